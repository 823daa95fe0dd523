"""Computations by blocks of rows: flags set after each block, and sums that wait for the blocks of all sources."""

from __future__ import annotations

from math import prod
from random import Random

import pytest

import hostir as hi
from hostir.check.proof import analyse
from hostir.check.tracing.memory import Buffer, View, dense, rows_of
from hostir.cli.pictures.scene import boxes_of, stage
from hostir.ir import Program
from hostir.repair.repair import repair
from tests.check.test_alike import assert_one_rank_stands_for_all
from tests.judging.reduce_scatters import FORMS, IN_PIECES, reduce_scatter
from tests.judging.simulated import failure_of

EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=["pieces", "slices"])
ORDERING = ("signal", "wait_signal", "barrier", "synchronize")


# A matmul and a reduce-scatter ------------------------------------------------------------------------------------
@EACH_FORM
@pytest.mark.parametrize(("ranks", "pieces"), [(2, 1), (2, 3), (3, 2), (4, 2), (8, 2)])
def test_a_matmul_and_a_reduce_scatter_are_proved_on_all_ranks_and_on_one(form: str, ranks: int, pieces: int) -> None:
    program = hi.parse(reduce_scatter(form, ranks, pieces))
    assert analyse(program).findings == []
    assert_one_rank_stands_for_all(program, compare=True)


@EACH_FORM
def test_one_rank_stands_for_many(form: str) -> None:
    assert_one_rank_stands_for_all(hi.parse(reduce_scatter(form, 200)))


def shorter(form: str, ranks: int) -> dict[str, Program]:
    """Return programs that lack one ordering statement each. A key has the line of the statement that is left out."""
    lines = reduce_scatter(form, ranks).splitlines()
    return {
        f"{n}: {line.strip()}": hi.parse("\n".join([*lines[:n], *lines[n + 1 :]]))
        for n, line in enumerate(lines)
        if line.strip().split(" ")[0] in ORDERING
    }


@EACH_FORM
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_checker_reports_every_missing_order(form: str, ranks: int) -> None:
    programs = shorter(form, ranks)
    assert len(programs) == 5
    assert [line for line, program in programs.items() if not hi.check(program)] == []


@pytest.mark.slow
@EACH_FORM
def test_every_missing_order_can_be_repaired(form: str) -> None:
    for program in shorter(form, 3).values():
        assert hi.check(repair(program)) == []


LOST = {
    "wait_signal": lambda text: "\n".join(line for line in text.splitlines() if "wait_signal" not in line),
    "ready": lambda text: text.replace(" ready %sent_there >= 1 from %r own %mine", ""),
    "signal": lambda text: "\n".join(line for line in text.splitlines() if "  signal" not in line),
}


@pytest.mark.slow
@EACH_FORM
@pytest.mark.parametrize("lost", LOST)
def test_a_repair_restores_a_lost_use_of_flags(form: str, lost: str) -> None:
    text = reduce_scatter(form, 3)
    broken = hi.parse(LOST[lost](text))
    assert broken != hi.parse(text)
    assert repair(broken) == hi.parse(text)


# Blocks that wait for flags and blocks that set flags -------------------------------------------------------------
RELAY = """hostir 1
mesh @mesh [didx] = 0 1
program @relay(%x: f32[8@didx, 3], %w: f32[3, 3]) -> (%y) streams 1 {
  %user = current_stream
  %r = rank of %x over didx
  %a: f32[8, 3] = allocate_symmetric
  %z: f32[8, 3] = allocate
  %y: f32[8, 3] = allocate_symmetric
  %there: flag[READY] = allocate_symmetric
  %done: flag[DONE] = allocate_symmetric
  set_stream 0
  synchronize %user
  barrier of %x over didx
  %mine = chunk %a[%r of 2]
  for %i in 0..HALF {
    %from = chunk %x[%i of HALF] axis 0
    %to = chunk %mine[%i of HALF] axis 0
    put %from -> %to at 1 - %r over didx
    signal %there[(%r * HALF) + %i] = 1 at 1 - %r over didx
  }
  set_stream %user
  put %x -> %mine at %r over didx
  for %i in 0..HALF { signal %there[(%r * HALF) + %i] = 1 at %r over didx }
  matmul %a, %w -> %z ready %there >= 1 done %done = 1 from %r * HALF
  set_stream 0
  for %i in 0..DONE {
    wait_signal %done[%i] >= 1
    %sent = chunk %z[%i of DONE]
    %got = chunk %y[%i of DONE]
    put %sent -> %got at 1 - %r over didx
  }
  barrier of %x over didx
  set_stream %user
  synchronize 0
  free %z
}
"""


