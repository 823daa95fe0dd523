"""Launches of Triton kernels on GPUs and in Triton's interpreter, and the limits of devices."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from hostir.ir.source import Diagnostic, HostIRError
from hostir.kernels.parameters import TAPING, KernelLaunch
from hostir.kernels.repeats import ATEN

# Triton decides this when a kernel is decorated, so it holds for the life of the process.
INTERPRETED: bool = triton.knobs.runtime.interpret

# The interpreter keeps the program index in a global and patches triton.language while it runs.
_interpreter_lock = threading.Lock()


class _Thread(threading.local):
    """State of a thread.

    Fields:
        bound: True if CUDA has bound a context to the thread.
        only_loads: True if the thread loads kernels and does not launch them.
    """

    bound = False
    only_loads = False


_thread = _Thread()


@dataclass(frozen=True)
class Limits:
    """The resources of a device that a kernel can use.

    Fields:
        sms: number of SMs. A persistent grid has as many programs.
        shared_memory: bytes of shared memory that one program may use.
        tma: True if the device has the Tensor Memory Accelerator (TMA; Hopper and later).
        fp8: True if its tensor cores multiply 8-bit floats (Ada, Hopper and later).
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
    """Return the common device of all `tensors` that are not None.

    Raises ValueError if they are on several devices, or on the CPU while Triton compiles for GPUs.
    """
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    device = next(iter(devices.values()))
    if any(other != device for other in devices.values()):
        places = ", ".join(f"{name} on {where}" for name, where in devices.items())
        raise ValueError(f"expected all tensors on one device, got {places}")
    if not INTERPRETED and device.type != "cuda":
        raise ValueError(f"Triton kernels need CUDA tensors, got {device.type}; on a CPU, set TRITON_INTERPRET=1 first")
    return device


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    # The interpreter computes with numpy. Like a GPU, numpy must not warn of overflow or NaN.
    with _interpreter_lock, np.errstate(all="ignore"):
        yield


