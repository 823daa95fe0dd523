"""Order the operations of an unrolled program: who comes before whom on a rank's streams, computed once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostir.runtime.unroll import Op, UnrolledProgram

CALLER = -1  # the caller's stream; the pool's are 0, 1, ...
NONE = 0  # the register that always holds None
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


# Lifetimes ------------------------------------------------------------------------------------------------------------
# Buffers that can be returned to the allocator when the host drops them, and those that must wait for a stream.
#
# An allocator of CUDA memory hands a dropped buffer to the next allocation on the stream it came from. That is safe
# if that stream has already waited for every stream that used the buffer. The order proves it, or names the streams it
# cannot prove it for; they are then marked on the tensor (`record_stream`), at some cost in memory. Programs that
# lowering emits allocate on the caller's stream and join all workers to it, so they pass; but flags may stand in for
# a join. The caller's stream then joins all others at the end of the call, and such a buffer is dropped only then.
# Texts edited by hand may do neither.


def late_streams(unrolled: UnrolledProgram) -> dict[int, tuple[int, ...]]:
    """Return, for each buffer that needs it, the streams that may still use it when the host drops it.

    Buffers are dropped where the program frees them, else at the end of the run. Outputs go to the caller, who uses
    them on its stream; inputs come from the caller, who drops them after the run.
    """
    ops, order, buffers = unrolled.ops, unrolled.order, unrolled.buffers
    homes = dict.fromkeys(unrolled.inputs, CALLER) | {x: op.stream for x, op in unrolled.allocated.items()}
    uses: dict[int, list[int]] = {buffer: [] for buffer in homes}
    dropped: dict[int, int] = {}
    communications: dict[int, Op] = {}  # by handle
    awaited: dict[int, int] = {}  # by handle: where it is first waited for
    for position, op in enumerate(ops):
        if op.defines:
            continue
        if op.starts:
            communications[op.starts] = op
        if op.awaits:
            awaited.setdefault(op.awaits, position)
        if op.frees:
            dropped[op.frees] = position
        user = communications[op.awaits] if op.awaits else op  # who waits for a communication uses its buffers
        for register in (*user.reads, *user.writes):
            if buffers[register] in uses:
                uses[buffers[register]].append(position)
    found: dict[int, tuple[int, ...]] = {}
    for buffer, home in homes.items():
        end = dropped.get(buffer, len(ops))
        clock = order.clock(home, end)
        late = {
            ops[use].stream
            for use in uses[buffer]
            if use < end
            and (clock.get(ops[use].stream, 0) < order.numbers[use] or awaited.get(ops[use].starts, use) > end)
        }
        if late:
            found[buffer] = tuple(sorted(late))
    for buffer in {buffers[output] for output in unrolled.outputs}:
        if homes.get(buffer, CALLER) != CALLER:
            found[buffer] = tuple(sorted({*found.get(buffer, ()), CALLER}))
    return found


def early_buffers(unrolled: UnrolledProgram) -> set[int]:
    """Return the buffers touched by streams that may not have waited for the caller's stream's earlier work."""
    early = (op for position, op in enumerate(unrolled.ops) if not unrolled.order.forked(position))
    return {unrolled.buffers[register] for op in early for register in (*op.reads, *op.writes)}


def homes(unrolled: UnrolledProgram) -> tuple[int, ...]:
    """Return, for each output, the register of the buffer that the caller's tensor replaces; NONE if it gets a copy.

    Replaced are buffers that the program allocates, returns whole and once, and touches only after the beginning of the
    call: the caller's stream may have used the tensor before the call, unlike memory that is newly allocated.
    """
    allocated = unrolled.allocated.keys() - early_buffers(unrolled)
    replaced: list[int] = []
    for register in unrolled.outputs:
        replaced.append(register if register in allocated else NONE)
        allocated.discard(register)
    return tuple(replaced)
