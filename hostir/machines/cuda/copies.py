"""One-sided copies on CUDA.

Copy engines copy between GPUs. Within a GPU the driver copies dense tensors, and kernels copy others. One kernel on a
few SMs may also make many copies to peers and send their signals.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.layout import collapse
from hostir.kernels.parameters import TAPING
from hostir.kernels.repeats import Kernel, repeating
from hostir.kernels.table import kernels_for
from hostir.machines.binding import Step, copy_here
from hostir.machines.cuda.context import PlanContext
from hostir.machines.cuda.driver import DEVICE, Memcpy2D, check, cuda_driver
from hostir.machines.cuda.flags import CudaFlags
from hostir.machines.pushes import PushedProduct, Pushes
from hostir.plan.operations import ComputeOp, CopyOp

if TYPE_CHECKING:
    from hostir.kernels.flags.copies import PushKernel


class CopySteps:
    """Makes the steps of a plan's one-sided copies. A step makes one copy, or launches one kernel for several copies.

    Fields:
        pushes: the run of copies by SMs to which an operation belongs, by the id of the operation.
        products: the pushed product to which an operation belongs, by the id of the operation.
        behind_products: the ids of the computations that directly follow a pushed product.
        push_kernels: the number of kernels created so far that carry out a run of copies.
    """

    def __init__(self, context: PlanContext, flags: CudaFlags) -> None:
        self.context = context
        self.flags = flags
        self.push_kernels = 0
        runs = Pushes.of(context.unrolled)
        self.pushes = {id(op): pushes for pushes in runs for op in pushes.ops}
        products = [
            each for each in PushedProduct.of(context.unrolled, runs) if self.pushing_kernel(each.product) is not None
        ]
        self.products = {id(op): each for each in products for op in (each.product, *each.pushes.ops)}
        self.behind_products = {id(each.reader) for each in products}

    def copy(self, op: CopyOp) -> Step:
        """Return the step that copies by the driver: from or to a peer, or between dense tensors of this GPU."""
        registers, streams, x, out, stream = self.context.registers, self.context.streams, op.x, op.out, op.stream
        copy = StridedCopy()
        return lambda: copy(registers[out], registers[x], streams[stream].cuda_stream)

    def copy_within(self, op: CopyOp) -> Step:
        """Return the step that copies within this GPU: by the driver if both tensors are dense, else by a kernel."""
        layouts = self.context.unrolled.layouts
        if layouts[op.x].dense and layouts[op.out].dense:
            return self.copy(op)
        registers, x, out, kernel = self.context.registers, op.x, op.out, self.context.kernels["copy"]
        return lambda: copy_here(registers[out], registers[x], kernel)

    def push(self, pushes: Pushes) -> Step:
        """Return the step that launches one kernel for a run of copies and signals."""
        registers, source = self.context.registers, self.context.unrolled.buffers[pushes.copies[0][0].x]
        kernel = self.pushing(pushes)
        return self.context.launching(pushes.ops[0], lambda: kernel(registers[source]))

    def pushed_product(self, op: ComputeOp, pushes: Pushes) -> Step:
        """Return the step that launches one kernel for a product and for copies of its rows: see `PushedProduct`."""
        registers, out, operands, kernel = self.context.registers, op.out, op.operands, self.pushing_kernel(op)
        assert kernel is not None
        multiply = repeating(kernel, pushed=self.pushing(pushes), **op.options)
        return self.context.launching(op, lambda: multiply(registers[out], *[registers[x] for x in operands]))

    def pushing_kernel(self, op: ComputeOp) -> Kernel | None:
        """Return the kernel that computes a product and also stores it to peers; None if there is no such kernel."""
        return kernels_for(self.context.kernels, torch_dtype(op.dtype)).get(f"{op.computation}_pushed")

    def pushing(self, pushes: Pushes) -> PushKernel:
        """Return the kernel that carries out a run of copies and sends their signals."""
        registers, flags = self.context.registers, self.flags
        to = registers[pushes.copies[0][0].out]
        pieces = []
        for copy, signal in pushes.copies:
            needless = signal is None or flags.is_sent(signal)
            flag, epoch = (0, 0) if signal is None or needless else (flags.raised(signal), signal.epoch)
            offset = self.context.unrolled.layouts[copy.x].offset * to.element_size()
            pieces.append((offset, registers[copy.out].data_ptr(), flag, epoch))
        # The kernel raises its flags in any order. So it raises each flag once, to its last epoch: a lower epoch might
        # arrive after the peer has reset the flag to 0.
        last = {flag: number for number, (*_, flag, _) in enumerate(pieces)}
        pieces = [
            (offset, target, flag if last[flag] == number else 0, epoch)
            for number, (offset, target, flag, epoch) in enumerate(pieces)
        ]
        return self.push_kernel(pieces, to.numel() * to.element_size(), pushes.sms)

    def push_kernel(self, pieces: Sequence[tuple[int, ...]], size: int, sms: int) -> PushKernel:
        from hostir.kernels.flags.copies import Piece, PushKernel  # which needs Triton

        self.push_kernels += 1
        context = self.context
        return PushKernel(
            context.device, [Piece(*each) for each in pieces], size, sms, context.words, self.push_kernels
        )


class StridedCopy:
    """A copy between strided tensors by copy engines. It is one memcpy, or several 2D copies of equally spaced rows.

    The first call fixes the layouts of both tensors; later calls may change only their addresses.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, Memcpy2D | int]] | None = (
            None  # offset in out, offset in x, and a 2D copy or a size in bytes
        )

    def __call__(self, out: torch.Tensor, x: torch.Tensor, stream: int) -> None:
        """Copy `x` to `out` on the stream with the handle `stream`. Do nothing if both have the same address."""
        target, source = out.data_ptr(), x.data_ptr()
        if target == source:
            return
        if self.pieces is None:
            self.pieces = pieces(out, x)
        driver, handle, writer = cuda_driver(), ctypes.c_void_p(stream), TAPING.writer
        for to, start, piece in self.pieces:
            if isinstance(piece, int):
                if writer is not None:
                    writer.copy(target + to, source + start, piece, stream)
                code = driver.cuMemcpyAsync(
                    ctypes.c_uint64(target + to), ctypes.c_uint64(source + start), ctypes.c_size_t(piece), handle
                )
            else:
                piece.out_address, piece.x_address = target + to, source + start
                if writer is not None:
                    writer.copy_rows(piece, stream)
                code = driver.cuMemcpy2DAsync_v2(ctypes.byref(piece), handle)
            if code:
                check(code, "a copy")


def pieces(out: torch.Tensor, x: torch.Tensor) -> list[tuple[int, int, Memcpy2D | int]]:
    """Return the copies that make `out` equal to `x`.

    Each copy is a triple of the byte offset in `out`, the byte offset in `x`, and a description. The description is a
    `Memcpy2D`, or the size in bytes of a contiguous copy.
    """
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
