"""Order the events of all ranks by vector clocks (happens-before).

Find races, cyclic waits and kernels that block SMs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from math import prod
from typing import Any, TypeVar

import numpy as np

from hostir.check.events import Event, Flag, Lane, Side, WaitingKernel
from hostir.check.memory import Access, Buffer
from hostir.check.trace import RankTrace
from hostir.ir.machine import Move
from hostir.ir.regions import Near, Region, covered

# Happens-before -------------------------------------------------------------------------------------------------------
# Happens-before over all ranks: join the events of the ranks, and visit them with vector clocks.
#
# Every lane (a stream of a rank, a team's collectives on a rank, ...) counts its events. An event's clock holds, for
# each lane, the number of events of this lane that come before it: the maximum over the events that it follows. Then
# one look-up tells whether A comes before B (Mattern 1989), and the transitive closure is never computed. An event that
# is never reached waits in a cycle, or behind one.

Clock = Any  # an array, by lane
SIGNAL = "signal"  # the lane of one signal
T = TypeVar("T")


@dataclass
class Trouble:
    """A mismatch between the statements that ranks issue, or a deadlock. Neither depends on accesses to memory."""

    kind: str
    events: list[Event | None]
    detail: str = ""


@dataclass
class Order:
    """The events of all ranks, and the edges between ranks. `troubles` are mismatches detected while joining them."""

    ranks: Sequence[RankTrace]
    events: list[Event] = field(default_factory=list)
    lanes: dict[Lane, int] = field(default_factory=dict)
    # Clocks of signals; if kernels wait, also clocks of the begin events in `lasting`.
    clocks: dict[Event, Clock] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    sent: dict[tuple[int, str, int], list[Flag]] = field(default_factory=dict)  # the signals of each flag
    needs: dict[Event, Clock] = field(default_factory=dict)  # clocks of signals that also count events in `held`
    partners: dict[Flag, Event] = field(default_factory=dict)  # for each wait for a flag: the signal that ends it
    resizable: bool = False  # set by the `RaceDetector` that visits the events

    def __post_init__(self) -> None:
        self.events = [event for rank in self.ranks for event in rank.events]
        for event in self.events:
            if event.lane is not None:
                self.lanes.setdefault(event.lane, len(self.lanes))
        self._join_collectives()
        self._join_messages()
        self._join_barriers()
        self._join_flags()

    # Edges between ranks ----------------------------------------------------------------------------------------------
    def _moment(self, after: list[Event], team: tuple[int, ...]) -> Event:
        """Add an event that follows all of these events of a team. An edge to it replaces an edge to each of them."""
        first = after[0]
        moment = Event(first.rank, first.call, "meets", first.statement, first.rounds, first.stream, after=after)
        self.events.append(moment)
        return moment

    def _of_each(self, team: tuple[int, ...], issued: list[dict[tuple[int, ...], list[T]]]) -> list[list[T]]:
        """Return, for each rank of a team, the items that it issued to the team."""
        return [issued[rank].get(team, []) if rank < len(issued) else [] for rank in team]

    def _join_collectives(self) -> None:
        for team in dict.fromkeys(team for rank in self.ranks for team in rank.collectives):
            for sides in zip_longest(*self._of_each(team, [rank.collectives for rank in self.ranks])):
                if not _agree(sides):
                    events = [side.begin if side else None for side in sides]
                    self.troubles.append(Trouble("collectives differ", events, " ".join(map(str, team))))
                    break
                self._join_sides(sides)

    def _join_sides(self, sides: Sequence[Side]) -> None:
        """Order each side's end after the begin of its senders; its receivers may hold it up."""
        if sides[0].exchange.moves is None:
            meeting = self._moment([side.begin for side in sides], sides[0].exchange.team)
            for side in sides:
                side.end.after.append(meeting)
            return
        of = {side.begin.rank: side for side in sides}
        for move in {move for side in sides for move in side.exchange.moves or () if move.source != move.target}:
            of[move.target].end.after.append(of[move.source].begin)
            of[move.source].end.held.append(of[move.target].begin)

    def _join_messages(self) -> None:
        posted: dict[tuple[tuple[int, ...], int, int], tuple[list[Side], list[Side]]] = {}
        for rank in self.ranks:
            for team, sides in rank.messages.items():
                for side in sides:
                    for move in side.exchange.moves or ():
                        ends = posted.setdefault((team, move.source, move.target), ([], []))
                        for end, here in enumerate((move.source, move.target)):
                            if here == rank.rank:
                                ends[end].append(side)
        for sends, receives in posted.values():
            for send, receive in zip_longest(sends, receives):
                if send is None or receive is None:
                    self.troubles.append(Trouble("message without partner", [(send or receive).begin]))
                elif _content(send, "x") != _content(receive, "out"):
                    self.troubles.append(Trouble("messages differ", [send.begin, receive.begin]))
                else:
                    send.take.held.append(receive.begin)
                    receive.give.after += [send.begin, send.take]

    def _join_barriers(self) -> None:
        for team in dict.fromkeys(team for rank in self.ranks for team in rank.barriers):
            for barriers in zip_longest(*self._of_each(team, [rank.barriers for rank in self.ranks])):
                if None in barriers:
                    self.troubles.append(Trouble("barriers differ", list(barriers), " ".join(map(str, team))))
                    break
                if earlier := [before for barrier in barriers for before in barrier.after]:
                    meeting = self._moment(earlier, team)
                    for barrier in barriers:
                        barrier.after.append(meeting)

    def _join_flags(self) -> None:
        for flag in (flag for rank in self.ranks for flag in rank.signals):
            self.sent.setdefault(flag.place, []).append(flag)
        for wait in (wait for rank in self.ranks for wait in rank.waits):
            enough = self.enough(wait)
            if not enough:
                self.troubles.append(Trouble("nobody sends", [wait.event], f"{wait.epoch[1]}"))
                continue
            self.partners[wait] = enough[0].event
            wait.event.after.append(enough[0].event)
        self._show_signals()

    def _show_signals(self) -> None:
        """Give each signal of a kernel, which is on no lane, ticks that show that it was sent: its wait's ticks."""
        for wait, signal in self.partners.items():
            if signal.lane is None and wait.event.lane is not None:
                signal.ends += wait.event.ends
            elif signal.lane is None:  # another kernel waits, block by block: the signal gets a lane for itself
                signal.lane, signal.tick = (signal.rank, SIGNAL, len(self.lanes)), 1
                self.lanes[signal.lane] = len(self.lanes)
                signal.ends.append((signal.lane, 1))

    def enough(self, wait: Flag) -> list[Flag]:
        """Return the signals that can end a wait, by rising epoch."""
        same = [f for f in self.sent.get(wait.place, ()) if f.epoch >= wait.epoch and f.epoch[0] == wait.epoch[0]]
        return sorted(same, key=lambda f: (f.epoch, f.event.rank, f.event.number))

    # Clocks -----------------------------------------------------------------------------------------------------------
    def run(self, visit: Callable[[Event, Clock], None]) -> list[Event]:
        """Visit all events in an order that follows the edges; return the events that are never reached."""
        keep = {flag.event for rank in self.ranks for flag in rank.signals}
        if not any(rank.kernels for rank in self.ranks):
            return self._walk(visit, keep, self.clocks)
        begins = {begin for rank in self.ranks for begin, _ in rank.lasting()}
        left = self._walk(visit, keep | begins, self.clocks)
        self.needs = self.clocks
        if any(event.held for event in self.events):
            self.needs = {}
            self._walk(lambda event, clock: None, keep, self.needs, held=True)
        return left

    def _walk(
        self,
        visit: Callable[[Event, Clock], None],
        keep: Set[Event],
        kept: dict[Event, Clock],
        held: bool = False,
    ) -> list[Event]:
        """Visit all events once. With `held`, clocks also count the events that may hold an event up."""
        waiting = {event: len(event.after) + len(event.held) for event in self.events}
        followers = self.followers()
        clocks: dict[Event, Clock] = {}
        needed = {event: len(after) for event, after in followers.items()}
        ready = deque(event for event, n in waiting.items() if not n)
        zero = np.zeros(len(self.lanes), dtype=np.int32)
        while ready:
            event = ready.popleft()
            known = [*event.after, *event.held] if held else event.after
            clock = _clock(event, known, clocks, zero, self.lanes)
            visit(event, clock)
            del waiting[event]
            for before in (*event.after, *event.held):
                needed[before] -= 1
                if not needed[before]:
                    del clocks[before]
            if event in followers:
                clocks[event] = clock
            if event in keep:
                kept[event] = clock
            for follower in followers.get(event, ()):
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
        return list(waiting)

    def followers(self) -> dict[Event, list[Event]]:
        """Return, for each event, the events that directly follow it or may be held up by it."""
        followers: dict[Event, list[Event]] = {}
        for event in self.events:
            for before in (*event.after, *event.held):
                followers.setdefault(before, []).append(event)
        return followers

    def known(self, event: Event, clock: Clock) -> bool:
        """Return True if an event has ended for an observer with this clock."""
        for lane, tick in event.ends:  # noqa: SIM110, as this is the hottest loop of the checker
            if clock[self.lanes[lane]] >= tick:
                return True
        return False


