"""All-gather + matmul: every strategy of ours and what torch offers, against the floor, in one process run.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.allgather_matmul --out benchmarks/results/allgather_matmul
    python -m benchmarks.chart benchmarks/results/allgather_matmul.json

Rows are the first weights of the MLPs of Llama 3 8B, 70B and 405B as tensor parallel 8 has them (N of a rank stays the
same on fewer), and the shape that nvFuser published. floor = max(cuBLAS alone, best all-gather alone), where the
all-gather is NCCL's or bare copies from the peers, eager or from a graph; a score is floor/time, and 1 the end of the
road. Every candidate first has to be right; then all are timed in turn, and have to be right again on other data. Eager
calls and CUDA graphs are timed apart; one-sided strategies replay their own graph where they are given `out=`. Slices
of a pipeline are an axis of A and of the result, outside of the ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

import hostir as hi
from benchmarks.harness import Clock, write
from benchmarks.peers import DTYPES, PARTS, Candidate, Judge, Operands, WrongResultError, parts, peers, replayed
from benchmarks.scores import EAGER, GRAPH, Result, Row, file_name, line, report, rows, scored
from examples import patterns
from hostir.ir.comm_ops import Communication
from hostir.runtime.session import Session, session

TITLE = "All-gather + matmul: floor/time"
ALARM = 120  # seconds that a step may take before the process ends with a traceback of each thread
WARM_CALLS = 4  # of a new candidate; an executor replays its graph from the third on
PATIENCE = 20  # seconds that ours wait for another rank
LONGEST = 200  # characters of why a candidate was left out
ALONE = "Triton alone"
T = TypeVar("T")


@dataclass(frozen=True)
class Variant:
    """A way to lower and run the fusion."""

    strategy: str
    kernels: str
    slices: int = 1
    streams: int = 1

    def __str__(self) -> str:
        slices = f" {self.slices} slices" if self.slices > 1 else ""
        streams = f" {self.streams} streams" if self.slices > 1 or self.raises_by_kernel else ""
        return f"{self.strategy}{slices}{streams} {self.kernels}"

    @property
    def raises_by_kernel(self) -> bool:
        """Whether signals have a stream of their own, where there is more than one peer."""
        return self.strategy == "fused" and self.streams > 1


VARIANTS = tuple(
    Variant(strategy, kernels, slices, streams)
    for strategy, slices, streams in (
        ("sequential", 1, 1),
        ("pipeline", 2, 2),
        ("pipeline", 4, 4),
        ("ring", 1, 2),
        ("fused", 1, 1),
        ("fused", 1, 2),
        ("push", 1, 1),
    )
    for kernels in ("aten", "triton")
    if (strategy, streams, kernels) != ("fused", 2, "aten")  # cuBLAS leaves no SM to the signals
)
STRATEGIES = tuple(dict.fromkeys(variant.strategy for variant in VARIANTS))


def warmed(make: Callable[[], Candidate]) -> Candidate:
    """A new candidate after some calls, each after the one before, so that the next tells what went wrong in it."""
    made = make()
    for _ in range(WARM_CALLS):
        made.call()
        torch.cuda.synchronize()
    return made


def ours(of: Operands, variant: Variant, mode: str, dtype: str) -> Candidate:
    """A variant as a candidate. Each mode has an executor of its own, which sees the same addresses every time."""
    row, slices = of.row, variant.slices
    fusion = patterns.allgather_matmul(ranks=of.ranks, S=slices, M=row.M, K=row.K, N=row.N, dtype=dtype)
    program = hi.lower(fusion, variant.strategy, variant.streams)
    executor = hi.Executor(program, kernels=variant.kernels, timeout=PATIENCE)
    executor.watchdog = None  # a candidate that raises is left out, and does not end the job
    a, b, c = of.a.view(slices, 1, -1, row.K), of.b, of.shaped(of.c, slices)

    def into_c() -> torch.Tensor:
        return executor(a, b, out=c)[0]

    if any(isinstance(s, Communication) for s in program.walk()):  # through NCCL: the caller captures, on all ranks
        return Candidate(str(variant), mode, True, into_c if mode == EAGER else replayed(into_c))
    if mode == EAGER:
        return Candidate(str(variant), mode, True, lambda: executor(a, b)[0])
    candidate = warmed(lambda: Candidate(str(variant), mode, True, into_c))
    if executor.graph_refusal is not None:
        raise RuntimeError(f"no CUDA graph: {executor.graph_refusal}")
    return candidate


class Bench:
    """Measures rows on all ranks in step: what fails on one rank is left out on all."""

    def __init__(self, joined: Session, given: argparse.Namespace) -> None:
        self.joined, self.given = joined, given
        self.begun = time.monotonic()
        self.clock = Clock(joined.device, given.repeats)
        self.console = Console(quiet=joined.rank > 0, highlight=False, soft_wrap=True)
        self.failed: dict[str, str] = {}  # of the row being measured: why a candidate has no score

    # In step ----------------------------------------------------------------------------------------------------------
    def agree(self, about: str, mine: str) -> str:
        """What the first rank with something to say said; empty where none has. The alarm starts anew."""
        faulthandler.dump_traceback_later(ALARM, exit=True)
        said = self.joined.exchange(f"benchmark, {about}", mine, ALARM)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "")

    def attempt(self, row: Row, what: str, step: str, work: Callable[[], T]) -> T | None:
        """What `work` gives where it raises on no rank; else None, and a line that says why."""
        made, problem = None, ""
        try:
            made = work()
            torch.cuda.synchronize()
        except Exception as raised:
            kind = "WRONG" if isinstance(raised, WrongResultError) else type(raised).__name__
            problem = f"{kind}: {next(iter(str(raised).strip().splitlines()), '')}"[:LONGEST]
        if said := self.agree(f"{row}, {what}, {step}", problem):
            self.failed[what] = f"{step}: {said}"
            self.console.print(f"{row}: {what}: {step}: {said}", markup=False, style="yellow")
            return None
        return made

    def over(self, row: Row) -> bool:
        """Whether the time is used up on any rank."""
        over = time.monotonic() - self.begun > self.given.budget
        return bool(self.agree(f"{row}, budget", "over" if over else ""))

    # One row ----------------------------------------------------------------------------------------------------------
    def measure(self, row: Row) -> Result:
        """All figures of a row, times in microseconds."""
        torch.manual_seed(self.joined.rank)
        self.failed.clear()
        of = Operands(row, DTYPES[self.given.dtype], self.joined.device)
        found = self.right(row, "before timing", Judge(of), self.entrants(row, of))
        raced = self.clock.race(parts(of) | {(c.name, c.mode): c.call for c in found})
        of.renew()
        found = self.right(row, "after timing", Judge(of), found)
        alone = [c for c in found if c.name == ALONE]
        found = [c for c in found if c.name != ALONE]
        host = self.clock.host({(c.name, c.mode): c.call for c in found})
        times: dict[str, Result] = {}
        for c in found:
            entry = times.setdefault(c.name, {"ours": c.ours})
            entry |= {c.mode: raced[c.name, c.mode], f"host_{c.mode}_us": host[c.name, c.mode]}
        done = scored(
            {
                **{"model": row.model, "M": row.M, "N": row.N, "K": row.K},
                **{"ranks": self.joined.size, "dtype": self.given.dtype},
                **{f"{part}_us": min(raced[part, mode] for mode in (EAGER, GRAPH)) for part in PARTS},
                "triton_us": raced[ALONE, EAGER] if alone else None,
                "parts": {f"{part}, {mode}": raced[part, mode] for part in PARTS for mode in (EAGER, GRAPH)},
                "times": times,
                "failed": dict(self.failed),
            }
        )
        for c in found:
            if self.given.profile and done["best_ours"] in (f"{c.name}, {EAGER}", f"{c.name}, {GRAPH}"):
                self.attempt(row, str(c), "profile", partial(self.profile, row, c))
        torch.cuda.synchronize()
        dist.barrier()  # nobody's symmetric memory goes while others use it
        return done

    def entrants(self, row: Row, of: Operands) -> list[Candidate]:
        """The candidates that can be called."""
        makers = peers(of)
        for variant in VARIANTS:
            same = variant.raises_by_kernel and of.ranks < 3  # as on one stream
            if variant.strategy in self.given.only and not same:
                for mode in (EAGER, GRAPH):
                    makers.append((str(variant), mode, partial(ours, of, variant, mode, self.given.dtype)))
        makers.append((ALONE, EAGER, lambda: Candidate(ALONE, EAGER, True, of.multiply_in_triton)))
        made = [self.attempt(row, f"{name}, {mode}", "made", partial(warmed, make)) for name, mode, make in makers]
        return [candidate for candidate in made if candidate is not None]

    def right(self, row: Row, when: str, judge: Judge, found: list[Candidate]) -> list[Candidate]:
        """Those whose results are right on every rank."""
        return [c for c in found if self.attempt(row, str(c), when, partial(judge.check, c))]

    def profile(self, row: Row, c: Candidate) -> None:
        """A trace of three calls on rank 0, which begin in step."""
        first = self.joined.rank == 0
        watched = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        with watched if first else nullcontext():
            for _ in range(3):
                torch.cuda.synchronize()
                dist.barrier()
                c.call()
            torch.cuda.synchronize()
        if first:
            self.given.profile.mkdir(parents=True, exist_ok=True)
            name = f"{row} {self.joined.size} ranks {c}".replace("=", "").replace(", ", " ").replace(" ", "-")
            watched.export_chrome_trace(str(self.given.profile / f"{name}.json"))


# The command line -------------------------------------------------------------------------------------------------
def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md; other ranks than 8 add their number")
    parser.add_argument("--rows", type=_rows, default="", help="such as 8B:2048,70B (default: all)")
    parser.add_argument("--only", type=_strategies, default=STRATEGIES, help="strategies of ours, such as fused,ring")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs of each (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=240, help="start no row after so many seconds (%(default)s)")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write Chrome traces of our best of each row there")
    return parser.parse_args(arguments)


def _rows(text: str) -> list[Row]:
    try:
        return rows(text)
    except ValueError as unknown:
        raise argparse.ArgumentTypeError(str(unknown)) from None


def _strategies(text: str) -> tuple[str, ...]:
    if unknown := set(text.split(",")) - set(STRATEGIES):
        raise argparse.ArgumentTypeError(f"no strategy {', '.join(unknown)}: there are {', '.join(STRATEGIES)}")
    return tuple(text.split(","))


def measure_all(bench: Bench, results: list[Result]) -> list[Row]:
    """Fills `results`, row by row; gives the rows that there was no time for."""
    left = list(bench.given.rows)
    while left and not bench.over(left[0]):
        row = left.pop(0)
        done = bench.attempt(row, "row", "measured", partial(bench.measure, row))
        gc.collect()  # graphs and symmetric memory
        torch.cuda.empty_cache()
        if done is not None:
            results.append(done)
            style = {None: "", True: "green", False: "red"}[done["met"]]
            bench.console.print(line(done), markup=False, style=style)
            save(bench, results, left)
    return left


def save(bench: Bench, results: list[Result], left: list[Row]) -> None:
    if bench.given.out is None or bench.joined.rank > 0:
        return
    name = file_name(bench.given.out.name, bench.joined.size, bench.given.dtype)
    data = {"rows": results, "not_measured": [str(row) for row in left]}
    missing = f"\n\nNot measured: {', '.join(map(str, left))}." if left else ""
    write(bench.given.out.with_name(name), TITLE, report(results) + missing, data)


def main() -> None:
    """Measures, prints a line a row, and writes table and figures on rank 0."""
    given = options()
    results: list[Result] = []
    with session("cuda") as joined, torch.no_grad():
        if joined is None:
            sys.exit("start it with torchrun, one process a GPU")
        finest = joined.size * max(variant.slices for variant in VARIANTS)
        if uneven := [row for row in given.rows if row.M % finest]:
            sys.exit(f"{uneven[0]}: rows do not divide by {finest}, the ranks times the slices")
        bench = Bench(joined, given)
        left = measure_all(bench, results)
        asked = [row for row in results if row["met"] is not None]
        told = f"{sum(row['met'] for row in asked)} of {len(asked)} rows reach what they must"
        bench.console.print(f"{told}; {time.monotonic() - bench.begun:.0f} s")
        if left:
            bench.console.print(f"not measured: {', '.join(map(str, left))}", style="yellow")
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
