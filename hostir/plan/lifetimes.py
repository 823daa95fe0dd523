"""Lifetimes of memory: which stream a buffer's memory belongs to, and which streams still use it late.

Buffers that can be returned to the allocator when the host drops them, and those that must wait for a stream.

An allocator of CUDA memory hands a dropped buffer to the next allocation on the stream it came from. That is safe
if that stream has already waited for every stream that used the buffer. The order proves it, or names the streams it
cannot prove it for; they are then marked on the tensor (`record_stream`), at some cost in memory. Programs that
lowering emits allocate on the caller's stream and join all workers to it, so they pass; but flags may stand in for
a join. The caller's stream then joins all others at the end of the call, and such a buffer is dropped only then.
Texts edited by hand may do neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostir.plan.operations import Op
    from hostir.plan.unrolled import UnrolledProgram
from hostir.plan.operations import CALLER, NONE


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
