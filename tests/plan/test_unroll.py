"""Unrolled programs of one rank, and the memory that must be marked for a stream that uses it late."""

from __future__ import annotations

import pytest
import torch

from hostir.call.executor import Executor
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.plan.lifetimes import late_streams
from hostir.plan.operations import (
    CALLER,
    BarrierOp,
    CollectiveOp,
    ComputeOp,
    CopyOp,
    FreeOp,
    MarkOp,
    MessagesOp,
    SignalOp,
    SymmetricOp,
    ViewOp,
    WaitOp,
    WaitSignalOp,
)
from hostir.plan.unroll import message_teams_of, teams_of, unroll
from hostir.plan.unrolled import UnrolledProgram
from tests.call.small_programs import alone, pipeline, program, said


def recording_of(p: Program, rank: int = 0) -> UnrolledProgram:
    parts = [shard(x, v.tensor, rank, {}) for x, v in zip(random_inputs(p, {}), p.inputs, strict=True)]
    return unroll(p, rank, {}, parts)


def test_a_view_is_made_once_however_often_it_is_named() -> None:
    ops = recording_of(pipeline()).ops
    assert len([op for op in ops if isinstance(op, ViewOp)]) == 3 * 4
    assert len([op for op in ops if isinstance(op, CollectiveOp)]) == 4


def test_a_chain_of_views_is_one_view_of_its_buffer() -> None:
    body = """%c: f32[4, 3] = allocate
  %i = select %a[1]
  %j = chunk %i[1 of 2] axis 1
  %k = reshape %j
  relu %k -> %c"""
    p = alone(body.replace("%k = reshape", "%k: f32[4, 3] = reshape"), "%a: f32[2, 4, 6]")
    (view,) = (op for op in recording_of(p).ops if isinstance(op, ViewOp))
    assert (view.shape, view.stride, view.offset) == ((4, 3), (6, 1), 24 + 3)
    a = torch.randn(2, 4, 6)
    (c,) = Executor(p, machine="gloo")(a)
    assert torch.equal(c, a[1, :, 3:].relu())


def test_an_allreduce_in_place_moves_nothing_and_one_to_another_buffer_copies_first() -> None:
    body = """%x: f32[4, 8] = allocate
  %p = as_partial %x over didx
  matmul %a, %b -> %p
  %h = allreduce %p -> {out} over didx
  wait %h"""
    inputs = "%a: f32[4, 6@didx], %b: f32[6@didx, 8]"
    here = program(body.format(out="%x"), inputs, "%x")
    there = program("%c: f32[4, 8] = allocate\n  " + body.format(out="%c"), inputs)
    kinds = [[op.computation for op in recording_of(p).ops if isinstance(op, ComputeOp)] for p in (here, there)]
    assert kinds == [["matmul"], ["matmul", "copy"]]


def test_a_message_within_a_rank_is_a_copy_that_other_streams_can_wait_for() -> None:
    body = """%c: f32[8@didx, 4] = allocate
  %h = scatter %a -> %c
  {waits}wait %h"""
    inputs = "%a: f32[8, 4]"
    same = recording_of(program(body.format(waits=""), inputs), rank=1)
    assert [type(op) for op in same.ops if isinstance(op, MessagesOp | MarkOp | WaitOp)] == [MessagesOp, WaitOp]
    lonely = program(body.format(waits=""), inputs, mesh="0")
    assert not [op for op in recording_of(lonely).ops if isinstance(op, MarkOp | WaitOp)]
    there = "%user = current_stream\n  set_stream 0\n  {}\n  set_stream %user\n  synchronize 0"
    elsewhere = program(body.replace("{waits}wait %h", there.format("wait %h")), inputs, mesh="0")
    assert [type(op) for op in recording_of(elsewhere).ops if isinstance(op, MarkOp | WaitOp)] == [MarkOp, WaitOp]
    a = torch.randn(8, 4)
    assert torch.equal(Executor(elsewhere, machine="gloo")(a)[0], a)


