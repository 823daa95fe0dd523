"""Reduce-scatters by `chain`: each rank's product adds to the sum that the rank before it has begun."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.ir.onesided_ops import Barrier, Get
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import Matmul, Sum
from tests.lower.held import assert_correct
from tests.lower.scattered import scattered
from tests.lower.test_scattered_rows import products, row_parallel


def multiplied(ranks: int, rows: int | str = "M", form: str = "matmul") -> hi.Fusion:
    """Return a fusion whose rows, in one axis, are scattered."""
    k = 4 * ranks
    with hi.Fusion("multiplied") as fusion:
        a = hi.tensor("a", [rows, k], "f32")
        b = hi.tensor("b", [k, 6] if form == "matmul" else [6, k], "f32")
        c = a @ b if form == "matmul" else hi.linear(a, b)
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(1, mesh)
    b.shard(0 if form == "matmul" else 1, mesh)
    c.shard(0, mesh)
    return fusion


def adding(program: Program) -> list[bool]:
    return [s.addend is not None for s in program.walk() if isinstance(s, Matmul)]


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_the_last_product_of_a_block_finishes_its_sum(ranks: int, streams: int) -> None:
    fusion = patterns.row_parallel_scattered(ranks=ranks, S=1, M=8 * ranks, K=4 * ranks, N=6).program()
    program = hi.lower(fusion, "chain", streams=streams)
    assert not [s for s in program.walk() if isinstance(s, Sum)]
    assert adding(program) == [False, *[True] * min(ranks - 1, 3)]
    assert program.streams == streams
    assert_correct(fusion, program, range(4))


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_in_an_allreduce_all_ranks_get_the_sums_of_each_piece(ranks: int, streams: int) -> None:
    fusion = patterns.row_parallel(ranks=ranks, S=1, M=8 * ranks, K=4 * ranks, N=6).program()
    program = hi.lower(fusion, "chain", streams=streams)
    assert adding(program) == [False, *[True] * min(ranks - 1, 3)]
    assert sum(isinstance(s, Barrier) for s in program.walk()) == 0, "flags order the calls"
    assert_correct(fusion, program, range(6))


@pytest.mark.parametrize("form", ["matmul", "linear"])
@pytest.mark.parametrize("rows", ["M", 24, 6])
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_in_one_axis_are_cut_into_pieces(ranks: int, rows: int | str, form: str) -> None:
    fusion = multiplied(ranks, rows, form).program()
    program = hi.lower(fusion, "chain", streams=4)
    assert program.streams == (2 if rows == "M" else next(n for n in (4, 3, 2, 1) if rows // ranks % n == 0))
    assert_correct(fusion, program, range(3), *([{"M": 24}, {"M": 48}] if rows == "M" else []))


def test_a_size_that_does_not_divide_into_pieces_is_refused() -> None:
    program = hi.lower(multiplied(2), "chain", streams=4)
    with pytest.raises(HostIRError, match="M must be a multiple of 4"):
        hi.run(program, torch.ones(6, 8), torch.ones(8, 6))


@pytest.mark.parametrize("pattern", [patterns.mlp, patterns.attention_output, patterns.row_parallel])
def test_gathers_of_the_same_program_are_lowered_as_by_ring(pattern: Callable[..., hi.Fusion]) -> None:
    fusion = pattern().program()
    program = hi.lower(fusion, "chain")
    assert [s for s in program.walk() if isinstance(s, Get)]
    assert True in adding(program)
    assert_correct(fusion, program, range(4))


def test_what_follows_the_sum_runs_behind_it() -> None:
    fusion = row_parallel(3, bias=False).program()
    program = hi.lower(fusion, "chain")
    assert {"gelu", "add"} <= {s.keyword() for s in program.body}
    assert_correct(fusion, program, range(4))


@pytest.mark.parametrize(
    "fusion",
    [patterns.allgather_matmul, patterns.reduce_scatter, lambda: products(2)],
    ids=["no sum", "no matmul", "a sum of products"],
)
def test_other_fusions_are_lowered_as_by_ring(fusion: Callable[[], hi.Fusion]) -> None:
    assert hi.lower(fusion(), "chain", streams=2) == hi.lower(fusion(), "ring", streams=2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_fusions_are_right_in_every_order(first: int, testrun_uid: str) -> None:
    lowered = 0
    for seed in range(first, first + 20):
        random = Random(f"{testrun_uid} {seed}")
        fusion = scattered(random.choice((2, 3, 4)), random.randrange(1 << 30), to_all=random.random() < 0.4)
        program = hi.lower(fusion, "chain", streams=random.choice((1, 2, 3)))
        lowered += True in adding(program)
        assert_correct(fusion, program, range(2))
    assert lowered > 2
