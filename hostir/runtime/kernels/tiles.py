"""Choose the tile of a matmul: the candidates, how the programs of a launch share the tiles, and how long they take.

A program is an instance of the Triton kernel: one thread block on one SM. The kernel and the cost model use the same
estimate. Needs neither torch nor Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hostir.ir.types import DTYPES

# Tiles ----------------------------------------------------------------------------------------------------------------
# A matmul, and the tiles that it can run with.

MIN_STEPS = 4  # the fewest steps along K of a part of a split tile: fewer do not pay for summing the parts
MAX_PARTS = 8  # the most parts of a split tile: the last program reads the partial sums of all others
SCALE_BLOCK = 128  # elements along K, and columns of the right side, that share a scale of blocks
MIN_OWN_ROWS = 64  # fewer own rows are copied to their block: with tiles of their own, B would be read once more


@dataclass(frozen=True)
class Gemm:
    """A matmul `[batches, m, k] @ [k, n]`, and how its rows arrive.

    Fields:
        dtype: `bf16`, `f16`, `f32`, `tf32` for f32 on tensor cores, `f8` for 8-bit operands whose products tensor cores
            add up, or `f8s` where each step along K is scaled, or added to the others in f32.
        block: the number of rows of a block, if they arrive block by block while the kernel runs; None: all are ready.
        separate: whether no tile may span two blocks, as the rows of one block are elsewhere in memory.
        overlapped: whether a kernel directly before this one copies the blocks, and overlaps it; else copy engines do.
        result: the bytes of an element of the result; None: as many as an operand's.
    """

    m: int
    n: int
    k: int
    dtype: str
    batches: int = 1
    block: int | None = None
    separate: bool = False
    overlapped: bool = False
    result: int | None = None

    @property
    def itemsize(self) -> int:
        """The bytes of an element of an operand."""
        return 1 if self.dtype.startswith("f8") else DTYPES[self.dtype.removeprefix("t")].bytes


@dataclass(frozen=True)
class Tile:
    """The shape of an output tile, and how the kernel computes the tiles.

    Fields:
        m, n, k: rows and columns of the output tile, and the step along K.
        stages: depth of the software pipeline.
        warps: warps per program.
        rate: throughput of the K loop, relative to the fastest tile of the same table.
        rate_waiting: the same if rows arrive while the kernel runs; None if it is equal to `rate`.
        halves: store the tile in two halves, which takes half the shared memory and so leaves room for a stage.
        group: rows of tiles that are computed together, so that they find each other's operands in L2.
        split: how many tiles, the last ones, are split along K among several programs each (split-K).
        parts: the maximal number of programs for each of these.
        early_blocks: for how many blocks of rows, the first ones, each tile is split in two along K, so that more SMs
            are busy while few rows have arrived. 0 if tiles span two blocks.
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

    @property
    def unsplit(self) -> Tile:
        """The same tile as `candidates` returns it: none is split."""
        return replace(self, split=0, parts=MAX_PARTS, early_blocks=0)

    def shared_memory(self, itemsize: int, *, descriptors: bool, result: int | None = None, adds: bool = False) -> int:
        """Return the most bytes of shared memory that it takes for operands of `itemsize` bytes, results of `result`.

        They are those of the pipeline, of the tile that a TMA store reads, and as many for one to which it `adds`, and
        of vectors and barriers. Behind the pipeline a tile of float32 sums may change its layout in the same memory.
        """
        pipeline = self.stages * (self.m + self.n) * self.k * itemsize
        elements = self.m * self.n // (2 if self.halves else 1)
        outgoing = elements * (result or itemsize) * (1 + adds) if descriptors else 0
        return max(pipeline, 4 * elements) + outgoing + _VECTORS

    def fitting(
        self,
        itemsize: int,
        shared_memory: int,
        *,
        descriptors: bool,
        result: int | None = None,
        adds: bool = False,
    ) -> Tile:
        """Return the same tile with as many of its stages as fit into `shared_memory` bytes, at least one."""
        tile = self
        while tile.stages > 1 and shared_memory < tile.shared_memory(
            itemsize, descriptors=descriptors, result=result, adds=adds
        ):
            tile = replace(tile, stages=tile.stages - 1)
        return tile


