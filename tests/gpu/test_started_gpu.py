"""Started calls on one CUDA device: beside the caller's work, in its captures, and with memory that goes early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hostir.runtime.executor import Executor
from tests.gpu.one_device import NAN, SLEEP, close, inputs_of, pipeline, slowed


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    with torch.device("cuda"):
        yield torch.device("cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("given", [False, True])
def test_results_are_right_behind_the_wait_and_inputs_may_go_at_once(given: bool) -> None:
    executor = Executor(pipeline(), machine="cuda")
    slowed(executor, "matmul")
    for _ in range(6):
        a, b = inputs_of()
        exact_a, exact_b = a.clone(), b.clone()
        out = torch.full((4, 1, 64, 256), NAN) if given else None
        handle = executor.start(a, b, out=out)
        del a, b
        (c,) = handle.wait()
        late_a, late_b = (torch.full_like(x, NAN) for x in (exact_a, exact_b))  # perhaps in the memory of the inputs
        assert close(c.clone(), exact_a, exact_b)
        del late_a, late_b


def test_a_dropped_call_keeps_its_memory_until_it_has_ended() -> None:
    executor = Executor(pipeline(), machine="cuda")
    slowed(executor, "matmul")
    a, b = inputs_of()
    out, exact = torch.full((4, 1, 64, 256), NAN), (a.clone(), b.clone())
    executor.start(a, b, out=out)
    shapes = a.shape, b.shape
    del a, b
    others = [torch.full(shape, NAN) for shape in shapes for _ in range(8)]
    executor.synchronize()
    assert close(out, *exact)
    del others


def test_the_callers_stream_goes_on_beside_the_call() -> None:
    executor = Executor(pipeline(), machine="cuda")
    a, b = inputs_of()
    slowed(executor, "matmul")
    executor(a, b)
    torch.cuda.synchronize()
    handle, own, call = executor.start(a, b), torch.cuda.Event(), torch.cuda.Event()
    own.record()
    handle.wait()
    call.record()
    own.synchronize()
    assert not call.query(), "the caller's stream has waited for the call at its start"


@pytest.mark.parametrize("waits", [True, False])
def test_within_a_capture_a_call_forks_and_joins(waits: bool) -> None:
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
        assert close(c.clone(), a, b)
