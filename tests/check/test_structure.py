"""Structural errors that the checker reports: each at its statement, all of them at once."""

from __future__ import annotations

import pytest

import hostir as hi
from hostir.check import check_structure, verify
from hostir.ir import HostIRError
from hostir.ir.sizes import Size
from hostir.ir.source import Diagnostic

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\nmesh @other [didx] = 1 0\n"
INPUTS = "%a: f32[4@didx, 8], %b: f32[4, 8], %p: f32[4, 8] partial(didx)"


def findings(body: str, outputs: str = "", phase: str = "program", inputs: str = INPUTS) -> list[Diagnostic]:
    try:
        return check_structure(hi.parse(f"{HEAD}{phase} @p({inputs}) -> ({outputs}) {{\n{body}\n}}\n", "p.hir"))
    except HostIRError as wrong:  # the parser reports errors in inferred types
        return list(wrong.diagnostics)


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("wait %b", 5, "%b is not a communication in flight"),
        ("relu %a -> %b", 5, "%b is declared f32[4, 8], but relu gives f32[4@didx, 8]"),
        ("add %a, %b -> %b", 5, "%b is sharded unlike the other operands"),
        ("relu %p -> %b", 5, "%p is a partial sum over didx"),
        ("relu %b -> %p", 5, "%p is declared f32[4, 8] partial didx, but relu gives f32[4, 8]"),
        ("%x = select %a[0]", 5, "axis 0 of %a lies over didx"),
        ("%x = select %b[0] axis 2", 5, "%b has no axis 2"),
        ("%x = chunk %a[0 of 3]", 5, "cannot be cut in 3 equal pieces"),
        ("%x = permute %b (0, 0)", 5, "(0, 0) is not an order of the 2 axes of %b"),
        ("%x: f32[4, 4] = reshape %b", 5, "%b has 32 elements, %x has 16"),
        ("%x: f16[32] = reshape %b", 5, "reshape cannot change f32 to f16"),
        ("%x: f32[8, 4@didx] = reshape %a", 5, "reshape would move elements between ranks"),
        ("%x: f32[4, 8@didx] = shard %a", 5, "shard only spreads replicated axes"),
        ("%x: f32[(2 2@didx), 8] = shard %b", 5, "the blocks of a rank are not contiguous"),
        ("%x = as_partial %b over tp", 5, "cannot hold partial sums over 'tp'"),
        ("%c: f32[4, 8] = allocate\n%h = allgather %a -> %c over tp\nwait %h", 6, "no mesh axis 'tp'"),
        (
            "%c: f32[4, 8] = allocate\n%h = allgather %b -> %c over didx\nwait %h",
            6,
            "allgather over didx does not lead",
        ),
        (
            "%c: f32[4, 8] = allocate\n%h = allreduce %b -> %c over didx\nwait %h",
            6,
            "allreduce over didx does not lead",
        ),
        (
            "%c: f32[4, 8@didx] = allocate\n%h = alltoall %a -> %c over didx\nwait %h",
            6,
            "alltoall over didx does not lead",
        ),
        ("%c: f16[4, 8] = allocate\n%h = allgather %a -> %c over didx\nwait %h", 6, "moves elements and keeps them"),
        ("%c: f32[4, 8] on @other = allocate\n%h = gather %b -> %c\nwait %h", 6, "gather does not lead"),
        ("%c: f32[4, 8] on @other = allocate\nrelu %b -> %c", 6, "operands of relu lie on different meshes"),
        ("%c: f32[8] = allocate\nsum %b axis 2 -> %c", 6, "%b has no axis 2"),
        ("%c: f16[4, 8] = allocate\ncast %b to f61 -> %c", 6, "unknown dtype 'f61'"),
        ("matmul %b, %b -> %b", 5, "contraction of different sizes: %b has 8 in its last axis, %b has 4 in axis 0"),
        ("%x: f32[4, 8] = current_stream", 5, "%x is a f32[4, 8], but current_stream gives a stream"),
    ],
)
def test_a_structural_error_of_a_host_program_is_reported_at_its_line(body: str, line: int, message: str) -> None:
    (finding,) = findings(body)
    assert message in finding.message
    assert finding.span is not None
    assert (finding.span.file, finding.span.line) == ("p.hir", line)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("%c: f32[4, 4] = relu %b", "%c is f32[4, 4], but relu gives f32[4, 8]"),
        ("%c: f16[4, 8] = relu %b", "%c is f16[4, 8], but relu gives f32[4, 8]"),
        ("%c: f32[8] auto = linear %b, %w, %b", "the bias %b is f32[4, 8]"),
        ("%c: f32[4, 8] auto = add %b, %w", "shapes do not align: %b is f32[4, 8], %w is f32[6, 8]"),
        ("%c: f32[4, 8] = reshard %w", "reshard changes where %w lies, not its type"),
        ("%c: f16[6] auto = matmul %h, %w", "mixed dtypes: %h is f16[8], %w is f32"),
    ],
)
def test_a_structural_error_of_a_fusion_is_reported(body: str, message: str) -> None:
    (finding,) = findings(body, phase="fusion", inputs="%b: f32[4, 8], %w: f32[6, 8], %h: f16[8]")
    assert message.split(", %w is f32")[0].split("is f16[8]")[0] in finding.message