def test_teams_come_in_the_order_of_the_program_and_once() -> None:
    p = parse("""hostir 1
mesh @grid [dp, tp] = (0 1) (2 3)
mesh @line [x] = 3 2 1 0
program @p(%a: f32[8@tp, 4@dp], %l: f32[8@x, 4] on @line) -> (%a) {
  %b: f32[8, 4@dp] = allocate
  %c: f32[8, 4] on @line = allocate
  %h = allgather %a -> %b over tp
  wait %h
  %g = allgather %l -> %c over x
  wait %g
  %i = allgather %a -> %b over tp
  wait %i
}
""")
    assert teams_of(p) == ((0, 1), (2, 3), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("set_stream 2", "no stream 2 in a pool of 2"),
        ("%c: f32[4, 5] = allocate\n  free %c\n  matmul %a, %b -> %c", "freed earlier"),
        ("%t: f32[4, 5] = allocate\n  free %t\n  free %t", "freed earlier"),
        ("%t = permute %a (1, 0)\n  %u: f32[32] = reshape %t", "cannot be seen as [32]"),
        ("%t: f32[4, 8] = allocate\n  %h = allreduce %p -> %t over didx", "nothing waits for this communication"),
    ],
)
def test_a_statement_that_no_machine_can_run_is_refused(body: str, message: str) -> None:
    inputs = "%a: f32[4, 8], %b: f32[8, 5], %p: f32[4, 8] partial(didx)"
    problem = said(lambda: recording_of(program(body, inputs, outputs="%a")))
    assert message in problem
    assert problem.startswith("p.hir:")


GRID = """hostir 1
mesh @grid [dp, tp] = (0 1) (3 2)
mesh @line [x] = 3 2
program @p(%a: f32[8@tp, 4@dp], %l: f32[8@x] on @line) -> (%a) {
  %r = rank of %a over tp
  %b: f32[8@tp, 4@dp] = allocate
  %m: f32[8@x] on @line = allocate
  %h = exchange %a to 1 - %r, %b from 1 - %r over tp
  wait %h
  %q = rank of %l over x
  if %q == 0 {
    %s = send %l to 1 over x
    wait %s
  }
  if %q == 1 {
    %s = recv %m from 0 over x
    wait %s
  }
  free %b
  free %m
}
"""


def test_messages_go_to_the_ranks_of_their_team_beside_its_collectives() -> None:
    p = parse(GRID)
    assert teams_of(p) == ()
    assert message_teams_of(p) == ((0, 1), (2, 3))
    sent = {rank: [op for op in recording_of(p, rank).ops if isinstance(op, MessagesOp)] for rank in range(4)}
    peers = {
        rank: [([to for _, to in op.sends], [source for _, source in op.receives]) for op in ops]
        for rank, ops in sent.items()
    }
    assert peers == {
        0: [([1], [1])],
        1: [([0], [0])],
        2: [([3], [3]), ([], [3])],
        3: [([2], [2]), ([2], [])],
    }
    assert not any(op.collective for ops in sent.values() for op in ops)
    assert {op.team for op in sent[3]} == {(2, 3)}
    between = program("%c: f32[8@didx, 4] = allocate\n  %h = scatter %a -> %c\n  wait %h", "%a: f32[8, 4]")
    assert [op.collective for op in recording_of(between, 1).ops if isinstance(op, MessagesOp)] == [True]


def test_a_message_of_a_rank_to_itself_keeps_its_place_among_the_messages_of_a_team() -> None:
    body = "%r = rank of %a over didx\n  %c: f32[8@didx] = allocate\n  %h = exchange %a to %r, %c from %r over didx"
    p = program(f"{body}\n  wait %h", "%a: f32[8@didx]")
    (message,) = (op for op in recording_of(p, 1).ops if isinstance(op, MessagesOp))
    assert [to for _, to in message.sends] == [source for _, source in message.receives] == [1]


def test_messages_of_a_team_of_one_are_copies_one_after_another() -> None:
    body = """%b: f32[4] = allocate
  %c: f32[4] = allocate
  %user = current_stream
  set_stream 0
  synchronize %user
  %h = exchange %a to 0, %b from 0 over didx
  set_stream %user
  %g = exchange %b to 0, %c from 0 over didx
  wait %g
  wait %h
  free %b"""
    p = alone(body, "%a: f32[4]")
    kinds = [type(op) for op in recording_of(p).ops if isinstance(op, ComputeOp | MarkOp | WaitOp)]
    assert kinds == [ComputeOp, MarkOp, WaitOp, ComputeOp, WaitOp]
    a = torch.randn(4)
    assert torch.equal(Executor(p, machine="gloo")(a)[0], a)


ONE_SIDED = """%me = rank of %a over didx
  %box: f32[2, 4, 8] = allocate_symmetric
  %f: flag[4] = allocate_symmetric
  %c: f32[4, 5] = allocate
  %mine = select %box[%me]
  %up = chunk %f[1 of 2]
  put %a -> %mine at 1 - %me over didx
  put %a -> %mine at %me over didx
  get %mine from 1 - %me over didx -> %mine
  signal %up[1] = 3 at 1 - %me over didx
  wait_signal %f[3] >= 3
  barrier of %a over didx
  matmul %mine, %b -> %c ready %f >= 2 from %me
  barrier of %a over didx"""
