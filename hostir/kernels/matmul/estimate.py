"""Estimates of the time that a matmul takes with a tile, and the choice of the fastest tile.

The kernel and the cost model of strategies use the same estimate. This module needs neither torch nor Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hostir.kernels.matmul.schedule import Grid, schedule
from hostir.kernels.matmul.tiles import MAX_PARTS, MIN_STEPS, Gemm, Tile

# TFLOP/s of an H200, for calls of 0.2 TFLOP.
PEAK = {"bf16": 820.0, "f16": 820.0, "f32": 14.0, "tf32": 410.0, "f8": 1500.0, "f8s": 1000.0}


@dataclass(frozen=True)
class Rates:
    """The speed of a family of matmul kernels on a GPU. Times are in microseconds.

    Fields:
        peak: for each dtype, the TFLOP/s of one SM in the K loop of a tile with `Tile.rate` 1.
        tile: the time that a tile takes outside its K loop, to fill the pipeline and to store the tile.
        split: three durations, which a part of a split tile takes in addition: to start and synchronize, to read a
            partial sum of another part, and to store one element of a partial sum by one warp. None if the family never
            splits tiles.
        read: GB/s at which all SMs together read a right operand that is not in L2.
    """

    peak: Mapping[str, float] = field(hash=False)
    tile: float = 0.0
    split: tuple[float, float, float] | None = None
    read: float = np.inf

    def scaled(self, factor: float) -> Rates:
        """Return the same rates with a K loop that is `factor` times as fast."""
        return replace(self, peak={dtype: factor * peak for dtype, peak in self.peak.items()})

    def unsplit_time(self, tile: Tile, gemm: Gemm) -> float:
        """Return the time in microseconds that a program takes for an unsplit tile."""
        rate = tile.rate if gemm.block is None else tile.rate_waiting or tile.rate
        steps = -(-gemm.k // tile.k)
        return self.tile + 2e-6 * steps * tile.m * tile.n * tile.k / (self.peak[gemm.dtype] * rate)

    def part(self, tile: Tile, parts: int, tile_time: float) -> float:
        """Return the time of the part that ends last if a tile is split into `parts` parts.

        This part also adds up the partial sums of the other parts. `tile_time` is the time of the unsplit tile.
        """
        assert self.split is not None
        start, read, store = self.split
        return tile_time / parts + start + read * (1 if parts == 2 else parts) + store * tile.m * tile.n / tile.warps


# The rates of the Triton kernel, measured on an H200 with 132 SMs, and used for every GPU.
TRITON = Rates({d: peak / 132 for d, peak in PEAK.items()}, tile=2.8, split=(3.0, 2.0, 3.0 / 4096), read=4300.0)
IN_L2 = 32 << 20  # bytes of a right operand that stay in an L2 cache of 50 MiB, beside rows and results


def duration(
    tile: Tile, gemm: Gemm, sms: int, rates: Rates = TRITON, arrivals: Sequence[float] = (0.0,)
) -> tuple[float, float]:
    """Return the time in microseconds at which a matmul on `sms` SMs ends, and the same for infinitely fast memory.

    Blocks of rows arrive at the times `arrivals`, in the order in which the matmul computes them. Programs take tiles,
    and parts of tiles, in turn. A program begins a tile when the program is free and the rows have arrived. The tiles
    of each block read the right operand again if it does not fit into L2.
    """
    grid, tile_time = Grid.of(tile, gemm), rates.unsplit_time(tile, gemm)
    plan = grid.schedule(tile, sms)
    if grid.blocks == 1 and not grid.early:
        part = rates.part(tile, plan.parts, tile_time) if plan.parts else 0.0
        waves, more = divmod(plan.unsplit, plan.programs)
        # True if no program has a part after a tile of the last wave.
        alone = (grid.tiles - plan.unsplit) * plan.parts <= plan.programs - more
        end = max(arrivals) + waves * tile_time + (max(tile_time * (more > 0), part) if alone else tile_time + part)
    else:
        _, ready, took = _work(tile, gemm, sms, rates, arrivals)
        # From some tile on, a program never waits. It ends at the arrival of that tile plus all times from then on.
        end = float((ready + took[::-1].cumsum(0)[::-1]).max())
    return max(end, min(arrivals) + _loading(grid, tile, gemm, rates)), end


def block_ends(
    tile: Tile, gemm: Gemm, sms: int, rates: Rates, arrivals: Sequence[float], blocks: int
) -> tuple[float, ...]:
    """Return the times at which `blocks` equal blocks of the output have been written, in the order of computation.

    The times are in microseconds. The other arguments are as in `duration`. A block ends at `inf` if it needs rows that
    arrive at `inf`.
    """
    tiles, ready, took = _work(tile, gemm, sms, rates, arrivals)
    count, sums = int(tiles[-1]) + 1, took.cumsum(0)
    of_units = (sums + np.maximum.accumulate(ready - sums + took)).ravel()[: len(tiles)]
    ends = np.zeros(blocks)
    for block in (tiles * blocks // count, ((tiles + 1) * blocks - 1) // count):  # a tile may belong to several
        np.maximum.at(ends, block, of_units)
    loaded = min(arrivals) + _loading(Grid.of(tile, gemm), tile, gemm, rates) * np.arange(1, blocks + 1) / blocks
    return tuple(np.maximum(np.maximum.accumulate(ends), loaded).tolist())


def _work(tile: Tile, gemm: Gemm, sms: int, rates: Rates, arrivals: Sequence[float]) -> tuple[Any, Any, Any]:
    """Return the tile of each unit of work, and two arrays `[round, program]` with the times of the units.

    A unit is a tile or a part of a tile. In each round, every program takes one unit. The first array of times holds
    the time at which the rows of each unit have arrived. The second one holds the duration of each unit.
    """
    grid, tile_time = Grid.of(tile, gemm), rates.unsplit_time(tile, gemm)
    plan = grid.schedule(tile, sms)
    half, part = (rates.part(tile, n, tile_time) if n else 0.0 for n in (2 if grid.early else 0, plan.parts))
    last = grid.tiles + grid.early - plan.unsplit  # tiles that are split
    counts = 2 * grid.early, grid.tiles - last - grid.early, last * plan.parts
    halves, rest = np.arange(counts[0]) // 2, np.arange(grid.early, grid.tiles)
    tiles = np.concatenate([halves, rest[: counts[1]], np.tile(rest[counts[1] :], plan.parts)])
    work = np.zeros((2, -(-len(tiles) // plan.programs) * plan.programs))
    work[0, : len(tiles)] = np.asarray(arrivals)[((tiles + 1) * grid.blocks - 1) // grid.tiles]
    work[1, : len(tiles)] = np.repeat([half, tile_time, part], counts)
    ready, took = work.reshape(2, -1, plan.programs)
    return tiles, ready, took


def collecting(gemm: Gemm) -> float:
    """Return the microseconds in which a kernel collects the rows of a grouped matmul; 0 if it does not."""
    if not gemm.collects:
        return 0.0
    return COLLECTION + 2 * gemm.rows * gemm.k * gemm.itemsize / COLLECTED / 1e3


def right_bytes(gemm: Gemm) -> int:
    """Return the number of bytes of all right operands of a matmul."""
    return gemm.matrices * gemm.n * gemm.k * gemm.itemsize


def in_l2(gemm: Gemm) -> bool:
    """Return True if the right operands of a matmul stay in L2 once they were read."""
    return right_bytes(gemm) <= IN_L2


def _loading(grid: Grid, tile: Tile, gemm: Gemm, rates: Rates) -> float:
    """Return the time in microseconds to load the right operands from memory.

    If they stay in L2, the time is 0. Otherwise they are loaded again for each block.
    """
    right = right_bytes(gemm)
    times: float = 0 if in_l2(gemm) else min(grid.blocks, grid.batches * -(-grid.rows // tile.m))
    return times * right / rates.read / 1e3


COLLECTION, COLLECTED = 4.0, 1900.0  # to collect rows: microseconds to start, and GB/s read and written, on an H100

# Assumed arrival of blocks: GB/s; if copy engines copy them, also the microseconds before the first copy begins, and
# between two copies.
LINK, FIRST, _PAUSE = 390.0, 15.0, 2.5
EARLY_WAVES = 2  # the most waves that the halves of early tiles may fill: more tiles keep all SMs busy without a split
FINE_WAVES = 8  # with more waves, the number of split tiles matters little
_SUSTAINED = 0.95  # the share of the peak that is left when power limits the clock in long calls
_WORTH = 1.01  # an unsplit tile is preferred if its estimate is at most this many times as long
SPLIT_STEP = 9  # the step between the numbers of split tiles that are tried


def rounded_up(gemm: Gemm, tiles: Sequence[Tile]) -> Gemm:
    """Return `gemm` with more rows, but with the same number of tiles, whichever of `tiles` is used.

    Choosing a tile takes milliseconds, and the number of rows may differ in every call. By rounding up, gemms with
    slightly different numbers of rows become equal, so more calls find their tile in the cache of `choose`. Returns
    `gemm` itself if this function cannot round up without more tiles.
    """
    heights, block = {tile.m for tile in tiles}, gemm.block
    step = min(heights)
    if block is None:
        return replace(gemm, m=-(-gemm.m // step) * step)
    blocks, rest = divmod(gemm.m, block)
    spans = not gemm.separate and block < max(heights)  # tiles higher than a block span several blocks
    if gemm.batches > 1 or rest or (spans and step % blocks):
        return gemm
    step //= blocks if spans else 1
    high = -(-block // step) * step
    high -= spans and high > block and high in heights  # otherwise these tiles would no longer span blocks
    return replace(gemm, m=blocks * high, block=high)


@functools.lru_cache(maxsize=1024)
def choose(gemm: Gemm, sms: int, tiles: tuple[Tile, ...], rates: Rates = TRITON) -> Tile:
    """Return the fastest of `tiles`, with its best split, for a matmul on `sms` SMs.

    If rows arrive in blocks, the estimate assumes that the first block is ready, and that the other blocks arrive one
    after another over NVLink. Among tiles with equal estimates, the function takes the tile that would be fastest if
    memory were infinitely fast. If these times are equal, too, it takes the tile with the largest `early_blocks`,
    because this was faster on H200s.
    """
    rates, (first, pause) = rates.scaled(_SUSTAINED), (0.0, 0.0) if gemm.overlapped else (FIRST, _PAUSE)
    blocks = 1 if gemm.block is None else max(1, gemm.batches * gemm.m // gemm.block)
    each = pause + (gemm.block or 0) * gemm.k * gemm.itemsize / LINK / 1e3
    arrivals = [0.0, *(first + i * each for i in range(1, blocks))]

    def key(tile: Tile) -> tuple[float, float, int, int]:
        estimate, arithmetic = duration(tile, gemm, sms, rates, arrivals)
        worth = _WORTH if tile.split or tile.early_blocks else 1
        return estimate * worth, arithmetic, -tile.early_blocks, tile.split

    return min((way for tile in tiles for way in _splits(tile, gemm, sms, rates)), key=key)


def _splits(tile: Tile, gemm: Gemm, sms: int, rates: Rates) -> Iterator[Tile]:
    """Yield the unsplit tile, then a copy of it for each way to split tiles that may make the matmul faster.

    If the matmul waits for blocks of rows, the tiles of the first blocks may be split, and so may the last tiles. If
    all rows are ready, only the tiles of the last wave may be split, and only if they fill at most half of the SMs. If
    all tiles fit in one wave, the last tiles are not split: that was never faster.
    """
    yield tile
    grid = Grid.of(tile, gemm)
    if rates.split is None:
        return
    last = grid.tiles % sms
    if grid.blocks == 1 and 0 < 2 * last <= sms < grid.tiles:
        yield replace(tile, split=last)
    if grid.blocks == 1:
        return
    # With 32-bit elements there are no early tiles: the kernel would need registers for two loops.
    for early in range(grid.blocks if gemm.itemsize < 4 and grid.steps >= 2 * MIN_STEPS else 1):
        walk = replace(tile, early_blocks=early)
        grid = Grid.of(walk, gemm)
        if early and not 0 < 2 * grid.early <= EARLY_WAVES * sms:
            return
        if early:
            yield walk
        yield from _last_splits(walk, grid, sms)


def _last_splits(tile: Tile, grid: Grid, sms: int) -> Iterator[Tile]:
    """Yield copies of the tile with other values of `split` and `parts`, which split the last tiles.

    With these values, each part of a split tile runs on a separate SM.
    """
    units = grid.tiles + grid.early
    if grid.tiles <= sms:
        return
    last = units % sms
    for parts in (2,) if grid.early else (2, 4, MAX_PARTS):  # early tiles leave registers for two parts only
        most = min(sms // parts, grid.tiles - grid.first)
        steps = range(SPLIT_STEP, most + 1, SPLIT_STEP) if units <= FINE_WAVES * sms else ()
        for split in sorted({*steps, last, sms - last, grid.tiles // grid.blocks}):
            plan = schedule(units, grid.steps, sms, split, parts)
            if 0 < split <= most and plan.parts and plan.programs == sms:
                yield replace(tile, split=split, parts=parts)
