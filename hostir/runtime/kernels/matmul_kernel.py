"""The Triton kernel of hostir.runtime.kernels.matmul."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from hostir.runtime.kernels.contract import part_of_tile, tile_position, whole_tiles
from hostir.runtime.kernels.launch import INTERPRETED
from hostir.runtime.kernels.ready import wait_for_rows
from hostir.runtime.kernels.split import part_of

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _early_tiles(
    unit,  # the first of this program; each tile is two
    end,
    of_block,  # tiles of a block
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
    above,
    b,
    out,
    bias,
    bias_step,
    batches,
    M,
    N,
    K,
    strides,
    WAIT: tl.constexpr,
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
    """This program's share of the tiles to before `end`, two parts of each, block by block.

    Its next unit, and the looks left. Rows that have not come are multiplied all the same, when a program gives up:
    another counts on its sum.
    """
    while unit < 2 * end:
        block = unit // (2 * of_block)
        part = unit % (2 * of_block) // of_block
        tile = block * of_block + unit % of_block
        batch, row, column = tile_position(tile, group, first, height, batches, M, N, BM, BN)
        if WAIT:
            _, looks = wait_for_rows(
                *(flags, stalls, epoch, first, blocks, height, looks),
                *(batch * M + row, batch * M + min(row + BM, M)),
                OWN=OWN,
                FLAGS=FLAGS,
                TMA=DESCRIPTORS,
            )
            looks = tl.maximum(looks, 1)
        part_of_tile(
            *(tile, part, 2, sums, tickets, batch, row, column, a, above, b, out, bias, bias_step, M, N, K, strides),
            *(True, BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
        )
        unit += tl.num_programs(0)
    return unit, looks


_VARYING = ["epoch", "first", "blocks", "height", "looks", "whole", "split", "parts", "early", "group", "batches", "M"]


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
    whole,  # tiles that are early or one program's work each, with SPLIT only, as split and parts
    split,  # tiles behind them
    parts,
    sums,  # of float32, with SPLIT or EARLY: [split, parts, BM, BN], of PAIRS [split, BM, BN]; then [early, BM, BN]
    tickets,  # [split + early tiles] of int32, all 0
    early,  # blocks, the first ones, whose tiles are two programs' work each, with EARLY; each is whole batches
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
    SPLIT: tl.constexpr,  # the last tiles are computed by several programs each, none of own rows or early
    PAIRS: tl.constexpr,  # by two
    READY: tl.constexpr,  # rows come while the kernel runs
    OWN: tl.constexpr,  # the rows of block `first` are there
    FLAGS: tl.constexpr,  # the power of 2 that holds all blocks
    EARLY: tl.constexpr,
    BESIDE: tl.constexpr,  # it may have started before the kernel before it has ended
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,  # float32 on plain FMAs
    RUN: tl.constexpr,  # steps of BK that EXACT sums up at a time
):
    """Parts of early tiles, if there are any; whole tiles, one program each; with SPLIT, a part of one behind them."""
    tile = tl.program_id(0)
    tiles = batches * tl.cdiv(M, BM) * tl.cdiv(N, BN)
    alone = whole if SPLIT else tiles
    strides = (a_batch, a_row, a_column, b_row, b_column, out_batch, out_row, out_column)
    of_own = (own_batch, own_row, own_column, b_row, b_column, out_batch, out_row, out_column)
    before = alone  # how often a program has been given something before the tiles that are split
    if READY:
        # Where no tile spans two blocks, tiles are numbered block by block. Then those of a block, and of the blocks
        # behind it that have come as well, are one pipeline: a wait in its midst would keep Triton from building it.
        tiles_of_block = tl.where(height % M == 0, tiles // blocks, 0)
        if EARLY:
            early_sums, early_tickets = sums, tickets
            if SPLIT:
                early_sums += (split * (1 if PAIRS else parts)).to(tl.int64) * (BM * BN)
                early_tickets += split
            if own is not None:
                tile, looks = _early_tiles(
                    *(tile, tiles_of_block, tiles_of_block, early_sums, early_tickets),
                    *(flags, stalls, epoch, first, blocks, height, looks, group, own, first * (height // M)),
                    *(b, out, bias, bias_step, batches, M, N, K, of_own, False, OWN, FLAGS),
                    *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
                )
            tile, looks = _early_tiles(
                *(tile, early * tiles_of_block, tiles_of_block, early_sums, early_tickets),
                *(flags, stalls, epoch, first, blocks, height, looks, group, a, 0),
                *(b, out, bias, bias_step, batches, M, N, K, strides, True, OWN, FLAGS),
                *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
            tile -= early * tiles_of_block  # from two of each to one
            before += early * tiles_of_block
        elif own is not None:
            whole_tiles(
                *(tile, tiles_of_block, group, first, height, own, first * (height // M), b, out, bias, bias_step),
                *(batches, M, N, K, of_own),
                *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
            if tile < tiles_of_block:
                tile += tl.cdiv(tiles_of_block - tile, tl.num_programs(0)) * tl.num_programs(0)
        while (tile < alone) & (looks > 0):
            batch, row, _ = tile_position(tile, group, first, height, batches, M, N, BM, BN)
            come, looks = wait_for_rows(
                *(flags, stalls, epoch, first, blocks, height, looks),
                *(batch * M + row, batch * M + min(row + BM, M)),
                OWN=OWN,
                FLAGS=FLAGS,
                TMA=DESCRIPTORS,
            )
            stop = tl.where(looks > 0, min(max(come * tiles_of_block, tile + 1), alone), tile)
            whole_tiles(
                *(tile, stop, group, first, height, a, 0, b, out, bias, bias_step, batches, M, N, K, strides),
                *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
            tile += tl.cdiv(stop - tile, tl.num_programs(0)) * tl.num_programs(0)
        looks = tl.maximum(looks, 1)  # so that a part of a tile, too, says what has not come
    else:
        whole_tiles(
            *(tile, alone, group, None, None, a, 0, b, out, bias, bias_step, batches, M, N, K, strides),
            *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
        )
    if SPLIT:
        number, part = part_of(tl.program_id(0), tl.num_programs(0), before, split, parts)
        if number < split:
            batch, row, column = tile_position(whole + number, group, first, height, batches, M, N, BM, BN)
            if READY:
                # As with early tiles, another program counts on this one's sum.
                wait_for_rows(
                    *(flags, stalls, epoch, first, blocks, height, looks),
                    *(batch * M + row, batch * M + min(row + BM, M)),
                    OWN=OWN,
                    FLAGS=FLAGS,
                    TMA=DESCRIPTORS,
                )
            part_of_tile(
                *(number, part, parts, sums, tickets, batch, row, column, a, 0, b, out, bias, bias_step),
                *(M, N, K, strides, PAIRS),
                *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
    if BESIDE and not _INTERPRETED:
        gdc_wait()  # what follows on the stream comes after that kernel too
