"""Run tasks of simulated ranks in any order that the edges between them allow, and find accesses that none order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import prod
from random import Random
from time import perf_counter

import torch

from hostir.ir.op import Statement
from hostir.ir.source import HostIRError, Span, described, error, user_span

# Memory ---------------------------------------------------------------------------------------------------------------
# The memory of simulated ranks: NaN until it is written, and out of bounds once it is freed.

NAN = float("nan")


class SimulatedMemory:
    """The buffers of all simulated ranks; each has its own storage."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.owners: dict[int, tuple[str, int]] = {}  # of each storage: its buffer's name, and the rank
        self.freed: dict[int, Span | None] = {}  # by storage: where
        self.buffers: list[torch.Tensor] = []

    def new(self, name: str, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a dense buffer of NaN, or of 0 for dtypes without NaN."""
        memory = torch.zeros(
            max(prod(shape), 1), dtype=dtype, device=self.device
        )  # at least one element, to have an address
        if dtype.is_floating_point:
            self.buffers.append(memory.fill_(NAN))
        buffer = memory[: prod(shape)].view(tuple(shape))
        self.owners[storage_of(buffer)] = name, rank
        return buffer

    def overlap(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether two views have an element in common."""
        if storage_of(x) != storage_of(y):
            return False
        marks = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool)
        marks.as_strided(x.shape, x.stride(), int(x.storage_offset())).fill_(True)
        return bool(marks.as_strided(y.shape, y.stride(), int(y.storage_offset())).any())

    def free(self, storage: int, span: Span | None) -> None:
        """Mark memory as freed: it must not be accessed any more."""
        self.freed[storage] = span

    def reset(self) -> None:
        """Restore the state before the first run."""
        self.freed.clear()
        for buffer in self.buffers:
            buffer.fill_(NAN)


def make_undefined(x: torch.Tensor) -> None:
    """Make a view undefined: NaN, or 0 for dtypes without NaN."""
    x.fill_(NAN if x.dtype.is_floating_point else 0)


def storage_of(x: torch.Tensor) -> int:
    """Return an identity of the memory that a tensor is in."""
    return x.untyped_storage().data_ptr()


# Tasks ----------------------------------------------------------------------------------------------------------------
# Tasks with edges between them, and a seeded scheduler that may run any task whose predecessors have run.

Views = tuple[torch.Tensor, ...]
Epoch = tuple[int, int]  # which call, and the epoch counted from its start


@dataclass(eq=False, slots=True, repr=False)  # its tasks all lead to each other
class Task:
    """An action of one rank: `run`, once every task it follows has run and its gate is open.

    Fields:
        lane: its queue: the label of its stream, or a separate one if it is on no stream.
        order, step: the numbers of tasks and of statements that its rank issued before it.
        statement, rounds, call: its origin; no statement for what the caller does.
        stream: the label of the stream that was current.
        run: the action; None for a task that only orders others.
        reads, writes: the views that it accesses, of any rank; `memory`: their storages.
        undefines: views whose contents it makes undefined.
        gate: the gate that must be open, besides the tasks that it follows.
        changes: the gate that it may open or close when it runs.
        one_sm: whether it needs one SM only, which a kernel that was issued later in the same call leaves free.
        may_block: whether it may hold SMs until another rank does something.
        epoch: the epoch that it waits for at its gate, or that it sets the flag `changes` to.
        team: of a communication.
        since: the task at which its bar in a trace begins; None if a trace does not show it.
        timed: whether a real machine takes time for it.
        queued_behind: the task whose end delays it on a real link, though nothing orders the two.
        needs, blockers: how many tasks it follows, and how many of them have not run yet.
        holds, held: the tasks that it may delay on some machines, and how many may delay this one.
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
        """Add an edge from each of `others` that exists on some machines only, and that programs must not rely on."""
        for other in others:
            other.holds.append(self)
            self.held += 1
        return self


def join(tasks: Iterable[Task]) -> Task:
    """Return an empty task that follows all of these; tasks that follow it need one edge instead of many."""
    return Task().follow(tasks)


# Gates ------------------------------------------------------------------------------------------------------------
class Gate:
    """A condition that blocks tasks while it is closed. Blocked tasks are parked until the gate changes."""

    def __init__(self) -> None:
        self.parked: list[Task] = []

    def open(self, task: Task) -> bool:
        raise AssertionError(type(self).__name__)

    def admits(self, task: Task) -> bool:
        """Whether the task may run now; if not, it is parked."""
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
    """A flag that signals set. It is open to tasks whose epoch it has reached."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.signals: list[Task] = []  # of this run, in order

    def open(self, task: Task) -> bool:
        return bool(self.signals) and self.signals[-1].epoch >= task.epoch

    def set(self, signal: Task) -> None:
        self.signals.append(signal)

    def reset(self) -> None:
        super().reset()
        self.signals = []


