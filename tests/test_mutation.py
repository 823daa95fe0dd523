"""The checker on a sample of mutants; `python -m benchmarks.mutation` judges all of them in more schedules."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import hostir as hi
from tests.judging.mutants import Mutant, mutants
from tests.judging.mutation import Verdict, every_mutant, judge, originals, sample
from tests.judging.simulated import errors, failure_of

MUTANTS, SEEDS = 150, 40
ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.xdist_group("mutation")  # in one process, because all tests lower the same programs


@cache
def verdicts() -> list[Verdict]:
    judged = (judge(mutant, SEEDS) for mutant in sample(every_mutant(originals()), MUTANTS))
    return [verdict for verdict in judged if verdict is not None]


def description(verdict: Verdict) -> str:
    mutant = verdict.mutant
    head = f"{mutant.operator} in @{mutant.name}: {mutant.change}"
    return "\n".join([head, verdict.guilt, *verdict.findings, mutant.text])


@pytest.mark.slow
def test_every_guilty_mutant_is_rejected() -> None:
    missed = [verdict for verdict in verdicts() if verdict.outcome == "missed"]
    assert not missed, "\n".join(map(description, missed))


@pytest.mark.slow
def test_the_sample_holds_guilty_and_innocent_mutants_of_many_operators() -> None:
    caught = {v.mutant.operator for v in verdicts() if v.outcome == "caught"}
    innocent = {v.mutant.operator for v in verdicts() if v.outcome == "innocent"}
    assert len(caught) > 25
    assert len(innocent) > 10


@pytest.mark.slow
def test_every_correct_program_is_accepted() -> None:
    rejected = {str(p): messages for p in originals() if (messages := errors(hi.check(p)))}
    assert rejected == {}


@pytest.mark.slow
def test_a_correct_program_fails_in_no_schedule() -> None:
    programs = [p for p in originals() if p.outputs and p.ranks == 2][::9]
    assert {str(p): guilt for p in programs if (guilt := failure_of(p, SEEDS))} == {}


def test_a_mutant_differs_from_its_program_and_from_every_other() -> None:
    for program in originals()[::20]:
        texts = [str(program), *(m.text for m in mutants(program))]
        assert len(set(texts)) == len(texts) > 2


def test_a_sample_has_equally_many_mutants_of_each_operator_and_is_the_same_every_time() -> None:
    counts = {"a": 9, "b": 2, "c": 5}
    drawn = [Mutant(name, "p", "", f"{name}{n}") for name, count in counts.items() for n in range(count)]
    chosen = sample(drawn, 8)
    assert sorted(m.operator for m in chosen) == ["a"] * 3 + ["b"] * 2 + ["c"] * 3
    assert chosen == sample(drawn, 8)


def test_the_page_on_mutation_shows_the_results_of_the_benchmark() -> None:
    names = "mutation", "mutation_experts", "mutation_sums"
    results = [(ROOT / f"benchmarks/results/{name}.md").read_text() for name in names]
    tables = [part.strip() for text in results for part in text.split("\n\n") if part.startswith("| ")]
    page = (ROOT / "docs/mutation.md").read_text()
    assert len(tables) == 5
    assert all(table in page for table in tables)
