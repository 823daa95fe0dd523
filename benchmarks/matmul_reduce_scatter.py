"""Matmul + reduce-scatter: `hi.compile`, all its candidates, NCCL + cuBLAS and torch, scored against the floor.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_reduce_scatter --out benchmarks/results/rs
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_reduce_scatter --shapes odd
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_reduce_scatter --as-rank-of 8
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_reduce_scatter --device cpu --shrink 64 --rows 8B:2048
    python -m benchmarks.chart benchmarks/results/rs_2.json rs.svg

A row of the table is a shape: the second weight of the MLP of Llama 3 8B, 70B or 405B with tensor parallelism 8. K is
the number of columns of A on one rank, which stays the same on fewer ranks. With `--shapes odd` the rows are shapes
that no kernel was tuned for. floor = max(cuBLAS alone, the best reduce-scatter alone). The reduce-scatter is NCCL's, or
torch's by copy engines, eager or from a graph. A score is floor/time. For hostir, a call with `out=` of what
`hi.compile` has chosen in its trial is scored: an eager call if the program uses NCCL, otherwise a replay. The table
also compares this call with the fastest peer of the same mode. In a pipeline, the axis of the slices is outside the
axis of the ranks, in A and in the result.

The peers:

    NCCL + cuBLAS   torch.matmul, then reduce_scatter_tensor
    torch fused     torch.ops.symm_mem.fused_matmul_reduce_scatter

With `--as-rank-of R`, two GPUs emulate two of R ranks. Each GPU computes one block of rows for each of the R ranks. It
sends all blocks but its own to the other GPU, one after another with a flag after each, and adds up R blocks. Three
things differ from R ranks: the barrier and the credits are between two ranks, no rank lags behind the others, and there
are no other implementations to compare with. The floor is cuBLAS alone, or the copies alone.
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
    options_parser,
    summed_rows,
)
from benchmarks.harness import synchronize
from benchmarks.scores import BENCHMARKS, BY_HAND, LARGE, ODD, TORCH, Result, Row
from examples import patterns
from hostir.choice.platforms import Platform
from hostir.job.session import Session
from hostir.kernels.matmul.matmul import matmul as triton_matmul
from hostir.lower.fused import SMS


def low_contention(part: torch.Tensor) -> torch.Tensor:
    """Reduce-scatter by copy engines, as torch does it."""
    group = dist.group.WORLD.group_name
    c = torch.ops.symm_mem._low_contention_reduce_scatter(part, "sum", group)
    return torch.ops._c10d_functional.wait_tensor(c)


def row_parallel(ranks: int, M: int, N: int, K: int, dtype: str) -> hi.Fusion:
    """Return a fusion of plain matrices without a Stream axis. A and B are sharded on K, the result on its rows."""
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
        b: `[K, N]`, this rank's rows; stored by columns, like the weight of a linear layer.
        part: `[M, N]`, this rank's partial sum; on GPUs in symmetric memory.
        c: `[M / ranks, N]`, this rank's rows of the result.
    """

    slices = (2, 4)

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        super().__init__(row, dtype, job)
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

    def parts(self) -> Mapping[str, Work]:
        parts: dict[str, Work] = {"gemm": self.multiply, "nccl": self.scatter}
        parts["torch"] = partial(low_contention, self.part)
        if self.on_gpu:
            parts["triton"] = partial(triton_matmul, self.a, self.b, self.part)
        return parts

    def multiply(self) -> None:
        torch.matmul(self.a, self.b, out=self.part)

    def scatter(self) -> None:
        dist.reduce_scatter_tensor(self.c, self.part)

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {BY_HAND: self.by_hand, TORCH: self.fused}

    def by_hand(self) -> torch.Tensor:
        self.multiply()
        self.scatter()
        return self.c

    def fused(self) -> torch.Tensor:
        group = dist.group.WORLD.group_name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(self.a, self.b, "sum", 0, group)

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
        """Return A as `[slices, ranks, rows, K]`: the rows for each rank are cut into slices."""
        return self.a.view(self.ranks, slices, -1, self.row.K).transpose(0, 1)

    def out(self, slices: int) -> torch.Tensor:
        return self.c if slices == 1 else self.c.view(slices, 1, -1, self.row.N)


