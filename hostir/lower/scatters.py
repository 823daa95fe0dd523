"""Sums over ranks in one-sided form: ranks put their addends into each other's buffers, and then add them up.

Every rank has a symmetric buffer with one slot for each rank. A slot has room for one shard. Rank `s` puts the rows for
rank `t` into slot `s` of the buffer of rank `t`. Each receiver adds up the slots in the order of the ranks. So a sum
has the same bits in every run, and is rounded once. If the kernel of the sum itself waits for arrivals, it reads the
local rows in place, without a copy to the buffer. The strategies `ring`, `fused` and `push` use this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hostir.ir.comm_ops import AllReduce, ReduceScatter
from hostir.ir.host_ops import AsPartial, Chunk, For, Select, SetStream
from hostir.ir.onesided_ops import WaitSignal
from hostir.ir.op import Bin, Expr, Lit, Ref, Statement, Value
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.tensor_ops import ACTIVATIONS, Add, Contraction, DenseCopy, Sum, Unary
from hostir.ir.types import Axis
from hostir.ir.view_ops import Permute, ViewStatement
from hostir.lower.allreduces import AllReduceSteps
from hostir.lower.host import Host, modulo
from hostir.lower.pipeline import NOT_OVERLAPPED
from hostir.lower.reshard import Reduction
from hostir.lower.rows import long_axes, maker_of_rows, piece_axis, shard_place
from hostir.lower.transfers import ARRIVED, COPY_STREAM, Blocks, Mover, Transfers, Turns

MIN_PIECE_ROWS = 256  # two tiles


@dataclass(frozen=True)
class Pieces:
    """Chooses the number of pieces into which the rows for another rank are cut.

    With several pieces, copies begin earlier. `most` is the largest number of pieces, and `min_bytes` is the smallest
    size of a piece. More than two pieces gain nothing, because each copy takes time to start and to signal its end.
    """

    most: int = 2
    min_bytes: int = 8 << 20

    def of(self, s: ReduceScatter) -> int:
        """Return the number of pieces for a reduce_scatter: the largest for which pieces are large enough.

        It is 1 if sizes are symbols.
        """
        shard = s.out.tensor
        extent, columns = shard.local_shape[piece_axis(s)].value, shard.local_shape[-1].value
        rows = product(shard.local_shape[:-1]).value
        if extent is None or columns is None or rows is None:
            return 1
        size = rows * columns * shard.dtype.bytes
        fits = (n for n in range(self.most, 1, -1) if extent % n == 0 and rows >= n * MIN_PIECE_ROWS)
        return next((n for n in fits if size >= n * self.min_bytes), 1)


class ScatteredBlocks:
    """The blocks of rows that ranks send in one reduce_scatter, and the sum of these blocks.

    Args:
        like: a tensor on the mesh.
        axis: an axis outside the scattered axis, or None if there is no such axis. The rows for one rank are sent in
            one block for each index of this axis.
        pieces: the number of blocks in which the rows for one rank are sent if `axis` is None.
    """

    def __init__(self, host: Host, s: Reduction, like: Value, axis: int | None, pieces: int = 1) -> None:
        self.host, self.scatter, self.axis, self.pieces = host, s, axis, pieces
        self.team = host.team(s, like)
        shard = s.out.tensor.host()
        self.count = ONE if axis is None else shard.local_shape[axis]
        assert self.count.value is not None
        self.each = self.count.value * pieces  # number of blocks for each rank
        room = shard.with_axes([Axis.of(self.team.ranks), *shard.axes])
        buffer = Value(host.names.fresh(f"{s.out.name}_sent"), room, s.span)
        self.transfers = Transfers(host, s, buffer, flags=Size(self.each * self.team.ranks))

    @property
    def parts(self) -> int:
        """The number of blocks in the rows for all ranks.

        Each block has a flag that is set when the block has been computed.
        """
        return self.each * self.team.ranks

    @property
    def first(self) -> Expr:
        """The block with which the product of all rows begins.

        With this choice, the product computes blocks in about the order in which they are sent. It computes blocks in
        memory order, and goes on with block 0 after the last block. It ends with a block of this rank, which is not
        sent.

        If the blocks for a rank are contiguous, or there are two ranks, the product begins with the first block for the
        next rank, because that block is sent first.

        Otherwise there is an axis outside the scattered axis. Each index of this axis is an outer block, with one block
        for each rank. Outer blocks are sent one after another. If the product began in the first outer block, with the
        block for the next rank, it would also end there, with blocks that are sent early. So it begins in the last
        outer block, directly after this rank's block, with blocks that are sent late.
        """
        ranks, blocks = self.team.ranks, self.each * self.team.ranks
        if self.axis is None or ranks == 2:
            return _times(self.team.peer(Lit(1)), self.pieces)
        return modulo(Bin("+", self.team.rank, Lit(blocks - ranks + 1)), blocks)

    def in_turns(self, full: Value, done: Value | None = None, first: Expr | None = None) -> tuple[Turns, Blocks]:
        """Return the order in which the blocks of `full` are sent, and the blocks.

        The first turn sends the block `first`, if it is for another rank. Otherwise it sends a block for the next rank.

        Args:
            full: the rows for all ranks.
            done: flags of this rank, one for each block of `full`. A flag is set when its block has been computed.
            first: the block that is computed first; None if it is a block for the next rank.
        """
        index, pieces, ranks = self.host.index("i"), self.pieces, self.team.ranks
        mine, sent = _times(self.team.rank, pieces), (ranks - 1) * pieces
        number: Expr = index
        if first is not None and self.axis is None and ranks > 2:
            begin = modulo(Bin("-", _plus(first, sent), mine), ranks * pieces)
            number = modulo(Bin("+", index, begin), sent)
        block = self.team.peer(Bin("+", number, Lit(1)))  # the number of the block in the rows for all ranks
        if pieces > 1:
            block = modulo(Bin("+", mine, Bin("+", number, Lit(pieces))), ranks * pieces)
        to = block if pieces == 1 else Bin("/", block, Lit(pieces))
        return Turns(index, Size(sent), to), self.blocks(full, block, done)

    def blocks(self, full: Value, block: Expr, done: Value | None = None) -> Blocks:
        """Return the views, the flag and the wait that are needed to send block number `block` of `full`.

        The wait is for the block's flag in `done`. A block has the rows for one rank, or a piece of these rows. If
        `axis` is not None, `block` is the number of a rank, and there is a block for each index of `axis`.
        """
        host, s, team, pieces = self.host, self.scatter, self.team, self.pieces
        assert isinstance(s, ReduceScatter)
        views: list[ViewStatement] = []
        in_turn: list[ViewStatement] = []
        k, index, flag, awaited = shard_place(s).axis, None, _times(team.rank, self.each), block
        slot = Select(self.transfers.buffer, self.named("slot"), team.rank, span=s.span)
        target, source = add_view(slot, views), full
        if self.axis is not None:
            index = host.index("s")
            source, target = (one_of(host, v, self.axis, index, self.count, views) for v in (full, target))
            k -= len(full.tensor.axes) - len(source.tensor.axes)
            flag, awaited = Bin("+", flag, index), Bin("+", Bin("*", index, Lit(team.ranks)), block)
        inside = piece_axis(s) if pieces > 1 else k
        place, count = (block, team.ranks * pieces) if inside == k else (Bin("/", block, Lit(pieces)), team.ranks)
        source = add_view(Chunk(source, self.named("block"), place, Size(count), k, span=s.span), in_turn)
        if pieces > 1:
            piece = modulo(block, pieces)
            flag = Bin("+", flag, piece)
            target = self.piece(target, "place", piece, inside, in_turn)
            source = source if inside == k else self.piece(source, "piece", piece, inside, in_turn)
        wait = None if done is None else WaitSignal(done, awaited, ARRIVED, span=s.span)
        return Blocks(source, target, tuple(views), flag, index, self.count, tuple(in_turn), wait)

    def add_up(self, note: str = "each block when all ranks have sent it", *, polls: bool = True) -> None:
        """Append to the host program the statement that sums up the blocks of all ranks.

        It includes the addition and the activation that follow the sum (see `epilogue`).

        Args:
            note: a comment for the statement.
            polls: True if the kernel of the sum waits for each block, and holds SMs meanwhile. False if the stream
                waits for all blocks before the kernel starts; the local rows are then copied to their slot of the
                buffer.
        """
        host, s, rank = self.host, self.scatter, self.team.rank
        views: list[ViewStatement] = []
        mine = self.mine(host.values[s.x.name], views)
        if not polls:
            slot = add_view(Select(self.transfers.buffer, self.named("slot"), rank, span=s.span), views)
            host.body += [*views, self.transfers.put(mine, slot, rank), self.wait_for_all()]
        result, addend, activation = epilogue(host, s.out)
        out = self.target(result)
        total = Sum(out, self.transfers.buffer, 0, addend=addend, activation=activation, span=s.span, note=note)
        if polls:
            host.body += views
            total = replace(total, ready=self.transfers.flags, epoch=ARRIVED, first=rank, own=mine)
        host.body.append(total)

    def wait_for_all(self) -> For:
        """Return the loop in which the current stream waits for the blocks of all other ranks."""
        index, others = self.host.index("i"), self.team.ranks - 1
        flag = modulo(Bin("+", _times(self.team.peer(Lit(1)), self.each), index), self.each * self.team.ranks)
        return For(index.value, Size(others * self.each), (self.transfers.wait(flag),), span=self.scatter.span)

    def mine(self, full: Value, views: list[ViewStatement]) -> Value:
        """Return a view of the rows in `full` that this rank sums up; append the view to `views`."""
        assert isinstance(self.scatter, ReduceScatter)
        place = shard_place(self.scatter)
        chunk = Chunk(full, self.named("mine"), self.team.rank, place.count, place.axis, span=self.scatter.span)
        return add_view(chunk, views)

    def target(self, result: Value) -> Value:
        """Return the tensor into which the sum is written.

        Usually this is the buffer of `result`. But if only a permuted copy of the sum is needed, it is a view of the
        memory of that copy, and the statement that makes the copy is left out.
        """
        host, turned = self.host, self.host.only_user(result)
        copy = host.only_user(turned.out) if isinstance(turned, Permute) else None
        last = len(result.tensor.axes) - 1
        if not isinstance(turned, Permute) or not isinstance(copy, DenseCopy) or turned.axes[last] != last:
            return host.destination(result)
        back = tuple(turned.axes.index(i) for i in range(last + 1))
        out = Value(host.names.fresh(result.name), result.tensor.host(), result.span)
        host.folded |= {turned.out.name, copy.out.name}
        host.body.append(Permute(host.destination(copy.out), out, back, span=turned.span))
        return out

    def piece(self, rows: Value, name: str, index: Expr, axis: int, views: list[ViewStatement]) -> Value:
        """Return a view of piece `index` of some rows; append the view to `views`."""
        return add_view(Chunk(rows, self.named(name), index, Size(self.pieces), axis, span=self.scatter.span), views)

    def named(self, name: str) -> Value:
        """Return a new value for the result of a view.

        Its type is only a placeholder: `add_view` sets the inferred type.
        """
        return Value(self.host.names.fresh(name), self.scatter.out.type, self.scatter.span)


class OneStep(ScatteredBlocks):
    """The blocks of an allreduce in one step: every rank sends all of its rows to all other ranks.

    The rows are sent in `pieces` blocks. Each block goes to all ranks before the next block is sent.
    """

    def __init__(self, host: Host, s: AllReduce, like: Value, pieces: int = 1) -> None:
        super().__init__(host, s, like, None, pieces)

    @property
    def parts(self) -> int:
        return self.pieces

    @property
    def first(self) -> Expr:
        return Lit(0)

    def in_turns(self, full: Value, done: Value | None = None, first: Expr | None = None) -> tuple[Turns, Blocks]:
        index, others = self.host.index("i"), self.team.ranks - 1
        if self.pieces == 1:
            return Turns(index, Size(others), self.team.peer(Bin("+", index, Lit(1)))), self.blocks(full, Lit(0), done)
        piece: Expr = index if others == 1 else Bin("/", index, Lit(others))
        if first is not None:
            piece = piece if first == Lit(0) else modulo(Bin("+", piece, first), self.pieces)
        to = Lit(1) if others == 1 else Bin("+", modulo(index, others), Lit(1))
        return Turns(index, Size(others * self.pieces), self.team.peer(to)), self.blocks(full, piece, done)

    def blocks(self, full: Value, block: Expr, done: Value | None = None) -> Blocks:
        """Return the views, the flag and the wait that are needed to send block number `block` of `full`."""
        views: list[ViewStatement] = []
        in_turn: list[ViewStatement] = []
        rank, span = self.team.rank, self.scatter.span
        source, target = full, add_view(Select(self.transfers.buffer, self.named("slot"), rank, span=span), views)
        flag: Expr = rank
        if self.pieces > 1:
            axis = next(k for k, size in enumerate(full.tensor.local_shape) if not size.is_one)
            source = self.piece(source, "block", block, axis, in_turn)
            target = self.piece(target, "place", block, axis, in_turn)
            flag = Bin("+", _times(rank, self.pieces), block)
        wait = None if done is None else WaitSignal(done, block, ARRIVED, span=span)
        return Blocks(source, target, tuple(views), flag, in_turn=tuple(in_turn), awaited=wait)

    def mine(self, full: Value, views: list[ViewStatement]) -> Value:
        return full


class ScatteredRows:
    """Builds one sum over ranks: the statements that send the rows, and the statement that adds them up.

    If a product makes the rows, and copy engines send them, copies begin while the product runs. For this, the product
    sets a flag after each block of rows, and computes the block of this rank last. But if the product itself waits for
    gathered rows, it must begin with the rows that arrive first. Then blocks are sent in the order in which they are
    computed.
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
        # With one stream, the stream itself signals. A kernel that signals would get no SM while the product runs.
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
        """Return the product `s`, or a changed product if copies wait for its blocks.

        The changed product sets a flag after each block of rows.
        """
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
        """Append the copies that send each rank its rows.

        The next rank gets its rows first, then the rank after it, and so on. If the product waits for gathered rows,
        blocks are sent in the order in which they are computed.
        """
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
        """Append to the host program the statement that sums up the blocks of all ranks.

        Usually its kernel waits for each block. There is one exception: copy engines send rows that no product makes.
        Then the kernel starts after all blocks have arrived. So it holds no SM while the blocks are copied.
        """
        if self.product is not None or self.mover.sms:
            self.blocks.add_up()
        else:
            maker = maker_of_rows(self.host.program, self.scatter)
            why = f"{NOT_OVERLAPPED}: the {maker.keyword()} that makes the rows raises no flags for it" if maker else ""
            self.blocks.add_up(why, polls=False)
        self.transfers.join()


