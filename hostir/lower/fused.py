"""Passes `fused` and `push`: each rank sends blocks of rows to all ranks, and one kernel takes each as it arrives.

For an allgather, a block is one rank's shard, and a matmul waits for the blocks. (If the matmul sums over the gathered
axis, a block is one rank's part of a slice of the rows.) For a reduce_scatter, the blocks are the rows that a matmul
makes for each other rank, and a sum waits for the blocks of all ranks. In `fused` the matmul sets a flag after each
block, so copies begin while it runs; in `push` they begin when it has ended. An allreduce is either such a sum of all
rows, or takes both steps: `hostir/lower/allreduces.py` decides.

The schedule for an allgather follows kernels that wait for rows of a gathered operand inside the matmul: FLUX (Chang et
al., 2024), and the all-gather matmuls of Triton-distributed (Zheng et al., 2025). The schedule for a reduce_scatter
follows the reduce-scatter by copy engines in Triton-distributed: a matmul counts the tiles of each block, copies wait
for the count, and a separate kernel reduces. The two passes differ in who moves the bytes:

- in `fused`, copy engines move them, which costs the matmul no SMs;
- in `push`, a few SMs of the sending rank move them, in one kernel before the kernel that waits. This is for few rows:
  a kernel writes to peers and sets flags in less time than copy engines take to start. The waiting kernel starts while
  the first one copies. On CUDA with Triton's kernels, a product of few rows stores them to the peers itself
  (`hostir.machines.pushes.PushedProduct`). Low-latency collectives also store to peers from kernels: NCCL's LL
  protocols, and the one-shot kernels of TensorRT-LLM and of torch's symmetric memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hostir.ir.comm_ops import AllGather, AllReduce, ReduceScatter
from hostir.ir.host_ops import Chunk, For, SetStream
from hostir.ir.onesided_ops import Signal
from hostir.ir.op import Bin, Codec, Expr, Lit, Ref, Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.tensor_ops import Add, Contraction, DenseCopy, Linear, Matmul, RmsNorm, TensorOp, Unary
from hostir.ir.view_ops import Permute, Shard, ViewStatement
from hostir.lower import Pass
from hostir.lower.allreduces import AllReduceSteps, fits_chunks, rows_axis
from hostir.lower.chunks import Chunks, rows_in
from hostir.lower.columns import columns_as_rows
from hostir.lower.host import Host
from hostir.lower.pipeline import NOT_OVERLAPPED
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
    piece_axis,
    product_of_rows,
    reads_rows,
    row_slices,
    seen_from,
    shard_in_pieces,
    shard_of,
    users,
    wanted_otherwise,
)
from hostir.lower.scales import SMS, send_scales
from hostir.lower.scatters import OneStep, ScatteredBlocks, add_view, first_done, one_of
from hostir.lower.slices import operand_places, why_not
from hostir.lower.transfers import ARRIVED, COPY_STREAM, SIGNAL_STREAM, Blocks, Mover, Transfers, Turns

MIN_PIECE_ROWS = 256  # two tiles


@dataclass(frozen=True)
class Pieces:
    """The number of pieces that the rows for another rank are cut into, so that copies begin early.

    More than two gain nothing: every copy takes time to start, and to signal when it has ended.
    """

    most: int = 2
    min_bytes: int = 8 << 20

    def of(self, s: ReduceScatter) -> int:
        """Return the number of pieces for a reduce_scatter: the most that are large enough; 1 if sizes are unknown."""
        shard = s.out.tensor
        extent, columns = shard.local_shape[piece_axis(s)].value, shard.local_shape[-1].value
        rows = product(shard.local_shape[:-1]).value
        if extent is None or columns is None or rows is None:
            return 1
        size = rows * columns * shard.dtype.bytes
        fits = (n for n in range(self.most, 1, -1) if extent % n == 0 and rows >= n * MIN_PIECE_ROWS)
        return next((n for n in fits if size >= n * self.min_bytes), 1)


# The passes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fused(Pass):
    """Replaces collectives of rows by copies to all peers and a kernel that waits for each block of rows."""

    name = "fused"
    streams: int = 4
    pieces: Pieces = Pieces()
    steps: AllReduceSteps = field(default_factory=AllReduceSteps)

    def run(self, program: Program) -> Program:
        return sent(program, self.name, Mover(streams=self.streams), self.pieces, self.steps)


@dataclass(frozen=True)
class Push(Pass):
    """Replaces collectives of rows by a kernel that copies to all ranks and a kernel that starts while it runs."""

    name = "push"
    steps: AllReduceSteps = field(default_factory=AllReduceSteps)

    def run(self, program: Program) -> Program:
        return sent(program, self.name, Mover(sms=SMS), Pieces(), self.steps)


def sent(program: Program, strategy: str, mover: Mover, pieces: Pieces, steps: AllReduceSteps) -> Program:
    """Return the host program in which each rank sends its blocks of rows to the others by `mover`."""

    def two(s: AllReduce) -> bool:
        return not steps.one(s, unknown=mover.sms > 0)

    def as_collectives(s: AllReduce) -> bool:
        return two(s) and (mover.sms > 0 or not _in_chunks(s, program))

    reason = "the rows of a rank lie over several axes of the mesh, and a shard in no equal blocks of them"
    program, onto = added_onto(columns_as_rows(program))
    rows = (
        RowCollectives.of(program, strategy, as_collectives)
        .only(_in_blocks, reason)
        .noted(strategy)
        .with_block_axes(_needs_block_axes)
        .with_scales_first()
    )
    ordered = _matmuls_first(rows)
    chunked = {s: _product_in_chunks(s, ordered, steps.chunks_of(s)) for s in rows.reduces if two(s)}
    host = Host(ordered, rows.ordered(ordered, chunked))
    host.apart |= {s.out.name for s in rows.reduces}
    later = {s.out.name for s in chunked.values() if s is not None}  # results of products that are computed in chunks
    arriving: dict[str, SentRows] = {}  # by the gathered tensor: rows that the caller's stream has not waited for
    leaving = _sums_of_products(rows, [*rows.scatters, *(s for s in rows.reduces if s not in chunked)])
    scattered: dict[Reduction, ScatteredRows] = {}
    workers = 0
    scales = {s.out.name for s in rows.scales}
    sums = [s for s in (*rows.scatters, *rows.reduces) if s not in chunked]
    for n, s in enumerate(host.program.body):
        if result_of(s).name in onto:
            host.values[result_of(s).name] = host.destination(onto[result_of(s).name])
        if isinstance(s, AllGather) and s.out.name in scales:
            send_scales(host, s)
            continue
        if result_of(s).name in later:
            host.destination(result_of(s))
            continue
        if isinstance(s, AllReduce) and s in chunked:
            chunks = Chunks(host, s, steps.chunks_of(s), mover.streams, chunked[s])
            workers = max(workers, chunks.build())
            continue
        if isinstance(s, AllGather) and s in rows.moves:
            arriving[s.out.name] = sent_rows = (SentColumns if by_columns(s) else SentRows)(host, s, mover, scales)
            behind = [each for each in sums if each in host.program.body[n:]]
            sent_rows.joined_later = any((each.mesh, each.over) == (s.mesh, s.over) for each in behind)
            workers = max(workers, sent_rows.workers)
            continue
        if isinstance(s, Reduction) and (s in rows.moves or s in rows.reduces):
            scatter = scattered.get(s) or ScatteredRows(host, s, mover, pieces, steps)
            scatter.send()
            scatter.receive()
            workers = max(workers, scatter.transfers.workers)
            continue
        scatter_of = leaving.get(result_of(s).name)
        if isinstance(s, Contraction) and scatter_of is not None:
            host.destination(s.out)
            scattered[scatter_of] = ScatteredRows(host, scatter_of, mover, pieces, steps, s)
        needed = [arriving.pop(v.name) for v in operands_of(s) if v.name in arriving]
        if len(needed) == 1 and isinstance(s, Contraction) and reads_rows(s, needed[0].gather.out):
            needed[0].multiply(s, scattered.get(scatter_of) if scatter_of else None)
            continue
        for each in needed:
            each.wait()
        if isinstance(s, Contraction) and scatter_of is not None:
            host.add(scattered[scatter_of].raising(s.rename(host.values)))
            continue
        host.add_unsliced(s)
    for each in arriving.values():  # rows that are an output and have no other user
        each.wait()
    return host.finished(workers)


def added_onto(program: Program) -> tuple[Program, dict[str, Value]]:
    """Make the last product of a sum of partial sums add to the other terms: then one product makes the sum's rows.

    Also return a map from each tensor that a product adds to (by name) to the sum that shares its memory.
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
    """Return the product that can be the last term of a sum of partial sums, and the other term.

    None if no term can.
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


def in_one_step(host: Host, s: AllReduce) -> int:
    """Add an allreduce in one step by copy engines; return the number of worker streams that it uses."""
    reduced = ScatteredRows(host, s, Mover(streams=1), Pieces(), AllReduceSteps(blocks=1))
    reduced.send()
    reduced.receive()
    return reduced.transfers.workers


def _in_chunks(s: AllReduce, program: Program) -> bool:
    """Return True if an allreduce in two steps runs in chunks: no matmul can wait for its gathered rows."""
    readers = [user for rows in _finished(s, program) for user in program.body if reads_rows(user, rows)]
    maker = maker_of_rows(program, s)
    waits = isinstance(maker, Contraction) and any(
        isinstance(other, AllGather) and other.out in operands_of(maker) for other in program.body
    )
    return fits_chunks(s) and not readers and not waits


def _finished(s: AllReduce, program: Program) -> Iterator[Value]:
    """Yield the sum, then each result of elementwise statements and norms that are its only users in turn."""
    rows = s.out
    yield rows
    while rows not in program.outputs and len(after := users(program, rows)) == 1:
        if not isinstance(after[0], (Add, Unary, RmsNorm)) or after[0].out.tensor.shape != rows.tensor.shape:
            return
        rows = after[0].out
        yield rows


def _product_in_chunks(s: AllReduce, program: Program, chunks: int) -> Contraction | None:
    """Return the product whose result only an allreduce reads, if it can be computed in chunks; else None."""
    maker, axis = next((other for other in program.body if result_of(other) == s.x), None), rows_axis(s)
    if axis is None or s.x in program.outputs or len(users(program, s.x)) > 1 or not isinstance(maker, Contraction):
        return None
    if isinstance(maker, Matmul) and maker.addend is not None:
        return None
    place = rows_in(chunks, axis)
    return None if why_not(maker, place, operand_places(maker, place)) else maker


def _sums_of_products(rows: RowCollectives, sums: Iterable[Reduction]) -> dict[str, Reduction]:
    """Map the results of products to the collectives that sum up their rows; if there are several, to the first."""
    sum_of: dict[str, Reduction] = {}
    for scatter in sums:
        if (product := product_of_rows(rows.program, scatter)) is not None:
            sum_of.setdefault(product.out.name, scatter)
    return sum_of


def _in_blocks(s: RowCollective) -> bool:
    """Return True if the rows are a sequence of equal blocks, each with one piece of every rank's shard.

    If the rows are summed up, the number of blocks must be known.
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
    """Reorder statements so that the first user of gathered rows is a matmul, which can wait block by block."""
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


