"""Find deadlocks of waiting kernels: a kernel holds all SMs of its rank while it waits for work that needs these SMs.

A waiting kernel waits for a signal. A deadlock occurs if the signal, or an event that must happen before it, needs the
SMs that the kernel holds.

Consider a set of waiting kernels, at most one on each rank. They can run at the same time if no kernel of the set must
end before another kernel of the set starts. Then some legal schedule reaches a point at which all kernels of the set
start, and only the events that happen before these starts have happened.

At this point, kernel K *holds up* a signal if some event happens before the signal, needs SMs of K's rank, and has not
happened yet. This event cannot begin until K ends. There are two exceptions:
- Copies that K may overlap already have their SMs.
- A signal `by 1 sms` that was issued before K in the same call gets the SM that K leaves free, unless a *rival* may
  have taken this SM. A rival is another waiting kernel of the rank, or a communication, that begins while the set runs.
  A rival keeps the SM, because it cannot get the other SMs.

The set is a deadlock if each of its kernels waits for a signal that a kernel of the set holds up. From each kernel, go
to the kernel that holds up its signal. This path ends in a cycle. So the search looks for such cycles.
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

MAX_PATHS = 20_000  # the most paths followed in one component of the graph; with more, it counts as a deadlock


def kernels_in_the_way(order: Order) -> Iterator[Trouble]:
    """Yield the first deadlock of waiting kernels that hold SMs, if there is one. A kernel may also block itself."""
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
    """Return the number of consecutive calls that must be checked to find every deadlock of any number of calls.

    Take a call, and a waiting kernel that starts `apart` calls later. Suppose that all events of the earlier call that
    need SMs have always ended when the kernel starts. Then two successive kernels of a cycle belong to calls that
    differ by less than `apart`. A cycle has at most one kernel on each rank. So `ranks * (apart - 1) + 2` calls are
    enough. docs/memory-model.md has the argument.
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
    """Yield events of a rank's first call.

    These are the events that need SMs, and the ends of waiting kernels and communications.
    """
    yield from (event for event in rank.events if event.sms and not event.call)
    yield from (end for _, end in rank.lasting() if not end.call)


def _cycles(order: Order, component: list[WaitingKernel], graph: Any) -> Iterator[list[WaitingKernel]]:
    """Yield the cycles of kernels that can all run at the same time. Yield each cycle once for each of its kernels.

    If there are more than `MAX_PATHS` paths, the search stops, and the last item is an empty cycle.

    Args:
        order: the order of all events.
        component: the kernels of one strongly connected component of the graph.
        graph: an edge leads from each kernel to every kernel that may hold up its signal.
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
    """Return True if two kernels may run at the same time.

    They must be on different ranks, and no kernel must end before the other kernel can start.
    """
    ordered = order.known(a.end, order.clocks[b.start]) or order.known(b.end, order.clocks[a.start])
    return a.start.rank != b.start.rank and not ordered


def _signals(order: Order, kernel: WaitingKernel) -> list[Event]:
    """Return the signals that a kernel waits for."""
    return [signal for flag in kernel.waits if (signal := order.partners.get(flag))]


class _Line:
    """The events of one lane that need SMs, in order.

    A lane is a sequence of events that happen one after another, for example the events of a stream.
    """

    def __init__(self, index: int, events: list[Event]) -> None:
        self.index = index
        self.events = sorted(events, key=lambda event: event.tick)
        self.ticks = [event.tick for event in self.events]
        self.issued = [(event.call, event.number) for event in self.events]
        self.large = [place for place, event in enumerate(self.events) if not event.small]

    def first_held(self, first: int, holder: Event, taken: int) -> int:
        """Return the index of the first event, from index `first` on, that gets no SM while `holder` runs.

        Return the number of events if all of them get an SM. `holder` leaves only one SM free, which only a small event
        can use. The event gets this SM if it was issued before `holder` in the same call, and if its tick is at most
        `taken`. After this tick a rival may have taken the SM.
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
    """All events that need SMs, by rank and lane. The methods find events that cannot begin while waiting kernels run.

    Fields:
        of: for each rank, its lanes with events that need SMs.
        rivals: for each rank, the events at which its waiting kernels and communications begin and end. Such a kernel
            or communication may take the SM that another waiting kernel leaves free, and keep it.
        latest: for each waiting kernel, a vector clock that counts all events that happen before the signals that the
            kernel waits for.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        lines: dict[tuple[int, int], list[Event]] = {}
        for event in order.events:
            if event.sms and event.lane is not None:
                lines.setdefault((event.rank, order.lanes[event.lane]), []).append(event)
        self.of: dict[int, list[_Line]] = {}
        for (rank, index), events in lines.items():
            self.of.setdefault(rank, []).append(_Line(index, events))
        self.rivals = {rank.rank: [*rank.lasting()] for rank in order.ranks}
        nothing = np.zeros(len(order.lanes), dtype=np.int32)
        self.latest: dict[WaitingKernel, Clock] = {
            kernel: np.maximum.reduce([nothing, *(order.needs[signal] for signal in _signals(order, kernel))])
            for rank in order.ranks
            for kernel in rank.kernels
        }

    def held(self, after: Clock, holder: WaitingKernel, running: Sequence[WaitingKernel]) -> Event | None:
        """Return an event that `holder` holds up while the kernels `running` run; None if there is no such event.

        The event is on `holder`'s rank, needs SMs, and is counted by the vector clock `after`.
        """
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
        """Return, for each rival of `holder`, the vector clock of the event at which the rival begins.

        A rival is a waiting kernel or a communication that may take the SM that `holder` leaves free. Only rivals that
        may run at the same time as every kernel in `running` are included.
        """
        known, clocks = self.order.known, self.order.clocks
        return [
            clocks[begin]
            for begin, end in self.rivals[holder.start.rank]
            if begin is not holder.start
            and not any(known(kernel.end, clocks[begin]) or known(end, clocks[kernel.start]) for kernel in running)
        ]

    def begun(self, kernel: WaitingKernel, line: _Line) -> int:
        """Return a tick of a lane: the events up to this tick need no more SMs once `kernel` has started.

        Either these events have ended when the kernel starts, or the kernel may overlap them. In the second case they
        already have their SMs.
        """
        overlapped = kernel.overlapped
        same_lane = (
            overlapped is not None and overlapped.lane is not None and self.order.lanes[overlapped.lane] == line.index
        )
        return max(int(self.order.clocks[kernel.start][line.index]), overlapped.tick if overlapped and same_lane else 0)

    def any_held(self, kernel: WaitingKernel, holder: WaitingKernel) -> bool:
        """Return True if `holder`, when it runs alone, holds up a signal that `kernel` waits for.

        `holder` and `kernel` may be the same kernel.
        """
        return self.held(self.latest[kernel], holder, [holder]) is not None

    def stuck(self, cycle: list[WaitingKernel], *, sure: bool = True) -> Trouble | None:
        """Return the deadlock of a cycle of kernels; None if the cycle is not a deadlock.

        In a deadlock, each kernel of the cycle waits for a signal that a kernel of the cycle holds up. If `sure` is
        False, the search for cycles was given up. Then the first kernel is reported as a deadlock without this test.
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
