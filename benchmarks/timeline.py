"""Compare predicted timelines with measured ones, statement by statement, on two ranks.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.timeline --out benchmarks/results/timeline
    torchrun --standalone --nproc-per-node 2 -m benchmarks.timeline --device cpu --out benchmarks/results/timeline_cpu
    python -m benchmarks.timeline --draw

The programs are in benchmarks/timeline_programs.json. `--draw` draws them anew from patterns, strategies and sizes, by
a seed: a third has kernels that wait for flags, and another third has sums or collectives beside a matmul.

A unit is a kernel, a copy or a collective of the plan. Times count from the beginning of the call. The error of a unit
is the difference between its predicted and its measured end, divided by its measured duration. A program ends with its
last unit; the kernel that may reset flags after it is no unit. Each program is measured twice. An error below the
difference between the two counts as none. Only units of at least 20 us count. The time that a kernel waits for flags is
listed apart.

On GPUs, the device first computes matmuls, so that the host runs ahead and the clock is that of a busy GPU. The ranks
begin together. torch.profiler gives the times of kernels and copies: events on streams would keep kernels from
overlapping. The constants of the cost model are those of the GPU, scaled by a calibration at the start. In it, a matmul
runs as the programs do, because the clock depends on what ran before. No constant is fitted to these programs.

On CPUs, kernels, copies and collectives sleep for known times (benchmarks/sleeping.py), and nothing is computed. Units
of at least 2 % of a call count. Sizes are an eighth. Programs of `push` are left out: SMs copy there, and CPUs have no
SMs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import hostir as hi
from benchmarks.harness import Clock, table, write
from benchmarks.sleeping import KERNELS, SLEEPING, sleeping
from examples import patterns
from hostir.call.executor import Executor
from hostir.choice import calibration
from hostir.choice.measure import random_parts
from hostir.choice.platforms import Platform, platform_here, reference
from hostir.choice.timeline import RESET, PredictedSpan, predict
from hostir.ir.program import Program
from hostir.job.session import Session, session
from hostir.machines.cuda.ranges import range_name
from hostir.machines.trace import Trace
from hostir.plan.operations import CollectiveOp, ComputeOp, Op
from hostir.plan.unroll import unroll

TITLE = "Predicted timelines, compared with measured ones"
PROGRAMS = Path(__file__).with_name("timeline_programs.json")
SEED, COUNT = 44, 30
PATTERNS = ("allgather_matmul_rows", "column_parallel", "gate_up", "row_parallel", "row_parallel_scattered", "mlp")
WAYS = (
    ("sequential", 1),
    ("pipeline", 2),
    ("pipeline", 4),
    ("ring", 1),
    ("fused", 1),
    ("fused", 2),
    ("push", 1),
)
SIZES = {"M": (1024, 2048, 4096, 8192), "K": (2048, 4096, 8192), "N": (2048, 4096, 7168), "H": (4096, 8192)}
SHORTEST = 20.0  # microseconds of a unit that counts, on GPUs
SHARE = 0.02  # of a call that a unit must take to count, on CPUs
RUNS = {"cpu": 1, "cuda": 20}
SECONDS = 8.0  # of a call that sleeps
AHEAD = 150  # matmuls, of 0.2 ms each, that a GPU computes while the host issues a call
EDGE = 4096  # rows, columns and inner extent of these matmuls
MATMUL = "matmul on a busy GPU"  # of the calibration
BEGIN = "the call begins"  # the range of the barrier before a call
Key = tuple[str, tuple[int, ...], int]  # the text of a unit, its rounds, and its number among equal ones
Times = dict[Key, tuple[float, float]]  # microseconds from the beginning of the call: begin and end


# Programs -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A program to predict and to measure: a pattern, its sizes, and the way in which it is lowered and computed."""

    pattern: str
    sizes: Mapping[str, int]
    strategy: str
    streams: int
    kernels: str

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.pattern} {sizes} {self.strategy}/{self.streams} {self.kernels}"

    def program(self, smaller: int = 1) -> Program:
        """Return the host program for two ranks; with sizes divided by `smaller`, except for the number of slices."""
        sizes = {name: size if name == "S" else size // smaller for name, size in self.sizes.items()}
        fusion = getattr(patterns, self.pattern)(ranks=2, dtype="bf16", **sizes)
        return hi.lower(fusion, self.strategy, self.streams)


def drawn(seed: int = SEED, count: int = COUNT) -> list[Case]:
    """Draw programs: a third with kernels that wait, a third with sums or collectives beside matmuls, and others."""
    random, cases = Random(seed), list[Case]()
    for wanted in (waits, beside, lambda case: True):
        kept: list[Case] = []
        while len(kept) < count // 3:
            case = _draw(random)
            if case not in (*cases, *kept) and wanted(case):
                kept.append(case)
        cases += kept
    return cases


def _draw(random: Random) -> Case:
    pattern, (strategy, streams) = random.choice(PATTERNS), random.choice(WAYS)
    known = getattr(patterns, pattern).__code__.co_varnames
    sizes = {name: random.choice(values) for name, values in SIZES.items() if name in known}
    slices = random.choice((2, 4)) if strategy == "pipeline" else 1
    return Case(pattern, {"S": slices, **sizes}, strategy, streams, random.choice(("cublas", "triton")))


def waits(case: Case) -> bool:
    """Return True if a program has kernels that wait for flags."""
    in_one_kernel = (op for op in _ops(case) if case.kernels == "triton" or op.computation == "sum")
    return any(op.ready is not None for op in in_one_kernel)


def beside(case: Case) -> bool:
    """Return True if a program has sums or collectives that run beside a matmul."""
    program = case.program(smaller=8)
    ops = unroll(program, 0, {}).ops
    shared = any(isinstance(op, CollectiveOp) or _computes(op, "sum") for op in ops)
    return program.streams > 0 and shared and any(_computes(op, "matmul", "linear") for op in ops)


def _ops(case: Case) -> Iterator[ComputeOp]:
    return (op for op in unroll(case.program(smaller=8), 0, {}).ops if isinstance(op, ComputeOp))


def _computes(op: Op, *computations: str) -> bool:
    return isinstance(op, ComputeOp) and op.computation in computations


def committed() -> list[Case]:
    """Return the programs of the committed list."""
    return [Case(**row) for row in json.loads(PROGRAMS.read_text())]


# Times ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Unit:
    """A kernel, a copy or a collective, with its predicted and its measured times in microseconds.

    Fields:
        statement: its text and its rounds.
        begin, end: the predicted times from the beginning of the call.
        waited: the predicted part of this time in which it waits for flags or for other ranks.
        measured: the measured begin and end.
        noise: the difference between two measurements of the end.
        kernel_waits: True if a kernel waits for flags.
    """

    statement: str
    begin: float
    end: float
    waited: float
    measured: tuple[float, float]
    noise: float
    kernel_waits: bool

    @property
    def duration(self) -> float:
        return self.measured[1] - self.measured[0]

    @property
    def error(self) -> float:
        """The error of the end, relative to the measured duration; 0 if it is not larger than the noise."""
        off = abs(self.end - self.measured[1])
        return 0.0 if off <= self.noise else off / self.duration


def keyed(spans: Iterable[tuple[str, tuple[int, ...], float, float]]) -> Times:
    """Return the times of units by their keys. The spans are in the order in which they begin."""
    times: Times = {}
    count: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for text, rounds, begin, end in spans:
        times[text, rounds, count[text, rounds]] = begin, end
        count[text, rounds] += 1
    return times


def middle(runs: Sequence[Times]) -> Times:
    """Return the median of the times of several runs, of the units that all runs have."""
    common = [key for key in runs[0] if all(key in run for run in runs)]
    return {key: (median(r[key][0] for r in runs), median(r[key][1] for r in runs)) for key in common}


def merged(times: Times) -> Times:
    """Return the times of units, with the copies of one kernel that copies on SMs as one unit."""
    kept: Times = {}
    for (text, rounds, number), (begin, end) in times.items():
        key = (text, rounds, number) if " sms" not in text else (text, (), 0)
        first, last = kept.get(key, (begin, end))
        kept[key] = min(first, begin), max(last, end)
    return kept


class Bench:
    """Predicts and measures programs on this rank."""

    def __init__(self, job: Session, runs: int) -> None:
        self.job, self.runs = job, runs
        self.on_gpu = job.device.type == "cuda"
        self.clock = Clock(job.device) if self.on_gpu else None
        self.ahead = torch.randn(2, EDGE, EDGE, device=job.device).bfloat16() if self.on_gpu else torch.empty(0)
        self.calibration = dict[str, float]()
        self.platform = self.calibrated() if self.on_gpu else reference(SLEEPING, job.size)

    def calibrated(self) -> Platform:
        """Return the platform with constants that are scaled by a calibration now."""
        platform = platform_here("cuda", self.job.size)
        self.calibration = calibration.measure(self.job) | {MATMUL: self.matmul()}
        known = platform.hardware.name in platform.name.lower()
        hardware = calibration.scaled(platform.hardware, self.calibration, "cuda", self.job.size, known=known)
        estimate = calibration.estimates_of(hardware, "cuda", self.job.size)["matmul"]
        faster = estimate / self.calibration[MATMUL]
        kernels = {name: replace(k, rates=k.rates.scaled(faster)) for name, k in hardware.kernels.items()}
        hardware = replace(hardware, kernels=kernels)
        return replace(platform, hardware=hardware)

    def matmul(self) -> float:
        """Return the microseconds of the matmul of the calibration if it runs as the programs do."""
        program = calibration.programs("cuda", self.job.size)["matmul"]
        executor, inputs = Executor(program, kernels="aten", graphs=False), random_parts(program, {}, 0, self.job)
        mine = median([self.once(executor, inputs)() for _ in range(self.runs + WARM)][WARM:])
        return max(float(text) for text in self.job.exchange("matmul", repr(mine), 600.0))

    def compare(self, case: Case) -> dict[str, Any]:
        """Predict and measure one program; return its figures, the same on all ranks."""
        program = case.program() if self.on_gpu else case.program(smaller=8)
        kernels = case.kernels if self.on_gpu else KERNELS
        predicted = predict(program, {}, self.platform, kernels)
        slower = 1.0 if self.on_gpu else SECONDS * 1e6 / predicted.us
        first, second = self.measure(program, kernels, slower)
        shortest = SHORTEST if self.on_gpu else SHARE * predicted.us
        mine = [span for span in predicted.spans if span.rank == self.job.rank]
        waited = dict(zip(keyed(map(_times, mine)), (s.waited for s in mine), strict=True))
        spans = merged(keyed(map(_times, mine)))
        units = [
            Unit(
                _text(key), *spans[key], waited.get(key, 0.0), times, abs(times[1] - second.times[key][1]), _polls(key)
            )
            for key, times in first.times.items()
            if key in spans and times[1] - times[0] >= shortest
        ]
        found = {
            "units": [asdict(unit) | {"error": unit.error} for unit in units],
            "missing": [_text(key) for key in first.times.keys() - spans.keys()],
            "us": first.us,
            "untraced_us": first.untraced_us,
        }
        ranks = [json.loads(text) for text in self.job.exchange("timeline", json.dumps(found), 600.0)]
        return {
            "case": str(case),
            "predicted_us": max(span.end for span in predicted.spans if span.statement != RESET),
            "us": max(rank["us"] for rank in ranks),
            "untraced_us": max(rank["untraced_us"] for rank in ranks),
            "missing": [text for rank in ranks for text in rank["missing"]],
            "units": [unit for rank in ranks for unit in rank["units"]],
        }

    def measure(self, program: Program, kernels: str, slower: float) -> tuple[Measured, Measured]:
        """Measure a program twice. `slower` is the factor by which operations sleep longer than they are predicted."""
        if self.on_gpu:
            return self.on_cuda(program, kernels), self.on_cuda(program, kernels)
        with sleeping(slower):
            trace = Trace()
            executor, inputs = Executor(program, kernels="aten", trace=trace), random_parts(program, {}, 0, self.job)
            executor.prepare(inputs, None)
            return self.sleep(executor, inputs, trace, slower), self.sleep(executor, inputs, trace, slower)

    def sleep(self, executor: Executor, inputs: Sequence[Any], trace: Trace, slower: float) -> Measured:
        """Measure one call that sleeps. All ranks begin it at the same time."""
        soon = [float(text) for text in self.job.exchange("begin", repr(time.time() + 0.1))]
        trace.events.clear()
        begin = max(soon)
        time.sleep(begin - time.time())
        executor(*inputs)
        us = (time.time() - begin) * 1e6 / slower
        events = sorted(trace.events, key=lambda e: e.start)
        scale = 1e6 / slower
        spans = ((e.statement, e.rounds, (e.start - begin) * scale, (e.end - begin) * scale) for e in events)
        return Measured(keyed(spans), us, us)

    def on_cuda(self, program: Program, kernels: str) -> Measured:
        """Measure calls on a GPU, in a profile and without."""
        executor, inputs = Executor(program, kernels=kernels, graphs=False), random_parts(program, {}, 0, self.job)
        times = [self.once(executor, inputs)() for _ in range(self.runs + WARM)]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
            for _ in range(self.runs + WARM):
                self.once(executor, inputs)
        calls = self.calls(executor, watched.profiler.kineto_results.events())
        return Measured(middle([units for units, _ in calls]), median(us for _, us in calls), median(times[WARM:]))

    def once(self, executor: Executor, inputs: Sequence[Any]) -> Callable[[], float]:
        """Call a program while the GPU is still busy; return a function that returns the microseconds of the call."""
        assert self.clock is not None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(AHEAD):
            torch.mm(*self.ahead)
        self.clock.flush.zero_()
        with record_function(BEGIN):
            self.clock.line.barrier(channel=7)
        begin.record()
        executor(*inputs)
        end.record()
        torch.cuda.synchronize()
        return lambda: begin.elapsed_time(end) * 1e3

    def calls(self, executor: Executor, events: Iterable[Any]) -> list[tuple[Times, float]]:
        """Return the times of the units of each call in a profile, and the microseconds of the call.

        The kernels of collectives are in ranges of torch's own. They run in the order in which the plan issues them.
        """
        assert executor.latest is not None
        plan: Any = executor.latest.plan
        units = {range_name(plan.unrolled, op): (plan.unrolled.text(op), op.place.rounds) for op in plan.ops}
        on_device = [event for event in events if event.device_type().name == "CUDA"]
        ranges, by_nccl = (
            sorted((event.start_ns() / 1e3, event.end_ns() / 1e3, event.name()) for event in on_device if wanted(event))
            for wanted in (lambda e: e.name() == BEGIN or e.name() in units, lambda e: e.name().startswith("ncclDev"))
        )
        collectives = [range_name(plan.unrolled, op) for op in plan.ops if isinstance(op, CollectiveOp) and op.by_group]
        begins = [end for _, end, name in ranges if name == BEGIN]
        if len(begins) != self.runs + WARM:
            sys.exit(f"the profile has {len(begins)} of {self.runs + WARM} calls")
        found = []
        for begin, until in pairwise([*begins, inf]):
            mine, of_nccl = ([each for each in kernels if begin <= each[0] < until] for kernels in (ranges, by_nccl))
            named = [each for each in mine if each[2] != BEGIN]
            if len(of_nccl) == len(collectives):
                named += [(b, e, name) for (b, e, _), name in zip(of_nccl, collectives, strict=True)]
            times = keyed((*units[name], b - begin, e - begin) for b, e, name in sorted(named))
            found.append((merged(times), max((end for _, end in times.values()), default=0.0)))
        return found[WARM:]


WARM = 4


@dataclass(frozen=True)
class Measured:
    """The times of the units of a program on this rank, and of the program in a profile and without."""

    times: Times
    us: float
    untraced_us: float


def _times(span: PredictedSpan) -> tuple[str, tuple[int, ...], float, float]:
    return span.statement, span.rounds, span.begin, span.end


def _polls(key: Key) -> bool:
    """Return True if a unit is a kernel that waits for flags."""
    return " ready %" in key[0]


def _text(key: Key) -> str:
    text, rounds, number = key
    return f"{text} {list(rounds)}{f' #{number}' * bool(number)}"


# The report -----------------------------------------------------------------------------------------------------------
def within(errors: Sequence[float], limit: float) -> str:
    """Return the share of errors within a limit, as text."""
    return f"{100 * sum(error <= limit for error in errors) / len(errors):.0f}" if errors else "-"


def report(results: list[dict[str, Any]]) -> str:
    """Return tables: all units, each program, and the kernels that wait."""
    rows = []
    for r in results:
        errors = [unit["error"] for unit in r["units"]]
        rows.append(
            [
                r["case"],
                str(len(errors)),
                *(within(errors, limit) for limit in (0.05, 0.1, 0.15)),
                f"{100 * median(errors):.1f}" if errors else "-",
                f"{100 * max(errors):.1f}" if errors else "-",
                f"{r['predicted_us']:.0f}",
                f"{r['us']:.0f}",
                f"{100 * abs(r['predicted_us'] / r['us'] - 1):.1f}",
                f"{100 * (r['us'] / r['untraced_us'] - 1):.1f}",
            ]
        )
    errors = [unit["error"] for r in results for unit in r["units"]]
    programs = [abs(r["predicted_us"] / r["us"] - 1) for r in results]
    figures = {"units": (errors, (0.05, 0.1, 0.15)), "programs": (programs, (0.05, 0.08, 0.15))}
    summary = [
        [name, str(len(each)), *(within(each, limit) for limit in limits), f"{100 * median(each):.1f}" if each else "-"]
        for name, (each, limits) in figures.items()
    ]
    waiting = [_waiting(r["case"], unit) for r in results for unit in r["units"] if unit["kernel_waits"]]
    heads = ["program", "units", "within 5 %", "10 %", "15 %", "median %", "worst %"]
    text = table(["", "number", "within 5 %", "10 % (programs: 8 %)", "15 %", "median %"], summary)
    text += "\n\n" + table([*heads, "predicted us", "measured us", "off %", "profile costs %"], rows)
    if waiting:
        heads = ["program", "kernel", "waits us, predicted", "measured", "us in all, predicted", "measured"]
        text += (
            f"\n\nKernels that wait for flags. The rest of their time counts as predicted.\n\n{table(heads, waiting)}"
        )
    return text


def _waiting(case: str, unit: Mapping[str, Any]) -> list[str]:
    """Return the row of a kernel that waits for flags."""
    predicted, measured = unit["end"] - unit["begin"], unit["measured"][1] - unit["measured"][0]
    waits = (unit["waited"], max(measured - predicted + unit["waited"], 0.0))
    return [case, unit["statement"], *(f"{us:.0f}" for us in (*waits, predicted, measured))]


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help=f"write {PROGRAMS.name}, and measure nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    parser.add_argument("--first", type=int, default=COUNT, help="measure this many programs (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="measure every n-th program (default: %(default)s)")
    parser.add_argument("--runs", type=int, help="timed calls of each measurement (default: 20, on a CPU 1)")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure the programs, print a line for each, and write the tables and the figures on rank 0."""
    options = parse_options()
    if options.draw:
        PROGRAMS.write_text(json.dumps([asdict(case) for case in drawn()], indent=1) + "\n")
        return
    results: list[dict[str, Any]] = []
    with session(options.device) as job, torch.no_grad():
        if job is None or job.size != 2:
            sys.exit("start it with torchrun, two processes, on GPUs with a GPU each")
        bench = Bench(job, options.runs or RUNS[options.device])
        for case in committed()[:: options.every][: options.first]:
            if options.device == "cpu" and case.strategy == "push":
                continue
            results.append(bench.compare(case))
            if job.rank == 0:
                r, errors = results[-1], [unit["error"] for unit in results[-1]["units"]]
                worst = f"worst error {100 * max(errors):.1f} %" if errors else "no unit counts"
                print(f"{case}: {r['predicted_us']:.0f} predicted, {r['us']:.0f} measured, {worst}", flush=True)
                if options.out:
                    write(options.out, TITLE, report(results), {"calibration": bench.calibration, "rows": results})
        dist.barrier()
        if job.rank == 0:
            print(report(results))


if __name__ == "__main__":
    main()
