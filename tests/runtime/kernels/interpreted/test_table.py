from __future__ import annotations

import pytest
import torch

import hostir.ir.text as text
from hostir.runtime.kernels.table import kernel_table
from hostir.runtime.local import run_whole
from hostir.runtime.reference import reference
from hostir.runtime.sharding import random_inputs
from tests.runtime import programs
from tests.runtime.kernels.checking import assert_as_accurate, assert_only_view_written, embedded, filled


@pytest.mark.parametrize("name", ["AG_MATMUL", "ROW_PARALLEL", "GRID"])
def test_programs_compute_the_same_with_tritons_kernels(name):
    program = text.parse(getattr(programs, name))
    sizes = {"M": 3, "K": 8, "N": 5}
    inputs = random_inputs(program, {n: sizes[n] for n in program.size_names})
    for ours, exact in zip(
        run_whole(program, inputs, seed=1, kernels="triton"), reference(program, inputs), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_leading_axes_that_do_not_merge_are_walked(dtype):
    a = filled((2, 3, 4, 8), dtype, pad=(1, 1, 1, 0))
    weight, bias = filled((5, 8), dtype), filled((5,), dtype)
    out, buffer = embedded((2, 3, 4, 5), dtype, order=(2, 0, 1, 3), pad=(1, 0, 1, 0))
    kernel_table("triton", "cpu")["linear"](out, a, weight, bias)
    assert_only_view_written(out, buffer)
    exact = a.double() @ weight.double().t() + bias.double()
    magnitude = a.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert_as_accurate(out, a @ weight.t() + bias, exact, magnitude)
