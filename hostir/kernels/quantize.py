"""Quantize to 8-bit floats in Triton, and transpose quantized rows.

One kernel computes the scales of rows or blocks; another divides by them. Each of them reads its input `x` once.
`quantize_rows` does both in one kernel, with scales that are powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hostir.kernels import aten
from hostir.kernels.devices import check_device, launch, launching, limits
from hostir.kernels.layout import rows
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.operands import DTYPES

_WIDTH = 4096  # elements that a program reads at once
_TILE = 16384  # elements that a program reads at once, if neighbouring elements of a column are neighbours in memory
_MOST = 8  # at most so many matrices are quantized in one launch
_SQUARE = 128  # rows and columns of a tile that is transposed
_TRANSPOSING = 4  # programs of an SM that transpose
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


@triton.jit
def _power_of_two(most):
    """Return the power-of-two scale for e4m3 of numbers whose largest absolute value has the bits `most`.

    See `aten.quantize_rows`.
    """
    bits = ((most + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    return tl.where(most < 0x7F800000, tl.maximum(bits, 0x800000), most).to(tl.float32, bitcast=True)


@triton.jit
def _read_tile(x, row, column, rows, columns, x_row, x_column):
    """Return a tile of `x` as float32; 0 outside of the `rows` and `columns`."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * x_row + column.to(tl.int64)[None, :] * x_column
    return to_float32(tl.load(x + at, mask=mask, other=0.0))


@triton.jit
def _write_tile(out, read, by, row, column, rows, columns, out_row, out_column):
    """Multiply each row of a tile with its number of `by`, and store the result in the dtype of `out`."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * out_row + column.to(tl.int64)[None, :] * out_column
    tl.store(out + at, from_float32(read * by[:, None], out.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_rows_kernel(
    xs,
    rows,
    columns,
    scale,
    out,
    x_row,
    x_column,
    scale_row,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Quantize `ROWS` rows of one of the matrices `xs`, and store their scales.

    The matrices are one below the other. `rows` has the number of rows of each. If `ONCE`, one tile holds the rows of
    a program; else they are read twice.
    """
    x, count, block = xs[0], tl.cast(rows[0], tl.int32), tl.program_id(0)
    above = block * 0  # the number of rows of the matrices above x
    for n in tl.static_range(1, len(xs)):
        if block >= tl.cdiv(count, ROWS):
            block -= tl.cdiv(count, ROWS)
            above += count
            x, count = xs[n], tl.cast(rows[n], tl.int32)
    row, place = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    if ONCE:
        read = _read_tile(x, row, place, count, columns, x_row, x_column)
        most = tl.max(magnitude(read), 1)
    else:
        most = _largest(x, row, count, columns, x_row, x_column, ROWS, WIDTH)
    by = _power_of_two(most)
    tl.store(scale + (above + row).to(tl.int64) * scale_row, by, mask=row < count)
    out += above.to(tl.int64) * out_row
    if ONCE:
        _write_tile(out, read, _inverse(by), row, place, count, columns, out_row, out_column)
    else:
        _write_rows(out, x, _inverse(by), row, count, columns, x_row, x_column, out_row, out_column, WIDTH)


