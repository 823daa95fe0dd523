"""Plans on CUDA: copies by SMs that form one kernel, and the matmul that overlaps this kernel."""

from __future__ import annotations

import pytest
import torch

from hostir.ir import parse
from hostir.ir.source import HostIRError
from hostir.machines.pushes import MAX_PUSHED_ROWS, PushedProduct, Pushes
from hostir.plan.operations import ComputeOp, CopyOp, SignalOp
from hostir.plan.unroll import unroll
from hostir.plan.unrolled import UnrolledProgram

TO_ALL = """for %i in 0..4 {
    put %a -> %mine at (%r + %i) % 4 over x by 8 sms
    signal %there[%r] = 1 at (%r + %i) % 4 over x
  }"""
MATMUL = "matmul %full, %b -> %c ready %there >= 1 from %r"


def recorded(*body: str) -> UnrolledProgram:
    lines = "\n".join(f"  {line}" for line in body)
    program = parse(f"""hostir 1
mesh @mesh [x] = 0 1 2 3
program @p(%a: f32[4@x, 2, 8], %b: f32[8, 5]) -> (%c) streams 1 {{
  %user = current_stream
  %r = rank of %a over x
  %full: f32[4, 2, 8] = allocate_symmetric
  %there: flag[4] = allocate_symmetric
  %mine: f32[4@x, 2, 8] = shard %full
{lines}
}}
""")
    return unroll(program, 1, {}, [torch.zeros(1, 2, 8), torch.zeros(8, 5)])


C = "%c: f32[4, 2, 5] = allocate"


def kernels(unrolled: UnrolledProgram) -> list[tuple[int, int]]:
    """Return the numbers of copies and signals of each kernel that copies."""
    return [(len(p.copies), sum(s is not None for _, s in p.copies)) for p in Pushes.of(unrolled)]


def overlapped(unrolled: UnrolledProgram) -> list[int]:
    return [op.ready.overlapped_sms if op.ready else 0 for op in unrolled.ops if isinstance(op, ComputeOp)]


def reserved(unrolled: UnrolledProgram) -> list[int]:
    return [op.ready.reserved_sms if op.ready else 0 for op in unrolled.ops if isinstance(op, ComputeOp)]


def test_copies_and_the_signals_between_them_are_one_kernel_that_the_matmul_overlaps() -> None:
    ops = recorded(TO_ALL, C, MATMUL)
    assert kernels(ops) == [(4, 4)]
    (pushes,) = Pushes.of(ops)
    assert pushes.sms == 8
    assert list(pushes.ops) == [op for op in ops.ops if isinstance(op, CopyOp | SignalOp)]
    assert [signal.peer for _, signal in pushes.copies if signal] == [1, 2, 3, 0]
    assert overlapped(ops) == [8]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("set_stream 0\n  synchronize %user\n  set_stream %user\n  synchronize 0", 0),
        ("relu %b -> %b", 0),
        ("signal %there[%r] = 2 at 0 over x", 0),
        ("signal %there[%r] = 2 at 0 over x by 1 sms", 0),
        ("free %b2", 0),
        ("synchronize %user", 0),
        ("%v = select %b[0]", 8),
    ],
    ids=[
        *("another stream", "a kernel", "a second signal", "a signal by a kernel", "memory that goes"),
        *("the stream itself", "a view"),
    ],
)
def test_a_matmul_overlaps_copies_only_if_it_directly_follows_them(between: str, expected: int) -> None:
    ops = recorded("%b2: f32[8, 5] = allocate", "relu %b -> %b2", TO_ALL, C, between, MATMUL)
    assert overlapped(ops)[-1] == expected


