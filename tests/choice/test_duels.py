"""The winner of a duel between two candidates of a trial."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isnan, nan
from types import SimpleNamespace
from typing import Any

import pytest

from hostir.choice import trials
from hostir.choice.choices import Candidate, Timing, TrialState
from hostir.choice.trials import OTHERS, Trial

CHAMPION, CHALLENGER = Candidate("ring", 1, "triton"), Candidate("push", 1, "triton")


@pytest.mark.parametrize(
    ("device", "host", "wins"),
    [
        ((20.0, 19.0), (10.0, 10.0), True),  # the host does not count: it is faster
        ((19.0, 20.0), (10.0, 10.0), False),
        ((20.0, 20.0), (10.0, 10.0), False),  # equal: the candidate with the shorter estimate stays
        ((20.0, 18.0), (30.0, 70.0), False),  # costs of 22.5 and 31 us
        ((18.0, 20.0), (70.0, 30.0), True),
        ((18.0, 20.0), (38.0, 30.0), False),  # 23 and 22.5: nearly equal, and the device decides
        ((20.0, 18.0), (30.0, 40.0), True),  # 22.5 and 23.5
        ((20.0, 19.8), (30.0, 34.6), False),  # 22.5 and 23.5: the device does not outweigh the cost
    ],
)
def test_the_cost_decides_and_if_costs_are_nearly_equal_the_device_counts_once_more(
    device: tuple[float, float], host: tuple[float, float], wins: bool
) -> None:
    assert won([(us,) for us in device], host) is wins


def test_the_host_does_not_count_for_calls_in_graphs() -> None:
    times, host = [(20.0,), (18.0,)], (30.0, 70.0)
    assert not won(times, host)
    assert won(times, host, in_graphs=True)
    assert not won([*reversed(times)], host, in_graphs=True)
    assert won([*reversed(times)], host, in_graphs=True, uncaptured=[CHAMPION]), "it cannot be captured"
    assert not won([*reversed(times)], host, uncaptured=[CHAMPION])


def test_a_replay_counts_unless_the_host_and_the_device_take_less_for_a_call() -> None:
    both = [CHAMPION, CHALLENGER]
    times, host = [(25.0, 24.0), (23.0, 20.0)], (30.0, 70.0)
    assert not won(times, host), "costs of 25.5 and 32.5 us"
    assert won(times, host, replaying=both), "costs of 29 and 27"
    assert won([(25.0, 24.0), (33.0, 20.0)], (30.0, 20.0), replaying=both), "costs of 29 and 20"
    assert not won([(25.0, 24.0), (33.0, 20.0)], (30.0, 31.0), replaying=both), "29 and 31"
    assert not won([(25.0, 24.0), (33.0, 20.0)], (30.0, 36.0), replaying=both), "29 and 37"
    assert not won([(25.0,), (33.0,)], (30.0, 20.0), replaying=both), "its calls were not timed"


def test_costs_of_calls_are_relative_to_the_time_of_the_champion_in_its_first_duel() -> None:
    trial = object.__new__(Trial)
    trial.progress, trial.fastest, trial.in_graphs, trial.uncaptured = TrialState(CHAMPION), {}, False, set()
    trial.replaying, trial.host = {CHALLENGER}, {CHAMPION: 0.0, CHALLENGER: 5.0}
    trial._compare(CHAMPION, CHALLENGER, {CHAMPION: [30.0], CHALLENGER: [50.0, 40.0]})
    assert trial.progress.times == {CHAMPION: 30.0, CHALLENGER: 40.0}
    trial._compare(CHAMPION, CHALLENGER, {CHAMPION: [33.0], CHALLENGER: [50.0, 37.0]})
    assert trial.progress.times == {CHAMPION: 30.0, CHALLENGER: pytest.approx(37 * 30 / 33)}


@pytest.mark.parametrize(
    ("call", "host", "plain"), [(37.0, 10.0, True), (39.0, 10.0, False), (20.0, 37.0, True), (20.0, 39.0, False)]
)
def test_calls_are_replayed_unless_the_host_and_the_device_take_5_percent_less_without(
    call: float, host: float, plain: bool
) -> None:
    trial = object.__new__(Trial)
    trial.progress, trial.fastest, trial.in_graphs, trial.uncaptured = TrialState(CHAMPION), {}, False, set()
    trial.replaying, trial.host = {CHALLENGER}, {CHAMPION: 0.0, CHALLENGER: host}
    trial.progress.plain.add(CHALLENGER)
    replay = 40.0 - OTHERS  # it takes 40 us between replays of other graphs
    trial._compare(CHAMPION, CHALLENGER, {CHAMPION: [replay, 30.0], CHALLENGER: [replay, call]})
    assert trial.progress.plain == ({CHALLENGER} if plain else set())
    assert trial.progress.times[CHALLENGER] == pytest.approx(max(call, host) if plain else replay), "as measured"


@pytest.mark.parametrize(
    ("champion", "challenger", "wins"),
    [
        ((86.0, 84.0), (87.0, 77.0), True),
        ((87.0, 77.0), (86.0, 84.0), False),
        ((84.0, 86.0), (77.0, 90.0), True),
        ((80.0, 90.0), (81.0, 80.0), False),  # equal: the replay decides
    ],
)
def test_the_time_of_the_device_is_that_of_a_replay_or_of_a_call(
    champion: tuple[float, float], challenger: tuple[float, float], wins: bool
) -> None:
    assert won([champion, challenger], (10.0, 10.0)) is wins


def won(
    device: Sequence[Sequence[float]],
    host: Sequence[float],
    *,
    in_graphs: bool = False,
    uncaptured: Sequence[Candidate] = (),
    replaying: Sequence[Candidate] = (),
) -> bool:
    """Return True if the challenger wins, with these times of the champion and of the challenger."""
    trial = object.__new__(Trial)
    trial.progress, trial.fastest, trial.in_graphs, trial.uncaptured = (
        TrialState(CHAMPION),
        {},
        in_graphs,
        {*uncaptured},
    )
    trial.replaying = {*replaying}
    trial.host = dict(zip((CHAMPION, CHALLENGER), host, strict=True))
    trial._compare(CHAMPION, CHALLENGER, dict(zip((CHAMPION, CHALLENGER), device, strict=True)))
    return trial.progress.best == CHALLENGER


def test_a_duel_measures_replays_and_calls_and_the_host_in_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, order, clock = object.__new__(Trial), list[str](), [0.0]
    device = {"replay A": 30.0, "call A": 25.0, "replay B": 28.0, "call B": nan}
    host = {"replay A": 9.0, "call A": 40.0, "replay B": 9.0, "call B": 50.0}

    class Lap:
        def stop(self) -> None:
            self.time = device[order[-1]]

        def us(self) -> float:
            return self.time

    def run(name: str) -> Callable[[], None]:
        def issued() -> None:
            order.append(name)
            clock[0] += host[name] / 1e6

        return issued

    monkeypatch.setattr(trials.time, "perf_counter", lambda: clock[0])
    trial.device, trial.seconds, trial.host = "cuda", 0.0, {CHAMPION: 1.0, CHALLENGER: 1.0}
    trial.runs = {
        CHAMPION: {trials.REPLAY: run("replay A"), trials.CALL: run("call A")},
        CHALLENGER: {trials.REPLAY: run("replay B"), trials.CALL: run("call B")},
    }
    trial.stopwatch = SimpleNamespace(start=Lap)  # type: ignore[assignment]
    issued = list[int]()  # the runs that were issued before each synchronization
    executor = SimpleNamespace(synchronize=lambda: issued.append(len(order)))
    trial.execute = lambda candidate: executor  # type: ignore[assignment, return-value]
    other: list[float] = [7.0, 45.0]  # the other rank's host times
    trial.replaying = {CHAMPION, CHALLENGER}

    def exchanged(self: Trial, mine: Any) -> list[Any]:
        times, *_, seconds = mine
        return [mine, [times, other, [True, False], seconds + 1]]

    monkeypatch.setattr(Trial, "_exchange", exchanged)
    medians = trial._duel(CHAMPION, CHALLENGER)
    assert medians[CHAMPION] == [30.0, 25.0]
    assert medians[CHALLENGER][0] == 28.0
    assert isnan(medians[CHALLENGER][1])
    assert trial.host == pytest.approx({CHAMPION: 40.0, CHALLENGER: 50.0})
    once = ["replay A", "call A", "replay B", "call B"]
    assert order[:8] == once + once[2:] + once[:2]
    assert len(order) == 4 * trials.ROUNDS["cuda"] == issued[-1]
    assert max(b - a for a, b in pairwise([0, *issued])) <= 4 * trials.QUEUED
    assert trial.seconds >= 1, "that of the slowest rank"
    assert trial.replaying == {CHAMPION}, "all ranks must find the same winner"
    other[:] = [70.0, 45.0]
    trial._duel(CHAMPION, CHALLENGER)
    assert trial.host == pytest.approx({CHAMPION: 70.0, CHALLENGER: 50.0})
    del trial.runs[CHALLENGER][trials.REPLAY]  # it cannot be captured
    trial.host[CHALLENGER] = 1.0
    trial._duel(CHAMPION, CHALLENGER)
    assert trial.host[CHALLENGER] == pytest.approx(50.0)
    trial.device, trial.host, other[:] = "cpu", {CHAMPION: 0.0, CHALLENGER: 0.0}, [0.0, 0.0]
    trial._duel(CHAMPION, CHALLENGER)
    assert trial.host == {CHAMPION: 0.0, CHALLENGER: 0.0}, "on a CPU a call is the work"


@pytest.mark.parametrize(
    ("estimate", "calls", "captured", "ways"),
    [
        (400.0, "eager", True, [trials.REPLAY, trials.CALL]),
        (600.0, "eager", True, [trials.REPLAY]),
        (400.0, "out", False, [trials.CALL]),
        (400.0, "graph", True, [trials.REPLAY]),
        (400.0, "graph", False, [trials.CALL]),
    ],
)
def test_short_calls_are_timed_besides_their_replays_unless_the_caller_captures_them(
    estimate: float, calls: str, captured: bool, ways: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Executor:
        count, graph_refusal, plain = 0, None, ""
        machine, session, calls = "cuda", None, None

        def __call__(self, *inputs: object, out: object = None) -> list[str]:
            self.count += 1
            assert self.plain or self.count == 1, "later calls may be replayed"
            return ["result"]

        def record(self, inputs: object, outs: object) -> SimpleNamespace:
            if not captured:
                raise RuntimeError("no capture")
            return SimpleNamespace(replay=lambda: None)

        def synchronize(self) -> None: ...

        def issue_plainly(self, reason: str) -> None:
            self.plain, self.graph_refusal = reason, reason if replays_itself else "NCCL"

    executor, chosen, replays_itself = Executor(), SimpleNamespace(calls=calls), True
    ranges: Any = SimpleNamespace(choice=lambda sizes: None, budget=1.0, decider=chosen)

    def find(*_: object) -> Any:
        return executor

    trial = Trial("trial", [Timing(CHAMPION, estimate)], ranges, {}, find, find)
    monkeypatch.setattr(Trial, "_exchange", lambda self, mine: [mine])
    trial._begin(CHAMPION, [], None)
    assert [*trial.runs[CHAMPION]] == ways
    assert trial.uncaptured == (set() if captured else {CHAMPION})
    assert executor.count == trials.WARM["cuda"] + (0 if calls == "graph" else trials.ISSUED)
    before = executor.count
    trial.runs[CHAMPION][ways[-1]]()
    assert executor.count - before == (ways[-1] == trials.CALL)
    assert not trial.replaying, "calls without out= are not replayed"
    for replays_itself in (False, True):
        trial._begin(CHAMPION, [], [])
        assert trial.replaying == ({CHAMPION} if captured and replays_itself else set())
    captured = True
    trial._begin(CHAMPION, [], None)
    assert not trial.uncaptured, "a later capture may succeed"
    assert not trial.replaying


@pytest.mark.parametrize(("ways", "reason"), [(1, ""), (2, "not tried: HOSTIR_TUNE allows trials 0.005 s")])
def test_the_time_for_a_duel_is_that_of_all_ways_to_run_the_candidates(ways: int, reason: str) -> None:
    trial = object.__new__(Trial)
    trial.progress, trial.device, trial.seconds, trial.budget = TrialState(CHAMPION), "cuda", 0.0, 0.005
    trial.ranges = SimpleNamespace(compiling={})  # type: ignore[assignment]
    trial.estimates = {CHAMPION: 100.0, CHALLENGER: 100.0}  # 4 untimed and 15 timed runs of both take 3.8 ms
    names = [trials.REPLAY, trials.CALL][:ways]
    trial.runs = {CHAMPION: dict.fromkeys(names, list)}
    assert trial._too_long(CHALLENGER) == reason


@pytest.mark.parametrize("in_graphs", [False, True])
def test_the_times_of_a_candidate_that_cannot_be_captured_are_not_times_of_replays(
    in_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, published = object.__new__(Trial), list[TrialState]()
    monkeypatch.setattr(Trial, "_publish", lambda self: published.append(self.progress))
    trial.progress, trial.in_graphs, trial.uncaptured = TrialState(CHAMPION), in_graphs, {CHALLENGER}
    trial.progress.times |= {CHAMPION: 20.0, CHALLENGER: 30.0}
    trial.progress.replays |= {CHAMPION: 19.0, CHALLENGER: 30.0}
    trial.runs, trial.inputs, trial.began = {}, [], 0.0
    trial.execute = lambda candidate: SimpleNamespace(unbind=list)  # type: ignore[assignment, return-value]
    trial._finish_times()
    trial._conclude()
    assert published == [trial.progress]
    assert trial.progress.replays == {CHAMPION: 19.0}
    assert trial.progress.times == {CHAMPION: 20.0, **({} if in_graphs else {CHALLENGER: 30.0})}
    assert trial.progress.refused == ({CHALLENGER: "it cannot be captured in a CUDA graph"} if in_graphs else {})


def test_the_next_process_takes_the_winner_of_a_trial() -> None:
    """Its replays may have decided a duel, or the host may have been slower in a later one."""
    trial = object.__new__(Trial)
    trial.progress, trial.uncaptured, trial.in_graphs = TrialState(CHAMPION), set(), False
    trial.progress.times |= {CHAMPION: 20.0, CHALLENGER: 19.5}
    trial._finish_times()
    assert trial.progress.times == {CHAMPION: 20.0, CHALLENGER: 20.01}
    trial.progress.times[CHALLENGER] = 30.0
    trial._finish_times()
    assert trial.progress.times[CHALLENGER] == 30.0


def test_a_rank_takes_the_result_of_the_others_with_all_times() -> None:
    """The ranks must also agree on the candidate that captures run, which follows from the times."""
    stored: dict[str, str] = {}
    store = SimpleNamespace(set=stored.__setitem__, get=stored.get, check=lambda keys: keys[0] in stored)
    job = SimpleNamespace(size=2, first_store=store, asking=lambda where: contextlib.nullcontext())
    mine, theirs = (object.__new__(Trial) for _ in range(2))
    for trial in (mine, theirs):
        trial.name, trial.session, trial.progress = "trial", job, TrialState(CHAMPION)  # type: ignore[assignment]
        trial.in_places = False
    assert not mine._takes_posted_result()
    theirs.progress.best = CHALLENGER
    theirs.progress.times |= {CHAMPION: 20.0, CHALLENGER: 1 / 3}
    theirs.progress.replays |= {CHALLENGER: 2 / 3}
    theirs.progress.plain |= {CHAMPION}
    theirs.in_places = True
    theirs._post_result()
    assert mine._takes_posted_result()
    assert mine.progress == theirs.progress
    assert mine.in_places, "such times are not kept"


def test_a_challenger_that_cannot_be_captured_is_left_out_of_calls_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = object.__new__(Trial)
    executor = SimpleNamespace(has_plan=lambda inputs: True, prepare=lambda inputs, out: None)
    trial.execute = lambda candidate: executor  # type: ignore[assignment, return-value]
    trial.progress, trial.device, trial.session = TrialState(CHAMPION), "cpu", None
    trial.ranges = SimpleNamespace(compiling={})  # type: ignore[assignment]
    monkeypatch.setattr(Trial, "_exchange", lambda self, mine: [mine])
    monkeypatch.setattr(Trial, "_begin", lambda self, candidate, inputs, out: self.uncaptured.add(candidate))
    for trial.in_graphs, reason in ((False, ""), (True, "it cannot be captured in a CUDA graph")):
        trial.uncaptured = set()
        assert trial._prepared(CHALLENGER, [], None) == reason
