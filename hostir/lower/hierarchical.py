"""Pass `hierarchical`: rows cross hosts in slices by collectives, and one-sided copies move them inside each host.

The pass `levels` has split each collective into one between hosts and one inside each host. Here both are cut in slices
of rows. While one slice goes between hosts, the slice before goes inside the host, and matmuls compute on slices that
are complete. Only ranks of one host access each other's memory.

In an all-gather, a slice goes between hosts first. Each rank then puts what it has received to the ranks of its host.
In a reduce-scatter, each rank first puts the products of a slice to the ranks of its host. They add them up, and the
sums go between hosts. A rank computes on the rows of its host first, because no NIC has to bring them. An all-reduce
runs in chunks (`hostir/lower/chunks.py`).

Collectives in two levels are known from NCCL and Horovod. There, each level is one call, and computations wait for the
complete result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hostir.ir.host_ops import Allocate, AsPartial, Chunk, For, Select, SetStream, Synchronize, Wait
from hostir.ir.op import Bin, Expr, Lit, Ref, Statement, Value
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import DenseCopy, Sum, TensorOp
from hostir.ir.types import Axis, Kind
from hostir.ir.view_ops import Reshape, Shard
from hostir.lower import Pass
from hostir.lower.chunks import Chunks
from hostir.lower.host import Host, modulo
from hostir.lower.loops import Slices
from hostir.lower.propagate import operands_of, result_of
from hostir.lower.slices import schedule
from hostir.lower.transfers import Blocks, Transfers
from hostir.lower.turns import Moves, Pair, Reduced, Turns


@dataclass(frozen=True)
class Hierarchical(Pass):
    """Cuts collectives of rows in slices: one goes between hosts while the one before goes inside each host.

    There are at most `streams` slices, each on a worker stream. If a rank's rows lie in pieces, there may be more.
    """

    name = "hierarchical"
    streams: int = 4

    def run(self, program: Program) -> Program:
        moves = Moves.of(program, self.streams)
        program = moves.noted(self.name)
        host = Host(program)
        host.apart |= {step.reduce.out.name for step in moves.sums}
        workers = 0
        for step in schedule(program.body, [*moves.groups(), *moves.sums]):
            if isinstance(step, Turns):
                workers = max(workers, HostTurns(host, step, self.streams).build())
            elif isinstance(step, Reduced):
                chunks = Chunks(host, step.reduce, step.chunks, self.streams, step.product, step.hosts)
                workers = max(workers, chunks.build())
            elif isinstance(step, Statement):
                host.add_unsliced(step)
        return host.finished(workers)


class HostTurns:
    """Builds the statements of a group: copies in two levels, and turns that compute on what has arrived.

    Each slice has a worker stream for its copies. Computations run on the caller's stream.
    """

    def __init__(self, host: Host, group: Turns, streams: int) -> None:
        self.host, self.group = host, group
        pair = group.pairs[0]
        mesh = pair.between.mesh
        outside = (v for s in group.statements for v in operands_of(s) if v.name in host.values)
        like = host.values[next(v.name for v in outside if v.tensor.mesh == mesh)]
        self.hosts = host.team(pair.between, like)
        self.ranks = None if pair.inside is None else host.team(pair.inside, like)
        self.slices = pair.places.slices.count.value or 1
        self.workers = min(streams, self.slices)
        self.buffers: dict[str, Value] = {}  # by name: the buffer of a result, with the rows of all turns
        self.gathered = GatheredRows(self, group.gather) if group.gather else None
        self.summed = [SummedRows(self, pair) for pair in group.scatters]

    def build(self) -> int:
        """Append all statements to the host program; return the number of worker streams that they use."""
        host, body, worker, slice, other = self.host, self.host.body, *map(self.host.index, "wso")
        shared = [each.transfers for each in (self.gathered, *self.summed) if each and each.transfers]
        body += shared[0].reuse_barrier() if shared else []
        for_each_worker = For(worker.value, Size(self.workers), (SetStream(worker), Synchronize(host.user)))
        body += [for_each_worker] if self.gathered else []
        if self.gathered:
            body.append(For(slice.value, Size(self.slices), tuple(self.gathered.copies(slice))))
        body.append(SetStream(host.user))
        body.append(For(slice.value, Size(self.slices), tuple(self.turn(self.hosts.rank, slice, "own"))))
        turns = self.turn(self.hosts.peer(Bin("+", other, Lit(1))), slice, "o")
        ends = [statement for summed in self.summed for statement in summed.between(slice)]
        loop = For(other.value, Size(self.hosts.ranks - 1), tuple(turns))
        body.append(For(slice.value, Size(self.slices), (*self.crossed(slice), loop, *ends)))
        body.append(For(worker.value, Size(self.workers), (Synchronize(worker),)))
        return self.workers

    def crossed(self, slice: Expr) -> list[Statement]:
        """Return the wait for a slice that has come from other hosts, in a list, if no flag announces it."""
        return [] if self.gathered is None or self.ranks is not None else [Synchronize(self.worker(slice))]

    def turn(self, of_host: Expr, slice: Expr, suffix: str) -> list[Statement]:
        """Return the statements for the rows of one host in one slice: waits, computations, and copies of products."""
        turn = Turn(self, of_host, slice, suffix)
        if self.gathered:
            self.gathered.arrive(turn)
        for summed in self.summed:
            summed.expect(turn)
        for s in self.group.statements:
            if isinstance(s, TensorOp):
                turn.statement(s)
        for summed in self.summed:
            summed.inside(turn)
        return turn.body

    def worker(self, slice: Expr) -> Expr:
        """Return the number of the worker stream of a slice."""
        return slice if self.workers == self.slices else modulo(slice, self.workers)

    def flag(self, slice: Expr, of_host: Expr, rank: Expr) -> Expr:
        """Return the index of the flag for the rows of one host that one rank of this host puts, in one slice."""
        assert self.ranks is not None
        turn = Bin("+", Bin("*", slice, Lit(self.hosts.ranks)), of_host)
        return Bin("+", Bin("*", turn, Lit(self.ranks.ranks)), rank)

    def flags(self) -> Size:
        """Return the number of flags that `flag` numbers."""
        assert self.ranks is not None
        return Size(self.slices * self.hosts.ranks * self.ranks.ranks)

    def value(self, name: str, like: Value, axes: Iterable[Axis]) -> Value:
        """Return a new value with the mesh and the dtype of another, without partial sums."""
        type = replace(like.tensor.host(), axes=tuple(axes), partial=())
        return Value(self.host.names.fresh(name), type, like.span)

    def view(self, view: Select | Chunk | AsPartial, body: list[Statement]) -> Value:
        """Append a view with its inferred type; return its result."""
        typed = replace(view, out=replace(view.out, type=view.infer()))
        body.append(typed)
        return typed.out

    def at(self, x: Value, index: Expr, body: list[Statement], axis: int = 0, name: str = "") -> Value:
        """Append a view of one index of an axis; return its result, with the given name if that is free."""
        out = Value(self.host.names.fresh(name or f"{x.name}_s"), x.type, x.span)
        return self.view(Select(x, out, index, axis, span=x.span), body)


class Turn(Slices):
    """Builds the statements of one turn: those for the rows of one host in one slice.

    Args:
        turns: the builder of all turns.
        of_host: the position of the host whose rows these are.
        slice: the index of the slice.
        suffix: the end of the names of slices.
    """

    def __init__(self, turns: HostTurns, of_host: Expr, slice: Expr, suffix: str) -> None:
        super().__init__(turns.host, turns.group, of_host, suffix)
        self.turns, self.of_host, self.slice = turns, of_host, slice

    def slice_of(self, full: Value, value: Value) -> tuple[Value, bool]:
        split, view = self.turns.group.levels[value.name].split(full.tensor), full
        if full.tensor.axes != split.axes:
            view = Value(self.names.fresh(f"{value.name}_levels"), full.tensor.with_axes(split.axes), value.span)
            self.body.append(Reshape(full, view, span=value.span))
        name = f"{value.name}_{self.suffix}"
        for index, k in sorted([(self.of_host, split.hosts), (self.slice, split.slices)], key=lambda each: -each[1]):
            view = self.turns.at(view, index, self.body, k, name)
        return view, True

    def staged(self, value: Value) -> Value:
        """Return the place of this turn in a buffer for all turns, which the first turn allocates."""
        if value.name not in self.turns.buffers:
            turns, type = self.turns, value.tensor.host()
            axes = turns.group.levels[value.name].split(type).turn
            rounds = [Axis.of(turns.slices), Axis.of(turns.hosts.ranks), *axes]
            self.names.taken.discard(value.name)
            turns.buffers[value.name] = self.host.scratch(value.name, type.with_axes(rounds), value)
        return self.of_turn(self.turns.buffers[value.name])

    def of_turn(self, buffer: Value, hosts: int = 0) -> Value:
        """Return this turn's part of a buffer with a leading axis of slices, and an axis of hosts inside it."""
        name = f"{buffer.name}_{self.suffix}"
        return self.turns.at(self.turns.at(buffer, self.slice, self.body), self.of_host, self.body, hosts, name)


