"""The candidate that captures of the caller run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import hostir as hi
from hostir.call.executor import Executor
from hostir.choice import ranged
from hostir.choice.choices import Candidate, Timing
from hostir.choice.decision import Decider
from hostir.choice.ranged import RangedExecutor
from hostir.choice.ranges import Ranges, key
from hostir.ir.program import Program
from tests.choice.test_ranges import GPUS, LARGE, _own_cache, layer  # noqa: F401

PUSH, PLAIN = Candidate("push", 1, "triton"), Candidate("sequential", 1, "cublas")
FEW, MANY = {"M": 64}, {"M": 4096}


class FakeRank(Executor):
    """An executor that only says that it is one of a rank on CUDA."""

    session = None
    decided: Any = None
    may_differ_in_captures = True

    def __init__(self, program: Program, kernels: str) -> None:
        self.program, self.kernels = program, kernels


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[RangedExecutor]:
    """An executor after calls with 64 and 4096 rows: `push` is chosen, and for 64 rows `sequential` replays faster.

    There is no garbage collection, so that only references keep objects alive.
    """
    monkeypatch.setattr(ranged, "RankExecutor", FakeRank)
    every = Ranges(Decider(LARGE.program(), GPUS), {})
    every.budget = 2.0
    timings = Timing(PUSH, 10.0, graph=50.0, symmetric=4096), Timing(PLAIN, 20.0, graph=30.0)
    gc.collect()
    gc.disable()
    executor = RangedExecutor(every, 0, FakeRank)
    for sizes, source in ((FEW, "measured"), (MANY, "estimated")):
        name = key(every.representative(sizes))
        every.choices[name] = replace(every.choice(sizes), taken=PUSH, source=source, timings=timings)
        executor._settled.add(name)
    for candidate in (PUSH, PLAIN):
        executor._executor(candidate)
    yield executor
    gc.enable()


def captured(executor: RangedExecutor, sizes: Mapping[str, int] = FEW) -> Candidate | None:
    """Return the candidate that captures of calls with these sizes run, if plain calls run `push`."""
    its: Any = executor.executors[PUSH]
    if (decision := its.decided(sizes)) is None:
        return None
    return next(candidate for candidate, each in executor.executors.items() if each is decision[0])


def test_captures_run_the_candidate_that_replays_fastest(few: RangedExecutor) -> None:
    assert captured(few) == PLAIN
    assert captured(few, {"M": 80}) == PLAIN, "another size of the range"
    assert captured(few, MANY) == PUSH, "these replays were not measured"
    plain: Any = few.executors[PLAIN]
    assert plain.decided(FEW) == (plain, "")


def test_nothing_is_known_before_the_first_call_of_a_range(few: RangedExecutor) -> None:
    few._settled.clear()
    assert captured(few) is None


def test_captures_run_the_chosen_candidate_if_there_are_no_trials(few: RangedExecutor) -> None:
    few.ranges.budget = 0.0
    assert captured(few) == PUSH
    assert few.called[0].notes == ()


def test_captures_run_the_chosen_candidate_if_the_other_one_does_not_fit(few: RangedExecutor) -> None:
    few.ranges.fits = lambda candidate, sizes: candidate == PUSH or sizes == FEW  # type: ignore[method-assign]
    assert captured(few) == PLAIN
    assert captured(few, {"M": 80}) == PUSH


def test_captures_run_no_candidate_that_sends_messages(few: RangedExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks connect for each plan, and wait for each other."""
    asked: list[Program] = []
    monkeypatch.setattr(ranged, "message_teams_of", lambda program: asked.append(program) or [(0, 1)])
    assert captured(few) == PUSH
    assert asked == [few.ranges.program(PLAIN)]


def test_a_candidate_that_is_not_chosen_for_these_sizes_is_not_replaced(few: RangedExecutor) -> None:
    other = next(c for c in few.ranges.decider.candidates.programs if c not in (PUSH, PLAIN))
    its: Any = few._executor(other)
    assert its.decided(FEW) == (its, "")


def test_the_sizes_of_a_call_count_if_they_differ_from_given_sizes(few: RangedExecutor) -> None:
    few.ranges.free, few.ranges.fixed = (), FEW
    asked: list[Any] = []
    few.ranges.fits = lambda candidate, sizes: bool(asked.append(sizes)) or sizes["M"] != 66  # type: ignore[method-assign]
    assert captured(few, {"M": 66}) == PUSH
    assert captured(few, {"M": 68}) == PLAIN
    assert asked == [{"M": 66}, {"M": 68}]


def test_executors_that_run_one_program_in_all_calls_are_left_as_they_are(
    few: RangedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRank, "may_differ_in_captures", False)
    few.executors.clear()
    few._executor(PUSH)
    assert captured(few) == PUSH, "also such an executor asks"
    assert few.called[0].notes == ()


def test_calls_are_not_replayed_if_plain_calls_are_faster(few: RangedExecutor) -> None:
    push: Any = few.executors[PUSH]
    assert push.decided(FEW) == (few.executors[PLAIN], "")
    for name, choice in few.ranges.choices.items():
        timings = [replace(timing, plain=timing.candidate == PUSH) for timing in choice.timings]
        few.ranges.choices[name] = replace(choice, timings=tuple(timings))
    reason = "a trial has shown that plain calls are faster"
    assert push.decided(FEW) == (few.executors[PLAIN], reason)
    assert push.decided(MANY) == (push, ""), "nothing was measured"
    few.ranges.budget = 0.0
    assert push.decided(FEW) == (push, reason)


def test_a_note_tells_which_candidate_captures_run(few: RangedExecutor) -> None:
    times = "a replay takes 30 us, and one of 'push, triton' 50 us"
    note = f"in CUDA graphs that you capture, 'sequential, cublas' runs: {times}"
    assert {choice.notes for choice in few.called} == {(note,), ()}
    few.ranges.free, few.ranges.fixed = (), FEW
    assert isinstance(few.choice, hi.Choice)
    assert few.choice.notes == (note,)


def test_an_executor_does_not_keep_the_executor_of_its_fusion_alive(few: RangedExecutor) -> None:
    """The garbage collector would destroy CUDA graphs, also during a capture."""
    one: Any = RangedExecutor(few.ranges, 0, FakeRank)
    decided, held = one._executor(PUSH).decided, weakref.ref(one)
    del one
    assert held() is None
    assert decided(FEW) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_leave_nothing_to_try(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        executor: Any = hi.compile(layer(1), machine="gloo", tune=2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert executor.ranges.budget == (0 if deterministic else 2)
