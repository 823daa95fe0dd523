"""Tiles of a matmul: the candidates, and the choice of one by an estimate of its time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hostir.runtime.kernels.matmul_kernel import MAX_PARTS, MIN_STEPS, Schedule, schedule

# Tiles ----------------------------------------------------------------------------------------------------------------
# The tiles that a matmul can run with.


@dataclass(frozen=True)
class Config:
    """A tile of the output and how the kernel computes it.

    Fields:
        m, n, k: rows and columns of the output tile, and the step along K.
        stages: depth of the software pipeline.
        warps: warps per program.
        rate: throughput, relative to the fastest tile of the same table (an estimate).
        fed: the same if rows arrive while the kernel runs; None: as `rate`.
        halves: store the tile in two halves, which needs half the shared memory and so leaves room for a stage.
        group: rows of tiles that are computed together, so that they find each other's operands in L2.
        split: number of tiles, the last ones, whose contraction is split among several programs each.
        parts: maximal number of programs for each of these.
        early: number of blocks of rows, the first ones, whose tiles are split in two, if no tile spans two blocks: so
            more SMs are busy while few rows have arrived.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int
    rate: float = 1.0
    halves: bool = False
    group: int = 8
    split: int = 0
    parts: int = MAX_PARTS
    fed: float | None = None
    early: int = 0

    def shared_memory(self, itemsize: int, *, descriptors: bool, biased_batch: bool = False) -> int:
        """Return the bytes of shared memory for elements of `itemsize` bytes.

        Counts the pipeline, the tile that a TMA store sends out, and room for barriers and layout changes: more of it
        if a bias is added to whole tiles of a batch.
        """
        pipeline = self.stages * (self.m + self.n) * self.k * itemsize
        outgoing = self.m * self.n * itemsize // (2 if self.halves else 1)
        changes = _BIASED_BATCH if biased_batch and not self.halves else 0
        return pipeline + (outgoing if descriptors else 0) + _SCRATCH + changes

    def fitting(self, itemsize: int, shared_memory: int, *, descriptors: bool, biased_batch: bool) -> Config:
        """Return the tile with as many stages as fit into `shared_memory` bytes."""
        tile = self
        while tile.stages > 1 and shared_memory < tile.shared_memory(
            itemsize, descriptors=descriptors, biased_batch=biased_batch
        ):
            tile = replace(tile, stages=tile.stages - 1)
        return tile


# Bytes that the compiler takes for barriers and layout changes, rounded up: 1 KiB was the most seen.
_SCRATCH = 2 << 10
_BIASED_BATCH = 8 << 10

# Tables are ordered by preference: of two tiles with the same estimate, the first wins.
_TMA_16_BIT = (
    Config(128, 256, 64, stages=4, warps=8, halves=True),
    Config(256, 128, 64, stages=4, warps=8, halves=True, rate=0.98, fed=0.85),
    Config(128, 128, 64, stages=6, warps=4, rate=0.95, fed=0.86),
    Config(64, 256, 64, stages=4, warps=4, rate=0.9),
    Config(64, 128, 128, stages=4, warps=4, rate=0.77, fed=0.78),
    Config(128, 64, 64, stages=6, warps=4, rate=0.7, fed=0.55),
    Config(64, 64, 128, stages=6, warps=4, rate=0.53, fed=0.55),
    Config(64, 64, 64, stages=4, warps=4, rate=0.32),
)
_POINTERS_16_BIT = (
    Config(128, 128, 64, stages=3, warps=8),
    Config(128, 64, 64, stages=3, warps=8, rate=0.8),
    Config(64, 64, 64, stages=3, warps=4, rate=0.6),
    Config(64, 64, 32, stages=3, warps=4, rate=0.5),
)
_TF32 = (
    Config(128, 128, 32, stages=3, warps=8),
    Config(64, 128, 32, stages=3, warps=4, rate=0.8),
    Config(64, 64, 32, stages=3, warps=4, rate=0.6),
)
# Without tensor cores arithmetic is the bottleneck whatever the tile; a small one keeps all of it in registers.
_IEEE_32_BIT = (
    Config(64, 64, 16, stages=4, warps=4),
    Config(32, 32, 32, stages=3, warps=4, rate=0.6),
)

