"""What all-gather + matmul is measured against: its two parts alone, and what a user of torch would call.

NCCL + cuBLAS   all_gather_into_tensor, then torch.matmul
torch fused     torch.ops.symm_mem.fused_all_gather_matmul, without the gathered A, which ours does not return either
torch native    its variant with a CUTLASS matmul that waits for shards (bf16, 128 rows or more of each rank)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from benchmarks.harness import graphed
from benchmarks.scores import EAGER, GRAPH, Row
from hostir.runtime.kernels.matmul import matmul as triton_matmul

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SAMPLE = 256  # rows of the result that are held against float64
MARGIN = 1.1  # how much more than torch's a candidate's error may be
ROW_MARGIN = 4.0  # how many of torch's errors a single row may be away from torch's
PIECES = (1, 2, 4)  # that a matmul's rows are taken in, besides those of a rank

PARTS = ("gemm", "nccl", "copies")

Work = Callable[[], Any]


class WrongResultError(Exception):
    """A candidate computed something else."""


@dataclass(frozen=True)
class Candidate:
    """Something to measure.

    Fields:
        name, mode: what it is called, and `eager` or `graph`.
        ours: or a peer.
        call: runs it, and gives the result: `[slices, ranks, rows, N]`.
    """

    name: str
    mode: str
    ours: bool
    call: Callable[[], torch.Tensor]

    def __str__(self) -> str:
        return f"{self.name}, {self.mode}"


class Operands:
    """A row's tensors on this rank.

    Fields:
        a: `[M / ranks, K]`, this rank's rows, in symmetric memory.
        b: `[K, N]`, stored by columns, as the weight of a linear layer is.
        whole: `[M, K]`, the rows of all ranks.
        c: `[M, N]`, for those that are given where to write.
    """

    def __init__(self, row: Row, dtype: torch.dtype, device: torch.device) -> None:
        self.row, self.ranks, self.rank = row, dist.get_world_size(), dist.get_rank()
        self.a = symm_mem.empty(row.M // self.ranks, row.K, dtype=dtype, device=device)
        handle = symm_mem.rendezvous(self.a, dist.group.WORLD)
        self.theirs = [handle.get_buffer(rank, self.a.shape, dtype) for rank in range(self.ranks)]
        self.b = (torch.randn(row.N, row.K, device=device) / row.K**0.5).to(dtype).t()
        self.whole = torch.empty(row.M, row.K, dtype=dtype, device=device)
        self.c = torch.empty(row.M, row.N, dtype=dtype, device=device)
        self.renew()

    def renew(self) -> None:
        """New rows on every rank, when nobody reads the old ones any more."""
        torch.cuda.synchronize()
        dist.barrier()
        self.a.normal_()
        torch.cuda.synchronize()
        dist.barrier()
        self.gather()

    # The parts --------------------------------------------------------------------------------------------------------
    def gather(self) -> None:
        dist.all_gather_into_tensor(self.whole, self.a)

    def pull(self) -> None:
        """Copy engines bring the rows of all peers, in an order that differs by rank; nothing waits for anything.

        Less than any all-gather that can be used does: it is there for the floor.
        """
        mine = self.whole.chunk(self.ranks)
        for turn in range(1, self.ranks):
            peer = (self.rank + turn) % self.ranks
            mine[peer].copy_(self.theirs[peer])

    def multiply(self) -> None:
        torch.matmul(self.whole, self.b, out=self.c)

    def multiply_in_triton(self) -> torch.Tensor:
        return self.shaped(triton_matmul(self.whole, self.b, self.c))

    # The peers --------------------------------------------------------------------------------------------------------
    def by_hand(self) -> torch.Tensor:
        self.gather()
        self.multiply()
        return self.shaped(self.c)

    def fused(self) -> torch.Tensor:
        group = dist.group.WORLD.group_name
        _, (c,) = torch.ops.symm_mem.fused_all_gather_matmul(self.a, [self.b], 0, group, return_A=False)
        return self.shaped(c)

    def native(self) -> torch.Tensor:
        _, c = symm_mem._fused_all_gather_matmul_native(self.a, self.b, dist.group.WORLD.group_name)
        return self.shaped(c)

    def shaped(self, c: torch.Tensor, slices: int = 1) -> torch.Tensor:
        """`[M, N]` as a fusion in `slices` has it."""
        return c.view(slices, self.ranks, -1, self.row.N)


def parts(of: Operands) -> dict[tuple[str, str], Work]:
    """The GEMM and the all-gather alone, by part and mode."""
    eager = dict(zip(PARTS, (of.multiply, of.gather, of.pull), strict=True))
    works: dict[tuple[str, str], Work] = {(part, EAGER): work for part, work in eager.items()}
    works |= {(part, GRAPH): graphed(work) for part, work in eager.items()}
    return works


def peers(of: Operands) -> list[tuple[str, str, Callable[[], Candidate]]]:
    """Name and mode of each peer, and what makes it, which may raise."""

    def made(name: str, mode: str, call: Callable[[], torch.Tensor]) -> Candidate:
        return Candidate(name, mode, False, replayed(call) if mode == GRAPH else call)

    calls = {"NCCL + cuBLAS": of.by_hand, "torch fused": of.fused, "torch native": of.native}
    modes = [(name, mode) for name in calls for mode in (EAGER, GRAPH) if (name, mode) != ("torch native", GRAPH)]
    return [(name, mode, lambda name=name, mode=mode: made(name, mode, calls[name])) for name, mode in modes]


def replayed(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same from a CUDA graph; every call gives the same tensor."""
    results: dict[str, torch.Tensor] = {}

    def keep() -> None:
        results["last"] = call()

    replay = graphed(keep)

    def again() -> torch.Tensor:
        replay()
        return results["last"]

    return again


