"""CUDA graphs of calls with `out=`: captures, replays, failed captures, and the lifetime of graphs."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hostir.call.executor import Executor
from hostir.ir.program import Program
from hostir.ir.source import error
from hostir.job import calls
from hostir.job import groups as process_groups
from hostir.job import session as sessions
from hostir.job.groups import Groups
from hostir.job.watchdog import Watchdog
from hostir.machines.cuda import memory as memories
from hostir.machines.cuda import uses
from hostir.machines.cuda.graphs import MAX_GRAPHS
from hostir.machines.cuda.machine import CudaPlan
from hostir.machines.cuda.uses import release
from tests.call.small_programs import BESIDE, alone, program, said
from tests.counting import calls_of
from tests.machines.cuda import fake_graphs
from tests.machines.cuda.fake_graphs import CPU, Current, Device, Stream, alive, log, user_objects


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs.install(monkeypatch)


def executor(p: Program | None = None, **options: Any) -> Executor:
    return fake_graphs.executor(p or alone(BESIDE), **options)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.randn(8, 5)


def renewed(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Put new numbers into the inputs and NaN into the output; return the expected output."""
    a.normal_()
    b.normal_()
    c.fill_(float("nan"))
    return (a @ b).relu()


def how(e: Executor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> str:
    """Return the log of a call, whose result must be right."""
    exact = renewed(a, b, c)
    log.clear()
    (result,) = e(a, b, out=c)
    assert result is c
    assert torch.allclose(c, exact, atol=1e-5)
    steps = [step if isinstance(step, str) else step[0] for step in log]
    return " ".join(dict.fromkeys(step for step in steps if step in ("eager", "capture", "replay", "leave", "release")))


def test_the_third_call_at_the_same_addresses_is_captured_and_all_later_ones_are_replayed() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    assert [how(e, a, b, c) for _ in range(6)] == ["eager", "eager", "capture replay", "replay", "replay", "replay"]
    assert e.graph_refusal is None
    assert Device.current.name == "caller"


def test_a_capture_has_its_own_stream_and_does_not_restrict_other_threads() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    for _ in range(3):
        e(a, b, out=c)
    (begun,) = [step for step in log if step[0] == "capture"]
    assert begun[1:3] == ("pool 0", "thread_local")
    assert begun[3] not in ("caller", *[stream.name for stream in e._machine.streams])


def test_every_set_of_addresses_has_its_own_graph() -> None:
    e, (a, b) = executor(), inputs()
    one, other = torch.empty(4, 5), torch.empty(4, 5)
    for _ in range(3):
        how(e, a, b, one)
    assert how(e, a, b, other) == "eager"
    assert how(e, a, b, one) == "replay"
    assert how(e, a, b, other) == "eager"
    assert how(e, a.clone(), b, one) == "eager"
    assert how(e, a, b, other) == "capture replay"
    assert [how(e, a, b, c) for c in (one, other, one)] == ["replay"] * 3


def test_different_shapes_at_one_address_have_different_graphs() -> None:
    body = "%c: f32[M, 5] = allocate\n  matmul %a, %b -> %c"
    e = executor(alone(body, "%a: f32[M, 8], %b: f32[8, 5]"))
    a, b, c = torch.randn(6, 8), torch.randn(8, 5), torch.empty(6, 5)
    for m in (6, 3, 6, 3, 6, 3, 6, 3):
        a.normal_()
        c.fill_(float("nan"))
        e(a[:m], b, out=c[:m])
        assert torch.allclose(c[:m], a[:m] @ b, atol=1e-5)
        assert c[m:].isnan().all()
    assert len(alive) == 2


def test_a_call_without_out_is_eager_and_returns_new_tensors() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    for _ in range(3):
        how(e, a, b, c)
    kept = [e(a, b)[0] for _ in range(4)]
    assert len({x.data_ptr() for x in (*kept, c)}) == 5
    assert len(alive) == 1


def test_in_the_callers_capture_a_call_is_issued_statement_by_statement() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    for _ in range(3):
        how(e, a, b, c)
    Device.callers_capture = True
    assert how(e, a, b, c) == "eager"
    Device.callers_capture = False
    assert how(e, a, b, c) == "replay"


@pytest.mark.parametrize(("options", "reason"), [({"graphs": False}, "graphs=False"), ({}, "machine 'gloo' has no")])
def test_an_executor_says_why_it_makes_no_graphs(options: dict[str, Any], reason: str) -> None:
    e = executor(**options) if options else Executor(alone(BESIDE), machine="gloo")
    a, b, c = *inputs(), torch.empty(4, 5)
    for _ in range(4):
        e(a, b, out=c)
    assert not alive
    assert reason in str(e.graph_refusal)


def test_a_program_that_uses_nccl_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "%c: f32[2, 4] = allocate\n  %h = allgather %a -> %c over didx\n  wait %h"
    e = executor(program(body, "%a: f32[2@didx, 4]"))
    monkeypatch.setattr(CudaPlan, "run", lambda self, inputs, outs, *current: outs)
    a, c = torch.randn(1, 4), torch.empty(2, 4)
    for _ in range(4):
        e(a, out=c)
    assert not alive
    assert "'%h = allgather %a -> %c over didx' goes through NCCL" in str(e.graph_refusal)


def test_outputs_are_copied_on_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    body = BESIDE.replace("free %t", "%r = select %c[2]")
    p = alone(body, outputs="%t, %r, %a, %c")
    a, b = inputs()
    outs = [torch.full(shape, float("nan")) for shape in ((4, 5), (5,), (4, 8), (4, 5))]
    copy, where = torch.Tensor.copy_, []

    def noted(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        where.append(Device.current.name)
        return copy(x, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    results = executor(p, graphs=False)(a, b, out=outs)
    monkeypatch.undo()
    assert where == ["caller", "caller"], "only the view and the input are copied: %t and %c are written in place"
    assert all(x is y for x, y in zip(results, outs, strict=True))
    c = (a @ b).relu()
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(outs, (a @ b, c[2], a, c), strict=True))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("begin", "RuntimeError: CUDA error: no capture begins"),
        ("kernel", "rank 0, 'matmul %a, %b -> %t': ValueError: not in a capture"),
        ("end", "RuntimeError: CUDA error: a stream has not joined"),
    ],
)
def test_after_a_failed_capture_calls_stay_eager_and_say_why_once(step: str, reason: str) -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    other = torch.empty(4, 5)
    for _ in range(3):
        how(e, a, b, other)
    how(e, a, b, c)
    how(e, a, b, c)
    Device.fails = step
    with pytest.warns(RuntimeWarning, match="@p runs without CUDA graphs") as warned:
        assert how(e, a, b, c) in ("capture eager", "capture leave release eager")
    assert warned[0].filename == __file__
    assert reason in str(e.graph_refusal)
    assert reason in str(warned[0].message)
    assert Device.current.name == "caller"
    assert Device.capture is None
    Device.fails = ""
    assert [how(e, a, b, x) for x in (c, other, c, c, c)] == ["eager"] * 5
    gc.collect()
    assert not alive


