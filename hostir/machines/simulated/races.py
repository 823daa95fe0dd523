"""Race detection on simulated ranks. While tasks run, it finds unordered accesses to common memory.

The *past* of a task is the set of tasks that happen before it. These are the tasks that it follows, the signal that it
has waited for, and the pasts of these tasks and of this signal. A past is stored as the bits of an integer, like a
vector clock with a component for each task. If a task ran earlier only by chance, or only because it held the SMs, it
is not in the past. So races are found under any seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hostir.ir.source import HostIRError, Span, error
from hostir.machines.simulated.memory import SimulatedMemory, storage_of
from hostir.machines.simulated.tasks import FlagGate, Task

Origin = Callable[[Task], tuple[Span | None, str]]


class TaskAccess:
    """A task's read or write of a view.

    Fields:
        task: the number of the task.
        writes: True for a write, False for a read.
        storage: the identity of the view's storage.
        extent: the number of elements that the storage has.
        place: the shape, the strides and the offset of the view.
        range: the range of the storage's elements from the first element to the last element of the view.
    """

    def __init__(self, task: int, view: torch.Tensor, writes: bool) -> None:
        self.task = task
        self.writes = writes
        self.storage = storage_of(view)
        self.extent = view.untyped_storage().nbytes() // view.element_size()
        self.place = view.shape, view.stride(), int(view.storage_offset())
        last = sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
        self.range = range(self.place[2], self.place[2] + last + 1 if view.numel() else self.place[2])

    @property
    def does(self) -> str:
        return "writes" if self.writes else "reads"

    def of(self, marks: torch.Tensor) -> torch.Tensor:
        """Return the marks of the accessed elements, as a view of `marks`.

        `marks` has one mark for each element of the storage.
        """
        return marks.as_strided(*self.place)

    def blank(self) -> torch.Tensor:
        """Return a new mark for each element of the storage, all False."""
        return torch.zeros(self.extent, dtype=torch.bool, device="cpu")

    def meets(self, other: TaskAccess) -> bool:
        """Return True if this access and `other` have an element in common. Both must access the same storage."""
        if self.range.stop <= other.range.start or other.range.stop <= self.range.start:
            return False
        marks = self.blank()
        self.of(marks).fill_(True)
        return bool(other.of(marks).any())

    def stands_for(self, other: TaskAccess) -> bool:
        """Return True if the detector may forget the earlier access `other`.

        The detector may do so if every later access that races with `other` also races with this access.
        """
        return self.place == other.place and (self.writes or not other.writes)


class Watch:
    """The race detector of one run. `where` describes a task's statement, and `memory` knows the names of buffers."""

    def __init__(self, tasks: Sequence[Task], memory: SimulatedMemory, where: Origin) -> None:
        self.tasks = tasks
        self.memory = memory
        self.where = where
        self.number = {task: i for i, task in enumerate(tasks)}
        self.past: dict[int, int] = {}  # by task that has not run yet: its past so far
        self.sent: dict[int, int] = {}  # by signal: its past and the signal itself
        self.accesses: dict[int, list[TaskAccess]] = {}  # by storage: the accesses that are not forgotten
        self.written: dict[int, torch.Tensor] = {}  # by storage: a mark for each element that is defined
        self.unwritten: HostIRError | None = None  # the error of the first read of undefined memory

    def runs(self, task: Task) -> None:
        """Record that a task runs. Raises HostIRError if the task races with a task that ran before."""
        me = self.number[task]
        known = self.past.pop(me, 0) | 1 << me
        if isinstance(task.gate, FlagGate):
            known |= self.sent[self.number[next(s for s in task.gate.signals if s.epoch >= task.epoch)]]
        if isinstance(task.changes, FlagGate):
            self._signal(task, known, task.changes.signals)
            self.sent[me] = known
        for view in task.reads:
            self._access(TaskAccess(me, view, writes=False), known)
        for view in task.writes:
            self._access(TaskAccess(me, view, writes=True), known)
        for view in task.undefines:
            self._access(TaskAccess(me, view, writes=True), known, defines=False)
        for follower in task.followers:
            number = self.number[follower]
            self.past[number] = self.past.get(number, 0) | known

    def finish(self) -> None:
        """Check the completed run. Raises HostIRError if a task read memory that no task had written."""
        if self.unwritten is not None:
            raise self.unwritten

    def _access(self, access: TaskAccess, known: int, defines: bool = True) -> None:
        left = []
        for other in self.accesses.get(access.storage, ()):
            ordered = known >> other.task & 1
            if not ordered and (access.writes or other.writes) and access.meets(other):
                raise self._race(other, access)
            if not (ordered and access.stands_for(other)):
                left.append(other)
        self.accesses[access.storage] = [*left, access]
        marks = self.written.setdefault(access.storage, access.blank())
        if access.writes:
            access.of(marks).fill_(defines)
        elif (
            self.unwritten is None and not access.of(marks).all()
        ):  # a race with this read may still be found; its error says more
            span, where = self._described(access)
            self.unwritten = error(
                f"{where} reads what nobody wrote: {self._buffer(access.storage)}",
                span,
                expected="a write of all it reads, ordered before it",
            )

    def _signal(self, task: Task, known: int, earlier: Sequence[Task]) -> None:
        """Check a signal. Raises HostIRError unless it is ordered after the previous signal of the same flag."""
        if not earlier or known >> self.number[earlier[-1]] & 1:
            return
        first, second = self.where(earlier[-1]), self.where(task)
        raise error(
            f"race: {first[1]} and {second[1]} set one flag, and nothing orders them",
            second[0],
            expected="signals of one flag one after another, such as from one stream",
            notes=(first, second),
        )

    def _race(self, first: TaskAccess, second: TaskAccess) -> HostIRError:
        (span, one), (other_span, other) = self._described(first), self._described(second)
        return error(
            f"race: {one} and {other} touch common elements of {self._buffer(first.storage)}, and nothing orders them",
            other_span,
            expected="one before the other: by a stream, a synchronize, a wait, a signal or a barrier",
            notes=((span, f"{one} {first.does}"), (other_span, f"{other} {second.does}")),
        )

    def _described(self, access: TaskAccess) -> tuple[Span | None, str]:
        task = self.tasks[access.task]
        span, where = self.where(task)
        if task.statement is None:
            return span, f"{where}, {task.stream},"
        stream = "the caller's stream" if task.stream == "caller" else task.stream
        return span, f"{where} on {stream}"

    def _buffer(self, storage: int) -> str:
        name, rank = self.memory.owners[storage]
        return f"%{name} of rank {rank}"
