"""Buffers in `hostir.check`: who frees them, whether outputs are written, and what a statement may overwrite."""

from __future__ import annotations

import math
import random

import pytest
import torch

import hostir as hi
from hostir.ir import Value
from hostir.ir.check import check_structure
from hostir.ir.check.buffers import Layer, Region
from hostir.ir.host_ops import Chunk, Select
from hostir.ir.sizes import Size
from hostir.ir.source import Diagnostic, HostIRError
from hostir.ir.types import DTYPES, Axis, TensorType
from hostir.ir.values import Lit
from hostir.ir.view_ops import Permute, Reshape, ViewOp
from hostir.runtime.local import run_local
from tests.runtime.whole import run_whole

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\n"
INPUTS = "%a: f32[4, 4], %b: f32[4, 4], %p: f32[4, 4] partial(didx), %s: f32[4@didx, 4]"


def findings(body: str, outputs: str = "") -> list[Diagnostic]:
    """Of a program with a buffer %c that is written first, in line 3."""
    head = f"{HEAD}program @p({INPUTS}) -> ({outputs}) streams 2 {{ %c: f32[4, 4] = allocate relu %a -> %c\n"
    return check_structure(hi.parse(f"{head}{body}\n}}\n", "p.hir"))


# What a statement may overwrite -----------------------------------------------------------------------------------
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
    ],
)
def test_a_result_on_top_of_an_operand_is_a_finding(body: str) -> None:
    (found,) = findings(body)
    assert "writes" in found.message
    assert "while it reads" in found.message
    assert found.span is not None
    assert found.span.file == "p.hir"


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
        "%x = as_partial %c over didx\n%h = allreduce %x -> %c over didx\nwait %h",
    ],
)
def test_the_same_view_elementwise_and_memory_apart_are_sound(body: str) -> None:
    assert findings(body) == []


def _type(*shape: int) -> TensorType:
    return TensorType(DTYPES["f32"], tuple(Axis.of(n) for n in shape))


