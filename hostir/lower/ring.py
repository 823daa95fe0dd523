"""Pass `ring`: each rank computes on the rows of one peer after another, while the rows of other peers are copied.

An allgather becomes a copy of each peer's shard, followed by the matmuls of this shard. A reduce_scatter becomes a
product of the rows for each peer, followed by the copy of these rows to the peer; at the end, each rank adds up the
rows that it has received. If rows are gathered, a rank multiplies its local rows first; otherwise it multiplies them
last. If matmuls sum over the gathered axis, each turn takes one slice of the rows, with the parts of all peers.

The schedule of the allgather follows the pipelined all-gather of torch's asynchronous tensor parallelism
(`torch.distributed._symmetric_memory`). There are three differences: copies over symmetric memory replace the
collective, the local shard comes first, and each rank begins with a different peer. In torch's reduce-scatter, peers
get a rank's products after barriers. Here the rank puts its products, and a flag signals their arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hostir.ir.comm_ops import AllGather, AllReduce, ReduceScatter
from hostir.ir.host_ops import Chunk, For, Select, SetStream, Synchronize
from hostir.ir.onesided_ops import Get
from hostir.ir.op import Bin, Expr, Lit, Ref, Statement, Value
from hostir.ir.program import Program
from hostir.ir.sizes import ONE, Size
from hostir.ir.tensor_ops import DenseCopy, TensorOp
from hostir.ir.types import Axis
from hostir.ir.view_ops import ViewStatement
from hostir.lower import Pass
from hostir.lower.allreduces import shared_axis
from hostir.lower.columns import columns_as_rows
from hostir.lower.host import Host, modulo
from hostir.lower.loops import Slices
from hostir.lower.propagate import operands_of, result_of
from hostir.lower.rows import (
    RowCollective,
    RowCollectives,
    by_columns,
    reads_rows,
    row_slices,
    shard_in_pieces,
    shard_place,
    users,
)
from hostir.lower.scales import send_scales
from hostir.lower.scatters import ScatteredBlocks, add_view, in_one_step
from hostir.lower.slices import SlicedGroup, SlicePlace, operand_places, result_place, schedule, why_not
from hostir.lower.transfers import Transfers

FIRST = Lit(0)  # the worker that prepares the shards before it takes its turns


@dataclass(frozen=True)
class Ring(Pass):
    """Replaces each collective of rows by copies from one peer after another, or to one peer after another.

    The rank computes on the rows of one peer between two copies.
    """

    name = "ring"
    streams: int = 4

    def run(self, program: Program) -> Program:
        program = columns_as_rows(program)
        rows = RowCollectives.of(program, self.name, two_steps=lambda s: shared_axis(s) is not None)
        after = _after(rows)
        reason = "every matmul of these rows also needs what a later allgather brings"
        rows = rows.only(lambda s: not isinstance(s, AllGather) or _in_turn(s, rows, after), reason)
        rows = rows.noted(self.name).with_block_axes(shard_in_pieces).with_products_in_blocks().with_scales_first()
        host = Host(rows.program, rows.ordered(rows.program))
        host.apart |= {s.out.name for s in rows.reduces}
        scales = rows.scales
        pools = [_pool(s, self.streams) for s in rows.moves]
        chained = self.chained(rows)
        steps = [*schedule(host.program.body, [*chained, *_groups(rows, chained)])]
        for n, step in enumerate(steps):
            if isinstance(step, SlicedGroup) and step in chained:
                pools.append(self.build_chain(host, step))
            elif isinstance(step, AllGather) and step in scales:
                send_scales(host, step)
            elif isinstance(step, SlicedGroup):
                first = step.statements[0]
                if isinstance(first, AllGather) and by_columns(first):
                    GatheredColumns(host, step).build(self.streams)
                else:
                    Peers(host, step).build(self.streams, joined_later=self._joined_after(steps[n + 1 :], step))
            elif isinstance(step, AllReduce) and step in rows.reduces:
                pools.append(in_one_step(host, step))
            else:
                host.add_unsliced(step)
        return host.finished(max(pools, default=0))

    def chained(self, rows: RowCollectives) -> list[SlicedGroup]:
        """Return a group for each reduce_scatter that `build_chain` lowers, with its product; `ring` has none."""
        return []

    def build_chain(self, host: Host, group: SlicedGroup) -> int:
        """Append the statements of a group from `chained`; return the number of worker streams."""
        raise AssertionError(self.name)

    def _joined_after(self, steps: Iterable[Statement | SlicedGroup], group: SlicedGroup) -> bool:
        """Return True if a later group makes the caller's stream wait for all worker streams of this group."""
        later = (s.statements[0] for s in steps if isinstance(s, SlicedGroup))
        pools = [_pool(s, self.streams) for s in later if isinstance(s, RowCollective)]
        first = group.statements[0]
        return isinstance(first, RowCollective) and max(pools, default=0) >= _pool(first, self.streams)


