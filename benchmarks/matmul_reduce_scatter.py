"""Matmul + reduce-scatter: what `hi.compile` gives, all that it could choose and what torch offers, against the floor.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_reduce_scatter --out benchmarks/results/rs
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_reduce_scatter --shapes odd
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_reduce_scatter --as-rank-of 8
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_reduce_scatter --device cpu --shrink 64 --rows 8B:2048
    python -m benchmarks.chart benchmarks/results/rs_2.json rs.svg

Rows are the second weights of the MLPs of Llama 3 8B, 70B and 405B as tensor parallel 8 has them (K of a rank stays the
same on fewer); with `--shapes odd`, shapes that nothing here was tuned for. floor = max(cuBLAS alone, the best
reduce-scatter alone), where the reduce-scatter is NCCL's or torch's by copy engines, eager or from a graph; a score is
floor/time. Ours is what `hi.compile` gives by its estimates, with `out=`: issued by the host where it runs through
NCCL, else replayed; the peers issued in the same way stand beside it. Slices of a pipeline are an axis of A and of the
result, outside of the ranks.

What it is measured against:

    NCCL + cuBLAS   torch.matmul, then reduce_scatter_tensor
    torch fused     torch.ops.symm_mem.fused_matmul_reduce_scatter

With `--as-rank-of R`, two GPUs meet what each of R would: each makes the blocks of rows of R ranks and sends all but
its own to the one peer, one after another with a flag behind each, and adds up as many. What is not the same: barrier
and credits are of two ranks, no rank lags behind the others, and there is neither NCCL nor any peer. The floor is
cuBLAS alone, or the copies alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks.comparison import (
    PIECES,
    Candidate,
    Entrant,
    Judge,
    Subject,
    Variant,
    Work,
    compare,
    lowered,
    parser,
    summed_rows,
)
from benchmarks.harness import synchronize
from benchmarks.scores import BY_HAND, KINDS, LARGE, ODD, TORCH, Result, Row
from examples import patterns
from hostir.choice.platforms import Platform
from hostir.lower.fused import SMS
from hostir.runtime.kernels.matmul import matmul as triton_matmul
from hostir.runtime.session import Session


def low_contention(part: torch.Tensor) -> torch.Tensor:
    """torch's reduce-scatter by copy engines."""
    group = dist.group.WORLD.group_name
    c = torch.ops.symm_mem._low_contention_reduce_scatter(part, "sum", group)
    return torch.ops._c10d_functional.wait_tensor(c)


def row_parallel(ranks: int, M: int, N: int, K: int, dtype: str) -> hi.Fusion:
    """A and B sharded on K, the result on its rows: plain matrices, and nothing said of slices."""
    with hi.Fusion("matmul_reduce_scatter") as fusion:
        a, b = hi.tensor("a", [M, K], dtype), hi.tensor("b", [K, N], dtype)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(1, mesh)
    b.shard(0, mesh)
    c.shard(0, mesh)
    return fusion


