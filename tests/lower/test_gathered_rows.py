"""`ring`, `fused` and `push`: right under every schedule, over calls, with nothing that could be left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hostir as hi
from examples import patterns
from examples.ag_matmul import ag_matmul
from hostir.check.tracer import Tracer, View
from hostir.ir import HostIRError, Program
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Synchronize
from hostir.ir.onesided_ops import Barrier, Get, Put, Signal, WaitSignal
from hostir.ir.tensor_ops import Contraction, DenseCopy, TensorOp
from hostir.ir.types import DTYPES
from hostir.runtime.reference import reference
from hostir.runtime.sharding import random_inputs, torch_dtype
from tests.lower.gathered import gathered
from tests.lower.held import every_strategy, hold, one_sided, without_each
from tests.mutation import convicted
from tests.runtime.whole import run_whole

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
def test_a_pattern_gives_the_unsharded_result_in_two_calls_whatever_the_schedule(
    pattern: Pattern, strategy: str, ranks: int
) -> None:
    fusion = pattern(ranks=ranks, S=2, M=32, K=16).program()
    program = hi.lower(fusion, strategy)
    assert one_sided(program) or (pattern is patterns.mlp_2d and ranks == 2)
    hold(fusion, program, range(3))
    assert convicted(program, 4) == ""


@every_strategy
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_fusions_of_gathered_rows_give_the_unsharded_result(strategy: str, ranks: int) -> None:
    covered = 0
    for seed in range(10):
        fusion = gathered(ranks, seed)
        try:
            program = hi.lower(fusion, strategy, streams=1 + seed % 3)
        except HostIRError as refused:
            if "lie over several axes of the mesh" not in str(refused):
                raise
            continue
        covered += 1
        assert one_sided(program)
        assert strategy == "ring" or waiting(program) in (1, 2)  # where the next product sums over its columns
        hold(fusion, program, range(seed, seed + 2))
    assert covered > 6


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
    hold(fusion.program(), program, range(2), *sizes)


class Operands(Tracer):
    """Keeps how the left sides of matmuls lie in their buffers."""

    def compute(self, kind: str, out: View, operands: Sequence[View | None], *rest: Any) -> None:
        if kind == "matmul" and (a := operands[0]):
            self.seen.add((a.shape, a.strides, a.offset))
        super().compute(kind, out, operands, *rest)

    seen: set[tuple[object, ...]]


@pytest.mark.parametrize(
    "pattern", [patterns.allgather_matmul, patterns.allgather_matmul_rows, patterns.allgather_matmul_kept]
)
def test_every_rank_multiplies_the_same_rows_in_the_same_layout_so_that_copies_agree_in_every_bit(
    pattern: Pattern,
) -> None:
    program = hi.lower(pattern(ranks=4), "ring")
    seen = []
    for rank in range(4):
        tracer = Operands(rank, program, {})
        tracer.seen = set()
        tracer.call()
        seen.append(tracer.seen)
    assert len(seen[0]) == 4
    assert all(views == seen[0] for views in seen)


def test_copies_of_a_result_agree_where_a_rank_has_rows_in_several_places() -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @rows(%x: f32[2, 4@tp, 4], %w: f32[4, 6]) -> (%y) {
  %full: f32[2, 4, 4] = allgather %x over tp
  %y: f32[2, 4, 6] auto = matmul %full, %w
}
"""
    hold(hi.parse(text), hi.lower(hi.parse(text), "ring"), range(20))  # which raises where the copies differ


@every_strategy
def test_what_one_computation_takes_by_rows_another_may_take_whole(strategy: str) -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @square(%x: f32[4@tp, 4], %w: f32[4, 4]) -> (%c, %y) {
  %full: f32[4, 4] = allgather %x over tp
  %c: f32[4, 4] auto = matmul %full, %w
  %y: f32[4, 4] auto = add %c, %w
}
"""
    hold(hi.parse(text), hi.lower(hi.parse(text), strategy), range(3))


def test_rows_that_are_wanted_whole_hold_no_later_matmul_up() -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @rows(%x: f32[4@tp, 4], %w: f32[4, 4]) -> (%c, %d, %one) {
  %one: f32[4, 4] = allgather %x over tp
  %two: f32[4, 4] = allgather %x over tp
  %c: f32[4, 4] auto = matmul %two, %w
  %d: f32[4, 4] auto = matmul %one, %c
}
"""
    hold(hi.parse(text), hi.lower(hi.parse(text), "fused"), range(3))


def test_gathered_rows_that_no_matmul_needs_first_are_waited_for_in_front_of_what_does() -> None:
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
    hold(hi.parse(text), program, range(3))


# Edges that they cannot do without --------------------------------------------------------------------------------
@every_strategy
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "pattern", [patterns.allgather_matmul, patterns.allgather_matmul_kept, patterns.gate_up], ids=lambda p: p.__name__
)
def test_the_checker_reports_whatever_is_left_out(pattern: Pattern, strategy: str, ranks: int) -> None:
    program = hi.lower(pattern(ranks=ranks, S=2, M=8 * ranks, K=4), strategy, streams=2)
    kinds = set()
    for missing, body in without_each(program.body):
        kinds.add(type(missing))
        found = [f for f in hi.check(program.with_body(body)) if f.level == "error"]
        assert found, f"'{missing.keyword()}' was left out unnoticed"
    of_strategy = {"ring": {Get, Synchronize}, "fused": {Signal, Synchronize}, "push": {Signal}}
    assert {Barrier, Put} | of_strategy[strategy] <= kinds