@dataclass(frozen=True)
class Way:
    """The way in which an emulated rank computes its blocks of rows and sends them.

    Fields:
        strategy: `ring` runs one matmul for each block. `fused` runs one matmul, which raises a flag after each block.
            `push` runs one matmul, and then copies by SMs.
        kernels: the kernels that multiply and add.
        pieces: the number of pieces in which a block is sent.
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


def program_text(row: Row, ranks: int, way: Way, dtype: str, operands: str = "", product: str = "matmul %a, %b") -> str:
    """Return the program of two ranks that emulate two of `ranks` ranks.

    `operands` is the text of the inputs, and `product` is the text of the matmul; by default a plain matmul. The rank
    at position %r first computes the blocks for the positions after %r, and at the end its own block. It sends all
    blocks but its own to the peer, which has the position p = 1 - %r. In a team of `ranks` ranks, the rank at position
    p - 1 - i (modulo `ranks`) would send the peer its i-th block, counted from 0. So the i-th block goes to the slot of
    that rank.
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
    rounds, by_piece = f"for %i in 0..{ranks - 1} {{", f"for %p in 0..{pieces} {{"
    barrier = "barrier of %sent over didx"
    by_rows = [name for name in ("%a", "%scale_a") if f"{name}," in product]

    def cut(place: str, suffix: str) -> list[str]:
        """Return the statements of the matmul of a block of rows. The last one is a matmul without its output."""
        views = [f"{name}_{suffix} = chunk {name}[{place} of {ranks}] axis 0" for name in by_rows]
        return [*views, re.sub(r"%(a|scale_a),", rf"%\1_{suffix},", product)]

    fork, local_block, streams = ["set_stream 0", "synchronize %user", barrier], [], 1
    if way.strategy == "ring":
        streams = 2
        *block_views, multiply = cut(block, "block")
        send = ["set_stream %i % 2", "synchronize %user", by_piece, *put, "}"]
        body = [*fork, "set_stream 1", "synchronize 0", rounds, "set_stream %user", *views]
        body += [*block_views, f"{multiply} -> %block", *send, "}"]
        *local_views, multiply = cut("%r", "mine")
        local_block = [*local_views, f"{multiply} -> %mine"]
    elif way.strategy == "fused":
        flags = f"%part_done: flag[{ranks * pieces}] = allocate_symmetric"
        multiply = f"{product} -> %part done %part_done = 1 from (%r + 1) % {ranks} * {pieces}"
        wait = f"wait_signal %part_done[({block}) * {pieces} + %p] >= 1"
        body = [
            flags,
            *fork,
            "set_stream %user",
            multiply,
            "set_stream 0",
            rounds,
            *views,
            by_piece,
            wait,
            *put,
            "}",
            "}",
        ]
    else:
        streams = 0
        body = [f"{product} -> %part", barrier, rounds, *views, by_piece, *put, "}", "}"]
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
            *("set_stream %user", f"%mine = chunk %part[%r of {ranks}] axis 0", *local_block),
            f"%c: {dtype}[{2 * m}@didx, {n}] = allocate",
            "sum %sent axis 0 -> %c ready %there >= 1 from %r own %mine",
            *(f"synchronize {stream}" for stream in range(streams)),
            *("free %part", "}"),
        ]
    )


