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

from collections import Counter
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from hostir.ir.comm_ops import LOW_LATENCY
from hostir.plan.operations import CALLER, NONE, CollectiveOp

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


def awaited_at_once(unrolled: UnrolledProgram) -> frozenset[int]:
    """Return the handles of communications for which the next operation waits; empty if there are worker streams.

    On CUDA, such a collective may run on the caller's stream instead of another stream. This saves two events on the
    host, and the synchronization of two streams on the device.
    """
    ops = [op for op in unrolled.ops if not op.defines]
    if any(op.stream != CALLER for op in ops):
        return frozenset()
    waits = Counter(op.awaits for op in ops)
    at_once = (a.starts for a, b in pairwise(ops) if a.starts and b.awaits == a.starts)
    return frozenset(handle for handle in at_once if waits[handle] == 1)


def in_workspaces(unrolled: UnrolledProgram) -> dict[int, CollectiveOp]:
    """Return the collectives that use the workspace, by their positions.

    Collectives `by low_latency` use slots instead. The result is empty if ranks may do different things.
    """
    if any(s.conditional for s in unrolled.program.walk()):
        return {}
    named = {at: op for at, op in enumerate(unrolled.ops) if isinstance(op, CollectiveOp) and op.by}
    return {at: op for at, op in named.items() if op.by != LOW_LATENCY}


def input_in_workspace(unrolled: UnrolledProgram) -> int | None:
    """Return the register of the input that the caller may compute in the workspace, or None.

    The input must be the operand of the only collective that uses the workspace. This collective must leave the
    workspace as it is, and end after all ranks have read it. All-reduces do not: torch's kernels store parts of their
    results there.
    """
    collectives = [*in_workspaces(unrolled).values()]
    if len(collectives) != 1 or collectives[0].communication == "allreduce":
        return None
    written = {unrolled.buffers[register] for op in unrolled.ops for register in op.writes}
    x = collectives[0].x
    return x if x in unrolled.inputs and x not in written else None


def workspace_buffers(unrolled: UnrolledProgram) -> frozenset[int]:
    """Return the buffers that may lie in the workspace of collectives, so that the collectives need not copy them.

    Collectives `by low_latency` have no operands in a workspace.

    The program allocates such a buffer, and a collective that names an implementation reads all of it. No operation
    uses the buffer after the collective started, because the collective may overwrite the workspace. No other such
    collective uses the workspace between the first use of the buffer and this collective. The result is empty if one of
    these collectives may run beside other operations, or if ranks may do different things: the result must be the same
    on all ranks.
    """
    collectives = in_workspaces(unrolled)
    if not collectives or not awaited_at_once(unrolled).issuperset(op.handle for op in collectives.values()):
        return frozenset()
    uses: dict[int, list[int]] = {}
    for at, op in enumerate(unrolled.ops):
        for register in (*op.reads, *op.writes):
            uses.setdefault(unrolled.buffers[register], []).append(at)
    kept = {unrolled.buffers[output] for output in unrolled.outputs}
    buffers = set[int]()
    for at, op in collectives.items():
        buffer, elements = unrolled.buffers[op.x], prod(unrolled.layouts[op.x].shape)
        complete = buffer in unrolled.allocated and prod(unrolled.allocated[buffer].shape) == elements
        if not complete or buffer in kept or buffer == unrolled.buffers[op.out] or uses[buffer][-1] > at:
            continue
        if not any(uses[buffer][0] <= other < at for other in collectives):
            buffers.add(buffer)
    return frozenset(buffers)