def test_the_values_and_the_index_of_a_loop_are_local_to_it() -> None:
    assert findings("for %i in 0..2 { }\nfor %i in 0..2 { }") == []
    after = findings("for %i in 0..2 {\n%x = select %b[%i]\nrelu %x -> %x\n}\nrelu %x -> %x")
    assert [d.message for d in after] == ["%x is not defined here"]


def test_all_findings_come_at_once_in_program_order() -> None:
    program = hi.parse(f"{HEAD}program @p({INPUTS}) -> () {{\nrelu %a -> %b\nwait %b\nrelu %p -> %b\n}}\n")
    with pytest.raises(HostIRError) as wrong:
        verify(program)
    assert [d.span.line for d in wrong.value.diagnostics if d.span] == [5, 6, 7]
    assert str(wrong.value).count("error:") == 3


def test_a_fusion_may_declare_another_sharding_than_its_statements_infer() -> None:
    text = f"{HEAD}fusion @f(%a: f32[4@didx, 8], %b: f32[4, 8]) -> (%c) {{\n%c: f32[4, 8@didx] = add %a, %b\n}}\n"
    program = hi.parse(text)
    assert check_structure(program) == []
    assert check_structure(program, explicit=True) != []


def test_a_division_by_a_literal_zero_is_a_finding() -> None:
    zeros = findings("for %i in 0..4 {\nset_stream %i % 0\n%x = select %b[%i / (2 - 2)]\n}")
    assert [d.message for d in zeros] == ["'%i % 0' divides by zero", "'%i / (2 - 2)' divides by zero"]
    assert [d.span.line for d in zeros if d.span] == [6, 7]
    assert findings("for %i in 0..4 {\n%x = select %b[(%i % 2) / 1]\n}") == []


@pytest.mark.parametrize("phase", ["program", "fusion"])
def test_the_numbers_of_streams_and_devices_are_limited(phase: str) -> None:
    def messages(device: int, streams: int) -> list[str]:
        text = f"hostir 1\nmesh @mesh [didx] = 0 {device}\n{phase} @p(%a: f32[4]) -> (%a) streams {streams} {{ }}\n"
        return [d.message for d in check_structure(hi.parse(text))]

    assert messages(65535, 1024) == []
    assert messages(65536, 1024) == ["mesh @mesh names device 65536"]
    assert messages(99999999, 99999999) == ["@p has a pool of 99999999 streams", "mesh @mesh names device 99999999"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "program @p(%a: f32[{big}]) -> () {{ }}", "a size of more than 18 digits"),
        (HEAD + "program @p(%a: f32[999999999*9999999999]) -> () {{ }}", "a size of more than 18 digits"),
        ("hostir {big}\nmesh @mesh [didx] = 0\nprogram @p() -> () {{ }}", "an integer of 5000 digits"),
        ("hostir 1\nmesh @mesh [didx] = {big}\nprogram @p() -> () {{ }}", "an integer of 5000 digits"),
        (HEAD + "program @p() -> () streams {big} {{ }}", "an integer of 5000 digits"),
        (HEAD + "program @p() -> () {{ set_stream {big} }}", "an integer of 5000 digits"),
        (HEAD + "program @p() -> () {{ delay {big} us }}", "an integer of 5000 digits"),
        (HEAD + "program @p(%a: f32[4]) -> () {{ %b = permute %a ({big}) }}", "an integer of 5000 digits"),
        (HEAD + "program @p() -> () {{ for %i in 0..{big} {{ }} }}", "a size of more than 18 digits"),
        (HEAD + "program @p() -> () {{ set_stream {deep} }}", "an index expression with 3000 operators"),
        (HEAD + "program @p() -> () {{ set_stream 0{long} }}", "an index expression with 3000 operators"),
    ],
)
def test_too_large_numbers_and_expressions_are_refused_at_their_position(text: str, message: str) -> None:
    too_large = text.format(big="9" * 5000, deep="(1 + " * 3000 + "1" + ")" * 3000, long=" + 1" * 3000)
    with pytest.raises(HostIRError) as wrong:
        hi.parse(too_large, "p.hir")
    (diagnostic,) = wrong.value.diagnostics
    assert diagnostic.message == message
    assert diagnostic.span is not None
    assert len(str(wrong.value)) < 1000


@pytest.mark.parametrize("size", [10**18, 10**5000, -(10**5000)], ids=["19 digits", "5001 digits", "negative"])
def test_a_size_has_at_most_18_digits(size: int) -> None:
    assert str(Size.of(10**18 - 1)) == "9" * 18
    with pytest.raises(HostIRError, match="a size of more than 18 digits"):
        Size.of(size)


def test_at_most_64_blocks_may_be_nested() -> None:
    def nested(depth: int) -> str:
        return "\n".join([f"for %i{n} in 0..1 {{" for n in range(depth)] + ["}" * depth])

    assert findings(nested(63)) == []
    for depth in (64, 3000):
        (finding,) = findings(nested(depth))
        assert finding.message == "blocks 65 deep"
        assert finding.span is not None
        assert finding.span.line == 68
