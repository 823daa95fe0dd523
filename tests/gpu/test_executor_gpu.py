"""Executors on one CUDA device: delayed streams, captures of the caller, and memory that is reused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import triton

from hostir.call.executor import Executor
from hostir.ir import parse
from hostir.ir.source import HostIRError
from hostir.job import symmetric
from hostir.kernels.matmul import kernel, matmul
from hostir.machines.cuda.machine import CudaPlan
from hostir.machines.cuda.streams import queues
from hostir.machines.trace import Trace
from tests.gpu.one_device import NAN, SLEEP, alone, delay_kernels, inputs_of, is_product, pipeline, poison

pytestmark = pytest.mark.usefixtures("on_gpu")


@pytest.mark.parametrize("kernels", ["aten", "triton"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_successive_calls_give_separate_outputs(dtype: str, kernels: str) -> None:
    executor = Executor(pipeline(dtype), machine="cuda", kernels=kernels)
    kept = []
    for _ in range(10):
        poison()
        a, b = inputs_of({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype])
        kept.append((executor(a, b)[0], a, b))
    assert all(is_product(*call) for call in kept)
    assert len(executor.plans) == 1


def test_workers_wait_for_writes_of_the_caller() -> None:
    executor = Executor(pipeline(), machine="cuda")
    a, b = inputs_of()
    executor(a, b)
    fresh = torch.randn_like(a)
    torch.cuda._sleep(SLEEP)
    a.copy_(fresh)
    (c,) = executor(a, b)
    assert is_product(c, fresh, b)


def test_the_caller_may_overwrite_inputs_and_read_outputs_after_a_call_returns() -> None:
    executor = Executor(pipeline(), machine="cuda")
    delay_kernels(executor, "matmul")
    a, b = inputs_of()
    kept_a, kept_b = a.clone(), b.clone()
    (c,) = executor(a, b)
    a.fill_(NAN)
    b.fill_(NAN)
    assert is_product(c.clone(), kept_a, kept_b)


def test_a_call_does_not_wait_for_the_device() -> None:
    executor = Executor(pipeline(), machine="cuda")
    a, b = inputs_of()
    executor(a, b)
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * SLEEP)
    begin = time.monotonic()
    executor(a, b)
    issued = time.monotonic() - begin
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), f"issuing took {issued:.3f} s"


def test_the_stream_of_the_caller_is_the_current_stream_and_stays_current() -> None:
    executor = Executor(pipeline(), machine="cuda")
    stream = torch.cuda.Stream()
    a, b = inputs_of()
    torch.cuda.synchronize()
    for _ in range(2):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
            a.copy_(torch.randn_like(a))
            (c,) = executor(a, b)
            assert torch.cuda.current_stream() == stream
        torch.cuda.current_stream().wait_stream(stream)
        assert is_product(c, a, b)


@pytest.mark.parametrize("on_workers", [True, False])
@pytest.mark.parametrize("kernels", ["aten", "triton"])
def test_calls_at_the_same_addresses_read_the_current_data_on_any_stream(kernels: str, on_workers: bool) -> None:
    body = "  %c: bf16[4, 1, 64, 256] = allocate\n  matmul %a, %b -> %c"
    on_callers = alone(body, "%a: bf16[4, 1, 64, 128], %b: bf16[128, 256]")
    program = pipeline("bf16") if on_workers else on_callers
    executor = Executor(program, machine="cuda", kernels=kernels, graphs=False)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    a, b = inputs_of(torch.bfloat16)
    outs = [torch.empty_like(executor(a, b)[0]) for _ in range(3)]
    for number in range(12):
        torch.cuda.synchronize()
        c = outs[number % 3]
        with torch.cuda.stream(streams[number % 2]):
            torch.cuda._sleep(SLEEP)
            a.copy_(torch.randn_like(a))
            b.copy_(torch.randn_like(b))
            c.fill_(NAN)
            executor(a, b, out=c)
            assert is_product(c, a, b)


def test_every_call_reads_the_setting_of_tf32() -> None:
    body = "  %c: f32[512, 256] = allocate\n  matmul %a, %b -> %c"
    executor = Executor(alone(body, "%a: f32[512, 512], %b: f32[512, 256]"), machine="cuda", kernels="triton")
    a, b = torch.randn(512, 512), torch.randn(512, 256)
    exact = a.double() @ b.double()
    errors = []
    for number in range(8):
        torch.backends.cuda.matmul.allow_tf32 = number % 2 == 1
        try:
            errors.append((executor(a, b)[0] - exact).abs().max().item())
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
    assert max(errors[::2]) < 1e-3 < min(errors[1::2])


def test_the_stream_of_the_caller_is_current_after_an_error() -> None:
    executor = Executor(pipeline(), machine="cuda")

    def fails(out: torch.Tensor, *operands: torch.Tensor) -> None:
        raise ValueError("no more")

    executor._machine.kernels = {**executor._machine.kernels, "matmul": fails}
    before = torch.cuda.current_stream()
    with pytest.raises(HostIRError, match=r"rank 0, 'matmul %g_i, %b -> %c_i' in round 0: ValueError: no more"):
        executor(*inputs_of())
    assert torch.cuda.current_stream() == before


@pytest.mark.parametrize("kernels", ["aten", "triton"])
def test_a_call_can_be_captured_and_replayed_with_new_data(kernels: str) -> None:
    executor = Executor(pipeline("bf16"), machine="cuda", kernels=kernels)
    a, b = inputs_of(torch.bfloat16)
    executor(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (c,) = executor(a, b)
    for _ in range(5):
        a.copy_(torch.randn_like(a))
        b.copy_(torch.randn_like(b))
        c.fill_(NAN)
        graph.replay()
        assert is_product(c, a, b)
    (eager,) = executor(a, b)
    assert is_product(eager, a, b)


def test_a_first_call_inside_a_capture_is_refused() -> None:
    executor = Executor(pipeline(), machine="cuda")
    a, b = inputs_of()
    errors: list[str] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.add_(0)
        try:
            executor(a, b)
        except HostIRError as problem:
            errors.append(str(problem))
    assert "for the first time inside a CUDA graph capture" in errors[0]
    assert "call it once" in errors[0]


@pytest.mark.parametrize("home", ["%user", "1"], ids=["from the caller's stream", "from a worker's stream"])
def test_memory_that_a_worker_still_reads_is_not_reused(home: str) -> None:
    body = f"""  %c: f32[512, 512] = allocate
  set_stream {home}
  synchronize %user
  %t: f32[512, 512] = allocate
  set_stream 0
  synchronize %user
  relu %a -> %t
  gelu %t -> %c
  set_stream {home}
  free %t
  %u: f32[512, 512] = allocate
  mul %nan, %nan -> %u
  set_stream %user
  synchronize 0
  synchronize 1"""
    executor = Executor(alone(body, "%a: f32[512, 512], %nan: f32[512, 512]"), machine="cuda", check=False)
    delay_kernels(executor, "gelu")
    nan = torch.full((512, 512), NAN)
    for _ in range(3):
        a = torch.randn(512, 512)
        (c,) = executor(a, nan)
        assert torch.allclose(c, torch.nn.functional.gelu(a.relu()))


def test_inputs_and_outputs_of_a_worker_without_a_join_stay_allocated() -> None:
    body = "  %c: f32[512, 512] = allocate\n  set_stream 0\n  synchronize %user\n  gelu %a -> %c"
    executor = Executor(alone(body, "%a: f32[512, 512]"), machine="cuda", check=False)
    delay_kernels(executor, "gelu")
    a = torch.randn(512, 512)
    exact = torch.nn.functional.gelu(a)
    torch.cuda.synchronize()
    (c,) = executor(a)
    del a
    torch.full((512, 512), NAN)  # would reuse the memory of `a`
    executor._machine.streams[0].synchronize()
    assert torch.allclose(c, exact)


def test_a_call_leaves_no_memory_allocated() -> None:
    executor = Executor(pipeline(), machine="cuda")
    a, b = inputs_of()
    executor(a, b)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        executor(a, b)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_a_trace_has_the_times_of_both_streams() -> None:
    trace = Trace()
    executor = Executor(pipeline(), machine="cuda", trace=trace)
    executor(*inputs_of())
    matmuls = [e for e in trace.events if e.keyword == "matmul"]
    assert sorted((e.rounds, e.stream) for e in matmuls) == [((i,), f"stream {i % 2}") for i in range(4)]
    assert all(e.start < e.end and abs(e.end - time.time()) < 60 for e in trace.events)


def test_synchronize_times_out_if_the_device_does_not_finish() -> None:
    executor = Executor(pipeline(), machine="cuda", timeout=0.1)
    a, b = inputs_of()
    executor(a, b)
    torch.cuda.synchronize()
    executor.synchronize()
    torch.cuda._sleep(20 * SLEEP)
    executor(a, b)
    with pytest.raises(HostIRError, match=r"the device has not finished @ag_matmul after 0\.1 s"):
        executor.synchronize()


ABSENT = """%full: bf16[2, M, 64] = allocate_symmetric
  %there: flag[2] = allocate_symmetric
  copy %a -> %full
  %c: bf16[2, M, 64] = allocate
  matmul %full, %b -> %c ready %there >= 1 from 0"""


@pytest.mark.parametrize("makes_room", [True, False])
def test_a_timeout_of_a_kernel_is_raised_by_a_call_of_new_shapes(
    makes_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTIR_TIMEOUT", "1")
    if makes_room:
        monkeypatch.setattr(symmetric, "KEPT_BYTES", 1)
    executor = Executor(alone(ABSENT, "%a: bf16[2, M, 64], %b: bf16[64, 64]"), machine="cuda", check=False)
    b = torch.randn(64, 64).bfloat16()
    first, second = (torch.randn(2, rows, 64).bfloat16() for rows in (128, 256))
    missing = r"rank 0, 'matmul %full.* flag %there\[0\] did not reach epoch"
    executor(first, b)
    with pytest.raises(HostIRError, match=missing):
        executor(second, b)  # a new plan reads the timeouts of all plans
    assert len(executor.plans) == 2 - makes_room


def test_a_timeout_of_a_kernel_is_raised_by_a_call_of_known_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTIR_TIMEOUT", "1")
    executor = Executor(alone(ABSENT, "%a: bf16[2, M, 64], %b: bf16[64, 64]"), machine="cuda", check=False)
    b = torch.randn(64, 64).bfloat16()
    first, second = (torch.randn(2, rows, 64).bfloat16() for rows in (128, 256))
    executor(first, b)
    with pytest.raises(HostIRError, match="did not reach epoch"):
        executor(second, b)
    executor(second, b)
    torch.cuda.synchronize()
    with pytest.raises(HostIRError, match="did not reach epoch"):
        executor(first, b)


@pytest.mark.parametrize("count", [6, 40])
def test_streams_that_wait_for_the_last_one_are_refused_if_the_device_has_too_few_queues(count: int) -> None:
    text = f"""hostir 1
