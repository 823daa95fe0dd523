"""A persistent Triton matmul: the device side."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from hostir.runtime.kernels.flags import wait_for_rows
from hostir.runtime.kernels.layout import INTERPRETED

# Conversions ----------------------------------------------------------------------------------------------------------
# Conversions between float32 and the types of operands, right on the GPU and in Triton's interpreter.
#
# The interpreter holds bfloat16 as raw 16-bit integers: arithmetic on it is meaningless, widening loses subnormals and
# narrowing truncates where the GPU rounds to nearest even. There the conversions are done on the bits.

_ON_BITS = tl.constexpr(INTERPRETED)


@triton.jit
def to_float32(x):
    """`x` (any float type) as float32, exactly."""
    if _ON_BITS and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def from_float32(x, dtype: tl.constexpr):
    """The float32 tensor `x` as `dtype`, rounded to nearest even."""
    if _ON_BITS and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # Adding just under half of the dropped part, and one more when the kept part is odd, rounds to nearest even;
        # a NaN could overflow into an infinity, so it is set apart.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


# Tiles in memory ------------------------------------------------------------------------------------------------------
# How the matmul kernel reads tiles from memory and writes them, by TMA descriptors or by pointers.


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


# Tiles that several programs share ------------------------------------------------------------------------------------
# Tiles whose contraction several programs share, so that a last wave of few tiles fills all multiprocessors.
#
# Whole tiles first, one program each; then the last tiles, each cut along K into equal parts, a program for each part:
# split-K for the remainder only, as the hybrids of Stream-K have it (M. Osama, D. Merrill, C. Cecka, M. Garland, J. D.
# Owens: Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU, PPoPP 2023),
# but in parts that begin at the same steps in every tile: programs at the same step find each other's operands in L2,
# and shares that begin anywhere take half as long again.
#
# Where rows come while the kernel runs, the tiles of the first blocks of them may be split in two as well; a program
# may have several of those parts.
#
# Of two parts, whoever is done first leaves its sum in memory, and the other adds it to its own: either order gives the
# same bits. Of more, each leaves its sum, and the last to come adds them all up in the order of K. So the bits of a
# result never depend on who came last, and nobody waits for a program that is not writing its sum already.

MIN_STEPS = 4  # along K, of a part: less does not pay for the sum left in memory
MOST_PARTS = 8  # of a tile: the last to come reads what all have left


@dataclass(frozen=True)
class Schedule:
    """How the programs of one launch divide the tiles of the output among them.

    Fields:
        programs: how many there are.
        whole: tiles, the first ones, that one program each computes. Of early tiles each part counts for one.
        parts: of each of the other tiles; a program has one part at most. 0: there are no others.
    """

    programs: int
    whole: int
    parts: int = 0


def schedule(tiles: int, steps: int, sms: int, split: int, most: int = MOST_PARTS) -> Schedule:
    """How `sms` programs divide `tiles` of `steps` along K, if the last `split` are to be split in `most` parts each.

    Into fewer where there are not as many programs, or parts would be short; not at all where there were not even two.
    """
    split = min(split, tiles)
    parts = min(sms // split, steps // MIN_STEPS, most) if split else 0
    if parts < 2:
        return Schedule(min(sms, tiles), tiles)
    return Schedule(min(sms, max(tiles - split, split * parts)), tiles - split, parts)


@triton.jit
def part_of(program, programs, whole, split, parts):
    """`(tile, part)` of a program, the tile counted from the first that is split; no tile below `split`: it has none.

    The programs with fewer whole tiles come first. Equal parts of all tiles lie side by side.
    """
    number = (program - whole % programs + programs) % programs
    return tl.where(number < split * parts, number % split, split), number // split


@triton.jit
def first_step(part, parts, steps):
    """The first step along K of a part."""
    return part * steps // parts


@triton.jit
def comes_second(tickets, tile):
    """Say that this program has its sum of one of the two parts of a tile. Whether the other program said so before."""
    return tl.atomic_add(tickets + tile, 1, sem="relaxed", scope="gpu") != 0


@triton.jit
def has_left_its_sum(tickets, tile):
    """Say, first of two, that the sum is in memory."""
    tl.debug_barrier()  # what other threads wrote comes before the word of the one thread that says so
    tl.atomic_add(tickets + tile, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_the_first(tickets, tile):
    """Wait, second of two, until the sum of the first is in memory. The ticket is 0 afterwards."""
    said = tl.atomic_add(tickets + tile, 0, sem="acquire", scope="gpu")
    while said < 3:
        said = tl.atomic_add(tickets + tile, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    tl.store(tickets + tile, 0)


@triton.jit
def arrive(tickets, tile, parts):
    """Say that this program's sum of a tile that is split is in memory, one of `parts`.

    Returns whether all are, so that this program, the last, sees them. The ticket is 0 afterwards: the next launch
    finds it so.
    """
    tl.debug_barrier()  # what other threads wrote comes before the ticket of the one thread that says so
    last = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(tickets + tile, 0)
    return last


@triton.jit
def leave_sum(sums, slot, acc, BM: tl.constexpr, BN: tl.constexpr, HALVES: tl.constexpr):
    """Write a sum of part of a tile to memory, in the halves in which it is read again."""
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
    """The sums of one half of a tile that lie in `count` slots from `slot` on, added up in this order."""
    at = tl.arange(0, BM)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums += slot.to(tl.int64) * (BM * BN) + half * (BM * COLUMNS)
    total = tl.zeros((BM, COLUMNS), dtype=tl.float32)
    for _ in tl.range(count, num_stages=1):
        total += tl.load(sums + at, cache_modifier=".cg")  # from L2, where other programs' stores are
        sums += BM * BN
    return total


@triton.jit
def add_to_sum(sums, slot, acc, BM: tl.constexpr, BN: tl.constexpr):
    """The tile `acc` added to what was left of it in a slot, half by half: registers do not hold two tiles."""
    left, right = halves(acc, BM, BN)
    left = add_sums(sums, slot, 1, 0, BM, BN, BN // 2) + left
    right = add_sums(sums, slot, 1, 1, BM, BN, BN // 2) + right
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, BN))


# One tile -------------------------------------------------------------------------------------------------------------
# Tiles of a matmul: where each lies, and what one program does for it, whole or a part along K.

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


# The kernel -----------------------------------------------------------------------------------------------------------
# The Triton kernel of hostir.runtime.kernels.matmul.


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
