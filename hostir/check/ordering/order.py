"""Order the events of all ranks by vector clocks.

A *lane* is a sequence of events in order, such as a stream of a rank, or a team's collectives on a rank. The *tick* of
an event is its position in its lane. The vector clock of an event holds, for each lane, the number of events of the
lane that happen before the event. It is the maximum of the clocks of the events that it directly follows. Then one
look-up tells whether A happens before B (Mattern 1989), and the transitive closure is never computed. If the walk over
the events never reaches an event, this event is part of a cycle of waits, or comes after one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from hostir.check.ordering.joining import JoinedRanks
from hostir.check.tracing.events import Event, Lane
from hostir.check.tracing.trace import RankTrace

Clock = Any  # a vector clock: an array with one number for each lane


class Order(JoinedRanks):
    """The order of the events of all ranks. `run` computes the vector clocks and keeps some of them.

    Fields:
        clocks: the vector clocks of signals. If the program has waiting kernels, it also has the clocks of the events
            at which waiting kernels and communications begin.
        needs: more complete vector clocks of the signals. They also count events that must happen before a signal on
            some machines, or at some sizes, but not on all (`Event.held`).
    """

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        super().__init__(ranks)
        self.clocks: dict[Event, Clock] = {}
        self.needs: dict[Event, Clock] = {}

    def run(self, visit: Callable[[Event, Clock], None]) -> list[Event]:
        """Visit all events with their vector clocks, each after the events that happen before it.

        Return the events that are never reached, because they are in a cycle of waits or after one.
        """
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
        """Visit all events once, and return the events that are never reached.

        Args:
            visit: called with each event and its vector clock.
            keep: the events whose clocks are kept.
            kept: the dictionary to which these clocks are added.
            held: True if clocks also count the events that an event waits for on some machines or at some sizes
                (`Event.held`).
        """
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
        """Return True if `event` has ended before another event, the one with the vector clock `clock`."""
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