def _pool(s: RowCollective, streams: int) -> int:
    """Return the number of worker streams: the number that was asked for, but at most the number of peers."""
    return min(streams, s.mesh.size(s.over) - 1)


def _groups(rows: RowCollectives, chained: Sequence[SlicedGroup]) -> list[SlicedGroup]:
    """Return a group for each collective, with the computations that can run on the rows of one rank at a time.

    Statements of the groups in `chained` are left out.

    A reduce_scatter joins the group of an allgather under two conditions: the group computes the rows to scatter, and
    both collectives divide the rows among the ranks in the same way.
    """
    after = _after(rows)
    groups: list[SlicedGroup] = []
    taken = {result_of(s).name for group in chained for s in group.statements}
    for gather in rows.gathers:
        if gather.out.name in taken:
            continue
        groups.append(_computed_from(gather, rows, after, taken))
        taken |= {result_of(s).name for s in groups[-1].statements}
    for scatter in rows.scatters:
        if scatter.out.name in taken:
            continue
        place = shard_place(scatter)
        group = next((g for g in groups if g.places.get(scatter.x.name) == place and _alike(g, scatter)), SlicedGroup())
        if not group.statements:
            groups.append(_computed_for(scatter, rows, taken))
        else:
            group.add(scatter, place, {})
    for group in groups:
        group.keep_axes()
    return groups


def _computed_from(
    gather: AllGather, rows: RowCollectives, after: dict[str, int], taken: Collection[str]
) -> SlicedGroup:
    """Return the group of an allgather, with the computations that can run on the rows of one rank at a time.

    `taken` holds the results of statements that belong to other groups.
    """
    rows_of_slice = SlicePlace(0, ONE, Size(row_slices(gather)))
    group = SlicedGroup([gather], {gather.out.name: rows_of_slice if by_columns(gather) else shard_place(gather)})
    inside = {gather.out.name}
    late = {name for name, latest in after.items() if latest >= after[gather.out.name]}
    for s in rows.program.body:
        name = result_of(s).name
        if isinstance(s, TensorOp) and name not in taken and _joins(s, group, inside, late - inside):
            inside.add(name)
    return group


def _alike(group: SlicedGroup, scatter: ReduceScatter) -> bool:
    """Return True if the turns of a group are over the same ranks as the turns of a reduce_scatter."""
    first = group.statements[0]
    if isinstance(first, AllGather) and by_columns(first):
        return False
    return isinstance(first, RowCollective) and (first.mesh, first.over) == (scatter.mesh, scatter.over)


def _computed_for(scatter: ReduceScatter, rows: RowCollectives, taken: set[str]) -> SlicedGroup:
    """Return the group of a reduce_scatter, with the computations that can make the rows for one rank at a time.

    `taken` holds the results of computations that belong to other groups.
    """
    group = SlicedGroup([], {scatter.x.name: shard_place(scatter)})
    for s in reversed(rows.program.body):
        name = result_of(s).name
        place = group.places.get(name)
        if not isinstance(s, TensorOp) or place is None or name in taken or scatter.over not in s.out.tensor.partial:
            continue
        places = operand_places(s, place)
        if why_not(s, place, places) or group.conflicts(places) or not _in_one_piece(s, place, places):
            continue
        group.statements.insert(0, s)
        group.places |= places
    group.add(scatter, shard_place(scatter), {})
    return group


def _in_turn(s: AllGather, rows: RowCollectives, after: dict[str, int]) -> bool:
    """Return True if an allgather can be lowered to turns, one for each peer.

    Some matmul must read the gathered rows, or what is computed from them shard by shard, and depend on no later
    allgather. There are two exceptions: nothing reads the rows, or the allgather is the second step of an allreduce.
    """
    readers = [user for user in rows.program.body if reads_rows(user, s.out)]
    early = (all(after.get(v.name, -1) < after[s.out.name] for v in operands_of(u) if v != s.out) for u in readers)
    if any(early) or not users(rows.program, s.out) or s.out.name in rows.regathered:
        return True
    return any(isinstance(c, TensorOp) and c.contracts for c in _computed_from(s, rows, after, ()).statements)


