"""Quantization to 8-bit floats in Triton: scales and quotients have the bits of ATen's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hostir.kernels import aten, quantize
from hostir.kernels.matmul.operands import DTYPES


def same_bits(ours: torch.Tensor, atens: torch.Tensor) -> bool:
    """Return True if both are equal bit for bit. All NaNs count as equal."""
    a, b = ours.float(), atens.float()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        ours.view(torch.uint8)[~a.isnan()], atens.view(torch.uint8)[~b.isnan()]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", aten.FP8)
@pytest.mark.parametrize(
    ("shape", "block"), [((5, 384), 0), ((5, 384), 128), ((2, 3, 70), 0), ((3, 5000), 0), ((40, 128), 128)]
)
def test_scales_and_quotients_equal_atens(shape, block, fp8, dtype, monkeypatch):
    x = (torch.randn(shape) * torch.logspace(-30, 3, shape[-1])).to(dtype)
    flat = x.view(-1, shape[-1])
    flat[0], flat[1, 7], flat[2, 3] = 0, math.nan, math.inf
    ours_scale, expected = (torch.full((*shape[:-1], shape[-1] // (block or shape[-1])), math.nan) for _ in range(2))
    aten.row_scales(expected, x, dtype=fp8, block=block)
    padded = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., :-3].copy_(x)
    wanted, theirs = torch.empty(shape, dtype=aten.FP8[fp8]), torch.empty(1, 1)
    ours = torch.empty_like(wanted)
    for scale in (expected, theirs.fill_(0.37), expected[..., :1]):
        aten.quantize(wanted, x, scale, dtype=fp8)
        with monkeypatch.context() as patch:
            patch.setattr(quantize.aten, "row_scales", None)  # the Triton kernel must compute it
            patch.setattr(quantize.aten, "quantize", None)
            quantize.row_scales(ours_scale.fill_(-1), padded, dtype=fp8, block=block)
            quantize.quantize(ours.zero_(), padded, scale, dtype=fp8)
        torch.testing.assert_close(ours_scale, expected, rtol=0, atol=0, equal_nan=True)
        assert same_bits(ours, wanted)
    assert ours_scale.view(-1)[0] == 2.0**-126
    assert not (ours.float() * ours_scale[..., :1]).view(-1, shape[-1])[0].any()


@pytest.mark.parametrize("fp8", aten.FP8)
def test_numbers_halfway_between_two_8_bit_floats_are_rounded_to_even(fp8):
    numbers = torch.arange(256, dtype=torch.uint8).view(aten.FP8[fp8]).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middle = (numbers[1:] + numbers[:-1]) / 2
    away = [torch.nextafter(middle, torch.tensor(end)) for end in (-math.inf, math.inf)]
    x = torch.cat([numbers, middle, *away, torch.tensor([1e9, -1e9, 1e-30])])[None]
    ours, wanted = (torch.empty_like(x, dtype=aten.FP8[fp8]) for _ in range(2))
    one = torch.ones(1, 1)
    quantize.quantize(ours, x, one, dtype=fp8)
    aten.quantize(wanted, x, one, dtype=fp8)
    assert same_bits(ours, wanted)


def test_aten_computes_operands_that_triton_does_not_take():
    x = torch.randn(4, 3, 8).transpose(0, 1)
    for operand in (x, x.double(), x[:, :, :0]):
        scale, again = (torch.empty(3, 4, 1) for _ in range(2))
        quantize.row_scales(scale, operand, dtype="f8e4m3")
        aten.row_scales(again, operand, dtype="f8e4m3")
        assert torch.equal(scale, again)
        out, wanted = (torch.empty_like(operand, dtype=torch.float8_e4m3fn) for _ in range(2))
        quantize.quantize(out, operand, scale, dtype="f8e4m3")
        aten.quantize(wanted, operand, scale, dtype="f8e4m3")
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


def least_power_of_two(most: float) -> float:
    """Return the least power of two from 2^-126 on by which `most` is divided to at most 448."""
    return next(2.0**k for k in range(-126, 128) if most <= 448 * 2.0**k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 384), (2, 3, 70), (3, 9000), (70, 66)])
def test_rows_have_the_least_power_of_two_that_fits_as_their_scale_in_both_layouts(shape, dtype, monkeypatch):
    x = (torch.randn(shape) * torch.logspace(-30, 3, shape[-1])).to(dtype)
    flat = x.view(-1, shape[-1])
    flat[0], flat[1, 7], flat[2, 3] = 0, math.nan, math.inf
    if len(flat) > 4:
        flat[3], flat[4] = 448.0, 0
        flat[4, 1] = torch.nextafter(torch.tensor(896.0, dtype=dtype), torch.tensor(1e4, dtype=dtype))
    wanted_scale, wanted = torch.empty(*shape[:-1], 1), torch.empty(shape, dtype=torch.float8_e4m3fn)
    aten.quantize_rows(wanted, wanted_scale, [x])
    for scale, row in zip(wanted_scale.flatten().tolist(), flat, strict=True):
        most = row.abs().max().item()
        assert scale == least_power_of_two(most) if math.isfinite(most) else str(scale) == str(most)
    transposed = torch.empty(flat.shape[::-1], dtype=dtype).t().copy_(flat)
    with monkeypatch.context() as patch:
        patch.setattr(quantize, "aten", None)  # the Triton kernel must compute it
        for read in (x, transposed):
            scale, out = torch.full((*read.shape[:-1], 1), -1.0), torch.zeros(read.shape, dtype=wanted.dtype)
            quantize.quantize_rows(out, scale, [read])
            torch.testing.assert_close(scale.view_as(wanted_scale), wanted_scale, rtol=0, atol=0, equal_nan=True)
            assert same_bits(out.view_as(wanted), wanted)
    error = (wanted.double() * wanted_scale - x.double()).abs()
    assert ((error <= x.double().abs() / 16 + wanted_scale * 2.0**-10) | ~wanted_scale.isfinite()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(33, 1, 16), (1, 0, 7), (5,) * 9, (2100, 3)])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("by_columns", [False, True])
def test_several_matrices_are_quantized_as_one(by_columns, axis, sizes, dtype, monkeypatch):
    shapes = [(size, 70)[:: 1 if axis == 0 else -1] for size in sizes]
    xs = [(torch.randn(shape) * torch.logspace(-3, 3, shape[1])).to(dtype) for shape in shapes]
    xs = [x.t().contiguous().t() for x in xs] if by_columns else xs
    together, launched, launch = torch.cat(xs, axis), list[Any](), quantize.launch
    monkeypatch.setattr(quantize, "launch", lambda *args, **options: [launched.append(args), launch(*args, **options)])
    results = []
    for kernels in (quantize, aten):
        scale, out = torch.full((len(together), 1), -1.0), torch.zeros(together.shape, dtype=torch.float8_e4m3fn)
        kernels.quantize_rows(out, scale, xs, axis=axis)
        results.append((scale, out))
    (scale, out), (wanted_scale, wanted) = results
    assert torch.equal(scale, wanted_scale)
    assert same_bits(out, wanted)
    ((_, _, read, *_),) = launched
    at_once = len(sizes) <= quantize._MOST and (not by_columns or (axis == -1 and min(sizes) > 1))
    assert [x.data_ptr() for x in read] == [x.data_ptr() for x in xs] if at_once else len(read) == 1


def test_matrices_of_other_widths_and_dtypes_are_not_quantized_as_one():
    memory = torch.randn(4, 64)
    scale, out = torch.zeros(8, 1), torch.zeros(8, 64, dtype=torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        quantize.quantize_rows(out, scale, [memory, memory[:, :32]])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        quantize.quantize_rows(out, scale, [memory.view(2, 2, 64), memory.view(1, 4, 64)])
    mixed = [memory, torch.randn(4, 64).bfloat16()]
    results = []
    for kernels in (quantize, aten):
        scale, out = torch.zeros(8, 1), torch.zeros(8, 64, dtype=torch.float8_e4m3fn)
        kernels.quantize_rows(out, scale, mixed)
        results.append((scale, out.float()))
    assert all(map(torch.equal, *results))


def test_aten_quantizes_rows_that_triton_does_not_take():
    for x in (torch.randn(4, 3, 8).transpose(0, 1), torch.randn(3, 4, 0), torch.randn(3, 4, 5).double()):
        scale, out = torch.empty(*x.shape[:-1], 1), torch.empty(x.shape, dtype=torch.float8_e4m3fn)
        quantize.quantize_rows(out, scale, [x])
        assert torch.equal(scale, aten.power_of_two_scales(x))
        most = x.abs().amax().item() if x.numel() else 0
        torch.testing.assert_close(out.float() * scale, x.float(), rtol=2**-4, atol=2.0**-8 * most)


@pytest.mark.parametrize("layout", ["rows", "batches", "a part of wider rows"])
@pytest.mark.parametrize(("outer", "inner", "columns"), [(1, 1, 1), (3, 50, 70), (2, 200, 33), (1, 20000, 1)])
def test_transposed_rows_and_their_joint_scales_equal_atens(outer, inner, columns, layout, monkeypatch):
    shape, count = (outer, inner, columns), outer * inner
    x = torch.empty(shape, dtype=torch.float8_e4m3fn)
    a, b = (torch.empty(outer, inner, 1) for _ in range(2))
    aten.quantize_rows(x, a, [torch.randn(shape) * torch.logspace(-6, 3, inner)[:, None]])
    aten.quantize_rows(x, b, [torch.randn(shape) * torch.logspace(1, -2, inner)[:, None]])
    length, wider = -(-count // 16) * 16, torch.randn(outer, inner, 3 * columns).to(x.dtype)
    if layout == "batches":
        x, a, b = (t.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(t.dtype) for t in (x, a, b))
    elif layout == "a part of wider rows":
        x = torch.cat([x.view(torch.uint8), x.view(torch.uint8)], -1).view(x.dtype)[..., 1 : columns + 1]
    results = []
    for kernels in (quantize, aten):
        moved, other = (torch.full((n, length), -1.0).to(x.dtype) for n in (columns, 3 * columns))
        scales = torch.full((2, 4), -1.0)[:, 0]
        kernels.transpose_rows(moved, other, scales, x, wider, a, b)
        results.append((scales, moved, other))
    scales, *moved = results[1]
    for ours, atens in zip(*results, strict=True):
        assert torch.equal(ours.float(), atens.float())
    products = (a * b).flatten()
    assert scales.tolist() == [products.max(), 1]
    exponent = (products.double() / scales[0]).log2()
    assert torch.equal(exponent, exponent.round())
    halves = (exponent / 2).floor(), (exponent / 2).ceil()
    for read, half, result in zip((x, wider), halves, moved, strict=True):
        exact = (read.flatten(0, 1).double() * half.exp2()[:, None]).t()
        error = result.double()[:, :count] - exact
        assert error.abs().max() <= 2.0**-10, "only numbers below 2^-6 are rounded, to multiples of 2^-9"
        assert not result.double()[:, count:].any()


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf])
def test_the_scale_of_zeros_is_not_zero_and_rows_with_nan_are_nan(scale):
    for kernels in (quantize, aten):
        a, b, scales = torch.ones(1, 5, 1), torch.ones(1, 5, 1), torch.empty(2)
        a[0, slice(None) if scale == 0 else 3] = scale
        x = torch.ones(1, 5, 2).to(torch.float8_e4m3fn)
        moved = [torch.zeros(2, 16).to(x.dtype) for _ in range(2)]
        kernels.transpose_rows(*moved, scales, x, x, a, b)
        if scale == 0:
            assert scales[0] == 2.0**-126
            assert all(each.float().isfinite().all() for each in moved)
        else:
            assert str(scales[0].item()) == str(scale)
            assert all(each.float()[:, 3].isnan().all() for each in moved)