# The interpreter pays per operation, not per element; with small tiles, small tensors have incomplete ones too.
INTERPRETER = Config(32, 32, 32, stages=1, warps=1, group=2)

# Fewest own rows that get tiles of their own; for fewer, reading the right side once more costs more than a copy.
MIN_OWN_ROWS = 64


def candidates(dtype: torch.dtype, *, descriptors: bool = True, tf32: bool = False) -> tuple[Config, ...]:
    """Return the tiles worth trying for operands of `dtype` (float32 on tensor cores if `tf32`)."""
    if dtype == torch.float32:
        return _TF32 if tf32 else _IEEE_32_BIT
    return _TMA_16_BIT if descriptors else _POINTERS_16_BIT


def in_blocks(batches: int, M: int, block: int | None, m: int, apart: bool = False) -> tuple[int, int]:
    """Return `(batches, rows of each)` for which no tile of `m` rows spans two blocks of `block` rows.

    `batches` times `M` rows are given. Several batches stay as they are. Blocks smaller than a tile fill tiles badly,
    so they become batches only if they must be `apart`.
    """
    if batches > 1 or block is None or (block < m and not apart):
        return batches, M
    return M // block, block


@dataclass(frozen=True)
class Ahead:
    """The tiles of the first blocks, which are never among those of `Config.split`: early tiles and those of own rows.

    Fields:
        blocks: number of early blocks.
        early: number of their tiles, of two parts each.
        tiles: number of tiles that are early or of own rows.
    """

    blocks: int = 0
    early: int = 0
    tiles: int = 0

    @classmethod
    def of(cls, tile: Config, batches: int, M: int, N: int, block: int | None, apart: bool) -> Ahead:
        """Count them for `batches` times `M` rows, as returned by `in_blocks`; all 0 if tiles span two blocks."""
        if block is None or block % M:
            return cls()
        blocks, of_block = min(tile.early, batches * M // block), block // M * -(-M // tile.m) * -(-N // tile.n)
        return cls(blocks, blocks * of_block, max(blocks, apart) * of_block)


# The choice -----------------------------------------------------------------------------------------------------------
# The choice of a tile, by an estimate of the time that each candidate takes.

# Cost of a tile besides its arithmetic (filling the pipeline, storing), in multiply-adds of the fastest tile.
_FIXED_COST = 256 * 128 * 256
# Extra costs of a split tile, as measured on an H200: starting it and synchronizing (3 us), reading the sum of each
# part (2 us), and storing it, per element of a warp (3 us for a tile of 128 x 256 with 8 warps).
_SPLIT_COST, _PART_COST, _SUM_COST = 9e6, 6e6, 2160
# Multiply-adds of an SM per second: 390 T/s over 132 SMs.
_SPEED = 390e12 / 132
# Arrival of blocks that a peer's copy engine sends one after another: a delay before the first, a pause before each
# other one, both in multiply-adds, and the bytes that arrive per multiply-add.
_FIRST, _PAUSE, _BYTES = 15e-6 * _SPEED, 2.5e-6 * _SPEED, 390e9 / _SPEED
# Multiply-adds of an SM while all SMs together read a byte of a right side that is not in L2, at 4.3 TB/s.
_WORK_PER_BYTE_READ = _SPEED / 4.3e12
_IN_L2 = 32 << 20  # bytes of a right side that stay in an L2 of 50 MiB, beside rows and results
EARLY_WAVES = 2  # of parts of early tiles, at most: with more, all SMs are busy anyway
FINE_WAVES = 8  # with more waves it matters little how many of the last tiles are split
_WORTH = 1.01  # a simpler tile is preferred if its estimate is at most this many times as long
SPLIT_STEP = 9  # between the numbers of split tiles that are tried


@functools.lru_cache(maxsize=1024)
def choose(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    sms: int,
    *,
    batch: int = 1,
    block: int | None = None,
    apart: bool = False,
    descriptors: bool = True,
    tf32: bool = False,
    shared_memory: int = 227 << 10,
) -> Config:
    """Return the tile for `batch` products `[M, K] @ [K, N]` on `sms` SMs with `shared_memory` bytes each.

    If rows arrive in blocks of `block` rows, tiles span two blocks only as `in_blocks` says, and never if `apart`.

    Estimates the time of each candidate and takes the least. If all rows are ready (`block` is None), the tiles of the
    last wave are whole or split: all of them if it fills at most half of the SMs, else as many as leave a program for
    each of two parts. Tiles of a single wave are never split: that never paid. If rows arrive, as over NVLink, the
    tiles of the first blocks may be split, and any number of the last tiles.

    Raises ValueError when no candidate fits into the shared memory.
    """
    fitting = [
        tile
        for tile in candidates(dtype, descriptors=descriptors, tf32=tf32)
        if tile.shared_memory(dtype.itemsize, descriptors=descriptors) <= shared_memory
    ]
    if not fitting:
        raise ValueError(f"no {dtype} matmul tile fits into {shared_memory} bytes of shared memory")
    if block is None:
        tried = [split for tile in fitting for split in _of_the_last_wave(tile, _tiles(tile, batch, M, N), sms)]
        return min(tried, key=lambda tile: _alone(tile, batch, M, N, K, sms))
    found = dict[Config, tuple[float, float]]()
    for tile in fitting:
        batches, rows = in_blocks(batch, M, block, tile.m, apart)
        walks = [tile]
        if dtype != torch.float32:  # whose sums of two loops registers do not hold
            walks += _with_early_blocks(tile, batches, rows, N, K, block, sms)
        for walk in walks:
            found |= _fed(walk, batches, rows, N, K, dtype.itemsize, sms, block, apart)
    return min(found, key=lambda tile: _preferred(tile, *found[tile]))


def _preferred(tile: Config, estimate: float, arithmetic: float) -> tuple[float, float, int, int]:
    """Return the sort key of a tile. Among equals, the one with more early blocks was faster on H200s."""
    return estimate * (_WORTH if tile.split or tile.early else 1), arithmetic, -tile.early, tile.split


def _of_the_last_wave(tile: Config, tiles: int, sms: int) -> Iterator[Config]:
    """Yield the tile with a whole last wave, and with a split one if there are more waves."""
    yield tile
    last = tiles % sms
    if last and tiles > sms:
        yield replace(tile, split=last) if 2 * last <= sms else replace(tile, split=sms - last, parts=2)


def _with_early_blocks(tile: Config, batches: int, M: int, N: int, K: int, block: int, sms: int) -> Iterator[Config]:
    """Yield the tile with one, two and more early blocks, up to `EARLY_WAVES` waves of parts."""
    if -(-K // tile.k) < 2 * MIN_STEPS:
        return
    for blocks in range(1, batches * M // block):
        early = Ahead.of(replace(tile, early=blocks), batches, M, N, block, False).early
        if not early or 2 * early > EARLY_WAVES * sms:
            return
        yield replace(tile, early=blocks)


def _split_counts(tiles: int, of_block: int, ahead: Ahead, sms: int) -> Iterator[tuple[int, int]]:
    """Yield how many of the last tiles to split, and in how many parts each, with a program for each part."""
    units = tiles + ahead.early
    if tiles <= sms:
        return
    last = units % sms
    for parts in (2,) if ahead.early else (2, 4, MAX_PARTS):  # registers do not hold early tiles and sums of more
        max_split = min(sms // parts, tiles - ahead.tiles)
        steps = range(SPLIT_STEP, max_split + 1, SPLIT_STEP) if units <= FINE_WAVES * sms else ()
        for split in sorted({*steps, last, sms - last, of_block}):
            if 0 < split <= max_split:
                yield split, parts


def _tiles(tile: Config, batches: int, M: int, N: int) -> int:
    return batches * -(-M // tile.m) * -(-N // tile.n)


def _whole(tile: Config, K: int, rate: float) -> float:
    """Estimate the time of a tile that is not split, in multiply-adds of the fastest tile."""
    return -(-K // tile.k) * tile.m * tile.n * tile.k / rate + _FIXED_COST


def _part(tile: Config, parts: int, whole: float) -> float:
    """Estimate the time of the last program of a split tile, if a whole tile takes `whole`."""
    read = 1 if parts == 2 else parts  # sums of other programs
    return whole / parts + _SPLIT_COST + read * _PART_COST + tile.m * tile.n / tile.warps * _SUM_COST


def _alone(tile: Config, batches: int, M: int, N: int, K: int, sms: int) -> float:
    """Estimate the time if all rows are ready, in multiply-adds of one SM with the fastest tile."""
    plan = schedule(_tiles(tile, batches, M, N), -(-K // tile.k), sms, tile.split, tile.parts)
    whole = _whole(tile, K, tile.rate)
    return -(-plan.whole // plan.programs) * whole + (_part(tile, plan.parts, whole) if plan.parts else 0)


def _fed(
    tile: Config, batches: int, M: int, N: int, K: int, itemsize: int, sms: int, block: int, apart: bool
) -> dict[Config, tuple[float, float]]:
    """Estimate the time if rows arrive in blocks, the first at once and the others one by one, for all ways to split.

    Returns, by tile, the estimate and its arithmetic alone, which decides between tiles that are bound by memory: the
    tiles of each block read all of the right side again, if the L2 does not keep it from one block to the next.
    """
    tiles, steps, blocks = _tiles(tile, batches, M, N), -(-K // tile.k), max(1, batches * M // block)
    ahead = Ahead.of(tile, batches, M, N, block, apart)
    units = tiles + ahead.early
    arrivals = [0.0, *(_FIRST + i * (_PAUSE + block * K * itemsize / _BYTES) for i in range(1, blocks))]
    whole = _whole(tile, K, tile.fed or tile.rate)
    half, programs = _part(tile, 2, whole), min(sms, units)
    plans: dict[int, list[Schedule]] = {units: [Schedule(programs, units)]}  # by units before the split ones
    for split, parts in _split_counts(tiles, tiles // blocks, ahead, sms):
        plan = schedule(units, steps, sms, split, parts)
        if plan.parts and plan.programs == programs:  # others would leave SMs without work
            plans.setdefault(plan.whole, []).append(plan)
    right = N * K * itemsize
    reading = (min(blocks, batches * -(-M // tile.m)) if right > _IN_L2 else 0) * right * _WORK_PER_BYTE_READ
    found, free = dict[Config, tuple[float, float]](), [0.0] * programs
    for number in range(units + 1):
        for plan in plans.get(number, ()):
            took, left, part = list(free), units - number, _part(tile, plan.parts, whole) if plan.parts else 0.0
            for turn in range(left * plan.parts):
                ready = arrivals[(number - ahead.early + turn % left) * blocks // tiles]
                program = (number + turn) % programs
                took[program] = max(took[program], ready) + part
            walk = replace(tile, split=left, parts=plan.parts or tile.parts)
            found[walk] = max(*took, reading), max(took)
        if number == units:
            break
        if number < 2 * ahead.early:
            ready, takes = arrivals[number * blocks // (2 * tiles)], half
        else:
            ready, takes = arrivals[(number - ahead.early) * blocks // tiles], whole
        program = number % programs
        free[program] = max(free[program], ready) + takes
    return found
