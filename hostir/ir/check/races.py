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
    """Two accesses to a common element that nothing orders, as issued; `first` is None where there is but one.

    Of an `unwritten` one, `first` has left undefined what `second` reads.
    """

    kind: str  # race, use after free, unwritten
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
    written: dict[Region, None] = field(default_factory=dict)  # at some time
    undefined: dict[Region, tuple[Touch, list[Region]]] = field(default_factory=dict)  # and what was written since
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
            if access.does == "undefines":
                self._undefine(touch)
            elif access.does == "writes":
                self._define(access.region)
            group.writes.append(touch)
            return
        if touch.event.lane is not None:
            group.reads = [t for t in group.reads if t.event.lane != touch.event.lane]
        group.reads.append(touch)

    def _undefine(self, touch: Touch) -> None:
        if touch.event.verb != "allocates":  # of what is new nothing was written before
            self.undefined[touch.access.region] = touch, []

    def _define(self, region: Region) -> None:
        self.written[region] = None
        for gone, (_, since) in list(self.undefined.items()):
            if gone.meets(region):
                since.append(region)
                if covered(gone, since):
                    del self.undefined[gone]

    def unwritten(self, region: Region) -> Iterator[Touch | None]:
        """Why a region may not be read: who left some of it undefined, or None where nobody has written it."""
        if not self.undefined and region in self.written:
            return
        gaps = ((gone, *gap) for gone, gap in self.undefined.items() if gone.meets(region))
        left = [touch for gone, touch, since in gaps if not covered(region, since, within=gone)]
        if not left and not covered(region, self.written):
            yield None
        yield from left


class Memory:
    """Looks at what events do to memory, one event after another.

    `conflicts` holds one conflict for each pair of statements and each buffer, with the number of times it was met.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.histories: dict[Buffer, History] = {}
        self.conflicts: dict[tuple[object, ...], tuple[Conflict, int]] = {}
        self.raced: set[Buffer] = set()
        self.unsure: list[tuple[Touch, Buffer, History, Touch | None]] = []  # reads of nothing so far, and why

    def visit(self, event: Event, clock: Clock) -> None:
        for access in event.accesses:
            buffer = self._buffer(access)
            history = self.histories.setdefault(buffer, History())
            touch = Touch(event, access)
            found = list(self._unordered(touch, history, clock))
            for other in found:
                if _told_of_the_writer(other, touch):
                    continue
                self.raced.add(buffer)
                self._note(Conflict("race", buffer, *_as_issued(other, touch)))
            if history.freed and self.order.known(history.freed.event, clock):
                self._note(Conflict("use after free", buffer, history.freed, touch))
            if not access.writes:
                self.unsure += [(touch, buffer, history, why) for why in history.unwritten(access.region)]
            if access.does == "frees":
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
        for touch, buffer, history, why in self.unsure:
            if buffer not in self.raced or (why is None and not covered(touch.access.region, history.written)):
                self._note(Conflict("unwritten", buffer, why, touch))

    def _note(self, conflict: Conflict) -> None:
        sides = frozenset(id(t.event.statement) for t in (conflict.first, conflict.second) if t)
        own = conflict.buffer.rank == conflict.second.event.rank
        first, times = self.conflicts.setdefault((conflict.kind, conflict.buffer.name, sides, own), (conflict, 0))
        self.conflicts[conflict.kind, conflict.buffer.name, sides, own] = first, times + 1


def _told_of_the_writer(a: Touch, b: Touch) -> bool:
    """A read that is not behind an allocation, which needs no finding of its own: either whoever wrote what it reads is
    not behind the allocation, or the read is not behind the writer, or nobody wrote it."""
    return any(one.event.verb == "allocates" and not other.access.writes for one, other in ((a, b), (b, a)))


def _as_issued(a: Touch, b: Touch) -> tuple[Touch, Touch]:
    """Two accesses in the order in which their ranks issue them."""
    first = (a.event.call, a.event.number) <= (b.event.call, b.event.number)
    return (a, b) if first else (b, a)
