"""Join the events of all ranks to one graph: add the edges between ranks, and find statements that do not match.

Statements of different ranks must match if they take part in the same communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import TypeVar

from hostir.check.tracing.events import Event, Flag, Lane, Side
from hostir.check.tracing.trace import RankTrace
from hostir.ir.machine import Move

SIGNAL = "signal"  # the name of a lane that holds a single signal
T = TypeVar("T")


@dataclass
class Trouble:
    """An error that is not about memory: a deadlock, flags that are used wrongly, or statements that do not match.

    Fields:
        category: a key of `hostir.check.findings.TROUBLES`.
        events: the events that are involved; None stands for an event that a rank lacks.
        detail: text for the message, such as the ranks of the team or the epoch.
    """

    category: str
    events: list[Event | None]
    detail: str = ""


class JoinedRanks:
    """The events of all ranks as a graph. An edge says that one event directly happens before another event.

    Fields:
        events: all events of all ranks.
        lanes: the index of each lane in vector clocks. A lane is a sequence of events, such as a stream of a rank.
        troubles: the statements of different ranks that do not match.
        sent: the signals of each flag.
        partners: for each wait for a flag, the signal that ends the wait.
    """

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        self.ranks = ranks
        self.events: list[Event] = [event for rank in ranks for event in rank.events]
        self.lanes: dict[Lane, int] = {}
        self.troubles: list[Trouble] = []
        self.sent: dict[tuple[int, str, int], list[Flag]] = {}
        self.partners: dict[Flag, Event] = {}
        for event in self.events:
            if event.lane is not None:
                self.lanes.setdefault(event.lane, len(self.lanes))
        self._join_collectives()
        self._join_messages()
        self._join_barriers()
        self._join_flags()

    def _moment(self, after: list[Event], team: tuple[int, ...]) -> Event:
        """Add and return an event that happens after all events in `after`.

        If an event must follow all of them, it then needs only one edge, from the new event. `team` are the ranks that
        have issued the events.
        """
        first = after[0]
        moment = Event(first.rank, first.call, "meets", first.statement, first.rounds, first.stream, after=after)
        self.events.append(moment)
        return moment

    def _of_each(self, team: tuple[int, ...], issued: list[dict[tuple[int, ...], list[T]]]) -> list[list[T]]:
        """Return, for each rank of a team, the items that the rank issued for this team.

        `issued` holds the items of each rank by team.
        """
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
        """Add the edges between the sides of one collective. The side of a rank is its part of the collective.

        Each side ends after the sides that send to it have begun. On some machines a sender also waits until its
        receivers have begun.
        """
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
        """Give a tick to each signal that a kernel sends, so that vector clocks can show that the signal was sent.

        The signal itself is on no lane, so it takes the tick of the wait that it ends. If another kernel waits for the
        signal block by block, this wait is on no lane either. Then the signal gets a lane that holds nothing else.
        """
        for wait, signal in self.partners.items():
            if signal.lane is None and wait.event.lane is not None:
                signal.ends += wait.event.ends
            elif signal.lane is None:
                signal.lane, signal.tick = (signal.rank, SIGNAL, len(self.lanes)), 1
                self.lanes[signal.lane] = len(self.lanes)
                signal.ends.append((signal.lane, 1))

    def enough(self, wait: Flag) -> list[Flag]:
        """Return the signals with epochs that are high enough to end a wait, in the order of their epochs."""
        same = [f for f in self.sent.get(wait.place, ()) if f.epoch >= wait.epoch and f.epoch[0] == wait.epoch[0]]
        return sorted(same, key=lambda f: (f.epoch, f.event.rank, f.event.number))

    def followers(self) -> dict[Event, list[Event]]:
        """Return, for each event, the events that directly follow it, and the events that it may hold up."""
        followers: dict[Event, list[Event]] = {}
        for event in self.events:
            for before in (*event.after, *event.held):
                followers.setdefault(before, []).append(event)
        return followers


def _agree(sides: Sequence[Side | None]) -> bool:
    """Return True if all ranks of a team issue the same collective, with fitting shapes and dtypes.

    `sides` holds each rank's side of the collective; None if the rank issues no collective.
    """
    first = sides[0]
    if first is None or None in sides:
        return False
    every = [side for side in sides if side is not None]
    if any(side.exchange.named != first.exchange.named for side in every):
        return False
    if any(side.exchange.moves is None for side in every):
        return len({(side.exchange.team, *_form(side)) for side in every}) == 1
    of = {side.begin.rank: side for side in every}
    meant = {rank: frozenset(side.exchange.moves or ()) for rank, side in of.items()}
    moves = {move for its in meant.values() for move in its}
    both = all(move in meant[move.source] and move in meant[move.target] for move in moves)
    return both and all(_fits(move, of[move.source], of[move.target]) for move in moves)


def _fits(move: Move, source: Side, target: Side) -> bool:
    """Return True if the source sends as many elements as the target receives, with the same dtype."""
    (taken, dtype), (stored, other) = _content(source, "x"), _content(target, "out")
    return dtype == other and 0 < taken * move.put[1] == stored * move.take[1]


def _content(side: Side, which: str) -> tuple[int, object]:
    """Return the number of elements of a side's operand or result, and the dtype.

    `which` is "x" for the operand and "out" for the result.
    """
    view = side.x if which == "x" else side.out
    return prod(view.shape) if view else 0, _dtype(side, which)


def _form(side: Side) -> tuple[object, ...]:
    """Return the shapes of a side's operand and result, followed by their dtypes."""
    return (*(v and v.shape for v in (side.x, side.out)), _dtype(side, "x"), _dtype(side, "out"))


def _dtype(side: Side, which: str) -> object:
    value = getattr(side.begin.statement, which, None)
    return value.tensor.dtype if value is not None else None
