"""Time hostir and its peers on several ranks: in one process, with aligned starts, a flushed L2 and random data."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton

from hostir.choice.laps import L2_FLUSH
from hostir.choice.measure import WallClock

WARM = 4
CALLS = 20  # the host time is the median of this number of calls that count

Name = TypeVar("Name")


@dataclass
class Clock:
    """Times work on all ranks. A barrier on the device before every run makes the ranks start together.

    A time is the maximum over the ranks of the median of all runs, in microseconds. For CPU processes it is wall clock
    time.
    """

    device: torch.device
    runs: int = 30

    def __post_init__(self) -> None:
        if self.device.type == "cpu":
            return
        self.flush = torch.empty(L2_FLUSH, dtype=torch.uint8, device=self.device)
        space = symm_mem.empty(16, dtype=torch.float32, device=self.device)
        self.line = symm_mem.rendezvous(space, dist.group.WORLD)

    def time(self, work: Callable[[], Any]) -> float:
        """Return the time of a single piece of work."""
        return self.race({"": work})[""]

    def race(self, works: Mapping[Name, Callable[[], Any]]) -> dict[Name, float]:
        """Return the time of each piece of work.

        The pieces run in turn, so that clock drift and heat affect all equally. Each round runs every piece once, in a
        random order that is the same on all ranks. The order is random because a piece that keeps the host busy for a
        long time delays the next piece.
        """
        for work in works.values():
            for _ in range(WARM):
                work()
        synchronize(self.device)
        dist.barrier()
        elapsed: dict[Name, list[Callable[[], float]]] = {name: [] for name in works}
        order = Random(0)
        for _ in range(self.runs):
            for name in order.sample(list(works), len(works)):
                elapsed[name].append(self.run(works[name]))
        synchronize(self.device)
        return self.slowest({name: [time_of() for time_of in elapsed[name]] for name in works})

    def run(self, work: Callable[[], Any]) -> Callable[[], float]:
        """Run `work` once; return a function that returns the time in microseconds once the device has finished."""
        if self.device.type == "cpu":
            return WallClock().run(work)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        self.line.barrier(channel=7)
        start.record()
        work()
        end.record()
        return lambda: start.elapsed_time(end) * 1e3

    def host(self, works: Mapping[Name, Callable[[], Any]]) -> dict[Name, float]:
        """Return the time that the host takes to issue each piece of work. The device is idle when the work begins.

        The pieces run in turn, because the speed of a host changes within seconds. If there are several, each one runs
        twice in its turn, and the second run counts: programs repeat their work, and the first run after another piece
        finds cold caches.
        """
        spans: dict[Name, list[float]] = {name: [] for name in works}
        for _ in range(CALLS):
            for name, work in works.items():
                if len(works) > 1:
                    work()
                synchronize(self.device)
                start = time.perf_counter()
                work()
                spans[name].append((time.perf_counter() - start) * 1e6)
        synchronize(self.device)
        return self.slowest(spans)

    def slowest(self, times: Mapping[Name, list[float]]) -> dict[Name, float]:
        """Return the median of each list of times, on the rank where it is largest."""
        medians = torch.tensor([statistics.median(runs) for runs in times.values()], device=self.device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        return {name: round(t, 1) for name, t in zip(times, medians.tolist(), strict=True)}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work. A CPU has finished when its calls return."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graphed(work: Callable[[], Any]) -> Callable[[], None]:
    """Capture `work` in a CUDA graph; return a function that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    torch.cuda.synchronize()
    dist.barrier()
    return graph.replay


def environment() -> dict[str, Any]:
    """Return the date, commit, hardware and versions of a measurement."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        **(gpus() if torch.cuda.is_available() else {"cores": os.cpu_count(), "python": platform.python_version()}),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def commit() -> str:
    """Return the commit of the measured code: `BENCHMARK_COMMIT`, or else the commit that git names.

    On another machine, the working tree may be a copy without the history of the repository, or with another history.
    To measure there, set `BENCHMARK_COMMIT`.
    """
    if name := os.environ.get("BENCHMARK_COMMIT"):
        return name
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"


def gpus() -> dict[str, Any]:
    """Return the GPU, the number of GPUs, and the versions of CUDA and NCCL; the number of ranks if it is another."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    hosts = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    count = min(ranks, hosts * torch.cuda.device_count())
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": count,
        **({} if count == ranks else {"ranks": ranks}),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with a first column of words and further columns of numbers."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(path: Path, title: str, text: str, data: dict[str, Any]) -> None:
    """Write `path`.json and `path`.md, each with the environment."""
    stamp = environment()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({"environment": stamp, **data}, indent=1) + "\n")
    stamp_line = ", ".join(f"{k} {v}" for k, v in stamp.items())
    path.with_suffix(".md").write_text(f"# {title}\n\n{stamp_line}\n\n{text}\n")
