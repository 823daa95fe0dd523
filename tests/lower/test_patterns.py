"""Every pattern, lowered by every strategy, gives the unsharded result on simulated ranks in several schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.call.bounds import compare
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir import HostIRError, Program
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import For
from hostir.ir.tensor_ops import TensorOp
from tests.call.whole import planned, run_whole
from tests.judging.mutation import SENT
from tests.judging.simulated import failure_of
from tests.lower.held import without_each
from tests.symbolic import PATTERNS, lowered

Pattern = Callable[..., hi.Fusion]
every_pattern = pytest.mark.parametrize("pattern", [*patterns.PATTERNS, *patterns.EXPERTS], ids=lambda p: p.__name__)
IN_F64 = [pattern for pattern in PATTERNS if pattern is not patterns.moe_layer_fp8]  # fp8 has no products in f64
SEEDS = (0, 1, 2)


def assert_unsharded_result(
    source: Program, programs: list[Program], seeds: tuple[int, ...] = SEEDS, **sizes: int
) -> None:
    inputs = random_inputs(source, sizes, seed=len(programs))
    plain, exact = reference(source, inputs, sizes, None), reference(source, inputs, sizes)
    for program in programs:
        run = planned(program, inputs, sizes)
        for seed in seeds:
            for comparison in compare(program, run(seed), plain, exact):
                assert comparison.good, f"seed {seed}: {comparison}\n{program}"


def accepted(pattern: Pattern, **arguments: int) -> dict[str, int]:
    names = pattern.__code__.co_varnames[: pattern.__code__.co_argcount]
    return {name: value for name, value in arguments.items() if name in names}


@every_pattern
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 8))])
def test_a_pattern_gives_the_unsharded_result(pattern: Pattern, ranks: int) -> None:
    for slices in (1, 4):
        fusion = pattern(**accepted(pattern, ranks=ranks, S=slices, M=64, K=16, N=32, H=32))
        programs = {hi.lower(fusion, "pipeline", streams) for streams in (1, 3, 8)} | {hi.lower(fusion, "sequential")}
        one_sided = {hi.lower(fusion, strategy) for strategy in ("ring", "fused") if pattern in SENT}
        assert all(hi.check(program) == [] for program in programs | one_sided)
        assert_unsharded_result(fusion.program(), sorted(programs, key=str))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
@pytest.mark.parametrize("pattern", [p for p in IN_F64 if p.__module__ == patterns.__name__], ids=lambda p: p.__name__)
def test_a_pattern_gives_the_unsharded_result_in_other_dtypes(pattern: Pattern, dtype: str) -> None:
    fusion = pattern(ranks=4, dtype=dtype)
    assert_unsharded_result(fusion.program(), [hi.lower(fusion, "pipeline"), hi.lower(fusion, "sequential")])


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_experts_in_fp8_give_the_unsharded_result_in_other_dtypes(dtype: str) -> None:
    fusion = patterns.moe_layer_fp8(ranks=4, dtype=dtype)
    strategies = "pipeline", "sequential", "ring", "fused", "push"
    assert_unsharded_result(fusion.program(), [hi.lower(fusion, strategy) for strategy in strategies])


@pytest.mark.parametrize("pattern", IN_F64, ids=lambda p: p.__name__)
def test_every_strategy_gives_the_result_in_f64_to_its_last_digits(pattern: Pattern) -> None:
    for source, program in lowered(pattern, 4, "f64"):
        inputs = random_inputs(source, {"M": 48}, seed=7)
        plain, exact = reference(source, inputs, {"M": 48}, None), reference(source, inputs, {"M": 48})
        for comparison in compare(program, run_whole(program, inputs, {"M": 48}, seed=2), plain, exact):
            assert comparison.good, f"{comparison}\n{program}"
            assert comparison.bound < 1e-13


def symbolic(ranks: int) -> hi.Fusion:
    """Return an MLP with sizes that are bound at run time; rows are gathered before and reduce-scattered after."""
    with hi.Fusion("symbolic") as fusion:
        x = hi.tensor("x", ["M", "K"], "f32")
        w1 = hi.tensor("w1", ["K", "H"], "f32")
        w2 = hi.tensor("w2", ["H", "K"], "f32")
        y = hi.gelu(x @ w1) @ w2
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(0, mesh)
    w1.shard(1, mesh)
    w2.shard(0, mesh)
    y.set_device_mesh(mesh)
    y.split(0, ranks)
    y.axis(0).parallelize(hi.ParallelType.DIDx)
    y.split(1, 3)
    y.axis(1).parallelize(hi.ParallelType.Stream)
    return fusion


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_program_serves_every_size_bound_at_run_time(ranks: int) -> None:
    fusion = symbolic(ranks)
    programs = [hi.lower(fusion, "pipeline"), hi.lower(fusion, "sequential")]
    for rows, inner, hidden in ((3, 5, 8), (9, 16, 4), (12, 1, 24)):
        assert_unsharded_result(fusion.program(), programs, M=rows * ranks, K=inner, H=hidden)


def test_sizes_that_the_program_does_not_divide_are_refused() -> None:
    program = hi.lower(symbolic(2))
    with pytest.raises(HostIRError, match="M must be a multiple of 6"):
        run_whole(program, [torch.ones(8, 4), torch.ones(4, 4), torch.ones(4, 4)])


@pytest.mark.parametrize("strategy", ["pipeline", "ring", "fused", "push"])
@pytest.mark.parametrize("pattern", [patterns.allgather_matmul, patterns.row_parallel_scattered, patterns.row_parallel])
def test_a_single_rank_has_a_plain_matmul(pattern: Pattern, strategy: str) -> None:
    program = hi.lower(pattern(ranks=1), strategy)
    assert [s.keyword() for s in program.walk()] == ["allocate", "matmul"]
    assert program.streams == 0


@pytest.mark.parametrize("pattern", [patterns.allgather_matmul, patterns.mlp, patterns.row_parallel])
def test_the_pipeline_uses_no_more_streams_than_slices(pattern: Pattern) -> None:
    assert hi.lower(pattern(S=2), "pipeline", streams=8).streams == 2
    assert hi.lower(pattern(S=4), "pipeline", streams=3).streams == 3


def test_a_copy_of_a_non_contiguous_slice_has_a_note() -> None:
    program = hi.lower(patterns.allgather_matmul_rows(), "pipeline")
    assert any(s.note.startswith("copy: ") for s in program.walk())


# Statements that are needed ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_each_wait_and_synchronize_of_the_pipeline_is_needed(streams: int) -> None:
    program = hi.lower(patterns.allgather_matmul(ranks=2, S=4, M=32, K=8, N=8), "pipeline", streams)
    assert failure_of(program, 20) == ""
    mutants = list(without_each(program.body))
    assert len(mutants) == 3  # the fork, the wait in the loop, the join
    for missing, body in mutants:
        assert failure_of(program.with_body(body), 200), f"'{missing.keyword()}' is not needed"


def test_a_tensor_that_would_be_sliced_along_two_axes_is_computed_outside_the_loop() -> None:
    text = """hostir 1
