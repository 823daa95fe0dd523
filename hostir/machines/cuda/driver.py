"""Call functions of the CUDA driver that torch does not offer, for flags in memory, copies, and new streams.

A stream can write a flag or wait for a flag without an SM. Copies need no SM either, except copies within one GPU,
which the driver runs as kernels. All these operations can be captured into a CUDA graph. They are in the chapters on
stream memory operations, memory management and stream management of the CUDA driver API.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hostir.kernels.parameters import TAPING

WAIT, WRITE = 4, 5  # CU_STREAM_MEM_OP_WAIT_VALUE_64 and CU_STREAM_MEM_OP_WRITE_VALUE_64
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
ORDERED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: visible only after all earlier work of the stream
DEVICE = 2  # CU_MEMORYTYPE_DEVICE
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID: the number of an allocation, unique in the process
MAX_BATCH = 200  # operations per batch; the driver takes 256


class MemoryOp(ctypes.Structure):
    """The driver's struct CUstreamBatchMemOpParams: an operation of a stream on a 64-bit value in memory."""

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
    return [(f"{name}_{field}", ctype) for field, ctype in fields]


class Memcpy2D(ctypes.Structure):
    """The driver's struct CUDA_MEMCPY2D: a copy of `height` rows of `width` bytes."""

    _fields_ = (*_side("x"), *_side("out"), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


@functools.cache
def cuda_driver() -> Any:
    """Return the CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")  # releases the GIL during a call, which may block until a queue has room


def check(code: int, operation: str) -> None:
    """Raise RuntimeError if the driver's return code is not 0. `operation` names the operation in the message."""
    if code == 0:
        return
    text = ctypes.c_char_p()
    cuda_driver().cuGetErrorString(code, ctypes.byref(text))
    message = text.value.decode() if text.value else "unknown error"
    raise RuntimeError(f"{operation}: {message} (CUDA error {code})")


def new_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Create a stream that is not from torch's pool. The stream is never destroyed.

    torch's pool gives the same 32 streams to everyone.
    """
    handle, context = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        check(cuda_driver().cuCtxGetCurrent(ctypes.byref(context)), "a stream")
        if not context:  # a new thread has no context until its first call of the CUDA runtime
            torch.cuda.mem_get_info(device)
        arguments = ctypes.byref(handle), ctypes.c_uint(NON_BLOCKING), ctypes.c_int(priority)
        check(cuda_driver().cuStreamCreateWithPriority(*arguments), "a stream")
    return torch.cuda.ExternalStream(handle.value, device=device)


def capture_of(stream: torch.cuda.Stream) -> tuple[int, int]:
    """Return the unique number of the capture that a stream is part of, and the handle of the graph."""
    status, number, graph, nothing = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p()
    handle = ctypes.c_void_p(stream.cuda_stream)
    results = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), nothing, nothing
    check(cuda_driver().cuStreamGetCaptureInfo_v2(handle, *results), "a capture")
    return number.value, graph.value or 0


def capture_id(stream: torch.cuda.Stream) -> int:
    """Return the unique number of the capture that a stream is part of."""
    return capture_of(stream)[0]


class Allocations:
    """A record of the CUDA allocations that contained some addresses when this object was created.

    CUDA may free an allocation and give its address to a new allocation. The two allocations have the same address, but
    different unique numbers.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self.addresses = [ctypes.c_uint64(address) for address in addresses]
        self.result = ctypes.c_uint64()
        self.call, self.pointer = cuda_driver().cuPointerGetAttribute, ctypes.byref(self.result)
        self.numbers = [self.number(address) for address in self.addresses]

    def number(self, address: ctypes.c_uint64) -> int:
        """Return the unique number of the allocation that contains an address now; 0 if no allocation contains it."""
        return 0 if self.call(self.pointer, BUFFER_ID, address) else self.result.value

    def still_there(self) -> bool:
        """Return True if the same allocations still contain the addresses. This takes 0.7 us for each address."""
        for address, number in zip(self.addresses, self.numbers, strict=True):
            if self.call(self.pointer, BUFFER_ID, address) or self.result.value != number:
                return False
        return True


def wait_at_least(address: int, value: int) -> MemoryOp:
    """Return the operation that makes a stream wait until the int64 at an address of this GPU is at least `value`."""
    return MemoryOp(WAIT, address, value, AT_LEAST, 0, 0)


def write(address: int, value: int) -> MemoryOp:
    """Return the operation by which a stream sets an int64 of this GPU or a peer.

    All earlier work of the stream is visible before the new value.
    """
    return MemoryOp(WRITE, address, value, ORDERED, 0, 0)


def in_batches(ops: Sequence[MemoryOp]) -> Callable[[int], None]:
    """Return a function that takes the handle of a stream and issues these operations to it, in order."""
    parts = [ops[i : i + MAX_BATCH] for i in range(0, len(ops), MAX_BATCH)]
    batches = [((MemoryOp * len(part))(*part), ctypes.c_uint(len(part))) for part in parts]
    call, no_flags = cuda_driver().cuStreamBatchMemOp_v2, ctypes.c_uint(0)

    def issue(stream: int) -> None:
        handle = ctypes.c_void_p(stream)
        for part in parts if TAPING.writer is not None else ():
            TAPING.writer.memory_ops(part, stream)
        for array, count in batches:
            if code := call(handle, count, array, no_flags):
                check(code, "flags that a stream waits for")

    return issue
