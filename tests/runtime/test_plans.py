"""What the device reports of plans that are not the latest. Streams and what kernels say are fakes here."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch

from hostir.ir.source import HostIRError, error
from hostir.runtime import plans
from hostir.runtime.cuda import CudaPlan
from hostir.runtime.executor import Executor
from tests.runtime import fake_graphs
from tests.runtime.fake_graphs import Device, Event
from tests.runtime.small_programs import alone, said

RELU = alone("%c: f32[M] = allocate\n  relu %a -> %c", "%a: f32[M]")


class Kernels:
    """What kernels of a plan report: each thing once."""

    def __init__(self, *reports: str) -> None:
        self.reports = [*reports]
        self.stalls = ["a table of theirs"]

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
    e._plan.one_sided = Kernels(*reports)  # type: ignore[assignment]
    return e._plan


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
    for size in range(1, 6):
        called(executor, size, *(["block 0 stays away"] if size == 3 else []))
    assert raised(executor, 5, calls=2 * len(executor.plans)) == ["block 0 stays away"]


def test_what_several_plans_report_is_said_together(executor: Executor) -> None:
    for size in (1, 2):
        called(executor, size, f"block {size} stays away")
    message = said(executor.synchronize)
    assert "block 1 stays away" in message
    assert "block 2 stays away" in message
    executor.synchronize()


def test_of_a_broken_machine_all_plans_say_the_same_once(executor: Executor) -> None:
    for size in (1, 2):
        called(executor, size)
    executor._machine.broken = "a call failed"
    assert said(executor.synchronize).count("cannot run again") == 1


def test_a_plan_that_made_room_is_asked_until_the_device_is_done_with_it(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = False
    monkeypatch.setattr(plans, "KEPT", 1)
    monkeypatch.setattr(Event, "query", lambda event: done)
    kernels = called(executor, 1).one_sided
    held = weakref.ref(next(iter(executor.plans.values())))
    assert raised(executor, 2, calls=5) == []
    assert isinstance(kernels, Kernels)
    kernels.reports.append("block 0 stays away")
    assert raised(executor, 2, calls=2) == ["block 0 stays away"]
    kernels.reports.append("block 1 stays away")
    done = True
    assert raised(executor, 2, calls=6) == ["block 1 stays away"]
    gc.collect()
    assert held() is None


def test_a_plan_that_can_report_nothing_goes_at_once(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 1)
    executor(torch.ones(1))
    held = weakref.ref(executor._plan)
    executor(torch.ones(2))
    gc.collect()
    assert held() is None


def test_what_a_plan_reports_whose_memory_went_is_raised_by_the_call_that_took_its_place(executor: Executor) -> None:
    plan = called(executor, 1, "block 0 stays away")
    plan.memory = types.SimpleNamespace(gone=True)  # type: ignore[assignment]
    assert raised(executor, 2, calls=3) == ["block 0 stays away"]
    assert plan not in executor.plans.values()


def test_what_it_reports_is_not_lost_where_there_is_no_plan_in_its_place(executor: Executor) -> None:
    plan = called(executor, 1, "block 0 stays away")
    plan.memory = types.SimpleNamespace(gone=True)  # type: ignore[assignment]
    said(lambda: executor(torch.ones(2, 2)))
    assert raised(executor, 2, calls=3) == ["block 0 stays away"]


def test_a_call_in_a_capture_asks_for_its_own_plan_alone(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 1)
    called(executor, 1)
    kernels = called(executor, 2).one_sided
    monkeypatch.setattr(Event, "query", lambda event: pytest.fail("an event of another stream is asked for"))
    Device.callers_capture = True
    assert raised(executor, 2, calls=3) == []
    assert isinstance(kernels, Kernels)
    kernels.reports.append("block 0 stays away")
    assert raised(executor, 2, calls=1) == ["block 0 stays away"]
