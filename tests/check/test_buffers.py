"""The checker on buffers: overwritten operands, frees, and outputs that are never written."""

from __future__ import annotations

import re

import pytest
import torch

import hostir as hi
from hostir.call.local import run_local
from hostir.check import check_structure
from hostir.check.findings import Finding
from hostir.ir.source import Diagnostic, HostIRError
from tests.call.whole import run_whole

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\n"
INPUTS = "%a: f32[4, 4], %b: f32[4, 4], %p: f32[4, 4] partial(didx), %s: f32[4@didx, 4]"


def findings(body: str, outputs: str = "") -> list[Diagnostic]:
    """Return the errors of a program. Line 3 allocates and writes a buffer %c, and %me is the position of the rank."""
    head = f"{HEAD}program @p({INPUTS}) -> ({outputs}) streams 2 {{ %c: f32[4, 4] = allocate relu %a -> %c "
    program = hi.parse(f"{head}%me = rank of %s over didx\n{body}\n}}\n", "p.hir")
    return [finding for finding in hi.check(program) if finding.level == "error"]


# The operand that a finding names ---------------------------------------------------------------------------------
BUFFERS = {
    **dict.fromkeys(("x", "y", "out"), "f32[4, 4]"),
    **{"row": "f32[4]", "own": "f32[2, 4]", "half": "f32[2, 4]", "halves": "f32[2, 2, 4]", "scale": "f32[1, 1]"},
    **{"q": "f8e4m3[4, 4]", "r": "f8e4m3[4, 4]", "q_own": "f8e4m3[2, 4]", "scale_2": "f32[1, 1]"},
}
BLOCKS = "ready %f >= 1 from %me own"


@pytest.mark.parametrize(
    ("operands", "statement"),
    [
        ("x y own", f"matmul %x, %y -> %out {BLOCKS} %own"),
        ("x y row own", f"linear %x, %y, %row -> %out {BLOCKS} %own"),
        (
            "q r scale scale_2 row q_own",
            f"scaled_matmul %q, %r scaled %scale, %scale_2 plus %row to f32 -> %out {BLOCKS} %q_own",
        ),
        ("halves half own", f"sum %halves axis 0 plus %half -> %out {BLOCKS} %own"),
    ],
)
def test_a_finding_names_the_operand_that_was_freed_or_is_overwritten(operands: str, statement: str) -> None:
    buffers = BUFFERS | ({"out": "f32[2, 4]"} if "sum" in statement else {})
    begin = "%f: flag[2] = allocate_symmetric\nbarrier of %s over didx\n"
    begin += "".join(f"%{name}: {type} = allocate\n" for name, type in buffers.items())
    begin += "for %i in 0..2 { signal %f[%i] = 1 at %me over didx }\n"
    for operand in operands.split():
        freed = [finding.message for finding in findings(f"{begin}free %{operand}\n{statement}")]
        assert f"%{operand} is used after it was freed" in freed
        if buffers[operand] == buffers["out"]:
            written = statement.replace("-> %out", f"-> %{operand}")
            messages = [finding.message for finding in findings(f"{begin}{written}")]
            assert f"{statement.split()[0]} writes %{operand} while it reads it" in messages


