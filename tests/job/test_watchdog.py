"""The watchdog: it frees observed plans on the caller's thread, and ends runs that other ranks fail or do not make."""

from __future__ import annotations

import io
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from hostir.ir.source import Diagnostic, HostIRError
from hostir.job import watchdog
from hostir.job.links import RankEvent
from hostir.job.watchdog import GuestWatchdog, Watchdog


class Plan:
    """A plan that records the thread on which it is freed. `number`: its progress; None if the progress is unknown."""

    checks = 0

    def __init__(self, freed_on: list[str], number: int | None = None) -> None:
        self.freed_on, self.number = freed_on, number

    def __del__(self) -> None:
        self.freed_on.append(threading.current_thread().name)

    def in_flight(self) -> list[object]:
        return []

    def describe(self, op: object) -> str:
        return ""

    def progress(self) -> object:
        Plan.checks += 1
        time.sleep(1e-4)
        return self.number

    def reported_problem(self) -> str:
        return ""


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    monkeypatch.setattr(watchdog, "PERIOD", 1e-4)
    watching = Watchdog(None, 0, 1, 60.0, 30.0)
    yield watching
    watching.close()


@pytest.mark.parametrize("number", [None, 7])
def test_a_plan_is_freed_on_the_callers_thread(dog: Watchdog, number: int | None) -> None:
    freed_on: list[str] = []
    Plan.checks = 0
    for _ in range(200):
        dog.observe(Plan(freed_on, number))
        time.sleep(2e-4)
    assert len(freed_on) == 199
    assert set(freed_on) == {threading.current_thread().name}
    assert Plan.checks > 20


def test_no_plan_is_freed_during_a_capture(dog: Watchdog) -> None:
    freed_on: list[str] = []
    dog.observe(Plan(freed_on))
    captured = Plan(freed_on)
    dog.observe(captured, capturing=True)
    dog.observe(captured, capturing=True)
    assert not freed_on
    assert len(dog.replaced) == 1, "a plan that is captured again replaces nothing"
    dog.observe(captured)
    assert freed_on == [threading.current_thread().name]
    assert weakref.ref(captured)() is dog.plan


class Running(Plan):
    """A plan that runs until the watchdog gives its run up."""

    def __init__(self) -> None:
        super().__init__([], number=7)
        self.given_up: list[str] = []

    def in_flight(self) -> list[object]:
        return [] if self.given_up else [object()]

    def give_up(self, problem: HostIRError) -> None:
        self.given_up.append(str(problem))


