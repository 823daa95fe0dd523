"""Where a kernel runs: Triton's interpreter or a GPU, and what that GPU can do."""

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
    """What a kernel may count on.

    Fields:
        sms: streaming multiprocessors, the number of programs of a persistent grid.
        shared_memory: bytes of shared memory one program may take.
        tma: whether the copy engine for tensor tiles (TMA; Hopper and later) exists.
    """

    sms: int
    shared_memory: int
    tma: bool


@functools.cache
def limits(device: torch.device) -> Limits:
    """The limits of `device`. The interpreter claims three multiprocessors, so that its programs loop over tiles."""
    if INTERPRETED:
        return Limits(sms=3, shared_memory=1 << 30, tma=True)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Limits(
        sms=properties["multiprocessor_count"],
        shared_memory=properties["max_shared_mem"],
        tma=torch.cuda.get_device_capability(device) >= (9, 0),
    )


def check_device(**tensors: torch.Tensor | None) -> torch.device:
    """The one device of all `tensors` (None is passed over).

    Raises ValueError when they lie on several devices, or on the CPU while Triton compiles for GPUs.
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
    # Overflow and NaN are silent on a GPU, so numpy, which the interpreter computes with, keeps silent as well.
    with _interpreter_lock, np.errstate(all="ignore"):
        yield


def launching(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context to launch kernels on `device` in: its CUDA context current, or the interpreter to ourselves."""
    return _interpreting() if INTERPRETED else torch.cuda.device(device)


def bind_thread(device: torch.device) -> None:
    """Give this thread the CUDA context of `device`, the current one.

    CUDA binds it to a new thread at its first call of the runtime, and to encode a descriptor is none.
    """
    if not _thread.bound:
        torch.cuda.mem_get_info(device)
        _thread.bound = True


class Compiled:
    """A compiled kernel, to be launched with arguments of the types that it was compiled for.

    Triton's own launch looks at every argument, to find the kernel that fits, and encodes every descriptor. Who knows
    both from an earlier launch saves most of the host's time.
    """

    def __init__(self, kernel: Any) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg  # needs a driver

        self._function, self._metadata = kernel.function, kernel.packed_metadata
        self._described = kernel.metadata.tensordesc_meta
        self._encode = make_tensordesc_arg
        self._launch = copy.copy(kernel.run)
        if self._described:  # what Triton would encode descriptors with is taken off
            self._launch.launch = inspect.getclosurevars(kernel.run.launch).nonlocals["launcher"]
        self.stream = triton.runtime.driver.active.get_current_stream  # of a device index, its handle

    def encoded(self, number: int, descriptor: TensorDescriptor) -> Sequence[Any]:
        """What the kernel gets for its descriptor `number`. It holds the address of the tensor, not the tensor."""
        return tuple(self._encode(descriptor, self._described[number] if self._described else None))

    def launch(self, programs: int, stream: int, arguments: Sequence[Any]) -> None:
        """Launch with all arguments of the kernel: tensors by address, descriptors encoded, constants as they were."""
        self._launch(programs, 1, 1, stream, self._function, self._metadata, None, None, None, *arguments)