def launching(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager for launches on `device`: it makes the device current, or locks the interpreter."""
    return _interpreting() if INTERPRETED else torch.cuda.device(device)


def bind_thread(device: torch.device) -> None:
    """Bind the CUDA context of `device` to this thread. `device` must be the current device.

    CUDA binds the context when a thread first calls the CUDA runtime. A thread that encodes a TMA descriptor calls only
    the driver, so it needs this function first.
    """
    if not _thread.bound:
        torch.cuda.mem_get_info(device)
        _thread.bound = True


class Compiled:
    """A compiled Triton kernel that can be launched directly, without Triton's launch code.

    Triton's launch inspects every argument to find the compiled kernel, and encodes every descriptor. This class calls
    the compiled kernel directly, and passes descriptors that are already encoded. That saves most of the host time.
    """

    def __init__(self, kernel: Any) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg  # needs a driver

        self._function, self._metadata = kernel.function, kernel.packed_metadata
        self._kernel = kernel
        self._described = kernel.metadata.tensordesc_meta
        self._encode = make_tensordesc_arg
        self._launch = copy.copy(kernel.run)
        if self._described:  # remove the wrapper with which Triton encodes descriptors
            self._launch.launch = inspect.getclosurevars(kernel.run.launch).nonlocals["launcher"]
        self.stream = triton.runtime.driver.active.get_current_stream  # from a device index to a stream handle

    @functools.cached_property
    def kernel_launch(self) -> KernelLaunch:
        """The properties of the kernel that all launches share. Raises TypeError if native code cannot launch it."""
        return KernelLaunch.of(self._kernel)

    def encoded(self, number: int, descriptor: TensorDescriptor) -> Sequence[Any]:
        """Return the encoded form of `descriptor`, as arguments of the kernel.

        `number` is the index of the descriptor among the descriptors of the kernel.

        The arguments hold the address of the descriptor's tensor, but do not keep the tensor alive.
        """
        return tuple(self._encode(descriptor, self._described[number] if self._described else None))

    def launch(self, programs: int, stream: int, arguments: Sequence[Any]) -> None:
        """Launch a grid of `programs` programs on the stream with the handle `stream`.

        `arguments` are all arguments of the kernel: addresses of tensors, encoded descriptors, and the constants that
        the kernel was compiled for.
        """
        if TAPING.writer is not None:
            TAPING.writer.launch(self, programs, stream, arguments)
        self._launch(programs, 1, 1, stream, self._function, self._metadata, None, None, None, *arguments)


# The first call that launches kernels compiles and loads all of them before it issues any work. There are two reasons:
# peers should not wait for a compiler that takes seconds, and a kernel may turn out to need more than the device has.


class TooLargeError(HostIRError):
    """The error of a kernel that needs more shared memory or threads than a device has."""


def load(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Compiled | None:
    """Compile a kernel for arguments of these types, and load it on the current device.

    `options` are Triton's compile options. Returns None in the interpreter. Raises TooLargeError if the kernel needs
    more shared memory or threads than the device has.
    """
    if INTERPRETED:
        return None
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    try:
        compiled._init_handles()
    except OutOfResources as lack:
        unit = {"shared memory": "bytes of ", "tensor memory": "columns of "}.get(lack.name, "")
        what = f"the kernel needs {lack.required} {unit}{lack.name}, and the GPU has {lack.limit}"
        raise TooLargeError(Diagnostic(what, hint=ATEN)) from lack
    return Compiled(compiled)


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a grid of `programs` programs through Triton on the current device.

    In the context of `loading`, only compile and load the kernel.
    """
    if _thread.only_loads:
        load(kernel, arguments, options)
    else:
        if TAPING.writer is not None:
            TAPING.writer.incomplete()
        kernel[(programs,)](*arguments, **options)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Enter a context in which this thread loads kernels and does not launch them. Operands are `StandIn`s."""
    _thread.only_loads = True
    try:
        yield
    finally:
        _thread.only_loads = False


def only_loads() -> bool:
    """Return True if this thread is in the context of `loading`: it loads kernels and does not launch them."""
    return _thread.only_loads


class StandIn(torch.Tensor):
    """A tensor without memory that imitates the layout, the device and the address of a real tensor.

    It is a tensor on torch's meta device that reports another device and address. Operations that write to it do
    nothing. Its views are stand-ins too, with addresses in the same storage.

    Fields:
        place: the device that it reports.
        origin: the address of its storage.
    """

    place: torch.device
    origin: int

    @classmethod
    def of(
        cls, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, address: int = 0
    ) -> StandIn:
        standin = torch.empty_strided(shape, strides, dtype=dtype, device="meta").as_subclass(cls)
        standin.place, standin.origin = device, address
        return standin

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.place.type == "cuda"

    def data_ptr(self) -> int:
        return self.origin + int(self.storage_offset()) * self.element_size()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if options.get("out") is not None:
            return options["out"]
        known: dict[int, StandIn] = {}
        with torch._C.DisableTorchFunctionSubclass():
            bare = [_bare(x, known) for x in args]
            result = func(*bare, **{name: _bare(x, known) for name, x in options.items()})
            if func.__name__.endswith("_") and not func.__name__.endswith("__"):
                target = args[0] if args else next(iter(options.values()))
                if isinstance(target, cls) and _layout(result) != _layout(target):
                    raise NotImplementedError(f"{func.__name__} changes the layout of a tensor without memory")
                return target
            if isinstance(result, torch.Tensor):
                return cls._like(result, known)
            several = isinstance(result, tuple | list) and any(isinstance(x, torch.Tensor) for x in result)
            return tuple([cls._like(x, known) for x in result]) if several else result

    @classmethod
    def _like(cls, x: torch.Tensor, known: Mapping[int, StandIn]) -> StandIn:
        """Return a stand-in for the meta tensor `x`, the result of an operation on the stand-ins `known`.

        `known` maps the storage of each operand to the operand. If `x` is a view of an operand, the stand-in gets the
        origin of this operand; else its origin is 0. The stand-in gets the device of the first operand.
        """
        standin, other = x.as_subclass(cls), known.get(_storage(x))
        standin.place = next(iter(known.values())).place
        standin.origin = 0 if other is None else other.origin
        return standin


def _bare(x: Any, known: dict[int, StandIn]) -> Any:
    """Return the argument `x` of an operation, in which plain meta tensors replace all tensors.

    Each stand-in that is replaced is added to `known`, by its storage.
    """
    if isinstance(x, StandIn):
        known[_storage(x)] = x
        return x.as_subclass(torch.Tensor)
    if isinstance(x, torch.Tensor):
        return x.to("meta")
    return type(x)([_bare(each, known) for each in x]) if type(x) in (tuple, list) else x


def _layout(x: torch.Tensor) -> tuple[Sequence[int], Sequence[int], int]:
    return x.shape, x.stride(), int(x.storage_offset())


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)