def test_a_call_that_another_rank_abandons_ends_the_current_run(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STILL", 1e-3)
    dog.observe(running := Running())
    dog.links.spread(RankEvent("abandoned", 1, "rank 1, 'relu %a -> %b': on strike"))
    deadline = time.monotonic() + 10
    while not running.given_up and time.monotonic() < deadline:
        time.sleep(1e-3)
    (text,) = running.given_up
    assert (
        "a call ended midway on another rank, and what rank 0 has issued may wait for its rest: rank 1, 'relu" in text
    )
    assert dog.disturbed


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (RankEvent("died", 2, "its process has ended"), ["first, rank 2 died: its process has ended", "first, reset"]),
        (RankEvent("died", 1, "its process has ended"), ["first, reset"]),
        (None, ["first, reset"]),
    ],
)
def test_the_error_of_an_abandoned_call_names_a_death_that_is_noticed_after_it(
    later: RankEvent | None, told: list[str], dog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOSS", 0.2)
    dog.everyone = {0, 1, 2}
    dog.take(RankEvent("abandoned", 1, "reset"))
    arrival = threading.Timer(0.05, lambda: later is not None and dog.links.spread(later))
    arrival.start()
    failure = dog.blame(HostIRError(Diagnostic("rank 0, 'allgather': closed by its peer")), abandoned=True)
    arrival.join()
    assert [text for _, text in failure.diagnostics[0].notes] == told


def test_a_misalignment_reported_while_a_call_begins_disturbs_the_next_call(dog: Watchdog) -> None:
    dog.take(RankEvent("misaligned", 1, "the calls of the ranks do not line up"))
    dog.resume()
    assert dog.disturbed


@pytest.mark.parametrize("early", [False, True])
def test_calls_abandoned_before_a_renewal_are_forgotten_and_later_ones_are_not(dog: Watchdog, early: bool) -> None:
    before, after = RankEvent("abandoned", 1, "before", 0), RankEvent("abandoned", 1, "after", 1)
    dog.take(before)
    dog.take(before)
    assert dog.abandoned == before
    if early:  # the other rank has finished the renewal before this rank
        dog.take(after)
    dog.renewed()
    assert dog.abandoned == (after if early else None)
    dog.take(RankEvent("abandoned", 2, "late", 0))
    assert dog.abandoned == (after if early else None)
    dog.take(after)
    assert dog.abandoned == after


def test_no_rank_is_waited_for_after_a_renewal_because_all_ranks_have_called(dog: Watchdog) -> None:
    dog.everyone = {0, 1}
    for event in (RankEvent("abandoned", 1, "fails"), RankEvent("back", 1), RankEvent("back", 0)):
        dog.take(event)
    lost = RankEvent("abandoned", 0, "its call is lost")
    dog.take(lost)  # rank 0 came back to a call that raised, and rank 1 is in the call that renews
    assert dog.first == lost
    dog.renewed()
    assert dog.first is None
    dog.take(lost)  # on another rank, the event arrives after the renewal
    dog.take(RankEvent("failed", 1, "a late refusal", 0))
    assert dog.first is None
    dog.take(later := RankEvent("failed", 1, "later", 1))
    assert dog.first == later


def test_a_failure_after_a_renewal_is_the_first_one_even_if_it_arrives_before_this_rank_has_renewed(
    dog: Watchdog,
) -> None:
    """Otherwise this rank would think that all ranks have failed, and would not say that it makes calls again."""
    dog.everyone = {0, 1}
    dog.take(RankEvent("abandoned", 0, "before", 0))
    dog.take(after := RankEvent("failed", 1, "after", 1))
    dog.renewed()
    assert dog.first == after
    assert dog.failed == {1}
    assert dog.away == {0, 1}


class Waiting(Plan):
    """A plan that waits for a peer. `raised`: the error that was raised from its run."""

    raised: HostIRError | None = None

    def in_flight(self) -> list[object]:
        return ["a barrier"] if self.raised is None else []

    def describe(self, op: object) -> str:
        return str(op)

    def give_up(self, problem: HostIRError) -> None:
        self.raised = problem


def test_a_run_that_other_ranks_do_not_make_is_stopped_even_if_it_begins_after_the_report(dog: Watchdog) -> None:
    dog.links.spread(RankEvent("misaligned", 1, "rank 0 calls @a, rank 1 @b"))
    dog.links.spread(RankEvent("misaligned", 2, "rank 0 calls @a, rank 2 @b"))
    assert dog.misalign("rank 0 calls @a, rank 1 @c") == "rank 0 calls @a, rank 1 @b", "all ranks use the first report"
    plan = Waiting([])
    dog.observe(plan)
    deadline = time.monotonic() + 20
    while plan.raised is None and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert plan.raised is not None
    assert plan.raised.diagnostics[0].message == "rank 0 calls @a, rank 1 @b"
    assert "rank 0 was at a barrier" in str(plan.raised)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("raised", [None, HostIRError(Diagnostic("%a has the wrong shape"))])
@pytest.mark.parametrize("kind", [Watchdog, GuestWatchdog])
def test_a_collective_that_does_not_end_ends_the_process_even_of_a_guest(
    kind: type[Watchdog],
    raised: HostIRError | None,
    closed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    codes, late = list[int](), "'allgather %a -> %b' has not ended for 600 s"
    monkeypatch.setattr(watchdog, "PERIOD", 1e-4)
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: (codes.append(code), dog.closing.set()))
    dog = kind(None, 0, 1, 60.0, 30.0)
    if closed:  # nobody reads what the process prints
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        sys.stdout.close()
    dog.raised = raised  # by an earlier call
    dog.observe(plan := Waiting([]))
    dog.late = lambda: late
    dog.thread.join(20)
    assert codes == [1]
    assert plan.raised is None, "no call waits for it on the host"
    assert f"error: rank 0 is ended: {late}" in capsys.readouterr().err
    assert RankEvent("failed", 0, f"rank 0: {late}") in dog.links.events
    dog.close()
