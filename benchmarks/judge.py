"""Run programs that the checker accepts on real CPU processes, one of which is slow, and compare the results.

    python -m benchmarks.judge --programs 100                                    a first look
    python -m benchmarks.judge --programs 2000 --compiled --out benchmarks/results/judge    all correct programs
    python -m benchmarks.judge --programs 0 --mutants 4000 --calls-by-hand 0     mutants of compiled programs
    python -m benchmarks.judge --programs 0 --calls-by-hand 0 --compiled --only moe_layer    one compiled program
    python -m benchmarks.judge --programs 100 --promise one_stream               a checker with a wrong assumption

The programs run on processes (`tests/judging/real_ranks.py`). There are random programs that the checker accepts and
that have little synchronisation (`tests/judging/random_programs.py`), the hand-written programs of
`tests/cases/counterexamples`, and every pattern, lowered (`tests/judging/mutation.py`). Outputs must have the same bits
as on simulated ranks in program order. This also holds for mutants (`tests/judging/mutants.py`) that the checker
accepts. If the checker assumes an order that processes do not guarantee, some of them give other results. The verdicts
on mutants can be saved in a file, as in `benchmarks.mutation`. A later call with the same file continues.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, takewhile
from multiprocessing.pool import Pool
from pathlib import Path
from random import Random
from typing import TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import hostir as hi
from benchmarks.harness import table, write
from benchmarks.mutation import Kept, add_selection, begin, comment, digest, mutants_of, selected
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from tests.judging import mutation
from tests.judging.mutants import Mutant
from tests.judging.mutation import sample
from tests.judging.random_programs import Accepts, accepted, loosened
from tests.judging.real_ranks import CALLS, Case, judged

HAND_WRITTEN = Path(__file__).parents[1] / "tests" / "cases" / "counterexamples"
SIZES = {"five_rounds": {"N": 10}}
CHUNK = 10  # programs that one job of processes runs
MUTANTS = 40  # mutants for one job of processes, which runs the accepted ones
CALLS_BY_HAND = 200
RANKS = (2, 3, 4)
Item, Outcome = TypeVar("Item"), TypeVar("Outcome")


@dataclass(frozen=True)
class Work:
    """Seeds of random programs to try on `ranks` ranks, with `calls` calls of each accepted program."""

    ranks: int
    first: int
    count: int
    calls: int
    patience: float
    promise: str


@dataclass(frozen=True)
class Done:
    """The outcome of some work: the number of programs that ran, and description and text of each wrong program."""

    work: Work
    run: int
    wrong: list[tuple[str, str]]


def tried(work: Work) -> Done:
    """Draw the programs of some seeds, and run the accepted ones."""
    assumed = contextlib.nullcontext()
    accepts: Accepts = accepted
    if work.promise:
        from tests.judging.promises import PROMISES

        assumed, accepts = PROMISES[work.promise].assumed(), PROMISES[work.promise].accepts
    seeds = range(work.first, work.first + work.count)
    drawn = [(seed, loosened(seed, work.ranks, accepts)) for seed in seeds]
    cases = [Case(program, seed, work.calls) for seed, program in drawn if program is not None]
    with assumed:
        verdicts = judged(cases, work.patience)
    wrong = [(f"seed {v.case.seed} on {work.ranks} ranks: {v}", str(v.case.program)) for v in verdicts if v.wrong]
    return Done(work, len(cases), wrong)


def in_batches(
    pool: Pool, function: Callable[[Item], Outcome], works: Iterable[Item], workers: int, last: float
) -> Iterator[Outcome]:
    """Yield the results of a function for the items, in any order. No item is started after the time `last`.

    Items that have begun are finished: if a worker were killed, the processes of its ranks would go on.
    """
    left = iter(works)
    while time.monotonic() <= last and (batch := list(islice(left, workers))):
        yield from pool.imap_unordered(function, batch)


def at_random(options: argparse.Namespace) -> Iterator[Done]:
    """Run at least `--programs` random programs. 2, 3 and 4 ranks get equally many seeds."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    works = (
        Work(ranks, options.first + CHUNK * n, CHUNK, options.calls, options.patience, options.promise)
        for n in range(options.programs)  # more than enough
        for ranks in RANKS
    )
    last = time.monotonic() + options.seconds
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    left = options.programs
    enough = takewhile(lambda _: left > 0, works)
    with spawn.Pool(options.workers, begin) as pool, Progress(*columns) as progress:
        progress.disable = not progress.console.is_terminal
        bar = progress.add_task("programs", total=options.programs)
        for done in in_batches(pool, tried, enough, options.workers, last):
            left -= done.run
            progress.update(bar, advance=done.run)
            yield done


