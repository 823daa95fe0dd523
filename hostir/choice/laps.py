"""Laps: measurements of the time of one call, in a trial of candidates.

On CUDA the time is what one call costs in a long row of calls: the time of the device or of the host, whichever is
longer. The device first waits while the host issues the call, and then all ranks meet on the device. So the time of the
device contains no delays of a rank's host, such as the time in which the ranks agree on a candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import nan

import torch

from hostir.choice.choices import Candidate
from hostir.job.session import Session

REPLAYS = 9  # timed replays of each candidate in a duel of a race
WAIT = 400_000  # clock cycles for which the device waits, about 250 us: the host issues most calls in less


class Lap:
    """Measures one call on a CPU by the wall clock, from the creation of this object to `stop`."""

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
    """Measures one call on CUDA, with two events on the caller's stream for the time of the device.

    `ready` makes the work that follows on the stream wait for all ranks.
    """

    def __init__(self, ready: Callable[[], object]) -> None:
        self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT)
        ready()
        self.first.record()
        super().__init__()

    def stop(self) -> None:
        super().stop()
        self.last.record()

    def us(self) -> float:
        return max(float(self.first.elapsed_time(self.last)) * 1e3, super().us()) if self.last.query() else nan


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
        if self.on_gpu and self.session is not None:
            self.session.groups.prepare([self.everyone])

    def start(self) -> Lap:
        """Start a lap. On CUDA, this issues work to the current stream."""
        return CudaLap(self._meet) if self.on_gpu else LAP()

    def _meet(self) -> None:
        """Make the current stream wait until the streams of all ranks are here."""
        if self.session is None:
            return
        group, _ = self.session.groups.of(self.everyone)
        options = torch.distributed.AllreduceOptions()
        options.asyncOp = False  # NCCL runs on the current stream
        group.allreduce([torch.zeros(1, device=self.session.device)], options)


def replayed(
    graphs: dict[Candidate, torch.cuda.CUDAGraph], stopwatch: Stopwatch, flush: torch.Tensor | None
) -> list[tuple[Candidate, Lap]]:
    """Replay graphs in turn, in the order A B B A A B, and return the laps. All ranks do this together.

    The first replay of each graph is not timed. `flush` is overwritten before each replay.
    """
    laps = []
    for n in range(REPLAYS + 1):
        for candidate in graphs if n % 2 == 0 else reversed(graphs):
            if flush is not None:
                flush.zero_()
            lap = stopwatch.start()
            graphs[candidate].replay()
            lap.stop()
            if n > 0:
                laps.append((candidate, lap))
    return laps


def room_for_flush() -> torch.Tensor | None:
    """Return memory that is larger than the L2 cache of the GPU; None if there is too little free memory.

    If it is overwritten, the L2 cache no longer contains the weights of the caller's model. Between two calls of a
    layer, the other layers of the model have the same effect.
    """
    size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    try:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return None
