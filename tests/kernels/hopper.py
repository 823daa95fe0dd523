"""A fake Hopper GPU: plans are bound for it, and the kernels that they load are collected and compiled.

Tensors of the GPU are stand-ins. Triton's driver, streams, process groups and symmetric memory are fakes. The code that
decides how a kernel is compiled is not replaced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from hostir.ir.program import Program
from hostir.ir.types import bind_shape
from hostir.job.groups import Groups
from hostir.job.symmetric import Rooms, SymmetricMemory
from hostir.kernels import devices, reduce
from hostir.kernels.devices import StandIn
from hostir.kernels.flags import signals
from hostir.kernels.matmul import matmul, workspaces
from hostir.kernels.matmul.tiles import Tile
from hostir.kernels.table import kernel_table
from hostir.machines.cuda import blocks, copies, credits, driver, flags, machine, streams
from hostir.machines.cuda.machine import CudaMachine
from hostir.machines.cuda.memory import PeerMemory
from hostir.plan.unroll import unroll

TARGET = GPUTarget("cuda", 90, 32)
GPU = torch.device("cuda", 0)
SHARED_MEMORY = 227 << 10
REGISTERS = 64 << 10  # of an SM
SMS = 132


@dataclass(frozen=True)
class Kernel:
    """A kernel to compile: a function, and everything that Triton specializes it for.

    Fields:
        module, name: the module and the name of the function.
        signature, constants, attributes, options: the arguments of Triton's compiler.
    """

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @functools.cached_property
    def key(self) -> str:
        """A text that identifies the kernel: equal kernels have equal keys."""
        return repr([self.name, self.signature, self.constants, self.attributes, self.options])

    @property
    def is_matmul(self) -> bool:
        return self.name == "matmul_kernel"

    @property
    def settings(self) -> Any:
        """The tuple of compile-time constants `C` of a matmul or a sum; None for other kernels."""
        last = self.constants.get((len(self.signature) - 1,))
        return last if hasattr(last, "_asdict") else None

    def __str__(self) -> str:
        text = ", ".join(f"{n}={x}" for n, x in self.settings._asdict().items() if x) if self.settings else ""
        return f"{self.name}({text}) stages={self.options['num_stages']} warps={self.options['num_warps']}"

    def compiled(self) -> Any:
        """Compile the kernel for a Hopper GPU. Within `counted`, its metadata have `spilled` and `registers`."""
        function = getattr(importlib.import_module(self.module), self.name)
        source = ASTSource(function, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=TARGET, options=self.options)

    @property
    def estimate(self) -> int:
        """The most bytes of shared memory that it may need: for a matmul, the estimate of its tile."""
        if not self.is_matmul:
            return SHARED_MEMORY
        settings = self.settings
        stages, warps = self.options["num_stages"], self.options["num_warps"]
        tile = Tile(settings.BM, settings.BN, settings.BK, stages=stages, warps=warps, halves=settings.HALVES)
        item, result = (_bytes(self.signature[name]) for name in ("a", "out"))
        return tile.shared_memory(item, descriptors=settings.DESCRIPTORS, result=result, adds=settings.ADDS)


def _bytes(of: str) -> int:
    """Return the bytes of an element for the type of a pointer or a descriptor."""
    (bits,) = re.findall(r"^(?:\*|tensordesc<)[a-z]+(\d+)", of)
    return int(bits) // 8


@contextmanager
def counted() -> Iterator[None]:
    """Add `spilled` (bytes of spilled registers) and `registers` (of a thread) to the metadata of compiled kernels."""

    def hook(*stages_of: Any) -> tuple[str, str] | None:
        if not stages_of:
            return "registers counted", "registers counted"  # not equal to kernels in Triton's cache that lack these
        _, stages, *_ = stages_of
        assemble = stages["cubin"]

        def count(ptx: str, metadata: dict[str, Any]) -> bytes:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                cubin: bytes = assemble(ptx, metadata)
            spilled, used = (re.findall(word, output.getvalue()) for word in (r"(\d+) bytes spill", r"Used (\d+) reg"))
            assert spilled, output.getvalue()
            metadata["spilled"] = sum(map(int, spilled))  # of stores and of loads
            metadata["registers"] = max(map(int, used))
            return cubin

        stages["cubin"] = count
        return None

    with triton.knobs.runtime.scope(), triton.knobs.nvidia.scope():
        triton.knobs.runtime.add_stages_inspection_hook = hook
        triton.knobs.nvidia.dump_ptxas_log = True
        yield


class _Driver:
    """A fake of Triton's driver for the GPU."""

    utils = SimpleNamespace(
        get_device_properties=lambda index: {"multiprocessor_count": SMS, "max_shared_mem": SHARED_MEMORY}
    )

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, index: int) -> int:
        return 0