def two_gathers(ranks: int) -> Program:
    """Two allgathers over the same ranks, the second of what came of the first."""
    rows = f"{ranks}@didx, 2, 4"
    whole = rows.replace("@didx", "")
    return hi.parse(f"""hostir 1
mesh @mesh [didx] = {" ".join(map(str, range(ranks)))}
fusion @two_gathers(%x: f32[{rows}], %w: f32[4, 4]) -> (%y) {{
  %full: f32[{whole}] = allgather %x over didx
  %h: f32[{whole}] = matmul %full, %w
  %part: f32[{rows}] = shard %h
  %again: f32[{whole}] = allgather %part over didx
  %y: f32[{whole}] auto = matmul %again, %w
}}
""")


@every_strategy
def test_two_gathers_over_the_same_ranks_share_the_barrier_behind_the_call_before(strategy: str) -> None:
    fusion = two_gathers(4)
    program = hi.lower(fusion, strategy)
    assert sum(isinstance(s, Barrier) for s in program.walk()) == (3 if strategy == "ring" else 1)
    hold(fusion, program, range(3))
    assert convicted(program, 4) == ""


def test_a_matmul_that_can_wait_goes_before_what_needs_all_rows() -> None:
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
    hold(hi.parse(text), program, range(3))


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
    assert not torch.equal((inputs[0] @ inputs[1].t()) + inputs[2], exact.to(x.dtype)), "an example that cannot tell"
    for seed in range(3):
        (y,) = run_whole(program, inputs, seed=seed)
        assert torch.equal(y, exact.to(x.dtype))


# What they leave, and what they refuse ----------------------------------------------------------------------------
@every_strategy
def test_ranks_that_are_alone_have_a_plain_matmul(strategy: str) -> None:
    program = hi.lower(patterns.allgather_matmul(ranks=1), strategy)
    assert [s.keyword() for s in program.walk()] == ["allocate", "matmul"]
    assert program.streams == 0


@every_strategy
def test_a_communication_that_is_not_overlapped_says_why(strategy: str) -> None:
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
    ("pattern", "why"),
    [
        (patterns.weight_gathered, "no matmul has %b_full as its left side"),
        (patterns.alltoall, "handles only allgathers and reduce_scatters of rows"),
        (patterns.sendrecv, "handles only allgathers and reduce_scatters of rows"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fusion_that_moves_no_rows_is_refused_at_the_users_line(pattern: Pattern, strategy: str, why: str) -> None:
    with pytest.raises(HostIRError) as refused:
        hi.lower(pattern(), strategy)
    (found,) = refused.value.diagnostics
    assert f"'{strategy}'" in found.message
    assert why in found.message
    assert found.span
    assert found.span.file.endswith("patterns.py")
    assert "'pipeline'" in found.hint


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


def columns(ranks: int, rows: int | str, dtype: str = "f32", *, whole: bool = False) -> Program:
    """An MLP whose input and output are sharded on their columns; the gathered input is an output too if `whole`."""
    names, more = " ".join(map(str, range(ranks))), ", %f" if whole else ""
    return hi.parse(COLUMNS.format(ranks=names, rows=rows, dtype=dtype, K=2 * ranks, H=3 * ranks, more=more))


@pytest.mark.parametrize("strategy", ["ring", "fused"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_axis_that_products_sum_over_is_gathered_in_slices_of_rows(strategy: str, ranks: int) -> None:
    fusion = columns(ranks, "8*M", whole=ranks == 3)
    program = hi.lower(fusion, strategy, streams=2)
    assert not [s for s in program.walk() if isinstance(s, Communication)]
    assert waiting(program) == (strategy == "fused")
    assert [s.keyword() for s in program.walk() if isinstance(s, DenseCopy)] == ["copy"] * (1 + (ranks == 3))
    hold(fusion, program, range(3), {"M": 1})
    alone = hi.lower(gather_of_columns("8*M", ranks), strategy, streams=2)
    for missing, body in without_each(alone.body):
        found = [f for f in hi.check(alone.with_body(body)) if f.level == "error"]
        assert found, f"'{missing.keyword()}' was left out unnoticed\n{alone}"


def test_a_sum_over_a_gathered_axis_has_one_rounding_and_the_same_bits_on_every_rank_and_in_every_run() -> None:
    fusion = columns(4, 8, "bf16")
    inputs = random_inputs(fusion, {}, seed=1)
    for strategy in ("ring", "fused"):
        program = hi.lower(fusion, strategy)
        assert convicted(program, 2) == ""
        hold(fusion, program, range(2))
        first = run_whole(program, inputs, seed=0)  # which compares the copies of all ranks
        assert all(map(torch.equal, first, run_whole(program, inputs, seed=3)))


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
def test_fused_has_a_stream_for_signals_where_a_copy_follows_another(ranks: int, slices: int, streams: int) -> None:
    fusion = patterns.allgather_matmul(ranks=ranks, S=slices)
    program = hi.lower(fusion, "fused", streams)
    several = streams > 1 and (ranks > 2 or slices > 1)
    assert program.streams == 1 + several
    signals = [s for s in program.walk() if isinstance(s, Signal)]
    own = [0] if slices > 1 else []  # of own rows, where they are copied; then of those for peers
    assert [s.sms for s in signals] == [*own, int(several)]
    assert program == hi.lower(fusion, "fused", min(streams, 2))


def test_rows_of_several_meshes_have_streams_as_their_peers_are() -> None:
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
def test_the_program_of_eight_ranks_is_one_program_on_a_page(strategy: str) -> None:
    program = hi.lower(ag_matmul(8), strategy)
    assert str(program).count("\n") < 40
    assert program.ranks == 8
