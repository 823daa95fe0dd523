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
    """An action of one rank. It may run once every task that it follows has run and its gate is open.

    Fields:
        lane: the label of the task's stream; a unique label if the task is on no stream.
        order: the number of tasks that its rank created before it.
        step: the number of statements of its rank up to the moment when the task was created.
        statement: the statement to which the task belongs; None for a task of the caller.
        rounds: the rounds of the loops around the statement.
        call: the number of the call, from 0.
        stream: the label of the stream that was current when the task was issued.
        run: the action; None for a task that only orders others.
        reads, writes: the views that the task reads and writes, in memory of any rank.
        memory: the storages of these views.
        undefines: the views that the task makes undefined.
        gate: the gate that must be open before the task may run; None for no gate.
        changes: the gate that the task may open or close when it runs.
        one_sm: True if the task needs only one SM. A kernel that was issued later in the same call leaves this SM free.
        may_block: True if the task may hold SMs until another rank does something.
        epoch: the epoch for which the task waits at its gate, or the new epoch of the flag `changes`.
        team: the team of a communication.
        since: the task at whose start its bar in a trace begins; None if a trace does not show it.
        awaits: the number of the block for which a kernel waits in this task, and the number of its blocks.
        timed: True if a real machine takes time for the task.
        queued_behind: the task that delays this task on a real link, although no edge orders the two tasks.
        followers: the tasks that follow this task.
        needs: the number of tasks that this task follows.
        blockers: the number of tasks for which this task still waits in a run.
        holds: the tasks that this task may delay on some machines. A holding edge leads to each of these tasks.
        held: the number of tasks that may delay this task on some machines.
        seconds: the measured duration of the task.
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
    awaits: tuple[int, int] | None = None
    timed: bool = False
    queued_behind: Task | None = None
    followers: list[Task] = field(default_factory=list, repr=False)
    needs: int = 0
    blockers: int = 0
    holds: list[Task] = field(default_factory=list, repr=False)
    held: int = 0
    seconds: float = 0.0

    def follow(self, others: Iterable[Task]) -> Task:
        """Add an edge from each of `others` to this task, and return this task."""
        for other in others:
            other.followers.append(self)
            self.needs += 1
        return self

    def held_by(self, others: Iterable[Task]) -> Task:
        """Add a holding edge from each of `others` to this task, and return this task.

        Only some machines have holding edges, so programs must not rely on them.
        """
        for other in others:
            other.holds.append(self)
            self.held += 1
        return self


def join(tasks: Iterable[Task]) -> Task:
    """Return an empty task that follows all of `tasks`.

    A task that must follow all of `tasks` then needs only one edge.
    """
    return Task().follow(tasks)


class Gate:
    """A condition that blocks tasks while it is closed. Blocked tasks are parked until the gate changes."""

    def __init__(self) -> None:
        self.parked: list[Task] = []

    def open(self, task: Task) -> bool:
        raise AssertionError(type(self).__name__)

    def admits(self, task: Task) -> bool:
        """Return True if a task may run now. Otherwise park the task and return False."""
        if self.open(task):
            return True
        self.parked.append(task)
        return False

    def released(self) -> list[Task]:
        """Remove the parked tasks from the gate and return them. The gate must be asked again for each of them."""
        parked, self.parked = self.parked, []
        return parked

    def reset(self) -> None:
        self.parked = []


class FlagGate(Gate):
    """A gate that is a flag. Signals set the flag. The gate is open for a task once the flag has the task's epoch."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.signals: list[Task] = []  # the signals of this run, in order

    def open(self, task: Task) -> bool:
        return bool(self.signals) and self.signals[-1].epoch >= task.epoch

    def opened_by(self, task: Task) -> Task:
        """Return the signal that a task which has run waited for."""
        return next(signal for signal in self.signals if signal.epoch >= task.epoch)

    def set(self, signal: Task) -> None:
        self.signals.append(signal)

    def reset(self) -> None:
        super().reset()
        self.signals = []


class SMGate(Gate):
    """A gate for the SMs of a rank. While a kernel that waits holds the SMs, only copies that overlap it may start.

    The kernel leaves one SM free for tasks that need only one SM and were issued before the kernel in the same call.
    But a task that may block can take this SM and then wait for the other SMs. So the SM does not count as free while
    such a task is parked.

    Fields:
        holder: the kernel that holds the SMs; None if they are free.
        overlapping: the copies that overlap the holder.
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