def _clock(
    event: Event, after: Sequence[Event], clocks: dict[Event, Clock], zero: Clock, lanes: dict[Lane, int]
) -> Clock:
    if not after:
        clock = zero
    elif len(after) == 1:
        clock = clocks[after[0]]
    else:
        clock = np.maximum(clocks[after[0]], clocks[after[1]])
        for before in after[2:]:
            np.maximum(clock, clocks[before], out=clock)
    if event.seen is not None:
        clock = event.seen(clock)
    elif event.lane is not None and len(after) < 2:
        clock = clock.copy()
    if event.lane is not None:
        clock[lanes[event.lane]] = event.tick
    return clock


def _agree(sides: Sequence[Side | None]) -> bool:
    """Return True if all ranks of a team issue the same collective."""
    first = sides[0]
    if first is None or None in sides:
        return False
    every = [side for side in sides if side is not None]
    if any(side.exchange.kind != first.exchange.kind for side in every):
        return False
    if any(side.exchange.moves is None for side in every):
        return len({(side.exchange.team, *_form(side)) for side in every}) == 1
    of = {side.begin.rank: side for side in every}
    meant = {rank: frozenset(side.exchange.moves or ()) for rank, side in of.items()}
    moves = {move for its in meant.values() for move in its}
    both = all(move in meant[move.source] and move in meant[move.target] for move in moves)
    return both and all(_fits(move, of[move.source], of[move.target]) for move in moves)


