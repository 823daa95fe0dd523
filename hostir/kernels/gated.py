"""The gate of an expert's rows, with the weights of the rows, and its gradients, in Triton: a program computes a row.

By separate operators, a gate takes three kernels and its gradients six, which read and write the rows again each time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hostir.kernels.devices import check_device, launch, launching
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.operands import DTYPES

MAX_WIDTH = 8192  # elements of a row that a program holds at a time


@triton.jit
def _gate_kernel(g, u, weights, out, columns, WIDTH: tl.constexpr):
    """Compute `out = silu(g) * u * weight` for a row."""
    row = tl.program_id(0).to(tl.int64)
    weight = to_float32(tl.load(weights + row))
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        at, mask = row * columns + column, column < columns
        gate = to_float32(tl.load(g + at, mask=mask, other=0.0))
        value = gate * tl.sigmoid(gate) * to_float32(tl.load(u + at, mask=mask, other=0.0)) * weight
        tl.store(out + at, from_float32(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_gradients_kernel(dy, g, u, weights, d_g, d_u, d_weights, columns, WIDTH: tl.constexpr):
    """Compute the gradients of `silu(g) * u * weight` for a row. `d_weights` gets one sum for each row."""
    row = tl.program_id(0).to(tl.int64)
    weight = to_float32(tl.load(weights + row))
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        at, mask = row * columns + column, column < columns
        gate = to_float32(tl.load(g + at, mask=mask, other=0.0))
        up = to_float32(tl.load(u + at, mask=mask, other=0.0))
        d = to_float32(tl.load(dy + at, mask=mask, other=0.0))
        share = tl.sigmoid(gate)
        silu = gate * share
        total += d * silu * up
        d *= weight
        d_gate = d * up * share * (1 + gate * (1 - share))
        tl.store(d_g + at, from_float32(d_gate, d_g.dtype.element_ty), mask=mask)
        tl.store(d_u + at, from_float32(d * silu, d_u.dtype.element_ty), mask=mask)
    tl.store(d_weights + row, from_float32(tl.sum(total, 0), d_weights.dtype.element_ty))


def gate(g: torch.Tensor, u: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `silu(g) * u * weights[..., None]` in the dtype of `g`, computed in f32 and rounded once.

    `g` and `u` are `[..., columns]`, and `weights` is `[...]`; `takes` says which dtypes they may have.
    """
    g, u, weights = (t.contiguous() for t in (g, u, weights))
    out = torch.empty_like(g)
    _launch(_gate_kernel, g, u, weights, out)
    return out


def gate_gradients(
    dy: torch.Tensor, g: torch.Tensor, u: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `g`, `u` and `weights` for the gradient `dy` of `gate(g, u, weights)`."""
    dy, g, u, weights = (t.contiguous() for t in (dy, g, u, weights))
    d_g, d_u, d_weights = torch.empty_like(g), torch.empty_like(u), torch.zeros_like(weights)  # without columns: 0
    _launch(_gate_gradients_kernel, dy, g, u, weights, d_g, d_u, d_weights)
    return d_g, d_u, d_weights


def takes(*tensors: torch.Tensor) -> bool:
    """Return True if the kernels take such tensors."""
    return all(t.dtype in DTYPES for t in tensors)


def _launch(kernel: Any, first: torch.Tensor, *others: torch.Tensor) -> None:
    if not first.numel():
        return
    columns = first.shape[-1]
    width = min(triton.next_power_of_2(columns), MAX_WIDTH)
    with launching(check_device(first=first, **{f"other {i}": t for i, t in enumerate(others)})):
        launch(
            *(kernel, first.numel() // columns, first, *others, columns),
            WIDTH=width,
            num_warps=4 if width <= 2048 else 8,
        )
