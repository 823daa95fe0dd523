"""Products of rows in groups in Triton: one persistent kernel computes all groups of all sources.

The kernel reads the offsets of the groups itself, so the host does not wait for them. The rows of a group are the rows
of all its sources, one source after another. The rows that belong to no group count as two more groups, before the
first group and after the last one. Their tiles store 0.

Another kernel first collects the rows, so that the rows of each group lie one after another. Then TMA can load them,
and no tile is partly empty because its source has few rows. On an H100, a matmul that gathered its rows itself, by
pointers, took 1.4 times as long as both kernels together. If rows arrive while the kernels run, or if an index orders
them, the first kernel does this work: it waits for the flag of a source before it reads the source's rows (see
`hostir.kernels.flags.ready`), and reads the rows that the index names. Other rows, if they have a constant stride, are
not collected if the groups have so many rows in each source that few tiles are partly empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hostir.kernels import aten
from hostir.kernels.devices import INTERPRETED, check_device, launch, launching, limits
from hostir.kernels.flags.ready import Awaited, ReadyFlags, ready_layout, wait_for_rows
from hostir.kernels.layout import collapse, descriptor_strides, launch_layout
from hostir.kernels.layout import rows as flat_rows
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.operands import DTYPES, Described
from hostir.kernels.matmul.tiles import collecting_pays, grouped_tile

MAX_SOURCES = 64  # of one launch: for each row, a tile looks for the source among all
MIN_GROUPS = 16  # Triton 3.6 cannot add up fewer groups than a thread loads elements
MAX_INTERVALS = 4096  # of sources and groups in one launch, before the groups are rounded up to a power of 2

# A unit of the kernel that collects rows, and its options.
_COLLECTING = {"ROWS": 8, "WIDTH": 16} if INTERPRETED else {"ROWS": 32, "WIDTH": 512, "num_warps": 16}

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def rows_of(offsets, source_step, step, source, group, groups, rows):
    """Return the first row and the number of rows of a group in a source. Either index may be a tensor.

    Group 0 has the rows before the first offset, and group `groups + 1` the rows after the last one. Offsets that
    decrease or lie outside the rows are limited to the rows: then the results of some rows are undefined.
    """
    at = offsets + source.to(tl.int64) * source_step + group.to(tl.int64) * step
    begin = tl.load(at - step, mask=(group > 0) & (group < groups + 2), other=0)
    end = tl.load(at, mask=group <= groups, other=rows)
    begin = tl.minimum(tl.maximum(begin, 0), rows).to(tl.int32)
    end = tl.minimum(tl.maximum(end, begin), rows).to(tl.int32)
    return begin, end - begin


@triton.jit
def add_product(acc, x, y):
    """Return `acc + x @ y` in f32, without rounding of f32 operands.

    Products of 16-bit operands are added to `acc` one by one. Other products are added up before `acc` is added:
    tensor cores add up products of fp8 in fewer bits, and a long sum of f32 is more exact if it is a sum of sums.
    """
    if _INTERPRETED:
        return acc + tl.dot(to_float32(x), to_float32(y), input_precision="ieee")
    elif x.dtype.primitive_bitwidth == 16:
        return tl.dot(x, y, acc)
    else:
        # Triton would make one sum of both, unless a number of products to be added up first is given.
        return acc + tl.dot(x, y, input_precision="ieee", max_num_imprecise_acc=x.shape[1])


class RowGroups(NamedTuple):
    """The groups of a grouped matmul: offsets and their strides, and sizes.

    Fields:
        sources, first: the number of sources, and the source whose rows come first in each group.
        count: the number of groups.
        rows: the number of rows of a source.
    """

    offsets: Any
    source_step: Any
    step: Any
    sources: Any
    first: Any
    count: Any
    rows: Any


@triton.jit
def _rows_by_source(groups, turns, group):
    """Return the first row and the number of rows of groups in sources, which are counted from source `first` on."""
    source = (turns + groups.first) % groups.sources
    begin, count = rows_of(groups.offsets, groups.source_step, groups.step, source, group, groups.count, groups.rows)
    return begin, tl.where((turns < groups.sources) & (group < groups.count + 2), count, 0)


@triton.jit(
    do_not_specialize=[
        *("epoch", "first", "blocks", "polls", "sources", "groups", "rows", "tokens", "capacity"),
    ]
)
def _collect_rows_kernel(
    x,
    offsets,
    index,  # of the rows, with INDEX; as `offsets`, with strides between sources and between rows
    own_rows,  # the rows of block `first`, with OWN; their columns have the stride of the columns of x
    out,
    flags,  # flags to polls are set with READY only: fields of ReadyFlags; blocks is the number of flags
    timeouts,
    epoch,
    first,
    blocks,
    polls,
    sources,
    groups,
    rows,
    tokens,  # the number of rows of a source of x, from which an index chooses
    capacity,  # the number of rows of `out`
    K,
    x_source,
    x_row,
    x_column,
    offsets_source,
    offsets_step,
    index_source,
    index_step,
    own_source,
    own_row,
    out_row,
    SOURCES: tl.constexpr,  # sources, and groups + 2, rounded up to powers of 2
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    READY: tl.constexpr,
    OWN: tl.constexpr,
    INDEX: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Copy the rows of all groups to `out`, in the order of the groups. Each group begins at a multiple of BM.

    A unit of work is ROWS rows of a source and WIDTH columns. The units of block `first` come first.
    """
    each, first_source = 1, 0  # the sources of a block, and the first source
    if READY:
        each = sources // blocks
        first_source = first * each
    of = RowGroups(offsets, offsets_source, offsets_step, sources, first_source, groups, rows)
    turns, group = tl.arange(0, SOURCES)[:, None], tl.arange(0, GROUPS)[None, :]
    begin, count = _rows_by_source(of, turns, group)
    count = tl.where((group > 0) & (group <= groups), count, 0)  # rows of no group are not read
    tiles = tl.cdiv(tl.sum(count, 0), BM)
    place = (tl.cumsum(tiles, 0) - tiles)[None, :] * BM + tl.cumsum(count, 0) - count  # of the first row of a source
    known = 0  # with READY: the number of blocks, counted from block `first`, that this program has seen ready
    width, height = tl.cdiv(K, WIDTH), tl.cdiv(rows, ROWS)
    for unit in range(tl.program_id(0), sources * height * width, tl.num_programs(0)):
        turn = unit // (height * width)
        if READY:
            needed = turn // each
            if needed >= known:
                awaited = Awaited(flags, timeouts, epoch, first, blocks, each * rows)
                for behind in range(known, needed + 1):
                    there = (first + behind) % blocks * each * rows
                    polls = tl.maximum(polls, 1)  # after a timeout, each later flag is polled once
                    known, polls = wait_for_rows(awaited, polls, there, there + 1, OWN, FLAGS, False)
        row = unit // width % height * ROWS + tl.arange(0, ROWS)
        first_row = tl.sum(tl.where(turns == turn, begin, 0), 0)[None, :]
        number = tl.sum(tl.where(turns == turn, count, 0), 0)[None, :]
        shift = tl.sum(tl.where(turns == turn, place - begin, 0), 0)[None, :]
        in_group = (row[:, None] >= first_row) & (row[:, None] < first_row + number)
        target = row + tl.sum(tl.where(in_group, shift, 0), 1)
        inside = (tl.max(in_group.to(tl.int32), 1) > 0) & (target >= 0) & (target < capacity)
        source = (turn + first_source) % sources
        token = row.to(tl.int64)
        if INDEX:
            at = index + source.to(tl.int64) * index_source + token * index_step
            token = tl.load(at, mask=inside, other=0).to(tl.int64)
            token = tl.minimum(tl.maximum(token, 0), tokens - 1)
        left = x + source.to(tl.int64) * x_source + token * x_row
        if OWN:
            left = tl.where(turn < each, own_rows + turn.to(tl.int64) * own_source + token * own_row, left)
        k = (unit % width * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)[None, :]
        here = inside[:, None] & (k < K) & (tokens > 0)
        value = tl.load(left[:, None] + k * x_column, mask=here)
        tl.store(out + target.to(tl.int64)[:, None] * out_row + k, value, mask=here)


