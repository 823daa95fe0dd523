"""Order the events of all ranks by vector clocks (happens-before).

Every lane (a stream of a rank, a team's collectives on a rank, ...) counts its events. An event's clock holds, for
each lane, the number of events of this lane that come before it: the maximum over the events that it follows. Then
one look-up tells whether A comes before B (Mattern 1989), and the transitive closure is never computed. An event that
is never reached waits in a cycle, or behind one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from hostir.check.ordering.joining import JoinedRanks
from hostir.check.tracing.events import Event, Lane
from hostir.check.tracing.trace import RankTrace

Clock = Any  # an array, by lane


class Order(JoinedRanks):
    """The order of the events of all ranks.

    Fields:
        clocks: the clocks of signals; if kernels wait, also of the events that begin work in `lasting`.
        needs: the clocks of signals that also count events in `held`.
    """

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        super().__init__(ranks)
        self.clocks: dict[Event, Clock] = {}
        self.needs: dict[Event, Clock] = {}

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