@pytest.mark.parametrize(("between", "expected"), [("", 2), ("barrier of %a over x", 0), ("wait %done", 0)])
def test_statements_that_do_nothing_in_a_team_of_one_still_prevent_overlap(between: str, expected: int) -> None:
    program = parse(f"""hostir 1
mesh @mesh [x] = 0
program @p(%a: f32[1@x, 8], %b: f32[8, 5]) -> (%c) {{
  %full: f32[1, 8] = allocate_symmetric
  %there: flag[1] = allocate_symmetric
  %mine: f32[1@x, 8] = shard %full
  %e: f32[1, 8] = allocate
  %done = allgather %a -> %e over x
  put %a -> %mine at 0 over x by 2 sms
  signal %there[0] = 1 at 0 over x
  {between}
  %c: f32[1, 5] = allocate
  matmul %full, %b -> %c ready %there >= 1 from 0
  {"" if "wait" in between else "wait %done"}
}}
""")
    assert overlapped(unroll(program, 0, {}, [torch.zeros(1, 8), torch.zeros(8, 5)]))[-1] == expected


def test_a_matmul_reserves_an_sm_only_for_earlier_signals_by_kernels() -> None:
    signal, plain = "signal %more[0] = 1 at 0 over x by 1 sms", "signal %more[1] = 1 at 0 over x"
    with_own_rows, more = f"{MATMUL} own %a", "%more: flag[4] = allocate_symmetric"
    assert reserved(recorded(more, plain, C, with_own_rows, "relu %c -> %c", signal, with_own_rows, with_own_rows)) == [
        0,
        0,
        1,
        1,
    ]
    aside = ["set_stream 0", "synchronize %user", signal, "set_stream %user"]
    assert reserved(recorded(more, *aside, C, with_own_rows)) == [1]
    assert [op.sms for op in recorded(more, signal, plain, C).ops if isinstance(op, SignalOp)] == [1, 0]


def test_a_kernel_copies_only_to_symmetric_memory_of_any_rank() -> None:
    with pytest.raises(HostIRError, match="%e is not symmetric"):
        recorded("%e: f32[4@x, 2, 8] = allocate", "put %a -> %e at %r over x by 8 sms", C, MATMUL)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (["put %a -> %mine at 0 over x by 8 sms", "put %a -> %mine at 2 over x by 8 sms"], [(2, 0)]),
        (["put %a -> %mine at 0 over x by 8 sms", "put %a -> %mine at 2 over x by 4 sms"], [(1, 0), (1, 0)]),
        (["put %a -> %mine at 0 over x by 8 sms", "put %a -> %mine at 2 over x"], [(1, 0)]),
        (
            [
                "put %a -> %mine at 0 over x by 8 sms",
                "signal %there[0] = 1 at 0 over x",
                "signal %there[1] = 1 at 0 over x",
                "put %a -> %mine at 2 over x by 8 sms",
            ],
            [(1, 1), (1, 0)],
        ),
        (
            [
                "put %a -> %mine at 0 over x by 8 sms",
                "signal %there[0] = 1 at 0 over x by 1 sms",
                "put %a -> %mine at 2 over x by 8 sms",
            ],
            [(1, 0), (1, 0)],
        ),
        (
            [
                "%e: f32[4@x, 2, 8] = allocate",
                "relu %a -> %e",
                "put %a -> %mine at 0 over x by 8 sms",
                "put %e -> %mine at 2 over x by 8 sms",
            ],
            [(1, 0), (1, 0)],
        ),
        (
            [
                "put %a -> %mine at 0 over x by 8 sms",
                "set_stream 0",
                "synchronize %user",
                "put %a -> %mine at 2 over x by 8 sms",
                "set_stream %user",
                "synchronize 0",
            ],
            [(1, 0), (1, 0)],
        ),
        (["put %a -> %mine at 0 over x by 8 sms"] * 3, [(1, 0), (1, 0), (1, 0)]),
        (
            [
                "%one = select %full[0]",
                "%two = select %full[1]",
                "%three = select %full[2]",
                "put %one -> %three at 1 over x by 8 sms",
                "put %two -> %one at 1 over x by 8 sms",
                "put %one -> %two at 0 over x by 8 sms",
            ],
            [(1, 0), (1, 0), (1, 0)],
        ),
    ],
    ids=[
        *("without signals", "other SMs", "a copy engine", "two signals", "a signal by a kernel of its own"),
        *("another buffer", "another stream"),
        *("to where another goes", "to where another comes from, and from where another goes"),
    ],
)
def test_a_copy_of_another_kind_begins_another_kernel(body: list[str], expected: list[tuple[int, int]]) -> None:
    assert kernels(recorded(*body, C, "matmul %full, %b -> %c")) == expected


