"""What the clauses on overlap say, of programs by every strategy and of programs by hand."""

from __future__ import annotations

import pytest

import hostir as hi
from examples import patterns
from hostir.choice.overlaps import NOTHING, overlap_clauses
from hostir.plan.unroll import unroll

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\nprogram @p(%a: f32[8@didx, 4], %x: f32[8, 8]) -> (%f, %y)"
GATHER = "%f: f32[8, 4] = allocate\n  %h = allgather %a -> %f over didx\n"
MULTIPLY = "%y: f32[8, 8] = allocate\n  matmul %x, %x -> %y\n"


def said(program: hi.Program, rank: int = 0) -> tuple[str, ...]:
    return overlap_clauses(unroll(program, rank, {}))


def by_hand(*body: str) -> tuple[str, ...]:
    return said(hi.parse(f"{HEAD} {{\n  {'  '.join(body)}}}\n"))


@pytest.mark.parametrize(
    ("strategy", "clause"),
    [
        ("sequential", "its allgather overlaps with no computation"),
        ("pipeline", "4 of its 4 allgathers overlap with matmul"),
        ("ring", "3 of its 3 gets overlap with matmul"),
        ("fused", "12 of its 12 puts overlap with matmul"),
        ("push", "12 of its 12 puts overlap with matmul"),
    ],
)
def test_each_strategy_overlaps_an_allgather_as_it_says(strategy: str, clause: str) -> None:
    program = hi.lower(patterns.allgather_matmul(), strategy)
    assert [said(program, rank) for rank in range(4)] == [(clause,)] * 4


def test_one_worker_stream_overlaps_nothing() -> None:
    assert said(hi.lower(patterns.allgather_matmul(), "pipeline", 1)) == (
        "none of its 4 allgathers overlaps with a computation",
    )


def test_sums_are_computations_too_and_copies_are_not() -> None:
    assert said(hi.lower(patterns.mlp(), "push")) == ("24 of its 24 puts overlap with matmul and sum",)
    assert said(hi.lower(patterns.mlp(), "pipeline")) == tuple(
        f"4 of its 4 {kind}s overlap with matmul and gelu" for kind in ("allgather", "reduce_scatter")
    )


def test_a_communication_ends_where_it_is_waited_for() -> None:
    assert by_hand(GATHER, MULTIPLY, "wait %h\n") == ("its allgather overlaps with matmul",)
    assert by_hand(GATHER, "wait %h\n", MULTIPLY) == ("its allgather overlaps with no computation",)
    assert by_hand(MULTIPLY, GATHER, "wait %h\n") == ("its allgather overlaps with no computation",)


def test_some_of_several_communications_overlap() -> None:
    twice = GATHER + "  wait %h\n  %f2: f32[8, 4] = allocate\n  %h2 = allgather %a -> %f2 over didx\n  "
    assert by_hand(twice, MULTIPLY, "wait %h2\n") == ("1 of its 2 allgathers overlaps with matmul",)


def test_a_program_without_communication_says_so() -> None:
    assert said(hi.lower(patterns.no_communication(), "sequential")) == (NOTHING,)
