"""The checker against a sample of mutants; `python -m benchmarks.mutation` judges all of them, under more schedules."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import hostir as hi
from tests.mutants import Mutant, mutants
from tests.mutation import Verdict, convicted, errors, every_mutant, judge, originals, sample

MUTANTS, SEEDS = 150, 40
ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.xdist_group("mutation")  # one process, as all of them look at the same programs


@cache
def verdicts() -> list[Verdict]:
    judged = (judge(mutant, SEEDS) for mutant in sample(every_mutant(originals()), MUTANTS))
    return [verdict for verdict in judged if verdict is not None]


def told(verdict: Verdict) -> str:
    mutant = verdict.mutant
    return "\n".join([f"{mutant.kind} in @{mutant.of}: {mutant.what}", verdict.guilt, *verdict.findings, mutant.text])


def test_every_guilty_mutant_is_rejected() -> None:
    missed = [verdict for verdict in verdicts() if verdict.outcome == "missed"]
    assert not missed, "\n".join(map(told, missed))


def test_the_sample_holds_guilty_and_innocent_mutants_of_many_kinds() -> None:
    caught = {v.mutant.kind for v in verdicts() if v.outcome == "caught"}
    innocent = {v.mutant.kind for v in verdicts() if v.outcome == "innocent"}
    assert len(caught) > 25
    assert len(innocent) > 10


def test_no_right_program_is_rejected() -> None:
    rejected = {str(p): said for p in originals() if (said := errors(hi.check(p)))}
    assert rejected == {}


def test_a_right_program_is_convicted_by_no_schedule() -> None:
    programs = [p for p in originals() if p.outputs and p.ranks == 2][::9]  # here: every run of pytest would make them
    assert {str(p): guilt for p in programs if (guilt := convicted(p, SEEDS))} == {}


def test_a_mutant_differs_from_its_program_and_from_every_other() -> None:
    for program in originals()[::20]:
        texts = [str(program), *(m.text for m in mutants(program))]
        assert len(set(texts)) == len(texts) > 2


def test_a_sample_is_even_over_the_kinds_and_the_same_every_time() -> None:
    found = [
        Mutant(kind, "p", "", f"{kind}{n}") for kind, count in (("a", 9), ("b", 2), ("c", 5)) for n in range(count)
    ]
    chosen = sample(found, 8)
    assert sorted(m.kind for m in chosen) == ["a"] * 3 + ["b"] * 2 + ["c"] * 3
    assert chosen == sample(found, 8)


def test_the_page_shows_what_was_measured() -> None:
    measured = (ROOT / "benchmarks/results/mutation.md").read_text().split("\n\n")
    tables = [part.strip() for part in measured if part.startswith("| ")]
    page = (ROOT / "docs/mutation.md").read_text()
    assert len(tables) == 2
    assert all(table in page for table in tables)