def relay(ready: int, done: int, wait: str = "%i") -> Program:
    text = RELAY.replace("READY", str(ready)).replace("DONE", str(done)).replace("HALF", str(ready // 2))
    return hi.parse(text.replace("%done[%i]", f"%done[{wait}]"))


@pytest.mark.parametrize(("ready", "done"), [(2, 2), (2, 8), (8, 2), (4, 8), (8, 4), (2, 1)])
def test_the_numbers_of_blocks_that_wait_and_of_blocks_that_set_flags_may_differ(ready: int, done: int) -> None:
    program = relay(ready, done)
    assert hi.check(program) == []
    assert failure_of(program, 10) == ""


@pytest.mark.parametrize(("ready", "done"), [(2, 2), (2, 8), (8, 2), (8, 4)])
def test_a_flag_orders_nothing_in_another_block(ready: int, done: int) -> None:
    program = relay(ready, done, f"{done - 1} - %i")
    assert {finding.category for finding in hi.check(program)} == {"race"}  # type: ignore[attr-defined]
    assert failure_of(program, 20)


@pytest.mark.parametrize("early", [False, True])
def test_rows_may_be_overwritten_after_a_wait_for_the_block_that_reads_them(early: bool) -> None:
    wait = "    wait_signal %done[%i] >= 1\n"
    over = "    %old = chunk %a[%i of DONE]\n    copy %old -> %old\n"
    text = RELAY.replace(wait, over + wait if early else wait + over)
    program = hi.parse(text.replace("READY", "4").replace("DONE", "2").replace("HALF", "2"))
    assert ("a" in {finding.buffer for finding in hi.check(program)}) is early  # type: ignore[attr-defined]


CHAIN = """hostir 1
mesh @mesh [didx] = 0
program @chain(%x: f32[4, 3], %w: f32[3, 3]) -> (%y) streams 2 {
  %user = current_stream
  %a: f32[4, 3] = allocate
  %b: f32[4, 3] = allocate
  %y: f32[4, 3] = allocate
  %first: flag[4] = allocate_symmetric
  %second: flag[2] = allocate_symmetric
  for %s in 0..2 {
    set_stream %s
    synchronize %user
  }
  set_stream 0
  matmul %x, %w -> %a done %first = 1
  set_stream 1
  wait_signal %first[0] >= 1
  matmul %a, %w -> %b ready %first >= 1 done %second = 1
  set_stream %user
  for %i in 0..2 {
    %part = chunk %b[%i of 2]
    %out = chunk %y[%i of 2]
    wait_signal %second[%i] >= 1
    copy %part -> %out
    %old = chunk %a[%i of 2]
    copy %part -> %old
  }
  for %s in 0..2 { synchronize %s }
  free %a
  free %b
}
"""


def test_a_flag_of_a_waiting_kernel_orders_the_kernel_that_it_waited_for() -> None:
    assert {f.category for f in hi.check(hi.parse(CHAIN))} <= {"SMs held"}  # type: ignore[attr-defined]
    early = CHAIN.replace("wait_signal %second[%i] >= 1\n", "")
    assert "race" in {f.category for f in hi.check(hi.parse(early))}  # type: ignore[attr-defined]


SUM = """hostir 1
mesh @mesh [didx] = 0
program @sums(%x: SHAPE) -> (%y) streams 1 {
  %user = current_stream
  %y: f32[4, 3] = allocate
  %z: f32[4, 3] = allocate
  %done: flag[2] = allocate_symmetric
  set_stream 0
  synchronize %user
  set_stream %user
  sum %x axis AXIS -> %z done %done = 1 from 1
  set_stream 0
  for %i in 0..2 {
    wait_signal %done[WAIT] >= 1
    %part = chunk %z[%i of 2]
    %out = chunk %y[%i of 2]
    copy %part -> %out
  }
  set_stream %user
  synchronize 0
  free %z
}
"""


@pytest.mark.parametrize(("shape", "axis"), [("f32[5, 4, 3]", 0), ("f32[4, 5, 3]", 1), ("f32[4, 3, 5]", 2)])
@pytest.mark.parametrize(("wait", "race"), [("%i", False), ("0", True), ("1", True)])
def test_a_sum_over_any_axis_sets_flags_after_its_blocks(shape: str, axis: int, wait: str, race: bool) -> None:
    program = hi.parse(SUM.replace("SHAPE", shape).replace("AXIS", str(axis)).replace("WAIT", wait))
    assert bool(hi.check(program)) is race
    assert bool(failure_of(program, 20)) is race


# Blocks of rows in memory -----------------------------------------------------------------------------------------
def elements(x: View) -> list[int]:
    offsets = [x.offset]
    for n, stride in zip(x.shape, x.strides, strict=True):
        offsets = [at + i * stride for at in offsets for i in range(n)]
    return offsets


def test_blocks_of_rows_hold_the_rows_in_order() -> None:
    random, cut, refused = Random(1), 0, 0
    for _ in range(400):
        shape = tuple(random.choice([1, 2, 2, 3, 4]) for _ in range(random.choice([1, 2, 3, 4])))
        x = dense(Buffer(0, "x", 10**6), shape)
        axes = random.sample(range(len(shape)), len(shape)) if random.random() < 0.4 else range(len(shape))
        kept = tuple(random.choice([n, n, max(n // 2, 1)]) for n in shape)  # cut axes no longer merge
        x = View(x.buffer, 0, tuple(kept[a] for a in axes), tuple(x.strides[a] for a in axes))
        rows, width = prod(x.shape[:-1]), x.shape[-1]
        blocks = random.choice([n for n in range(1, rows + 1) if rows % n == 0])
        views, all_of_x = [rows_of(x, n, blocks) for n in range(blocks)], elements(x)
        size = rows // blocks * width
        for n, view in enumerate(views):
            if view is None:
                refused += 1
                continue
            cut += 1
            assert elements(view) == all_of_x[n * size : (n + 1) * size]
    assert cut > 500
    assert refused


UNCUT = """hostir 1
mesh @mesh [didx] = 0
program @uncut(%x: f32[5, 3, 2, 4]) -> (%z) {
  %wide: f32[3, 4, 4] = allocate
  %done: flag[2] = allocate_symmetric
  %z = chunk %wide[0 of 2] axis 1
  sum %x axis 0 -> %z done %done = 1
}
"""


def test_rows_that_cannot_be_cut_are_refused_with_a_hint() -> None:
    (finding,) = hi.check(hi.parse(UNCUT))
    assert finding.message == "rank 0: 2 blocks of the rows of shape [3, 2, 4] with strides [16, 4, 1] are not views"
    assert finding.hint == "copy it first"
    assert hi.check(hi.parse(UNCUT.replace("flag[2]", "flag[3]"))) == []


def test_a_program_in_pieces_gives_equal_bits_in_every_order() -> None:
    assert failure_of(hi.parse(reduce_scatter(IN_PIECES, 3)), 10) == ""


def test_an_arrow_leads_from_a_matmul_to_each_wait_for_one_of_its_blocks() -> None:
    program = hi.parse(reduce_scatter(IN_PIECES, 2))
    order = analyse(program).order
    assert order is not None
    scene = stage(order, boxes_of(program, order, [0], 1, set()), {})
    arrows = {(a.source.word, a.target.word, tuple(a.target.rounds)) for a in scene.arrows}
    assert {("matmul", "wait_signal", ((0, p),)) for p in range(2)} <= arrows


ALONE = {
    "matmul": ("%x: f32[4, 3], %v: f32[3, 3], %own: f32[4, 3]", 1, "matmul %x, %v -> %y ready %there >= 1 own %own"),
    "sum": ("%x: f32[1, 4, 3], %own: f32[4, 3]", 2, "sum %x axis 0 -> %y ready %there >= 1 from 0 own %own"),
}


@pytest.mark.parametrize("operation", ALONE)
def test_a_computation_of_own_rows_only_waits_for_nothing(operation: str) -> None:
    inputs, flags, line = ALONE[operation]
    buffers = f"  %there: flag[{flags}] = allocate_symmetric\n  %y: f32[4, 3] = allocate\n"
    text = f"hostir 1\nmesh @mesh [didx] = 0\nprogram @p({inputs}) -> (%y) {{\n{buffers}  {line}\n}}\n"
    assert hi.check(hi.parse(text)) == []