# Right or wrong ---------------------------------------------------------------------------------------------------
class Product(Protocol):
    """What is multiplied: `whole`, `[M, K]`, the rows of so many ranks, and `b`, `[K, N]`."""

    row: Row
    ranks: int
    whole: torch.Tensor
    b: torch.Tensor


class Judge:
    """Holds results of the present rows of a product against float64 in a sample of rows, and against torch in all."""

    def __init__(self, of: Product) -> None:
        self.of = of
        m = of.row.M // of.ranks
        ends = torch.arange(of.ranks) * m
        drawn = torch.randint(of.row.M, (SAMPLE,))
        self.sample = torch.cat([ends, ends + m - 1, drawn]).unique().to(of.whole.device)
        self.exact = of.whole[self.sample].double() @ of.b.double()
        self.unfused = of.whole @ of.b
        self.error = self.error_of(self.unfused)
        # cuBLAS sums up otherwise, and with half-precision inputs less exactly, where there are fewer rows.
        in_pieces = [torch.cat([x @ of.b for x in of.whole.chunk(n)]) for n in {*PIECES, of.ranks}]
        self.bound = MARGIN * max(map(self.error_of, in_pieces))

    def error_of(self, c: torch.Tensor) -> float:
        """Relative, in the sample."""
        off = torch.linalg.vector_norm(c[self.sample].double() - self.exact)
        return float(off / torch.linalg.vector_norm(self.exact))

    def check(self, candidate: Candidate) -> bool:
        """Calls a candidate on memory that holds NaN.

        Raises WrongResultError where its result is not as good as torch's.
        """
        candidate.call().fill_(float("nan"))  # an eager one gets the same memory again from torch's allocator
        c = candidate.call().transpose(0, 1).reshape(self.of.row.M, self.of.row.N)
        if lost := int((~c.isfinite()).any(dim=1).sum()):
            raise WrongResultError(f"{lost} rows hold NaN or infinity")
        error = self.error_of(c)
        if error > self.bound:
            raise WrongResultError(f"error {error:.2e}, and torch's is {self.error:.2e}")
        away = (c - self.unfused).float().norm(dim=1) / self.unfused.float().norm(dim=1)
        if far := int((away > ROW_MARGIN * self.bound).sum()):
            furthest = f"row {int(away.argmax())} by {float(away.max()):.1e}"
            raise WrongResultError(f"{far} rows differ from torch's, {furthest}")
        return True