def _fits(move: Move, source: Side, target: Side) -> bool:
    """Return True if both ends of a move have the same dtype and number of elements."""
    (taken, dtype), (stored, other) = _content(source, "x"), _content(target, "out")
    return dtype == other and 0 < taken * move.put[1] == stored * move.take[1]


def _content(side: Side, which: str) -> tuple[int, object]:
    """Return the number of elements that a side sends or receives, and their dtype."""
    view = side.x if which == "x" else side.out
    return prod(view.shape) if view else 0, _dtype(side, which)


def _form(side: Side) -> tuple[object, ...]:
    """Return the shapes of a side's operand and result, then their dtypes."""
    return (*(v and v.shape for v in (side.x, side.out)), _dtype(side, "x"), _dtype(side, "out"))


def _dtype(side: Side, which: str) -> object:
    value = getattr(side.begin.statement, which, None)
    return value.tensor.dtype if value is not None else None


# Races ----------------------------------------------------------------------------------------------------------------
# Unordered accesses to memory: races, use after free, reads of unwritten memory.
#
# Events are visited in an order that follows happens-before. So an access visited earlier is either ordered before a
# later one, or unordered with it. For each buffer, the accesses that a later one could still race with are kept, by
# region (as in FastTrack, Flanagan and Freund 2009: after an ordered write, earlier accesses need no further check).


