"""How long the checker takes, and how that grows: an MLP by every strategy, with 64 slices on more and more ranks.

    python -m benchmarks.check --out benchmarks/results/check
    python -m benchmarks.check --mutants 100000     does one rank get the verdict of all, on mutants of many programs?

Ranks are alike, so one of them is looked at; its statements are counted as unrolled, in as many calls as it takes.
Up to so many statements of all ranks, what a look at all of them takes stands beside. Times are the best of three, in
a process of one thread.
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
ALL = 100_000  # statements of all ranks and calls, up to which all are looked at too


def mlp(strategy: str, ranks: int) -> Program:
    """The program to check."""
    with knobs.scope(spec=0):
        return hi.lower(patterns.mlp(ranks=ranks, S=SLICES, M=ranks * SLICES * 4, H=2 * ranks), strategy)


def measure(strategy: str, ranks: int) -> dict[str, object]:
    """Seconds that a check takes, and how much it looks at."""
    program = mlp(strategy, ranks)
    seconds, analysis = best(lambda: analyse_quickly(program))
    order = alike(program, {}, analysis.calls)
    assert order, "ranks are not alike"
    statements = analysis.calls * unrolled_length(program.body, {})
    whole = best(lambda: analyse(program))[0] if ranks * statements <= ALL else None
    return {
        "strategy": strategy,
        "ranks": ranks,
        "calls": analysis.calls,
        "statements of a rank": statements,
        "events": len(order.events),
        "seconds": seconds,
        "seconds for all ranks": whole or "",
    }


def best(check: Callable[[], Analysis]) -> tuple[float, Analysis]:
    """The seconds of a check that finds nothing."""
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        analysis = check()
        seconds.append(time.perf_counter() - begun)
        assert not analysis.findings, analysis.findings
    return round(min(seconds), 3), analysis


# One rank against all ----------------------------------------------------------------------------------------------
def programs() -> list[Program]:
    """Programs of up to 8 ranks and 8 slices."""
    more = [
        hi.lower(tiny(pattern, ranks, slices), strategy)
        for pattern in patterns.PATTERNS
        for ranks, slices in ((3, 2), (4, 4), (8, 1), (8, 2), (8, 8))
        for strategy in STRATEGIES
        if pattern in SENT or strategy in ("sequential", "pipeline")
    ]
    more += [program for grid in GRIDS for program in on_grid(*grid)]
    return [*originals(), *{str(p): p for p in more}.values()]


def compare(mutant: Mutant) -> str:
    """Whether one rank stands for all in a mutant, and what is made of it then."""
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
    """Prints how often one rank gets the verdict of all, on so many mutants."""
    found = sample(every_mutant(programs()), most)
    with Pool() as pool:
        told = Counter(pool.imap_unordered(compare, found, chunksize=8))
    print(table(["mutants", "how many"], [[what, str(times)] for what, times in told.most_common()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--mutants", type=int, default=0, help="compare one rank with all, on so many mutants")
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
