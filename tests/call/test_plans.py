"""Timeouts that kernels report, and the lifetime of plans. Streams and the kernels' reports are simulated here."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hostir.call import rank as executors
from hostir.call.executor import Executor
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import error
from hostir.machines.cuda.machine import CudaPlan
from hostir.machines.cuda.timeouts import TIMEOUTS, Timeouts
from hostir.plan.operations import ComputeOp
from hostir.plan.unroll import unroll
from hostir.plan.unrolled import UnrolledProgram
from tests.call.small_programs import alone, said
from tests.machines.cuda import fake_graphs
from tests.machines.cuda.fake_graphs import Device

RELU = alone("%c: f32[M] = allocate\n  relu %a -> %c", "%a: f32[M]")
BLOCKS = 3
WAITS = alone(
    f"""%box: f32[M, {BLOCKS}, 8] = allocate_symmetric
  %f: flag[{BLOCKS}] = allocate_symmetric
  %rows = permute %box (1, 0, 2)
  %c: f32[{BLOCKS}, M, 5] = allocate
  for %i in 0..2 {{ matmul %rows, %b -> %c ready %f >= 4 from 0 }}""",
    f"%a: f32[M, {BLOCKS}, 8], %b: f32[8, 5]",
)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs.install(monkeypatch)


@pytest.fixture
def executor() -> Executor:
    return fake_graphs.executor(RELU)


def waiting(size: int, program: Program = WAITS) -> tuple[UnrolledProgram, list[ComputeOp]]:
    """Unroll a program with a loop of two rounds; in each round a kernel waits. Return it with the two kernels."""
    unrolled = unroll(program, 0, {"M": size}, [torch.empty(size, BLOCKS, 8), torch.empty(8, 5)])
    return unrolled, [op for op in unrolled.ops if isinstance(op, ComputeOp)]


def words(timeouts: Timeouts, size: int = 1, round_: int = 0) -> torch.Tensor:
    """Return the words in which a kernel of the plan for a size reports its timeouts."""
    unrolled, ops = waiting(size)
    return timeouts.of(unrolled, ops[round_], BLOCKS)


def called(e: Executor, size: int) -> CudaPlan:
    """Call an executor with inputs of a size, and return the plan."""
    e(torch.ones(size))
    assert e.latest is not None
    assert isinstance(e.latest.plan, CudaPlan)
    return e.latest.plan


GAVE_UP = "rank 0: flag %f[1] did not reach epoch 4 (stands at 2)"


def test_a_timeout_is_reported_once_with_its_statement_and_its_round() -> None:
    timeouts = Timeouts(0)
    assert timeouts.problem() is None
    words(timeouts, round_=1)[1] = torch.tensor([4, 2])
    message = said(raising(timeouts))
    assert GAVE_UP in message
    assert "'matmul %rows, %b -> %c ready %f >= 4' in round 1" in message
    assert timeouts.problem() is None


def raising(timeouts: Timeouts) -> Callable[[], None]:
    def raise_problem() -> None:
        if (problem := timeouts.problem()) is not None:
            raise problem

    return raise_problem


def test_plans_for_all_sizes_report_in_the_same_words() -> None:
    timeouts = Timeouts(0)
    first, other = words(timeouts), words(timeouts, round_=1)
    assert first.data_ptr() == words(timeouts, size=2).data_ptr() != other.data_ptr()
    first[0, 0] = other[2, 0] = 4
    assert said(raising(timeouts)).count("did not reach epoch 4") == 2
    assert not first.any()
    assert not other.any()


def test_plans_of_equal_programs_report_in_the_same_words() -> None:
    timeouts, (unrolled, ops) = Timeouts(0), waiting(1, parse(str(WAITS)))
    for round_, op in enumerate(ops):
        assert timeouts.of(unrolled, op, BLOCKS).data_ptr() == words(timeouts, round_=round_).data_ptr()


def test_each_kernel_has_as_many_words_as_it_waits_for_blocks() -> None:
    timeouts, (unrolled, ops) = Timeouts(0), waiting(1)
    several = [timeouts.of(unrolled, ops[0], blocks) for blocks in (TIMEOUTS - 1, 2, 2 * TIMEOUTS, 1)]
    for number, rows in enumerate(several):
        rows[-1, 0] = number + 1
    message = said(raising(timeouts))
    assert all(f"did not reach epoch {number + 1}" in message for number in range(4))
    assert all(not rows.any() for rows in several)


EXPERTS = alone(
    """%y: f32[2, M, 5] = allocate
  %c: f32[2, 3, 5] = allocate
  grouped_matmul %x, %w by %offsets rows %order -> %y
  combine_rows %y by %back times %weights -> %c""",
    "%x: f32[2, 4, 8], %w: f32[3, 8, 5], %offsets: i32[2, 4], %order: i64[2, M], "
    "%back: i32[2, 3, 2], %weights: f32[2, 3, 2]",
)


def test_indices_that_do_not_fit_are_reported_with_their_place_and_their_statement() -> None:
    shapes = {torch.float32: [(2, 4, 8), (3, 8, 5)], torch.int32: [(2, 4)], torch.int64: [(2, 6)]}
    inputs = [torch.empty(shape, dtype=dtype) for dtype, each in shapes.items() for shape in each]
    inputs += [torch.empty(2, 3, 2, dtype=torch.int32), torch.empty(2, 3, 2)]
    unrolled = unroll(EXPERTS, 0, {"M": 6}, inputs)
    product, combined = (op for op in unrolled.ops if isinstance(op, ComputeOp))
    timeouts = Timeouts(0)
    of_product, of_sums = timeouts.of_indices(unrolled, product), timeouts.of_indices(unrolled, combined)
    assert (len(of_product), len(of_sums)) == (2, 1)
    of_product[0, 0], of_product[1, 0] = (6 + 1) << 32 | 9, (7 + 1) << 32 | 0xFFFFFFFF
    of_sums[0, 0] = (11 + 1) << 32 | 6
    message = said(raising(timeouts))
    assert "'grouped_matmul %x, %w by %offsets rows %order -> %y': %offsets[1, 2] is 9" in message
    assert "%order[1, 1] is -1" in message
    assert "%back[1, 2, 1] is 6" in message
    assert not timeouts.lost, "the ranks need not meet again"
    assert timeouts.problem() is None


@pytest.mark.parametrize("sizes", [[2], [1], [3], [2, 3, 4, 1]], ids=str)
def test_the_next_call_with_any_shapes_raises_a_timeout(
    sizes: list[int], executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "MAX_PLANS", 2)
    called(executor, 1)
    called(executor, 2)
    words(executor._machine.timeouts)[1] = torch.tensor([4, 2])
    assert GAVE_UP in said(lambda: executor(torch.ones(sizes[0])))
    for size in sizes:
        executor(torch.ones(size))


def test_synchronize_raises_a_timeout(executor: Executor) -> None:
    called(executor, 1)
    words(executor._machine.timeouts)[1] = torch.tensor([4, 2])
    assert GAVE_UP in said(executor.synchronize)
    executor.synchronize()


def test_synchronize_raises_when_a_call_was_abandoned(executor: Executor) -> None:
    called(executor, 1)
    session = types.SimpleNamespace(has_lost_call=True, lost_call=lambda: error("a call ended midway on another rank"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "session", session)
        assert "a call ended midway on another rank" in said(executor.synchronize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor._machine.groups, "abandoned", "rank 0, 'relu %a -> %c': on strike")
        assert "@p cannot be waited for: rank 0, 'relu %a -> %c': on strike" in said(executor.synchronize)
    executor.synchronize()


def test_ranks_do_not_renew_their_session_within_a_capture(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    called(executor, 1)
    renewed: list[bool] = []
    watchdog = types.SimpleNamespace(disturbed=True, misaligned="", plan=None, replaced=[], observe=lambda *_: None)
    watchdog.resume = lambda: setattr(watchdog, "disturbed", False)
    session = types.SimpleNamespace(has_lost_call=False, renew=lambda: renewed.append(True))
    monkeypatch.setattr(executor, "watchdog", watchdog)
    monkeypatch.setattr(executor, "session", session)
    monkeypatch.setattr(executor._machine.groups, "abandoned", "rank 0, 'relu %a -> %c': on strike")
    Device.callers_capture = True
    assert "@p is captured after a call that ended midway: rank 0, 'relu" in said(lambda: executor(torch.ones(1)))
    assert not renewed  # a renewal would wait for the device
    Device.callers_capture = False
    executor(torch.ones(1))
    assert renewed


def test_an_interrupted_renewal_is_tried_again(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    called(executor, 1)

    def stop() -> None:
        raise KeyboardInterrupt

    watchdog = types.SimpleNamespace(disturbed=True, misaligned="")
    watchdog.resume = lambda: setattr(watchdog, "disturbed", False)
    monkeypatch.setattr(executor, "watchdog", watchdog)
    monkeypatch.setattr(executor, "session", types.SimpleNamespace(has_lost_call=False, renew=stop))
    monkeypatch.setattr(executor._machine.groups, "abandoned", "rank 0, 'relu %a -> %c': on strike")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            executor(torch.ones(1))


def test_a_plan_that_is_replaced_is_freed_at_once(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "MAX_PLANS", 1)
    held = weakref.ref(called(executor, 1))
    out = torch.empty(1)
    executor(torch.ones(1), out=out)
    called(executor, 2)
    gc.collect()
    assert held() is None
    assert len(executor.bound) == 1


def test_a_plan_without_its_symmetric_memory_is_freed(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = called(executor, 1)
    called(executor, 2)
    plan.memory = types.SimpleNamespace(gone=True)
    held = weakref.ref(plan)
    del plan
    machine = executor._machine
    make = machine.plan

    def at_a_rendezvous(*args: Any) -> Any:
        machine.symmetric.released += 1
        return make(*args)

    monkeypatch.setattr(machine, "plan", at_a_rendezvous)
    called(executor, 3)
    gc.collect()
    assert held() is None
    assert len(executor.bound) == len(executor.plans) == 2


def test_a_plan_that_the_callers_graph_uses_is_kept(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "MAX_PLANS", 1)
    held = weakref.ref(called(executor, 1))
    Device.callers_capture = True
    executor(torch.ones(1))
    assert "inside a CUDA graph capture" in said(lambda: executor(torch.ones(3)))
    Device.callers_capture = False
    called(executor, 2)
    gc.collect()
    assert held() is not None


def test_results_are_right_if_there_are_more_bound_calls_than_are_kept(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "MAX_BOUND", 3)
    outs = [torch.empty(4) for _ in range(5)]
    for turn in range(3):
        for out in outs:
            x = torch.randn(4)
            executor(x, out=out)
            assert torch.equal(out, x.relu()), turn
    assert len(executor.bound) == 3