# One allgather --------------------------------------------------------------------------------------------------------


class SentRows:
    """Builds one allgather: the transfers of the shards to all ranks, and the matmul that waits for their blocks.

    Fields:
        joined_later: True if a later sum over the same ranks issues copies after these, and the caller's stream waits
            for them. (A sum over other ranks does not count: it could hold the SMs that signals of these copies need.)
    """

    joined_later = False

    def __init__(self, host: Host, gather: AllGather, mover: Mover, scales: Collection[str] = ()) -> None:
        self.host, self.gather, self.mover, self.scales = host, gather, mover, scales
        self.axis = next(iter(long_axes(gather)), None)  # the axis of blocks, if a rank's shard is several blocks
        self.team = host.team(gather)
        self.multiplied = first_matmul(host.program, gather) is not None
        self.x = x = host.packed(host.values[gather.x.name], gather)
        # If other statements than matmuls read the rows, they get a copy: the next call overwrites the buffer.
        self.unshared = host.destination(gather.out) if wanted_otherwise(host.program, gather.out) else None
        name = host.names.fresh(f"{gather.out.name}_shared") if self.unshared else gather.out.name
        buffer = Value(name, gather.out.tensor.host(), gather.span)
        host.values.setdefault(gather.out.name, buffer)
        count = self.count()
        self.transfers = Transfers(host, gather, buffer, flags=count * self.team.ranks)
        self.blocks = self.blocks_of(x, buffer, count)
        self.send()
        self.workers = self.transfers.workers

    def count(self) -> Size:
        """Return the number of blocks of a shard."""
        return ONE if self.axis is None else self.gather.x.tensor.local_shape[self.axis]

    def send(self) -> None:
        """Send the shard to all ranks: first to the previous rank, then to the rank before it, and so on.

        So blocks arrive at a rank in the order of their source ranks, beginning after the rank itself. Copy engines
        send the shard to the other ranks. It is copied within the rank only if the matmul cannot read it in place.
        """
        index, ranks, transfers = self.host.index("i"), self.team.ranks, self.transfers
        note = "to the rank that multiplies these rows next" if self.multiplied else ""
        if self.mover.sms:
            turns = Turns(index, Size(ranks), self.team.peer(Bin("-", Lit(ranks), index)))
            self.host.body += transfers.once(self.blocks)
            transfers.send(self.blocks, turns, self.mover, f"to itself, then {note or 'to its peers'}")
            return
        transfers.fork()
        self.host.body += transfers.once(self.blocks)
        if self.copies_own:
            # A copy within a GPU needs SMs, so it must come before the matmul that holds them.
            self.host.body += [SetStream(self.host.user), *self.copy_own(), SetStream(COPY_STREAM)]
        turns = Turns(index, Size(ranks - 1), self.team.peer(Bin("-", Lit(ranks - 1), index)))
        transfers.send(self.blocks, turns, self.mover, note)

    def blocks_of(self, x: Value, buffer: Value, count: Size) -> Blocks:
        """Return the blocks of this rank's shard: a single block, or one for each index of the axis of blocks."""
        views: list[ViewStatement] = []
        index: Ref | None = None
        flag: Expr = self.team.rank
        if self.axis is not None:
            index = self.host.index("s")
            flag = Bin("+", Bin("*", index, Lit(self.team.ranks)), self.team.rank)
            x, buffer = (one_of(self.host, value, self.axis, index, count, views) for value in (x, buffer))
        mine = Value(self.host.names.fresh("mine"), x.tensor, self.gather.span)
        return Blocks(x, mine, (*views, Shard(buffer, mine, span=self.gather.span)), flag, index, count)

    def copy_own(self) -> list[Statement]:
        """Return the copy of the local rows to the buffer, and the signals that they have arrived."""
        s, signal = self.gather, self.transfers.signal(self.blocks, self.team.rank)
        mine = Value(self.host.names.fresh("mine"), self.x.tensor, s.span)
        note = "the matmul begins with these rows" if self.multiplied else ""
        put = self.transfers.put(self.x, mine, self.team.rank, note=note)
        index, count = self.blocks.index, self.blocks.count
        signals = signal if index is None else For(index.value, count, (signal,), span=s.span)
        return [Shard(self.transfers.buffer, mine, span=s.span), put, signals]

    @property
    def copies_own(self) -> bool:
        """True if the local rows are copied to the buffer, too.

        The copy is not needed if they are one block, a single matmul reads them, and copy engines move the other rows:
        the matmul then reads them in place. The matmul must not read another gathered tensor, except scales of the
        rows, because it would wait for all of that tensor before it starts.
        """
        users = self.host.users.get(self.gather.out.name, [])
        if self.mover.sms or self.axis is not None or self.unshared is not None or len(users) != 1:
            return True
        operands = {v.name for v in users[0].values(Codec.READ)} - {self.gather.out.name, *self.scales}
        return any(isinstance(s, AllGather) and s.out.name in operands for s in self.host.program.body)

    def multiply(self, s: Contraction, scatter: ScatteredRows | None) -> None:
        """Add the matmul that waits for the blocks.

        After it, all copies have ended, and other statements may read the rows.
        """
        self.host.destination(s.out)
        on_buffers = s.rename(self.host.values)
        waiting = replace(
            on_buffers,
            a=self.transfers.buffer,
            ready=self.transfers.flags,
            epoch=ARRIVED,
            first=self.team.rank,
            own=None if self.copies_own else self.blocks.source,
            note="own rows first, each other block when it is there",
        )
        self.host.body.append(waiting if scatter is None else scatter.raising(waiting))
        self.finish()

    def wait(self) -> None:
        """Make the caller's stream wait for all blocks, because a statement other than a matmul needs them first."""
        index, count = self.host.index("i"), self.blocks.count * self.team.ranks
        self.host.body.append(For(index.value, count, (self.transfers.wait(index),)))
        self.finish()

    def finish(self) -> None:
        """Make the caller's stream wait for this rank's copies; copy the rows out of the buffer if needed."""
        if not self.joined_later:
            self.transfers.join()
        if self.unshared:
            note = f"copy: {self.unshared} is wanted whole"
            self.host.body.append(
                DenseCopy(out=self.unshared, x=self.transfers.buffer, span=self.gather.span, note=note)
            )


