"""Passes `fused` and `push`: each rank sends blocks of rows to all ranks, and one kernel waits for each block.

For an allgather, a block is one rank's shard, and a matmul waits for the blocks. But if the matmul sums over the
gathered axis, a block is one rank's part of a slice of the rows. For a reduce_scatter, a block has the rows that a
matmul makes for one other rank, and a sum waits for the blocks of all ranks. In `fused` the matmul sets a flag after
each block, so copies begin while it runs. In `push` copies begin when the matmul has ended. An allreduce either sums
all rows on every rank, or is a reduce_scatter and an allgather: `hostir/lower/allreduces.py` decides.

The schedule for an allgather follows kernels that wait for rows of a gathered operand inside the matmul: FLUX (Chang et
al., 2024), and the all-gather matmuls of Triton-distributed (Zheng et al., 2025). The schedule for a reduce_scatter
follows the reduce-scatter by copy engines in Triton-distributed: a matmul counts the tiles of each block, copies wait
for the count, and a separate kernel reduces. The two passes differ in who moves the bytes:

- in `fused`, copy engines move them, which costs the matmul no SMs;
- in `push`, a few SMs of the sending rank move them, in one kernel before the kernel that waits. This is for few rows:
  a kernel writes to peers and sets flags in less time than copy engines take to start. The waiting kernel starts while
  the copying kernel runs. On CUDA with Triton's kernels, a product of few rows stores its result directly to the peers
  (`hostir.machines.pushes.PushedProduct`). Low-latency collectives also store to peers from kernels: NCCL's LL
  protocols, and the one-shot kernels of TensorRT-LLM and of torch's symmetric memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hostir.ir.comm_ops import AllGather, AllReduce
from hostir.ir.expert_ops import GroupedMatmul, PermuteRows
from hostir.ir.op import Codec, Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.tensor_ops import Add, ByBlocks, Contraction, Linear, Matmul, RmsNorm, TensorOp, Unary
from hostir.ir.view_ops import Permute
from hostir.lower import Pass
from hostir.lower.allreduces import AllReduceSteps, fits_chunks, rows_axis
from hostir.lower.chunks import Chunks, rows_in
from hostir.lower.columns import columns_as_rows
from hostir.lower.gathers import SentColumns, SentRows
from hostir.lower.host import Host
from hostir.lower.propagate import operands_of, result_of, users_of
from hostir.lower.reshard import Reduction
from hostir.lower.rows import (
    RowCollective,
    RowCollectives,
    block_axes,
    by_columns,
    first_matmul,
    long_axes,
    maker_of_rows,
    product_of_rows,
    reads_rows,
    seen_from,
    shard_in_pieces,
    shard_of,
    users,
    waits_for_rows,
)
from hostir.lower.scales import SMS, send_scales
from hostir.lower.scatters import Pieces, ScatteredRows
from hostir.lower.slices import operand_places, why_not
from hostir.lower.transfers import Mover


@dataclass(frozen=True)
class Fused(Pass):
    """Replaces collectives of rows by copies to all peers, and by a kernel that waits for each block of rows."""

    name = "fused"
    streams: int = 4
    pieces: Pieces = field(default_factory=Pieces)
    steps: AllReduceSteps = field(default_factory=AllReduceSteps)

    def run(self, program: Program) -> Program:
        return sent(program, self.name, Mover(streams=self.streams), self.pieces, self.steps)


@dataclass(frozen=True)
class Push(Pass):
    """Replaces each collective of rows by two kernels.

    The first kernel copies to all ranks. The second kernel waits for each block of rows, and starts while the first
    kernel runs.
    """

    name = "push"
    steps: AllReduceSteps = field(default_factory=AllReduceSteps)

    def run(self, program: Program) -> Program:
        return sent(program, self.name, Mover(sms=SMS), Pieces(), self.steps)


def sent(program: Program, strategy: str, mover: Mover, pieces: Pieces, steps: AllReduceSteps) -> Program:
    """Return the host program of a fusion in which each rank sends its blocks of rows to the other ranks.

    Args:
        strategy: the name of the pass, for messages.
        mover: the hardware that copies the blocks.
        pieces: chooses the number of pieces into which a reduce_scatter cuts the rows for a rank.
        steps: chooses the number of steps of an allreduce, and the number of its blocks or chunks.
    """

    def two(s: AllReduce) -> bool:
        return not steps.one(s, unknown=mover.sms > 0)

    def as_collectives(s: AllReduce) -> bool:
        return two(s) and (mover.sms > 0 or not _in_chunks(s, program))

    reason = "the rows of a rank lie over several axes of the mesh, and a shard in no equal blocks of them"
    program, onto = added_onto(columns_as_rows(indexed(program)))
    rows = (
        RowCollectives.of(program, strategy, as_collectives)
        .only(_in_blocks, reason)
        .noted(strategy)
        .with_block_axes(_needs_block_axes)
        .with_scales_first()
    )
    ordered = _matmuls_first(rows)
    chunked = {s: product_in_chunks(s, ordered, steps.chunks_of(s)) for s in rows.reduces if two(s)}
    host = Host(ordered, rows.ordered(ordered, chunked))
    host.apart |= {s.out.name for s in rows.reduces}
    sending = _Sending(host, rows, mover, pieces, steps, chunked)
    for s in ordered.body:
        if (sum := onto.get(result_of(s).name)) is not None:
            host.values[result_of(s).name] = host.destination(sum)
        sending.add(s)
    return sending.finished()


class _Sending:
    """Builds the host program of `sent`, statement by statement.

    Args:
        chunked: the allreduces that run in chunks. An allreduce is mapped to the product that makes its rows if this
            product runs in chunks, too; else to None.
    """

    def __init__(
        self,
        host: Host,
        rows: RowCollectives,
        mover: Mover,
        pieces: Pieces,
        steps: AllReduceSteps,
        chunked: Mapping[AllReduce, Contraction | None],
    ) -> None:
        self.host, self.rows, self.mover, self.pieces, self.steps, self.chunked = (
            host,
            rows,
            mover,
            pieces,
            steps,
            chunked,
        )
        self.later = {s.out.name for s in chunked.values() if s is not None}  # results of products in chunks
        self.scales = {s.out.name for s in rows.scales}
        self.sums: list[Reduction] = [*rows.scatters, *(s for s in rows.reduces if s not in chunked)]
        self.leaving = _sums_of_products(rows, self.sums)
        self.scattered: dict[Reduction, ScatteredRows] = {}
        # By the name of a gathered tensor: rows for which the caller's stream has not waited yet.
        self.arriving: dict[str, SentRows] = {}
        self.workers = 0

    def add(self, s: Statement) -> None:
        """Append one statement of the fusion to the host program, in its lowered form."""
        if isinstance(s, AllGather) and s.out.name in self.scales:
            send_scales(self.host, s)
        elif result_of(s).name in self.later:
            self.host.destination(result_of(s))
        elif isinstance(s, AllReduce) and s in self.chunked:
            chunks = Chunks(self.host, s, self.steps.chunks_of(s), self.mover.streams, self.chunked[s])
            self.workers = max(self.workers, chunks.build())
        elif isinstance(s, AllGather) and s in self.rows.moves:
            self.gather(s)
        elif isinstance(s, Reduction) and (s in self.rows.moves or s in self.rows.reduces):
            scatter = self.scattered.get(s) or self.scatter(s)
            scatter.send()
            scatter.receive()
            self.workers = max(self.workers, scatter.transfers.workers)
        else:
            self.compute(s)

    def gather(self, s: AllGather) -> None:
        """Append the copies that send the rows of an allgather.

        The first statement that reads the rows will wait for them.
        """
        sent_rows = (SentColumns if by_columns(s) else SentRows)(self.host, s, self.mover, self.scales)
        body = self.host.program.body
        behind = [each for each in self.sums if each in body[body.index(s) :]]
        sent_rows.joined_later = any((each.mesh, each.over) == (s.mesh, s.over) for each in behind)
        self.arriving[s.out.name] = sent_rows
        self.workers = max(self.workers, sent_rows.workers)

    def scatter(self, s: Reduction, product: Contraction | None = None) -> ScatteredRows:
        """Return the builder of a sum over ranks.

        `product` is the product that makes the rows, if copies may begin while this product runs.
        """
        return ScatteredRows(self.host, s, self.mover, self.pieces, self.steps, product)

    def compute(self, s: Statement) -> None:
        """Append a computation or a view to the host program.

        If it reads gathered rows, it waits for them. If its result has rows that are summed up over ranks, it sets the
        flags that the copies of these rows wait for.
        """
        scatter = None
        if isinstance(s, Contraction) and (scatter_of := self.leaving.get(s.out.name)) is not None:
            self.host.destination(s.out)
            scatter = self.scattered[scatter_of] = self.scatter(scatter_of, s)
        needed = [self.arriving.pop(v.name) for v in operands_of(s) if v.name in self.arriving]
        if len(needed) == 1 and isinstance(s, ByBlocks) and waits_for_rows(s, needed[0].gather):
            needed[0].multiply(s, scatter)
            return
        for each in needed:
            each.wait()
        if scatter is not None:
            self.host.add(scatter.raising(s.rename(self.host.values)))
        else:
            self.host.add_unsliced(s)

    def finished(self) -> Program:
        """Return the host program."""
        for each in self.arriving.values():  # rows that are an output and have no other user
            each.wait()
        return self.host.finished(self.workers)


def indexed(program: Program) -> Program:
    """Replace grouped matmuls of permuted rows by `grouped_matmul ... rows`, if the rows are gathered.

    Such a matmul can wait for the gathered rows, because it reads them itself. Permuted rows that nothing else reads
    are not computed.
    """
    gathers = {s.out.name: s for s in program.body if isinstance(s, AllGather)}
    permuted = {s.out.name: s for s in program.body if isinstance(s, PermuteRows) and s.x.name in gathers}
    body = list[Statement]()
    for s in program.body:
        new = _by_index(s, permuted) if isinstance(s, GroupedMatmul) else None
        body.append(s if new is None or not waits_for_rows(new, gathers[new.x.name]) else new)
    read = {v.name for s in body for v in operands_of(s)} | {v.name for v in program.outputs}
    return program.with_body(s for s in body if not (result_of(s).name in permuted and result_of(s).name not in read))


def _by_index(s: GroupedMatmul, permuted: Mapping[str, PermuteRows]) -> GroupedMatmul | None:
    """Return a grouped matmul that reads the rows by an index; None if not all its rows are permuted by one index."""
    rows = permuted.get(s.x.name)
    if s.index is not None or rows is None:
        return None
    if s.scale_x is None:
        return replace(s, x=rows.x, index=rows.index)
    scales = permuted.get(s.scale_x.name)
    alike = scales is not None and scales.index == rows.index
    return replace(s, x=rows.x, index=rows.index, scale_x=scales.x) if scales is not None and alike else None


def added_onto(program: Program) -> tuple[Program, dict[str, Value]]:
    """Replace each addition of a product and another partial sum by `matmul ... plus`.

    Then the product is added to the other partial sum in place. So a single kernel finishes the rows, and can set their
    flags. Return the new program, and a map: the name of each such partial sum is mapped to the result that takes over
    its memory.
    """
    makers, users, names = {result_of(s).name: s for s in program.body}, users_of(program), Names.of(program)
    body, onto = [*program.body], dict[str, Value]()
    for s in program.body:
        if not isinstance(s, Add) or (pair := _added(s, makers, users, {v.name for v in program.outputs})) is None:
            continue
        product, other = pair
        (right, contracted), views = product.right_side, list[Statement]()
        if contracted:
            view = Value(names.fresh(f"{right.name}_t"), right.tensor.host().with_axes(right.tensor.host().axes[::-1]))
            views, right = [Permute(right, view, (1, 0), span=product.span)], view
        adding = Matmul(out=s.out, a=product.a, b=right, addend=other, span=product.span, note="added to the others")
        body = [new for old in body if old is not product for new in ((*views, adding) if old is s else (old,))]
        makers[s.out.name] = adding
        onto = {name: s.out if value == other else value for name, value in onto.items()} | {other.name: s.out}
    return program.with_body(body), onto


def _added(
    s: Add, makers: Mapping[str, Statement], users: Mapping[str, list[Statement]], outputs: Collection[str]
) -> tuple[Contraction, Value] | None:
    """Return the terms of an addition: first the product that can become `matmul ... plus`, then the other term.

    Both terms are partial sums. Return None if neither term can become `matmul ... plus`.

    Args:
        makers: for the name of each tensor, the statement that computes the tensor.
        users: for the name of each tensor, the statements that read the tensor.
        outputs: the names of the program's outputs.
    """
    alone = all(len(users[v.name]) == 1 and v.name not in outputs and v.type == s.out.type for v in s.operands)
    if not alone or not s.out.tensor.partial or not all(isinstance(makers.get(v.name), TensorOp) for v in s.operands):
        return None
    for last, other in ((s.y, s.x), (s.x, s.y)):
        product = makers[last.name]
        if not isinstance(product, Matmul | Linear) or len(product.operands) > 2:
            continue
        if not isinstance(makers.get(seen_from(product.a, makers).name), AllGather):
            return product, other
    return None


def _in_chunks(s: AllReduce, program: Program) -> bool:
    """Return True if an allreduce in two steps runs in chunks.

    Its chunks must be contiguous. It does not run in chunks if a matmul can wait for the gathered rows, or if the
    product that makes the rows itself waits for gathered rows.
    """
    readers = [user for rows in _finished(s, program) for user in program.body if reads_rows(user, rows)]
    maker = maker_of_rows(program, s)
    waits = isinstance(maker, Contraction) and any(
        isinstance(other, AllGather) and other.out in operands_of(maker) for other in program.body
    )
    return fits_chunks(s) and not readers and not waits


def _finished(s: AllReduce, program: Program) -> Iterator[Value]:
    """Yield the result of an allreduce, and the results of the elementwise statements and norms that follow it.

    The walk ends at the first result that is an output, or that has more than one reader.
    """
    rows = s.out
    yield rows
    while rows not in program.outputs and len(after := users(program, rows)) == 1:
        if not isinstance(after[0], (Add, Unary, RmsNorm)) or after[0].out.tensor.shape != rows.tensor.shape:
            return
        rows = after[0].out
        yield rows


def product_in_chunks(s: AllReduce, program: Program, chunks: int) -> Contraction | None:
    """Return the product that makes the rows of an allreduce, if the product can be computed in chunks; else None.

    The allreduce must be the only reader of the product's result.
    """
    maker, axis = next((other for other in program.body if result_of(other) == s.x), None), rows_axis(s)
    if axis is None or s.x in program.outputs or len(users(program, s.x)) > 1 or not isinstance(maker, Contraction):
        return None
    if isinstance(maker, Matmul) and maker.addend is not None:
        return None
    place = rows_in(chunks, axis)
    return None if why_not(maker, place, operand_places(maker, place)) else maker


def _sums_of_products(rows: RowCollectives, sums: Iterable[Reduction]) -> dict[str, Reduction]:
    """Return a map from the name of each product's result to the first collective that sums up its rows."""
    sum_of: dict[str, Reduction] = {}
    for scatter in sums:
        if (product := product_of_rows(rows.program, scatter)) is not None:
            sum_of.setdefault(product.out.name, scatter)
    return sum_of


