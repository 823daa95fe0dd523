"""Copies of rows to peers, made by the matmul kernel that computes the rows.

If there are few rows, this takes less time than a second kernel that copies the output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hostir.kernels.flags.copies import PushKernel, raise_piece_flags


class Pushed(NamedTuple):
    """Copies of pieces to peers: the fields of a `PushKernel` on the device.

    `table` and `arrived` are pointers, `count` is the number of pieces, and `height` is the number of rows of a piece.
    """

    table: Any
    arrived: Any
    count: Any
    height: Any


@triton.jit
def push_tile(pushed, x, row, end, column, N, ALIGNED: tl.constexpr):
    """Store a rounded tile `x` to the targets of all pieces that contain rows of the tile.

    The tile begins at row `row` and at column `column`. Rows from `end` on and columns from `N` on are padding, and are
    not stored. ALIGNED is True if all targets are aligned to 16 bytes.
    """
    r = (row + tl.arange(0, x.shape[0])).to(tl.int64)
    c = column + tl.arange(0, x.shape[1])
    for piece in range(pushed.count):
        top = tl.load(pushed.table + piece) // (N * (x.dtype.primitive_bitwidth // 8))
        target = tl.load(pushed.table + pushed.count + piece).to(tl.pointer_type(x.dtype))
        if ALIGNED:
            target = tl.multiple_of(target, 16)
        rows = (r < end) & (r >= top) & (r < top + pushed.height)
        tl.store(target + (r - top)[:, None] * N + c[None, :], x, mask=rows[:, None] & (c < N)[None, :])


@triton.jit
def raise_pushed(pushed, PIECES: tl.constexpr):
    """Count this program as done. The last program of the launch raises the flags of all pieces.

    So a flag rises only after all stores of the launch have arrived at the peers.
    """
    tl.debug_barrier()  # orders the writes of all threads before the arrival that one thread signals
    if tl.atomic_add(pushed.arrived, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(pushed.arrived, 0)
        raise_piece_flags(pushed.table, pushed.count, 0, pushed.count, PIECES)


def pushed_rows(pushed: PushKernel, out: torch.Tensor) -> int:
    """Return the number of rows of a piece.

    Raises ValueError if `out` is not contiguous, or if a piece does not consist of complete rows.
    """
    row = out.shape[-1] * out.element_size()
    if not out.is_contiguous():
        raise ValueError(f"expected a dense result to copy to peers, got strides {list(out.stride())}")
    if row == 0 or pushed.size % row or any(offset % row for offset in pushed.offsets):
        raise ValueError(f"expected pieces of whole rows of {row} bytes, got {pushed.size} bytes")
    return pushed.size // row
