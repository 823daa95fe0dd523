"""Started calls on one CUDA device: concurrent work of the caller, captures, and memory that is freed early."""

from __future__ import annotations

import pytest
import torch

from hostir.call.executor import Executor
from tests.gpu.one_device import NAN, SLEEP, delay_kernels, inputs_of, is_product, pipeline

pytestmark = pytest.mark.usefixtures("on_gpu")


@pytest.mark.parametrize("with_out", [False, True])
def test_results_are_complete_after_the_wait_and_inputs_may_be_freed_at_once(with_out: bool) -> None:
    executor = Executor(pipeline(), machine="cuda")
    delay_kernels(executor, "matmul")
    for _ in range(6):
        a, b = inputs_of()
        exact_a, exact_b = a.clone(), b.clone()
        out = torch.full((4, 1, 64, 256), NAN) if with_out else None
        handle = executor.start(a, b, out=out)
        del a, b
        (c,) = handle.wait()
        late_a, late_b = (torch.full_like(x, NAN) for x in (exact_a, exact_b))  # may reuse the memory of the inputs
        assert is_product(c.clone(), exact_a, exact_b)
        del late_a, late_b


def test_a_dropped_call_keeps_its_memory_until_it_has_ended() -> None:
    executor = Executor(pipeline(), machine="cuda")
    delay_kernels(executor, "matmul")
    a, b = inputs_of()
    out, exact = torch.full((4, 1, 64, 256), NAN), (a.clone(), b.clone())
    executor.start(a, b, out=out)
    shapes = a.shape, b.shape
    del a, b
    others = [torch.full(shape, NAN) for shape in shapes for _ in range(8)]
    executor.synchronize()
    assert is_product(out, *exact)
    del others


def test_the_stream_of_the_caller_does_not_wait_for_a_started_call() -> None:
    executor = Executor(pipeline(), machine="cuda")
    a, b = inputs_of()
    delay_kernels(executor, "matmul")
    executor(a, b)
    torch.cuda.synchronize()
    handle, before, call = executor.start(a, b), torch.cuda.Event(), torch.cuda.Event()
    before.record()
    handle.wait()
    call.record()
    before.synchronize()
    assert not call.query(), "the caller's stream waited for the call"


@pytest.mark.parametrize("waits", [True, False])
def test_a_started_call_in_a_capture_forks_and_joins(waits: bool) -> None:
    executor = Executor(pipeline(), machine="cuda")
    a, b = inputs_of()
    c = torch.empty(4, 1, 64, 256)
    executor(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        handle = executor.start(a, b, out=c)
        if waits:
            handle.wait()
        del handle
    for _ in range(3):
        a.copy_(torch.randn_like(a))
        c.fill_(NAN)
        torch.cuda._sleep(SLEEP)
        graph.replay()
        assert is_product(c.clone(), a, b)
