"""All-gather + matmul: every strategy of hostir, NCCL + cuBLAS and torch's operators, scored against the floor.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.allgather_matmul --out benchmarks/results/allgather_matmul
    python -m benchmarks.chart benchmarks/results/allgather_matmul.json docs/images/allgather_matmul.svg

A row of the table is a shape: the first weight of the MLP of Llama 3 8B, 70B or 405B with tensor parallelism 8, or the
shape that nvFuser published. N is the number of columns on one rank, which stays the same on fewer ranks. floor =
max(cuBLAS alone, best all-gather alone). The all-gather is NCCL's, or it consists of bare copies from the peers, eager
or from a graph. A score is floor/time; 1 is the best possible score. Eager calls and CUDA graphs are timed separately.
With `out=`, an executor of a one-sided strategy captures its calls in a graph and replays them. In a pipeline, the axis
of the slices is outside the axis of the ranks, in A and in the result.

The peers:

    NCCL + cuBLAS   all_gather_into_tensor, then torch.matmul
    torch fused     torch.ops.symm_mem.fused_all_gather_matmul; like hostir, it does not return the gathered A
    torch native    as torch fused, with a CUTLASS matmul that waits for shards (bf16, at least 128 rows of each rank)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import hostir as hi
from benchmarks import comparison
from benchmarks.comparison import PIECES, SAMPLE, Entrant, Subject, Variant, Work, compare, lowered, options_parser
from benchmarks.harness import synchronize
from benchmarks.scores import BY_HAND, GRAPH, TORCH, Row
from examples import patterns
from hostir.choice.platforms import Platform
from hostir.job.session import Session
from hostir.kernels.matmul.matmul import matmul as triton_matmul

NATIVE = "torch native"
VARIANTS = tuple(
    Variant(strategy, kernels, slices, streams)
    for strategy, slices, streams in (
        ("sequential", 1, 1),
        ("sequential by low_latency", 1, 1),
        ("sequential by copy_engine", 1, 1),
        ("pipeline", 2, 2),
        ("pipeline", 4, 4),
        ("ring", 1, 2),
        ("fused", 1, 1),
        ("fused", 1, 2),
        ("push", 1, 1),
    )
    for kernels in ("aten", "triton")
    if (strategy, streams, kernels) != ("fused", 2, "aten")  # cuBLAS leaves no SM to the signals
)


class Operands(Subject):
    """A row's tensors on this rank.

    Fields:
        a: `[M / ranks, K]`, this rank's rows; on GPUs in symmetric memory.
        b: `[K, N]`, stored by columns, like the weight of a linear layer.
        gathered: `[M, K]`, the rows of all ranks.
        c: `[M, N]`, the result of candidates that write to `out`.
    """

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        super().__init__(row, dtype, job)
        self.a = self.shared(row.M // self.ranks, row.K)
        self.b = (torch.randn(row.N, row.K, device=self.device) / row.K**0.5).to(dtype).t()
        self.gathered = torch.empty(row.M, row.K, dtype=dtype, device=self.device)
        self.c = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.peer_rows = [self.of_peer(self.a, peer) for peer in range(self.ranks)] if self.on_gpu else []
        self.renew()

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.a.normal_()
        synchronize(self.device)
        dist.barrier()
        self.gather()

    def judge(self) -> Judge:
        return Judge(self)

    def parts(self) -> Mapping[str, Work]:
        parts: dict[str, Work] = {"gemm": self.multiply, "nccl": self.gather}
        if self.on_gpu:
            parts |= {"copies": self.pull, "triton": partial(triton_matmul, self.gathered, self.b, self.c)}
        return parts

    def gather(self) -> None:
        dist.all_gather_into_tensor(self.gathered, self.a)

    def pull(self) -> None:
        """Copy the rows of all peers by copy engines, without synchronization; each rank begins with a different peer.

        The time is a lower bound for an all-gather, which must also synchronize the ranks.
        """
        blocks = self.gathered.chunk(self.ranks)
        for turn in range(1, self.ranks):
            peer = (self.rank + turn) % self.ranks
            blocks[peer].copy_(self.peer_rows[peer])

    def multiply(self) -> None:
        torch.matmul(self.gathered, self.b, out=self.c)

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {BY_HAND: self.by_hand, TORCH: self.fused, NATIVE: self.native}

    def peers_in(self, modes: Sequence[str]) -> Iterator[Entrant]:
        yield from (peer for peer in super().peers_in(modes) if (peer.name, peer.mode) != (NATIVE, GRAPH))

    def by_hand(self) -> torch.Tensor:
        self.gather()
        self.multiply()
        return self.out(1)

    def fused(self) -> torch.Tensor:
        group = dist.group.WORLD.group_name
        _, (c,) = torch.ops.symm_mem.fused_all_gather_matmul(self.a, [self.b], 0, group, return_A=False)
        return self.shaped(c)

    def native(self) -> torch.Tensor:
        _, c = symm_mem._fused_all_gather_matmul_native(self.a, self.b, dist.group.WORLD.group_name)
        return self.shaped(c)

    def fusion(self, slices: int) -> hi.Fusion:
        row, dtype = self.row, self.dtype_name
        return patterns.allgather_matmul(ranks=self.ranks, S=slices, M=row.M, K=row.K, N=row.N, dtype=dtype)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a.view(slices, 1, -1, self.row.K), self.b

    def out(self, slices: int) -> torch.Tensor:
        return self.shaped(self.c, slices)

    def shaped(self, c: torch.Tensor, slices: int = 1) -> torch.Tensor:
        """Return `c`, `[M, N]`, viewed with the axes of the result of a fusion with `slices` slices."""
        return c.view(slices, self.ranks, -1, self.row.N)

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        yield from self.peers_in(modes)
        yield from self.compiled_in(modes)
        for variant in VARIANTS:
            duplicate = (
                variant.strategy == "fused" and variant.streams > 1 and self.ranks < 3
            )  # the same program as on one stream
            has_kernels = platform.computes == "cuda" or variant.kernels == "aten"
            if variant.strategy not in only or duplicate or not has_kernels:
                continue
            for mode in modes:
                yield Entrant(str(variant), mode, partial(self.ours, variant, mode))

    def ours(self, variant: Variant, mode: str) -> comparison.Candidate:
        return lowered(self, hi.lower(self.fusion(variant.slices), variant.strategy, variant.streams), variant, mode)


class Product(Protocol):
    """The operands of a matmul: `gathered`, `[M, K]`, has the rows of `ranks` ranks; `b` is `[K, N]`."""

    row: Row
    ranks: int
    gathered: torch.Tensor
    b: torch.Tensor


class Judge(comparison.Judge):
    """Compares results `[slices, ranks, rows, N]` of a product with float64 and torch."""

    def __init__(self, product: Product) -> None:
        a, b = product.gathered, product.b
        m = product.row.M // product.ranks
        starts = torch.arange(product.ranks) * m
        random_rows = torch.randint(product.row.M, (SAMPLE,))
        sample = torch.cat([starts, starts + m - 1, random_rows]).unique().to(a.device)
        exact = a[sample].double() @ b.double()
        in_pieces = [torch.cat([x @ b for x in a.chunk(n)]) for n in {*PIECES, product.ranks}]
        super().__init__(sample, exact, a @ b, in_pieces)

    def rows_of(self, c: torch.Tensor) -> torch.Tensor:
        return c.transpose(0, 1).reshape(self.unfused.shape)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    return options_parser(__doc__, "allgather").parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    compare(parse_options(arguments), "allgather", Operands, finest=max(variant.slices for variant in VARIANTS))


if __name__ == "__main__":
    main()
