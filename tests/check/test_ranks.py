"""Statements of single ranks: their errors in the text and at run time, and matmuls that wait for flags."""

from __future__ import annotations

import pytest
import torch

import hostir as hi
from hostir.call.local import run_local
from hostir.check import check_structure
from hostir.ir import HostIRError
from hostir.ir.source import Diagnostic
from tests.call.whole import run_whole

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\nmesh @other [didx] = 1 0\n"
INPUTS = "%a: f32[4@didx, 8], %b: f32[4, 8]"
BUFFERS = """%s: f32[4@didx, 8] = allocate_symmetric
%f: flag[2] = allocate_symmetric
%c: f32[4@didx, 8] = allocate
"""  # lines 5 to 7
GATHER = """hostir 1
mesh @mesh [didx] = 0 1 2 3
program @gather(%a: f32[{rows}@didx, 8], %b: f32[8, 5]) -> (%c) streams 1 {{
  %user = current_stream
  %full: f32[{rows}, 8] = allocate_symmetric
  %arrived: flag[{flags}] = allocate_symmetric
  %c: f32[{rows}, 5] = allocate
  %r = rank of %a over didx
  barrier of %a over didx
  set_stream 0
  synchronize %user
  %mine = chunk %full[%r of 4]
  for %i in 0..3 {{
    put %a -> %mine at (%r + %i + 1) % 4 over didx
    signal %arrived[%r] = 1 at (%r + %i + 1) % 4 over didx
  }}
  set_stream %user
  put %a -> %mine at %r over didx
  signal %arrived[%r] = 1 at %r over didx
  matmul %full, %b -> %c ready %arrived >= {epoch} from {first}
  synchronize 0
}}
"""


