"""Which tile shape a matmul runs with."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from hostir.runtime.kernels.split import MOST_PARTS, schedule


@dataclass(frozen=True)
class Config:
    """A tile of the output and how the kernel works on it.

    Fields:
        m, n, k: rows and columns of the output tile, and the contraction's step.
        stages: depth of the software pipeline.
        warps: warps of one program.
        rate: throughput, relative to the fastest tile of the same table (an estimate to choose by).
        fed: the same where rows come while the kernel runs, if it differs.
        halves: store the tile in two halves, which needs half the shared memory and so leaves room for a stage.
        group: rows of tiles walked together, so that they find each other's operands in L2.
        split: tiles, the last ones, whose contraction is split among several programs each.
        parts: programs for one of these, at most.
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
    parts: int = MOST_PARTS
    fed: float | None = None

    def shared_memory(self, itemsize: int, *, descriptors: bool, biased_batch: bool = False) -> int:
        """Bytes of shared memory for elements of `itemsize` bytes.

        Counts the pipeline, the tile that a TMA store sends out, and room for barriers and layout changes: more of it
        where a whole tile of a batch meets a bias.
        """
        pipeline = self.stages * (self.m + self.n) * self.k * itemsize
        outgoing = self.m * self.n * itemsize // (2 if self.halves else 1)
        changes = _BIASED_BATCH if biased_batch and not self.halves else 0
        return pipeline + (outgoing if descriptors else 0) + _SCRATCH + changes

    def fitting(self, itemsize: int, shared_memory: int, *, descriptors: bool, biased_batch: bool) -> Config:
        """The tile with as many stages as fit into `shared_memory` bytes."""
        tile = self
        while tile.stages > 1 and shared_memory < tile.shared_memory(
            itemsize, descriptors=descriptors, biased_batch=biased_batch
        ):
            tile = replace(tile, stages=tile.stages - 1)
        return tile


# What the compiler takes for barriers and changes of layout, rounded up: 1 KiB was the most seen.
_SCRATCH = 2 << 10
_BIASED_BATCH = 8 << 10

