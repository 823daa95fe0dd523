"""Who touches which memory without being ordered: races, use of what was freed, reads of what nobody wrote.

Events come in an order that respects what comes before what, so an earlier access is ordered before a later one or not
at all. For each buffer the accesses that a later one could still race with are kept, by region (the idea of FastTrack,
Flanagan and Freund 2009: after an ordered write, what came before it need not be looked at again).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hostir.ir.check.near import Near
from hostir.ir.check.order import Clock, Order
from hostir.ir.check.regions import Region, covered
from hostir.ir.check.tracer import Event
from hostir.ir.check.views import Access, Buffer


@dataclass(frozen=True, slots=True)
class Touch:
    """An event and one of its accesses."""

    event: Event
    access: Access


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two accesses to a common element that nothing orders, as issued; `first` is None where there is but one."""

    kind: str  # race, use after free, freed twice, unwritten
    buffer: Buffer
    first: Touch | None
    second: Touch


@dataclass(eq=False, slots=True)
class Group:
    """The accesses to one region of a buffer; `near` are the groups of those that meet it, itself among them."""

    reads: list[Touch] = field(default_factory=list)
    writes: list[Touch] = field(default_factory=list)
    near: list[Group] = field(default_factory=list)


@dataclass(eq=False)
class History:
    """The accesses to one buffer so far."""

    groups: dict[Region, Group] = field(default_factory=dict)
    near: Near[Group] = field(default_factory=Near)
    written: dict[Region, None] = field(default_factory=dict)
    freed: Touch | None = None

    def group(self, region: Region) -> Group:
        """The accesses to a region."""
        group = self.groups.get(region)
        if group is None:
            group = self.groups[region] = Group()
            group.near = [*self.near.meeting(region), group]
            for other in group.near[:-1]:
                other.near.append(group)
            self.near.add(region, group)
        return group

    def add(self, touch: Touch, clean: bool) -> None:
        """Keeps an access; `clean` if it is ordered after all others that it could race with."""
        group, access = self.groups[touch.access.region], touch.access
        if access.writes:
            if clean:
                group.reads, group.writes = [], []
            if not access.frees and touch.event.verb != "overwrites":  # what the caller leaves is not for reading
                self.written[access.region] = None
            group.writes.append(touch)
            return
        if touch.event.lane is not None:
            group.reads = [t for t in group.reads if t.event.lane != touch.event.lane]
        group.reads.append(touch)


class Memory:
    """Looks at what events do to memory, one event after another.

    `conflicts` holds one conflict for each pair of statements and each buffer, with the number of times it was met.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.histories: dict[Buffer, History] = {}
        self.conflicts: dict[tuple[object, ...], tuple[Conflict, int]] = {}
        self.raced: set[Buffer] = set()
        self.unsure: list[tuple[Touch, Buffer, History]] = []  # reads of what was not written so far

    def visit(self, event: Event, clock: Clock) -> None:
        for access in event.accesses:
            buffer = self._buffer(access)
            history = self.histories.setdefault(buffer, History())
            touch = Touch(event, access)
            found = list(self._unordered(touch, history, clock))
            for other in found:
                self.raced.add(buffer)
                self._note(Conflict("race", buffer, *_as_issued(other, touch)))
            if history.freed and self.order.known(history.freed.event, clock):
                self._note(Conflict("freed twice" if access.frees else "use after free", buffer, history.freed, touch))
            if not (access.writes or access.region in history.written or covered(access.region, history.written)):
                self.unsure.append((touch, buffer, history))
            if access.frees:
                history.freed = touch
            history.add(touch, clean=not found)

    def _buffer(self, access: Access) -> Buffer:
        if access.rank < 0:
            return access.buffer
        return self.order.ranks[access.rank].kept.get(access.buffer.name, access.buffer)

    def _unordered(self, touch: Touch, history: History, clock: Clock) -> Iterator[Touch]:
        group, known = history.group(touch.access.region), self.order.known
        for near in group.near:
            for other in (*near.writes, *near.reads) if touch.access.writes else near.writes:
                if other.event is not touch.event and not known(other.event, clock):
                    yield other

    def finish(self) -> None:
        """Once all events have come: of reads of nothing, those of buffers in which no race explains it."""
        for touch, buffer, history in self.unsure:
            if buffer not in self.raced or not covered(touch.access.region, history.written):
                self._note(Conflict("unwritten", buffer, None, touch))

    def _note(self, conflict: Conflict) -> None:
        sides = frozenset(id(t.event.statement) for t in (conflict.first, conflict.second) if t)
        own = conflict.buffer.rank == conflict.second.event.rank
        first, times = self.conflicts.setdefault((conflict.kind, conflict.buffer.name, sides, own), (conflict, 0))
        self.conflicts[conflict.kind, conflict.buffer.name, sides, own] = first, times + 1


def _as_issued(a: Touch, b: Touch) -> tuple[Touch, Touch]:
    """Two accesses in the order in which their ranks issue them."""
    first = (a.event.call, a.event.number) <= (b.event.call, b.event.number)
    return (a, b) if first else (b, a)
