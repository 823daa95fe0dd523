"""What an executor's proofs take: the first sizes of a program, and each of the next 100 different M.

    python -m benchmarks.proofs --out benchmarks/results/proofs

All patterns on 8 ranks with 8 slices, by every strategy, lowered once with M as a symbol. For each M the proof that an
executor asks for when it makes a plan is timed, in milliseconds of the CPU; what was proved before of other programs is
forgotten. Each M is then checked in full, and must have no findings either. `--pattern NAME` takes one pattern, and
`--quick` skips the checks.
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
    """Each pattern by each strategy that can lower it."""
    for pattern in patterns.PATTERNS:
        if only not in (None, pattern.__name__):
            continue
        known = pattern.__code__.co_varnames[: pattern.__code__.co_argcount]
        given: dict[str, Any] = {"ranks": RANKS, "S": SLICES, "M": "M"}
        fusion = pattern(**{name: value for name, value in given.items() if name in known})
        for strategy in STRATEGIES:
            try:
                with knobs.scope(spec=0):
                    yield pattern.__name__, strategy, hi.lower(fusion, strategy)
            except HostIRError:  # it cannot overlap this
                continue


def measure(pattern: str, strategy: str, program: Program, quick: bool) -> dict[str, Any]:
    """Milliseconds of the first proof, and of the slowest of the next 100."""
    forget()
    many = [FIRST + 64 * i for i in range(MORE + 1)]
    times = []
    for m in many if "M" in program.size_names else many[:1]:
        begun = time.thread_time()
        prove(program, {"M": m})
        times.append(1e3 * (time.thread_time() - begun))
        if not quick:
            errors = [found for found in check(program, sizes={"M": m}) if found.level == "error"]
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
    found = list(programs(options.pattern))
    rows = [
        measure(*each, options.quick)
        for each in track(found, "proving", console=console, disable=not console.is_terminal)
    ]
    headers = list(rows[0])
    text = table(headers, [[str(row[h]) for h in headers] for row in rows])
    print(text)
    if options.out:
        write(options.out, "The time of an executor's proofs", text, {"rows": rows})


if __name__ == "__main__":
    main()
