"""Whether programs that the checker accepts are right on real CPU processes, one of which is slow.

    python -m benchmarks.judge --programs 100                                    a first look
    python -m benchmarks.judge --programs 2000 --compiled --out benchmarks/results/judge    all right programs
    python -m benchmarks.judge --programs 0 --mutants 4000 --calls-by-hand 0     mutants of compiled programs
    python -m benchmarks.judge --programs 100 --promise one_stream               with a checker that assumes too much

The programs run on processes (`tests/judging/real_ranks.py`). They are random programs that the checker accepts, with
little synchronisation (`tests/judging/random_programs.py`), the hand-written programs of
`tests/cases/counterexamples`, and every pattern, lowered (`tests/judging/mutation.py`). Outputs must have the bits that
simulated ranks give in program order. So must outputs of the mutants (`tests/judging/mutants.py`) that the checker
accepts: if the checker assumes an order that processes do not guarantee, they go wrong. Their verdicts can be kept in
a file, as in `benchmarks.mutation`, and a later call with the same file continues.
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
from benchmarks.mutation import Kept, begin, comment, digest
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from tests.judging import mutation
from tests.judging.mutants import Mutant
from tests.judging.mutation import every_mutant, originals, sample
from tests.judging.random_programs import Accepts, accepted, loosened
from tests.judging.real_ranks import CALLS, Case, judged

HAND_WRITTEN = Path(__file__).parents[1] / "tests" / "cases" / "counterexamples"
SIZES = {"five_rounds": {"N": 10}}
CHUNK = 10  # programs that one job of processes runs
MUTANTS = 40  # of which one job runs those that are accepted
CALLS_BY_HAND = 200
RANKS = (2, 3, 4)
Of, Found = TypeVar("Of"), TypeVar("Found")


@dataclass(frozen=True)
class Work:
    """Seeds to try on so many ranks, with so many calls of each program that is accepted."""

    ranks: int
    first: int
    count: int
    calls: int
    patience: float
    promise: str


@dataclass(frozen=True)
class Done:
    """What came of it: how many programs ran, and the text of each that went wrong, with how."""

    work: Work
    run: int
    wrong: list[tuple[str, str]]


def tried(work: Work) -> Done:
    """Draws the programs of some seeds, and runs those that are accepted."""
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
    pool: Pool, function: Callable[[Of], Found], works: Iterable[Of], workers: int, last: float
) -> Iterator[Found]:
    """What a function gives for each work, in any order, until a time.

    All that has begun ends: a worker that is ended leaves its job of ranks behind.
    """
    left = iter(works)
    while time.monotonic() <= last and (batch := list(islice(left, workers))):
        yield from pool.imap_unordered(function, batch)


def at_random(given: argparse.Namespace) -> Iterator[Done]:
    """Runs at least so many random programs, as many on 2 ranks as on 3 or 4."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    works = (
        Work(ranks, given.first + CHUNK * n, CHUNK, given.calls, given.patience, given.promise)
        for n in range(given.programs)  # more than enough
        for ranks in RANKS
    )
    last = time.monotonic() + given.seconds
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    left = given.programs
    wanted = takewhile(lambda _: left > 0, works)
    with spawn.Pool(given.workers, begin) as pool, Progress(*columns) as progress:
        progress.disable = not progress.console.is_terminal
        bar = progress.add_task("programs", total=given.programs)
        for done in in_batches(pool, tried, wanted, given.workers, last):
            left -= done.run
            progress.update(bar, advance=done.run)
            yield done


