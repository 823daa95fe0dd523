"""Pass `ring`: each rank pulls its peers' shards one after another, and multiplies each while the next is copied.

The schedule is that of the pipelined all-gather of torch's asynchronous tensor parallelism
(`torch.distributed._symmetric_memory`): copies over symmetric memory instead of a collective, the own shard first, and
each rank beginning with another peer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hostir.ir.comm_ops import AllGather
from hostir.ir.host_ops import Chunk, For, Select, SetStream, Synchronize
from hostir.ir.op import Bin, Expr, Lit, Statement, Value
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import DenseCopy, TensorOp
from hostir.ir.types import Axis
from hostir.lower import Pass
from hostir.lower.gathers import Gathers, reads_rows, shard_in_pieces, shard_place
from hostir.lower.host import Host, modulo
from hostir.lower.propagate import operands_of, result_of
from hostir.lower.slices import SlicedGroup, Slices, operand_places, result_place, schedule, why_not
from hostir.lower.transfers import Transfers

FIRST = Lit(0)  # the worker on which the shards are made ready, before it takes its turns


@dataclass(frozen=True)
class Ring(Pass):
    """Replaces an allgather of rows by copies from one peer after another, each followed by its matmuls."""

    name = "ring"
    streams: int = 4

    def run(self, program: Program) -> Program:
        gathers = Gathers.of(program, self.name)
        after = _after(gathers)
        reason = "every matmul of these rows also needs what a later allgather brings"
        gathers = gathers.only(lambda s: _in_turn(s, program, after), reason)
        gathers = gathers.noted(self.name).with_block_axes(shard_in_pieces)
        host = Host(gathers.program)
        for step in schedule(host.program.body, _groups(gathers)):
            if isinstance(step, SlicedGroup):
                Turns(host, step).build(self.streams)
            else:
                host.whole(step)
        return host.finished(max((_pool(s, self.streams) for s in gathers.rows), default=0))


def _pool(s: AllGather, streams: int) -> int:
    """Return the number of worker streams: as asked for, but not more than peers."""
    return min(streams, s.mesh.size(s.over) - 1)


# Computations of a turn -----------------------------------------------------------------------------------------------


def _groups(gathers: Gathers) -> list[SlicedGroup]:
    """Return, for each allgather, the computations that can run on the rows of one shard."""
    after = _after(gathers)
    groups: list[SlicedGroup] = []
    taken: set[str] = set()
    for n, gather in enumerate(gathers.rows):
        group = SlicedGroup([gather], {gather.out.name: shard_place(gather)})
        made = {gather.out.name}
        late = {name for name, latest in after.items() if latest >= n}
        for s in gathers.program.body:
            name = result_of(s).name
            if isinstance(s, TensorOp) and name not in taken and _joins(s, group, made, late - made):
                made.add(name)
        taken |= made
        group.keep_axes()
        groups.append(group)
    return groups


def _in_turn(s: AllGather, program: Program, after: dict[str, int]) -> bool:
    """Whether some matmul of the rows does not depend on a later allgather."""
    users = (user for user in program.body if reads_rows(user, s.out))
    return any(all(after.get(v.name, -1) < after[s.out.name] for v in operands_of(u) if v != s.out) for u in users)


def _after(gathers: Gathers) -> dict[str, int]:
    """Return, for each value, the number of the last allgather that it depends on; -1 if there is none."""
    after: dict[str, int] = {}
    number = {s.out.name: n for n, s in enumerate(gathers.rows)}
    for s in gathers.program.body:
        name = result_of(s).name
        reads = (after.get(v.name, -1) for v in operands_of(s))
        after[name] = max([number.get(name, -1), *reads])
    return after


def _joins(s: TensorOp, group: SlicedGroup, made: Collection[str], late: Collection[str]) -> bool:
    """Add a computation to the group if it can run shard by shard on what the group makes; return whether it was.

    What else it reads must not depend on this or a later allgather: groups run in the order of their allgathers.
    """
    source = next((v for v in s.operands if v.name in made), None)
    place = result_place(s, source, group.places[source.name]) if source else None
    if place is None or any(v.name in late for v in s.operands):
        return False
    places = operand_places(s, place)
    whole = any(v.name in made and v.name not in places for v in s.operands)
    if whole or why_not(s, place, places) or group.conflicts(places):
        return False
    sliced = [(s.out, place), *((v, places[v.name]) for v in s.operands if v.name in places)]
    if not all(at.blocks_outside(v.tensor).is_one for v, at in sliced):
        return False
    group.add(s, place, places)
    return True


# One allgather --------------------------------------------------------------------------------------------------------


class Turns:
    """Builds one allgather and what is computed from it: in each turn the rows of one shard, the own ones first.

    A shard has the same place and layout on every rank, its owner included: so kernels run alike on every rank, and
    what they compute from a shard has the same bits everywhere.
    """

    def __init__(self, host: Host, group: SlicedGroup) -> None:
        gather = group.statements[0]
        assert isinstance(gather, AllGather)
        self.host, self.group, self.gather, self.team = host, group, gather, host.team(gather)
        self.computations = group.statements[1:]
        self.kept = host.used_outside(gather.out, {result_of(s).name for s in self.computations})
        self.piece = group.places[gather.out.name].slice(gather.out.tensor)
        for each in group.statements if self.kept else self.computations:
            host.destination(result_of(each))

    def build(self, streams: int) -> None:
        """Add all statements: share the own shard, compute on it, then get each peer's shard and compute on that."""
        s, body, user = self.gather, self.host.body, self.host.user
        transfers, own = self.share()
        shared, pool, worker = transfers.buffer, _pool(s, streams), self.host.index("s")
        body += [SetStream(FIRST), Synchronize(user), transfers.barrier(f"all ranks have their shards in {shared}")]
        if pool > 1:
            fork = (SetStream(Bin("+", worker, Lit(1))), Synchronize(FIRST))
            body.append(For(worker.value, Size(pool - 1), fork))
        body.append(SetStream(user))
        if self.kept:
            body.append(DenseCopy(out=own, x=shared, span=s.span, note=f"copy: {s.out} is wanted whole"))
        body += self.computed(own, self.team.rank, "own")
        turn = self.host.index("i")
        peer = self.team.peer(Bin("+", turn, Lit(1)))  # each rank gets from another one
        rows = self.rows(shared, peer, "i")
        get = transfers.get(shared if self.kept else rows.out, rows.out, peer)
        theirs = (SetStream(modulo(turn, pool)), rows, get, *self.computed(rows.out, peer, "i"))
        body.append(For(turn.value, Size(self.team.ranks - 1), theirs, span=s.span))
        body += [SetStream(user), For(worker.value, Size(pool), (Synchronize(worker),))]

    def share(self) -> tuple[Transfers, Value]:
        """Copy the own shard to a symmetric buffer, for peers to get; return also the own rows for this rank's matmuls.

        The buffer has room for the shards of all, unless these are wanted whole and go to a tensor of their own.
        """
        s, host, rank = self.gather, self.host, self.team.rank
        x = host.packed(host.values[s.x.name], s)
        room = self.piece if self.kept else self.piece.with_axes([Axis.of(self.team.ranks), *self.piece.axes])
        transfers = Transfers(host, s, Value(host.names.fresh(f"{s.x.name}_shared"), room, s.span))
        host.body += transfers.reuse_barrier()
        rows = self.rows(transfers.buffer, rank, "own")
        host.body += [rows, transfers.put(x, transfers.buffer if self.kept else rows.out, rank)]
        return transfers, rows.out

    def rows(self, shared: Value, index: Expr, suffix: str) -> Chunk | Select:
        """Return a view of the rows of the shard at a place, in the memory where this rank computes on them."""
        full, place = self.gather.out, self.group.places[self.gather.out.name]
        out = Value(self.host.names.fresh(f"{full.name}_{suffix}"), self.piece, full.span)
        if self.kept:
            return Chunk(self.host.values[full.name], out, index, place.count, place.axis, span=full.span)
        return Select(shared, out, index, span=full.span)

    def computed(self, rows: Value, index: Expr, suffix: str) -> list[Statement]:
        """Return the computations on the rows of the shard at a place."""
        slices = Slices(self.host, self.group, index, suffix)
        slices.slices[self.gather.out.name] = rows
        for s in self.computations:
            slices.statement(s)
        return slices.body
