"""Which copies by SMs, with the signals between them, one kernel carries out on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostir.runtime.plan import Allocate, Copy, Op, Recording, Signal, Symmetric, View

if TYPE_CHECKING:
    pass

HOST = (Allocate, Symmetric, View)  # the device does nothing for these


@dataclass(frozen=True)
class Pushes:
    """Copies one after another on a stream, of one size and from one buffer, each with the signal right behind it.

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
        views = {op.out: op for op in recording.ops if isinstance(op, View)}
        runs: list[list[Op]] = []
        run: list[Op] = []
        for op in recording.ops:
            if isinstance(op, HOST):
                continue
            if not _follows(op, run, views, recording.buffers):
                run = []
                if isinstance(op, Copy) and op.sms:
                    runs.append(run)
                else:
                    continue
            run.append(op)
        return [_paired(each) for each in runs]


def _follows(op: Op, run: Sequence[Op], views: dict[int, View], buffers: Sequence[int]) -> bool:
    """Whether an operation belongs to a run: another copy of its kind, or the one signal behind a copy."""
    if not run or op.stream != run[0].stream:
        return False
    first = run[0]
    assert isinstance(first, Copy)
    if isinstance(op, Copy):
        alike = _shape(op.x, views) == _shape(first.x, views) and buffers[op.x] == buffers[first.x]
        return op.sms == first.sms and alike
    return isinstance(op, Signal) and isinstance(run[-1], Copy)


def _shape(register: int, views: dict[int, View]) -> tuple[int, ...] | None:
    """Of a view; None for a whole buffer."""
    return views[register].shape if register in views else None


def _paired(run: Sequence[Op]) -> Pushes:
    following = [*run[1:], None]
    pairs = [
        (op, after if isinstance(after, Signal) else None)
        for op, after in zip(run, following, strict=True)
        if isinstance(op, Copy)
    ]
    return Pushes(tuple(pairs), tuple(run))


def copying(ops: Sequence[Op], stream: int) -> int:
    """On how many SMs the copies go on that come last, where something is issued to their stream; 0 for none."""
    latest = (op for op in reversed(ops) if not isinstance(op, HOST))
    last = next(latest, None)
    if isinstance(last, Signal) and last.stream == stream:
        last = next(latest, None)
    return last.sms if isinstance(last, Copy) and last.stream == stream else 0
