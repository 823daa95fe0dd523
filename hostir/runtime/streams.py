"""Streams: the caller's, an executor's, and such as nobody else has.

None that hostir makes is of torch's pool, which gives everyone the same 32: a graph that anybody captures on one of
those shares cuBLAS's workspace with what is issued to it, see cublas.py.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque

import torch

from hostir.runtime.driver import new_stream

WORKERS = 32  # of a device, unless one executor has more
RESTING = 32  # streams of one kind that nobody takes
_known: dict[int | None, tuple[int, torch.cuda.Stream]] = {}  # of each device the stream that was current last
_workers: dict[torch.device, list[torch.cuda.Stream]] = {}
_taken: Counter[torch.device] = Counter()  # how many executors have been given
_choosing = threading.Lock()
_free: dict[tuple[torch.device, int, bool], deque[torch.cuda.Stream]] = {}  # by kind: whose owners have gone, in order


def queues() -> int:
    """How many hardware queues the streams of a process share: CUDA reads this when it starts."""
    said = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return min(int(said), 32) if said.isdigit() and int(said) else 8


def current(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a device; the same object as long as the same one is current.

    Every call asks for it, and torch takes 10 us of the host to say which one it is.
    """
    handle = torch._C._cuda_getCurrentRawStream(device.index)
    known = _known.get(device.index)
    if known is not None and known[0] == handle:
        return known[1]
    stream = torch.cuda.current_stream(device)
    _known[device.index] = handle, stream
    return stream


def workers(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Streams for the statements of an executor: different ones, by turns of those that all executors share."""
    made = _workers.setdefault(device, [])
    with _choosing:
        first = _taken[device]
        _taken[device] += count
        while len(made) < max(count, min(first + count, WORKERS)):
            made.append(new_stream(device, priority=0))
        return [made[(first + i) % len(made)] for i in range(count)]


def own_stream(owner: object, device: torch.device, priority: int, products: bool = False) -> torch.cuda.Stream:
    """A stream that nobody else has while `owner` lives. With `products` cuBLAS's workspace comes with it.

    torch never frees that, so streams whose owners have gone are taken again in their turn. But the latest of those
    with products rest, as a graph that has gone may still be under way. That it is not by their turn is likely, and
    nothing looks: who replays a graph is not known, and to wait for the whole device CUDA forbids while anybody
    captures.
    """
    spare = _free.setdefault((device, priority, products), deque())
    try:
        stream = spare.popleft() if len(spare) > (RESTING if products else 0) else new_stream(device, priority)
    except IndexError:  # another thread has taken the only one
        stream = new_stream(device, priority)
    weakref.finalize(owner, spare.append, stream).atexit = False
    return stream
