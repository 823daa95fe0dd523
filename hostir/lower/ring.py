"""Pass `ring`: each rank pulls its peers' shards one after another, and multiplies each while the next is copied.

The schedule is that of the pipelined all-gather of torch's asynchronous tensor parallelism
(`torch.distributed._symmetric_memory`): copies over symmetric memory instead of a collective, the own shard first, and
each rank beginning with another peer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import AllGather
from hostir.ir.host_ops import Chunk, For, Select, SetStream, Synchronize
from hostir.ir.op import Bin, Codec, Expr, Lit, Statement, Value
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import DenseCopy, TensorOp
from hostir.ir.types import Axis, TensorType
from hostir.lower import Pass
from hostir.lower.gathers import Gathers, reads_rows, shard_in_pieces, shard_place, with_block_axes
from hostir.lower.host import Host, modulo
from hostir.lower.pipeline import SlicedGroup, operand_places, result_place, schedule, why_not
from hostir.lower.propagate import result_of
from hostir.lower.transfers import Transfers

FIRST = Lit(0)  # the worker on which the shards are made ready, before it takes its turns


@dataclass(frozen=True)
class Ring(Pass):
    """Replaces an allgather of rows by copies from one peer after another, each followed by its matmuls."""

    name = "ring"
    streams: int = 4

    def run(self, program: Program) -> Program:
        gathers = Gathers.of(program, self.name)
        in_turn = _in_turn(program, gathers.rows)
        gathers = gathers.only(
            in_turn.__contains__, "every matmul of these rows also needs what a later allgather brings"
        )
        blocked, rows = with_block_axes(gathers.with_reasons(program, self.name), gathers.rows, shard_in_pieces)
        groups = _groups(blocked, rows)
        host = Host(blocked)
        for step in schedule(blocked.body, groups):
            if isinstance(step, SlicedGroup):
                Turns(host, step).build(self.streams)
            else:
                host.whole(step)
        return host.finished(max((_pool(s, self.streams) for s in rows), default=0))


def _pool(s: AllGather, streams: int) -> int:
    """Return the number of worker streams: as asked for, but not more than peers."""
    return min(streams, s.mesh.size(s.over) - 1)


# Computations of a turn -------------------------------------------------------------------------------------------
def _groups(program: Program, gathers: Sequence[AllGather]) -> list[SlicedGroup]:
    """Return, for each allgather, the computations that can run on the rows of one shard."""
    after = _after(program, gathers)
    groups: list[SlicedGroup] = []
    taken: set[str] = set()
    for n, gather in enumerate(gathers):
        group = SlicedGroup([gather], {gather.out.name: shard_place(gather)})
        made = {gather.out.name}
        late = {name for name, latest in after.items() if latest >= n}
        for s in program.body:
            name = result_of(s).name
            if isinstance(s, TensorOp) and name not in taken and _joins(s, group, made, late - made):
                group.statements.append(s)
                made.add(name)
        taken |= made
        groups.append(group)
    return groups


def _in_turn(program: Program, gathers: Sequence[AllGather]) -> list[AllGather]:
    """Return the allgathers with a matmul that does not depend on a later one."""
    after = _after(program, gathers)
    return [
        s
        for n, s in enumerate(gathers)
        if any(
            reads_rows(user, s.out) and all(after.get(v.name, -1) < n for v in user.values(Codec.READ) if v != s.out)
            for user in program.body
        )
    ]


def _after(program: Program, gathers: Sequence[AllGather]) -> dict[str, int]:
    """Return, for each value, the number of the last allgather that it depends on; -1 if there is none."""
    after: dict[str, int] = {}
    number = {s.out.name: n for n, s in enumerate(gathers)}
    for s in program.body:
        name = result_of(s).name
        reads = (after.get(v.name, -1) for v in s.values(Codec.READ, Codec.ALIAS))
        after[name] = max([number.get(name, -1), *reads])
    return after


def _joins(s: TensorOp, group: SlicedGroup, made: Collection[str], late: Collection[str]) -> bool:
    """Whether a computation can run shard by shard on what the group makes; if so, its places are added to the group.

    What else it reads must not depend on this or a later allgather: groups run in the order of their allgathers.
    """
    source = next((v for v in s.operands if v.name in made), None)
    place = result_place(s, source, group.places[source.name]) if source else None
    if place is None or any(v.name in late for v in s.operands):
        return False
    places = operand_places(s, place)
    whole = any(v.name in made and v.name not in places for v in s.operands)
    if whole or why_not(s, place, places) or any(group.places.get(n, p) != p for n, p in places.items()):
        return False
    sliced = [(s.out, place), *((v, places[v.name]) for v in s.operands if v.name in places)]
    if not all(at.blocks_outside(v.tensor).is_one for v, at in sliced):
        return False
    group.places |= {**places, s.out.name: place}
    return True


# The turns --------------------------------------------------------------------------------------------------------
class Turns:
    """Builds the statements of one allgather and of what is computed from it, at the top level of a host program.

    A shard has the same place and layout on every rank, its owner included: so kernels run alike on every rank, and
    what they compute from a shard has the same bits everywhere.
    """

    def __init__(self, host: Host, group: SlicedGroup) -> None:
        gather = group.statements[0]
        assert isinstance(gather, AllGather)
        self.host, self.group, self.gather, self.team = host, group, gather, host.team(gather)
        self.computations = group.statements[1:]
        self.kept = host.used_outside(gather.out, {result_of(s).name for s in self.computations})
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
        body += self.turn(self.team.rank, "own", own)
        turn = self.host.index("i")
        peer = self.team.peer(Bin("+", turn, Lit(1)))  # each rank gets from another one
        rows = self.rows(shared, peer, "i")
        get = transfers.get(shared if self.kept else rows.out, rows.out, peer)
        theirs = (SetStream(modulo(turn, pool)), rows, get, *self.turn(peer, "i", rows.out))
        body.append(For(turn.value, Size(self.team.ranks - 1), theirs, span=s.span))
        body += [SetStream(user), For(worker.value, Size(pool), (Synchronize(worker),))]

    def share(self) -> tuple[Transfers, Value]:
        """Copy the own shard to a symmetric buffer, for peers to get; return also the own rows for this rank's matmuls.

        The buffer has room for the shards of all, unless these are wanted whole and go to a tensor of their own.
        """
        s, host = self.gather, self.host
        x, piece = host.packed(host.values[s.x.name], s), self.piece_type(s.out)
        room = piece if self.kept else piece.with_axes([Axis.of(self.team.ranks), *piece.axes])
        transfers = Transfers(host, s, Value(host.names.fresh(f"{s.x.name}_shared"), room, s.span))
        shared, rank = transfers.buffer, self.team.rank
        host.body += transfers.reuse_barrier()
        rows = self.rows(shared, rank, "own")
        host.body += [rows, transfers.put(x, shared if self.kept else rows.out, rank)]
        return transfers, rows.out

    def rows(self, shared: Value, index: Expr, suffix: str) -> Chunk | Select:
        """Return the rows of the shard at a place, in the memory where this rank computes on them."""
        if self.kept:
            return self.piece(self.gather.out, index, suffix)
        full = self.gather.out
        out = Value(self.host.names.fresh(f"{full.name}_{suffix}"), self.piece_type(full), full.span)
        return Select(shared, out, index, span=full.span)

    def turn(self, index: Expr, suffix: str, rows: Value) -> list[Statement]:
        """Return the computations on the rows of the shard at a place."""
        pieces = {self.gather.out.name: rows}
        done: list[Statement] = []
        for s in self.computations:
            out = result_of(s).name
            by_rows = {out, *operand_places(s, self.group.places[out])}  # another may take the same whole
            for v in s.values(Codec.READ, Codec.WRITE):
                if v.name in by_rows and v.name not in pieces:
                    done.append(piece := self.piece(v, index, suffix))
                    pieces[v.name] = piece.out
            done.append(s.rename({**self.host.values, **{name: pieces[name] for name in by_rows}}))
        return done

    def piece(self, value: Value, index: Expr, suffix: str) -> Chunk:
        """Return a view of the rows of the shard at a place, in a tensor that has the rows of all."""
        at = self.group.places[value.name]
        out = Value(self.host.names.fresh(f"{value.name}_{suffix}"), self.piece_type(value), value.span)
        return Chunk(self.host.values[value.name], out, index, at.count, at.axis, span=value.span)

    def piece_type(self, value: Value) -> TensorType:
        return replace(self.group.places[value.name], keep=True).slice(value.tensor)