def findings(body: str, inputs: str = INPUTS, outputs: str = "") -> list[Diagnostic]:
    try:
        return check_structure(hi.parse(f"{HEAD}program @p({inputs}) -> ({outputs}) {{\n{body}\n}}\n", "p.hir"))
    except HostIRError as wrong:  # where the type of a result must be inferred, reading finds it
        return list(wrong.diagnostics)


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        # memory of a peer
        ("get %a from 0 over didx -> %c", 8, "get cannot reach %a at a peer"),
        ("put %a -> %c at 0 over didx", 8, "put cannot reach %c at a peer"),
        (
            "%v = chunk %c[0 of 2]\n%w = chunk %s[0 of 2]\nput %w -> %v at 0 over didx",
            10,
            "put cannot reach %v, a view",
        ),
        ("get %s from 0 over tp -> %c", 8, "the mesh of %s has no axis 'tp'"),
        ("get %s from 0 over didx -> %b", 8, "get copies one rank's part: f32[2, 8] of %s to f32[4, 8] of %b"),
        ("%o: f32[4@didx, 8] on @other = allocate\nget %s from 0 over didx -> %o", 9, "lie on different meshes"),
        # lifetimes
        ("free %s", 8, "%s is a symmetric buffer: it lasts from call to call"),
        ("%v = chunk %s[0 of 2]\nfree %v", 9, "%v is a view of a symmetric buffer"),
        ("for %i in 0..2 {\n%t: f32[4] = allocate_symmetric\n}", 9, "%t lasts from call to call"),
        ("if 0 == 0 {\n%t: f32[4] = allocate_symmetric\n}", 9, "%t lasts from call to call"),
        # flags
        ("%g: flag[2] = allocate", 8, "no peer can signal %g"),
        ("%g: flag[2@didx] = allocate_symmetric", 8, "%g is not replicated"),
        ("%g: flag[2] partial(didx) = allocate_symmetric", 8, "%g is not replicated"),
        ("%g: flag[2, 2] = allocate_symmetric", 8, "%g is not a row of flags"),
        ("%v = select %f[0]", 8, "%f holds flags, which select cannot use"),
        ("copy %f -> %f", 8, "%f holds flags, which copy cannot use"),
        ("get %f from 0 over didx -> %f", 8, "%f holds flags, which get cannot use"),
        ("%h = send %f to 1 over didx\nwait %h", 8, "%f holds flags, which send cannot use"),
        ("%h = allgather %f -> %f over didx\nwait %h", 8, "%f holds flags, which allgather cannot use"),
        ("free %f", 8, "%f is a symmetric buffer: it lasts from call to call"),
        ("signal %s[0] = 1 at 0 over didx", 8, "%s is not a row of flags"),
        ("signal %f[0] = 1 at 0 over tp", 8, "the mesh of %f has no axis 'tp'"),
        ("wait_signal %a[0] >= 1", 8, "%a is not a row of flags"),
        ("%m: f32[4, 8] = allocate\nmatmul %b, %n -> %m ready %b >= 1 from 0", 9, "%b is not a row of flags"),
        ("%m: f32[4, 8] = allocate\nlinear %b, %n -> %m ready %b >= 1 from 0", 9, "%b is not a row of flags"),
        ("%m: f32[4, 8] = allocate\nmatmul %b, %n -> %m own %b", 9, "'own' rows replace one block"),
        ("%m: f32[4, 8] = allocate\nmatmul %b, %n -> %m from 99", 9, "and this matmul has no blocks"),
        ("%m: f32[8] = allocate\nsum %b axis 0 -> %m from 1", 9, "and this sum has no blocks"),
        ("%m: f32[8] = allocate\nsum %b axis 0 -> %m ready %f >= 1 from 1", 9, "this sum has no own rows"),
        (
            "%m: f32[4, 8] = allocate\n%o: bf16[2, 8] = allocate\nmatmul %b, %n -> %m ready %f >= 1 from 0 own %o",
            10,
            "mixed dtypes: %b is f32, %o is bf16",
        ),
        (
            "%m: f32[4, 8] = allocate\n%o: f32[2, 4] = allocate\nmatmul %b, %n -> %m ready %f >= 1 from 0 own %o",
            10,
            "%o is f32[2, 4], %b is f32[4, 8]",
        ),
        (
            "%m: f32[4, 8] = allocate\n%o: f32[2, 8] on @other = allocate\n"
            "matmul %s, %n -> %m ready %f >= 1 from 0 own %o",
            10,
            "lie on different meshes",
        ),
        # positions, conditions and messages
        ("%r = rank of %a over tp", 8, "the mesh of %a has no axis 'tp'"),
        ("barrier of %a over tp", 8, "the mesh of %a has no axis 'tp'"),
        ("%h = recv %c from 0 over tp\nwait %h", 8, "the mesh of %c has no axis 'tp'"),
        ("if 0 % 0 == 0 { }", 8, "'0 % 0' divides by zero"),
        ("%u = current_stream\nif %u == 0 { }", 9, "%u is a stream"),
        ("%u = current_stream\nset_stream %u + 1", 9, "%u is a stream"),
        ("if 0 == 0 {\n%x = select %b[0]\n}\nrelu %x -> %x", 11, "%x is not defined here"),
    ],
)
def test_an_invalid_statement_of_a_single_rank_is_an_error(body: str, line: int, message: str) -> None:
    (finding,) = findings(BUFFERS + body, INPUTS + ", %n: f32[8, 8]")
    assert message in finding.message
    assert finding.span is not None
    assert (finding.span.file, finding.span.line) == ("p.hir", line)


@pytest.mark.parametrize(
    "body",
    [
        "get %s from 0 over didx -> %s",
        "put %s -> %s at 1 over didx",
        "%v = chunk %s[1 of 2]\n%w = chunk %s[0 of 2]\nput %v -> %w at 1 over didx",
        "%h = recv %c from 1 over didx\nwait %h",
        "%h = exchange %a to 1, %c from 1 over didx\nwait %h",
        "signal %f[0] = 1 at 0 over didx\nwait_signal %f[0] >= 1",
        "barrier of %f over didx\n%r = rank of %f over didx\nset_stream %r",
        "%r = rank of %a over didx\nif %r == 0 {\nfree %c\n}",
        "%r = rank of %a over didx\nif %r == 0 {\n%x = select %b[0]\n}\nif %r == 1 {\n%x = select %b[1]\n}",
    ],
)
def test_valid_statements_of_single_ranks_are_accepted(body: str) -> None:
    assert findings(BUFFERS + body) == []


