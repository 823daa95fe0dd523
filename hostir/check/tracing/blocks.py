"""Trace computations by blocks of rows.

Their kernels wait for a flag before each block, or set a flag after each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from hostir.check.tracing.events import BlockEvents, Event, Flag, WaitingKernel
from hostir.check.tracing.memory import View, access, rows_of
from hostir.check.tracing.trace import RankTrace
from hostir.ir.machine import Done, Ready


def trace_by_blocks(
    trace: RankTrace,
    out: View,
    operands: Sequence[View | None],
    axis: int | None,
    ready: Ready | None,
    done: Done | None,
) -> None:
    """Add the events of a computation by blocks to a rank's trace.

    Args:
        trace: the trace of the rank.
        out: the result.
        operands: the operands. The rows of the first operand are cut into blocks.
        axis: the axis of sources that a sum reduces; None for a matmul.
        ready: the flags that the kernel waits for, if any.
        done: the flags that the kernel sets, if any.
    """
    pushing = trace.pushing.pop(trace.current, None) if ready else None  # the kernel may overlap these copies
    early = [view for n, view in enumerate(operands) if ready and view is not None and n in ready.early]
    start = trace.step("starts", [access(view, "reads") for view in early], sms=True)
    blocks = _blocks(trace, start, out, operands, axis, ready, done)
    last = [flag.event for flag in blocks.signals] or blocks.units
    end = trace.step("ends", [], after=[*last, *([pushing.last] if pushing else [])])
    for event in last:  # the earlier events of the kernel share this list
        event.ends.append((end.lane or (), end.tick))
    trace.waits += blocks.waits
    trace.signals += blocks.signals
    trace.by_blocks.append(blocks)
    if ready is not None:
        trace.kernels.append(WaitingKernel(start, end, pushing.last if pushing else None, blocks.waits))


def _blocks(
    trace: RankTrace,
    start: Event,
    out: View,
    operands: Sequence[View | None],
    axis: int | None,
    ready: Ready | None,
    done: Done | None,
) -> BlockEvents:
    """Add and return the events of the blocks. They happen between the start and the end of the kernel."""
    x, *others = [x for x in operands if x is not None]
    of_rows = ready.along if ready else done.along if done else ()
    cut_alike = [view for n, view in enumerate(operands) if view is not None and n in of_rows]
    sources, inner = [x], 1
    if axis is not None and ready is not None:
        sources = [x.select(axis, n) for n in range(x.shape[axis])]
    elif axis is not None:  # without flags to wait for, one event reads a block of rows of all sources
        sources, inner = [x.permute((*(n for n in range(len(x.shape)) if n != axis), axis))], 2
    count = lcm(ready.results if ready else 1, done.blocks if done else 1)
    uncut = [access(other, "reads") for other in others if other not in cut_alike]
    writes = [access(_rows(trace, out, n, count), "writes") for n in range(count)]
    parts, waits = list[Event](), list[Flag]()
    for source, rows in enumerate(sources):
        for n in range(count):
            block = (source * count + n) * ready.results // count if ready else 0
            local = _own(trace, ready, source * count + n, count) if ready and block in ready.replaced else None
            accesses = [access(local, "reads")] if local else []
            accesses += [access(_rows(trace, rows, n, count, inner), "undefines" if local else "reads"), *uncut]
            accesses += [access(_rows(trace, other, n, count), "reads") for other in cut_alike]
            accesses += writes[n : n + 1] if axis is None else []
            parts.append(part := trace.event("runs", accesses, [start]))
            if ready and not local:
                waits.append(Flag(part, trace.rank, ready.flags.buffer.name, block, (trace.turn, ready.epoch)))
    units = parts
    if axis is not None:
        units = [trace.event("runs", writes[n : n + 1], parts[n::count]) for n in range(count)]
    blocks = BlockEvents(ready, done, units, parts, waits)
    if done is not None:
        size = count // done.blocks
        for n in range(done.blocks):
            signal = trace.event("signals", [], units[n * size : (n + 1) * size])
            blocks.signals.append(Flag(signal, trace.rank, done.flags.buffer.name, n, (trace.turn, done.epoch)))
    for n, unit in enumerate(units):  # an observer of the signal, or of the end, has seen all earlier events
        unit.ends = blocks.signals[n * done.blocks // count].event.ends if done else unit.ends
        for part in parts[n::count]:
            part.ends = unit.ends
    if ready is not None and done is not None:
        _one_by_one(blocks, ready)
    return blocks


def _one_by_one(blocks: BlockEvents, ready: Ready) -> None:
    """Record that each block of the result may have to wait for the previous block.

    Some machines compute blocks in order.
    """
    count = len(blocks.units)
    size, before = count // ready.results, list[Event]()
    for result in ready.order:
        units = range(result * size, (result + 1) * size)
        for n in units:
            for part in blocks.parts[n::count]:
                part.held += before
        before = [blocks.units[n] for n in units]


def _own(trace: RankTrace, ready: Ready, part: int, count: int) -> View:
    """Return the rows of `ready.own_rows` that replace part number `part` of the operand.

    Each source of the operand has `count` parts.
    """
    size = count // ready.results
    assert isinstance(ready.own_rows, View)
    return _rows(trace, ready.own_rows, part - ready.own_first * size, ready.own_blocks * size)


def _rows(trace: RankTrace, x: View, block: int, blocks: int, inner: int = 1) -> View:
    rows = rows_of(x, block, blocks, inner)
    if rows is None:
        layout = f"shape {list(x.shape)} with strides {list(x.strides)}"
        raise trace.fail(
            f"{blocks} blocks of the rows of {layout} are not views",
            expected="blocks that cut one axis, or cut the next axis within each index of it",
            hint="copy it first",
        )
    return rows
