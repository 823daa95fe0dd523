"""What the device reports of plans that are not the latest. Streams and what kernels say are fakes here."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch

from hostir.ir.source import HostIRError, error
from hostir.runtime import executor as plans
from hostir.runtime.cuda import machine as cuda
from hostir.runtime.cuda.machine import CudaPlan
from hostir.runtime.executor import Executor
from tests.runtime.cuda import fake_graphs
from tests.runtime.cuda.fake_graphs import Device, Event, Stream
from tests.runtime.small_programs import alone, said

RELU = alone("%c: f32[M] = allocate\n  relu %a -> %c", "%a: f32[M]")


class Kernels:
    """What kernels of a plan report: each thing once."""

    def __init__(self, *reports: str) -> None:
        self.reports = [*reports]
        self.timeouts = ["a table of theirs"]

    def problem(self) -> HostIRError | None:
        return error(self.reports.pop()) if self.reports else None


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs.install(monkeypatch)


@pytest.fixture
def executor() -> Executor:
    return fake_graphs.executor(RELU)


def called(e: Executor, size: int, *reports: str) -> CudaPlan:
    """The plan for inputs of a size, which has been called once, and whose kernels then report something."""
    e(torch.ones(size))
    assert isinstance(e._plan, CudaPlan)
    e._plan.one_sided = Kernels(*reports)
    return e._plan


def loses_its_memory(plan: CudaPlan) -> weakref.ref[CudaPlan]:
    """Has a plan's symmetric memory make room for other sizes; what tells whether anybody holds the plan."""
    plan.memory = types.SimpleNamespace(gone=True)
    return weakref.ref(plan)


def say(plan: CudaPlan, report: str) -> None:
    """Has kernels of a plan report something, after whatever has asked them before."""
    assert isinstance(plan.one_sided, Kernels)
    plan.one_sided.reports.append(report)


def raised(e: Executor, size: int, calls: int) -> list[str]:
    """The messages of so many calls with inputs of a size."""
    found = []
    for _ in range(calls):
        try:
            e(torch.ones(size))
        except HostIRError as problem:
            found.append(problem.diagnostics[0].message)
    return found


def test_what_another_plan_reports_is_raised_once_by_the_calls_that_follow(executor: Executor) -> None:
    older = [called(executor, size) for size in range(1, 6)]
    say(older[2], "block 0 stays away")
    assert raised(executor, 5, calls=2 * len(executor.plans)) == ["block 0 stays away"]


def test_what_the_latest_plan_reports_is_not_lost_among_the_others(executor: Executor) -> None:
    older = [called(executor, size) for size in range(1, 6)]
    raised(executor, 5, calls=2)  # turns are under way
    say(older[4], "block 0 stays away")
    assert raised(executor, 5, calls=12) == ["block 0 stays away"]


def test_calls_of_shapes_that_take_turns_ask_all_plans(executor: Executor) -> None:
    older = [called(executor, size) for size in range(1, 6)]
    say(older[2], "block 0 stays away")
    found = [message for call in range(12) for message in raised(executor, (1, 5)[call % 2], calls=1)]
    assert found == ["block 0 stays away"]


def test_the_first_call_of_other_shapes_raises_what_any_plan_has_reported(executor: Executor) -> None:
    for plan, block in zip([called(executor, size) for size in (1, 2)], "12", strict=True):
        say(plan, f"block {block} stays away")
    message = said(lambda: executor(torch.ones(3)))
    assert "block 1 stays away" in message
    assert "block 2 stays away" in message
    assert raised(executor, 3, calls=9) == []


def test_synchronize_says_together_what_plans_report(executor: Executor) -> None:
    plans = [called(executor, size) for size in (1, 2)]
    for plan, block in zip(plans, "12", strict=True):
        say(plan, f"block {block} stays away")
    message = said(executor.synchronize)
    assert "block 1 stays away" in message
    assert "block 2 stays away" in message
    executor.synchronize()


def test_of_a_broken_machine_all_plans_say_the_same_once(executor: Executor) -> None:
    for size in (1, 2):
        called(executor, size)
    executor._machine.broken = "a call failed"
    for _ in range(3):
        said(lambda: executor(torch.ones(2, 2)))
    assert len(executor.plans.unraised) == 1
    assert said(executor.synchronize).count("cannot run again") == 1
    assert said(lambda: executor(torch.ones(3))).count("cannot run again") == 1


