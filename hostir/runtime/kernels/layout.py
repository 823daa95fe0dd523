"""Devices that kernels run on, and memory layouts of tensors as kernels see them."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

# Devices --------------------------------------------------------------------------------------------------------------
# A kernel runs in Triton's interpreter or on a GPU, within the limits of that GPU.

# Triton decides this when a kernel is decorated, so once for the life of the process.
INTERPRETED: bool = triton.knobs.runtime.interpret

# The interpreter keeps the program index in a global and patches triton.language while it runs.
_interpreter_lock = threading.Lock()


class _Thread(threading.local):
    bound = False


_thread = _Thread()


@dataclass(frozen=True)
class Limits:
    """The resources of a device that a kernel can use.

    Fields:
        sms: number of SMs, which is the number of programs of a persistent grid.
        shared_memory: bytes of shared memory that one program may use.
        tma: whether the device has the Tensor Memory Accelerator (TMA; Hopper and later).
        fp8: whether its tensor cores multiply 8-bit floats (Ada, Hopper and later).
    """

    sms: int
    shared_memory: int
    tma: bool
    fp8: bool


@functools.cache
def limits(device: torch.device) -> Limits:
    """Return the limits of `device`. The interpreter claims three SMs, so that its programs loop over tiles."""
    if INTERPRETED:
        return Limits(sms=3, shared_memory=1 << 30, tma=True, fp8=True)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Limits(
        sms=properties["multiprocessor_count"],
        shared_memory=properties["max_shared_mem"],
        tma=torch.cuda.get_device_capability(device) >= (9, 0),
        fp8=torch.cuda.get_device_capability(device) >= (8, 9),
    )


def check_device(**tensors: torch.Tensor | None) -> torch.device:
    """Return the one device of all `tensors` that are not None.

    Raises ValueError if they are on several devices, or on the CPU while Triton compiles for GPUs.
    """
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    device = next(iter(devices.values()))
    if any(other != device for other in devices.values()):
        found = ", ".join(f"{name} on {where}" for name, where in devices.items())
        raise ValueError(f"expected all tensors on one device, got {found}")
    if not INTERPRETED and device.type != "cuda":
        raise ValueError(f"Triton kernels need CUDA tensors, got {device.type}; on a CPU, set TRITON_INTERPRET=1 first")
    return device


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    # Overflow and NaN are silent on a GPU, so numpy, which the interpreter computes with, must be silent as well.
    with _interpreter_lock, np.errstate(all="ignore"):
        yield


def launching(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager for launches on `device`: it makes the device current, or locks the interpreter."""
    return _interpreting() if INTERPRETED else torch.cuda.device(device)


def bind_thread(device: torch.device) -> None:
    """Bind the CUDA context of `device`, the current one, to this thread.

    CUDA does so at a thread's first call of the CUDA runtime; encoding a descriptor is a call of the driver.
    """
    if not _thread.bound:
        torch.cuda.mem_get_info(device)
        _thread.bound = True


class Compiled:
    """A compiled kernel, launched with arguments of the types that it was compiled for.

    Triton's own launch inspects every argument to find the kernel that fits, and encodes every descriptor. Reusing both
    from an earlier launch saves most of the host time.
    """

    def __init__(self, kernel: Any) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg  # needs a driver

        self._function, self._metadata = kernel.function, kernel.packed_metadata
        self._described = kernel.metadata.tensordesc_meta
        self._encode = make_tensordesc_arg
        self._launch = copy.copy(kernel.run)
        if self._described:  # remove the wrapper with which Triton encodes descriptors
            self._launch.launch = inspect.getclosurevars(kernel.run.launch).nonlocals["launcher"]
        self.stream = triton.runtime.driver.active.get_current_stream  # from a device index to a stream handle

    def encoded(self, number: int, descriptor: TensorDescriptor) -> Sequence[Any]:
        """Return the arguments that encode descriptor `number`. They hold the tensor's address, not the tensor."""
        return tuple(self._encode(descriptor, self._described[number] if self._described else None))

    def launch(self, programs: int, stream: int, arguments: Sequence[Any]) -> None:
        """Launch with all arguments: tensors as addresses, descriptors encoded, constants as they were compiled."""
        self._launch(programs, 1, 1, stream, self._function, self._metadata, None, None, None, *arguments)