def _random_view(rng: random.Random, x: torch.Tensor, reshapes: bool) -> tuple[ViewOp, torch.Tensor] | None:
    """A view of `x` that exists, both as a statement and as the elements it holds."""
    if not x.dim():
        return None
    value, axis = Value("x", _type(*x.shape)), rng.randrange(x.dim())
    kind = rng.choice(["select", "chunk", "permute", "reshape"] if reshapes else ["select", "chunk", "permute"])
    if kind == "select":
        index = rng.randrange(x.shape[axis])
        return Select(x=value, out=value, index=Lit(index), axis=axis), x.select(axis, index)
    if kind == "chunk":
        count = rng.choice([n for n in (1, 2, 3) if x.shape[axis] % n == 0])
        index = rng.randrange(count)
        extent = x.shape[axis] // count
        view = Chunk(x=value, out=value, index=Lit(index), count=Size(count), axis=axis)
        return view, x.narrow(axis, index * extent, extent)
    if kind == "permute":
        order = tuple(rng.sample(range(x.dim()), x.dim()))
        return Permute(x=value, out=value, axes=order), x.permute(order)
    shape = rng.choice([(x.numel(),), (1, x.numel()), (x.shape[0], x.numel() // x.shape[0])])
    return Reshape(x=value, out=Value("x", _type(*shape))), x.reshape(shape)


@pytest.mark.parametrize("reshapes", [False, True])
def test_regions_agree_with_the_elements_they_hold(reshapes: bool) -> None:
    rng, shape = random.Random(11), (4, 6, 2)
    seen = {"apart": 0, "equal": 0}
    for _ in range(3000):
        regions, elements = [], []
        for _ in range(2):
            region, x = Region("x", (Layer.of(_type(*shape)),)), torch.arange(math.prod(shape)).view(shape)
            for _ in range(rng.randrange(5)):
                if step := _random_view(rng, x, reshapes):
                    region, x = region.seen_by(step[0]), step[1]
            regions.append(region)
            elements.append(x)
        disjoint = not set(elements[0].flatten().tolist()) & set(elements[1].flatten().tolist())
        apart = regions[0].apart(regions[1])
        assert apart == regions[1].apart(regions[0])
        assert disjoint or not apart
        assert apart or reshapes or not disjoint, "pieces by literal index are known exactly"
        if regions[0] == regions[1]:
            assert torch.equal(elements[0], elements[1])
        seen["apart"] += apart
        seen["equal"] += regions[0] == regions[1]
    assert min(seen.values()) > 50


# Who frees what ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("%v = select %c[0]\nfree %c\n%r = select %a[1]\nrelu %v -> %r", "%v is used after %c was freed, of which"),
        ("%v = select %c[0]\nfree %v\nrelu %c -> %c", "%c is used after it was freed"),
        ("%v = select %c[0]\nfree %c\nfree %v", "%v is used after %c was freed, of which it is a view"),
        ("free %c\n%v = select %c[0]", "%c is used after it was freed"),
        ("free %a", "%a is an input: an input is the caller's to free"),
        ("%v = select %a[0]\nfree %v", "%v is a view of an input: an input is the caller's to free"),
        ("for %i in 0..2 {\nfree %c\n}", "%c would be freed in every round"),
        ("for %i in 0..2 {\n%v = select %c[%i]\nfree %v\n}", "%v would be freed in every round"),
    ],
)
def test_memory_ends_once_and_with_all_its_views(body: str, message: str) -> None:
    (found,) = findings(body)
    assert message in found.message
    assert found.span is not None


@pytest.mark.parametrize(
    "body",
    [
        "for %i in 0..2 {\n%t: f32[4, 4] = allocate\nrelu %a -> %t\nfree %t\n}",
        "for %i in 0..2 {\n%t: f32[4] = allocate\nfree %t\n}\n%t: f32[4] = allocate\n%v = select %t[0]\nrelu %v -> %v",
        "%v = select %c[0]\nrelu %v -> %v\nfree %v",
    ],
)
def test_a_buffer_may_end_where_it_began(body: str) -> None:
    assert findings(body) == []


def test_an_output_is_not_freed_through_a_view() -> None:
    (found,) = findings("%v = select %c[1]\nfree %c", "%v")
    assert found.message == "the output %v, a view of %c, was freed"
    assert found.span is not None
    assert found.span.line == 5
    (found,) = findings("%v = select %c[1]\nfree %v", "%c")
    assert found.message == "the output %c was freed"


def test_the_run_names_where_an_output_was_freed() -> None:
    body = "%c: f32[4] = allocate\nrelu %a -> %c\n%v = select %c[1]\nfree %c"
    text = f"{HEAD}program @p(%a: f32[4]) -> (%v) {{\n{body}\n}}\n"
    message = r"p.hir:7:1: error: rank 0, caller: its memory was freed before the outputs were read"
    with pytest.raises(HostIRError, match=message):
        run_local(hi.parse(text, "p.hir"), [torch.ones(4)])


# Outputs ------------------------------------------------------------------------------------------------------------
def test_an_output_that_no_statement_writes_is_a_finding() -> None:
    (found,) = findings("%d: f32[4, 4] = allocate", "%c, %d")
    assert found.message == "the output %d is never written"
    assert found.span is not None
    assert found.span.line == 4
    (found,) = findings("%d: f32[4, 4] = allocate\n%v = select %d[0]", "%v, %v")
    assert found.message == "the output %v, a view of %d, is never written"
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
def test_inputs_and_what_is_written_through_views_may_be_outputs(body: str, output: str) -> None:
    assert findings(body, output) == []


# Loops that are too long ---------------------------------------------------------------------------------------------
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
def test_a_run_stops_at_the_loop_that_never_ends(loops: str, column: int) -> None:
    text = (
        f"{HEAD}program @p(%a: f32[2, N]) -> (%c) streams 1 {{\n%c: f32[2, N] = allocate\n{loops}\nrelu %a -> %c\n}}\n"
    )
    program = hi.parse(text, "p.hir")
    assert check_structure(program) == []
    with pytest.raises(HostIRError, match=rf"p.hir:5:{column}: error: with this loop the program has \d+ statements"):
        run_whole(program, [torch.zeros(2, 1_000_000)])


def test_a_step_around_the_ring_of_pieces_leads_to_another_piece() -> None:
    text = (
        "hostir 1\nmesh @mesh [didx] = 0 1\nprogram @p(%x: f32[4, 8]) -> (%y) {\n  %y: f32[4, 8] = allocate\n"
        "  copy %x -> %y\n  for %i in 0..4 {\n    %a = select %y[%i]\n    %b = select %y[(%i + STEP) % 4]\n"
        "    copy %a -> %b\n  }\n}\n"
    )
    assert check_structure(hi.parse(text.replace("STEP", "1"))) == []
    assert check_structure(hi.parse(text.replace("STEP", "4"))) != []