mesh @mesh [didx] = 0
program @many(%x: f32[{count}, 8]) -> (%y) streams {count} {{
  %user = current_stream
  %r = rank of %x over didx
  %f: flag[1] = allocate_symmetric
  %y: f32[{count}, 8] = allocate
  for %s in 0..{count} {{ set_stream %s   synchronize %user }}
  for %s in 0..{count} {{
    set_stream %s
    if %s == {count - 1} {{ signal %f[0] = 1 at %r over didx }}
    wait_signal %f[0] >= 1
    %x_s = select %x[%s]
    %y_s = select %y[%s]
    relu %x_s -> %y_s
  }}
  set_stream %user
  for %s in 0..{count} {{ synchronize %s }}
}}
"""
    executor = Executor(parse(text), machine="cuda", timeout=20)
    x = torch.randn(count, 8)
    torch.relu(x)  # loads the kernel
    if count > queues():
        with pytest.raises(HostIRError, match="share a hardware queue"):
            executor(x)
        return
    for _ in range(3):
        (y,) = executor(x)
    executor.synchronize()
    assert torch.equal(y, torch.relu(x))


@pytest.mark.parametrize("strategy", ["calls", "out", "captured"])
def test_offsets_and_indices_that_do_not_fit_are_raised_by_a_later_call(strategy: str) -> None:
    program = parse("""hostir 1
