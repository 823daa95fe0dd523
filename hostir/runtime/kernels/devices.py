"""Devices that Triton kernels run on, its interpreter among them, and launches at little host time."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

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