def in_one_step(host: Host, s: AllReduce) -> int:
    """Append an allreduce in one step by copy engines; return the number of worker streams that it uses."""
    reduced = ScatteredRows(host, s, Mover(streams=1), Pieces(), AllReduceSteps(blocks=1))
    reduced.send()
    reduced.receive()
    return reduced.transfers.workers


def epilogue(host: Host, result: Value) -> tuple[Value, Value | None, str]:
    """Find an addition and an activation that directly follow a sum, so that the kernel of the sum can compute them.

    `result` is the result of the sum. Return the final result, the tensor to add (or None), and the name of the
    activation (or an empty string). The addition must be the only reader of the sum, and the activation must be the
    only reader of its operand. The tensor to add, such as a bias or a residual, must already be computed.
    """
    shape, addend, activation = result.tensor.shape, None, ""
    user = host.only_user(result)
    if isinstance(user, Add) and user.out.tensor.shape == shape:
        other = user.y if user.x == result else user.x
        if other != result and other.name in host.values:
            result, addend = user.out, host.values[other.name]
            host.folded.add(result.name)
            user = host.only_user(result)
    if isinstance(user, Unary) and user.keyword() in ACTIVATIONS:
        result, activation = user.out, user.keyword()
        host.folded.add(result.name)
    return result, addend, activation