mesh @mesh [didx] = 0
program @p(%x: bf16[2, 64, 128], %w: bf16[3, 128, 64], %offsets: i32[2, 4], %order: i32[2, 96]) -> (%y) {
  %y: bf16[2, 96, 64] = allocate
  grouped_matmul %x, %w by %offsets rows %order -> %y
}
""")
    x, w = torch.randn(2, 64, 128, device="cuda").bfloat16(), torch.randn(3, 128, 64, device="cuda").bfloat16()
    offsets = torch.tensor([[0, 10, 40, 96], [5, 5, 90, 90]], device="cuda").int()
    order = torch.randint(0, 64, (2, 96), device="cuda").int()
    executor = Executor(program, machine="cuda", kernels="triton")
    outs = [torch.empty(2, 96, 64, device="cuda").bfloat16()]

    def call() -> None:
        executor(x, w, offsets, order, out=None if strategy == "calls" else outs)

    for _ in range(4):
        call()
    graph = torch.cuda.CUDAGraph()
    if strategy == "captured":
        with torch.cuda.graph(graph):
            call()
    for t, place, wrong, said in (
        (offsets, (1, 2), 3, "%offsets[1, 2] is 3"),
        (order, (0, 7), 64, "%order[0, 7] is 64"),
        (order, (1, 95), -1, "%order[1, 95] is -1"),
    ):
        right = t[place].clone()
        t[place] = wrong
        graph.replay() if strategy == "captured" else call()
        t[place] = right
        torch.cuda.synchronize()
        with pytest.raises(HostIRError) as raised:
            call()
        assert said in str(raised.value)
        call()
    executor.synchronize()


def test_a_first_call_compiles_its_kernels_before_the_plan_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **details: compiled.append(details["repr"])
    )
    monkeypatch.setattr(matmul, "_launches", {})
    kernel.matmul_kernel.device_caches.clear()
    run, compiled_before_run = CudaPlan.run, list[int]()

    def count_and_run(plan: CudaPlan, *tensors: Any, **options: Any) -> Any:
        compiled_before_run.append(len(compiled))
        return run(plan, *tensors, **options)

    monkeypatch.setattr(CudaPlan, "run", count_and_run)
    a, b = inputs_of(torch.float16)
    (c,) = Executor(pipeline("f16"), machine="cuda", kernels="triton")(a, b)
    assert is_product(c, a, b)
    assert compiled_before_run == [len(compiled)] != [0]
