"""Scales for 8-bit floats, and what is divided by them: the bits of ATen's."""

from __future__ import annotations

import math

import pytest
import torch

from hostir.kernels import aten, quantize
from hostir.kernels.matmul.operands import DTYPES


def same_bits(ours: torch.Tensor, atens: torch.Tensor) -> bool:
    """Whether they are equal bit for bit, but that every NaN is alike."""
    a, b = ours.float(), atens.float()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        ours.view(torch.uint8)[~a.isnan()], atens.view(torch.uint8)[~b.isnan()]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", aten.FP8)
@pytest.mark.parametrize(
    ("shape", "block"), [((5, 384), 0), ((5, 384), 128), ((2, 3, 70), 0), ((3, 5000), 0), ((40, 128), 128)]
)
def test_scales_and_quotients_are_those_of_aten(shape, block, kind, dtype, monkeypatch):
    x = (torch.randn(shape) * torch.logspace(-30, 3, shape[-1])).to(dtype)
    flat = x.view(-1, shape[-1])
    flat[0], flat[1, 7], flat[2, 3] = 0, math.nan, math.inf
    found, expected = (torch.full((*shape[:-1], shape[-1] // (block or shape[-1])), math.nan) for _ in range(2))
    aten.row_scales(expected, x, dtype=kind, block=block)
    given = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., :-3].copy_(x)
    wanted, theirs = torch.empty(shape, dtype=aten.FP8[kind]), torch.empty(1, 1)
    ours = torch.empty_like(wanted)
    for scale in (expected, theirs.fill_(0.37), expected[..., :1]):
        aten.quantize(wanted, x, scale, dtype=kind)
        with monkeypatch.context() as patch:
            patch.setattr(quantize.aten, "row_scales", None)  # it must not be left to ATen
            patch.setattr(quantize.aten, "quantize", None)
            quantize.row_scales(found.fill_(-1), given, dtype=kind, block=block)
            quantize.quantize(ours.zero_(), given, scale, dtype=kind)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert same_bits(ours, wanted)
    assert found.view(-1)[0] == 2.0**-126
    assert not (ours.float() * found[..., :1]).view(-1, shape[-1])[0].any()


@pytest.mark.parametrize("kind", aten.FP8)
def test_every_number_between_two_of_eight_bits_is_rounded_to_the_nearest_even(kind):
    numbers = torch.arange(256, dtype=torch.uint8).view(aten.FP8[kind]).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middle = (numbers[1:] + numbers[:-1]) / 2
    away = [torch.nextafter(middle, torch.tensor(end)) for end in (-math.inf, math.inf)]
    x = torch.cat([numbers, middle, *away, torch.tensor([1e9, -1e9, 1e-30])])[None]
    ours, wanted = (torch.empty_like(x, dtype=aten.FP8[kind]) for _ in range(2))
    one = torch.ones(1, 1)
    quantize.quantize(ours, x, one, dtype=kind)
    aten.quantize(wanted, x, one, dtype=kind)
    assert same_bits(ours, wanted)


def test_what_triton_does_not_take_aten_computes():
    x = torch.randn(4, 3, 8).transpose(0, 1)
    for given in (x, x.double(), x[:, :, :0]):
        scale, again = (torch.empty(3, 4, 1) for _ in range(2))
        quantize.row_scales(scale, given, dtype="f8e4m3")
        aten.row_scales(again, given, dtype="f8e4m3")
        assert torch.equal(scale, again)
        out, wanted = (torch.empty_like(given, dtype=torch.float8_e4m3fn) for _ in range(2))
        quantize.quantize(out, given, scale, dtype="f8e4m3")
        aten.quantize(wanted, given, scale, dtype="f8e4m3")
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