def _after(rows: RowCollectives) -> dict[str, int]:
    """Return a map from the name of each value to the index of the last allgather that it depends on.

    The index is -1 for a value that depends on no allgather.
    """
    after: dict[str, int] = {}
    number = {s.out.name: n for n, s in enumerate(rows.gathers)}
    for s in rows.program.body:
        name = result_of(s).name
        reads = (after.get(v.name, -1) for v in operands_of(s))
        after[name] = max([number.get(name, -1), *reads])
    return after


def _joins(s: TensorOp, group: SlicedGroup, inside: Collection[str], late: Collection[str]) -> bool:
    """Add a computation to a group if it can run shard by shard on results of the group; return True if it was added.

    `inside` holds the names of results of the group. `late` holds the names of values outside the group that depend on
    the allgather of the group or on a later allgather. The computation must not read these values, because groups run
    in the order of their allgathers.
    """
    source = next((v for v in s.operands if v.name in inside), None)
    place = result_place(s, source, group.places[source.name]) if source else None
    if place is None or any(v.name in late for v in s.operands):
        return False
    places = operand_places(s, place)
    unsliced = any(v.name in inside and v.name not in places for v in s.operands)
    if unsliced or why_not(s, place, places) or group.conflicts(places):
        return False
    if not _in_one_piece(s, place, places):
        return False
    group.add(s, place, places)
    return True


def _in_one_piece(s: TensorOp, place: SlicePlace, places: dict[str, SlicePlace]) -> bool:
    """Return True if each slice that a computation reads or writes is contiguous in its axis on every rank."""
    sliced = [(s.out, place), *((v, places[v.name]) for v in s.operands if v.name in places)]
    return all(at.blocks_outside(v.tensor).is_one for v, at in sliced)


class Peers:
    """Builds the statements of a group. Each turn computes on the rows of one rank, and copies rows.

    Gathered rows are copied before the computations, and rows to scatter are copied after them. A shard has the same
    position and layout on every rank, including the rank that owns it. So the same kernels run on every rank, and
    results computed from a shard have the same bits everywhere.
    """

    def __init__(self, host: Host, group: SlicedGroup) -> None:
        self.host, self.group = host, group
        self.computations = [s for s in group.statements if isinstance(s, TensorOp)]
        moves: list[RowCollective] = [s for s in group.statements if isinstance(s, RowCollective)]
        first = moves[0]
        self.gathered = GatheredShards(host, group, first) if isinstance(first, AllGather) else None
        for computation in self.computations:
            host.destination(computation.out)
        self.team = host.team(first, host.values[first.x.name])
        self.scattered: list[tuple[ReduceScatter, ScatteredBlocks]] = []
        for s in moves:
            if isinstance(s, ReduceScatter):
                full = host.packed(host.values[s.x.name], s)
                self.scattered.append((s, ScatteredBlocks(host, s, full, axis=None)))
        self.pool = 0

    def build(self, streams: int, *, joined_later: bool = False) -> None:
        """Append all statements of the group to the host program.

        Args:
            streams: the maximum number of worker streams.
            joined_later: True if a later group makes the caller's stream wait for all worker streams of this group.
        """
        host, body, worker = self.host, self.host.body, self.host.index("s")
        self.pool = min(streams, self.team.ranks - 1)
        if self.gathered:
            shared = self.gathered.share()
            begin: list[Statement] = [self.gathered.transfers.barrier(f"all ranks have their shards in {shared}")]
        else:
            begin = self.scattered[0][1].transfers.reuse_barrier()
        if begin or not self.computations:  # else every turn already waits for the product of its rows
            body += [SetStream(FIRST), Synchronize(host.user), *begin]
            if self.pool > 1:
                fork = (SetStream(Bin("+", worker, Lit(1))), Synchronize(FIRST))
                body.append(For(worker.value, Size(self.pool - 1), fork))
            body.append(SetStream(host.user))
        if self.gathered:
            body += [*self.gathered.kept_shard(), *self.computed(self.team.rank, "own", self.gathered.local_rows)]
        turn = host.index("i")
        statements = self.turn(turn, self.team.peer(Bin("+", turn, Lit(1))))  # each rank has a different peer
        body += [For(turn.value, Size(self.team.ranks - 1), statements), SetStream(host.user)]
        if not self.gathered:
            body += self.computed(self.team.rank, "own")
            self.add_up()
        if self.gathered or self.computations or not joined_later:  # results computed here may be freed after the join
            body.append(For(worker.value, Size(self.pool), (Synchronize(worker),)))
        if self.gathered:
            self.add_up()

    def turn(self, turn: Ref, peer: Expr) -> tuple[Statement, ...]:
        """Return the statements of one turn, for one peer.

        Gathered rows are multiplied on the worker stream that copied them. If the group has no allgather, products run
        one after another on the caller's stream, and a worker stream sends each product.
        """
        worker, user = SetStream(modulo(turn, self.pool)), self.host.user
        if self.gathered:
            rows, get = self.gathered.get(peer)
            return worker, rows, get, *self.computed(peer, "i", rows.out), *self.sent(peer)
        computed = self.computed(peer, "i")
        before = (SetStream(user), *computed, worker, Synchronize(user)) if computed else (worker,)
        return *before, *self.sent(peer)

    def computed(self, index: Expr, suffix: str, rows: Value | None = None) -> list[Statement]:
        """Return the computations on the rows of the rank at position `index`; `rows` are its gathered rows, if any."""
        slices = Slices(self.host, self.group, index, suffix)
        if self.gathered and rows is not None:
            slices.slices[self.gathered.gather.out.name] = rows
        for s in self.computations:
            slices.statement(s)
        return slices.body

    def sent(self, peer: Expr) -> Iterator[Statement]:
        """Yield the statements that copy rows to the peer that sums them up, and signal their arrival."""
        for s, scattered in self.scattered:
            blocks = scattered.blocks(self.host.values[s.x.name], peer)
            note = "to the rank that sums up these rows"
            yield from (*blocks.views, *blocks.in_turn, *scattered.transfers.put_and_signal(blocks, peer, note))

    def add_up(self) -> None:
        """Append to the host program, for each reduce_scatter, the statements that sum up the blocks from all ranks."""
        for _, scattered in self.scattered:
            if self.computations:
                scattered.add_up()
            else:
                scattered.add_up("", polls=False)


