"""The Triton kernel of hostir.runtime.kernels.matmul."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from hostir.runtime.kernels.launch import INTERPRETED
from hostir.runtime.kernels.numerics import to_float32
from hostir.runtime.kernels.ready import wait_for_rows
from hostir.runtime.kernels.split import (
    add_sums,
    add_to_sum,
    arrive,
    comes_second,
    first_step,
    has_left_its_sum,
    leave_sum,
    part_of,
    wait_for_the_first,
)
from hostir.runtime.kernels.tile_memory import finish, load_descriptor, load_pointers, store

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _tile_position(tile, group, first, height, batches, M, N, BM: tl.constexpr, BN: tl.constexpr):
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
def _whole_tiles(
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
        batch, row, column = _tile_position(tile, group, first, height, batches, M, N, BM, BN)
        acc = _contract(
            *(batch - above, row, column, 0, tl.cdiv(K, BK), a, b, M, N, K, strides),
            *(BM, BN, BK, DESCRIPTORS, B_IS_NK, BATCHED, PRECISION, EXACT, RUN),
        )
        finish(
            *(out, bias, bias_step, batch, row, column, M, N, strides, acc),
            *(BM, BN, HALVES, DESCRIPTORS, BATCHED, HAS_BIAS),
        )


@triton.jit
def _split_tiles(
    whole,
    split,
    parts,
    sums,
    tickets,
    flags,
    stalls,
    epoch,
    first,
    blocks,
    height,
    looks,
    group,
    a,
    b,
    out,
    bias,
    bias_step,
    batches,
    M,
    N,
    K,
    strides,
    PAIRS: tl.constexpr,
    READY: tl.constexpr,
    OWN: tl.constexpr,
    FLAGS: tl.constexpr,
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
    """This program's part of a tile behind the whole ones, if it has any."""
    COLUMNS: tl.constexpr = BN // 2 if HALVES else BN
    number, part = part_of(tl.program_id(0), tl.num_programs(0), whole, split, parts)
    if number < split:
        batch, row, column = _tile_position(whole + number, group, first, height, batches, M, N, BM, BN)
        if READY:
            # Rows that have not come are multiplied all the same, when this program gives up: others count on its sum.
            end = batch * M + min(row + BM, M)
            wait_for_rows(
                *(flags, stalls, epoch, first, blocks, height, looks, batch * M + row, end),
                OWN=OWN,
                FLAGS=FLAGS,
                TMA=DESCRIPTORS,
            )
        steps = tl.cdiv(K, BK)
        acc = _contract(
            *(batch, row, column, first_step(part, parts, steps), first_step(part + 1, parts, steps)),
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


_VARYING = ["epoch", "first", "blocks", "height", "looks", "whole", "split", "parts", "group", "batches", "M"]


@triton.jit(do_not_specialize=_VARYING)
def matmul_kernel(
    a,  # DESCRIPTORS: descriptors of a, b (B_IS_NK: of its transpose), out and own; else pointers
    b,
    out,
    own,  # the rows of block `first`, if they are elsewhere; then each block is so many whole batches
    bias,
    bias_step,
    flags,  # as in ReadyFlags, with READY only, as what follows down to looks
    stalls,
    epoch,
    first,
    blocks,
    height,  # rows of a block
    looks,
    whole,  # as in Schedule, with SPLIT only, as what follows down to tickets
    split,  # tiles behind the whole ones
    parts,
    sums,  # [split, parts, BM, BN] of float32; of PAIRS [split, 1, BM, BN]
    tickets,  # [split] of int32, all 0
    group,  # rows of tiles that are walked together
    batches,
    M,
    N,
    K,
    own_batch,  # strides, used with pointers only
    own_row,
    own_column,
    a_batch,
    a_row,
    a_column,
    b_row,
    b_column,
    out_batch,
    out_row,
    out_column,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_IS_NK: tl.constexpr,
    BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,  # the last tiles are computed by several programs each, none of them of own rows
    PAIRS: tl.constexpr,  # by two
    READY: tl.constexpr,  # rows come while the kernel runs
    OWN: tl.constexpr,  # the rows of block `first` are there
    FLAGS: tl.constexpr,  # the power of 2 that holds all blocks
    BESIDE: tl.constexpr,  # it may have started before the kernel before it has ended
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,  # float32 on plain FMAs
    RUN: tl.constexpr,  # steps of BK that EXACT sums up at a time
):
    """Whole tiles first, one program each; then, with SPLIT, a part of one of the others."""
    tile = tl.program_id(0)
    tiles = batches * tl.cdiv(M, BM) * tl.cdiv(N, BN)
    alone = whole if SPLIT else tiles
    strides = (a_batch, a_row, a_column, b_row, b_column, out_batch, out_row, out_column)
    of_own = (own_batch, own_row, own_column, b_row, b_column, out_batch, out_row, out_column)
    if READY:
        # Where no tile spans two blocks, tiles are numbered block by block. Then those of a block, and of the blocks
        # behind it that have come as well, are one pipeline: a wait in its midst would keep Triton from building it.
        tiles_of_block = tl.where(height % M == 0, tiles // blocks, 0)
        if own is not None:
            _whole_tiles(
                *(tile, tiles_of_block, group, first, height, own, first * (height // M), b, out, bias, bias_step),
                *(batches, M, N, K, of_own),
                *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
            if tile < tiles_of_block:
                tile += tl.cdiv(tiles_of_block - tile, tl.num_programs(0)) * tl.num_programs(0)
        while (tile < alone) & (looks > 0):
            batch, row, _ = _tile_position(tile, group, first, height, batches, M, N, BM, BN)
            come, looks = wait_for_rows(
                *(flags, stalls, epoch, first, blocks, height, looks),
                *(batch * M + row, batch * M + min(row + BM, M)),
                OWN=OWN,
                FLAGS=FLAGS,
                TMA=DESCRIPTORS,
            )
            stop = tl.where(looks > 0, min(max(come * tiles_of_block, tile + 1), alone), tile)
            _whole_tiles(
                *(tile, stop, group, first, height, a, 0, b, out, bias, bias_step, batches, M, N, K, strides),
                *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
            tile += tl.cdiv(stop - tile, tl.num_programs(0)) * tl.num_programs(0)
        looks = tl.maximum(looks, 1)  # so that a part of a tile, too, says what has not come
    else:
        _whole_tiles(
            *(tile, alone, group, None, None, a, 0, b, out, bias, bias_step, batches, M, N, K, strides),
            *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
        )
    if SPLIT:
        _split_tiles(
            *(whole, split, parts, sums, tickets, flags, stalls, epoch, first, blocks, height, looks, group),
            *(a, b, out, bias, bias_step, batches, M, N, K, strides, PAIRS, READY, OWN, FLAGS),
            *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
        )
    if BESIDE and not _INTERPRETED:
        gdc_wait()  # what follows on the stream comes after that kernel too
