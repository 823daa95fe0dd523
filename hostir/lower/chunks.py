"""Allreduces in two steps, in chunks of rows: one chunk is gathered while the product of the next chunk runs."""

from __future__ import annotations

from dataclasses import replace

from hostir.ir.comm_ops import AllReduce
from hostir.ir.host_ops import AsPartial, Chunk, For, Select, SetStream, Synchronize, Wait
from hostir.ir.onesided_ops import If, Signal, WaitSignal
from hostir.ir.op import Bin, Expr, Lit, Ref, Statement, Value
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import Contraction, DenseCopy, Sum
from hostir.ir.types import Axis, Kind, TensorType
from hostir.ir.view_ops import ViewStatement
from hostir.lower.allreduces import rows_axis
from hostir.lower.host import Host
from hostir.lower.scatters import add_view, epilogue
from hostir.lower.slices import SlicePlace, operand_places
from hostir.lower.transfers import COPY_STREAM, SIGNAL_STREAM, Transfers

# More worker streams, if an allreduce between hosts completes the sums: of this allreduce, and of the sums.
BETWEEN, LOCAL = Lit(2), Lit(3)


class Chunks:
    """Builds an allreduce in chunks of rows.

    The product of a chunk has a block of rows for each rank, and sets a flag when it has computed a block. Copy engines
    then send the block to its rank, while the product of the next chunk runs. After that product, each rank sums up its
    block of the earlier chunk, and gets the sums of the other blocks from the other ranks.

    If the ranks are on several hosts, sums run on a stream of their own. It waits for the copies, and the products of
    later chunks need not. A sum is then sent to other hosts as early as possible.

    Args:
        count: the number of chunks.
        streams: the maximum number of worker streams. Chunks between hosts use four streams.
        product: the product that makes the rows, if it is computed in chunks, too; else None.
        hosts: a mesh axis over which the sums are partial sums, too, because the ranks are on several hosts. An
            allreduce between hosts completes the sums of a chunk before other ranks get them. Empty if all ranks are on
            one host.
    """

    def __init__(
        self,
        host: Host,
        s: AllReduce,
        count: int,
        streams: int,
        product: Contraction | None,
        hosts: str = "",
    ) -> None:
        self.host, self.reduce, self.count, self.product, self.hosts = host, s, count, product, hosts
        axis = rows_axis(s)
        assert axis is not None
        self.axis = axis
        self.gathering = SIGNAL_STREAM if streams > 1 or hosts else COPY_STREAM
        self.workers = 4 if hosts else 1 + (streams > 1)
        part = host.destination(product.out) if product else host.values[s.x.name]
        self.team = host.team(s, part)
        # An epilogue can follow only a complete sum.
        self.result, self.addend, self.activation = (s.out, None, "") if hosts else epilogue(host, s.out)
        ranks, type = self.team.ranks, s.out.tensor.host()
        block = Axis.of(type.axes[axis].extent / Size(count * ranks))
        share = type.with_axes(block if j == axis else a for j, a in enumerate(type.axes))
        self.sent = Transfers(host, s, self.buffer("sent", share, count, ranks), flags=Size(ranks))
        self.sums = Transfers(host, s, self.buffer("sums", share, count))
        self.summed = self.sums.row(f"{s.out.name}_summed", Size(ranks))
        self.done = self.sent.row(f"{part.name}_done", Size(ranks)) if product else None
        self.out = host.destination(self.result)
        self.part = host.packed(part, s)

    def build(self) -> int:
        """Append all statements to the host program; return the number of worker streams that they use."""
        host, index = self.host, self.host.index("c")
        begin = self.sent.reuse_barrier()
        if begin or self.product is None:  # else copies wait for the flags of the product
            self.sent.fork()
            host.body += [*begin, SetStream(host.user)]
        if self.product is None or self.hosts:
            host.body += [self.each(index, self.count, [*self.send(index), *self.add_up(index)]), SetStream(host.user)]
        else:
            last, previous = Lit(self.count), Bin("-", index, Lit(1))
            send = If(Bin("/", index, last), Lit(0), tuple(self.send(index)), span=self.reduce.span)
            later = Bin("/", Bin("+", index, Lit(self.count - 1)), last)
            add_up = If(later, Lit(1), tuple(self.add_up(previous)), span=self.reduce.span)
            host.body.append(self.each(index, self.count + 1, [send, add_up]))
        # A peer sums up a chunk after this rank's copies have arrived, and this rank gets the sums after that. So it
        # is enough to wait for the stream that gets the sums.
        host.body.append(Synchronize(self.gathering))
        return self.workers

    def send(self, chunk: Expr) -> list[Statement]:
        """Return the statements that compute the product of a chunk, and send its rows to the ranks that add them."""
        host, s, team, views = self.host, self.reduce, self.team, list[ViewStatement]()
        part = self.chunk(self.part, chunk, views)
        computed: list[Statement] = []
        if self.product is not None and self.done is not None:
            places = operand_places(self.product, rows_in(self.count, self.axis))
            rows = {name: self.chunk(host.values[name], chunk, views, at.axis) for name, at in places.items()}
            product = self.product.rename({**host.values, **rows})
            raising = replace(product, out=part, done=self.done, raised=_epoch(chunk), first=team.peer(Lit(1)))
            note = "the rows for each rank are sent when they are done, its own come last"
            computed = [replace(raising, note=note)]
        slot = self.slot(self.sent.buffer, chunk, views)
        slot = add_view(Select(slot, self.named("slot"), team.rank, span=s.span), views)
        index = host.index("i")
        peer = team.peer(Bin("+", index, Lit(1)))
        turn: list[ViewStatement] = []
        block = self.rows(part, peer, turn)
        wait = [] if self.done is None else [WaitSignal(self.done, peer, _epoch(chunk), span=s.span)]
        put = self.sent.put(block, slot, peer, note="to the rank that sums up these rows")
        signal = Signal(self.sent.flags, team.rank, _epoch(chunk), peer, team.over, span=s.span)
        loop = self.each(index, team.ranks - 1, [*turn, *wait, put, signal])
        return [*views, *computed, SetStream(COPY_STREAM), loop, SetStream(host.user)]

    def add_up(self, chunk: Expr) -> list[Statement]:
        """Return the statements that sum up this rank's rows of a chunk, and get the sums of the other ranks."""
        host, s, team, views = self.host, self.reduce, self.team, list[ViewStatement]()
        mine = self.rows(self.chunk(self.part, chunk, views), team.rank, views)
        sent, sums = (self.slot(t.buffer, chunk, views) for t in (self.sent, self.sums))
        out = self.chunk(self.out, chunk, views)
        local = self.rows(out, team.rank, views)
        addend = self.addend
        at = self.axis - len(self.out.tensor.axes) + (len(addend.tensor.axes) if addend else 0)
        if addend is not None and at >= 0 and not addend.tensor.axes[at].extent.is_one:
            addend = self.rows(self.chunk(addend, chunk, views, at), team.rank, views, at)
        total = Sum(sums, sent, 0, addend=addend, activation=self.activation, span=s.span)
        index = host.index("i")
        peer = team.peer(Bin("+", index, Lit(1)))
        others = team.ranks - 1
        before: list[Statement] = [SetStream(LOCAL), Synchronize(host.user)] if self.hosts else []
        if self.product is None:
            slot = add_view(Select(sent, self.named("slot"), team.rank, span=s.span), views)
            before.append(self.sent.put(mine, slot, team.rank))
        else:
            total = replace(total, ready=self.sent.flags, epoch=_epoch(chunk), first=team.rank, own=mine)
        if self.product is None or self.hosts:  # while bytes travel, no SM is held
            arrived = WaitSignal(self.sent.flags, peer, _epoch(chunk), span=s.span)
            before.append(self.each(index, others, [arrived]))
        turn: list[ViewStatement] = []
        theirs = self.rows(out, peer, turn)
        wait = WaitSignal(self.summed, peer, _epoch(chunk), span=s.span)
        return [
            *(*views, *before),
            replace(total, note="of the rows that this rank sums up"),
            *self.completed(sums),
            *(SetStream(self.gathering), Synchronize(BETWEEN if self.hosts else host.user)),
            self.each(index, others, [Signal(self.summed, team.rank, _epoch(chunk), peer, team.over, span=s.span)]),
            self.each(index, others, [*turn, wait, self.sums.get(sums, theirs, peer)]),
            *([] if self.hosts else [SetStream(host.user)]),
            DenseCopy(out=local, x=sums, span=s.span, note="copy: what this rank itself has summed up"),
            *([SetStream(host.user)] if self.hosts else []),
        ]

    def completed(self, sums: Value) -> list[Statement]:
        """Return the allreduce between hosts of the sums of a chunk, if any, on a stream of its own."""
        if not self.hosts:
            return []
        s, views = self.reduce, list[ViewStatement]()
        addend = add_view(AsPartial(sums, self.named("addend"), self.hosts, span=s.span), views)
        handle = Value(self.host.names.fresh(f"{s.out.name}_ready"), Kind.HANDLE, s.span)
        reduce = AllReduce(addend, sums, over=self.hosts, handle=handle, span=s.span, note="between hosts")
        return [SetStream(BETWEEN), Synchronize(LOCAL), *views, reduce, Wait(handle, span=s.span)]

    def buffer(self, name: str, share: TensorType, *lead: int) -> Value:
        """Return a new value for a symmetric buffer. Its type is `share` with leading axes of the extents `lead`.

        `share` is the type of the rows of one chunk that one rank sums up.
        """
        type = share.with_axes([*(Axis.of(n) for n in lead), *share.axes])
        return Value(self.host.names.fresh(f"{self.reduce.out.name}_{name}"), type, self.reduce.span)

    def slot(self, buffer: Value, chunk: Expr, views: list[ViewStatement]) -> Value:
        return add_view(Select(buffer, self.named(f"{buffer.name}_c"), chunk, span=self.reduce.span), views)

    def chunk(self, x: Value, chunk: Expr, views: list[ViewStatement], axis: int | None = None) -> Value:
        """Return a view of one chunk of a tensor; append the view to `views`.

        The tensor is cut along `axis`, by default along the axis of rows.
        """
        name, k = self.named(f"{x.name}_c"), self.axis if axis is None else axis
        return add_view(Chunk(x, name, chunk, Size(self.count), k, span=self.reduce.span), views)

    def rows(self, x: Value, rank: Expr, views: list[ViewStatement], axis: int | None = None) -> Value:
        """Return a view of the rows of the chunk `x` that one rank sums up; append the view to `views`.

        The chunk is cut along `axis`, by default along the axis of rows.
        """
        name, k = f"{x.name}_{'own' if rank == self.team.rank else 'i'}", self.axis if axis is None else axis
        chunk = Chunk(x, self.named(name), rank, Size(self.team.ranks), k, span=self.reduce.span)
        return add_view(chunk, views)

    def named(self, name: str) -> Value:
        """Return a new value for the result of a view.

        Its type is only a placeholder: `add_view` sets the inferred type.
        """
        return Value(self.host.names.fresh(name), self.reduce.out.type, self.reduce.span)

    def each(self, index: Ref, count: int, statements: list[Statement]) -> For:
        return For(index.value, Size(count), tuple(statements), span=self.reduce.span)


def rows_in(count: int, axis: int) -> SlicePlace:
    """Return the place of `count` chunks of rows along an axis."""
    return SlicePlace(axis, Size(), Size(count))


def _epoch(chunk: Expr) -> Expr:
    """Return the epoch of the flags of a chunk: the chunk's index plus 1."""
    return chunk.left if isinstance(chunk, Bin) else Bin("+", chunk, Lit(1))
