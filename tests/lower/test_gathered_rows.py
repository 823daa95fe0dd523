"""Gathered rows by `ring`, `fused` and `push`: correct in every schedule and over calls; every statement is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hostir as hi
from examples import patterns
from examples.ag_matmul import ag_matmul
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.check.tracing.memory import View
from hostir.check.tracing.tracer import Tracer
from hostir.ir import HostIRError, Program
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Synchronize
from hostir.ir.onesided_ops import Barrier, Get, Put, Signal, WaitSignal
from hostir.ir.tensor_ops import Contraction, DenseCopy, TensorOp
from hostir.ir.types import DTYPES
from hostir.kernels.dtypes import torch_dtype
from tests.call.whole import planned
from tests.judging.simulated import failure_of
from tests.lower.gathered import gathered
from tests.lower.held import (
    assert_correct,
    assert_each_statement_is_needed,
    every_strategy,
    lowerable,
    one_sided,
)

Pattern = Callable[..., hi.Fusion]
GATHERED = [patterns.allgather_matmul, patterns.allgather_matmul_rows, patterns.allgather_matmul_kept]
GATHERED += [patterns.column_parallel, patterns.gate_up, patterns.mlp, patterns.mlp_2d]


def waiting(program: Program) -> int:
    """Return the number of products that wait for their rows."""
    return sum(isinstance(s, Contraction) and s.ready is not None for s in program.walk())


@pytest.mark.parametrize(
    ("pattern", "ranks"), [*((p, n) for p in GATHERED for n in (2, 4)), (patterns.allgather_matmul, 8)]
)
@every_strategy
def test_a_pattern_gives_the_unsharded_result_in_every_schedule(pattern: Pattern, strategy: str, ranks: int) -> None:
    fusion = pattern(ranks=ranks, S=2, M=32, K=16).program()
    program = hi.lower(fusion, strategy)
    assert one_sided(program) or (pattern is patterns.mlp_2d and ranks == 2)
    assert_correct(fusion, program, range(3))
    assert failure_of(program, 4) == ""


@every_strategy
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_fusions_of_gathered_rows_give_the_unsharded_result(strategy: str, ranks: int) -> None:
    fusions = (gathered(ranks, seed) for seed in range(10))
    lowered = list(lowerable(fusions, lambda seed, fusion: hi.lower(fusion, strategy, streams=1 + seed % 3)))
    for seed, fusion, program in lowered:
        assert strategy == "ring" or waiting(program) in (1, 2)  # 2 if the next product sums over its columns
        assert_correct(fusion, program, range(seed, seed + 2))
    assert len(lowered) > 6


@pytest.mark.parametrize("ranks", [2, 4])
@every_strategy
def test_one_program_serves_every_size_bound_at_run_time(strategy: str, ranks: int) -> None:
    with hi.Fusion("symbolic") as fusion:
        x = hi.tensor("x", ["S", ranks, "M", "K"], "f32")
        w = hi.tensor("w", ["K", "N"], "f32")
        fusion.output(hi.gelu(x @ w))
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)
    w.shard(1, mesh)
    program = hi.lower(fusion, strategy)
    assert one_sided(program)
    some = ((1, 3, 5), (3, 2, 1), (2, 1, 8))
    sizes = [{"S": slices, "M": rows, "K": inner, "N": 4 * ranks} for slices, rows, inner in some]
    assert_correct(fusion.program(), program, range(2), *sizes)


class Operands(Tracer):
    """Records the layout of the left operand of every matmul."""

    def compute(self, operation: str, out: View, operands: Sequence[View | None], *rest: Any) -> None:
        if operation == "matmul" and (a := operands[0]):
            self.seen.add((a.shape, a.strides, a.offset))
        super().compute(operation, out, operands, *rest)

    seen: set[tuple[object, ...]]


@pytest.mark.parametrize(
    "pattern", [patterns.allgather_matmul, patterns.allgather_matmul_rows, patterns.allgather_matmul_kept]
)
def test_every_rank_multiplies_the_same_rows_in_the_same_layout(pattern: Pattern) -> None:
    """So the copies of a result agree in every bit."""
    program = hi.lower(pattern(ranks=4), "ring")
    seen = []
    for rank in range(4):
        tracer = Operands(rank, program, {})
        tracer.seen = set()
        tracer.call()
        seen.append(tracer.seen)
    assert len(seen[0]) == 4
    assert all(views == seen[0] for views in seen)


def test_the_copies_of_a_result_agree_if_a_rank_has_rows_in_several_places() -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @rows(%x: f32[2, 4@tp, 4], %w: f32[4, 6]) -> (%y) {
  %full: f32[2, 4, 4] = allgather %x over tp
  %y: f32[2, 4, 6] auto = matmul %full, %w
}
"""
    assert_correct(hi.parse(text), hi.lower(hi.parse(text), "ring"), range(20))  # which raises if the copies differ