ONE_SIDED_INPUTS = "%a: f32[8@didx, 8], %b: f32[8, 5]"


def test_one_sided_statements_name_memory_of_this_rank_and_of_peers() -> None:
    unrolled = recording_of(program(ONE_SIDED, ONE_SIDED_INPUTS), rank=1)
    homes = {op.out: (op.name, op.rank) for op in unrolled.ops if isinstance(op, SymmetricOp)}
    assert sorted(homes.values()) == [("box", 0), ("box", 1), ("f", 0), ("f", 1)]

    def home(register: int) -> tuple[str, int] | None:
        return homes.get(unrolled.buffers[register])

    copies = [(home(op.x), home(op.out)) for op in unrolled.ops if isinstance(op, CopyOp)]
    assert copies == [(None, ("box", 0)), (None, ("box", 1)), (("box", 0), ("box", 1))]
    (signal,) = (op for op in unrolled.ops if isinstance(op, SignalOp))
    (flags,) = (op for op in unrolled.ops if isinstance(op, ViewOp) and op.out == signal.flags)
    assert (home(signal.flags), flags.offset, signal.slot, signal.epoch, signal.peer) == (("f", 0), 2, 1, 3, 0)
    (wait,) = (op for op in unrolled.ops if isinstance(op, WaitSignalOp))
    assert (home(wait.flags), wait.slot, wait.epoch) == (("f", 1), 3, 3)
    assert [(op.team, op.number) for op in unrolled.ops if isinstance(op, BarrierOp)] == [((0, 1), 0), ((0, 1), 1)]
    (matmul,) = (op for op in unrolled.ops if isinstance(op, ComputeOp))
    assert matmul.ready is not None
    assert (home(matmul.ready.flags), matmul.ready.epoch, matmul.ready.first) == (("f", 1), 2, 1)
    assert matmul.options == {}
    places = {home(op.out): (op.shape, op.stride, op.offset) for op in unrolled.ops if isinstance(op, ViewOp)}
    assert places["box", 0] == places["box", 1] == ((4, 8), (8, 1), 32), "the same view at the peer"


def test_a_computation_by_blocks_names_the_flags_that_it_waits_for_and_raises() -> None:
    body = """%me = rank of %a over didx
  %f: flag[4] = allocate_symmetric
  %g: flag[2] = allocate_symmetric
  %box: f32[2, 2, 8] = allocate_symmetric
  %c: f32[2, 8] = allocate
  sum %box axis 0 -> %c ready %f >= 2 done %g = 3 from %me own %a"""
    unrolled = recording_of(program(body, "%a: f32[4@didx, 8]"), rank=1)
    (op,) = (op for op in unrolled.ops if isinstance(op, ComputeOp))
    named = {register: op.name for register, op in unrolled.symmetric.items() if op.rank == 1}
    assert [(named[flags], slot, epoch) for flags, slot, epoch in op.awaited_flags] == [("f", 0, 2), ("f", 1, 2)]
    assert [(named[flags], slot, epoch) for flags, slot, epoch in op.raised_flags] == [("g", 0, 3), ("g", 1, 3)]
    assert [named.get(register, register) for register in op.reads] == ["box", "f", 1]
    assert [named.get(register) for register in op.writes] == [None, "g"]
    assert [named.get(register) for register in unrolled.tensors(op)] == ["box", None, None]
    assert [unrolled.flag_name(flags, slot) for flags, slot, _ in op.raised_flags] == ["%g[0]", "%g[1]"]


