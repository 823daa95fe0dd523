"""Calls from several threads: taking turns works; overlaps and different orders raise on every rank."""

from __future__ import annotations

import _thread
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hostir as hi
from hostir.job import calls as team_calls
from hostir.job.calls import Calls
from hostir.job.threads import ThreadPairs, common_name
from tests.launch import environment, launch

SCRIPT = Path(__file__).with_name("thread_cases.py")
OVERLAP = r"thread 'Thread-\d+ \(calls\)' calls @\w+ while thread '|in thread 'Thread-\* \(calls\)"


def messages(case: str) -> list[str]:
    """Run a case; return the messages of all ranks."""
    job = launch(2, str(SCRIPT), case, env=environment(HOSTIR_TIMEOUT="20"), timeout=100)
    assert not job.returncode, job.stderr
    return re.findall("SAID (.*)", job.stdout)


@pytest.mark.torchrun
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case",
    [
        "one_executor",
        "one_known_executor",
        "equal_executors",
        "executors_of_two_programs",
        "uncompared_calls",
    ],
)
def test_calls_of_two_threads_that_overlap_raise_in_all_threads_of_all_ranks(case: str) -> None:
    texts = messages(case)
    assert len(texts) == 6
    for text in texts:
        assert re.search(OVERLAP, text)


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("case", "times", "threads"),
    [
        ("new_threads_in_different_orders", 4, ("Thread-* (answer)", "Thread-* (answer) number 2")),
        ("known_threads_in_different_orders", 2, ("Thread-* (answer)", "Thread-* (answer) number 2")),
        ("one_thread_ends_before_the_other_starts", 2, ("Thread-* (answer) number 2", "Thread-* (answer)")),
        ("a_thread_or_the_main_thread", 2, ("MainThread", "Thread-* (answer)")),
    ],
)
def test_threads_that_call_in_different_orders_on_two_ranks_are_named(
    case: str, times: int, threads: tuple[str, str]
) -> None:
    texts = messages(case)
    assert texts == [texts[0]] * times
    for rank, thread in enumerate(threads):
        assert re.search(rf"rank {rank} (calls @ag )?with M=8 in thread '{re.escape(thread)}'", texts[0]), texts[0]


@pytest.mark.torchrun
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["turns", "a_group_for_each_thread"])
def test_threads_that_take_turns_or_have_separate_groups_get_right_results(case: str) -> None:
    messages(case)


def test_threads_of_a_single_rank_wait_for_each_other() -> None:
    executor = hi.Executor(hi.parse(ALONE), machine="gloo")
    failures: list[BaseException] = []

    def calls(value: float) -> None:
        try:
            for _ in range(200):
                (y,) = executor(torch.full((64,), value))
                assert torch.equal(y, torch.full((64,), 2 * value))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=calls, args=[value]) for value in (1.0, 2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


ALONE = """hostir 1
mesh @mesh [didx] = 0
program @alone(%x: f32[M]) -> (%y) {
  %y: f32[M] = allocate
  add %x, %x -> %y
}
"""


def in_thread(function: Callable[[], object], start: Callable[..., object]) -> None:
    """Run a function in a thread, and wait for it."""
    done = threading.Event()
    start(lambda: (function(), done.set()))
    assert done.wait(20)


def test_calls_of_autograds_thread_count_as_calls_of_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(dist.HashStore(), 0, (0, 1))

    def enter() -> None:
        with calls.turn("layer"):
            pass

    enter()
    mine = calls.caller, calls.name
    assert mine == (threading.current_thread(), "MainThread")
    with monkeypatch.context() as backward:
        backward.setattr(team_calls, "in_backward", lambda: True)
        for _ in range(2):
            in_thread(enter, lambda run: _thread.start_new_thread(run, ()))
            assert (calls.caller, calls.name) == mine
        in_thread(enter, lambda run: threading.Thread(target=run, name="trainer 3").start())
        assert calls.name == "trainer *", "a Python thread that runs backward() is the caller itself"
    in_thread(enter, lambda run: _thread.start_new_thread(run, ()))
    assert calls.name.startswith("Dummy-*"), "a foreign thread outside a backward pass is a caller itself"


def test_threads_are_numbered_in_the_order_of_their_start() -> None:
    gate = threading.Event()
    ordered = [f"{prefix} {n}" for n in (7, 9) for prefix in ("alike", "other")]
    threads = [threading.Thread(target=gate.wait, args=[60], name=name) for name in ordered]
    for thread in threads:
        thread.start()
    names = [common_name(thread) for thread in reversed(threads)]
    gate.set()
    for thread in threads:
        thread.join()
    assert names == ["other * number 2", "alike * number 2", "other *", "alike *"]
    assert [common_name(thread) for thread in reversed(threads)] == names, "threads keep their names"


class Worker(threading.Thread):
    """A thread of a subclass."""

    def run(self) -> None:
        """Do nothing."""


def test_threads_are_numbered_for_each_class_and_function() -> None:
    assert {common_name(Worker()).partition(" number")[0] for _ in range(2)} == {"Worker Thread-*"}
    assert common_name(threading.current_thread()) == "MainThread"


@pytest.mark.parametrize(
    ("pairs", "fits"),
    [
        ("1-1 2-2 3-3 1-1", True),
        ("2-2 1-1 3-3", True),  # any thread may call first
        ("2-1 3-2 4-3 2-1", True),  # one rank has an additional thread with this function
        ("2-1 1-2", False),
        ("2-1 1-1", False),
        ("1-1 1-2", False),
        ("1-1 3-3 2-4", False),
        ("1-1 4-3 3-2 2-1", False),
    ],
)
def test_threads_with_one_function_are_paired_in_one_order(pairs: str, fits: bool) -> None:
    threads = ThreadPairs()
    every = [pair.split("-") for pair in pairs.split()]
    names = {"1": "Thread-* (work)", **{str(n): f"Thread-* (work) number {n}" for n in range(2, 5)}}
    for theirs, ours in every[:-1]:
        assert threads.add(1, names[theirs], names[ours])
    assert threads.add(1, *(names[number] for number in every[-1])) is fits
    assert threads.add(2, names["3"], names["1"]), "the threads of each rank are paired separately"


def test_a_thread_that_has_called_here_is_not_paired_with_another_name() -> None:
    threads = ThreadPairs()
    threads.callers |= {"left"}
    assert threads.add(1, "right", "left")
    assert threads.known(1, "right", "left")
    assert not threads.add(1, "left", "right")
