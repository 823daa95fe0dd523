"""All-gather + fp8 matmul, and fp8 matmul + reduce-scatter: ours against the peers, as scores against the floor.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --out benchmarks/results/scaled_gather
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --side scatter --scales blocks
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --axis 1 --rows 70B:8192
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --side scatter --as-rank-of 8
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --device cpu --shrink 64 --rows 70B:2048

Operands are e4m3, results bf16, scales of rows unless said; `--exact` keeps tensor cores from accumulating, as
`use_fast_accum=False` does. Rows and scores are those of `benchmarks.allgather_matmul` and
`benchmarks.matmul_reduce_scatter`, at the widths of 70B. With `--axis`, rows are `[2, M / 2, K]` and gathered or
scattered on that axis; on axis 1, what `hi.compile` gives for axis 0 is timed in the same turns. `benchmarks.matmul
--fp8` has Triton's kernel alone beside the fastest one of the library.

With `--as-rank-of R`, two GPUs meet what each of R would, as in `benchmarks.arrivals` and
`benchmarks.matmul_reduce_scatter`.

What it is measured against:

    NCCL + cuBLAS   all_gather_into_tensor of rows and scales, then torch._scaled_mm; or this and reduce_scatter_tensor
    torch fused     torch.ops.symm_mem.fused_all_gather_scaled_matmul or fused_scaled_matmul_reduce_scatter

torch has scales of blocks from CUDA 12.9 on, and only on Hopper. Elsewhere `--scales blocks` has no peer, and results
are held against sums in float64, rounded once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks import arrivals
from benchmarks.comparison import (
    SAMPLE,
    Candidate,
    Entrant,
    Judge,
    Subject,
    Variant,
    Work,
    compare,
    compiled,
    lowered,
    parser,
)
from benchmarks.harness import synchronize
from benchmarks.matmul_reduce_scatter import StandsForMore, Way, text
from benchmarks.scores import BY_HAND, EAGER, LARGE, TORCH, Result, Row
from examples import patterns
from hostir.choice.platforms import Platform
from hostir.runtime.kernels.scaled import scaled_matmul_reference
from hostir.runtime.session import Session

F8 = torch.float8_e4m3fn
BATCH, BLOCK = 2, 128  # of rows with an axis; elements that share a scale of blocks


def every_rank(x: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The bytes of a tensor of every rank."""
    mine = x.view(torch.uint8)
    found = mine.new_empty(ranks * mine.shape[0], *mine.shape[1:])
    dist.all_gather_into_tensor(found, mine)
    return [*found.chunk(ranks)]


