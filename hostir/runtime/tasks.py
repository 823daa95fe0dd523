"""Tasks with edges between them, and a seeded scheduler that may run any task whose predecessors have run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from random import Random
from time import perf_counter

from hostir.ir.op import Statement


@dataclass(eq=False, slots=True)
class Task:
    """Something that one rank does at one moment: `run`, once every task it follows has run.

    Fields:
        lane: the stream, or one of its own for what is on none.
        order: how much its rank issued before it.
        statement, rounds: what it comes from, None where the program's text has no such statement.
        timed: whether a real machine does it, in time that a trace should show.
        memory: the storages it touches.
        start, end: when it would run, in seconds, if every lane had a processor of its own.
    """

    rank: int = 0
    lane: str = ""
    order: int = 0
    run: Callable[[], object] | None = None
    statement: Statement | None = None
    rounds: tuple[int, ...] = ()
    timed: bool = False
    memory: Sequence[int] = ()
    followers: list[Task] = field(default_factory=list, repr=False)
    blockers: int = 0
    start: float = 0.0
    end: float = 0.0

    def follow(self, others: Iterable[Task]) -> Task:
        """Adds an edge from each of `others`; returns the task."""
        for other in others:
            other.followers.append(self)
            self.blockers += 1
        return self


def join(tasks: Iterable[Task]) -> Task:
    """A moment after all of these, which takes no time: it saves an edge from each of them to each that follows."""
    return Task().follow(tasks)


Order = Callable[[Task], float]  # which task of those that may run goes first: the one with the least number


def program_order(task: Task) -> float:
    """As issued, rank after rank for equal places."""
    return task.order + task.rank * 1e-6


def random_order(seed: int) -> Order:
    """Strict random priorities of lanes, which change rarely, sometimes or often, as the seed has it.

    Where they do not change, a lane starves until it alone can run. That makes orders likely that fair choices hardly
    ever give, such as a whole stream running before the first collective (the idea of probabilistic concurrency
    testing: Burckhardt et al., ASPLOS 2010).
    """
    random = Random(seed)
    change = random.choice((0.0, 0.1, 0.5))
    priority: dict[tuple[int, str], float] = {}

    def order(task: Task) -> float:
        lane = (task.rank, task.lane)
        if lane not in priority or random.random() < change:
            priority[lane] = random.random()
        return priority[lane]

    return order


def execute(
    tasks: Iterable[Task],
    order: Order,
    watch: Callable[[Task], None],
    failed: Callable[[Task, Exception], Exception],
) -> None:
    """Runs tasks until none may run any more; those that are left wait for each other.

    `watch` sees each task before it runs, and raises where it must not; an exception of the task itself is raised as
    what `failed` makes of it.
    """
    heap = [(order(task), i, task) for i, task in enumerate(tasks) if not task.blockers]
    heapify(heap)
    count = len(heap)  # tells equals apart
    while heap:
        task = heappop(heap)[-1]
        watch(task)
        begun = perf_counter()
        if task.run is not None:
            try:
                task.run()
            except Exception as problem:
                raise failed(task, problem) from problem
        task.end = task.start + (perf_counter() - begun if task.timed else 0.0)
        for follower in task.followers:
            follower.start = max(follower.start, task.end)
            follower.blockers -= 1
            if not follower.blockers:
                count += 1
                heappush(heap, (-1.0 if follower.run is None else order(follower), count, follower))
