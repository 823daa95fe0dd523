"""Find cyclic waits, and kernels that hold all SMs while they wait for what needs them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hostir.check.order import Clock, Order, Trouble
from hostir.check.tracer import Event, Flag, Kernel, Tracer

# Cyclic waits ---------------------------------------------------------------------------------------------------------
# Ranks that wait for each other in a cycle, and flags that are set out of order.


def cyclic_waits(order: Order, left: list[Event]) -> Iterator[Trouble]:
    """Yield the cycle of events that wait for each other, shown once, if some events were never reached.

    If a signal of a higher epoch would end one of the waits, the signals of its flag are reported as unordered instead.
    """
    stuck = set(left)
    for wait in (wait for rank in order.ranks for wait in rank.waits if wait.event in stuck):
        first = order.partners.get(wait.event)
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
    """Return the events of a cycle, each statement of a rank once, the first in program order first."""
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
        for lower, higher in pairwise(f for f in flags if f.event in order.clocks):  # a deadlock cuts the rest off
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
    """Return two epochs as text, with their calls where these differ."""
    return [f"{f.epoch[1]}" + (f" of call {f.epoch[0] + 1}" if a.epoch[0] != b.epoch[0] else "") for f in (a, b)]


def _before(order: Order, first: Event, second: Event) -> bool:
    return order.known(first, order.clocks[second])


# Kernels that hold all SMs --------------------------------------------------------------------------------------------
# Kernels that hold all SMs of a rank while they wait for what needs these SMs, itself or something before it.
#
# A set of kernels, at most one a rank, can run at one time if none of them ends before another starts: every start then
# lies outside the future of every end, so some schedule has done all that comes before the starts and nothing more. In
# such a set kernel K *holds up* a signal if an event that needs SMs of K's rank comes before the signal, and comes
# before no start of the set: it cannot begin until K ends. (Copies that K starts beside have their SMs by then, and
# signals `by 1 sms` that were issued before K in its call get the one that K leaves them, unless a *rival* may have
# taken it: another kernel of the rank that waits, or a communication, which begins beside the set and, for want of the
# other SMs, stays.) The set is stuck if each of its kernels waits for a signal that one of them holds up. Each then
# waits for the one that holds it up, and so on around: the search is for such cycles.

MAX_PATHS = 20_000  # followed in one strongly connected set of kernels; a set with more counts as stuck


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
    """Return the number of calls to check, so that any deadlock of any number of calls shows.

    If all events of one call that need SMs have ended when a kernel starts `apart` calls later, the calls of successive
    kernels in a cycle differ by less than `apart`. docs/memory-model.md has the argument.
    """
    first = {rank.rank: [*_of_the_first_call(rank)] for rank in order.ranks if rank.kernels}
    calls = order.ranks[0].turn
    starts = [kernel.start for rank in order.ranks for kernel in rank.kernels]
    for apart in range(1, calls):
        later = [start for start in starts if start.call == apart]
        if all(order.known(event, order.clocks[start]) for start in later for event in first[start.rank]):
            return ranks * (apart - 1) + 2
    return ranks * (calls - 1) + 2


def _of_the_first_call(rank: Tracer) -> Iterator[Event]:
    """Yield the events of a rank's first call that need SMs, and the ends of those that may hold them."""
    yield from (event for event in rank.events if event.sms and not event.call)
    yield from (end for _, end in rank.lasting() if not end.call)


def _cycles(order: Order, component: list[Kernel], graph: Any) -> Iterator[list[Kernel]]:
    """Yield the cycles of a strongly connected set of kernels that can all run at one time, once for each kernel in it.

    If there are more than `MAX_PATHS` paths, the last cycle is empty.
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


def together(order: Order, a: Kernel, b: Kernel) -> bool:
    """Whether two kernels are of different ranks, and neither ends before the other starts."""
    ordered = order.known(a.end, order.clocks[b.start]) or order.known(b.end, order.clocks[a.start])
    return a.start.rank != b.start.rank and not ordered


def _signals(order: Order, kernel: Kernel) -> list[Event]:
    """Return the signals that a kernel waits for."""
    return [signal for flag in kernel.waits if (signal := order.partners.get(flag.event))]


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

        Small events get the SM that it leaves, if they were issued before it in its call, and before the tick at which
        a rival may have taken that SM.
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
        # Of each rank the begin and the end of what may take an SM and keep it, if kernels that wait have the others.
        self.rivals = {rank.rank: [*rank.lasting()] for rank in order.ranks}
        # All that comes before any signal of a kernel: what is held up of one of them is in there, and nothing else is.
        self.latest: dict[Kernel, Clock] = {
            kernel: np.maximum.reduce([order.needs[signal] for signal in _signals(order, kernel)])
            for rank in order.ranks
            for kernel in rank.kernels
        }

    def held(self, after: Clock, holder: Kernel, running: Sequence[Kernel]) -> Event | None:
        """Return an event before `after` that gets no SM of `holder`'s rank while these kernels run, or None."""
        for line in self.of.get(holder.start.rank, ()):
            first = bisect_right(line.ticks, max(self.begun(kernel, line) for kernel in running))
            until = bisect_right(line.ticks, after[line.index])
            if first >= until:
                continue
            taken = min(
                (int(begun[line.index]) for begun in self.rivals_beside(holder, running)), default=line.ticks[-1]
            )
            if (place := line.first_held(first, holder.start, taken)) < until:
                return line.events[place]
        return None

    def rivals_beside(self, holder: Kernel, running: Sequence[Kernel]) -> list[Clock]:
        """Return the begin clocks of what may take the SM that `holder` leaves, while these kernels run."""
        known, clocks = self.order.known, self.order.clocks
        return [
            clocks[begin]
            for begin, end in self.rivals[holder.start.rank]
            if begin is not holder.start
            and not any(known(kernel.end, clocks[begin]) or known(end, clocks[kernel.start]) for kernel in running)
        ]

    def begun(self, kernel: Kernel, line: _Line) -> int:
        """Return the last tick of a lane whose events do not need the SMs that a kernel takes."""
        overlapped = kernel.overlapped
        own = overlapped is not None and overlapped.lane is not None and self.order.lanes[overlapped.lane] == line.index
        return max(int(self.order.clocks[kernel.start][line.index]), overlapped.tick if overlapped and own else 0)

    def any_held(self, kernel: Kernel, holder: Kernel) -> bool:
        """Whether one kernel alone blocks a signal that another kernel, or the kernel itself, waits for."""
        return self.held(self.latest[kernel], holder, [holder]) is not None

    def stuck(self, cycle: list[Kernel], *, sure: bool = True) -> Trouble | None:
        """Return the deadlock of a cycle if each kernel waits for what one of them blocks; always, unless `sure`."""
        found: list[Trouble] = []
        for kernel in cycle:
            signals = [(s, self.order.needs[s]) for s in _signals(self.order, kernel)]
            held = ((s, e) for s, after in signals for h in cycle if (e := self.held(after, h, cycle)))
            signal, event = next(held, (None, None))
            if not sure:
                return Trouble("SMs held", [kernel.start, *_signals(self.order, kernel)[:1]])
            if signal is None or event is None:
                return None
            found.append(Trouble("SMs held", [kernel.start, *dict.fromkeys((event, signal))]))
        return found[0]
