"""Run `hostir tune`: measure all candidates on the ranks of this job, and cache the times for later choices."""

from __future__ import annotations

import contextlib
import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hostir.choice import cache, calibration
from hostir.choice.candidates import SEQUENTIAL, candidates_of
from hostir.choice.choices import Choice
from hostir.choice.decision import Decider, check_ranks, check_sizes, decide
from hostir.choice.measure import PATIENCE, Progress, measure, steps
from hostir.choice.platforms import platform_here
from hostir.choice.ranges import Ranges, free_sizes
from hostir.cli.explain import table, time_text
from hostir.cli.loading import load_named
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.job.session import Session, launched, session
from hostir.knobs import KERNELS
from hostir.lower.strategies import fusion_of

Begin = Callable[[str, int], Progress]  # called with the label of a case and its number of steps


@dataclass(frozen=True)
class Case:
    """A fusion and the sizes at which it is measured. `label` describes the case in tables and progress bars."""

    label: str
    fusion: Program
    sizes: Mapping[str, int]


def check_started(command: str) -> None:
    """Raise HostIRError if torchrun did not start this process, because then there are no ranks to measure.

    `command` is the file argument of `hostir tune`. The hint shows it.
    """
    if not launched():
        raise error(
            "'hostir tune' measures real ranks, and this process is the only one",
            expected="to be started by torchrun, one process a GPU",
            hint=f"torchrun --nproc-per-node 8 -m hostir tune {command}",
        )


def tune_command(cases: Sequence[Case], options: Namespace) -> int:
    """Measure the cases that the cache lacks, and print the fastest candidate of each case; return the exit code."""
    if options.runs is not None and options.runs < 1:
        raise error(f"--runs {options.runs}", expected="at least 1")
    for case in cases:
        if len(free_sizes(fusion_of(case.fusion), case.sizes)) != 1:
            check_sizes(fusion_of(case.fusion), dict(case.sizes))
    with session(options.device) as job:
        assert job is not None
        cases = [bound for case in cases for bound in _bound(case, job, options)]
        with _progress(job) as begin:
            rows = [_tune(case, job, options, begin) for case in cases]
        if job.rank == 0:
            print(table(["sizes", "strategy", "streams", "kernels", "us", "sequential us", "times"], rows))
            print(f"kept in {cache.folder()}")
    return 0


def _bound(case: Case, job: Session, options: Namespace) -> list[Case]:
    """Return cases in which every size has a value.

    If the case has a free size, return one case for each value of this size at which `hi.compile` chooses a strategy.
    If no size is free, return only the case itself.
    """
    if not free_sizes(case.fusion, case.sizes):
        return [case]
    platform = platform_here("cuda" if job.device.type == "cuda" else "gloo", job.size)
    check_ranks(case.fusion, platform)
    ranges = Ranges(Decider(case.fusion, platform, KERNELS.get(options.kernels)), case.sizes)
    for sizes in ranges.representatives:
        check_sizes(case.fusion, sizes)
    (name,) = ranges.free
    return [Case(f"{case.label} {name}={sizes[name]}".strip(), case.fusion, sizes) for sizes in ranges.representatives]


def _tune(case: Case, job: Session, options: Namespace, begin: Begin) -> list[str]:
    """Measure a case, unless all its candidates are in the cache.

    Rank 0 returns the case's row of the table. All other ranks return an empty list.
    """
    kernels = KERNELS.get(options.kernels)
    platform = platform_here("cuda" if job.device.type == "cuda" else "gloo", job.size)
    check_ranks(case.fusion, platform)
    key = cache.key_of(case.fusion, case.sizes, platform)
    programs = candidates_of(case.fusion, platform, kernels, for_testing=True).programs
    cached = {} if options.again else cache.read(key)
    missing = any(c not in cached or cached[c].digest != p.digest for c, p in programs.items())
    measures = _from_rank_0(job, "measure" if missing else "") == "measure"
    if measures:
        progress = begin(case.label, steps(len(programs)))
        entries = measure(programs, case.sizes, job, runs=options.runs, progress=progress)
        _on_rank_0(job, lambda: cache.write(key, case.fusion.name, entries))
    if job.rank:
        return []
    choice = decide(case.fusion, platform, case.sizes, kernels)
    return _measured_row(case, choice, "measured now" if measures else "in the cache")