@every_strategy
def test_a_result_that_is_computed_by_rows_can_be_read_as_one_tensor(strategy: str) -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @square(%x: f32[4@tp, 4], %w: f32[4, 4]) -> (%c, %y) {
  %full: f32[4, 4] = allgather %x over tp
  %c: f32[4, 4] auto = matmul %full, %w
  %y: f32[4, 4] auto = add %c, %w
}
"""
    assert_correct(hi.parse(text), hi.lower(hi.parse(text), strategy), range(3))


def test_a_statement_that_reads_all_rows_delays_no_later_matmul() -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @rows(%x: f32[4@tp, 4], %w: f32[4, 4]) -> (%c, %d, %one) {
  %one: f32[4, 4] = allgather %x over tp
  %two: f32[4, 4] = allgather %x over tp
  %c: f32[4, 4] auto = matmul %two, %w
  %d: f32[4, 4] auto = matmul %one, %c
}
"""
    assert_correct(hi.parse(text), hi.lower(hi.parse(text), "fused"), range(3))


def test_rows_that_are_first_read_by_another_statement_are_awaited_before_it() -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @rows(%x: f32[4@tp, 4], %w: f32[4, 4]) -> (%c, %d) {
  %one: f32[4, 4] = allgather %x over tp
  %two: f32[4, 4] = allgather %x over tp
  %v: f32[4, 4] auto = relu %two
  %u: f32[4, 4] auto = relu %one
  %c: f32[4, 4] auto = matmul %one, %v
  %d: f32[4, 4] auto = matmul %two, %u
}
"""
    program = hi.lower(hi.parse(text), "fused")
    assert waiting(program) == 1
    assert sum(isinstance(s, WaitSignal) for s in program.walk()) == 1
    assert_correct(hi.parse(text), program, range(3))


# Statements that are needed ---------------------------------------------------------------------------------------
@every_strategy
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "pattern", [patterns.allgather_matmul, patterns.allgather_matmul_kept, patterns.gate_up], ids=lambda p: p.__name__
)
def test_the_checker_reports_every_statement_left_out(pattern: Pattern, strategy: str, ranks: int) -> None:
    program = hi.lower(pattern(ranks=ranks, S=2, M=8 * ranks, K=4), strategy, streams=2)
    of_strategy = {"ring": {Get, Synchronize}, "fused": {Signal, Synchronize}, "push": {Signal}}
    assert {Barrier, Put} | of_strategy[strategy] <= assert_each_statement_is_needed(program)


def two_gathers(ranks: int) -> Program:
    """Return two allgathers over the same ranks; the second gathers a result of the first."""
    rows = f"{ranks}@didx, 2, 4"
    gathered_rows = rows.replace("@didx", "")
    return hi.parse(f"""hostir 1
mesh @mesh [didx] = {" ".join(map(str, range(ranks)))}
fusion @two_gathers(%x: f32[{rows}], %w: f32[4, 4]) -> (%y) {{
  %full: f32[{gathered_rows}] = allgather %x over didx
  %h: f32[{gathered_rows}] = matmul %full, %w
  %part: f32[{rows}] = shard %h
  %again: f32[{gathered_rows}] = allgather %part over didx
  %y: f32[{gathered_rows}] auto = matmul %again, %w
}}
""")


@every_strategy
def test_two_gathers_over_the_same_ranks_share_the_barrier_after_the_previous_call(strategy: str) -> None:
    fusion = two_gathers(4)
    program = hi.lower(fusion, strategy)
    assert sum(isinstance(s, Barrier) for s in program.walk()) == (3 if strategy == "ring" else 1)
    assert_correct(fusion, program, range(3))
    assert failure_of(program, 4) == ""


def test_a_matmul_that_waits_by_blocks_goes_before_a_statement_that_needs_all_rows() -> None:
    text = """hostir 1
