"""Calls from several threads: taking turns is right, overlaps and other orders raise on every rank."""

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
        "calls_that_are_not_compared",
    ],
)
def test_calls_of_two_threads_that_overlap_raise_in_all_threads_of_all_ranks(case: str) -> None:
    found = messages(case)
    assert len(found) == 6
    for text in found:
        assert re.search(OVERLAP, text)


@pytest.mark.torchrun
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("case", "times", "threads"),
    [
        ("another_order_on_another_rank", 4, ("Thread-* (answer)", "Thread-* (answer) number 2")),
        ("another_order_of_threads_that_have_called", 2, ("Thread-* (answer)", "Thread-* (answer) number 2")),
        ("one_that_has_ended_before_the_other_starts", 2, ("Thread-* (answer) number 2", "Thread-* (answer)")),
        ("a_thread_or_the_main_thread", 2, ("MainThread", "Thread-* (answer)")),
    ],
)
def test_threads_that_call_in_another_order_on_another_rank_are_named(
    case: str, times: int, threads: tuple[str, str]
) -> None:
    found = messages(case)
    assert found == [found[0]] * times
    for rank, thread in enumerate(threads):
        assert re.search(rf"rank {rank} (calls @ag )?with M=8 in thread '{re.escape(thread)}'", found[0]), found[0]


@pytest.mark.torchrun
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["turns", "groups_of_their_own"])
def test_threads_that_take_turns_or_have_groups_of_their_own_are_right(case: str) -> None:
    messages(case)


def test_threads_of_a_rank_alone_wait_for_each_other() -> None:
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


def test_what_autograd_s_thread_calls_belongs_to_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert calls.name == "trainer *", "a thread of Python's that runs backward() calls itself"
    in_thread(enter, lambda run: _thread.start_new_thread(run, ()))
    assert calls.name.startswith("Dummy-*"), "a foreign thread outside a backward pass is one of its own"


def test_names_are_those_of_the_order_of_start_whoever_asks_first() -> None:
    gate = threading.Event()
    ordered = [f"{kind} {n}" for n in (7, 9) for kind in ("alike", "other")]
    threads = [threading.Thread(target=gate.wait, args=[60], name=name) for name in ordered]
    for thread in threads:
        thread.start()
    names = [common_name(thread) for thread in reversed(threads)]
    gate.set()
    for thread in threads:
        thread.join()
    assert names == ["other * number 2", "alike * number 2", "other *", "alike *"]
    assert [common_name(thread) for thread in reversed(threads)] == names, "which they keep"


class Worker(threading.Thread):
    """A thread of a class of its own."""

    def run(self) -> None:
        """Do nothing."""


def test_numbers_are_those_of_a_class_and_a_function() -> None:
    assert {common_name(Worker()).partition(" number")[0] for _ in range(2)} == {"Worker Thread-*"}
    assert common_name(threading.current_thread()) == "MainThread"


@pytest.mark.parametrize(
    ("pairs", "fits"),
    [
        ("1-1 2-2 3-3 1-1", True),
        ("2-2 1-1 3-3", True),  # whoever calls first
        ("2-1 3-2 4-3 2-1", True),  # a rank has a further thread of this kind
        ("2-1 1-2", False),
        ("2-1 1-1", False),
        ("1-1 1-2", False),
        ("1-1 3-3 2-4", False),
        ("1-1 4-3 3-2 2-1", False),
    ],
)
def test_threads_of_one_kind_are_paired_in_one_order(pairs: str, fits: bool) -> None:
    threads = ThreadPairs()
    every = [pair.split("-") for pair in pairs.split()]
    names = {"1": "Thread-* (work)", **{str(n): f"Thread-* (work) number {n}" for n in range(2, 5)}}
    for theirs, ours in every[:-1]:
        assert threads.add(1, names[theirs], names[ours])
    assert threads.add(1, *(names[number] for number in every[-1])) is fits
    assert threads.add(2, names["3"], names["1"]), "another rank's threads have other numbers"


def test_a_name_that_has_called_here_is_no_thread_of_another_kind() -> None:
    threads = ThreadPairs()
    threads.callers |= {"left"}
    assert threads.add(1, "right", "left")
    assert threads.known(1, "right", "left")
    assert not threads.add(1, "left", "right")
