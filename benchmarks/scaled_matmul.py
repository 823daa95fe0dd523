"""All-gather + fp8 matmul, and fp8 matmul + reduce-scatter: hostir and its peers, scored against the floor.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --out benchmarks/results/scaled_gather
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --side scatter --scales blocks
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --axis 1 --rows 70B:8192
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --side scatter --as-rank-of 8
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaled_matmul --device cpu --shrink 64 --rows 70B:2048

Operands are e4m3, and results are bf16. By default there is one scale for each row of A and for each column of B. With
`--exact`, sums are accumulated in f32 and not in the tensor cores, as with `use_fast_accum=False`. Rows and scores are
as in `benchmarks.allgather_matmul` and `benchmarks.matmul_reduce_scatter`, with the widths of 70B. With `--axis`, A is
`[2, M / 2, K]`, and axis 0 or 1 is gathered or scattered. For axis 1, `hi.compile` for axis 0 is timed as well, in turn
with the other candidates. `benchmarks.matmul --fp8` compares the matmul kernels alone.

With `--as-rank-of R`, two GPUs emulate two of R ranks, as in `benchmarks.arrivals` and
`benchmarks.matmul_reduce_scatter`.

The peers:

    NCCL + cuBLAS   all_gather_into_tensor of rows and scales, then torch._scaled_mm; or this and reduce_scatter_tensor
    torch fused     torch.ops.symm_mem.fused_all_gather_scaled_matmul or fused_scaled_matmul_reduce_scatter

torch supports block-wise scales only on Hopper, from CUDA 12.9 on. Elsewhere `--scales blocks` has no peer, and results
are compared with sums in float64 that are rounded once.
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
    options_parser,
)
from benchmarks.harness import synchronize
from benchmarks.matmul_reduce_scatter import EmulatedRank, Way, program_text
from benchmarks.scores import BY_HAND, EAGER, LARGE, TORCH, Result, Row
from examples import patterns
from hostir.choice.platforms import Platform
from hostir.job.session import Session
from hostir.kernels.scales import scaled_matmul_reference

F8 = torch.float8_e4m3fn
BATCH, BLOCK = 2, 128  # the extent of axis 0 of rows with `--axis`; the number of elements with the same block scale


def every_rank(x: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """All-gather a tensor; return the tensor of each rank, as bytes."""
    local_bytes = x.view(torch.uint8)
    gathered = local_bytes.new_empty(ranks * local_bytes.shape[0], *local_bytes.shape[1:])
    dist.all_gather_into_tensor(gathered, local_bytes)
    return [*gathered.chunk(ranks)]


class Operands(Subject):
    """The tensors of a row on this rank. This is the base class for the all-gather and for the reduce-scatter.

    Fields:
        lead: the shape of the rows of all ranks: `[M]`, or `[2, M / 2]` with `--axis`.
        axis: the axis of `lead` that is gathered or scattered.
        a: e4m3, `[..., K]`, with scales `scale_a`.
        b: e4m3, `[K, N]`, stored by columns, with scales `scale_b`.
        c: the result.
    """

    def __init__(
        self,
        row: Row,
        dtype: torch.dtype,
        job: Session,
        *,
        scales: str,
        fast: bool,
        axis: int | None = None,
        gathers: bool,
        ranks: int = 0,
    ) -> None:
        super().__init__(row, dtype, job)
        self.ranks = ranks or self.ranks
        self.job, self.scales, self.fast, self.batched = job, scales, fast, axis is not None
        self.lead, self.axis = [BATCH, row.M // BATCH] if self.batched else [row.M], axis or 0
        rows = self.part_of(self.lead) if gathers else self.lead
        groups = row.K // BLOCK if scales == "blocks" else 1
        row_scales = rows if scales != "tensor" else [1] * len(rows)
        column_scales = {"tensor": (1, 1), "rows": (1, row.N), "blocks": (groups, row.N // BLOCK)}[scales]
        self.a = torch.empty(*rows, row.K, dtype=F8, device=self.device)
        self.b = torch.randn(row.N, row.K, device=self.device).to(F8).t()
        self.scale_a = torch.rand(*row_scales, groups, device=self.device) + 0.1
        self.scale_b = (torch.rand(column_scales, device=self.device) + 0.1) / row.K**0.5
        if scales == "tensor" or (self.batched and not gathers):  # then all ranks have the same scales
            dist.broadcast(self.scale_a, 0)
        if self.batched and not gathers:
            dist.broadcast(self.scale_b, 0)

    def part_of(self, lead: Sequence[int]) -> list[int]:
        """Return the shape of one rank's rows, if the rows of all ranks have the shape `lead`."""
        return [size // self.ranks if n == self.axis else size for n, size in enumerate(lead)]

    def about(self) -> Result:
        axis = {"axis": self.axis} if self.batched else {}
        return {"scales": self.scales, "fast": self.fast, **axis}

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.a.copy_(torch.randn(self.a.shape, device=self.device).to(F8))

    def by_torch(self, a: torch.Tensor, scale_a: torch.Tensor) -> torch.Tensor:
        """Return torch's scaled matmul of flat rows.

        On a CPU, where some versions of torch lack it, return the reference result.
        """
        if not self.on_gpu:
            return self.exact(a, scale_a, self.dtype)
        scales = scale_a, self.scale_b
        if self.scales == "tensor":
            scales = scale_a.view(()), self.scale_b.view(())
        elif self.scales == "blocks":  # cuBLAS reads scales of blocks by columns
            scales = scale_a.t().contiguous().t(), self.scale_b_by_columns
        return torch._scaled_mm(a, self.b, *scales, out_dtype=self.dtype, use_fast_accum=self.fast)

    @cached_property
    def scale_b_by_columns(self) -> torch.Tensor:
        return self.scale_b.t().contiguous().t()

    def rounded(self, a: torch.Tensor, scale_a: torch.Tensor) -> torch.Tensor:
        """Return torch's scaled matmul of flat rows. If torch does not support it, return the exact result, rounded."""
        try:
            return self.by_torch(a, scale_a)
        except (RuntimeError, ValueError):
            return self.exact(a, scale_a, self.dtype)

    def exact(self, a: torch.Tensor, scale_a: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return a scaled matmul of flat rows, summed in float64."""
        return scaled_matmul_reference(a, self.b, scale_a, self.scale_b, None, dtype)

    def scales_of(self, scale_a: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the scales of some flat rows."""
        return scale_a.flatten(0, -2)[rows] if self.scales != "tensor" else scale_a.view(1, 1)

    def out(self, slices: int) -> torch.Tensor:
        return self.c

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a, self.b, self.scale_a, self.scale_b

    def parts(self) -> Mapping[str, Work]:
        parts: dict[str, Work] = {"gemm": self.multiply, "nccl": self.communicate}
        return {**parts, "axis_0": self.on_axis_0} if self.batched and self.axis else parts

    @cached_property
    def on_axis_0(self) -> Work:
        """Return a call of `hi.compile` that gathers or scatters the rows on axis 0. Its result was checked."""
        options = {"scales": self.scales, "fast": self.fast, "axis": 0}
        subject = type(self)(self.row, self.dtype, self.job, **options)
        candidate = compiled(subject, EAGER)
        subject.judge().check(candidate)
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
        """Return the arguments of a pattern that are sizes, by parameter name."""
        batch = {"batch": self.lead[1 - self.axis]} if self.batched else {}
        return {"ranks": self.ranks, "M": self.lead[self.axis], "K": self.row.K, "N": N, **batch}


class Gathered(Operands):
    """An all-gather: `a` has this rank's rows, `gathered` the rows of all ranks, and `gathered_scales` their scales."""

    def __init__(self, row: Row, dtype: torch.dtype, job: Session, **fields: Any) -> None:
        super().__init__(row, dtype, job, gathers=True, **fields)
        self.gathered = torch.empty(*self.lead, row.K, dtype=F8, device=self.device)
        self.gathered_scales = (
            self.scale_a if self.scales == "tensor" else self.scale_a.new_empty(*self.lead, self.scale_a.shape[-1])
        )
        self.c = torch.empty(*self.lead, row.N, dtype=dtype, device=self.device)
        self.all_scale_b = self.scale_b  # the scales in the fusion; with `--axis`, B has the columns of all ranks
        if self.batched:
            self.all_scale_b = self.scale_b.new_empty(self.ranks * row.N)
            dist.all_gather_into_tensor(self.all_scale_b, self.scale_b.view(-1))
            self.all_scale_b = self.all_scale_b.view(1, -1)
        self.renew()

    def renew(self) -> None:
        super().renew()
        self.communicate()

    def judge(self) -> Judge:
        sample = torch.randint(self.row.M, (SAMPLE,)).unique().to(self.device)
        flat = self.gathered.flatten(0, -2)
        exact = self.exact(flat[sample], self.scales_of(self.gathered_scales, sample))
        return Judge(sample, exact, self.rounded(flat, self.gathered_scales.flatten(0, -2)))

    def communicate(self) -> None:
        for all_rows, rows in ((self.gathered, self.a), (self.gathered_scales, self.scale_a)):
            if all_rows is rows:
                continue
            if self.axis == 0:
                dist.all_gather_into_tensor(all_rows.view(torch.uint8), rows.view(torch.uint8))
            else:
                torch.cat(every_rank(rows, self.ranks), dim=1, out=all_rows.view(torch.uint8))

    def multiply(self) -> torch.Tensor:
        return self.by_torch(self.gathered.flatten(0, -2), self.gathered_scales.flatten(0, -2))

    def by_hand(self) -> torch.Tensor:
        self.communicate()
        return self.multiply()

    def fused(self) -> torch.Tensor:
        lists = [None], [None], [self.dtype], [self.fast]
        scale_a, scale_b = (x.view(()) if self.scales == "tensor" else x for x in (self.scale_a, self.scale_b))
        arguments = self.a, [self.b], scale_a, [scale_b], self.axis, dist.group.WORLD.group_name
        _, (c,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(*arguments, *lists)
        return c

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a, self.b, self.scale_a, self.all_scale_b

    def fusion(self, slices: int) -> hi.Fusion:
        fields = {"dtype": self.dtype_name, "scales": self.scales, "fast": self.fast}
        if not self.batched:
            return patterns.scaled_allgather_matmul(**self.sizes(self.row.N), **fields)
        return patterns.scaled_batch_gathered(**self.sizes(self.row.N), **fields, axis=self.axis)


class Scattered(Operands):
    """A reduce-scatter: `a` has this rank's columns, with their scales. Each rank gets a part of the sum."""

    def __init__(self, row: Row, dtype: torch.dtype, job: Session, **fields: Any) -> None:
        super().__init__(row, dtype, job, gathers=False, **fields)
        self.c = torch.empty(*self.part_of(self.lead), row.N, dtype=dtype, device=self.device)
        self.renew()

    def flat_rows(self, rank: int) -> torch.Tensor:
        """Return the indices of the flat rows that a rank gets, in the order in which it gets them."""
        return torch.arange(self.row.M, device=self.device).view(self.lead).chunk(self.ranks, self.axis)[rank].flatten()

    def judge(self) -> Judge:
        generator = torch.Generator().manual_seed(self.row.M)
        sample = torch.randint(self.row.M // self.ranks, (SAMPLE,), generator=generator).unique().to(self.device)
        rows = torch.cat([self.flat_rows(rank)[sample] for rank in range(self.ranks)])
        exact = self.exact(self.a.flatten(0, -2)[rows], self.scales_of(self.scale_a, rows))
        dist.all_reduce(exact)
        unfused = self.scatter(self.rounded(*self.flat())).clone()
        return Judge(sample, exact.chunk(self.ranks)[self.rank], unfused.flatten(0, -2))

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a.flatten(0, -2), self.scale_a.flatten(0, -2)

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
        return self.by_torch(*self.flat())

    def by_hand(self) -> torch.Tensor:
        return self.scatter(self.multiply())

    def fused(self) -> torch.Tensor:
        scale_a, scale_b = (x.view(()) if self.scales == "tensor" else x for x in (self.flat()[1], self.scale_b))
        options = {"out_dtype": self.dtype, "use_fast_accum": self.fast}
        shape = [*self.lead, self.row.N]
        arguments = self.flat()[0], self.b, scale_a, scale_b, "sum", self.axis, 0, dist.group.WORLD.group_name, shape
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(*arguments, **options)

    def fusion(self, slices: int) -> hi.Fusion:
        fields = {"dtype": self.dtype_name, "scales": self.scales, "fast": self.fast}
        if not self.batched:
            return patterns.scaled_row_parallel(**self.sizes(self.row.N), **fields, bias=False)
        return patterns.scaled_batch_scattered(**self.sizes(self.row.N), **fields, axis=self.axis)


class EmulatedGathered(Gathered):
    """Tensors of a row on one of two ranks that emulate a larger team. The peer sends the rows of all other ranks."""

    def renew(self) -> None:
        if not hasattr(self, "bytes"):
            self.bytes = self.shared(self.row.M // self.ranks, self.row.K // self.dtype.itemsize)
            self.peer_bytes = self.of_peer(self.bytes, 1 - self.rank) if self.on_gpu else torch.empty_like(self.bytes)
            self.a = self.bytes.view(F8)
            self.pulled = torch.empty_like(self.gathered).view(
                self.dtype
            )  # a buffer of its own: results are compared with `gathered`
        super().renew()

    def about(self) -> Result:
        return {**super().about(), "emulated_on": 2}

    def communicate(self) -> None:
        for all_rows, rows in ((self.gathered, self.a), (self.gathered_scales, self.scale_a)):
            if all_rows is rows:
                continue
            by_rank = every_rank(rows, 2)
            for place, block in enumerate(all_rows.view(torch.uint8).chunk(self.ranks)):
                block.copy_(by_rank[self.rank if place == self.rank else 1 - self.rank])

    def parts(self) -> Mapping[str, Work]:
        return {"gemm": self.multiply, "copies": self.pull}

    def pull(self) -> None:
        """Copy as many shards from the peer as the programs do, without synchronization."""
        for block in self.pulled.chunk(self.ranks)[1:]:
            block.copy_(self.peer_bytes)

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        for way in arrivals.WAYS:
            strategy, kernels = way.name.split()[0], way.kernels
            if strategy in only and (kernels == "aten" or self.on_gpu):
                yield from (Entrant(way.name, mode, partial(self.ours, way, strategy, mode)) for mode in modes)

    def ours(self, way: arrivals.Way, strategy: str, mode: str) -> Candidate:
        groups = 0 if self.scales == "tensor" else self.scale_a.shape[-1]
        scaling = arrivals.Scaling(groups, (self.scale_b.shape[0], self.scale_b.shape[1]), self.fast)
        program = hi.parse(arrivals.program_text(self.row, self.ranks, way, scaling))
        return lowered(self, program, Variant(strategy, way.kernels), mode, name=way.name)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a[None, None], self.b, self.scale_a[None, None], self.scale_b

    def out(self, slices: int) -> torch.Tensor:
        return self.c.view(1, self.ranks, -1, self.row.N)


class EmulatedScattered(EmulatedRank, Scattered):
    """Tensors of a row on one of two ranks that emulate a larger team. It sends all blocks but its own to the peer."""

    def __init__(self, row: Row, dtype: torch.dtype, job: Session, *, ranks: int, **fields: Any) -> None:
        super().__init__(row, dtype, job, **fields)
        self.emulate(ranks)

    def multiply(self) -> torch.Tensor:
        return self.by_torch(*self.flat())

    def product(self) -> torch.Tensor:
        return self.rounded(*self.flat())

    def exact_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.exact(self.a[rows], self.scales_of(self.scale_a, rows))

    def program(self, way: Way) -> str:
        row, (groups, columns) = self.row, self.scale_b.shape
        rows, name = (row.M, "%scale_a") if self.scales != "tensor" else (1, "%scale")
        scale_a, scale_b = f"{name}: f32[{rows}, {2 * groups}@didx]", f"%scale_b: f32[{2 * groups}@didx, {columns}]"
        operands = f"%a: f8e4m3[{row.M}, {2 * row.K}@didx], %b: f8e4m3[{2 * row.K}@didx, {row.N}], {scale_a}, {scale_b}"
        fast = " accumulate fast" if self.fast else ""
        product = f"scaled_matmul %a, %b scaled {name}, %scale_b to {self.dtype_name}{fast}"
        return program_text(row, self.ranks, way, self.dtype_name, operands, product)


SIDES = {"gather": (Gathered, EmulatedGathered), "scatter": (Scattered, EmulatedScattered)}


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that the other comparisons do not have."""
    parser.add_argument("--side", choices=[*SIDES], default="gather", help="all-gather or reduce-scatter (%(default)s)")
    parser.add_argument("--scales", choices=("rows", "tensor", "blocks"), default="rows", help="(%(default)s)")
    parser.add_argument("--exact", action="store_true", help="sum in f32, not in the tensor cores")
    parser.add_argument("--axis", type=int, choices=(0, 1), help="the axis of rows [2, M / 2, K]; needs scales of rows")
    parser.add_argument("--as-rank-of", type=int, metavar="R", help="let 2 GPUs emulate two of R ranks")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    first, _ = add_options(argparse.ArgumentParser(add_help=False)).parse_known_args(arguments)
    parser = add_options(options_parser(__doc__, f"scaled_{first.side}"))
    options = parser.parse_args(arguments)
    if options.axis is not None and (options.scales != "rows" or options.as_rank_of):
        parser.error("--axis needs scales of rows, and does not work with --as-rank-of")
    real, emulated = SIDES[options.side]
    fields: dict[str, Any] = {"scales": options.scales, "fast": not options.exact}
    if options.as_rank_of is None:
        return compare(options, f"scaled_{options.side}", partial(real, **fields, axis=options.axis), finest=BATCH)
    options.rows = [row for row in options.rows if row.M in LARGE]
    if options.out is not None:
        options.out = options.out.with_name(f"{options.out.name}_as_rank_of")
    subject = partial(emulated, **fields, ranks=options.as_rank_of)
    compare(options, f"scaled_{options.side}_emulated", subject, ranks=2, finest=options.as_rank_of)


if __name__ == "__main__":
    main()
