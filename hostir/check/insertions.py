"""Propose statements that might repair a finding, and the places to insert them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hostir.check.order import Order
from hostir.check.proof import Finding
from hostir.check.tracer import CALLER, Event, Flag
from hostir.ir.host_ops import CurrentStream, For, FreeBuffer, SetStream, Synchronize, Wait
from hostir.ir.machine import Frame
from hostir.ir.onesided_ops import Barrier, Signal, WaitSignal
from hostir.ir.op import (
    ZERO,
    Bin,
    Codec,
    Expr,
    FlagOperand,
    Lit,
    Phase,
    Ref,
    Statement,
    Sync,
    Value,
    expr_values,
    rename_expr,
)
from hostir.ir.program import Names, Program
from hostir.ir.sizes import Size
from hostir.ir.sizes import product as size_product
from hostir.ir.types import FLAG, Kind, TensorType

# Places in a program --------------------------------------------------------------------------------------------------
# Edits of host programs by place; and facts about a place: the names in scope, the current stream.

BodyPosition = tuple[int, ...]  # an index into the program's body, an index into the body of that statement, ...
Block = tuple[Statement, ...]


def issues(s: Statement) -> bool:
    """Return True if a statement itself issues work to the current stream."""
    return not (s.on_host or moves_on(s) or names_stream(s))


def moves_on(s: Statement) -> bool:
    """Return True if a statement may change the current stream."""
    return s.sets_stream is not None or bool(s.bodies)


def names_stream(s: Statement) -> bool:
    """Return True if a statement gives the current stream a name."""
    defined = s.defines(Phase.HOST)
    return defined is not None and defined.type is Kind.STREAM


@dataclass(frozen=True)
class Edit:
    """An insertion of the statements `new` at a place; they replace the first `drop` statements there."""

    place: BodyPosition
    new: Block = ()
    drop: int = 0


Edits = tuple[Edit, ...]


def edited(program: Program, edits: Iterable[Edit]) -> Program:
    """Return the program with these edits applied. Places refer to `program`; blocks that become empty are removed."""
    body = program.body
    # From the last to the first: then no edit shifts a later one.
    for edit in sorted(edits, key=lambda e: e.place, reverse=True):
        body = _spliced(body, edit.place, edit)
    return program.with_body(body)


def _spliced(body: Block, place: BodyPosition, edit: Edit) -> Block:
    at, *inner = place
    if not inner:
        return (*body[:at], *edit.new, *body[at + edit.drop :])
    outer = body[at].with_bodies(lambda block: _spliced(block, tuple(inner), edit))
    return (*body[:at], *([outer] if any(outer.bodies) else []), *body[at + 1 :])


def without(body: Block, gone: Sequence[Statement]) -> Block:
    """Return a body without these statement objects, and without loops and conditions that become empty."""
    kept: list[Statement] = []
    for s in body:
        if any(s is g for g in gone):
            continue
        less = s.with_bodies(lambda block: without(block, gone)) if s.bodies else s
        if less == s:
            kept.append(s)
        elif any(less.bodies):
            kept.append(less)
    return tuple(kept)


class Outline:
    """The statements of a host program with their places."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.statements = list(_placed(program.body, ()))
        self.places = {id(s): place for place, s in self.statements}
        self.user = callers_stream(program)

    def place(self, s: Statement) -> BodyPosition:
        return self.places[id(s)]

    def block(self, place: BodyPosition) -> Block:
        """Return the block that contains a place."""
        body = self.program.body
        for at in place[:-1]:
            body = body[at].bodies[0]
        return body

    def end(self, place: BodyPosition) -> BodyPosition:
        """Return the place at the end of the block that contains `place`."""
        return (*place[:-1], len(self.block(place)))

    def set_above(self, place: BodyPosition) -> Expr | None:
        """Return the stream of the last `set_stream` above a place, if any."""
        above = [s.sets_stream for at, s in self.statements if at < place and s.sets_stream is not None]
        return above[-1] if above else None

    def stream(self, place: BodyPosition) -> Expr | None:
        """Return the current stream at a place by the text above it.

        None if the stream's names are not in scope there.
        """
        above = self.set_above(place)
        if above is not None:
            return above if self.knows(place, above) else None
        return Ref(self.user) if self.user else None

    def knows(self, place: BodyPosition, stream: Expr) -> bool:
        """Return True if all names of a stream are in scope at a place."""
        scope = self.scope(place)
        return all(scope.get(v.name) == v for v in expr_values(stream))

    def scope(self, place: BodyPosition) -> dict[str, Value]:
        """Return the values in scope at a place, by name."""
        values = {v.name: v for v in self.program.inputs}
        body = self.program.body
        for at in place[:-1]:
            index = body[at].defines(Phase.HOST)
            values |= _defined(body[:at]) | ({index.name: index} if index else {})
            body = body[at].bodies[0]
        return values | _defined(body[: place[-1]])

    # Statements to insert ---------------------------------------------------------------------------------------------
    def fork(self, place: BodyPosition, source: Ref | Lit) -> Block:
        """Return statements that make every other pool stream wait for `source`, then restore the current stream."""
        index, count = self._index(place), self.program.streams
        worker: Expr = Ref(index)
        if isinstance(source, Lit):
            count, next = count - 1, Bin("+", worker, Lit(source.value + 1))
            if source.value < count:
                worker = Bin("%", next, Lit(count + 1)) if source.value else next
        body = (SetStream(stream=worker), Synchronize(stream=source))
        return (self._for_all(index, body, count), *self._back(place)) if count else ()

    def join(self, place: BodyPosition) -> Block:
        """Return statements that make the current stream wait for every pool stream."""
        index = self._index(place)
        return (self._for_all(index, (Synchronize(stream=Ref(index)),), self.program.streams),)

    def at_callers(self, place: BodyPosition) -> Block:
        """Return the statements needed to make the caller's stream current at a place of the outermost block."""
        if len(place) > 1 or self.user is None:
            return ()
        return () if self.set_above(place) in (None, Ref(self.user)) else (SetStream(stream=Ref(self.user)),)

    def ends(self) -> list[BodyPosition]:
        """Return places at the program's end: before closing barriers and frees, before closing frees, and last."""
        body = self.program.body
        places = [len(body)]
        for closing in (_frees, _closes):
            at = len(body)
            while at and closing(body[at - 1]):
                at -= 1
            places.append(at)
        return [(at,) for at in dict.fromkeys(places)]

    def _for_all(self, index: Value, body: Block, count: int) -> For:
        return For(index=index, count=Size.of(count), body=body)

    def _index(self, place: BodyPosition) -> Value:
        scope, name = self.scope(place), "s"
        while name in scope:
            name += "s"
        return Value(name, Kind.INDEX)

    def _back(self, place: BodyPosition) -> Block:
        current = self.stream(place)
        return () if current is None or resets(self.block(place)[place[-1] :]) else (SetStream(stream=current),)


