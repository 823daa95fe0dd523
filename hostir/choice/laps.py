"""Laps: measurements of the time of one run of a candidate, in a trial.

A lap begins at a barrier of all ranks. On CUDA the barrier is on the device, after the device has waited while the host
issues the run. So the time contains no delays of a host that issues the run within that wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import nan

import torch

from hostir.call.rank import RankExecutor
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.kernels.pools import outside_pools

CPU = torch.device("cpu")
L2_FLUSH = 256 << 20  # bytes written before each run: several times as many as L2 holds
WAIT = 1_000_000  # clock cycles for which the device waits, about 0.5 ms: the host issues most runs in less
BARRIER = "start_barrier"  # the name of the programs below
BY_FLAGS = """hostir 1
mesh @mesh [rank] = {mesh}
program @start_barrier() -> () {{
  %here: f32[{ranks}@rank] = allocate_symmetric
  barrier of %here over rank
}}
"""
BY_ALL_REDUCE = """hostir 1
mesh @mesh [rank] = {mesh}
program @start_barrier(%x: f32[1] partial(rank)) -> (%y) {{
  %y: f32[1] = allocate
  %h = allreduce %x -> %y over rank
  wait %h
}}
"""


class Lap:
    """Measures one run on a CPU by the wall clock, from the creation of this object to `stop`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds = nan

    def stop(self) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self.began

    def us(self) -> float:
        """Return the time in microseconds; NaN if it is not known."""
        return self.seconds * 1e6


LAP = Lap  # tests replace it


class CudaLap(Lap):
    """Measures one run on CUDA, with two events on the current stream.

    `ready` issues work to the current stream: the run begins after it.
    """

    def __init__(self, ready: Callable[[], object]) -> None:
        self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT)
        ready()
        self.first.record()

    def stop(self) -> None:
        self.last.record()

    def us(self) -> float:
        return float(self.first.elapsed_time(self.last)) * 1e3 if self.last.query() else nan


class StartBarrier:
    """A barrier of all ranks before a timed run. It is a small host program. All ranks make it, and call it together.

    After a call, the work that follows on the current stream of a rank waits until all ranks are here. The program is a
    barrier by flags in symmetric memory, which takes a few microseconds, or an all-reduce. Raises HostIRError if a rank
    cannot run the program.

    Args:
        ranks: the number of ranks.
        execute: makes an executor from a program and the name of its kernels.
        by_flags: True for flags, False for an all-reduce.
    """

    def __init__(self, ranks: int, execute: Callable[[Program, str], RankExecutor], by_flags: bool) -> None:
        text = (BY_FLAGS if by_flags else BY_ALL_REDUCE).format(mesh=" ".join(map(str, range(ranks))), ranks=ranks)
        self.executor = execute(parse(text, BARRIER), "aten")
        self.inputs: tuple[torch.Tensor, ...] = ()
        if not by_flags:
            here = torch.device("cuda", torch.cuda.current_device()) if self.executor.machine == "cuda" else CPU
            self.inputs = (outside_pools(here, lambda: torch.zeros(1, dtype=torch.float32, device=here)),)
        self.executor.prepare(self.inputs, None)

    def __call__(self) -> None:
        self.executor(*self.inputs)

    def end(self) -> None:
        """Drop the plan of the program. `SymmetricMemory.discard` then releases its memory."""
        self.executor.rest()


class Stopwatch:
    """Starts laps. All ranks make this object, and start the same laps.

    Args:
        device: the type of the device, `cpu` or `cuda`.
        barrier: the barrier before each lap; None to have no barrier.
    """

    def __init__(self, device: str, barrier: StartBarrier | None) -> None:
        self.on_gpu, self.barrier, self.flush = device == "cuda", barrier, None
        if self.on_gpu:
            here = torch.device("cuda", torch.cuda.current_device())
            self.flush = outside_pools(here, _larger_than_l2)

    def start(self) -> Lap:
        """Start a lap. On CUDA, this issues work to the current stream."""
        if self.on_gpu:
            return CudaLap(self._get_ready)
        self._get_ready()
        return LAP()

    def _get_ready(self) -> None:
        """Overwrite the L2 cache of a GPU, and wait for all ranks."""
        if self.flush is not None:
            self.flush.zero_()
        if self.barrier is not None:
            self.barrier()


def _larger_than_l2() -> torch.Tensor | None:
    """Return memory that is larger than the L2 cache of the GPU; None if there is too little free memory.

    If it is overwritten before a run, the L2 cache does not contain the tensors of the run. Between two calls of a
    layer, the other layers of a model have the same effect.
    """
    try:
        return torch.empty(L2_FLUSH, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return None
