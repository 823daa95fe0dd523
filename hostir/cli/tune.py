"""Run `hostir tune` and `hostir explain`, and choose for `--strategy auto`."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostir.choice import cache
from hostir.choice.candidates import SEQUENTIAL, candidates_of
from hostir.choice.choices import Choice, Timing
from hostir.choice.decision import Decider, check_ranks, check_sizes, choose, decide
from hostir.choice.hardware import REFERENCE, parse_machine
from hostir.choice.measure import PATIENCE, Progress, measure, steps
from hostir.choice.overlaps import overlap_clauses
from hostir.choice.platforms import Platform, platform_here, reference
from hostir.choice.ranges import Range, Ranges, free_sizes
from hostir.cli.loading import load_named
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, amount, error, is_first_rank
from hostir.knobs import KERNELS, SYMMETRIC_LIMIT
from hostir.lower.strategies import fusion_of
from hostir.runtime.session import Session, joined, launched, session
from hostir.runtime.unroll import unroll

# Tables ---------------------------------------------------------------------------------------------------------------
# Choices as aligned tables of plain text.


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as they need to be; numbers are aligned right."""
    widths = [max(len(line[i]) for line in (headers, *rows)) for i in range(len(headers))]
    return "\n".join(_line(line, widths) for line in (headers, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(w) if _number(cell) else cell.ljust(w) for cell, w in zip(cells, widths, strict=True)]
    return ("  " + "  ".join(padded)).rstrip()


def _number(cell: str) -> bool:
    return (
        cell.replace(".", "").isdecimal()
        or cell == "-"
        or cell.endswith(("us", "%", " by", "streams", "bytes", "iB", "symmetric"))
    )


def describe(choice: Choice) -> str:
    """Return a choice in full: what was taken, the times of the candidates, and why others were not possible."""
    parts = [f"{choice}"]
    if choice.timings:
        parts += ["", _times(choice)]
    if choice.impossible:
        rows = [[it.candidate.strategy, it.candidate.kernels, it.reason] for it in choice.impossible]
        parts += ["", "not possible:", *(_line(row, _widths(rows)) for row in rows)]
    if choice.notes:
        parts += ["", *(f"note: {note}" for note in choice.notes)]
    return "\n".join(parts)


def describe_ranges(ranges: Ranges) -> str:
    """Return in full which candidate runs at which sizes, and how long it takes at one of them."""
    if len(ranges.free) > 1:
        return f"{ranges}\n\nbind all of them but one to see its ranges: --set {ranges.free[0]}=..."
    (name,) = ranges.free
    rows = [[str(it.first), "-" if it.last is None else str(it.last), *_of_range(ranges, it)] for it in ranges.ranges]
    headers = [f"{name} from", "to", "strategy", "streams", "kernels", "times", f"at {name}=", "us", "symmetric"]
    notes = dict.fromkeys(note for it in ranges.ranges for note in (*it.choice.fallbacks, *it.choice.notes))
    said = "".join(f"\nnote: {note}" for note in notes)
    return f"{str(ranges).splitlines()[0]}\n\n{table(headers, rows)}" + (f"\n{said}" if said else "")


def _of_range(ranges: Ranges, it: Range) -> list[str]:
    choice, (name,) = it.choice, ranges.free
    streams = str(choice.streams) if choice.taken.shows_streams else "-"
    at = ranges.representative({name: it.first})[name]
    best = choice.timings[0]
    symmetric = amount(best.symmetric) if best.symmetric else "-"
    return [choice.strategy, streams, choice.kernels, choice.source, str(at), _us(best.us), symmetric]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]


def _times(choice: Choice) -> str:
    best = choice.timings[0].us
    headers = ["strategy", "streams", "kernels", "us", "slower by", "graph us", "eager us", "symmetric"]
    return table(headers, [_row(timing, best) for timing in choice.timings])


def _row(timing: Timing, best: float) -> list[str]:
    c = timing.candidate
    streams = str(c.streams) if c.shows_streams else "-"
    slower = f"{timing.us / best - 1:.0%}" if timing.us > best > 0 else "-"
    times = [_us(timing.us), slower, _us(timing.graph), _us(timing.eager)]
    return [c.strategy, streams, c.kernels, *times, amount(timing.symmetric) if timing.symmetric else "-"]


