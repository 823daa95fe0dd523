"""CUDA streams: the caller's stream, worker streams that executors share, private streams, and the order of calls.

hostir takes no stream from torch's pool, which gives the same 32 streams to everyone. A graph that is captured on a
stream of the pool shares a cuBLAS workspace with all other work on that stream: see hostir.machines.cuda.cublas.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence

import torch

from hostir.kernels.parameters import TAPING
from hostir.machines.cuda.driver import capture_id, new_stream

WORKERS = 32  # the number of shared worker streams of a device, unless one executor needs more
RESTING = 32  # the number of private streams with a cuBLAS workspace that wait for reuse, the ones freed last
_known: dict[int | None, tuple[int, torch.cuda.Stream]] = {}  # the latest current stream, by device index
_workers: dict[torch.device, list[torch.cuda.Stream]] = {}
_taken: Counter[torch.device] = Counter()  # the number of worker streams that executors were given
_choosing = threading.Lock()
# Private streams without an owner, the oldest first, by device, priority and `products`.
_free: dict[tuple[torch.device, int, bool], deque[torch.cuda.Stream]] = {}


def queues() -> int:
    """Return the number of hardware queues of a process.

    It is the value of CUDA_DEVICE_MAX_CONNECTIONS, but at most 32; by default it is 8. CUDA reads this environment
    variable once, when it starts.
    """
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return min(int(value), 32) if value.isdigit() and int(value) else 8


def current(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a device. While the same stream is current, this returns the same object.

    Every call of a program needs the current stream, and `torch.cuda.current_stream` would take 10 us on the host.
    """
    handle = torch._C._cuda_getCurrentRawStream(device.index)
    if device.index in _known and (latest := _known[device.index])[0] == handle:
        return latest[1]
    stream = torch.cuda.current_stream(device)
    _known[device.index] = handle, stream
    return stream


def join(streams: Sequence[torch.cuda.Stream], stream: int, other: int, event: torch.cuda.Event) -> None:
    """Make stream `streams[stream]` wait for all work issued to `streams[other]` so far."""
    record(event, streams[other])
    wait(event, streams[stream])


def record(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Record an event on a stream. If a tape is being recorded, also add this to the tape."""
    event.record(stream)
    if TAPING.writer is not None:
        TAPING.writer.record(event.cuda_event, stream.cuda_stream)


def wait(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Make a stream wait for an event. If a tape is being recorded, also add this to the tape."""
    event.wait(stream)
    if TAPING.writer is not None:
        TAPING.writer.wait(event.cuda_event, stream.cuda_stream)


class CallOrder:
    """Orders calls that must run one after another, even if they are made on different streams of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None  # the stream of the latest call
        self.captured: tuple[int, torch.cuda.Stream] | None = None  # capture and stream of the latest captured call

    def follow(self, now: torch.cuda.Stream | None = None) -> None:
        """Make the current stream wait for the latest call if that call was on another stream.

        `now` is the current stream, if the caller knows it.
        """
        now = now or current(self.device)
        if self.stream is not None and self.stream != now:
            now.wait_stream(self.stream)
        self.stream = now

    def follow_in_capture(self) -> None:
        """Make the current stream wait for the latest call in the same capture if that call was on another stream.

        A captured call does not wait for calls outside the capture: the caller decides when the graph is replayed.
        """
        now = current(self.device)
        capture = capture_id(now)
        if self.captured is not None and self.captured[0] == capture and self.captured[1] != now:
            now.wait_stream(self.captured[1])
        self.captured = capture, now


_communicating: dict[torch.device, CallOrder] = {}


def communication_order(device: torch.device) -> CallOrder:
    """Return the object that orders all communicating calls on a device.

    Kernels that wait for peers hold SMs while they wait. NCCL's kernels do so, too. So two calls would deadlock if they
    ran in different orders on two ranks.
    """
    return _communicating.setdefault(device, CallOrder(device))


def workers(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Return `count` different streams for an executor, taken in turn from streams that all executors share."""
    shared = _workers.setdefault(device, [])
    with _choosing:
        first = _taken[device]
        _taken[device] += count
        while len(shared) < max(count, min(first + count, WORKERS)):
            shared.append(new_stream(device, priority=0))
        return [shared[(first + i) % len(shared)] for i in range(count)]


def calling_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the streams on which communicating calls may be under way.

    These are all worker streams, and the stream on which the latest call was made. Calls that were made on other
    streams end before the latest call.
    """
    latest = communication_order(device).stream
    return [*_workers.get(device, ()), *(() if latest is None else (latest,))]


def own_stream(owner: object, device: torch.device, priority: int, products: bool = False) -> torch.cuda.Stream:
    """Return a stream that nothing but `owner` uses as long as `owner` lives.

    `products` is True if the owner calls cuBLAS on the stream. For such a stream, torch keeps a cuBLAS workspace that
    torch never frees. So streams are reused after their owners have been garbage-collected, the oldest stream first. A
    graph of the owner may still be running then, and use the workspace. So the latest RESTING streams with products are
    not reused. When a stream is reused, such a graph has probably ended, but hostir cannot check this: it does not know
    who replays a graph, and CUDA forbids waiting for the device during a capture.
    """
    idle = _free.setdefault((device, priority, products), deque())
    try:
        stream = idle.popleft() if len(idle) > (RESTING if products else 0) else new_stream(device, priority)
    except IndexError:  # another thread has taken the last one
        stream = new_stream(device, priority)
    weakref.finalize(owner, idle.append, stream).atexit = False
    return stream
