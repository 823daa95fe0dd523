"""Sums of outer products of rows in groups in Triton: the gradients of the matrices of a grouped matmul.

A program computes a tile of the sum of one group. It reads the rows of this group of all sources, whose offsets it
reads itself. So the host does not wait for the offsets, and the sum is rounded once. The rows of all sources are one
sequence for its loop: a loop for each source would be short, and would begin with an empty pipeline.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hostir.kernels import aten
from hostir.kernels.devices import INTERPRETED, check_device, launch, launching
from hostir.kernels.grouped import MAX_SOURCES, add_product, rows_of
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.operands import DTYPES


@triton.jit(do_not_specialize=["sources", "rows"])
def _grouped_outer_kernel(
    x,
    y,
    offsets,
    addend,
    out,
    sources,
    rows,
    K,
    N,
    x_source,
    x_row,
    x_column,
    y_source,
    y_row,
    y_column,
    offsets_source,
    offsets_step,
    addend_group,
    addend_row,
    addend_column,
    out_group,
    out_row,
    out_column,
    SOURCES: tl.constexpr,  # whose rows are one sequence; a power of 2
    EVEN: tl.constexpr,  # True if K is a multiple of BM, and N of BN
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute a tile of the sum of a group. Tiles go down the columns of x, then right, then to the next group.

    Offsets that decrease or lie outside the rows are limited to the rows.
    """
    height, width = tl.cdiv(K, BM), tl.cdiv(N, BN)
    group, tile = tl.program_id(0) // (height * width), tl.program_id(0) % (height * width)
    k, n = tile % height * BM + tl.arange(0, BM), tile // height * BN + tl.arange(0, BN)
    far_k, far_n = k.to(tl.int64), n.to(tl.int64)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    left, right = x + far_k[None, :] * x_column, y + far_n[None, :] * y_column
    for first in range(0, sources, SOURCES):
        number = first + tl.arange(0, SOURCES)
        begin, count = rows_of(offsets, offsets_source, offsets_step, number % sources, group + 1, group + 1, rows)
        count = tl.where(number < sources, count, 0)
        upto = tl.cumsum(count, 0)
        total = tl.max(upto, 0)
        for start in range(0, total, BK):
            place = start + tl.arange(0, BK)
            here, row, source = (place < total)[:, None], tl.sum(begin, 0) + place, place * 0 + first
            if SOURCES > 1:
                of_source = (place[:, None] >= (upto - count)[None, :]) & (place[:, None] < upto[None, :])
                row = place + tl.sum(tl.where(of_source, (begin - upto + count)[None, :], 0), 1)
                source = tl.sum(tl.where(of_source, number[None, :], 0), 1)
            row, source = row.to(tl.int64)[:, None], source.to(tl.int64)[:, None]
            of_a, of_b = here, here
            if not EVEN:
                of_a, of_b = here & (k < K)[None, :], here & (n < N)[None, :]
            a = tl.load(left + source * x_source + row * x_row, mask=of_a, other=0.0)
            b = tl.load(right + source * y_source + row * y_row, mask=of_b, other=0.0)
            acc = add_product(acc, tl.trans(a), b)
    inside = (k < K)[:, None] & (n < N)[None, :]
    if addend is not None:
        of_group = addend + group.to(tl.int64) * addend_group
        old = of_group + far_k[:, None] * addend_row + far_n[None, :] * addend_column
        acc += to_float32(tl.load(old, mask=inside, other=0.0))
    place = out + group.to(tl.int64) * out_group + far_k[:, None] * out_row + far_n[None, :] * out_column
    tl.store(place, from_float32(acc, out.dtype.element_ty), mask=inside)


def grouped_outer(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, addend: torch.Tensor | None = None
) -> None:
    """Compute `out[e] = sum of the outer products of x[t] and y[t] over the rows t of group e, + addend[e]` in Triton.

    With one leading axis, the sum is also over this axis. It is computed in f32 and rounded once. The addend may be
    `out` itself. Offsets that decrease or lie outside the rows are limited to the rows. ATen computes the result
    instead if Triton's kernels do not take the dtype (such as f64).
    """
    if x.dtype not in DTYPES or y.dtype != x.dtype or out.dtype != x.dtype:
        aten.grouped_outer(out, x, y, offsets, addend)
        return
    if not out.numel():
        return
    x, y, offsets = (t if x.ndim > 2 else t[None] for t in (x, y, offsets))
    groups, K, N = out.shape
    tile = _tile(x.dtype, N)
    with launching(check_device(out=out, x=x, y=y, offsets=offsets, addend=addend)):
        launch(
            *(_grouped_outer_kernel, groups * triton.cdiv(K, tile["BM"]) * triton.cdiv(N, tile["BN"])),
            *(x, y, offsets, addend, out, len(x), x.shape[1], K, N, *x.stride(), *y.stride(), *offsets.stride()),
            *((0, 0, 0) if addend is None else addend.stride()),
            *out.stride(),
            SOURCES=min(triton.next_power_of_2(max(len(x), 1)), MAX_SOURCES),
            EVEN=K % tile["BM"] == 0 and N % tile["BN"] == 0,
            **tile,
        )


def _tile(dtype: torch.dtype, columns: int) -> dict[str, int]:
    """Return the tile and the options of a launch, for sums with so many columns."""
    if INTERPRETED:
        return {"BM": 16, "BN": 32, "BK": 16}
    if dtype == torch.float32:
        return {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
    if columns <= 128:
        return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 4}
    return {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}
