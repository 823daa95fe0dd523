"""Copies to peers by one kernel, and products of few rows that are stored to peers directly.

The runs of copies by SMs, with the signals between them, that one kernel carries out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from hostir.ir.regions import dense_strides
from hostir.plan.operations import ComputeOp, CopyOp, ElementRange, Op, SignalOp, overlap
from hostir.plan.unrolled import UnrolledProgram


@dataclass(frozen=True)
class Pushes:
    """Consecutive copies on a stream, of one size and from one buffer, each with the signal directly after it.

    They may run at the same time: none writes what another reads or writes.

    Fields:
        copies: in order, each with its signal, or None if it has none.
        ops: all of them, in issue order.
    """

    copies: tuple[tuple[CopyOp, SignalOp | None], ...]
    ops: tuple[Op, ...]

    @property
    def sms(self) -> int:
        return self.copies[0][0].sms

    @classmethod
    def of(cls, unrolled: UnrolledProgram) -> list[Pushes]:
        """Return all such runs of a program, each as long as possible."""
        runs: list[_Run] = []
        run: _Run | None = None
        for op in unrolled.ops:  # a pattern of two operations, so it names them
            if op.defines:
                continue
            if isinstance(op, CopyOp) and op.sms:
                if run is None or not run.takes(op):
                    run = _Run(unrolled)
                    runs.append(run)
                run.add(op)
            elif run is not None and isinstance(op, SignalOp) and run.takes_signal(op):
                run.ops.append(op)
            else:
                run = None
        return [_paired(each.ops) for each in runs]


@dataclass
class _Run:
    """A run of copies and signals under construction.

    Fields:
        ops: so far.
        read, written: by buffer, what the copies touch.
    """

    unrolled: UnrolledProgram
    ops: list[Op] = field(default_factory=list)
    read: dict[int, list[ElementRange]] = field(default_factory=dict)
    written: dict[int, list[ElementRange]] = field(default_factory=dict)

    def takes(self, op: CopyOp) -> bool:
        """Whether a copy is of the same kind as the first, and may run at the same time as the others."""
        first, x, out = self.ops[0], self.unrolled.layouts[op.x], self.unrolled.layouts[op.out]
        assert isinstance(first, CopyOp)
        same = self.unrolled.layouts[first.x]
        if (op.stream, op.sms, x.buffer, x.shape) != (first.stream, first.sms, same.buffer, same.shape):
            return False
        touched = [*self.read.get(out.buffer, ()), *self.written.get(out.buffer, ())]
        return not overlap(out.extent, touched) and not overlap(x.extent, self.written.get(x.buffer, ()))

    def add(self, op: CopyOp) -> None:
        self.ops.append(op)
        for register, touched in ((op.x, self.read), (op.out, self.written)):
            layout = self.unrolled.layouts[register]
            touched.setdefault(layout.buffer, []).append(layout.extent)

    def takes_signal(self, op: SignalOp) -> bool:
        """Whether a signal is sent by the stream itself, directly after a copy."""
        return not op.sms and isinstance(self.ops[-1], CopyOp) and self.ops[-1].stream == op.stream


def _paired(run: Sequence[Op]) -> Pushes:
    following = [*run[1:], None]
    pairs = [
        (op, after if isinstance(after, SignalOp) else None)
        for op, after in zip(run, following, strict=True)
        if isinstance(op, CopyOp)
    ]
    return Pushes(tuple(pairs), tuple(run))


# A product and the copies by SMs of its result that come next may be one kernel, which stores to peers itself.
#
# That saves a kernel between them and a read of the result; with many rows, stores to peers slow the product down.

MAX_PUSHED_ROWS = 64  # one row of tiles


@dataclass(frozen=True)
class PushedProduct:
    """A product of few rows, and the copies of whole rows of it that come next on its stream.

    One kernel may do both, in the place of the copies. Whatever precedes them precedes the product as well, but for the
    product itself and perhaps a barrier; then no peer can access what the product reads and writes. Memory that is
    freed between them is to be freed after the kernel.

    Fields:
        reader: the computation that comes next. It must not overlap the kernel as it may overlap copies alone: it may
            read the product itself.
    """

    product: ComputeOp
    pushes: Pushes
    reader: ComputeOp | None

    @classmethod
    def of(cls, unrolled: UnrolledProgram, runs: Sequence[Pushes]) -> list[PushedProduct]:
        """Return all of a program, of whose copies by SMs these are the runs."""
        if not runs:
            return []
        ops = [op for op in unrolled.ops if not op.defines and not op.frees]
        at = {id(op): n for n, op in enumerate(ops)}
        found = []
        for pushes in runs:
            begin, end = at[id(pushes.ops[0])], at[id(pushes.ops[-1])] + 1
            product = _product_before(unrolled, ops[:begin], pushes)
            if product is not None:
                reader = ops[end] if end < len(ops) else None
                # Whoever takes it wants its operands and flags of blocks, which only a computation has.
                found.append(cls(product, pushes, reader if isinstance(reader, ComputeOp) else None))
        return found


def _product_before(unrolled: UnrolledProgram, before: Sequence[Op], pushes: Pushes) -> ComputeOp | None:
    """Return the product whose rows are copied next, if one kernel may do both; else None."""
    layouts, buffers, symmetric = unrolled.layouts, unrolled.buffers, unrolled.symmetric
    meets = bool(before) and bool(before[-1].of_team)
    op = before[-2] if meets and len(before) > 1 else before[-1] if before else None
    stream = pushes.ops[0].stream
    # The traits tell that it multiplies, but only a computation has operands and flags of blocks.
    if not isinstance(op, ComputeOp) or not op.place.statement.contracts or op.ready is not None or op.done is not None:
        return None
    tensors = {buffers[register] for register in (op.out, *op.operands)}
    if op.stream != stream or (meets and (before[-1].stream != stream or tensors & symmetric.keys())):
        return None
    out, columns = layouts[op.out], layouts[op.out].shape[-1]
    rows, sources = prod(out.shape[:-1]), [layouts[copy.x] for copy, _ in pushes.copies]
    whole = out == (sources[0].buffer, out.shape, dense_strides(out.shape), 0)
    if not whole or not 0 < rows <= MAX_PUSHED_ROWS or not columns:
        return None
    if any(x.offset % columns or prod(x.shape) % columns for x in sources):
        return None
    return None if tensors & {buffers[copy.out] for copy, _ in pushes.copies} else op