class GatheredShards:
    """Builds the copies of an allgather.

    Each rank puts its shard into a symmetric buffer, and peers get the shard from there. If the complete gathered
    tensor is needed, `kept` is True, and the shards are copied to this tensor.
    """

    def __init__(self, host: Host, group: SlicedGroup, gather: AllGather) -> None:
        self.host, self.gather, self.team = host, gather, host.team(gather)
        self.kept = host.used_outside(gather.out, {result_of(s).name for s in group.statements[1:]})
        self.place = group.places[gather.out.name]
        self.piece = self.place.slice(gather.out.tensor)
        if self.kept:
            host.destination(gather.out)

    def kept_shard(self) -> list[Statement]:
        """Return the statement that copies the local shard to the gathered tensor, in a list.

        Return an empty list if the complete gathered tensor is not needed.
        """
        note = f"copy: {self.gather.out} is wanted whole"
        copy = DenseCopy(out=self.local_rows, x=self.transfers.buffer, span=self.gather.span, note=note)
        return [copy] if self.kept else []

    def get(self, peer: Expr) -> tuple[Chunk | Select, Get]:
        """Return two statements: a view of the memory for a peer's rows, and the copy of these rows from the peer."""
        shared = self.transfers.buffer
        rows = self.rows(shared, peer, "i")
        return rows, self.transfers.get(shared if self.kept else rows.out, rows.out, peer)

    def share(self) -> Value:
        """Append the copy of the local shard to this rank's symmetric buffer; return the buffer.

        Set `local_rows` to the local rows, in the memory where matmuls read them. The buffer has room for the shards of
        all ranks. But if the complete gathered tensor is needed, the shards of peers go to this tensor, and the buffer
        has room for one shard only.
        """
        s, host, rank = self.gather, self.host, self.team.rank
        x = host.values[s.x.name]  # a copy within the rank takes any strides
        room = self.piece if self.kept else self.piece.with_axes([Axis.of(self.team.ranks), *self.piece.axes])
        self.transfers = Transfers(host, s, Value(host.names.fresh(f"{s.x.name}_shared"), room, s.span))
        host.body += self.transfers.reuse_barrier()
        rows = self.rows(self.transfers.buffer, rank, "own")
        self.local_rows = rows.out
        host.body += [rows, self.transfers.put(x, self.transfers.buffer if self.kept else rows.out, rank)]
        return self.transfers.buffer

    def rows(self, shared: Value, index: Expr, suffix: str) -> Chunk | Select:
        """Return a view of the shard of the rank at position `index`, in the memory where matmuls read it."""
        full = self.gather.out
        out = Value(self.host.names.fresh(f"{full.name}_{suffix}"), self.piece, full.span)
        if self.kept:
            return Chunk(self.host.values[full.name], out, index, self.place.count, self.place.axis, span=full.span)
        return Select(shared, out, index, span=full.span)


