"""Calls that `Executor.start` starts beside the caller's work.

The tests check which streams wait for each other, and which tensors are passed to `record_stream`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hostir.call import started
from hostir.call.executor import Executor
from hostir.ir.source import HostIRError
from hostir.machines.cuda import streams
from tests.call.small_programs import BESIDE, alone
from tests.machines.cuda import fake_graphs
from tests.machines.cuda.fake_graphs import Current, Device, Event, Stream, log


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs.install(monkeypatch)
    monkeypatch.setattr(streams, "_communicating", {})
    monkeypatch.setattr(started, "capture_id", lambda stream: 7)
    monkeypatch.setattr(Event, "wait", lambda event, stream: log.append((stream.name, "waits for", event.stream)))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: log.append((x.shape, "used on", stream.name)), raising=False
    )


def start(**options: Any) -> tuple[Executor, Any, torch.Tensor]:
    """Return an executor, a call that it has started, and the right result."""
    e = fake_graphs.executor(alone(BESIDE))
    a, b = torch.randn(4, 8), torch.randn(8, 5)
    handle = e.start(a, b, **options)
    assert Device.current.name == "caller"
    return e, handle, (a @ b).relu()


def waits(name: str) -> list[str]:
    return [step[2] for step in log if isinstance(step, tuple) and step[:2] == (name, "waits for")]


def test_the_call_runs_on_its_own_stream_and_the_caller_waits_for_it_once() -> None:
    e, handle, exact = start()
    assert e._side is not None
    beside = e._side.outside.name
    assert waits(beside)[0] == "caller", "the inputs come from the caller's stream"
    assert waits("caller") == [], "the caller has not waited yet"
    (c,) = handle.wait()
    torch.testing.assert_close(c, exact)
    assert waits("caller") == [beside]
    assert (c.shape, "used on", "caller") in log
    assert handle.wait()[0] is c
    assert waits("caller") == [beside]
    with Current(Stream(name="third")):
        assert handle.wait()[0] is c
    assert waits("third") == [beside]


def test_a_dropped_handle_marks_the_tensors_in_use() -> None:
    out = torch.empty(4, 5)
    e, handle, _ = start(out=out)
    assert e._side is not None
    log.clear()
    del handle
    beside = e._side.outside.name
    assert [step for step in log if step[1] == "used on"] == [(x, "used on", beside) for x in [(4, 8), (8, 5), (4, 5)]]
    _, handle, _ = start(out=out)
    handle.wait()
    log.clear()
    del handle
    assert log == [], "the stream that allocated all tensors has waited"


def test_within_a_capture_a_started_call_has_another_stream_and_joins_even_if_it_is_dropped() -> None:
    e, first, _ = start()
    first.wait()
    Device.callers_capture = True
    handle = e.start(torch.randn(4, 8), torch.randn(8, 5))
    assert e._side is not None
    inside = e._side.inside.name
    assert inside != e._side.outside.name
    assert inside not in waits("caller")
    with pytest.raises(HostIRError, match="outside any capture"):
        unwaited(e).wait()
    del handle
    assert waits("caller")[-1] == inside
    handle = e.start(torch.randn(4, 8), torch.randn(8, 5))
    output = handle.wait()
    Device.callers_capture = False
    assert handle.wait() is output, "the capture has joined the call"


def unwaited(e: Executor) -> Any:
    """Return a call that was started outside the current capture."""
    Device.callers_capture = False
    handle = e.start(torch.randn(4, 8), torch.randn(8, 5))
    Device.callers_capture = True
    return handle


def test_a_call_that_is_refused_leaves_the_callers_stream_current_and_joined() -> None:
    e, handle, _ = start()
    handle.wait()
    log.clear()
    with pytest.raises(HostIRError, match="given 1 input"):
        e.start(torch.randn(4, 8))
    assert Device.current.name == "caller"
    assert e._side is not None
    assert waits("caller") == [e._side.outside.name]
