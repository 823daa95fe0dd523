"""Mixtures of experts: rows in groups, of sizes that only the device knows, on simulated ranks."""

from __future__ import annotations

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.call.bounds import reductions
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir import HostIRError, Program

GROUPED = """hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[2@didx, 12, 8], %w: f32[3, 8, 4], %offsets: i32[2@didx, 4]) -> (%y) {
  %y: f32[2@didx, 12, 4] = allocate
  grouped_matmul %x, %w by %offsets -> %y
}
"""


@pytest.fixture
def grouped() -> Program:
    return hi.parse(GROUPED)


def test_ranks_may_have_groups_of_other_sizes(grouped: Program) -> None:
    assert hi.check(grouped) == []
    x, w = torch.randn(2, 12, 8), torch.randn(3, 8, 4)
    offsets = torch.tensor([[0, 12, 12, 12], [2, 2, 5, 9]], dtype=torch.int32)
    (y,) = hi.run(grouped, x, w, offsets)
    torch.testing.assert_close(y[0], x[0] @ w[0])
    assert not y[1, :2].any()
    torch.testing.assert_close(y[1, 2:5], x[1, 2:5] @ w[1])
    torch.testing.assert_close(y[1, 5:9], x[1, 5:9] @ w[2])
    assert not y[1, 9:].any()


@pytest.mark.parametrize("offsets", [[0, 4, 3, 12], [0, 4, 8, 13], [-1, 0, 0, 0]])
def test_offsets_that_do_not_fit_are_an_error_of_the_statement_and_its_rank(
    grouped: Program, offsets: list[int]
) -> None:
    both = torch.tensor([[0, 1, 2, 3], offsets], dtype=torch.int32)
    with pytest.raises(HostIRError, match=r"rank 1, 'grouped_matmul .*: offset .* does not fit 12 rows") as refused:
        hi.run(grouped, torch.randn(2, 12, 8), torch.randn(3, 8, 4), both)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.span is not None
    assert diagnostic.span.line == 5
    assert diagnostic.expected == "offsets that do not decrease, from 0 to 12"


def test_random_offsets_have_empty_groups_and_groups_with_all_rows() -> None:
    program = hi.parse(GROUPED)
    drawn = [random_inputs(program, {}, seed)[2] for seed in range(30)]
    counts = torch.stack([offsets.diff(dim=-1) for offsets in drawn])
    assert all((offsets.diff(dim=-1) >= 0).all() for offsets in drawn)
    assert all(offsets.min() >= 0 for offsets in drawn)
    assert all(offsets.max() <= 12 for offsets in drawn)
    assert (counts == 0).any()
    assert (counts == 12).any()
    assert any(not torch.equal(offsets[0], offsets[1]) for offsets in drawn)


def test_the_rows_of_a_source_are_gathered_because_offsets_count_all_of_them() -> None:
    with hi.Fusion("rows") as fusion:
        x = hi.tensor("x", [12, 8], "f32")
        w, offsets = hi.tensor("w", [3, 8, 4], "f32"), hi.tensor("offsets", [4], "i32")
        y = hi.grouped_matmul(x, w, offsets)
        fusion.output(y)
    x.shard(0, hi.DeviceMesh(range(2)))
    program = hi.lower(fusion)
    assert "allgather" in str(program)
    inputs = random_inputs(program, {}, seed=3)
    torch.testing.assert_close(hi.run(program, *inputs)[0].double(), reference(fusion.program(), inputs)[0])


def test_a_repeated_run_sees_other_offsets_in_the_same_program() -> None:
    fusion = patterns.expert_mlp(ranks=2, S=2, M=16, K=8, H=16)
    program = hi.lower(fusion, "pipeline")
    for seed in range(6):
        inputs = random_inputs(program, {}, seed)
        (y,), (exact,) = hi.run(program, *inputs, seed=seed), reference(fusion.program(), inputs)
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


def gathered(shape: list[int], axis: int) -> hi.Fusion:
    """Return a grouped matmul of rows that are gathered along an axis, with offsets on every rank."""
    with hi.Fusion("gathered") as fusion:
        x, w = hi.tensor("x", shape, "f32"), hi.tensor("w", [3, shape[-1], 8], "f32")
        y = hi.grouped_matmul(x, w, hi.tensor("offsets", [*shape[:-2], 4], "i32"))
        fusion.output(y)
    mesh = hi.DeviceMesh(range(4))
    x.shard(axis, mesh)
    for t in (w, y):
        t.set_device_mesh(mesh)
    return fusion


@pytest.mark.parametrize("strategy", ["fused", "push"])
@pytest.mark.parametrize(
    ("shape", "axis"), [([4, 6, 8], 0), ([8, 6, 8], 0), ([4, 2, 6, 8], 0), ([2, 4, 6, 8], 1), ([2, 2, 4, 6, 8], 2)]
)
def test_a_grouped_matmul_waits_for_sources_one_by_one(shape: list[int], axis: int, strategy: str) -> None:
    fusion = gathered(shape, axis)
    program = hi.lower(fusion, strategy)
    assert hi.check(program) == []
    assert hi.parse(str(program)) == program
    one_block_a_source = len(shape) < 5  # else sources of a rank lie along several axes
    assert any("ready" in line for line in str(program).splitlines() if "grouped_matmul" in line) == one_block_a_source
    for seed in range(4):
        inputs = random_inputs(program, {}, seed)
        (y,), (exact,) = hi.run(program, *inputs, seed=seed), reference(fusion.program(), inputs)
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