@pytest.mark.parametrize(
    "writes",
    [
        "get %s from 0 over didx -> %c",
        "put %a -> %s at 1 over didx\n%v = chunk %s[0 of 1]\ncopy %v -> %c",
        "%h = recv %c from 1 over didx\nwait %h",
        "%h = exchange %a to 1, %c from 1 over didx\nwait %h",
    ],
)
def test_copies_and_messages_write_an_output(writes: str) -> None:
    assert findings(BUFFERS + writes, outputs="%c") == []


def test_flags_cannot_be_inputs_or_outputs() -> None:
    assert [d.message for d in findings("", "%f: flag[2]")] == ["the input %f holds flags"]
    (finding,) = findings("%f: flag[2] = allocate_symmetric", outputs="%f")
    assert finding.message == "the output %f holds flags"
    assert finding.span is not None
    assert finding.span.line == 5


# Running ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("get %s from 2 over didx -> %c", "there is no position 2 along didx"),
        ("put %a -> %s at 0 - 1 over didx", "there is no position -1 along didx"),
        ("signal %f[2] = 1 at 0 over didx", "%f has no flag 2"),
        ("wait_signal %f[0] >= 0", "epoch 0 of a flag"),
        ("%r = rank of %a over didx\n%h = send %a to %r over didx\nwait %h", "rank 0 would wait for itself"),
        ("%r = rank of %a over didx\n%h = recv %c from %r over didx\nwait %h", "rank 0 would wait for itself"),
        (
            "%r = rank of %a over didx\n%h = exchange %a to %r, %c from 1 - %r over didx\nwait %h",
            "rank 0 would wait for itself",
        ),
        ("%r = rank of %a over didx\nif 1 / %r == 1 { set_stream 0 }", "the condition divides by zero"),
        (
            "%m: f32[4, 8] = allocate\n%g: flag[3] = allocate_symmetric\nmatmul %b, %n -> %m ready %g >= 1 from 0",
            "3 flags",
        ),
        (
            "%m: f32[4, 8] = allocate\n%g: flag[3] = allocate_symmetric\nlinear %b, %n -> %m ready %g >= 1 from 0",
            "3 flags",
        ),
        ("%m: f32[4, 8] = allocate\nmatmul %b, %n -> %m ready %f >= 1 from 2", "%f has no flag 2"),
        ("%m: f32[4, 8] = allocate\nmatmul %b, %n -> %m ready %f >= 0 from 0", "epoch 0 of a flag"),
        ("%m: f32[4, 8] = allocate\nmatmul %b, %n -> %m ready %f >= 1 from 0 own %b", "%b has 4 rows"),
    ],
)
def test_a_run_refuses_ranks_flags_and_epochs_that_do_not_exist(body: str, message: str) -> None:
    text = f"{HEAD}program @p({INPUTS}, %n: f32[8, 8]) -> () {{\n{BUFFERS}{body}\n}}\n"
    with pytest.raises(HostIRError) as refused:
        run_whole(hi.parse(text, "p.hir"), [torch.rand(4, 8), torch.rand(4, 8), torch.rand(8, 8)])
    (diagnostic,) = refused.value.diagnostics
    assert message in diagnostic.message
    assert diagnostic.expected
    assert diagnostic.span is not None
    assert diagnostic.span.file == "p.hir"


def test_a_rank_outside_a_mesh_has_position_minus_one() -> None:
    program = hi.parse(
        "hostir 1\nmesh @all [x] = 0 1 2\nmesh @pair [y] = 2 1\n"
        "program @p(%a: f32[3], %b: f32[2@y] on @pair) -> (%c) {\n  %c: f32[3] = allocate\n  copy %a -> %c\n"
        "  %r = rank of %b over y\n  if %r == 0 - 1 { relu %a -> %c }\n  if %r == 0 { add %a, %a -> %c }\n}\n"
    )
    a = torch.randn(3)
    ((first, second, third),) = run_local(program, [a, torch.rand(2)])
    assert first is not None
    assert second is not None
    assert third is not None
    assert torch.equal(first, a.relu())
    assert torch.equal(second, a)
    assert torch.equal(third, a + a)