mesh @mesh [didx] = 0 1
fusion @rows(%x: f32[4@didx, 4], %w: f32[4, 4]) -> (%y, %c) {
  %full: f32[4, 4] = allgather %x over didx
  %y: f32[4, 4] auto = relu %full
  %v: f32[4, 4] auto = gelu %w
  %c: f32[4, 4] auto = matmul %full, %v
}
"""
    program = hi.lower(hi.parse(text), "fused")
    assert [s.keyword() for s in program.walk() if isinstance(s, TensorOp)] == ["gelu", "matmul", "copy", "relu"]
    assert_correct(hi.parse(text), program, range(3))


@every_strategy
@pytest.mark.parametrize(("dtype", "big"), [("bf16", 16), ("f16", 45.25)])
def test_a_bias_is_added_before_the_result_is_rounded(strategy: str, dtype: str, big: float) -> None:
    text = f"""hostir 1
mesh @mesh [didx] = 0 1
fusion @biased(%x: {dtype}[4@didx, 2], %w: {dtype}[3, 2], %bias: {dtype}[3]) -> (%y) {{
  %full: {dtype}[4, 2] = allgather %x over didx
  %y: {dtype}[4, 3] auto = linear %full, %w, %bias
}}
"""
    fusion = hi.parse(text)
    program = hi.lower(fusion, strategy)
    assert {s.keyword() for s in program.walk() if isinstance(s, TensorOp)} == {"linear"}
    x, bias = torch.tensor([[big, 1.0]], dtype=torch_dtype(DTYPES[dtype])), torch.ones(3)
    inputs = [x.repeat(4, 1), x.repeat(3, 1), bias.to(x.dtype)]
    (exact,) = reference(fusion, inputs)
    assert not torch.equal((inputs[0] @ inputs[1].t()) + inputs[2], exact.to(x.dtype)), "no example"
    for (y,) in map(planned(program, inputs), range(3)):
        assert torch.equal(y, exact.to(x.dtype))


# Communications that are not overlapped, and fusions that are refused ---------------------------------------------
@every_strategy
def test_a_communication_that_is_not_overlapped_has_a_note_with_the_reason(strategy: str) -> None:
    text = """hostir 1
mesh @mesh [didx] = 0 1
fusion @turned(%x: f32[4@didx, 4], %w: f32[4, 6@didx]) -> (%y) {
  %full: f32[4, 4] = allgather %x over didx
  %h: f32[4, 6@didx] = matmul %full, %w
  %y: f32[4@didx, 6] = alltoall %h over didx
}
"""
    program = hi.lower(hi.parse(text), strategy)
    (left,) = [s for s in program.walk() if isinstance(s, Communication)]
    assert left.keyword() == "alltoall"
    assert (
        left.note == f"not overlapped: {strategy} handles only allgathers and reduce_scatters of rows, and allreduces"
    )


@every_strategy
@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (patterns.weight_gathered, "no matmul has %b_full as its left side"),
        (patterns.alltoall, "handles only allgathers and reduce_scatters of rows"),
        (patterns.sendrecv, "handles only allgathers and reduce_scatters of rows"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fusion_without_rows_to_move_is_refused_at_its_line(pattern: Pattern, strategy: str, reason: str) -> None:
    with pytest.raises(HostIRError) as refused:
        hi.lower(pattern(), strategy)
    (diagnostic,) = refused.value.diagnostics
    assert f"'{strategy}'" in diagnostic.message
    assert reason in diagnostic.message
    assert diagnostic.span
    assert diagnostic.span.file.endswith("patterns.py")
    assert "'pipeline'" in diagnostic.hint


COLUMNS = """hostir 1
mesh @mesh [tp] = {ranks}
fusion @columns(%a: {dtype}[{rows}, 2, {K}@tp], %b: {dtype}[{K}, {H}@tp], %w: {dtype}[{H}@tp, {K}]) -> (%y, %c{more}) {{
  %x: {dtype}[{rows}, 2, {K}@tp] = relu %a
  %f: {dtype}[{rows}, 2, {K}] = reshard %x
  %c: {dtype}[{rows}, 2, {H}@tp] = matmul %f, %b
  %g: {dtype}[{rows}, 2, {H}@tp] = gelu %c
  %y: {dtype}[{rows}, 2, {K}@tp] = matmul %g, %w
}}
"""


def columns(ranks: int, rows: int | str, dtype: str = "f32", *, output_gathered: bool = False) -> Program:
    """Return an MLP with sharded columns; with `output_gathered` the gathered input is an output too."""
    names, more = " ".join(map(str, range(ranks))), ", %f" if output_gathered else ""
    return hi.parse(COLUMNS.format(ranks=names, rows=rows, dtype=dtype, K=2 * ranks, H=3 * ranks, more=more))


@pytest.mark.parametrize("strategy", ["ring", "fused"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_contracted_axis_is_gathered_in_slices_of_rows(strategy: str, ranks: int) -> None:
    fusion = columns(ranks, "8*M", output_gathered=ranks == 3)
    program = hi.lower(fusion, strategy, streams=2)
    assert not [s for s in program.walk() if isinstance(s, Communication)]
    assert waiting(program) == (strategy == "fused")
    assert [s.keyword() for s in program.walk() if isinstance(s, DenseCopy)] == ["copy"] * (1 + (ranks == 3))
    assert_correct(fusion, program, range(3), {"M": 1})
    assert_each_statement_is_needed(hi.lower(gather_of_columns("8*M", ranks), strategy, streams=2))


def test_a_sum_over_a_gathered_axis_rounds_once_with_the_same_bits_on_every_rank_and_in_every_run() -> None:
    fusion = columns(4, 8, "bf16")
    inputs = random_inputs(fusion, {}, seed=1)
    for strategy in ("ring", "fused"):
        program = hi.lower(fusion, strategy)
        assert failure_of(program, 2) == ""
        assert_correct(fusion, program, range(2))
        run = planned(program, inputs)
        assert all(map(torch.equal, run(0), run(3)))  # `run` compares the results of all ranks


def test_a_gather_of_the_contracted_axis_is_refused_with_the_reason() -> None:
    with pytest.raises(HostIRError, match="sums over, and only copy engines take parts of the rows of %full"):
        hi.lower(gather_of_columns("8"), "push")
    for rows, strategy in itertools.product(("7", "M"), ("ring", "fused")):
        with pytest.raises(HostIRError, match="the rows of %full are not known to be even"):
            hi.lower(gather_of_columns(rows), strategy)
    for strategy in ("ring", "fused"):
        with pytest.raises(HostIRError, match="sums over, of which each rank has several parts in %a"):
            hi.lower(gather_of_columns("8", parts="(3 2@tp 2)"), strategy)


def gather_of_columns(rows: str, ranks: int = 2, parts: str = "") -> Program:
    text = f"""hostir 1
