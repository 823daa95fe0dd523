"""A fake CUDA device: streams and graphs write to `log`, and tensors are on the CPU.

A capture records the kernels; a replay runs them on the same memory.
"""

from __future__ import annotations

import ctypes
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hostir.call.executor import Executor
from hostir.call.rank import RankExecutor
from hostir.ir.program import Program
from hostir.job.groups import Groups
from hostir.kernels.table import kernel_table
from hostir.machines.cuda import copies, streams, uses
from hostir.machines.cuda.machine import CudaMachine

CPU = torch.device("cpu")
log: list[Any] = []


class Device:
    """The state of the fake device."""

    current: Stream
    capture: Graph | None = None
    callers_capture = False
    fails: str = ""  # the step of a capture that fails


class Stream:
    device_index, priority = 0, 0

    def __init__(self, device: object = None, name: str = "") -> None:
        self.name = name or f"stream {next(Stream.count)}"
        self.cuda_stream = id(self)

    count: Iterator[int] = itertools.count()

    def wait_stream(self, other: Stream) -> None:
        log.append((self.name, "waits for", other.name))

    def synchronize(self) -> None: ...


class Event:
    stream = ""  # the name of the stream of the latest record

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream.name if stream is not None else ""

    def wait(self, stream: Stream) -> None: ...

    def query(self) -> bool:
        return True


class Current:
    """Stands for torch.cuda.stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before, Device.current = Device.current, self.stream

    def __exit__(self, *problem: object) -> None:
        Device.current = self.before


class Graph:
    pool: object = None

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        alive.add(self)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        log.append(("capture", pool, capture_error_mode, Device.current.name))
        if pool in used and not any(graph.pool == pool for graph in alive):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")  # as torch's allocator of pinned memory says
        used.add(pool)
        self.pool = pool
        Device.capture = self
        if Device.fails == "begin":
            raise RuntimeError("CUDA error: no capture begins")

    def capture_end(self) -> None:
        if Device.capture is None:
            raise RuntimeError("CUDA error: nothing is captured")
        Device.capture = None
        if Device.fails == "end":
            raise RuntimeError("CUDA error: a stream has not joined")

    def replay(self) -> None:
        log.append(("replay", Device.current.name))
        if Device.fails == "replay":
            raise RuntimeError("CUDA error: out of memory")
        for work in self.work:
            work()


alive: weakref.WeakSet[Graph] = weakref.WeakSet()
used: set[object] = set()  # pools of graphs that are alive or gone


class UserObjects:
    """The driver's user objects: the graph that the caller captures holds them until `destroy`."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int]] = []  # the argument and the address of each function to call

    def cuUserObjectCreate(self, user_object: Any, argument: Any, function: Any, count: int, flags: int) -> int:  # noqa: N802, the driver names it
        assert (count, flags) == (1, 1)
        self.held.append((argument.value, function.value))
        return 0

    def cuGraphRetainUserObject(self, graph: Any, user_object: Any, count: int, flags: int) -> int:  # noqa: N802, the driver names it
        assert (count, flags) == (1, 1)
        return 0

    def destroy(self) -> None:
        """Destroy all graphs that the caller has captured."""
        for argument, function in self.held:
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(function)(argument)
        self.held.clear()


user_objects = UserObjects()


class CopyAtOnce:
    """A copy by the driver, which the fake makes at once."""

    def __call__(self, out: torch.Tensor, x: torch.Tensor, stream: int) -> None:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's functions and classes by the fakes, and clear the log."""
    log.clear()
    alive.clear()
    used.clear()
    Device.capture, Device.callers_capture, Device.fails = None, False, ""
    caller = Device.current = Stream(name="caller")
    cuda = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "stream": Current,
        "graph_pool_handle": lambda: f"pool {len(used)}",
        "is_current_stream_capturing": lambda: Device.callers_capture or Device.capture is not None,
        "default_stream": lambda device: caller,
        "current_stream": lambda device: Device.current,
        "synchronize": lambda device: None,
        "set_stream": lambda stream: setattr(Device, "current", stream),
    }
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", cuda["is_current_stream_capturing"])
    monkeypatch.setattr(copies, "StridedCopy", CopyAtOnce)
    monkeypatch.setattr(streams, "_known", {})
    monkeypatch.setattr(streams, "_workers", {})
    monkeypatch.setattr(streams, "_taken", Counter())
    monkeypatch.setattr(streams, "_free", {})
    monkeypatch.setattr(streams, "_communicating", {})
    monkeypatch.setattr(uses, "_uses", {})
    monkeypatch.setattr(uses, "capture_of", lambda stream: (1, 1))
    monkeypatch.setattr(uses, "cuda_driver", lambda: user_objects)
    user_objects.held.clear()
    monkeypatch.setattr(streams, "new_stream", lambda device, priority: Stream())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: id(Device.current), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *which: log.append(("leave", *which)))
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *which: log.append(("release", *which)))


def captured(kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*tensors: torch.Tensor, **options: Any) -> None:
        if Device.capture is None:
            log.append("eager")
            kernel(*tensors, **options)
            return
        if Device.fails == "kernel":
            raise ValueError("not in a capture")
        Device.capture.work.append(lambda: kernel(*tensors, **options))

    return run


def executor(p: Program, plain: bool = False, **options: Any) -> Executor:
    """Return a CUDA executor with a fake device and tensors on the CPU. If `plain`, kernels run also in captures."""
    kernels = {kind: kernel if plain else captured(kernel) for kind, kernel in kernel_table("aten", "cpu").items()}
    groups = Groups(0, CPU)
    nccl = types.SimpleNamespace(_allgather_base=lambda out, x, options: None)
    groups.made = {(0, 1): types.SimpleNamespace(_get_backend=lambda device: nccl)}
    machine = CudaMachine(CPU, p, kernels, groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankExecutor, "_join", lambda self, *arguments: machine)
        return Executor(p, machine="cuda", **options)
