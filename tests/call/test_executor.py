"""Executors in one process: plans, inputs of a call, and error messages."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from hostir.call.executor import Executor, run
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.machines.binding import MAX_PLANS
from hostir.machines.gloo.machine import GlooPlan
from hostir.machines.trace import Trace
from tests.call.small_programs import FORK, JOIN, alone, pipeline, said

SQUARE = """%c: f32[4, 5] = allocate
  %t: f32[4, 5] = allocate
  matmul %a, %b -> %t
  relu %t -> %c"""


def test_every_call_gives_fresh_outputs_of_fresh_inputs() -> None:
    executor = Executor(pipeline(1), machine="gloo")
    kept = []
    for _ in range(20):
        a, b = torch.randn(4, 1, 3, 8), torch.randn(8, 5)
        kept.append((executor(a, b)[0], a @ b))
    assert all(torch.allclose(c, exact, atol=1e-5) for c, exact in kept)
    assert len({c.data_ptr() for c, _ in kept}) == len(kept)
    assert len(executor.plans) == 1


def test_a_plan_is_made_once_for_each_layout_of_the_inputs() -> None:
    p = alone("%c: f32[M, 5] = allocate\n  matmul %a, %b -> %c", "%a: f32[M, 8], %b: f32[8, 5]")
    executor = Executor(p, machine="gloo")
    b = torch.randn(8, 5)
    wide = torch.randn(6, 16)
    for a in (torch.randn(3, 8), torch.randn(7, 8), wide[:, 8:], wide[:, :8], torch.randn(3, 8)):
        assert torch.allclose(executor(a, b)[0], a @ b, atol=1e-5)
    assert len(executor.plans) == 3


def test_views_follow_an_input_to_a_new_address() -> None:
    p = alone("%c: f32[8] = allocate\n  %r = select %a[2]\n  relu %r -> %c", "%a: f32[4, 8]")
    executor = Executor(p, machine="gloo")
    memory = torch.randn(9, 8)
    for start in (0, 5, 3):
        assert torch.equal(executor(memory[start : start + 4])[0], memory[start + 2].relu())
    assert len(executor.plans) == 1


def test_the_last_reference_frees_an_executor_without_a_garbage_collection() -> None:
    executor = Executor(alone(SQUARE), machine="gloo")
    executor(torch.randn(4, 8), torch.randn(8, 5))
    held = weakref.ref(executor)
    gc.collect()
    gc.disable()
    try:
        del executor
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("machine", ["local", "gloo"])
def test_inputs_whose_gradients_would_be_lost_are_refused(machine: str) -> None:
    a, b = torch.randn(4, 8, requires_grad=True), torch.randn(8, 5)
    executor = Executor(alone(SQUARE), machine=machine)
    inputs = ([a], [b]) if machine == "local" else (a, b)
    for _ in range(2):
        for call in (lambda: executor(*inputs), lambda: run(alone(SQUARE), a, b, machine=machine)):
            assert "input %a requires gradients" in said(call)
        with torch.no_grad():
            (c,) = executor(*inputs)
        c = c[0] if machine == "local" else c
        assert not c.requires_grad
        assert torch.allclose(c, (a @ b).relu(), atol=1e-5)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("machine", ["local", "gloo"])
@pytest.mark.parametrize(
    ("body", "needed"),
    [
        ("%h = allreduce %a -> %c over didx\n  wait %h", "the tensor that allreduce "),
        ("%r: f32[32] = reshape %a\n  %d: f32[32] = reshape %c\n  relu %r -> %d", "cannot be seen as [32]"),
    ],
)
def test_an_input_that_must_be_contiguous_is_named(machine: str, body: str, needed: str) -> None:
    partial = " partial(didx)" if "allreduce" in body else ""
    executor = Executor(alone(f"%c: f32[4, 8] = allocate\n  {body}", f"%a: f32[4, 8]{partial}"), machine=machine)
    transposed = torch.randn(8, 4).T
    problem = said(lambda: executor([transposed] if machine == "local" else transposed))
    assert "input %a of rank 0 is not contiguous: shape [4, 8], strides [1, 4]" in problem
    assert "hint: pass a.contiguous()" in problem
    assert needed in problem
    contiguous = transposed.contiguous()
    (c,) = executor([contiguous] if machine == "local" else contiguous)
    assert torch.isfinite(c[0] if machine == "local" else c).all()


def test_only_the_latest_plans_are_kept() -> None:
    p = alone("%c: f32[M] = allocate\n  relu %a -> %c", "%a: f32[M]")
    executor = Executor(p, machine="gloo")
    for size in range(1, MAX_PLANS + 1):
        executor(torch.ones(size))
    first, second = list(executor.plans.values())[:2]
    executor(torch.ones(1))
    executor(torch.ones(MAX_PLANS + 1))
    assert len(executor.plans) == MAX_PLANS
    assert first in executor.plans.values()
    assert second not in executor.plans.values()
    a = torch.randn(2)
    assert torch.equal(executor(a)[0], a.relu())


def test_a_program_may_return_an_input() -> None:
    a = torch.randn(4, 8)
    (out,) = Executor(alone("", "%a: f32[4, 8]", "%a"), machine="gloo")(a)
    assert out.data_ptr() == a.data_ptr()


def test_a_stream_waits_for_the_stream_that_it_synchronizes_with() -> None:
    p = alone(f"""%x: f32[4, 8] = allocate
  %c: f32[4, 8] = allocate
  {FORK}
  set_stream 0
  gelu %a -> %x
  set_stream 1
  synchronize 0
  relu %x -> %c
  {JOIN}""", "%a: f32[4, 8]")  # fmt: skip
    executor = Executor(p, machine="gloo")
    slow = executor._machine.kernels["gelu"]

    def delayed(out: torch.Tensor, x: torch.Tensor) -> None:
        time.sleep(0.05)
        slow(out, x)

    executor._machine.kernels = {**executor._machine.kernels, "gelu": delayed}
    for _ in range(3):
        a = torch.randn(4, 8)
        assert torch.equal(executor(a)[0], torch.nn.functional.gelu(a).relu())


def test_the_local_machine_takes_and_returns_a_part_for_each_rank() -> None:
    p = pipeline(2)
    a, b = random_inputs(p, {})
    parts = [[shard(x, v.tensor, rank, {}) for rank in range(2)] for x, v in zip((a, b), p.inputs, strict=True)]
    executor = Executor(p)
    assert executor.machine == "local"
    for (c,) in (executor(*parts), Executor(p, seed=7)(*parts)):
        assert len(c) == 2
        assert all(torch.allclose(part, a @ b, atol=1e-5) for part in c)


@pytest.mark.parametrize("machine", ["local", "gloo"])
def test_run_takes_and_returns_unsharded_tensors(machine: str) -> None:
    p = alone("%c: f32[M, 5] = allocate\n  matmul %a, %b -> %c", "%a: f32[M, 8], %b: f32[8, 5]")
    a, b = torch.randn(6, 8), torch.randn(8, 5)
    (c,) = run(p, a, b, machine=machine)
    assert torch.allclose(c, a @ b, atol=1e-5)


def test_a_trace_has_every_computation_on_its_stream() -> None:
    trace = Trace()
    executor = Executor(pipeline(1), machine="gloo", trace=trace)
    executor(torch.randn(4, 1, 3, 8), torch.randn(8, 5))
    matmuls = sorted((e.rounds, e.stream, e.statement) for e in trace.events if e.keyword == "matmul")
    assert matmuls == [((i,), f"stream {i % 2}", "matmul %g_i, %b -> %c_i") for i in range(4)]
    assert all(e.start <= e.end for e in trace.events)


def test_the_threads_of_an_executor_end_with_it() -> None:
    before = set(threading.enumerate())
    executor = Executor(pipeline(1), machine="gloo")
    executor(torch.randn(4, 1, 3, 8), torch.randn(8, 5))
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del executor
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread for thread in started if thread.is_alive()]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([torch.ones(4, 8)], "was given 1 input\n"),
        ([torch.ones(4, 8), torch.ones(8, 4)], "%b has shape [8, 4]"),
        ([torch.ones(4, 8), torch.ones(8, 5).double()], "dtype torch.float64"),
        ([torch.ones(4, 8), None], "%b of rank 0 is None"),
        ([torch.ones(4, 8), [1.0]], "%b of rank 0 is [1.0]"),
        ([torch.ones(4, 8), torch.ones(8, 5, device="meta")], "is on meta"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: Sequence[torch.Tensor], message: str) -> None:
    executor = Executor(alone(SQUARE), machine="gloo")
    assert message in said(lambda: executor(*inputs))
    a, b = torch.randn(4, 8), torch.randn(8, 5)
    assert torch.allclose(executor(a, b)[0], (a @ b).relu(), atol=1e-6)
    assert message in said(lambda: executor(*inputs))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Executor(pipeline(2), machine="gloo"), "@p runs on 2 ranks, and there are 1"),
        (lambda: Executor(None), "not a host program: None"),
        (lambda: Executor(alone(SQUARE), machine="cloud"), "unknown machine 'cloud'"),
        (lambda: Executor(alone(SQUARE), machine="gloo")(*2 * [torch.ones(4, 8)]), "%b has shape"),
        (lambda: Executor(alone(SQUARE), sizes={"M": 3}, machine="gloo"), "@p has no size 'M'"),
    ],
)
def test_impossible_executors_are_refused(make: Callable[[], Executor], message: str) -> None:
    assert message in said(make)


@pytest.mark.parametrize("stream", ["0", "%user"])
def test_an_exception_on_any_thread_reaches_the_caller_with_its_statement(stream: str) -> None:
    body = f"""%c: f32[4, 8] = allocate
  {FORK}
  for %i in 0..3 {{
    set_stream {stream}
    gelu %a -> %c
  }}
  {JOIN}"""
    executor = Executor(alone(body, "%a: f32[4, 8]"), machine="gloo")
    kernel, calls = executor._machine.kernels["gelu"], [0]

    def second_fails(out: torch.Tensor, x: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("no more")
        kernel(out, x)

    executor._machine.kernels = {**executor._machine.kernels, "gelu": second_fails}
    a = torch.randn(4, 8)
    problem = said(lambda: executor(a))
    assert "error: rank 0, 'gelu %a -> %c' in round 1: ValueError: no more" in problem
    assert problem.startswith("p.hir:9:")
    assert torch.equal(executor(a)[0], torch.nn.functional.gelu(a)), (
        "after an error, a program of one rank can be called again"
    )


def test_a_plan_names_the_statement_that_runs() -> None:
    executor = Executor(alone(SQUARE), machine="gloo")
    seen = []
    kernel = executor._machine.kernels["relu"]

    def look(out: torch.Tensor, x: torch.Tensor) -> None:
        (plan,) = executor.plans.values()
        seen.append([plan.unrolled.describe(op) for op in plan.in_flight()])
        kernel(out, x)

    executor._machine.kernels = {**executor._machine.kernels, "relu": look}
    executor(torch.randn(4, 8), torch.randn(8, 5))
    (plan,) = executor.plans.values()
    assert seen == [["'relu %t -> %c'"]]
    assert isinstance(plan, GlooPlan)
    assert plan.in_flight() == []
