"""Calls from several threads of two gloo ranks; the argument names a case.

Each thread passes different values, so that a result shows if a call was matched with another thread's call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist

import hostir as hi
from hostir.job.calls import SHOWING
from tests.job.misaligned_calls import GATHER, PUT, RANK, gathered, rows, uncompared


def call(executor: hi.Executor, value: int) -> None:
    """Make a call, and check that the peer's call has the same value."""
    (y,) = executor(rows(8) + 10 * value)
    assert torch.equal(y, gathered(8) + 10 * value), y


class Caller:
    """A thread that makes a call on request."""

    def __init__(self, value: int, name: str | None = None) -> None:
        self.value = value
        self.asked, self.answers = SimpleQueue[hi.Executor | None](), SimpleQueue[BaseException | None]()
        self.thread = threading.Thread(target=self.answer, name=name, daemon=True)
        self.thread.start()

    def answer(self) -> None:
        while (executor := self.asked.get()) is not None:
            try:
                call(executor, self.value)
                self.answers.put(None)
            except BaseException as failure:
                self.answers.put(failure)

    def __call__(self, executor: hi.Executor) -> None:
        self.asked.put(executor)
        if (failure := self.answers.get(timeout=60)) is not None:
            raise failure

    def end(self) -> None:
        self.asked.put(None)
        self.thread.join()


def known_executor() -> hi.Executor:
    """An executor that the main threads of all ranks have called."""
    executor = hi.Executor(hi.parse(GATHER))
    call(executor, 0)
    assert executor.session is not None
    executor.session.exchange("known", "")
    return executor


def said(function: Callable[[], object]) -> str:
    """Return the message that a call raises, and print it."""
    with pytest.raises(hi.HostIRError) as raised:
        function()
    message = raised.value.diagnostics[0].message
    sys.stdout.write(f"SAID {message}\n")  # in one write: other processes print, too
    sys.stdout.flush()
    return message


def at_once(executors: list[hi.Executor], compared: bool = True) -> None:
    """Make overlapping calls on two threads: each thread of each rank gets an error; results before it are right."""
    refusals: list[hi.HostIRError] = []
    problems: list[BaseException] = []

    def calls(value: int) -> None:
        try:
            while True:
                try:
                    call(executors[value], value)
                except AssertionError:
                    if compared:
                        raise
        except hi.HostIRError as refusal:
            refusals.append(refusal)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=calls, args=[value]) for value in range(len(executors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not problems, problems
    assert len(refusals) == len(threads)
    for refusal in refusals:
        sys.stdout.write(f"SAID {refusal.diagnostics[0].message}\n")
        sys.stdout.flush()
    said(lambda: call(executors[0], 9))  # a later call from another thread is refused too


def one_executor() -> None:
    at_once([hi.Executor(hi.parse(GATHER))] * 2)


def one_known_executor() -> None:
    at_once([known_executor()] * 2)


def equal_executors() -> None:
    at_once([hi.Executor(hi.parse(GATHER)) for _ in range(2)])


def executors_of_two_programs() -> None:
    at_once([hi.Executor(hi.parse(GATHER)), hi.Executor(hi.parse(PUT))])


def uncompared_calls() -> None:
    """As on CUDA, calls may be matched with another thread's calls until calls of one rank overlap."""
    executor = uncompared()
    call(executor, 0)
    assert executor.session is not None
    executor.session.exchange("known", "")
    at_once([executor] * 2, compared=False)


def new_threads_in_different_orders() -> None:
    """The two threads never overlap on a rank. No call is matched with a call of the other thread."""
    executor = known_executor()
    callers = [Caller(1), Caller(2)]
    said(lambda: callers[RANK](executor))
    said(lambda: callers[1 - RANK](executor))


def known_threads_in_different_orders() -> None:
    executor = known_executor()
    callers = [Caller(1), Caller(2)]
    for caller in callers:
        caller(executor)
    said(lambda: callers[RANK](executor))


def one_thread_ends_before_the_other_starts() -> None:
    """Each thread makes one call. Rank 1 begins with the second thread, which rank 0 has not started yet.

    The results of the first call are wrong: nothing shows the difference yet. The next call raises on all ranks.
    """
    executor = known_executor()
    if RANK == 0:
        while not executor.calls.store.check(["call/1"]):
            time.sleep(0.01)
        first = Caller(1)
        with contextlib.suppress(AssertionError):
            first(executor)
        first.end()
        second = Caller(2)
        said(lambda: second(executor))
    else:
        callers = [Caller(1), Caller(2)]
        with contextlib.suppress(AssertionError):
            callers[1](executor)
        said(lambda: callers[0](executor))


def a_thread_or_the_main_thread() -> None:
    executor, caller = known_executor(), Caller(1)
    said((lambda: call(executor, 2)) if RANK == 0 else (lambda: caller(executor)))


def turns() -> None:
    """Threads call one after another, in the same order on each rank. Rank 0 has further threads."""
    executor = known_executor()
    if RANK == 0:
        others = [threading.Thread(target=time.sleep, args=[0.01]) for _ in range(3)]
        for other in others:
            other.start()
    for value in (1, 2):  # a thread that ends, then the main thread
        caller = Caller(value)
        for _ in range(3):
            caller(executor)
        caller.end()
        call(executor, 3)
    callers = [Caller(4), Caller(5), Caller(6, name=f"of rank {RANK}")]
    for turn in (0, 1, 2, 0, 0, 2, 1):
        callers[turn](executor)
    with ThreadPoolExecutor(1) as pool:
        for value in (7, 8, 9):
            pool.submit(call, executor, value).result()
    call(executor, 1)
    for caller in callers:
        caller.end()


def a_group_for_each_thread() -> None:
    """Each thread has its own group. Ranks start the threads in opposite orders; nothing orders their calls."""
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    problems: list[BaseException] = []

    def calls(number: int) -> None:
        try:
            executor = hi.Executor(hi.parse(GATHER), group=groups[number])
            for _ in range(200):
                call(executor, number)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=calls, args=[number]) for number in ((0, 1) if RANK == 0 else (1, 0))]
    for thread in threads:
        thread.start()
        time.sleep(SHOWING / 4)
    for thread in threads:
        thread.join(60)
    assert not problems, problems


if __name__ == "__main__":
    globals()[sys.argv[1]]()
