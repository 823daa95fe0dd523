"""Pass `hierarchical`: rows cross hosts in slices by collectives, and one-sided copies move them inside each host.

The pass `levels` has split each collective into one between hosts and one inside each host. Here both are cut in slices
of rows. While one slice goes between hosts, the slice before goes inside the host, and matmuls compute on slices that
are complete. Only ranks of one host access each other's memory.

In an all-gather, a slice goes between hosts first. Each rank then puts what it has received to the ranks of its host.
A rank computes on the rows of its host first, because no NIC has to bring them. In a reduce-scatter, each rank first
puts the products of a slice to the ranks of its host. They add them up, and the sums go between hosts. If no NIC brings
rows, a rank computes slice by slice, each for all hosts, so that the sums of the first slice leave early. An all-reduce
runs in chunks (`hostir/lower/chunks.py`).

Each resource has a worker stream: the NIC, the links of the host in each direction of rows, and the SMs for copies
within a rank and for sums. So no transfer waits until a matmul leaves SMs for the copy or the sum before.

Collectives in two levels are known from NCCL and Horovod. There, each level is one call, and computations wait for the
complete result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import AllReduce, Collective
from hostir.ir.host_ops import Allocate, AsPartial, Chunk, For, Select, SetStream, Synchronize, Wait
from hostir.ir.op import Bin, Expr, Lit, Statement, Value
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import DenseCopy, Sum, TensorOp
from hostir.ir.types import Axis, Kind
from hostir.ir.view_ops import Permute, Reshape, Shard
from hostir.lower import Pass
from hostir.lower.chunks import Chunks
from hostir.lower.host import Host
from hostir.lower.loops import Slices
from hostir.lower.propagate import operands_of, result_of
from hostir.lower.slices import schedule
from hostir.lower.transfers import Blocks, Transfers
from hostir.lower.turns import Moves, Pair, Reduced, SplitAxes, TurnGroup

# The worker streams of collectives between hosts, of copies within a rank and sums, and of copies to the ranks of this
# host: of gathered rows, and of products. If a host has one rank of each team, there is a worker stream for each slice
# instead.
BETWEEN, LOCAL, INSIDE, PRODUCTS = map(Lit, range(4))


@dataclass(frozen=True)
class Hierarchical(Pass):
    """Cuts collectives of rows in slices: one goes between hosts while the one before goes inside each host.

    There are at most `streams` slices. If a rank's rows lie in separate pieces, each piece is a slice.
    """

    name = "hierarchical"
    streams: int = 4

    def run(self, program: Program) -> Program:
        moves = Moves.of(program, self.streams)
        program = moves.noted(self.name)
        steps = schedule(program.body, [*moves.groups(), *moves.sums])
        host = Host(program, ordered(steps))
        host.apart |= {step.reduce.out.name for step in moves.sums}
        workers = 0
        for step in steps:
            if isinstance(step, TurnGroup):
                workers = max(workers, HostTurns(host, step).build())
            elif isinstance(step, Reduced):
                chunks = Chunks(host, step.reduce, step.chunks, self.streams, step.product, step.hosts)
                workers = max(workers, chunks.build())
            elif isinstance(step, Statement):
                host.add_unsliced(step)
        return host.finished(workers)


def ordered(steps: Iterable[object]) -> set[tuple[str, str]]:
    """Return the teams inside hosts that need no barrier between two calls, because flags order the calls.

    A team is a pair: the name of the mesh, and the name of the mesh axis. A rank may put rows of the next call when its
    peers have read the rows of this call. It knows this if it has waited for data that they sent later: in an
    all-reduce, in another group, or in sums that they have computed from the gathered rows.
    """
    uses: dict[tuple[str, str], set[tuple[int, type]]] = {}  # by team: the steps with its collectives, and their types
    for number, step in enumerate(steps):
        inside: list[Collective] = [step.reduce] if isinstance(step, Reduced) else []
        inside += [pair.inside for pair in step.pairs if pair.inside] if isinstance(step, TurnGroup) else []
        for s in inside:
            uses.setdefault((s.mesh.name, s.over), set()).add((number, type(s)))
    return {team for team, each in uses.items() if len(each) > 1 or any(cls is AllReduce for _, cls in each)}


class HostTurns:
    """Builds the statements of a group: copies in two levels, and turns that compute on what has arrived.

    A turn handles the rows of one host in one slice. Computations run on the caller's stream.
    """

    def __init__(self, host: Host, group: TurnGroup) -> None:
        self.host, self.group = host, group
        pair = group.pairs[0]
        outside = (v for s in group.statements for v in operands_of(s) if v.name in host.values)
        like = host.values[next(v.name for v in outside if v.tensor.mesh == pair.between.mesh)]
        self.hosts = host.team(pair.between, like)
        self.ranks = None if pair.inside is None else host.team(pair.inside, like)
        self.slices = pair.places.slices.count.value or 1
        self.computations = [s for s in group.statements if isinstance(s, TensorOp)]
        # True if the rows of this host are put and computed on slice by slice, not rank by rank. Sums need slices. And
        # if there are few ranks, the first rows come sooner.
        self.own_slices = self.ranks is not None and (bool(group.scatters) or self.ranks.ranks < self.slices)
        results = {result_of(s).name for s in group.statements}
        apart = [pair.x for pair in group.scatters if pair.inside is None and not host.used_outside(pair.x, results)]
        # Products that are computed where a collective between hosts reads them.
        self.direct = {s.out.name for s in self.computations} & {x.name for x in apart}
        for s in self.computations:
            if s.out.name not in self.direct:
                host.destination(s.out)
        self.gathered = GatheredRows(self, group.gather) if group.gather else None
        self.summed = [SummedRows(self, pair) for pair in group.scatters]

    @property
    def forks(self) -> bool:
        """True if worker streams begin before the first turn: they gather rows, or put rows that no turn makes."""
        return self.gathered is not None or (self.ranks is not None and not self.computations)

    @property
    def workers(self) -> int:
        """The number of worker streams."""
        return self.slices if self.ranks is None else 3 + (self.gathered is not None and bool(self.summed))

    @property
    def sending(self) -> Expr:
        """The worker stream of copies of products."""
        return PRODUCTS if self.gathered else INSIDE

    def worker(self, slice: Expr) -> Expr:
        """Return the worker stream of the collectives between hosts that move a slice."""
        return slice if self.ranks is None else BETWEEN

    def build(self) -> int:
        """Append all statements to the host program; return the number of worker streams that they use."""
        host, body, worker, slice = self.host, self.host.body, self.host.index("w"), self.host.index("s")
        body += self.transfers[0].reuse_barrier() if self.transfers else []
        if self.forks:
            body.append(For(worker.value, Size(self.workers), (SetStream(worker), Synchronize(host.user))))
            body += [*self.gathered.own_copies(), *self.gathered.copies()] if self.gathered else []
            body.append(SetStream(host.user))
        own = self.ranks is not None and self.gathered is not None  # this host's rows come first
        if own:
            body += self.own_turns()
        other = host.index("o")
        later = self.ranks is not None  # begin with the next host
        turns = self.turn(self.hosts.peer(Bin("+", other, Lit(1)) if later else other), slice, "o", other)
        each: list[Statement] = [For(other.value, Size(self.hosts.ranks - own), tuple(turns))]
        if self.gathered and not own:
            each.insert(0, Synchronize(self.worker(slice)))
        for summed in self.summed:
            each += summed.between(slice)
        body.append(For(slice.value, Size(self.slices), tuple(each)))
        if later or self.summed:  # else each slice has waited for its stream
            body.append(For(worker.value, Size(self.workers), (Synchronize(worker),)))
        return self.workers

    @property
    def transfers(self) -> list[Transfers]:
        """The one-sided copies inside hosts, of each collective."""
        return [each.transfers for each in (self.gathered, *self.summed) if each and each.transfers]

    def own_turns(self) -> list[Statement]:
        """Return the statements for the rows of this host, which need no other host.

        There is one turn for each slice, or one for each rank of the host, in the order in which their rows arrive.
        """
        if self.own_slices:
            slice = self.host.index("s")
            return [For(slice.value, Size(self.slices), tuple(self.turn(self.hosts.rank, slice, "own")))]
        assert self.ranks is not None
        index = self.host.index("i")
        rank = self.ranks.peer(Bin("-", Lit(self.ranks.ranks), index))
        turn = self.turn(self.hosts.rank, None, "own", rank=rank)
        return [For(index.value, Size(self.ranks.ranks), tuple(turn))]

    def turn(
        self, of_host: Expr, slice: Expr | None, suffix: str, other: Expr | None = None, rank: Expr | None = None
    ) -> list[Statement]:
        """Return the statements of a turn: waits, computations, and copies of products.

        Args:
            of_host: the position of the host.
            slice: the index of the slice; None for all slices at once.
            suffix: the end of the names of slices.
            other: the number of the host, counted from the host after this one; None for this host.
            rank: the position of a rank in the host, if the turn is for the rows of this rank only.
        """
        turn = Turn(self, of_host, rank, slice, suffix)
        if self.gathered:
            self.gathered.arrive(turn, other)
        for summed in self.summed:
            summed.expect(turn)
        for s in self.computations:
            turn.statement(s)
        for summed in self.summed:
            summed.inside(turn)
        return turn.body

    def value(self, name: str, like: Value, axes: Iterable[Axis]) -> Value:
        """Return a new value with the mesh and the dtype of another, which is no partial sum."""
        type = replace(like.tensor.host(), axes=tuple(axes), partial=())
        return Value(self.host.names.fresh(name), type, like.span)

    def view(self, view: Select | Chunk | AsPartial, body: list[Statement]) -> Value:
        """Append a view with its inferred type; return its result."""
        typed = replace(view, out=replace(view.out, type=view.infer()))
        body.append(typed)
        return typed.out

    def at(self, x: Value, index: Expr, body: list[Statement], axis: int = 0, name: str = "") -> Value:
        """Append a view of one index of an axis; return its result. Its name begins with `name`, if that is not ""."""
        out = Value(self.host.names.fresh(name or f"{x.name}_s"), x.type, x.span)
        return self.view(Select(x, out, index, axis, span=x.span), body)

    def in_levels(self, x: Value, pair: Pair, axes: tuple[Axis, ...]) -> Value:
        """Append views of rows with the axes in the order of `Pair.levels`; return the result.

        `axes` has the types of these axes.
        """
        order, body = pair.split.order, self.host.body
        places = sorted(range(len(order)), key=lambda k: order[k])
        view = self.value(f"{x.name}_levels", x, (axes[k] for k in places))
        body.append(Reshape(x, view, span=x.span))
        if list(order) == sorted(order):
            return view
        turned = self.value(view.name, x, axes)
        body.append(Permute(view, turned, order, span=x.span))
        return turned


class Turn(Slices):
    """Builds the statements of one turn.

    Args:
        turns: the builder of all turns.
        of_host: the position of the host whose rows these are.
        rank: the position of the rank in this host whose rows these are; None for all ranks of the host.
        slice: the index of the slice; None for all slices.
        suffix: the end of the names of slices.
    """

    def __init__(self, turns: HostTurns, of_host: Expr, rank: Expr | None, slice: Expr | None, suffix: str) -> None:
        super().__init__(turns.host, turns.group, of_host, suffix)
        self.turns, self.of_host, self.rank, self.slice = turns, of_host, rank, slice

    def levels(self, split: SplitAxes) -> list[tuple[int, Expr]]:
        """Return the positions and the indices of the axes of which a turn has one index, the last position first."""
        each = [(split.hosts, self.of_host), (split.ranks, self.rank), (split.slices, self.slice)]
        return sorted([(k, index) for k, index in each if k is not None and index is not None], key=lambda it: -it[0])

    def slice_of(self, full: Value, value: Value) -> tuple[Value, bool]:
        split, view = self.turns.group.levels[value.name].split(full.tensor), full
        if full.tensor.axes != split.axes:
            view = Value(self.names.fresh(f"{value.name}_levels"), full.tensor.with_axes(split.axes), value.span)
            self.body.append(Reshape(full, view, span=value.span))
        for k, index in self.levels(split):
            view = self.turns.at(view, index, self.body, k, f"{value.name}_{self.suffix}")
        return view, True

    def rows(self, buffer: Value, pair: Pair) -> Value:
        """Append views of the rows of this turn in a buffer with the axes `Pair.levels`; return the result.

        Its axes have the order that `slice_of` gives them.
        """
        split, rows = pair.split, buffer
        taken = dict(self.levels(split))
        for k in reversed(split.order):
            if k in taken:
                rows = self.turns.at(rows, taken[k], self.body, split.order.index(k), f"{pair.out.name}_{self.suffix}")
        left = [k for k in split.order if k not in taken]
        if left == sorted(left):
            return rows
        axes = tuple(left.index(k) for k in sorted(left))
        turned = self.fresh(rows, rows.tensor.with_axes(rows.tensor.axes[k] for k in axes))
        self.body.append(Permute(rows, turned, axes, span=rows.span))
        return turned


class GatheredRows:
    """Builds the copies of an all-gather.

    The rows of other hosts arrive in `crossed`, slice by slice. If a host has several ranks, each of them puts its
    rows, and the rows that have crossed, to the buffer `shared` of all ranks of its host, to its own one on the stream
    LOCAL.
    """

    def __init__(self, turns: HostTurns, pair: Pair) -> None:
        self.turns, self.pair = turns, pair
        host, s = turns.host, pair.between
        x = host.packed(host.values[pair.x.name], s)
        self.x = turns.in_levels(x, pair, pair.sharded(pair.levels, hosts=True))
        hosts, *inner = pair.levels
        self.at_slices = 0 if pair.inside is None else 1  # in the axes of one host
        slices = inner.pop(self.at_slices)
        rows = slices, hosts, *pair.sharded(inner, hosts=False)
        self.crossed = turns.value(f"{pair.out.name}_crossed", x, rows)
        host.body.append(Allocate(self.crossed, span=s.span))
        self.transfers: Transfers | None = None
        if pair.inside is not None:
            shared = turns.value(f"{pair.out.name}_shared", x, pair.levels)
            count = turns.slices * turns.hosts.ranks * s.mesh.size(pair.inside.over)
            self.transfers = Transfers(host, pair.inside, shared, flags=Size(count))
        inside = {result_of(each).name for each in turns.group.statements[len(pair.statements) :]}
        self.kept = host.destination(pair.out) if host.used_outside(pair.out, inside) else None

    def flag(self, rank: Expr, slice: Expr | None, other: Expr | None) -> Expr:
        """Return the index of the flag for rows that a rank of this host puts.

        Args:
            rank: the position of the rank in its host.
            slice: the index of the slice; None for all slices.
            other: the number of the other host, counted from the host after this one; None for the rows of this host.
        """
        if slice is None or self.turns.ranks is None:
            return rank
        number: Expr = Bin("*", slice, Lit(self.turns.hosts.ranks))
        if other is not None:
            number = Bin("+", Bin("+", number, other), Lit(1))
        return Bin("+", Bin("*", number, Lit(self.turns.ranks.ranks)), rank)

    def own_copies(self) -> list[Statement]:
        """Return the copies of this rank's rows to the ranks of its host; empty if it is alone there."""
        if self.transfers is None:
            return []
        turns, s, each = self.turns, self.pair.between, list[Statement]()
        place = Value(turns.host.names.fresh("place"), self.x.tensor, s.span)
        shard = Shard(self.transfers.buffer, place, span=s.span)
        if not turns.own_slices:
            return [shard, *self.inside(self.x, place, None, None)]
        slice = turns.host.index("s")
        mine, there = (turns.at(x, slice, each, self.at_slices + 1) for x in (self.x, place))
        each += self.inside(mine, there, slice, None)
        return [shard, For(slice.value, Size(turns.slices), tuple(each), span=s.span)]

    def copies(self) -> list[Statement]:
        """Return the loop over slices that sends rows between hosts, and passes on what has come from other hosts."""
        turns, s, body, slice = self.turns, self.pair.between, list[Statement](), self.turns.host.index("s")
        body.append(SetStream(turns.worker(slice)))
        mine = turns.at(self.x, slice, body, self.at_slices + 1)
        crossed = turns.at(self.crossed, slice, body)
        handle = Value(turns.host.names.fresh(f"{self.pair.out.name}_ready"), Kind.HANDLE, s.span)
        body += [replace(s, x=mine, out=crossed, handle=handle, note="between hosts"), Wait(handle, span=s.span)]
        if self.transfers is not None:
            body += [stream for each in (INSIDE, LOCAL) for stream in (SetStream(each), Synchronize(BETWEEN))]
            body.append(self.pass_on(crossed, slice))
        return [For(slice.value, Size(turns.slices), tuple(body), span=s.span)]

    def pass_on(self, crossed: Value, slice: Expr) -> For:
        """Return the loop over other hosts that puts the rows of a slice to the ranks of this host."""
        turns, each, span = self.turns, list[Statement](), self.pair.between.span
        assert self.transfers is not None
        other = turns.host.index("o")
        of_host = turns.hosts.peer(Bin("+", other, Lit(1)))
        rows = turns.at(crossed, of_host, each, name=f"{self.crossed.name}_o")
        shared = turns.at(self.transfers.buffer, of_host, each, name=f"{self.transfers.buffer.name}_o")
        ranks = self.pair.sharded(shared.tensor.axes, hosts=False)
        place = Value(turns.host.names.fresh("place"), shared.tensor.with_axes(ranks), span)
        each.append(Shard(shared, place, span=span))
        each += self.inside(rows, turns.at(place, slice, each, 1), slice, other)
        return For(other.value, Size(turns.hosts.ranks - 1), tuple(each), span=span)

    def inside(self, rows: Value, place: Value, slice: Expr | None, other: Expr | None) -> list[Statement]:
        """Return the statements that put some rows to all ranks of this host."""
        ranks, transfers = self.turns.ranks, self.transfers
        assert ranks is not None
        assert transfers is not None
        index = self.turns.host.index("i")
        blocks = Blocks(rows, place, (), self.flag(ranks.rank, slice, other))
        copies = transfers.put_and_signal(blocks, ranks.peer(Bin("+", index, Lit(1))), "inside the host")
        return [
            *(SetStream(INSIDE), For(index.value, Size(ranks.ranks - 1), copies, span=rows.span)),
            *(SetStream(LOCAL), *transfers.put_and_signal(blocks, ranks.rank, "to this rank itself")),
        ]

    def arrive(self, turn: Turn, other: Expr | None) -> None:
        """Append the waits for the rows of a turn, and make them the operand of its computations.

        `other` is the number of the other host, counted from the host after this one; None for the rows of this host.
        """
        turns, pair, body = self.turns, self.pair, turn.body
        if self.transfers is None:
            assert turn.slice is not None
            slice = turns.at(self.crossed, turn.slice, body)
            turn.slices[pair.out.name] = turns.at(slice, turn.of_host, body, name=f"{pair.out.name}_{turn.suffix}")
        else:
            assert turns.ranks is not None
            index = turns.host.index("i")
            wait = self.transfers.wait(self.flag(turn.rank or turns.ranks.peer(index), turn.slice, other))
            for_each = For(index.value, Size(turns.ranks.ranks), (wait,), span=pair.between.span)
            body.append(for_each if turn.rank is None else wait)
            turn.slices[pair.out.name] = turn.rows(self.transfers.buffer, pair)
        if self.kept is not None:
            view, _ = turn.slice_of(self.kept, pair.out)
            note = f"copy: {pair.out} is wanted whole"
            turn.body.append(DenseCopy(out=view, x=turn.slices[pair.out.name], span=pair.out.span, note=note))


