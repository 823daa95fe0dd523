"""`hi.check` returns findings for any invalid program, and does not raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

import hostir as hi
from hostir.ir import Program
from hostir.ir.op import Bin, Codec, Lit, Ref, Statement, Value, codecs_of
from hostir.ir.sizes import Size
from hostir.ir.types import STREAM, Axis, DType, Kind, Mesh, TensorType
from tests.judging.mutants import edits

ROOT = Path(__file__).parent / "cases"
SEED = 17


@cache
def programs() -> list[Program]:
    """Return all cases that parse and have at most four ranks."""
    parsed = []
    for path in sorted(ROOT.rglob("*.hir")):
        with contextlib.suppress(hi.HostIRError):
            parsed.append(hi.parse(path.read_text(encoding="utf-8", errors="replace"), path.name))
    return [program for program in parsed if program.ranks <= 4]


JUNK: tuple[Any, ...] = (
    *(None, 0, -1, 10**30, 1.5, True, "x", b"", (), [], (Lit(0),), Kind.HANDLE),
    *(Lit(0), Lit(-1), Lit(10**20), Bin("/", Lit(1), Lit(0)), Bin("^", Lit(1), Lit(1))),
    *(Size(3), Size(0), Size(-2), Size(1, 7), Size(10**17), Size(1, 1, (("Q", 1),))),
)


def _checked(program: Program, **options: Any) -> list[hi.Diagnostic]:
    findings = hi.check(program, **options)
    assert all(str(finding) for finding in findings)
    return findings


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"M": 5}], ids=str)
def test_every_program_can_be_checked_at_any_sizes(sizes: dict[str, int]) -> None:
    assert len(programs()) > 100
    suitable = [program for program in programs() if sizes.keys() <= program.size_names]
    findings = [_checked(program, sizes=sizes) for program in suitable]
    assert sum(map(bool, findings)) >= {0: 40, 1: 1}[len(sizes)]


@pytest.mark.slow
def test_mutants_that_would_not_parse_can_be_checked() -> None:
    mutants = [mutant for program in programs()[::5] if program.meshes for _, _, mutant in edits(program)]
    chosen = Random(SEED).sample(mutants, 300)
    assert sum(bool(_checked(mutant)) for mutant in chosen) > 100


def _other_types(value: Value) -> Iterator[Value]:
    """Yield the value with other types, including types that cannot be written."""
    yield from (replace(value, type=other) for other in Kind)
    if not isinstance(value.type, TensorType):
        return
    type = value.type
    yield from (replace(value, type=replace(type, axes=axes)) for axes in ((), type.axes[1:], type.axes * 2, 3))
    yield from (replace(value, type=replace(type, mesh=mesh)) for mesh in (None, Mesh("z", ("q",), (3,), (0, 1, 2))))
    yield from (replace(value, type=replace(type, mesh=mesh)) for mesh in (Mesh("z", (), (), ()), "mesh"))
    yield from (replace(value, type=replace(type, partial=partial)) for partial in (("nope",), "didx", None))
    yield replace(value, type=replace(type, dtype=DType("f8", 1)))
    for mark in ("nope", STREAM):
        yield replace(value, type=replace(type, axes=tuple(Axis.of(3, mark) for _ in type.axes)))


def _replacement(old: Any, random: Random, program: Program) -> Any:
    """Return another value for a field: mostly one of the same type."""
    named = [v for s in program.walk() for v in s.named] or [Value("v", Kind.INDEX)]
    alike: list[Any] = []
    if isinstance(old, Value):
        alike = [random.choice(named), *_other_types(old)]
    elif isinstance(old, tuple):
        alike = [old[1:], old * 2, old[::-1]]
    elif isinstance(old, Lit | Ref | Bin):
        alike = [Ref(random.choice(named)), Bin("%", old, Lit(0)), Bin("-", Lit(0), old), Bin("*", old, Lit(10**17))]
    elif isinstance(old, Size):
        alike = [old * Size(1, 1, (("M", 1),)), old / 7, Size(10**12)]
    return random.choice(alike if alike and random.random() < 0.7 else JUNK)


def _put(block: tuple[Statement, ...], old: Statement, new: Statement) -> tuple[Statement, ...]:
    def inside(s: Statement) -> Statement:
        blocks = {name: _put(getattr(s, name), old, new) for name, c in codecs_of(type(s)).items() if c is Codec.BLOCK}
        return replace(s, **blocks) if blocks else s

    return tuple(new if s is old else inside(s) for s in block)


def mangled(program: Program, random: Random) -> Program | None:
    """Return the program with another value in one field of it or of a statement; None if that raises."""
    statements = list(program.walk())
    s = random.choice(statements) if statements and random.random() < 0.85 else None
    name = random.choice(
        [f.name for f in fields(s or program) if f.init and f.name not in ("span", "note")] or ["span"]
    )
    try:
        other = replace(s or program, **{name: _replacement(getattr(s or program, name), random, program)})
    except hi.HostIRError:
        return None
    return other if isinstance(other, Program) else program.with_body(_put(program.body, s, other))


def test_programs_with_arbitrary_fields_can_be_checked() -> None:
    random = Random(SEED)
    drawn = (mangled(random.choice(programs()), random) for _ in range(1500))
    findings = [_checked(program, ranks=random.choice((None, 2))) for program in drawn if program]
    assert sum(map(bool, findings)) > 700


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("streams", "two", "field 'streams' of the program is 'two'"),
        ("meshes", (), "field 'meshes' of the program is ()"),
        ("body", ("free",), "'free' stands among the statements"),
    ],
)
def test_an_invalid_field_of_a_program_is_named(field: str, value: Any, message: str) -> None:
    (finding,) = hi.check(replace(programs()[0], **{field: value}))
    assert message in finding.message
    assert finding.expected


def test_a_fusion_without_an_output_is_an_error() -> None:
    with hi.Fusion("f") as fusion:
        hi.tensor("a", ["M", 8])
    (finding,) = hi.check(fusion)
    assert "fusion @f has no output" in finding.message


@pytest.mark.parametrize(
    "options", [{"calls": 0}, {"calls": 33}, {"calls": "two"}, {"ranks": "two"}, {"sizes": {"two": 4}}], ids=str
)
def test_invalid_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(hi.HostIRError, match=r"two|calls=(0|33)"):
        hi.check(hi.parse((ROOT / "patterns" / "mlp-ring.hir").read_text()), **options)