@dataclass(eq=False, slots=True)
class Touch:
    """An event and one of its accesses."""

    event: Event
    access: Access


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two unordered accesses to a common element, in the order of issue; `first` is None if only one is involved.

    In an `unwritten` conflict, `second` reads elements that `first` left undefined.
    """

    kind: str  # race, use after free, unwritten
    buffer: Buffer
    first: Touch | None
    second: Touch


@dataclass(eq=False, slots=True)
class AccessGroup:
    """The accesses to one region of a buffer; `near` holds this group and the groups of all overlapping regions."""

    reads: list[Touch] = field(default_factory=list)
    writes: list[Touch] = field(default_factory=list)
    near: list[AccessGroup] = field(default_factory=list)


@dataclass(eq=False)
class History:
    """The accesses to one buffer so far."""

    groups: dict[Region, AccessGroup] = field(default_factory=dict)
    near: Near[AccessGroup] = field(default_factory=Near)
    written: dict[Region, None] = field(default_factory=dict)  # regions written at any time so far
    # By region: who left it undefined, and the regions written since.
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
        """Record an access. `clean`: it is ordered after all accesses that it could race with."""
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
        """Yield the reasons not to read a region: an access that left a part undefined, or None if nothing wrote it."""
        if not self.undefined and region in self.written:
            return
        gaps = ((gone, *gap) for gone, gap in self.undefined.items() if gone.meets(region))
        left = [touch for gone, touch, since in gaps if not covered(region, since, within=gone)]
        if not left and not covered(region, self.written):
            yield None
        yield from left


@dataclass(eq=False, slots=True)
class CallUses:
    """The accesses of one call to a buffer, as ticks: they have ended for a clock that has reached all of them."""

    ticks: Clock
    others: list[Event] = field(default_factory=list)  # events that end at any one of several ticks


class RaceDetector:
    """Checks the accesses of events, one event after another, against earlier accesses to the same memory.

    `conflicts` holds one conflict for each pair of statements and each buffer, with the number of its occurrences.
    `resizable` is True if calls use each symmetric buffer one after another, whatever elements they access: then
    buffers may have another size in every call.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.resizable = True
        self.kept = {buffer for rank in order.ranks for buffer in rank.kept.values()}
        self.uses: dict[Buffer, dict[tuple[int, bool], CallUses]] = {}  # of symmetric buffers, by (call, writes)
        self.histories: dict[Buffer, History] = {}
        self.conflicts: dict[tuple[object, ...], tuple[Conflict, int]] = {}
        self.raced: set[Buffer] = set()
        # Reads of memory unwritten so far, with the reason.
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
        """Return True if an access follows every access of other calls, unless both read, anywhere in the buffer."""
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
        """Report reads of unwritten memory after all events, except in buffers where a race explains them."""
        for touch, buffer, history, why in self.unsure:
            if buffer not in self.raced or (why is None and not covered(touch.access.region, history.written)):
                self._note(Conflict("unwritten", buffer, why, touch))

    def forget(self) -> None:
        """Drop the cyclic links between groups, which would cost the garbage collector more time."""
        for history in self.histories.values():
            for group in history.groups.values():
                group.near.clear()

    def _note(self, conflict: Conflict) -> None:
        sides = frozenset(id(t.event.statement) for t in (conflict.first, conflict.second) if t)
        local = conflict.buffer.rank == conflict.second.event.rank
        first, times = self.conflicts.setdefault((conflict.kind, conflict.buffer.name, sides, local), (conflict, 0))
        self.conflicts[conflict.kind, conflict.buffer.name, sides, local] = first, times + 1


def _implied_by_writer(a: Touch, b: Touch) -> bool:
    """Return True if a conflict is a read that is not ordered after an allocation: another finding implies it.

    Either the write of these elements is not after the allocation, or the read is not after the write, or nothing
    wrote them. Each of these is a finding.
    """
    return any(one.event.verb == "allocates" and not other.access.writes for one, other in ((a, b), (b, a)))


def _as_issued(a: Touch, b: Touch) -> tuple[Touch, Touch]:
    """Return two accesses in the order in which their ranks issue them."""
    first = (a.event.call, a.event.number) <= (b.event.call, b.event.number)
    return (a, b) if first else (b, a)


# Cyclic waits ---------------------------------------------------------------------------------------------------------
# Ranks that wait for each other in a cycle; flags that are set out of order.