class EmulatedRank(Subject):
    """The tensors of a row on one of two ranks that emulate a larger team.

    Fields:
        c: `[M / ranks, N]`, this rank's block of rows: the sum of its own block and the blocks from the peer.
    """

    part: torch.Tensor
    multiply: Callable[[], object]

    def emulate(self, ranks: int) -> None:
        """Make this rank emulate one of `ranks` ranks."""
        self.ranks = ranks
        self.c = torch.empty(self.row.M // ranks, self.row.N, dtype=self.dtype, device=self.device)
        self.slots = self.shared(ranks, *self.c.shape)
        self.peer_slots = self.of_peer(self.slots, 1 - self.rank) if self.on_gpu else torch.empty_like(self.slots)

    def product(self) -> torch.Tensor:
        """Return the result of this rank's matmul, `[M, N]`."""
        raise NotImplementedError

    def exact_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows of the result of this rank's matmul, in float64."""
        raise NotImplementedError

    def program(self, way: Way) -> str:
        """Return the text of the program for a way."""
        raise NotImplementedError

    def about(self) -> Result:
        return {**super().about(), "emulated_on": 2}

    def judge(self) -> Judge:
        """Return a judge that holds the expected sum.

        The peer plays all other ranks. So the sum adds this rank's block of its product, and every block that the peer
        sends: all blocks of the peer's product but the one that the peer keeps.
        """
        m = self.row.M // self.ranks
        random_rows = torch.randint(m, (32,), generator=torch.Generator().manual_seed(m))  # the same on both ranks
        sample = torch.cat([torch.tensor([0, m - 1]), random_rows]).unique().to(self.device)
        rows = torch.cat([place * m + sample for place in range(self.ranks)])
        sums = []
        for product in (self.product().float(), self.exact_rows(rows)):
            products = [torch.empty_like(product) for _ in range(2)]
            dist.all_gather(products, product.contiguous())
            blocks = [rank_product.chunk(self.ranks) for rank_product in products]
            received = [block for place, block in enumerate(blocks[1 - self.rank]) if place != 1 - self.rank]
            sums.append(torch.stack([blocks[self.rank][self.rank], *received]).sum(0))
        return Judge(sample, sums[1], sums[0].to(self.dtype))

    def parts(self) -> Mapping[str, Work]:
        return {"gemm": self.multiply, "copies": self.push}

    def push(self) -> None:
        """Copy as many blocks to the peer as the programs do, without synchronization."""
        for block, slot in zip(self.part.chunk(self.ranks)[1:], self.peer_slots[1:], strict=True):
            slot.copy_(block)

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        for way in WAYS:
            if way.strategy not in only or (way.kernels == "triton" and not self.on_gpu):
                continue
            for mode in modes:
                yield Entrant(str(way), mode, partial(self.ours, way, mode))

    def ours(self, way: Way, mode: str) -> Candidate:
        return lowered(self, hi.parse(self.program(way)), Variant(way.strategy, way.kernels), mode, name=str(way))


class EmulatedOperands(EmulatedRank, Operands):
    """The operands of a row on one of two ranks that emulate a larger team."""

    def __init__(self, row: Row, dtype: torch.dtype, job: Session, *, ranks: int) -> None:
        super().__init__(row, dtype, job)
        self.emulate(ranks)

    def product(self) -> torch.Tensor:
        return self.a @ self.b

    def exact_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.a[rows].double() @ self.b.double()

    def program(self, way: Way) -> str:
        return program_text(self.row, self.ranks, way, self.dtype_name)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = options_parser(__doc__, "reduce_scatter", without=ODD)
    parser.add_argument("--shapes", choices=("layers", "odd"), default="layers", help="the rows, if none are named")
    parser.add_argument("--as-rank-of", type=int, metavar="R", help="let 2 GPUs emulate two of R ranks")
    options = parser.parse_args(arguments)
    if options.shapes == "odd":
        options.rows = BENCHMARKS["reduce_scatter"].rows(",".join(ODD))
    if options.as_rank_of:
        options.rows = [row for row in options.rows if row.M in LARGE]
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    options = parse_options(arguments)
    if options.as_rank_of is None:
        return compare(options, "reduce_scatter", Operands)
    if options.out is not None:
        options.out = options.out.with_name(f"{options.out.name}_as_rank_of")
    subject = partial(EmulatedOperands, ranks=options.as_rank_of)
    compare(options, "departures", subject, ranks=2, finest=options.as_rank_of)


if __name__ == "__main__":
    main()
