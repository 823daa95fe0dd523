"""CUDA streams, and the calls of the CUDA driver that torch does not offer."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hostir.runtime.kernels.layout import collapse

# The driver -----------------------------------------------------------------------------------------------------------
# The few calls of the CUDA driver that torch does not offer: flags that streams set and wait for, copies, streams.
#
# No flag or copy needs an SM, except copies within one GPU, which the driver runs as kernels. All can be captured into
# a CUDA graph. (CUDA driver API: stream memory operations, memory management, stream management.)

WAIT, WRITE = 4, 5  # CU_STREAM_MEM_OP_WAIT_VALUE_64 and CU_STREAM_MEM_OP_WRITE_VALUE_64
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
ORDERED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: visible only after all that the stream did before
DEVICE = 2  # CU_MEMORYTYPE_DEVICE
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID: the number of an allocation, which no other of the process ever gets
MAX_BATCH = 200  # operations per batch; the driver takes 256


class MemoryOp(ctypes.Structure):
    """CUstreamBatchMemOpParams for a 64-bit value."""

    _fields_ = (
        ("kind", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def _side(name: str) -> list[tuple[str, Any]]:
    size = ctypes.c_size_t
    where = (("memory", ctypes.c_uint64), ("host", ctypes.c_void_p), ("address", ctypes.c_uint64))
    fields = (("skip", size), ("top", size), *where, ("array", ctypes.c_void_p), ("pitch", size))
    return [(f"{name}_{field}", kind) for field, kind in fields]


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: a copy of `height` rows of `width` bytes."""

    _fields_ = (*_side("x"), *_side("out"), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")  # releases the GIL during a call, which may block until a queue has room


def check(code: int, what: str) -> None:
    """Raise RuntimeError if the driver returned an error code other than 0."""
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    message = text.value.decode() if text.value else "unknown error"
    raise RuntimeError(f"{what}: {message} (CUDA error {code})")


def new_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Create a stream outside torch's pool, which gives the same 32 to everyone. It is never destroyed."""
    handle, context = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "a stream")
        if not context:  # a new thread has none until its first call of the CUDA runtime
            torch.cuda.mem_get_info(device)
        arguments = ctypes.byref(handle), ctypes.c_uint(NON_BLOCKING), ctypes.c_int(priority)
        check(_driver().cuStreamCreateWithPriority(*arguments), "a stream")
    return torch.cuda.ExternalStream(handle.value, device=device)


def capture_id(stream: torch.cuda.Stream) -> int:
    """Return the number of the capture that a stream is part of, which no other capture has."""
    status, number, nothing = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    handle = ctypes.c_void_p(stream.cuda_stream)
    results = ctypes.byref(status), ctypes.byref(number), nothing, nothing, nothing
    check(_driver().cuStreamGetCaptureInfo_v2(handle, *results), "a capture")
    return number.value


class Allocations:
    """The allocations that some addresses were in when this was made.

    CUDA may free an allocation and give its address to the next one. An address alone does not tell the two apart.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self.addresses = [ctypes.c_uint64(address) for address in addresses]
        self.result = ctypes.c_uint64()
        self.call, self.pointer = _driver().cuPointerGetAttribute, ctypes.byref(self.result)
        self.numbers = [self.number(address) for address in self.addresses]

    def number(self, address: ctypes.c_uint64) -> int:
        """Return the number of the allocation that holds an address now; 0 if none does."""
        return 0 if self.call(self.pointer, BUFFER_ID, address) else self.result.value

    def still_there(self) -> bool:
        """Return True if the same allocations hold the addresses. This takes 0.7 us an address."""
        for address, number in zip(self.addresses, self.numbers, strict=True):
            if self.call(self.pointer, BUFFER_ID, address) or self.result.value != number:
                return False
        return True


# Flags ------------------------------------------------------------------------------------------------------------
def wait_at_least(address: int, value: int) -> MemoryOp:
    """Return the operation that makes a stream wait until the int64 at an address of this GPU is at least `value`."""
    return MemoryOp(WAIT, address, value, AT_LEAST, 0, 0)


def write(address: int, value: int) -> MemoryOp:
    """Return the operation that sets an int64, also a peer's, after all earlier work of the stream is visible."""
    return MemoryOp(WRITE, address, value, ORDERED, 0, 0)


