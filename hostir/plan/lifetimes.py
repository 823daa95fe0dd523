"""Lifetimes of buffers: the streams that may still use a buffer when the host drops it, and the homes of outputs.

torch's allocator of CUDA memory gives a dropped buffer to the next allocation on the stream that allocated it. This is
safe if that stream has already waited for every stream that used the buffer. `late_streams` proves it from the order
of the operations, or names the streams for which there is no proof. The machine marks these streams on the tensor
(`record_stream`), which costs some memory. Programs from the lowering allocate on the caller's stream and join all
worker streams to it, so nothing is marked. There is one exception: a program may wait for flags instead of joining a
worker. The caller's stream then joins all others at the end of the call, and the buffer is dropped only then. A text
edited by hand may do neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostir.plan.operations import CALLER, NONE

if TYPE_CHECKING:
    from hostir.plan.operations import Op
    from hostir.plan.unrolled import UnrolledProgram


def late_streams(unrolled: UnrolledProgram) -> dict[int, tuple[int, ...]]:
    """Return the streams that may still use a buffer when the host drops it, by buffer; safe buffers are left out.

    A buffer is dropped where the program frees it, or at the end of the run. The caller uses outputs on its stream, and
    drops inputs after the run.
    """
    ops, order, buffers = unrolled.ops, unrolled.order, unrolled.buffers
    homes = dict.fromkeys(unrolled.inputs, CALLER) | {x: op.stream for x, op in unrolled.allocated.items()}
    uses: dict[int, list[int]] = {buffer: [] for buffer in homes}
    dropped: dict[int, int] = {}
    communications: dict[int, Op] = {}  # by handle
    awaited: dict[int, int] = {}  # by handle: the position of the first wait
    for position, op in enumerate(ops):
        if op.defines:
            continue
        if op.starts:
            communications[op.starts] = op
        if op.awaits:
            awaited.setdefault(op.awaits, position)
        if op.frees:
            dropped[op.frees] = position
        user = communications[op.awaits] if op.awaits else op  # a wait uses the buffers of its communication
        for register in (*user.reads, *user.writes):
            if buffers[register] in uses:
                uses[buffers[register]].append(position)
    streams: dict[int, tuple[int, ...]] = {}
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
            streams[buffer] = tuple(sorted(late))
    for buffer in {buffers[output] for output in unrolled.outputs}:
        if homes.get(buffer, CALLER) != CALLER:
            streams[buffer] = tuple(sorted({*streams.get(buffer, ()), CALLER}))
    return streams


def early_buffers(unrolled: UnrolledProgram) -> set[int]:
    """Return the buffers used by a stream before it has waited for the caller's stream at the beginning of the call."""
    early = (op for position, op in enumerate(unrolled.ops) if not unrolled.order.forked(position))
    return {unrolled.buffers[register] for op in early for register in (*op.reads, *op.writes)}


def homes(unrolled: UnrolledProgram) -> tuple[int, ...]:
    """Return, for each output, the register of the buffer that the caller's tensor replaces; NONE if it gets a copy.

    The caller's tensor can replace a buffer that the program allocates, and returns once and not as a view. All its
    uses must follow the beginning of the call, since the caller's stream may have used the tensor before.
    """
    allocated = unrolled.allocated.keys() - early_buffers(unrolled)
    replaced: list[int] = []
    for register in unrolled.outputs:
        replaced.append(register if register in allocated else NONE)
        allocated.discard(register)
    return tuple(replaced)
