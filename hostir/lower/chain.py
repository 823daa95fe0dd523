"""Pass `chain`: a reduce_scatter without sums. Each rank's product adds to the sum that the rank before it has begun.

The ranks form a ring. For each block of rows, one rank begins with its product, and the next rank fetches the result.
Its product adds to the fetched rows in place, and so on. The chain of a block ends at the rank to which the block
belongs. So there is no separate sum, and no buffer for the addends of all ranks. While a rank computes on one piece of
a block, copy engines fetch the next piece.

This is the reduce-scatter of a ring as NCCL and others have it, with the addition in the epilogue of the matmul. Each
addition rounds to the dtype of the rows, as it does in NCCL.

An allreduce is a reduce_scatter and an allgather. If nothing comes between the two, they form one chain: as soon as a
rank has the sums of a piece, all ranks fetch them, while the rank computes its next piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import ReduceScatter
from hostir.ir.host_ops import AsPartial, Chunk, For, Select, SetStream, Synchronize
from hostir.ir.onesided_ops import Signal, WaitSignal
from hostir.ir.op import Bin, Expr, Lit, Ref, Statement, Value
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import Linear, Matmul
from hostir.ir.types import Axis
from hostir.ir.view_ops import Permute, ViewStatement
from hostir.lower.host import Host
from hostir.lower.propagate import result_of
from hostir.lower.ring import Ring
from hostir.lower.rows import RowCollectives, by_columns, long_axes, piece_axis, shard_place, users
from hostir.lower.scatters import add_view
from hostir.lower.slices import SlicedGroup, operand_places, why_not
from hostir.lower.transfers import ARRIVED, Transfers


@dataclass(frozen=True)
class Chain(Ring):
    """Replaces each reduce_scatter of a matmul's rows by a chain of matmuls. Other collectives are lowered by `Ring`.

    The rows must be the result of a single matmul, and only the reduce_scatter may read them.

    `streams` is also the number of pieces of a block.
    """

    name = "chain"

    def chained(self, rows: RowCollectives) -> list[SlicedGroup]:
        groups: list[SlicedGroup] = []
        for s in rows.scatters:
            if (product := _product(rows.program, s)) is not None:
                after: list[Statement] = users(rows.program, s.out)
                regathers = [g for g in rows.gathers if g in after and g.out.name in rows.regathered]
                alone = len(regathers) == len(after) and s.out not in rows.program.outputs
                groups.append(SlicedGroup([product, s, *(regathers if alone else ())]))
        return groups

    def build_chain(self, host: Host, group: SlicedGroup) -> int:
        product, scatter, *gathers = group.statements
        assert isinstance(product, Matmul | Linear)
        assert isinstance(scatter, ReduceScatter)
        return ChainedMatmuls(host, scatter, product, result_of(gathers[0]) if gathers else None, self.streams).build()


def _product(program: Program, s: ReduceScatter) -> Matmul | Linear | None:
    """Return the product that alone makes the rows of a reduce_scatter, if its blocks can be computed in turn."""
    maker, place = next((other for other in program.body if result_of(other) == s.x), None), shard_place(s)
    if not isinstance(maker, Matmul | Linear) or len(maker.operands) != 2 or users(program, s.x) != [s]:
        return None
    if by_columns(s) or not place.outer.is_one or s.x in program.outputs:
        return None
    return None if why_not(maker, place, operand_places(maker, place)) else maker


class ChainedMatmuls:
    """Builds the chain of one reduce_scatter.

    In step n, a rank computes a part of the block that belongs to the rank n + 1 positions before it. In the last step,
    this is its own block. So all that a rank fetches comes from the rank before it.

    Args:
        host: the host program.
        s: the reduce_scatter.
        product: the matmul that makes its rows.
        full: the tensor in which all ranks want all sums; None if each rank only wants its rows of them.
        streams: the most pieces of a block, each of which is fetched on a separate worker stream.
    """

    def __init__(
        self, host: Host, s: ReduceScatter, product: Matmul | Linear, full: Value | None, streams: int
    ) -> None:
        self.host, self.scatter, self.product = host, s, product
        self.a = host.values[product.a.name]
        self.team = host.team(s, self.a)
        self.axis = shard_place(s).axis
        self.pieces, self.cut = _pieces(s, streams)
        self.full = None if full is None else host.destination(full)
        self.out = replace(s.out, type=s.out.tensor.host()) if full is not None else host.destination(s.out)
        self.b = self.right_side()
        self.steps = self.team.ranks - 1  # before the last step
        local = self.partial(self.out, []).tensor
        slots = self.steps if full is None else self.steps + 1
        buffer = Value(host.names.fresh(f"{s.out.name}_begun"), local.with_axes([Axis.of(slots), *local.axes]), s.span)
        self.transfers = Transfers(host, s, buffer, flags=Size(self.steps * self.pieces))
        if full is not None:
            self.summed = self.transfers.row(f"{full.name}_summed", Size(self.team.ranks * self.pieces))

    def build(self) -> int:
        """Append all statements to the host program; return the number of worker streams."""
        host, body = self.host, self.host.body
        body += self.transfers.reuse_barrier()
        body.append(self.step(Lit(0)))
        if self.steps > 2:
            step = host.index("n")
            body.append(For(step.value, Size(self.steps - 2), (self.step(Bin("+", step, Lit(1))),)))
        if self.steps > 1:
            body.append(self.step(Lit(self.steps - 1)))
        body.append(self.last_step())
        if self.full is not None:
            worker = host.index("s")
            body += [SetStream(host.user), For(worker.value, Size(self.pieces), (Synchronize(worker),))]
        return self.pieces

    def step(self, step: Expr) -> For:
        """Return the loop of a step before the last one: its products, and the copies that the next step needs."""
        host, transfers, piece = self.host, self.transfers, self.host.index("i")
        views: list[ViewStatement] = []
        target = self.slot(step, "begun", piece, views)
        if step == Lit(self.steps - 1):
            fetched = self.own(piece, views)
        else:
            fetched = self.slot(_sum(step, 1), "fetched", piece, views)
        flag = piece if step == Lit(0) else self.flag(step, piece)
        block = self.team.peer(_sum(step, self.team.ranks - 1, -1))
        after, before = self.team.peer(Lit(1)), self.team.peer(Lit(self.team.ranks - 1))
        statements = (
            *self.multiplied(block, piece, target, views, adds=step != Lit(0)),
            *(SetStream(piece), Synchronize(host.user)),
            replace(transfers.signal_flag(flag, after), note="the next rank goes on with these rows"),
            *(transfers.wait(flag), transfers.get(target, fetched, before)),
        )
        return For(piece.value, Size(self.pieces), statements, span=self.scatter.span)

    def last_step(self) -> For:
        """Return the loop of the last step: the products of this rank's block, which finish the sums."""
        piece, views = self.host.index("i"), list[ViewStatement]()
        target = self.own(piece, views)
        statements = [*self.multiplied(self.team.rank, piece, target, views, adds=True)]
        if self.full is not None:
            statements += self.gathered(piece, target, self.full)
        return For(piece.value, Size(self.pieces), tuple(statements), span=self.scatter.span)

    def own(self, piece: Ref, views: list[ViewStatement]) -> Value:
        """Return the memory for a piece of this rank's sums, seen as partial sums; append its views to `views`."""
        if self.full is not None:
            return self.slot(Lit(self.steps), "sums", piece, views)
        return self.partial(self.piece(self.out, "rows", piece, views), views)

    def gathered(self, piece: Ref, sums: Value, full: Value) -> Iterator[Statement]:
        """Yield the statements by which each rank tells the others that it has the sums of a piece, and gets theirs."""
        host, team, span, offset = self.host, self.team, self.scatter.span, self.host.index("j")
        others = Size(team.ranks - 1)
        yield from (SetStream(piece), Synchronize(host.user))
        after = team.peer(Bin("+", offset, Lit(1)))
        announce = Signal(self.summed, self.flag(team.rank, piece), ARRIVED, after, team.over, span=span)
        yield For(offset.value, others, (announce,), span=span)
        for peer in (after, team.rank):
            views: list[ViewStatement] = []
            place = Chunk(full, self.named("block"), peer, Size(team.ranks), self.axis, span=span)
            target = self.piece(add_view(place, views), "gathered", piece, views)
            get = self.transfers.get(sums, target, peer)
            if peer is team.rank:
                yield from (*views, get)
            else:
                wait = WaitSignal(self.summed, self.flag(peer, piece), ARRIVED, span=span)
                yield For(offset.value, others, (wait, *views, get), span=span)

    def flag(self, number: Expr, piece: Ref) -> Expr:
        """Return the number of the flag for a piece, with `number` flags for each piece before it."""
        return Bin("+", number if self.pieces == 1 else Bin("*", number, Lit(self.pieces)), piece)

    def slot(self, number: Expr, name: str, piece: Ref, views: list[ViewStatement]) -> Value:
        """Return a view of a piece in a slot of the symmetric buffer; append its views to `views`."""
        slot = Select(self.transfers.buffer, self.named("slot"), number, span=self.scatter.span)
        return self.piece(add_view(slot, views), name, piece, views)

    def multiplied(
        self, block: Expr, piece: Ref, target: Value, views: list[ViewStatement], *, adds: bool
    ) -> Iterator[Statement]:
        """Yield the statements that compute a piece of a block on the caller's stream, and the given views.

        With `adds`, the caller's stream first waits until the piece is fetched.
        """
        place = shard_place(self.scatter)
        rows = Chunk(self.a, self.named("block"), block, place.count, self.axis, span=self.product.span)
        a = self.piece(add_view(rows, views), "left", piece, views)
        yield SetStream(self.host.user)
        if adds:
            yield Synchronize(piece)
        yield from views
        note = "adds to the rows of the ranks before" if adds else "begins the sums of these rows"
        addend = target if adds else None
        yield Matmul(out=target, a=a, b=self.b, addend=addend, span=self.product.span, note=note)

    def right_side(self) -> Value:
        """Return the right side of the products. If it is a weight of `linear`, append a transposed view."""
        right, contracted = self.product.right_side
        right = self.host.values[right.name]
        if not contracted:
            return right
        axes = right.tensor.host().axes[::-1]
        view = Value(self.host.names.fresh(f"{right.name}_t"), right.tensor.host().with_axes(axes))
        return self.host.view(Permute(right, view, (1, 0), span=self.product.span))

    def piece(self, rows: Value, name: str, index: Expr, views: list[ViewStatement]) -> Value:
        """Return a view of a piece of the rows of a block; append the view to `views`."""
        if self.pieces == 1:
            return rows
        cut = self.cut - (len(self.out.tensor.axes) - len(rows.tensor.axes))
        return add_view(Chunk(rows, self.named(name), index, Size(self.pieces), cut, span=rows.span), views)

    def partial(self, rows: Value, views: list[ViewStatement]) -> Value:
        """Return a view of rows of the result as partial sums; append the view to `views`."""
        view = AsPartial(rows, self.named("partial"), self.scatter.over, span=self.scatter.span)
        return add_view(view, views)

    def named(self, name: str) -> Value:
        """Return a new value for the result of a view, whose type `add_view` sets."""
        return Value(self.host.names.fresh(name), self.scatter.out.type, self.scatter.span)


def _pieces(s: ReduceScatter, most: int) -> tuple[int, int]:
    """Return the number of pieces of a block, at most `most`, and the axis along which a block is cut.

    Pieces along an outer axis are contiguous. So the outermost axis is chosen that gives the most pieces. If the extent
    of an axis is a symbol, there are at most two pieces, so that few numbers of rows are refused.
    """
    cuts = [(1, piece_axis(s))]
    for axis in (*long_axes(s), piece_axis(s)):
        inside = [factor for factor in s.out.tensor.host().axes[axis].factors if factor.on != s.over]
        extent = s.out.tensor.local_shape[axis].value
        if len(inside) < 2 and all(factor.on is None for factor in inside):
            cuts += [(n, axis) for n in range(2, most + 1) if (n == 2 if extent is None else extent % n == 0)]
    return max(cuts, key=lambda cut: (cut[0], -cut[1]))


def _sum(step: Expr, number: int, sign: int = 1) -> Expr:
    """Return `number + step`, or `number - step` if `sign` is -1."""
    if isinstance(step, Lit):
        return Lit(number + sign * step.value)
    return Bin("+", step, Lit(number)) if sign > 0 else Bin("-", Lit(number), step)