def in_batches(ops: Sequence[MemoryOp]) -> Callable[[int], None]:
    """Return a function that issues these operations, in order, to the stream of a given handle."""
    parts = [ops[i : i + MAX_BATCH] for i in range(0, len(ops), MAX_BATCH)]
    batches = [((MemoryOp * len(part))(*part), ctypes.c_uint(len(part))) for part in parts]
    call, no_flags = _driver().cuStreamBatchMemOp_v2, ctypes.c_uint(0)

    def issue(stream: int) -> None:
        handle = ctypes.c_void_p(stream)
        for array, count in batches:
            if code := call(handle, count, array, no_flags):
                check(code, "flags that a stream waits for")

    return issue


# Copies -----------------------------------------------------------------------------------------------------------
class StridedCopy:
    """A copy between strided tensors by copy engines: one memcpy, or 2D copies of equally spaced rows.

    The first call fixes the layouts of both tensors; later calls may change only their addresses.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, Memcpy2D | int]] | None = None  # (offset in out, offset in x, what to copy)

    def __call__(self, out: torch.Tensor, x: torch.Tensor, stream: int) -> None:
        """Copy `x` to `out` on the stream of a given handle; do nothing if they are the same memory."""
        target, source = out.data_ptr(), x.data_ptr()
        if target == source:
            return
        if self.pieces is None:
            self.pieces = pieces(out, x)
        driver, handle = _driver(), ctypes.c_void_p(stream)
        for to, start, piece in self.pieces:
            if isinstance(piece, int):
                code = driver.cuMemcpyAsync(
                    ctypes.c_uint64(target + to), ctypes.c_uint64(source + start), ctypes.c_size_t(piece), handle
                )
            else:
                piece.out_address, piece.x_address = target + to, source + start
                code = driver.cuMemcpy2DAsync_v2(ctypes.byref(piece), handle)
            if code:
                check(code, "a copy")


def pieces(out: torch.Tensor, x: torch.Tensor) -> list[tuple[int, int, Memcpy2D | int]]:
    """Return the copies that make `out` equal to `x`: offsets in bytes in `out` and `x`, and a 2D copy or a size."""
    size = x.element_size()
    levels = collapse(x.shape, x.stride(), out.stride()) or [(1, 1, 1)]
    if levels[0][0] == 0:
        return []
    if levels[-1][1:] != (1, 1):
        levels.append((1, 1, 1))
    width = levels[-1][0] * size
    if len(levels) == 1:
        return [(0, 0, width)]
    *outer, (height, x_pitch, out_pitch), _ = levels
    where = [(0, 0)]
    for count, x_step, out_step in outer:
        where = [(to + i * out_step * size, start + i * x_step * size) for to, start in where for i in range(count)]
    if x_pitch * size < width or out_pitch * size < width:  # rows that repeat or overlap have no pitch
        rows = [(i * out_pitch * size, i * x_pitch * size) for i in range(height)]
        return [(to + down, start + along, width) for to, start in where for down, along in rows]
    return [(to, start, _rows(x_pitch * size, out_pitch * size, width, height)) for to, start in where]


def _rows(x_pitch: int, out_pitch: int, width: int, height: int) -> Memcpy2D:
    return Memcpy2D(
        x_memory=DEVICE, out_memory=DEVICE, x_pitch=x_pitch, out_pitch=out_pitch, width=width, height=height
    )


# Streams --------------------------------------------------------------------------------------------------------------
# Streams: the caller's, those that executors share, and private ones.
#
# None that hostir creates is from torch's pool, which gives everyone the same 32: a graph that is captured on one of
# those shares cuBLAS's workspace with what is issued to it, see hostir.runtime.cuda.graphs.

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
