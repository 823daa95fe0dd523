"""Find the runs of copies by SMs, with the signals between them, that one kernel carries out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hostir.runtime.unroll import CopyOp, Extent, Op, SignalOp, UnrolledProgram, ViewOp, overlap


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
        views = {op.out: op.shape for op in unrolled.ops if isinstance(op, ViewOp)}
        runs: list[_Run] = []
        run: _Run | None = None
        for op in unrolled.ops:
            if op.defines:
                continue
            if isinstance(op, CopyOp) and op.sms:
                if run is None or not run.takes(op):
                    run = _Run(unrolled.buffers, views, unrolled.extents)
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
        buffers, shapes, at: of registers: their buffers, the shapes of views, where in its buffer each lies.
        ops: so far.
        read, written: by buffer, what the copies touch.
    """

    buffers: Sequence[int]
    shapes: Mapping[int, tuple[int, ...]]
    at: Mapping[int, Extent]
    ops: list[Op] = field(default_factory=list)
    read: dict[int, list[Extent]] = field(default_factory=dict)
    written: dict[int, list[Extent]] = field(default_factory=dict)

    def takes(self, op: CopyOp) -> bool:
        """Whether a copy is of the same kind as the first, and may run at the same time as the others."""
        first, x, out = self.ops[0], self.buffers[op.x], self.buffers[op.out]
        assert isinstance(first, CopyOp)
        alike = op.stream == first.stream and op.sms == first.sms and x == self.buffers[first.x]
        if not alike or self.shapes.get(op.x) != self.shapes.get(first.x):
            return False
        touched = [*self.read.get(out, ()), *self.written.get(out, ())]
        return not overlap(self.at[op.out], touched) and not (
            x in self.written and overlap(self.at[op.x], self.written[x])
        )

    def add(self, op: CopyOp) -> None:
        self.ops.append(op)
        for register, touched in ((op.x, self.read), (op.out, self.written)):
            if register in self.at:  # inputs, which nothing writes, are not
                touched.setdefault(self.buffers[register], []).append(self.at[register])

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
