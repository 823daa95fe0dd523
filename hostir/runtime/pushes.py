"""Which copies by SMs, with the signals between them, one kernel carries out on CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hostir.runtime.extents import Extent, extents, overlap
from hostir.runtime.plan import Allocate, Copy, Op, Recording, Signal, Symmetric, View

HOST = (Allocate, Symmetric, View)  # the device does nothing for these


@dataclass(frozen=True)
class Pushes:
    """Copies one after another on a stream, of one size and from one buffer, each with the signal right behind it.

    They may run at one time: none writes what another reads or writes.

    Fields:
        copies: in order, with the signals; None where there is none.
        ops: all of them, in the order of issue.
    """

    copies: tuple[tuple[Copy, Signal | None], ...]
    ops: tuple[Op, ...]

    @property
    def sms(self) -> int:
        return self.copies[0][0].sms

    @classmethod
    def of(cls, recording: Recording) -> list[Pushes]:
        """All of a program, each as long as can be."""
        views = {op.out: op.shape for op in recording.ops if isinstance(op, View)}
        at = extents(recording)
        runs: list[_Run] = []
        run: _Run | None = None
        for op in recording.ops:
            if isinstance(op, HOST):
                continue
            if isinstance(op, Copy) and op.sms:
                if run is None or not run.takes(op):
                    run = _Run(recording.buffers, views, at)
                    runs.append(run)
                run.add(op)
            elif run is not None and isinstance(op, Signal) and run.takes_signal(op):
                run.ops.append(op)
            else:
                run = None
        return [_paired(each.ops) for each in runs]


@dataclass
class _Run:
    """Copies of one kernel and their signals, while more are looked for.

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

    def takes(self, op: Copy) -> bool:
        """Whether a copy is of the same kind as the first, and may run while the others do."""
        first, x, out = self.ops[0], self.buffers[op.x], self.buffers[op.out]
        assert isinstance(first, Copy)
        alike = op.stream == first.stream and op.sms == first.sms and x == self.buffers[first.x]
        if not alike or self.shapes.get(op.x) != self.shapes.get(first.x):
            return False
        touched = [*self.read.get(out, ()), *self.written.get(out, ())]
        return not overlap(self.at[op.out], touched) and not (
            x in self.written and overlap(self.at[op.x], self.written[x])
        )

    def add(self, op: Copy) -> None:
        self.ops.append(op)
        for register, touched in ((op.x, self.read), (op.out, self.written)):
            if register in self.at:  # inputs, which nothing writes, are not
                touched.setdefault(self.buffers[register], []).append(self.at[register])

    def takes_signal(self, op: Signal) -> bool:
        """Whether a signal is one of the stream, and right behind a copy."""
        return not op.sms and isinstance(self.ops[-1], Copy) and self.ops[-1].stream == op.stream


def _paired(run: Sequence[Op]) -> Pushes:
    following = [*run[1:], None]
    pairs = [
        (op, after if isinstance(after, Signal) else None)
        for op, after in zip(run, following, strict=True)
        if isinstance(op, Copy)
    ]
    return Pushes(tuple(pairs), tuple(run))


def room(ops: Sequence[Op], ordered: int, stream: int) -> dict[str, int]:
    """The SMs that a kernel does not get which is issued to a stream now and takes all: `beside` and `spare`.

    Args:
        ops: what comes before it in the call.
        ordered: how many of them there were when a statement last ordered a stream.
        stream: its own.
    """
    spare = any(isinstance(op, Signal) and op.sms for op in ops)
    return {"beside": _copying(ops[ordered:], stream), "spare": int(spare)}


def _copying(ops: Sequence[Op], stream: int) -> int:
    """On how many SMs the copies go on that come last, where something is issued to their stream; 0 for none."""
    latest = (op for op in reversed(ops) if not isinstance(op, HOST))
    last = next(latest, None)
    if isinstance(last, Signal) and not last.sms and last.stream == stream:
        last = next(latest, None)
    return last.sms if isinstance(last, Copy) and last.stream == stream else 0
