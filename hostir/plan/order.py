"""Compute the order of the operations of an unrolled program on the streams of a rank, by vector clocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hostir.plan.operations import CALLER

if TYPE_CHECKING:
    from hostir.plan.operations import Op

StreamClock = Mapping[int, int]  # for each stream, the number of its operations that have ended


class RankOrder:
    """The happens-before order of a rank's operations, by vector clocks.

    An operation follows all earlier operations on its stream. If its stream has joined another stream, the operation
    also follows everything that was issued to that stream before the join. If its stream has waited for a
    communication, the operation follows the communication and everything before it. Only operations that follow such a
    wait come after the end of the communication.

    Fields:
        numbers: for each operation, its number on its stream, from 1.
        clocks: for each operation, the number of operations on each other stream that it follows.
        issued: for each stream, the positions of its operations in the list of operations.
        known: for each stream, the clock of its next operation.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.numbers: list[int] = []
        self.clocks: list[StreamClock] = []
        self.issued: dict[int, list[int]] = {CALLER: []}
        self.known: dict[int, StreamClock] = {CALLER: {}}
        begun: dict[int, tuple[StreamClock, int, int]] = {}  # by handle: clock, stream and number
        for position, op in enumerate(ops):
            stream = op.stream
            issued, clock = self.issued.setdefault(stream, []), self.known.setdefault(stream, {})
            if op.joins is not None and op.joins in self.known:
                clock = self.known[stream] = _later(clock, self.known[op.joins], op.joins, len(self.issued[op.joins]))
            elif op.awaits:
                clock = self.known[stream] = _later(clock, *begun[op.awaits])
            issued.append(position)
            self.numbers.append(len(issued))
            self.clocks.append(clock)
            if op.starts:
                begun[op.starts] = clock, stream, len(issued)

    def precedes(self, first: int, then: int) -> bool:
        """Return True if operation `first` ends before operation `then` begins.

        Both arguments are positions in the list.
        """
        stream = self.ops[first].stream
        same = stream == self.ops[then].stream
        return first < then if same else self.clocks[then].get(stream, 0) >= self.numbers[first]

    def forked(self, position: int) -> bool:
        """Return True if the operation at a position follows all work that the caller's stream had before the call."""
        return self.ops[position].stream == CALLER or CALLER in self.clocks[position]

    def clock(self, stream: int, position: int) -> StreamClock:
        """Return the clock of a stream just before the operation at a position is issued."""
        issued = self.issued.get(stream, [])
        count = bisect_left(issued, position)
        return {**self.clocks[issued[count - 1]], stream: count} if count else {}

    @property
    def unjoined(self) -> tuple[int, ...]:
        """The streams with work that the caller's stream has not yet waited for at the end of the call."""
        known = self.known[CALLER]
        return tuple(sorted(s for s, issued in self.issued.items() if s != CALLER and known.get(s, 0) < len(issued)))


def _later(clock: StreamClock, other: StreamClock, stream: int, count: int) -> StreamClock:
    """Return a clock that counts all operations that `clock` or `other` counts.

    It also counts the first `count` operations of `stream`.
    """
    later = {**clock, **{s: n for s, n in other.items() if n >= clock.get(s, 0)}}
    later[stream] = max(count, clock.get(stream, 0))
    return later
