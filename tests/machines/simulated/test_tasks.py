"""The orders that the scheduler of simulated ranks may choose, and those that it chooses."""

from __future__ import annotations

from collections.abc import Sequence

from hostir.machines.simulated.scheduler import execute, program_order, random_order
from hostir.machines.simulated.tasks import FlagGate, SMGate, Task

SEEDS = range(400)


def chains(lengths: Sequence[int]) -> list[Task]:
    """Return lanes with these numbers of tasks; the rank of a task is its lane."""
    tasks: list[Task] = []
    for rank, length in enumerate(lengths):
        lane: list[Task] = []
        for order in range(length):
            lane.append(Task(rank, "lane", order, order, run=lambda: None).follow(lane[-1:]))
        tasks += lane
    return tasks


def ran(tasks: Sequence[Task], seed: int) -> list[Task]:
    order = random_order(seed, tasks) if seed else program_order
    return execute(tasks, order, lambda task: None, lambda task, problem: problem)


def test_every_legal_order_has_a_chance() -> None:
    tasks = chains([2, 2])
    orders = {tuple(task.rank for task in ran(tasks, seed)) for seed in SEEDS}
    assert len(orders) == 6, "as many as there are ways to merge two lanes of two"


def test_a_lane_may_starve_until_it_alone_can_run() -> None:
    tasks = chains([20, 20])
    orders = {tuple(task.rank for task in ran(tasks, seed)) for seed in SEEDS}
    assert {(0,) * 20 + (1,) * 20, (1,) * 20 + (0,) * 20} <= orders


def test_some_seed_delays_each_task_until_no_other_can_run() -> None:
    tasks = chains([5, 5, 5])
    behind = {task: 5 - task.order for task in tasks}  # how many of its lane are left when it waits
    for seed in range(2, 2 + 2 * len(tasks), 2):
        order = ran(tasks, seed)
        late = tasks[seed // 2 % len(tasks)]
        assert order.index(late) == len(tasks) - behind[late]


def test_program_order_is_the_order_of_issue_with_ranks_in_step() -> None:
    assert [task.rank for task in ran(chains([3, 3]), 0)] == [0, 1, 0, 1, 0, 1]


def test_a_gate_parks_tasks_and_forgets_them_between_runs() -> None:
    flag, sms = FlagGate(), SMGate()
    wait = Task(0, "a", 0, run=lambda: None, gate=flag, epoch=(0, 2))
    signals = [Task(0, "b", n, run=lambda: None, changes=flag, epoch=(0, n)) for n in (1, 2)]
    for signal in signals:
        signal.run = lambda signal=signal: flag.set(signal)
    signals[1].follow(signals[:1])
    kernel = Task(0, "c", 0, run=lambda: None, gate=sms)
    for seed in range(20):
        flag.reset()
        sms.reset()
        order = ran([wait, *signals, kernel], seed)
        assert order.index(wait) > order.index(signals[1])
    flag.reset()
    sms.take(wait)
    assert ran([wait, kernel], 1) == [], "no signal, and no SMs"
    assert flag.parked == [wait]
    assert sms.parked == [kernel]
