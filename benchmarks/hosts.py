"""Compare `hierarchical` with other programs on two hosts, where kernels and transfers sleep for known times.

    python -m benchmarks.hosts --out benchmarks/results/hosts

The hosts are namespaces of this machine (tests/two_hosts.py), with two ranks each. Ranks are CPU processes, streams are
threads, and gloo carries flags and meetings between hosts. Kernels, copies and collectives sleep for the times of the
cost model (benchmarks/sleeping.py), and nothing is computed.

The constants of a row are such that the hierarchical program needs a given time of each resource of a rank: the SMs
(kernels), the NIC (collectives between hosts) and the link inside the host (copies). At first the three are equal. Then
one of them is 20 % longer or shorter. The bound is the longest of the three: no order of the same kernels and transfers
is faster. With the same constants, a collective over all ranks is a ring. It takes the time of the NICs or of the
links, whichever is longer.

*all ranks* gathers all rows and then computes, or computes and then sums up all rows: strategy `sequential`. `pipeline`
and `hierarchical` run in the same number of slices.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import hostir as hi
from benchmarks.harness import table, write
from benchmarks.sleeping import KERNELS, SLEEPING, sleeping
from examples import patterns
from hostir.call.executor import Executor
from hostir.choice.cost import CostCopy, CostTransfer, tasks_of
from hostir.choice.hardware import Hardware, Kernels
from hostir.choice.measure import random_parts
from hostir.choice.platforms import Platform, reference
from hostir.choice.simulation import Costs
from hostir.ir.program import Program, with_hosts
from hostir.job.session import Session, session
from hostir.kernels.matmul.estimate import Rates
from hostir.kernels.matmul.tiles import Gemm, Tile
from tests import two_hosts

TITLE = "Programs for two hosts, with kernels and transfers that sleep"
HOSTS, IN_HOST = 2, 2
RANKS = HOSTS * IN_HOST
STRATEGIES = ("sequential", "pipeline", "hierarchical")
PATTERNS: Mapping[str, Callable[..., hi.Fusion]] = {
    "all-gather + matmul": patterns.allgather_matmul,
    "matmul + reduce-scatter": patterns.row_parallel_scattered,
    "matmul + all-reduce": patterns.row_parallel,
    "MLP": patterns.mlp,
}
UNIT = 1e6  # microseconds of a resource, before it is made longer or shorter
MUST, GOAL = 1.2, 1.5
START = 180.0  # seconds for all processes to start and to end


# Times ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Needs:
    """The time that a rank needs of each resource, as a multiple of `UNIT`."""

    kernel: float = 1.0
    outer: float = 1.0
    inner: float = 1.0

    def __str__(self) -> str:
        return f"{self.kernel:.1f}, {self.outer:.1f}, {self.inner:.1f}"

    @property
    def bound(self) -> float:
        """The time of a program that keeps the busiest resource busy from the beginning to the end."""
        return max(self.kernel, self.outer, self.inner)

    @staticmethod
    def every() -> list[Needs]:
        """Return equal times, and all times of which one is 20 % longer or shorter."""
        changed = [{name: factor} for name in ("kernel", "outer", "inner") for factor in (0.8, 1.2)]
        return [Needs(), *(Needs(**each) for each in changed)]


@cache
def lowered(pattern: Callable[..., hi.Fusion], strategy: str, slices: int) -> Program:
    """Return the host program of a pattern for the two hosts."""
    fusion = with_hosts(pattern(ranks=RANKS, S=slices, M=512).program(), HOSTS)
    return hi.lower(fusion, strategy, slices)


def on_hosts(hardware: Hardware) -> Platform:
    return reference(hardware, RANKS, HOSTS)


def needed(program: Program, hardware: Hardware) -> Needs:
    """Return the times that rank 0 needs of each resource, if it runs one statement after another."""
    costs, times = Costs(hardware, KERNELS, 0.0), {Gemm: 0.0, CostTransfer: 0.0, CostCopy: 0.0}
    for task in tasks_of(program, {}, on_hosts(hardware).hosts):
        if task.rank == 0 and type(task.work) in times:
            times[type(task.work)] += costs.alone(task) / UNIT
    return Needs(*times.values())


def hardware_for(program: Program, needs: Needs) -> Hardware:
    """Return constants with which a hierarchical program needs given times."""
    rates = 1.0, 1.0, 1e-3  # a NIC counts only if it is slower than the links
    now = needed(program, machine(*rates))
    factors = now.kernel / needs.kernel, now.inner / needs.inner, now.outer / needs.outer
    return machine(*(rate * factor for rate, factor in zip(rates, factors, strict=True)))


def machine(flops: float, link: float, nic: float) -> Hardware:
    """Return constants without fixed times. Kernels that only move bytes take no time.

    Args:
        flops: the TFLOP/s of a GPU.
        link: the GB/s of a link inside a host.
        nic: the GB/s of the NIC of each GPU.
    """
    shares = {"allgather": RANKS - 1, "reduce_scatter": RANKS - 1, "allreduce": 2 * (RANKS - 1)}
    kernels = {
        name: Kernels(dict.fromkeys(family.tiles, (Tile(1, 1, 1),)), Rates(dict.fromkeys(family.tiles, flops)), 0.0, {})
        for name, family in SLEEPING.kernels.items()
    }
    return replace(
        SLEEPING,
        kernels=kernels,
        memory=1e12,
        collective=0.0,
        low_latency=0.0,
        rates={name: link * (share + 0.5) / share for name, share in shares.items()},  # without the bytes that it keeps
        copy=0.0,
        link=link,
        nic=nic,
        nic_latency=0.0,
    )


# On the ranks ---------------------------------------------------------------------------------------------------------
def measured(job: Session, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the chosen rows; yield the figures of each row, the same on all ranks."""
    seconds = options.seconds
    for name, needs in chosen(options):
        programs = {strategy: lowered(PATTERNS[name], strategy, options.slices) for strategy in STRATEGIES}
        hardware, times = hardware_for(programs["hierarchical"], needs), dict[str, float]()
        for strategy, program in programs.items():
            with sleeping(seconds * 1e6 / UNIT, hardware, job.hosts()):
                executor, inputs = Executor(program, kernels="aten"), random_parts(program, {}, 0, job)
                executor.prepare(inputs, None)
                times[strategy] = timed(job, lambda executor=executor, inputs=inputs: executor(*inputs)) / seconds
        yield {"pattern": name, "needs": vars(needs), "bound": needs.bound, "times": times}


