"""Tasks of simulated ranks, the edges between them, and the gates that block them: flags, and the SMs of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from hostir.ir.op import Statement

Views = tuple[torch.Tensor, ...]
Epoch = tuple[int, int]  # the number of a call, and an epoch of that call


@dataclass(eq=False, slots=True, repr=False)  # a repr would print all tasks
class Task:
    """An action of one rank: `run`, once every task it follows has run and its gate is open.

    Fields:
        lane: the label of its stream, or a unique label if it is on no stream.
        order, step: the numbers of tasks and of statements that its rank issued before it.
        statement, rounds, call: its origin; a task of the caller has no statement.
        stream: the label of the stream that was current when it was issued.
        run: the action; None for a task that only orders others.
        reads, writes: the views that it accesses, of any rank.
        memory: the storages of these views.
        undefines: the views that it makes undefined.
        gate: the gate that must be open, besides the tasks that it follows.
        changes: the gate that it may open or close when it runs.
        one_sm: True if it needs only one SM, which a kernel that was issued later in the same call leaves free.
        may_block: True if it may hold SMs until another rank does something.
        epoch: the epoch that it waits for at its gate, or the new epoch of the flag `changes`.
        team: the team of a communication.
        since: the task at which its bar in a trace begins; None if a trace does not show it.
        timed: True if a real machine takes time for it.
        queued_behind: the task that delays it on a real link, though nothing orders the two.
        needs, blockers: the number of tasks that it follows, and the number of these that have not run yet.
        holds, held: the tasks that it may delay on some machines, and the number of tasks that may delay this one.
        seconds: its measured duration.
    """

    rank: int = 0
    lane: str = ""
    order: int = 0
    step: int = 0
    statement: Statement | None = None
    rounds: tuple[int, ...] = ()
    call: int = 0
    stream: str = ""
    run: Callable[[], object] | None = None
    reads: Views = ()
    writes: Views = ()
    undefines: Views = ()
    memory: tuple[int, ...] = ()
    gate: Gate | None = None
    changes: Gate | None = None
    one_sm: bool = False
    may_block: bool = False
    epoch: Epoch = (0, 0)
    team: tuple[int, ...] = ()
    since: Task | None = None
    timed: bool = False
    queued_behind: Task | None = None
    followers: list[Task] = field(default_factory=list, repr=False)
    needs: int = 0
    blockers: int = 0
    holds: list[Task] = field(default_factory=list, repr=False)
    held: int = 0
    seconds: float = 0.0

    def follow(self, others: Iterable[Task]) -> Task:
        """Add an edge from each of `others`; return the task."""
        for other in others:
            other.followers.append(self)
            self.needs += 1
        return self

    def held_by(self, others: Iterable[Task]) -> Task:
        """Add a holding edge from each of `others`; return the task.

        Only some machines have these edges, so programs must not rely on them.
        """
        for other in others:
            other.holds.append(self)
            self.held += 1
        return self


def join(tasks: Iterable[Task]) -> Task:
    """Return an empty task that follows all of `tasks`, so that their followers need one edge instead of many."""
    return Task().follow(tasks)


class Gate:
    """A condition that blocks tasks while it is closed. Blocked tasks are parked until the gate changes."""

    def __init__(self) -> None:
        self.parked: list[Task] = []

    def open(self, task: Task) -> bool:
        raise AssertionError(type(self).__name__)

    def admits(self, task: Task) -> bool:
        """Return True if a task may run now; else park it."""
        if self.open(task):
            return True
        self.parked.append(task)
        return False

    def released(self) -> list[Task]:
        """Return the tasks that should try again."""
        parked, self.parked = self.parked, []
        return parked

    def reset(self) -> None:
        self.parked = []


class FlagGate(Gate):
    """A flag that signals set. It is open to a task once it has reached the task's epoch."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.signals: list[Task] = []  # the signals of this run, in order

    def open(self, task: Task) -> bool:
        return bool(self.signals) and self.signals[-1].epoch >= task.epoch

    def set(self, signal: Task) -> None:
        self.signals.append(signal)

    def reset(self) -> None:
        super().reset()
        self.signals = []


class SMGate(Gate):
    """The SMs of a rank. While a waiting kernel holds them, no other task starts, except the copies that overlap it.

    The kernel leaves one SM free for tasks that need only one SM and were issued before it in its call. A task that may
    wait for other ranks can also take this SM, and keeps it until it gets all other SMs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holder: Task | None = None
        self.overlapping: Sequence[Task] = ()

    def open(self, task: Task) -> bool:
        holder = self.holder
        if holder is None or any(task is copy for copy in self.overlapping):
            return True
        taken = any(other.may_block for other in self.parked)
        return task.one_sm and task.call == holder.call and task.order < holder.order and not taken

    def take(self, holder: Task | None, overlapping: Sequence[Task] = ()) -> None:
        self.holder, self.overlapping = holder, overlapping

    def reset(self) -> None:
        super().reset()
        self.holder = None
