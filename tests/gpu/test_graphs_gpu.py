"""Calls with `out=` on one CUDA device: eager, captured and replayed, with any addresses and in order."""

from __future__ import annotations

import threading

import pytest
import torch

from hostir.call.executor import Executor
from hostir.ir import parse
from hostir.machines.cuda.driver import Allocations
from tests.gpu.one_device import NAN, SLEEP, alone, delay_kernels, inputs_of, is_product, pipeline

pytestmark = pytest.mark.usefixtures("on_gpu")


def fresh(*tensors: torch.Tensor) -> None:
    for x in tensors:
        x.copy_(torch.randn_like(x))


def graphs_of(executor: Executor) -> int:
    assert executor._graphs is not None
    return len(executor._graphs.kept)


def called(times: int) -> tuple[Executor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an executor after some finished calls, with its inputs and output."""
    executor = Executor(pipeline(), machine="cuda")
    a, b = inputs_of()
    c = torch.empty(4, 1, 64, 256)
    for _ in range(times):
        executor(a, b, out=c)
    torch.cuda.synchronize()
    return executor, a, b, c


@pytest.mark.parametrize("kernels", ["aten", "triton"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_calls_with_out_become_replays_on_the_current_data(dtype: str, kernels: str) -> None:
    executor = Executor(pipeline(dtype), machine="cuda", kernels=kernels)
    a, b = inputs_of({"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    c = torch.empty(4, 1, 64, 256, dtype=a.dtype)
    for call in range(8):
        fresh(a, b)
        c.fill_(NAN)
        (result,) = executor(a, b, out=c)
        assert result is c
        assert is_product(c, a, b)
        assert graphs_of(executor) == (call >= 2)
    assert executor.graph_refusal is None
    assert is_product(executor(a, b)[0], a, b)


def test_a_replay_is_ordered_with_the_stream_of_the_caller() -> None:
    executor = Executor(pipeline(), machine="cuda")
    delay_kernels(executor, "matmul")
    a, b = inputs_of()
    c = torch.empty(4, 1, 64, 256)
    for _ in range(5):
        new_a, new_b = torch.randn_like(a), torch.randn_like(b)
        torch.cuda._sleep(SLEEP)
        a.copy_(new_a)
        b.copy_(new_b)
        executor(a, b, out=c)
        a.fill_(NAN)
        b.fill_(NAN)
        assert is_product(c.clone(), new_a, new_b)
    assert graphs_of(executor) == 1


@pytest.mark.parametrize("calls", [pytest.param(2, id="capture"), pytest.param(4, id="replay")])
def test_a_call_does_not_wait_for_the_device(calls: int) -> None:
    executor, a, b, c = called(calls)
    torch.cuda._sleep(20 * SLEEP)
    executor(a, b, out=c)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    assert graphs_of(executor) == 1
    assert is_product(c, a, b)


def test_calls_with_changing_addresses_give_the_product() -> None:
    executor = Executor(pipeline(), machine="cuda")
    memory = [torch.empty(20, 4, 1, 64, 128), torch.empty(20, 128, 256), torch.full((20, 4, 1, 64, 256), NAN)]
    for call in range(120):
        at = [call % n for n in ((1, 20, 3, 2)[call % 4], (2, 1)[call % 2], (3, 20, 1)[call % 3])]
        a, b, c = (x[i] for x, i in zip(memory, at, strict=True))
        fresh(a, b)
        c.fill_(NAN)
        executor(a, b, out=c)
        assert is_product(c, a, b)
    assert 0 < graphs_of(executor) <= 16


def test_replays_use_new_tensors_at_the_same_addresses() -> None:
    executor = Executor(pipeline(), machine="cuda")
    for _ in range(10):
        a, b = inputs_of()
        c = torch.full((4, 1, 64, 256), NAN)
        executor(a, b, out=c)
        assert is_product(c, a, b)
        del a, b, c


def test_a_graph_keeps_no_memory_of_the_caller() -> None:
    executor = Executor(pipeline(), machine="cuda")
    a, b = inputs_of()
    executor(a, b)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    c = torch.empty(4, 1, 64, 256)
    size = torch.cuda.memory_allocated() - before
    for _ in range(4):
        executor(a, b, out=c)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    del c
    assert torch.cuda.memory_allocated() == allocated - size


def test_copied_outputs_are_copied_in_every_replay() -> None:
    body = "  %t: f32[4, 256] = allocate\n  relu %a -> %t\n  %c = select %t[1]"
    head = "hostir 1\nmesh @mesh [didx] = 0\nprogram @p(%a: f32[4, 256]) -> (%c, %a, %t, %t) {\n"
    executor = Executor(parse(f"{head}{body}\n}}\n"), machine="cuda")
    a = torch.empty(4, 256)
    outs = [torch.empty(256), *(torch.empty(4, 256) for _ in range(3))]
    for _ in range(6):
        fresh(a)
        for x in outs:
            x.fill_(NAN)
        results = executor(a, out=outs)
        assert all(x is y for x, y in zip(results, outs, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(outs, (a[1].relu(), a, a.relu(), a.relu()), strict=True))
    assert graphs_of(executor) == 1


def test_a_call_with_out_can_be_captured_by_the_caller() -> None:
    executor, a, b, c = called(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executor(a, b, out=c)
        c.mul_(2)
    for _ in range(4):
        fresh(a, b)
        c.fill_(NAN)
        graph.replay()
        assert is_product(c / 2, a, b)
        c.fill_(NAN)
        executor(a, b, out=c)
        assert is_product(c, a, b)
    assert graphs_of(executor) == 1


def test_two_executors_replay_on_two_streams_at_once() -> None:
    executors = [Executor(pipeline(), machine="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in executors]
    sets = [(*inputs_of(), torch.empty(4, 1, 64, 256)) for _ in executors]
    torch.cuda.synchronize()
    for call in range(40):
        expected = []
        for number, (executor, stream, (a, b, c)) in enumerate(zip(executors, streams, sets, strict=True)):
            with torch.cuda.stream(stream):
                fresh(a, b)
                c.fill_(NAN)
                if call % 4 == number:
                    torch.cuda._sleep(SLEEP // 50)
                executor(a, b, out=c)
                expected.append((c.clone(), a.clone(), b.clone()))
        torch.cuda.synchronize()
        assert all(is_product(*call) for call in expected)
    assert [graphs_of(executor) for executor in executors] == [1, 1]


def test_one_executor_can_be_called_on_two_streams() -> None:
    executor = Executor(pipeline(), machine="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    sets = [(*inputs_of(), torch.empty(4, 1, 64, 256)) for _ in streams]
    torch.cuda.synchronize()
    for call in range(40):
        expected = []
        for number, (stream, (a, b, c)) in enumerate(zip(streams, sets, strict=True)):
            with torch.cuda.stream(stream):
                fresh(a, b)
                c.fill_(NAN)
                if call % 4 == number:
                    torch.cuda._sleep(SLEEP // 50)
                executor(a, b, out=c)
                (eager,) = executor(a, b)
                expected += [(c.clone(), a.clone(), b.clone()), (eager, a.clone(), b.clone())]
        torch.cuda.synchronize()
        assert all(is_product(*call) for call in expected)
    assert graphs_of(executor) == 2


def test_another_thread_can_use_the_gpu_during_captures() -> None:
    over = threading.Event()
    problems: list[BaseException] = []

    def allocate_and_copy() -> None:
        try:
            with torch.device("cuda"), torch.cuda.stream(torch.cuda.Stream()):
                size = 1 << 20
                while not over.is_set():
                    x = torch.ones(size)
                    assert float(x[-1]) == 1
                    size = size * 2 if size < 1 << 26 else 1 << 20
                    del x
        except BaseException as problem:
            problems.append(problem)

    other = threading.Thread(target=allocate_and_copy)
    other.start()
    try:
        executor = Executor(pipeline(), machine="cuda")
        a, b = inputs_of()
        for _ in range(16):
            c = torch.full((4, 1, 64, 256), NAN)
            for _ in range(4):
                executor(a, b, out=c)
            assert is_product(c, a, b)
    finally:
        over.set()
        other.join()
    assert not problems
    assert executor.graph_refusal is None


def test_after_a_failed_capture_calls_run_eagerly() -> None:
    executor = Executor(pipeline(), machine="cuda")
    kernel = executor._machine.kernels["matmul"]

    def synchronizing(out: torch.Tensor, *operands: torch.Tensor) -> None:
        kernel(out, *operands)
        float(out.view(-1)[0])  # waits for the device, which is forbidden in a capture

    executor._machine.kernels = {**executor._machine.kernels, "matmul": synchronizing}
    a, b = inputs_of()
    c = torch.empty(4, 1, 64, 256)
    executor(a, b, out=c)
    executor(a, b, out=c)
    before = torch.cuda.current_stream()
    c.fill_(NAN)
    with pytest.warns(RuntimeWarning, match=r"@ag_matmul runs without CUDA graphs: a capture failed: rank 0, 'matmul"):
        executor(a, b, out=c)
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()
    for _ in range(4):
        assert is_product(c, a, b)
        fresh(a, b)
        c.fill_(NAN)
        executor(a, b, out=c)
    assert graphs_of(executor) == 0
    assert "matmul" in str(executor.graph_refusal)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    x = torch.ones(1 << 22)
    x.record_stream(torch.cuda.Stream())
    del x
    torch.cuda.synchronize()
    torch.empty(1)
    assert torch.cuda.memory_allocated() <= allocated, "the allocator is still in capture mode"


def test_a_program_whose_workers_do_not_join_runs_without_graphs() -> None:
    body = "  %c: f32[512, 512] = allocate\n  set_stream 0\n  synchronize %user\n  gelu %a -> %c"
    executor = Executor(alone(body, "%a: f32[512, 512]"), machine="cuda", check=False)
    a, c = torch.randn(512, 512), torch.empty(512, 512)
    executor(a, out=c)
    executor(a, out=c)
    with pytest.warns(RuntimeWarning, match="@p runs without CUDA graphs"):
        executor(a, out=c)
    c.fill_(NAN)
    executor(a, out=c)
    torch.cuda.synchronize()
    assert torch.allclose(c, torch.nn.functional.gelu(a))


def test_a_reused_address_belongs_to_another_allocation() -> None:
    torch.cuda.empty_cache()
    x = torch.empty(32 << 20, dtype=torch.uint8)
    address, allocations = x.data_ptr(), Allocations([x.data_ptr()])
    assert allocations.still_there()
    x = None
    assert allocations.still_there(), "torch caches the memory"
    torch.cuda.empty_cache()
    assert not allocations.still_there()
    again = [torch.empty(32 << 20, dtype=torch.uint8) for _ in range(4)]
    assert address in [x.data_ptr() for x in again], "the address is not reused"
    assert not allocations.still_there()


def test_graphs_are_captured_again_after_the_last_one_was_destroyed() -> None:
    executor, a, b, c = called(4)
    (call,) = executor.bound.values()
    for _ in range(3):
        call.graph, call.captures = None, 0
        for _ in range(4):
            executor(a, b, out=c)
            assert is_product(c, a, b)
        assert graphs_of(executor) == 1
    assert executor.graph_refusal is None
