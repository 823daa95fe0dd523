"""Streams of CUDA, and the calls of its driver that torch does not offer."""

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
# The few calls of CUDA's driver that torch does not offer: flags that streams set and wait for, copies, streams.
#
# No flag or copy needs an SM, unless a copy stays on one GPU: the driver makes such a copy with a kernel. All can be
# captured into a CUDA graph. (CUDA driver API: stream memory operations, memory management, stream management.)

WAIT, WRITE = 4, 5  # CU_STREAM_MEM_OP_WAIT_VALUE_64 and CU_STREAM_MEM_OP_WRITE_VALUE_64
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
ORDERED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: the write is seen after all that the stream did before
DEVICE = 2  # CU_MEMORYTYPE_DEVICE
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not in order with the stream that CUDA begins with
MAX_BATCH = 200  # operations of a batch; the driver takes 256
Step = Callable[[], None]


class MemoryOp(ctypes.Structure):
    """CUstreamBatchMemOpParams, of 64 bits."""

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
    """CUDA_MEMCPY2D."""

    _fields_ = (*_side("x"), *_side("out"), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")  # which lets other threads run during a call: one may have to wait for room


def check(code: int, what: str) -> None:
    """Raises RuntimeError for a driver's error code other than 0."""
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    said = text.value.decode() if text.value else "unknown error"
    raise RuntimeError(f"{what}: {said} (CUDA error {code})")


def new_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    """A stream that is not one of torch's pool, which gives the same 32 to everyone. It is never destroyed."""
    handle, context = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "a stream")
        if not context:  # of a new thread, until its first call of the runtime
            torch.cuda.mem_get_info(device)
        arguments = ctypes.byref(handle), ctypes.c_uint(NON_BLOCKING), ctypes.c_int(priority)
        check(_driver().cuStreamCreateWithPriority(*arguments), "a stream")
    return torch.cuda.ExternalStream(handle.value, device=device)


# Flags ------------------------------------------------------------------------------------------------------------
def wait_at_least(address: int, value: int) -> MemoryOp:
    """The stream waits until the integer at an address of this GPU is at least `value`."""
    return MemoryOp(WAIT, address, value, AT_LEAST, 0, 0)


def write(address: int, value: int) -> MemoryOp:
    """The stream sets an integer, of a peer too, once all that it did before is to be seen by everyone."""
    return MemoryOp(WRITE, address, value, ORDERED, 0, 0)


def in_batches(ops: Sequence[MemoryOp]) -> Callable[[int], None]:
    """What has a stream, by its handle, do operations on flags one after another."""
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
class Copier:
    """Copies between tensors of one kind of layout: contiguous, or equal rows at equal distances, or blocks of such.

    The layouts are those of the tensors of the first copy.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, Memcpy2D | int]] | None = None  # by their distance from the first bytes

    def __call__(self, out: torch.Tensor, x: torch.Tensor, stream: int) -> None:
        """`out` becomes `x` on a stream, given by its handle; nothing happens where they are the same memory."""
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
    """The copies that make `out` equal to `x`: distances in bytes in either, and rows or a number of bytes."""
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
# Streams: the caller's, an executor's, and such as nobody else has.
#
# None that hostir makes is of torch's pool, which gives everyone the same 32: a graph that anybody captures on one of
# those shares cuBLAS's workspace with what is issued to it, see cublas.py.

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
