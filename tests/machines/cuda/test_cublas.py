"""In a capture, cuBLAS runs on private streams of the executor. Streams and graphs are fakes here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hostir.call.executor import Executor
from hostir.machines.cuda import cublas, streams
from hostir.machines.cuda import machine as cuda
from hostir.machines.cuda.uses import release
from tests.call.small_programs import BESIDE, alone
from tests.machines.cuda import fake_graphs
from tests.machines.cuda.fake_graphs import Current, Device, Stream, log, user_objects

HERE = "%c: f32[4, 5] = allocate\n  matmul %a, %b -> %c"
created: list[tuple[str, int]] = []


class Event(fake_graphs.Event):
    def record(self, stream: Stream | None = None) -> None:
        assert stream is not None
        self.stream = stream.name

    def wait(self, stream: Stream) -> None:
        log.append((stream.name, "waits for", self.stream))


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs.install(monkeypatch)
    created.clear()

    def new_stream(device: torch.device, priority: int) -> Stream:
        created.append((f"own {len(created)}", priority))
        stream = Stream(name=created[-1][0])
        stream.priority = priority
        return stream

    monkeypatch.setattr(cuda, "workers", lambda device, count: [Stream() for _ in range(count)])
    monkeypatch.setattr(streams, "new_stream", new_stream)
    monkeypatch.setattr(cublas, "_trials", cublas._Trials())
    monkeypatch.setattr(torch.cuda, "Event", Event)


def executor(monkeypatch: pytest.MonkeyPatch, body: str = BESIDE) -> Executor:
    """Return an executor that logs the streams of its kernels. Its matmul counts as cuBLAS."""
    e = fake_graphs.executor(alone(body))

    def noted(name: str, kernel: Any) -> Any:
        def run(*tensors: torch.Tensor, **options: Any) -> None:
            log.append((name, Device.current.name))
            kernel(*tensors, **options)

        return run

    kernels = e._machine.kernels = {name: noted(name, kernel) for name, kernel in e._machine.kernels.items()}
    monkeypatch.setattr(cuda, "BY_CUBLAS", (*cuda.BY_CUBLAS, kernels["matmul"]))
    return e


def noted_in(e: Executor, capture: bool) -> list[tuple[str, ...]]:
    """Return the log of one call, which may be part of a capture of the caller."""
    log.clear()
    Device.callers_capture = capture
    try:
        e(torch.randn(4, 8), torch.randn(8, 5))
    finally:
        Device.callers_capture = False
    return [step for step in log if isinstance(step, tuple)]


def test_in_a_capture_a_product_forks_from_its_stream_and_joins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    e = executor(monkeypatch)
    worker = e._machine.streams[0].name
    fork, join = (worker, "waits for", "caller"), ("caller", "waits for", worker)
    assert noted_in(e, capture=False) == [fork, ("matmul", worker), ("relu", worker), join]
    apart = [("own 0", "waits for", worker), ("matmul", "own 0"), (worker, "waits for", "own 0")]
    assert noted_in(e, capture=True) == [fork, *apart, ("relu", worker), join]
    assert noted_in(e, capture=True) == [fork, *apart, ("relu", worker), join]
    assert Device.current.name == "caller"


def test_the_private_stream_has_the_priority_of_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    e = executor(monkeypatch, HERE)
    noted_in(e, capture=False)
    assert noted_in(e, capture=True)[1] == ("matmul", "own 0")
    urgent = Stream(name="urgent")
    urgent.priority = -1
    with Current(urgent):
        for _ in range(2):
            assert noted_in(e, capture=True) == [
                *(("own 1", "waits for", "urgent"), ("matmul", "own 1"), ("urgent", "waits for", "own 1"))
            ]
    assert noted_in(e, capture=True)[1] == ("matmul", "own 0")
    assert created == [("own 0", 0), ("own 1", -1)]


def test_a_product_that_fails_in_a_capture_joins_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    e = executor(monkeypatch, HERE)
    noted_in(e, capture=False)
    Device.fails = "kernel"
    Device.capture = fake_graphs.Graph()
    log.clear()
    with pytest.raises(Exception, match="not in a capture"):
        e(torch.randn(4, 8), torch.randn(8, 5))
    assert log[:3] == [("own 0", "waits for", "caller"), ("matmul", "own 0"), ("caller", "waits for", "own 0")]
    assert Device.current.name == "caller"


def test_live_executors_never_share_a_private_stream_and_deleted_ones_return_theirs_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "RESTING", 2)
    living = executor(monkeypatch, HERE)
    assert noted_in(living, capture=False) == [("matmul", "caller")]
    seen = []
    for _ in range(6):
        e = executor(monkeypatch, HERE)
        noted_in(e, capture=False)
        seen.append(noted_in(e, capture=True)[1][1])
        del e
        user_objects.destroy()  # the graph of the caller
        release()
    assert seen == ["own 1", "own 2", "own 3", "own 1", "own 2", "own 3"]
    assert noted_in(living, capture=True)[1] == ("matmul", "own 0")


def test_recordings_for_trials_share_a_private_stream_which_no_other_capture_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = executor(monkeypatch, HERE), executor(monkeypatch, HERE)
    seen = []
    for e in (first, second, first):
        inputs = torch.randn(4, 8), torch.randn(8, 5)
        outs = e(*inputs)
        log.clear()
        e.record(inputs, outs)
        seen += [step[1] for step in log if isinstance(step, tuple) and step[0] == "matmul"]
    assert len(set(seen)) == 1
    assert len(seen) == 3
    assert noted_in(first, capture=True)[1] == ("matmul", "own 0")
    assert seen[0] != "own 0"


def test_the_error_of_a_product_is_raised_even_if_its_stream_can_no_longer_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    e = executor(monkeypatch, HERE)
    noted_in(e, capture=False)
    Device.fails = "kernel"
    Device.capture = fake_graphs.Graph()

    def spoiled(event: Event, stream: Stream) -> None:
        event.stream = stream.name
        if stream.name.startswith("own"):
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(Event, "record", spoiled)
    with pytest.raises(Exception, match="not in a capture"):
        e(torch.randn(4, 8), torch.randn(8, 5))


def test_an_executor_without_cublas_products_makes_no_private_streams() -> None:
    e = fake_graphs.executor(alone(BESIDE))
    noted_in(e, capture=False)
    noted_in(e, capture=True)
    assert not created
