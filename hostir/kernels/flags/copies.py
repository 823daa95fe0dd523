"""A kernel on a few SMs that copies pieces of memory to other GPUs, and raises a flag after each piece.

A copy engine moves large pieces faster, but takes microseconds to begin a copy and to signal after it. The next kernel
of the stream may start while this one copies (programmatic dependent launch, see `ReadyFlags.overlapped_sms`), and use
rows as soon as their flags rise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from hostir.kernels.devices import (
    INTERPRETED,
    Compiled,
    bind_thread,
    launching,
    limits,
    only_loads,
)
from hostir.kernels.flags.signals import loaded
from hostir.kernels.layout import Words

WARPS = 1 if INTERPRETED else 16
PER_THREAD = 64  # bytes that a thread loads before it stores them
BATCH = 2 << 20  # bytes per batch: at the end of a batch every program waits until all its writes have arrived
MAX_PIECES = 32  # per batch
GROUPS = 2  # groups of programs, which take turns with batches: while one group waits, the other writes


@dataclass(frozen=True)
class Piece:
    """A contiguous range of the source that is copied to a peer, and the flag that is raised afterwards.

    Fields:
        offset: the offset of the first byte in the source.
        target: the address to copy to. Nothing is copied if it is the address of the piece in the source.
        flag: the address of an int64 to set to `epoch`, or 0 for no flag. Two pieces of a kernel never share a flag.
        epoch: the value that the flag is set to.
    """

    offset: int
    target: int
    flag: int = 0
    epoch: int = 0


@triton.jit(do_not_specialize=["units", "pieces", "together"])
def push_kernel(
    source,  # pointer
    table,  # [4, pieces] of int64: offset, target, flag and epoch of each Piece
    arrived,  # [batches] of int32, 0 before and after. Counts programs that are done, plus 1 if the previous batch is.
    units,  # elements of a piece
    pieces,
    together,  # pieces per batch
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENTS: tl.constexpr,  # let the next kernel of the stream start early
):
    """Copy the pieces, batch by batch, and raise their flags.

    A batch consists of `together` successive pieces. The programs form GROUPS groups, and each group takes every
    GROUPS-th batch. Each program of the group copies a part of the batch. A batch is complete once all programs of its
    group have copied their parts, and the batch before it, which may belong to another group, is complete. The program
    that completes a batch raises the flags of the batch's pieces.
    """
    if DEPENDENTS:
        gdc_launch_dependents()
    group, program = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    programs = _programs_of(group, GROUPS)
    source = source.to(tl.int64, bitcast=True)
    unit = tl.arange(0, BLOCK)
    for first in range(group * together, pieces, GROUPS * together):
        count = min(together, pieces - first)
        # The pieces of a batch form one sequence of units. Each program copies an equal part of the sequence.
        part = tl.cdiv(tl.cdiv(count * units, programs), BLOCK) * BLOCK
        at = program * part
        end = min(count * units, at + part)
        while at < end:
            piece, within = first + at // units, at % units
            size = min(end - at, units - within)
            start, target = source + tl.load(table + piece), tl.load(table + pieces + piece)
            if start != target:
                skipped = within.to(tl.int64) * (UNIT.primitive_bitwidth // 8)
                x, out = (start + skipped).to(tl.pointer_type(UNIT)), (target + skipped).to(tl.pointer_type(UNIT))
                stop = size
                if ALIGNED:  # 16 bytes at a time
                    x, out = tl.multiple_of(x, 16), tl.multiple_of(out, 16)
                    stop = tl.multiple_of(stop, 128 // UNIT.primitive_bitwidth)
                for done in range(0, size, BLOCK):
                    mask = done + unit < stop
                    tl.store(out + done + unit, tl.load(x + done + unit, mask=mask), mask=mask)
            at += size
        batch = first // together
        tl.debug_barrier()  # orders the writes of all threads before the arrival that one thread signals
        others = programs - tl.where(batch > 0, 0, 1)
        if tl.atomic_add(arrived + batch, 1, sem="acq_rel", scope="sys") == others:
            _complete_batches(table, arrived, batch, pieces, together, MAX_PIECES, GROUPS)


@triton.jit
def _programs_of(group, GROUPS: tl.constexpr):
    """Return the number of programs of a group."""
    return (tl.num_programs(0) - group + GROUPS - 1) // GROUPS


@triton.jit
def _complete_batches(table, arrived, batch, pieces, together, MAX_PIECES: tl.constexpr, GROUPS: tl.constexpr):
    """Mark a batch as complete, and also the next batches if they waited only for this one; then raise all their flags.

    All batches are marked before the first flag rises: the release that marks a batch would otherwise wait until the
    earlier flags have reached the peers. So the flags of two batches may rise in either order. But each flag rises
    after all earlier pieces have arrived.
    """
    end, complete = batch, True
    while complete:
        tl.store(arrived + end, 0)
        end += 1
        complete = False
        if end * together < pieces:
            others = _programs_of(end % GROUPS, GROUPS)
            complete = tl.atomic_add(arrived + end, 1, sem="acq_rel", scope="gpu") == others
    for first in range(batch * together, end * together, together):
        raise_piece_flags(table, pieces, first, min(together, pieces - first), MAX_PIECES)


@triton.jit
def raise_piece_flags(table, pieces, first, count, MAX_PIECES: tl.constexpr):
    """Raise the flags of pieces `[first, first + count)` of a table of `pieces` pieces. `count <= MAX_PIECES`."""
    number = tl.arange(0, MAX_PIECES)
    exists = number < count
    flags = tl.load(table + 2 * pieces + first + number, mask=exists, other=0)
    epochs = tl.load(table + 3 * pieces + first + number, mask=exists, other=0)
    tl.atomic_xchg(flags.to(tl.pointer_type(tl.int64)), epochs, mask=flags != 0, sem="release", scope="sys")


class PushKernel:
    """A kernel that copies pieces of memory to peers and raises flags. A call of the object launches the kernel.

    A flag rises once its piece and all earlier elements of `pieces` have arrived. The kernel copies pieces in any
    order. So the target of a piece must overlap neither the source nor the target of another piece.

    The matmul that computes the source can make these copies itself: see `multiply` and `Pushed`.

    Args:
        device: this rank's device.
        pieces: the pieces to copy.
        size: the size of each piece in bytes.
        sms: the number of SMs to use; all of them if the device has fewer.
        words: the pool that holds the kernel's table; by default a new one.
        place: the index of the kernel in its plan, see `Words`.
    """

    def __init__(
        self,
        device: torch.device,
        pieces: Sequence[Piece],
        size: int,
        sms: int,
        words: Words | None = None,
        place: int = 0,
    ) -> None:
        self.device, self.sms, self.size = device, min(sms, limits(device).sms), size
        self.count = len(pieces)
        raised = [piece.flag for piece in pieces if piece.flag]
        assert len(set(raised)) == len(raised), "flags rise in any order: one cannot rise twice"
        self.together = min(max(BATCH // max(size, 1), 1), MAX_PIECES, self.count)
        columns = zip(*((p.offset, p.target, p.flag, p.epoch) for p in pieces), strict=True)
        numbers = [*(n for column in columns for n in column), *[0] * self.count]
        self.table = (words or Words(device, 1)).of(self, numbers, place)
        self.arrived = self.table[4 * self.count :].view(torch.int32)[: -(-self.count // self.together)]
        self.groups = min(GROUPS, self.sms, len(self.arrived))  # each has a batch: further groups would be idle
        self.alignment = size  # all sizes and addresses combined by OR: a low bit is 0 if it is 0 in all of them
        for piece in pieces:
            self.alignment |= piece.offset | piece.target
        self.offsets, self.layout = {piece.offset for piece in pieces}, (self.count, size, self.alignment % 16 == 0)
        # The kernel and its arguments after the source, by alignment: True if everything is aligned to 16 bytes.
        self.launches: dict[bool, tuple[Compiled | None, tuple[object, ...]]] = {}

    def __call__(self, source: torch.Tensor) -> None:
        """Launch the kernel on the current stream: copy pieces of `source`. Within `loading`, only load the kernel."""
        aligned = (self.alignment | source.data_ptr()) % 16 == 0
        if aligned not in self.launches:
            self._prepare(source, aligned)
        compiled, arguments = self.launches[aligned]
        if only_loads():
            return
        if compiled is None:
            with launching(self.device):
                push_kernel[(self.sms,)](source, *arguments, num_warps=WARPS)
            return
        bind_thread(self.device)
        compiled.launch(self.sms, compiled.stream(self.device.index), (source.data_ptr(), *arguments))

    def _prepare(self, source: torch.Tensor, aligned: bool) -> None:
        """Load the kernel for a source of this alignment, and prepare its arguments.

        `aligned` is True if all addresses and sizes are multiples of 16 bytes.
        """
        width = 8 if aligned else source.element_size()
        unit = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[width]
        block = 32 * WARPS * PER_THREAD // width
        sizes = (self.size // width, self.count, self.together)
        dependents = not INTERPRETED and limits(self.device).tma
        constants = (unit, block, aligned, triton.next_power_of_2(self.together), self.groups, dependents)
        tensors = self.table, self.arrived
        key = self.device, sizes[0] < 1 << 31, source.data_ptr() % 16 == 0, *constants
        arguments = source, *tensors, *sizes, *constants
        compiled = loaded(key, self.device, push_kernel, arguments, {"num_warps": WARPS})
        leading = tensors if compiled is None else tuple(t.data_ptr() for t in tensors)
        self.launches[aligned] = compiled, (*leading, *sizes, *constants)