@pytest.mark.parametrize("shapes", [38, 4])
def test_nothing_is_lost_where_there_are_more_shapes_than_plans(
    executor: Executor, shapes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "KEPT", 3)
    first = called(executor, 1)
    say(first, "block 0 stays away")
    found = [message for call in range(38) for message in raised(executor, 2 + call % shapes, calls=1)]
    assert found == ["block 0 stays away"]


@pytest.mark.parametrize("turn", ["next call", "other shapes", "synchronize"])
def test_a_plan_that_made_room_is_asked_until_the_device_is_done_with_it(
    executor: Executor, turn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(plans, "KEPT", 1)
    monkeypatch.setattr(Event, "query", lambda event: "made room" in done or event.stream != "caller")
    plan = called(executor, 1)
    held = weakref.ref(plan)
    assert raised(executor, 2, calls=5) == []
    assert raised(executor, 3, calls=5) == []  # not done
    say(plan, "block 0 stays away")
    if turn == "next call":
        assert raised(executor, 3, calls=3) == ["block 0 stays away"]
    elif turn == "other shapes":
        assert raised(executor, 4, calls=3) == ["block 0 stays away"]
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Event, "query", lambda event: True)
            assert "block 0 stays away" in said(executor.synchronize)
    say(plan, "block 1 stays away")
    del plan
    done.append("made room")
    assert raised(executor, 5, calls=6) == ["block 1 stays away"]
    gc.collect()
    assert held() is None


def test_the_device_is_done_with_a_plan_behind_the_latest_call_with_symmetric_memory(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, latest = called(executor, 1), Stream(name="of the latest call")
    monkeypatch.setattr(cuda, "_latest", {plan.machine.device: latest})
    behind = plan.behind()
    assert isinstance(behind, Event)
    assert behind.stream == "of the latest call"


def test_a_plan_that_can_report_nothing_goes_at_once(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 1)
    monkeypatch.setattr(Event, "query", lambda event: False)
    executor(torch.ones(1))
    held = weakref.ref(executor._plan)
    executor(torch.ones(2))
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("next_call", ["of other shapes", "refused", "synchronize"])
def test_what_a_plan_reports_whose_memory_went_is_not_lost(executor: Executor, next_call: str) -> None:
    called(executor, 2)
    plan = called(executor, 1)
    raised(executor, 2, calls=3)
    say(plan, "block 0 stays away")
    held = loses_its_memory(plan)
    del plan
    if next_call == "of other shapes":
        assert raised(executor, 3, calls=3) == ["block 0 stays away"]
    elif next_call == "refused":
        said(lambda: executor(torch.ones(2, 2)))
        assert raised(executor, 2, calls=3) == ["block 0 stays away"]
    else:
        said(lambda: executor(torch.ones(2, 2)))
        assert "block 0 stays away" in said(executor.synchronize)
    gc.collect()
    assert held() is None


def test_memory_that_went_is_not_held_for_a_plan_that_made_room(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "KEPT", 1)
    monkeypatch.setattr(Event, "query", lambda event: False)
    plan = called(executor, 1)
    raised(executor, 2, calls=2)
    held = loses_its_memory(plan)
    del plan
    raised(executor, 3, calls=1)
    gc.collect()
    assert held() is None


def test_a_plan_that_a_graph_of_the_caller_uses_is_asked_when_it_is_no_longer_kept(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "KEPT", 1)
    plan = called(executor, 1)
    Device.callers_capture = True
    executor(torch.ones(1))
    Device.callers_capture = False
    raised(executor, 2, calls=3)
    raised(executor, 3, calls=3)
    say(plan, "block 0 stays away")
    assert raised(executor, 3, calls=9) == ["block 0 stays away"]


def test_no_capture_asks_for_an_event(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 1)
    monkeypatch.setattr(Event, "query", lambda event: False)
    older = called(executor, 1)
    called(executor, 2)
    monkeypatch.setattr(Event, "query", lambda event: pytest.fail("an event is asked for"))
    Device.callers_capture = True
    assert "inside a CUDA graph capture" in said(lambda: executor(torch.ones(3)))
    say(older, "block 0 stays away")
    assert raised(executor, 2, calls=9) == ["block 0 stays away"]