class GatheredColumns:
    """Builds an allgather of the axis over which matmuls sum. Before it, each rank has some columns of all rows.

    Every rank has a symmetric buffer with room for the columns of all ranks, side by side. A rank puts its columns
    into its buffer, and peers get these columns from there. Each turn takes one slice of the rows. It gets the
    columns of this slice from all peers, and then multiplies the slice. So each product sums over the complete axis at
    once, in the same order on every rank, and rounds once.
    """

    def __init__(self, host: Host, group: SlicedGroup) -> None:
        gather = group.statements[0]
        assert isinstance(gather, AllGather)
        self.host, self.group, self.gather, self.team = host, group, gather, host.team(gather)
        self.computations = [s for s in group.statements if isinstance(s, TensorOp)]
        self.x = host.values[gather.x.name]
        inside = {result_of(s).name for s in group.statements[1:]}
        self.unshared = host.destination(gather.out) if host.used_outside(gather.out, inside) else None
        for s in self.computations:
            host.destination(s.out)
        full = gather.out.tensor.host()
        self.transfers = Transfers(
            host, gather, Value(host.names.fresh(f"{gather.out.name}_shared"), full, gather.span)
        )

    def build(self, streams: int) -> None:
        """Append all statements to the host program. They use at most `streams` worker streams."""
        host, body, team, transfers = self.host, self.host.body, self.team, self.transfers
        pool, worker = min(streams, team.ranks - 1), host.index("s")
        mine: list[ViewStatement] = []
        local_part = self.part(transfers.buffer, team.rank, mine)
        body += [*transfers.reuse_barrier(), *mine, transfers.put(self.x, local_part, team.rank)]
        body += [SetStream(FIRST), Synchronize(host.user)]
        body.append(transfers.barrier(f"all ranks have their columns in {transfers.buffer}"))
        if pool > 1:
            body.append(For(worker.value, Size(pool - 1), (SetStream(Bin("+", worker, Lit(1))), Synchronize(FIRST))))
        turn = host.index("i")
        join = For(worker.value, Size(pool), (Synchronize(worker),))
        rows = Chunk(transfers.buffer, self.named("rows"), turn, self.group.count, 0, span=self.gather.span)
        views: list[ViewStatement] = []
        slice = add_view(rows, views)
        statements = (*views, self.gets(slice, pool), SetStream(host.user), join, *self.computed(turn, slice))
        body.append(For(turn.value, self.group.count, statements))
        if self.unshared:
            note = f"copy: {self.gather.out} is wanted whole"
            body.append(DenseCopy(out=self.unshared, x=transfers.buffer, span=self.gather.span, note=note))

    def gets(self, rows: Value, pool: int) -> For:
        """Return the loop that gets the columns of some rows from all peers.

        The copies use `pool` worker streams in turn.
        """
        index, views = self.host.index("j"), list[ViewStatement]()
        peer = self.team.peer(Bin("+", index, Lit(1)))
        part = self.part(rows, peer, views)
        each = (SetStream(modulo(index, pool)), *views, self.transfers.get(part, part, peer))
        return For(index.value, Size(self.team.ranks - 1), each)

    def computed(self, turn: Ref, rows: Value) -> list[Statement]:
        """Return the computations on one slice of the rows; `turn` is the index of the slice."""
        slices = Slices(self.host, self.group, turn, turn.value.name)
        slices.slices[self.gather.out.name] = rows
        for s in self.computations:
            slices.statement(s)
        return slices.body

    def part(self, rows: Value, rank: Expr, views: list[ViewStatement]) -> Value:
        """Return a view of the columns of `rows` that belong to one rank; append the view to `views`."""
        last = len(rows.tensor.axes) - 1
        return add_view(
            Chunk(rows, self.named("part"), rank, Size(self.team.ranks), last, span=self.gather.span), views
        )

    def named(self, name: str) -> Value:
        return Value(self.host.names.fresh(name), self.gather.out.type, self.gather.span)