@triton.jit
def _quantize_adjacent_kernel(
    xs,
    columns,
    x_rows,
    rows,
    scale,
    out,
    x_column,
    scale_row,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Quantize `ROWS` rows, and store their scales. The rows are read twice.

    The matrices `xs` are side by side. `columns` has the number of columns of each, and `x_rows` the stride between
    its rows.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    most = tl.zeros((ROWS,), dtype=tl.int32)
    for n in tl.static_range(len(xs)):
        most = tl.maximum(most, _largest(xs[n], row, rows, columns[n], x_rows[n], x_column, ROWS, WIDTH))
    by = _power_of_two(most)
    tl.store(scale + row.to(tl.int64) * scale_row, by, mask=row < rows)
    for n in tl.static_range(len(xs)):
        _write_rows(out, xs[n], _inverse(by), row, rows, columns[n], x_rows[n], x_column, out_row, out_column, WIDTH)
        out += tl.cast(columns[n], tl.int64) * out_column


@triton.jit
def _inverse(by):
    """Return `1 / by`. It is exact for powers of two."""
    return tl.div_rn(tl.full(by.shape, 1.0, tl.float32), by)


@triton.jit
def _largest(x, row, rows, columns, x_row, x_column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the bits of the largest absolute value of each row."""
    most = tl.zeros((ROWS,), dtype=tl.int32)
    for start in range(0, columns, WIDTH):
        tile = _read_tile(x, row, start + tl.arange(0, WIDTH), rows, columns, x_row, x_column)
        most = tl.maximum(most, tl.max(magnitude(tile), 1))
    return most


@triton.jit
def _write_rows(out, x, by, row, rows, columns, x_row, x_column, out_row, out_column, WIDTH: tl.constexpr):
    """Multiply each row of `x` with its number of `by`, and store the rows in the dtype of `out`."""
    for start in range(0, columns, WIDTH):
        place = start + tl.arange(0, WIDTH)
        tile = _read_tile(x, row, place, rows, columns, x_row, x_column)
        _write_tile(out, tile, by, row, place, rows, columns, out_row, out_column)


@triton.jit
def _products_of_scales(a, b, start, inner, rows, a_outer, a_inner, b_outer, b_inner, COUNT: tl.constexpr):
    """Return the products of two scales for `COUNT` rows; 0 outside of the `rows`."""
    row = start + tl.arange(0, COUNT)
    outer, place = (row // inner).to(tl.int64), row % inner
    of_a = tl.load(a + outer * a_outer + place * a_inner, mask=row < rows, other=0.0)
    return of_a * tl.load(b + outer * b_outer + place * b_inner, mask=row < rows, other=0.0)


@triton.jit(do_not_specialize=["inner", "rows"])
def _transpose_kernel(
    a,
    b,
    a_scale,
    b_scale,
    scales,
    a_out,
    b_out,
    inner,
    rows,
    a_columns,
    b_columns,
    length,
    a_outer,
    a_inner,
    b_outer,
    b_inner,
    column_step,
    a_scale_outer,
    a_scale_inner,
    b_scale_outer,
    b_scale_inner,
    scales_step,
    a_out_row,
    b_out_row,
    least,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the largest product of the scales of a row, and transpose tiles of `a` and `b`: see `aten.transpose_rows`.

    Row `t` of an operand is its row `t % inner` in part `t // inner`. The results have `length` columns; those beyond
    the rows get 0. Every program reads all scales, `WIDTH` at a time.
    """
    most = tl.full((1,), least, tl.float32).to(tl.int32, bitcast=True)
    for start in range(0, rows, WIDTH):
        product = _products_of_scales(
            a_scale, b_scale, start, inner, rows, a_scale_outer, a_scale_inner, b_scale_outer, b_scale_inner, WIDTH
        )
        most = tl.maximum(most, tl.max(magnitude(product), 0))
    largest = most.to(tl.float32, bitcast=True)
    if tl.program_id(0) == 0:
        tl.store(scales + tl.arange(0, 1), largest)
        tl.store(scales + tl.arange(0, 1) + scales_step, tl.full((1,), 1.0, tl.float32))
    across = tl.cdiv(length, TILE)
    of_a = across * tl.cdiv(a_columns, TILE)
    for tile in range(tl.program_id(0), of_a + across * tl.cdiv(b_columns, TILE), tl.num_programs(0)):
        block = tile
        x, out, columns = a, a_out, tl.cast(a_columns, tl.int64)
        outer, step, out_row = tl.cast(a_outer, tl.int64), tl.cast(a_inner, tl.int64), tl.cast(a_out_row, tl.int64)
        if tile >= of_a:
            block = tile - of_a
            x, out, columns = b, b_out, tl.cast(b_columns, tl.int64)
            outer, step, out_row = tl.cast(b_outer, tl.int64), tl.cast(b_inner, tl.int64), tl.cast(b_out_row, tl.int64)
        first = block % across * TILE
        row, column = first + tl.arange(0, TILE), (block // across * TILE + tl.arange(0, TILE)).to(tl.int64)
        product = _products_of_scales(
            a_scale, b_scale, first, inner, rows, a_scale_outer, a_scale_inner, b_scale_outer, b_scale_inner, TILE
        )
        ratio = tl.div_rn(product, tl.broadcast_to(largest, (TILE,)))
        exponent = (ratio.to(tl.int32, bitcast=True) >> 23) - 127
        half = exponent >> 1
        part = ((tl.where(tile >= of_a, exponent - half, half) + 127) << 23).to(tl.float32, bitcast=True)
        by = tl.where(ratio == ratio, part, ratio)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        at = row // inner * outer + row % inner * step
        read = to_float32(tl.load(x + at[:, None] + column[None, :] * column_step, mask=there, other=0.0))
        result = tl.where((row < rows)[:, None], read * by[:, None], 0.0)
        there = (row < length)[:, None] & (column < columns)[None, :]
        tl.store(out + column[None, :] * out_row + row[:, None], from_float32(result, out.dtype.element_ty), mask=there)


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


def _by_columns(x: torch.Tensor) -> bool:
    """Return True if neighbouring elements of a column are neighbours in memory."""
    return x.stride(1) != 1 and x.stride(0) == 1


def _in_one_launch(xs: Sequence[torch.Tensor], axis: int) -> bool:
    """Return True if one launch can quantize several matrices: see `quantize_rows`."""
    flat = [each for each in map(rows, xs) if each is not None]
    if len(flat) < len(xs) or len(xs) > _MOST or len({(x.dtype, x.device) for x in xs}) > 1:
        return False
    if axis == 0:
        alike = len({x.stride() for x in flat}) == len({x.shape[1:] for x in xs}) == 1
        return alike and not _by_columns(flat[0])
    return len({x.stride(1) for x in flat}) == len({x.shape[:-1] for x in xs}) == 1


def quantize_rows(out: torch.Tensor, scale: torch.Tensor, xs: Sequence[torch.Tensor], *, axis: int = 0) -> None:
    """Quantize each row of matrices to e4m3, with a power of two as its scale: see `aten.quantize_rows`.

    If the elements of a column are neighbours in memory, the kernel reads and writes tiles, so that memory is read in
    long pieces. Several matrices are first copied to one if there are many, if their layouts or dtypes differ, or if
    they are one below the other and stored by columns. ATen computes the result instead if Triton's kernels do not
    take the dtype of `xs`, if there are no elements, or if the rows of a tensor have no constant stride.
    """
    if len(xs) > 1 and not _in_one_launch(xs, axis):
        xs = [torch.cat([*xs], axis)]
    flat = [each for each in map(rows, xs) if each is not None]
    flat_out, flat_scale = rows(out), rows(scale)
    takes = len(flat) == len(xs) and xs[0].dtype in DTYPES and out.numel()
    if not takes or flat_out is None or flat_scale is None:
        aten.quantize_rows(out, scale, xs, axis=axis)
        return
    first, width = flat[0], min(triton.next_power_of_2(max(x.shape[1] for x in flat)), 2 * _WIDTH)
    height = max(_WIDTH // width, 1)
    if by_columns := _by_columns(first):
        height = next(size for size, least in ((32, 4096), (16, 2048), (8, 0)) if len(first) >= least)
        width = min(width, _TILE // height)
    with launching(check_device(x=first, scale=scale, out=out)):
        if by_columns or (axis != 0 and len(flat) > 1):
            launch(
                *(_quantize_adjacent_kernel, -(-len(first) // height)),
                *(tuple(flat), tuple(x.shape[1] for x in flat), tuple(x.stride(0) for x in flat), len(first)),
                *(flat_scale, flat_out, first.stride(1), flat_scale.stride(0), *flat_out.stride()),
                ROWS=height,
                WIDTH=width,
                num_warps=_WARPS,
            )
        else:
            launch(
                *(_quantize_rows_kernel, sum(-(-len(x) // height) for x in flat)),
                *(tuple(flat), tuple(map(len, flat)), first.shape[1]),
                *(flat_scale, flat_out, *first.stride(), flat_scale.stride(0), *flat_out.stride()),
                ROWS=height,
                WIDTH=width,
                ONCE=first.shape[1] <= width,
                num_warps=_WARPS,
            )


def transpose_rows(
    a_out: torch.Tensor,
    b_out: torch.Tensor,
    scales: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
) -> None:
    """Transpose the rows of two operands, and give them one scale, in one Triton kernel: see `aten.transpose_rows`.

    ATen transposes instead if the columns of the operands have different strides.
    """
    if a.stride(2) != b.stride(2):
        aten.transpose_rows(a_out, b_out, scales, a, b, a_scale, b_scale)
        return
    (outer, inner, _), length = a.shape, a_out.shape[1]
    device = check_device(a=a, b=b, a_scale=a_scale, b_scale=b_scale)
    tiles = -(-length // _SQUARE) * sum(-(-len(out) // _SQUARE) for out in (a_out, b_out))
    strides = *a.stride()[:2], *b.stride()[:2], a.stride(2), *a_scale.stride()[:2], *b_scale.stride()[:2]
    with launching(device):
        launch(
            *(_transpose_kernel, min(tiles, _TRANSPOSING * limits(device).sms)),
            *(a, b, a_scale, b_scale, scales, a_out, b_out, inner, outer * inner, len(a_out), len(b_out), length),
            *(*strides, scales.stride(0), a_out.stride(0), b_out.stride(0), aten.LEAST_SCALE),
            WIDTH=min(triton.next_power_of_2(outer * inner), _WIDTH),
            TILE=_SQUARE,
            num_warps=_WARPS,
        )
