"""The tiles that a matmul may run with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hostir.runtime.kernels.split import MOST_PARTS


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
        early: blocks of rows, the first ones, whose tiles are split in two, where none spans two blocks: so more
            multiprocessors are busy while few rows have come.
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
    early: int = 0

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

# The interpreter pays for each operation, not for each element; small tiles make small tensors ragged.
INTERPRETER = Config(32, 32, 32, stages=1, warps=1, group=2)

# Own rows that are worth tiles of their own: where they are fewer, the right side is read more often than a copy costs.
FEWEST_APART = 64


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


@dataclass(frozen=True)
class Ahead:
    """The tiles of the first blocks, which do not count for `Config.split`: early ones, and own rows that are apart.

    Fields:
        blocks: that are early.
        early: their tiles, two parts each.
        tiles: those and own rows'.
    """

    blocks: int = 0
    early: int = 0
    tiles: int = 0

    @classmethod
    def of(cls, tile: Config, batches: int, M: int, N: int, block: int | None, apart: bool) -> Ahead:
        """Those of `batches` times `M` rows, as `in_blocks` has them. None where tiles span two blocks."""
        if block is None or block % M:
            return cls()
        blocks, of_block = min(tile.early, batches * M // block), block // M * -(-M // tile.m) * -(-N // tile.n)
        return cls(blocks, blocks * of_block, max(blocks, apart) * of_block)