class _Tensors(TorchFunctionMode):
    """Make new tensors on the GPU stand-ins, and pinned memory ordinary memory."""

    addresses = itertools.count(1 << 48, 1 << 40)  # above all addresses of a process

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if options.pop("pin_memory", False) or func is torch.Tensor.pin_memory:
            return args[0] if func is torch.Tensor.pin_memory else func(*args, **options)
        if func is torch.Tensor.is_pinned:
            return True
        if func is torch.Tensor.record_stream:
            return None
        device = options.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **options)
        result = func(*args, **{**options, "device": "meta"})
        return StandIn.of(result.shape, result.stride(), result.dtype, GPU, next(self.addresses))


class _Peers(PeerMemory):
    """Symmetric memory of stand-ins."""

    @contextmanager
    def offering(self, size: int) -> Iterator[str]:
        yield ""

    def reserve(self, size: int) -> None:
        self.size = size

    def map(self, offers: Sequence[Any], ranks: set[int]) -> dict[int, torch.Tensor]:
        return {rank: torch.zeros(self.size, dtype=torch.uint8, device=GPU) for rank in ranks}


@dataclass
class Hopper:
    """The fake GPU, which records loaded kernels and launches.

    Fields:
        kernels: the loaded kernels, by key.
        launches: the number of launches.
        lacks: a function that returns the reason why a kernel cannot be loaded; None if it can.
    """

    kernels: dict[str, Kernel] = field(default_factory=dict)
    launches: int = 0
    lacks: Callable[[Kernel], OutOfResources | None] = lambda kernel: None

    def compile(
        self,
        function: Any,
        key: str,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attributes: Any,
        _: bool,
    ) -> Any:
        """Replaces Triton's `warmup`: returns a kernel that can be loaded, without compiling it."""
        kinds = dict(signature), dict(constants), dict(attributes), dict(vars(options))
        kernel = Kernel(function.__module__, function.__name__, *kinds)

        def load() -> None:
            if (lack := self.lacks(kernel)) is not None:
                raise lack
            self.kernels[kernel.key] = kernel

        def run(*_: Any) -> None:
            load()
            self.launch()

        launched = {"function": 0, "packed_metadata": (), "launch_metadata": lambda *_: None, "run": run}
        return SimpleNamespace(_init_handles=load, **launched)

    def launch(self, *_: Any) -> None:
        self.launches += 1

    def plan(
        self,
        program: Program,
        rank: int,
        kernels: str,
        inputs: Sequence[torch.Tensor | None],
        sizes: Mapping[str, int] | None = None,
    ) -> Any:
        """Return a rank's plan for inputs. The other ranks do not exist."""

        def exchange(key: str, mine: str) -> list[str]:
            if not mine:
                return [""] * program.ranks
            return [
                mine if peer == rank else self.offer(program, peer, unrolled.sizes) for peer in range(program.ranks)
            ]

        unrolled = unroll(program, rank, sizes or {}, inputs)
        machine = CudaMachine(GPU, program, kernel_table(kernels, "cuda"), Groups(rank, GPU, exchange))
        return machine.plan(unrolled, first=inputs)

    def offer(self, program: Program, peer: int, sizes: Mapping[str, int]) -> str:
        """Return the message of a peer about its symmetric memory."""
        theirs = unroll(program, peer, sizes)
        memory = SymmetricMemory(peer, lambda key, mine: [mine], _Peers(GPU, peer))
        with ExitStack() as stack:
            return json.dumps(asdict(memory.offer(theirs, Rooms.of(program, sizes), stack)))


