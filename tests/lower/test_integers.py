"""Tensors of integers hold indices: they are moved and viewed, bit for bit, and nothing computes with them."""

from __future__ import annotations

import pytest
import torch

import hostir as hi
from hostir.call.bounds import compare
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir import HostIRError

DTYPES = {"i32": torch.int32, "i64": torch.int64}


def gathered(dtype: str, ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("gathered") as fusion:
        indices = hi.tensor("indices", [8, 6], dtype)
        everywhere = hi.reshard(hi.permute(indices, (1, 0)))
        fusion.output(everywhere)
    mesh = hi.DeviceMesh(range(ranks))
    indices.shard(0, mesh)
    everywhere.set_device_mesh(mesh)
    return fusion


@pytest.mark.parametrize("strategy", ["sequential", "pipeline", "ring", "fused", "push"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_indices_are_gathered_bit_for_bit(dtype: str, strategy: str) -> None:
    try:
        program = hi.lower(gathered(dtype), strategy)
    except HostIRError as refusal:
        assert "cannot overlap the allgather" in str(refusal)  # noqa: PT017
        return
    assert hi.check(program) == []
    assert hi.parse(str(program)) == program
    indices = torch.randint(-(2**31), 2**31, (8, 6)).to(DTYPES[dtype])
    for seed in range(3):
        (result,) = hi.run(program, indices, seed=seed)
        assert result.dtype == DTYPES[dtype]
        assert torch.equal(result, indices.t())


def test_a_comparison_of_indices_allows_no_difference() -> None:
    program = hi.lower(gathered("i32"))
    inputs = random_inputs(program, {})
    (exact,) = reference(program, inputs)
    assert exact.dtype == torch.int32
    other = exact.clone()
    other[0, 0] += 1
    (same,), (different,) = (compare(program, [got], [exact], [exact]) for got in (exact, other))
    assert same.good
    assert same.bound == 0
    assert not different.good


def test_undefined_indices_are_minus_one() -> None:
    program = hi.parse("""hostir 1
mesh @mesh [didx] = 0
program @p(%x: i32[4]) -> (%y) {
  %y: i32[4] = allocate
}
""")
    (result,) = hi.run(program, torch.arange(4, dtype=torch.int32), check=False)
    assert result.tolist() == [-1] * 4


def test_an_input_of_another_integer_dtype_is_refused() -> None:
    with pytest.raises(HostIRError, match=r"input %indices has dtype torch\.int64"):
        hi.run(hi.lower(gathered("i32")), torch.zeros(8, 6, dtype=torch.int64))