# Overwritten operands ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body",
    [
        "matmul %c, %b -> %c",
        "matmul %b, %c -> %c",
        "linear %c, %b -> %c",
        "%t = permute %c (1, 0)\nrelu %t -> %c",
        "%t = permute %c (1, 0)\nadd %b, %t -> %c",
        "%r = select %c[0]\nadd %c, %r -> %c",
        "%r = select %c[0]\nsum %c axis 0 -> %r",
        "%r = select %c[1]\n%k = select %c[1] axis 1\ncopy %r -> %k",
        "%r = chunk %c[0 of 2]\n%k = chunk %c[0 of 2]\n%x: f32[4, 2] = reshape %k\n"
        "%l = chunk %c[0 of 2] axis 1\n%m = chunk %r[0 of 2] axis 1\nmatmul %x, %m -> %l",
        "for %i in 0..4 {\n%r = select %c[%i]\n%k = select %c[0]\nmatmul %r, %b -> %k\n}",
        "%x: f32[16] = reshape %c\n%y: f32[4, 4] = reshape %x\nmatmul %y, %b -> %c",
        "%x: f32[4@didx, 4] = shard %c\n%h = allgather %x -> %c over didx\nwait %h",
        "for %i in 0..3 {\n%k = select %c[%i]\n%l = select %c[%i / 2]\nmatmul %k, %b -> %l\n}",
        "for %i in 0..4 {\n%k = select %c[%i]\n%l = select %c[(%i + 4) % 4]\nmatmul %k, %b -> %l\n}",
        "%k = chunk %c[%me of 2]\n%l = chunk %c[1 of 2]\nmatmul %k, %b -> %l",
        "%k = chunk %c[%me of 2]\n%l = chunk %c[%me of 2]\n"
        "%h = exchange %k to 1 - %me, %l from 1 - %me over didx\nwait %h",
    ],
)
def test_a_result_that_overlaps_an_operand_is_an_error(body: str) -> None:
    (finding,) = findings(body)
    assert re.search(r"^\w+ writes %\w+ while it reads (it|%\w+, and both are memory of %c)$", finding.message)
    assert finding.expected.startswith("memory that overlaps no operand")
    assert finding.hint == "allocate a buffer for the result"
    assert finding.span is not None
    assert finding.span.file == "p.hir"


@pytest.mark.parametrize(
    "body",
    [
        "relu %c -> %c",
        "copy %c -> %c",
        "add %c, %b -> %c",
        "mul %c, %c -> %c",
        "%t = permute %c (1, 0)\ngelu %t -> %t",
        "%r = select %c[1]\n%k = select %c[1]\nsilu %r -> %k",
        "%r = select %a[1]\nadd %c, %r -> %c",
        "%r = select %c[0]\n%k = select %c[1]\nmatmul %r, %b -> %k",
        "%r = select %c[0]\n%k = chunk %c[1 of 2]\n%l = select %k[0]\nmatmul %r, %b -> %l",
        "%r = chunk %c[0 of 2]\n%k = chunk %c[1 of 2]\ncopy %r -> %k",
        "%t = permute %c (1, 0)\n%r = select %t[3] axis 1\n%k = select %c[2]\nmatmul %r, %b -> %k",
        "%x: f32[2, 2, 4] = reshape %c\n%r = select %x[0]\n%k = select %x[1]\ncopy %r -> %k",
        "for %i in 0..3 {\n%r = select %c[%i]\n%k = select %c[%i + 1]\nmatmul %r, %b -> %k\n}",
        "for %i in 0..3 {\n%r = select %c[%i % 2]\n%k = select %c[(%i + 1) % 2]\nmatmul %r, %b -> %k\n}",
        "for %i in 0..4 {\n%k = select %c[%i]\n%l = select %c[(%i + 1) % 4]\ncopy %k -> %l\n}",
        "for %i in 0..2 {\n%k = select %c[%i]\n%l = select %c[3 - %i]\nmatmul %k, %b -> %l\n}",
        "for %i in 0..4 {\n%k = chunk %c[%i % 2 of 2]\n%l = chunk %c[1 - %i % 2 of 2]\nmatmul %k, %b -> %l\n}",
        "%k = chunk %c[%me of 2]\n%l = chunk %c[1 - %me of 2]\nrelu %k -> %l",
        "%x: f32[4, 2, 2] = reshape %c\n%k = select %x[0] axis 1\n%l = select %x[1] axis 1\ncopy %k -> %l",
        "%x: f32[8, 2] = reshape %c\n%k = chunk %x[0 of 4]\n%m: f32[4] = reshape %k\n%l = select %c[1]\nrelu %m -> %l",
        "%k = chunk %c[%me of 2]\n%l = chunk %c[1 - %me of 2]\n"
        "%h = exchange %k to 1 - %me, %l from 1 - %me over didx\nwait %h",
        "%x = as_partial %c over didx\n%h = allreduce %x -> %c over didx\nwait %h",
    ],
)
def test_elementwise_updates_in_place_and_disjoint_memory_are_accepted(body: str) -> None:
    assert findings(body) == []