def test_the_allocator_learns_of_the_end_of_a_failed_capture() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    how(e, a, b, c)
    how(e, a, b, c)
    Device.fails = "end"
    with pytest.warns(RuntimeWarning, match="a stream has not joined"):
        e(a, b, out=c)
    assert [step for step in log if step[0] in ("leave", "release")] == [
        ("leave", 0, "pool 0"),
        ("release", 0, "pool 0"),
    ]


def test_an_interrupt_during_a_capture_ends_it() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    how(e, a, b, c)
    how(e, a, b, c)

    def interrupted(*tensors: torch.Tensor) -> None:
        raise KeyboardInterrupt

    (plan,) = e.plans.values()
    step = plan.steps[-1]
    plan.steps[-1] = interrupted
    with pytest.raises(KeyboardInterrupt):
        e(a, b, out=c)
    plan.steps[-1] = step
    assert Device.capture is None
    assert Device.current.name == "caller"
    assert how(e, a, b, c) == "eager"


def test_a_graph_that_cannot_be_launched_is_an_error() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    for _ in range(3):
        how(e, a, b, c)
    Device.fails = "replay"
    assert "the CUDA graph of @p could not be launched: CUDA error: out of memory" in said(lambda: e(a, b, out=c))


def test_a_warm_call_of_a_collective_and_a_matmul_takes_fewer_calls_of_functions_than_by_hand() -> None:
    """By hand, `all_gather_into_tensor` and `matmul` take 27."""
    body = "%x: f32[2, 4] = allocate\n  %h = allgather %a -> %x over didx\n  wait %h\n"
    body += "  %c: f32[2, 3] = allocate\n  matmul %x, %b -> %c\n  free %x"
    e = fake_graphs.executor(program(body, "%a: f32[2@didx, 4], %b: f32[4, 3]"), plain=True)
    a, b = torch.randn(1, 4), torch.randn(4, 3)
    with torch.no_grad():
        for _ in range(4):
            e(a, b)
        assert calls_of(lambda: e(a, b)) <= 26


