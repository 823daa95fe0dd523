"""What might repair a finding: places for a synchronize, a fork, a join, a wait, a free or a barrier.

They are suggestions: whether one repairs anything is for the checker to say, and which is best for a search.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from hostir.ir.check.findings import Finding
from hostir.ir.check.missing import MissingFlags
from hostir.ir.check.order import Order
from hostir.ir.check.places import Edit, Edits, Outline, Place, on_host
from hostir.ir.check.tracer import CALLER, Event
from hostir.ir.host_ops import Allocate, CurrentStream, For, FreeBuffer, SetStream, Synchronize, Wait
from hostir.ir.onesided_ops import Barrier, Copy, Signal, WaitSignal
from hostir.ir.op import Phase, Statement
from hostir.ir.types import Kind
from hostir.ir.values import Expr, Lit, Ref, Value

REPAIRABLE = {"race", "flag shared", "leak", "nobody sends", "SMs held"}


def for_handles(outline: Outline) -> Iterator[Edits]:
    """Waits for a handle that nobody waits for, the first in program order: at any place of its block behind it."""
    for place, s in outline.statements:
        handle = s.defines(Phase.HOST)
        if handle is None or handle.type is not Kind.HANDLE:
            continue
        behind = outline.block(place)[place[-1] + 1 :]
        if not any(isinstance(x, Wait) and x.handle == handle for x in behind):
            yield from _waits(handle, place, behind)
            return


def _waits(handle: Value, place: Place, behind: tuple[Statement, ...]) -> Iterator[Edits]:
    for n, s in enumerate((None, *behind), place[-1] + 1):
        if s is None or not (on_host(s) or isinstance(s, Wait)):
            yield (Edit((*place[:-1], n), (Wait(handle=handle),)),)


def for_leaks(outline: Outline, names: Container[str]) -> Edits:
    """Frees for all buffers that nobody frees: where the block ends that allocates them."""
    ends: dict[Place, list[Statement]] = {}
    for place, s in outline.all_of(Allocate):
        value = s.defines(Phase.HOST)
        freed = any(isinstance(x, FreeBuffer) and x.x == value for x in outline.block(place))
        if value is not None and value.name in names and not freed:
            ends.setdefault(outline.end(place), []).append(FreeBuffer(x=value))
    return tuple(Edit(end, (*outline.at_callers(end), *frees)) for end, frees in ends.items())


class Suggestions:
    """Edits that may repair a finding about two events that nothing orders, or a signal that nobody sends."""

    def __init__(self, outline: Outline, order: Order) -> None:
        self.outline = outline
        self.order = order

    def of(self, found: Finding) -> Iterator[Edits]:
        if found.kind == "nobody sends":
            yield from self._unsent(found.events[0])
            return
        if found.kind == "SMs held":  # by a kernel of the next call; one of this call would better be issued later
            yield from self._joins()
            return
        first, second = found.events[:2]
        if first.rank != second.rank:
            yield from self._flags(first, second)
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
        """The stream of the second waits for that of the first."""
        for place in self._spots(second):
            for stream in self._streams(first, place):
                yield (Edit(place, (Synchronize(stream=stream),)),)
        if second.statement is not None and self.outline.program.streams:
            place = self.outline.place(second.statement)
            yield (Edit(place, self.outline.join(place)),)

    def _spots(self, second: Event) -> list[Place]:
        """Where the stream of an event may wait: in front of it, and wherever above a stream becomes current.

        What closes the program counts too, and barriers and signals: they pass on what their stream waited for.
        """
        outline = self.outline
        told = [place for place, _ in outline.all_of(Barrier, Signal)]
        if second.statement is None:
            return [*outline.ends(), *told]
        here = outline.place(second.statement)
        set_here = [(*at[:-1], at[-1] + 1) for at, _ in outline.all_of(SetStream) if at < here]
        return list(dict.fromkeys([here, *set_here, *told]))

    def _streams(self, event: Event, place: Place) -> list[Expr]:
        """How the streams that know of an event's end may be written at a place."""
        outline = self.outline
        lanes = {event.stream, *(str(lane[1]) for lane, _ in event.ends if len(lane) == 2)}
        found: list[Expr] = [Ref(outline.user)] if outline.user and (CALLER in lanes or lanes == {event.stream}) else []
        set_to = [s.stream for _, s in outline.all_of(SetStream) if isinstance(s, SetStream)]
        found += [s for s in set_to if not (isinstance(s, Ref) and s.value.type is Kind.STREAM)]
        found += [Lit(int(lane.split()[1])) for lane in sorted(lanes) if lane.startswith("stream ")]
        return [stream for stream in dict.fromkeys(found) if outline.knows(place, stream)]

    def _forks(self, second: Event) -> Iterator[Edits]:
        """Every worker waits for the caller's stream, or one that has waited for others, in front of the second's loop.

        Or in front of the first loop.
        """
        if not self.outline.program.streams:
            return
        outline, here = self.outline, second.statement
        spots = [n for n, s in enumerate(outline.program.body) if isinstance(s, (For, SetStream))][:1]
        spots += [outline.place(here)[0]] if here is not None else []
        for at in dict.fromkeys(spots):
            if outline.user and outline.user.name in outline.scope((at,)):
                yield (Edit((at,), outline.fork((at,), Ref(outline.user))),)
            for worker in self._told():
                yield (Edit((at,), outline.fork((at,), Lit(worker))),)

    def _told(self) -> list[int]:
        """The workers that barriers, signals and communication told of other ranks."""
        told = {e.stream for e in self.order.events if isinstance(e.statement, (Barrier, Wait, WaitSignal))}
        return sorted(int(stream.split()[1]) for stream in told if stream != CALLER)

    def _joins(self) -> Iterator[Edits]:
        """The caller's stream waits for every worker at the end."""
        if not self.outline.program.streams:
            return
        for end in self.outline.ends():
            yield (Edit(end, (*self.outline.at_callers(end), *self.outline.join(end))),)

    # Handles and frees ------------------------------------------------------------------------------------------------
    def _handles(self, first: Event, second: Event) -> Iterator[Edits]:
        """The wait for a communication moves in front of what uses its memory, or right behind the communication."""
        s, outline = first.statement, self.outline
        handle = s.defines(Phase.HOST) if s is not None else None
        if s is None or handle is None or handle.type is not Kind.HANDLE:
            return
        place = outline.place(s)
        behind = enumerate(outline.block(place)[place[-1] + 1 :], place[-1] + 1)
        wait = next(((*place[:-1], n) for n, x in behind if isinstance(x, Wait) and x.handle == handle), None)
        if wait is None:
            return
        targets = [(*place[:-1], place[-1] + 1)]
        if second.statement is not None:
            user = outline.place(second.statement)[: len(place)]
            targets += [user] if user[:-1] == place[:-1] and user > place else []
        for target in targets:
            yield Edit(wait, drop=1), Edit(target, (Wait(handle=handle),))

    def _frees(self, first: Event, second: Event) -> Iterator[Edits]:
        """A free moves to the end of its block."""
        for s in (first.statement, second.statement):
            if isinstance(s, FreeBuffer):
                place = self.outline.place(s)
                end = self.outline.end(place)
                yield Edit(place, drop=1), Edit(end, (*self.outline.at_callers(end), s))

    # Between ranks ----------------------------------------------------------------------------------------------------
    def _barriers(self, first: Event, second: Event) -> Iterator[Edits]:
        """All ranks meet between the two, or where a loop around them or the program begins or ends."""
        outline, told = self.outline, [s for s in (first.statement, second.statement) if s is not None]
        over = dict.fromkeys((s.remote, s.over) for s in told if isinstance(s, Copy))
        for x, axis in over:
            for place in self._meetings(told):
                if (operand := self._on_mesh_of(x, place)) is not None:
                    yield (Edit(place, (Barrier(x=operand, over=axis),)),)
            for end in outline.ends():
                operand = self._on_mesh_of(x, end)
                on = outline.at_callers(end)
                if operand is not None and outline.program.streams:
                    yield (Edit(end, (*on, *outline.join(end), Barrier(x=operand, over=axis))),)

    def _meetings(self, told: list[Statement]) -> list[Place]:
        outline = self.outline
        found: list[Place] = []
        for s in reversed(told):
            place = outline.place(s)
            found += [place, (*place[:-1], place[-1] + 1)]
            for depth in range(len(place) - 1, 0, -1):
                loop = place[:depth]
                found += [(*loop, 0), outline.end((*loop, 0)), loop, (*loop[:-1], loop[-1] + 1)]
        return list(dict.fromkeys([*found, *self._starts(), *outline.ends()]))

    def _starts(self) -> list[Place]:
        """In front of the first statement that a stream sees."""
        body = self.outline.program.body
        return [(next((n for n, s in enumerate(body) if not (on_host(s) or isinstance(s, CurrentStream))), 0),)]

    def _on_mesh_of(self, x: Value, place: Place) -> Value | None:
        """A value in scope that lies on the mesh of another: an input where there is one."""
        same = [v for v in self.outline.program.inputs if v.tensor.mesh == x.tensor.mesh]
        return same[0] if same else self.outline.scope(place).get(x.name)

    def _flags(self, first: Event, second: Event) -> Iterator[Edits]:
        """Either side waits for a flag that is raised already, and nobody waits for."""
        users = [event.statement for event in (second, first) if event.statement is not None]
        missing = MissingFlags(self.outline, self.order)
        yield from missing.waits(users)
        yield from missing.kernels(users)

    def _unsent(self, waiting: Event) -> Iterator[Edits]:
        """The signal that nobody sends; or in place of the wait for it a barrier, or nothing."""
        yield from MissingFlags(self.outline, self.order).signals(waiting)
        s = waiting.statement
        if not isinstance(s, WaitSignal):
            return
        place, x = self.outline.place(s), s.flags
        mesh, operand = x.tensor.mesh, self._on_mesh_of(x, place)
        yield (Edit(place, drop=1),)
        for axis in mesh.axes if mesh and operand else ():
            yield (Edit(place, (Barrier(x=operand or x, over=axis),), drop=1),)


def _issued(event: Event) -> tuple[int, int]:
    """When its rank issued an event."""
    return event.call, event.number
