"""Compute the regret of the choice by estimates, from recorded results.

    python -m benchmarks.regret
    python -m benchmarks.regret --rows --out benchmarks/results/regret

The benchmark reads all committed results that hold times of candidates. It estimates every candidate of every row again
with the present cost model, for the machine of the results. It runs nothing. Candidates that were not measured are left
out. The time of a candidate is the time of its faster mode, eager or from a graph. The columns:

- *regret* is the time of the candidate with the lowest estimate, divided by the time of the fastest candidate: the
  geometric mean over the rows, the maximum, and the number of rows over 1.05.
- *of 4* is the regret of a choice that measures the four candidates with the lowest estimates and the sequential
  programs, and takes the fastest of these.
- *recorded* is the regret of the candidate that `hi.compile` chose when the results were recorded: the geometric mean
  and the maximum.
- *within 10 %* is the number of candidates in a graph whose estimate differs from the time by at most 10 %. *estimate /
  time* is the median for these candidates.

Changes of the cost model are judged by this table.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import hostir as hi
from benchmarks.comparison import Variant
from benchmarks.harness import table, write
from benchmarks.matmul_reduce_scatter import row_parallel
from benchmarks.mlp import mlp
from benchmarks.reshard import all_gather, summed
from benchmarks.scores import MODES
from examples import patterns
from hostir.choice.candidates import SEQUENTIAL
from hostir.choice.cost import tasks_of
from hostir.choice.hardware import Hardware, hardware_of
from hostir.choice.simulation import GRAPH, estimates
from hostir.ir.comm_ops import LOW_LATENCY, AllGather
from hostir.ir.op import Statement
from hostir.ir.program import rewrite
from hostir.lower import STRATEGIES, lower
from hostir.lower.strategies import BY, fusion_of

RESULTS = Path(__file__).parent / "results"
MEASURED = 4  # number of the lowest estimates that would be measured
NEAR = 0.1
KERNELS = ("aten", "cublas", "triton")
ALLOWED = 1.05  # a regret that counts as large
OTHER_TRITON = {"d3a5b2e", "af38f7b"}  # commits with another Triton matmul than the one that the cost model describes
# Commits in which a kernel of its own ended each call.
OTHER_END = {"d3a5b2e", "af38f7b", "226164b", "15c147f", "1fb15c2", "057973d3", "d1483788"}
# Commits in which `low_latency` sent no blocks ahead, with its rate.
OTHER_SENDING = {*OTHER_END, "52d9d640"}, 300.0
# Commits in which `low_latency` ran no all-gathers: in an MLP, NCCL gathered and `low_latency` summed.
OTHER_GATHER = {"057973d3"}
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
        estimates: the estimated microseconds of these candidates, in the faster mode.
        ratios: estimate / time in a graph, of the candidates that were measured in a graph.
        recorded: the candidate that `hi.compile` chose when the row was recorded; empty if it was not recorded.
    """

    name: str
    times: Mapping[str, float]
    estimates: Mapping[str, float]
    ratios: Sequence[float] = ()
    recorded: str = ""

    @property
    def best(self) -> str:
        """The name of the fastest candidate."""
        return min(self.times, key=self.times.__getitem__)

    @property
    def order(self) -> Sequence[str]:
        """The names of the candidates, the lowest estimate first."""
        return sorted(self.estimates, key=self.estimates.__getitem__)

    @property
    def regret(self) -> float:
        """The time of the candidate with the lowest estimate, divided by the time of the fastest candidate."""
        return self.of(self.order[0])

    @property
    def of_four(self) -> float:
        """The regret if the candidates with the lowest estimates and the sequential programs were measured."""
        sequential = (name for name in self.order if name.startswith(SEQUENTIAL) and " by " not in name)
        return min(map(self.of, [*self.order[:MEASURED], *sequential]))

    def of(self, candidate: str) -> float:
        """Return the time of a candidate, divided by the time of the fastest candidate."""
        return self.times[candidate] / self.times[self.best]

    def __str__(self) -> str:
        shown = (f"{n} {self.estimates[n]:.0f}/{self.times[n]:.0f}" for n in self.order)
        recorded = f"; recorded {self.recorded} {self.of(self.recorded):.2f}" if self.recorded else ""
        return f"{self.name}: {self.regret:.2f}, best {self.best}{recorded}; estimate/time: {', '.join(shown)}"


