"""The device side of the persistent Triton matmul.

Arguments that belong together are passed as one tuple. Tuples exist at compile time only, so they cost no instruction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from hostir.kernels.devices import INTERPRETED
from hostir.kernels.flags.done import MISSED, Raised, count, stores_ended
from hostir.kernels.flags.pushed import push_tile, raise_pushed
from hostir.kernels.flags.ready import Awaited, wait_for_rows
from hostir.kernels.flags.signals import end_call
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.tiles import SCALE_BLOCK


class Constants(NamedTuple):
    """The compile-time constants of the matmul kernel.

    Fields:
        BM, BN, BK: rows and columns of a tile, and the step along K.
        HALVES: tiles are stored in two halves.
        DESCRIPTORS: matrices are TMA descriptors, not pointers.
        B_IS_NK: the descriptor of b describes the transpose of b.
        BATCHED: the output has several batches.
        HAS_BIAS: a bias is added.
        SPLIT: the last tiles are split along K. They are neither early tiles nor tiles of `own_rows`.
        PAIRS: the last tiles are split in two parts each.
        READY: rows arrive in blocks while the kernel runs.
        OWN: block `first` needs no flag, because its rows are `own_rows`. The kernel reads these rows in `own_rows`, or
            in `a` if they were copied there before the launch.
        FLAGS: the number of blocks, rounded up to a power of 2.
        EARLY: the tiles of the first blocks, called early tiles, are split in two.
        DONE: 0 without completion flags. Otherwise the largest number of blocks with completion flags that hold rows of
            one tile, rounded up to a power of 2.
        OVERLAPS: the kernel may have started before the previous kernel of the stream has ended.
        PRECISION: `tf32` or `ieee`.
        EXACT: float32 is multiplied by FMAs, not by tensor cores.
        RUN: with EXACT, the number of steps along K after which a partial sum is added to the total.
        SCALES: the layout of the scales of 8-bit operands; empty without scales. `rows`: each row of a and each column
            of b has a scale, or the operand has one scale. `blocks`: there is a scale for each
            SCALE_BLOCK elements of a row of a, and for each block of SCALE_BLOCK^2 elements of b. BK and BN then divide
            SCALE_BLOCK.
        STEPWISE: the sum of each step along K is added to the total in float32. With SCALES `blocks`, the kernel does
            this even without STEPWISE. Else tensor cores add up all steps. The sums in tensor cores have fewer bits
            than float32 if operands have 8 bits.
        PUSHED: the number of pieces that are copied to peers, rounded up to a power of 2; 0 without copies.
        ALIGNED: the targets of the pieces are aligned to 16 bytes.
        ADDS: the product is added to the old values of the output.
        ENDS: 0, or the size of the `CallEnd` that the kernel carries out.
    """

    BM: int
    BN: int
    BK: int
    HALVES: bool
    DESCRIPTORS: bool
    B_IS_NK: bool
    BATCHED: bool
    HAS_BIAS: bool
    SPLIT: bool
    PAIRS: bool
    READY: bool
    OWN: bool
    FLAGS: int
    EARLY: bool
    DONE: int
    OVERLAPS: bool
    PRECISION: str
    EXACT: bool
    RUN: int
    SCALES: str = ""
    STEPWISE: bool = False
    PUSHED: int = 0
    ALIGNED: bool = False
    ADDS: bool = False
    ENDS: int = 0


class Strides(NamedTuple):
    """Strides of the operands in elements; None if the operands are TMA descriptors.

    `b` has a row and a column stride. The other operands have a batch, a row and a column stride.
    """

    own_rows: Any
    a: Any
    b: Any
    out: Any


class Bias(NamedTuple):
    """The bias of a matmul: a pointer, and the stride between two elements."""

    base: Any
    step: Any


class Scales(NamedTuple):
    """The scales of a and b, in float32: pointers and strides.

    Fields:
        a, b: pointers.
        a_row: stride between the scales of two successive rows of a. Rows are counted through all batches.
        a_step: stride between the scales of two successive blocks of a along K.
        b_step: stride between the scales of two successive blocks of b along K.
        b_column: stride between the scales of two successive columns of b, or of two successive blocks of columns.
    """

    a: Any
    b: Any
    a_row: Any
    a_step: Any
    b_step: Any
    b_column: Any


class Workspace(NamedTuple):
    """Memory that the programs of a launch share.

    Fields:
        sums: partial sums of tiles in float32, in two areas. The first area belongs to the split tiles at the end. It
            has the shape `[split, parts, BM, BN]`: each part of a tile stores a sum. With PAIRS, it has the shape
            `[split, BM, BN]`: only the part that ends first stores a sum, and the other part adds this sum to its own.
            The second area belongs to the early tiles. It has the shape `[early tiles, BM, BN]`, because early tiles
            are split in pairs, too. An area is empty if no such tiles are split.
        tickets: `[split + early tiles]` of int32: a counter for each split tile, the split tiles at the end first. All
            counters are 0 before and after the launch.
    """

    sums: Any
    tickets: Any


class LeftOperand(NamedTuple):
    """The left operand of some tiles: `a`, or `own_rows`.

    Fields:
        base: a pointer or a descriptor.
        above: the index of the output's batch that corresponds to the first batch of `base`.
        strides: the batch, row and column strides if `base` is a pointer.
    """

    base: Any
    above: Any
    strides: Any


class Product(NamedTuple):
    """The arguments of the matmul that all tiles share: matrices, sizes, and the order of tiles.

    Fields:
        group: rows of tiles per group, see `tile_position`.
        first, height: the index of the block to begin with, and the number of rows of a block. None without flags. See
            `tile_position`.
        raised: the completion flags, a Raised; unused without DONE.
        pushed: the copies to peers, a Pushed; None without PUSHED.
    """

    b: Any
    out: Any
    bias: Any
    scales: Any
    batches: Any
    M: Any
    N: Any
    K: Any
    strides: Any
    group: Any
    first: Any
    height: Any
    raised: Any
    pushed: Any


# Loads and stores of tiles, by TMA descriptors or by pointers. A place is (batch, first row, first column).


@triton.jit
def load_pointers(base, row, column, height, width, row_stride, column_stride, BR: tl.constexpr, BC: tl.constexpr):
    """Load the tile `[BR, BC]` at (row, column) of a `[height, width]` matrix. Elements outside the matrix are 0."""
    r = (row + tl.arange(0, BR)).to(tl.int64)[:, None]
    c = (column + tl.arange(0, BC)).to(tl.int64)[None, :]
    return tl.load(base + r * row_stride + c * column_stride, mask=(r < height) & (c < width), other=0.0)


@triton.jit
def load_descriptor(desc, batch, row, column, BATCHED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Load the tile `[BR, BC]` at (row, column) of a TMA descriptor's matrix. Elements outside the matrix are 0."""
    if BATCHED:
        return tl.reshape(desc.load([batch, row, column]), (BR, BC))
    else:
        return desc.load([row, column])