class Operands(Subject):
    """A row's tensors on this rank; what both sides share.

    Fields:
        lead: the axes of all rows: `[M]`, or with an axis `[2, M / 2]`. `axis` is gathered or scattered.
        a: e4m3, `[..., K]`, with scales `of_a`.
        b: e4m3, `[K, N]`, stored by columns, with scales `of_b`.
        c: the result.
    """

    def __init__(
        self,
        row: Row,
        dtype: torch.dtype,
        joined: Session,
        *,
        scales: str,
        fast: bool,
        axis: int | None = None,
        gathers: bool,
        ranks: int = 0,
    ) -> None:
        super().__init__(row, dtype, joined)
        self.ranks = ranks or self.ranks
        self.joined, self.scales, self.fast, self.batched = joined, scales, fast, axis is not None
        self.lead, self.axis = [BATCH, row.M // BATCH] if self.batched else [row.M], axis or 0
        held = self.part_of(self.lead) if gathers else self.lead
        groups = row.K // BLOCK if scales == "blocks" else 1
        of_rows = held if scales != "tensor" else [1] * len(held)
        of_columns = {"tensor": (1, 1), "rows": (1, row.N), "blocks": (groups, row.N // BLOCK)}[scales]
        self.a = torch.empty(*held, row.K, dtype=F8, device=self.device)
        self.b = torch.randn(row.N, row.K, device=self.device).to(F8).t()
        self.of_a = torch.rand(*of_rows, groups, device=self.device) + 0.1
        self.of_b = (torch.rand(of_columns, device=self.device) + 0.1) / row.K**0.5
        if scales == "tensor" or (self.batched and not gathers):  # then these are the same on all ranks
            dist.broadcast(self.of_a, 0)
        if self.batched and not gathers:
            dist.broadcast(self.of_b, 0)

    def part_of(self, lead: Sequence[int]) -> list[int]:
        """The axes of the rows of one rank."""
        return [size // self.ranks if n == self.axis else size for n, size in enumerate(lead)]

    def about(self) -> Result:
        axis = {"axis": self.axis} if self.batched else {}
        return {"scales": self.scales, "fast": self.fast, **axis}

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.a.copy_(torch.randn(self.a.shape, device=self.device).to(F8))

    def torchs(self, a: torch.Tensor, of_a: torch.Tensor) -> torch.Tensor:
        """torch's product of flat rows. A CPU computes the reference: not every torch has the product there."""
        if not self.on_gpu:
            return self.exact(a, of_a, self.dtype)
        scales = of_a, self.of_b
        if self.scales == "tensor":
            scales = of_a.view(()), self.of_b.view(())
        elif self.scales == "blocks":  # cuBLAS reads these by columns
            scales = of_a.t().contiguous().t(), self.of_b_by_columns
        return torch._scaled_mm(a, self.b, *scales, out_dtype=self.dtype, use_fast_accum=self.fast)

    @cached_property
    def of_b_by_columns(self) -> torch.Tensor:
        return self.of_b.t().contiguous().t()

    def rounded(self, a: torch.Tensor, of_a: torch.Tensor) -> torch.Tensor:
        """torch's product of flat rows; where it has none, the exact one, rounded."""
        try:
            return self.torchs(a, of_a)
        except (RuntimeError, ValueError):
            return self.exact(a, of_a, self.dtype)

    def exact(self, a: torch.Tensor, of_a: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """A product of flat rows, summed in float64."""
        return scaled_matmul_reference(a, self.b, of_a, self.of_b, None, dtype)

    def some(self, of_a: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The scales of some of the flat rows."""
        return of_a.flatten(0, -2)[rows] if self.scales != "tensor" else of_a.view(1, 1)

    def out(self, slices: int) -> torch.Tensor:
        return self.c

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a, self.b, self.of_a, self.of_b

    def parts(self) -> Mapping[str, Work]:
        found: dict[str, Work] = {"gemm": self.multiply, "nccl": self.communicate}
        return {**found, "axis_0": self.on_axis_0} if self.batched and self.axis else found

    @cached_property
    def on_axis_0(self) -> Work:
        """What `hi.compile` gives for rows that are gathered or scattered on axis 0; its result is right."""
        more = {"scales": self.scales, "fast": self.fast, "axis": 0}
        first = type(self)(self.row, self.dtype, self.joined, **more)
        candidate = compiled(first, EAGER)
        first.judge().check(candidate)
        return candidate.call

    def multiply(self) -> torch.Tensor:
        raise NotImplementedError

    def communicate(self) -> object:
        raise NotImplementedError

    def by_hand(self) -> torch.Tensor:
        raise NotImplementedError

    def fused(self) -> torch.Tensor:
        raise NotImplementedError

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {BY_HAND: self.by_hand, TORCH: self.fused}

    def sizes(self, N: int) -> dict[str, int]:
        """What a pattern calls the sizes of a fusion."""
        batch = {"batch": self.lead[1 - self.axis]} if self.batched else {}
        return {"ranks": self.ranks, "M": self.lead[self.axis], "K": self.row.K, "N": N, **batch}


class Gathered(Operands):
    """`a` is this rank's part of the rows; `whole` and `of_whole` are those of all, with their scales."""

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session, **more: Any) -> None:
        super().__init__(row, dtype, joined, gathers=True, **more)
        self.whole = torch.empty(*self.lead, row.K, dtype=F8, device=self.device)
        self.of_whole = self.of_a if self.scales == "tensor" else self.of_a.new_empty(*self.lead, self.of_a.shape[-1])
        self.c = torch.empty(*self.lead, row.N, dtype=dtype, device=self.device)
        self.of_all = self.of_b  # what a fusion has: with rows of an axis, its columns are those of all ranks
        if self.batched:
            self.of_all = self.of_b.new_empty(self.ranks * row.N)
            dist.all_gather_into_tensor(self.of_all, self.of_b.view(-1))
            self.of_all = self.of_all.view(1, -1)
        self.renew()

    def renew(self) -> None:
        super().renew()
        self.communicate()

    def judge(self) -> Judge:
        sample = torch.randint(self.row.M, (SAMPLE,)).unique().to(self.device)
        flat = self.whole.flatten(0, -2)
        exact = self.exact(flat[sample], self.some(self.of_whole, sample))
        return Judge(sample, exact, self.rounded(flat, self.of_whole.flatten(0, -2)))

    def communicate(self) -> None:
        for all_rows, rows in ((self.whole, self.a), (self.of_whole, self.of_a)):
            if all_rows is rows:
                continue
            if self.axis == 0:
                dist.all_gather_into_tensor(all_rows.view(torch.uint8), rows.view(torch.uint8))
            else:
                torch.cat(every_rank(rows, self.ranks), dim=1, out=all_rows.view(torch.uint8))

    def multiply(self) -> torch.Tensor:
        return self.torchs(self.whole.flatten(0, -2), self.of_whole.flatten(0, -2))

    def by_hand(self) -> torch.Tensor:
        self.communicate()
        return self.multiply()

    def fused(self) -> torch.Tensor:
        lists = [None], [None], [self.dtype], [self.fast]
        of_a, of_b = (x.view(()) if self.scales == "tensor" else x for x in (self.of_a, self.of_b))
        given = self.a, [self.b], of_a, [of_b], self.axis, dist.group.WORLD.group_name
        _, (c,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(*given, *lists)
        return c

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a, self.b, self.of_a, self.of_all

    def fusion(self, slices: int) -> hi.Fusion:
        more = {"dtype": self.dtype_name, "scales": self.scales, "fast": self.fast}
        if not self.batched:
            return patterns.scaled_allgather_matmul(**self.sizes(self.row.N), **more)
        return patterns.scaled_batch_gathered(**self.sizes(self.row.N), **more, axis=self.axis)


class Scattered(Operands):
    """`a` is this rank's columns, with scales of its own; each rank gets its part of the sum."""

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session, **more: Any) -> None:
        super().__init__(row, dtype, joined, gathers=False, **more)
        self.c = torch.empty(*self.part_of(self.lead), row.N, dtype=dtype, device=self.device)
        self.renew()

    def flat_rows(self, rank: int) -> torch.Tensor:
        """Which of all flat rows a rank gets, in its order."""
        return torch.arange(self.row.M, device=self.device).view(self.lead).chunk(self.ranks, self.axis)[rank].flatten()

    def judge(self) -> Judge:
        drawn = torch.randint(self.row.M // self.ranks, (SAMPLE,), generator=torch.Generator().manual_seed(self.row.M))
        sample = drawn.unique().to(self.device)
        rows = torch.cat([self.flat_rows(rank)[sample] for rank in range(self.ranks)])
        exact = self.exact(self.a.flatten(0, -2)[rows], self.some(self.of_a, rows))
        dist.all_reduce(exact)
        unfused = self.scatter(self.rounded(*self.flat())).clone()
        return Judge(sample, exact.chunk(self.ranks)[self.rank], unfused.flatten(0, -2))

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a.flatten(0, -2), self.of_a.flatten(0, -2)

    @cached_property
    def part(self) -> torch.Tensor:
        return self.rounded(*self.flat())

    def communicate(self) -> object:
        return self.scatter(self.part)

    def scatter(self, part: torch.Tensor) -> torch.Tensor:
        parts = part.view(*self.lead, -1).chunk(self.ranks, self.axis)
        dist.reduce_scatter_tensor(self.c.flatten(0, -2), part if self.axis == 0 else torch.cat(parts).flatten(0, -2))
        return self.c

    def multiply(self) -> torch.Tensor:
        return self.torchs(*self.flat())

    def by_hand(self) -> torch.Tensor:
        return self.scatter(self.multiply())

    def fused(self) -> torch.Tensor:
        of_a, of_b = (x.view(()) if self.scales == "tensor" else x for x in (self.flat()[1], self.of_b))
        more = {"out_dtype": self.dtype, "use_fast_accum": self.fast}
        shape = [*self.lead, self.row.N]
        given = self.flat()[0], self.b, of_a, of_b, "sum", self.axis, 0, dist.group.WORLD.group_name, shape
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(*given, **more)

    def fusion(self, slices: int) -> hi.Fusion:
        more = {"dtype": self.dtype_name, "scales": self.scales, "fast": self.fast}
        if not self.batched:
            return patterns.scaled_row_parallel(**self.sizes(self.row.N), **more, bias=False)
        return patterns.scaled_batch_scattered(**self.sizes(self.row.N), **more, axis=self.axis)


# As a rank of more ------------------------------------------------------------------------------------------------
class GatheredAsRankOf(Gathered):
    """A row's tensors on one of two ranks that stand for more: the peer sends the rows of all others."""

    def renew(self) -> None:
        if not hasattr(self, "bytes"):
            self.bytes = self.shared(self.row.M // self.ranks, self.row.K // self.dtype.itemsize)
            self.theirs = self.of_peer(self.bytes, 1 - self.rank) if self.on_gpu else torch.empty_like(self.bytes)
            self.a = self.bytes.view(F8)
            self.pulled = torch.empty_like(self.whole).view(self.dtype)  # what results are held against stays as it is
        super().renew()

    def about(self) -> Result:
        return {**super().about(), "emulated_on": 2}

    def communicate(self) -> None:
        for all_rows, rows in ((self.whole, self.a), (self.of_whole, self.of_a)):
            if all_rows is rows:
                continue
            both = every_rank(rows, 2)
            for place, block in enumerate(all_rows.view(torch.uint8).chunk(self.ranks)):
                block.copy_(both[self.rank if place == self.rank else 1 - self.rank])

    def parts(self) -> Mapping[str, Work]:
        return {"gemm": self.multiply, "copies": self.pull}

    def pull(self) -> None:
        """Copies of as many shards from the peer, which nobody waits for."""
        for block in self.pulled.chunk(self.ranks)[1:]:
            block.copy_(self.theirs)

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        for way in arrivals.WAYS:
            strategy, kernels = way.name.split()[0], way.kernels
            if strategy in only and (kernels == "aten" or self.on_gpu):
                yield from (Entrant(way.name, mode, partial(self.ours, way, strategy, mode)) for mode in modes)

    def ours(self, way: arrivals.Way, strategy: str, mode: str) -> Candidate:
        groups = 0 if self.scales == "tensor" else self.of_a.shape[-1]
        scaling = arrivals.Scaling(groups, (self.of_b.shape[0], self.of_b.shape[1]), self.fast)
        program = hi.parse(arrivals.text(self.row, self.ranks, way, scaling))
        return lowered(self, program, Variant(strategy, way.kernels), mode, name=way.name)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a[None, None], self.b, self.of_a[None, None], self.of_b

    def out(self, slices: int) -> torch.Tensor:
        return self.c.view(1, self.ranks, -1, self.row.N)


class ScatteredAsRankOf(StandsForMore, Scattered):
    """The same for rows of which each rank sends all but its own to the peer."""

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session, *, ranks: int, **more: Any) -> None:
        super().__init__(row, dtype, joined, **more)
        self.stand_for(ranks)

    def multiply(self) -> torch.Tensor:
        return self.torchs(*self.flat())

    def product(self) -> torch.Tensor:
        return self.rounded(*self.flat())

    def exact_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.exact(self.a[rows], self.some(self.of_a, rows))

    def program(self, way: Way) -> str:
        row, (groups, columns) = self.row, self.of_b.shape
        rows, name = (row.M, "%scale_a") if self.scales != "tensor" else (1, "%scale")
        of_a, of_b = f"{name}: f32[{rows}, {2 * groups}@didx]", f"%scale_b: f32[{2 * groups}@didx, {columns}]"
        operands = f"%a: f8e4m3[{row.M}, {2 * row.K}@didx], %b: f8e4m3[{2 * row.K}@didx, {row.N}], {of_a}, {of_b}"
        fast = " accumulate fast" if self.fast else ""
        product = f"scaled_matmul %a, %b scaled {name}, %scale_b to {self.dtype_name}{fast}"
        return text(row, self.ranks, way, self.dtype_name, operands, product)


# The command line -------------------------------------------------------------------------------------------------
SIDES = {"gather": (Gathered, GatheredAsRankOf), "scatter": (Scattered, ScatteredAsRankOf)}


def own_options(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what the other benchmarks lack."""
    options.add_argument("--side", choices=[*SIDES], default="gather", help="of the matmul (%(default)s)")
    options.add_argument("--scales", choices=("rows", "tensor", "blocks"), default="rows", help="(%(default)s)")
    options.add_argument("--exact", action="store_true", help="sums in f32, not in the tensor cores")
    options.add_argument("--axis", type=int, choices=(0, 1), help="of rows [2, M / 2, K]; scales are those of rows")
    options.add_argument("--as-rank-of", type=int, metavar="R", help="let 2 GPUs stand for one of so many ranks")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a line a row, and writes table and figures on rank 0."""
    known, _ = own_options(argparse.ArgumentParser(add_help=False)).parse_known_args(arguments)
    options = own_options(parser(__doc__, f"scaled_{known.side}"))
    given = options.parse_args(arguments)
    if given.axis is not None and (given.scales != "rows" or given.as_rank_of):
        options.error("--axis is for scales of rows, and not for ranks that stand for more")
    real, stands = SIDES[given.side]
    more: dict[str, Any] = {"scales": given.scales, "fast": not given.exact}
    if given.as_rank_of is None:
        return compare(given, f"scaled_{given.side}", partial(real, **more, axis=given.axis), finest=BATCH)
    given.rows = [row for row in given.rows if row.M in LARGE]
    if given.out is not None:
        given.out = given.out.with_name(f"{given.out.name}_as_rank_of")
    of = partial(stands, **more, ranks=given.as_rank_of)
    compare(given, f"scaled_{given.side}_emulated", of, ranks=2, finest=given.as_rank_of)


if __name__ == "__main__":
    main()
