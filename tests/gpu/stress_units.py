"""Executors with their tensors, streams, and delays without SMs, for tests/gpu/stress_onesided.py."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import torch

from hostir.call.executor import Executor
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.ir.types import bind_shape
from hostir.kernels.dtypes import TORCH
from hostir.machines.cuda.machine import CudaPlan
from hostir.machines.gloo.machine import GlooPlan
from tests.gpu.stress_cases import Config, differing, fingerprint, products_of, share_of_allowed

NAN = float("nan")
CYCLES = 2_000_000  # 1 ms at about 2 GHz
BYTES = 16 << 20  # copied from the host in about 0.3 ms
NAP = 3e-4  # the longest sleep in seconds, without a GPU
SELDOM = 0.1  # the share of delayed statements
Parts = Sequence[torch.Tensor | None]


class Delays:
    """Delays of single streams of this rank.

    A kernel cannot delay a statement: it could not run while another kernel waits for a peer on all SMs, and the peer
    may wait for this statement. So a delay keeps a copy engine busy. Without a GPU, the thread of the stream sleeps.
    """

    def __init__(self, device: torch.device) -> None:
        self.random: Random | None = None  # set while statements are delayed
        self.device = device
        if device.type == "cuda":
            self.on_device = torch.empty(BYTES, dtype=torch.uint8, device=device)
            self.on_host = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
            self.driver = ctypes.CDLL("libcuda.so.1")

    def into(self, plans: Iterable[object]) -> None:
        """Let each statement of these plans be delayed on its stream at random."""
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
        addresses = (ctypes.c_uint64(x.data_ptr()) for x in (self.on_device, self.on_host))
        code = self.driver.cuMemcpyAsync(*addresses, ctypes.c_size_t(size), ctypes.c_void_p(stream))
        assert code == 0, f"a delay: CUDA error {code}"

    def kernel(self, random: Random) -> None:
        """Delay the current stream by at most 1 ms, before a call."""
        if self.device.type == "cuda":
            torch.cuda._sleep(random.randrange(CYCLES))


class Streams:
    """The caller's streams: two of each priority, and torch's default stream. Without a GPU there are no streams."""

    def __init__(self, device: torch.device) -> None:
        self.by_priority: dict[tuple[int, int], torch.cuda.Stream] = {}
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.by_priority = {(i, p): torch.cuda.Stream(device, priority=p) for i in range(2) for p in (0, -1)}
            self.main = torch.cuda.default_stream(device)

    @contextlib.contextmanager
    def on(self, number: int, priority: int | None) -> Iterator[None]:
        stream = self.by_priority.get((number, priority)) if priority is not None else None
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            yield

    def fork(self) -> None:
        """Let all streams wait for the default stream."""
        for stream in self.by_priority.values():
            stream.wait_stream(self.main)

    def join(self) -> None:
        """Let the default stream wait for all streams."""
        for stream in self.by_priority.values():
            self.main.wait_stream(stream)


class Slot:
    """Tensors that keep their addresses over calls, and a CUDA graph of the caller."""

    def __init__(self, inputs: Parts, outs: Parts) -> None:
        self.inputs = [None if x is None else torch.empty_like(x) for x in inputs]
        self.outs = [None if x is None else torch.empty_like(x) for x in outs]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captured: Parts = ()


class Unit:
    """The executor of one configuration on this rank; it is called once for each of its two sizes."""

    def __init__(self, config: Config, rank: int, device: torch.device, delays: Delays) -> None:
        self.config = config
        self.rank = rank
        self.device = device
        self.program = config.program()
        self.executor = Executor(self.program, kernels=config.kernels)
        self.sizes = [{"M": m} if self.program.size_names else {} for m in config.rows]
        self.slots: dict[tuple[int, int], Slot] = {}
        if device.type == "cuda":  # plans read the streams when they are made
            machine: Any = self.executor._machine
            for i in range(len(machine.streams)):
                machine.streams[i] = torch.cuda.Stream(device, priority=config.priorities[i % 8])
        for size in range(2):
            inputs = self.parts(self.unsharded(size, seed=0), size)
            outputs = self.executor(*inputs)
            for number in range(2):
                self.slots[size, number] = Slot(inputs, outputs)
        self.executor.synchronize()
        delays.into(self.executor.plans.values())

    # Inputs -------------------------------------------------------------------------------------------------------
    def unsharded(self, size: int, seed: int) -> list[torch.Tensor]:
        """Return random unsharded inputs, the same on every rank."""
        if self.device.type == "cpu":
            return random_inputs(self.program, self.sizes[size], seed)
        generator = torch.Generator(self.device).manual_seed(seed)
        inputs = []
        for value in self.program.inputs:
            shape, dtype = bind_shape(value.tensor.shape, self.sizes[size]), TORCH[value.tensor.dtype.name]
            inputs.append(torch.randn(shape, generator=generator, device=self.device).to(dtype))
        return inputs

    def parts(self, unsharded: Sequence[torch.Tensor], size: int) -> Parts:
        sizes = self.sizes[size]
        return [shard(x, v.tensor, self.rank, sizes) for x, v in zip(unsharded, self.program.inputs, strict=True)]

    # Forms of a call ----------------------------------------------------------------------------------------------
    def prepare(self, form: str, size: int, number: int) -> None:
        """Capture the caller's graph once; this waits for the device."""
        slot = self.slots[size, number]
        if form == "captured" and slot.graph is None:
            slot.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(slot.graph):
                slot.captured = self.executor(*slot.inputs)

    def call(self, form: str, inputs: Parts, size: int, number: int) -> Parts:
        """Make one call on the current stream and return copies of its outputs; overwrite the inputs afterwards."""
        slot = self.slots[size, number]
        if form == "eager":
            poison(slot.outs)
            outputs = self.executor(*inputs)
            fill(inputs)
            return outputs
        for x, new in zip(slot.inputs, inputs, strict=True):
            if x is not None and new is not None:
                x.copy_(new)
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
    def check(self, unsharded: Sequence[torch.Tensor], size: int, outputs: Parts) -> torch.Tensor:
        """Return the largest error of a call as a share of the allowed error: a scalar on the device."""
        exacts = products_of(self.config, [x.double() for x in unsharded])
        ranks = len(self.config.mesh)
        plains = zip(*(products_of(self.config, unsharded, rows, ranks) for rows in (1, ranks)), strict=True)
        worst = torch.zeros((), dtype=torch.float64, device=self.device)
        for value, x, exact, alternatives in zip(self.program.outputs, outputs, exacts, plains, strict=True):
            full = (exact, *alternatives)
            mine, *theirs = (shard(y, value.tensor, self.rank, self.sizes[size]) for y in full)
            assert (x is None) == (mine is None), f"rank {self.rank} has a part of {value}, or none, by mistake"
            if x is not None and mine is not None:
                shares = [share_of_allowed(x, mine, way, self.config.depth) for way in theirs if way is not None]
                worst = torch.maximum(worst, torch.stack(shares).amin())
        return worst

    def compare(self, outputs: Parts, others: Parts) -> torch.Tensor:
        """Return 0 if the outputs of two calls have the same bits, else infinity."""
        odd = [differing(x, y) for x, y in zip(outputs, others, strict=True) if x is not None and y is not None]
        return torch.stack(odd).amax() if odd else torch.zeros((), dtype=torch.float64, device=self.device)

    def prints(self, outputs: Parts) -> torch.Tensor | None:
        """Return a hash of the bits of all-reduces; None if ranks hold different parts."""
        if not self.config.reduced or self.config.scattered:
            return None
        hashes = [fingerprint(x) for x in outputs if x is not None]
        nothing = torch.full((), -float("inf"), dtype=torch.float64, device=self.device)
        return torch.stack(hashes).sum() if hashes else nothing

    def poison_shared(self) -> None:
        """Fill this rank's symmetric buffers with NaN, while no rank is in a call."""
        machine: Any = self.executor._machine
        for memory in machine.symmetric.met.values():
            fill([x for (_, rank), x in memory.buffers.items() if rank == self.rank and x.is_floating_point()])


def fill(tensors: Parts) -> None:
    for x in tensors:
        if x is not None:
            x.fill_(NAN)


def poison(like: Parts) -> None:
    """Leave NaN in the memory that the allocator hands out next for tensors of these sizes."""
    blocks = [torch.full_like(x, NAN) for x in like if x is not None]
    del blocks