# Tables are ordered by preference: of two tiles with the same estimate, the first wins.
_TMA_16_BIT = (
    Config(128, 256, 64, stages=4, warps=8, halves=True),
    Config(256, 128, 64, stages=4, warps=8, halves=True, rate=0.98, fed=0.85),
    Config(128, 128, 64, stages=6, warps=4, rate=0.95, fed=0.86),
    Config(64, 256, 64, stages=4, warps=4, rate=0.9, fed=0.88),
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

# The interpreter pays for each operation, not for each element; small tiles make small tensors ragged.
INTERPRETER = Config(32, 32, 32, stages=1, warps=1, group=2)

# Own rows that are worth tiles of their own: where they are fewer, the right side is read more often than a copy costs.
FEWEST_APART = 64

# What a tile costs besides its arithmetic (filling the pipeline, storing), in multiply-adds of the fastest tile.
_FIXED_COST = 256 * 128 * 256
# What a tile that is split costs besides, as seen on an H200: to begin anew and to meet (4 us), to read what each part
# has left (2 us), and to leave it, for each element (6 us of a tile of 128 x 256).
_MEETING_COST, _PART_COST, _SUM_COST = 12e6, 6e6, 540
# What a multiprocessor multiplies and adds while a byte comes from a peer: of 390 T/s, over 132, at 300 GB/s.
_WORK_OF_A_BYTE = 390e12 / 132 / 300e9
# The same while all of them read a byte of a right side that the L2 does not hold, at 4.3 TB/s.
_WORK_OF_A_BYTE_READ = 390e12 / 132 / 4.3e12
_IN_L2 = 32 << 20  # beside rows and results, of 50 MiB


def candidates(dtype: torch.dtype, *, descriptors: bool = True, tf32: bool = False) -> tuple[Config, ...]:
    """The tiles worth trying for operands of `dtype` (float32 on tensor cores when `tf32`)."""
    if dtype == torch.float32:
        return _TF32 if tf32 else _IEEE_32_BIT
    return _TMA_16_BIT if descriptors else _POINTERS_16_BIT


def in_blocks(batches: int, M: int, block: int | None, m: int, apart: bool = False) -> tuple[int, int]:
    """`(batches, rows of each)` such that tiles of `m` rows span no two blocks of `block` of `batches` times `M` rows.

    Rows of several batches keep them. Unless they must be `apart`, blocks smaller than a tile are left together: apart,
    they fill tiles badly.
    """
    if batches > 1 or block is None or (block < m and not apart):
        return batches, M
    return M // block, block


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
    """The tile for `batch` products `[M, K] @ [K, N]` on `sms` multiprocessors with `shared_memory` bytes each.

    Where the rows come in blocks of `block`, tiles keep apart as `in_blocks` says, or always where `apart`.

    Estimates the time of each candidate, with the tiles of the last wave whole or split, and takes the least: all of
    them where the wave is thin; of a thick one as many as leave a program for each of two parts, which may pay where
    rows come late. Blocks come as they do over NVLink. Tiles of one wave alone are never split: that never paid.

    Raises ValueError when no candidate fits into the shared memory.
    """
    fitting = [
        tile
        for tile in candidates(dtype, descriptors=descriptors, tf32=tf32)
        if tile.shared_memory(dtype.itemsize, descriptors=descriptors) <= shared_memory
    ]
    if not fitting:
        raise ValueError(f"no {dtype} matmul tile fits into {shared_memory} bytes of shared memory")
    tried = []
    for tile in fitting:
        tiles = _tiles(tile, *in_blocks(batch, M, block, tile.m, apart), N)
        tried.append(replace(tile, split=0))
        last = tiles % sms
        if last and tiles > sms:
            thin = 2 * last <= sms
            tried.append(replace(tile, split=last) if thin else replace(tile, split=sms - last, parts=2))
    if block is None:
        return min(tried, key=lambda tile: _alone(tile, batch, M, N, K, sms))
    return min(tried, key=lambda tile: _fed(tile, batch, M, N, K, dtype.itemsize, sms, block, apart))


def _tiles(tile: Config, batches: int, M: int, N: int) -> int:
    return batches * -(-M // tile.m) * -(-N // tile.n)


def _part(tile: Config, parts: int, whole: float) -> float:
    """What the last program of a tile that is split takes, if a tile takes `whole`. Of two it reads what one left."""
    read = 1 if parts == 2 else parts
    return whole / parts + _MEETING_COST + read * _PART_COST + tile.m * tile.n * _SUM_COST


def _alone(tile: Config, batches: int, M: int, N: int, K: int, sms: int) -> float:
    """What all rows take that are there, in multiply-adds of one multiprocessor with the fastest tile."""
    tiles, steps = _tiles(tile, batches, M, N), -(-K // tile.k)
    plan = schedule(tiles, steps, sms, tile.split, tile.parts)
    whole = steps * tile.m * tile.n * tile.k / tile.rate + _FIXED_COST
    return -(-plan.whole // plan.programs) * whole + (_part(tile, plan.parts, whole) if plan.parts else 0)


def _fed(
    tile: Config, batch: int, M: int, N: int, K: int, itemsize: int, sms: int, block: int, apart: bool
) -> tuple[float, float]:
    """The same where rows come in blocks, the first at once and each other one so much after the one before.

    The tiles of each block read all of the right side anew, if the L2 does not keep it from one block to the next.
    Where that takes longer than all else, what else takes comes second.
    """
    batches, rows = in_blocks(batch, M, block, tile.m, apart)
    tiles, steps, blocks = _tiles(tile, batches, rows, N), -(-K // tile.k), max(1, batch * M // block)
    coming = block * K * itemsize * _WORK_OF_A_BYTE
    whole = steps * tile.m * tile.n * tile.k / (tile.fed or tile.rate) + _FIXED_COST
    plan = schedule(tiles, steps, sms, min(tile.split, tiles - tiles // blocks), tile.parts)
    free = [0.0] * plan.programs
    for number in range(plan.whole):
        program = number % plan.programs
        free[program] = max(free[program], number * blocks // tiles * coming) + whole
    left = tiles - plan.whole
    for number in range(left * plan.parts):
        program = (plan.whole + number) % plan.programs
        there = (plan.whole + number % left) * blocks // tiles * coming
        free[program] = max(free[program], there) + _part(tile, plan.parts, whole)
    right = N * K * itemsize
    times = min(blocks, batches * -(-rows // tile.m)) if right > _IN_L2 else 0
    return max(*free, times * right * _WORK_OF_A_BYTE_READ), max(free)
