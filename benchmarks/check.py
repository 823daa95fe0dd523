"""How long the checker takes, and how that grows: the pipelined all-gather + matmul on more and more ranks and slices.

    python benchmarks/check.py --out benchmarks/results/check

Statements are counted as unrolled, over all ranks of one call; two calls are checked. Times are the best of three, in a
process of one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from harness import table, write
from rich.console import Console
from rich.progress import track

import hostir as hi
from hostir import knobs
from hostir.ir import Program, check
from hostir.ir.check.orders import analyse
from hostir.ir.interpret import unrolled

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import patterns

SIZES = [(2, 2), (4, 4), (8, 8), (16, 16), (32, 32), (64, 64)]
STREAMS = 4


def pipeline(ranks: int, slices: int) -> Program:
    """The program to check."""
    with knobs.scope(spec=0):
        return hi.lower(patterns.allgather_matmul(ranks=ranks, S=slices, M=ranks * slices * 4), streams=STREAMS)


def measure(ranks: int, slices: int) -> dict[str, float]:
    """Seconds that a check takes, and how much it looks at."""
    program = pipeline(ranks, slices)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        findings = check(program)
        seconds.append(time.perf_counter() - begun)
        assert not findings, findings
    order = analyse(program).order
    assert order
    return {
        "ranks": ranks,
        "slices": slices,
        "statements": ranks * unrolled(program.body, {}),
        "events": len(order.events),
        "lanes": len(order.lanes),
        "seconds": round(min(seconds), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console = Console(stderr=True)
    rows = [measure(*size) for size in track(SIZES, "checking", console=console, disable=not console.is_terminal)]
    for before, row in zip([None, *rows], rows, strict=False):
        row["growth"] = (
            round(row["seconds"] / before["seconds"] / (row["events"] / before["events"]), 2) if before else 1
        )
    headers = list(rows[0])
    text = table(headers, [[str(row[h]) for h in headers] for row in rows])
    print(text)
    if options.out:
        write(options.out, "The checker's time", text, {"rows": rows})


if __name__ == "__main__":
    main()