def cyclic_waits(order: Order, left: list[Event]) -> Iterator[Trouble]:
    """Yield one cycle of events that wait for each other, if some events were never reached (`left`).

    If a signal of a higher epoch would end one of the waits, report the signals of its flag as unordered instead.
    """
    stuck = set(left)
    for wait in (wait for rank in order.ranks for wait in rank.waits if wait.event in stuck):
        first = order.partners.get(wait)
        others = [f.event for f in order.enough(wait) if f.event not in stuck]
        if first in stuck and others:
            yield Trouble("flag shared", [others[0], first], f"from {wait.epoch[1]} on")
            return
    event = next((e for e in left if e.statement is not None), left[0] if left else None)
    seen: dict[Event, int] = {}
    path: list[Event] = []
    while event is not None and event not in seen:
        seen[event] = len(path)
        path.append(event)
        event = next((before for before in (*event.after, *event.held) if before in stuck), None)
    if event is not None:
        yield Trouble("deadlock", _one_per_statement(path[seen[event] :]))


def _one_per_statement(cycle: list[Event]) -> list[Event | None]:
    """Return one event for each statement and rank of a cycle, beginning with the first in program order."""
    kept: dict[tuple[int, int, tuple[int, ...]], Event] = {}
    for event in reversed(cycle):
        if event.statement is not None:
            kept.setdefault((event.rank, id(event.statement), event.rounds), event)
    events = list(kept.values())
    first = min(range(len(events)), key=lambda n: _place(events[n]), default=0)
    return [*events[first:], *events[:first]]


def _place(event: Event) -> tuple[int, int, int, int]:
    span = event.statement.span if event.statement else None
    return event.call, span.line if span else 0, span.column if span else 0, event.rank


def flags_out_of_order(order: Order) -> Iterator[Trouble]:
    """Yield signals of one flag that are not ordered with rising epochs."""
    for sent in order.sent.values():
        flags = sorted(sent, key=lambda f: (f.epoch, f.event.rank, f.event.number))
        # Events behind a deadlock have no clock.
        for lower, higher in pairwise(f for f in flags if f.event in order.clocks):
            events: list[Event | None] = [lower.event, higher.event]
            first, second = _epochs(lower, higher)
            if lower.epoch == higher.epoch and lower.event.rank != higher.event.rank:
                yield Trouble("sent twice", events, first)
            elif lower.epoch == higher.epoch and _before(order, lower.event, higher.event):
                yield Trouble("sent again", events, first)
            elif _before(order, higher.event, lower.event):
                yield Trouble("stale epoch", [higher.event, lower.event], f"{first} after {second}")
            elif not _before(order, lower.event, higher.event):
                yield Trouble("flag shared", events, f"{first} and {second}")


def _epochs(a: Flag, b: Flag) -> list[str]:
    """Return two epochs as text, with the calls if these differ."""
    return [f"{f.epoch[1]}" + (f" of call {f.epoch[0] + 1}" if a.epoch[0] != b.epoch[0] else "") for f in (a, b)]


def _before(order: Order, first: Event, second: Event) -> bool:
    return order.known(first, order.clocks[second])


# Kernels that hold all SMs --------------------------------------------------------------------------------------------
# Kernels that hold all SMs of a rank while they wait for a signal that needs these SMs, or that follows an event that
# needs them.
#
# A set of kernels, at most one on each rank, can run at one time if no kernel of the set ends before another starts.
# Then every start lies outside the future of every end. So there is a schedule that has done exactly the events before
# the starts.
#
# In such a set, kernel K *holds up* a signal if an event that needs SMs of K's rank comes before the signal, but not
# before any start of the set: this event cannot begin until K ends. There are two exceptions:
# - Copies that K may overlap already have their SMs.
# - Signals `by 1 sms` that were issued before K in its call get the SM that K leaves free, unless a *rival* may have
#   taken it. A rival is another waiting kernel of the rank, or a communication, that begins beside the set and stays,
#   because it cannot get the other SMs.
#
# The set is stuck if each of its kernels waits for a signal that a kernel of the set holds up. Then each kernel waits
# for the kernel that holds up its signal, and so on in a cycle: the search looks for such cycles.