def test_a_symmetric_buffer_that_is_an_output_is_copied_for_the_caller() -> None:
    unrolled = recording_of(program("%s: f32[4, 8] = allocate_symmetric", "%a: f32[4, 8]", outputs="%s"))
    (buffer,) = (op for op in unrolled.ops if isinstance(op, SymmetricOp))
    (copy,) = (op for op in unrolled.ops if isinstance(op, ComputeOp))
    assert (copy.computation, copy.operands, (copy.out,)) == ("copy", (buffer.out,), unrolled.outputs)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("get %a from 1 over didx -> %b", "%a is not symmetric"),
        ("%t: f32[4, 4] = allocate\n  put %a -> %t at 1 over didx", "%t is not symmetric"),
        ("%f: flag[1] = allocate\n  signal %f[0] = 1 at 0 over didx", "%f is not symmetric"),
        ("%f: flag[1] = allocate\n  wait_signal %f[0] >= 1", "%f is not symmetric"),
        ("%f: flag[2] = allocate\n  matmul %a, %b -> %b ready %f >= 1 from 0", "%f is not symmetric"),
        ("%f: flag[2] = allocate\n  matmul %a, %b -> %b done %f = 1 from 0", "%f is not symmetric"),
        (
            "%f: flag[2] = allocate_symmetric\n  matmul %a, %b -> %b done %f = 4294967296 from 0",
            "epoch 4294967296 of a flag",
        ),
        (
            "%f: flag[1] = allocate_symmetric\n  signal %f[0] = 4294967296 at 0 over didx",
            "epoch 4294967296 of a flag",
        ),
        (
            "if 1 == 1 { %s: f32[2] = allocate_symmetric }\n  if 1 == 1 { %s: f32[3] = allocate_symmetric }",
            "%s was allocated before with another shape or dtype",
        ),
    ],
)
def test_a_statement_on_memory_that_peers_cannot_share_is_refused(body: str, message: str) -> None:
    p = program(body, "%a: f32[4, 4], %b: f32[4, 4]", outputs="%a")
    problem = said(lambda: recording_of(p))
    assert message in problem
    assert problem.startswith("p.hir:")


def test_a_program_that_joins_its_workers_needs_no_marks_on_its_memory() -> None:
    assert late_streams(recording_of(pipeline())) == {}


LATE = {"%a": (0,), "%c": (0,)}


@pytest.mark.parametrize(
    ("body", "late"),
    [
        pytest.param("set_stream 0\n  relu %a -> %c", LATE, id="a worker that never joins"),
        pytest.param(
            "set_stream 0\n  relu %a -> %c\n  set_stream 1\n  synchronize 0", LATE, id="joined by another worker"
        ),
        pytest.param("set_stream 0\n  relu %a -> %c\n  set_stream %user\n  synchronize 0", {}, id="joined"),
        pytest.param(
            "set_stream 0\n  relu %a -> %c\n  set_stream 1\n  synchronize 0\n  set_stream %user\n  synchronize 1",
            {},
            id="joined through another worker",
        ),
        pytest.param(
            "set_stream %user\n  synchronize 0\n  set_stream 0\n  relu %a -> %c",
            LATE,
            id="joined too early",
        ),
    ],
)
def test_memory_that_a_stream_may_still_use_is_marked(body: str, late: dict[str, tuple[int, ...]]) -> None:
    p = alone(f"%user = current_stream\n  %c: f32[4, 8] = allocate\n  {body}", "%a: f32[4, 8]")
    assert late_streams(recording_of(p)) == {{"%a": 1, "%c": 2}[name]: streams for name, streams in late.items()}


def test_own_rows_that_a_worker_may_still_read_are_marked() -> None:
    body = """%me = rank of %a over didx
  %full: f32[4, 8] = allocate_symmetric
  %f: flag[2] = allocate_symmetric
  %c: f32[4, 5] = allocate_symmetric
  set_stream 0
  matmul %full, %b -> %c ready %f >= 1 from %me own %a"""
    p = program(body, "%a: f32[4@didx, 8], %b: f32[8, 5]", outputs="%b")
    assert late_streams(recording_of(p)) == {1: (0,), 2: (0,)}


def test_a_copy_that_a_worker_may_still_make_marks_the_memory_that_it_reads() -> None:
    body = "%s: f32[4, 8] = allocate_symmetric\n  set_stream 0\n  put %a -> %s at 0 over didx"
    assert late_streams(recording_of(alone(body, "%a: f32[4, 8]", outputs="%a"))) == {1: (0,)}


def test_an_output_from_a_workers_memory_is_marked_for_the_caller() -> None:
    body = "%user = current_stream\n  set_stream 0\n  %c: f32[4, 8] = allocate\n  relu %a -> %c\n"
    p = alone(f"{body}  set_stream %user\n  synchronize 0", "%a: f32[4, 8]")
    assert late_streams(recording_of(p)) == {2: (CALLER,)}


def test_a_buffer_freed_before_its_communication_is_waited_for_is_marked() -> None:
    body = """%user = current_stream
  %t: f32[4, 8] = allocate
  %c: f32[4, 8] = allocate
  %p = as_partial %t over didx
  %h = allreduce %p -> %t over didx
  free %t
  wait %h
  relu %a -> %c"""
    unrolled = recording_of(program(body, "%a: f32[4, 8]"))
    (free,) = (op for op in unrolled.ops if isinstance(op, FreeOp))
    assert late_streams(unrolled) == {free.buffer: (CALLER,)}
