"""Products of rows in groups in Triton: one persistent kernel computes all groups of all sources.

The kernel reads the offsets of the groups itself, so the host does not wait for them. The rows of a group are the rows
of all its sources, one source after another. A tile has rows of one group, and may have rows of several sources: with
many sources, tiles of one source each would be partly empty. The rows that belong to no group count as two more groups,
before the first group and after the last one. Their tiles store 0.

Every program makes the same table of tiles. If all rows are there, the tiles of a group come one after another, so that
all find the matrix of the group in L2. If the rows of sources arrive while the kernel runs, the first groups are
computed source by source: each source has the tiles that need it, but no source that comes later. These groups are as
many as can be computed while rows arrive, because their matrices are read once for each source. The other groups follow
when all rows are there. A program waits for the flag of a source before the first of its tiles that needs it (see
`hostir.kernels.flags.ready`).

With an index, a tile loads the rows that the index names. So nothing has to wait until rows have been permuted.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import torch
import triton
import triton.language as tl

from hostir.kernels import aten
from hostir.kernels.devices import INTERPRETED, check_device, launch, launching, limits
from hostir.kernels.flags.ready import Awaited, ReadyFlags, wait_for_rows
from hostir.kernels.layout import collapse
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.estimate import share_apart
from hostir.kernels.matmul.operands import DTYPES
from hostir.kernels.matmul.tiles import grouped_tile

MAX_SOURCES = 64  # of one launch: for each row, a tile looks for the source among all
MAX_INTERVALS = 4096  # of sources and groups in the table of one launch

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def rows_of(offsets, source_step, step, source, group, groups, rows):
    """Return the first row and the number of rows of a group in a source. Either index may be a tensor.

    Group 0 has the rows before the first offset, and group `groups + 1` the rows after the last one. Offsets that
    decrease or lie outside the rows are limited to the rows: then some rows are computed twice, and every row is
    written.
    """
    at = offsets + source.to(tl.int64) * source_step + group.to(tl.int64) * step
    begin = tl.load(at - step, mask=(group > 0) & (group < groups + 2), other=0)
    end = tl.load(at, mask=group <= groups, other=rows)
    begin = tl.minimum(tl.maximum(begin, 0), rows).to(tl.int32)
    end = tl.minimum(tl.maximum(end, begin), rows).to(tl.int32)
    return begin, end - begin


@triton.jit
def _table(
    offsets,
    steps,
    first,
    sizes,
    BM: tl.constexpr,
    BY_SOURCE: tl.constexpr,
    SOURCES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return the number of tiles of one column up to the end of each interval of tiles.

    If BY_SOURCE, interval `i * GROUPS + group` has the tiles whose last row is of the i-th source from source `first`
    on. But after group `apart`, the last source has all tiles. Without BY_SOURCE, interval `group` has all tiles of a
    group.
    """
    source_step, step = steps
    sources, groups, apart, rows = sizes
    turn, group = tl.arange(0, SOURCES)[:, None], tl.arange(0, GROUPS)[None, :]
    _, count = rows_of(offsets, source_step, step, (turn + first) % sources, group, groups, rows)
    count = tl.where((turn < sources) & (group < groups + 2), count, 0)
    if BY_SOURCE:
        upto = tl.cumsum(count, 0)
        by_turn = group <= apart
        ends = tl.where(turn < sources - 1, tl.where(by_turn, upto // BM, 0), tl.cdiv(upto, BM))
        tiles = tl.where(turn < sources, ends - tl.where(by_turn, (upto - count) // BM, 0), 0)
        return tl.cumsum(tl.reshape(tiles, [SOURCES * GROUPS]), 0)
    else:
        return tl.cumsum(tl.cdiv(tl.sum(count, 0), BM), 0)


@triton.jit
def dot(x, y, acc):
    """Return `x @ y + acc`, in f32 without rounding of f32 operands."""
    if _INTERPRETED:
        return tl.dot(to_float32(x), to_float32(y), acc, input_precision="ieee")
    else:
        return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["sources", "groups", "apart", "rows", "tokens", "epoch", "first", "blocks", "polls"])
def _grouped_matmul_kernel(
    x,
    w,
    offsets,
    index,  # of the rows, with INDEX; as `offsets`, with strides between sources and between rows
    out,
    own_rows,  # the rows of block `first`, with OWN; their columns have the stride of the columns of x
    flags,  # flags to polls are set with READY only: fields of ReadyFlags; blocks is the number of flags
    timeouts,
    epoch,
    first,
    blocks,
    polls,
    sources,
    groups,
    apart,  # with READY: the number of groups at the beginning that are computed source by source
    rows,
    tokens,  # the number of rows of a source of x, from which an index chooses
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
    index_source,
    index_step,
    out_source,
    out_row,
    out_column,
    own_source,
    own_row,
    SOURCES: tl.constexpr,  # sources, and groups + 2, rounded up to powers of 2
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,  # True if K is a multiple of BK
    READY: tl.constexpr,
    OWN: tl.constexpr,
    INDEX: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Compute this program's tiles. Tiles go down the rows of an interval, then right, so that matrices stay in L2."""
    each, first_source = 1, 0  # the sources of a block, and the first source to compute
    known = 0  # with READY: the number of blocks, counted from block `first`, that this program has seen ready
    if READY:
        each = sources // blocks
        first_source = first * each
    steps, sizes = (offsets_source, offsets_step), (sources, groups, apart, rows)
    ends = _table(offsets, steps, first_source, sizes, BM, READY, SOURCES, GROUPS)
    turns, width = tl.arange(0, SOURCES), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.max(ends, 0) * width, tl.num_programs(0)):
        before = ends * width <= tile
        interval, begin_here = tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)
        height = tl.min(tl.where(before, 1 << 30, ends), 0) - begin_here
        within = tile - begin_here * width
        group = interval % GROUPS - 1
        terms = tl.where((group >= 0) & (group < groups) & (tokens > 0), K, 0)
        if READY:
            needed = interval // GROUPS // each
            if (needed >= known) & (terms > 0):
                awaited = Awaited(flags, timeouts, epoch, first, blocks, each * rows)
                for behind in range(known, needed + 1):
                    row_there = (first + behind) % blocks * each * rows
                    polls = tl.maximum(polls, 1)  # after a timeout, each later flag is polled once
                    known, polls = wait_for_rows(awaited, polls, row_there, row_there + 1, OWN, FLAGS, False)
        sources_here = (turns + first_source) % sources
        begin, count = rows_of(offsets, offsets_source, offsets_step, sources_here, group + 1, groups, rows)
        count = tl.where(turns < sources, count, 0)
        upto = tl.cumsum(count, 0)
        earlier = 0  # the tiles of the group that need no source as late as this interval's
        if READY:
            rows_before = tl.sum(tl.where(turns == interval // GROUPS, upto - count, 0), 0)
            earlier = tl.where(group < apart, rows_before // BM, 0)
        place = (earlier + within % height) * BM + tl.arange(0, BM)  # in the group
        total = tl.max(upto, 0)
        in_rows = (place < total)[:, None]
        place = tl.minimum(place, total - 1)  # the last row once more, where a tile has fewer rows: it is not stored
        of_turn = (place[:, None] >= (upto - count)[None, :]) & (place[:, None] < upto[None, :])
        turn = tl.sum(tl.where(of_turn, turns[None, :], 0), 1)
        row = (place + tl.sum(tl.where(of_turn, (begin - upto + count)[None, :], 0), 1)).to(tl.int64)
        source = ((turn + first_source) % sources).to(tl.int64)
        out_rows = source * out_source + row * out_row
        token = row
        if INDEX:
            token = tl.load(index + source * index_source + row * index_step).to(tl.int64)
            token = tl.minimum(tl.maximum(token, 0), tokens - 1)
        left = x + source * x_source + token * x_row
        if OWN:
            left = tl.where(turn < each, own_rows + turn.to(tl.int64) * own_source + token * own_row, left)
        left = left[:, None]
        column = within // height * BN + tl.arange(0, BN)
        in_columns, column = (column < N)[None, :], column.to(tl.int64)[None, :]
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        right = w + group.to(tl.int64) * w_group + column * w_column
        for start in range(0, terms, BK):
            k = start + tl.arange(0, BK)
            far = k.to(tl.int64)
            if EVEN:
                a = tl.load(left + far[None, :] * x_column)
                b = tl.load(right + far[:, None] * w_row, mask=in_columns, other=0.0)
            else:
                a = tl.load(left + far[None, :] * x_column, mask=(k < K)[None, :], other=0.0)
                b = tl.load(right + far[:, None] * w_row, mask=in_columns & (k < K)[:, None], other=0.0)
            acc = dot(a, b, acc)
        at = out + out_rows[:, None] + column * out_column
        tl.store(at, from_float32(acc, out.dtype.element_ty), mask=in_rows & in_columns)


def grouped_matmul(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    index: torch.Tensor | None = None,
    *,
    ready: ReadyFlags | None = None,
    own_rows: torch.Tensor | None = None,
) -> None:
    """Compute `out[..., t, :] = x[..., t, :] @ w[e]` for the rows t of group e in Triton, in f32, rounded once.

    With `index`, the rows are `x[..., index[..., t], :]`. Rows of no group become 0. Offsets that decrease or lie
    outside the rows, and indices outside the rows of `x`, are limited to the rows, so that nothing outside is accessed.
    ATen computes the result instead if Triton's kernels do not take the dtype (such as f64).

    With `ready`, the sources, which are the indices of the leading axes, arrive in blocks while the kernel runs.
    `own_rows` are then the rows of block `ready.first`, which needs no flag. All offsets and indices are there at the
    start. Raises ValueError if the flags do not split the sources evenly, or if the leading axes do not merge.
    """
    if ready is None and (x.dtype not in DTYPES or w.dtype != x.dtype or out.dtype != x.dtype):
        aten.grouped_matmul(out, x, w, offsets, index)
        return
    by_source = offsets if index is None else index
    lead = collapse(x.shape[:-2], x.stride()[:-2], out.stride()[:-2], offsets.stride()[:-1], by_source.stride()[:-1])
    sources, *steps = lead[0] if lead else (1, 0, 0, 0, 0)
    groups = len(w)
    own = collapse(own_rows.shape[:-2], own_rows.stride()[:-2]) if own_rows is not None else []
    if ready is None and (len(lead) > 1 or (x.ndim > 2 and not _in_one_launch(sources, groups))):
        for n, (out_part, x_part, begins) in enumerate(zip(out, x, offsets, strict=True)):
            grouped_matmul(out_part, x_part, w, begins, None if index is None else index[n])
        return
    if ready is None and not out.numel():
        return
    if own_rows is not None and own_rows.stride(-1) != x.stride(-1):
        raise ValueError(f"own rows with columns of stride {own_rows.stride(-1)}, and rows with {x.stride(-1)}")
    if ready is not None and (not out.numel() or sources % len(ready.flags) or len(own) > 1 or len(lead) > 1):
        raise ValueError(f"{len(ready.flags)} flags for {sources} sources of {x.shape[-2]} rows")
    rows, columns = out.shape[-2:]
    tile = _tile(sources * rows // max(groups, 1), x.element_size())
    device = check_device(out=out, x=x, w=w, offsets=offsets, index=index, own_rows=own_rows)
    sms = limits(device).sms - (0 if ready is None else ready.reserved_sms)
    most = (-(-sources * rows // tile["BM"]) + groups + 2) * -(-columns // tile["BN"])
    waits: tuple[Any, ...] = (None, None, 0, 0, 1, 0)
    if ready is not None:
        waits = (ready.flags, ready.timeouts, ready.epoch, ready.first, len(ready.flags), ready.polls)
    with launching(device):
        launch(
            *(_grouped_matmul_kernel, max(min(most, sms), 1), x, w, offsets, index, out, own_rows, *waits),
            *(sources, groups, _apart(out, x, w, ready), rows, x.shape[-2], columns, x.shape[-1]),
            *(steps[0], *x.stride()[-2:], *w.stride()),
            *(steps[2], offsets.stride(-1), steps[3], by_source.stride(-1), steps[1], *out.stride()[-2:]),
            *(own[0][1] if own else 0, 0 if own_rows is None else own_rows.stride(-2)),
            SOURCES=triton.next_power_of_2(sources),
            GROUPS=triton.next_power_of_2(groups + 2),
            EVEN=x.shape[-1] % tile["BK"] == 0,
            READY=ready is not None,
            OWN=own_rows is not None,
            INDEX=index is not None,
            FLAGS=1 if ready is None else triton.next_power_of_2(len(ready.flags)),
            **tile,
        )


def grouped_matmul_by_blocks(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    index: torch.Tensor | None = None,
    *,
    ready: ReadyFlags,
    own_rows: torch.Tensor | None = None,
) -> None:
    """Compute a grouped matmul whose sources arrive in blocks, as `grouped_matmul` does with `ready`.

    It takes any layouts: small operands that do not fit are copied first, and a result that does not fit is copied
    last. If one launch cannot have so many sources and groups, there is a launch for each block.
    """
    dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    sources, rows, columns = x.shape[:-2].numel(), *x.shape[-2:]
    flat = x.view(sources, rows, columns)
    begins, result = offsets.reshape(sources, -1), dense.view(sources, *out.shape[-2:])
    numbers = None if index is None else index.reshape(sources, -1)
    if own_rows is not None:
        own_rows = own_rows.reshape(-1, rows, columns)
        own_rows = own_rows if own_rows.stride(-1) == x.stride(-1) else own_rows.contiguous()
    blocks = len(ready.flags)
    if _in_one_launch(sources, len(w)):
        grouped_matmul(result, flat, w, begins, numbers, ready=ready, own_rows=own_rows)
    else:
        each = sources // blocks
        for block in (*range(ready.first, blocks), *range(ready.first)):
            part, flag = slice(block * each, (block + 1) * each), slice(block, block + 1)
            one = replace(ready, flags=ready.flags[flag], timeouts=ready.timeouts[flag], first=0)
            own = own_rows if block == ready.first else None
            of_part = None if numbers is None else numbers[part]
            grouped_matmul(result[part], flat[part], w, begins[part], of_part, ready=one, own_rows=own)
    if dense is not out:
        out.copy_(dense)


def _apart(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, ready: ReadyFlags | None) -> int:
    """Return the number of groups that are computed source by source."""
    if ready is None:
        return 0
    blocks, (groups, size, columns) = len(ready.flags), w.shape
    block, flops = x.numel() // blocks * x.element_size(), 2.0 * out.shape[:-1].numel() * size * columns
    return ceil(groups * share_apart(blocks, block, flops, "f32" if x.element_size() == 4 else "bf16"))


def _in_one_launch(sources: int, groups: int) -> bool:
    """Return True if one launch can compute so many groups of so many sources."""
    return sources <= MAX_SOURCES and triton.next_power_of_2(sources) * (groups + 2) <= MAX_INTERVALS


def _tile(rows: int, itemsize: int) -> dict[str, int]:
    """Return the tile and the options of a launch, for groups of about so many rows."""
    if INTERPRETED:
        return {"BM": 16, "BN": 32, "BK": 16}
    tile = grouped_tile(rows, itemsize)
    return {"BM": tile.m, "BN": tile.n, "BK": tile.k, "num_warps": tile.warps, "num_stages": tile.stages}