MAX_PATHS = 20_000  # the most paths followed in a strongly connected set of kernels; a set with more counts as stuck


def kernels_in_the_way(order: Order) -> Iterator[Trouble]:
    """Yield the first cycle of kernels that block each other (a kernel may block itself)."""
    kernels = [kernel for rank in order.ranks for kernel in rank.kernels]
    if not kernels:
        return
    import networkx as nx  # here, because few programs have such kernels

    lanes = Lanes(order)
    graph: Any = nx.DiGraph()
    for kernel in kernels:
        for other in kernels:
            if (kernel is other or together(order, kernel, other)) and lanes.any_held(kernel, other):
                graph.add_edge(kernel, other)
    place = {kernel: n for n, kernel in enumerate(kernels)}
    components = (
        sorted(component, key=lambda kernel: place[kernel]) for component in nx.strongly_connected_components(graph)
    )
    for component in sorted(components, key=lambda component: place[component[0]]):
        for cycle in _cycles(order, component, graph):
            if trouble := lanes.stuck(cycle or component[:1], sure=bool(cycle)):
                yield trouble
                return


def calls_needed(order: Order, ranks: int) -> int:
    """Return the number of calls to check that shows every deadlock of any number of calls.

    Suppose that all events of one call that need SMs have ended when a kernel starts `apart` calls later. Then the
    calls of successive kernels in a cycle differ by less than `apart`. docs/memory-model.md has the argument.
    """
    first = {rank.rank: [*_of_the_first_call(rank)] for rank in order.ranks if rank.kernels}
    calls = order.ranks[0].turn
    starts = [kernel.start for rank in order.ranks for kernel in rank.kernels]
    for apart in range(1, calls):
        later = [start for start in starts if start.call == apart]
        if all(order.known(event, order.clocks[start]) for start in later for event in first[start.rank]):
            return ranks * (apart - 1) + 2
    return ranks * (calls - 1) + 2


def _of_the_first_call(rank: RankTrace) -> Iterator[Event]:
    """Yield the events of a rank's first call that need SMs, and the ends of events that may keep holding SMs."""
    yield from (event for event in rank.events if event.sms and not event.call)
    yield from (end for _, end in rank.lasting() if not end.call)


def _cycles(order: Order, component: list[WaitingKernel], graph: Any) -> Iterator[list[WaitingKernel]]:
    """Yield the cycles of a strongly connected set of kernels whose members can all run at one time.

    Each cycle is yielded once for each of its kernels. The last cycle is empty if there are over `MAX_PATHS` paths.
    """
    paths = [[kernel] for kernel in reversed(component)]
    inside = set(component)
    for _ in range(MAX_PATHS):
        if not paths:
            return
        path = paths.pop()
        for holder in graph.successors(path[-1]):
            if holder is path[0]:
                yield path
            elif holder in inside and all(together(order, holder, other) for other in path):
                paths.append([*path, holder])
    yield []


def together(order: Order, a: WaitingKernel, b: WaitingKernel) -> bool:
    """Return True if two kernels are on different ranks, and neither ends before the other starts."""
    ordered = order.known(a.end, order.clocks[b.start]) or order.known(b.end, order.clocks[a.start])
    return a.start.rank != b.start.rank and not ordered


def _signals(order: Order, kernel: WaitingKernel) -> list[Event]:
    """Return the signals that a kernel waits for."""
    return [signal for flag in kernel.waits if (signal := order.partners.get(flag))]


class _Line:
    """The events of one lane that need SMs, in order."""

    def __init__(self, index: int, events: list[Event]) -> None:
        self.index = index
        self.events = sorted(events, key=lambda event: event.tick)
        self.ticks = [event.tick for event in self.events]
        self.issued = [(event.call, event.number) for event in self.events]
        self.large = [place for place, event in enumerate(self.events) if not event.small]

    def first_held(self, first: int, holder: Event, taken: int) -> int:
        """Return the index of the first event, from `first` on, that gets no SM while `holder` runs.

        Small events get the SM that `holder` leaves free if they were issued before it in its call, and if their tick
        is not above `taken`, at which a rival may have taken that SM.
        """
        if self.issued[first] < (holder.call, 0):
            return first
        large = bisect_left(self.large, first)
        return max(
            first,
            min(
                self.large[large] if large < len(self.large) else len(self.events),
                bisect_left(self.issued, (holder.call, holder.number)),
                bisect_right(self.ticks, taken),
            ),
        )


