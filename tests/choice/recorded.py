"""Measurements of 8 H200, read tolerantly from whatever benchmark wrote them, and what the cost model makes of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import hostir as hi
from examples import patterns
from hostir.choice import simulation
from hostir.choice.cost import tasks_of
from hostir.choice.hardware import Hardware, hardware_of
from hostir.ir.program import Program

# Names of candidates: `sequential aten`, `S=4 streams=2 aten`, `pipeline 4 slices 2 streams triton`,
# `fused triton`, `fused 2 streams triton`.
NAMES = (
    re.compile(r"(?P<strategy>sequential|ring|fused|push)(?: (?P<streams>\d+) streams)? (?P<kernels>aten|triton)"),
    re.compile(r"(?P<strategy>)S=(?P<slices>\d+) streams=(?P<streams>\d+) (?P<kernels>aten|triton)"),
    re.compile(
        r"(?P<strategy>pipeline|ring|fused|push) (?P<slices>\d+) slices "
        r"(?P<streams>\d+) streams (?P<kernels>aten|triton)"
    ),
)
WHOLE = 1  # slices of what has no pipeline
ESTIMATES: dict[tuple[object, ...], Mapping[str, float]] = {}  # made once: several files have the same rows
OTHER_TRITON = {"d3a5b2e"}  # commits at which the Triton matmul was another, whose launch took the host 190 us
WHOLE_TILES = {"af38f7b"}  # commits at which it split no tiles, but shared some by stream-K


def estimates(
    program: Program, sizes: Mapping[str, int], hardware: Hardware, kernels: str = "aten"
) -> Mapping[str, float]:
    """The microseconds of a call of a program, by mode."""
    return simulation.estimates(tasks_of(program, sizes), hardware, kernels)


@dataclass(frozen=True)
class Way:
    """A candidate of a benchmark; unlike ours it also says of how many slices its fusion is."""

    strategy: str
    slices: int
    streams: int
    kernels: str


@dataclass(frozen=True)
class Recorded:
    """What several ways took, in microseconds, in one row and one mode of a benchmark."""

    row: str
    kind: str
    shape: tuple[int, int, int]
    ranks: int
    dtype: str
    mode: str
    hardware: Hardware
    times: Mapping[Way, float]

    def of_fusion(self, slices: int) -> Mapping[Way, float]:
        """The ways to run one fusion, as `auto` chooses among them."""
        return {way: t for way, t in self.times.items() if way.slices in (WHOLE, slices)}

    def loss(self, ways: Mapping[Way, float]) -> tuple[float, Way]:
        """How much slower than the fastest of some ways the one is that the model takes, as a ratio; and that one."""
        taken = min(ways, key=self.estimate)
        return ways[taken] / min(ways.values()), taken

    def estimate(self, way: Way) -> float:
        fusion = (self.kind, self.shape, self.ranks, self.dtype)
        key = (fusion, way, repr(self.hardware))  # all of its constants, which are no key themselves
        if key not in ESTIMATES:
            program = lowered(*fusion, way.strategy, way.slices, way.streams)
            ESTIMATES[key] = estimates(program, {}, self.hardware, way.kernels)
        return ESTIMATES[key][self.mode]


def way(name: str) -> Way | None:
    """What a benchmark's name of a candidate means; None for a peer's, and for what `auto` does not choose."""
    for form in NAMES:
        if match := form.fullmatch(name):
            said = match.groupdict()
            strategy = said["strategy"] or "pipeline"
            streams = int(said.get("streams") or {"ring": 2}.get(strategy, 1))
            return Way(strategy, int(said.get("slices") or WHOLE), streams, said["kernels"])
    return None


@cache
def lowered(
    kind: str, shape: tuple[int, int, int], ranks: int, dtype: str, strategy: str, slices: int, streams: int
) -> Program:
    m, n, k = shape
    sizes: dict[str, Any] = {"ranks": ranks, "S": slices, "M": m, "N": n, "dtype": dtype}
    if kind == "allgather":
        fusion = patterns.allgather_matmul(K=k, **sizes)
    else:
        made = patterns.row_parallel_scattered if kind == "reduce_scatter" else patterns.row_parallel
        fusion = made(K=k * ranks, **sizes)
    with hi.knobs.scope(spec=0):
        return hi.lower(fusion, strategy, streams)


def recorded(data: Mapping[str, Any]) -> Iterator[Recorded]:
    """All rows and modes of a benchmark's JSON in which at least two ways were timed."""
    around = data["environment"]
    hardware = hardware_of(around["gpu"])
    assert hardware, around
    if around.get("commit", "") in {"", *WHOLE_TILES}:
        triton = hardware.kernels["triton"]
        whole = replace(triton, rates=replace(triton.rates, split=None))
        hardware = replace(hardware, kernels={**hardware.kernels, "triton": whole})
    for row in data.get("results") or data["rows"]:
        m, n, k = row["shape"] if "shape" in row else (row["M"], row["N"], row["K"])
        name = row.get("row") or f"{row.get('model', '')} M={m}"
        for mode in ("graph", "eager"):
            times = {w: t for said, t in _times(row, mode).items() if t and (w := way(said))}
            if around.get("commit") in OTHER_TRITON:
                times = {w: t for w, t in times.items() if w.kernels != "triton"}
            if len(times) > 1:
                kind, ranks = row.get("kind", "allgather"), row.get("ranks", around.get("gpus", 8))
                yield Recorded(name, kind, (m, n, k), ranks, row.get("dtype", "bf16"), mode, hardware, times)


def _times(row: Mapping[str, Any], mode: str) -> Mapping[str, float | None]:
    """The times of a row by name, whether modes are inside of candidates or outside."""
    if mode in row:
        return row[mode]
    return {name: found.get(mode) for name, found in row.get("times", {}).items()}


def read(path: Path) -> list[Recorded]:
    return list(recorded(json.loads(path.read_text())))
