"""Streams: the current stream, workers that executors share, private streams, and the order of calls."""

from __future__ import annotations

import pytest
import torch

from hostir.machines.cuda import streams
from hostir.machines.cuda.streams import current, own_stream
from tests.call import small_programs
from tests.machines.cuda import fake_graphs
from tests.machines.cuda.fake_graphs import CPU, Current, Stream, log


def test_torch_makes_an_object_for_a_stream_only_when_another_becomes_current(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[object] = []
    handles = {0: 7, 1: 7}

    def current_stream(device: torch.device) -> object:
        created.append(f"stream {handles[device.index]} of {device}")
        return created[-1]

    monkeypatch.setattr(streams, "_known", {})
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: handles[index], raising=False)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    currents = [current(first), current(first), current(second), current(first)]
    assert currents == ["stream 7 of cuda:0", "stream 7 of cuda:0", "stream 7 of cuda:1", "stream 7 of cuda:0"]
    handles[0] = 8
    assert [current(first), current(first), current(second)] == [
        *("stream 8 of cuda:0", "stream 8 of cuda:0", "stream 7 of cuda:1")
    ]
    assert created == ["stream 7 of cuda:0", "stream 7 of cuda:1", "stream 8 of cuda:0"]


def test_executors_share_streams_outside_torch_s_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs.install(monkeypatch)
    created: list[object] = []
    monkeypatch.setattr(streams, "new_stream", lambda device, priority: created.append(object()) or created[-1])
    first = [streams.workers(CPU, 1)[0] for _ in range(streams.WORKERS)]
    again = [streams.workers(CPU, 1)[0] for _ in range(2 * streams.WORKERS)]
    assert len(set(map(id, first))) == len(created) == streams.WORKERS
    assert again[: streams.WORKERS] == again[streams.WORKERS :]
    assert set(map(id, again)) == set(map(id, first))


@pytest.mark.parametrize("earlier", [0, 5, 30, 100])
def test_all_streams_of_an_executor_are_different(earlier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs.install(monkeypatch)
    monkeypatch.setattr(streams, "new_stream", lambda device, priority: object())
    for _ in range(earlier):
        streams.workers(CPU, 1)
    for count in (streams.WORKERS, 2, streams.WORKERS + 1, 40, 31, 41):
        assert len(set(map(id, streams.workers(CPU, count)))) == count
    assert len(streams._workers[CPU]) == 41, "as many as the largest executor needs"
    many = small_programs.alone("%c: f32[4, 8] = allocate\n  relu %a -> %c", "%a: f32[4, 8]", streams=40)
    assert len(set(map(id, fake_graphs.executor(many)._machine.streams))) == 40


def test_a_stream_without_products_is_reused_at_once_but_never_for_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_graphs.install(monkeypatch)
    owner = Stream()  # anything that can go
    left = own_stream(owner, CPU, 0)
    del owner
    first, second = Stream(), Stream()
    assert own_stream(first, CPU, 0, products=True) is not left
    assert own_stream(first, CPU, -1) is not left
    assert own_stream(first, CPU, 0) is left
    assert own_stream(second, CPU, 0) is not left


def test_communicating_calls_run_in_order_on_different_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_graphs.install(monkeypatch)
    monkeypatch.setattr(streams, "_communicating", {})
    one, another = streams.communication_order(CPU), streams.communication_order(CPU)
    one.follow()
    with Current(Stream(name="other")):
        another.follow()
        one.follow()
    another.follow()
    assert log == [("other", "waits for", "caller"), ("caller", "waits for", "other")]


def test_communicating_calls_run_in_order_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs.install(monkeypatch)
    order, capture = streams.CallOrder(CPU), [1]
    monkeypatch.setattr(streams, "capture_id", lambda stream: capture[-1])
    order.follow_in_capture()
    with Current(Stream(name="other")):
        order.follow_in_capture()
        order.follow_in_capture()
        assert log == [("other", "waits for", "caller")]
    order.follow()
    capture.append(2)
    order.follow_in_capture()
    assert log == [("other", "waits for", "caller")], "no wait for another capture or a call outside"


@pytest.mark.parametrize(
    ("said", "count"), [(None, 8), ("", 8), ("many", 8), ("0", 8), ("1", 1), ("32", 32), ("99", 32)]
)
def test_the_number_of_hardware_queues_is_read_as_cuda_reads_it(
    said: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", said)
    assert streams.queues() == count