def _frees(s: Statement) -> bool:
    return s.freed is not None


def _closes(s: Statement) -> bool:
    return _frees(s) or s.orders is Sync.MEET or s.sets_stream is not None


def resets(body: Block) -> bool:
    """Return True if a body sets the stream before it issues any work."""
    first = next((s for s in body if not s.on_host), None)
    if first is None or first.sets_stream is not None:
        return first is not None
    return not first.conditional and any(map(resets, first.bodies))


def callers_stream(program: Program) -> Value | None:
    """Return the value of a `current_stream` before any `set_stream`: the caller's stream; None without one."""
    for s in program.body:
        if names_stream(s):
            return s.defines(Phase.HOST)
        if moves_on(s):
            break
    return None


def with_callers_stream(program: Program) -> Program:
    """Return the program with a value that holds the caller's stream."""
    if callers_stream(program) is not None:
        return program
    return program.with_body((CurrentStream(out=Value(Names.of(program).fresh("user"), Kind.STREAM)), *program.body))


def _defined(body: Block) -> dict[str, Value]:
    return {v.name: v for s in body if not s.bodies and (v := s.defines(Phase.HOST))}


def _placed(body: Block, outside: BodyPosition) -> Iterator[tuple[BodyPosition, Statement]]:
    for at, s in enumerate(body):
        yield (*outside, at), s
        for inner in s.bodies:
            yield from _placed(inner, (*outside, at))


