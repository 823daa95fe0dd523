"""Find kernels that hold all SMs of a rank while they wait for work that needs them.

The awaited signal needs these SMs, or follows an event that needs them.

A set of kernels, at most one on each rank, can run at one time if no kernel of the set ends before another starts.
Then every start lies outside the future of every end. So there is a schedule that has done exactly the events before
the starts.

In such a set, kernel K *holds up* a signal if an event that needs SMs of K's rank comes before the signal, but not
before any start of the set: this event cannot begin until K ends. There are two exceptions:
- Copies that K may overlap already have their SMs.
- Signals `by 1 sms` that were issued before K in its call get the SM that K leaves free, unless a *rival* may have
  taken it. A rival is another waiting kernel of the rank, or a communication, that begins beside the set and stays,
  because it cannot get the other SMs.

The set is stuck if each of its kernels waits for a signal that a kernel of the set holds up. Then each kernel waits
for the kernel that holds up its signal, and so on in a cycle: the search looks for such cycles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hostir.check.ordering.joining import Trouble
from hostir.check.ordering.order import Clock, Order
from hostir.check.tracing.events import Event, WaitingKernel
from hostir.check.tracing.trace import RankTrace

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
