"""Measurements on H200, read from the JSON of several benchmarks, and the cost model's estimate of each."""

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
UNSLICED = 1  # slices of a fusion without a Stream axis
ESTIMATES: dict[tuple[object, ...], Mapping[str, float]] = {}  # computed once: several files have the same rows
OTHER_TRITON = {"d3a5b2e"}  # commits with an older Triton matmul, which took 190 us to launch
UNSPLIT_TILES = {"af38f7b"}  # commits at which it did not split tiles (it used stream-K)


def estimates(
    program: Program, sizes: Mapping[str, int], hardware: Hardware, kernels: str = "aten"
) -> Mapping[str, float]:
    """Return the estimated microseconds of one call of a program, by mode."""
    return simulation.estimates(tasks_of(program, sizes), hardware, kernels)


@dataclass(frozen=True)
class MeasuredCandidate:
    """Candidate of a benchmark: as `Candidate`, with the number of slices of its fusion."""

    strategy: str
    slices: int
    streams: int
    kernels: str


@dataclass(frozen=True)
class Recorded:
    """Times of several candidates in microseconds, in one row and one mode of a benchmark."""

    row: str
    pattern: str
    shape: tuple[int, int, int]
    ranks: int
    dtype: str
    mode: str
    hardware: Hardware
    times: Mapping[MeasuredCandidate, float]

    def of_fusion(self, slices: int) -> Mapping[MeasuredCandidate, float]:
        """Return the candidates of one fusion: `auto` chooses among these."""
        return {candidate: t for candidate, t in self.times.items() if candidate.slices in (UNSLICED, slices)}

    def loss(self, candidates: Mapping[MeasuredCandidate, float]) -> tuple[float, MeasuredCandidate]:
        """Return the slowdown of the model's candidate against the fastest, as a ratio, and that candidate."""
        taken = min(candidates, key=self.estimate)
        return candidates[taken] / min(candidates.values()), taken

    def estimate(self, candidate: MeasuredCandidate) -> float:
        fusion = (self.pattern, self.shape, self.ranks, self.dtype)
        key = (fusion, candidate, repr(self.hardware))  # all constants as text, as Hardware is not hashable
        if key not in ESTIMATES:
            program = lowered(*fusion, candidate.strategy, candidate.slices, candidate.streams)
            ESTIMATES[key] = estimates(program, {}, self.hardware, candidate.kernels)
        return ESTIMATES[key][self.mode]


def parse_candidate(name: str) -> MeasuredCandidate | None:
    """Parse a benchmark's name of a candidate; None for a peer, and for candidates that `auto` never chooses."""
    for form in NAMES:
        if match := form.fullmatch(name):
            fields = match.groupdict()
            strategy = fields["strategy"] or "pipeline"
            streams = int(fields.get("streams") or {"ring": 2}.get(strategy, 1))
            return MeasuredCandidate(strategy, int(fields.get("slices") or UNSLICED), streams, fields["kernels"])
    return None


@cache
def lowered(
    pattern: str, shape: tuple[int, int, int], ranks: int, dtype: str, strategy: str, slices: int, streams: int
) -> Program:
    m, n, k = shape
    sizes: dict[str, Any] = {"ranks": ranks, "S": slices, "M": m, "N": n, "dtype": dtype}
    if pattern == "allgather":
        fusion = patterns.allgather_matmul(K=k, **sizes)
    else:
        row_parallel = patterns.row_parallel_scattered if pattern == "reduce_scatter" else patterns.row_parallel
        fusion = row_parallel(K=k * ranks, **sizes)
    with hi.knobs.scope(spec=0):
        return hi.lower(fusion, strategy, streams)


def recorded(data: Mapping[str, Any]) -> Iterator[Recorded]:
    """Yield the rows and modes of a benchmark's JSON in which at least two candidates were timed."""
    environment = data["environment"]
    hardware = hardware_of(environment["gpu"])
    assert hardware, environment
    if environment.get("commit", "") in {"", *UNSPLIT_TILES}:
        triton = hardware.kernels["triton"]
        unsplit = replace(triton, rates=replace(triton.rates, split=None))
        hardware = replace(hardware, kernels={**hardware.kernels, "triton": unsplit})
    for row in data.get("results") or data["rows"]:
        m, n, k = row["shape"] if "shape" in row else (row["M"], row["N"], row["K"])
        title = row.get("row") or f"{row.get('model', '')} M={m}"
        for mode in ("graph", "eager"):
            times = {c: t for name, t in _times(row, mode).items() if t and (c := parse_candidate(name))}
            if environment.get("commit") in OTHER_TRITON:
                times = {c: t for c, t in times.items() if c.kernels != "triton"}
            if len(times) > 1:
                pattern, ranks = row.get("kind", "allgather"), row.get("ranks", environment.get("gpus", 8))
                yield Recorded(title, pattern, (m, n, k), ranks, row.get("dtype", "bf16"), mode, hardware, times)


def _times(row: Mapping[str, Any], mode: str) -> Mapping[str, float | None]:
    """Return the times of one mode by candidate; old files nest candidates in modes, new ones modes in candidates."""
    if mode in row:
        return row[mode]
    return {name: modes.get(mode) for name, modes in row.get("times", {}).items()}


def read(path: Path) -> list[Recorded]:
    return list(recorded(json.loads(path.read_text())))