# Missing signals and waits --------------------------------------------------------------------------------------------
# Missing signals, missing waits, and missing `ready` clauses of kernels, with the index expressions that each needs.
#
# A missing signal or wait can be restored without knowing its purpose. Waits without a signal, and signals without a
# wait, show the missing flags, epochs and ranks. An inserted statement has to signal, or wait for, exactly these epochs
# over all ranks and rounds. Candidates for its expressions come from the program's text and from the indices in scope;
# expressions that fit are kept.

RaisedSlot = tuple[int, int, int]  # rank, slot, epoch
Numbers = tuple[int, ...]
MAX_SUGGESTIONS = 40  # the most signals, or waits, that are suggested


class MissingFlags:
    """Signals and waits of one call without a counterpart, and edits that add the counterpart.

    `deadlock`: events that wait for each other in a cycle.
    """

    def __init__(self, outline: Outline, order: Order, deadlock: Sequence[Event] = ()) -> None:
        self.outline = outline
        self.order = order
        buffers = (v for s in outline.program.walk() if (v := s.buffer))
        self.flags = [v for v in buffers if v.tensor.dtype == FLAG]
        awaited = {id(signal) for signal in order.partners.values()}
        self.sent = _by_name(flag for rank in order.ranks for flag in rank.signals)
        alone = (wait for rank in order.ranks for wait in rank.waits if not order.enough(wait))
        self.unsent = _by_name([*alone, *held_up(order, deadlock)])
        self.unawaited = _by_name(f for rank in order.ranks for f in rank.signals if id(f.event) not in awaited)

    def signals(self, waiting: Event) -> Iterator[Edits]:
        """Yield edits that add one signal for all missing epochs of a flag.

        Signals after copies to the peer come first.
        """
        flags = next((f for f in self.flags if f.name in self.unsent and _names(waiting.statement, f)), None)
        if flags is None:
            return
        missing, sent = self.unsent[flags.name], self.sent.get(flags.name, set())
        ranked: list[tuple[bool, int, int, Edits]] = []
        for place, before in self._behind():
            frames, slots, epochs = self._operands(place, flags, missing)
            for peer, over in self._peers(place, flags):
                ranks = _peers_of(peer, over, flags, frames)
                for (slot, s), (epoch, e) in product(slots.items(), epochs.items()):
                    raised = set(zip(ranks, slot, epoch, strict=False))
                    if len(raised) == len(frames) and missing <= raised and not raised & sent:
                        signal = Signal(flags=flags, slot=s, epoch=e, peer=peer, over=over)
                        copied = before.remote is not None and before.peer_place == (peer, over)
                        ranked.append((not copied, len(raised), len(ranked), (Edit(place, (signal,)),)))
        yield from (edits for *_, edits in sorted(ranked, key=lambda f: f[:3])[:MAX_SUGGESTIONS])

    def waits(self, users: Sequence[Statement]) -> Iterator[Edits]:
        """Yield edits that add a wait for signals without one, before a statement or before a block around it."""
        ranked: list[tuple[int, int, Edits]] = []
        for flags in (f for f in self.flags if f.name in self.unawaited):
            for place in self._in_front(users):
                frames, slots, epochs = self._operands(place, flags, self.unawaited[flags.name])
                for (slot, s), (epoch, e) in product(slots.items(), epochs.items()):
                    awaited = {(_rank(f), *which) for f, *which in zip(frames, slot, epoch, strict=True)}
                    if awaited and len(awaited) == len(frames) and awaited <= self.unawaited[flags.name]:
                        wait = WaitSignal(flags=flags, slot=s, epoch=e)
                        ranked.append((-len(awaited), len(ranked), (Edit(place, (wait,)),)))
        yield from (edits for *_, edits in sorted(ranked, key=lambda f: f[:2])[:MAX_SUGGESTIONS])

    def kernels(self, users: Sequence[Statement]) -> Iterator[Edits]:
        """Yield edits that make a computation wait for flags without a wait; some of its rows may come from `own`."""
        for s in users:
            place = self.outline.place(s)
            for flags in (f for f in self.flags if f.name in self.unawaited):
                owns = self._stand_ins(s, place, flags)
                unawaited = {(rank, epoch) for rank, _, epoch in self.unawaited[flags.name]}
                frames, slots, epochs = self._operands(place, flags, self.unawaited[flags.name])
                for epoch, e in epochs.items():
                    awaited = {(_rank(f), which) for f, which in zip(frames, epoch, strict=True)}
                    if len(awaited) == len(frames) and awaited <= unawaited:
                        for first, local in ((ZERO, None), *product(slots.values(), owns)):
                            if (changed := s.waiting(flags, e, first, local)) is not None:
                                yield (Edit(place, (changed,), drop=1),)

    def _stand_ins(self, s: Statement, place: BodyPosition, flags: Value) -> list[Value]:
        """Return candidates for `own`: values with the number of rows that `own` replaces, the latest value first."""
        tensors = [v for v in self.outline.scope(place).values() if isinstance(v.type, TensorType)]
        if (plain := s.waiting(flags, Lit(1), ZERO, None)) is None:
            return []
        x = plain.flag_operands[0].rows[0]
        rows = _rows(x) / flags.tensor.shape[0] if s.contracts else _rows(next(s.values(Codec.WRITE)))
        return [v for v in reversed(tensors) if _rows(v) == rows and v.tensor.dtype == x.tensor.dtype]

    # Places -----------------------------------------------------------------------------------------------------------
    def _behind(self) -> Iterator[tuple[BodyPosition, Statement]]:
        """Yield the place after each statement that is issued to a stream, with the statement."""
        for at, s in self.outline.statements:
            if issues(s):
                yield (*at[:-1], at[-1] + 1), s

    def _in_front(self, users: Sequence[Statement]) -> list[BodyPosition]:
        """Return places before these statements, before blocks around them, and at the ends of earlier conditions."""
        places: dict[BodyPosition, None] = {}
        for s in users:
            place = self.outline.place(s)
            for depth in range(len(place), 0, -1):
                places[place[:depth]] = None
                for n, other in enumerate(self.outline.block(place[:depth])[: place[depth - 1]]):
                    if other.conditional:
                        places[(*place[: depth - 1], n, len(other.bodies[0]))] = None
        return list(places)

    def _frames(self, place: BodyPosition, flags: Value) -> list[Frame]:
        """Return one frame, with the values of all indices, for each time that a rank reaches a place in one call."""
        frames: list[Frame] = []
        for rank in self.order.ranks:
            frame = Frame(rank, rank.sizes)
            if frame.here(flags.tensor.mesh):
                for s in self.outline.program.walk():
                    if s.place is not None:
                        s.evaluate(frame)
                frames += _arrivals(self.outline.program.body, place, frame)
        return frames

    # Expressions ------------------------------------------------------------------------------------------------------
    def _operands(
        self, place: BodyPosition, flags: Value, missing: set[RaisedSlot]
    ) -> tuple[list[Frame], dict[Numbers, Expr], dict[Numbers, Expr]]:
        """Return the frames of a place.

        And expressions for a slot and for an epoch, by their values in these frames.
        """
        frames = self._frames(place, flags)
        slots = self._numbers(self._slots(place, flags), place, frames)
        return frames, slots, self._numbers(self._epochs(flags, missing), place, frames)

    def _numbers(self, exprs: Iterable[Expr], place: BodyPosition, frames: Sequence[Frame]) -> dict[Numbers, Expr]:
        """Return one expression for each distinct sequence of values over these frames; replace names out of scope."""
        by_values: dict[Numbers, Expr] = {}
        indices = self._indices(place)
        for expr in exprs:
            strange = {v.name for v in expr_values(expr)} - {v.name for v in indices}
            for index in indices if len(strange) == 1 else () if strange else [None]:
                known = expr if index is None else rename_expr(expr, dict.fromkeys(strange, index))
                try:
                    by_values.setdefault(tuple(frame.index(known) for frame in frames), known)
                except ZeroDivisionError:
                    continue
        return by_values

    def _indices(self, place: BodyPosition) -> list[Value]:
        return [v for v in self.outline.scope(place).values() if v.type is Kind.INDEX]

    def _slots(self, place: BodyPosition, flags: Value) -> Iterator[Expr]:
        """Yield expressions for a slot: expressions of the text, each index, and combinations of several indices."""
        yield from (use.slot for use in self._uses(flags) if use.slot is not None)
        count = flags.tensor.shape[0].bind(self.order.ranks[0].sizes)
        peers = (s.peer_place[0] for s in self.outline.program.walk() if s.peer_place is not None)
        parts: list[Expr] = [*map(Ref, self._indices(place)), *(peer for peer in peers if isinstance(peer, Bin))]
        parts = list(dict.fromkeys(parts))
        yield from (Lit(n) for n in range(min(count, 2)))
        for v in parts:
            yield v
            for n in (n for n in range(2, count + 1) if count % n == 0):
                yield Bin("%", v, Lit(n))
                yield from (Bin("+", Bin("*", v, Lit(n)), w) for w in parts if w != v and n < count)

    def _epochs(self, flags: Value, missing: set[RaisedSlot]) -> Iterator[Expr]:
        """Yield expressions for an epoch: expressions of the text, the missing epochs, and a loop's round plus one."""
        yield from (use.epoch for use in self._uses(flags))
        yield from (Lit(epoch) for epoch in sorted({epoch for _, _, epoch in missing}))
        rounds = (s.defines(Phase.HOST) for s in self.outline.program.walk() if s.bodies)
        yield from (Bin("+", Ref(v), Lit(1)) for v in dict.fromkeys(rounds) if v is not None)

    def _uses(self, flags: Value) -> list[FlagOperand]:
        """Return the flag operands of all statements; operands with these flags come first."""
        operands = (use for s in self.outline.program.walk() for use in s.flag_operands)
        return sorted(operands, key=lambda use: use.flags != flags)

    def _peers(self, place: BodyPosition, flags: Value) -> Iterator[tuple[Expr, str]]:
        """Yield expressions for a peer and their mesh axes: from the program's text, then all distances from a rank."""
        mesh = flags.tensor.mesh
        known = {v.name for v in self._indices(place)}
        candidates = [s.peer_place for s in self.outline.program.walk() if s.peer_place is not None]
        for index, over in (s.place for s in self.outline.program.walk() if s.place is not None):
            if mesh and over in mesh.axes:
                n = mesh.size(over)
                candidates.append((Ref(index), over))
                candidates += [(Bin("%", Bin("+", Ref(index), Lit(k)), Lit(n)), over) for k in range(1, n)]
        for peer, over in dict.fromkeys(candidates):
            if mesh and over in mesh.axes and {v.name for v in expr_values(peer)} <= known:
                yield peer, over