@triton.jit
def store(product, place, x, BC: tl.constexpr, C: tl.constexpr):
    """Round the tile `x` of `BC` columns and store it at `place`; with PUSHED, also store it to peers."""
    batch, row, column = place
    out = product.out
    x = from_float32(x, out.dtype if C.DESCRIPTORS else out.dtype.element_ty)
    if C.PUSHED:
        top = batch * product.M
        push_tile(product.pushed, x, top + row, top + product.M, column, product.N, C.ALIGNED)
    if C.DESCRIPTORS:
        if C.BATCHED:
            out.store([batch, row, column], tl.reshape(x, (1, C.BM, BC)))
        else:
            out.store([row, column], x)
    else:
        batch_stride, row_stride, column_stride = product.strides.out
        r = (row + tl.arange(0, C.BM)).to(tl.int64)[:, None]
        c = (column + tl.arange(0, BC)).to(tl.int64)[None, :]
        at = out + batch.to(tl.int64) * batch_stride + r * row_stride + c * column_stride
        tl.store(at, x, mask=(r < product.M) & (c < product.N))


@triton.jit
def _stored(product, place, BC: tl.constexpr, C: tl.constexpr):
    """Load the old values of the tile of `BC` columns at `place` in the output."""
    batch, row, column = place
    if C.DESCRIPTORS:
        return load_descriptor(product.out, batch, row, column, C.BATCHED, C.BM, BC)
    else:
        batch_stride, row_stride, column_stride = product.strides.out
        rows = product.out + batch.to(tl.int64) * batch_stride
        return load_pointers(rows, row, column, product.M, product.N, row_stride, column_stride, C.BM, BC)


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """Return the left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def scales_of_rows(product, place, step, C: tl.constexpr):
    """Return the scales `[BM, 1]` of the rows of a tile, at block `step` along K."""
    batch, row, _ = place
    r = row + tl.arange(0, C.BM)
    at = (batch * product.M + r).to(tl.int64) * product.scales.a_row + step * product.scales.a_step
    return tl.load(product.scales.a + at, mask=r < product.M, other=0.0)[:, None]


@triton.jit
def _load_columns(base, column, width, step, BC: tl.constexpr):
    """Return `BC` elements of a vector from index `column` on, in shape `[1, BC]`. Elements past the end are 0.

    The load has shape `[BC]`, and the other axis is added to the loaded vector. After a load of shape `[1, BC]`, Triton
    would use the layout of that load also for the tile of a batched output. To do so, it would move the complete tile
    through shared memory.
    """
    c = (column + tl.arange(0, BC)).to(tl.int64)
    return tl.load(base + c * step, mask=c < width, other=0.0)[None, :]


@triton.jit
def finish_columns(product, place, x, BC: tl.constexpr, C: tl.constexpr):
    """Finish `BC` columns of a tile: scale the sums `x`, add the bias or the old output, and store the result."""
    _, _, column = place
    if C.SCALES == "rows":
        of_columns = _load_columns(product.scales.b, column, product.N, product.scales.b_column, BC)
        x = x * scales_of_rows(product, place, 0, C) * of_columns
    if C.HAS_BIAS:
        x += to_float32(_load_columns(product.bias.base, column, product.N, product.bias.step, BC))
    if C.ADDS:
        x += to_float32(_stored(product, place, BC, C))
    store(product, place, x, BC, C)


@triton.jit
def finish(product, place, acc, C: tl.constexpr):
    """Finish all columns of a tile by `finish_columns`. With HALVES, finish one half after the other."""
    batch, row, column = place
    if C.HALVES:
        left, right = halves(acc, C.BM, C.BN)
        finish_columns(product, place, left, C.BN // 2, C)
        finish_columns(product, (batch, row, column + C.BN // 2), right, C.BN // 2, C)
    else:
        finish_columns(product, place, acc, C.BN, C)


# Split tiles: several programs share the contraction of one tile, so that a last wave of few tiles fills all SMs.
#
# Unsplit tiles come first; one program computes each. Then come the last tiles. Each is cut along K into equal parts,
# and one program computes each part. This is split-K for the remainder only, as in the hybrid schedules of Stream-K
# (M. Osama, D. Merrill, C. Cecka, M. Garland, J. D. Owens: Stream-K: Work-centric Parallel Decomposition for Dense
# Matrix-Matrix Multiplication on the GPU, PPoPP 2023). But parts begin at the same steps in every tile. So programs at
# the same step find each other's operands in L2. With parts that begin anywhere, split tiles take 1.5 times as long.
#
# If rows arrive while the kernel runs, the tiles of the first blocks (early tiles) may be split in two as well. A
# program may have several of those parts.
#
# With two parts, the program that finishes first stores its partial sum in memory. The other program adds this sum to
# its partial sum; the result has the same bits in either order. With more parts, each program stores its partial sum,
# and the last program adds up all of them in the order of K. So results do not depend on which program is last. A
# program waits only for another program that is already storing its sum.


@triton.jit
def part_of(program, programs, unsplit, split, parts):
    """Return `(tile, part)`: the split tile that a program works on, and the index of its part.

    `tile` is counted from the first split tile. It is `split` if the program has no part. The programs with fewer
    unsplit tiles get parts first. Consecutive programs get the same part of different tiles.
    """
    number = (program - unsplit % programs + programs) % programs
    return tl.where(number < split * parts, number % split, split), number // split


@triton.jit
def first_step(part, parts, steps):
    """Return the first step along K of part `part`, if `steps` steps are split into `parts` parts."""
    return part * steps // parts


@triton.jit
def claim_pair(tickets, tile):
    """Mark one of a tile's two parts as computed; return True if the other part was marked before."""
    return tl.atomic_add(tickets + tile, 1, sem="relaxed", scope="gpu") != 0