class SummedRows:
    """Builds the copies and sums of a reduce-scatter.

    If a host has several ranks, a rank puts the rows of each of them to that rank's buffer `sent`, where each sender
    has a slot. When a slice is complete, each rank adds up its slots in one sum. The sums, one for each host, then go
    between hosts.
    """

    def __init__(self, turns: HostTurns, pair: Pair) -> None:
        self.turns, self.pair = turns, pair
        host, s = turns.host, pair.between
        like = host.values.get(pair.x.name, pair.x)
        hosts, *inner = pair.levels
        self.at_slices = 0 if pair.inside is None else 1  # in the axes of one host
        slices = inner.pop(self.at_slices)
        room = pair.sharded(inner, hosts=False)
        self.sums = turns.value(f"{pair.out.name}_sums", like, (slices, hosts, *room))
        self.transfers: Transfers | None = None
        if pair.inside is None:
            self.sums = replace(self.sums, type=replace(self.sums.tensor, partial=pair.x.tensor.partial))
        else:
            ranks = s.mesh.size(pair.inside.over)
            sent = turns.value(f"{pair.out.name}_sent", like, (slices, Axis.of(ranks), hosts, *room))
            self.transfers = Transfers(host, pair.inside, sent, flags=Size(turns.slices * turns.hosts.ranks * ranks))
        host.body.append(Allocate(self.sums, span=s.span))
        self.out = turns.in_levels(host.destination(pair.out), pair, pair.sharded(pair.levels, hosts=True))

    def of_turn(self, buffer: Value, turn: Turn, sender: Expr | None = None) -> Value:
        """Append the views of the part of a buffer that belongs to a turn, and to a sender, if any; return the part."""
        assert turn.slice is not None
        part = self.turns.at(buffer, turn.slice, turn.body)
        part = part if sender is None else self.turns.at(part, sender, turn.body, name="slot")
        return self.turns.at(part, turn.of_host, turn.body, name=f"{buffer.name}_{turn.suffix}")

    def expect(self, turn: Turn) -> None:
        """Let the computations of a turn write their products where they are sent from, if that is possible."""
        if self.pair.x.name in self.turns.direct:
            turn.slices[self.pair.x.name] = self.of_turn(self.sums, turn)

    def inside(self, turn: Turn) -> None:
        """Append the copies of the products of a turn to the ranks of this host."""
        turns, x = self.turns, self.pair.x
        product = turn.slices.get(x.name) or turn.slice_of(turns.host.values[x.name], x)[0]
        if self.transfers is None:
            if x.name not in turns.direct:
                turn.body.append(DenseCopy(out=self.of_turn(self.sums, turn), x=product, span=x.span))
            return
        ranks, transfers, index = turns.ranks, self.transfers, turns.host.index("i")
        at_ranks = self.pair.split.ranks_in_turn
        assert ranks is not None
        assert at_ranks is not None
        peer = ranks.peer(Bin("+", index, Lit(1)))
        slot = self.of_turn(transfers.buffer, turn, ranks.rank)

        def block(rank: Expr, body: list[Statement]) -> Value:
            name = Value(turns.host.names.fresh(f"{x.name}_block"), x.type, x.span)
            return turns.view(Chunk(product, name, rank, Size(ranks.ranks), at_ranks, span=x.span), body)

        own = block(ranks.rank, turn.body)
        each = list[Statement]()
        blocks = Blocks(block(peer, each), slot, (), self.flag(turn.slice, turn.of_host, ranks.rank))
        each += transfers.put_and_signal(blocks, peer, "inside the host")
        turn.body += [
            *(SetStream(turns.sending), *([Synchronize(turns.host.user)] if turns.computations else [])),
            For(index.value, Size(ranks.ranks - 1), tuple(each), span=x.span),
            SetStream(turns.host.user),
            transfers.put(own, slot, ranks.rank, note="to this rank itself"),
        ]

    def flag(self, slice: Expr | None, of_host: Expr, rank: Expr) -> Expr:
        """Return the index of the flag for the rows of a host in a slice that a rank of this host puts."""
        assert slice is not None
        assert self.turns.ranks is not None
        number = Bin("+", Bin("*", slice, Lit(self.turns.hosts.ranks)), of_host)
        return Bin("+", Bin("*", number, Lit(self.turns.ranks.ranks)), rank)

    def add_up(self, slice: Expr) -> list[Statement]:
        """Return the statements that wait for what the ranks of this host have sent for a slice, and add it up."""
        turns, transfers, span, body = self.turns, self.transfers, self.pair.x.span, list[Statement]()
        if transfers is None or turns.ranks is None:
            return []
        host, index = turns.host.index("h"), turns.host.index("i")
        sender = turns.ranks.peer(Bin("+", index, Lit(1)))
        wait = transfers.wait(self.flag(slice, turns.hosts.peer(host), sender))
        waits = For(index.value, Size(turns.ranks.ranks - 1), (wait,), span=span)
        sums, sent = (turns.at(x, slice, body) for x in (self.sums, transfers.buffer))
        return [
            *(SetStream(LOCAL), Synchronize(turns.host.user)),
            For(host.value, Size(turns.hosts.ranks), (waits,), span=span),
            *body,
            Sum(sums, sent, 0, span=span, note="of the ranks of this host"),
        ]

    def between(self, slice: Expr) -> list[Statement]:
        """Return the statements that add up a slice inside the host, and send the sums between hosts."""
        turns, s, body = self.turns, self.pair.between, self.add_up(slice)
        alone = self.transfers is None
        body += [SetStream(turns.worker(slice)), Synchronize(turns.host.user if alone else LOCAL)]
        sums, out = turns.at(self.sums, slice, body), turns.at(self.out, slice, body, self.at_slices + 1)
        if not alone:
            name = Value(turns.host.names.fresh("addend"), sums.type, s.span)
            sums = turns.view(AsPartial(sums, name, s.over, span=s.span), body)
        handle = Value(turns.host.names.fresh(f"{self.pair.out.name}_ready"), Kind.HANDLE, s.span)
        body += [replace(s, x=sums, out=out, handle=handle, note="between hosts"), Wait(handle, span=s.span)]
        return [*body, SetStream(turns.host.user)]