class SentColumns(SentRows):
    """Builds one allgather of the axis that matmuls sum over: ranks send their parts of slices of the rows.

    The matmul waits for one flag for each slice. A worker stream sets it when the parts of all peers have arrived.
    """

    def __init__(self, host: Host, gather: AllGather, mover: Mover, scales: Collection[str] = ()) -> None:
        super().__init__(host, gather, replace(mover, streams=1), scales)  # the other worker stream sets the flags
        self.workers = 2

    def count(self) -> Size:
        """Return the number of slices."""
        return Size(row_slices(self.gather))

    def blocks_of(self, x: Value, buffer: Value, count: Size) -> Blocks:
        """Return this rank's parts of the slices."""
        views: list[ViewStatement] = []
        index = self.host.index("s")
        mine = Value(self.host.names.fresh("mine"), x.tensor, self.gather.span)
        self.local_part = Shard(buffer, mine, span=self.gather.span)

        def slice(of: Value, name: str) -> Value:
            out = Value(self.host.names.fresh(name), of.type, self.gather.span)
            return add_view(Chunk(of, out, index, count, 0, span=self.gather.span), views)

        source, target = slice(x, "part"), slice(mine, "place")
        return Blocks(source, target, tuple(views), self.flag(index, self.team.rank), index, count)

    def flag(self, slice: Expr, rank: Expr) -> Expr:
        """Return the index of the flag that tells that a rank's part of a slice has arrived."""
        return Bin("+", Bin("*", slice, Lit(self.team.ranks)), rank)

    def copy_own(self) -> list[Statement]:
        """Return the copy of the local parts to the buffer; the matmul comes after it."""
        return [self.local_part, self.transfers.put(self.x, self.local_part.out, self.team.rank)]

    @property
    def copies_own(self) -> bool:
        return True

    def multiply(self, s: Contraction, scatter: ScatteredRows | None) -> None:
        """Add the matmul that waits for the slices."""
        host, flags = self.host, self.transfers.row(f"{self.gather.out.name}_whole", self.blocks.count)
        index = host.index("s")
        raised = Signal(flags, index, ARRIVED, self.team.rank, self.team.over, span=self.gather.span)
        host.body += [SetStream(SIGNAL_STREAM), For(index.value, self.blocks.count, (self.arrivals(index), raised))]
        host.body.append(SetStream(host.user))
        host.destination(s.out)
        on_buffers = s.rename(host.values)
        note = "each slice of the rows when all parts of it are there"
        waiting = replace(on_buffers, a=self.transfers.buffer, ready=flags, epoch=ARRIVED, note=note)
        host.body.append(waiting if scatter is None else scatter.raising(waiting))
        self.finish()

    def wait(self) -> None:
        """Make the caller's stream wait for all parts of all slices."""
        index = self.host.index("s")
        self.host.body.append(For(index.value, self.blocks.count, (self.arrivals(index),)))
        self.finish()

    def arrivals(self, slice: Ref) -> For:
        """Return the waits for the peers' parts of a slice."""
        index = self.host.index("i")
        peer = self.team.peer(Bin("+", index, Lit(1)))
        return For(index.value, Size(self.team.ranks - 1), (self.transfers.wait(self.flag(slice, peer)),))


