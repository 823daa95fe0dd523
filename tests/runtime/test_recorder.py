"""Recordings: what a program becomes for one rank, and which memory must be marked for a stream that uses it late."""

from __future__ import annotations

import pytest
import torch

from hostir.ir.program import Program
from hostir.ir.text import parse
from hostir.runtime.executor import Executor
from hostir.runtime.lifetimes import late_streams
from hostir.runtime.plan import (
    CALLER,
    Collective,
    Compute,
    Free,
    Mark,
    Messages,
    Recording,
    View,
    Wait,
    message_teams_of,
    teams_of,
)
from hostir.runtime.recorder import record
from hostir.runtime.sharding import random_inputs, shard
from tests.runtime.small_programs import alone, pipeline, program, said


def recording_of(p: Program, rank: int = 0) -> Recording:
    parts = [shard(x, v.tensor, rank, {}) for x, v in zip(random_inputs(p, {}), p.inputs, strict=True)]
    return record(p, rank, {}, parts)


# Recordings -------------------------------------------------------------------------------------------------------
def test_a_view_is_made_once_however_often_it_is_named() -> None:
    ops = recording_of(pipeline()).ops
    assert len([op for op in ops if isinstance(op, View)]) == 3 * 4
    assert len([op for op in ops if isinstance(op, Collective)]) == 4


def test_a_chain_of_views_is_one_view_of_its_buffer() -> None:
    body = """%c: f32[4, 3] = allocate
  %i = select %a[1]
  %j = chunk %i[1 of 2] axis 1
  %k = reshape %j
  relu %k -> %c"""
    p = alone(body.replace("%k = reshape", "%k: f32[4, 3] = reshape"), "%a: f32[2, 4, 6]")
    (view,) = (op for op in recording_of(p).ops if isinstance(op, View))
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
    kinds = [[op.kind for op in recording_of(p).ops if isinstance(op, Compute)] for p in (here, there)]
    assert kinds == [["matmul"], ["matmul", "copy"]]


def test_a_message_within_a_rank_is_a_copy_that_other_streams_can_wait_for() -> None:
    body = """%c: f32[8@didx, 4] = allocate
  %h = scatter %a -> %c
  {waits}wait %h"""
    inputs = "%a: f32[8, 4]"
    same = recording_of(program(body.format(waits=""), inputs), rank=1)
    assert [type(op) for op in same.ops if isinstance(op, Messages | Mark | Wait)] == [Messages, Wait]
    lonely = program(body.format(waits=""), inputs, mesh="0")
    assert not [op for op in recording_of(lonely).ops if isinstance(op, Mark | Wait)]
    there = "%user = current_stream\n  set_stream 0\n  {}\n  set_stream %user\n  synchronize 0"
    elsewhere = program(body.replace("{waits}wait %h", there.format("wait %h")), inputs, mesh="0")
    assert [type(op) for op in recording_of(elsewhere).ops if isinstance(op, Mark | Wait)] == [Mark, Wait]
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
def test_what_no_machine_can_do_is_refused_at_its_statement(body: str, message: str) -> None:
    inputs = "%a: f32[4, 8], %b: f32[8, 5], %p: f32[4, 8] partial(didx)"
    problem = said(lambda: recording_of(program(body, inputs, outputs="%a")))
    assert message in problem
    assert problem.startswith("p.hir:")


# Messages ---------------------------------------------------------------------------------------------------------
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
    sent = {rank: [op for op in recording_of(p, rank).ops if isinstance(op, Messages)] for rank in range(4)}
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
    assert [op.collective for op in recording_of(between, 1).ops if isinstance(op, Messages)] == [True]


def test_a_message_to_oneself_keeps_its_place_among_the_messages_of_a_team() -> None:
    body = "%r = rank of %a over didx\n  %c: f32[8@didx] = allocate\n  %h = exchange %a to %r, %c from %r over didx"
    p = program(f"{body}\n  wait %h", "%a: f32[8@didx]")
    (message,) = (op for op in recording_of(p, 1).ops if isinstance(op, Messages))
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
    kinds = [type(op) for op in recording_of(p).ops if isinstance(op, Compute | Mark | Wait)]
    assert kinds == [Compute, Mark, Wait, Compute, Wait]
    a = torch.randn(4)
    assert torch.equal(Executor(p, machine="gloo")(a)[0], a)


@pytest.mark.parametrize(
    ("body", "what", "line"),
    [
        ("%s: f32[4, 8] = allocate_symmetric", "allocate_symmetric", 4),
        ("barrier of %a over didx", "barrier", 4),
    ],
)
def test_what_only_simulated_ranks_can_do_is_refused_at_its_statement(body: str, what: str, line: int) -> None:
    problem = said(lambda: recording_of(program(body, "%a: f32[4, 8]", outputs="%a")))
    assert f"p.hir:{line}:3: error: '{what}' runs on simulated ranks only so far" in problem
    assert "hint: run without torchrun" in problem
    assert problem.count("error:") == 1


def test_a_recorder_takes_no_notes_of_copies_signals_and_matmuls_that_wait() -> None:
    text = """get %a from 0 over didx -> %c
  put %a -> %c at 0 over didx
  signal %f[0] = 1 at 0 over didx
  wait_signal %f[0] >= 1
  matmul %a, %b -> %c ready %f >= 1 from 0"""
    p = program(text, "%a: f32[4, 4], %b: f32[4, 4], %c: f32[4, 4], %f: flag[2]", outputs="%a")
    parts: list[torch.Tensor | None] = [torch.empty(4, 4)] * 3 + [torch.empty(2)]
    for place, what in enumerate(["get", "put", "signal", "wait_signal", "matmul ... ready"]):
        only = p.with_body(p.body[place : place + 1])
        problem = said(lambda only=only: record(only, 0, {}, parts))  # type: ignore[misc]
        assert f"p.hir:{4 + place}:3: error: '{what}' runs on simulated ranks only so far" in problem


# Lifetimes --------------------------------------------------------------------------------------------------------
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
    recording = recording_of(program(body, "%a: f32[4, 8]"))
    (free,) = (op for op in recording.ops if isinstance(op, Free))
    assert late_streams(recording) == {free.buffer: (CALLER,)}
