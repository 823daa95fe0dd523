"""Whether the checker notices what goes wrong: a table of mutants, guilty ones, and those it caught and missed.

    python -m benchmarks.mutation --limit 400                                        a first look, in minutes
    python -m benchmarks.mutation --limit 0 --out benchmarks/results/mutation        all of them

A mutant is a correct program with one edit (`tests/judging/mutants.py`). The checker should reject every mutant that
the simulated ranks show to be wrong (`tests/judging/mutation.py`), and accept all original programs.

All of them take more than an hour on one core. Verdicts that are kept are not judged again, so the work can be split
over several calls, also on other machines with the same sources, of which the last one prints the table of all:

    python -m benchmarks.mutation --limit 0 --jobs 15 --part 1/2 --seconds 500 --verdicts first.jsonl
    python -m benchmarks.mutation --limit 0 --jobs 15 --part 2/2 --seconds 500 --verdicts second.jsonl
    python -m benchmarks.mutation --limit 0 --verdicts second.jsonl first.jsonl --out benchmarks/results/mutation
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.judging.mutants import Mutant
from tests.judging.mutation import OUTCOMES, Verdict, edited_twice, every_mutant, judge, originals, sample, subject

ROOT = Path(__file__).parents[1]
ORIGINAL = "unchanged"  # the kind of the programs that the mutants are made from


# Verdicts ---------------------------------------------------------------------------------------------------------
def judged(found: Sequence[Mutant], seeds: int, jobs: int, seconds: float) -> Iterator[tuple[Mutant, Verdict | None]]:
    """The verdict on each of these, None where it cannot be read, in any order, until the time is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    last = time.monotonic() + seconds
    spawn = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in whatever state they are
    with spawn.Pool(jobs, begin) as pool, Progress(*columns) as progress:
        progress.disable = not progress.console.is_terminal
        verdicts = pool.imap_unordered(partial(of_mutant, seeds=seeds), found, chunksize=4)
        for each in progress.track(verdicts, total=len(found), description="mutants"):
            yield each
            if time.monotonic() > last:
                return


def begin() -> None:
    """Prepares a worker: one thread, and no look at what modules hold whenever Python collects cycles."""
    torch.set_num_threads(1)
    gc.freeze()


def of_mutant(mutant: Mutant, seeds: int) -> tuple[Mutant, Verdict | None]:
    return mutant, judge(mutant, seeds)


class Kept:
    """Verdicts on texts that earlier calls have judged; new ones are added to the first of the files.

    Args:
        files: of which each may be missing.
        tried: how each was judged: a number, under a name that tells it from other ways to judge.

    Raises SystemExit for files that other sources, other ways or other numbers have given.
    """

    def __init__(self, files: Sequence[Path], **tried: int) -> None:
        self.files, self.found = files, dict[str, dict[str, Any] | None]()
        head = json.dumps({"sources": digest_of_sources(), **tried})
        for path in files:
            first, *lines = path.read_text().splitlines() if path.exists() else [head]
            if first != head:
                sys.exit(f"{path} has verdicts of {first}, not of {head}: judge anew, into another file")
            complete = (line for line in lines if line.endswith("]"))  # a call may have been ended in a line
            self.found |= dict(map(json.loads, complete))
        for path in files[:1]:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(head + "\n")

    def add(self, mutant: Mutant, verdict: Verdict | None) -> None:
        fields = None if verdict is None else {k: v for k, v in vars(verdict).items() if k != "mutant"}
        self.found[digest(mutant.text)] = fields
        for path in self.files[:1]:
            with path.open("a") as kept:
                kept.write(json.dumps([digest(mutant.text), fields]) + "\n")

    def of(self, mutants: Iterable[Mutant]) -> list[Verdict]:
        """The verdicts on those that have been judged and can be read."""
        said = ((mutant, self.found.get(digest(mutant.text))) for mutant in mutants)
        return [
            Verdict(mutant, **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
            for mutant, fields in said
            if fields is not None
        ]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_sources() -> str:
    """Of all that a verdict depends on."""
    paths = [path for folder in ("hostir", "examples", "tests/judging") for path in (ROOT / folder).rglob("*.py")]
    return digest("".join(path.read_text() for path in sorted(paths)))


# Tables -----------------------------------------------------------------------------------------------------------
def counted(verdicts: Iterable[Verdict]) -> dict[str, Counter[str]]:
    """How many of each outcome, by kind of edit, and in all."""
    kinds: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict.mutant.operator, Counter())[verdict.outcome] += 1
    changed = [count for kind, count in kinds.items() if kind != ORIGINAL]
    return {
        "all mutants": sum(changed, Counter()),
        **dict(sorted(kinds.items(), key=lambda item: (item[0] != ORIGINAL, item[0]))),
    }


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, its first column of words."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def report(verdicts: Sequence[Verdict]) -> str:
    """The table by kind of edit, and what was rejected without a conviction."""
    rows = [
        [kind, n.total(), n["caught"] + n["missed"], *(n[outcome] for outcome in OUTCOMES)]
        for kind, n in counted(verdicts).items()
    ]
    doubts = Counter(
        (v.outcome, subject(v.findings[0]), v.mutant.operator) for v in verdicts if v.outcome in ("benign", "unfounded")
    )
    return "\n\n".join(
        [
            table(["edit", "mutants", "guilty", *OUTCOMES], rows),
            "Rejected, and convicted by no schedule that was tried:",
            table(["finding", "outcome", "edit", "mutants"], [[f, o, k, n] for (o, f, k), n in sorted(doubts.items())]),
        ]
    )