PRODUCT = "matmul %a, %b -> %part"
BARRIER = "barrier of %a over x"
SENT = """for %i in 0..3 {
    put %part -> %slot at (%r + %i + 1) % 4 over x by 8 sms
    signal %there[%r] = 1 at (%r + %i + 1) % 4 over x
  }"""
BLOCKS = """for %i in 0..3 {
    %block = chunk %part[(%r + %i + 1) % 4 of 4] axis AXIS
    %place = chunk %slot[0 of 4] axis AXIS
    put %block -> %place at (%r + %i + 1) % 4 over x by 8 sms
  }"""


def products(*body: str, rows: int = 8) -> list[PushedProduct]:
    lines = "\n".join(f"  {line}" for line in body)
    program = parse(f"""hostir 1
mesh @mesh [x] = 0 1 2 3
program @p(%a: f32[{rows}, 8@x], %b: f32[8@x, 6], %d: f32[{rows}, 6]) -> (%c) streams 1 {{
  %user = current_stream
  %r = rank of %a over x
  %sent: f32[4, {rows}, 6] = allocate_symmetric
  %shared: f32[{rows}, 8@x] = allocate_symmetric
  %there: flag[4] = allocate_symmetric
  %part: f32[{rows}, 6] = allocate
  %e: f32[{rows}, 6] = allocate
  %slot = select %sent[%r]
{lines}
  %c: f32[{rows}, 6] = allocate
  sum %sent axis 0 -> %c ready %there >= 1 from %r own %part
}}
""")
    unrolled = unroll(program, 1, {})
    return PushedProduct.of(unrolled, Pushes.of(unrolled))


@pytest.mark.parametrize("between", ["", BARRIER, "free %e", "%f: f32[2] = allocate", f"free %e\n  {BARRIER}"])
def test_a_product_and_the_next_copies_of_its_rows_may_be_one_kernel(between: str) -> None:
    (ops,) = products(PRODUCT, between, SENT)
    assert ops.product.computation == "matmul"
    assert len(ops.pushes.copies) == 3
    assert ops.reader is not None
    assert (ops.reader.computation, ops.reader.starts_early) == ("sum", True)


def test_a_product_copies_only_few_and_complete_rows_to_peers() -> None:
    assert products(PRODUCT, SENT, rows=MAX_PUSHED_ROWS)
    assert not products(PRODUCT, SENT, rows=MAX_PUSHED_ROWS + 4)
    assert products(PRODUCT, BLOCKS.replace("AXIS", "0"))


@pytest.mark.parametrize(
    "body",
    [
        (PRODUCT, SENT.replace("%part", "%d")),
        ("add %d, %d -> %part", SENT),
        (PRODUCT, "relu %d -> %e", SENT),
        (PRODUCT, "relu %part -> %part", SENT),
        (PRODUCT, BARRIER, BARRIER, SENT),
        (PRODUCT, "set_stream 0", "synchronize %user", SENT, "set_stream %user", "synchronize 0"),
        ("set_stream 0", "synchronize %user", PRODUCT, "set_stream %user", SENT),
        (PRODUCT, "synchronize 0", SENT),
        (f"{PRODUCT} ready %there >= 1", SENT),
        ("%more: flag[4] = allocate_symmetric", f"{PRODUCT} done %more = 1", SENT),
        ("copy %a -> %shared", PRODUCT.replace("%a", "%shared"), BARRIER, SENT),
        ("matmul %a, %b -> %sent_0".replace("%sent_0", "%slot"), SENT.replace("put %part", "put %slot")),
    ],
    ids=[
        *("other rows", "no product", "another kernel", "another result", "two barriers", "another stream", "no order"),
        *("another stream's work", "rows that arrive", "blocks that are done", "what peers reach", "in its place"),
    ],
)
def test_a_product_is_a_separate_kernel_if_one_kernel_for_both_could_change_results(body: tuple[str, ...]) -> None:
    assert not products(*body)
