"""Propose statements that might repair a finding, and the places to insert them.

Insertions that might repair a finding: a synchronize, a fork, a join, a wait, a free or a barrier.

These are suggestions: the checker decides which of them repair anything, and a search picks the best.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from hostir.check.findings import Finding
from hostir.check.ordering.order import Order
from hostir.check.tracing.events import CALLER, Event
from hostir.ir.host_ops import FreeBuffer, Synchronize, Wait
from hostir.ir.onesided_ops import Barrier
from hostir.ir.op import (
    Expr,
    Lit,
    Ref,
    Statement,
    Sync,
    Value,
)
from hostir.ir.types import Kind
from hostir.repair.missing import MissingFlags, held_up
from hostir.repair.places import BodyPosition, Edit, Edits, Outline, issues, moves_on

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
