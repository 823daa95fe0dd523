"""Test the checker by mutation: print how many mutants are wrong, and how many of these the checker rejects.

    python -m benchmarks.mutation --limit 400                                        a first look, in minutes
    python -m benchmarks.mutation --limit 0 --out benchmarks/results/mutation        all of them
    python -m benchmarks.mutation --only moe_layer --edits delete                    some programs and some edits
    python -m benchmarks.mutation --sums                 those of programs with `chain` and `low_latency`
    python -m benchmarks.mutation --hosts                those of programs for several hosts

A mutant is a correct program with one edit (`tests/judging/mutants.py`). It is *guilty* if some run on simulated ranks
shows that it is wrong (`tests/judging/mutation.py`). The checker should reject every guilty mutant, and accept all
original programs.

All mutants take more than an hour on one core. Saved verdicts are not computed again. So the work can be split over
several calls, which may run on other machines with the same sources. The last call prints the table of all mutants:

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

from hostir.ir.program import Program
from tests.judging.mutants import Mutant
from tests.judging.mutation import (
    OUTCOMES,
    Verdict,
    edited_twice,
    every_mutant,
    hierarchical,
    judge,
    originals,
    sample,
    subject,
    sums,
)

ROOT = Path(__file__).parents[1]
ORIGINAL = "unchanged"  # the kind of edit of the original programs


# Verdicts ---------------------------------------------------------------------------------------------------------
def judged(mutants: Sequence[Mutant], seeds: int, jobs: int, seconds: float) -> Iterator[tuple[Mutant, Verdict | None]]:
    """Judge mutants, in any order, until the time is over; yield each with its verdict.

    The verdict is None for a text that cannot be parsed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    last = time.monotonic() + seconds
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with spawn.Pool(jobs, begin) as pool, Progress(*columns) as progress:
        progress.disable = not progress.console.is_terminal
        verdicts = pool.imap_unordered(partial(of_mutant, seeds=seeds), mutants, chunksize=4)
        for each in progress.track(verdicts, total=len(mutants), description="mutants"):
            yield each
            if time.monotonic() > last:
                return


def begin() -> None:
    """Prepare a worker: use one thread, and exclude all existing objects from garbage collection."""
    torch.set_num_threads(1)
    gc.freeze()


def of_mutant(mutant: Mutant, seeds: int) -> tuple[Mutant, Verdict | None]:
    return mutant, judge(mutant, seeds)


class Kept:
    """The saved verdicts, by the digest of the mutant's text. New verdicts are added to the first file.

    Args:
        files: the files with verdicts. A file may be missing.
        tried: the settings with which verdicts are computed, such as the number of seeds.

    Raises SystemExit if a file has verdicts that were computed from other sources or with other settings.
    """

    def __init__(self, files: Sequence[Path], **tried: int) -> None:
        self.files, self.verdicts = files, dict[str, dict[str, Any] | None]()
        head = json.dumps({"sources": digest_of_sources(), **tried})
        for path in files:
            first, *lines = path.read_text().splitlines() if path.exists() else [head]
            if first != head:
                sys.exit(f"{path} has verdicts of {first}, not of {head}: judge anew, into another file")
            complete = (line for line in lines if line.endswith("]"))  # a call may have ended in the middle of a line
            self.verdicts |= dict(map(json.loads, complete))
        for path in files[:1]:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(head + "\n")

    def add(self, mutant: Mutant, verdict: Verdict | None) -> None:
        fields = None if verdict is None else {k: v for k, v in vars(verdict).items() if k != "mutant"}
        self.verdicts[digest(mutant.text)] = fields
        for path in self.files[:1]:
            with path.open("a") as kept:
                kept.write(json.dumps([digest(mutant.text), fields]) + "\n")

    def of(self, mutants: Iterable[Mutant]) -> list[Verdict]:
        """Return the verdicts on the mutants that have been judged and can be parsed."""
        judged = ((mutant, self.verdicts.get(digest(mutant.text))) for mutant in mutants)
        return [
            Verdict(mutant, **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
            for mutant, fields in judged
            if fields is not None
        ]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_sources() -> str:
    """Return a digest of all sources that verdicts depend on."""
    paths = [path for folder in ("hostir", "examples", "tests/judging") for path in (ROOT / folder).rglob("*.py")]
    return digest("".join(path.read_text() for path in sorted(paths)))


# Tables -----------------------------------------------------------------------------------------------------------
def counted(verdicts: Iterable[Verdict]) -> dict[str, Counter[str]]:
    """Return the number of verdicts of each outcome, by kind of edit and in total."""
    kinds: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict.mutant.operator, Counter())[verdict.outcome] += 1
    changed = [count for kind, count in kinds.items() if kind != ORIGINAL]
    return {
        "all mutants": sum(changed, Counter()),
        **dict(sorted(kinds.items(), key=lambda item: (item[0] != ORIGINAL, item[0]))),
    }


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table with a first column of words."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def report(verdicts: Sequence[Verdict]) -> str:
    """Return two tables: the outcomes by kind of edit, and the mutants that were rejected but are not guilty."""
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


def comment(text: str) -> str:
    """Return the lines of a text as comments of a program."""
    return "".join(f"// {line}\n" for line in text.split("\n"))