# Bytes for a vector of scales, a bias or flags of a tile, which changes its layout while the pipeline holds the next
# tile, and for barriers: at most 1056, of 256 numbers in float32 and 4 stages.
_VECTORS = 2 << 10

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
# Without tensor cores arithmetic is the bottleneck with any tile; a small one fits into registers.
_IEEE_32_BIT = (
    Tile(64, 64, 16, stages=4, warps=4),
    Tile(32, 32, 32, stages=3, warps=4, rate=0.6),
)
# A step of 128 is as wide as TMA's widest swizzle, and as a block with a scale of its own.
_TMA_8_BIT = (
    Tile(128, 256, 128, stages=4, warps=8, halves=True),
    Tile(256, 128, 128, stages=4, warps=8, halves=True, rate=0.99),
    Tile(128, 128, 128, stages=6, warps=4, rate=0.97),
    Tile(64, 256, 128, stages=4, warps=4, rate=0.94),
    Tile(64, 128, 128, stages=6, warps=4, rate=0.78),
    Tile(128, 64, 128, stages=6, warps=4, rate=0.68),
    Tile(64, 64, 256, stages=5, warps=4, rate=0.56),
    Tile(64, 64, 128, stages=4, warps=4, rate=0.39),
)
# A step's sum takes registers of its own, and scales of blocks allow no more than 128 columns.
_TMA_8_BIT_STEPS = (
    Tile(128, 128, 128, stages=4, warps=8),
    Tile(64, 128, 128, stages=6, warps=4, rate=0.8),
    Tile(128, 64, 128, stages=6, warps=4, rate=0.65),
    Tile(64, 64, 128, stages=6, warps=4, rate=0.45),
)
_POINTERS_8_BIT = (
    Tile(128, 128, 128, stages=3, warps=8),
    Tile(128, 64, 128, stages=3, warps=8, rate=0.8),
    Tile(64, 64, 128, stages=3, warps=4, rate=0.6),
    Tile(64, 64, 64, stages=3, warps=4, rate=0.5),
)

# In Triton's interpreter an operation costs the same for any size; a small tile lets small tests have partial tiles.
INTERPRETER = Tile(32, 32, 32, stages=1, warps=1, group=2)


@functools.lru_cache(maxsize=256)
def candidates(
    dtype: str,
    *,
    descriptors: bool = True,
    shared_memory: int = 227 << 10,
    result: int | None = None,
    adds: bool = False,
) -> tuple[Tile, ...]:
    """Return the tiles worth trying for a dtype, as `Gemm` names it, that fit into `shared_memory` bytes.

    `result` is as in `Gemm`. With wider results than operands, or if the product `adds` to what the output holds,
    tiles have as many of their stages as fit.

    Raises ValueError if none fits.
    """
    tables = {"f32": _IEEE_32_BIT, "tf32": _TF32}
    if dtype in ("f8", "f8s"):
        tables[dtype] = (_TMA_8_BIT if dtype == "f8" else _TMA_8_BIT_STEPS) if descriptors else _POINTERS_8_BIT
    tiles = tables.get(dtype, _TMA_16_BIT if descriptors else _POINTERS_16_BIT)
    itemsize = Gemm(1, 1, 1, dtype).itemsize
    memory: dict[str, Any] = {"descriptors": descriptors, "result": result, "adds": adds}
    if adds or (result or itemsize) > itemsize:
        tiles = tuple(t.fitting(itemsize, shared_memory, **memory) for t in tiles)
    fitting = tuple(t for t in tiles if t.shared_memory(itemsize, **memory) <= shared_memory)
    if not fitting:
        raise ValueError(f"no {dtype} matmul tile fits into {shared_memory} bytes of shared memory")
    return fitting


# The schedule ---------------------------------------------------------------------------------------------------------
# The tiles of a matmul, and which program computes which tile or part of one. The kernel that does so is in
# hostir.runtime.kernels.matmul_kernel.


@dataclass(frozen=True)
class Schedule:
    """The assignment of the output's tiles to the programs of one launch.

    Fields:
        programs: the number of programs.
        whole: how many tiles, the first ones, are computed by one program each. Each half of an early tile counts.
        parts: the number of parts of each of the other tiles; a program has at most one part. 0 if there are none.
    """

    programs: int
    whole: int
    parts: int = 0