# Frees ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "lines", "message"),
    [
        (
            "%v = select %c[0]\nfree %c\n%w = select %a[1]\nrelu %v -> %w",
            (7, 5),
            "%v is used after its buffer %c was freed",
        ),
        ("%v = select %c[0]\nfree %v\nrelu %c -> %c", (6, 5), "%c is used after it was freed"),
        ("free %c\n%v = select %c[0]\nrelu %v -> %v", (6, 4), "%v is used after its buffer %c was freed"),
        ("free %c\nmatmul %c, %b -> %a", (5, 4), "%c is used after it was freed"),
        ("free %c\n%h = allgather %s -> %c over didx\nwait %h", (5, 4), "%c is used after it was freed"),
        ("free %c\n%h = send %c to 1 - %me over didx\nwait %h", (5, 4), "%c is used after it was freed"),
        ("%t: f32[4, 4] = allocate_symmetric\nfree %c\nput %c -> %t at %me over didx", (6, 5), "%c is used after"),
        ("if %me == 1 {\nfree %c\n}\nrelu %a -> %c", (7, 5), "%c is used after it was freed"),
        ("for %i in 0..4 {\nrelu %a -> %c\nif %i == 2 {\nfree %c\n}\n}", (5, 7), "%c is used after it was freed"),
        ("free %c\nfree %c", (5, 4), "%c is freed twice"),
        ("%v = select %c[0]\nfree %c\nfree %v", (6, 5), "%c is freed twice"),
        ("for %i in 0..2 {\nfree %c\n}", (5, 5), "%c is freed twice"),
        ("for %i in 0..2 {\n%v = select %c[%i]\nfree %v\n}", (6, 6), "%c is freed twice"),
        ("if %me == 0 {\nfree %c\n}\nif %me / 2 == 0 {\nfree %c\n}", (8, 5), "%c is freed twice"),
        ("free %a", (4,), "%a is an input: only the caller may free an input"),
        ("%v = select %a[0]\nfree %v", (5,), "%v is a view of an input: only the caller may free an input"),
        ("if %me == 3 {\nfree %a\n}", (5,), "%a is an input: only the caller may free an input"),
    ],
)
def test_a_buffer_is_freed_once_and_not_used_afterwards(body: str, lines: tuple[int, ...], message: str) -> None:
    (finding,) = findings(body)
    assert message in finding.message
    spans = [finding.span, *(span for span, _ in finding.notes)]
    assert tuple(span.line for span in spans if span) == lines, "the statement, and the free"
    if "twice" in message:
        assert finding.hint == "free it once"
        assert [text for _, text in finding.notes] == ["first here"]


@pytest.mark.parametrize(
    "body",
    [
        "for %i in 0..2 {\n%t: f32[4, 4] = allocate\nrelu %a -> %t\nfree %t\n}",
        "for %i in 0..2 {\n%t: f32[4] = allocate\nfree %t\n}\n%t: f32[4] = allocate\n%w = select %a[0]\n"
        "relu %w -> %t\n%v = select %t[0]\ngelu %v -> %v\nfree %v",
        "%v = select %c[0]\nrelu %v -> %v\nfree %v",
        "for %i in 0..4 {\nrelu %a -> %c\nif %i == 3 {\nfree %c\n}\n}",
        "if %me == 0 {\nrelu %a -> %c\nfree %c\n}\nif %me == 1 {\ngelu %a -> %c\nfree %c\n}",
        "if %me == 0 {\nfree %c\n}\nif %me == 1 {\nrelu %a -> %c\nfree %c\n}",
    ],
)
def test_each_rank_may_free_a_buffer_in_another_statement(body: str) -> None:
    assert findings(body) == []


