"""Find operations that one kernel can carry out together: copies by SMs, their signals, and a product before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from hostir.ir.regions import dense_strides
from hostir.plan.operations import ComputeOp, CopyOp, ElementRange, Op, SignalOp, overlap
from hostir.plan.unrolled import UnrolledProgram


@dataclass(frozen=True)
class Pushes:
    """A run of consecutive copies by SMs on one stream, and the signals between the copies.

    One kernel carries out the run. All copies have the same size and read from the same buffer. They may run at the
    same time, because no copy writes memory that another copy reads or writes.

    Fields:
        copies: the copies in issue order. Each copy is paired with the signal directly after it, or with None if there
            is no such signal.
        ops: the copies and signals, in issue order.
    """

    copies: tuple[tuple[CopyOp, SignalOp | None], ...]
    ops: tuple[Op, ...]

    @property
    def sms(self) -> int:
        return self.copies[0][0].sms

    @classmethod
    def of(cls, unrolled: UnrolledProgram) -> list[Pushes]:
        """Return all runs of copies by SMs in a program. Each run is as long as possible."""
        runs: list[_Run] = []
        run: _Run | None = None
        for op in unrolled.ops:  # this pattern is about two classes, so it names them
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
        ops: the operations so far.
        read, written: for each buffer, the ranges that the copies read and the ranges that they write.
    """

    unrolled: UnrolledProgram
    ops: list[Op] = field(default_factory=list)
    read: dict[int, list[ElementRange]] = field(default_factory=dict)
    written: dict[int, list[ElementRange]] = field(default_factory=dict)

    def takes(self, op: CopyOp) -> bool:
        """Return True if a copy can join the run.

        The copy must have the same stream, number of SMs, source buffer and shape as the first copy of the run. It must
        not write memory that another copy reads or writes, and no other copy may write memory that it reads.
        """
        first, x, out = self.ops[0], self.unrolled.layouts[op.x], self.unrolled.layouts[op.out]
        assert isinstance(first, CopyOp)
        first_x = self.unrolled.layouts[first.x]
        if (op.stream, op.sms, x.buffer, x.shape) != (first.stream, first.sms, first_x.buffer, first_x.shape):
            return False
        touched = [*self.read.get(out.buffer, ()), *self.written.get(out.buffer, ())]
        return not overlap(out.extent, touched) and not overlap(x.extent, self.written.get(x.buffer, ()))

    def add(self, op: CopyOp) -> None:
        self.ops.append(op)
        for register, touched in ((op.x, self.read), (op.out, self.written)):
            layout = self.unrolled.layouts[register]
            touched.setdefault(layout.buffer, []).append(layout.extent)

    def takes_signal(self, op: SignalOp) -> bool:
        """Return True if a signal can join the run.

        The signal must come directly after a copy on the same stream, and the stream must send it without a kernel.
        """
        return not op.sms and isinstance(self.ops[-1], CopyOp) and self.ops[-1].stream == op.stream


def _paired(run: Sequence[Op]) -> Pushes:
    following = [*run[1:], None]
    pairs = [
        (op, after if isinstance(after, SignalOp) else None)
        for op, after in zip(run, following, strict=True)
        if isinstance(op, CopyOp)
    ]
    return Pushes(tuple(pairs), tuple(run))


# One kernel may multiply and store the result to peers. This saves a kernel launch and a read of the result. With more
# rows than one row of tiles, the stores to peers slow the product down.
MAX_PUSHED_ROWS = 64


@dataclass(frozen=True)
class PushedProduct:
    """A product of few rows, and the copies of its rows that come next on its stream. One kernel may carry out both.

    The kernel runs where the copies would run, so the product runs later than in the program. This is correct because
    at most a barrier stands between the product and the copies. If there is a barrier, no peer can access the memory
    that the product reads or writes. Memory that is freed between the product and the copies must be freed after the
    kernel instead.

    Fields:
        product: the product.
        pushes: the copies of its rows.
        reader: the computation directly after the copies; None if there is no such computation. The computation might
            overlap ordinary copies, but it must not overlap this kernel, because it may read the product.
    """

    product: ComputeOp
    pushes: Pushes
    reader: ComputeOp | None

    @classmethod
    def of(cls, unrolled: UnrolledProgram, runs: Sequence[Pushes]) -> list[PushedProduct]:
        """Return a `PushedProduct` for each run that one kernel may carry out together with the product before the run.

        `runs` are all runs of copies by SMs in the program.
        """
        if not runs:
            return []
        ops = [op for op in unrolled.ops if not op.defines and not op.frees]
        at = {id(op): n for n, op in enumerate(ops)}
        products = []
        for pushes in runs:
            begin, end = at[id(pushes.ops[0])], at[id(pushes.ops[-1])] + 1
            product = _product_before(unrolled, ops[:begin], pushes)
            if product is not None:
                reader = ops[end] if end < len(ops) else None
                # The code that uses `reader` needs its operands and its ready flags, which only a computation has.
                products.append(cls(product, pushes, reader if isinstance(reader, ComputeOp) else None))
        return products


def _product_before(unrolled: UnrolledProgram, before: Sequence[Op], pushes: Pushes) -> ComputeOp | None:
    """Return the product directly before a run of copies if one kernel may carry out both; else None.

    `before` are the operations before the run.
    """
    layouts, buffers, symmetric = unrolled.layouts, unrolled.buffers, unrolled.symmetric
    after_barrier = bool(before) and bool(before[-1].of_team)
    op = before[-2] if after_barrier and len(before) > 1 else before[-1] if before else None
    stream = pushes.ops[0].stream
    # The trait `contracts` says that a statement multiplies. Only a ComputeOp has operands and flags of blocks.
    if not isinstance(op, ComputeOp) or not op.place.statement.contracts or op.ready is not None or op.done is not None:
        return None
    tensors = {buffers[register] for register in (op.out, *op.operands)}
    if op.stream != stream or (after_barrier and (before[-1].stream != stream or tensors & symmetric.keys())):
        return None
    out, columns = layouts[op.out], layouts[op.out].shape[-1]
    rows, sources = prod(out.shape[:-1]), [layouts[copy.x] for copy, _ in pushes.copies]
    fills_buffer = out == (sources[0].buffer, out.shape, dense_strides(out.shape), 0)
    if not fills_buffer or not 0 < rows <= MAX_PUSHED_ROWS or not columns:
        return None
    if any(x.offset % columns or prod(x.shape) % columns for x in sources):
        return None
    return None if tensors & {buffers[copy.out] for copy, _ in pushes.copies} else op