def held_up(order: Order, deadlock: Sequence[Event]) -> list[Flag]:
    """Return the waits in a deadlock whose epoch nobody sends. A later signal would end them, but waits for them."""
    ids = {id(event.statement) for event in deadlock}
    waits = (wait for rank in order.ranks for wait in rank.waits if id(wait.event.statement) in ids)
    return [wait for wait in waits if (enough := order.enough(wait)) and enough[0].epoch > wait.epoch]


def _rows(x: Value) -> Size:
    """Return the number of rows of a rank's shard of a tensor."""
    return size_product(x.tensor.local_shape[:-1])


def _names(s: Statement | None, flags: Value) -> bool:
    return s is not None and any(use.flags == flags for use in s.flag_operands)


def _by_name(flags: Iterable[Flag]) -> dict[str, set[RaisedSlot]]:
    """Group flags by name: the (rank, slot, epoch) of each in the first call."""
    slots: dict[str, set[RaisedSlot]] = {}
    for flag in flags:
        if flag.epoch[0] == 0:
            slots.setdefault(flag.flags, set()).add((flag.rank, flag.slot, flag.epoch[1]))
    return slots


def _peers_of(peer: Expr, over: str, flags: Value, frames: Sequence[Frame]) -> list[int]:
    """Return the peer's rank in each frame; an empty list if a frame has no such peer."""
    peers: list[int] = []
    for frame in frames:
        team = flags.tensor.mesh.team(_rank(frame), over) if flags.tensor.mesh else ()
        if not 0 <= (at := frame.index(peer)) < len(team):
            return []
        peers.append(team[at])
    return peers


