"""Merging the verdicts of several calls of `benchmarks.mutation` into one table."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

import hostir as hi
from benchmarks import mutation
from benchmarks.mutation import Kept, report
from examples import patterns
from tests.judging.mutants import Mutant
from tests.judging.mutation import Verdict, tiny

CAUGHT = Verdict(Mutant("swap", "p", "swapped", "one"), (), ("race on %x: 'a'",), "seed 3: NaN")
MISSED = Verdict(Mutant("swap", "p", "swapped", "two"), (), (), "seed 0: NaN")
UNREAD = Mutant("swap", "p", "swapped", "three")


def test_verdicts_of_earlier_calls_are_merged_and_not_computed_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    Kept([first], seeds=200).add(CAUGHT.mutant, CAUGHT)
    later = Kept([second, first], seeds=200)
    later.add(MISSED.mutant, MISSED)
    later.add(UNREAD, None)
    with second.open("a") as ended:
        ended.write('["half a li')
    both = Kept([first, second], seeds=200)
    assert both.of([CAUGHT.mutant, MISSED.mutant, UNREAD]) == [CAUGHT, MISSED]
    assert len(both.verdicts) == 3
    assert "| swap | 2 | 2 | 0 | 1 | 1 | 0 | 0 | 0 |" in report(both.of([CAUGHT.mutant, MISSED.mutant]))


def test_verdicts_of_other_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Kept([tmp_path / "kept.jsonl"], seeds=200)
    with pytest.raises(SystemExit, match="judge anew"):
        Kept([tmp_path / "kept.jsonl"], seeds=100)
    monkeypatch.setattr(mutation, "digest_of_sources", lambda: "other")
    with pytest.raises(SystemExit, match="judge anew"):
        Kept([tmp_path / "kept.jsonl"], seeds=200)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b"])
def test_an_invalid_part_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutation.main(["--part", text])
    assert f"'{text}' is no part of a whole, such as 1/2" in capsys.readouterr().err


@pytest.fixture
def two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [hi.lower(tiny(fusion, 2, 2), "pipeline") for fusion in (patterns.mlp, patterns.moe_layer)]
    monkeypatch.setattr(mutation, "originals", lambda: programs)


@pytest.mark.usefixtures("two_programs")
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--only", "moe_layers"], "no program is called moe_layers; there are: mlp, moe_layer"),
        (["--only", "mlp", "--edits", "deletes"], "no kind of edit begins with 'deletes'; there are: .*delete"),
    ],
)
def test_unknown_programs_and_edits_are_refused(arguments: list[str], problem: str) -> None:
    with pytest.raises(SystemExit, match=problem):
        mutation.main(arguments)


@pytest.mark.usefixtures("two_programs")
def test_programs_are_selected_by_name_and_mutants_by_edit() -> None:
    options = Namespace(only=["mlp"], edits=["delete w", "delete join"], sums=False, hosts=False)
    (program,) = mutation.selected(options)
    assert program.name == "mlp"
    mutants = mutation.mutants_of([program], options)
    assert {mutant.operator for mutant in mutants} == {"delete wait", "delete join"}
    assert {mutant.name for mutant in mutants} == {"mlp"}