def by_hand(calls: int, patience: float) -> Iterator[tuple[Program, str, int, int, str]]:
    """Yield each hand-written program, its verdict, the numbers of calls and of wrong calls, and an error."""
    for path in sorted(HAND_WRITTEN.glob("*.hir")):
        program = hi.parse(path.read_text(), path.name)
        sizes = SIZES.get(program.name, {})
        errors = [finding for finding in hi.check(program, sizes=sizes) if finding.level == "error"]
        verdict = errors[0].message if errors else "accepted"
        cases = [Case(program, seed, 10, sizes) for seed in range(calls // 10)]
        if errors:  # only two cases: a program that hangs once would hang again
            cases = cases[:2]
        verdicts = judged(cases, patience)
        reason = next((v.wrong for v in verdicts if v.wrong), "")
        yield program, verdict, 10 * len(cases), sum(v.calls for v in verdicts), reason


def compiled(options: argparse.Namespace) -> list[list[str]]:
    """Run the compiled programs; return a row for each name with the numbers of programs and calls, and the errors."""
    cases = [Case(program, seed, options.calls) for seed, program in enumerate(selected(options))]
    works = [cases[at : at + CHUNK] for at in range(0, len(cases), CHUNK)]
    counts, wrong = Counter[str](), dict[str, list[str]]()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(options.workers, begin) as pool:
        for verdicts in pool.imap_unordered(partial(judged, patience=options.patience), works):
            for v in verdicts:
                counts[v.case.program.name] += 1
                if v.wrong:
                    wrong.setdefault(v.case.program.name, []).append(f"on {v.case.program.ranks} ranks: {v}")
    return [
        [name, str(n), str(n * options.calls), "; ".join(wrong.get(name, ["the same bits"]))]
        for name, n in sorted(counts.items())
    ]


def of_mutants(mutants: Sequence[Mutant], calls: int, patience: float) -> list[tuple[Mutant, mutation.Verdict | None]]:
    """Check mutants, and run the accepted ones on processes; return their verdicts.

    The verdict is None for a text that cannot be parsed.
    """
    refused: list[tuple[Mutant, mutation.Verdict | None]] = []
    cases: dict[Mutant, Case] = {}
    for mutant in mutants:
        try:
            program = hi.parse(mutant.text, mutant.name)
        except HostIRError:
            refused.append((mutant, None))
            continue
        if findings := mutation.errors(hi.check(program)):
            refused.append((mutant, mutation.Verdict(mutant, findings=findings)))
            continue
        cases[mutant] = Case(program, int(digest(mutant.text), 16) % 1_000_003, calls)
    verdicts = zip(cases, judged(list(cases.values()), patience), strict=True)
    return refused + [(mutant, mutation.Verdict(mutant, guilt=str(v) if v.wrong else "")) for mutant, v in verdicts]


def mutated(options: argparse.Namespace) -> list[mutation.Verdict]:
    """Judge a sample of mutants of compiled programs until the time is over.

    The sample has about equally many mutants of each kind of edit.
    """
    kept = Kept(options.verdicts, calls_on_processes=options.calls)
    chosen = sample(mutants_of(selected(options), options), options.mutants)
    left = [mutant for mutant in chosen if digest(mutant.text) not in kept.verdicts]
    left.sort(
        key=lambda mutant: mutant.text.partition("program")[0]
    )  # programs of one job should have the same number of ranks
    works = [left[at : at + MUTANTS] for at in range(0, len(left), MUTANTS)]
    Random(0).shuffle(works)
    last = time.monotonic() + options.seconds
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(options.workers, begin) as pool:
        judge = partial(of_mutants, calls=options.calls, patience=options.patience)
        for mutant, verdict in chain.from_iterable(in_batches(pool, judge, works, options.workers, last)):
            kept.add(mutant, verdict)
    return kept.of(chosen)


def by_kind(verdicts: Sequence[mutation.Verdict], calls: int) -> list[list[str]]:
    """Return a row for each kind of edit, and a row for all mutants."""
    kinds = sorted({v.mutant.operator for v in verdicts})
    by_operator = ((kind, [v for v in verdicts if v.mutant.operator == kind]) for kind in kinds)
    groups = [("all mutants", verdicts), *by_operator]
    rows = []
    for name, group in groups:
        run = sum(not v.findings for v in group)
        rows.append(
            [name, *map(str, (len(group), len(group) - run, run, run * calls, sum(bool(v.guilt) for v in group)))]
        )
    return rows


def counted(done: Iterable[Done]) -> list[list[str]]:
    """Return a row for each number of ranks, and a row for all programs."""
    every = list(done)
    rows = []
    for name, some in (*((str(r), [d for d in every if d.work.ranks == r]) for r in RANKS), ("all", every)):
        run = sum(d.run for d in some)
        calls = sum(d.run * d.work.calls for d in some)
        rows.append([name, *map(str, (sum(d.work.count for d in some), run, calls, sum(len(d.wrong) for d in some)))])
    return rows


def keep(folder: Path, failure: str, text: str) -> None:
    """Write a program that went wrong into a folder; print the failure and the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{'_'.join(failure.split(':')[0].split())}.hir"
    path.write_text(comment(failure) + text)
    print(f"{failure}\n  kept in {path}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all programs, print and write the tables; return 1 if a program that the checker accepts goes wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="the least number of random programs; 0: none")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls of each random program")
    parser.add_argument(
        "--calls-by-hand", type=int, default=CALLS_BY_HAND, help="calls of each hand-written program; 0: none"
    )
    parser.add_argument("--compiled", action="store_true", help="also run every pattern, lowered")
    parser.add_argument("--mutants", type=int, default=0, help="number of mutants of compiled programs")
    resume = "files with verdicts on mutants that are not judged again; new ones go to the first file"
    parser.add_argument("--verdicts", type=Path, nargs="+", default=[], metavar="FILE", help=resume)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no more programs and mutants after this time"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds that a communication may stand still")
    parser.add_argument("--promise", default="", help="one of tests/judging/promises.py, which the checker assumes")
    parser.add_argument("--keep", type=Path, default=Path("/tmp/judge"), help="folder for programs that go wrong")
    parser.add_argument("--out", type=Path, help="write .json and .md files with this name")
    add_selection(parser)
    options = parser.parse_args(arguments)
    if options.mutants and options.promise:
        parser.error("--promise is for random programs alone: mutants are judged by the checker as it is")
    torch.set_num_threads(1)

    failures: list[str] = []
    texts = []
    data: dict[str, object] = {}
    if options.calls_by_hand:
        rows = []
        for program, verdict, calls, wrong, reason in by_hand(options.calls_by_hand, options.patience):
            rows.append([program.name, verdict, str(calls), str(wrong), reason or "the same bits"])
            if verdict == "accepted" and wrong:
                failures.append(f"{program.name}: {reason}")
        texts.append(table(["program", "checker", "calls", "wrong", "how"], rows))
        data["by hand"] = rows
        print(texts[-1], flush=True)
    if options.compiled:
        rows = compiled(options)
        failures += [f"{row[0]}, compiled, {row[-1]}" for row in rows if row[-1] != "the same bits"]
        texts.append(table(["compiled", "programs", "calls", "how"], rows))
        data["compiled"] = rows
        print(texts[-1], flush=True)
    if options.mutants:
        verdicts = mutated(options)
        rows = by_kind(verdicts, options.calls)
        for v in (v for v in verdicts if v.guilt):
            failure = f"mutant {digest(v.mutant.text)} of {v.mutant.name}: {v.mutant.change}: {v.guilt}"
            keep(options.keep, failure, v.mutant.text)
            failures.append(failure)
        texts.append(table(["edit", "mutants", "refused", "accepted and run", "calls", "wrong"], rows))
        data["mutants"] = rows
        print(texts[-1], flush=True)
    if options.programs:
        begun, done = time.perf_counter(), []
        for each in at_random(options):
            done.append(each)
            for failure, text in each.wrong:
                keep(options.keep, failure, text)
                failures.append(failure)
        seconds = time.perf_counter() - begun
        texts.append(table(["ranks", "seeds", "accepted and run", "calls", "wrong"], counted(done)))
        texts.append(f"Random programs: {seconds:.0f} s on {options.workers} workers.")
        print("\n\n".join(texts[-2:]))
        data |= {"random": counted(done), "seconds": round(seconds)}
    data["wrong"] = failures
    if options.out:
        write(options.out, "Accepted programs on real processes", "\n\n".join([*texts, *failures]), data)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