@dataclass(frozen=True)
class Recorded:
    """The rows of a file of results, with the machine on which they were recorded."""

    name: str
    hardware: Hardware
    ranks: int
    rows: Sequence[Regret]


def gathered_by_nccl(program: hi.Program) -> hi.Program:
    """Return a host program in which NCCL runs the all-gathers that it names `low_latency` for."""

    def change(s: Statement) -> tuple[Statement, ...]:
        return (replace(s, by="") if isinstance(s, AllGather) and s.by == LOW_LATENCY else s,)

    return program.with_body(rewrite(program.body, change))


def estimates_of(row: Result, hardware: Hardware) -> dict[str, dict[str, float]]:
    """Return the estimated microseconds of every measured candidate of a row, by mode."""
    by_name: dict[str, dict[str, float]] = {}
    several = {int(name.split()[1]) for name in row["times"] if " slices " in name}
    for slices in sorted({1, *several}):
        fusion = fusion_of(FUSIONS[row["kind"]](row, slices))
        known = [(name, n) for name, s in STRATEGIES.items() for n in s.stream_counts]
        for strategy, streams in [*known, *((name, 1) for name in BY.values())]:
            names = {kernels: str(Variant(strategy, kernels, slices, streams)) for kernels in KERNELS}
            if measured := {kernels: name for kernels, name in names.items() if name in row["times"]}:
                program = lower(fusion, strategy, streams)
                tasks = tasks_of(gathered_by_nccl(program) if row.get("gathers_by_nccl") else program, {})
                for kernels, name in measured.items():
                    times = estimates(tasks, hardware, kernels)
                    by_name[name] = {mode: round(time, 1) for mode, time in times.items()}  # as a choice rounds them
    return by_name


def rows_of(data: Mapping[str, Any]) -> Iterator[Result]:
    """Yield the rows of a file that hold times of candidates, in the form in which comparisons write them."""
    environment = data.get("environment", {})
    for row in data.get("rows") or data.get("results") or ():
        if not isinstance(row, dict):  # a summary of rows
            return
        if "shape" in row:  # benchmarks/patterns.py has other names, and nests candidates in modes
            M, N, K = row["shape"]
            named = {n: re.sub(r"^S=(\d+) streams=(\d+)", r"pipeline \1 slices \2 streams", n) for n in row["graph"]}
            times = {name: {mode: row[mode].get(n) for mode in MODES} for n, name in named.items()}
            kind = row["kind"].replace("allreduce", "all_reduce")
            row = {"model": row["row"].split()[0], "kind": kind, "M": M, "N": N, "K": K, "times": times}
        if not isinstance(row.get("times"), dict) or row.get("kind", "allgather") not in FUSIONS:
            continue
        if not all(isinstance(time, dict) for time in row["times"].values()):
            continue
        old = environment.get("commit") in OTHER_TRITON
        times = {n: time for n, time in row["times"].items() if not (old and n.endswith("triton"))}
        known = {"times": times, "gathers_by_nccl": environment.get("commit") in OTHER_GATHER}
        yield {"kind": "allgather", "dtype": "bf16", "ranks": environment.get("gpus"), **row, **known}


