"""Find wrong accesses to memory: races, uses after a free, and reads of unwritten memory.

Each event is visited after all events that happen before it. So if access A is visited before access B, either A
happens before B, or the two are unordered. For each region of a buffer, only those accesses are kept that a later
access could still race with. After a write that follows all earlier accesses to the region, the earlier accesses are
dropped, as in FastTrack (Flanagan and Freund 2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hostir.check.ordering.order import Clock, Order
from hostir.check.tracing.events import Event
from hostir.check.tracing.memory import Access, Buffer
from hostir.ir.regions import Near, Region, covered


@dataclass(eq=False, slots=True)
class Touch:
    """An event and one of its accesses."""

    event: Event
    access: Access


@dataclass(frozen=True, slots=True)
class Conflict:
    """An error in the accesses to a buffer: a race, a use after a free, or a read of unwritten elements.

    Fields:
        category: `race`, `use after free` or `unwritten`.
        buffer: the buffer.
        first: in a race, the access that its rank issues first. In a use after a free, the access that frees the
            buffer. In an `unwritten` conflict, the access that left the elements undefined; None if nothing has written
            the elements.
        second: the other access. In an `unwritten` conflict, it reads the elements.
    """

    category: str
    buffer: Buffer
    first: Touch | None
    second: Touch


@dataclass(eq=False, slots=True)
class AccessGroup:
    """The accesses to one region of a buffer that a later access could still race with.

    `near` holds this group and the groups of all regions that overlap this region.
    """

    reads: list[Touch] = field(default_factory=list)
    writes: list[Touch] = field(default_factory=list)
    near: list[AccessGroup] = field(default_factory=list)


@dataclass(eq=False)
class History:
    """The accesses to one buffer so far.

    Fields:
        groups: the accesses by region.
        near: an index of the regions. It finds the regions that overlap a given region.
        written: all regions that have ever been written.
        undefined: the regions that an access has left undefined. Each is mapped to this access, and to the regions that
            were written after it.
        freed: the access that freed the buffer.
    """

    groups: dict[Region, AccessGroup] = field(default_factory=dict)
    near: Near[AccessGroup] = field(default_factory=Near)
    written: dict[Region, None] = field(default_factory=dict)
    undefined: dict[Region, tuple[Touch, list[Region]]] = field(default_factory=dict)
    freed: Touch | None = None

    def group(self, region: Region) -> AccessGroup:
        """Return the group of a region; create it on first use."""
        group = self.groups.get(region)
        if group is None:
            group = self.groups[region] = AccessGroup()
            group.near = [*self.near.meeting(region), group]
            for other in group.near[:-1]:
                other.near.append(group)
            self.near.add(region, group)
        return group

    def add(self, touch: Touch, clean: bool) -> None:
        """Record an access.

        `clean` is True if the access happens after all earlier accesses that it could race with.
        """
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
        if touch.event.verb != "allocates":  # a new buffer has never been written
            self.undefined[touch.access.region] = touch, []

    def _define(self, region: Region) -> None:
        self.written[region] = None
        for gone, (_, since) in list(self.undefined.items()):
            if gone.meets(region):
                since.append(region)
                if covered(gone, since):
                    del self.undefined[gone]

    def unwritten(self, region: Region) -> Iterator[Touch | None]:
        """Yield the reasons why a region must not be read.

        A reason is an access that left a part of the region undefined, or None if a part of it was never written.
        """
        if not self.undefined and region in self.written:
            return
        gaps = ((gone, *gap) for gone, gap in self.undefined.items() if gone.meets(region))
        left = [touch for gone, touch, since in gaps if not covered(region, since, within=gone)]
        if not left and not covered(region, self.written):
            yield None
        yield from left


@dataclass(eq=False, slots=True)
class CallUses:
    """The events of one call that access a buffer, in a form that is quick to compare with a vector clock.

    Fields:
        ticks: for each lane, the tick of the last event on the lane that accesses the buffer. An event happens after
            all these events if its vector clock has reached all these ticks.
        others: the events without a tick, and the events with several ticks. They are compared one by one.
    """

    ticks: Clock
    others: list[Event] = field(default_factory=list)


class RaceDetector:
    """Checks the accesses of each visited event against earlier accesses to the same memory.

    Fields:
        conflicts: for each pair of statements and each buffer, one conflict and the number of its occurrences.
        resizable: True if each call ends its accesses to every symmetric buffer before the next call accesses the same
            buffer, even at other elements. Reads need not be ordered after other reads. If this is True, a symmetric
            buffer may have a different size in each call.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.resizable = True
        self.kept = {buffer for rank in order.ranks for buffer in rank.kept.values()}
        self.uses: dict[Buffer, dict[tuple[int, bool], CallUses]] = {}  # of symmetric buffers, by (call, writes)
        self.histories: dict[Buffer, History] = {}
        self.conflicts: dict[tuple[object, ...], tuple[Conflict, int]] = {}
        self.raced: set[Buffer] = set()
        # Reads of memory that was unwritten when they were visited, with the reasons from `History.unwritten`.
        self.unsure: list[tuple[Touch, Buffer, History, Touch | None]] = []

    def visit(self, event: Event, clock: Clock) -> None:
        for access in event.accesses:
            buffer = self._buffer(access)
            if self.resizable and buffer in self.kept:
                self.resizable = self._follows(buffer, event, access.writes, clock)
            history = self.histories.setdefault(buffer, History())
            touch = Touch(event, access)
            unordered = self._unordered(touch, history, clock)
            for other in unordered:
                if _implied_by_writer(other, touch):
                    continue
                self.raced.add(buffer)
                self._note(Conflict("race", buffer, *_as_issued(other, touch)))
            if history.freed and self.order.known(history.freed.event, clock):
                self._note(Conflict("use after free", buffer, history.freed, touch))
            if not access.writes:
                self.unsure += [(touch, buffer, history, why) for why in history.unwritten(access.region)]
            if access.does == "frees":
                history.freed = touch
            history.add(touch, clean=not unordered)

    def _follows(self, buffer: Buffer, event: Event, writes: bool, clock: Clock) -> bool:
        """Record an access of `event` to a buffer.

        Return True if the access happens after all accesses of earlier calls to the same buffer, even at other
        elements. A read need not happen after other reads.
        """
        calls = self.uses.setdefault(buffer, {})
        for (call, wrote), uses in calls.items():
            if call == event.call or not (writes or wrote):
                continue
            seen = (clock >= uses.ticks).all() and all(self.order.known(other, clock) for other in uses.others)
            if call > event.call or not seen:
                return False
        mine = calls.get((event.call, writes))
        if mine is None:
            mine = calls[event.call, writes] = CallUses(np.zeros(len(clock), dtype=np.int32))
        if len(event.ends) == 1:
            ((lane, tick),) = event.ends
            at = self.order.lanes[lane]
            mine.ticks[at] = max(mine.ticks[at], tick)
        else:
            mine.others.append(event)
        return True

    def _buffer(self, access: Access) -> Buffer:
        if access.rank < 0:
            return access.buffer
        return self.order.ranks[access.rank].kept.get(access.buffer.name, access.buffer)

    def _unordered(self, touch: Touch, history: History, clock: Clock) -> list[Touch]:
        near, known, event = history.group(touch.access.region).near, self.order.known, touch.event
        reads = touch.access.writes  # a write conflicts with reads, too
        others = [other for group in near for other in ((*group.writes, *group.reads) if reads else group.writes)]
        return [other for other in others if other.event is not event and not known(other.event, clock)]

    def finish(self) -> None:
        """Record a conflict for each read of unwritten memory. The caller calls this when all events have been visited.

        If there is a race on the same buffer, the race may be the reason why the elements seem unwritten. Then no
        conflict is recorded for the read.
        """
        for touch, buffer, history, why in self.unsure:
            if buffer not in self.raced or (why is None and not covered(touch.access.region, history.written)):
                self._note(Conflict("unwritten", buffer, why, touch))

    def most_specific(self) -> list[tuple[Conflict, int]]:
        """Return the conflicts, each with the number of its occurrences.

        A conflict with an `allocate` is left out if there is another conflict between the same statement and the same
        stream. That conflict has the same cause, and its message is clearer.
        """
        every = self.conflicts.values()
        streams = {_sides(c) for c, _ in every if c.first and not _of_new(c)}
        return [(c, n) for c, n in every if not (_of_new(c) and _sides(c) in streams)]

    def forget(self) -> None:
        """Clear the links between groups of accesses.

        The links form cycles, which take the garbage collector longer to free.
        """
        for history in self.histories.values():
            for group in history.groups.values():
                group.near.clear()

    def _note(self, conflict: Conflict) -> None:
        sides = frozenset(id(t.event.statement) for t in (conflict.first, conflict.second) if t)
        local = conflict.buffer.rank == conflict.second.event.rank
        first, times = self.conflicts.setdefault((conflict.category, conflict.buffer.name, sides, local), (conflict, 0))
        self.conflicts[conflict.category, conflict.buffer.name, sides, local] = first, times + 1


def _implied_by_writer(a: Touch, b: Touch) -> bool:
    """Return True if one of two unordered accesses is an allocation and the other is a read.

    This conflict is not reported, because another finding shows the same error: the write of the elements does not
    follow the allocation, or the read does not follow the write, or nothing writes the elements.
    """
    return any(one.event.verb == "allocates" and not other.access.writes for one, other in ((a, b), (b, a)))


def _as_issued(a: Touch, b: Touch) -> tuple[Touch, Touch]:
    """Return two accesses in the order of issue.

    Accesses of different ranks are ordered by the call, and within a call by the number of events that their rank had
    issued before.
    """
    first = (a.event.call, a.event.number) <= (b.event.call, b.event.number)
    return (a, b) if first else (b, a)


def _of_new(conflict: Conflict) -> bool:
    return conflict.first is not None and conflict.first.event.verb == "allocates"


def _sides(conflict: Conflict) -> tuple[int, str]:
    return id(conflict.second.event.statement), conflict.first.event.stream if conflict.first else ""