class GatheredRows:
    """Builds the copies of an all-gather.

    The rows of other hosts arrive in `crossed`. If a host has several ranks, each of them puts its rows, and those that
    have crossed, to the buffers `shared` of all ranks of its host. Otherwise `shared` holds only the rank's rows.
    """

    def __init__(self, turns: HostTurns, pair: Pair) -> None:
        self.turns, self.pair = turns, pair
        host, split, s = turns.host, pair.split, pair.between
        x = host.packed(host.values[pair.x.name], s)
        self.x = turns.value(f"{x.name}_levels", x, pair.sharded(split.axes, split.hosts, split.ranks))
        host.body.append(Reshape(x, self.x, span=s.span))
        self.slices, (axes, self.at_hosts, at_ranks) = split.slices, split.in_slice
        lead = Axis.of(turns.slices)
        self.crossed = turns.value(f"{pair.out.name}_crossed", x, (lead, *pair.sharded(axes, None, at_ranks)))
        host.body.append(Allocate(self.crossed, span=s.span))
        self.shared = turns.value(f"{pair.out.name}_shared", x, (lead, *axes))
        self.mine = pair.sharded(axes, self.at_hosts, at_ranks)  # the axes of this rank's rows in a slice
        self.transfers: Transfers | None = None
        if pair.inside is None:
            host.body.append(Allocate(self.shared, span=s.span))
        else:
            self.transfers = Transfers(host, pair.inside, self.shared, flags=turns.flags())
        inside = {result_of(each).name for each in turns.group.statements[len(pair.statements) :]}
        self.kept = host.destination(pair.out) if host.used_outside(pair.out, inside) else None

    def copies(self, slice: Ref) -> list[Statement]:
        """Return the statements that send this rank's rows of a slice, and those that have come from other hosts."""
        turns, s, body = self.turns, self.pair.between, list[Statement]()
        body.append(SetStream(turns.worker(slice)))
        mine, crossed = turns.at(self.x, slice, body, self.slices), turns.at(self.crossed, slice, body)
        handle = Value(turns.host.names.fresh(f"{self.pair.out.name}_ready"), Kind.HANDLE, s.span)
        body.append(replace(s, x=mine, out=crossed, handle=handle, note="between hosts"))
        if self.transfers is None:
            return [*body, Wait(handle, span=s.span)]
        shared = turns.at(self.shared, slice, body)
        place = self.own_place(shared, body)
        body += [*self.inside(mine, place, turns.hosts.rank, slice), Wait(handle, span=s.span)]
        other, each = turns.host.index("o"), list[Statement]()
        of_host = turns.hosts.peer(Bin("+", other, Lit(1)))
        there = turns.at(crossed, of_host, each, self.at_hosts, f"{self.crossed.name}_o")
        rows = turns.at(shared, of_host, each, self.at_hosts, f"{self.shared.name}_o")
        place = Value(turns.host.names.fresh("place"), there.tensor, s.span)
        each += [Shard(rows, place, span=s.span), *self.inside(there, place, of_host, slice)]
        return [*body, For(other.value, Size(turns.hosts.ranks - 1), tuple(each), span=s.span)]

    def own_place(self, shared: Value, body: list[Statement]) -> Value:
        """Append the view of the place of this rank's rows in the rows of a slice; return its result."""
        place = Value(self.turns.host.names.fresh("place"), shared.tensor.with_axes(self.mine), self.pair.out.span)
        body.append(Shard(shared, place, span=place.span))
        return place

    def inside(self, rows: Value, place: Value, of_host: Expr, slice: Expr) -> list[Statement]:
        """Return the loop that puts some rows to all ranks of this host, first to this rank."""
        ranks, transfers = self.turns.ranks, self.transfers
        assert ranks is not None
        assert transfers is not None
        index = self.turns.host.index("i")
        flag = self.turns.flag(slice, of_host, ranks.rank)
        copies = transfers.put_and_signal(Blocks(rows, place, (), flag), ranks.peer(index), "inside the host")
        return [For(index.value, Size(ranks.ranks), copies, span=rows.span)]

    def arrive(self, turn: Turn) -> None:
        """Append the waits for the rows of a turn, and make them the operand of its computations."""
        turns, pair = self.turns, self.pair
        mine = turn.of_host == turns.hosts.rank
        if self.transfers is not None:
            assert turns.ranks is not None
            index = turns.host.index("i")
            wait = self.transfers.wait(turns.flag(turn.slice, turn.of_host, index))
            turn.body.append(For(index.value, Size(turns.ranks.ranks), (wait,), span=pair.between.span))
        elif mine:  # no collective brings them: they need no wait
            x = turns.at(self.x, turn.slice, turn.body, self.slices)
            place = self.own_place(turns.at(self.shared, turn.slice, turn.body), turn.body)
            turn.body.append(DenseCopy(out=place, x=x, span=pair.out.span))
        rows = turn.of_turn(self.shared if mine or self.transfers else self.crossed, self.at_hosts)
        turn.slices[pair.out.name] = rows
        if self.kept is not None:
            view, _ = turn.slice_of(self.kept, pair.out)
            turn.body.append(DenseCopy(out=view, x=rows, span=pair.out.span, note=f"copy: {pair.out} is wanted whole"))


