"""Cases that tests/choice/test_trials.py runs as `trial_cases.py NAME ...`; each prints `PASS name rank`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import hostir as hi
import hostir.torch
from hostir.call import rank
from hostir.call.executor import Executor
from hostir.call.rank import RankExecutor
from hostir.choice import laps, trials
from hostir.choice.choices import Candidate, Choice
from hostir.choice.decision import Decider
from hostir.choice.ranged import RangedExecutor
from hostir.choice.ranges import Ranges
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.job.agreement import Agreement
from hostir.job.offers import Offer
from hostir.job.session import Session, session
from hostir.job.symmetric import SymmetricMemory
from hostir.machines.gloo.machine import GlooPlan
from hostir.torch.ops.running import group_named

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CASES: dict[str, Callable[[], None]] = {}
STRATEGIES = ("sequential", "ring", "fused", "push")


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def rows(k: int | str = 32, name: str = "rows", m: int | str = "M") -> hi.Fusion:
    with hi.Fusion(name) as fusion:
        a, b = hi.tensor("a", [m, k], "f32"), hi.tensor("b", [k, 16], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(SIZE))
    a.shard(0, mesh)
    c.set_device_mesh(mesh)
    return fusion


CALLED: list[str] = []  # the strategies of the programs that ran


@contextlib.contextmanager
def times(by_strategy: Mapping[str, float]) -> Iterator[None]:
    """Make trials measure these times of strategies, in microseconds. Record the strategies of calls in CALLED."""
    CALLED.clear()
    honest, by_digest = RankExecutor.__call__, dict[str, str]()

    def recorded(self: RankExecutor, *inputs: Any, out: Any = None) -> tuple[Any, ...]:
        if self.program.name != laps.BARRIER:
            CALLED.append(by_digest.get(self.program.digest, "asked for"))
        return honest(self, *inputs, out=out)

    def program(self: Ranges, candidate: Candidate) -> Program:
        result = self.decider.program_of(candidate)
        by_digest[result.digest] = candidate.strategy
        return result

    class TestLap(laps.Lap):
        def stop(self) -> None:
            self.seconds = by_strategy.get(CALLED[-1], 5000.0) * 1e-6

    everything = mock.patch.object(Decider, "candidates", property(lambda self: self.measurable))
    recording = mock.patch.object(RankExecutor, "__call__", recorded)
    with (
        everything,
        recording,
        mock.patch.object(Ranges, "program", program),
        mock.patch.object(laps, "LAP", TestLap),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", hi.FallbackWarning)
        yield


def call(executor: Executor, m: int = 64, k: int = 32) -> None:
    torch.manual_seed(len(CALLED) + 1000 * m)
    a, b = torch.randn(m, k), torch.randn(k, 16)
    (c,) = executor(a.chunk(SIZE)[RANK].contiguous(), b)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


def taken(executor: Executor, m: int = 64) -> tuple[str, str]:
    """Return the strategy that is chosen for M, and the reason; check that all ranks have chosen it."""
    choice = executor.choice if isinstance(executor.choice, hi.Choice) else executor.choice.choice({"M": m})
    assert executor.session is not None
    answers = executor.session.exchange("taken", json.dumps([choice.strategy, choice.source, CALLED]))
    assert len(set(answers)) == 1, answers
    return choice.strategy, choice.source


# First: executors of other cases would hold memory until the next call.
@case
def the_losers_hold_no_symmetric_memory() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="memory"), tune=2)
        assert executor.session is not None
        before = executor.session.symmetric_bytes
        for _ in range(3):
            call(executor)
        held = executor.session.symmetric_bytes - before
        alone = hi.compile(rows(name="alone"), "ring")
        call(alone)
        after = executor.session.symmetric_bytes
        assert after - before - held == held > 0, (before, held, after, alone.symmetric_bytes)
    with times({"sequential": 100.0}):
        none = hi.compile(rows(name="no_memory"), tune=2)
        for _ in range(3):
            call(none)
        assert executor.session.symmetric_bytes == after


@case
def the_fastest_of_the_tried_candidates_runs_after_the_trial() -> None:
    for fastest in STRATEGIES:
        with times({fastest: 100.0}):
            executor = hi.compile(rows(name=f"fastest_{fastest}"), tune=2)
            for _ in range(3):
                call(executor)
            assert taken(executor) == (fastest, "measured")
            assert set(CALLED) == set(STRATEGIES), CALLED
            CALLED.clear()
            call(executor)
            assert [fastest] == CALLED
            assert isinstance(executor, RangedExecutor)
            choice = executor.choice.choice({"M": 64})
            assert {timing.us for timing in choice.timings} == {100.0, 5000.0}
            assert choice.timings[0].us == 100.0
            assert {timing.candidate.strategy for timing in choice.timings} == set(STRATEGIES)


@case
def the_slowest_rank_of_a_call_counts() -> None:
    mine = {"ring": 10.0, "fused": 90.0} if RANK == 0 else {"ring": 900.0, "fused": 100.0}
    with times({**mine, "sequential": 200.0, "push": 300.0}):
        executor = hi.compile(rows(name="slowest"), tune=2)
        for _ in range(3):
            call(executor)
        assert taken(executor) == ("fused", "measured")
        choice = executor.choice.choice({"M": 64})
        assert {t.candidate.strategy: t.us for t in choice.timings}["ring"] == 900.0


@case
def a_rank_that_is_ten_times_slower_agrees_with_the_others() -> None:
    with times({}), mock.patch.object(laps, "LAP", laps.Lap):
        executor = hi.compile(rows(name="slow_rank"), tune=2)
        for _ in range(3):
            time.sleep(0.005 * (RANK == 1))
            call(executor)
        assert taken(executor)[1] == "measured"


@case
def ranges_are_tried_apart_and_sizes_of_one_range_together() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="mixed"), tune=2)
        for number in range(9):
            call(executor, (64, 72, 1024)[number % 3])
        assert taken(executor, 64) == taken(executor, 1024) == ("ring", "measured")
        assert isinstance(executor, RangedExecutor)
        assert len(executor.ranges.choices) == 3  # with the largest


@case
def a_started_call_runs_what_a_trial_of_plain_calls_has_measured() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="started"), tune=2)
        a, b = torch.randn(64 // SIZE, 32), torch.randn(32, 16)
        executor.start(a, b).wait()
        assert taken(executor) == ("ring", "measured")
        assert set(CALLED) == set(STRATEGIES)
        CALLED.clear()
        executor.start(a, b).wait()
        call(executor)
        assert CALLED == ["ring"] * 2


@case
def executors_whose_calls_alternate_are_tried_at_once() -> None:
    with times({"fused": 100.0}):
        both = [hi.compile(rows(name="twice"), tune=2) for _ in range(2)]
        for number in range(6):
            call(both[number % 2])
        assert [taken(executor) for executor in both] == [("fused", "measured")] * 2


@case
def a_fusion_without_free_sizes_is_tried_as_well() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="fixed", m=64), tune=2)
        for _ in range(3):
            call(executor)
        assert taken(executor) == ("ring", "measured")
        assert str(executor.choice).startswith("@fixed runs 'ring, ")
        assert "(measured 100 us, the fastest of " in str(executor.choice)


@case
def the_next_executor_uses_the_measurements() -> None:
    with times({"push": 100.0}):
        executor = hi.compile(rows(name="kept"), tune=2)
        for _ in range(3):
            call(executor)
        assert taken(executor) == ("push", "measured")
        CALLED.clear()
        executor = hi.compile(rows(name="kept"), tune=2)
        for _ in range(3):
            call(executor)
        assert CALLED == ["push"] * 3, (CALLED, executor.choice.choice({"M": 64}))
        assert taken(executor) == ("push", "measured")
        off = hi.compile(rows(name="kept"), tune=0)
        assert taken(off) == ("push", "measured")
        eager = hi.compile(rows(name="kept"), calls="eager", tune=0)  # its calls were not measured
        assert taken(eager)[1] == "estimated"


@case
def measurements_for_several_free_sizes_are_used_by_the_next_executor() -> None:
    with times({"push": 100.0}):
        executor = hi.compile(rows("K", name="two_free"), tune=2)
        for m, k in ((64, 32), (256, 64)):
            call(executor, m, k)
        CALLED.clear()
        executor = hi.compile(rows("K", name="two_free"), tune=2)
        for m, k in ((64, 32), (72, 32), (256, 64)):
            call(executor, m, k)
            assert executor.choice.choice({"M": m, "K": k}).source == "measured"
        assert CALLED == ["push"] * 3, CALLED
        call(executor, 64, 128)  # another range
        assert set(CALLED) == set(STRATEGIES)


@case
def all_sizes_of_a_range_are_tried_in_its_first_call() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="one_call"), tune=2)
        call(executor, 64)
        assert taken(executor) == ("ring", "measured")
        CALLED.clear()
        for m in range(48, 96, 2 * SIZE):
            call(executor, m)
        assert set(CALLED) == {"ring"}
        assert len(CALLED) == len(range(48, 96, 2 * SIZE))


@case
def a_trial_says_how_far_it_is() -> None:
    seen = []
    honest = trials.Trial._duel

    def watched(self: trials.Trial, *candidates: Candidate) -> Any:
        seen.append(executor.choice.choice({"M": 64}).source)
        return honest(self, *candidates)

    with times({"ring": 100.0}), mock.patch.object(trials.Trial, "_duel", watched):
        executor = hi.compile(rows(name="underway"), tune=2)
        call(executor)
    assert seen == ["estimated", "being measured (2 of 4)", "being measured (3 of 4)"], seen
    assert taken(executor) == ("ring", "measured")


@case
def rank_0_says_whether_there_are_trials() -> None:
    with times({"ring": 100.0}):
        off = hi.compile(rows(name="off"), tune=0 if RANK == 0 else 2)
        on = hi.compile(rows(name="on"), tune=2 if RANK == 0 else 0)
        for executor in (off, on):
            for _ in range(3):
                call(executor)
        assert taken(off)[1] == "estimated"
        assert taken(on) == ("ring", "measured")


@case
def deterministic_algorithms_and_a_small_budget_allow_no_trials() -> None:
    with times({"ring": 100.0}):
        torch.use_deterministic_algorithms(RANK == 0)
        fixed = hi.compile(rows(name="deterministic"), tune=2)
        for _ in range(3):
            call(fixed)
        torch.use_deterministic_algorithms(False)
        assert len(set(CALLED)) == 1
        assert taken(fixed)[1] == "estimated"
        CALLED.clear()
        short = hi.compile(rows(name="short"), tune=1e-9)
        for _ in range(3):
            call(short)
        taken(short)
        refused = [it.reason for it in short.choice.choice({"M": 64}).impossible]
        assert "not tried: HOSTIR_TUNE allows trials 1e-09 s" in refused


@case
def a_candidate_that_one_rank_cannot_plan_is_left_out() -> None:
    honest = SymmetricMemory.reserve

    def dishonest(self: SymmetricMemory, offers: Sequence[Offer]) -> str:
        return "no memory to share" if RANK == 1 and offers[0].reads else honest(self, offers)  # only ring reads

    with times({"ring": 100.0, "fused": 200.0}), mock.patch.object(SymmetricMemory, "reserve", dishonest):
        executor = hi.compile(rows(name="unplanned"), tune=2)
        for _ in range(3):
            call(executor)
        assert taken(executor) == ("fused", "measured")
        choice = executor.choice.choice({"M": 64})
        assert "no memory to share" in next(it.reason for it in choice.impossible if it.candidate.strategy == "ring")


@contextlib.contextmanager
def failing(
    strategy: str, problem: BaseException, on: Sequence[int], call: int = 1, midway: bool = True
) -> Iterator[None]:
    """Let the calls of a strategy fail on some ranks, from a certain call on.

    If `midway` is True, the last step of the call fails. Otherwise the call issues nothing.
    """
    honest, made = RankExecutor._issue, 0

    def fail() -> None:
        raise problem

    def issue(self: RankExecutor, bound: Any, *arguments: Any) -> Any:
        nonlocal made
        if self.program.name == laps.BARRIER:
            return honest(self, bound, *arguments)
        made += CALLED[-1] == strategy
        if CALLED[-1] != strategy or RANK not in on or made < call:
            return honest(self, bound, *arguments)
        if not midway:
            fail()
        next(iter(bound.plan.lanes.values())).steps[-1] = fail
        return honest(self, bound, *arguments)

    with mock.patch.object(RankExecutor, "_issue", issue):
        yield


def is_left_out(executor: Executor, strategy: str, words: str) -> None:
    """Check that all ranks have left out a candidate for the same reason, and that its later calls are right."""
    choice = executor.choice.choice({"M": 64})
    (reason,) = [it.reason for it in choice.impossible if it.candidate.strategy == strategy]
    assert words in reason, reason
    assert executor.session is not None
    assert len(set(executor.session.exchange("reason", reason))) == 1
    CALLED.clear()  # its length is the seed of the inputs, and ranks have made other numbers of calls
    for m in (64, 256, 64):
        call(executor, m)
    assert strategy not in CALLED
    assert taken(executor) == ("ring", "measured")


@case
def a_challenger_whose_call_fails_is_left_out_and_the_call_of_the_user_returns() -> None:
    strike = RuntimeError("on strike")
    for midway in (True, False):
        for on in ([1], range(SIZE)):
            for number in (1, 3):
                name = f"strike_{midway}_{len(on)}{on[0]}_{number}"
                other = hi.compile(rows(name=f"other_{name}"), "push")
                with times({"fused": 10.0, "ring": 100.0}), warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    call(other)
                    executor = hi.compile(rows(name=name), tune=2)
                    with failing("fused", strike, on, number, midway):
                        CALLED.clear()
                        torch.manual_seed(7)
                        a, b = torch.randn(64, 32), torch.randn(32, 16)
                        (c,) = executor(a.chunk(SIZE)[RANK].contiguous(), b)
                        torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)
                    messages = [str(w.message) for w in warned if "failed in its trial" in str(w.message)]
                    assert len(messages) == (RANK == 0), messages
                    is_left_out(executor, "fused", "on strike")
                    call(other)


@case
def a_barrier_by_flags_or_by_an_all_reduce_waits_for_all_ranks() -> None:
    memory = hi.compile(rows(name="here"), "push").session.groups.memory
    assert memory is not None

    def make(program: Program, kernels: str) -> Any:
        return hi.Executor(program, kernels=kernels)

    torch.set_default_dtype(torch.bfloat16)
    for by_flags in (True, False):
        met = set(memory.met)
        barrier = laps.StartBarrier(SIZE, make, by_flags)
        for late in range(SIZE):
            dist.barrier()
            began = time.monotonic()
            if late == RANK:
                time.sleep(0.2)
            barrier()
            assert time.monotonic() - began > 0.15
        assert (set(memory.met) > met) == by_flags
        barrier.end()
        memory.discard()
        assert set(memory.met) <= met
    torch.set_default_dtype(torch.float32)


@case
def ranks_agree_on_the_barrier_before_each_timed_run() -> None:
    def tried(name: str, refused: Sequence[bool] = (), limit: int | None = None) -> list[bool]:
        """Return which barriers a trial tries, as `by_flags`. Rank 1 fails in some, and may have a limit."""
        ways, honest = list[bool](), laps.StartBarrier.__init__

        def watched(self: laps.StartBarrier, ranks: int, execute: Any, by_flags: bool) -> None:
            ways.append(by_flags)
            honest(self, ranks, execute, by_flags)
            if RANK == 1 and by_flags in refused:
                raise ValueError("not here")

        limited = hi.knobs.scope(symmetric_limit=limit if RANK == 1 else None)
        with times({"ring": 100.0}), mock.patch.object(laps.StartBarrier, "__init__", watched), limited:
            executor = hi.compile(rows(name=name), tune=2)
            call(executor)
            assert taken(executor) == ("ring", "measured")
        return ways

    assert tried("by_flags") == [True]
    assert tried("not_by_flags", [True]) == [True, False]
    assert tried("in_no_way", [True, False]) == [True, False]
    assert tried("limited", limit=1 << 30) == [False]


@case
def if_the_champion_fails_all_ranks_raise_and_the_next_call_begins_the_trial_anew() -> None:
    with times({"push": 1000.0, "ring": 100.0}):
        executor = hi.compile(rows(name="champion"), tune=2)
        best = executor.choice.choice({"M": 64}).strategy
        with failing(best, RuntimeError("on strike"), [1], 2), pytest.raises(HostIRError, match="on strike"):
            call(executor)
        CALLED.clear()
        for _ in range(3):
            call(executor)
        assert taken(executor) == ("ring", "measured")


@case
def an_interrupt_in_the_call_of_a_challenger_ends_the_trial_on_all_ranks() -> None:
    for number in (1, 3):
        with times({"ring": 100.0}):
            executor = hi.compile(rows(name=f"stopped_{number}"), tune=2)
            expected = KeyboardInterrupt if RANK == 1 else HostIRError
            with failing("fused", KeyboardInterrupt(), [1], number), pytest.raises(expected):
                call(executor)
            CALLED.clear()
            for _ in range(3):
                call(executor)
            assert taken(executor) == ("ring", "measured")


@case
def the_way_of_calling_of_rank_0_counts() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="calls"), tune=2, calls=("out", "eager")[RANK > 0])
        assert executor.ranges.decider.calls == "out"
        call(executor)
        assert taken(executor) == ("ring", "measured")


@case
def a_trial_runs_with_inputs_in_the_places_that_the_first_candidate_gave() -> None:
    for number, winner in enumerate(("push", "ring")):
        with times({winner: 100.0}), preferred("push"):
            executor = hi.compile(rows(name=f"places_{number}"), tune=2)
            home, _ = executor.places(torch.zeros(64 // SIZE, 32), torch.zeros(32, 16))
            assert home is not None
            assert not CALLED
            for n in range(3):
                torch.manual_seed(n)
                a, b = torch.randn(64, 32), torch.randn(32, 16)
                (c,) = executor(home.copy_(a.chunk(SIZE)[RANK]), b)
                torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)
            assert taken(executor) == (winner, "measured")
            again, _ = executor.places(home, b)
            assert (again is None) == (winner == "ring")
            assert again is None or again.data_ptr() == home.data_ptr()
            dist.barrier()
            assert taken(hi.compile(rows(name=f"places_{number}"), tune=0)) == ("push", "estimated"), "nothing is kept"


def placed(executor: Executor, m: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an input in its place, the other input, and the result of a call with them."""
    torch.manual_seed(7)
    a, b = torch.randn(m, 32), torch.randn(32, 16)
    home, _ = executor.places(torch.zeros(m // SIZE, 32), b)
    assert home is not None
    return home.copy_(a.chunk(SIZE)[RANK]), b, a @ b


@case
def inputs_in_their_places_keep_their_values_if_a_call_fails_in_a_trial() -> None:
    for number in (1, 3):
        with times({"push": 100.0, "fused": 10.0}), preferred("push"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bystander = hi.compile(rows(name=f"bystander_{number}"), "push")
            x, w, y = placed(bystander)
            executor = hi.compile(rows(name=f"cleared_{number}"), tune=2)
            home, b, c = placed(executor)
            with failing("fused", RuntimeError("on strike"), [1], number):
                torch.testing.assert_close(executor(home, b)[0], c, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(bystander(x, w)[0], y, rtol=1e-4, atol=1e-4)
            CALLED.clear()  # the rank on strike may have made one call less
            assert taken(executor) == ("push", "measured")
            again, _ = executor.places(home, b)
            assert again is not None
            assert again.data_ptr() == home.data_ptr()


@case
def inputs_in_their_places_may_be_written_right_after_an_error() -> None:
    with times({"push": 100.0}), preferred("push"):
        executor = hi.compile(rows(name="written_again"), tune=2)
        home, b, c = placed(executor)
        mine = home.clone()
        for _ in range(2):  # first in the trial, then in a plain call
            with failing("push", RuntimeError("on strike"), range(SIZE)), pytest.raises(HostIRError):
                executor(home, b)
            torch.testing.assert_close(executor(home.copy_(mine), b)[0], c, rtol=1e-4, atol=1e-4)


@case
def the_losers_hold_no_memory_for_sizes_of_which_only_places_were_asked() -> None:
    with times({"sequential": 100.0}), preferred("push"):
        executor = hi.compile(rows(name="asked"), tune=2)
        assert executor.session is not None
        before = executor.session.symmetric_bytes
        executor.places(torch.zeros(64 // SIZE, 32), torch.zeros(32, 16))
        call(executor, 56)
        assert taken(executor, 56) == ("sequential", "measured")
        assert executor.session.symmetric_bytes <= before


@case
def times_are_not_kept_if_a_single_rank_passes_an_input_in_its_place() -> None:
    for one in range(SIZE):
        with times({"push": 100.0}), preferred("push"):
            executor = hi.compile(rows(name=f"in_place_on_{one}"), tune=2)
            home, b, c = placed(executor)
            x = home if one == RANK else home.clone()
            torch.testing.assert_close(executor(x, b)[0], c, rtol=1e-4, atol=1e-4)
            assert taken(executor) == ("push", "measured")
            dist.barrier()
            assert taken(hi.compile(rows(name=f"in_place_on_{one}"), tune=0)) == ("push", "estimated")


@case
def a_capture_tries_nothing() -> None:
    with times({"ring": 100.0}), preferred("push"):
        executor = hi.compile(rows(name="captured_first"), tune=2)
        with mock.patch.object(RangedExecutor, "_captures", return_value=True):
            call(executor)
            assert CALLED == ["push"]
        call(executor)
        assert taken(executor) == ("ring", "measured")


@contextlib.contextmanager
def preferred(strategy: str) -> Iterator[None]:
    """Let the estimates prefer a strategy."""
    estimates = Decider.estimates

    def changed(self: Decider, *arguments: Any) -> Any:
        timings, impossible = estimates(self, *arguments)
        sooner = min(timing.us for timing in timings) * 0.9
        timings = [replace(t, us=sooner) if t.candidate.strategy == strategy else t for t in timings]
        return tuple(sorted(timings, key=lambda timing: timing.us)), impossible

    with mock.patch.object(Decider, "estimates", changed):
        yield


@case
def after_an_interrupt_between_two_duels_the_trial_begins_anew() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="interrupted"), tune=2)
        with (
            mock.patch.object(trials.Trial, "_prepared", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            [call(executor) for _ in range(3)]
        CALLED.clear()
        for _ in range(3):
            call(executor)
        assert taken(executor) == ("ring", "measured")


@case
def an_interrupt_of_one_rank_in_a_trial_is_an_error_on_all_ranks() -> None:
    for method in ("_duel", "_prepared", "_drop_losers"):
        with times({"ring": 100.0}):
            executor = hi.compile(rows(name=f"interrupted{method}"), tune=2)
            broken = mock.patch.object(trials.Trial, method, side_effect=KeyboardInterrupt)
            message = ""
            with broken if RANK == 1 else contextlib.nullcontext():
                while not message:
                    try:
                        call(executor)
                    except (HostIRError, KeyboardInterrupt) as problem:
                        message = f"{type(problem).__name__} {problem}"
            assert message.startswith("KeyboardInterrupt") if RANK == 1 else "interrupted in" in message, message
            CALLED.clear()
            for _ in range(3):
                call(executor)
            assert taken(executor) == ("ring", "measured")


@case
def a_rank_without_the_result_takes_it_from_the_others() -> None:
    honest = trials.Trial._conclude
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="result"), tune=2)
        assert executor.session is not None
        broken = mock.patch.object(trials.Trial, "_conclude", side_effect=KeyboardInterrupt)
        message = ""
        with broken if RANK == 1 else contextlib.nullcontext():
            while not message:
                try:
                    call(executor)
                except (HostIRError, KeyboardInterrupt) as problem:
                    message = f"{type(problem).__name__} {problem}"
        assert trials.Trial._conclude is honest
        CALLED.clear()
        for _ in range(3):
            call(executor)
        assert CALLED == ["ring"] * 3
        assert taken(executor) == ("ring", "measured")
        chosen = executor.ranges.choice({"M": 64})  # type: ignore[attr-defined]
        times_of_ranks = [[it.us, it.graph] for it in chosen.timings]
        everywhere = executor.session.exchange("times", json.dumps(times_of_ranks))
        assert len({*everywhere}) == 1, "captures may run another candidate, by these times"
        assert all(graph is None for _, graph in times_of_ranks), "a CPU has no graphs"


MAKES_A_PLAN_FOR_CAPTURES: list[bool] = []  # not empty while an executor does


@contextlib.contextmanager
def captures_by(strategy: str) -> Iterator[None]:
    """Let captures run the candidate with this strategy, and let plans for captures be made as on CUDA.

    On CUDA warm calls are not compared.
    """
    begin, apply = Agreement.__init__, RankExecutor._apply_decision

    def not_compared(self: Agreement, session: Any, program: Program, kernels: str, compare: bool) -> None:
        begin(self, session, program, kernels, False)

    def as_on_cuda(self: RankExecutor, plan: Any, inputs: Any) -> None:
        MAKES_A_PLAN_FOR_CAPTURES.append(True)
        try:
            with mock.patch.object(rank, "CudaPlan", GlooPlan), mock.patch.object(torch.cuda, "current_blas_handle"):
                apply(self, plan, inputs)
        finally:
            MAKES_A_PLAN_FOR_CAPTURES.clear()

    def captured(choice: Choice) -> Candidate:
        others = [timing.candidate for timing in choice.timings if timing.candidate.strategy == strategy]
        return others[0] if choice.source == "measured" else choice.taken

    with (
        mock.patch.object(Agreement, "__init__", not_compared),
        mock.patch.object(RankExecutor, "_apply_decision", as_on_cuda),
        mock.patch.object(RankExecutor, "may_differ_in_captures", True),
        mock.patch.object(Choice, "captured", property(captured)),
        mock.patch.object(RangedExecutor, "_with_note", lambda executor, choice: choice),  # it has times of replays
        mock.patch.object(GlooPlan, "for_captures", None, create=True),
        mock.patch.object(GlooPlan, "settled", False, create=True),
        mock.patch.object(GlooPlan, "plain", "", create=True),
        times({"ring": 100.0}),
    ):
        yield


def for_captures(executor: Executor) -> str:
    """Return the strategy that captures of the latest call run, or the error that they raise.

    The text is empty if captures run the plan of the call.
    """
    assert isinstance(executor, RangedExecutor)
    current = executor.current
    assert isinstance(current, RankExecutor)
    plan: Any = current.latest.plan if current.latest is not None else None
    made = plan.for_captures
    if isinstance(made, HostIRError):
        return str(made)
    names = [it.strategy for it, its in executor.executors.items() if made and its.program is made.unrolled.program]
    return " ".join(names)


def forget_plans(executor: Any) -> None:
    executor.current.plans.clear()
    executor.current.latest = None
    executor.current.bound.clear()


def meetings(executor: Executor) -> int:
    assert executor.session is not None
    return executor.session.meetings.number


@case
def ranks_meet_once_for_the_candidate_that_captures_run() -> None:
    with captures_by("sequential"):
        executor = hi.compile(rows(name="captures"), tune=2)
        call(executor)
        assert taken(executor) == ("ring", "measured")
        assert for_captures(executor) == "sequential"
        before = meetings(executor)
        call(executor, 80)  # of the same range
        assert for_captures(executor) == "sequential"
        assert meetings(executor) == before
        again = hi.compile(rows(name="captures"), tune=2)  # with the times of the first
        CALLED.clear()
        call(again)
        assert CALLED == ["ring"], "no trial"
        assert for_captures(again) == "sequential"
        if RANK == 0:  # a plan that only one rank makes
            forget_plans(again)
        for _ in range(2):
            call(again)
            assert for_captures(again) == "sequential"


@case
def a_rank_that_cannot_plan_for_captures_makes_its_calls() -> None:
    with captures_by("sequential"):
        executor = hi.compile(rows(name="captures_unplanned"), tune=2)
        call(executor)
        again, honest = hi.compile(rows(name="captures_unplanned"), tune=2), RankExecutor._plan

        def without_memory(self: RankExecutor, unrolled: Any, kind: Any, inputs: Any) -> Any:
            if RANK == 1 and kind is None and self is not again.current:
                raise torch.OutOfMemoryError("no memory left")
            return honest(self, unrolled, kind, inputs)

        with mock.patch.object(RankExecutor, "_plan", without_memory):
            for _ in range(3):
                call(again)
        made = for_captures(again)
        assert "OutOfMemoryError: no memory left" in made if RANK == 1 else made == "sequential", made


@case
def if_a_rank_refuses_the_program_of_captures_all_ranks_make_their_calls() -> None:
    with captures_by("sequential"):
        call(hi.compile(rows(name="captures_refused"), tune=2))
        executor, honest = hi.compile(rows(name="captures_refused"), tune=2), RankExecutor._unrolled

        def refused(self: RankExecutor, inputs: Any) -> Any:
            if RANK == 1 and MAKES_A_PLAN_FOR_CAPTURES:
                raise error("not here")
            return honest(self, inputs)

        with mock.patch.object(RankExecutor, "_unrolled", refused):
            for m in (64, 64, 80):
                call(executor, m)
            assert "not here" in for_captures(executor)
            if RANK == 0:
                forget_plans(executor)
            for _ in range(2):  # a rank that makes a plan alone meets nobody
                call(executor)
                assert "not here" in for_captures(executor)
        call(executor, 1024)


@case
def an_interrupt_of_one_rank_that_plans_for_captures_costs_one_call() -> None:
    with captures_by("sequential"):
        # The first call of `one` and `two` tries the candidates. Later executors know the times, and the ranks meet.
        unrolled, meet, plan = (RankExecutor, "_unrolled"), (Agreement, "reach"), (RankExecutor, "_plan")
        for name, (owner, method) in (
            ("one", unrolled),
            ("two", plan),
            ("one", unrolled),
            ("one", meet),
            ("two", plan),
        ):
            executor, honest = hi.compile(rows(name=name), tune=2), getattr(owner, method)
            interrupts = [KeyboardInterrupt()] if RANK == 1 else []

            def interrupted(self: Any, *given: Any, honest: Any = honest, interrupts: Any = interrupts) -> Any:
                if MAKES_A_PLAN_FOR_CAPTURES and interrupts:
                    raise interrupts.pop()
                return honest(self, *given)

            ends = list[str]()
            with mock.patch.object(owner, method, interrupted):
                while ends[-2:] != ["", ""]:
                    CALLED.clear()  # the data of a call depend on it
                    try:
                        call(executor)
                        ends.append("")
                    except (HostIRError, KeyboardInterrupt) as problem:
                        ends.append(f"{type(problem).__name__} {problem}")
            assert len(ends) <= 3, ends
            assert not interrupts
            CALLED.clear()
            assert for_captures(executor) == "sequential"
            assert taken(executor) == ("ring", "measured")


def left_by_trials(executor: Executor) -> list[str]:
    """Return the keys in the store that belong to trials, when all ranks have made their calls."""
    assert executor.session is not None
    executor.session.exchange("calls made", "")
    store: Any = executor.session.first_store
    keys: list[str] = [key for key in store.list_keys() if "trial" in key]
    executor.session.exchange("keys read", "")
    return keys


@case
def the_store_does_not_grow_with_the_number_of_trials() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="keys"), tune=2)
        call(executor)
        before = left_by_trials(executor)
        for m in (128, 256, 512):
            call(executor, m)
        assert taken(executor, 512) == ("ring", "measured")
        after = left_by_trials(executor)
        assert len(after) == len(before), after


@case
def a_failure_that_one_rank_has_while_it_plans_is_a_reason() -> None:
    honest = RankExecutor.prepare

    def without_memory(self: RankExecutor, inputs: Sequence[Any], out: Any) -> None:
        known = bool(self.plans)
        honest(self, inputs, out)
        if RANK == 1 and not known:
            raise torch.OutOfMemoryError("no memory left")

    with times({"ring": 100.0}), mock.patch.object(RankExecutor, "prepare", without_memory):
        executor = hi.compile(rows(name="out_of_memory"), tune=2)
        for _ in range(3):
            call(executor)
        taken(executor)
        reasons = [it.reason for it in executor.choice.choice({"M": 64}).impossible]
        assert reasons.count("OutOfMemoryError: no memory left") == 3, reasons


class Clock:
    """A clock in the place of `time` that stands still, except when a test moves it."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@case
def compiling_for_a_fusion_is_limited_and_reported_apart() -> None:
    honest, clock = RankExecutor.prepare, Clock()

    def slow(self: RankExecutor, inputs: Sequence[Any], out: Any) -> None:
        honest(self, inputs, out)
        clock.now += 7.0 if RANK == 1 else 1.0

    with (
        times({"ring": 100.0}),
        mock.patch.object(RankExecutor, "prepare", slow),
        mock.patch.object(trials, "time", clock),
    ):
        executor = hi.compile(rows(name="compiling"), tune=2)
        for _ in range(3):
            call(executor)
        assert taken(executor)[1] == "measured"
        choice = executor.choice.choice({"M": 64})
        assert len(choice.timings) == 3  # the champion, and two challengers of 7 s each
        reasons = [it.reason for it in choice.impossible if it.candidate.strategy in STRATEGIES]
        assert reasons == ["not tried: compiling others has taken 14.0 s, and 20 s are allowed for a fusion"]
        assert choice.notes[-1].startswith("its trial took ")
        assert choice.notes[-1].endswith(" s, of which compiling took 14.0 s")
        call(executor, 1024)  # another range of the same fusion
        assert all(
            "compiling others" in it.reason
            for it in executor.choice.choice({"M": 1024}).impossible
            if it.candidate.strategy in STRATEGIES
        )
        assert taken(executor, 1024)[1] == "estimated"
        other = hi.compile(rows(name="another"), tune=2)
        call(other)
        assert len(other.choice.choice({"M": 64}).timings) == 3


def summed(name: str) -> hi.Fusion:
    """Return a matmul with an all-reduce. `fused` and `ring` divide M, other strategies do not."""
    with hi.Fusion(name) as fusion:
        a, b = hi.tensor("a", ["M", 32], "f32"), hi.tensor("b", [32, 16], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(SIZE))
    a.shard(1, mesh)
    b.shard(0, mesh)
    c.set_device_mesh(mesh)
    return fusion


def call_summed(executor: Executor, m: int) -> None:
    torch.manual_seed(len(CALLED) + 1000 * m)
    a, b = torch.randn(m, 32), torch.randn(32, 16)
    (c,) = executor(a.chunk(SIZE, 1)[RANK].contiguous(), b.chunk(SIZE)[RANK].contiguous())
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


@case
def sizes_that_do_not_fit_a_candidate_run_another() -> None:
    with times({"fused": 100.0}):
        for sizes in (None, {"M": 64}):
            executor = hi.compile(summed("misfits"), tune=2, sizes=sizes)
            for number in range(90):
                call_summed(executor, (64, 64, 65)[number % 3])
                if sizes is not None:
                    break  # all sizes run the program that is chosen for 64
            assert taken(executor) == ("fused", "measured")


@case
def a_sequential_candidate_that_was_not_tried_runs_the_sizes_that_fit_no_other() -> None:
    honest = trials.Trial._too_long

    def too_slow(self: trials.Trial, challenger: Candidate) -> str:
        return "too slow" if challenger.strategy == "sequential" else honest(self, challenger)

    def without_push(self: Ranges, sizes: Mapping[str, int], honest: Any = Ranges.rivals) -> Any:
        return tuple(timing for timing in honest(self, sizes) if timing.candidate.strategy != "push")

    with (
        times({"fused": 100.0}),
        mock.patch.object(trials.Trial, "_too_long", too_slow),
        mock.patch.object(Ranges, "rivals", without_push),
    ):
        executor = hi.compile(summed("left_out"), tune=2)
        for _ in range(3):
            call_summed(executor, 64)
        assert taken(executor) == ("fused", "measured")
        reasons = [
            it.reason for it in executor.choice.choice({"M": 64}).impossible if it.candidate.strategy != "pipeline"
        ]
        assert reasons.count("too slow") == 1
        assert not any(
            it.candidate.strategy == "sequential" and "estimate" in it.reason
            for it in executor.choice.choice({"M": 64}).impossible
        )
        call_summed(executor, 65)
        assert CALLED[-1] == "sequential"


@case
def times_of_zero_and_calls_without_rows_are_no_error() -> None:
    with times(dict.fromkeys(STRATEGIES, 0.0)):
        executor = hi.compile(rows(name="no_time"), tune=2)
        for _ in range(4):
            call(executor)
        assert taken(executor)[1] == "estimated"
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="no_rows"), tune=2)
        for number in range(4):
            call(executor, m=SIZE * (number % 2))
        assert taken(executor, 0) == ("ring", "measured")


@case
def candidates_for_which_the_limit_has_no_room_beside_the_best_are_left_out() -> None:
    with times({"ring": 100.0}), hi.knobs.scope(symmetric_limit=10_000):
        executor = hi.compile(rows(name="no_room"), tune=2)
        assert executor.session is not None
        for _ in range(3):
            call(executor)
        best, source = taken(executor)
        reasons = [it.reason for it in executor.choice.choice({"M": 64}).impossible if it.candidate.strategy != best]
        assert source == "measured"
        assert sum("has no room for it beside" in reason for reason in reasons) == 2, reasons
        memory = executor.session.groups.memory
        assert memory is not None
        meetings = memory.meetings
        call(executor)
        assert memory.meetings == meetings


@case
def no_loser_holds_plans() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="early"), tune=2)
        call(executor)
        best = executor.choice.choice({"M": 64}).taken
        assert {c for c, each in executor.executors.items() if each.plans} == {best}  # type: ignore[attr-defined]


@case
def a_call_in_a_signal_handler_is_refused_in_a_trial() -> None:
    honest = trials.Trial._duel

    def interrupted(self: trials.Trial, *candidates: Candidate) -> Any:
        with pytest.raises(HostIRError, match="is called while this thread runs another call"):
            call(executor)
        return honest(self, *candidates)

    with times({"ring": 100.0}), mock.patch.object(trials.Trial, "_duel", interrupted):
        executor = hi.compile(rows(name="handler"), tune=2)
        for _ in range(3):
            call(executor)
        assert taken(executor) == ("ring", "measured")


@case
def a_call_of_another_range_in_a_signal_handler_is_refused_in_a_trial() -> None:
    honest, refused = Session.exchange, list[str]()

    def interrupted(self: Session, key: str, *args: Any, **options: Any) -> list[str]:
        if key == "trial" and RANK == 1:
            with pytest.raises(HostIRError, match="is called while this thread runs another call"):
                call(executor)
            refused.append(key)
        return honest(self, key, *args, **options)

    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="handlers"), tune=2)
        call(executor)
        with mock.patch.object(Session, "exchange", interrupted):
            call(executor, 1024)
        assert bool(refused) == (RANK == 1)
        CALLED.clear()
        assert taken(executor, 1024) == ("ring", "measured")


@case
def after_the_end_of_its_group_a_trial_refuses_calls() -> None:
    group = dist.new_group(list(range(SIZE)))
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="ended"), tune=2, group=group)
        for _ in range(6):
            call(executor)
        dist.destroy_process_group(group)
        later = hi.compile(rows(name="ended"), tune=2, group=dist.new_group(list(range(SIZE))))
        with pytest.raises(HostIRError, match="@ended is called after the end of its session"):
            call(executor)
        for _ in range(3):
            call(later)
        assert taken(later) == ("ring", "measured")


@case
def an_input_of_a_wrong_shape_on_one_rank_is_named_on_the_others() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="shape"), tune=2)
        for number in range(25):
            if number in (0, 5, 20):
                dist.barrier()
                time.sleep(0.3 * (RANK != 1))  # otherwise the others may already run the call
                wrong = (1,) * (RANK == 1)
                with pytest.raises(HostIRError, match=r"input %a of rank 1 has shape \[32, 32, 1\]"):
                    executor(torch.zeros(64 // SIZE, 32, *wrong), torch.zeros(32, 16))
                CALLED.clear()
            call(executor)
        assert taken(executor) == ("ring", "measured")


@case
def a_wrong_input_fails_as_without_a_trial() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="wrong"), tune=2)
        for number in range(3):
            if number in (0, 2):
                with pytest.raises(HostIRError, match=r"dtype torch\.float64"):
                    executor(torch.zeros(64 // SIZE, 32, dtype=torch.float64), torch.zeros(32, 16))
            call(executor)
        assert taken(executor) == ("ring", "measured")


@case
def a_recomputation_runs_the_program_of_its_forward_pass() -> None:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with times({"ring": 100.0}), hostir.torch.install(tune=2):
        weight = torch.randn(8, 24, requires_grad=True)

        def layer(x: torch.Tensor) -> torch.Tensor:
            y = hostir.torch.all_gather_matmul(x, weight, group)
            return torch.relu(y)

        for step in range(25):
            x = torch.randn(16, 8, requires_grad=True)
            CALLED.clear()
            first, second = (checkpoint(layer, part, use_reentrant=False) for part in x.chunk(2))
            forward = CALLED[:]
            CALLED.clear()
            (first * 2).sum().backward()
            repeated = CALLED[:1]
            CALLED.clear()
            second.sum().backward()
            repeated += CALLED[:1]
            assert repeated == forward[-2:], (step, repeated, forward)
        (row,) = [
            row
            for row in hostir.torch.report()
            if row.strategy.startswith("ring") and "all_gather_matmul" in row.operator
        ]
        assert row.why[0].startswith("measured on "), row
        for name, executor in group_named(group).compiled.items():
            if name[0].__name__.startswith("all_gather_matmul"):
                assert sorted(len(each.plans) > 0 for each in executor.executors.values()) == [False] * 3 + [True]


@case
def compiled_and_eager_layers_are_tried_and_give_the_same_gradients() -> None:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with times({"fused": 100.0}), hostir.torch.install(tune=2):

        def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = hostir.torch.all_gather_matmul(x, w, group)
            return y

        compiled = torch.compile(layer, backend="aot_eager")
        torch.manual_seed(7)
        everyone, w = torch.randn(SIZE * 8, 16), torch.randn(16, 12)
        x = everyone.chunk(SIZE)[RANK].clone().requires_grad_()
        for step in range(25):
            x.grad = None
            (compiled if step % 2 else layer)(x, w).square().sum().backward()
            expected = SIZE * (2 * everyone @ w @ w.t()).chunk(SIZE)[RANK]
            torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=1e-3)


@case
def a_trial_keeps_the_plans_of_other_ranges() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="kept"), tune=2)
        call(executor, 64)
        (ring,) = (each for each in executor.executors.values() if each.plans)  # type: ignore[attr-defined]
        (plan,) = ring.plans.values()
        bound = dict(ring.bound)
    with times({"fused": 100.0}):
        call(executor, 1024)
        assert taken(executor, 1024)[0] == "fused"
        assert list(ring.plans.values()) == [plan]
        assert ring.bound == bound
        meetings = executor.session.groups.memory.meetings  # type: ignore[union-attr]
        call(executor, 64)
        assert executor.session.groups.memory.meetings == meetings  # type: ignore[union-attr]


@case
def a_wrong_out_is_refused_before_the_trial() -> None:
    a, b = torch.randn(64 // SIZE, 32), torch.randn(32, 16)
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="wrong_out"), tune=2)
        with pytest.raises(HostIRError, match=r"out= for %c of rank . has shape \[3, 3\]"):
            executor(a, b, out=[torch.zeros(3, 3)])
        with pytest.raises(HostIRError, match=r"out= for %c of rank 1 has shape \[3, 3\]"):
            executor(a, b, out=torch.zeros(3, 3) if RANK == 1 else torch.zeros(64, 16))
        CALLED.clear()
        c = torch.full((64, 16), torch.nan)
        assert executor(a, b, out=c)[0] is c
        assert not c.isnan().any()
        assert taken(executor) == ("ring", "measured")


@case
def an_input_that_requires_gradients_on_one_rank_is_refused_before_the_trial() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="gradients"), tune=2)
        with pytest.raises(HostIRError, match="input %a requires gradients"):
            executor(torch.randn(64 // SIZE, 32, requires_grad=RANK == 1), torch.randn(32, 16))
        CALLED.clear()
        assert taken(executor)[1] == "estimated"
        call(executor)
        assert taken(executor) == ("ring", "measured")


@case
def a_rank_without_memory_for_a_trial_is_named_on_the_others() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="no_memory_left"), tune=2)
        full = mock.patch.object(trials.Trial, "_separate", side_effect=torch.OutOfMemoryError("no memory left"))
        words = r"^no memory left" if RANK == 1 else "rank 1 was interrupted in .* by OutOfMemoryError: no memory left"
        with full if RANK == 1 else contextlib.nullcontext(), pytest.raises((HostIRError, RuntimeError), match=words):
            call(executor)
        CALLED.clear()
        call(executor)
        assert taken(executor) == ("ring", "measured")


@case
def only_the_call_of_the_caller_writes_to_its_out() -> None:
    honest, c = trials.Trial._conclude, torch.full((64, 16), torch.nan)

    def conclude(self: trials.Trial) -> None:
        assert c.isnan().all()
        honest(self)

    with times({"ring": 100.0}), mock.patch.object(trials.Trial, "_conclude", conclude):
        executor = hi.compile(rows(name="out"), tune=2)
        executor(torch.randn(64 // SIZE, 32), torch.randn(32, 16), out=c)
        assert not c.isnan().any()


@case
def a_forked_child_is_refused_before_it_asks_the_store() -> None:
    with times({"ring": 100.0}):
        executor = hi.compile(rows(name="forked"), tune=2)
        call(executor)
        child = os.fork()
        if child == 0:
            with mock.patch.object(trials.Trial, "_takes_posted_result", side_effect=SystemError):
                try:
                    call(executor, 1024)
                except HostIRError as refusal:
                    os._exit(int("fork" not in str(refusal)))
                finally:
                    os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        call(executor, 1024)


@case
def a_champion_whose_memory_was_released_is_begun_anew() -> None:
    plans, honest = list[tuple[str, Any]](), trials.Trial._begin

    def begin(self: trials.Trial, candidate: Candidate, inputs: Sequence[Any], out: Any) -> None:
        honest(self, candidate, inputs, out)
        plans.append((candidate.strategy, next(iter(self.execute(candidate).plans.values()))))

    recorded = mock.patch.object(trials.Trial, "_begin", begin)
    with times({"ring": 100.0}), hi.knobs.scope(symmetric_limit=10_000), recorded:
        executor = hi.compile(rows(name="begun_anew"), tune=2)
        call(executor)
        best = taken(executor)[0]
        assert len([strategy for strategy, _ in plans if strategy == best]) == 3  # two candidates had no room beside it
        assert len({id(plan) for strategy, plan in plans if strategy == best}) == 3


def die() -> None:
    """Let rank 1 die in the middle of a trial."""
    honest = trials.Trial._duel

    def killed(self: trials.Trial, *candidates: Candidate) -> Any:
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(self, *candidates)

    with times({"ring": 100.0}), mock.patch.object(trials.Trial, "_duel", killed):
        call(hi.compile(rows(name="dies"), tune=2))


def main() -> None:
    with session("cpu"):
        if sys.argv[1:] == ["--die"]:
            return die()
        for name in sys.argv[1:]:
            CASES[name]()
            dist.barrier()
            sys.stdout.write(f"PASS {name} {RANK}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
