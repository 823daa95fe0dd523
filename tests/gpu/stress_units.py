"""What tests/gpu/stress_onesided.py calls: executors with tensors of their own, streams, and delays that need no SM."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import torch

from hostir.ir.types import bind_shape
from hostir.runtime.cuda.machine import CudaPlan
from hostir.runtime.executor import Executor
from hostir.runtime.gloo.machine import GlooPlan
from hostir.runtime.sharding import TORCH, random_inputs, shard
from tests.gpu.stress_cases import Config, differing, fingerprint, products_of, share_of_allowed

NAN = float("nan")
CYCLES = 2_000_000  # of a clock near 2 GHz: 1 ms
BYTES = 16 << 20  # from the host in about 0.3 ms
NAP = 3e-4  # seconds, at most, of a thread without a GPU
SELDOM = 0.1  # the share of statements that are held up
Parts = Sequence[torch.Tensor | None]


# Time -------------------------------------------------------------------------------------------------------------
class Delays:
    """Holds up single streams of this rank.

    A kernel would not do before a statement: while another kernel waits for a peer on all SMs it could not run, and the
    peer may wait for just that statement. So a copy engine is kept busy. Without a GPU a stream's thread sleeps.
    """

    def __init__(self, device: torch.device) -> None:
        self.random: Random | None = None  # while statements are held up
        self.device = device
        if device.type == "cuda":
            self.there = torch.empty(BYTES, dtype=torch.uint8, device=device)
            self.here = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
            self.driver = ctypes.CDLL("libcuda.so.1")

    def into(self, plans: Iterable[object]) -> None:
        """From now on each statement of these plans may be held up, on its stream."""
        for plan in plans:
            if isinstance(plan, CudaPlan):
                plan.steps[:] = [
                    partial(self.held_up, plan, op.stream, step) for op, step in zip(plan.ops, plan.steps, strict=True)
                ]
            if isinstance(plan, GlooPlan):
                for lane in plan.lanes.values():
                    lane.steps[:] = [partial(self.slept, step) for step in lane.steps]

    def slept(self, step: Callable[[], object]) -> None:
        if self.random is not None and self.random.random() < SELDOM:
            time.sleep(self.random.random() * NAP)
        step()

    def held_up(self, plan: CudaPlan, stream: int, step: Callable[[], object]) -> None:
        if self.random is not None and self.random.random() < SELDOM:
            self.copy(plan.streams[stream].cuda_stream, self.random.randrange(1, BYTES))
        step()

    def copy(self, stream: int, size: int) -> None:
        addresses = (ctypes.c_uint64(x.data_ptr()) for x in (self.there, self.here))
        code = self.driver.cuMemcpyAsync(*addresses, ctypes.c_size_t(size), ctypes.c_void_p(stream))
        assert code == 0, f"a delay: CUDA error {code}"

    def kernel(self, random: Random) -> None:
        """Holds up the current stream for at most 1 ms, before a call."""
        if self.device.type == "cuda":
            torch.cuda._sleep(random.randrange(CYCLES))


class Streams:
    """The caller's: two of each priority, and the one that torch begins with. Without a GPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self.made: dict[tuple[int, int], torch.cuda.Stream] = {}
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.made = {(i, p): torch.cuda.Stream(device, priority=p) for i in range(2) for p in (0, -1)}
            self.main = torch.cuda.default_stream(device)

    @contextlib.contextmanager
    def on(self, number: int, priority: int | None) -> Iterator[None]:
        made = self.made.get((number, priority)) if priority is not None else None
        with torch.cuda.stream(made) if made is not None else contextlib.nullcontext():
            yield

    def fork(self) -> None:
        """All wait for what has been issued to the first."""
        for stream in self.made.values():
            stream.wait_stream(self.main)

    def join(self) -> None:
        """The first waits for all."""
        for stream in self.made.values():
            self.main.wait_stream(stream)


# Calls ------------------------------------------------------------------------------------------------------------
class Slot:
    """Tensors that stay where they are from call to call, and a CUDA graph of the caller's."""

    def __init__(self, inputs: Parts, outs: Parts) -> None:
        self.inputs = [None if x is None else torch.empty_like(x) for x in inputs]
        self.outs = [None if x is None else torch.empty_like(x) for x in outs]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captured: Parts = ()


