"""`hi.check` has findings for whatever is wrong with a program, and raises for none."""

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
from tests.mutants import _edits

ROOT = Path(__file__).parent / "cases"
SEED = 17


@cache
def programs() -> list[Program]:
    """All cases of at most four ranks that are programs: tests/test_bad_input.py has the others."""
    found = []
    for path in sorted(ROOT.rglob("*.hir")):
        with contextlib.suppress(hi.HostIRError):
            found.append(hi.parse(path.read_text(encoding="utf-8", errors="replace"), path.name))
    return [program for program in found if program.ranks <= 4]


JUNK: tuple[Any, ...] = (
    *(None, 0, -1, 10**30, 1.5, True, "x", b"", (), [], (Lit(0),), Kind.HANDLE),
    *(Lit(0), Lit(-1), Lit(10**20), Bin("/", Lit(1), Lit(0)), Bin("^", Lit(1), Lit(1))),
    *(Size(3), Size(0), Size(-2), Size(1, 7), Size(10**17), Size(1, 1, (("Q", 1),))),
)


def _checked(program: Program, **options: Any) -> list[hi.Diagnostic]:
    found = hi.check(program, **options)
    assert all(str(finding) for finding in found)
    return found


@pytest.mark.parametrize("sizes", [{}, {"M": 5}], ids=str)
def test_every_text_is_checked_for_any_sizes(sizes: dict[str, int]) -> None:
    assert len(programs()) > 100
    sound = [program for program in programs() if sizes.keys() <= program.size_names]
    found = [_checked(program, sizes=sizes) for program in sound]
    assert sum(map(bool, found)) >= {0: 40, 1: 1}[len(sizes)]


def test_mutants_are_checked_that_are_not_even_texts() -> None:
    found = [mutant for program in programs()[::5] if program.meshes for _, _, mutant in _edits(program)]
    chosen = Random(SEED).sample(found, 300)
    assert sum(bool(_checked(mutant)) for mutant in chosen) > 100


def _other_types(value: Value) -> Iterator[Value]:
    """The value with other types, such as no text has."""
    yield from (replace(value, type=kind) for kind in Kind)
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


def _held_otherwise(held: Any, random: Random, program: Program) -> Any:
    """What a field may be given in place of what it holds: half of the time something of its own kind."""
    named = [v for s in program.walk() for v in s.named] or [Value("v", Kind.INDEX)]
    alike: list[Any] = []
    if isinstance(held, Value):
        alike = [random.choice(named), *_other_types(held)]
    elif isinstance(held, tuple):
        alike = [held[1:], held * 2, held[::-1]]
    elif isinstance(held, Lit | Ref | Bin):
        alike = [Ref(random.choice(named)), Bin("%", held, Lit(0)), Bin("-", Lit(0), held), Bin("*", held, Lit(10**17))]
    elif isinstance(held, Size):
        alike = [held * Size(1, 1, (("M", 1),)), held / 7, Size(10**12)]
    return random.choice(alike if alike and random.random() < 0.7 else JUNK)


def _put(block: tuple[Statement, ...], old: Statement, new: Statement) -> tuple[Statement, ...]:
    def inside(s: Statement) -> Statement:
        blocks = {name: _put(getattr(s, name), old, new) for name, c in codecs_of(type(s)).items() if c is Codec.BLOCK}
        return replace(s, **blocks) if blocks else s

    return tuple(new if s is old else inside(s) for s in block)


def mangled(program: Program, random: Random) -> Program | None:
    """The program with another thing in one field of it or of a statement; None where none can be built."""
    statements = list(program.walk())
    s = random.choice(statements) if statements and random.random() < 0.85 else None
    name = random.choice(
        [f.name for f in fields(s or program) if f.init and f.name not in ("span", "note")] or ["span"]
    )
    try:
        other = replace(s or program, **{name: _held_otherwise(getattr(s or program, name), random, program)})
    except hi.HostIRError:
        return None
    return other if isinstance(other, Program) else program.with_body(_put(program.body, s, other))


def test_programs_that_python_mangled_are_checked() -> None:
    random = Random(SEED)
    drawn = (mangled(random.choice(programs()), random) for _ in range(1500))
    found = [_checked(program, ranks=random.choice((None, 2))) for program in drawn if program]
    assert sum(map(bool, found)) > 700


@pytest.mark.parametrize(
    ("field", "held", "message"),
    [
        ("streams", "two", "field 'streams' of the program is 'two'"),
        ("meshes", (), "field 'meshes' of the program is ()"),
        ("body", ("free",), "'free' stands among the statements"),
    ],
)
def test_what_no_program_can_hold_is_named(field: str, held: Any, message: str) -> None:
    (found,) = hi.check(replace(programs()[0], **{field: held}))
    assert message in found.message
    assert found.expected


def test_a_fusion_that_is_not_finished_is_a_finding() -> None:
    with hi.Fusion("f") as fusion:
        hi.tensor("a", ["M", 8])
    (found,) = hi.check(fusion)
    assert "fusion @f has no output" in found.message


@pytest.mark.parametrize(
    "options", [{"calls": 0}, {"calls": 33}, {"calls": "two"}, {"ranks": "two"}, {"sizes": {"two": 4}}], ids=str
)
def test_arguments_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(hi.HostIRError, match=r"two|calls=(0|33)"):
        hi.check(hi.parse((ROOT / "patterns" / "mlp-ring.hir").read_text()), **options)
