"""Schedules of the persistent matmul: the order of its tiles, and the program that computes each tile or part.

The kernel that follows a schedule is in hostir.kernels.matmul.kernel. This module needs neither torch nor Triton.
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
        unsplit: the number of units at the beginning that are not split further. A unit is a tile, or one half of an
            early tile. Each unit is computed by one program.
        parts: the number of parts of each of the remaining tiles; 0 if no tiles remain. A program computes at most one
            of these parts.
    """

    programs: int
    unsplit: int
    parts: int = 0


def schedule(tiles: int, steps: int, sms: int, split: int, max_parts: int = MAX_PARTS) -> Schedule:
    """Return a schedule of `tiles` tiles for at most `sms` programs. Each tile has `steps` steps along K.

    Each of the last `split` tiles is split into `max_parts` parts, or fewer if there are too few programs or if parts
    would be too short. If fewer than two parts are possible, no tile is split.
    """
    split = min(split, tiles)
    parts = min(sms // split, steps // MIN_STEPS, max_parts) if split else 0
    if parts < 2:
        return Schedule(min(sms, tiles), tiles)
    return Schedule(min(sms, max(tiles - split, split * parts)), tiles - split, parts)


@dataclass(frozen=True)
class Grid:
    """The counts of the tiles that cover an output. Programs take the tiles batch by batch, and block by block.

    Fields:
        batches: the number of batches. No tile spans two batches. If the gemm has one batch and its rows arrive in
            blocks, each block counts as a batch if it is at least as high as a tile, or if no tile may span two blocks.
            Other blocks do not count as batches, because their tiles would be partly empty.
        rows: the number of rows of a batch.
        tiles: the number of tiles.
        steps: the number of steps along K of each tile.
        blocks: the number of blocks that arrive one after another; 1 if all rows are ready.
        early_blocks: the number of blocks at the beginning whose tiles are split in two; 0 if tiles span blocks.
        early: the number of tiles of these early blocks.
        first: the number of tiles at the beginning that are early or hold `own_rows`. They are never among the tiles at
            the end that are split.
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
        """Return the largest number of blocks that hold rows of one tile.

        A block has `height` rows. Rows are counted through all batches.
        """
        tops = np.arange(0, self.rows, tile.m) + self.rows * np.arange(self.batches)[:, None]
        ends = np.minimum(tops + tile.m, tops - tops % self.rows + self.rows)
        return int(((ends - 1) // height - tops // height).max()) + 1

    def schedule(self, tile: Tile, sms: int) -> Schedule:
        """Return the schedule of this grid's tiles for programs on `sms` SMs."""
        return schedule(self.tiles + self.early, self.steps, sms, min(tile.split, self.tiles - self.first), tile.parts)