class SummedRows:
    """Builds the copies and sums of a reduce-scatter.

    If a host has several ranks, a rank puts the rows of each of them to that rank's buffer `sent`, where each sender
    has a slot. Each rank adds up its slots. The sums of a slice, one for each host, then go between hosts.
    """

    def __init__(self, turns: HostTurns, pair: Pair) -> None:
        self.turns, self.pair = turns, pair
        host, split, s = turns.host, pair.split, pair.between
        like = host.values.get(pair.x.name, pair.x)
        self.slices, (axes, self.at_hosts, at_ranks) = split.slices, split.in_slice
        lead = Axis.of(turns.slices)
        self.sums = turns.value(f"{pair.out.name}_sums", like, (lead, *pair.sharded(axes, None, at_ranks)))
        self.transfers: Transfers | None = None
        if pair.inside is None:
            self.sums = replace(self.sums, type=replace(self.sums.tensor, partial=pair.x.tensor.partial))
        else:
            room = pair.sharded(split.turn, None, split.ranks_in_turn)
            slots = [lead, Axis.of(turns.hosts.ranks), Axis.of(s.mesh.size(pair.inside.over)), *room]
            sent = turns.value(f"{pair.out.name}_sent", like, slots)
            self.transfers = Transfers(host, pair.inside, sent, flags=turns.flags())
        host.body.append(Allocate(self.sums, span=s.span))
        out = host.destination(pair.out)
        self.out = turns.value(f"{pair.out.name}_levels", out, pair.sharded(split.axes, split.hosts, split.ranks))
        host.body.append(Reshape(out, self.out, span=s.span))

    def expect(self, turn: Turn) -> None:
        """Let the computations of a turn write their products where they are sent from, if that is possible."""
        made = any(isinstance(s, TensorOp) and s.out.name == self.pair.x.name for s in self.turns.group.statements)
        if made and self.transfers is None and not turn.escapes(self.pair.x):
            turn.slices[self.pair.x.name] = turn.of_turn(self.sums, self.at_hosts)

    def inside(self, turn: Turn) -> None:
        """Append the copies of the products of a turn to the ranks of this host, and the sum of what they have sent."""
        turns, pair, transfers, body = self.turns, self.pair, self.transfers, turn.body
        x = pair.x
        product = turn.slices[x.name] if x.name in turn.slices else turn.slice_of(turns.host.values[x.name], x)[0]
        sums = turn.of_turn(self.sums, self.at_hosts)
        if transfers is None:
            if product.tensor != sums.tensor or x.name not in turn.slices:
                body.append(DenseCopy(out=sums, x=product, span=x.span))
            return
        ranks, index = turns.ranks, turns.host.index("i")
        assert ranks is not None
        assert pair.split.ranks_in_turn is not None
        sent, each = turn.of_turn(transfers.buffer), list[Statement]()
        body += [SetStream(turns.worker(turn.slice)), Synchronize(turns.host.user)]
        name = Value(turns.host.names.fresh(f"{x.name}_block"), x.type, x.span)
        count, to = Size(ranks.ranks), ranks.peer(index)
        block = turns.view(Chunk(product, name, to, count, pair.split.ranks_in_turn, span=x.span), each)
        slot = turns.at(sent, ranks.rank, body, name="slot")
        flag = turns.flag(turn.slice, turn.of_host, ranks.rank)
        each += transfers.put_and_signal(Blocks(block, slot, (), flag), to, "inside the host")
        body.append(For(index.value, count, tuple(each), span=x.span))
        wait = transfers.wait(turns.flag(turn.slice, turn.of_host, index))
        body.append(For(index.value, count, (wait,), span=x.span))
        body += [Sum(sums, sent, 0, span=x.span, note="of the ranks of this host"), SetStream(turns.host.user)]

    def between(self, slice: Expr) -> list[Statement]:
        """Return the statements that send the sums of a slice between hosts."""
        turns, s, body = self.turns, self.pair.between, list[Statement]()
        body.append(SetStream(turns.worker(slice)))
        body += [Synchronize(turns.host.user)] if self.transfers is None else []
        sums, out = turns.at(self.sums, slice, body), turns.at(self.out, slice, body, self.slices)
        if self.transfers is not None:
            name = Value(turns.host.names.fresh("addend"), sums.type, s.span)
            sums = turns.view(AsPartial(sums, name, s.over, span=s.span), body)
        handle = Value(turns.host.names.fresh(f"{self.pair.out.name}_ready"), Kind.HANDLE, s.span)
        body += [replace(s, x=sums, out=out, handle=handle, note="between hosts"), Wait(handle, span=s.span)]
        return [*body, SetStream(turns.host.user)]