def test_an_exchange_of_a_rank_with_itself_copies() -> None:
    program = hi.parse(
        f"{HEAD}program @p(%a: f32[4@didx]) -> (%c) {{\n%c: f32[4@didx] = allocate\n%r = rank of %a over didx\n"
        "%h = exchange %a to %r, %c from %r over didx\nwait %h\n}\n"
    )
    a = torch.rand(4)
    for seed in range(4):
        assert torch.equal(run_whole(program, [a], seed=seed)[0], a)


# Matmuls that wait ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", ["0", "%r", "(%r + 1) % 4"])
def test_a_matmul_multiplies_each_block_after_its_flag(first: str) -> None:
    program = hi.parse(GATHER.format(rows=12, flags=4, epoch=1, first=first), "gather.hir")
    assert hi.parse(str(program)) == program
    order = "" if first == "0" else f" from {first}"
    assert f"ready %arrived >= 1{order}\n" in str(program)
    assert hi.check(program) == []
    a, b = torch.randn(12, 8), torch.randn(8, 5)
    for seed in range(8):
        (c,) = run_whole(program, [a, b], seed=seed)
        torch.testing.assert_close(c, a @ b)


OWN = """  put %a -> %mine at %r over didx
  signal %arrived[%r] = 1 at %r over didx
  matmul %full, %b -> %c ready %arrived >= 1 from %r"""


def with_own(rows: str = "%a", worker: str = "", user: str = "") -> hi.Program:
    """Return GATHER with `own` rows in place of their copy, and more statements on both streams."""
    text = GATHER.format(rows=12, flags=4, epoch=1, first="%r")
    assert OWN in text
    text = text.replace(OWN, f"  {user}\n{OWN.splitlines()[-1]} own {rows}").replace("  %mine", f"  {worker}\n  %mine")
    if rows == "%x":
        text = text.replace("  %r = rank", "  %x: f32[12@didx, 8] = allocate\n  %r = rank").replace(
            "\n}", "\n  free %x\n}"
        )
    return hi.parse(text, "own.hir")


def test_own_rows_are_multiplied_without_a_copy() -> None:
    program = with_own()
    assert hi.parse(str(program)) == program
    assert str(program).count("put") == 1
    assert "from %r own %a" in str(program)
    assert hi.check(program) == []
    a, b = torch.randn(12, 8), torch.randn(8, 5)
    for seed in range(8):
        (c,) = run_whole(program, [a, b], seed=seed)
        torch.testing.assert_close(c, a @ b)


def test_own_rows_that_nobody_has_written_are_reported() -> None:
    assert any("%x" in d.message for d in hi.check(with_own("%x")))


def test_own_rows_that_another_stream_still_writes_are_a_race() -> None:
    assert hi.check(with_own("%x", user="relu %a -> %x")) == []
    findings = hi.check(with_own("%x", worker="relu %a -> %x"))
    assert any(d.message.startswith("race on %x") for d in findings), findings


OWN_ROWS = """hostir 1
mesh @mesh [didx] = 0 1
program @own_rows(%x: f32[2@didx, 8], %b: f32[8, 4]) -> (%c, %z) streams 1 {
  %user = current_stream
  %r = rank of %x over didx
  %a: f32[2, 8] = allocate_symmetric
  %ready: flag[2] = allocate_symmetric
  %c: f32[2, 4] = allocate
  %z: f32[2, 8] = allocate
  set_stream 0
  synchronize %user
  %a_r = chunk %a[%r of 2]
  put %x -> %a_r at (%r + 1) % 2 over didx
  signal %ready[%r] = 1 at (%r + 1) % 2 over didx
  set_stream %user
  matmul %a, %b -> %c ready %ready >= 1 from %r own %x
THEN  synchronize 0
  barrier of %x over didx
}
"""
MATMUL = "'matmul %a, %b -> %c ready %ready >= 1 from %r own %x'"


