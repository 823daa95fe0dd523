"""Remove one synchronisation from a program, repair it, and compare its longest chain of work with the original's.

    python -m benchmarks.repair --limit 60                               a first look
    python -m benchmarks.repair --out benchmarks/results/repair          all of them

A repair (`hostir check --fix`) should not have a longer chain of work than the original program (see `originals` in
`tests/judging/mutation.py`). The benchmark prints each repair with a longer chain and each program that was not
repaired, and lists them below the table.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import hostir as hi
from benchmarks.harness import table, write
from hostir.check.proof import analyse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.repair.repair import longest_chain, repair
from tests.judging.mutants import Mutant, mutants
from tests.judging.mutation import originals

SYNCHRONISATIONS = ("fork", "join", "synchronize", "wait", "wait_signal", "signal", "barrier", "ready")


@dataclass(frozen=True)
class Repaired:
    """A mutant that lacks one synchronisation, and its repair.

    Fields:
        before: the longest chain of the original program.
        after: the longest chain of the repair; -1 if the repair failed or has findings.
        why: the reason if the repair failed or has findings.
    """

    mutant: Mutant
    before: int
    after: int
    seconds: float
    why: str = ""

    @property
    def good(self) -> bool:
        return 0 <= self.after <= self.before


def broken(programs: Sequence[Program]) -> Iterator[tuple[Program, Mutant]]:
    """Yield each program with each of its mutants that lacks one synchronisation."""
    kinds = {f"delete {name}" for name in SYNCHRONISATIONS}
    for program in programs:
        yield from ((program, mutant) for mutant in mutants(program) if mutant.operator in kinds)


def repaired(original: Program, mutant: Mutant) -> Repaired:
    """Repair a mutant. The repaired program is printed and parsed again before it is judged."""
    before, start = chain(original), time.perf_counter()
    try:
        after = hi.parse(str(repair(hi.parse(mutant.text, mutant.name))), mutant.name)
    except HostIRError as refused:
        return Repaired(mutant, before, -1, time.perf_counter() - start, refused.diagnostics[0].message)
    seconds = time.perf_counter() - start
    if findings := analyse(after).findings:
        return Repaired(mutant, before, -1, seconds, f"not repaired: {findings[0].message}")
    return Repaired(mutant, before, chain(after), seconds)


def chain(program: Program) -> int:
    order = analyse(program).order
    if order is None:
        raise HostIRError(*analyse(program).findings)
    return longest_chain(order)


def main() -> None:
    """Repair all mutants; print and write the outcomes for each kind of edit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=0, help="the most mutants, drawn at random (default: all)")
    parser.add_argument("--out", type=Path, help="write .json and .md files with this name")
    options = parser.parse_args()
    every = list(broken(originals()))
    if options.limit:
        every = Random(0).sample(every, min(options.limit, len(every)))
    counts = {kind: Counter[str]() for kind in sorted({mutant.operator for _, mutant in every})}
    slowest, bad = 0.0, list[str]()
    for original, mutant in every:
        result = repaired(original, mutant)
        slowest = max(slowest, result.seconds)
        counts[mutant.operator]["as short" if result.good else "longer" if result.after >= 0 else "not repaired"] += 1
        if not result.good:
            end = result.why or f"the longest chain grows from {result.before} to {result.after}"
            bad.append(f"@{mutant.name} {mutant.change}: {end}")
            print(bad[-1], flush=True)
    outcomes = ("as short", "longer", "not repaired")
    total = {"all": sum(counts.values(), Counter[str]())}
    rows = [[kind, str(n.total()), *(str(n[outcome]) for outcome in outcomes)] for kind, n in (counts | total).items()]
    text = table(["edit", "mutants", *outcomes], rows) + f"\n\nThe slowest repair took {slowest:.1f} s."
    print(text)
    if options.out:
        data = {"counts": {kind: dict(n) for kind, n in counts.items()}, "slowest_s": round(slowest, 1), "bad": bad}
        listed = "\n\n" + "\n".join(f"- {line}" for line in bad) if bad else ""
        write(options.out, "Repairs of programs that lack one synchronisation", text + listed, data)


if __name__ == "__main__":
    main()