@triton.jit
def publish_sum(tickets, tile):
    """Signal that this program's partial sum is in memory.

    Two programs compute a tile. The program that ends its part first calls this function.
    """
    tl.debug_barrier()  # orders the writes of all threads before the release by one thread
    tl.atomic_add(tickets + tile, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_first_sum(tickets, tile):
    """Wait until the partial sum of the other program is in memory; then reset the ticket to 0.

    Two programs compute a tile. The program that ends its part last calls this function.
    """
    ticket = tl.atomic_add(tickets + tile, 0, sem="acquire", scope="gpu")
    while ticket < 3:
        ticket = tl.atomic_add(tickets + tile, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    tl.store(tickets + tile, 0)


@triton.jit
def arrive(tickets, tile, parts):
    """Signal that this program's partial sum of a tile is in memory; return True if all `parts` sums are there now.

    So only the last of the tile's programs gets True. It sees all sums, and it has reset the ticket to 0 for the next
    launch.
    """
    tl.debug_barrier()  # orders the writes of all threads before the atomic by one thread
    last = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(tickets + tile, 0)
    return last


@triton.jit
def store_sum(sums, slot, acc, BM: tl.constexpr, BN: tl.constexpr, HALVES: tl.constexpr):
    """Store the partial sum `acc` of a tile in a slot. With HALVES, store its left half first, then its right half."""
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
    """Return the total of the partial sums in `count` slots, added in order from `slot` on.

    The total has COLUMNS columns: all columns of the tile, or one half of them. `half` is the index of the half.
    """
    at = tl.arange(0, BM)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums += slot.to(tl.int64) * (BM * BN) + half * (BM * COLUMNS)
    total = tl.zeros((BM, COLUMNS), dtype=tl.float32)
    for _ in tl.range(count, num_stages=1):
        total += tl.load(sums + at, cache_modifier=".cg")  # from L2, which has the stores of other programs
        sums += BM * BN
    return total


@triton.jit
def add_to_sum(sums, slot, acc, BM: tl.constexpr, BN: tl.constexpr):
    """Return the tile `acc` plus the partial sum in a slot.

    The two halves of the tile are added one after the other, because registers cannot hold two tiles.
    """
    left, right = halves(acc, BM, BN)
    left = add_sums(sums, slot, 1, 0, BM, BN, BN // 2) + left
    right = add_sums(sums, slot, 1, 1, BM, BN, BN // 2) + right
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, BN))


# The position of a tile, and the computation of a tile or of a part along K.

_INTERPRETED = tl.constexpr(INTERPRETED)
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def tile_position(tile, product, C: tl.constexpr):
    """Return the place of an output tile: its batch, its first row and its first column.

    Consecutive tiles go down through `group` rows of tiles, and then continue one tile to the right. If `first` is not
    None, tile 0 is in block `first`, and block 0 follows the last block.
    """
    tiles_m = tl.cdiv(product.M, C.BM)
    tiles_n = tl.cdiv(product.N, C.BN)
    batch = tile // (tiles_m * tiles_n)
    tile = tile % (tiles_m * tiles_n)
    top = tile // (product.group * tiles_n) * product.group
    wide = min(tiles_m - top, product.group)
    within = tile % (product.group * tiles_n)
    tile_m = top + within % wide
    if product.first is not None:
        first_row = product.first * product.height  # counted through all batches
        batch = (batch + first_row // product.M) % product.batches
        tile_m = (tile_m + first_row % product.M // C.BM) % tiles_m
    return batch, tile_m * C.BM, within // wide * C.BN


@triton.jit
def _blocks_of(product, place, C: tl.constexpr):
    """Return the indices of the first and the last block of `product.raised` that hold rows of a tile."""
    batch, row, _ = place
    top, end = batch * product.M + row, batch * product.M + min(row + C.BM, product.M)
    return top // product.raised.height, (end - 1) // product.raised.height


@triton.jit
def count_tiles(product, place, more, wanted, C: tl.constexpr):
    """If `wanted`, wait until this program's stores are in memory, and then count `more` tiles as stored.

    They are counted in each block that holds rows of the tile at `place`. `count` describes `more`, and raises the
    flags of complete blocks.
    """
    M, height = product.M, product.raised.height
    begin, end = _blocks_of(product, place, C)
    begin = stores_ended(begin, wanted, C.DESCRIPTORS)
    block = begin + tl.arange(0, C.DONE)
    exists = (block <= end) & (wanted != 0)
    # A block's tiles are all tiles from its first row to its last row.
    tiles_m, top, bottom = tl.cdiv(M, C.BM), block * height, block * height + height - 1
    top, bottom = top // M * tiles_m + top % M // C.BM, bottom // M * tiles_m + bottom % M // C.BM
    count(product.raised, block, exists, (bottom - top + 1) * tl.cdiv(product.N, C.BN), more)


@triton.jit
def _dot(x, y, acc, C: tl.constexpr):
    if _INTERPRETED:
        return tl.dot(to_float32(x), to_float32(y), acc, input_precision="ieee")
    else:
        return tl.dot(x, y, acc, input_precision=C.PRECISION)


@triton.jit
def _add_step(x, y, acc, product, place, k, C: tl.constexpr):
    """Return `acc` plus the products of one step along K. The step begins at element `k`.

    Triton's option `max_num_imprecise_acc` cannot be used to sum up each step separately. With it, Triton 3.7 adds the
    sum of a step to the total before it waits for the tensor cores, and PTX leaves the result undefined.
    """
    if C.SCALES == "blocks":
        block = k // _SCALE_BLOCK
        of_b = block * product.scales.b_step + place[2] // _SCALE_BLOCK * product.scales.b_column
        # Loaded before the products and used after them, so that the products hide the latency.
        scales_a, scale_b = scales_of_rows(product, place, block, C), tl.load(product.scales.b + of_b)
        part = _dot(x, y, None, C)
        return acc + part * (scales_a * scale_b)
    elif C.STEPWISE:
        return acc + _dot(x, y, None, C)
    else:
        return _dot(x, y, acc, C)


@triton.jit
def _contract(left, product, place, begin, stop, C: tl.constexpr):
    """Return the sum of the products of a tile over steps `[begin, stop)` along K, in float32."""
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    batch, row, column = place
    batch -= left.above
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(begin, stop):
        k = step * C.BK
        if C.DESCRIPTORS:
            x = load_descriptor(left.base, batch, row, k, C.BATCHED, C.BM, C.BK)
            if C.B_IS_NK:
                y = product.b.load([column, k]).T
            else:
                y = product.b.load([k, column])
        else:
            a_batch, a_row, a_column = left.strides
            b_row, b_column = product.strides.b
            rows = left.base + batch.to(tl.int64) * a_batch
            x = load_pointers(rows, row, k, product.M, product.K, a_row, a_column, C.BM, C.BK)
            y = load_pointers(product.b, k, column, product.K, product.N, b_row, b_column, C.BK, C.BN)
        acc = _add_step(x, y, acc, product, place, k, C)
        if C.EXACT and step % C.RUN == C.RUN - 1:  # a sum of short sums is more accurate than one long sum
            total += acc
            acc = tl.zeros((BM, BN), dtype=tl.float32)
    if C.EXACT:
        acc += total
    return acc


@triton.jit
def unsplit_tiles(left, product, begin, stop, C: tl.constexpr):
    """Compute this program's unsplit tiles: `begin`, `begin` + grid size, and so on, up to `stop` - 1."""
    stored = 0  # tiles that are stored but not yet counted
    # With PUSHED the loop contains another loop, so it is not flattened.
    for tile in tl.range(begin, stop, tl.num_programs(0), flatten=C.DESCRIPTORS and C.PUSHED == 0):
        place = tile_position(tile, product, C)
        finish(product, place, _contract(left, product, place, 0, tl.cdiv(product.K, C.BK), C), C)
        if C.DONE:
            # The program waits for its stores only when its next tile belongs to other blocks.
            stored += 1
            following = tile + tl.num_programs(0)
            begin_here, end_here = _blocks_of(product, place, C)
            begin_next, end_next = _blocks_of(product, tile_position(following, product, C), C)
            leaves = ((following >= stop) | (begin_next != begin_here) | (end_next != end_here)).to(tl.int32)
            count_tiles(product, place, stored, leaves, C)
            stored *= 1 - leaves


@triton.jit
def part_of_tile(left, product, place, number, part, parts, workspace, PAIRS: tl.constexpr, C: tl.constexpr):
    """Compute one part along K of a tile. The program that finishes last stores the tile.

    `number` is the index of the tile's ticket and of its partial sums in the workspace. PAIRS is True if the tile has
    two parts.
    """
    COLUMNS: tl.constexpr = C.BN // 2 if C.HALVES else C.BN
    steps = tl.cdiv(product.K, C.BK)
    sums, tickets = workspace
    acc = _contract(left, product, place, first_step(part, parts, steps), first_step(part + 1, parts, steps), C)
    if PAIRS:
        if claim_pair(tickets, number):
            wait_for_first_sum(tickets, number)
            finish(product, place, add_to_sum(sums, number, acc, C.BM, C.BN), C)
            if C.DONE:
                count_tiles(product, place, 1, 1, C)
        else:
            store_sum(sums, number, acc, C.BM, C.BN, True)
            publish_sum(tickets, number)
    else:
        store_sum(sums, number * parts + part, acc, C.BM, C.BN, C.HALVES)
        if arrive(tickets, number, parts):
            batch, row, column = place
            for half in tl.static_range(2 if C.HALVES else 1):
                at = column + half * COLUMNS
                total = add_sums(sums, number * parts, parts, half, C.BM, C.BN, COLUMNS)
                finish_columns(product, (batch, row, at), total, COLUMNS, C)
            if C.DONE:
                count_tiles(product, place, 1, 1, C)


# The Triton kernel that hostir.kernels.matmul.matmul launches.


@triton.jit
def _wait_for_tile(awaited, polls, product, place, C: tl.constexpr):
    """Wait for the rows of the tile at `place`, and return the result of `wait_for_rows`."""
    batch, row, _ = place
    begin, end = batch * product.M + row, batch * product.M + min(row + C.BM, product.M)
    return wait_for_rows(awaited, polls, begin, end, C.OWN, C.FLAGS, C.DESCRIPTORS)


@triton.jit
def _early_tiles(left, product, unit, end, of_block, workspace, awaited, polls, WAIT: tl.constexpr, C: tl.constexpr):
    """Compute this program's parts of early tiles, block by block. Early tiles are all tiles before tile `end`.

    Each early tile is split in two parts, which are units of work. `unit` is the first unit of this program. A block
    has `of_block` tiles. If WAIT is True, the program waits for the rows of each tile.

    Returns the next unit of this program and the polls that are left. If a program gives up, it still multiplies the
    rows that have not arrived, because another program waits for its sum.
    """
    while unit < 2 * end:
        block = unit // (2 * of_block)
        part = unit % (2 * of_block) // of_block
        tile = block * of_block + unit % of_block
        place = tile_position(tile, product, C)
        if WAIT:
            _, polls = _wait_for_tile(awaited, polls, product, place, C)
            if C.DONE:
                count_tiles(product, place, MISSED, (polls == 0).to(tl.int32), C)
            polls = tl.maximum(polls, 1)
        part_of_tile(left, product, place, tile, part, 2, workspace, True, C)
        unit += tl.num_programs(0)
    return unit, polls


# Integers that vary from call to call. They are not in tuples: Triton would specialize the integers of a tuple for 1
# and for multiples of 16, even if they were listed here.
_VARYING = ["epoch", "first", "blocks", "height", "polls", "raised_epoch", "raised_height", "unsplit", "split", "parts"]
_VARYING += ["early", "group", "batches", "M"]


@triton.jit(do_not_specialize=_VARYING)
def matmul_kernel(
    a,  # a, b, out and own_rows are descriptors with DESCRIPTORS (of b's transpose with B_IS_NK), else pointers
    b,
    out,
    own_rows,  # the rows of block `first`, if they are elsewhere; then each block consists of complete batches
    bias,  # a Bias, or None
    scales,  # Scales, with SCALES only
    first,  # the block to begin with, of READY or else of DONE; None if neither is set
    height,  # rows of a block
    flags,  # flags to polls are set with READY only: fields of ReadyFlags; blocks is the number of flags
    timeouts,
    epoch,
    blocks,
    polls,
    raised_flags,  # raised_flags to raised_height are set with DONE only: all fields of Raised except counts
    raised_epoch,
    raised_height,
    pushed,  # a Pushed, with PUSHED only
    ending,  # an Ending, with ENDS only
    counts,  # the last field of Raised, with DONE only
    workspace,  # a Workspace, with SPLIT or EARLY
    unsplit,  # unsplit to parts are set with SPLIT only. Number of tiles before the split tiles, with early tiles
    split,  # number of split tiles
    parts,  # parts of each split tile
    early,  # number of first blocks in which tiles are split in two, with EARLY; each is complete batches
    group,  # rows of tiles per group, see tile_position
    batches,
    M,
    N,
    K,
    strides,  # Strides
    C: tl.constexpr,  # Constants
):
    """Compute this program's parts of early tiles, then its unsplit tiles, and then its part of a split tile."""
    tile = tl.program_id(0)
    tiles = batches * tl.cdiv(M, C.BM) * tl.cdiv(N, C.BN)
    alone = unsplit if C.SPLIT else tiles
    raised = Raised(raised_flags, raised_epoch, raised_height, counts)
    product = Product(b, out, bias, scales, batches, M, N, K, strides, group, first, height, raised, pushed)
    left = LeftOperand(a, 0, strides.a)
    before = alone  # the number of units of work before the split tiles; programs take them in turn
    if C.READY:
        awaited = Awaited(flags, timeouts, epoch, first, blocks, height)
        own_left = LeftOperand(own_rows, first * (height // M), strides.own_rows)
        # If no tile spans two blocks, tiles are numbered block by block. Then the tiles of a block, and of all next
        # blocks that are ready as well, run as one pipelined loop: Triton cannot pipeline a loop that contains a wait.
        tiles_of_block = tl.where(height % M == 0, tiles // blocks, 0)
        if C.EARLY:
            early_sums, early_tickets = workspace
            if C.SPLIT:
                early_sums += (split * (1 if C.PAIRS else parts)).to(tl.int64) * (C.BM * C.BN)
                early_tickets += split
            of_early = Workspace(early_sums, early_tickets)
            if own_rows is not None:
                tile, polls = _early_tiles(
                    *(own_left, product, tile, tiles_of_block, tiles_of_block, of_early, awaited, polls), False, C
                )
            tile, polls = _early_tiles(
                *(left, product, tile, early * tiles_of_block, tiles_of_block, of_early, awaited, polls), True, C
            )
            tile -= early * tiles_of_block  # from units to tiles
            before += early * tiles_of_block
        elif own_rows is not None:
            unsplit_tiles(own_left, product, tile, tiles_of_block, C)
            if tile < tiles_of_block:
                tile += tl.cdiv(tiles_of_block - tile, tl.num_programs(0)) * tl.num_programs(0)
        while (tile < alone) & (polls > 0):
            place = tile_position(tile, product, C)
            next_missing, polls = _wait_for_tile(awaited, polls, product, place, C)
            stop = tl.where(polls > 0, min(max(next_missing * tiles_of_block, tile + 1), alone), tile)
            unsplit_tiles(left, product, tile, stop, C)
            tile += tl.cdiv(stop - tile, tl.num_programs(0)) * tl.num_programs(0)
        if C.DONE:
            while tile < alone:  # the program has given up
                count_tiles(product, tile_position(tile, product, C), 1 + MISSED, 1, C)
                tile += tl.num_programs(0)
        polls = tl.maximum(polls, 1)  # so that a part of a split tile also reports what is missing
    else:
        unsplit_tiles(left, product, tile, alone, C)
    if C.SPLIT:
        number, part = part_of(tl.program_id(0), tl.num_programs(0), before, split, parts)
        if number < split:
            place = tile_position(unsplit + number, product, C)
            if C.READY:  # as with early tiles, another program relies on this one's sum
                _, polls = _wait_for_tile(awaited, polls, product, place, C)
                if C.DONE:
                    count_tiles(product, place, MISSED, (polls == 0).to(tl.int32), C)
            part_of_tile(left, product, place, number, part, parts, workspace, C.PAIRS, C)
    if C.PUSHED:
        raise_pushed(pushed, C.PUSHED)
    if C.OVERLAPS and not _INTERPRETED:
        gdc_wait()  # so that later work of the stream also comes after the previous kernel
    if C.ENDS:
        end_call(ending, C.ENDS)
