"""All-gather + matmul: every strategy of ours and what torch offers, against the floor, in one process run.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.allgather_matmul --out benchmarks/results/allgather_matmul
    python -m benchmarks.chart benchmarks/results/allgather_matmul.json docs/images/allgather_matmul.svg

Rows are the first weights of the MLPs of Llama 3 8B, 70B and 405B as tensor parallel 8 has them (N of a rank stays the
same on fewer), and the shape that nvFuser published. floor = max(cuBLAS alone, best all-gather alone), where the
all-gather is NCCL's or bare copies from the peers, eager or from a graph; a score is floor/time, and 1 the end of the
road. Eager calls and CUDA graphs are timed apart; one-sided strategies replay their own graph where they are given
`out=`. Slices of a pipeline are an axis of A and of the result, outside of the ranks.

What it is measured against:

    NCCL + cuBLAS   all_gather_into_tensor, then torch.matmul
    torch fused     torch.ops.symm_mem.fused_all_gather_matmul, without the gathered A, which ours lacks as well
    torch native    its variant with a CUTLASS matmul that waits for shards (bf16, 128 rows or more of each rank)
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
from benchmarks.comparison import PIECES, SAMPLE, Entrant, Subject, Variant, Work, compare, lowered, parser
from benchmarks.harness import synchronize
from benchmarks.scores import BY_HAND, GRAPH, TORCH, Row
from examples import patterns
from hostir.choice.platforms import Platform
from hostir.runtime.kernels.matmul import matmul as triton_matmul
from hostir.runtime.session import Session

NATIVE = "torch native"
VARIANTS = tuple(
    Variant(strategy, kernels, slices, streams)
    for strategy, slices, streams in (
        ("sequential", 1, 1),
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
        b: `[K, N]`, stored by columns, as the weight of a linear layer is.
        whole: `[M, K]`, the rows of all ranks.
        c: `[M, N]`, for those that are given where to write.
    """

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session) -> None:
        super().__init__(row, dtype, joined)
        self.a = self.shared(row.M // self.ranks, row.K)
        self.b = (torch.randn(row.N, row.K, device=self.device) / row.K**0.5).to(dtype).t()
        self.whole = torch.empty(row.M, row.K, dtype=dtype, device=self.device)
        self.c = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.theirs = [self.of_peer(self.a, peer) for peer in range(self.ranks)] if self.on_gpu else []
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

    # The parts --------------------------------------------------------------------------------------------------------
    def parts(self) -> Mapping[str, Work]:
        found: dict[str, Work] = {"gemm": self.multiply, "nccl": self.gather}
        if self.on_gpu:
            found |= {"copies": self.pull, "triton": partial(triton_matmul, self.whole, self.b, self.c)}
        return found

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

    # The peers --------------------------------------------------------------------------------------------------------
    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {BY_HAND: self.by_hand, TORCH: self.fused, NATIVE: self.native}

    def peers_in(self, modes: Sequence[str]) -> Iterator[Entrant]:
        yield from (each for each in super().peers_in(modes) if (each.name, each.mode) != (NATIVE, GRAPH))

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

    # Ours -------------------------------------------------------------------------------------------------------------
    def fusion(self, slices: int) -> hi.Fusion:
        row, dtype = self.row, self.dtype_name
        return patterns.allgather_matmul(ranks=self.ranks, S=slices, M=row.M, K=row.K, N=row.N, dtype=dtype)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a.view(slices, 1, -1, self.row.K), self.b

    def out(self, slices: int) -> torch.Tensor:
        return self.shaped(self.c, slices)

    def shaped(self, c: torch.Tensor, slices: int = 1) -> torch.Tensor:
        """`[M, N]` as a fusion in `slices` has it."""
        return c.view(slices, self.ranks, -1, self.row.N)

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        yield from self.peers_in(modes)
        yield from self.compiled_in(modes)
        for variant in VARIANTS:
            same = variant.strategy == "fused" and variant.streams > 1 and self.ranks < 3  # as on one stream
            here = platform.computes == "cuda" or variant.kernels == "aten"
            if variant.strategy not in only or same or not here:
                continue
            for mode in modes:
                yield Entrant(str(variant), mode, partial(self.ours, variant, mode))

    def ours(self, variant: Variant, mode: str) -> comparison.Candidate:
        return lowered(self, hi.lower(self.fusion(variant.slices), variant.strategy, variant.streams), variant, mode)


# Right or wrong ---------------------------------------------------------------------------------------------------
class Product(Protocol):
    """What is multiplied: `whole`, `[M, K]`, the rows of so many ranks, and `b`, `[K, N]`."""

    row: Row
    ranks: int
    whole: torch.Tensor
    b: torch.Tensor


class Judge(comparison.Judge):
    """Holds results of the present rows of a product, `[slices, ranks, rows, N]`, against float64 and torch."""

    def __init__(self, of: Product) -> None:
        m = of.row.M // of.ranks
        ends = torch.arange(of.ranks) * m
        drawn = torch.randint(of.row.M, (SAMPLE,))
        sample = torch.cat([ends, ends + m - 1, drawn]).unique().to(of.whole.device)
        exact = of.whole[sample].double() @ of.b.double()
        in_pieces = [torch.cat([x @ of.b for x in of.whole.chunk(n)]) for n in {*PIECES, of.ranks}]
        super().__init__(sample, exact, of.whole @ of.b, in_pieces)

    def rows_of(self, c: torch.Tensor) -> torch.Tensor:
        return c.transpose(0, 1).reshape(self.unfused.shape)


# The command line -------------------------------------------------------------------------------------------------
def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    return parser(__doc__, "allgather").parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a line a row, and writes table and figures on rank 0."""
    compare(options(arguments), "allgather", Operands, finest=max(variant.slices for variant in VARIANTS))


if __name__ == "__main__":
    main()
