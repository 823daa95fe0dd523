"""Measure how long the checker takes for different numbers of ranks: an MLP with 64 slices, by every strategy.

    python -m benchmarks.check --out benchmarks/results/check
    python -m benchmarks.check --mutants 30000  compare a check of one rank with a check of all ranks, on mutants

With `--mutants` there is one line for programs of meshes with one axis, one for two axes, and one for 2 x 2 x 2 ranks.

All ranks run the same statements, so the checker looks at one rank. The table counts the unrolled statements of this
rank in all checked calls. If all ranks together have at most `ALL` statements, it also has the time of a check of all
ranks. Times are the best of three, in a process of one thread.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import Pool
from pathlib import Path

from rich.console import Console
from rich.progress import track

import hostir as hi
from benchmarks.harness import table, write
from examples import patterns
from hostir import knobs
from hostir.check import check_structure
from hostir.check.one_rank.alike import alike
from hostir.check.proof import Analysis, analyse, analyse_quickly, judge
from hostir.check.small_sizes import small_sizes
from hostir.ir import Program
from hostir.ir.machine import unrolled_length
from hostir.lower import STRATEGIES
from tests.judging.mutants import Mutant
from tests.judging.mutation import SENT, every_mutant, on_grid, originals, sample, tiny

RANKS = (8, 16, 32, 64)
SLICES = 64
GRIDS = ((2, 2), (2, 4), (3, 2), (4, 2))  # meshes of two axes
ALL = 100_000  # the most statements of all ranks and calls for which all ranks are checked as well


def mlp(strategy: str, ranks: int) -> Program:
    """Return the program to check."""
    with knobs.scope(spec=0):
        return hi.lower(patterns.mlp(ranks=ranks, S=SLICES, M=ranks * SLICES * 4, H=2 * ranks), strategy)


def measure(strategy: str, ranks: int) -> dict[str, object]:
    """Return a row of the table: the seconds of a check, and the numbers of statements and events."""
    program = mlp(strategy, ranks)
    seconds, analysis = best(lambda: analyse_quickly(program))
    order = alike(program, {}, analysis.calls)
    assert order, "ranks are not alike"
    statements = analysis.calls * unrolled_length(program.body, {})
    all_ranks = best(lambda: analyse(program))[0] if ranks * statements <= ALL else None
    return {
        "strategy": strategy,
        "ranks": ranks,
        "calls": analysis.calls,
        "statements of a rank": statements,
        "events": len(order.events),
        "seconds": seconds,
        "seconds for all ranks": all_ranks or "",
    }


def best(check: Callable[[], Analysis]) -> tuple[float, Analysis]:
    """Return the seconds of the fastest of three checks, and the analysis. There must be no findings."""
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        analysis = check()
        seconds.append(time.perf_counter() - begun)
        assert not analysis.findings, analysis.findings
    return round(min(seconds), 3), analysis


# One rank against all ----------------------------------------------------------------------------------------------
def programs() -> list[Program]:
    """Return the correct programs that are mutated. They have up to 8 ranks and 8 slices."""
    more = [
        hi.lower(tiny(pattern, ranks, slices), strategy)
        for pattern in patterns.PATTERNS
        for ranks, slices in ((3, 2), (4, 4), (8, 1), (8, 2), (8, 8))
        for strategy in STRATEGIES
        if pattern in SENT or strategy in ("sequential", "pipeline")
    ]
    more += [program for grid in GRIDS for program in on_grid(*grid)]
    with knobs.scope(spec=0):
        more += [hi.lower(tiny(patterns.mlp_3d, 8, 2), strategy) for strategy in STRATEGIES]
    return [*originals(), *{str(p): p for p in more}.values()]


OUTCOMES = ("both right", "both wrong", "DIFFERENT", "ranks differ", "no structure", "no program")


def compare(mutant: Mutant) -> str:
    """Check a mutant by tracing one rank, and by tracing all ranks; return the outcome of the comparison."""
    try:
        program = hi.parse(mutant.text, mutant.name)
    except hi.HostIRError:
        return "no program"
    if check_structure(program) or (sizes := small_sizes(program, {})) is None:
        return "no structure"
    order = alike(program, sizes, 2)
    if order is None:
        return "ranks differ"
    wrong, all_wrong = bool(judge(program, order, sizes, 2).findings), bool(analyse(program, sizes, 2).findings)
    if wrong != all_wrong:
        print(f"{mutant.name}: {mutant.change}: one rank says {wrong}, all say {all_wrong}", flush=True)
        return "DIFFERENT"
    return "both wrong" if wrong else "both right"


def against_all(most: int) -> None:
    """Compare checks of one rank with checks of all ranks, on at most `most` mutants for each number of mesh axes."""
    by_axes: dict[int, list[Program]] = {}
    for program in programs():
        by_axes.setdefault(max(len(mesh.axes) for mesh in program.meshes), []).append(program)
    rows = []
    for axes, group in sorted(by_axes.items()):
        mutants = sample(every_mutant(group), most)
        with Pool() as pool:
            counts = Counter(pool.imap_unordered(compare, mutants, chunksize=8))
        rows.append([str(axes), str(len(mutants)), *(str(counts[outcome]) for outcome in OUTCOMES)])
    print(table(["axes", "mutants", *OUTCOMES], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--mutants",
        type=int,
        default=0,
        help="compare one rank with all ranks, on this number of mutants for each number of axes",
    )
    options = parser.parse_args()
    if options.mutants:
        against_all(options.mutants)
        return
    console = Console(stderr=True)
    sizes = [(strategy, ranks) for strategy in STRATEGIES for ranks in RANKS]
    rows = [measure(*size) for size in track(sizes, "checking", console=console, disable=not console.is_terminal)]
    headers = list(rows[0])
    text = table(headers, [[str(row[h]) for h in headers] for row in rows])
    print(text)
    if options.out:
        write(options.out, "The checker's time", text, {"rows": rows})


if __name__ == "__main__":
    main()