@pytest.mark.parametrize(
    ("then", "reads"),
    [
        ("  relu %a -> %z\n", "'relu %a -> %z'"),
        (
            "  barrier of %x over didx\n  get %a from 1 - %r over didx -> %z\n",
            "'get %a from 1 - %r over didx -> %z' of another rank",
        ),
        ("  %p = as_partial %a over didx\n  %h = allreduce %p -> %z over didx\n  wait %h\n", "'%h = allreduce"),
    ],
)
def test_own_rows_are_undefined_in_the_gathered_buffer_after_the_matmul(then: str, reads: str) -> None:
    program = hi.parse(OWN_ROWS.replace("THEN", then), "own.hir")
    (finding,) = hi.check(program)
    assert finding.message.startswith(reads)
    assert finding.message.endswith(f" reads %a, rows of which {MATMUL} leaves undefined")
    assert finding.hint == "write these rows of %a before they are read, or read the `own` rows instead"
    assert [span.line for span, _ in finding.notes if span] == [16, finding.span.line if finding.span else 0]
    for seed in range(6):
        with pytest.raises(HostIRError, match=r"reads what nobody wrote: %a"):
            run_local(program, [torch.rand(2, 8), torch.rand(8, 4)], seed=seed, watch=True)


@pytest.mark.parametrize(
    ("then", "relu"),
    [
        ("  put %x -> %a_r at %r over didx\n  relu %a -> %z\n", True),  # written again
        (
            "  %h = allgather %x -> %z over didx\n  wait %h\n"
            "  %a_p = chunk %a[1 - %r of 2]\n  %z_p = chunk %z[1 - %r of 2]\n  copy %a_p -> %z_p\n",
            False,
        ),  # the gathered rows
    ],
)
def test_own_rows_may_be_read_after_they_are_written_again(then: str, relu: bool) -> None:
    program = hi.parse(OWN_ROWS.replace("THEN", then))
    assert hi.check(program) == []
    x, b = torch.randn(2, 8), torch.randn(8, 4)
    for seed in range(6):
        c, z = run_whole(program, [x, b], seed=seed, watch=True)
        torch.testing.assert_close(c, x @ b)
        assert torch.equal(z, x.relu() if relu else x)


def test_own_rows_that_a_peer_writes_are_a_race() -> None:
    text = OWN_ROWS.replace("THEN", "  %h = allgather %x -> %z over didx\n  wait %h\n")
    assert hi.check(hi.parse(text)) == []
    messages = [d.message for d in hi.check(hi.parse(text.replace("chunk %a[%r of 2]", "chunk %a[0 of 2]")))]
    assert f"race on %a: {MATMUL} writes it, while 'put" in messages[0]


def with_bias(bias: str) -> hi.Program:
    """Return GATHER with `linear`; the statements `bias` compute its bias from %z on the worker stream."""
    text = GATHER.format(rows=12, flags=4, epoch=1, first="%r").replace("%b: f32[8, 5]", "%w: f32[5, 8], %z: f32[5]")
    text = text.replace("matmul %full, %b -> %c", "linear %full, %w, %bias -> %c")
    text = text.replace("  %r = rank", "  %bias: f32[5] = allocate\n  %r = rank").replace("\n}", "\n  free %bias\n}")
    return hi.parse(text.replace("  %mine", f"  {bias}\n  %mine"), "bias.hir")


def test_a_linear_adds_its_bias_to_each_block() -> None:
    program = with_bias("relu %z -> %bias\n  set_stream %user\n  synchronize 0\n  set_stream 0")
    assert hi.parse(str(program)) == program
    assert hi.check(program) == []
    a, w, z = torch.randn(12, 8), torch.randn(5, 8), torch.randn(5)
    for seed in range(8):
        (c,) = run_whole(program, [a, w, z], seed=seed)
        torch.testing.assert_close(c, a @ w.t() + z.relu())


def test_a_bias_that_another_stream_still_writes_is_a_race() -> None:
    findings = hi.check(with_bias("relu %z -> %bias"))
    assert any(d.message.startswith("race on %bias") for d in findings), findings


def test_a_matmul_that_waits_for_an_epoch_that_is_never_signalled_is_reported() -> None:
    program = hi.parse(GATHER.format(rows=12, flags=4, epoch=2, first=0), "gather.hir")
    assert "error" in [d.level for d in hi.check(program)]
    with pytest.raises(HostIRError):
        run_whole(program, [torch.randn(12, 8), torch.randn(8, 5)])