def comment(said: str) -> str:
    """Some lines as comments of a program."""
    return "".join(f"// {line}\n" for line in said.split("\n"))


def keep(verdicts: Iterable[Verdict], folder: Path) -> list[Path]:
    """Writes the text of every miss, and of every one rejected without a conviction, to look at."""
    paths = []
    for v in verdicts:
        if v.outcome not in ("missed", "benign", "unfounded"):
            continue
        digest = hashlib.sha256(v.mutant.text.encode()).hexdigest()[:8]
        file = f"{v.mutant.operator.replace(' ', '_')}-{v.mutant.name}-{digest}.hir"
        path = folder / v.outcome.replace(" ", "_") / file
        said = [f"{v.mutant.operator}: {v.mutant.change}", *filter(None, [v.guilt]), *v.findings]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(comment("\n".join(said)) + v.mutant.text)
        paths.append(path)
    return paths


def environment(given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seeds": given.seeds,
        "jobs": given.jobs,
        "seconds": round(seconds),
    }


def write(out: Path, text: str, verdicts: Sequence[Verdict], around: dict[str, Any]) -> None:
    """Writes `out`.json and `out`.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    kinds = {kind: dict(count) for kind, count in counted(verdicts).items()}
    out.with_suffix(".json").write_text(json.dumps({"environment": around, "kinds": kinds}, indent=1) + "\n")
    said = ", ".join(f"{name} {value}" for name, value in around.items())
    out.with_suffix(".md").write_text(f"# Mutants of right programs\n\n{said}\n\n{text}\n")


# The command line -------------------------------------------------------------------------------------------------
def part(text: str) -> tuple[int, int]:
    """The I and N of a part I/N."""
    first, _, parts = text.partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise argparse.ArgumentTypeError(f"'{text}' is no part of a whole, such as 1/2")
    return int(first), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges, prints the tables and writes them; 1 where a guilty mutant is missed or a right program is rejected."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    options.add_argument("--limit", type=int, default=4000, help="mutants, even over the kinds; 0 for all")
    options.add_argument("--seeds", type=int, default=200, help="schedules of each mutant (%(default)s)")
    options.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="judge only the I-th of N parts")
    options.add_argument("--seconds", type=float, default=float("inf"), help="judge no longer than this")
    resume = "verdicts that are not judged again; new ones go to the first file"
    options.add_argument("--verdicts", type=Path, nargs="+", default=[], metavar="FILE", help=resume)
    options.add_argument("--keep", type=Path, default=Path("/tmp/mutation"), help="folder for what is to be looked at")
    options.add_argument("--out", type=Path, help="writes .json and .md there")
    given = options.parse_args(arguments)

    begun, programs, kept = time.perf_counter(), originals(), Kept(given.verdicts, seeds=given.seeds)
    unchanged = [Mutant(ORIGINAL, p.name, "", str(p)) for p in programs]
    found = every_mutant(programs)
    chosen = sample(found, given.limit or len(found))
    every = [*unchanged, *chosen, *edited_twice(found, len(chosen) // 4)]
    left = list({m.text: m for m in every if digest(m.text) not in kept.found}.values())
    which, parts = given.part
    mine = [m for m in left if int(digest(m.text), 16) % parts == which - 1]
    print(f"{len(every)} mutants and right programs, {len(mine)} to be judged", flush=True)
    for mutant, verdict in judged(mine, given.seeds, given.jobs, given.seconds):
        kept.add(mutant, verdict)
    verdicts = kept.of(every)
    print(text := report(verdicts))
    if missing := sum(digest(m.text) not in kept.found for m in every):
        print(f"\n{missing} of {len(every)} not judged yet")
    for path in keep(verdicts, given.keep):
        print(path)
    if given.out and not missing:
        write(given.out, text, verdicts, environment(given, time.perf_counter() - begun))
    right = {"innocent"}
    rejected = (v.mutant.operator == ORIGINAL and v.outcome not in right for v in verdicts)
    return int(any(v.outcome == "missed" for v in verdicts) or any(rejected))


if __name__ == "__main__":
    raise SystemExit(main())
