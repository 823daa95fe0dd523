"""Tiles whose contraction several programs share, so that the last wave fills all multiprocessors.

Stream-K (M. Osama, D. Merrill, C. Cecka, M. Garland, J. D. Owens: Stream-K: Work-centric Parallel Decomposition for
Dense Matrix-Matrix Multiplication on the GPU, PPoPP 2023), as a hybrid: whole tiles first, one program each, then the
steps along K of the tiles that remain, in equal shares. Whoever shares a tile leaves a sum of its own in memory; the
last to come adds them all up, in the order of K, so that the bits of a result do not depend on who came last, and
nobody waits for another program.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

MIN_STEPS = 4  # along K, that a program shares a tile for: less does not pay for the sum left in memory


@dataclass(frozen=True)
class Schedule:
    """How the programs of one launch divide the tiles of the output among them.

    Fields:
        programs: how many there are.
        whole: tiles, the first ones, that one program each computes.
        shares: into how many the steps of the other tiles are divided. 0: there are none.
    """

    programs: int
    whole: int
    shares: int = 0


def schedule(tiles: int, steps: int, sms: int, waves: int) -> Schedule:
    """How `sms` programs divide `tiles` of `steps` along K, if the tiles of the last `waves` waves are to be shared."""
    shared = tiles - max(0, (tiles - 1) // sms - (waves - 1)) * sms
    if waves == 0 or steps < 2 * MIN_STEPS or shared % sms == 0:
        return Schedule(min(sms, tiles), tiles)
    shares = min(sms, shared * steps // MIN_STEPS)
    # Shares that end where tiles end leave one sum each, others two.
    even = shares // shared * shared
    if even * 8 >= shares * 7:
        shares = even
    return Schedule(max(shares, min(sms, tiles - shared)), tiles - shared, shares)


@triton.jit
def first_step(share, shares, steps):
    """The first of `steps` that belongs to number `share` of `shares`; `steps` is not less than `shares`."""
    return share * (steps // shares) + min(share, steps % shares)


@triton.jit
def share_of(step, shares, steps):
    """The share that `step` belongs to."""
    size = steps // shares
    larger = steps % shares  # as many shares have one step more, the first ones
    return max(step // (size + 1), (step - larger) // size)


@triton.jit
def arrive(tickets, tile, holders):
    """Say that this program's sum of shared `tile` is in memory, one of `holders` of the tile.

    Returns whether all are, so that this program, the last, sees them. The ticket is 0 afterwards: the next launch
    finds it so.
    """
    tl.debug_barrier()  # what other threads wrote comes before the ticket of the one thread that says so
    last = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") == holders - 1
    if last:
        tl.store(tickets + tile, 0)
    return last