def _rank(frame: Frame) -> int:
    assert frame.machine.rank is not None
    return frame.machine.rank


def _arrivals(body: Block, place: BodyPosition, frame: Frame) -> Iterator[Frame]:
    """Yield a copy of the frame for each time that its rank reaches a place."""
    at, *inner = place
    if not inner:
        yield Frame(frame.machine, frame.sizes, dict(frame.handles))
        return
    outer = body[at]
    for _ in outer.rounds(frame):
        yield from _arrivals(outer.bodies[0], tuple(inner), frame)


# Insertions -----------------------------------------------------------------------------------------------------------
# Insertions that might repair a finding: a synchronize, a fork, a join, a wait, a free or a barrier.
#
# These are suggestions: the checker decides which of them repair anything, and a search picks the best.

REPAIRABLE = {"race", "flag shared", "leak", "nobody sends", "SMs held"}


def repairable(finding: Finding, order: Order | None) -> bool:
    """Return True if edits may repair a finding."""
    if finding.kind == "deadlock" and order is not None:
        return bool(held_up(order, finding.events))
    return finding.kind in REPAIRABLE


def for_handles(outline: Outline) -> Iterator[Edits]:
    """Yield edits that wait for the first handle without a wait, at each later place of its block."""
    for place, s in outline.statements:
        handle = s.started
        if handle is None:
            continue
        behind = outline.block(place)[place[-1] + 1 :]
        if not any(x.awaited == handle for x in behind):
            yield from _waits(handle, place, behind)
            return


