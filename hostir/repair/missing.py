"""Signals and waits that are missing for a finding.

Missing signals, missing waits, and missing `ready` clauses of kernels, with the index expressions that each needs.

A missing signal or wait can be restored without knowing its purpose. Waits without a signal, and signals without a
wait, show the missing flags, epochs and ranks. An inserted statement has to signal, or wait for, exactly these epochs
over all ranks and rounds. Candidates for its expressions come from the program's text and from the indices in scope;
expressions that fit are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from hostir.check.ordering.order import Order
from hostir.check.tracing.events import Event, Flag
from hostir.check.tracing.tracer import Tracer
from hostir.ir.machine import Frame
from hostir.ir.onesided_ops import Signal, WaitSignal
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
    Value,
    expr_values,
    rename_expr,
)
from hostir.ir.sizes import Size
from hostir.ir.sizes import product as size_product
from hostir.ir.types import FLAG, Kind, TensorType
from hostir.repair.places import Block, BodyPosition, Edit, Edits, Outline, issues

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
            frame = Frame(Tracer(rank.rank, self.outline.program, rank.sizes), rank.sizes)
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
