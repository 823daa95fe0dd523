"""The RMS norm of rows in Triton. One program computes a row. It reads a row of up to MAX_WIDTH elements only once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hostir.kernels import aten
from hostir.kernels.devices import check_device, launch, launching
from hostir.kernels.layout import rows
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.operands import DTYPES

MAX_WIDTH = 16384  # elements of a row that registers hold; longer rows are read twice


@triton.jit
def reciprocal_rms(squares, columns, eps):
    """Return `1 / sqrt(mean(x^2) + eps)` for a row. `squares` are the squares of its elements, and zeros."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares, 0), columns.to(tl.float32)) + eps))


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    out,
    columns,
    x_row,
    x_column,
    weight_column,
    out_row,
    out_column,
    eps,
    WIDTH: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Normalize a row and multiply it by the weight.

    The program loads `WIDTH` elements at a time. ONCE is True if `WIDTH` elements cover the row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    read = to_float32(tl.load(x + row * x_row + column.to(tl.int64) * x_column, mask=column < columns, other=0.0))
    squares = read * read
    if not ONCE:
        for start in range(WIDTH, columns, WIDTH):
            at = start + column
            more = to_float32(tl.load(x + row * x_row + at.to(tl.int64) * x_column, mask=at < columns, other=0.0))
            squares += more * more
    scale = reciprocal_rms(squares, columns, eps)
    for start in range(0, columns, WIDTH):
        at = start + column
        far = at.to(tl.int64)
        if not ONCE:
            read = to_float32(tl.load(x + row * x_row + far * x_column, mask=at < columns, other=0.0))
        normed = read * scale
        if weight is not None:
            normed *= to_float32(tl.load(weight + far * weight_column, mask=at < columns, other=0.0))
        tl.store(out + row * out_row + far * out_column, from_float32(normed, out.dtype.element_ty), mask=at < columns)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float) -> None:
    """Compute `out = x / sqrt(mean(x^2) + eps) * weight` for each row of `x` in Triton, in f32, rounded once.

    ATen computes the result instead if Triton's kernels do not take the dtype of `x` (such as f64), if `x` has no
    elements, or if the rows of `x` or `out` have no constant stride.
    """
    flat, flat_out = rows(x), rows(out)
    if flat is None or flat_out is None or x.dtype not in DTYPES or not x.numel():
        aten.rms_norm(out, x, weight, eps=eps)
        return
    count, columns = flat.shape
    width = min(triton.next_power_of_2(columns), MAX_WIDTH)
    with launching(check_device(x=x, weight=weight, out=out)):
        launch(
            *(_rms_norm_kernel, count),
            *(flat, weight, flat_out, columns, *flat.stride()),
            *(0 if weight is None else weight.stride(0), *flat_out.stride(), eps),
            WIDTH=width,
            ONCE=columns <= width,
            num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
        )
