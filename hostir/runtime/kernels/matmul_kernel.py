"""A persistent Triton matmul: the device side."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from hostir.runtime.kernels.flags import wait_for_rows
from hostir.runtime.kernels.layout import INTERPRETED

# Conversions ----------------------------------------------------------------------------------------------------------
# Conversions between float32 and the operands' types that are correct on the GPU and in Triton's interpreter.
#
# The interpreter holds bfloat16 as raw 16-bit integers: arithmetic on it is meaningless, widening loses subnormals and
# narrowing truncates where the GPU rounds to nearest even. There the conversions are done on the bits.

_ON_BITS = tl.constexpr(INTERPRETED)


@triton.jit
def to_float32(x):
    """Return `x` (any float type) as float32, exactly."""
    if _ON_BITS and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def from_float32(x, dtype: tl.constexpr):
    """Return the float32 tensor `x` as `dtype`, rounded to nearest even."""
    if _ON_BITS and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # Adding just under half of the dropped part, and one more when the kept part is odd, rounds to nearest even;
        # a NaN could overflow into an infinity, so it is handled separately.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


# Tiles in memory ------------------------------------------------------------------------------------------------------
# Loads and stores of tiles, by TMA descriptors or by pointers.


@triton.jit
def load_pointers(base, row, column, height, width, row_stride, column_stride, BR: tl.constexpr, BC: tl.constexpr):
    """Load the tile `[BR, BC]` at (row, column) of a `[height, width]` matrix, zero outside of it."""
    r = (row + tl.arange(0, BR)).to(tl.int64)[:, None]
    c = (column + tl.arange(0, BC)).to(tl.int64)[None, :]
    return tl.load(base + r * row_stride + c * column_stride, mask=(r < height) & (c < width), other=0.0)


@triton.jit
def load_descriptor(desc, batch, row, column, BATCHED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Load the tile `[BR, BC]` at (row, column) of a TMA descriptor's matrix, zero outside of it."""
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
    """Return the left and the right half of a tile."""
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


# Tiles that several programs share ------------------------------------------------------------------------------------
# Split tiles: several programs share the contraction of one tile, so that a last wave of few tiles fills all SMs.
#
# Whole tiles come first, one program each; then the last tiles, each cut along K into equal parts, a program per part:
# split-K for the remainder only, as in the hybrid schedules of Stream-K (M. Osama, D. Merrill, C. Cecka, M. Garland,
# J. D. Owens: Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU, PPoPP
# 2023), but in parts that begin at the same steps in every tile: programs at the same step find each other's operands
# in L2; with parts that begin anywhere the split tiles take 1.5 times as long.
#
# If rows arrive while the kernel runs, the tiles of the first blocks (early tiles) may be split in two as well; a
# program may have several of those parts.
#
# Of two parts, the program that finishes first stores its sum in memory, and the other adds it to its own: either order
# gives the same bits. Of more parts, each program stores its sum, and the last one adds them all up in the order of K.
# So results are bitwise the same whichever program is last, and no program waits for one that is not storing its sum
# already.


@triton.jit
def part_of(program, programs, whole, split, parts):
    """Return `(tile, part)` of a program; the tile is counted from the first split one, and `split` if it has none.

    The programs with fewer whole tiles get parts first. Consecutive programs get the same part of different tiles.
    """
    number = (program - whole % programs + programs) % programs
    return tl.where(number < split * parts, number % split, split), number // split


@triton.jit
def first_step(part, parts, steps):
    """Return the first step along K of a part."""
    return part * steps // parts


@triton.jit
def claim_pair(tickets, tile):
    """Mark one of a tile's two parts as computed; return whether the other part was marked before."""
    return tl.atomic_add(tickets + tile, 1, sem="relaxed", scope="gpu") != 0


