"""How long the checker takes, and how that grows: an MLP by every strategy, with 64 slices on more and more ranks.

    python benchmarks/check.py --out benchmarks/results/check

Ranks are alike, so one of them is looked at; its statements are counted as unrolled, in as many calls as it takes.
Up to so many statements of all ranks, what a look at all of them takes stands beside. Times are the best of three, in
a process of one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness import table, write
from rich.console import Console
from rich.progress import track

import hostir as hi
from hostir import knobs
from hostir.ir import Program
from hostir.ir.check.alike import alike
from hostir.ir.check.orders import Analysis, analyse, look
from hostir.ir.interpret import unrolled
from hostir.lower import STRATEGIES

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import patterns

RANKS = (8, 16, 32, 64)
SLICES = 64
ALL = 100_000  # statements of all ranks and calls, up to which all are looked at too


def mlp(strategy: str, ranks: int) -> Program:
    """The program to check."""
    with knobs.scope(spec=0):
        return hi.lower(patterns.mlp(ranks=ranks, S=SLICES, M=ranks * SLICES * 4, H=2 * ranks), strategy)


def measure(strategy: str, ranks: int) -> dict[str, object]:
    """Seconds that a check takes, and how much it looks at."""
    program = mlp(strategy, ranks)
    seconds, analysis = best(lambda: look(program))
    order = alike(program, {}, analysis.calls)
    assert order, "ranks are not alike"
    statements = analysis.calls * unrolled(program.body, {})
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
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
