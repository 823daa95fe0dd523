"""Rows in the order of an index, and weighted sums of such rows, in Triton. One program computes a part of a row.

ATen takes several kernels for a sum: for each addend, it gathers rows, converts them, multiplies them and adds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hostir.kernels import aten
from hostir.kernels.devices import check_device, launch, launching
from hostir.kernels.layout import collapse
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.operands import DTYPES, DTYPES_8_BIT

MAX_WIDTH = 4096  # elements of a row that a program computes


@triton.jit(do_not_specialize=["sums", "rows"])
def _combine_rows_kernel(
    y,
    index,
    weights,
    out,
    sums,  # the number of sums of a source
    rows,  # the number of rows of a source
    addends,  # of a sum
    columns,
    y_source,
    y_row,
    y_column,
    index_source,
    index_row,
    index_column,
    weights_source,
    weights_row,
    weights_column,
    out_source,
    out_row,
    out_column,
    WIDTH: tl.constexpr,
):
    """Add up rows of `y`, weighted if there are weights. Indices outside the rows are limited to the rows."""
    parts = tl.cdiv(columns, WIDTH)
    number = tl.program_id(0) // parts
    source, row = (number // sums).to(tl.int64), (number % sums).to(tl.int64)
    column = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    inside, far = column < columns, column.to(tl.int64)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for addend in range(addends):
        at = tl.load(index + source * index_source + row * index_row + addend * index_column).to(tl.int64)
        at = tl.minimum(tl.maximum(at, 0), rows - 1)
        value = to_float32(tl.load(y + source * y_source + at * y_row + far * y_column, mask=inside, other=0.0))
        if weights is not None:
            weight = tl.load(weights + source * weights_source + row * weights_row + addend * weights_column)
            value *= to_float32(weight)
        total += value
    place = out + source * out_source + row * out_row + far * out_column
    tl.store(place, from_float32(total, out.dtype.element_ty), mask=inside)


def permute_rows(out: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> None:
    """Compute `out[..., s, :] = x[..., index[..., s], :]` in Triton.

    ATen computes the result instead if Triton's kernels do not take the dtype, or if `x` has no rows.
    """
    if x.dtype not in (*DTYPES, *DTYPES_8_BIT) or not x.shape[-2]:
        aten.permute_rows(out, x, index)
        return
    _combine(out, x, index[..., None], None)


def combine_rows(out: torch.Tensor, y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
    """Compute `out[..., t, :] = sum over j of weights[..., t, j] * y[..., index[..., t, j], :]` in Triton, in f32.

    The sum is in this order and rounded once. ATen computes the result instead if Triton's kernels do not take the
    dtype (such as f64), or if `y` has no rows.
    """
    if y.dtype not in DTYPES or not y.shape[-2]:
        aten.combine_rows(out, y, index, weights)
        return
    _combine(out, y, index, weights)


def _combine(out: torch.Tensor, y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None) -> None:
    factors = index if weights is None else weights
    strides = [t.stride()[:-2] for t in (y, index, factors, out)]
    lead = collapse(y.shape[:-2], *strides)
    if len(lead) > 1:
        for n in range(len(out)):
            _combine(out[n], y[n], index[n], None if weights is None else weights[n])
        return
    if not out.numel():
        return
    sources, *steps = lead[0] if lead else (1, 0, 0, 0, 0)
    sums, columns = out.shape[-2:]
    width = min(triton.next_power_of_2(columns), MAX_WIDTH)
    with launching(check_device(y=y, index=index, weights=weights, out=out)):
        launch(
            *(_combine_rows_kernel, sources * sums * triton.cdiv(columns, width)),
            *(y, index, weights, out, sums, y.shape[-2], index.shape[-1], columns),
            *(steps[0], *y.stride()[-2:], steps[1], *index.stride()[-2:]),
            *(steps[2], *factors.stride()[-2:], steps[3], *out.stride()[-2:]),
            WIDTH=width,
            num_warps=4 if width <= 2048 else 8,
        )