def one_of(host: Host, value: Value, axis: int, index: Ref, count: Size, views: list[ViewStatement]) -> Value:
    """Return a view of block `index` of the `count` blocks of an axis; append the view to `views`."""
    name = Value(host.names.fresh(f"{value.name}_{index.value.name}"), value.type, value.span)
    if value.tensor.axes[axis].marks:
        return add_view(Chunk(value, name, index, count, axis, span=value.span), views)
    return add_view(Select(value, name, index, axis, span=value.span), views)


def add_view(view: Select | Chunk | AsPartial, views: list[ViewStatement]) -> Value:
    """Give the result of a view statement the inferred type; append the statement to `views`, and return its result."""
    views.append(replace(view, out=replace(view.out, type=view.infer())))
    return views[-1].out


def first_done(first: Expr, waits: int, parts: int) -> Expr:
    """Return the index of the block that is complete first in the result of a product.

    Args:
        first: the block of gathered rows with which the product begins.
        waits: the number of blocks of gathered rows that the product waits for.
        parts: the number of blocks of the result.
    """
    if first == Lit(0) or parts % waits == 0:
        return first if first == Lit(0) else _times(first, parts // waits)
    return modulo(Bin("/", Bin("+", _times(first, parts), Lit(waits - 1)), Lit(waits)), parts)


def _times(expr: Expr, count: int) -> Expr:
    return expr if count == 1 else Bin("*", expr, Lit(count))


def _plus(expr: Expr, count: int) -> Expr:
    return Lit(expr.value + count) if isinstance(expr, Lit) else Bin("+", expr, Lit(count))
