"""Programs of two gloo ranks with a call that one of them leaves midway; the arguments name one."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostir as hi
from hostir.ir.source import error
from hostir.job.calls import SLOTS
from hostir.job.session import joined
from hostir.machines.gloo.machine import GlooPlan
from hostir.plan.operations import CALLER
from tests.job.misaligned_calls import GATHER, PUT, RANK, RELU, gathered, rows

PROMPT = 6.0  # seconds; HOSTIR_TIMEOUT is 20


def said(call: Callable[[], object]) -> str:
    """Return the message that a call raises long before the timeout."""
    begun = time.monotonic()
    with pytest.raises(hi.HostIRError) as raised:
        call()
    assert time.monotonic() - begun < PROMPT, raised.value
    return str(raised.value)


def check(executor: hi.Executor, m: int = 8) -> None:
    (y,) = executor(rows(m))
    assert torch.equal(y, gathered(m)), y


def called(text: str) -> hi.Executor:
    """Return an executor that all ranks have called once; no rank is in a call."""
    executor = hi.Executor(hi.parse(text), check=False)  # without a proof, ranks meet for each new size
    check(executor)
    joined().exchange("no rank is in a call", "")
    return executor


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def interrupted(executor: hi.Executor) -> None:
    with pytest.raises(KeyboardInterrupt):
        executor(rows(8))


def plan_of(executor: hi.Executor) -> GlooPlan:
    assert executor.latest is not None
    assert isinstance(executor.latest.plan, GlooPlan)
    return executor.latest.plan


def insert(executor: hi.Executor, step: Callable[[], object]) -> None:
    """Insert a step at the beginning of the caller's lane."""
    lane = plan_of(executor).lanes[CALLER]
    lane.steps.insert(0, step)
    lane.ops.insert(0, lane.ops[0])
    lane.waits.insert(0, lane.waits[0])


INTERRUPTED = "rank 1 was interrupted in @{} by KeyboardInterrupt"


def interrupted_where_it_waits_for_its_threads(name: str, text: str) -> None:
    """Interrupt rank 1 while it waits for its threads. Their work cannot be undone, so no rank makes another call."""
    executor = called(text)
    if RANK == 1:
        vars(plan_of(executor))["execute"] = interrupt
        interrupted(executor)
    else:
        assert INTERRUPTED.format(name) in said(lambda: executor(rows(8)))
    assert INTERRUPTED.format(name) in said(lambda: executor(rows(8)))


def interrupted_in_a_step(name: str, text: str) -> None:
    """Interrupt rank 1 in a step of a call. The calls of all ranks go on."""
    executor = called(text)
    if RANK == 1:
        insert(executor, interrupt)
        interrupted(executor)
    else:
        assert INTERRUPTED.format(name) in said(lambda: executor(rows(8)))
    check(executor)


def interrupted_where_ranks_meet(name: str, text: str) -> None:
    """Interrupt rank 1 in calls with new sizes, after it has posted its call. The calls of all ranks go on."""
    executor = called(text)
    for m, call in ((12, executor), (16, executor.places)):
        if RANK == 1:
            vars(joined().meetings)["meet"] = interrupt
            with pytest.raises(KeyboardInterrupt):
                call(rows(m))
            del vars(joined().meetings)["meet"]
        else:
            assert INTERRUPTED.format(name) in said(lambda: call(rows(m)))  # noqa: B023
        check(executor, m)


def interrupted_once_ranks_have_met(name: str, text: str) -> None:
    """Interrupt rank 1 in the first call of an executor, after the ranks have met. The calls of all ranks go on."""
    called(text)
    executor, meetings = hi.Executor(hi.parse(text)), joined().meetings
    meet = meetings.meet
    if RANK == 1:

        def meet_and_stop(*arguments: Any) -> None:
            meet(*arguments)
            interrupt()

        vars(meetings)["meet"] = meet_and_stop
        interrupted(executor)
        del vars(meetings)["meet"]
    else:
        assert INTERRUPTED.format(name) in said(lambda: executor(rows(8)))
    check(executor)


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


def a_rank_that_is_far_ahead_hears_of_a_call_that_ended_midway(name: str, text: str) -> None:
    """Rank 1 fails at the end of a call, while rank 0 is so many calls ahead that it waits for rank 1."""
    alone, executor = hi.Executor(hi.parse(RELU)), called(text)
    alone(rows(8))

    def fail_later() -> None:
        store = executor.calls.store
        while int(store.get("turn/0")) < 2:
            time.sleep(0.01)
        fail()

    def many_calls() -> None:
        for _ in range(SLOTS):
            alone(rows(8))

    if RANK == 1:
        lane = plan_of(executor).lanes[CALLER]
        lane.add(lane.ops[-1], fail_later)
        assert "out of memory" in said(lambda: executor(rows(8)))
    else:
        check(executor)
        assert "a call ended midway on another rank" in said(many_calls)
    check(executor)


def plans_that_fail(name: str, text: str, why: str) -> None:
    """Rank 1 fails to make a plan for new sizes, and rank 0 makes the call. The calls of all ranks go on."""
    executor = called(text)
    machine = executor._machine
    for m in (12, 16):
        executor._compare = executor._agreement.compare = m == 12  # else as on CUDA
        if RANK == 1:
            vars(machine)["plan"] = refuse if why == "HostIRError" else fail
            with pytest.raises(hi.HostIRError if why == "HostIRError" else RuntimeError, match="out of memory"):
                executor(rows(m))
            del vars(machine)["plan"]
        else:
            assert "out of memory" in said(lambda: executor(rows(m)))  # noqa: B023
        check(executor, m)


def refuse(*_: object, **__: object) -> None:
    raise error("out of memory")


def renewals_that_fail(name: str, text: str, where: str, why: str) -> None:
    """Rank 1 fails in its renewal. No rank makes another call, and each says why."""
    executor = called(text)
    if RANK == 1:
        insert(executor, fail)
    assert "RuntimeError: out of memory" in said(lambda: executor(rows(8)))
    joined().exchange("all ranks have raised", "")
    expected = f"rank 1 did not begin anew after a call that ended midway: {why}"
    if RANK == 1:
        failure, at = RENEWALS[where]
        vars(at(executor))[where] = failure
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            executor(rows(8))
        del vars(at(executor))[where]
    for _ in range(2):
        assert expected in said(lambda: executor(rows(8)))


def renewals_leave_nothing_behind(name: str, text: str) -> None:
    executor = called(text)

    def after_renewals(count: int) -> tuple[int, int]:
        for _ in range(count):
            if RANK == 1:
                insert(executor, fail)
            assert "out of memory" in said(lambda: executor(rows(8)))
            check(executor)
            joined().exchange("no rank is in a call", "")
        gc.collect()  # errors and the frames that they refer to are cycles
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    files, threads = after_renewals(2)
    more_files, more_threads = after_renewals(8)
    assert more_files < files + 8, (files, more_files)  # less than one for each renewal
    assert more_threads < threads + 8, (threads, more_threads)


RENEWALS: dict[str, tuple[Callable[..., None], Callable[[hi.Executor], object]]] = {
    "exchange": (interrupt, lambda executor: joined()),
    "prepare": (fail, lambda executor: joined().groups.memory),
    "_renew": (interrupt, lambda executor: executor),
}
PROGRAMS = {"ag": GATHER, "put": PUT}

if __name__ == "__main__":
    case, name, *arguments = sys.argv[1:]
    globals()[case](name, PROGRAMS[name], *arguments)
    print(f"PASS {case} {RANK}", flush=True)
