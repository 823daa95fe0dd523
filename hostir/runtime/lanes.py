"""What one thread of a CPU process does in a run, and what it stands at."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from enum import Enum

import torch

from hostir.runtime.plan import Op, Step

Key = int | tuple[object, ...]  # of a lane: a stream, or a team


class AbandonedError(Exception):
    """Another lane of the run failed."""


class Waits(Enum):
    """What a step may have to wait for."""

    NOTHING = "it works"
    LANE = "another lane of this rank"
    PEER = "another rank"


class Lane:
    """What one thread does in a run: steps, and the operation of each."""

    def __init__(self, key: Key, fail: Callable[[Op, BaseException], None]) -> None:
        self.key = key
        self.fail = fail
        self.steps: list[Step] = []
        self.ops: list[Op] = []
        self.waits: list[Waits] = []
        self.notes: dict[int, Callable[[], str]] = {}  # by step: more about what it waits for
        self.cursor: Iterator[Step] | None = None
        self.done = threading.Event()

    def add(self, op: Op, step: Step, waits: Waits = Waits.NOTHING, note: Callable[[], str] | None = None) -> None:
        if note is not None:
            self.notes[len(self.steps)] = note
        self.steps.append(step)
        self.ops.append(op)
        self.waits.append(waits)

    def run(self) -> None:
        # The iterator counts the steps for whoever asks where the run stands.
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
            self.done.set()

    def run_in_mode(self, inference: bool) -> None:
        """`run` on a thread of its own, as a caller in torch's inference mode or not would."""
        with torch.inference_mode() if inference else contextlib.nullcontext():
            self.run()

    @property
    def position(self) -> int:
        """The index of the step being executed; -1 where none is."""
        cursor = self.cursor
        return len(self.steps) - operator.length_hint(cursor) - 1 if cursor else -1
