"""Products of rows in groups in Triton: one persistent kernel computes all groups of all sources.

The kernel reads the offsets of the groups itself, so the host does not wait for them. Every program makes the same
table of intervals of rows: for each source, the rows before the first group, the groups, and the rows after the last
group. A tile has rows of one interval. The tiles of the rows that belong to no group store 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hostir.kernels import aten
from hostir.kernels.devices import INTERPRETED, check_device, launch, launching, limits
from hostir.kernels.layout import collapse
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.operands import DTYPES

MAX_INTERVALS = 4096  # intervals of rows in the table of one launch

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _intervals(offsets, source_step, step, sources, groups, rows, INTERVALS: tl.constexpr):
    """Return the table of intervals: the first row of each, and the row after its last row.

    Each source has `groups + 2` intervals. Offsets that decrease or lie outside the rows are limited to the rows: then
    some rows are computed twice, and every row is written.
    """
    number = tl.arange(0, INTERVALS)
    source, interval = number // (groups + 2), number % (groups + 2)
    exists = number < sources * (groups + 2)
    at = offsets + source.to(tl.int64) * source_step + interval.to(tl.int64) * step
    begin = tl.load(at - step, mask=exists & (interval > 0), other=0)
    end = tl.load(at, mask=exists & (interval <= groups), other=rows)
    begin = tl.minimum(tl.maximum(begin, 0), rows).to(tl.int32)
    end = tl.minimum(tl.maximum(end, begin), rows).to(tl.int32)
    return begin, tl.where(exists, end, begin)


@triton.jit
def _dot(x, y, acc):
    if _INTERPRETED:
        return tl.dot(to_float32(x), to_float32(y), acc, input_precision="ieee")
    else:
        return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["sources", "groups", "rows"])
def _grouped_matmul_kernel(
    x,
    w,
    offsets,
    out,
    sources,
    groups,
    rows,
    N,
    K,
    x_source,
    x_row,
    x_column,
    w_group,
    w_row,
    w_column,
    offsets_source,
    offsets_step,
    out_source,
    out_row,
    out_column,
    INTERVALS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute this program's tiles. Tiles go down the rows of a group, then right, so that matrices stay in L2."""
    begins, ends = _intervals(offsets, offsets_source, offsets_step, sources, groups, rows, INTERVALS)
    number = tl.arange(0, INTERVALS)
    heights = tl.cdiv(ends - begins, BM)  # in tiles
    last = tl.cumsum(heights * tl.cdiv(N, BN), 0)  # the number of tiles up to the end of each interval
    for tile in range(tl.program_id(0), tl.max(last, 0), tl.num_programs(0)):
        interval = tl.sum((last <= tile).to(tl.int32), 0)
        here = number == interval
        height = tl.sum(tl.where(here, heights, 0), 0)
        within = tile - tl.sum(tl.where(here, last, 0), 0) + height * tl.cdiv(N, BN)
        source, group = (interval // (groups + 2)).to(tl.int64), interval % (groups + 2) - 1
        row = tl.sum(tl.where(here, begins, 0), 0) + within % height * BM + tl.arange(0, BM)
        column = within // height * BN + tl.arange(0, BN)
        in_rows, in_columns = (row < tl.sum(tl.where(here, ends, 0), 0))[:, None], (column < N)[None, :]
        row, column = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        left = x + source * x_source + row * x_row
        right = w + group.to(tl.int64) * w_group + column * w_column
        terms = tl.where((group >= 0) & (group < groups), K, 0)
        for start in range(0, terms, BK):
            k = start + tl.arange(0, BK)
            far = k.to(tl.int64)
            a = tl.load(left + far[None, :] * x_column, mask=in_rows & (k < K)[None, :], other=0.0)
            b = tl.load(right + far[:, None] * w_row, mask=in_columns & (k < K)[:, None], other=0.0)
            acc = _dot(a, b, acc)
        at = out + source * out_source + row * out_row + column * out_column
        tl.store(at, from_float32(acc, out.dtype.element_ty), mask=in_rows & in_columns)


def grouped_matmul(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> None:
    """Compute `out[..., t, :] = x[..., t, :] @ w[e]` for the rows t of group e in Triton, in f32, rounded once.

    Rows of no group become 0. Offsets that decrease or lie outside the rows are limited to the rows, so that nothing
    outside is accessed. ATen computes the result instead if Triton's kernels do not take the dtype (such as f64).
    """
    if x.dtype not in DTYPES or w.dtype != x.dtype or out.dtype != x.dtype:
        aten.grouped_matmul(out, x, w, offsets)
        return
    lead = collapse(x.shape[:-2], x.stride()[:-2], out.stride()[:-2], offsets.stride()[:-1])
    sources, *steps = lead[0] if lead else (1, 0, 0, 0)
    groups, intervals = len(w), sources * (len(w) + 2)
    if len(lead) > 1 or (x.ndim > 2 and intervals > MAX_INTERVALS):
        for parts in zip(out, x, offsets, strict=True):
            grouped_matmul(parts[0], parts[1], w, parts[2])
        return
    if not out.numel():
        return
    rows, columns = x.shape[-2], out.shape[-1]
    tile = _tile(sources * rows // groups, x.dtype)
    device = check_device(out=out, x=x, w=w, offsets=offsets)
    most = (-(-rows // tile["BM"]) + groups + 2) * sources * -(-columns // tile["BN"])
    with launching(device):
        launch(
            *(_grouped_matmul_kernel, min(most, limits(device).sms)),
            *(x, w, offsets, out, sources, groups, rows, columns, x.shape[-1]),
            *(steps[0], *x.stride()[-2:], *w.stride()),
            *(steps[2], offsets.stride(-1), steps[1], *out.stride()[-2:]),
            INTERVALS=triton.next_power_of_2(intervals),
            **tile,
        )


def _tile(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the tile and the options of a launch, for groups of about so many rows."""
    if INTERPRETED:
        return {"BM": 16, "BN": 32, "BK": 16}
    if dtype == torch.float32:
        return {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
    if rows <= 64:
        return {"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 4}
    return {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}
