"""Timing on several ranks, fair to everyone: ours and the peers in one process, lined up, L2 flushed, random data."""

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

from hostir.choice.measure import WallClock

L2_FLUSH = 256 << 20  # bytes written before each run: more than the L2 holds
WARM = 4
CALLS = 20  # of which the median is a call's host time

Name = TypeVar("Name")


@dataclass
class Clock:
    """Times work on all ranks: every run starts behind a barrier on the device, so that ranks start together.

    The figure is the maximum over ranks of each rank's median, in microseconds; of CPU processes, by wall clock.
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
        """One work alone."""
        return self.race({"": work})[""]

    def race(self, works: Mapping[Name, Callable[[], Any]]) -> dict[Name, float]:
        """Several works in turn, one run of each a round, so that drifting clocks and heat touch all alike.

        Each round has another order, the same on all ranks: work that keeps the host long makes the next one late.
        """
        for work in works.values():
            for _ in range(WARM):
                work()
        synchronize(self.device)
        dist.barrier()
        took: dict[Name, list[Callable[[], float]]] = {name: [] for name in works}
        order = Random(0)
        for _ in range(self.runs):
            for name in order.sample(list(works), len(works)):
                took[name].append(self.run(works[name]))
        synchronize(self.device)
        return self.slowest({name: [each() for each in took[name]] for name in works})

    def run(self, work: Callable[[], Any]) -> Callable[[], float]:
        """One run; its microseconds are asked for once the device is done."""
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
        """The time that each work takes of the host, where the device has nothing else to do."""
        spans: dict[Name, list[float]] = {name: [] for name in works}
        for name, work in works.items():
            for _ in range(CALLS):
                synchronize(self.device)
                begun = time.perf_counter()
                work()
                spans[name].append((time.perf_counter() - begun) * 1e6)
        synchronize(self.device)
        return self.slowest(spans)

    def slowest(self, times: Mapping[Name, list[float]]) -> dict[Name, float]:
        """The maximum over ranks of each median."""
        worst = torch.tensor([statistics.median(each) for each in times.values()], device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return {name: round(t, 1) for name, t in zip(times, worst.tolist(), strict=True)}


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given; a CPU has when the calls return."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graphed(work: Callable[[], Any]) -> Callable[[], None]:
    """The replay of a CUDA graph of `work`."""
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
    """Return what the figures depend on: date, commit, hardware and versions."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        **(gpus() if torch.cuda.is_available() else {"cores": os.cpu_count(), "python": platform.python_version()}),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def commit() -> str:
    """Return the commit of the measured code: `BENCHMARK_COMMIT`, or else the commit that git names.

    A copy of the working tree on another machine lacks the history of the repository, or has one of its own. Whoever
    measures there passes `BENCHMARK_COMMIT`.
    """
    if given := os.environ.get("BENCHMARK_COMMIT"):
        return given
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def gpus() -> dict[str, Any]:
    """What figures of a GPU depend on besides."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": dist.get_world_size() if dist.is_initialized() else 1,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(path: Path, title: str, text: str, data: dict[str, Any]) -> None:
    """Writes `path`.json and `path`.md, each with the environment."""
    around = environment()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({"environment": around, **data}, indent=1) + "\n")
    said = ", ".join(f"{k} {v}" for k, v in around.items())
    path.with_suffix(".md").write_text(f"# {title}\n\n{said}\n\n{text}\n")
