"""Laps: measurements of the time of one run of a candidate, in a trial.

First all ranks meet. On CUDA they meet on the device, after it has waited while the host issues the run. So the time
contains no delays of a host that issues the run within that wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import nan

import torch

from hostir.call.rank import RankExecutor
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, logger
from hostir.job.links import headline
from hostir.kernels.pools import outside_pools
from hostir.knobs import SYMMETRIC_LIMIT

LOG = logger(__name__)
L2_FLUSH = 256 << 20  # bytes written before each run: several times as many as L2 holds
WAIT = 1_000_000  # clock cycles for which the device waits, about 0.5 ms: the host issues most runs in less
MEET = "meet"  # the name of the programs below
BY_FLAGS = """hostir 1
mesh @mesh [rank] = {mesh}
program @meet() -> () {{
  %here: f32[{ranks}@rank] = allocate_symmetric
  barrier of %here over rank
}}
"""
BY_ALL_REDUCE = """hostir 1
mesh @mesh [rank] = {mesh}
program @meet(%x: f32[1] partial(rank)) -> (%y) {{
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


class Meeting:
    """A small program of its own, in which all ranks meet. All ranks make this object, and call it together.

    After a call, the work that follows on the current stream of a rank waits until all ranks are here. The ranks meet
    by flags in symmetric memory, which takes a few microseconds. Ranks that cannot share memory meet by an all-reduce.
    So do ranks with a limit of symmetric memory: the flags and the candidates would release each other's memory.

    Args:
        ranks: the number of ranks.
        execute: makes an executor from a program and the name of its kernels.
    """

    def __init__(self, ranks: int, execute: Callable[[Program, str], RankExecutor]) -> None:
        self.mesh, self.ranks, self.execute = " ".join(map(str, range(ranks))), ranks, execute
        self.inputs: tuple[torch.Tensor, ...] = ()
        self.executor = self._by_flags() or self._by_all_reduce()

    def _by_flags(self) -> RankExecutor | None:
        if SYMMETRIC_LIMIT.get() is not None:
            return None
        try:
            executor = self.execute(parse(BY_FLAGS.format(mesh=self.mesh, ranks=self.ranks), MEET), "aten")
            executor.prepare((), None)
        except HostIRError as refusal:
            LOG.info("in trials the ranks meet by an all-reduce: %s", headline(refusal))
            return None
        return executor

    def _by_all_reduce(self) -> RankExecutor:
        executor = self.execute(parse(BY_ALL_REDUCE.format(mesh=self.mesh), MEET), "aten")
        self.inputs = (torch.zeros(1, device="cuda" if executor.machine == "cuda" else "cpu"),)
        return executor

    def __call__(self) -> None:
        self.executor(*self.inputs)

    def end(self) -> None:
        """Release the symmetric memory of the program, once all ranks have called this and meet again."""
        self.executor.rest()


class Stopwatch:
    """Starts laps. All ranks make this object, and start the same laps.

    Args:
        device: the type of the device, `cpu` or `cuda`.
        meeting: lets all ranks meet; None for a rank alone.
    """

    def __init__(self, device: str, meeting: Meeting | None) -> None:
        self.on_gpu, self.meeting, self.flush = device == "cuda", meeting, None
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
        """Empty the L2 cache of a GPU, and let all ranks meet."""
        if self.flush is not None:
            self.flush.zero_()
        if self.meeting is not None:
            self.meeting()


def _larger_than_l2() -> torch.Tensor | None:
    """Return memory that is larger than the L2 cache of the GPU; None if there is too little free memory.

    If it is overwritten before a run, the L2 cache does not contain the tensors of the run. Between two calls of a
    layer, the other layers of a model have the same effect.
    """
    try:
        return torch.empty(L2_FLUSH, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return None
