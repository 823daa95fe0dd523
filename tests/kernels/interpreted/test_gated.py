"""The gate of rows and its gradients, compared with float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere

from hostir.kernels import gated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 64), (4, 1), (1, 7, 130)])
@pytest.mark.parametrize("width", [64, gated.MAX_WIDTH])
def test_the_gate_and_its_gradients_are_those_of_torch_in_float64(shape, dtype, width, monkeypatch):
    monkeypatch.setattr(gated, "MAX_WIDTH", width)
    g, u, dy = (torch.randn(shape).to(dtype) for _ in range(3))
    weights = torch.rand(shape[:-1])
    exact = [t.double().requires_grad_() for t in (g, u, weights)]
    y = F.silu(exact[0]) * exact[1] * exact[2][..., None]
    wanted = [y, *torch.autograd.grad(y, exact, dy.double())]
    results = [gated.gate(g, u, weights), *gated.gate_gradients(dy, g, u, weights)]
    for result, true, like in zip(results, wanted, (g, g, u, weights), strict=True):
        assert (result.dtype, result.shape) == (like.dtype, like.shape)
        rounding = torch.finfo(result.dtype).eps
        torch.testing.assert_close(result.double(), true.detach(), rtol=rounding, atol=1e-5)


def test_other_layouts_and_no_rows_are_computed_too():
    g, u = torch.randn(6, 2, 4).transpose(0, 1), torch.randn(2, 4, 6).transpose(1, 2)
    weights = torch.rand(6, 2).t()
    torch.testing.assert_close(gated.gate(g, u, weights), F.silu(g) * u * weights[..., None])
    assert gated.gate(g[:0], u[:0], weights[:0]).shape == (0, 6, 4)
    assert [t.shape for t in gated.gate_gradients(g[:0], g[:0], u[:0], weights[:0])] == [(0, 6, 4), (0, 6, 4), (0, 6)]
