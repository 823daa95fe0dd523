"""Whether the checker notices what goes wrong: a table of mutants, guilty ones, and those it caught and missed.

    python -m benchmarks.mutation --limit 400                                        a first look, in minutes
    python -m benchmarks.mutation --limit 0 --out benchmarks/results/mutation        all of them

A mutant is a right program with one edit (`tests/mutants.py`). The checker should reject every one that the simulated
ranks convict (`tests/mutation.py`), and none of the programs that the mutants were made from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.mutants import Mutant
from tests.mutation import OUTCOMES, Verdict, edited_twice, every_mutant, judge, originals, sample, subject

ORIGINAL = "unchanged"  # the kind of the programs that the mutants are made from


def judged(found: Sequence[Mutant], seeds: int, processes: int) -> Iterator[Verdict]:
    """The verdict on each of these that can be read, in any order."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    spawn = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in whatever state they are
    with spawn.Pool(processes, torch.set_num_threads, (1,)) as pool, Progress(*columns) as progress:
        progress.disable = not progress.console.is_terminal
        verdicts = pool.imap_unordered(partial(judge, seeds=seeds), found, chunksize=4)
        for verdict in progress.track(verdicts, total=len(found), description="mutants"):
            if verdict is not None:
                yield verdict


def counted(verdicts: Iterable[Verdict]) -> dict[str, Counter[str]]:
    """How many of each outcome, by kind of edit, and in all."""
    kinds: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict.mutant.kind, Counter())[verdict.outcome] += 1
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
        (v.outcome, subject(v.findings[0]), v.mutant.kind) for v in verdicts if v.outcome in ("benign", "unfounded")
    )
    return "\n\n".join(
        [
            table(["edit", "mutants", "guilty", *OUTCOMES], rows),
            "Rejected, and convicted by no schedule that was tried:",
            table(["finding", "outcome", "edit", "mutants"], [[f, o, k, n] for (o, f, k), n in sorted(doubts.items())]),
        ]
    )


def keep(verdicts: Iterable[Verdict], folder: Path) -> list[Path]:
    """Writes the text of every miss, and of every one rejected without a conviction, to look at."""
    paths = []
    for v in verdicts:
        if v.outcome not in ("missed", "benign", "unfounded"):
            continue
        digest = hashlib.sha256(v.mutant.text.encode()).hexdigest()[:8]
        path = folder / v.outcome.replace(" ", "_") / f"{v.mutant.kind.replace(' ', '_')}-{v.mutant.of}-{digest}.hir"
        said = [f"{v.mutant.kind}: {v.mutant.what}", *filter(None, [v.guilt]), *v.findings]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"// {line}\n" for text in said for line in text.split("\n")) + v.mutant.text)
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
        "processes": given.processes,
        "seconds": round(seconds),
    }


def write(out: Path, text: str, verdicts: Sequence[Verdict], around: dict[str, Any]) -> None:
    """Writes `out`.json and `out`.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    kinds = {kind: dict(count) for kind, count in counted(verdicts).items()}
    out.with_suffix(".json").write_text(json.dumps({"environment": around, "kinds": kinds}, indent=1) + "\n")
    said = ", ".join(f"{name} {value}" for name, value in around.items())
    out.with_suffix(".md").write_text(f"# Mutants of right programs\n\n{said}\n\n{text}\n")


def main() -> int:
    """Judges, prints the tables and writes them; 1 where a guilty mutant is missed or a right program is rejected."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--limit", type=int, default=4000, help="mutants, even over the kinds; 0 for all")
    options.add_argument("--seeds", type=int, default=200, help="schedules of each mutant")
    options.add_argument("--keep", type=Path, default=Path("/tmp/mutation"), help="folder for what is to be looked at")
    options.add_argument("--out", type=Path, help="writes .json and .md there")
    given = options.parse_args()

    begun, programs = time.perf_counter(), originals()
    unchanged = [Mutant(ORIGINAL, p.name, "", str(p)) for p in programs]
    found = every_mutant(programs)
    chosen = sample(found, given.limit or len(found))
    pairs = edited_twice(found, len(chosen) // 4)
    verdicts = list(judged([*unchanged, *chosen, *pairs], given.seeds, given.processes))
    text = report(verdicts)
    print(text)
    for path in keep(verdicts, given.keep):
        print(path)
    if given.out:
        write(given.out, text, verdicts, environment(given, time.perf_counter() - begun))
    right = {"innocent"}
    return int(any(v.outcome == "missed" or (v.mutant.kind == ORIGINAL and v.outcome not in right) for v in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
