"""One-sided statements in a single CPU process, memory that several processes share, and programs that are refused."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hostir.call.executor import Executor
from hostir.call.local import run_local
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.ir.types import FLAG
from hostir.job.offers import ALIGNMENT
from hostir.job.symmetric import SharedMemory, SymmetricMemory
from hostir.kernels.dtypes import torch_dtype
from hostir.machines.gloo.machine import GlooPlan
from hostir.machines.gloo.memory import SharedFiles
from hostir.machines.trace import Trace
from hostir.plan.operations import EPOCHS, flag_value
from hostir.plan.unroll import unroll
from hostir.plan.unrolled import UnrolledProgram
from tests.call.small_programs import alone, program, said
from tests.machines.cuda import simulated_gpus


def signalled_backwards(shape: str, view: str, blocks: int) -> Program:
    """Return a matmul that waits for flags; another stream raises them while it runs, the last block first."""
    return alone(
        f"""%user = current_stream
  %box: f32{shape} = allocate_symmetric
  %f: flag[{blocks}] = allocate_symmetric
  %out: f32{shape.replace("8]", "5]")} = allocate
  %x = {view.replace("%", "%box")}
  %c = {view.replace("%", "%out")}
  put %a -> %box at 0 over didx
  set_stream 0
  synchronize %user
  for %i in 0..{blocks} {{ signal %f[{blocks - 1} - %i] = 1 at 0 over didx }}
  set_stream %user
  matmul %x, %b -> %c ready %f >= 1 from {blocks - 1}
  synchronize 0""",
        f"%a: f32{shape}, %b: f32[8, 5]",
        "%out",
    )


@pytest.mark.parametrize(
    ("shape", "view", "blocks"),
    [
        ("[4, 6, 8]", "permute % (0, 1, 2)", 4),
        ("[4, 6, 8]", "permute % (0, 1, 2)", 3),
        ("[4, 6, 8]", "permute % (1, 0, 2)", 3),
        ("[4, 6, 8]", "permute % (1, 0, 2)", 12),
        ("[4, 6, 8]", "permute % (1, 0, 2)", 4),
        ("[2, 3, 4, 8]", "permute % (2, 1, 0, 3)", 8),
        ("[2, 3, 4, 8]", "permute % (1, 0, 2, 3)", 4),
        ("[12, 8]", "permute % (0, 1)", 1),
    ],
)
def test_blocks_of_rows_are_computed_whatever_their_layout(shape: str, view: str, blocks: int) -> None:
    executor = Executor(signalled_backwards(shape, view, blocks), machine="gloo", check=False)
    for _ in range(3):
        a = torch.randn([int(n) for n in shape.strip("[]").split(",")])
        b = torch.randn(8, 5)
        (c,) = executor(a, b)
        torch.testing.assert_close(c, a @ b)


def test_a_bias_is_added_to_each_block() -> None:
    text = str(signalled_backwards("[4, 6, 8]", "permute % (1, 0, 2)", 12)).replace(
        "%b: f32[8, 5]", "%w: f32[5, 8], %z: f32[5]"
    )
    executor = Executor(parse(text.replace("matmul %x, %b", "linear %x, %w, %z")), machine="gloo", check=False)
    a, w, z = torch.randn(4, 6, 8), torch.randn(5, 8), torch.randn(5)
    (c,) = executor(a, w, z)
    torch.testing.assert_close(c, a @ w.t() + z)


SUMMED = """%user = current_stream
  %sent: f32{sent} = allocate_symmetric
  %f: flag[{flags}] = allocate_symmetric
  %g: flag[{done}] = allocate_symmetric
  %out: f32{out} = allocate
  %y: f32{out} = allocate
  %x = {view_x}
  %c = {view_out}
  %y_c = {view_y}
  put %a -> %sent at 0 over didx
  set_stream 0
  synchronize %user
  for %i in 0..{flags} {{ signal %f[{flags} - 1 - %i] = 1 at 0 over didx }}
  set_stream %user
  sum %x axis 0 -> %c ready %f >= 1 done %g = 1 from 1 own %b
  set_stream 0
  for %i in 0..{done} {{ wait_signal %g[{done} - 1 - %i] >= 1 }}
  relu %c -> %y_c
  set_stream %user
  synchronize 0"""


@pytest.mark.parametrize(
    ("shape", "view", "blocks", "done"),
    [
        ("[4, 6, 8]", "(0, 1, 2)", 4, 4),
        ("[4, 6, 8]", "(0, 1, 2)", 3, 2),
        ("[4, 6, 8]", "(1, 0, 2)", 2, 12),
        ("[4, 6, 8]", "(1, 0, 2)", 12, 8),
        ("[4, 6, 8]", "(2, 1, 0)", 1, 6),
        ("[2, 3, 4, 8]", "(2, 1, 0, 3)", 8, 3),
        ("[2, 3, 4, 8]", "(1, 0, 2, 3)", 4, 6),
        ("[12, 8]", "(0, 1)", 1, 2),
    ],
)
def test_sums_are_computed_by_blocks_whatever_their_layout(shape: str, view: str, blocks: int, done: int) -> None:
    axes = [int(n) for n in view.strip("()").split(",")]
    behind = ", ".join(map(str, [0, *(n + 1 for n in axes)]))
    sent = f"[3, {shape[1:]}"
    extents = [int(n) for n in shape.strip("[]").split(",")]
    own = [extents[n] for n in axes]
    body = SUMMED.format(
        sent=sent,
        out=shape,
        flags=3 * blocks,
        done=done,
        view_x=f"permute %sent ({behind})",
        view_out=f"permute %out {view}",
        view_y=f"permute %y {view}",
    )
    p = alone(body, f"%a: f32{sent}, %b: f32{own}", "%y")
    executor = Executor(p, machine="gloo", check=False)
    for _ in range(3):
        a, b = torch.randn(3, *extents), torch.randn(own)
        (y,) = executor(a, b)
        (simulated,) = run_local(p, [a, b])
        a[1] = b.permute([axes.index(n) for n in range(len(axes))])
        assert torch.equal(y, (a[0] + a[1] + a[2]).clamp_min(0))
        assert torch.equal(simulated[0], y)


def test_a_sum_with_own_rows_writes_no_input() -> None:
    body = """%f: flag[2] = allocate_symmetric
  %c: f32[6, 5] = allocate
  signal %f[0] = 1 at 0 over didx
  sum %a axis 0 -> %c ready %f >= 1 from 1 own %b"""
    executor = Executor(alone(body, "%a: f32[2, 6, 5], %b: f32[6, 5]"), machine="gloo")
    a, b = torch.randn(2, 6, 5), torch.randn(6, 5)
    before = a.clone()
    assert torch.equal(executor(a, b)[0], before[0] + b)
    assert torch.equal(a, before)


def test_a_sum_that_waits_for_no_flags_sets_a_flag_after_each_block() -> None:
    p = alone(
        """%g: flag[3] = allocate_symmetric
  %c: f32[6, 5] = allocate
  sum %a axis 1 -> %c done %g = 1 from 2
  for %i in 0..3 { wait_signal %g[%i] >= 1 }""",
        "%a: f32[6, S, 5]",
    )
    executor = Executor(p, machine="gloo")
    for size in (4, 1, 0):
        a = torch.randn(6, size, 5)
        (c,) = executor(a)
        torch.testing.assert_close(c, a.sum(1))
        torch.testing.assert_close(run_local(p, [a])[0][0], a.sum(1))


def test_a_trace_shows_copies_and_one_bar_for_a_matmul_that_waits() -> None:
    trace = Trace()
    p = signalled_backwards("[4, 6, 8]", "permute % (0, 1, 2)", 4)
    Executor(p, machine="gloo", trace=trace, check=False)(torch.randn(4, 6, 8), torch.randn(8, 5))
    assert [(e.stream, e.keyword) for e in sorted(trace.events, key=lambda e: e.start)] == [
        ("caller", "put"),
        ("caller", "matmul"),
    ]


def test_a_failure_releases_a_stream_that_waits_for_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    p = alone(
        """%user = current_stream
  %f: flag[1] = allocate_symmetric
  %c: f32[4, 5] = allocate
  set_stream 0
  synchronize %user
  wait_signal %f[0] >= 1
  set_stream %user
  matmul %a, %b -> %c
  signal %f[0] = 1 at 0 over didx
  synchronize 0"""
    )

    def broken(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        raise RuntimeError("no carry flag")

    executor = Executor(p, machine="gloo")
    a, b = torch.randn(4, 8), torch.randn(8, 5)
    with monkeypatch.context() as patch:
        patch.setitem(executor._machine.kernels, "matmul", broken)
        assert "'matmul %a, %b -> %c': RuntimeError: no carry flag" in said(lambda: executor(a, b))
    torch.testing.assert_close(executor(a, b)[0], a @ b)


def test_a_stream_that_waits_for_a_flag_describes_its_wait() -> None:
    body = "%f: flag[3] = allocate_symmetric\n  signal %f[2] = 4 at 0 over didx\n  wait_signal %f[2] >= {}"
    executor = Executor(alone(body.format("5"), outputs="%a"), machine="gloo", check=False)
    refusals: list[str] = []
    a, b = torch.randn(4, 8), torch.randn(8, 5)
    thread = threading.Thread(target=lambda: refusals.append(said(lambda: executor(a, b))))
    thread.start()
    while (call := executor.latest) is None or call.plan.progress() is None:
        time.sleep(0.001)
    plan = call.plan
    (op,) = plan.in_flight()
    where = "epoch 5 of call 1 of flag %f[2]: the flag stands at epoch 4 of call 1"
    assert plan.describe(op) == f"'wait_signal %f[2] >= 5', which waits for {where}"
    stands = plan.progress()
    time.sleep(0.01)
    assert plan.progress() == stands
    assert isinstance(plan, GlooPlan)
    plan.failure.record(op, RuntimeError("enough"))
    thread.join(10)
    assert "'wait_signal %f[2] >= 5': RuntimeError: enough" in refusals[0]
    assert plan.progress() is None


def test_a_call_that_fails_before_peers_can_notice_it_is_not_counted() -> None:
    """The other ranks wait in this call. This rank repeats it, so all flags count the same number of calls."""
    body = "%f: flag[1] = allocate_symmetric\n%y: f32[8] = allocate\nrelu %x -> %y\nsignal %f[0] = 1 at 0 over didx"
    executor = Executor(alone(body, "%x: f32[8]", "%y"), machine="gloo", check=False)
    x = torch.randn(8)
    executor(x)
    (plan,) = executor.plans.values()
    assert isinstance(plan, GlooPlan)
    assert plan.memory is not None

    def strike() -> None:
        raise RuntimeError("no memory")

    step, plan.host.steps[0] = plan.host.steps[0], strike
    assert "no memory" in said(lambda: executor(x))
    plan.host.steps[0] = step
    executor(x)
    assert plan.memory.calls == 2


def test_flags_rise_from_call_to_call() -> None:
    assert flag_value(1, 1) > flag_value(1, 0) > 0
    assert flag_value(8, 1) > flag_value(7, EPOCHS - 1)
    assert flag_value((1 << 31) - 1, EPOCHS - 1) <= torch.iinfo(torch_dtype(FLAG)).max


class Plan:
    """A user of symmetric memory."""


PLAN = Plan()


def met(*recordings: UnrolledProgram) -> list[SharedMemory | HostIRError | None]:
    """Let ranks meet with these unrolled programs, each on a thread; return their memory."""
    results: list[SharedMemory | HostIRError | None] = [None] * len(recordings)

    def meet(rank: int, memory: SymmetricMemory) -> None:
        try:
            results[rank] = memory.of(recordings[rank], PLAN)
        except HostIRError as problem:
            results[rank] = problem

    together(len(recordings), meet)
    return results


def together(ranks: int, do: Callable[[int, SymmetricMemory], None]) -> None:
    """Call `do` for all ranks at once, with the memory of each rank."""
    simulated_gpus.together(ranks, lambda rank, exchange: do(rank, SymmetricMemory(rank, exchange, SharedFiles())))


SHARED = """%me = rank of %x over didx
  %box: f32[2, 3] = allocate_symmetric
  %f: flag[3] = allocate_symmetric
  put %x -> %box at (%me + 1) % 2 over didx
  signal %f[0] = 1 at (%me + 1) % 2 over didx
  barrier of %x over didx"""


def recordings(body: str = SHARED, ranks: int = 2) -> list[UnrolledProgram]:
    p = program(body, "%x: f32[4@didx, 3]", "%x")
    return [unroll(p, rank, {}, [torch.empty(2, 3)]) for rank in range(ranks)]


def test_all_ranks_drop_the_memory_that_rank_0_used_least_recently(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "%box: f32[M, 16] = allocate_symmetric\n  barrier of %box over didx"
    p = program(body, "%x: f32[2@didx, M]", "%x")
    monkeypatch.setattr("hostir.job.symmetric.KEPT_BYTES", 12 * 64 + 3 * ALIGNMENT)  # for M=4 three times
    history: list[list[Any]] = [[], []]

    plans: list[list[Plan]] = [[], []]

    def use(rank: int, memory: SymmetricMemory) -> None:
        for turn, m in enumerate((1, 2, 4, 4, 3, 7, 100, 1)):
            plans[rank].append(Plan())
            held = memory.of(unroll(p, rank, {"M": m}, [torch.empty(1, m)]), plans[rank][-1])
            assert held is not None
            held.used = turn if rank == 0 else -turn
            if m == 2 and rank == 1:
                held.captured.add(plans[rank][-1])
            history[rank].append(sizes_of(memory))
            if m == 7:
                first = next(each for (_, sizes), each in memory.met.items() if dict(sizes)["M"] == 3)
                history[rank].append(first.gone)
        history[rank].append(first.gone)

    together(2, use)
    assert history[0] == history[1]
    assert history[0] == [[1], [1, 2], [1, 2, 4], [1, 2, 4], [1, 2, 4, 3], [2, 3, 7], False, [2, 100], [2, 1], True]


def sizes_of(memory: SymmetricMemory) -> list[int]:
    """Return the values of M for which there is memory, the oldest first."""
    return [dict(sizes)["M"] for _, sizes in memory.met]


def test_equal_programs_share_memory_and_it_is_dropped_when_ranks_meet_after_rank_0_stopped_using_it() -> None:
    body = "%box: f32[M, 16] = allocate_symmetric\n  barrier of %box over didx"
    one, equal = (program(body, "%x: f32[2@didx, M]", "%x") for _ in range(2))
    other = program(f"{body}\n  barrier of %box over didx", "%x: f32[2@didx, M]", "%x")

    def use(rank: int, memory: SymmetricMemory) -> None:
        def of(p: Program, m: int, plan: Plan) -> SharedMemory | None:
            return memory.of(unroll(p, rank, {"M": m}, [torch.empty(1, m)]), plan)

        first, second, third = Plan(), Plan(), Plan()
        shared = of(one, 1, first)
        assert of(equal, 1, second) is shared
        assert of(other, 1, third) is not shared
        assert sizes_of(memory) == [1, 1]
        del first
        of(one, 2, third)
        assert sizes_of(memory) == [1, 1, 2]
        if rank == 0:
            del second
        of(one, 3, third)
        assert sizes_of(memory) == [1, 2, 3]
        assert shared is not None
        assert shared.gone

    together(2, use)


def test_ranks_see_each_others_buffers_and_no_file_remains() -> None:
    before = set(os.listdir("/proc/self/fd"))
    one, other = met(*recordings())
    assert isinstance(one, SharedMemory)
    assert isinstance(other, SharedMemory)
    for name, shape in (("box", (2, 3)), ("f", (3,))):
        for rank in range(2):
            here, there = one.buffers[(name, ()), rank], other.buffers[(name, ()), rank]
            assert tuple(here.shape) == shape
            assert bool(here.isnan().all() if name == "box" else (here == 0).all())
            value = rank + 5
            here.fill_(value)
            assert bool((there == value).all())
            assert here.data_ptr() != there.data_ptr()
    assert [tuple(one.barriers((0, 1), rank).shape) for rank in range(2)] == [(1, 2), (1, 2)]
    del one, other, here, there
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("if %me == 0 { %g: f32[2] = allocate_symmetric }  if %me == 1 { %g: f16[2] = allocate_symmetric }", "f16[2]"),
        ("if %me == 0 { %g: flag[2] = allocate_symmetric   signal %g[0] = 1 at 1 over didx }", "rank 1 has no %g"),
        ("if %me == 1 { barrier of %x over didx }", "ranks 0 and 1 differ in how many barriers"),
    ],
)
def test_all_ranks_get_one_message_if_their_buffers_differ(odd: str, message: str) -> None:
    one, other = met(*recordings(f"{SHARED}\n  {odd}"))
    assert isinstance(one, HostIRError)
    assert message in str(one)
    assert str(one) == str(other)
    assert str(one).startswith("p.hir:")
    assert str(one).count("error:") == 1


def test_all_ranks_fail_if_one_rank_cannot_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    for problem in met(*recordings()):
        assert "rank 0 cannot share memory with the others: [Errno 24] Too many open files" in str(problem)
    monkeypatch.delattr(os, "memfd_create")
    for problem in met(*recordings()):
        assert "only Linux lets processes open each other's memory" in str(problem)


def test_all_ranks_fail_at_once_if_one_rank_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: SharedFiles, size: int) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(SharedFiles, "reserve", refuse)
    monkeypatch.setattr(SharedFiles, "map", lambda *_: pytest.fail("ranks meet without their memory"))
    for problem in met(*recordings()):
        assert "rank 0 cannot share memory with the others: no room" in str(problem)


def test_buffers_belong_to_an_executor_and_its_sizes() -> None:
    body = """%s: f32[M] = allocate_symmetric
  %y: f32[M] = allocate
  copy %s -> %y
  put %x -> %s at 0 over didx"""
    p = alone(body, "%x: f32[M]", "%y")
    one, other = Executor(p, machine="gloo", check=False), Executor(p, machine="gloo", check=False)
    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    assert one(ones)[0].isnan().all(), "the buffer is not written yet"
    assert torch.equal(one(twos)[0], ones), "the buffer keeps its contents from call to call"
    assert one(torch.ones(4))[0].isnan().all(), "other sizes have other buffers"
    assert torch.equal(one(ones)[0], twos)
    assert other(ones)[0].isnan().all(), "other executors have other buffers"


def test_simulated_ranks_put_inputs_of_any_strides_and_refuse_the_same_programs_as_real_ranks() -> None:
    p = program(
        f"{SHARED}\n  relu %x -> %y".replace("%f:", "%y: f32[4@didx, 3] = allocate\n  %f:"), "%x: f32[4@didx, 3]", "%y"
    )
    x = [torch.randn(3, 2).t(), torch.randn(3, 2).t()]
    (y,) = Executor(p, check=False)(x)
    assert all(torch.equal(part, mine.relu()) for part, mine in zip(y, x, strict=True))
    gathers = program(
        "%g: f32[4, 3] = allocate\n  %h = allgather %x -> %g over didx\n  wait %h\n  barrier of %x over didx",
        "%x: f32[4@didx, 3]",
        "%x",
    )
    assert "input %x of rank 0 is not contiguous" in said(lambda: Executor(gathers)(x))
