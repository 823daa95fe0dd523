"""Measure an executor's proofs: for the first sizes of a program, and for each of the next 100 values of M.

    python -m benchmarks.proofs --out benchmarks/results/proofs

Each pattern is lowered for 8 ranks with 8 slices by every strategy, once, with M as a symbol. For each value of M, the
benchmark measures the proof that an executor needs for a plan, in CPU milliseconds. At first, the cache has no proofs
of other programs. For each value of M, the program is also checked in full, and there must be no findings.
`--pattern NAME` measures one pattern, and `--quick` skips the full checks.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import hostir as hi
from benchmarks.harness import table, write
from examples import patterns
from hostir import knobs
from hostir.check import check, forget, prove
from hostir.ir import HostIRError, Program
from hostir.lower.strategies import STRATEGIES

RANKS, SLICES, FIRST, MORE = 8, 8, 256, 100


def programs(only: str | None) -> Iterator[tuple[str, str, Program]]:
    """Yield each pattern, lowered by each strategy that can lower it."""
    for pattern in patterns.PATTERNS:
        if only not in (None, pattern.__name__):
            continue
        known = pattern.__code__.co_varnames[: pattern.__code__.co_argcount]
        sizes: dict[str, Any] = {"ranks": RANKS, "S": SLICES, "M": "M"}
        fusion = pattern(**{name: value for name, value in sizes.items() if name in known})
        for strategy in STRATEGIES:
            try:
                with knobs.scope(spec=0):
                    yield pattern.__name__, strategy, hi.lower(fusion, strategy)
            except HostIRError:  # the strategy cannot overlap this pattern
                continue


def measure(pattern: str, strategy: str, program: Program, quick: bool) -> dict[str, Any]:
    """Return the milliseconds of the first proof, and of the slowest of the next 100 proofs."""
    forget()
    many = [FIRST + 64 * i for i in range(MORE + 1)]
    times = []
    for m in many if "M" in program.size_names else many[:1]:
        begun = time.thread_time()
        prove(program, {"M": m})
        times.append(1e3 * (time.thread_time() - begun))
        if not quick:
            errors = [finding for finding in check(program, sizes={"M": m}) if finding.level == "error"]
            assert not errors, (pattern, strategy, m, errors)
    return {
        "pattern": pattern,
        "strategy": strategy,
        "first, ms": round(times[0], 1),
        "most of the next 100, ms": round(max(times[1:], default=0.0), 3),
        "checked in full": 0 if quick else len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pattern")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)
    console = Console(stderr=True)
    selected = list(programs(options.pattern))
    rows = [
        measure(*each, options.quick)
        for each in track(selected, "proving", console=console, disable=not console.is_terminal)
    ]
    headers = list(rows[0])
    text = table(headers, [[str(row[h]) for h in headers] for row in rows])
    print(text)
    if options.out:
        write(options.out, "The time of an executor's proofs", text, {"rows": rows})


if __name__ == "__main__":
    main()