def test_a_buffer_that_only_some_ranks_free_leaks_on_the_others() -> None:
    text = "%c: f32[4] = allocate\n%me = rank of %a over didx\nif %me == 0 { free %c }\n"
    (finding,) = hi.check(hi.parse(f"{HEAD}program @p(%a: f32[4]) -> () {{\n{text}}}\n"))
    assert isinstance(finding, Finding)
    assert (finding.level, finding.category, finding.buffer) == ("warning", "leak", "c")


def test_an_output_is_not_freed_through_a_view() -> None:
    (finding,) = findings("%v = select %c[1]\nfree %c", "%v")
    assert finding.message == "the output %v, a view of %c, was freed"
    assert finding.span is not None
    assert finding.span.line == 5
    (finding,) = findings("%v = select %c[1]\nfree %v", "%c")
    assert finding.message == "the output %c was freed"
    (finding,) = findings("if %me == 1 {\nfree %c\n}", "%c")
    assert finding.message == "the output %c was freed"


def test_a_run_names_the_statement_that_freed_an_output() -> None:
    body = "%c: f32[4] = allocate\nrelu %a -> %c\n%v = select %c[1]\nfree %c"
    text = f"{HEAD}program @p(%a: f32[4]) -> (%v) {{\n{body}\n}}\n"
    message = r"p.hir:7:1: error: rank 0, caller: its memory was freed before the outputs were read"
    with pytest.raises(HostIRError, match=message):
        run_local(hi.parse(text, "p.hir"), [torch.ones(4)])


# Outputs ----------------------------------------------------------------------------------------------------------
def test_an_output_that_no_statement_writes_is_an_error() -> None:
    (finding,) = findings("%d: f32[4, 4] = allocate", "%c, %d")
    assert finding.message == "the output %d is never written"
    assert finding.span is not None
    assert finding.span.line == 4
    (finding,) = findings("%d: f32[4, 4] = allocate\n%v = select %d[0]", "%v, %v")
    assert finding.message == "the output %v, a view of %d, is never written"
    loop = "for %i in 0..2 {\n%t: f32[4] = allocate\nrelu %t -> %t\n}\n%t: f32[4] = allocate"
    assert [d.message for d in findings(loop, "%t")] == ["the output %t is never written"]


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ("", "%a"),
        ("%v = select %a[0]", "%v"),
        ("%d: f32[4, 4] = allocate\nfor %i in 0..4 {\n%x = select %d[%i]\n%y = select %a[%i]\nrelu %y -> %x\n}", "%d"),
        ("%d: f32[4, 4] = allocate\n%h = allgather %s -> %d over didx\nwait %h", "%d"),
    ],
)
def test_inputs_and_buffers_written_through_views_may_be_outputs(body: str, output: str) -> None:
    assert findings(body, output) == []


# Loops that are too long ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("loops", "column"),
    [
        ("for %i in 0..1000000000000 { set_stream 0 }", 1),
        ("for %i in 0..1000000000000 { }", 1),
        ("for %i in 0..N { set_stream 0 }", 1),
        ("for %i in 0..9 { for %j in 0..999999999999999999 { set_stream 0 } }", 18),
        ("for %i in 0..2000 { for %j in 0..400 { set_stream 0 } }", 1),
    ],
)
def test_a_run_refuses_a_loop_with_too_many_statements(loops: str, column: int) -> None:
    text = (
        f"{HEAD}program @p(%a: f32[2, N]) -> (%c) streams 1 {{\n%c: f32[2, N] = allocate\n{loops}\nrelu %a -> %c\n}}\n"
    )
    program = hi.parse(text, "p.hir")
    assert check_structure(program) == []
    with pytest.raises(HostIRError, match=rf"p.hir:5:{column}: error: with this loop the program has \d+ statements"):
        run_whole(program, [torch.zeros(2, 1_000_000)])
