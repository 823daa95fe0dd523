"""Schedule tasks with edges between them by a seed, and find accesses that no edges order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import prod
from random import Random
from time import perf_counter

import torch

from hostir.described import described
from hostir.ir.op import Statement
from hostir.ir.source import HostIRError, Span, error, user_span

# Memory ---------------------------------------------------------------------------------------------------------------
# The memory of simulated ranks: NaN until it is written, and out of bounds once it is freed.

NAN = float("nan")


class SimulatedMemory:
    """The buffers of all ranks on some device, each a storage of its own."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.owners: dict[int, tuple[str, int]] = {}  # of each storage: its buffer's name, and the rank
        self.freed: dict[int, Span | None] = {}  # by storage: where
        self.buffers: list[torch.Tensor] = []

    def new(self, name: str, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a dense buffer of NaN, or of 0 for dtypes without NaN."""
        memory = torch.zeros(max(prod(shape), 1), dtype=dtype, device=self.device)  # one at least, to have an address
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
        """Mark memory as freed: it may not be touched from here on."""
        self.freed[storage] = span

    def reset(self) -> None:
        """Restore the state before the first run."""
        self.freed.clear()
        for buffer in self.buffers:
            buffer.fill_(NAN)


def spoil(x: torch.Tensor) -> None:
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
        lane: the queue that it is part of: its stream, or one of its own if it is on none.
        order, step: how many tasks, and how many statements, its rank issued before it.
        statement, rounds, call: its origin; no statement if the program's text has none.
        stream: the label of the stream that was current, or a description of where the caller is.
        run: None for a task that only orders others.
        reads, writes: the views that it touches, of whatever rank; `memory`: their storages.
        undefines: views that it writes, and that nobody may read before something else writes them.
        gate: the gate that must be open, besides the tasks that it follows.
        turns: the gate that may open or close when it runs.
        small: whether it needs one SM only: a kernel that was issued later in its call leaves it one.
        lasts: whether it may hold SMs until other ranks do something.
        epoch: the epoch that it waits for at its gate, or that it sets the flag `turns` to.
        team: of a communication.
        since: the task at which the bar in a trace begins that ends with this task; None: nothing is drawn.
        timed: whether a real machine takes time for it.
        alone: the task whose end delays it on real wires, though nothing orders the two.
        needs, blockers: how many tasks it follows, and how many of them have not run.
        holds, held: the tasks that it may hold up on some machines, and how many may hold up this one.
        seconds: its duration.
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
    turns: Gate | None = None
    small: bool = False
    lasts: bool = False
    epoch: Epoch = (0, 0)
    team: tuple[int, ...] = ()
    since: Task | None = None
    timed: bool = False
    alone: Task | None = None
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
    """Return a task that takes no time after all of these: it saves edges from each of them to each that follows."""
    return Task().follow(tasks)


# Gates ------------------------------------------------------------------------------------------------------------
class Gate:
    """A condition that blocks tasks while it is closed. A task that is too early is parked until the gate changes."""

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
    """A flag that signals set. Waiting tasks pass while it is at their epoch or above."""

    def __init__(self) -> None:
        super().__init__()
        self.signals: list[Task] = []  # of this run, as they came

    def open(self, task: Task) -> bool:
        return bool(self.signals) and self.signals[-1].epoch >= task.epoch

    def set(self, signal: Task) -> None:
        self.signals.append(signal)

    def reset(self) -> None:
        super().reset()
        self.signals = []


class Processors(Gate):
    """The SMs of a rank: while a kernel holds them no other begins, except copies `beside` it.

    It leaves one SM to small tasks that were issued before it in its call. A task that may wait for other ranks can
    take that SM as well, and then cannot go on before it has the others too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holder: Task | None = None
        self.beside: Sequence[Task] = ()

    def open(self, task: Task) -> bool:
        holder = self.holder
        if holder is None or any(task is copy for copy in self.beside):
            return True
        taken = any(other.lasts for other in self.parked)
        return task.small and task.call == holder.call and task.order < holder.order and not taken

    def take(self, holder: Task | None, beside: Sequence[Task] = ()) -> None:
        self.holder, self.beside = holder, beside

    def reset(self) -> None:
        super().reset()
        self.holder = None


# Orders -----------------------------------------------------------------------------------------------------------
Order = Callable[[Task], float]  # which task of those that may run goes first: the one with the least number
LAST = 2.0  # behind every random number


def program_order(task: Task) -> float:
    """Return the order of issue, rank after rank for equal places."""
    return task.step + task.rank * 1e-6


def check_seed(seed: object) -> int:
    """Return the seed; raise HostIRError if it is none."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise error(f"the seed is {described(seed)}", user_span(), expected="an integer")
    return seed


def random_order(seed: int, tasks: Sequence[Task]) -> Order:
    """Return a random order that is likely to expose missing edges; every legal order has a chance.

    Lanes have strict random priorities, which never change, or seldom, or often, or at every step, as the seed has it.
    Where they do not change, a lane starves until it alone can run. That makes orders likely that fair choices hardly
    ever give, such as a whole stream running before the first collective (the idea of probabilistic concurrency
    testing: Burckhardt et al., ASPLOS 2010).

    Every other seed also holds one task back, and with it all that follows, until nothing else can run: whatever is
    not ordered behind that task overtakes it. Consecutive seeds hold back one after another of `tasks`.
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
    order: Order,
    before: Callable[[Task], None],
    failed: Callable[[Task, Exception], Exception],
    held: bool = True,
) -> list[Task]:
    """Run tasks until none may run any more, and return them as they ran; those left wait for each other.

    `before` sees each task before it runs, and raises if it must not run; an exception of the task itself is raised as
    what `failed` makes of it. Tasks wait for those that may hold them up only if `held`.
    """
    for task in tasks:
        task.blockers = task.needs + (task.held if held else 0)
    ready = [task for task in tasks if not task.blockers]
    heap: list[tuple[float, int, Task]] = []
    ran: list[Task] = []
    count = 0  # tells equals apart
    while True:
        while ready:
            task = ready.pop()
            if task.run is None:
                before(task)
                ran.append(task)
                ready += _unblocked(task, held)
                continue
            count += 1
            heappush(heap, (order(task), count, task))
        if not heap:
            return ran
        task = heappop(heap)[-1]
        if task.gate is not None and not task.gate.admits(task):
            continue
        before(task)
        _run(task, failed)
        ran.append(task)
        ready = _unblocked(task, held)
        if task.turns is not None:
            ready += task.turns.released()


