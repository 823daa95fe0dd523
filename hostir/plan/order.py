"""The order of an unrolled program's operations on the streams of a rank, by vector clocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hostir.plan.operations import CALLER

if TYPE_CHECKING:
    from hostir.plan.operations import Op

StreamClock = Mapping[int, int]  # by stream: how many of its operations have ended


class RankOrder:
    """The happens-before order of a rank's operations, by vector clocks.

    An operation follows the operations before it on its stream. If its stream has joined another stream or waited for
    a communication, the operation also follows everything that this stream or communication followed then. A
    communication itself has ended only for operations that follow a wait for it.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.numbers: list[int] = []  # of each operation: its number on its stream, from 1
        self.clocks: list[StreamClock] = []  # of each operation: the operations of other streams that it follows
        self.issued: dict[int, list[int]] = {CALLER: []}  # by stream: the positions of its operations
        self.known: dict[int, StreamClock] = {CALLER: {}}  # by stream: the clock of its next operation
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
        """Return True if an operation ends before another begins; both are positions."""
        stream = self.ops[first].stream
        same = stream == self.ops[then].stream
        return first < then if same else self.clocks[then].get(stream, 0) >= self.numbers[first]

    def forked(self, position: int) -> bool:
        """Return True if an operation follows all that the caller's stream was given before the call."""
        return self.ops[position].stream == CALLER or CALLER in self.clocks[position]

    def clock(self, stream: int, position: int) -> StreamClock:
        """Return the clock of an operation that would be issued to a stream just before the operation at a position."""
        issued = self.issued.get(stream, [])
        count = bisect_left(issued, position)
        return {**self.clocks[issued[count - 1]], stream: count} if count else {}

    @property
    def unjoined(self) -> tuple[int, ...]:
        """The streams that the caller's stream has not waited for at the end of the call."""
        known = self.known[CALLER]
        return tuple(sorted(s for s, issued in self.issued.items() if s != CALLER and known.get(s, 0) < len(issued)))


def _later(clock: StreamClock, other: StreamClock, stream: int, count: int) -> StreamClock:
    """Return a clock that also follows the clock `other` and the first `count` operations of a stream."""
    later = {**clock, **{s: n for s, n in other.items() if n >= clock.get(s, 0)}}
    later[stream] = max(count, clock.get(stream, 0))
    return later