@triton.jit
def publish_sum(tickets, tile):
    """Signal, as the first of two programs, that the sum is in memory."""
    tl.debug_barrier()  # orders the writes of all threads before the release of one
    tl.atomic_add(tickets + tile, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_first_sum(tickets, tile):
    """Wait, as the second of two programs, until the sum of the first is in memory; reset the ticket to 0."""
    ticket = tl.atomic_add(tickets + tile, 0, sem="acquire", scope="gpu")
    while ticket < 3:
        ticket = tl.atomic_add(tickets + tile, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    tl.store(tickets + tile, 0)


@triton.jit
def arrive(tickets, tile, parts):
    """Signal that this program's sum, one of `parts` of a split tile, is in memory; return whether it is the last.

    The last program sees all sums. It resets the ticket to 0, for the next launch.
    """
    tl.debug_barrier()  # orders the writes of all threads before the atomic of one
    last = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(tickets + tile, 0)
    return last


@triton.jit
def store_sum(sums, slot, acc, BM: tl.constexpr, BN: tl.constexpr, HALVES: tl.constexpr):
    """Store the sum of a part of a tile in a slot, in the halves in which it is read again."""
    COLUMNS: tl.constexpr = BN // 2 if HALVES else BN
    at = tl.arange(0, BM)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums += slot.to(tl.int64) * (BM * BN)
    if HALVES:
        left, right = halves(acc, BM, BN)
        tl.store(sums + at, left)
        tl.store(sums + BM * COLUMNS + at, right)
    else:
        tl.store(sums + at, acc)


@triton.jit
def add_sums(sums, slot, count, half, BM: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up one half of the sums in `count` slots from `slot` on, in this order."""
    at = tl.arange(0, BM)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums += slot.to(tl.int64) * (BM * BN) + half * (BM * COLUMNS)
    total = tl.zeros((BM, COLUMNS), dtype=tl.float32)
    for _ in tl.range(count, num_stages=1):
        total += tl.load(sums + at, cache_modifier=".cg")  # from L2: other programs' stores are there, not in L1
        sums += BM * BN
    return total


@triton.jit
def add_to_sum(sums, slot, acc, BM: tl.constexpr, BN: tl.constexpr):
    """Add the sum stored in a slot to the tile `acc`, half by half: registers do not hold two tiles."""
    left, right = halves(acc, BM, BN)
    left = add_sums(sums, slot, 1, 0, BM, BN, BN // 2) + left
    right = add_sums(sums, slot, 1, 1, BM, BN, BN // 2) + right
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, BN))


# One tile -------------------------------------------------------------------------------------------------------------
# The position of a tile, and the computation of a whole tile or of a part along K.

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def tile_position(tile, group, first, height, batches, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Return (batch, first row, first column) of an output tile: down `group` rows of tiles, then one tile right.

    If `first` is not None, tile 0 is in block `first` of `height` rows, and the last blocks wrap around.
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
    """Sum up, in float32, the products of steps `begin` to before `stop` along K for the tile at (row, column)."""
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
        if EXACT and step % RUN == RUN - 1:  # a sum of short sums is more accurate than one long sum
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
    above,  # batches of the output above the first of `a`
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
    """Compute this program's tiles from `begin`, which is its first, to before `stop`."""
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
    number,  # of the tile among the split ones: the index of its ticket and its sums
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
    """Compute one part along K of the tile at (row, column); the program that finishes last stores the tile."""
    COLUMNS: tl.constexpr = BN // 2 if HALVES else BN
    steps = tl.cdiv(K, BK)
    acc = _contract(
        *(batch - above, row, column, first_step(part, parts, steps), first_step(part + 1, parts, steps)),
        *(a, b, M, N, K, strides),
        *(BM, BN, BK, DESCRIPTORS, B_IS_NK, BATCHED, PRECISION, EXACT, RUN),
    )
    if PAIRS:
        if claim_pair(tickets, number):
            wait_for_first_sum(tickets, number)
            acc = add_to_sum(sums, number, acc, BM, BN)
            finish(
                *(out, bias, bias_step, batch, row, column, M, N, strides, acc),
                *(BM, BN, HALVES, DESCRIPTORS, BATCHED, HAS_BIAS),
            )
        else:
            store_sum(sums, number, acc, BM, BN, True)
            publish_sum(tickets, number)
    else:
        store_sum(sums, number * parts + part, acc, BM, BN, HALVES)
        if arrive(tickets, number, parts):
            for half in tl.static_range(2 if HALVES else 1):
                at = column + half * COLUMNS
                total = add_sums(sums, number * parts, parts, half, BM, BN, COLUMNS)
                if HAS_BIAS:
                    total += to_float32(load_pointers(bias, 0, at, 1, N, 0, bias_step, 1, COLUMNS))
                store(out, batch, row, at, M, N, strides, total, DESCRIPTORS, BATCHED, BM, COLUMNS)


# The kernel -----------------------------------------------------------------------------------------------------------
# The Triton kernel that hostir.runtime.kernels.matmul launches.


@triton.jit
def _early_tiles(
    unit,  # the first of this program; a tile is two units
    end,
    of_block,  # tiles per block
    sums,
    tickets,
    flags,
    timeouts,
    epoch,
    first,
    blocks,
    height,
    polls,
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
    """Compute this program's parts of the tiles to before `end`, two parts of each tile, block by block.

    Returns its next unit and the polls left. A program that gives up multiplies rows that have not arrived all the
    same: another program relies on its sum.
    """
    while unit < 2 * end:
        block = unit // (2 * of_block)
        part = unit % (2 * of_block) // of_block
        tile = block * of_block + unit % of_block
        batch, row, column = tile_position(tile, group, first, height, batches, M, N, BM, BN)
        if WAIT:
            _, polls = wait_for_rows(
                *(flags, timeouts, epoch, first, blocks, height, polls),
                *(batch * M + row, batch * M + min(row + BM, M)),
                OWN=OWN,
                FLAGS=FLAGS,
                TMA=DESCRIPTORS,
            )
            polls = tl.maximum(polls, 1)
        part_of_tile(
            *(tile, part, 2, sums, tickets, batch, row, column, a, above, b, out, bias, bias_step, M, N, K, strides),
            *(True, BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
        )
        unit += tl.num_programs(0)
    return unit, polls


_VARYING = ["epoch", "first", "blocks", "height", "polls", "whole", "split", "parts", "early", "group", "batches", "M"]


@triton.jit(do_not_specialize=_VARYING)
def matmul_kernel(
    a,  # DESCRIPTORS: descriptors of a, b (B_IS_NK: of its transpose), out and own; else pointers
    b,
    out,
    own,  # the rows of block `first`, if they are elsewhere; then each block consists of whole batches
    bias,
    bias_step,
    flags,  # from here to polls: as in ReadyFlags, with READY only
    timeouts,
    epoch,
    first,
    blocks,
    height,  # rows of a block
    polls,
    whole,  # number of tiles that are not split, or early; whole, split and parts with SPLIT only
    split,  # number of tiles behind them, which are split
    parts,
    sums,  # of float32, with SPLIT or EARLY: [split, parts, BM, BN], of PAIRS [split, BM, BN]; then [early, BM, BN]
    tickets,  # [split + early tiles] of int32, all 0
    early,  # number of blocks, the first ones, whose tiles are split in two, with EARLY; each is whole batches
    group,  # rows of tiles per group, see tile_position
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
    SPLIT: tl.constexpr,  # the last tiles are split; none of them is early or of own rows
    PAIRS: tl.constexpr,  # in two parts
    READY: tl.constexpr,  # rows arrive while the kernel runs
    OWN: tl.constexpr,  # the rows of block `first` are ready
    FLAGS: tl.constexpr,  # the number of blocks, rounded up to a power of 2
    EARLY: tl.constexpr,
    BESIDE: tl.constexpr,  # it may have started before the previous kernel of the stream has ended
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,  # float32 on plain FMAs
    RUN: tl.constexpr,  # steps of BK that EXACT sums up at a time
):
    """Compute this program's parts of early tiles, then its whole tiles, then with SPLIT its part of a split tile."""
    tile = tl.program_id(0)
    tiles = batches * tl.cdiv(M, BM) * tl.cdiv(N, BN)
    alone = whole if SPLIT else tiles
    strides = (a_batch, a_row, a_column, b_row, b_column, out_batch, out_row, out_column)
    of_own = (own_batch, own_row, own_column, b_row, b_column, out_batch, out_row, out_column)
    before = alone  # pieces of work handed out, program by program, before the split tiles
    if READY:
        # If no tile spans two blocks, tiles are numbered block by block. Then the tiles of a block, and of the blocks
        # behind it that are ready as well, run as one pipelined loop: Triton cannot pipeline a loop with a wait in it.
        tiles_of_block = tl.where(height % M == 0, tiles // blocks, 0)
        if EARLY:
            early_sums, early_tickets = sums, tickets
            if SPLIT:
                early_sums += (split * (1 if PAIRS else parts)).to(tl.int64) * (BM * BN)
                early_tickets += split
            if own is not None:
                tile, polls = _early_tiles(
                    *(tile, tiles_of_block, tiles_of_block, early_sums, early_tickets),
                    *(flags, timeouts, epoch, first, blocks, height, polls, group, own, first * (height // M)),
                    *(b, out, bias, bias_step, batches, M, N, K, of_own, False, OWN, FLAGS),
                    *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
                )
            tile, polls = _early_tiles(
                *(tile, early * tiles_of_block, tiles_of_block, early_sums, early_tickets),
                *(flags, timeouts, epoch, first, blocks, height, polls, group, a, 0),
                *(b, out, bias, bias_step, batches, M, N, K, strides, True, OWN, FLAGS),
                *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
            tile -= early * tiles_of_block  # from units to tiles
            before += early * tiles_of_block
        elif own is not None:
            whole_tiles(
                *(tile, tiles_of_block, group, first, height, own, first * (height // M), b, out, bias, bias_step),
                *(batches, M, N, K, of_own),
                *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
            if tile < tiles_of_block:
                tile += tl.cdiv(tiles_of_block - tile, tl.num_programs(0)) * tl.num_programs(0)
        while (tile < alone) & (polls > 0):
            batch, row, _ = tile_position(tile, group, first, height, batches, M, N, BM, BN)
            next_missing, polls = wait_for_rows(
                *(flags, timeouts, epoch, first, blocks, height, polls),
                *(batch * M + row, batch * M + min(row + BM, M)),
                OWN=OWN,
                FLAGS=FLAGS,
                TMA=DESCRIPTORS,
            )
            stop = tl.where(polls > 0, min(max(next_missing * tiles_of_block, tile + 1), alone), tile)
            whole_tiles(
                *(tile, stop, group, first, height, a, 0, b, out, bias, bias_step, batches, M, N, K, strides),
                *(BM, BN, BK, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
            tile += tl.cdiv(stop - tile, tl.num_programs(0)) * tl.num_programs(0)
        polls = tl.maximum(polls, 1)  # so that a part of a split tile also reports what is missing
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
                # As with early tiles, another program relies on this one's sum.
                wait_for_rows(
                    *(flags, timeouts, epoch, first, blocks, height, polls),
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
        gdc_wait()  # so that work behind this kernel is also behind the previous one
