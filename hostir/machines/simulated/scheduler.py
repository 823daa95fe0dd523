"""The scheduler of simulated ranks: the orders of tasks, the loop that runs tasks, and the times of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from random import Random
from time import perf_counter

from hostir.ir.source import described, error, user_span
from hostir.machines.simulated.tasks import FlagGate, Task

Priority = Callable[[Task], float]  # among the tasks that may run, the task with the lowest value runs first
LAST = 2.0  # later than every random number


def program_order(task: Task) -> float:
    """Return a task's priority in program order: tasks run in issue order, and lower ranks go first."""
    return task.step + task.rank * 1e-6


def check_seed(seed: object) -> int:
    """Return the seed; raise HostIRError if it is not an integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise error(f"the seed is {described(seed)}", user_span(), expected="an integer")
    return seed


def random_order(seed: int, tasks: Sequence[Task]) -> Priority:
    """Return random priorities that are likely to expose missing edges. Every legal order is possible.

    Each lane has a random priority. Depending on the seed, priorities change never, seldom, often, or at every step. If
    priorities never change, the lane with the lowest priority runs only when no other lane can run. For example, all
    tasks of one stream may run before the first collective. If the scheduler chose each next task at random, such
    orders would be very rare. (This is the idea of probabilistic concurrency testing: Burckhardt et al., ASPLOS 2010.)

    An even seed also delays one of `tasks` until nothing else can run. The task's followers wait with it, and all other
    tasks overtake it. Consecutive even seeds delay consecutive tasks.
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


def execute(
    tasks: Sequence[Task],
    order: Priority,
    before: Callable[[Task], None],
    failed: Callable[[Task, Exception], Exception],
    held: bool = True,
) -> list[Task]:
    """Run tasks until no task can run, and return the tasks that ran, in order. All other tasks are deadlocked.

    Args:
        tasks: all tasks of all ranks.
        order: the priority of a task among the tasks that may run.
        before: a function that is called with each task before the task runs. It raises an exception if the task must
            not run.
        failed: a function that is called if a task raises an exception. It returns the exception to raise instead.
        held: True if tasks also wait for holding edges. A holding edge is a delay that only some machines have.
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
    """Add the followers of `task`, which has run, to `ready` if they wait for no other task.

    If `held` is True, followers also wait for holding edges.
    """
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
    """Return the start and the end of each task in seconds, as if every lane had a separate processor.

    `ran` are the tasks in the order in which they ran.
    """
    starts: dict[Task, float] = {}
    at: dict[Task, tuple[float, float]] = {}
    for task in ran:
        start = starts.get(task, 0.0)
        if task.queued_behind is not None:
            start = max(start, at.get(task.queued_behind, (0.0, 0.0))[1])
        if isinstance(task.gate, FlagGate):
            start = max(start, at[task.gate.opened_by(task)][1])
        end = start + (task.seconds if task.timed else 0.0)
        at[task] = start, end
        for follower in task.followers:
            starts[follower] = max(starts.get(follower, 0.0), end)
    return at