class _Everything:
    """An object that stands for anything: it can be called, has every attribute, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


@contextmanager
def hopper() -> Iterator[Hopper]:
    """Yield the fake GPU, which exists within the context."""
    gpu, nothing = Hopper(), _Everything()
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver())

    def compile(function: Any, *rest: Any) -> Any:
        return gpu.compile(function, *rest)

    none = contextlib.nullcontext()
    replaced: list[tuple[Any, str, Any]] = [
        (JITFunction, "_do_compile", compile),
        (devices.Compiled, "__init__", lambda compiled, kernel: setattr(compiled, "stream", lambda index: 0)),
        (devices.Compiled, "encoded", lambda compiled, number, descriptor: (0,)),
        (devices.Compiled, "launch", gpu.launch),
        (torch.cuda, "device", lambda device: none),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        *((torch.cuda, name, lambda *_, **__: nothing) for name in ("Stream", "Event", "default_stream")),
        *((torch.cuda, name, lambda *_: nothing) for name in ("current_stream", "synchronize", "mem_get_info")),
        *((torch.cuda, name, lambda *_: None) for name in ("set_stream", "_sleep")),
        (torch._C, "_cuda_getDevice", lambda: 0),
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        (streams, "new_stream", lambda device, priority: nothing),
        (streams, "_known", {}),
        (streams, "_workers", {}),
        (streams, "_taken", Counter()),
        (driver, "cuda_driver", lambda: nothing),
        (copies, "cuda_driver", lambda: nothing),
        *((module, "in_batches", lambda ops: nothing) for module in (blocks, credits, flags)),
        (copies, "StridedCopy", lambda: nothing),
        (machine, "PeerMemory", lambda device, rank, group: _Peers(device, rank)),
        (CudaMachine, "connect", lambda machine, teams: None),
        (Groups, "of", lambda groups, team: (nothing, tuple(sorted(team)))),
        (signals, "_compiled", {}),
        (matmul, "_launches", {}),
        (workspaces, "_by_stream", {}),
        (workspaces, "_for_graphs", {}),
        (workspaces, "outside_pools", lambda device, work: work()),  # the stand-ins exist in this thread only
        (reduce, "_launches", {}),
    ]
    devices.limits.cache_clear()
    try:
        with ExitStack() as stack:
            for where, name, other in replaced:
                stack.enter_context(mock.patch.object(where, name, other, create=where is torch._C))
            stack.enter_context(_Tensors())
            yield gpu
    finally:
        triton.runtime.driver._active = before
        devices.limits.cache_clear()
        for function in _functions():
            function.device_caches.clear()


def _functions() -> Iterator[Any]:
    """Return the Triton kernels of hostir, which must forget what was compiled for the fake GPU."""
    from hostir.kernels import low_latency, norm, quantize
    from hostir.kernels.matmul import kernel

    for module in (kernel, reduce, signals, low_latency, norm, quantize):
        yield from (each for each in vars(module).values() if isinstance(each, JITFunction))


def inputs_of(
    program: Program, rank: int, columns: bool = False, sizes: Mapping[str, int] | None = None
) -> list[torch.Tensor | None]:
    """Return a rank's inputs. With `columns`, all matrices except the first input are stored by columns."""
    tensors: list[torch.Tensor | None] = []
    for number, value in enumerate(program.inputs):
        type = value.tensor
        if type.mesh is not None and rank not in type.mesh.devices:
            tensors.append(None)
            continue
        shape = bind_shape(type.local_shape, sizes or {})
        dtype = machine.torch_dtype(type.dtype)
        x = torch.empty(shape, dtype=dtype, device=GPU)
        turned = columns and number > 0 and len(shape) == 2 and min(shape) > 1
        tensors.append(torch.empty(shape[::-1], dtype=dtype, device=GPU).t() if turned else x)
    return tensors
