"""Laps: measurements of the time of one run of a candidate, in a trial.

On CUDA the device first waits while the host issues the run, and then all ranks meet on the device. So the time
contains no delays of a host that issues the run within that wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import nan

import torch

from hostir.job.session import Session
from hostir.kernels.pools import outside_pools

L2_FLUSH = 256 << 20  # bytes written before each run: several times as many as L2 holds
WAIT = 1_000_000  # clock cycles for which the device waits, about 0.5 ms: the host issues most runs in less


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

    `ready` makes the work that follows on the stream wait for all ranks.
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


class Stopwatch:
    """Starts laps. All ranks make this object, and start the same laps.

    Args:
        device: the type of the device, `cpu` or `cuda`.
        session: the job of the ranks; None for a rank alone.
    """

    def __init__(self, device: str, session: Session | None) -> None:
        self.on_gpu = device == "cuda"
        self.session = session if session is not None and session.size > 1 else None
        self.everyone = tuple(range(self.session.size)) if self.session is not None else ()
        self.flush = self.meeting = None
        if self.on_gpu:
            here = torch.device("cuda", torch.cuda.current_device())
            self.flush, self.meeting = outside_pools(here, lambda: (_larger_than_l2(), torch.zeros(1, device=here)))
        if self.on_gpu and self.session is not None:
            self.session.groups.prepare([self.everyone])

    def start(self) -> Lap:
        """Start a lap. On CUDA, this issues work to the current stream."""
        if self.flush is not None:
            self.flush.zero_()
        return CudaLap(self._meet) if self.on_gpu else LAP()

    def _meet(self) -> None:
        """Make the current stream wait until the streams of all ranks are here."""
        if self.session is None:
            return
        group, _ = self.session.groups.of(self.everyone)
        options = torch.distributed.AllreduceOptions()
        options.asyncOp = False  # NCCL runs on the current stream
        group.allreduce([self.meeting], options)


def _larger_than_l2() -> torch.Tensor | None:
    """Return memory that is larger than the L2 cache of the GPU; None if there is too little free memory.

    If it is overwritten before a run, the L2 cache does not contain the tensors of the run. Between two calls of a
    layer, the other layers of a model have the same effect.
    """
    try:
        return torch.empty(L2_FLUSH, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return None