class Operands(Subject):
    """A row's tensors on this rank.

    Fields:
        a: `[M, K]`, this rank's columns.
        b: `[K, N]`, this rank's rows; stored by columns, as the weight of a linear layer is.
        part: `[M, N]`, what this rank adds to the result; on GPUs in symmetric memory.
        c: `[M / ranks, N]`, this rank's rows of the result.
    """

    slices = (2, 4)

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session) -> None:
        super().__init__(row, dtype, joined)
        self.a = torch.empty(row.M, row.K, dtype=dtype, device=self.device)
        self.b = (torch.randn(row.N, row.K, device=self.device) / row.K**0.5).to(dtype).t()
        self.part = self.shared(row.M, row.N)
        self.c = torch.empty(row.M // self.ranks, row.N, dtype=dtype, device=self.device)
        self.sliced: dict[int, torch.Tensor] = {}
        self.renew()

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.a.normal_()
        for slices, a in self.sliced.items():
            a.copy_(self.in_slices(slices))
        self.multiply()

    def judge(self) -> Judge:
        row = self.row
        sample, exact = summed_rows(
            row.M, self.ranks, self.rank, lambda rows: self.a[rows].double() @ self.b.double(), self.device
        )
        in_pieces = []
        for n in (1, *(n for n in sorted({*PIECES, self.ranks}) if n > 1)):
            torch.cat([x @ self.b for x in self.a.chunk(n)], out=self.part)
            self.scatter()
            in_pieces.append(self.c.clone())
        return Judge(sample, exact, in_pieces[0], in_pieces[1:])

    # The parts --------------------------------------------------------------------------------------------------------
    def parts(self) -> Mapping[str, Work]:
        found: dict[str, Work] = {"gemm": self.multiply, "nccl": self.scatter}
        found["torch"] = partial(low_contention, self.part)
        if self.on_gpu:
            found["triton"] = partial(triton_matmul, self.a, self.b, self.part)
        return found

    def multiply(self) -> None:
        torch.matmul(self.a, self.b, out=self.part)

    def scatter(self) -> None:
        dist.reduce_scatter_tensor(self.c, self.part)

    # The peers --------------------------------------------------------------------------------------------------------
    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {BY_HAND: self.by_hand, TORCH: self.fused}

    def by_hand(self) -> torch.Tensor:
        self.multiply()
        self.scatter()
        return self.c

    def fused(self) -> torch.Tensor:
        group = dist.group.WORLD.group_name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(self.a, self.b, "sum", 0, group)

    # Ours -------------------------------------------------------------------------------------------------------------
    def fusion(self, slices: int) -> hi.Fusion:
        row, ranks, dtype = self.row, self.ranks, self.dtype_name
        if slices == 1:
            return row_parallel(ranks, row.M, row.N, row.K * ranks, dtype)
        return patterns.row_parallel_scattered(ranks, slices, row.M, row.K * ranks, row.N, dtype)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        if slices == 1:
            return self.a, self.b
        if slices not in self.sliced:
            self.sliced[slices] = self.in_slices(slices).contiguous()
        return self.sliced[slices], self.b

    def in_slices(self, slices: int) -> torch.Tensor:
        """A with the rows of each rank in slices, `[slices, ranks, rows, K]`."""
        return self.a.view(self.ranks, slices, -1, self.row.K).transpose(0, 1)

    def out(self, slices: int) -> torch.Tensor:
        return self.c if slices == 1 else self.c.view(slices, 1, -1, self.row.N)


# As a rank of more ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Way:
    """How one of two ranks that stand for more makes its blocks of rows and sends them.

    Fields:
        strategy: `ring`, a matmul for each block, issued by the host; `fused`, one that raises a flag behind each; or
            `push`, one after which SMs copy.
        kernels: what multiplies and adds.
        pieces: that a block is sent in.
    """

    strategy: str
    kernels: str
    pieces: int = 1

    def __str__(self) -> str:
        return f"{self.strategy}{f' {self.pieces} pieces' if self.pieces > 1 else ''} {self.kernels}"


WAYS = tuple(
    Way(strategy, kernels, pieces)
    for strategy, pieces in (("ring", 1), ("fused", 1), ("fused", 2), ("push", 1))
    for kernels in ("aten", "triton")
)


def text(row: Row, ranks: int, way: Way, dtype: str, operands: str = "", product: str = "matmul %a, %b") -> str:
    """The program of one of two ranks that stand for `ranks`: of `operands` a `product`, a plain one by default.

    This rank is at place %r, and makes the blocks for the places behind it first, its own last. All but its own go to
    the peer, at place 1 - %r: the i-th into the slot of the rank from which place 1 - %r would get its i-th.
    """
    m, n, pieces = row.M // ranks, row.N, way.pieces
    block, slot = f"(%r + %i + 1) % {ranks}", f"((%r + 1) % 2 + {ranks - 1} - %i) % {ranks}"
    by = f" by {SMS} sms" if way.strategy == "push" else ""
    put = [
        *(f"%piece = chunk %block[%p of {pieces}] axis 0", f"%place = chunk %slot[%p of {pieces}] axis 0"),
        f"put %piece -> %place at (%r + 1) % 2 over didx{by}",
        f"signal %there[({slot}) * {pieces} + %p] = 1 at (%r + 1) % 2 over didx",
    ]
    views = [f"%block = chunk %part[{block} of {ranks}] axis 0", f"%slot = select %sent[{slot}]"]
    rounds, each = f"for %i in 0..{ranks - 1} {{", f"for %p in 0..{pieces} {{"
    barrier = "barrier of %sent over didx"
    by_rows = [name for name in ("%a", "%scale_a") if f"{name}," in product]

    def cut(place: str, suffix: str) -> list[str]:
        """The product of a block of rows, without where it goes."""
        views = [f"{name}_{suffix} = chunk {name}[{place} of {ranks}] axis 0" for name in by_rows]
        return [*views, re.sub(r"%(a|scale_a),", rf"%\1_{suffix},", product)]

    fork, own, streams = ["set_stream 0", "synchronize %user", barrier], [], 1
    if way.strategy == "ring":
        streams = 2
        *of_block, multiply = cut(block, "block")
        send = ["set_stream %i % 2", "synchronize %user", each, *put, "}"]
        body = [*fork, "set_stream 1", "synchronize 0", rounds, "set_stream %user", *views]
        body += [*of_block, f"{multiply} -> %block", *send, "}"]
        *of_own, multiply = cut("%r", "mine")
        own = [*of_own, f"{multiply} -> %mine"]
    elif way.strategy == "fused":
        flags = f"%part_done: flag[{ranks * pieces}] = allocate_symmetric"
        multiply = f"{product} -> %part done %part_done = 1 from (%r + 1) % {ranks} * {pieces}"
        wait = f"wait_signal %part_done[({block}) * {pieces} + %p] >= 1"
        body = [flags, *fork, "set_stream %user", multiply, "set_stream 0", rounds, *views, each, wait, *put, "}", "}"]
    else:
        streams = 0
        body = [f"{product} -> %part", barrier, rounds, *views, each, *put, "}", "}"]
    operands = operands or f"%a: {dtype}[{row.M}, {2 * row.K}@didx], %b: {dtype}[{2 * row.K}@didx, {n}]"
    return "\n".join(
        [
            *("hostir 1", "mesh @mesh [didx] = 0 1"),
            f"program @departures({operands}) -> (%c) {f'streams {streams} ' if streams else ''}{{",
            *("%user = current_stream", "%r = rank of %a over didx"),
            f"%part: {dtype}[{row.M}, {n}] partial(didx) = allocate",
            f"%sent: {dtype}[{ranks}, {2 * m}@didx, {n}] = allocate_symmetric",
            f"%there: flag[{ranks * pieces}] = allocate_symmetric",
            *body,
            *("set_stream %user", f"%mine = chunk %part[%r of {ranks}] axis 0", *own),
            f"%c: {dtype}[{2 * m}@didx, {n}] = allocate",
            "sum %sent axis 0 -> %c ready %there >= 1 from %r own %mine",
            *(f"synchronize {stream}" for stream in range(streams)),
            *("free %part", "}"),
        ]
    )


class StandsForMore(Subject):
    """What is compared on one of two ranks that stand for more.

    Fields:
        c: `[M / ranks, N]`, the own block of rows, with all blocks added that the peer sends.
    """

    part: torch.Tensor
    multiply: Callable[[], object]

    def stand_for(self, ranks: int) -> None:
        self.ranks = ranks
        self.c = torch.empty(self.row.M // ranks, self.row.N, dtype=self.dtype, device=self.device)
        self.slots = self.shared(ranks, *self.c.shape)
        self.theirs = self.of_peer(self.slots, 1 - self.rank) if self.on_gpu else torch.empty_like(self.slots)

    def product(self) -> torch.Tensor:
        """What this rank multiplies, `[M, N]`."""
        raise NotImplementedError

    def exact_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of it in float64."""
        raise NotImplementedError

    def program(self, way: Way) -> str:
        """The text that adds up the blocks."""
        raise NotImplementedError

    def about(self) -> Result:
        return {**super().about(), "emulated_on": 2}

    def judge(self) -> Judge:
        """Against this rank's own block and the blocks of the peer but for that of its own place."""
        m = self.row.M // self.ranks
        drawn = torch.randint(m, (32,), generator=torch.Generator().manual_seed(m))  # the same on both ranks
        sample = torch.cat([torch.tensor([0, m - 1]), drawn]).unique().to(self.device)
        rows = torch.cat([place * m + sample for place in range(self.ranks)])
        sums = []
        for made in (self.product().float(), self.exact_rows(rows)):
            both = [torch.empty_like(made) for _ in range(2)]
            dist.all_gather(both, made.contiguous())
            blocks = [each.chunk(self.ranks) for each in both]
            added = [block for place, block in enumerate(blocks[1 - self.rank]) if place != 1 - self.rank]
            sums.append(torch.stack([blocks[self.rank][self.rank], *added]).sum(0))
        return Judge(sample, sums[1], sums[0].to(self.dtype))

    def parts(self) -> Mapping[str, Work]:
        return {"gemm": self.multiply, "copies": self.push}

    def push(self) -> None:
        """Copies of as many blocks to the peer, which nobody waits for."""
        for block, slot in zip(self.part.chunk(self.ranks)[1:], self.theirs[1:], strict=True):
            slot.copy_(block)

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        for way in WAYS:
            if way.strategy not in only or (way.kernels == "triton" and not self.on_gpu):
                continue
            for mode in modes:
                yield Entrant(str(way), mode, partial(self.ours, way, mode))

    def ours(self, way: Way, mode: str) -> Candidate:
        return lowered(self, hi.parse(self.program(way)), Variant(way.strategy, way.kernels), mode, name=str(way))


class AsRankOf(StandsForMore, Operands):
    """A row's tensors on one of two ranks that stand for more."""

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session, *, ranks: int) -> None:
        super().__init__(row, dtype, joined)
        self.stand_for(ranks)

    def product(self) -> torch.Tensor:
        return self.a @ self.b

    def exact_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.a[rows].double() @ self.b.double()

    def program(self, way: Way) -> str:
        return text(self.row, self.ranks, way, self.dtype_name)


# The command line -------------------------------------------------------------------------------------------------
def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    options = parser(__doc__, "reduce_scatter", without=ODD)
    options.add_argument("--shapes", choices=("layers", "odd"), default="layers", help="rows, where none are named")
    options.add_argument("--as-rank-of", type=int, metavar="R", help="let 2 GPUs stand for one of so many ranks")
    given = options.parse_args(arguments)
    if given.shapes == "odd":
        given.rows = KINDS["reduce_scatter"].rows(",".join(ODD))
    if given.as_rank_of:
        given.rows = [row for row in given.rows if row.M in LARGE]
    return given


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a line a row, and writes table and figures on rank 0."""
    given = options(arguments)
    if given.as_rank_of is None:
        return compare(given, "reduce_scatter", Operands)
    if given.out is not None:
        given.out = given.out.with_name(f"{given.out.name}_as_rank_of")
    compare(given, "departures", partial(AsRankOf, ranks=given.as_rank_of), ranks=2, finest=given.as_rank_of)


if __name__ == "__main__":
    main()