mesh @mesh [tp] = {" ".join(map(str, range(ranks)))}
fusion @inner(%a: f32[{rows}, {parts or f"{6 * ranks}@tp"}], %b: f32[{6 * ranks}, 8]) -> (%c) {{
  %full: f32[{rows}, {6 * ranks}] = reshard %a
  %c: f32[{rows}, 8] = matmul %full, %b
}}
"""
    return hi.parse(text)


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_the_ring_uses_no_more_streams_than_there_are_peers(streams: int) -> None:
    assert hi.lower(patterns.allgather_matmul(ranks=4), "ring", streams).streams == min(streams, 3)


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize(("ranks", "slices"), [(2, 1), (2, 4), (4, 1), (4, 4)])
def test_fused_has_a_stream_for_signals_if_a_copy_follows_another(ranks: int, slices: int, streams: int) -> None:
    fusion = patterns.allgather_matmul(ranks=ranks, S=slices)
    program = hi.lower(fusion, "fused", streams)
    several = streams > 1 and (ranks > 2 or slices > 1)
    assert program.streams == 1 + several
    signals = [s for s in program.walk() if isinstance(s, Signal)]
    local = [0] if slices > 1 else []  # the signal for local rows, if they are copied; then the signal for peers
    assert [s.sms for s in signals] == [*local, int(several)]
    assert program == hi.lower(fusion, "fused", min(streams, 2))


def test_rows_of_each_mesh_have_as_many_streams_as_they_need() -> None:
    program = hi.lower(
        hi.parse("""hostir 1
mesh @two [x] = 0 1
mesh @four [y] = 0 1 2 3
fusion @both(
    %a: f32[4@x, 8] on @two, %b: f32[8, 4] on @two, %d: f32[8@y, 8] on @four, %e: f32[8, 4] on @four
) -> (%c, %f) {
  %a_full: f32[4, 8] on @two = allgather %a over x
  %d_full: f32[8, 8] on @four = allgather %d over y
  %c: f32[4, 4] on @two = matmul %a_full, %b
  %f: f32[8, 4] on @four = matmul %d_full, %e
}
"""),
        "fused",
    )
    assert program.streams == 2
    assert hi.check(program) == []
    by_sms = {s.over: s.sms for s in program.walk() if isinstance(s, Signal)}
    assert by_sms == {"x": 0, "y": 1}


@every_strategy
def test_the_program_of_eight_ranks_fits_on_a_page(strategy: str) -> None:
    program = hi.lower(ag_matmul(8), strategy)
    assert str(program).count("\n") < 40
    assert program.ranks == 8