def _run(task: Task, failed: Callable[[Task, Exception], Exception]) -> None:
    assert task.run is not None
    begun = perf_counter()
    try:
        task.run()
    except Exception as problem:
        raise failed(task, problem) from problem
    task.seconds = perf_counter() - begun


def _unblocked(task: Task, held: bool) -> list[Task]:
    """Return the followers that waited for this task alone."""
    free = []
    for follower in (*task.followers, *task.holds) if held else task.followers:
        follower.blockers -= 1
        if not follower.blockers:
            free.append(follower)
    return free


def times(ran: Iterable[Task]) -> dict[Task, tuple[float, float]]:
    """Return when each task would start and end, in seconds, if every lane had a processor of its own."""
    starts: dict[Task, float] = {}
    at: dict[Task, tuple[float, float]] = {}
    for task in ran:
        start = starts.get(task, 0.0)
        if task.alone is not None:
            start = max(start, at.get(task.alone, (0.0, 0.0))[1])
        end = start + (task.seconds if task.timed else 0.0)
        at[task] = start, end
        for follower in task.followers:
            starts[follower] = max(starts.get(follower, 0.0), end)
    return at


# Race detection -------------------------------------------------------------------------------------------------------
# Finds, while simulated ranks run, accesses that nothing orders.
#
# Each task's past is what comes before it: the pasts of the tasks that it follows, and of the signal that it waited
# for. It is a set of tasks, kept as the bits of an integer: a vector clock with a component for each task. What merely
# ran earlier, or waited for SMs, is in no past. So a race is found in whatever order it runs, and under any seed.

Where = Callable[[Task], tuple[Span | None, str]]


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

    def __init__(self, tasks: Sequence[Task], memory: SimulatedMemory, where: Where) -> None:
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
        if isinstance(task.turns, FlagGate):
            self._signal(task, known, task.turns.signals)
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