def _waits(handle: Value, place: BodyPosition, behind: tuple[Statement, ...]) -> Iterator[Edits]:
    for n, s in enumerate((None, *behind), place[-1] + 1):
        if s is None or not (s.on_host or s.awaited is not None):
            yield (Edit((*place[:-1], n), (Wait(handle=handle),)),)


def for_leaks(outline: Outline, names: Container[str]) -> Edits:
    """Return edits that free leaked buffers at the end of the block that allocates them."""
    ends: dict[BodyPosition, list[Statement]] = {}
    for place, s in outline.statements:
        value = None if s.symmetric else s.buffer
        freed = any(x.freed == value for x in outline.block(place))
        if value is not None and value.name in names and not freed:
            ends.setdefault(outline.end(place), []).append(FreeBuffer(x=value))
    return tuple(Edit(end, (*outline.at_callers(end), *frees)) for end, frees in ends.items())


class Suggestions:
    """Edits that may repair a finding about two unordered events, a missing signal, or SMs that a kernel holds."""

    def __init__(self, outline: Outline, order: Order) -> None:
        self.outline = outline
        self.order = order

    def of(self, finding: Finding) -> Iterator[Edits]:
        if finding.kind == "nobody sends":
            yield from self._unsent(finding.events[0])
            return
        if finding.kind == "deadlock":
            for waiting in {id(w.event.statement): w.event for w in held_up(self.order, finding.events)}.values():
                yield from self._unsent(waiting, finding.events)
            return
        if finding.kind == "SMs held":  # only by kernels of the next call; a kernel of this call should be issued later
            yield from self._joins()
            return
        first, second = finding.events[:2]
        if first.rank != second.rank or _raises(first) or _raises(second):
            yield from self._flags(first, second)
        if first.rank != second.rank:
            yield from self._barriers(first, second)
        elif _issued(first) > _issued(second):
            first, second = second, first
        yield from self._frees(first, second)
        yield from self._handles(first, second)
        yield from self._forks(second)
        yield from self._joins()
        yield from self._synchronizes(first, second)

    # Between streams --------------------------------------------------------------------------------------------------
    def _synchronizes(self, first: Event, second: Event) -> Iterator[Edits]:
        """Make the stream of the second event wait for the stream of the first."""
        for place in self._spots(second):
            for stream in self._streams(first, place):
                yield (Edit(place, (Synchronize(stream=stream),)),)
        if second.statement is not None and self.outline.program.streams:
            place = self.outline.place(second.statement)
            yield (Edit(place, self.outline.join(place)),)

    def _spots(self, second: Event) -> list[BodyPosition]:
        """Return places where an event's stream may wait: before the event, and after each `set_stream` above it.

        Further places are before barriers and signals, because other ranks are ordered after whatever their stream
        waited for; and at the end of the program.
        """
        outline = self.outline
        passing = [place for place, s in outline.statements if s.orders & Sync.SIGNAL]
        if second.statement is None:
            return [*outline.ends(), *passing]
        here = outline.place(second.statement)
        set_here = [(*at[:-1], at[-1] + 1) for at, s in outline.statements if at < here and s.sets_stream is not None]
        return list(dict.fromkeys([here, *set_here, *passing]))

    def _streams(self, event: Event, place: BodyPosition) -> list[Expr]:
        """Return expressions, in scope at a place, for the streams that are ordered after an event's end."""
        outline = self.outline
        lanes = {event.stream, *(str(lane[1]) for lane, _ in event.ends if len(lane) == 2)}
        streams: list[Expr] = (
            [Ref(outline.user)] if outline.user and (CALLER in lanes or lanes == {event.stream}) else []
        )
        set_to = [s.sets_stream for _, s in outline.statements if s.sets_stream is not None]
        streams += [s for s in set_to if not (isinstance(s, Ref) and s.value.type is Kind.STREAM)]
        streams += [Lit(int(lane.split()[1])) for lane in sorted(lanes) if lane.startswith("stream ")]
        return [stream for stream in dict.fromkeys(streams) if outline.knows(place, stream)]

    def _forks(self, second: Event) -> Iterator[Edits]:
        """Make every pool stream wait for the caller's stream, or for a stream that waited for other ranks.

        The waits stand before the loop of the second event, or before the first loop.
        """
        if not self.outline.program.streams:
            return
        outline, here = self.outline, second.statement
        spots = [n for n, s in enumerate(outline.program.body) if moves_on(s) and not s.conditional][:1]
        spots += [outline.place(here)[0]] if here is not None else []
        for at in dict.fromkeys(spots):
            if outline.user and outline.user.name in outline.scope((at,)):
                yield (Edit((at,), outline.fork((at,), Ref(outline.user))),)
            for worker in self._ordered_workers():
                yield (Edit((at,), outline.fork((at,), Lit(worker))),)

    def _ordered_workers(self) -> list[int]:
        """Return the pool streams that wait for other ranks, by barriers, signals or communications."""
        streams = {e.stream for e in self.order.events if e.statement and e.statement.orders & Sync.WAIT}
        return sorted(int(stream.split()[1]) for stream in streams if stream != CALLER)

    def _joins(self) -> Iterator[Edits]:
        """Make the caller's stream wait for every pool stream at the end."""
        if not self.outline.program.streams:
            return
        for end in self.outline.ends():
            yield (Edit(end, (*self.outline.at_callers(end), *self.outline.join(end))),)

    # Handles and frees ------------------------------------------------------------------------------------------------
    def _handles(self, first: Event, second: Event) -> Iterator[Edits]:
        """Move the wait for a communication: directly after it, or before the statement that uses its memory."""
        s, outline = first.statement, self.outline
        handle = s.started if s is not None else None
        if s is None or handle is None:
            return
        place = outline.place(s)
        behind = enumerate(outline.block(place)[place[-1] + 1 :], place[-1] + 1)
        wait = next(((*place[:-1], n) for n, x in behind if x.awaited == handle), None)
        if wait is None:
            return
        targets = [(*place[:-1], place[-1] + 1)]
        if second.statement is not None:
            user = outline.place(second.statement)[: len(place)]
            targets += [user] if user[:-1] == place[:-1] and user > place else []
        for target in targets:
            yield Edit(wait, drop=1), Edit(target, (Wait(handle=handle),))

    def _frees(self, first: Event, second: Event) -> Iterator[Edits]:
        """Move a free to the end of its block."""
        for s in (first.statement, second.statement):
            if s is not None and s.freed is not None:
                place = self.outline.place(s)
                end = self.outline.end(place)
                yield Edit(place, drop=1), Edit(end, (*self.outline.at_callers(end), s))

    # Between ranks ----------------------------------------------------------------------------------------------------
    def _barriers(self, first: Event, second: Event) -> Iterator[Edits]:
        """Insert a barrier between the two events, at the ends of a loop around them, or at the end of the program."""
        outline, statements = self.outline, [s for s in (first.statement, second.statement) if s is not None]
        for x, axis in dict.fromkeys((s.remote, s.peer_place[1]) for s in statements if s.remote and s.peer_place):
            for place in self._meetings(statements):
                if (operand := self._on_mesh_of(x, place)) is not None:
                    yield (Edit(place, (Barrier(x=operand, over=axis),)),)
            for end in outline.ends():
                operand = self._on_mesh_of(x, end)
                on = outline.at_callers(end)
                if operand is not None and outline.program.streams:
                    yield (Edit(end, (*on, *outline.join(end), Barrier(x=operand, over=axis))),)

    def _meetings(self, statements: list[Statement]) -> list[BodyPosition]:
        outline = self.outline
        places: list[BodyPosition] = []
        for s in reversed(statements):
            place = outline.place(s)
            places += [place, (*place[:-1], place[-1] + 1)]
            for depth in range(len(place) - 1, 0, -1):
                loop = place[:depth]
                places += [(*loop, 0), outline.end((*loop, 0)), loop, (*loop[:-1], loop[-1] + 1)]
        return list(dict.fromkeys([*places, *self._starts(), *outline.ends()]))

    def _starts(self) -> list[BodyPosition]:
        """Return the place before the first statement that issues work to a stream."""
        body = self.outline.program.body
        return [(next((n for n, s in enumerate(body) if issues(s) or moves_on(s)), 0),)]

    def _on_mesh_of(self, x: Value, place: BodyPosition) -> Value | None:
        """Return a value in scope on the mesh of `x`: an input if possible, else `x` itself."""
        same = [v for v in self.outline.program.inputs if v.tensor.mesh == x.tensor.mesh]
        return same[0] if same else self.outline.scope(place).get(x.name)

    def _flags(self, first: Event, second: Event) -> Iterator[Edits]:
        """Make either event wait for a flag that is signalled already and that nothing waits for."""
        users = [event.statement for event in (second, first) if event.statement is not None]
        missing = MissingFlags(self.outline, self.order)
        yield from missing.waits(users)
        yield from missing.kernels(users)

    def _unsent(self, waiting: Event, deadlock: Sequence[Event] = ()) -> Iterator[Edits]:
        """Add the missing signal; or remove the wait, or replace it by a barrier."""
        yield from MissingFlags(self.outline, self.order, deadlock).signals(waiting)
        s = waiting.statement
        if s is None or not s.flag_operands or not s.orders:
            return
        place, x = self.outline.place(s), s.flag_operands[0].flags
        mesh, operand = x.tensor.mesh, self._on_mesh_of(x, place)
        yield (Edit(place, drop=1),)
        for axis in mesh.axes if mesh and operand else ():
            yield (Edit(place, (Barrier(x=operand or x, over=axis),), drop=1),)


def _raises(event: Event) -> bool:
    """Return True if an event belongs to a kernel that sets flags for others to wait for."""
    return event.statement is not None and any(use.raises and use.rows for use in event.statement.flag_operands)


def _issued(event: Event) -> tuple[int, int]:
    """Return the sort key of the order of issue: the call, and the position among its rank's events."""
    return event.call, event.number
