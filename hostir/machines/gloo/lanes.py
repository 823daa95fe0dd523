"""Threads in the place of streams.

The steps that one thread of a CPU process executes in a run, and its position among them.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from enum import Enum

import torch

from hostir.machines.binding import Step
from hostir.plan.operations import Op

LaneKey = int | tuple[object, ...]  # what a lane runs: the operations of a stream, or the communications of a team


class AbandonedError(Exception):
    """Raised in a lane because another lane of the run failed."""


class Waits(Enum):
    """The kinds of waits of a step."""

    NOTHING = "it works"
    LANE = "another lane of this rank"
    PEER = "another rank"


class ThreadLane:
    """The steps of one thread in a run, and the operation that each belongs to."""

    def __init__(self, key: LaneKey, fail: Callable[[Op, BaseException], None]) -> None:
        self.key = key
        self.fail = fail
        self.steps: list[Step] = []
        self.ops: list[Op] = []
        self.waits: list[Waits] = []
        self.notes: dict[int, Callable[[], str]] = {}  # by step: details of its wait, for messages
        self.cursor: Iterator[Step] | None = None
        self.done = threading.Event()

    def add(self, op: Op, step: Step, waits: Waits = Waits.NOTHING, note: Callable[[], str] | None = None) -> None:
        if note is not None:
            self.notes[len(self.steps)] = note
        self.steps.append(step)
        self.ops.append(op)
        self.waits.append(waits)

    def run(self) -> None:
        # Other threads read the position of the run from the iterator.
        cursor = self.cursor = iter(self.steps)
        try:
            for step in cursor:
                step()
        except AbandonedError:
            pass
        except BaseException as problem:
            self.fail(self.ops[self.position], problem)
        finally:
            self.cursor = None

    def run_on_thread(self, inference: bool) -> None:
        """Do as `run`, in torch's inference mode if the caller is, as each thread has a mode of its own; set `done`."""
        try:
            with torch.inference_mode() if inference else contextlib.nullcontext():
                self.run()
        finally:
            self.done.set()

    @property
    def position(self) -> int:
        """The index of the step being executed; -1 if none is."""
        cursor = self.cursor
        return len(self.steps) - operator.length_hint(cursor) - 1 if cursor else -1
