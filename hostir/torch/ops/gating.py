"""The gate of an expert's rows, as one operator with gradients."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor

from hostir.torch.ops.gradients import refuse_twice
from hostir.torch.ops.library import define
from hostir.torch.ops.running import THREAD


@define("gate(Tensor g, Tensor u, Tensor weights) -> Tensor")
def gate(g: Tensor, u: Tensor, weights: Tensor) -> Tensor:
    """Return `silu(g) * u * weights[..., None]` in the dtype of `g`, computed in f32 or better and rounded once.

    `g` and `u` are `[..., columns]`, and `weights` is `[...]`.
    """
    if THREAD.tracing:
        return torch.empty_like(g, memory_format=torch.contiguous_format)
    _check(g, u, weights)
    if g.is_cuda and _has_triton():
        from hostir.kernels import gated  # loads Triton: only where it is used

        if gated.takes(g, u, weights):
            return gated.gate(g, u, weights)
    wide = torch.promote_types(g.dtype, torch.float32)
    return (F.silu(g.to(wide)) * u.to(wide) * weights.to(wide)[..., None]).to(g.dtype).contiguous()


@define("gate_gradients(Tensor dy, Tensor g, Tensor u, Tensor weights) -> (Tensor, Tensor, Tensor)")
def gate_gradients(dy: Tensor, g: Tensor, u: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `g`, `u` and `weights` for the gradient `dy` of `gate(g, u, weights)`."""
    if THREAD.tracing:
        d_g, d_u, d_weights = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (g, u, weights))
        return d_g, d_u, d_weights
    _check(g, u, weights, dy)
    if g.is_cuda and _has_triton():
        from hostir.kernels import gated

        if gated.takes(dy, g, u, weights):
            return gated.gate_gradients(dy, g, u, weights)
    wide = torch.promote_types(g.dtype, torch.float32)
    d, before, up = (t.to(wide) for t in (dy, g, u))
    share, weight = before.sigmoid(), weights.to(wide)[..., None]
    d_g = d * weight * up * share * (1 + before * (1 - share))
    d_u, d_weights = d * weight * before * share, (d * before * share * up).sum(-1)
    return d_g.to(g.dtype).contiguous(), d_u.to(u.dtype).contiguous(), d_weights.to(weights.dtype).contiguous()


def _check(g: Tensor, u: Tensor, weights: Tensor, dy: Tensor | None = None) -> None:
    shapes = [tuple(t.shape) for t in (g, u, g if dy is None else dy)]
    if len({*shapes}) > 1 or weights.shape != g.shape[:-1]:
        raise ValueError(f"gates, rows and gradients of shapes {shapes}, and weights of {tuple(weights.shape)}")


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    refuse_twice(gate.name)
    gradients: tuple[Tensor, ...] = gate_gradients.packet(dy, *ctx.saved_tensors)
    return gradients


gate.differentiate(_backward, _setup)
