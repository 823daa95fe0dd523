"""Norms of rows in Triton equal ATen's, except for the last bit."""

from __future__ import annotations

import math

import pytest
import torch

from hostir.kernels import aten, norm
from hostir.kernels.matmul.operands import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "width"), [((5, 64), 16384), ((2, 3, 70), 16384), ((3, 100), 32), ((1, 1), 16384)])
def test_norms_equal_atens(shape, width, dtype, monkeypatch):
    x = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., :-3].copy_(3 * torch.randn(shape))
    weight = torch.randn(shape[-1] * 2).to(dtype)[::2]
    for factor in (weight, None):
        wanted, ours = torch.empty(shape, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
        aten.rms_norm(wanted, x, factor, eps=1e-5)
        with monkeypatch.context() as patch:
            patch.setattr(norm, "MAX_WIDTH", width)
            patch.setattr(norm.aten, "rms_norm", None)  # the Triton kernel must compute it
            norm.rms_norm(ours, x, factor, eps=1e-5)
        torch.testing.assert_close(ours, wanted, rtol=max(1e-6, torch.finfo(dtype).eps), atol=1e-6)


def test_aten_computes_operands_that_triton_does_not_take():
    x = torch.randn(4, 3, 8).transpose(0, 1)
    for factor in (x, x.double(), x[:, :, :0]):
        ours, wanted = torch.empty_like(factor), torch.empty_like(factor)
        norm.rms_norm(ours, factor, eps=1e-5)
        aten.rms_norm(wanted, factor, eps=1e-5)
        assert torch.equal(ours, wanted)
