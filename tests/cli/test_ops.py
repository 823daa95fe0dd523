from __future__ import annotations

import re

import pytest

import hostir as hi
from hostir.__main__ import main
from hostir.cli.ops import entry, markdown, sections, table
from hostir.ir.op import REGISTRY, Statement, codecs_of

EVERY = pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)


@EVERY
def test_every_statement_has_an_entry_with_phases_fields_and_example(cls: type[Statement]) -> None:
    described = entry(cls)
    phases = {phase for phases, _ in described.forms for phase in phases.split(", ")}
    assert phases == {phase.value for phase in cls.phases}
    assert all(described.keyword in text for _, text in described.forms)
    assert {name for _, names in described.fields for name in re.findall(r"`(\w+)`", names)} == set(codecs_of(cls))
    assert described.keyword in described.example
    assert described.summary.endswith(".")


def test_every_statement_is_in_one_section() -> None:
    keywords = [e.keyword for entries in sections().values() for e in entries]
    assert sorted(keywords) == sorted(REGISTRY)
    assert all(sections().values())


def test_syntax_marks_optional_parts_and_results_with_a_type() -> None:
    forms = {e.keyword: dict(e.forms) for entries in sections().values() for e in entries}
    assert forms["linear"] == {
        "fusion": "%out: <type> = linear %a, %weight(, %bias)?",
        "program": "linear %a, %weight(, %bias)? -> %out "
        "(ready %ready >= <epoch>)? (done %done = <raised>)? (from <first>)? (own %own)?",
    }
    assert forms["select"] == {"program": "%out = select %x[<index>] (axis <axis>)?"}
    assert forms["reshape"] == {"fusion, program": "%out: <type> = reshape %x"}
    assert forms["allgather"]["program"] == "%handle = allgather %x -> %out over <over> (by <by>)?"
    assert forms["for"] == {"program": "for %index in 0..<count> { ... }"}


def test_fields_are_listed_by_role_with_their_defaults() -> None:
    fields = dict(entry(REGISTRY["select"]).fields)
    assert fields["integer"] == "`axis` (0 unless said)"
    read = dict(entry(REGISTRY["linear"]).fields)["tensor operand that is read"]
    assert read == "`a`, `weight`, `own` (may be left out), `bias` (may be left out)"


def test_the_program_on_the_page_has_no_findings() -> None:
    text = re.search(r"```hir\n(.*?)```", markdown(), re.DOTALL)
    assert text
    program = hi.parse(text[1])
    assert hi.check(program) == []
    assert hi.parse(str(program)) == program


def test_every_type_on_the_page_parses() -> None:
    types = re.findall(r"^\| `(f32\[.*?)` \|", markdown(), re.MULTILINE)
    assert len(types) >= 6
    for text in types:
        hi.parse(
            "hostir 1\nmesh @mesh [didx] = 0 1 2 3\nmesh @grid [dp, tp] = (0 1) (2 3)\n"
            f"fusion @f(%a: {text if 'dp' not in text else text + ' on @grid'}) -> () {{ }}"
        )


def test_the_table_has_one_line_for_each_statement() -> None:
    lines = table().splitlines()
    assert "  wait %handle " in "\n".join(lines)
    assert sum(line.startswith("  ") for line in lines) == len(REGISTRY)


def test_the_command_prints_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    assert capsys.readouterr().out == table() + "\n"
    assert main(["ops", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown() + "\n"
