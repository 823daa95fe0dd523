"""Calls from several threads of two gloo ranks; the arguments name a case.

Each thread has values of its own: with a peer's call of another thread it would get wrong results.
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
    """Make a call with values of its own; raise if a peer's are another call's."""
    (y,) = executor(rows(8) + 10 * value)
    assert torch.equal(y, gathered(8) + 10 * value), y


class Caller:
    """A thread that makes a call when it is asked to."""

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


def known() -> hi.Executor:
    """An executor that the main threads of all ranks have called."""
    executor = hi.Executor(hi.parse(GATHER))
    call(executor, 0)
    assert executor.session is not None
    executor.session.exchange("known", "")
    return executor


def said(function: Callable[[], object]) -> str:
    """The message that a call raises, which this rank prints too."""
    with pytest.raises(hi.HostIRError) as raised:
        function()
    message = raised.value.diagnostics[0].message
    print(f"SAID {message}", flush=True)
    return message


def at_once(executors: list[hi.Executor], compared: bool = True) -> None:
    """Calls of two threads that overlap: every thread of every rank gets an error, and before only right results."""
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
        print(f"SAID {refusal.diagnostics[0].message}", flush=True)
    said(lambda: call(executors[0], 9))  # in another thread, and later


def one_executor() -> None:
    at_once([hi.Executor(hi.parse(GATHER))] * 2)


def one_known_executor() -> None:
    at_once([known()] * 2)


def equal_executors() -> None:
    at_once([hi.Executor(hi.parse(GATHER)) for _ in range(2)])


def executors_of_two_programs() -> None:
    at_once([hi.Executor(hi.parse(GATHER)), hi.Executor(hi.parse(PUT))])


def calls_that_are_not_compared() -> None:
    """As on CUDA: until calls of one rank overlap, they may meet another thread's."""
    executor = uncompared()
    call(executor, 0)
    assert executor.session is not None
    executor.session.exchange("known", "")
    at_once([executor] * 2, compared=False)


def another_order_on_another_rank() -> None:
    """The two threads never overlap on a rank. None of their calls meets one of the other thread."""
    executor = known()
    callers = [Caller(1), Caller(2)]
    said(lambda: callers[RANK](executor))
    said(lambda: callers[1 - RANK](executor))


def another_order_of_threads_that_have_called() -> None:
    executor = known()
    callers = [Caller(1), Caller(2)]
    for caller in callers:
        caller(executor)
    said(lambda: callers[RANK](executor))


def one_that_has_ended_before_the_other_starts() -> None:
    """Each thread makes one call. Rank 1 begins with the second; rank 0 has not yet started that one.

    The results of the first call are wrong. It is too early to know that, but the next call raises on all ranks.
    """
    executor = known()
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
    executor, caller = known(), Caller(1)
    said((lambda: call(executor, 2)) if RANK == 0 else (lambda: caller(executor)))


def turns() -> None:
    """Threads call one after another, in the same order on each rank. Rank 0 has further threads."""
    executor = known()
    if RANK == 0:
        others = [threading.Thread(target=time.sleep, args=[0.01]) for _ in range(3)]
        for other in others:
            other.start()
    for value in (1, 2):  # one that ends, and the main thread between
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


def groups_of_their_own() -> None:
    """Two threads with a group each, which ranks start in opposite order. Nothing orders the calls of the two."""
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
