"""Suggest a statement for waits that have no signal, and for signals that have no wait.

The statement is a signal, a wait, or a kernel with a `ready` clause. The waits without a signal show which flags and
epochs have to be signalled on which ranks. In the same way, the signals without a wait show what has to be waited for.
`PlaceExpressions` gives candidates for the expressions of the new statement. A candidate is kept if, over all ranks and
rounds, it signals the missing epochs, or waits only for epochs that no other statement waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from hostir.check.ordering.order import Order
from hostir.check.tracing.events import Event, Flag
from hostir.ir.onesided_ops import Signal, WaitSignal
from hostir.ir.op import ZERO, Codec, Lit, Statement, Value
from hostir.ir.sizes import Size
from hostir.ir.sizes import product as size_product
from hostir.ir.types import FLAG, TensorType
from hostir.repair.expressions import PlaceExpressions, RaisedSlot
from hostir.repair.places import BodyPosition, Edit, Edits, Outline, issues

MAX_SUGGESTIONS = 40  # the most signals that are suggested for a wait; also the most waits for signals


class MissingFlags:
    """Finds the waits of one call that have no signal, and the signals that have no wait; suggests edits for them.

    Fields:
        flags: the buffers of flags.
        sent: a map from the name of a buffer of flags to all signals of these flags.
        unsent: a map from the name of a buffer of flags to the waits for these flags that no signal ends.
        unawaited: a map from the name of a buffer of flags to the signals of these flags that end no wait.

    Args:
        outline: the statements of the program with their places.
        order: the order of the program's events.
        deadlock: events that wait for each other in a cycle. If a missing signal would end the wait of one of these
            events, `unsent` also has this wait.
    """

    def __init__(self, outline: Outline, order: Order, deadlock: Sequence[Event] = ()) -> None:
        self.outline = outline
        self.order = order
        buffers = (v for s in outline.program.walk() if (v := s.buffer))
        self.flags = [v for v in buffers if v.tensor.dtype == FLAG]
        awaited = {id(signal) for signal in order.partners.values()}
        self.sent = _by_name(flag for rank in order.ranks for flag in rank.signals)
        without_signal = (wait for rank in order.ranks for wait in rank.waits if not order.enough(wait))
        self.unsent = _by_name([*without_signal, *held_up(order, deadlock)])
        self.unawaited = _by_name(f for rank in order.ranks for f in rank.signals if id(f.event) not in awaited)

    def signals(self, waiting: Event) -> Iterator[Edits]:
        """Yield edits that insert one signal statement for all missing signals of the flags that an event waits for.

        Edits that insert the statement directly after a copy to the same peer come first.
        """
        flags = next((f for f in self.flags if f.name in self.unsent and _uses(waiting.statement, f)), None)
        if flags is None:
            return
        missing, sent = self.unsent[flags.name], self.sent.get(flags.name, set())
        ranked: list[tuple[bool, int, int, Edits]] = []
        for place, issued in _after_issues(self.outline):
            exprs = PlaceExpressions(self.outline, self.order, place, flags)
            slots, epochs = exprs.slots(), exprs.epochs(missing)
            for peer, over in exprs.peers():
                ranks = exprs.ranks_of(peer, over)
                for (slot, s), (epoch, e) in product(slots.items(), epochs.items()):
                    raised = set(zip(ranks, slot, epoch, strict=False))
                    if len(raised) == len(exprs.frames) and missing <= raised and not raised & sent:
                        signal = Signal(flags=flags, slot=s, epoch=e, peer=peer, over=over)
                        copied = issued.remote is not None and issued.peer_place == (peer, over)
                        ranked.append((not copied, len(raised), len(ranked), (Edit(place, (signal,)),)))
        yield from (edits for *_, edits in sorted(ranked, key=lambda f: f[:3])[:MAX_SUGGESTIONS])

    def waits(self, users: Sequence[Statement]) -> Iterator[Edits]:
        """Yield edits that insert one wait statement for signals that nothing waits for.

        The wait is inserted at a place where it runs before one of the statements `users`.
        """
        ranked: list[tuple[int, int, Edits]] = []
        for flags in (f for f in self.flags if f.name in self.unawaited):
            unawaited = self.unawaited[flags.name]
            for place in _places_before(self.outline, users):
                exprs = PlaceExpressions(self.outline, self.order, place, flags)
                for (slot, s), (epoch, e) in product(exprs.slots().items(), exprs.epochs(unawaited).items()):
                    awaited = set(zip(exprs.ranks, slot, epoch, strict=True))
                    if awaited and len(awaited) == len(exprs.ranks) and awaited <= unawaited:
                        wait = WaitSignal(flags=flags, slot=s, epoch=e)
                        ranked.append((-len(awaited), len(ranked), (Edit(place, (wait,)),)))
        yield from (edits for *_, edits in sorted(ranked, key=lambda f: f[:2])[:MAX_SUGGESTIONS])

    def kernels(self, users: Sequence[Statement]) -> Iterator[Edits]:
        """Yield edits that add a `ready` clause to a computation.

        With this clause, the computation waits for signals that no statement waits for yet. The computation is one of
        the statements `users`. In some of the edits, the clause also has `own` rows.
        """
        for s in users:
            place = self.outline.place(s)
            for flags in (f for f in self.flags if f.name in self.unawaited):
                local_tensors = self._local_tensors(s, place, flags)
                unawaited = {(rank, epoch) for rank, _, epoch in self.unawaited[flags.name]}
                exprs = PlaceExpressions(self.outline, self.order, place, flags)
                slots = exprs.slots()
                for epoch, e in exprs.epochs(self.unawaited[flags.name]).items():
                    awaited = set(zip(exprs.ranks, epoch, strict=True))
                    if len(awaited) == len(exprs.ranks) and awaited <= unawaited:
                        for first, local in ((ZERO, None), *product(slots.values(), local_tensors)):
                            if (changed := s.waiting(flags, e, first, local)) is not None:
                                yield (Edit(place, (changed,), drop=1),)

    def _local_tensors(self, s: Statement, place: BodyPosition, flags: Value) -> list[Value]:
        """Return the tensors in scope that may be the `own` rows of a computation `s`, the latest first.

        They have the dtype of the operand that is split into blocks, and as many rows as one of these blocks.
        """
        tensors = [v for v in self.outline.scope(place).values() if isinstance(v.type, TensorType)]
        if (plain := s.waiting(flags, Lit(1), ZERO, None)) is None:
            return []
        x = plain.flag_operands[0].rows[0]
        rows = _rows(x) / flags.tensor.shape[0] if s.contracts else _rows(next(s.values(Codec.WRITE)))
        return [v for v in reversed(tensors) if _rows(v) == rows and v.tensor.dtype == x.tensor.dtype]


def _after_issues(outline: Outline) -> Iterator[tuple[BodyPosition, Statement]]:
    """Yield each statement that is issued to a stream, and the place after it."""
    for at, s in outline.statements:
        if issues(s):
            yield (*at[:-1], at[-1] + 1), s


def _places_before(outline: Outline, users: Sequence[Statement]) -> list[BodyPosition]:
    """Return the places where a new statement runs before one of the statements `users`.

    For each of these statements, there is a place directly before it, and directly before each loop or `if` around it.
    For each `if` that precedes the statement in its block, there is a place at the end of the body of this `if`. The
    same holds for each `if` that precedes a loop or `if` around the statement.
    """
    places: dict[BodyPosition, None] = {}
    for s in users:
        place = outline.place(s)
        for depth in range(len(place), 0, -1):
            places[place[:depth]] = None
            for n, other in enumerate(outline.block(place[:depth])[: place[depth - 1]]):
                if other.conditional:
                    places[(*place[: depth - 1], n, len(other.bodies[0]))] = None
    return list(places)


def held_up(order: Order, deadlock: Sequence[Event]) -> list[Flag]:
    """Return the waits in a deadlock for epochs that no statement signals.

    A later signal with a higher epoch would end such a wait, but this signal is itself part of the deadlock.
    """
    ids = {id(event.statement) for event in deadlock}
    waits = (wait for rank in order.ranks for wait in rank.waits if id(wait.event.statement) in ids)
    return [wait for wait in waits if (enough := order.enough(wait)) and enough[0].epoch > wait.epoch]


def _rows(x: Value) -> Size:
    """Return the number of rows in a rank's part of a tensor."""
    return size_product(x.tensor.local_shape[:-1])


def _uses(s: Statement | None, flags: Value) -> bool:
    return s is not None and any(use.flags == flags for use in s.flag_operands)


def _by_name(flags: Iterable[Flag]) -> dict[str, set[RaisedSlot]]:
    """Return a map from the name of a buffer of flags to its signals or waits in the first call.

    A signal or wait is given as (rank, slot, epoch).
    """
    slots: dict[str, set[RaisedSlot]] = {}
    for flag in flags:
        if flag.epoch[0] == 0:
            slots.setdefault(flag.flags, set()).add((flag.rank, flag.slot, flag.epoch[1]))
    return slots