# One reduce_scatter, or an allreduce in one step ----------------------------------------------------------------------


class ScatteredRows:
    """Builds one sum over ranks. If a product makes the rows, copies begin while it runs.

    With copy engines, the product sets a flag after each block. It ends with a block of its own rank. If it waits for
    gathered rows, it must begin with rows that have arrived; then their order decides, and blocks are sent in that
    order.
    """

    def __init__(
        self,
        host: Host,
        s: Reduction,
        mover: Mover,
        pieces: Pieces,
        steps: AllReduceSteps,
        product: Contraction | None = None,
    ) -> None:
        # One stream, so that the stream itself signals: a signal kernel would get no SM while the product runs.
        self.host, self.scatter, self.mover, self.product = host, s, replace(mover, streams=1), product
        rows = host.values[s.x.name if product is None else product.out.name]
        early = product is not None and not mover.sms
        if isinstance(s, ReduceScatter):
            axis = next(iter(long_axes(s)), None)
            self.blocks = ScatteredBlocks(host, s, rows, axis, pieces.of(s) if early and axis is None else 1)
        else:
            self.blocks = OneStep(host, s, rows, steps.blocks_of(s) if early else 1)
            early = early and self.blocks.parts > 1  # else copies begin after the product
        self.transfers, self.team = self.blocks.transfers, self.blocks.team
        self.done: Value | None = None
        self.first: Expr | None = None  # the block that is ready first, if the product itself waits for rows
        if early:
            self.done = self.transfers.row(f"{rows.name}_done", Size(self.blocks.parts))
            if not (self.team.past_last_call and host.forked):
                self.transfers.fork()
                host.body += [*self.transfers.reuse_barrier(), SetStream(host.user)]

    def raising(self, s: Statement) -> Statement:
        """Return the matmul with a flag set after each block of rows, if copies wait for the blocks."""
        if self.done is None:
            return s
        assert isinstance(s, Contraction)
        last = ", its own come last" if self.blocks.axis is None and s.ready is None else ""
        note = f"the rows for each rank are sent when they are done{last}"
        if isinstance(self.scatter, AllReduce):
            note = "each block is sent to all ranks when it is done"
        raising = replace(s, done=self.done, raised=ARRIVED, note=f"{s.note}; {note}" if s.note else note)
        if s.ready is None:
            return replace(raising, first=self.blocks.first)
        waits = s.ready.tensor.shape[0].value
        self.first = None if waits is None else first_done(s.first, waits, self.blocks.parts)
        return raising

    def send(self) -> None:
        """Send each rank its rows: first to the next rank, and so on up; or in the order in which they are computed."""
        host, s, blocks = self.host, self.scatter, self.blocks
        full = host.packed(host.values[s.x.name], s)
        turns, sent = blocks.in_turns(full, self.done, self.first)
        if self.done is not None:
            host.body.append(SetStream(COPY_STREAM))
        elif not self.mover.sms:
            self.transfers.fork()
        host.body += self.transfers.once(sent)
        note = "to all, who sum them up" if isinstance(s, AllReduce) else "to the rank that sums up these rows"
        self.transfers.send(sent, turns, self.mover, note)

    def receive(self) -> None:
        """Add the sum of the blocks that all ranks have sent.

        The sum takes each block when it has arrived. If copy engines send rows that no product makes, the sum starts
        only when all blocks have arrived: it holds no SM while bytes travel.
        """
        if self.product is not None or self.mover.sms:
            self.blocks.add_up()
        else:
            maker = maker_of_rows(self.host.program, self.scatter)
            why = f"{NOT_OVERLAPPED}: the {maker.keyword()} that makes the rows raises no flags for it" if maker else ""
            self.blocks.add_up(why, polls=False)
        self.transfers.join()