@triton.jit(do_not_specialize=["sources", "groups", "first", "rows", "tokens", "capacity"])
def _grouped_matmul_kernel(
    left,  # the rows in the order of the groups: a pointer, or a descriptor with DESCRIPTORS
    w,  # likewise
    offsets,
    out,
    index,  # with INDEX, for the scales of rows: as in _collect_rows_kernel
    scale_x,  # with SCALED
    scale_w,
    sources,
    groups,
    first,
    rows,
    tokens,
    capacity,  # the number of rows of `left`; only offsets that do not fit the rows have more
    N,
    K,
    left_row,
    left_column,
    w_group,
    w_row,
    w_column,
    offsets_source,
    offsets_step,
    out_source,
    out_row,
    out_column,
    index_source,
    index_step,
    scale_x_source,
    scale_x_row,
    scale_w_group,
    scale_w_column,
    SOURCES: tl.constexpr,  # sources, and groups + 2, rounded up to powers of 2
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    W_IS_NK: tl.constexpr,  # True if the descriptor of w describes the transposed matrices
    COLLECTED: tl.constexpr,  # True if `left` is by _collect_rows_kernel; else it has the rows of all sources
    INDEX: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Compute this program's tiles. Tiles go down the rows of an interval, then right, so that matrices stay in L2.

    With COLLECTED, an interval has the rows of a group. Else it has the rows of a group in one source.
    """
    of = RowGroups(offsets, offsets_source, offsets_step, sources, first, groups, rows)
    turns, group_index, width = tl.arange(0, SOURCES), tl.arange(0, GROUPS), tl.cdiv(N, BN)
    _, counts = _rows_by_source(of, turns[None, :], group_index[:, None])
    if COLLECTED:
        tiles = tl.cdiv(tl.sum(counts, 1), BM)
    else:
        tiles = tl.reshape(tl.cdiv(counts, BM), [GROUPS * SOURCES])
    ends = tl.cumsum(tiles, 0)
    # Rows before the first group are not collected.
    not_collected = tl.cdiv(tl.sum(tl.where(group_index[:, None] == 0, counts, 0)), BM)
    for tile in range(tl.program_id(0), tl.max(ends, 0) * width, tl.num_programs(0)):
        before = ends * width <= tile
        interval, above = tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)
        height = tl.min(tl.where(before, 1 << 30, ends), 0) - above
        within = tile - above * width
        place = within % height * BM + tl.arange(0, BM)  # in the interval
        if COLLECTED:
            group = interval
            begin, count = _rows_by_source(of, turns, group)
            upto = tl.cumsum(count, 0)
            number = tl.max(upto, 0)
            inside = place < number
            place = tl.minimum(place, number - 1)  # the last row once more, where a tile has fewer rows
            of_turn = (place[:, None] >= (upto - count)[None, :]) & (place[:, None] < upto[None, :])
            turn = tl.sum(tl.where(of_turn, turns[None, :], 0), 1)
            row = place + tl.sum(tl.where(of_turn, (begin - upto + count)[None, :], 0), 1)
            source = ((turn + first) % sources).to(tl.int64)
            top = (above - not_collected + within % height) * BM
        else:
            group = interval // SOURCES
            begin, number = _rows_by_source(of, interval % SOURCES, group)
            inside = place < number
            row = begin + tl.minimum(place, number - 1)
            source = ((interval % SOURCES + first) % sources).to(tl.int64)
            top = source.to(tl.int32) * rows + begin + within % height * BM
        is_computed = (group > 0) & (group <= groups) & (tokens > 0) & (top < capacity)
        matrix = tl.minimum(tl.maximum(group - 1, 0), groups - 1)
        first_column = within // height * BN
        column = first_column + tl.arange(0, BN)
        in_columns, column = (column < N)[None, :], column.to(tl.int64)[None, :]
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(0, tl.where(is_computed, K, 0), BK):
            if DESCRIPTORS:
                a = left.load([top, start])
                if W_IS_NK:
                    b = tl.reshape(w.load([matrix, first_column, start]), (BN, BK)).T
                else:
                    b = tl.reshape(w.load([matrix, start, first_column]), (BK, BN))
            else:
                k = start + tl.arange(0, BK)
                far, in_k = k.to(tl.int64), k < K
                lines = left + (top + tl.arange(0, BM)).to(tl.int64)[:, None] * left_row
                a = tl.load(lines + far[None, :] * left_column, mask=inside[:, None] & in_k[None, :], other=0.0)
                columns = w + matrix.to(tl.int64) * w_group + column * w_column
                b = tl.load(columns + far[:, None] * w_row, mask=in_columns & in_k[:, None], other=0.0)
            acc = add_product(acc, a, b)
        if SCALED:
            token = row.to(tl.int64)
            if INDEX:
                token = tl.load(index + source * index_source + token * index_step, mask=inside, other=0).to(tl.int64)
                token = tl.minimum(tl.maximum(token, 0), tokens - 1)
            computed = inside & is_computed  # the results of other rows are 0, whatever the scales are
            of_rows = tl.load(scale_x + source * scale_x_source + token * scale_x_row, mask=computed, other=0.0)
            of_columns = scale_w + matrix.to(tl.int64) * scale_w_group + column * scale_w_column
            acc *= of_rows[:, None] * tl.load(of_columns, mask=in_columns & is_computed, other=0.0)
        at = (out + source * out_source + row.to(tl.int64) * out_row)[:, None] + column * out_column
        tl.store(at, from_float32(acc, out.dtype.element_ty), mask=inside[:, None] & in_columns)


def grouped_matmul(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    index: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    *,
    ready: ReadyFlags | None = None,
    own_rows: torch.Tensor | None = None,
) -> None:
    """Compute `out[..., t, :] = x[..., t, :] @ w[e]` for the rows t of group e in Triton, in f32, rounded once.

    With `index`, the rows are `x[..., index[..., t], :]`. Operands in fp8 have scales: `scale_x[..., T, 1]`, which the
    index orders, too, and `scale_w[E, 1, N]`. Rows of no group become 0. Offsets that decrease or lie
    outside the rows, and indices outside the rows of `x`, are limited to the rows, so that nothing outside is accessed.
    After such offsets, the results of some rows are undefined: see `hostir.kernels.misfits` for their error. ATen
    computes the result instead if Triton's kernels do not take the dtype (such as f64).

    With `ready`, the sources, which are the indices of the leading axes, arrive in blocks while the kernel runs.
    `own_rows` are then the rows of block `ready.first`, which needs no flag. All offsets and indices are there at the
    start. Raises ValueError if the flags do not split the sources evenly, or if the leading axes do not merge.
    """
    takes = x.dtype == w.dtype == out.dtype in DTYPES if scale_x is None else out.dtype in DTYPES
    if ready is None and not takes:
        aten.grouped_matmul(out, x, w, offsets, index, scale_x, scale_w)
        return
    numbers, factors = offsets if index is None else index, x if scale_x is None else scale_x
    leading = x.stride()[:-2], out.stride()[:-2], offsets.stride()[:-1], numbers.stride()[:-1], factors.stride()[:-2]
    lead = collapse(x.shape[:-2], *leading)
    sources, *steps = lead[0] if lead else (1, 0, 0, 0, 0, 0)
    groups = len(w)
    own = collapse(own_rows.shape[:-2], own_rows.stride()[:-2]) if own_rows is not None else []
    if ready is None and (len(lead) > 1 or (x.ndim > 2 and not _in_one_launch(sources, groups))):
        for n, (out_part, x_part, begins) in enumerate(zip(out, x, offsets, strict=True)):
            scale = None if scale_x is None else scale_x[n]
            grouped_matmul(out_part, x_part, w, begins, None if index is None else index[n], scale, scale_w)
        return
    if ready is None and not out.numel():
        return
    if own_rows is not None and own_rows.stride(-1) != x.stride(-1):
        raise ValueError(f"own rows with columns of stride {own_rows.stride(-1)}, and rows with {x.stride(-1)}")
    if ready is not None and (not out.numel() or sources % len(ready.flags) or len(own) > 1 or len(lead) > 1):
        raise ValueError(f"{len(ready.flags)} flags for {sources} sources of {x.shape[-2]} rows")
    operands = _Operands(out, x, w, offsets, index, scale_x, scale_w, own_rows)
    layouts = (*map(launch_layout, operands), ready_layout(ready))
    prepared = _prepared.get(layouts)
    if prepared is None:
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        strides = _Strides._make((*steps, own[0][1] if own else 0))
        prepared = _prepared[layouts] = _prepare(operands, ready, sources, strides)
    prepared(operands, ready)


class _Operands(NamedTuple):
    out: torch.Tensor
    x: torch.Tensor
    w: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor | None  # the index
    scale_x: torch.Tensor | None
    scale_w: torch.Tensor | None
    own_rows: torch.Tensor | None


class _Strides(NamedTuple):
    """The strides between sources of the operands with these names. `numbers` is the index, or else the offsets.

    Without scales, `scale_x` is the stride of the rows.
    """

    x: int
    out: int
    offsets: int
    numbers: int
    scale_x: int
    own_rows: int


@dataclass(frozen=True)
class _Prepared:
    """The launches of a grouped matmul for operands of one layout.

    Fields:
        collected: the number of rows to collect, and their distance in elements; None to read `x` itself.
        collecting, computing: arguments of the two kernels: the programs, the numbers that follow the tensors, and the
            constants with Triton's options.
        described: the layouts of the rows and of the matrices for TMA, with the shapes of tiles; None for pointers.
    """

    device: torch.device
    collected: tuple[int, int] | None
    collecting: tuple[int, Sequence[int], Mapping[str, Any]] | None
    computing: tuple[int, Sequence[int], Mapping[str, Any]]
    described: tuple[tuple[Described, tuple[int, ...]], ...] | None

    def __call__(self, operands: _Operands, ready: ReadyFlags | None) -> None:
        """Launch the kernels on the current stream."""
        out, x, w, offsets, index, scale_x, scale_w, own_rows = operands
        with launching(self.device):
            left = x
            if self.collected is not None and self.collecting is not None:
                left = x.new_empty(self.collected)  # not a shared workspace: other threads may launch in between
                waits: tuple[Any, ...] = (None, None, 0, 0, 1, 0)
                if ready is not None:
                    waits = (ready.flags, ready.timeouts, ready.epoch, ready.first, len(ready.flags), ready.polls)
                programs, numbers, options = self.collecting
                launch(_collect_rows_kernel, programs, x, offsets, index, own_rows, left, *waits, *numbers, **options)
            matrices: tuple[Any, ...] = (left, w)
            if self.described is not None:
                pairs = zip((left, w), self.described, strict=True)
                matrices = tuple(TensorDescriptor(t, d.shape, d.strides, [*block]) for t, (d, block) in pairs)
            programs, numbers, options = self.computing
            others = (offsets, out, None if scale_x is None else index, scale_x, scale_w)
            launch(_grouped_matmul_kernel, programs, *matrices, *others, *numbers, **options)


_MAX_PREPARED = 1024
_prepared: dict[tuple[object, ...], _Prepared] = {}  # by the layouts of the operands


def _prepare(operands: _Operands, ready: ReadyFlags | None, sources: int, strides: _Strides) -> _Prepared:
    out, x, w, offsets, index, scale_x, scale_w, own_rows = operands
    device = check_device(
        **{"out": out, "x": x, "w": w, "offsets": offsets, "index": index},
        **{"scale_x": scale_x, "scale_w": scale_w, "own_rows": own_rows},
    )
    groups, rows, columns, tokens, K = len(w), *out.shape[-2:], *x.shape[-2:]
    tile = _tile(sources * rows // max(groups, 1), x.element_size())
    sizes = {"SOURCES": triton.next_power_of_2(sources), "GROUPS": max(triton.next_power_of_2(groups + 2), MIN_GROUPS)}
    sms = max(limits(device).sms - (0 if ready is None else ready.reserved_sms), 1)
    flat = None if index is not None or ready is not None else flat_rows(x)
    if flat is not None and collecting_pays(sources, groups, sources * rows, columns, tile["BM"]):
        flat = None
    most = groups if flat is None else sources * (groups + 2)  # intervals of tiles, each with a partly empty tile
    tiles = sources * rows // tile["BM"] + min(most, sources * rows)
    collected, collecting, first = None, None, 0
    left_shape, left_strides = [sources * rows, K], [0 if flat is None else flat.stride(0), x.stride(-1)]
    if flat is None:
        collected = tiles * tile["BM"], -(-K // tile["BK"]) * tile["BK"]  # aligned for TMA
        left_shape, left_strides = [collected[0], K], [collected[1], 1]
        blocks = 1 if ready is None else len(ready.flags)
        first = 0 if ready is None else ready.first * (sources // blocks)
        numbers = (
            *(sources, groups, rows, tokens, collected[0], K, strides.x, *x.stride()[-2:]),
            *(strides.offsets, offsets.stride(-1), strides.numbers, (offsets if index is None else index).stride(-1)),
            *(strides.own_rows, 0 if own_rows is None else own_rows.stride(-2), collected[1]),
        )
        options = {
            **{"READY": ready is not None, "OWN": own_rows is not None, "INDEX": index is not None},
            **{"FLAGS": triton.next_power_of_2(blocks), **sizes, **_COLLECTING, "BM": tile["BM"]},
        }
        collecting = sms, numbers, options
    left = x.new_empty(0) if flat is None else x  # memory for collected rows is aligned
    described = _described(left, left_shape, left_strides, w, tile) if limits(device).tma else None
    computing = (
        max(min((tiles + 2) * -(-columns // tile["BN"]), sms), 1),
        (
            *(sources, groups, first, rows, tokens, left_shape[0], columns, K, *left_strides, *w.stride()),
            *(strides.offsets, offsets.stride(-1), strides.out, *out.stride()[-2:]),
            *((0, 0) if index is None or scale_x is None else (strides.numbers, index.stride(-1))),
            *((0, 0) if scale_x is None else (strides.scale_x, scale_x.stride(-2))),
            *((0, 0) if scale_w is None else (scale_w.stride(0), scale_w.stride(2))),
        ),
        {
            **{"DESCRIPTORS": described is not None, "W_IS_NK": described is not None and described[1][0].transposed},
            **{"COLLECTED": flat is None, "SCALED": scale_x is not None},
            **{"INDEX": scale_x is not None and index is not None, **sizes, **tile},
        },
    )
    return _Prepared(device, collected, collecting, computing, described)


def _described(
    left: torch.Tensor, shape: Sequence[int], strides: Sequence[int], w: torch.Tensor, tile: Mapping[str, int]
) -> tuple[tuple[Described, tuple[int, ...]], ...] | None:
    """Return the layouts of the rows and the matrices for TMA, and the shapes of tiles; None if it cannot load them."""
    transposed = w.stride(-1) != 1
    seen = w.mT if transposed else w
    of_w = (1, tile["BN"], tile["BK"]) if transposed else (1, tile["BK"], tile["BN"])
    described = []
    for t, size, steps, block in (
        (left, shape, strides, (tile["BM"], tile["BK"])),
        (seen, seen.shape, seen.stride(), of_w),
    ):
        legal = "it holds nothing" if 0 in size else descriptor_strides(t, size, steps)
        if isinstance(legal, str):
            return None
        described.append((Described(list(size), legal, transposed and t is seen), block))
    return tuple(described)


def grouped_matmul_by_blocks(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    index: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
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
    scales = None if scale_x is None else scale_x.reshape(sources, rows, 1)
    if own_rows is not None:
        own_rows = own_rows.reshape(-1, rows, columns)
        own_rows = own_rows if own_rows.stride(-1) == x.stride(-1) else own_rows.contiguous()
    blocks = len(ready.flags)
    if _in_one_launch(sources, len(w)):
        grouped_matmul(result, flat, w, begins, numbers, scales, scale_w, ready=ready, own_rows=own_rows)
    else:
        each = sources // blocks
        for block in (*range(ready.first, blocks), *range(ready.first)):
            part, flag = slice(block * each, (block + 1) * each), slice(block, block + 1)
            one = replace(ready, flags=ready.flags[flag], timeouts=ready.timeouts[flag], first=0)
            own = own_rows if block == ready.first else None
            order, scale = (None if t is None else t[part] for t in (numbers, scales))
            grouped_matmul(result[part], flat[part], w, begins[part], order, scale, scale_w, ready=one, own_rows=own)
    if dense is not out:
        out.copy_(dense)


def _in_one_launch(sources: int, groups: int) -> bool:
    """Return True if one launch can compute so many groups of so many sources."""
    return sources <= MAX_SOURCES and triton.next_power_of_2(sources) * (groups + 2) <= MAX_INTERVALS


def _tile(rows: int, itemsize: int) -> dict[str, int]:
    """Return the tile and the options of a launch, for groups of about so many rows."""
    if INTERPRETED:
        return {"BM": 16, "BN": 32, "BK": 16}
    tile = grouped_tile(rows, itemsize)
    return {"BM": tile.m, "BN": tile.n, "BK": tile.k, "num_warps": tile.warps, "num_stages": tile.stages}
