"""Scales of 8-bit operands in the shapes that kernels read, and a reference of the scaled matmul in float64.

Scales are tensor-wise (each operand has one scale), row-wise (each row of a and each column of b has a scale) or
block-wise (each block of an operand has a scale).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hostir.kernels.layout import rows_or_copy
from hostir.kernels.matmul.tiles import SCALE_BLOCK as BLOCK

ScalePair = tuple[torch.Tensor, torch.Tensor]  # of a and of b


class FlatScales(NamedTuple):
    """The scales of 8-bit operands as `flat_scales` returns them, and the option `fast` of `scaled_matmul`."""

    of_a: torch.Tensor
    of_b: torch.Tensor
    fast: bool


def flat_scales(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> ScalePair:
    """Return the scales of the operands `a` `[..., K]` and `b` `[K, N]` in the shapes that kernels read.

    The scales of `a` become `[rows, 1]`, or block-wise `[rows, K / 128]`. The scales of `b` become `[1, N]`, or stay
    block-wise. Both results are views if the rows of `scale_a` have a constant stride.

    Raises TypeError unless scales are float32, and ValueError if their shapes do not fit.
    """
    if {scale_a.dtype, scale_b.dtype} != {torch.float32}:
        raise TypeError(f"expected scales of float32, got scale_a of {scale_a.dtype}, scale_b of {scale_b.dtype}")
    (*leading, K), N = a.shape, b.shape[1]
    count, blocks = a.shape[:-1].numel(), (K // BLOCK, -(-N // BLOCK))
    of_all, of_rows = (scale_a.numel() == 1, scale_b.numel() == 1), [*scale_a.shape] == [*leading, 1]
    if (of_all[0] or of_rows) and (of_all[1] or [*scale_b.shape] == [1, N]):
        flat = scale_a.reshape(1, 1) if of_all[0] else rows_or_copy(scale_a)
        return flat.expand(count, 1), scale_b.reshape(1, -1).expand(1, N)
    if K % BLOCK == 0 and ([*scale_a.shape], *scale_b.shape) == ([*leading, blocks[0]], *blocks):
        return rows_or_copy(scale_a), scale_b
    block_wise = f", or {[*leading, blocks[0]]} and {[*blocks]} (block-wise)" if K % BLOCK == 0 else ""
    raise ValueError(
        f"a {[*a.shape]} and b {[*b.shape]} have scales of one element (tensor-wise), {[*leading, 1]} and {[1, N]} "
        f"(row-wise){block_wise}; got {[*scale_a.shape]} and {[*scale_b.shape]}"
    )


def of_blocks(scales: ScalePair | FlatScales, N: int) -> bool:
    """Return True if scales from `flat_scales` are block-wise. `N` is the number of columns of b."""
    return (scales[0].shape[1], *scales[1].shape) != (1, 1, N)


def scaled_matmul_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the scaled matmul of `a` `[..., K]` and `b` `[K, N]`, computed in float64, rounded once to `dtype`.

    As in the kernels, scales multiply the sums, not the operands: a zero sum with an infinite scale is NaN.
    """
    of_a, of_b = flat_scales(a, b, scale_a, scale_b)
    flat, N = a.reshape(-1, a.shape[-1]), b.shape[1]
    if not of_blocks((of_a, of_b), N):
        total = (flat.double() @ b.double()) * of_a.double() * of_b.double()
    else:
        total = torch.zeros(len(flat), N, dtype=torch.float64, device=a.device)
        for block, columns in enumerate(of_b.double().repeat_interleave(BLOCK, 1)[:, :N]):
            k = slice(block * BLOCK, (block + 1) * BLOCK)
            total += (flat[:, k].double() @ b[k].double()) * (of_a[:, block, None].double() * columns)
    return (total if bias is None else total + bias.double()).to(dtype).view(*a.shape[:-1], N)