SENT = """hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[2@didx, 6, 4], %o: i32[2@didx, 3], %w: f32[2, 4, 5]) -> (%y) {
  %r = rank of %x over didx
  %box: f32[2, 6, 4] = allocate_symmetric
  %offsets: i32[2, 3] = allocate_symmetric
  %f: flag[2] = allocate_symmetric
  %mine: f32[2@didx, 6, 4] = shard %box
  %its: i32[2@didx, 3] = shard %offsets
  %y: f32[2, 6, 5] = allocate
  barrier of %box over didx
  for %i in 0..2 {
    put %x -> %mine at (%r + %i) % 2 over didx
    put %o -> %its at (%r + %i) % 2 over didx
  }
  @again
  for %i in 0..2 { signal %f[%r] = 1 at (%r + %i) % 2 over didx }
  grouped_matmul %box, %w by %offsets -> %y ready %f >= 1 from %r
}
"""


def test_offsets_must_be_there_before_the_kernel_starts_not_only_before_the_flags_of_their_rows() -> None:
    program = hi.parse(SENT.replace("  @again\n", ""))
    (finding,) = hi.check(program)
    assert finding.message.startswith("race on %offsets: 'grouped_matmul")
    inputs = random_inputs(program, {}, 0)
    wrong = 0
    for seed in range(20):
        try:
            hi.run(program, *inputs, seed=seed, check=False)
        except HostIRError as problem:
            wrong += "of group" in str(problem)
    assert wrong, "in some orders, ranks compute with offsets that are not there"
    assert hi.check(hi.parse(SENT.replace("@again", "barrier of %offsets over didx"))) == []


def test_every_strategy_adds_the_partial_sums_of_experts_once() -> None:
    fusion = patterns.moe_layer(ranks=4, S=2, M=4, K=8, H=8)
    for strategy in ("sequential", "pipeline", "ring", "fused", "push"):
        assert reductions(hi.lower(fusion, strategy)) == 1  # comparisons allow for the roundings of this sum


def permuted(kept: bool = False) -> hi.Fusion:
    """Return grouped matmuls of gathered tokens in the order of an index. If `kept`, the rows are an output, too."""
    with hi.Fusion("permuted") as fusion:
        x, order = hi.tensor("x", [4, 6, 8], "f32"), hi.tensor("order", [4, 10], "i32")
        offsets = hi.tensor("offsets", [4, 4], "i32")
        rows = hi.permute_rows(x, order)
        for name in ("gate", "up"):
            y = hi.grouped_matmul(rows, hi.tensor(name, [3, 8, 8], "f32"), offsets)
            fusion.output(y)
        if kept:
            fusion.output(rows)
    mesh = hi.DeviceMesh(range(4))
    x.shard(0, mesh)
    rows.set_device_mesh(mesh)
    return fusion


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("strategy", ["fused", "push"])
def test_a_grouped_matmul_of_permuted_tokens_reads_them_by_the_index_and_waits_for_them(
    strategy: str, kept: bool
) -> None:
    fusion = permuted(kept)
    program = hi.lower(fusion, strategy)
    assert hi.check(program, calls=2) == []
    assert hi.parse(str(program)) == program
    first, second = (line for line in str(program).splitlines() if "grouped_matmul" in line)
    assert "by %offsets rows %order -> %" in first
    assert " ready " in first
    assert " ready " not in second
    assert ("permute_rows" in str(program)) is kept
    for seed in range(4):
        inputs = random_inputs(program, {}, seed)
        for y, exact in zip(hi.run(program, *inputs, seed=seed), reference(fusion.program(), inputs), strict=True):
            torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("index", "problem", "expected"),
    [
        ("i32[3, 10]", r"%index is i32\[3, 10\], and %x is f32\[2, 6, 8\]", "[2, S]"),
        ("i32[10]", r"%index is i32\[10\], and %x is f32\[2, 6, 8\]", "[2, S]"),
        ("f32[2, 10]", "%index holds indices, and is f32", "indices in i32 or i64"),
    ],
)
def test_an_index_that_does_not_fit_the_rows_is_refused(index: str, problem: str, expected: str) -> None:
    text = f"""hostir 1
mesh @mesh [didx] = 0
program @p(%x: f32[2, 6, 8], %w: f32[3, 8, 4], %offsets: i32[2, 4], %index: {index}) -> (%y) {{
  %y: f32[2, 10, 4] = allocate
  grouped_matmul %x, %w by %offsets rows %index -> %y
}}
"""
    with pytest.raises(HostIRError, match=problem) as refused:
        hi.Executor(hi.parse(text))
    assert refused.value.diagnostics[0].expected == expected


@pytest.mark.parametrize("axis", [1, 2])
def test_rows_within_a_source_are_not_overlapped_because_offsets_count_them(axis: int) -> None:
    for strategy in ("ring", "fused", "push"):
        with pytest.raises(HostIRError, match=f"'{strategy}' cannot overlap the allgather"):
            hi.lower(gathered([2, 8, 8], axis), strategy)