def _us(time: float | None) -> str:
    return "-" if time is None else f"{time:.1f}" if time < 100 else f"{time:.0f}"


# Explaining a choice --------------------------------------------------------------------------------------------------
# Choices on the command line: `hostir explain`, and `--strategy auto` of the other commands.


def explain_command(program: Program, sizes: Mapping[str, int], options: Namespace) -> int:
    """Print the choice for a fusion; return the exit code."""
    fusion = fusion_of(program)
    free = free_sizes(fusion, sizes)
    if not free:
        check_sizes(fusion, dict(sizes))
    if options.machine is not None and options.device is not None:
        raise error("--machine names another machine, and --device this one's", hint="leave one of them out")
    platform = platform_of(fusion, options.device, options.machine)
    check_ranks(fusion, platform)
    decider = Decider(fusion, platform, KERNELS.get(options.kernels), options.calls, SYMMETRIC_LIMIT.get())
    if not is_first_rank():
        return 0
    if free:
        ranges = Ranges(decider, sizes)
        check_sizes(fusion, ranges.representative(dict.fromkeys(free, 1)))
        print(json.dumps(ranges.to_json(), indent=1) if options.json else describe_ranges(ranges))
        return 0
    choice = decider.choice(sizes)
    if options.json:
        print(json.dumps(choice.to_json(), indent=1))
        return 0
    print(describe(choice))
    host = decider.program_of(choice.taken)
    clauses = overlap_clauses(unroll(host, host.meshes[0].devices[0], sizes))
    print("\n" + "\n".join(f"'{choice.taken}': {clause}" for clause in clauses))
    return 0


def chosen(fusion: Program, sizes: Mapping[str, int], options: Namespace) -> Choice:
    """Return the choice of `--strategy auto`: for `run` on the ranks that will run it, else as `explain` prints it.

    The caller prints fallbacks, so no warning is issued for them.
    """
    if options.command == "run":
        machine = {"cpu": "gloo", "cuda": "cuda", None: None}[options.device] if launched() else None
        return choose(fusion, sizes=sizes, kernels=options.kernels, machine=machine, warn=False)
    check_sizes(fusion, dict(sizes))
    platform = platform_of(fusion)
    check_ranks(fusion, platform)
    return Decider(fusion, platform, KERNELS.get(), limit=SYMMETRIC_LIMIT.get()).choice(sizes)


def platform_of(fusion: Program, device: str | None = None, machine: str | None = None) -> Platform:
    """Return the parse_machine machine; else this one, if it has the GPUs or was asked for; else a known one."""
    if machine is not None:
        hardware, ranks = parse_machine(machine)
        return reference(hardware, ranks or fusion.ranks)
    if launched():
        return platform_here("cuda" if joined(device).device.type == "cuda" else "gloo", fusion.ranks)
    if device is None and torch.cuda.device_count() < fusion.ranks:
        return reference(REFERENCE, fusion.ranks)
    return platform_here("gloo" if device == "cpu" else "cuda", fusion.ranks)


# Measuring all candidates ---------------------------------------------------------------------------------------------
# `hostir tune`: measures every candidate on the ranks of this job, and keeps the times for later choices.

Begin = Callable[[str, int], Progress]  # a case, by its label and how many steps it has


@dataclass(frozen=True)
class Case:
    """One fusion with its sizes; `label` names the values that were set."""

    label: str
    fusion: Program
    sizes: Mapping[str, int]


def check_started(command: str) -> None:
    """Raise outside torchrun, where there are no ranks to measure."""
    if not launched():
        raise error(
            "'hostir tune' measures real ranks, and this process is alone",
            expected="to be started by torchrun, one process a GPU",
            hint=f"torchrun --nproc-per-node 8 -m hostir tune {command}",
        )


def tune_command(cases: Sequence[Case], options: Namespace) -> int:
    """Measure each case that the cache does not hold yet, and print what is fastest; return the exit code."""
    if options.runs is not None and options.runs < 1:
        raise error(f"--runs {options.runs}", expected="at least 1")
    for case in cases:
        if len(free_sizes(fusion_of(case.fusion), case.sizes)) != 1:
            check_sizes(fusion_of(case.fusion), dict(case.sizes))
    with session(options.device) as job:
        assert job is not None
        cases = [each for case in cases for each in _bound(case, job, options)]
        with _progress(job) as begin:
            rows = [_tune(case, job, options, begin) for case in cases]
        if job.rank == 0:
            print(table(["sizes", "strategy", "streams", "kernels", "us", "sequential us", "times"], rows))
            print(f"kept in {cache.folder()}")
    return 0


