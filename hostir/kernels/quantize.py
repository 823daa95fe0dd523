"""Quantize to 8-bit floats in Triton. One kernel computes the scales of rows or blocks; another divides by them.

Each kernel reads its input `x` once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hostir.kernels import aten
from hostir.kernels.devices import check_device, launch, launching
from hostir.kernels.layout import rows
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.operands import DTYPES

_WIDTH = 4096  # elements that a program reads at once
_WARPS = 8


@triton.jit
def scale_of(most, limit, least):
    """Return the scale of numbers whose largest absolute value has the bits `most`; NaN for the bits of a NaN."""
    scale = tl.div_rn(most.to(tl.float32, bitcast=True), limit)
    return tl.where(scale < least, least, scale)


@triton.jit
def magnitude(x):
    """Return the bits of the absolute value of a float32, as an integer.

    The integers have the order of the absolute values. The integers of NaN come last.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def limited_quotient(x, scale, limit):
    """Return `x / scale`, limited to the range from `-limit` to `limit`. NaN stays NaN."""
    quotient = tl.div_rn(x, scale)
    return tl.where(quotient > limit, limit, tl.where(quotient < -limit, -limit, quotient))


@triton.jit
def _row_scales_kernel(
    x,
    out,
    segments,
    groups,
    length,
    x_row,
    x_column,
    out_row,
    out_column,
    limit,
    least,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the scales of `COUNT` segments. A row consists of `groups` segments of `length` elements each."""
    segment = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    row, group = (segment // groups).to(tl.int64), segment % groups
    there = segment < segments
    at = row * x_row + group.to(tl.int64) * length * x_column
    most = tl.zeros((COUNT,), dtype=tl.int32)
    for start in range(0, length, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = there[:, None] & (column < length)[None, :]
        read = to_float32(tl.load(x + at[:, None] + column.to(tl.int64)[None, :] * x_column, mask=mask, other=0.0))
        most = tl.maximum(most, tl.max(magnitude(read), 1))
    scale = scale_of(most, tl.full((COUNT,), limit, tl.float32), least)
    tl.store(out + row * out_row + group * out_column, scale, mask=there)


@triton.jit
def _quantize_kernel(
    x,
    scale,
    out,
    columns,
    length,
    x_row,
    x_column,
    scale_row,
    scale_column,
    out_row,
    out_column,
    limit,
    WIDTH: tl.constexpr,
):
    """Quantize up to `WIDTH` elements of a row. `length` neighbouring elements share a scale."""
    pieces = tl.cdiv(columns, WIDTH)
    row, column = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces * WIDTH + tl.arange(0, WIDTH)
    mask, far = column < columns, column.to(tl.int64)
    read = to_float32(tl.load(x + row * x_row + far * x_column, mask=mask, other=0.0))
    by = tl.load(scale + row * scale_row + far // length * scale_column, mask=mask, other=1.0)
    quotient = limited_quotient(read, by, limit)
    tl.store(out + row * out_row + far * out_column, from_float32(quotient, out.dtype.element_ty), mask=mask)


def row_scales(out: torch.Tensor, x: torch.Tensor, *, dtype: str, block: int = 0) -> None:
    """Compute `out = max(amax / limit, 2^-126)` in Triton, for each row of `x`, or for each `block` elements of a row.

    `amax` is the largest absolute value of the row or block. `limit` is the largest number of `dtype`. If a row or
    block contains NaN, its scale is NaN. ATen computes the scales instead if Triton's kernels do not take the dtype of
    `x` (such as f64), if `out` is not f32, if `x` has no elements, or if the rows of `x` or `out` have no constant
    stride.
    """
    flat, flat_out = rows(x), rows(out)
    if flat is None or flat_out is None or x.dtype not in DTYPES or out.dtype != torch.float32 or not x.numel():
        aten.row_scales(out, x, dtype=dtype, block=block)
        return
    length = block or x.shape[-1]
    width = min(triton.next_power_of_2(length), _WIDTH)
    segments, count = flat_out.numel(), _WIDTH // width
    with launching(check_device(x=x, out=out)):
        launch(
            *(_row_scales_kernel, -(-segments // count)),
            *(flat, flat_out, segments, flat_out.shape[1], length, *flat.stride(), *flat_out.stride()),
            *(torch.finfo(aten.FP8[dtype]).max, aten.LEAST_SCALE),
            COUNT=count,
            WIDTH=width,
            num_warps=_WARPS,
        )


def quantize(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *, dtype: str) -> None:
    """Compute `out = x / scale` in fp8 in Triton, limited to the dtype's range and rounded to nearest even.

    The kernel takes f32 scales: one for the tensor, one for each row, or one for each block of a row. ATen computes the
    result instead if Triton's kernels do not take the dtype of `x` (such as f64) or these scales, if `x` has no
    elements, or if the rows of `x`, `scale` or `out` have no constant stride.
    """
    flat, flat_out, by = rows(x), rows(out), scale.expand(*x.shape[:-1], scale.shape[-1])
    by_rows = scale.reshape(1, 1).expand(x.shape[:-1].numel(), 1) if scale.numel() == 1 else rows(by)
    takes = x.dtype in DTYPES and scale.dtype == torch.float32 and x.numel() > 0 and x.shape[-1] % scale.shape[-1] == 0
    if flat is None or flat_out is None or by_rows is None or not takes:
        aten.quantize(out, x, scale, dtype=dtype)
        return
    (count, columns), width = flat.shape, min(triton.next_power_of_2(x.shape[-1]), _WIDTH)
    with launching(check_device(x=x, scale=scale, out=out)):
        launch(
            *(_quantize_kernel, count * -(-columns // width)),
            *(flat, by_rows, flat_out, columns, columns // scale.shape[-1]),
            *(*flat.stride(), *by_rows.stride(), *flat_out.stride()),
            torch.finfo(aten.FP8[dtype]).max,
            WIDTH=width,
            num_warps=_WARPS,
        )
