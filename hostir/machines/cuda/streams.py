"""Streams: worker streams, their order behind each other, and the order of communicating calls.

Streams: the caller's, those that executors share, and private ones.

None that hostir creates is from torch's pool, which gives everyone the same 32: a graph that is captured on one of
those shares cuBLAS's workspace with what is issued to it, see hostir.machines.cuda.graphs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence

import torch

from hostir.machines.cuda.driver import capture_id, new_stream

WORKERS = 32  # shared worker streams of a device, unless one executor needs more
RESTING = 32  # freed streams with cuBLAS workspaces that are not reused yet
_known: dict[int | None, tuple[int, torch.cuda.Stream]] = {}  # the latest current stream, by device index
_workers: dict[torch.device, list[torch.cuda.Stream]] = {}
_taken: Counter[torch.device] = Counter()  # how many streams executors have been given
_choosing = threading.Lock()
# Streams whose owners are gone, oldest first, by device, priority and `products`.
_free: dict[tuple[torch.device, int, bool], deque[torch.cuda.Stream]] = {}


def queues() -> int:
    """Return how many hardware queues the streams of a process share; CUDA reads the variable when it starts."""
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return min(int(value), 32) if value.isdigit() and int(value) else 8


def current(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a device: the same object as long as the same stream is current.

    Every call asks for it, and `torch.cuda.current_stream` takes 10 us on the host.
    """
    handle = torch._C._cuda_getCurrentRawStream(device.index)
    known = _known.get(device.index)
    if known is not None and known[0] == handle:
        return known[1]
    stream = torch.cuda.current_stream(device)
    _known[device.index] = handle, stream
    return stream


def join(streams: Sequence[torch.cuda.Stream], stream: int, other: int, event: torch.cuda.Event) -> None:
    """Make a stream wait for all work that another has been given so far; both by their numbers."""
    event.record(streams[other])
    event.wait(streams[stream])


class CallOrder:
    """Calls that run one after another, on whatever streams they are made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None  # of the latest call
        self.handle: int | None = None  # of that stream
        self.captured: tuple[int, torch.cuda.Stream] | None = (
            None  # the capture with the latest captured call, its stream
        )

    def follow(self) -> None:
        """Make the current stream wait for the latest call, if that was on another stream."""
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle == self.handle:
            return
        now = current(self.device)
        if self.stream is not None:
            now.wait_stream(self.stream)
        self.stream, self.handle = now, handle

    def follow_in_capture(self) -> None:
        """Make the current stream wait for the latest call in the same capture, if that was on another stream.

        Calls outside a capture cannot come before what is in it: when it is replayed is the caller's to order.
        """
        now = current(self.device)
        capture = capture_id(now)
        if self.captured is not None and self.captured[0] == capture and self.captured[1] != now:
            now.wait_stream(self.captured[1])
        self.captured = capture, now


_communicating: dict[torch.device, CallOrder] = {}


def communication_order(device: torch.device) -> CallOrder:
    """Return the order of all calls on a device that communicate.

    Kernels that wait for peers hold SMs, NCCL's as well: two calls that run in different orders on two ranks would
    deadlock.
    """
    return _communicating.setdefault(device, CallOrder(device))


def workers(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Return `count` different streams for an executor, round robin from those that all executors share."""
    made = _workers.setdefault(device, [])
    with _choosing:
        first = _taken[device]
        _taken[device] += count
        while len(made) < max(count, min(first + count, WORKERS)):
            made.append(new_stream(device, priority=0))
        return [made[(first + i) % len(made)] for i in range(count)]


def calling_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the streams on which communicating calls may be under way: all workers, and the latest caller's.

    Calls on earlier streams end before the latest call.
    """
    latest = communication_order(device).stream
    return [*_workers.get(device, ()), *(() if latest is None else (latest,))]


def own_stream(owner: object, device: torch.device, priority: int, products: bool = False) -> torch.cuda.Stream:
    """Return a stream that nobody else has while `owner` lives. With `products`, cuBLAS is called on it.

    torch keeps a cuBLAS workspace for such a stream and never frees it, so streams whose owners are gone are reused,
    oldest first. The latest `RESTING` of those with products are not reused, since a deleted graph may still be running
    and use the workspace. That it has ended by the time of the reuse is likely, but not checked: who replays a graph is
    not known, and CUDA forbids waiting for the whole device while anyone captures.
    """
    idle = _free.setdefault((device, priority, products), deque())
    try:
        stream = idle.popleft() if len(idle) > (RESTING if products else 0) else new_stream(device, priority)
    except IndexError:  # another thread has taken the only one
        stream = new_stream(device, priority)
    weakref.finalize(owner, idle.append, stream).atexit = False
    return stream
