"""Lanes: the steps that one thread of a CPU process executes in a run, and its position among them.

Each stream has a lane, and so has each team that communicates.
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

LaneKey = int | tuple[object, ...]  # the number of a stream, or a team that communicates


class AbandonedError(Exception):
    """Ends a lane because another lane of the run failed."""


class Waits(Enum):
    """What a step waits for."""

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
        self.notes: dict[int, Callable[[], str]] = {}  # by step: describes its wait, for messages
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
        """Run in the caller's inference mode, since each thread has its own mode, and then set `done`."""
        try:
            with torch.inference_mode() if inference else contextlib.nullcontext():
                self.run()
        finally:
            self.done.set()

    @property
    def position(self) -> int:
        """The index of the step that the thread executes; -1 if it executes no step."""
        cursor = self.cursor
        return len(self.steps) - operator.length_hint(cursor) - 1 if cursor else -1
