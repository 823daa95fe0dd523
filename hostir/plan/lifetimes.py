"""Find the lifetimes of buffers: when their memory may be reused, and which of them a tensor of the caller may replace.

When a buffer is dropped, torch's allocator of CUDA memory gives its memory to the next allocation on the stream that
allocated the buffer. This is safe if that stream has already waited for every stream that used the buffer.
`late_streams` proves this from the order of the operations, or returns the streams for which it finds no proof. The
machine then calls `record_stream` for these streams, which costs some memory.

Programs from the lowering need no `record_stream`. They allocate on the caller's stream. Usually this stream joins all
worker streams before a buffer is dropped. Some programs wait for flags instead of joining a worker stream. Then the
caller's stream joins the worker stream at the end of the call, and the buffer is dropped only then. A program that was
edited by hand may do neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostir.plan.operations import CALLER, NONE

if TYPE_CHECKING:
    from hostir.plan.operations import Op
    from hostir.plan.unrolled import UnrolledProgram


def late_streams(unrolled: UnrolledProgram) -> dict[int, tuple[int, ...]]:
    """Return, for each buffer, the streams that may still use the buffer when the host drops it.

    Buffers without such streams are left out. The program drops a buffer at the statement that frees it, or at the end
    of the run. The caller uses the outputs on its stream, and drops the inputs after the run.
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
    """Return the buffers that a worker stream uses before it waits for the caller's stream in this call."""
    early = (op for position, op in enumerate(unrolled.ops) if not unrolled.order.forked(position))
    return {unrolled.buffers[register] for op in early for register in (*op.reads, *op.writes)}


def homes(unrolled: UnrolledProgram) -> tuple[int, ...]:
    """Return, for each output, the register of the buffer that a tensor passed as `out=` may replace.

    The register is NONE if there is no such buffer. Then the output is copied to the tensor. A buffer can be replaced
    if it meets all of these conditions:

    - The program allocates it.
    - The output is the buffer itself, not a view of it.
    - No earlier output is the same buffer.
    - All operations on it come after the work that the caller's stream had before the call, because that work may use
      the tensor.
    """
    allocated = unrolled.allocated.keys() - early_buffers(unrolled)
    replaced: list[int] = []
    for register in unrolled.outputs:
        replaced.append(register if register in allocated else NONE)
        allocated.discard(register)
    return tuple(replaced)