def _bound(case: Case, job: Session, options: Namespace) -> list[Case]:
    """Return the case for each of the sizes that `hi.compile` chooses for, if a size is free."""
    if not free_sizes(case.fusion, case.sizes):
        return [case]
    platform = platform_here("cuda" if job.device.type == "cuda" else "gloo", job.size)
    check_ranks(case.fusion, platform)
    ranges = Ranges(Decider(case.fusion, platform, KERNELS.get(options.kernels)), case.sizes)
    every = ranges.representatives
    for sizes in every:
        check_sizes(case.fusion, sizes)
    (name,) = ranges.free
    return [Case(f"{case.label} {name}={sizes[name]}".strip(), case.fusion, sizes) for sizes in every]


def _tune(case: Case, job: Session, options: Namespace, begin: Begin) -> list[str]:
    """Measure a case unless the cache holds all of it; return its row of the table, which rank 0 prints."""
    kernels = KERNELS.get(options.kernels)
    platform = platform_here("cuda" if job.device.type == "cuda" else "gloo", job.size)
    check_ranks(case.fusion, platform)
    key = cache.key_of(case.fusion, case.sizes, platform)
    found = candidates_of(case.fusion, platform, kernels, for_testing=True)
    known = {} if options.again else cache.read(key)
    missing = any(c not in known or known[c].digest != p.digest for c, p in found.programs.items())
    measures = _from_rank_0(job, "measure" if missing else "") == "measure"
    if measures:
        progress = begin(case.label, steps(len(found.programs)))
        entries = measure(found.programs, case.sizes, job, runs=options.runs, progress=progress)
        _keep(job, key, case.fusion.name, entries)
    if job.rank:
        return []
    choice = decide(case.fusion, platform, case.sizes, kernels)
    return _measured_row(case, choice, "measured now" if measures else "in the cache")


def _measured_row(case: Case, choice: Choice, when: str) -> list[str]:
    plain = next((f"{t.us:.1f}" for t in choice.timings if t.candidate.strategy == SEQUENTIAL), "-")
    streams = str(choice.streams) if choice.streams > 1 else "-"
    return [case.label, choice.strategy, streams, choice.kernels, f"{choice.timings[0].us:.1f}", plain, when]


def _keep(job: Session, key: Mapping[str, Any], name: str, entries: cache.Entries) -> None:
    """Save results to the cache on rank 0. All ranks raise if that fails."""
    problem = ""
    if job.rank == 0:
        try:
            cache.write(key, name, entries)
        except HostIRError as refusal:
            problem = refusal.diagnostics[0].message
    if problem := _from_rank_0(job, problem):
        raise error(problem, hint="HOSTIR_CACHE names another folder")


def _from_rank_0(job: Session, mine: str) -> str:
    return job.exchange(f"tune {next(_turns)}", mine, PATIENCE)[0]


_turns = itertools.count()


@contextlib.contextmanager
def _progress(job: Session) -> Iterator[Begin]:
    """Show a progress bar on rank 0, if stderr is a terminal."""
    if job.rank or not sys.stderr.isatty():
        yield lambda label, total: lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:

        def begin(label: str, total: int) -> Progress:
            task = bar.add_task(label, total=total)

            def step(doing: str) -> None:
                bar.update(task, advance=1, description=f"{label}: {doing}")

            return step

        yield begin


def tune_main(options: Namespace) -> int:
    """Run `hostir tune`; return its exit code."""
    check_started(options.file)
    cases = []
    for given in _combinations(options.given):
        options.given = list(given)
        program, sizes = load_named(options)
        cases.append(Case(" ".join(given) or program.name, program, sizes))
    return tune_command(cases, options)


def _combinations(given: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every choice of one value for each `--set NAME=VALUE,VALUE,...`."""
    lists = []
    for item in given:
        name, equals, values = item.partition("=")
        lists.append([f"{name}{equals}{value}" for value in values.split(",")])
    return itertools.product(*lists)


def explain_main(options: Namespace) -> int:
    """Run `hostir explain`; return its exit code."""
    program, sizes = load_named(options)
    return explain_command(program, sizes, options)
