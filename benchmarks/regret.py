"""Compute the regret of the choice by estimates, from recorded results.

    python -m benchmarks.regret
    python -m benchmarks.regret --rows --out benchmarks/results/regret

The benchmark reads the committed results of the comparisons. It estimates every candidate of every row again with the
present cost model, for the machine of the results. It runs nothing. Candidates that were not measured are left out. The
time of a candidate is the time of its faster mode, eager or from a graph. *regret* is the time of the candidate with
the lowest estimate, divided by the time of the fastest candidate. *of 4* is the regret of a choice that measures the
four candidates with the lowest estimates and the sequential program, and takes the fastest of these. *estimates*
compares estimates with times in a graph: the median of estimate / time, and the share of candidates within 10 %.
Changes of the cost model are judged by this table.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import hostir as hi
from benchmarks.comparison import Variant
from benchmarks.harness import table, write
from benchmarks.matmul_reduce_scatter import row_parallel
from benchmarks.mlp import mlp
from benchmarks.reshard import all_gather, summed
from examples import patterns
from hostir.choice.candidates import SEQUENTIAL, candidates_of
from hostir.choice.choices import Timing
from hostir.choice.decision import estimated
from hostir.choice.hardware import hardware_of
from hostir.choice.platforms import reference
from hostir.ir import HostIRError
from hostir.lower.strategies import fusion_of

RESULTS = Path(__file__).parent / "results"
MEASURED = 4  # number of the lowest estimates that would be measured
NEAR = 0.1
KERNELS = ("aten", "cublas", "triton")
ALLOWED = 1.05  # a regret that counts as large
Result = dict[str, Any]
Fused = hi.Fusion | hi.Program


def scaled(pattern: Callable[..., hi.Fusion], row: Result, **sizes: int) -> hi.Fusion:
    """Return the fusion of an fp8 row."""
    return pattern(ranks=row["ranks"], M=row["M"], **sizes, dtype=row["dtype"], scales=row["scales"], fast=row["fast"])


# Functions that make the fusion of a row in a number of slices, by the row's pattern.
FUSIONS: Mapping[str, Callable[[Result, int], Fused]] = {
    "allgather": lambda r, n: patterns.allgather_matmul(
        ranks=r["ranks"], S=n, M=r["M"], K=r["K"], N=r["N"], dtype=r["dtype"]
    ),
    "reduce_scatter": lambda r, n: (
        row_parallel(r["ranks"], r["M"], r["N"], r["K"] * r["ranks"], r["dtype"])
        if n == 1
        else patterns.row_parallel_scattered(r["ranks"], n, r["M"], r["K"] * r["ranks"], r["N"], r["dtype"])
    ),
    "all_reduce": lambda r, n: patterns.row_parallel(r["ranks"], n, r["M"], r["K"] * r["ranks"], r["N"], r["dtype"]),
    "mlp": lambda r, n: mlp(
        r["ranks"], n, r["M"], r["K"], r["N"] * r["ranks"], r["dtype"], gated=r.get("gated", False)
    ),
    "reshard": lambda r, n: (
        all_gather(r["ranks"], r["M"], r["N"], r["dtype"])
        if r["model"] == "all_gather"
        else summed(r["ranks"], r["M"], r["N"], r["dtype"], scattered=r["model"] == "reduce_scatter")
    ),
    "scaled_gather": lambda r, n: scaled(patterns.scaled_allgather_matmul, r, K=r["K"], N=r["N"]),
    "scaled_scatter": lambda r, n: scaled(
        lambda **arguments: patterns.scaled_row_parallel(**arguments, bias=False), r, K=r["K"], N=r["N"]
    ),
}


@dataclass(frozen=True)
class Regret:
    """The times and the estimates of the candidates of a row.

    Fields:
        name: the name of the row.
        times: microseconds of the measured candidates, in the faster mode.
        graph: microseconds of these candidates in a graph.
        timings: the estimates of these candidates.
    """

    name: str
    times: Mapping[str, float]
    graph: Mapping[str, float]
    timings: Mapping[str, Timing]

    @property
    def best(self) -> str:
        """The name of the fastest candidate."""
        return min(self.times, key=self.times.__getitem__)

    @property
    def order(self) -> Sequence[str]:
        """The names of the candidates, the lowest estimate first."""
        return sorted(self.timings, key=lambda name: self.timings[name].us)

    @property
    def regret(self) -> float:
        """The time of the candidate with the lowest estimate, divided by the time of the fastest candidate."""
        return self.times[self.order[0]] / self.times[self.best]

    @property
    def of_four(self) -> float:
        """The regret if the candidates with the lowest estimates and the sequential program were measured."""
        tried = [*self.order[:MEASURED], *(name for name in self.order if name.startswith(SEQUENTIAL))]
        return min(self.times[name] for name in tried) / self.times[self.best]

    @property
    def ratios(self) -> Sequence[float]:
        """Estimate / time in a graph, for each candidate that has both."""
        both = [(self.timings[n].graph, t) for n, t in self.graph.items() if n in self.timings]
        return [estimate / time for estimate, time in both if estimate]


def timings_of(row: Result, gpu: str) -> dict[str, Timing]:
    """Return the estimate of every candidate of a row, by its name in the results."""
    hardware = hardware_of(gpu)
    if hardware is None:
        raise SystemExit(f"there are no constants of {gpu}")
    platform, by_name = reference(hardware, row["ranks"]), {}
    several = sorted({int(name.split()[1]) for name in row["times"] if " slices " in name})
    for slices in (1, *several):
        try:
            fusion = fusion_of(FUSIONS[row["kind"]](row, slices))
            timings, _ = estimated(candidates_of(fusion, platform, KERNELS), platform, {}, "graph")
        except HostIRError:
            continue
        for timing in timings:
            each = timing.candidate
            by_name[str(Variant(each.strategy, each.kernels, slices, each.streams))] = timing
    return by_name


def regret_of(row: Result, gpu: str) -> Regret | None:
    """Return the times and estimates of a row; None if fewer than two candidates have both."""
    timings = timings_of(row, gpu)
    ours = {name: time for name, time in row["times"].items() if time["ours"] and name in timings}
    times = {n: min(t for t in (time.get("eager"), time.get("graph")) if t) for n, time in ours.items()}
    if len(times) < 2:
        return None
    graph = {name: time["graph"] for name, time in ours.items() if time.get("graph")}
    return Regret(f"{row['model']} M={row['M']}", times, graph, {name: timings[name] for name in times})


def benchmarks() -> Iterator[tuple[str, str, list[Regret]]]:
    """Yield the name, the GPU and the rows of each result file with candidates."""
    for file in sorted(RESULTS.rglob("*.json")):
        data = json.loads(file.read_text())
        rows = data.get("rows", []) if isinstance(data, dict) else []
        gpu = data.get("environment", {}).get("gpu", "") if isinstance(data, dict) else ""
        regrets = [regret_of(row, gpu) for row in rows if gpu and row.get("kind") in FUSIONS]
        if complete := [each for each in regrets if each is not None]:
            yield str(file.relative_to(RESULTS).with_suffix("")), gpu, complete


def summary(name: str, rows: Sequence[Regret]) -> list[str]:
    """Return the cells of a benchmark's row in the summary."""
    regrets, four, ratios = [r.regret for r in rows], [r.of_four for r in rows], [x for r in rows for x in r.ratios]
    near = sum(abs(math.log(x)) <= math.log(1 + NEAR) for x in ratios)
    return [
        name,
        str(len(rows)),
        *(f"{value:.2f}" for value in (geometric_mean(regrets), max(regrets))),
        str(sum(r > ALLOWED for r in regrets)),
        *(f"{value:.2f}" for value in (geometric_mean(four), max(four))),
        f"{median(ratios):.2f}, {near / len(ratios):.0%}" if ratios else "-",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", action="store_true", help="also print the candidates of each row, the lowest estimate first"
    )
    parser.add_argument("--only", default="", help="results with this in their name")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [(name, rows) for name, _, rows in benchmarks() if options.only in name]
    lines = [summary(name, rows) for name, rows in results]
    lines.append(summary("all", [r for _, rows in results for r in rows]))
    headers = ["results", "rows", "regret", "max", f"over {ALLOWED}", f"of {MEASURED}", "max of 4", "estimates"]
    text = table(headers, lines)
    if options.rows:
        for name, rows in results:
            for r in rows:
                shown = (f"{n} {r.timings[n].us:.0f}/{r.times[n]:.0f}" for n in r.order)
                print(f"{name} {r.name}: {r.regret:.2f}, best {r.best}; estimate/time: {', '.join(shown)}")
    print(text)
    if options.out:
        data = {n: {"regret": [r.regret for r in rows], "of_four": [r.of_four for r in rows]} for n, rows in results}
        write(options.out, "Regret of the choice by estimates", text, {"results": data})


if __name__ == "__main__":
    main()