def timed(job: Session, call: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks begin together, on the rank where it takes longest."""
    begin = max(float(text) for text in job.exchange("begin", repr(time.time() + 0.1)))
    time.sleep(max(begin - time.time(), 0.0))
    call()
    return max(float(text) for text in job.exchange("end", repr(time.time() - begin)))


def on_rank(options: argparse.Namespace) -> None:
    """Measure the rows on this rank. Rank 0 prints a line for each."""
    with session("cpu") as job:
        assert job is not None
        for row in measured(job, options):
            if job.rank == 0:
                print(json.dumps(row), flush=True)


# The report -----------------------------------------------------------------------------------------------------------
def gains(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return how much faster `hierarchical` is than the collective over all ranks, and than `pipeline`."""
    ours, *others = (row["times"][strategy] for strategy in reversed(STRATEGIES))
    return others[1] / ours, others[0] / ours


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table of all rows, and a sentence on the goals."""
    lines = [
        [
            row["pattern"],
            str(Needs(**row["needs"])),
            *(f"{time:.2f}" for time in (row["bound"], *(row["times"][strategy] for strategy in STRATEGIES))),
            *(f"{gain:.2f} x" for gain in gains(row)),
        ]
        for row in rows
    ]
    heads = ["pattern", "kernel, outer, inner", "bound", "all ranks", "pipeline", "hierarchical"]
    each = [gain for row in rows for gain in gains(row)]
    reached = [f"at least {limit} x in {sum(gain >= limit for gain in each)} of {len(each)}" for limit in (MUST, GOAL)]
    text = table([*heads, "against all ranks", "against pipeline"], lines)
    return f"{text}\n\nGains: {', '.join(reached)}; the smallest is {min(each):.2f} x."


def chosen(options: argparse.Namespace) -> list[tuple[str, Needs]]:
    """Return the rows that the options choose."""
    every = Needs.every()[: 1 if options.equal else None]
    return [(name, needs) for name in options.patterns or PATTERNS for needs in every]


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--patterns", nargs="+", choices=PATTERNS, metavar="PATTERN", help=f"of {', '.join(PATTERNS)}; by default all"
    )
    parser.add_argument("--equal", action="store_true", help="only equal times of kernels and transfers")
    parser.add_argument("--slices", type=int, default=16, help="of pipeline and hierarchical (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each resource (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Make two hosts and run this benchmark on their ranks; print the table, and write it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_options(arguments)
    if "RANK" in os.environ:
        on_rank(options)
        return
    if reason := two_hosts.why_not():
        sys.exit(f"this machine cannot have two hosts: {reason}")
    rows = len(chosen(options))
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        timeout = START + 20 * options.seconds * rows + 5 * rows
        job = two_hosts.run(IN_HOST, "-m", "benchmarks.hosts", *arguments, env=env, timeout=timeout)
    if job.returncode:
        sys.exit(f"a rank failed:\n{job.stderr}")
    results = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    print(text := f"{options.slices} slices.\n\n{report(results)}")
    if options.out:
        write(options.out, TITLE, text, {"slices": options.slices, "seconds": options.seconds, "rows": results})


if __name__ == "__main__":
    main()
