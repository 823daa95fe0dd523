"""All-gather + fp8 matmul, and fp8 matmul + reduce-scatter: ours against the peers, as scores against the floor.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --out benchmarks/results/scaled_matmul
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --side scatter --scales tensor
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --device cpu --shrink 64 --rows 70B:2048

Operands are e4m3, results bf16, scales of rows unless said; `--exact` keeps tensor cores from accumulating. Rows and
scores are those of `benchmarks.allgather_matmul` and `benchmarks.matmul_reduce_scatter`.

What it is measured against:

    NCCL + cuBLAS   all_gather_into_tensor of rows and scales, then torch._scaled_mm; or this and reduce_scatter_tensor
    torch fused     torch.ops.symm_mem.fused_all_gather_scaled_matmul or fused_scaled_matmul_reduce_scatter
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks.comparison import SAMPLE, Judge, Subject, Work, compare, parser
from benchmarks.harness import synchronize
from benchmarks.scores import BY_HAND, TORCH, Row
from examples import patterns
from hostir.runtime.session import Session

F8 = torch.float8_e4m3fn


class Operands(Subject):
    """A row's tensors on this rank; what both sides share.

    Fields:
        a, b: e4m3; `b` is stored by columns. `of_a`, `of_b` are their scales.
        c: the result.
    """

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session, *, scales: str, fast: bool, rows: int) -> None:
        super().__init__(row, dtype, joined)
        self.scales, self.fast = scales, fast
        self.a = torch.empty(rows, row.K, dtype=F8, device=self.device)
        self.b = torch.randn(row.N, row.K, device=self.device).to(F8).t()
        by_rows = scales == "rows"
        self.of_a = torch.rand(rows if by_rows else 1, 1, device=self.device) + 0.1
        self.of_b = (torch.rand(1, row.N if by_rows else 1, device=self.device) + 0.1) / row.K**0.5
        if not by_rows:
            dist.broadcast(self.of_a, 0)

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.a.copy_(torch.randn(self.a.shape, device=self.device).to(F8))

    def scaled_mm(self, a: torch.Tensor, of_a: torch.Tensor) -> torch.Tensor:
        """torch's product, which lies by columns in `b`."""
        of_a, of_b = (x if self.scales == "rows" else x.view(()) for x in (of_a, self.of_b))
        return torch._scaled_mm(a, self.b, of_a, of_b, out_dtype=self.dtype, use_fast_accum=self.fast)

    def out(self, slices: int) -> torch.Tensor:
        return self.c

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a, self.b, self.of_a, self.of_b

    def exact(self, a: torch.Tensor, of_a: torch.Tensor) -> torch.Tensor:
        """A product in float64."""
        return (a.double() * of_a.double()) @ (self.b.double() * self.of_b.double())


