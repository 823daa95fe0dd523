"""Tiles whose contraction several programs share, so that a last wave of few tiles fills all multiprocessors.

Whole tiles first, one program each; then the last tiles, each cut along K into equal parts, a program for each part:
split-K for the remainder only, as the hybrids of Stream-K have it (M. Osama, D. Merrill, C. Cecka, M. Garland,
J. D. Owens: Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU, PPoPP
2023), but in parts that begin at the same steps in every tile: programs at the same step find each other's operands in
L2, and shares that begin anywhere take half as long again.

Whoever has a part of a tile leaves a sum of its own in memory; the last to come adds them all up, in the order of K, so
that the bits of a result do not depend on who came last, and nobody waits for another program.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

MIN_STEPS = 4  # along K, of a part: less does not pay for the sum left in memory
MOST_PARTS = 8  # of a tile: the last to come reads what all have left


@dataclass(frozen=True)
class Schedule:
    """How the programs of one launch divide the tiles of the output among them.

    Fields:
        programs: how many there are.
        whole: tiles, the first ones, that one program each computes.
        parts: of each of the other tiles; a program has one part at most. 0: there are no others.
    """

    programs: int
    whole: int
    parts: int = 0


def schedule(tiles: int, steps: int, sms: int, split: int) -> Schedule:
    """How `sms` programs divide `tiles` of `steps` along K, if the last `split` tiles are to be split."""
    split = min(split, tiles)
    parts = min(sms // split, steps // MIN_STEPS, MOST_PARTS) if split else 0
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
