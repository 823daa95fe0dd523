"""Lanes of a CPU process, the failure of a run, and the times of steps.

A lane is the list of steps that one thread executes in a run. There is a lane for each stream and for
each team that communicates.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum

import torch

from hostir.machines.binding import Step
from hostir.machines.trace import Trace
from hostir.plan.operations import Op
from hostir.plan.unrolled import UnrolledProgram

LaneKey = int | tuple[object, ...]  # the number of a stream, or a team that communicates


class AbandonedError(Exception):
    """Raised in a lane to end it because another lane of the run has failed."""


class Waits(Enum):
    """The thing that a step waits for: nothing, another lane of this rank, or another rank."""

    NOTHING = "it works"
    LANE = "another lane of this rank"
    PEER = "another rank"


class ThreadLane:
    """The steps that one thread executes in a run. For each step, the lane also holds its operation and its wait.

    Fields:
        fail: a function that records an operation's failure.
        notes: functions for diagnostics. The key is the index of a step that waits. The function returns a text that
            says what the step waits for.
        cursor: the iterator over the steps in a run; None between runs.
        done: an event that is set when the thread has executed the lane.
    """

    def __init__(self, key: LaneKey, fail: Callable[[Op, BaseException], None]) -> None:
        self.key = key
        self.fail = fail
        self.steps: list[Step] = []
        self.ops: list[Op] = []
        self.waits: list[Waits] = []
        self.notes: dict[int, Callable[[], str]] = {}
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
        """Run the lane, and then set `done`.

        `inference` is True if the caller is in inference mode. Inference mode is set for each thread, so the lane's
        thread enters it, too.
        """
        try:
            with torch.inference_mode() if inference else contextlib.nullcontext():
                self.run()
        finally:
            self.done.set()

    @property
    def position(self) -> int:
        """The index of the step that the thread executes now; -1 if the thread executes no step."""
        cursor = self.cursor
        return len(self.steps) - operator.length_hint(cursor) - 1 if cursor else -1


class RunFailure:
    """The first failure of a run. A failure sets all events of the plan, so that no lane waits forever.

    Fields:
        problem: the operation that failed, and its exception; None in a run without failure.
        events: all events of the plan.
    """

    def __init__(self) -> None:
        self.problem: tuple[Op, BaseException] | None = None
        self.events: list[threading.Event] = []

    def event(self) -> threading.Event:
        """Return a new event for the lanes of the plan."""
        self.events.append(threading.Event())
        return self.events[-1]

    def record(self, op: Op, problem: BaseException) -> None:
        """Record the failure if it is the first one. Set all events, so that no lane waits any longer."""
        if self.problem is None:
            self.problem = op, problem
        for event in self.events:
            event.set()


class LaneTrace:
    """Records the times of a plan's operations in a trace, if there is one."""

    def __init__(self, unrolled: UnrolledProgram, trace: Trace | None) -> None:
        self.unrolled = unrolled
        self.trace = trace

    def timed(self, op: Op, step: Step) -> Step:
        """Return a step that runs `step` and records its time."""
        if self.trace is None:
            return step
        start, end = self.bracket(op)

        def timed_step() -> None:
            start()
            step()
            end()

        return timed_step

    def bracket(self, op: Op) -> tuple[Step, Step]:
        """Return two steps. The first step begins an event of the trace, and the second step ends the event.

        If there is no trace, the steps do nothing.
        """
        trace = self.trace
        if trace is None:
            return _nothing, _nothing
        rank, lane, text, rounds = self.unrolled.rank, op.lane, self.unrolled.text(op), op.place.rounds
        begun = [0.0]

        def start() -> None:
            begun[0] = time.time()

        def end() -> None:
            trace.add(rank, lane, text, begun[0], time.time(), rounds)

        return start, end


def _nothing() -> None:
    """Do nothing."""