class Gathered(Operands):
    """`a` is this rank's rows, `[M / ranks, K]`; `whole` and `of_whole` are those of all, with their scales."""

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session, *, scales: str, fast: bool) -> None:
        super().__init__(row, dtype, joined, scales=scales, fast=fast, rows=row.M // joined.size)
        self.whole = torch.empty(row.M, row.K, dtype=F8, device=self.device)
        self.of_whole = torch.empty(row.M, 1, device=self.device) if scales == "rows" else self.of_a
        self.c = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.renew()

    def renew(self) -> None:
        super().renew()
        self.gather()

    def judge(self) -> Judge:
        sample = torch.randint(self.row.M, (SAMPLE,)).unique().to(self.device)
        of_a = self.of_whole[sample] if self.scales == "rows" else self.of_whole
        return Judge(sample, self.exact(self.whole[sample], of_a), self.multiply())

    def parts(self) -> Mapping[str, Work]:
        return {"gemm": self.multiply, "nccl": self.gather}

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {BY_HAND: self.by_hand, **({TORCH: self.fused} if self.on_gpu else {})}

    def gather(self) -> None:
        dist.all_gather_into_tensor(self.whole.view(torch.uint8), self.a.view(torch.uint8))
        if self.scales == "rows":
            dist.all_gather_into_tensor(self.of_whole, self.of_a)

    def multiply(self) -> torch.Tensor:
        return self.scaled_mm(self.whole, self.of_whole)

    def by_hand(self) -> torch.Tensor:
        self.gather()
        return self.multiply()

    def fused(self) -> torch.Tensor:
        lists = [None], [None], [self.dtype], [self.fast]
        of_a, of_b = (x if self.scales == "rows" else x.view(()) for x in (self.of_a, self.of_b))
        group = dist.group.WORLD.group_name
        _, (c,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(self.a, [self.b], of_a, [of_b], 0, group, *lists)
        return c

    def fusion(self, slices: int) -> hi.Fusion:
        row, more = self.row, {"dtype": self.dtype_name, "scales": self.scales, "fast": self.fast}
        return patterns.scaled_allgather_matmul(self.ranks, row.M, row.K, row.N, **more)


class Scattered(Operands):
    """`a` is this rank's columns, `[M, K]`, with scales of its own; each rank gets rows of the sum."""

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session, *, scales: str, fast: bool) -> None:
        super().__init__(row, dtype, joined, scales=scales, fast=fast, rows=row.M)
        self.c = torch.empty(row.M // self.ranks, row.N, dtype=dtype, device=self.device)
        self.renew()

    def judge(self) -> Judge:
        sample = torch.randint(len(self.c), (SAMPLE,), generator=torch.Generator().manual_seed(self.row.M)).unique()
        sample = sample.to(self.device)
        rows = torch.cat([sample + rank * len(self.c) for rank in range(self.ranks)])
        exact = self.exact(self.a[rows], self.of_a[rows] if self.scales == "rows" else self.of_a)
        dist.all_reduce(exact)
        return Judge(sample, exact.chunk(self.ranks)[self.rank], self.by_hand().clone())

    def parts(self) -> Mapping[str, Work]:
        part = self.multiply()
        return {"gemm": self.multiply, "nccl": partial(dist.reduce_scatter_tensor, torch.empty_like(self.c), part)}

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {BY_HAND: self.by_hand, **({TORCH: self.fused} if self.on_gpu else {})}

    def multiply(self) -> torch.Tensor:
        return self.scaled_mm(self.a, self.of_a)

    def by_hand(self) -> torch.Tensor:
        dist.reduce_scatter_tensor(self.c, self.multiply())
        return self.c

    def fused(self) -> torch.Tensor:
        of_a, of_b = (x if self.scales == "rows" else x.view(()) for x in (self.of_a, self.of_b))
        more = {"out_dtype": self.dtype, "use_fast_accum": self.fast}
        given = self.a, self.b, of_a, of_b, "sum", 0, 0, dist.group.WORLD.group_name, [self.row.M, self.row.N]
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(*given, **more)

    def fusion(self, slices: int) -> hi.Fusion:
        row, more = self.row, {"dtype": self.dtype_name, "scales": self.scales, "fast": self.fast, "bias": False}
        return patterns.scaled_row_parallel(self.ranks, row.M, row.K, row.N, **more)


# The command line -------------------------------------------------------------------------------------------------
SIDES = {"gather": (Gathered, "allgather"), "scatter": (Scattered, "reduce_scatter")}


def own_options(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what the other benchmarks lack."""
    options.add_argument("--side", choices=[*SIDES], default="gather", help="of the matmul (%(default)s)")
    options.add_argument("--scales", choices=("rows", "tensor"), default="rows", help="(%(default)s)")
    options.add_argument("--exact", action="store_true", help="sums in f32, not in the tensor cores")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a line a row, and writes table and figures on rank 0."""
    known, _ = own_options(argparse.ArgumentParser(add_help=False)).parse_known_args(arguments)
    subject, collective = SIDES[known.side]
    given = own_options(parser(__doc__, collective)).parse_args(arguments)
    compare(given, collective, partial(subject, scales=given.scales, fast=not given.exact))


if __name__ == "__main__":
    main()