def _in_blocks(s: RowCollective) -> bool:
    """Return True if the rows of a collective are a sequence of equal blocks, each with a piece of every rank's shard.

    If the rows are summed up, the number of blocks must be an integer, not a symbol.
    """
    if isinstance(s, AllGather) and by_columns(s):  # these are sent in slices of rows
        return True
    axes = shard_of(s).tensor.host().axes
    outside = [block_axes(s)[0]] if _needs_block_axes(s) else [axes[j] for j in long_axes(s)]
    known = isinstance(s, AllGather) or all(axis.extent.value is not None for axis in outside)
    return known and all(len(axis.factors) == 1 for axis in outside)


def _needs_block_axes(s: RowCollective) -> bool:
    return not by_columns(s) and (shard_in_pieces(s) or len(long_axes(s)) > 1)


def _matmuls_first(rows: RowCollectives) -> Program:
    """Return the program with its statements reordered: if possible, a matmul is the first reader of gathered rows.

    A matmul can wait for the rows block by block.
    """
    program = rows.program
    for gather in rows.gathers:
        matmul, body = first_matmul(program, gather), program.body
        if matmul is None:  # no matmul reads the rows
            continue
        start, end = body.index(gather) + 1, body.index(matmul)
        needed = {v.name for v in matmul.values(Codec.READ)}
        for s in reversed(body[start:end]):
            needed |= {v.name for v in operands_of(s)} if result_of(s).name in needed else set()
        before = [s for s in body[start:end] if result_of(s).name in needed]
        after = [s for s in body[start:end] if result_of(s).name not in needed]
        program = program.with_body([*body[:start], *before, matmul, *after, *body[end + 1 :]])
    return program
