"""Whether programs that the checker accepts are right on real CPU processes, one of which is slow.

    python -m benchmarks.judge --programs 100                                    a first look
    python -m benchmarks.judge --programs 2000 --compiled --out benchmarks/results/judge    all of it
    python -m benchmarks.judge --programs 100 --promise one_stream               with a checker that believes too much

Random programs that the checker accepts and that have no synchronisation to spare (`tests/random_programs.py`), the
hand-written ones of `tests/cases/counterexamples`, and what the compiler makes of every pattern (`tests/mutation.py`),
run on processes (`tests/real_ranks.py`). Each call's outputs must have the bits that simulated ranks give in program
order.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import hostir as hi
from benchmarks.harness import table, write
from hostir.ir.program import Program
from tests.mutation import originals
from tests.random_programs import Accepts, accepted, loosened
from tests.real_ranks import CALLS, Case, judged

HAND_WRITTEN = Path(__file__).parents[1] / "tests" / "cases" / "counterexamples"
SIZES = {"five_rounds": {"N": 10}}
CHUNK = 10  # programs that one job of processes runs
CALLS_BY_HAND = 200
RANKS = (2, 3, 4)


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
    believed = contextlib.nullcontext()
    accepts: Accepts = accepted
    if work.promise:
        from tests.promises import PROMISES

        believed, accepts = PROMISES[work.promise].believed(), PROMISES[work.promise].accepts
    seeds = range(work.first, work.first + work.count)
    drawn = [(seed, loosened(seed, work.ranks, accepts)) for seed in seeds]
    cases = [Case(program, seed, work.calls) for seed, program in drawn if program is not None]
    with believed:
        verdicts = judged(cases, work.patience)
    wrong = [(f"seed {v.case.seed} on {work.ranks} ranks: {v}", str(v.case.program)) for v in verdicts if v.wrong]
    return Done(work, len(cases), wrong)


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
    with spawn.Pool(given.workers, torch.set_num_threads, (1,)) as pool, Progress(*columns) as progress:
        progress.disable = not progress.console.is_terminal
        bar, left = progress.add_task("programs", total=given.programs), given.programs
        batches = iter(lambda: [next(works) for _ in range(given.workers)], [])
        for batch in batches:
            for done in pool.imap_unordered(tried, batch):
                left -= done.run
                progress.update(bar, advance=done.run)
                yield done
            if left <= 0 or time.monotonic() > last:
                return


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
    with spawn.Pool(given.workers, torch.set_num_threads, (1,)) as pool:
        for verdicts in pool.imap_unordered(partial(judged, patience=given.patience), works):
            for v in verdicts:
                counts[v.case.program.name] += 1
                if v.wrong:
                    wrong.setdefault(v.case.program.name, []).append(f"on {v.case.program.ranks} ranks: {v}")
    return [
        [name, str(n), str(n * given.calls), "; ".join(wrong.get(name, ["the same bits"]))]
        for name, n in sorted(counts.items())
    ]


def counted(done: Iterable[Done]) -> list[list[str]]:
    """A row for each number of ranks, and one for all."""
    every = list(done)
    rows = []
    for name, some in (*((str(r), [d for d in every if d.work.ranks == r]) for r in RANKS), ("all", every)):
        run = sum(d.run for d in some)
        calls = sum(d.run * d.work.calls for d in some)
        rows.append([name, *map(str, (sum(d.work.count for d in some), run, calls, sum(len(d.wrong) for d in some)))])
    return rows


def main(given: Sequence[str] | None = None) -> int:
    """Runs all, prints the tables and writes them; 1 where a program that the checker accepts goes wrong."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--programs", type=int, default=100, help="random programs, at least")
    options.add_argument("--calls", type=int, default=CALLS, help="of each random program")
    options.add_argument("--calls-by-hand", type=int, default=CALLS_BY_HAND, help="of each hand-written one; 0: none")
    options.add_argument("--compiled", action="store_true", help="also what the compiler makes of every pattern")
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--seconds", type=float, default=float("inf"), help="after which no more are drawn")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--patience", type=float, default=20.0, help="seconds that a communication may stand still")
    options.add_argument("--promise", default="", help="one of tests/promises.py, which the checker believes")
    options.add_argument("--keep", type=Path, default=Path("/tmp/judge"), help="folder for what goes wrong")
    options.add_argument("--out", type=Path, help="writes .json and .md there")
    chosen = options.parse_args(given)
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
    begun, done = time.perf_counter(), []
    for each in at_random(chosen):
        done.append(each)
        for said, text in each.wrong:
            chosen.keep.mkdir(parents=True, exist_ok=True)
            name = "_".join(said.split(":")[0].split())
            (chosen.keep / f"{name}.hir").write_text(f"// {said}\n{text}")
            print(f"{said}\n  kept in {chosen.keep / name}.hir", file=sys.stderr, flush=True)
            failures.append(said)
    seconds = time.perf_counter() - begun
    texts.append(table(["ranks", "seeds", "accepted and run", "calls", "wrong"], counted(done)))
    texts.append(f"Random programs: {seconds:.0f} s on {chosen.workers} workers.")
    print("\n\n".join(texts[-2:]))
    data |= {"random": counted(done), "seconds": round(seconds), "wrong": failures}
    if chosen.out:
        write(chosen.out, "Accepted programs on real processes", "\n\n".join([*texts, *failures]), data)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