class SMGate(Gate):
    """The SMs of a rank. While a waiting kernel holds them, no other task starts, except the copies that overlap it.

    The kernel leaves one SM free for tasks that need only one and were issued before it in its call. A task that may
    wait for other ranks can take that SM too, and keeps it until it gets all others.
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


# Orders -----------------------------------------------------------------------------------------------------------
Priority = Callable[[Task], float]  # of the tasks that may run, the one with the lowest value goes first
LAST = 2.0  # after every random number


def program_order(task: Task) -> float:
    """Return a task's place in the order of issue; at equal places, lower ranks come first."""
    return task.step + task.rank * 1e-6


def check_seed(seed: object) -> int:
    """Return the seed; raise HostIRError if it is not an integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise error(f"the seed is {described(seed)}", user_span(), expected="an integer")
    return seed


def random_order(seed: int, tasks: Sequence[Task]) -> Priority:
    """Return a random order that is likely to expose missing edges; every legal order has a chance.

    Lanes have strict random priorities, which never change, or seldom, often, or at every step, depending on the seed.
    If they do not change, the lane with the lowest priority runs only when no other can. That makes orders likely that
    fair choices hardly ever give, such as a whole stream running before the first collective (the idea of
    probabilistic concurrency testing: Burckhardt et al., ASPLOS 2010).

    Every other seed also delays one task, and with it all that follow, until nothing else can run: whatever is not
    ordered after that task overtakes it. Consecutive seeds delay each of `tasks` in turn.
    """
    random = Random(seed)
    change = random.choice((0.0, 0.1, 0.5, 1.0))
    draw = random.random
    late = tasks[seed // 2 % len(tasks)] if tasks and seed % 2 == 0 else None
    priority: dict[tuple[int, str], float] = {}

    def order(task: Task) -> float:
        if task is late:
            return LAST
        lane = (task.rank, task.lane)
        if lane not in priority or draw() < change:
            priority[lane] = draw()
        return priority[lane]

    return order


# Running ----------------------------------------------------------------------------------------------------------
def execute(
    tasks: Sequence[Task],
    order: Priority,
    before: Callable[[Task], None],
    failed: Callable[[Task, Exception], Exception],
    held: bool = True,
) -> list[Task]:
    """Run tasks until none may run any more, and return them in the order in which they ran; the others are deadlocked.

    `before` is called with each task before it runs, and raises if it must not run; `failed` makes the exception to
    raise from one of the task itself. With `held`, tasks also wait for those that may delay them on some machines.
    """
    for task in tasks:
        task.blockers = task.needs + task.held if held else task.needs
    ready = [task for task in tasks if not task.blockers]
    heap: list[tuple[float, int, Task]] = []
    ran: list[Task] = []
    count = 0  # breaks ties
    while True:
        while ready:
            task = ready.pop()
            if task.run is None:
                before(task)
                ran.append(task)
                _unblock(task, held, ready)
                continue
            count += 1
            heappush(heap, (order(task), count, task))
        if not heap:
            return ran
        task = heappop(heap)[-1]
        if task.gate is not None and not task.gate.admits(task):
            continue
        before(task)
        assert task.run is not None
        begun = perf_counter() if task.timed else 0.0
        try:
            task.run()
        except Exception as problem:
            raise failed(task, problem) from problem
        if task.timed:
            task.seconds = perf_counter() - begun
        ran.append(task)
        _unblock(task, held, ready)
        if task.changes is not None:
            ready += task.changes.released()


def _unblock(task: Task, held: bool, ready: list[Task]) -> None:
    """Add the followers that have no other task left to wait for."""
    for follower in task.followers:
        follower.blockers -= 1
        if not follower.blockers:
            ready.append(follower)
    if not held:
        return
    for follower in task.holds:
        follower.blockers -= 1
        if not follower.blockers:
            ready.append(follower)


def times(ran: Iterable[Task]) -> dict[Task, tuple[float, float]]:
    """Return when each task would start and end, in seconds, if every lane had a processor of its own."""
    starts: dict[Task, float] = {}
    at: dict[Task, tuple[float, float]] = {}
    for task in ran:
        start = starts.get(task, 0.0)
        if task.queued_behind is not None:
            start = max(start, at.get(task.queued_behind, (0.0, 0.0))[1])
        end = start + (task.seconds if task.timed else 0.0)
        at[task] = start, end
        for follower in task.followers:
            starts[follower] = max(starts.get(follower, 0.0), end)
    return at


# Race detection -------------------------------------------------------------------------------------------------------
# Finds unordered accesses while simulated ranks run.
#
# The past of a task is the set of tasks that happen before it: the tasks that it follows, the signal that it waited
# for, and their pasts. It is kept as the bits of an integer: a vector clock with a component for each task. Tasks that
# merely ran earlier, or that it waited for because of SMs, are not in it. So a race is found under any seed.

Origin = Callable[[Task], tuple[Span | None, str]]


class TaskAccess:
    """A view of a storage that a task reads or writes, and the elements in it."""

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
        """Return the marks of its elements, from the marks of all elements of the storage."""
        return marks.as_strided(*self.place)

    def blank(self) -> torch.Tensor:
        """Return a mark for each element of the storage, none set."""
        return torch.zeros(self.extent, dtype=torch.bool, device="cpu")

    def meets(self, other: TaskAccess) -> bool:
        """Whether both touch a common element of one storage."""
        if self.range.stop <= other.range.start or other.range.stop <= self.range.start:
            return False
        marks = self.blank()
        self.of(marks).fill_(True)
        return bool(other.of(marks).any())

    def stands_for(self, other: TaskAccess) -> bool:
        """Whether all later accesses that race with the earlier `other` race with this one, which then replaces it."""
        return self.place == other.place and (self.writes or not other.writes)


class Watch:
    """The race detector of one run. `where` names a task's statement, `memory` the buffers."""

    def __init__(self, tasks: Sequence[Task], memory: SimulatedMemory, where: Origin) -> None:
        self.tasks = tasks
        self.memory = memory
        self.where = where
        self.number = {task: i for i, task in enumerate(tasks)}
        self.past: dict[int, int] = {}  # of tasks still to run, as far as it is known
        self.sent: dict[int, int] = {}  # of signals: their past and themselves
        self.accesses: dict[int, list[TaskAccess]] = {}  # by storage: all, but for those that a later one stands for
        self.written: dict[int, torch.Tensor] = {}  # by storage: a mark for each element
        self.unwritten: HostIRError | None = None

    def runs(self, task: Task) -> None:
        """Record that a task runs. Raises HostIRError if it races with one that ran before."""
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
        """Check the completed run. Raises HostIRError if something was read that nobody had written."""
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
        elif self.unwritten is None and not access.of(marks).all():  # a race with it may still come, and says more
            span, where = self._said(access)
            self.unwritten = error(
                f"{where} reads what nobody wrote: {self._buffer(access.storage)}",
                span,
                expected="a write of all it reads, ordered before it",
            )

    def _signal(self, task: Task, known: int, earlier: Sequence[Task]) -> None:
        """Record a signal; signals of one flag are ordered one after another."""
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
        (span, one), (other_span, other) = self._said(first), self._said(second)
        return error(
            f"race: {one} and {other} touch common elements of {self._buffer(first.storage)}, and nothing orders them",
            other_span,
            expected="one before the other: by a stream, a synchronize, a wait, a signal or a barrier",
            notes=((span, f"{one} {first.does}"), (other_span, f"{other} {second.does}")),
        )

    def _said(self, access: TaskAccess) -> tuple[Span | None, str]:
        task = self.tasks[access.task]
        span, where = self.where(task)
        if task.statement is None:
            return span, f"{where}, {task.stream},"
        stream = "the caller's stream" if task.stream == "caller" else task.stream
        return span, f"{where} on {stream}"

    def _buffer(self, storage: int) -> str:
        name, rank = self.memory.owners[storage]
        return f"%{name} of rank {rank}"