class Unit:
    """The executor of one configuration on this rank, made and called once for each of its two sizes."""

    def __init__(self, config: Config, rank: int, device: torch.device, delays: Delays) -> None:
        self.config = config
        self.rank = rank
        self.device = device
        self.program = config.program()
        self.executor = Executor(self.program, kernels=config.kernels)
        self.sizes = [{"M": m} if self.program.size_names else {} for m in config.rows]
        self.slots: dict[tuple[int, int], Slot] = {}
        if device.type == "cuda":  # plans look at the streams once, when they are made
            machine: Any = self.executor._machine
            for i in range(len(machine.streams)):
                machine.streams[i] = torch.cuda.Stream(device, priority=config.priorities[i % 8])
        for size in range(2):
            inputs = self.parts(self.wholes(size, seed=0), size)
            outputs = self.executor(*inputs)
            for number in range(2):
                self.slots[size, number] = Slot(inputs, outputs)
        self.executor.synchronize()
        delays.into(self.executor.plans.values())

    # Inputs -------------------------------------------------------------------------------------------------------
    def wholes(self, size: int, seed: int) -> list[torch.Tensor]:
        """Fresh whole inputs, the same on every rank."""
        if self.device.type == "cpu":
            return random_inputs(self.program, self.sizes[size], seed)
        generator = torch.Generator(self.device).manual_seed(seed)
        found = []
        for value in self.program.inputs:
            shape = bind_shape(value.tensor.shape, self.sizes[size])
            found.append(torch.randn(shape, generator=generator, device=self.device).to(TORCH[value.tensor.dtype.name]))
        return found

    def parts(self, wholes: Sequence[torch.Tensor], size: int) -> Parts:
        sizes = self.sizes[size]
        return [shard(x, v.tensor, self.rank, sizes) for x, v in zip(wholes, self.program.inputs, strict=True)]

    # Forms of a call ----------------------------------------------------------------------------------------------
    def prepare(self, form: str, size: int, number: int) -> None:
        """Captures the caller's graph where there is none yet. Waits for the device then."""
        slot = self.slots[size, number]
        if form == "captured" and slot.graph is None:
            slot.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(slot.graph):
                slot.captured = self.executor(*slot.inputs)

    def call(self, form: str, inputs: Parts, size: int, number: int) -> Parts:
        """One call on the current stream; its results are nobody else's. The inputs are overwritten after it."""
        slot = self.slots[size, number]
        if form == "eager":
            poison(slot.outs)
            outputs = self.executor(*inputs)
            fill(inputs)
            return outputs
        for held, new in zip(slot.inputs, inputs, strict=True):
            if held is not None and new is not None:
                held.copy_(new)
        if form == "out":
            fill(slot.outs)
            self.executor(*slot.inputs, out=slot.outs)
        else:
            assert slot.graph is not None
            fill(slot.captured)
            slot.graph.replay()
        results = [None if x is None else x.clone() for x in (slot.outs if form == "out" else slot.captured)]
        fill(slot.inputs)
        return results

    # Checking -----------------------------------------------------------------------------------------------------
    def check(self, wholes: Sequence[torch.Tensor], size: int, found: Parts) -> torch.Tensor:
        """The largest error of a call as a share of what is allowed: a scalar on the device, 0 where it has none."""
        exacts = products_of(self.config, [x.double() for x in wholes])
        ranks = len(self.config.mesh)
        plains = zip(*(products_of(self.config, wholes, rows, ranks) for rows in (1, ranks)), strict=True)
        worst = torch.zeros((), dtype=torch.float64, device=self.device)
        for value, x, exact, ways in zip(self.program.outputs, found, exacts, plains, strict=True):
            mine, *theirs = (shard(whole, value.tensor, self.rank, self.sizes[size]) for whole in (exact, *ways))
            assert (x is None) == (mine is None), f"rank {self.rank} holds {value}, or does not, and should know"
            if x is not None and mine is not None:
                shares = [share_of_allowed(x, mine, way, self.config.depth) for way in theirs if way is not None]
                worst = torch.maximum(worst, torch.stack(shares).amin())
        return worst

    def compare(self, found: Parts, other: Parts) -> torch.Tensor:
        """0 where two calls gave the same bits, else infinite."""
        odd = [differing(x, y) for x, y in zip(found, other, strict=True) if x is not None and y is not None]
        return torch.stack(odd).amax() if odd else torch.zeros((), dtype=torch.float64, device=self.device)

    def prints(self, found: Parts) -> torch.Tensor | None:
        """A number for the bits of the sums that all ranks hold; None where ranks hold different parts."""
        if not self.config.reduced or self.config.scattered:
            return None
        held = [fingerprint(x) for x in found if x is not None]
        none = torch.full((), -float("inf"), dtype=torch.float64, device=self.device)
        return torch.stack(held).sum() if held else none

    def poison_shared(self) -> None:
        """Puts NaN into this rank's symmetric buffers, while no rank is in a call."""
        machine: Any = self.executor._machine
        for memory in machine.symmetric.met.values():
            fill([x for (_, rank), x in memory.buffers.items() if rank == self.rank and x.is_floating_point()])


def fill(tensors: Parts) -> None:
    for x in tensors:
        if x is not None:
            x.fill_(NAN)


def poison(like: Parts) -> None:
    """Leaves NaN in the memory that the allocator gives out next for tensors of these sizes."""
    held = [torch.full_like(x, NAN) for x in like if x is not None]
    del held