def by_hand(calls: int, patience: float) -> Iterator[tuple[Program, str, int, int, str]]:
    """Each hand-written program: what the checker says, how many calls were made and went wrong, and how."""
    for path in sorted(HAND_WRITTEN.glob("*.hir")):
        program = hi.parse(path.read_text(), path.name)
        sizes = SIZES.get(program.name, {})
        errors = [found for found in hi.check(program, sizes=sizes) if found.level == "error"]
        said = errors[0].message if errors else "accepted"
        cases = [Case(program, seed, 10, sizes) for seed in range(calls // 10)]
        if errors:  # a few, to see whether the checker is right: what hangs once would hang again
            cases = cases[:2]
        verdicts = judged(cases, patience)
        how = next((verdict.wrong for verdict in verdicts if verdict.wrong), "")
        yield program, said, 10 * len(cases), sum(verdict.calls for verdict in verdicts), how


def compiled(given: argparse.Namespace) -> list[list[str]]:
    """A row for each name of a compiled program: how many there are, how many calls were made, and which went wrong."""
    cases = [Case(program, seed, given.calls) for seed, program in enumerate(originals())]
    works = [cases[at : at + CHUNK] for at in range(0, len(cases), CHUNK)]
    counts, wrong = Counter[str](), dict[str, list[str]]()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(given.workers, begin) as pool:
        for verdicts in pool.imap_unordered(partial(judged, patience=given.patience), works):
            for v in verdicts:
                counts[v.case.program.name] += 1
                if v.wrong:
                    wrong.setdefault(v.case.program.name, []).append(f"on {v.case.program.ranks} ranks: {v}")
    return [
        [name, str(n), str(n * given.calls), "; ".join(wrong.get(name, ["the same bits"]))]
        for name, n in sorted(counts.items())
    ]


def of_mutants(some: Sequence[Mutant], calls: int, patience: float) -> list[tuple[Mutant, mutation.Verdict | None]]:
    """What the checker says of each, None where it cannot be read, and how those that it accepts ran on processes."""
    found: list[tuple[Mutant, mutation.Verdict | None]] = []
    cases: dict[Mutant, Case] = {}
    for mutant in some:
        try:
            program = hi.parse(mutant.text, mutant.name)
        except HostIRError:
            found.append((mutant, None))
            continue
        if said := mutation.errors(hi.check(program)):
            found.append((mutant, mutation.Verdict(mutant, findings=said)))
            continue
        cases[mutant] = Case(program, int(digest(mutant.text), 16) % 1_000_003, calls)
    verdicts = zip(cases, judged(list(cases.values()), patience), strict=True)
    return found + [(mutant, mutation.Verdict(mutant, guilt=str(v) if v.wrong else "")) for mutant, v in verdicts]


def mutated(given: argparse.Namespace) -> list[mutation.Verdict]:
    """Verdicts on so many mutants of compiled programs, even over the kinds of edits, until the time is over."""
    kept, chosen = (
        Kept(given.verdicts, calls_on_processes=given.calls),
        sample(every_mutant(originals()), given.mutants),
    )
    left = [mutant for mutant in chosen if digest(mutant.text) not in kept.found]
    left.sort(key=lambda mutant: mutant.text.partition("program")[0])  # one job runs programs on as many ranks
    works = [left[at : at + MUTANTS] for at in range(0, len(left), MUTANTS)]
    Random(0).shuffle(works)
    last = time.monotonic() + given.seconds
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(given.workers, begin) as pool:
        judge = partial(of_mutants, calls=given.calls, patience=given.patience)
        for mutant, verdict in chain.from_iterable(in_batches(pool, judge, works, given.workers, last)):
            kept.add(mutant, verdict)
    return kept.of(chosen)


def by_kind(verdicts: Sequence[mutation.Verdict], calls: int) -> list[list[str]]:
    """A row for each kind of edit, and one for all."""
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
    """A row for each number of ranks, and one for all."""
    every = list(done)
    rows = []
    for name, some in (*((str(r), [d for d in every if d.work.ranks == r]) for r in RANKS), ("all", every)):
        run = sum(d.run for d in some)
        calls = sum(d.run * d.work.calls for d in some)
        rows.append([name, *map(str, (sum(d.work.count for d in some), run, calls, sum(len(d.wrong) for d in some)))])
    return rows


def keep(folder: Path, said: str, text: str) -> None:
    """Writes what goes wrong into a folder, and says where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{'_'.join(said.split(':')[0].split())}.hir"
    path.write_text(comment(said) + text)
    print(f"{said}\n  kept in {path}", file=sys.stderr, flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Runs all, prints the tables and writes them; 1 where a program that the checker accepts goes wrong."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--programs", type=int, default=100, help="random programs, at least; 0: none")
    options.add_argument("--calls", type=int, default=CALLS, help="of each random program")
    options.add_argument("--calls-by-hand", type=int, default=CALLS_BY_HAND, help="of each hand-written one; 0: none")
    options.add_argument("--compiled", action="store_true", help="also what the compiler makes of every pattern")
    options.add_argument("--mutants", type=int, default=0, help="of compiled programs, even over the kinds")
    resume = "verdicts on mutants that are not judged again; new ones go to the first file"
    options.add_argument("--verdicts", type=Path, nargs="+", default=[], metavar="FILE", help=resume)
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which no more are drawn, or mutants tried"
    )
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--patience", type=float, default=20.0, help="seconds that a communication may stand still")
    options.add_argument("--promise", default="", help="one of tests/judging/promises.py, which the checker assumes")
    options.add_argument("--keep", type=Path, default=Path("/tmp/judge"), help="folder for what goes wrong")
    options.add_argument("--out", type=Path, help="writes .json and .md there")
    chosen = options.parse_args(given)
    if chosen.mutants and chosen.promise:
        options.error("--promise is for random programs alone: mutants are judged by the checker as it is")
    torch.set_num_threads(1)

    failures: list[str] = []
    texts = []
    data: dict[str, object] = {}
    if chosen.calls_by_hand:
        rows = []
        for program, said, made, wrong, how in by_hand(chosen.calls_by_hand, chosen.patience):
            rows.append([program.name, said, str(made), str(wrong), how or "the same bits"])
            if said == "accepted" and wrong:
                failures.append(f"{program.name}: {how}")
        texts.append(table(["program", "checker", "calls", "wrong", "how"], rows))
        data["by hand"] = rows
        print(texts[-1], flush=True)
    if chosen.compiled:
        rows = compiled(chosen)
        failures += [f"{row[0]}, compiled, {row[-1]}" for row in rows if row[-1] != "the same bits"]
        texts.append(table(["compiled", "programs", "calls", "how"], rows))
        data["compiled"] = rows
        print(texts[-1], flush=True)
    if chosen.mutants:
        verdicts = mutated(chosen)
        rows = by_kind(verdicts, chosen.calls)
        for v in (v for v in verdicts if v.guilt):
            said = f"mutant {digest(v.mutant.text)} of {v.mutant.name}: {v.mutant.change}: {v.guilt}"
            keep(chosen.keep, said, v.mutant.text)
            failures.append(said)
        texts.append(table(["edit", "mutants", "refused", "accepted and run", "calls", "wrong"], rows))
        data["mutants"] = rows
        print(texts[-1], flush=True)
    if chosen.programs:
        begun, done = time.perf_counter(), []
        for each in at_random(chosen):
            done.append(each)
            for said, text in each.wrong:
                keep(chosen.keep, said, text)
                failures.append(said)
        seconds = time.perf_counter() - begun
        texts.append(table(["ranks", "seeds", "accepted and run", "calls", "wrong"], counted(done)))
        texts.append(f"Random programs: {seconds:.0f} s on {chosen.workers} workers.")
        print("\n\n".join(texts[-2:]))
        data |= {"random": counted(done), "seconds": round(seconds)}
    data["wrong"] = failures
    if chosen.out:
        write(chosen.out, "Accepted programs on real processes", "\n\n".join([*texts, *failures]), data)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
