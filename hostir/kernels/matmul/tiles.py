"""Tiles that a matmul can run with, and the memory that they need.

A program is an instance of the Triton kernel: one thread block on one SM. This module needs neither torch nor Triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from hostir.ir.types import DTYPES

MIN_STEPS = 4  # the fewest steps along K of a part of a split tile: shorter parts cost more than they save
MAX_PARTS = 8  # the most parts of a split tile: the last program reads the partial sums of all others
SCALE_BLOCK = 128  # with block-wise scales, the number of elements along K, and of columns of b, that share a scale
MIN_OWN_ROWS = 64  # fewer `own_rows` are copied into their block: separate tiles for them would read b once more


@dataclass(frozen=True)
class Gemm:
    """A matmul `[batches, m, k] @ [k, n]`, and how its rows arrive.

    Fields:
        dtype: `bf16`, `f16`, `f32`, `tf32` (f32 on tensor cores), `f8` (8-bit operands; tensor cores add up all
            products) or `f8s` (8-bit operands; each step along K is scaled, or added to the others, in f32).
        block: the number of rows of a block, if rows arrive block by block while the kernel runs. None if all rows are
            ready.
        separate: True if no tile may span two blocks, because the rows of one block are elsewhere in memory.
        overlapped: True if a kernel directly before this one copies the blocks and overlaps it; False if copy engines
            copy them.
        result: the bytes of an element of the result; None if elements of the result and of operands have the same
            size.
        matrices: the number of right sides `[k, n]`. Each is multiplied by equally many batches.
        grouped: True for `hostir.kernels.grouped`. The batches are groups of rows, and `m` is their mean size. If rows
            are not collected, they are groups of rows of one source.
        collects: True if a kernel collects the rows of the groups first. It waits for rows that arrive.
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
    matrices: int = 1
    grouped: bool = False
    collects: bool = False

    @property
    def itemsize(self) -> int:
        """The bytes of an element of an operand."""
        return 1 if self.dtype.startswith("f8") else DTYPES[self.dtype.removeprefix("t")].bytes

    @property
    def rows(self) -> int:
        """The number of rows of all batches."""
        return self.batches * self.m


@dataclass(frozen=True)
class Tile:
    """The shape of an output tile, and the way in which the kernel computes all tiles.

    Fields:
        m, n, k: rows and columns of the output tile, and the step along K.
        stages: depth of the software pipeline.
        warps: warps per program.
        rate: throughput of the K loop, relative to the fastest tile of the same table.
        rate_waiting: the same throughput if rows arrive while the kernel runs; None if it is equal to `rate`.
        halves: True to store the tile in two halves. The staging buffer is then half as large, which leaves room for
            another stage of the pipeline.
        group: rows of tiles that are computed together, so that they find each other's operands in L2.
        split: the number of tiles at the end that are split along K (split-K). Several programs share each of these
            tiles.
        parts: the largest number of programs that share a tile at the end.
        early_blocks: the number of blocks at the beginning in which each tile is split in two along K, so that more SMs
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
        """A copy of this tile that splits no tiles. `candidates` returns only such tiles."""
        return replace(self, split=0, parts=MAX_PARTS, early_blocks=0)

    def shared_memory(self, itemsize: int, *, descriptors: bool, result: int | None = None, adds: bool = False) -> int:
        """Return an upper bound, in bytes, of the shared memory that a program needs.

        Shared memory holds the stages of the pipeline, the tile that a TMA store reads, vectors and barriers. It also
        holds a tile of the old output if the product is added to it. After the K loop, the pipeline's memory may serve
        to convert the layout of the float32 sums.

        Args:
            itemsize: the bytes of an element of an operand.
            descriptors: True if tiles move through TMA descriptors.
            result: the bytes of an element of the result; by default `itemsize`.
            adds: True if the product is added to the old output.
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
        """Return this tile with fewer stages if they do not all fit into `shared_memory` bytes, but at least one stage.

        The other arguments are as in `Tile.shared_memory`.
        """
        tile = self
        while tile.stages > 1 and shared_memory < tile.shared_memory(
            itemsize, descriptors=descriptors, result=result, adds=adds
        ):
            tile = replace(tile, stages=tile.stages - 1)
        return tile


# Bytes for barriers, and for a vector (scales, bias or flags) that changes its layout while the pipeline holds the next
# tile: at most 1056, for 256 numbers in float32 and 4 stages.
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
# Without tensor cores, arithmetic is the bottleneck with any tile. A small tile fits into registers.
_IEEE_32_BIT = (
    Tile(64, 64, 16, stages=4, warps=4),
    Tile(32, 32, 32, stages=3, warps=4, rate=0.6),
)
# A step of 128 is as wide as TMA's widest swizzle, and as a block that shares a scale.
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
# The sum of a step takes further registers, and block-wise scales allow no more than 128 columns.
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

# Tiles of grouped matmuls. The first rate was measured on an H100, and the other rates are guesses.
_GROUPED_16_BIT = Tile(128, 256, 64, stages=3, warps=8, rate=0.95)
_GROUPED_FEW_ROWS = Tile(64, 128, 64, stages=4, warps=4, rate=0.55)
_GROUPED_32_BIT = Tile(64, 64, 16, stages=4, warps=8)
_GROUPED_8_BIT = Tile(128, 128, 128, stages=4, warps=8, rate=0.9)
_GROUPED_8_BIT_FEW_ROWS = Tile(64, 128, 128, stages=5, warps=4, rate=0.7)
COLLECTING = 640  # the columns of a product for which an H100 takes as long as to collect its rows
FEW_ROWS = 64  # groups of at most so many rows get lower tiles

# In Triton's interpreter an operation costs the same for any size. With a small tile, small tests have partial tiles.
INTERPRETER = Tile(32, 32, 32, stages=1, warps=1, group=2)


def grouped_tile(rows: int, itemsize: int) -> Tile:
    """Return the tile of a grouped matmul, for groups of about `rows` rows, and operands with so many bytes an element.

    A tile holds rows of a single group.
    """
    if itemsize == 4:
        return _GROUPED_32_BIT
    if itemsize == 1:
        return _GROUPED_8_BIT_FEW_ROWS if rows <= FEW_ROWS else _GROUPED_8_BIT
    return _GROUPED_FEW_ROWS if rows <= FEW_ROWS else _GROUPED_16_BIT


def collecting_pays(sources: int, groups: int, rows: int, columns: int, height: int) -> bool:
    """Return True if a grouped matmul is faster with rows that a kernel collects first.

    Collecting reads and writes the rows once. Without it, each source has tiles of its own, so more of them are partly
    empty: on average, half a tile of each group and source.

    Args:
        rows: the number of rows of all sources.
        columns: the number of columns of the product.
        height: the number of rows of a tile.
    """
    empty = (sources - 1) * groups / 2 / (rows / height + groups / 2)
    return empty > COLLECTING / max(columns, 1)


@functools.lru_cache(maxsize=256)
def candidates(
    dtype: str,
    *,
    descriptors: bool = True,
    shared_memory: int = 227 << 10,
    result: int | None = None,
    adds: bool = False,
) -> tuple[Tile, ...]:
    """Return the tiles worth trying for a dtype (as in `Gemm`) that fit into `shared_memory` bytes.

    The other arguments are as in `Tile.shared_memory`. If results are wider than operands, or if the product is added
    to the old output, tiles get fewer stages where necessary. Raises ValueError if no tile fits.
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
