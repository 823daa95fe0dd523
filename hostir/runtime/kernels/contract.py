"""Tiles of a matmul: where each lies, and what one program does for it, whole or a part along K."""

from __future__ import annotations

import triton
import triton.language as tl

from hostir.runtime.kernels.launch import INTERPRETED
from hostir.runtime.kernels.numerics import to_float32
from hostir.runtime.kernels.split import (
    add_sums,
    add_to_sum,
    arrive,
    comes_second,
    first_step,
    has_left_its_sum,
    leave_sum,
    wait_for_the_first,
)
from hostir.runtime.kernels.tile_memory import finish, load_descriptor, load_pointers, store

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def tile_position(tile, group, first, height, batches, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """(batch, first row, first column) of output tile number `tile`: down `group` rows of tiles, then one tile right.

    Where `first` is not None, the tiles begin with block `first` of `height` rows, and come round to it again.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    batch = tile // (tiles_m * tiles_n)
    tile = tile % (tiles_m * tiles_n)
    top = tile // (group * tiles_n) * group
    wide = min(tiles_m - top, group)
    within = tile % (group * tiles_n)
    tile_m = top + within % wide
    if first is not None:
        first_row = first * height  # counted through all batches
        batch = (batch + first_row // M) % batches
        tile_m = (tile_m + first_row % M // BM) % tiles_m
    return batch, tile_m * BM, within // wide * BN


@triton.jit
def _dot(x, y, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:
        return tl.dot(to_float32(x), to_float32(y), acc, input_precision="ieee")
    else:
        return tl.dot(x, y, acc, input_precision=PRECISION)


@triton.jit
def _contract(
    batch,
    row,
    column,
    begin,
    stop,
    a,
    b,
    M,
    N,
    K,
    strides,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_IS_NK: tl.constexpr,
    BATCHED: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    RUN: tl.constexpr,
):
    """The products of steps `begin` to before `stop` along K, summed up in float32, for the tile at (row, column)."""
    a_batch, a_row, a_column, b_row, b_column, _, _, _ = strides
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(begin, stop):
        k = step * BK
        if DESCRIPTORS:
            x = load_descriptor(a, batch, row, k, BATCHED, BM, BK)
            if B_IS_NK:
                y = b.load([column, k]).T
            else:
                y = b.load([k, column])
        else:
            x = load_pointers(a + batch.to(tl.int64) * a_batch, row, k, M, K, a_row, a_column, BM, BK)
            y = load_pointers(b, k, column, K, N, b_row, b_column, BK, BN)
        acc = _dot(x, y, acc, PRECISION)
        if EXACT and step % RUN == RUN - 1:  # a sum of short sums errs less than one long sum
            total += acc
            acc = tl.zeros((BM, BN), dtype=tl.float32)
    if EXACT:
        acc += total
    return acc


@triton.jit
def whole_tiles(
    begin,
    stop,
    group,
    first,
    height,
    a,
    above,  # batches of the output that lie above the first of `a`
    b,
    out,
    bias,
    bias_step,
    batches,
    M,
    N,
    K,
    strides,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_IS_NK: tl.constexpr,
    BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    RUN: tl.constexpr,
):
    """This program's share of the tiles from `begin`, which is one of its own, to before `stop`."""
    for tile in tl.range(begin, stop, tl.num_programs(0), flatten=DESCRIPTORS):
        batch, row, column = tile_position(tile, group, first, height, batches, M, N, BM, BN)
        acc = _contract(
            *(batch - above, row, column, 0, tl.cdiv(K, BK), a, b, M, N, K, strides),
            *(BM, BN, BK, DESCRIPTORS, B_IS_NK, BATCHED, PRECISION, EXACT, RUN),
        )
        finish(
            *(out, bias, bias_step, batch, row, column, M, N, strides, acc),
            *(BM, BN, HALVES, DESCRIPTORS, BATCHED, HAS_BIAS),
        )


@triton.jit
def part_of_tile(
    number,  # of the tile, among those that are split: it says where its ticket and its sums are
    part,
    parts,
    sums,
    tickets,
    batch,
    row,
    column,
    a,
    above,
    b,
    out,
    bias,
    bias_step,
    M,
    N,
    K,
    strides,
    PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_IS_NK: tl.constexpr,
    BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    RUN: tl.constexpr,
):
    """One part along K of the tile at (row, column); whoever finds all the others done stores the tile."""
    COLUMNS: tl.constexpr = BN // 2 if HALVES else BN
    steps = tl.cdiv(K, BK)
    acc = _contract(
        *(batch - above, row, column, first_step(part, parts, steps), first_step(part + 1, parts, steps)),
        *(a, b, M, N, K, strides),
        *(BM, BN, BK, DESCRIPTORS, B_IS_NK, BATCHED, PRECISION, EXACT, RUN),
    )
    if PAIRS:
        if comes_second(tickets, number):
            wait_for_the_first(tickets, number)
            acc = add_to_sum(sums, number, acc, BM, BN)
            finish(
                *(out, bias, bias_step, batch, row, column, M, N, strides, acc),
                *(BM, BN, HALVES, DESCRIPTORS, BATCHED, HAS_BIAS),
            )
        else:
            leave_sum(sums, number, acc, BM, BN, True)
            has_left_its_sum(tickets, number)
    else:
        leave_sum(sums, number * parts + part, acc, BM, BN, HALVES)
        if arrive(tickets, number, parts):
            for half in tl.static_range(2 if HALVES else 1):
                at = column + half * COLUMNS
                total = add_sums(sums, number * parts, parts, half, BM, BN, COLUMNS)
                if HAS_BIAS:
                    total += to_float32(load_pointers(bias, 0, at, 1, N, 0, bias_step, 1, COLUMNS))
                store(out, batch, row, at, M, N, strides, total, DESCRIPTORS, BATCHED, BM, COLUMNS)