def _measured_row(case: Case, choice: Choice, when: str) -> list[str]:
    """Return the row of the table for a case.

    It shows the fastest candidate, its time, the time of the sequential strategy, and the text `when`, which says when
    these times were measured.
    """
    sequential = next((f"{t.us:.1f}" for t in choice.timings if t.candidate.strategy == SEQUENTIAL), "-")
    streams = str(choice.streams) if choice.streams > 1 else "-"
    return [case.label, choice.strategy, streams, choice.kernels, f"{choice.timings[0].us:.1f}", sequential, when]


def _on_rank_0(job: Session, write: Callable[[], object]) -> None:
    """Call `write` on rank 0. All ranks call this together. If `write` raises HostIRError, all ranks raise it."""
    problem = ""
    if job.rank == 0:
        try:
            write()
        except HostIRError as refusal:
            problem = refusal.diagnostics[0].message
    if problem := _from_rank_0(job, problem):
        raise error(problem, hint="HOSTIR_CACHE names another folder")


def _from_rank_0(job: Session, text: str) -> str:
    """Send a text from rank 0 to all ranks, and return it. All ranks call it together; only rank 0's `text` is used."""
    return job.exchange("tuning", text, PATIENCE)[0]


@contextlib.contextmanager
def _progress(job: Session) -> Iterator[Begin]:
    """Yield a function that begins a progress bar for a case.

    Only rank 0 shows progress bars, and only if stderr is a terminal.
    """
    if job.rank or not sys.stderr.isatty():
        yield lambda label, total: lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:

        def begin(label: str, total: int) -> Progress:
            task = bar.add_task(label, total=total)

            def step(description: str) -> None:
                bar.update(task, advance=1, description=f"{label}: {description}")

            return step

        yield begin


def calibrate_command(options: Namespace) -> int:
    """Time the experiments of the calibration, keep their times, and print them; return the exit code."""
    with session(options.device) as job:
        assert job is not None
        times = calibration.measure(job)
        before = platform_here("cuda" if job.device.type == "cuda" else "gloo", job.size)
        _on_rank_0(job, lambda: calibration.write(before.name, times, job.size))
        after = platform_here("cuda" if job.device.type == "cuda" else "gloo", job.size)
        if job.rank == 0:
            estimates = calibration.estimates_of(after.hardware, job.device.type, job.size)
            rows = [[name, time_text(us), time_text(estimates.get(name))] for name, us in times.items()]
            print(table(["program", "us", "estimated us"], rows))
            print(f"kept in {cache.folder()}")
    return 0


def main(options: Namespace) -> int:
    """Run `hostir tune`; return its exit code."""
    check_started(options.file or "--calibrate")
    if options.calibrate:
        code = calibrate_command(options)
        if not options.file:
            return code
    if not options.file:
        raise error("the following arguments are required: FILE[:NAME]", hint="hostir tune --help")
    cases = []
    for assignments in _combinations(options.assignments):
        options.assignments = list(assignments)
        program, sizes = load_named(options)
        cases.append(Case(" ".join(assignments) or program.name, program, sizes))
    return tune_command(cases, options)


def _combinations(assignments: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return every combination of the values of `--set NAME=VALUE,VALUE,...`, as tuples of `NAME=VALUE` texts."""
    alternatives = []
    for assignment in assignments:
        name, equals, values = assignment.partition("=")
        alternatives.append([f"{name}{equals}{value}" for value in values.split(",")])
    return itertools.product(*alternatives)