# Layouts --------------------------------------------------------------------------------------------------------------
# Memory layouts of tensors, as kernels see them: merged axes, row views, and what TMA can describe.

# The widest stride a tensor map can hold, in bytes (CUDA driver API, cuTensorMapEncodeTiled).
_STRIDE_LIMIT = 1 << 40


def collapse(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Merge neighbouring axes as far as all of `strides` allow.

    Returns `(size, stride, stride, ...)` for each merged axis, outermost first, with one stride per argument. Axes of
    size 1 are dropped. A shape with a zero in it becomes one axis of size 0.
    """
    if 0 in shape:
        return [(0, *(0 for _ in strides))]
    merged: list[tuple[int, ...]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(outer == size * step for outer, step in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return merged


def rows(t: torch.Tensor) -> torch.Tensor | None:
    """Return `t[..., K]` as a view `[M, K]`, M the product of the leading axes; None if no single row stride fits."""
    if t.ndim == 2:
        return t
    if t.is_contiguous() and t.shape[-1]:  # the same result as below, in a quarter of the time
        return t.view(-1, t.shape[-1])
    levels = collapse(t.shape[:-1], t.stride()[:-1])
    if len(levels) > 1:
        return None
    size, stride = levels[0] if levels else (1, t.shape[-1])
    return t.as_strided((size, t.shape[-1]), (stride, t.stride(-1)))


def rows_or_copy(t: torch.Tensor) -> torch.Tensor:
    """Return `t[..., K]` as `[M, K]`: a view if a single row stride fits, else a dense copy."""
    flat = rows(t)
    return t.reshape(-1, t.shape[-1]) if flat is None else flat


def row_pieces(
    parts: Sequence[tuple[torch.Tensor, int]], count: int, cuts: Iterable[int] = ()
) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
    """Cut `count` rows of several tensors alike, at `cuts` and wherever the rows of one do not go on with one stride.

    Rows are the leading axes flattened. Of each tensor, with the first row to take, the rows may lie in any way.
    Returns, for each piece, its first row, counted from 0, and its rows of each tensor as views `[rows, K]`.
    """
    merged = [collapse(t.shape[:-1], t.stride()[:-1]) or [(1, t.shape[-1])] for t, _ in parts]
    turns = {
        row - first
        for (_, first), ((run, _), *_) in zip(parts, (levels[::-1] for levels in merged), strict=True)
        for row in range(first // run * run, first + count, run)
    }
    chosen = sorted(row for row in {0, count, *turns, *cuts} if 0 <= row <= count)
    return [
        (start, tuple(_rows_at(t, s, first + start, stop - start) for (t, first), s in zip(parts, merged, strict=True)))
        for start, stop in itertools.pairwise(chosen)
    ]


def _rows_at(t: torch.Tensor, levels: Sequence[tuple[int, ...]], start: int, count: int) -> torch.Tensor:
    """Return rows that have one stride; `levels` are the merged leading axes."""
    left, offset = start, int(t.storage_offset())
    for size, stride in reversed(levels):
        left, index = divmod(left, size)
        offset += index * stride
    return t.as_strided((count, t.shape[-1]), (levels[-1][1], t.stride(-1)), offset)


def descriptor_strides(t: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> list[int] | str:
    """Return strides (in elements) for a TMA descriptor of `shape` over the memory of `t`, or why there are none.

    The rules are those of `cuTensorMapEncodeTiled`: a base address on 16 bytes, innermost stride 1, every other stride
    a multiple of 16 bytes and of the next inner stride, and at least the extent of the inner axis. The stride of an
    axis of size 1 is never used, so one that breaks the rules is replaced by one that does not.
    """
    if t.data_ptr() % 16:
        return "its first element is not on a 16-byte boundary"
    if shape[-1] > 1 and strides[-1] != 1:
        return f"its innermost stride is {strides[-1]}, not 1"
    quantum = 16 // t.element_size()
    legal = [1]
    span = shape[-1]
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1 and (stride % quantum or stride < span or stride % legal[0] or stride >= _STRIDE_LIMIT):
            stride = -(-span // quantum) * quantum
        if stride % quantum:
            return f"its stride of {stride} elements is not a multiple of 16 bytes"
        if stride < span or stride % legal[0] or stride * t.element_size() >= _STRIDE_LIMIT:
            return f"its stride of {stride} elements does not step over whole rows"
        legal.insert(0, stride)
        span = size * stride
    return legal
