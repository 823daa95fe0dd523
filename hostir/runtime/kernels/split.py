"""Tiles whose contraction several programs share, so that a last wave of few tiles fills all multiprocessors.

Whole tiles first, one program each; then the last tiles, each cut along K into equal parts, a program for each part:
split-K for the remainder only, as the hybrids of Stream-K have it (M. Osama, D. Merrill, C. Cecka, M. Garland,
J. D. Owens: Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU, PPoPP
2023), but in parts that begin at the same steps in every tile: programs at the same step find each other's operands in
L2, and shares that begin anywhere take half as long again.

Where rows come while the kernel runs, the tiles of the first blocks of them may be split in two as well; a program may
have several of those parts.

Of two parts, whoever is done first leaves its sum in memory, and the other adds it to its own: either order gives the
same bits. Of more, each leaves its sum, and the last to come adds them all up in the order of K. So the bits of a
result never depend on who came last, and nobody waits for a program that is not writing its sum already.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from hostir.runtime.kernels.tile_memory import halves

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