def regret_of(row: Result, hardware: Hardware) -> Regret | None:
    """Return the times and estimates of a row; None if fewer than two candidates have both."""
    by_name = estimates_of(row, hardware)
    ours = {n: t for n, t in row["times"].items() if n in by_name and any(map(t.get, MODES))}
    if len(ours) < 2:
        return None
    times = {n: min(t for mode in MODES if (t := time.get(mode))) for n, time in ours.items()}
    faster = {n: min(by_name[n].values()) for n in ours}
    ratios = [by_name[n][GRAPH] / time[GRAPH] for n, time in ours.items() if time.get(GRAPH)]
    chosen = row.get("compiled", {}).get("choice", "")
    name = f"{row['kind']} {row['model']} M={row['M']}"
    return Regret(name, times, faster, ratios, chosen if chosen in times else "")


def recorded() -> Iterator[Recorded]:
    """Yield each file of results that holds times of candidates, if the constants of its GPU are known."""
    for file in sorted(RESULTS.rglob("*.json")):
        data = json.loads(file.read_text())
        hardware = hardware_of(str(data.get("environment", {}).get("gpu")))
        if hardware is None:
            continue
        if data["environment"].get("commit") in OTHER_END:
            hardware = replace(hardware, ending=hardware.small_kernel)
        if data["environment"].get("commit") in OTHER_SENDING[0]:
            hardware = replace(hardware, sending=OTHER_SENDING[1])
        rows = list(rows_of(data))
        if regrets := [regret for row in rows if (regret := regret_of(row, hardware))]:
            yield Recorded(str(file.relative_to(RESULTS).with_suffix("")), hardware, rows[0]["ranks"], regrets)


def summary(rows: Sequence[Regret]) -> dict[str, str]:
    """Return the cells of some rows' line in the table, by the name of the column."""
    ratios = [ratio for row in rows for ratio in row.ratios]
    near = sum(abs(math.log(ratio)) <= math.log(1 + NEAR) for ratio in ratios)
    cells = {"rows": str(len(rows))}
    for name, values in (("regret", [r.regret for r in rows]), ("of 4", [r.of_four for r in rows])):
        cells |= {name: f"{geometric_mean(values):.3f}", f"{name}, max": f"{max(values):.2f}"}
        cells |= {f"{name}, over {ALLOWED}": str(sum(value > ALLOWED for value in values))}
    chosen = [row.of(row.recorded) for row in rows if row.recorded]
    cells["recorded"] = f"{geometric_mean(chosen):.3f}, {max(chosen):.2f}" if chosen else "-"
    cells[f"within {NEAR:.0%}"] = f"{near} of {len(ratios)}, {near / len(ratios):.0%}" if ratios else "-"
    cells["estimate / time"] = f"{median(ratios):.2f}" if ratios else "-"
    return cells


def summaries(results: Sequence[Recorded]) -> list[dict[str, str]]:
    """Return the lines of the table: one for each file, and one for all files of each GPU."""
    lines = []
    for gpu in sorted({result.hardware.name for result in results}):
        of_gpu = [result for result in results if result.hardware.name == gpu]
        lines += [{"results": r.name, "GPUs": f"{r.ranks} x {gpu}", **summary(r.rows)} for r in of_gpu]
        lines.append({"results": "all", "GPUs": gpu, **summary([row for r in of_gpu for row in r.rows])})
    return lines


def table_of(lines: Sequence[Mapping[str, str]]) -> str:
    """Return the lines as a Markdown table."""
    return table([*lines[0]], [[*line.values()] for line in lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", action="store_true", help="also print the candidates of each row, the lowest estimate first"
    )
    parser.add_argument("--only", default="", help="results with this in their name")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [result for result in recorded() if options.only in result.name]
    if options.rows:
        for result in results:
            print("\n".join(f"{result.name} {row}" for row in result.rows))
    lines = summaries(results)
    print(table_of(lines))
    if options.out:
        rows = {f"{result.name}: {row.name}": round(row.regret, 3) for result in results for row in result.rows}
        write(options.out, "Regret of the choice by estimates", table_of(lines), {"results": lines, "rows": rows})


if __name__ == "__main__":
    main()