mesh @mesh [didx] = 0 1
fusion @turned(%a: f32[4, 8], %b: f32[2, 2@didx, 8], %w: f32[8, 4]) -> (%s) {
  %full: f32[2, 2, 8] = allgather %b over didx
  %y: f32[4, 4] = matmul %a, %w
  %x: f32[4, 4] = permute %y (1, 0)
  %p: f32[2, 2, 4] = matmul %full, %w
  %q: f32[4, 4] = reshape %p
  %u: f32[4, 4] = add ORDER
  %s: f32[(2@stream 2), 4] = add %u, %q
}
"""
    for order in ("%x, %y", "%y, %x"):
        fusion = hi.parse(text.replace("ORDER", order))
        program = hi.lower(fusion, "pipeline")
        (loop,) = (s for s in program.body if isinstance(s, For) and any(isinstance(c, Communication) for c in s.body))
        assert [s.keyword() for s in loop.body if isinstance(s, TensorOp)] == ["matmul", "add", "add"]
        assert_unsharded_result(fusion, [program])


def test_both_collectives_of_an_mlp_are_in_one_loop() -> None:
    program = hi.lower(patterns.mlp(), "pipeline")
    (loop,) = [s for s in program.body if isinstance(s, For) and any(isinstance(x, Communication) for x in s.body)]
    assert [x.keyword() for x in loop.body if not x.defines(program.phase) or isinstance(x, Communication)] == [
        "set_stream",
        "allgather",
        "wait",
        "delay",
        "matmul",
        "gelu",
        "matmul",
        "reduce_scatter",
        "wait",
    ]


@pytest.mark.parametrize("strategy", ["sequential", "pipeline", "auto"])
def test_ranks_may_divide_a_product_of_sizes_without_dividing_each_size(strategy: str) -> None:
    with hi.Fusion("flat") as fusion:
        a, b = hi.tensor("a", ["M", 4], "f64"), hi.tensor("b", [4, "N"], "f64")
        y = hi.relu(hi.reshape(a @ b, ["M*N"]))
        fusion.output(y)
    mesh = hi.DeviceMesh(range(2))
    a.shard(1, mesh)
    b.shard(0, mesh)
    y.shard(0, mesh)
    for M, N in ((3, 4), (4, 3)):
        x, w = torch.randn(M, 4, dtype=torch.float64), torch.randn(4, N, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hi.FallbackWarning)
            (flat,) = hi.run(fusion, x, w, strategy=strategy)
        torch.testing.assert_close(flat, (x @ w).relu().flatten())
    with pytest.raises(hi.HostIRError, match=r"M\*N must be a multiple of 2|M=3, N=3|not whole"):
        hi.run(fusion, x[:3], w, strategy=strategy)