class Lanes:
    """The events that need SMs, by rank and lane."""

    def __init__(self, order: Order) -> None:
        self.order = order
        lines: dict[tuple[int, int], list[Event]] = {}
        for event in order.events:
            if event.sms and event.lane is not None:
                lines.setdefault((event.rank, order.lanes[event.lane]), []).append(event)
        self.of: dict[int, list[_Line]] = {}
        for (rank, index), events in lines.items():
            self.of.setdefault(rank, []).append(_Line(index, events))
        # For each rank: begin and end of events that may take an SM and keep it while waiting kernels hold the others.
        self.rivals = {rank.rank: [*rank.lasting()] for rank in order.ranks}
        nothing = np.zeros(len(order.lanes), dtype=np.int32)
        # The clock of everything that comes before any signal that a kernel waits for.
        self.latest: dict[WaitingKernel, Clock] = {
            kernel: np.maximum.reduce([nothing, *(order.needs[signal] for signal in _signals(order, kernel))])
            for rank in order.ranks
            for kernel in rank.kernels
        }

    def held(self, after: Clock, holder: WaitingKernel, running: Sequence[WaitingKernel]) -> Event | None:
        """Return an event before `after` that gets no SM of `holder`'s rank while `running` run; None without one."""
        for line in self.of.get(holder.start.rank, ()):
            first = bisect_right(line.ticks, max(self.begun(kernel, line) for kernel in running))
            until = bisect_right(line.ticks, after[line.index])
            if first >= until:
                continue
            taken = min(
                (int(begun[line.index]) for begun in self.rival_clocks(holder, running)), default=line.ticks[-1]
            )
            if (place := line.first_held(first, holder.start, taken)) < until:
                return line.events[place]
        return None

    def rival_clocks(self, holder: WaitingKernel, running: Sequence[WaitingKernel]) -> list[Clock]:
        """Return the begin clocks of rivals: they may take the SM that `holder` leaves free while `running` run."""
        known, clocks = self.order.known, self.order.clocks
        return [
            clocks[begin]
            for begin, end in self.rivals[holder.start.rank]
            if begin is not holder.start
            and not any(known(kernel.end, clocks[begin]) or known(end, clocks[kernel.start]) for kernel in running)
        ]

    def begun(self, kernel: WaitingKernel, line: _Line) -> int:
        """Return the last tick of a lane up to which events do not need the SMs that a kernel takes."""
        overlapped = kernel.overlapped
        same_lane = (
            overlapped is not None and overlapped.lane is not None and self.order.lanes[overlapped.lane] == line.index
        )
        return max(int(self.order.clocks[kernel.start][line.index]), overlapped.tick if overlapped and same_lane else 0)

    def any_held(self, kernel: WaitingKernel, holder: WaitingKernel) -> bool:
        """Return True if `holder` alone holds up a signal that `kernel` waits for; they may be the same kernel."""
        return self.held(self.latest[kernel], holder, [holder]) is not None

    def stuck(self, cycle: list[WaitingKernel], *, sure: bool = True) -> Trouble | None:
        """Return the deadlock of a cycle if each kernel waits for a signal that one of them holds up.

        Always, unless `sure`.
        """
        troubles: list[Trouble] = []
        for kernel in cycle:
            signals = [(s, self.order.needs[s]) for s in _signals(self.order, kernel)]
            held = ((s, e) for s, after in signals for h in cycle if (e := self.held(after, h, cycle)))
            signal, event = next(held, (None, None))
            if not sure:
                return Trouble("SMs held", [kernel.start, *_signals(self.order, kernel)[:1]])
            if signal is None or event is None:
                return None
            troubles.append(Trouble("SMs held", [kernel.start, *dict.fromkeys((event, signal))]))
        return troubles[0]
