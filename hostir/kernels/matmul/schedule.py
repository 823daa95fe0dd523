"""The order in which a persistent matmul visits its tiles.

The tiles of a matmul, and which program computes which tile or part of one. The kernel that does so is in
hostir.kernels.matmul.kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from hostir.kernels.matmul.tiles import MAX_PARTS, MIN_STEPS, Gemm, Tile


@dataclass(frozen=True)
class Schedule:
    """The assignment of the output's tiles to the programs of one launch.

    Fields:
        programs: the number of programs.
        unsplit: how many tiles, the first ones, are computed by one program each. Each half of an early tile counts.
        parts: the number of parts of each of the other tiles; a program has at most one part. 0 if there are none.
    """

    programs: int
    unsplit: int
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