def schedule(tiles: int, steps: int, sms: int, split: int, max_parts: int = MAX_PARTS) -> Schedule:
    """Assign `tiles` of `steps` along K to `sms` programs, the last `split` of them in up to `max_parts` parts each.

    There are fewer parts if programs do not suffice, or parts would be too short; nothing is split in fewer than two.
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
        batches: the number of batches. No tile spans two. Each block is a batch if it is at least as high as a tile, or
            if no tile may span two blocks; lower blocks would leave tiles partly empty.
        rows: the number of rows of a batch.
        tiles: the number of tiles.
        steps: the number of steps along K of each tile.
        blocks: the number of blocks that arrive one after another; 1 if all rows are ready.
        early_blocks, early: the number of early blocks, and of their tiles, each split in two; 0 if tiles span blocks.
        first: the number of tiles that are early, or hold own rows: these are never among the last ones that are split.
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
# How long a matmul takes with a tile, and with which tile it is fastest.


# TFLOP/s of an H200 before power limits it.
PEAK = {"bf16": 820.0, "f16": 820.0, "f32": 14.0, "tf32": 410.0, "f8": 1500.0, "f8s": 1000.0}


@dataclass(frozen=True)
class Rates:
    """The speed of a family of matmul kernels on a GPU. Times are in microseconds.

    Fields:
        peak: TFLOP/s of one SM in the K loop of a tile whose rate is 1, by dtype.
        tile: time of a tile outside its K loop: filling the pipeline, storing.
        split: three times that a part of a split tile adds: to start and synchronize; to read the partial sum of
            another part; to store a partial sum, per element and warp. None if the family never splits.
        read: GB/s at which all SMs together read a right operand that is not in L2.
    """

    peak: Mapping[str, float] = field(hash=False)
    tile: float = 0.0
    split: tuple[float, float, float] | None = None
    read: float = np.inf

    def scaled(self, factor: float) -> Rates:
        """Return the same rates with a K loop that is `factor` times as fast."""
        return replace(self, peak={dtype: factor * peak for dtype, peak in self.peak.items()})

    def whole(self, tile: Tile, gemm: Gemm) -> float:
        """Return the time of a tile that is not split."""
        rate = tile.rate if gemm.block is None else tile.rate_waiting or tile.rate
        steps = -(-gemm.k // tile.k)
        return self.tile + 2e-6 * steps * tile.m * tile.n * tile.k / (self.peak[gemm.dtype] * rate)

    def part(self, tile: Tile, parts: int, whole: float) -> float:
        """Return the time of the last of the `parts` parts of a tile that takes `whole` without a split."""
        assert self.split is not None
        start, read, store = self.split
        return whole / parts + start + read * (1 if parts == 2 else parts) + store * tile.m * tile.n / tile.warps


# The rates of the Triton kernel, measured on an H200 with 132 SMs, and used for every GPU.
TRITON = Rates({d: peak / 132 for d, peak in PEAK.items()}, tile=2.8, split=(3.0, 2.0, 3.0 / 4096), read=4300.0)
IN_L2 = 32 << 20  # bytes of a right operand that stay in an L2 cache of 50 MiB, beside rows and results


def duration(
    tile: Tile, gemm: Gemm, sms: int, rates: Rates = TRITON, arrivals: Sequence[float] = (0.0,)
) -> tuple[float, float]:
    """Return when a matmul ends on `sms` SMs, in microseconds, and when it would end if memory were infinitely fast.

    Its blocks of rows arrive at the times `arrivals`, in the order in which it computes them. Programs take tiles, and
    parts of tiles, in turn; a program begins one when it is free and the rows are there. The tiles of each block read
    the right operand again if it does not fit into L2.
    """
    grid, whole = Grid.of(tile, gemm), rates.whole(tile, gemm)
    plan = grid.schedule(tile, sms)
    if grid.blocks == 1 and not grid.early:
        part = rates.part(tile, plan.parts, whole) if plan.parts else 0.0
        waves, more = divmod(plan.whole, plan.programs)
        # Whether no program has a part after a tile of the last wave.
        alone = (grid.tiles - plan.whole) * plan.parts <= plan.programs - more
        end = max(arrivals) + waves * whole + (max(whole * (more > 0), part) if alone else whole + part)
    else:
        _, ready, took = _work(tile, gemm, sms, rates, arrivals)
        # A program ends when, from some tile on, it never waits: at that tile's arrival, plus all times from there on.
        end = float((ready + took[::-1].cumsum(0)[::-1]).max())
    return max(end, min(arrivals) + _loading(grid, tile, gemm, rates)), end


def block_ends(
    tile: Tile, gemm: Gemm, sms: int, rates: Rates, arrivals: Sequence[float], blocks: int
) -> tuple[float, ...]:
    """Return when each of `blocks` equal blocks of the result's rows has been written, in the matmul's own order.

    The other arguments are those of `duration`. A block that waits for rows which arrive at `inf` ends there.
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
    """Return the tile of each unit of work, and, by round and program, when its rows are there and how long it takes.

    A unit is a tile or a part of one.
    """
    grid, whole = Grid.of(tile, gemm), rates.whole(tile, gemm)
    plan = grid.schedule(tile, sms)
    half, part = (rates.part(tile, n, whole) if n else 0.0 for n in (2 if grid.early else 0, plan.parts))
    last = grid.tiles + grid.early - plan.whole  # tiles that are split
    counts = 2 * grid.early, grid.tiles - last - grid.early, last * plan.parts
    halves, rest = np.arange(counts[0]) // 2, np.arange(grid.early, grid.tiles)
    tiles = np.concatenate([halves, rest[: counts[1]], np.tile(rest[counts[1] :], plan.parts)])
    work = np.zeros((2, -(-len(tiles) // plan.programs) * plan.programs))
    work[0, : len(tiles)] = np.asarray(arrivals)[((tiles + 1) * grid.blocks - 1) // grid.tiles]
    work[1, : len(tiles)] = np.repeat([half, whole, part], counts)
    ready, took = work.reshape(2, -1, plan.programs)
    return tiles, ready, took


def _loading(grid: Grid, tile: Tile, gemm: Gemm, rates: Rates) -> float:
    """Return how long memory takes to load the right side, as often as the L2 does not keep it between blocks."""
    right = gemm.n * gemm.k * gemm.itemsize
    times = min(grid.blocks, grid.batches * -(-grid.rows // tile.m)) if right > IN_L2 else 0
    return times * right / rates.read / 1e3


# How fast blocks are assumed to arrive: GB/s; and if copy engines send them one after another, the microseconds before
# the first of them and between two.
_LINK, _FIRST, _PAUSE = 390.0, 15.0, 2.5
EARLY_WAVES = 2  # the most waves that halves of early tiles fill: with more, all SMs are busy without a split
FINE_WAVES = 8  # with more waves than this, it matters little how many of the last tiles are split
_SUSTAINED = 0.95  # the share of the peak that is left when power limits the clock in long calls
_WORTH = 1.01  # a tile that is not split is preferred if its estimate is at most this many times as long
SPLIT_STEP = 9  # the step between the numbers of split tiles that are tried


def alike(gemm: Gemm, tiles: Sequence[Tile]) -> Gemm:
    """Return a gemm that stands for all with as many of each of these tiles; itself where none is known to.

    To choose a tile takes milliseconds, and numbers of rows may never repeat.
    """
    heights, block = {tile.m for tile in tiles}, gemm.block
    step = min(heights)
    if block is None:
        return replace(gemm, m=-(-gemm.m // step) * step)
    blocks, rest = divmod(gemm.m, block)
    spans = not gemm.separate and block < max(heights)  # tiles that are higher than a block span several
    if gemm.batches > 1 or rest or (spans and step % blocks):
        return gemm
    step //= blocks if spans else 1
    high = -(-block // step) * step
    high -= spans and high > block and high in heights  # or these tiles would span no blocks any more
    return replace(gemm, m=blocks * high, block=high)


@functools.lru_cache(maxsize=1024)
def choose(gemm: Gemm, sms: int, tiles: tuple[Tile, ...], rates: Rates = TRITON) -> Tile:
    """Return the one of `tiles`, with its best split, with which a matmul on `sms` SMs is fastest.

    If rows arrive in blocks, the first block is there, and the others are assumed to come one by one over NVLink. Of
    tiles with equal estimates the one with most early blocks is taken: it was faster on H200s.
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
    """Yield the tile without a split, and with early and last tiles split in all ways that may be faster.

    If all rows are ready, only the tiles of a last wave that fills at most half of the SMs are split. Tiles of a single
    wave are never split, as that was never faster.
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
    """Yield the tile with various numbers of last tiles split, and of their parts; each part has its own program."""
    units = grid.tiles + grid.early
    if grid.tiles <= sms:
        return
    last = units % sms
    for parts in (2,) if grid.early else (2, 4, MAX_PARTS):  # with early tiles, registers suffice for two parts only
        most = min(sms // parts, grid.tiles - grid.first)
        steps = range(SPLIT_STEP, most + 1, SPLIT_STEP) if units <= FINE_WAVES * sms else ()
        for split in sorted({*steps, last, sms - last, grid.tiles // grid.blocks}):
            plan = schedule(units, grid.steps, sms, split, parts)
            if 0 < split <= most and plan.parts and plan.programs == sms:
                yield replace(tile, split=split, parts=parts)
