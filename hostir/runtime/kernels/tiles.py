"""Tiles of a matmul: which there are, how programs share them, and how long they take.

The kernel chooses its tile by the estimate that the cost model uses as well. Needs neither torch nor Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hostir.ir.types import DTYPES

# Tiles ----------------------------------------------------------------------------------------------------------------
# A matmul, and the tiles that it can run with.

MIN_STEPS = 4  # of a part, along K: fewer do not pay for the sum in memory
MAX_PARTS = 8  # of a tile: the last program reads the sums of all
MIN_OWN_ROWS = 64  # fewer own rows get no tiles of their own: reading B once more would cost more than a copy


@dataclass(frozen=True)
class Gemm:
    """A matmul `[batches, m, k] @ [k, n]`, and how its rows arrive.

    Fields:
        dtype: `bf16`, `f16`, `f32`, or `tf32` for f32 on tensor cores.
        block: rows of each block, if they arrive block by block while the kernel runs; None: all are ready.
        separate: no tile may span two blocks, as the rows of one are elsewhere in memory.
        overlapped: the blocks come from the kernel right before, which this one overlaps; else from copy engines.
    """

    m: int
    n: int
    k: int
    dtype: str
    batches: int = 1
    block: int | None = None
    separate: bool = False
    overlapped: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype.removeprefix("t")].bytes


@dataclass(frozen=True)
class Tile:
    """A tile of the output and how the kernel computes it.

    Fields:
        m, n, k: rows and columns of the output tile, and the step along K.
        stages: depth of the software pipeline.
        warps: warps per program.
        rate: throughput of the K loop, relative to the fastest tile of the same table.
        rate_waiting: the same if rows arrive while the kernel runs; None: as `rate`.
        halves: store the tile in two halves, which needs half the shared memory and so leaves room for a stage.
        group: rows of tiles that are computed together, so that they find each other's operands in L2.
        split: number of tiles, the last ones, whose K loop is split among several programs each.
        parts: maximal number of programs for each of these.
        early_blocks: number of blocks of rows, the first ones, whose tiles are split in two, if no tile spans two
            blocks: so more SMs are busy while few rows have arrived.
    """

    m: int
    n: int
    k: int = 64
    stages: int = 4
    warps: int = 8
    rate: float = 1.0
    halves: bool = False
    group: int = 8
    split: int = 0
    parts: int = MAX_PARTS
    rate_waiting: float | None = None
    early_blocks: int = 0

    def shared_memory(self, itemsize: int, *, descriptors: bool, biased_batch: bool = False) -> int:
        """Return the bytes of shared memory for elements of `itemsize` bytes.

        Counts the pipeline, the tile that a TMA store sends out, and room for barriers and layout changes: more of it
        if a bias is added to whole tiles of a batch.
        """
        pipeline = self.stages * (self.m + self.n) * self.k * itemsize
        outgoing = self.m * self.n * itemsize // (2 if self.halves else 1)
        changes = _BIASED_BATCH if biased_batch and not self.halves else 0
        return pipeline + (outgoing if descriptors else 0) + _SCRATCH + changes

    def fitting(self, itemsize: int, shared_memory: int, *, descriptors: bool, biased_batch: bool) -> Tile:
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
    Tile(128, 256, 64, stages=4, warps=8, halves=True),
    Tile(256, 128, 64, stages=4, warps=8, halves=True, rate=0.98, rate_waiting=0.85),
    Tile(128, 128, 64, stages=6, warps=4, rate=0.95, rate_waiting=0.86),
    Tile(64, 256, 64, stages=4, warps=4, rate=0.9),
    Tile(64, 128, 128, stages=4, warps=4, rate=0.77, rate_waiting=0.78),
    Tile(128, 64, 64, stages=6, warps=4, rate=0.7, rate_waiting=0.55),
    Tile(64, 64, 128, stages=6, warps=4, rate=0.53, rate_waiting=0.55),
    Tile(64, 64, 64, stages=4, warps=4, rate=0.32),
)
_POINTERS_16_BIT = (
    Tile(128, 128, 64, stages=3, warps=8),
    Tile(128, 64, 64, stages=3, warps=8, rate=0.8),
    Tile(64, 64, 64, stages=3, warps=4, rate=0.6),
    Tile(64, 64, 32, stages=3, warps=4, rate=0.5),
)
_TF32 = (
    Tile(128, 128, 32, stages=3, warps=8),
    Tile(64, 128, 32, stages=3, warps=4, rate=0.8),
    Tile(64, 64, 32, stages=3, warps=4, rate=0.6),
)
# Without tensor cores arithmetic is the bottleneck whatever the tile; a small one keeps all of it in registers.
_IEEE_32_BIT = (
    Tile(64, 64, 16, stages=4, warps=4),
    Tile(32, 32, 32, stages=3, warps=4, rate=0.6),
)

# The interpreter pays per operation, not per element; with small tiles, small tensors have incomplete ones too.
INTERPRETER = Tile(32, 32, 32, stages=1, warps=1, group=2)


def candidates(dtype: str, *, descriptors: bool = True, shared_memory: int = 227 << 10) -> tuple[Tile, ...]:
    """Return the tiles worth trying for operands of a dtype, as `Gemm` names it, with so many bytes of shared memory.

    Raises ValueError if none fits.
    """
    tables = {"f32": _IEEE_32_BIT, "tf32": _TF32}
    tiles = tables.get(dtype, _TMA_16_BIT if descriptors else _POINTERS_16_BIT)
    itemsize = Gemm(1, 1, 1, dtype).itemsize
    fitting = tuple(t for t in tiles if t.shared_memory(itemsize, descriptors=descriptors) <= shared_memory)
    if not fitting:
        raise ValueError(f"no {dtype} matmul tile fits into {shared_memory} bytes of shared memory")
    return fitting


# The schedule ---------------------------------------------------------------------------------------------------------
# The tiles of a matmul, and which program computes which, or parts of them: see hostir.runtime.kernels.matmul_kernel.


@dataclass(frozen=True)
class Schedule:
    """The assignment of the output's tiles to the programs of one launch.

    Fields:
        programs: the number of programs.
        whole: the number of tiles, the first ones, that one program each computes. Each part of an early tile counts.
        parts: the parts of each of the other tiles; a program has at most one. 0: there are no other tiles.
    """

    programs: int
    whole: int
    parts: int = 0


def schedule(tiles: int, steps: int, sms: int, split: int, max_parts: int = MAX_PARTS) -> Schedule:
    """Assign `tiles` of `steps` along K to `sms` programs, and split the last `split` in up to `max_parts` parts each.

    Fewer parts if there are not as many programs or parts would be too short; no split if that leaves fewer than two.
    """
    split = min(split, tiles)
    parts = min(sms // split, steps // MIN_STEPS, max_parts) if split else 0
    if parts < 2:
        return Schedule(min(sms, tiles), tiles)
    return Schedule(min(sms, max(tiles - split, split * parts)), tiles - split, parts)


@dataclass(frozen=True)
class Grid:
    """The tiles that cover an output, in the order in which programs take them: batch by batch, block by block.

    Fields:
        batches, rows: of the output, and of each batch. No tile spans two batches. A block is a batch of its own where
            tiles must not span two, or are no higher than blocks; smaller blocks would fill tiles badly.
        tiles: number of tiles.
        steps: of each, along K.
        blocks: number of blocks that arrive one after another; 1 if all rows are ready.
        early_blocks, early: number of early blocks, and of their tiles, of two parts each; 0 if tiles span two blocks.
        first: number of tiles that are early, or of own rows: never among those of `Tile.split`.
    """

    batches: int
    rows: int
    tiles: int
    steps: int
    blocks: int = 1
    early_blocks: int = 0
    early: int = 0
    first: int = 0

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, tile: Tile, gemm: Gemm) -> Grid:
        batches, rows, block = gemm.batches, gemm.m, gemm.block
        if batches == 1 and block is not None and (block >= tile.m or gemm.separate):
            batches, rows = rows // block, block
        of_batch = -(-rows // tile.m) * -(-gemm.n // tile.n)
        tiles, steps = batches * of_batch, -(-gemm.k // tile.k)
        if block is None:
            return cls(batches, rows, tiles, steps)
        blocks = max(1, gemm.batches * gemm.m // block)
        if block % rows:
            return cls(batches, rows, tiles, steps, blocks)
        of_block, early = block // rows * of_batch, min(tile.early_blocks, blocks)
        first = max(early, gemm.separate) * of_block
        return cls(batches, rows, tiles, steps, blocks, early, early * of_block, first)

    def span(self, tile: Tile, height: int) -> int:
        """Return of how many blocks of `height` rows, counted through all batches, a tile has rows at most."""
        tops = np.arange(0, self.rows, tile.m) + self.rows * np.arange(self.batches)[:, None]
        ends = np.minimum(tops + tile.m, tops - tops % self.rows + self.rows)
        return int(((ends - 1) // height - tops // height).max()) + 1

    def schedule(self, tile: Tile, sms: int) -> Schedule:
        """Assign the tiles to programs on `sms` SMs."""
        return schedule(self.tiles + self.early, self.steps, sms, min(tile.split, self.tiles - self.first), tile.parts)


# The estimate ---------------------------------------------------------------------------------------------------------
# How long a matmul takes with a tile, and the tile with which it takes least.


PEAK = {"bf16": 820.0, "f16": 820.0, "f32": 14.0, "tf32": 410.0}  # TFLOP/s of an H200 before power limits it


@dataclass(frozen=True)
class Rates:
    """The speed of a family of matmul kernels on a GPU. Times are in microseconds.

    Fields:
        peak: TFLOP/s of one SM in the K loop of a tile whose rate is 1, by dtype.
        tile: time of a tile besides its K loop: filling the pipeline, storing.
        split: time that a part of a split tile takes besides: to start and synchronize, to read a sum of another part,
            and to store a sum, for each element of a warp; None if the family never splits.
        read: GB/s at which all SMs together read a right side that is not in L2.
    """

    peak: Mapping[str, float] = field(hash=False)
    tile: float = 0.0
    split: tuple[float, float, float] | None = None
    read: float = np.inf

    def scaled(self, factor: float) -> Rates:
        """Return the rates if the K loop is `factor` times as fast."""
        return replace(self, peak={dtype: factor * peak for dtype, peak in self.peak.items()})

    def whole(self, tile: Tile, gemm: Gemm) -> float:
        """Return the time of a tile that is not split."""
        rate = tile.rate if gemm.block is None else tile.rate_waiting or tile.rate
        steps = -(-gemm.k // tile.k)
        return self.tile + 2e-6 * steps * tile.m * tile.n * tile.k / (self.peak[gemm.dtype] * rate)

    def part(self, tile: Tile, parts: int, whole: float) -> float:
        """Return the time of the last of the `parts` parts of a tile that takes `whole` if it is not split."""
        assert self.split is not None
        start, read, store = self.split
        return whole / parts + start + read * (1 if parts == 2 else parts) + store * tile.m * tile.n / tile.warps


# Of the Triton kernel, as measured on an H200 of 132 SMs, and used on every GPU.
TRITON = Rates({d: peak / 132 for d, peak in PEAK.items()}, tile=2.8, split=(3.0, 2.0, 3.0 / 4096), read=4300.0)
IN_L2 = 32 << 20  # bytes of a right side that stay in an L2 of 50 MiB, beside rows and results


def duration(
    tile: Tile, gemm: Gemm, sms: int, rates: Rates = TRITON, arrivals: Sequence[float] = (0.0,)
) -> tuple[float, float]:
    """Return when a matmul ends on `sms` SMs, in microseconds, and when it would if memory were infinitely fast.

    Its blocks of rows arrive at times `arrivals`, in its own order. Programs take tiles, and parts of tiles, in turn: a
    program begins one when it is free and the rows are there. The tiles of each block read all of the right side again,
    if the L2 does not keep it from one block to the next.
    """
    grid, whole = Grid.of(tile, gemm), rates.whole(tile, gemm)
    plan = grid.schedule(tile, sms)
    half, part = (rates.part(tile, n, whole) if n else 0.0 for n in (2 if grid.early else 0, plan.parts))
    last = grid.tiles + grid.early - plan.whole  # tiles that are split
    if grid.blocks == 1 and not grid.early:
        waves, more = divmod(plan.whole, plan.programs)
        alone = last * plan.parts <= plan.programs - more  # no program has a part behind a tile of the last wave
        end = max(arrivals) + waves * whole + (max(whole * (more > 0), part) if alone else whole + part)
    else:
        counts = 2 * grid.early, grid.tiles - last - grid.early, last * plan.parts
        halves, rest = np.arange(counts[0]) // 2, np.arange(grid.early, grid.tiles)
        tiles = np.concatenate([halves, rest[: counts[1]], np.tile(rest[counts[1] :], plan.parts)])
        work = np.zeros((2, -(-len(tiles) // plan.programs) * plan.programs))
        work[0, : len(tiles)] = np.asarray(arrivals)[((tiles + 1) * grid.blocks - 1) // grid.tiles]
        work[1, : len(tiles)] = np.repeat([half, whole, part], counts)
        ready, took = work.reshape(2, -1, plan.programs)
        # A program ends as late as the one of its tiles that it had to wait for longest, and all behind it, take.
        end = float((ready + took[::-1].cumsum(0)[::-1]).max())
    right = gemm.n * gemm.k * gemm.itemsize
    times = min(grid.blocks, grid.batches * -(-grid.rows // tile.m)) if right > IN_L2 else 0
    return max(end, min(arrivals) + times * right / rates.read / 1e3), end


# Arrival of blocks that the kernel expects: GB/s, and if copy engines send them one after another, the microseconds
# before the first and between two.
_LINK, _FIRST, _PAUSE = 390.0, 15.0, 2.5
EARLY_WAVES = 2  # of parts of early tiles, at most: with more, all SMs are busy anyway
FINE_WAVES = 8  # with more waves it matters little how many of the last tiles are split
_SUSTAINED = 0.95  # of the peak, as power limits the clock in long calls
_WORTH = 1.01  # a simpler tile is preferred if its estimate is at most this many times as long
SPLIT_STEP = 9  # between the numbers of split tiles that are tried


@functools.lru_cache(maxsize=1024)
def choose(gemm: Gemm, sms: int, tiles: tuple[Tile, ...], rates: Rates = TRITON) -> Tile:
    """Return the one of `tiles`, split as suits best, with which a matmul on `sms` SMs takes least.

    If rows arrive in blocks, the first is there and the others come one by one, as over NVLink. Among equals, the tile
    with more early blocks was faster on H200s.
    """
    rates, (first, pause) = rates.scaled(_SUSTAINED), (0.0, 0.0) if gemm.overlapped else (_FIRST, _PAUSE)
    blocks = 1 if gemm.block is None else max(1, gemm.batches * gemm.m // gemm.block)
    each = pause + (gemm.block or 0) * gemm.k * gemm.itemsize / _LINK / 1e3
    arrivals = [0.0, *(first + i * each for i in range(1, blocks))]

    def key(tile: Tile) -> tuple[float, float, int, int]:
        estimate, arithmetic = duration(tile, gemm, sms, rates, arrivals)
        worth = _WORTH if tile.split or tile.early_blocks else 1
        return estimate * worth, arithmetic, -tile.early_blocks, tile.split

    return min((way for tile in tiles for way in _splits(tile, gemm, sms, rates)), key=key)


def _splits(tile: Tile, gemm: Gemm, sms: int, rates: Rates) -> Iterator[Tile]:
    """Yield the tile as it is, and with early and last tiles split in all ways that may pay and leave no SM idle.

    If all rows are ready, only the tiles of a last wave that fills at most half of the SMs are split. Tiles of a single
    wave are never split: that never paid.
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
    for early in range(grid.blocks if gemm.itemsize < 4 and grid.steps >= 2 * MIN_STEPS else 1):
        walk = replace(tile, early_blocks=early)
        grid = Grid.of(walk, gemm)
        if early and not 0 < 2 * grid.early <= EARLY_WAVES * sms:  # registers do not hold two loops of 32 bits
            return
        if early:
            yield walk
        yield from _last_splits(walk, grid, sms)


def _last_splits(tile: Tile, grid: Grid, sms: int) -> Iterator[Tile]:
    """Yield the tile with numbers of the last tiles split, in numbers of parts, with a program for each part."""
    units = grid.tiles + grid.early
    if grid.tiles <= sms:
        return
    last = units % sms
    for parts in (2,) if grid.early else (2, 4, MAX_PARTS):  # registers do not hold early tiles and sums of more
        most = min(sms // parts, grid.tiles - grid.first)
        steps = range(SPLIT_STEP, most + 1, SPLIT_STEP) if units <= FINE_WAVES * sms else ()
        for split in sorted({*steps, last, sms - last, grid.tiles // grid.blocks}):
            plan = schedule(units, grid.steps, sms, split, parts)
            if 0 < split <= most and plan.parts and plan.programs == sms:
                yield replace(tile, split=split, parts=parts)
