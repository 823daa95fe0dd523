"""Copies of strided tensors by copy engines."""

from __future__ import annotations

import ctypes

import torch

from hostir.kernels.layout import collapse
from hostir.machines.cuda.driver import DEVICE, Memcpy2D, check, cuda_driver


class StridedCopy:
    """A copy between strided tensors by copy engines: one memcpy, or 2D copies of equally spaced rows.

    The first call fixes the layouts of both tensors; later calls may change only their addresses.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, Memcpy2D | int]] | None = (
            None  # offset in out, offset in x, and a 2D copy or a size in bytes
        )

    def __call__(self, out: torch.Tensor, x: torch.Tensor, stream: int) -> None:
        """Copy `x` to `out` on the stream of a given handle; do nothing if they are the same memory."""
        target, source = out.data_ptr(), x.data_ptr()
        if target == source:
            return
        if self.pieces is None:
            self.pieces = pieces(out, x)
        driver, handle = cuda_driver(), ctypes.c_void_p(stream)
        for to, start, piece in self.pieces:
            if isinstance(piece, int):
                code = driver.cuMemcpyAsync(
                    ctypes.c_uint64(target + to), ctypes.c_uint64(source + start), ctypes.c_size_t(piece), handle
                )
            else:
                piece.out_address, piece.x_address = target + to, source + start
                code = driver.cuMemcpy2DAsync_v2(ctypes.byref(piece), handle)
            if code:
                check(code, "a copy")


def pieces(out: torch.Tensor, x: torch.Tensor) -> list[tuple[int, int, Memcpy2D | int]]:
    """Return the copies that make `out` equal to `x`: byte offsets in both, and a 2D copy or a size in bytes."""
    size = x.element_size()
    levels = collapse(x.shape, x.stride(), out.stride()) or [(1, 1, 1)]
    if levels[0][0] == 0:
        return []
    if levels[-1][1:] != (1, 1):
        levels.append((1, 1, 1))
    width = levels[-1][0] * size
    if len(levels) == 1:
        return [(0, 0, width)]
    *outer, (height, x_pitch, out_pitch), _ = levels
    where = [(0, 0)]
    for count, x_step, out_step in outer:
        where = [(to + i * out_step * size, start + i * x_step * size) for to, start in where for i in range(count)]
    if x_pitch * size < width or out_pitch * size < width:  # rows that repeat or overlap have no pitch
        rows = [(i * out_pitch * size, i * x_pitch * size) for i in range(height)]
        return [(to + down, start + along, width) for to, start in where for down, along in rows]
    return [(to, start, _rows(x_pitch * size, out_pitch * size, width, height)) for to, start in where]


def _rows(x_pitch: int, out_pitch: int, width: int, height: int) -> Memcpy2D:
    return Memcpy2D(
        x_memory=DEVICE, out_memory=DEVICE, x_pitch=x_pitch, out_pitch=out_pitch, width=width, height=height
    )