def test_an_error_that_the_device_reports_is_raised_by_the_next_call_and_by_synchronize(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    for _ in range(3):
        how(e, a, b, c)
    problem = error("rank 0: a kernel gave up waiting for flag 3")
    monkeypatch.setattr(CudaPlan, "problem", lambda plan: problem)
    assert e.latest is not None
    assert isinstance(e.latest.plan, CudaPlan)
    e.latest.plan.reports.append((memoryview(b"1"), b"0"))
    log.clear()
    for call in (lambda: e(a, b, out=c), lambda: e(a, b), e.synchronize):
        assert "a kernel gave up waiting for flag 3" in said(call)
    assert not log, "nothing was issued"


def test_the_watchdog_sees_an_error_of_the_device_unless_the_caller_has_got_it(monkeypatch: pytest.MonkeyPatch) -> None:
    e, (a, b) = executor(), inputs()
    e(a, b)
    (plan,) = e.plans.values()
    announced: list[tuple[str, str, int]] = []
    links = types.SimpleNamespace(announce=lambda *event: announced.append(event))
    dog = types.SimpleNamespace(plan=plan, acknowledged=False, links=links, renewals=3)
    assert Watchdog.reported(dog) == ""
    monkeypatch.setattr(CudaPlan, "problem", lambda plan: error("a kernel gave up"))
    assert Watchdog.reported(dog) == "a kernel gave up"
    assert announced == [("failed", "a kernel gave up", 3)]
    dog.acknowledged = True
    assert Watchdog.reported(dog) == ""


def test_the_latest_used_graphs_are_kept_and_a_dropped_one_needs_more_eager_calls() -> None:
    e, (a, b) = executor(), inputs()
    outs = [torch.empty(4, 5) for _ in range(MAX_GRAPHS + 1)]
    for c in outs[:MAX_GRAPHS]:
        assert [how(e, a, b, c) for _ in range(3)] == ["eager", "eager", "capture replay"]
    assert how(e, a, b, outs[0]) == "replay"
    assert [how(e, a, b, outs[MAX_GRAPHS]) for _ in range(3)] == ["eager", "eager", "capture replay"]
    gc.collect()
    assert len(alive) == MAX_GRAPHS
    assert how(e, a, b, outs[0]) == "replay"
    assert [how(e, a, b, outs[1]) for _ in range(9)] == ["eager"] * 8 + ["capture replay"]


class FakeAllocations:
    """The allocations of one call's tensors; a test can free all of them."""

    freed = False

    def __init__(self, addresses: list[int]) -> None:
        self.addresses = addresses

    def still_there(self) -> bool:
        return not FakeAllocations.freed


def test_a_graph_is_dropped_once_memory_that_it_copies_to_a_peer_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostir.machines.cuda.graphs.Allocations", FakeAllocations)
    monkeypatch.setattr(CudaPlan, "copied_with_peers", [0])
    monkeypatch.setattr(FakeAllocations, "freed", False)
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    assert [how(e, a, b, c) for _ in range(4)] == ["eager", "eager", "capture replay", "replay"]
    assert e.latest.allocations.addresses == [a.data_ptr()]
    monkeypatch.setattr(FakeAllocations, "freed", True)
    assert how(e, a, b, c) == "eager"
    assert not alive
    monkeypatch.setattr(FakeAllocations, "freed", False)
    assert [how(e, a, b, c) for _ in range(9)] == ["eager"] * 7 + ["capture replay", "replay"]
    assert e.graph_refusal is None


def test_a_graph_keeps_no_tensor_of_the_caller_alive() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    e._machine.kernels = {name: lambda *tensors, **options: None for name in e._machine.kernels}
    for _ in range(4):
        e(a, b, out=c)
    assert len(alive) == 1
    held = [weakref.ref(x) for x in (a, b, c)]
    del a, b, c
    gc.collect()
    assert not any(ref() is not None for ref in held)


def by_columns(x: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with other strides, for which an executor has another plan."""
    return x.t().contiguous().t()


def test_a_plan_that_a_graph_of_the_caller_uses_outlives_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostir.call.rank.MAX_PLANS", 1)
    e, (a, b) = executor(), inputs()
    e(a, b)
    plain = weakref.ref(e.latest.plan)
    e(a, by_columns(b))
    gc.collect()
    assert plain() is None
    used = weakref.ref(e.latest.plan)
    Device.callers_capture = True
    e(a, by_columns(b))
    Device.callers_capture = False
    e(a, b)
    gc.collect()
    assert used() is not None
    assert len(e.plans) == 1


def test_a_plan_lives_as_long_as_a_graph_of_the_caller_even_without_its_executor() -> None:
    e, (a, b) = executor(), inputs()
    e(a, b)
    used = weakref.ref(e.latest.plan)
    Device.callers_capture = True
    e(a, b)
    e(a, b)
    Device.callers_capture = False
    del e
    release()
    gc.collect()
    assert used() is not None
    assert len(user_objects.held) == 1
    user_objects.destroy()
    release()
    gc.collect()
    assert used() is None


def test_symmetric_memory_of_garbage_waits_for_a_call_that_is_not_captured() -> None:
    e, (a, b) = executor(), inputs()
    e(a, b)
    owner, memory = nn.Module(), torch.zeros(1)
    owner.itself, freed = [owner], weakref.ref(memory)  # a cycle
    uses.free_late(owner, [memory])
    del owner, memory
    Device.callers_capture = True
    gc.collect()
    e(a, b)
    assert freed() is not None
    Device.callers_capture = False
    with uses.capturing(e):  # type: ignore[arg-type]  # on another thread
        e(a, b)
    assert freed() is not None
    e(a, b)
    assert freed() is None


def test_symmetric_memory_waits_for_the_end_of_its_session_and_is_freed_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "flow_control_of", lambda *what: None)
    peers, owner, memory = memories.PeerMemory(CPU, 0), nn.Module(), torch.zeros(1)
    peers.aside = object()  # type: ignore[assignment]
    owner.flat, owner.kept, freed = {("x", 0): memory}, {}, weakref.ref(memory)
    peers.begin(None, owner)  # type: ignore[arg-type]
    del owner, memory
    assert freed() is not None
    peers.close(False)
    assert freed() is not None, "after a failure, kernels may still use the memory"
    peers.close(True)
    assert freed() is None


def test_memory_whose_last_plan_goes_with_a_graph_of_the_caller_is_freed_at_once() -> None:
    e, (a, b) = executor(), inputs()
    e(a, b)
    memory = torch.zeros(1)
    freed = weakref.ref(memory)
    uses.free_late(e.latest.plan, [memory])
    del memory
    Device.callers_capture = True
    e(a, b)
    Device.callers_capture = False
    del e
    user_objects.destroy()
    gc.collect()
    release()
    assert freed() is None


def test_no_thread_asks_for_a_semaphore_that_another_thread_has_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    e, (a, b) = executor(), inputs()
    e(a, b)
    Device.callers_capture = True
    e(a, b)
    Device.callers_capture = False
    user_objects.destroy()
    libc, freed, late, other = uses._libc(), list[int](), list[int](), threading.Thread(target=release)

    class Libc:
        def sem_trywait(self, semaphore: ctypes.c_void_p) -> int:
            late.extend(value for value in freed if value == semaphore.value)
            ended: int = libc.sem_trywait(semaphore)
            return ended

        def free(self, semaphore: int) -> None:
            freed.append(semaphore)
            other.start()  # Python may switch to another thread while a function of C runs
            other.join(0.2)

    monkeypatch.setattr(uses, "_libc", lambda: Libc())
    release()
    other.join()
    assert len(freed) == 1
    assert not late


def test_graphs_of_dropped_plans_are_deleted() -> None:
    e, (a, b), c, other = executor(), inputs(), torch.empty(4, 5), torch.empty(4, 5)
    across = by_columns(b)
    for _ in range(3):
        e(a, b, out=c)
        e(a, across, out=other)
    assert len(alive) == 2
    stale = next(iter(e.plans.values()))
    e._drop(lambda plan: plan is stale)
    gc.collect()
    assert len(alive) == 1
    assert [how(e, a, b, c) for _ in range(3)] == ["eager", "eager", "capture replay"]
    assert how(e, a, across, other) == "replay"


def test_calls_of_one_executor_run_in_order_on_different_streams() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    for _ in range(4):
        e(a, b, out=c)
    log.clear()
    with Current(Stream(name="other")):
        e(a, b, out=c)
        e(a, b)
    e(a, b)
    e(a, b, out=c)
    assert [step for step in log if step[0] in ("caller", "other")] == [
        ("other", "waits for", "caller"),
        ("caller", "waits for", "other"),
    ]


def test_a_session_that_ends_drops_the_graphs_before_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    for _ in range(3):
        how(e, a, b, c)
    here = object.__new__(sessions.Session)
    here.members = weakref.WeakSet([e])
    here.watchdog = types.SimpleNamespace(leave=lambda: None, close=lambda done: None, misaligned="")
    here.groups, here.calls, here.owner = Groups(0, CPU), calls.Calls(), True
    seen: list[int] = []
    monkeypatch.setattr(sessions, "_current", here)
    monkeypatch.setattr(sessions.Session, "exchange", lambda *what: [])
    monkeypatch.setattr(process_groups.Destroyer, "destroy", lambda self, groups, default: seen.append(len(alive)))
    here.close(done=True)
    assert seen == [0]
    assert e.graph_refusal == "its session has ended"
    for call in (lambda: e(a, b, out=c), lambda: e(a, b), lambda: e.places(a, b)):
        assert "error: @p is called after the end of its session" in said(call)


def test_graphs_are_deleted_with_their_executor_and_no_garbage_is_collected_during_a_capture() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    collecting: list[bool] = []
    kernels = e._machine.kernels
    kernels["relu"], relu = (lambda *x: (collecting.append(gc.isenabled()), relu(*x))), kernels["relu"]
    for _ in range(4):
        e(a, b, out=c)
    assert collecting == [True, True, False]
    assert gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        assert len(alive) == 1
        del e, kernels
        assert not alive
    finally:
        gc.enable()


def test_a_call_without_out_comes_after_the_replay_before_it_on_another_stream() -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    for _ in range(4):
        e(a, b, out=c)
    other = Stream(name="other")
    log.clear()
    with Current(other):
        e(a, b)
    assert ("other", "waits for", "caller") in log


def test_graphs_are_logged_when_they_are_captured_and_dropped_and_not_when_they_are_replayed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    e, (a, b), c = executor(), inputs(), torch.empty(4, 5)
    with caplog.at_level(logging.INFO, "hostir.machines.cuda.graphs"):
        for _ in range(6):
            how(e, a, b, c)
        assert e._graphs is not None
        e._graphs.release("its session has ended")
    captured, dropped = (record.getMessage() for record in caplog.records)
    assert captured.startswith("@p: captured a CUDA graph in ")
    assert dropped == "@p: dropped 1 CUDA graphs: its session has ended"
