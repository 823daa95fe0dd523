"""What repairs give back: every program with one synchronisation taken out, repaired, and its longest chain of work.

    python -m benchmarks.repair --limit 60                               a first look
    python -m benchmarks.repair --out benchmarks/results/repair          all of them

A repair (`hostir check --fix`) should not have a longer chain of work than the original program
(`tests/judging/mutation.py`). The benchmark prints each repair with a longer chain and each program that was not
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
    """A mutant with one synchronisation less, and its repair.

    Fields:
        before: the longest chain of the program that was right.
        after: that of the repair; -1 where there is none, or something is found in it.
        why: what is wrong where there is none.
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
    """Every mutant of these programs with one synchronisation less, with the program that it was made from."""
    kinds = {f"delete {name}" for name in SYNCHRONISATIONS}
    for program in programs:
        yield from ((program, mutant) for mutant in mutants(program) if mutant.operator in kinds)


def repaired(original: Program, mutant: Mutant) -> Repaired:
    """The repair of a mutant, read back from its text."""
    before, start = chain(original), time.perf_counter()
    try:
        after = hi.parse(str(repair(hi.parse(mutant.text, mutant.name))), mutant.name)
    except HostIRError as refused:
        return Repaired(mutant, before, -1, time.perf_counter() - start, refused.diagnostics[0].message)
    seconds = time.perf_counter() - start
    if found := analyse(after).findings:
        return Repaired(mutant, before, -1, seconds, f"not repaired: {found[0].message}")
    return Repaired(mutant, before, chain(after), seconds)


def chain(program: Program) -> int:
    order = analyse(program).order
    if order is None:
        raise HostIRError(*analyse(program).findings)
    return longest_chain(order)


def main() -> None:
    """Repairs them, prints what each kind came to, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=0, help="at most so many, drawn at random (default: all)")
    parser.add_argument("--out", type=Path, help="writes .json and .md there")
    given = parser.parse_args()
    every = list(broken(originals()))
    if given.limit:
        every = Random(0).sample(every, min(given.limit, len(every)))
    counts = {kind: Counter[str]() for kind in sorted({mutant.operator for _, mutant in every})}
    slowest, bad = 0.0, list[str]()
    for original, mutant in every:
        found = repaired(original, mutant)
        slowest = max(slowest, found.seconds)
        counts[mutant.operator]["as short" if found.good else "longer" if found.after >= 0 else "not repaired"] += 1
        if not found.good:
            end = found.why or f"the longest chain grows from {found.before} to {found.after}"
            bad.append(f"@{mutant.name} {mutant.change}: {end}")
            print(bad[-1], flush=True)
    outcomes = ("as short", "longer", "not repaired")
    total = {"all": sum(counts.values(), Counter[str]())}
    rows = [[kind, str(n.total()), *(str(n[outcome]) for outcome in outcomes)] for kind, n in (counts | total).items()]
    text = table(["edit", "mutants", *outcomes], rows) + f"\n\nThe slowest repair took {slowest:.1f} s."
    print(text)
    if given.out:
        data = {"counts": {kind: dict(n) for kind, n in counts.items()}, "slowest_s": round(slowest, 1), "bad": bad}
        listed = "\n\n" + "\n".join(f"- {line}" for line in bad) if bad else ""
        write(given.out, "Repairs of programs that lack one synchronisation", text + listed, data)


if __name__ == "__main__":
    main()