def keep(verdicts: Iterable[Verdict], folder: Path) -> list[Path]:
    """Write the texts of guilty mutants that were accepted, and of mutants that were rejected but are not guilty."""
    paths = []
    for v in verdicts:
        if v.outcome not in ("missed", "benign", "unfounded"):
            continue
        digest = hashlib.sha256(v.mutant.text.encode()).hexdigest()[:8]
        file = f"{v.mutant.operator.replace(' ', '_')}-{v.mutant.name}-{digest}.hir"
        path = folder / v.outcome.replace(" ", "_") / file
        lines = [f"{v.mutant.operator}: {v.mutant.change}", *filter(None, [v.guilt]), *v.findings]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(comment("\n".join(lines)) + v.mutant.text)
        paths.append(path)
    return paths


def environment(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return the machine, the versions and the options of a run."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seeds": options.seeds,
        "jobs": options.jobs,
        "seconds": round(seconds),
        **{name: " ".join(chosen) for name in ("only", "edits") if (chosen := getattr(options, name))},
    }


def write(out: Path, text: str, verdicts: Sequence[Verdict], stamp: dict[str, Any]) -> None:
    """Write `out`.json and `out`.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    kinds = {kind: dict(count) for kind, count in counted(verdicts).items()}
    out.with_suffix(".json").write_text(json.dumps({"environment": stamp, "kinds": kinds}, indent=1) + "\n")
    stamp_line = ", ".join(f"{name} {value}" for name, value in stamp.items())
    out.with_suffix(".md").write_text(f"# Mutants of right programs\n\n{stamp_line}\n\n{text}\n")


# The command line -------------------------------------------------------------------------------------------------
def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options `--only` and `--edits`, which `selected` and `mutants_of` read."""
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the names of the programs; default: all programs")
    parser.add_argument(
        "--edits", nargs="+", metavar="EDIT", help="how the kinds of edits begin, such as 'delete'; default: all kinds"
    )


def selected(options: argparse.Namespace) -> list[Program]:
    """Return the correct programs with the names of `--only`. Raises SystemExit if there is no such program."""
    programs = sums() if options.sums else [*hierarchical()] if options.hosts else originals()
    names = sorted({p.name for p in programs})
    if unknown := [name for name in options.only or () if name not in names]:
        sys.exit(f"no program is called {', '.join(unknown)}; there are: {', '.join(names)}")
    return [p for p in programs if not options.only or p.name in options.only]


def mutants_of(programs: Sequence[Program], options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants of programs whose kind of edit begins as `--edits` says. Raises SystemExit if none does."""
    mutants = every_mutant(programs)
    kinds = sorted({m.operator for m in mutants})
    for edit in options.edits or ():
        if not any(kind.startswith(edit) for kind in kinds):
            sys.exit(f"no kind of edit begins with '{edit}'; there are: {', '.join(kinds)}")
    return [m for m in mutants if not options.edits or m.operator.startswith(tuple(options.edits))]


def part(text: str) -> tuple[int, int]:
    """Parse a part such as `1/2`; return its number and the number of all parts."""
    first, _, parts = text.partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise argparse.ArgumentTypeError(f"'{text}' is no part of a whole, such as 1/2")
    return int(first), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge, print and write the tables; return 1 if a guilty mutant is accepted or a correct program is rejected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument(
        "--limit", type=int, default=4000, help="number of mutants, the same from each kind of edit; 0 for all"
    )
    parser.add_argument("--sums", action="store_true", help="only programs of chain, and with sums by low_latency")
    parser.add_argument("--hosts", action="store_true", help="only programs for several hosts")
    parser.add_argument("--seeds", type=int, default=200, help="schedules of each mutant (%(default)s)")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="judge only the I-th of N parts")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop judging after this time")
    resume = "files with verdicts that are not computed again; new ones go to the first file"
    parser.add_argument("--verdicts", type=Path, nargs="+", default=[], metavar="FILE", help=resume)
    parser.add_argument("--keep", type=Path, default=Path("/tmp/mutation"), help="folder for mutants to look at")
    parser.add_argument("--out", type=Path, help="write .json and .md files with this name")
    add_selection(parser)
    options = parser.parse_args(arguments)

    begun, kept = time.perf_counter(), Kept(options.verdicts, seeds=options.seeds)
    programs = selected(options)
    mutants = mutants_of(programs, options)
    unchanged = [Mutant(ORIGINAL, p.name, "", str(p)) for p in programs]
    chosen = sample(mutants, options.limit or len(mutants))
    every = [*unchanged, *chosen, *([] if options.edits else edited_twice(mutants, len(chosen) // 4))]
    left = list({m.text: m for m in every if digest(m.text) not in kept.verdicts}.values())
    which, parts = options.part
    mine = [m for m in left if int(digest(m.text), 16) % parts == which - 1]
    print(f"{len(every)} mutants and right programs, {len(mine)} to judge", flush=True)
    for mutant, verdict in judged(mine, options.seeds, options.jobs, options.seconds):
        kept.add(mutant, verdict)
    verdicts = kept.of(every)
    print(text := report(verdicts))
    if missing := sum(digest(m.text) not in kept.verdicts for m in every):
        print(f"\n{missing} of {len(every)} not judged yet")
    for path in keep(verdicts, options.keep):
        print(path)
    if options.out and not missing:
        write(options.out, text, verdicts, environment(options, time.perf_counter() - begun))
    right = {"innocent"}
    rejected = (v.mutant.operator == ORIGINAL and v.outcome not in right for v in verdicts)
    return int(any(v.outcome == "missed" for v in verdicts) or any(rejected))


if __name__ == "__main__":
    raise SystemExit(main())
