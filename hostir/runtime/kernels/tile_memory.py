"""How the matmul kernel reads tiles from memory and writes them, by TMA descriptors or by pointers."""

from __future__ import annotations

import triton
import triton.language as tl

from hostir.runtime.kernels.numerics import from_float32, to_float32


@triton.jit
def load_pointers(base, row, column, height, width, row_stride, column_stride, BR: tl.constexpr, BC: tl.constexpr):
    """The tile `[BR, BC]` at (row, column) of a `[height, width]` matrix, zero outside of it."""
    r = (row + tl.arange(0, BR)).to(tl.int64)[:, None]
    c = (column + tl.arange(0, BC)).to(tl.int64)[None, :]
    return tl.load(base + r * row_stride + c * column_stride, mask=(r < height) & (c < width), other=0.0)


@triton.jit
def load_descriptor(desc, batch, row, column, BATCHED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """The tile `[BR, BC]` at (row, column) of a matrix of a TMA descriptor, zero outside of it."""
    if BATCHED:
        return tl.reshape(desc.load([batch, row, column]), (BR, BC))
    else:
        return desc.load([row, column])


@triton.jit
def store(
    out,
    batch,
    row,
    column,
    M,
    N,
    strides,
    x,
    DESCRIPTORS: tl.constexpr,
    BATCHED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Round the tile `x` and store it at (row, column) of matrix `batch` of `out`."""
    if DESCRIPTORS:
        x = from_float32(x, out.dtype)
        if BATCHED:
            out.store([batch, row, column], tl.reshape(x, (1, BR, BC)))
        else:
            out.store([row, column], x)
    else:
        _, _, _, _, _, out_batch, out_row, out_column = strides
        r = (row + tl.arange(0, BR)).to(tl.int64)[:, None]
        c = (column + tl.arange(0, BC)).to(tl.int64)[None, :]
        x = from_float32(x, out.dtype.element_ty)
        at = out + batch.to(tl.int64) * out_batch + r * out_row + c * out_column
        tl.store(at, x, mask=(r < M) & (c < N))


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def finish(
    out,
    bias,
    bias_step,
    batch,
    row,
    column,
    M,
    N,
    strides,
    acc,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Add the bias to the sums of the tile at (row, column), and store it."""
    if HAS_BIAS:
        acc += to_float32(load_pointers(bias, 0, column, 1, N, 0, bias_step, 1, BN))
    if HALVES:
        left, right = halves(acc, BM, BN)
        store(out, batch, row, column, M, N, strides, left, DESCRIPTORS, BATCHED, BM, BN // 2)
        store(out, batch, row, column + BN // 2, M, N, strides, right, DESCRIPTORS, BATCHED, BM, BN // 2)
    else:
        store(out, batch, row, column, M, N, strides, acc, DESCRIPTORS, BATCHED, BM, BN)
