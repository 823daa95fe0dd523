"""Overlap clauses: for programs of every strategy and for programs written by hand."""

from __future__ import annotations

import pytest

import hostir as hi
from examples import patterns
from hostir.choice.overlaps import NOTHING, normed_clauses, overlap_clauses
from hostir.plan.unroll import unroll
from hostir.torch.ops.residual_norm import norm_fusion

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\nprogram @p(%a: f32[8@didx, 4], %x: f32[8, 8]) -> (%f, %y)"
GATHER = "%f: f32[8, 4] = allocate\n  %h = allgather %a -> %f over didx\n"
MULTIPLY = "%y: f32[8, 8] = allocate\n  matmul %x, %x -> %y\n"


def clauses(program: hi.Program, rank: int = 0) -> tuple[str, ...]:
    return overlap_clauses(unroll(program, rank, {}))


def by_hand(*body: str) -> tuple[str, ...]:
    return clauses(hi.parse(f"{HEAD} {{\n  {'  '.join(body)}}}\n"))


@pytest.mark.parametrize(
    ("strategy", "clause"),
    [
        ("sequential", "its allgather overlaps with no computation"),
        ("pipeline", "4 of its 4 allgathers overlap with matmul"),
        ("ring", "3 of its 3 copies from peers overlap with matmul"),
        ("fused", "12 of its 12 copies to peers overlap with matmul"),
        ("push", "12 of its 12 copies to peers overlap with matmul"),
    ],
)
def test_each_strategy_names_the_communications_that_it_overlaps(strategy: str, clause: str) -> None:
    program = hi.lower(patterns.allgather_matmul(), strategy)
    assert [clauses(program, rank) for rank in range(4)] == [(clause,)] * 4


def test_a_clause_names_what_the_kernel_of_a_sum_carries_out() -> None:
    for quantized, last in ((False, "add and rms_norm"), (True, "add, rms_norm, row_scales and quantize")):
        fusion = norm_fusion(2, "bf16", 64, 1e-6, True, False, quantized)
        program = hi.lower(fusion, "sequential by low_latency")
        clause = f"one kernel carries out its allreduce, {last}"
        assert normed_clauses(unroll(program, 0, {"M": 4})) == (clause,)
        assert normed_clauses(unroll(hi.lower(fusion, "sequential"), 0, {"M": 4})) == ()


def test_one_worker_stream_overlaps_nothing() -> None:
    assert clauses(hi.lower(patterns.allgather_matmul(), "pipeline", 1)) == (
        "none of its 4 allgathers overlaps with a computation",
    )


def test_sums_hide_communications_and_copies_do_not() -> None:
    assert clauses(hi.lower(patterns.mlp(), "push")) == ("24 of its 24 copies to peers overlap with matmul and sum",)
    assert clauses(hi.lower(patterns.mlp(), "pipeline")) == tuple(
        f"4 of its 4 {collective}s overlap with matmul and gelu" for collective in ("allgather", "reduce_scatter")
    )


def test_a_communication_ends_at_its_wait() -> None:
    assert by_hand(GATHER, MULTIPLY, "wait %h\n") == ("its allgather overlaps with matmul",)
    assert by_hand(GATHER, "wait %h\n", MULTIPLY) == ("its allgather overlaps with no computation",)
    assert by_hand(MULTIPLY, GATHER, "wait %h\n") == ("its allgather overlaps with no computation",)


def test_some_of_several_communications_overlap() -> None:
    twice = GATHER + "  wait %h\n  %f2: f32[8, 4] = allocate\n  %h2 = allgather %a -> %f2 over didx\n  "
    assert by_hand(twice, MULTIPLY, "wait %h2\n") == ("1 of its 2 allgathers overlaps with matmul",)


def test_a_program_without_communication_has_the_clause_for_it() -> None:
    assert clauses(hi.lower(patterns.no_communication(), "sequential")) == (NOTHING,)
