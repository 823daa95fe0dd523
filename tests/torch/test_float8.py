"""Gradients of weights that are products in fp8, on one rank and a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hostir.torch import float8
from hostir.torch.float8 import float8_weight_gradient, quantize_rows

WIDTHS = [6, 2, 4]


def quantized(*shape: int) -> tuple[Tensor, Tensor]:
    """Return random rows of different magnitudes in fp8, and their scales.

    Numbers of a row are alike in size, so that none becomes too small for e4m3 at a scale that all rows share.
    """
    signs = torch.randint(2, shape) * 2 - 1
    return quantize_rows(signs * (1 + torch.rand(shape)) * torch.logspace(-2, 2, shape[-2], 2.0)[:, None])


def wide(rows: tuple[Tensor, Tensor]) -> Tensor:
    return (rows[0].double() * rows[1]).flatten(0, -2)


def error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("shape", "axis"), [((37,), 0), ((3, 5), 0), ((3, 5), 1), ((2, 3, 4), 0), ((2, 3, 4), 1)])
@pytest.mark.parametrize("dtypes", [["float32"] * 3, ["bfloat16", "", "float64"], ["", "float16", ""], [""] * 3])
def test_each_weight_gets_the_sum_over_all_rows_in_its_dtype(
    shape: tuple[int, ...], axis: int, dtypes: list[str]
) -> None:
    x, dy = quantized(*shape, 8), quantized(*shape, sum(WIDTHS))
    exact = (wide(dy).t() @ wide(x)).split(WIDTHS)
    results = float8._weight_gradients(x, dy, axis, WIDTHS, dtypes)
    for result, true, dtype, width in zip(results, exact, dtypes, WIDTHS, strict=True):
        assert (result is None) == (not dtype)
        if result is not None:
            assert result.dtype == getattr(torch, dtype)
            assert result.shape == (width, 8)
            assert error(result, true) <= max(torch.finfo(result.dtype).eps, 1e-6)


def test_a_gradient_that_is_computed_alone_keeps_no_other_memory() -> None:
    x, dy = quantized(16, 8), quantized(16, sum(WIDTHS))
    result = float8._weight_gradients(x, dy, 0, WIDTHS, ["", "float32", ""])[1]
    assert result is not None
    assert result.untyped_storage().nbytes() == 4 * WIDTHS[1] * 8


@pytest.mark.parametrize(("shape", "axis"), [((0,), 0), ((0, 4), 0), ((4, 0), 1), ((4, 0), 0)])
def test_gradients_of_no_rows_are_zeros(shape: tuple[int, ...], axis: int) -> None:
    rows = (torch.empty(*shape, 8).to(float8.aten.FP8["f8e4m3"]), torch.empty(*shape, 1))
    assert not any(each.any() for each in float8._weight_gradients(rows, rows, axis, [5, 3], ["float32"] * 2))


@pytest.mark.parametrize("power", [12, 16, 20])
def test_a_row_that_is_far_larger_costs_the_others_little(power: int) -> None:
    x, dy = torch.randn(256, 64), torch.randn(256, 32)
    x[0, 0] = 2.0**power
    rows, of_dy = quantize_rows(x), quantize_rows(dy)
    (result,) = float8._weight_gradients(rows, of_dy, 0, [32], ["float32"])
    exact = (wide(of_dy).t() @ wide(rows))[:, 1:]
    assert result is not None
    assert error(result[:, 1:], exact) <= 1e-2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_makes_the_gradient_nan(bad: float) -> None:
    x, dy = torch.randn(16, 8), torch.randn(16, 4)
    dy[3, 2] = bad
    (result,) = float8._weight_gradients(quantize_rows(x), quantize_rows(dy), 0, [4], ["float32"])
    assert result is not None
    assert result.isnan().all()


def test_the_operator_passes_torchs_opcheck() -> None:
    x, dy = quantized(3, 5, 8), quantized(3, 5, 4)
    checked = "test_faketensor"  # the others compute with fp8, which the CPU does not
    torch.library.opcheck(float8_weight_gradient.packet.default, (*dy, *x, "bfloat16"), test_utils=checked)
