"""Order the operations of an unrolled program: who comes before whom on a rank's streams, computed once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostir.plan.operations import Op
from hostir.plan.operations import CALLER

StreamClock = Mapping[int, int]  # by stream: how many of its operations are over


class RankOrder:
    """The order of a rank's operations, by vector clocks.

    An operation follows those before it on its stream, and what the streams and communications that its stream has
    waited for followed when they were joined. A communication itself is over only for those that wait for it.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.numbers: list[int] = []  # of each operation: its place on its stream, from 1
        self.clocks: list[StreamClock] = []  # of each operation: what it follows on other streams
        self.issued: dict[int, list[int]] = {CALLER: []}  # of each stream: its operations
        self.known: dict[int, StreamClock] = {CALLER: {}}  # of each stream: what its next operation follows on others
        begun: dict[int, tuple[StreamClock, int, int]] = {}  # by handle: what a communication follows
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
        """Whether one operation is over before another begins; both by position."""
        stream = self.ops[first].stream
        same = stream == self.ops[then].stream
        return first < then if same else self.clocks[then].get(stream, 0) >= self.numbers[first]

    def forked(self, position: int) -> bool:
        """Whether an operation follows the caller's stream as it stood at the beginning of the call."""
        return self.ops[position].stream == CALLER or CALLER in self.clocks[position]

    def clock(self, stream: int, position: int) -> StreamClock:
        """Return what an operation would follow that is issued to a stream right before one at a position."""
        issued = self.issued.get(stream, [])
        count = bisect_left(issued, position)
        return {**self.clocks[issued[count - 1]], stream: count} if count else {}

    @property
    def unjoined(self) -> tuple[int, ...]:
        """The streams that the caller's stream has not waited for at the end of the call."""
        known = self.known[CALLER]
        return tuple(sorted(s for s, issued in self.issued.items() if s != CALLER and known.get(s, 0) < len(issued)))


def _later(clock: StreamClock, other: StreamClock, stream: int, count: int) -> StreamClock:
    """Return a clock that follows another one as well, and so many operations of a stream."""
    later = {**clock, **{s: n for s, n in other.items() if n >= clock.get(s, 0)}}
    later[stream] = max(count, clock.get(stream, 0))
    return later
