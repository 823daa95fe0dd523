"""Programs as text: a printed program parses back equal, fast, and every mistake is reported at its position."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from unittest.mock import ANY

import pytest
from hypothesis import given, settings

import hostir as hi
from hostir.ir import HostIRError, Phase, Program, Statement, format_program, format_statement
from hostir.ir.op import REGISTRY
from tests.strategies import programs

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\n"


def program(
    body: str, inputs: str = "%a: f32[4@didx, 8], %b: f32[4, 8]", outputs: str = "%b", streams: str = ""
) -> str:
    return f"{HEAD}program @p({inputs}) -> ({outputs}){streams} {{\n{body}}}\n"


@settings(max_examples=300)
@given(programs())
def test_a_program_reads_back_equal_and_prints_the_same_bytes(drawn: Program) -> None:
    text = str(drawn)
    again = hi.parse(text)
    assert again == drawn
    assert str(again) == text
    assert again.digest == drawn.digest
    assert all(hash(s) == hash(t) and repr(s) == repr(t) for s, t in zip(again.walk(), drawn.walk(), strict=True))


def test_statements_with_equal_operands_are_equal_at_any_position() -> None:
    one, other, third = hi.parse(program("  copy %a -> %b\n\n  copy %a -> %b // again\n  add %a, %a -> %b\n")).body
    assert one == other
    assert hash(one) == hash(other)
    assert one.span != other.span
    assert one != third
    assert one != "copy %a -> %b"
    assert repr(one) == "DenseCopy(out=%b: f32[4, 8], x=%a: f32[4@didx, 8])"
    assert one == ANY
    assert {c.__eq__ for c in REGISTRY.values()} == {Statement.__eq__}
    assert {c.__hash__ for c in REGISTRY.values()} == {Statement.__hash__}


def test_a_field_without_a_codec_is_named_in_the_error() -> None:
    @dataclass(frozen=True)
    class Bare(Statement):
        syntax = "bare {x}"
        x: int

    with pytest.raises(TypeError, match=r"Bare\.x has no codec"):
        Bare(x=1).uses(Phase.HOST)


def test_parsing_drops_comments_white_space_and_redundant_types() -> None:
    text = program("  %x = permute %a (1, 0)\n  relu %b -> %b\n")
    loose = text.replace("%x =", "%x :f32 [8,4@didx]= // mine\n").replace("relu %b", "relu\n\n%b")
    assert str(hi.parse(loose)) == text


def test_a_type_is_printed_if_it_differs_from_the_inferred_type() -> None:
    text = program("  %x: f32[(2@didx 4), 8] = select %c[0]\n", inputs="%b: f32[4, 8], %c: f32[4, 8@didx, 8]")
    parsed = hi.parse(text)
    assert str(parsed) == text
    assert hi.check(parsed) == []


def test_each_parameter_of_a_long_list_takes_a_line() -> None:
    inputs = ",\n    ".join(f"%input_{i}: bf16[4096@didx, 8192]" for i in range(4))
    text = f"{HEAD}program @p(\n    {inputs}\n) -> (%input_0) {{\n}}\n"
    assert str(hi.parse(text)) == text


def test_a_short_loop_prints_on_one_line() -> None:
    text = program("  for %s in 0..2 { set_stream %s   synchronize 0 }\n  for %i in 0..M { }\n", streams=" streams 2")
    assert str(hi.parse(text)) == text


def test_notes_print_as_comments_and_parsing_ignores_them() -> None:
    with hi.Fusion("f") as fusion:
        x = hi.tensor("x", [4, 6], "f32")
        y = hi.reshape(hi.permute(x, (1, 0)), [24])
        fusion.output(y)
    lowered = hi.lower(fusion)
    assert "// copy: " in str(lowered)
    assert hi.parse(str(lowered)) == lowered
    assert "//" not in format_program(lowered, notes=False)
    assert hi.parse(str(lowered)).digest == lowered.digest


def test_one_statement_prints_on_one_line_without_the_body_of_a_loop() -> None:
    parsed = hi.parse(program("  for %i in 0..4 {\n    %x = select %b[%i]\n    relu %x -> %x\n  }\n"))
    assert [format_statement(s, parsed) for s in parsed.walk()] == [
        "for %i in 0..4",
        "%x = select %b[%i]",
        "relu %x -> %x",
    ]


def test_parentheses_preserve_the_order_of_index_arithmetic() -> None:
    text = program("  set_stream (1 + 2) * (7 - (3 / 2)) % 2\n", streams=" streams 2")
    assert "set_stream ((1 + 2) * (7 - (3 / 2))) % 2" in str(hi.parse(text))


@pytest.mark.parametrize(
    ("body", "at", "message"),
    [
        ("  relu %b -> %bb\n", (4, 14), "%bb is not defined here"),
        ("  rely %b -> %b\n", (4, 3), "unknown statement 'rely'"),
        ("  relu %b %b\n", (4, 11), "unexpected '%b'"),
        ("  relu %b -> %b\n\n    relu", (6, 9), "the text ends too early"),
        ("  for %i in 0..4 {\n    set_stream %i\n  }\n  set_stream %i\n", (7, 14), "%i is not defined here"),
    ],
)
def test_a_mistake_is_reported_at_its_line_and_column(body: str, at: tuple[int, int], message: str) -> None:
    text = program(body)
    with pytest.raises(HostIRError) as wrong:
        hi.parse(text.removesuffix("}\n") if body.endswith("relu") else text, "file.hir")
    diagnostic = wrong.value.diagnostics[0]
    assert diagnostic.message == message
    assert diagnostic.span is not None
    assert (diagnostic.span.file, diagnostic.span.line, diagnostic.span.column) == ("file.hir", *at)
    assert f"file.hir:{at[0]}:{at[1]}: error: {message}" in str(wrong.value)


def test_a_syntax_error_names_the_expected_tokens_and_the_nearest_keyword() -> None:
    with pytest.raises(HostIRError) as wrong:
        hi.parse(program("  matmull %a, %b -> %b\n"), "file.hir")
    assert str(wrong.value).splitlines() == [
        "file.hir:4:3: error: unknown statement 'matmull'",
        "    4 |   matmull %a, %b -> %b",
        "      |   ^^^^^^^",
        "  expected: a statement or '}'",
        "  hint: did you mean 'matmul'?",
    ]


def test_a_finding_in_a_statement_underlines_all_of_it() -> None:
    findings = hi.check(hi.parse(program("  matmul %a,   %b -> %b\n"), "file.hir"))
    assert findings[0].span is not None
    assert (findings[0].span.column, findings[0].span.width) == (3, len("matmul %a,   %b -> %b"))


def test_five_thousand_statements_parse_in_a_second_and_a_half() -> None:
    body = "".join(f"  %x{i} = select %a[{i % 4}]\n  matmul %x{i}, %b -> %c\n" for i in range(2500))
    text = program(body, "%a: bf16[4, 8, 8], %b: bf16[8, 512], %c: bf16[8, 512]", "%c")
    code = f"""
import sys, time
import hostir as hi
text = sys.stdin.read()
hi.parse({program("")!r})  # the grammar is built once
for _ in range(4):
    begin = time.process_time()
    parsed = hi.parse(text)
    print(time.process_time() - begin, len(parsed.body))
"""
    # CPU time does not include the work of other processes. In a fresh process, the garbage collector does not
    # visit the objects of earlier tests.
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, statements = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    assert statements == ("5000",) * 4
    assert min(map(float, seconds)) < 1.5
