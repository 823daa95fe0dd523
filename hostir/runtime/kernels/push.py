"""Copies to peers by a kernel: a few multiprocessors write pieces of memory to other GPUs, and raise flags behind them.

A copy engine moves large pieces faster, but takes microseconds to begin each copy and to signal behind it. The kernel
that follows on the stream may start while this one copies (programmatic dependent launch, see ReadyFlags.beside), and
take what has come as its flag rises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from hostir.runtime.kernels.launch import INTERPRETED, Compiled, bind_thread, launching, limits

WARPS = 1 if INTERPRETED else 16
PER_THREAD = 64  # bytes that a thread loads before it stores them
BATCH = 2 << 20  # bytes between two looks at who is done: each waits until all that was written has arrived
MOST = 32  # pieces in a batch
GROUPS = 2  # of programs, which take batches in turn: while those of one wait, those of the other write


@dataclass(frozen=True)
class Piece:
    """Contiguous bytes of the source that go somewhere, and the flag that is raised behind them.

    Fields:
        offset: of the first byte, in the source.
        target: the address that it goes to. Where it lies there already, nothing is copied.
        flag: the address of an int64 that rises to `epoch`; 0 for none. No other piece of the kernel has the same.
    """

    offset: int
    target: int
    flag: int = 0
    epoch: int = 0


@triton.jit(do_not_specialize=["units", "pieces", "together"])
def push_kernel(
    source,  # pointer
    table,  # [4, pieces] of int64: offset, target, flag and epoch of each Piece
    arrived,  # [batches] of int32, 0 before and after: the programs that are done; and one, once all before has arrived
    units,  # of a piece
    pieces,
    together,  # pieces of a batch
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOST: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENTS: tl.constexpr,  # the kernel behind may start now
):
    """Each group takes every GROUPS-th batch, each program a part of it.

    A batch is complete once all programs of its group are done with it, and the batch before is complete. Who says the
    last of this raises its flags.
    """
    if DEPENDENTS:
        gdc_launch_dependents()
    group, program = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    programs = _programs_of(group, GROUPS)
    source = source.to(tl.int64, bitcast=True)
    unit = tl.arange(0, BLOCK)
    for first in range(group * together, pieces, GROUPS * together):
        count = min(together, pieces - first)
        # The pieces of a batch are one row of units, of which each program has an equal part.
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
        tl.debug_barrier()  # what other threads wrote comes before the arrival of the one thread that says so
        others = programs - tl.where(batch > 0, 0, 1)
        if tl.atomic_add(arrived + batch, 1, sem="acq_rel", scope="sys") == others:
            _hand_on(table, arrived, batch, pieces, together, MOST, GROUPS)


@triton.jit
def _programs_of(group, GROUPS: tl.constexpr):
    return (tl.num_programs(0) - group + GROUPS - 1) // GROUPS


@triton.jit
def _hand_on(table, arrived, batch, pieces, together, MOST: tl.constexpr, GROUPS: tl.constexpr):
    """Say that a batch is complete to those behind it, and raise its flags and those of the ones complete with it.

    The flags come last: saying anything behind them would wait until they have crossed over to the peers. So those of
    two batches may rise in either order, but none before all is there that comes before it.
    """
    end, complete = batch, True
    while complete:
        tl.store(arrived + end, 0)
        end += 1
        complete = False
        if end * together < pieces:
            others = _programs_of(end % GROUPS, GROUPS)
            complete = tl.atomic_add(arrived + end, 1, sem="acq_rel", scope="gpu") == others
    number = tl.arange(0, MOST)
    for first in range(batch * together, end * together, together):
        raised = number < min(together, pieces - first)
        flags = tl.load(table + 2 * pieces + first + number, mask=raised, other=0)
        epochs = tl.load(table + 3 * pieces + first + number, mask=raised, other=0)
        tl.atomic_xchg(flags.to(tl.pointer_type(tl.int64)), epochs, mask=flags != 0, sem="release", scope="sys")


class Push:
    """Copies and flags in one kernel on the current stream. A flag rises once its piece and all before it are there.

    Pieces are copied in any order: none may go where another lies or goes.

    Args:
        device: this rank's.
        pieces: what goes where, in order.
        size: of each piece, in bytes.
        sms: multiprocessors to use, at most; all, where the device has fewer.
    """

    def __init__(self, device: torch.device, pieces: Sequence[Piece], size: int, sms: int) -> None:
        self.device, self.sms, self.size = device, min(sms, limits(device).sms), size
        self.count = len(pieces)
        raised = [piece.flag for piece in pieces if piece.flag]
        assert len(set(raised)) == len(raised), "flags rise in any order: one cannot rise twice"
        self.together = min(max(BATCH // max(size, 1), 1), MOST, self.count)
        rows = ((p.offset, p.target, p.flag, p.epoch) for p in pieces)
        self.table = torch.tensor([*zip(*rows, strict=True)], dtype=torch.int64, device=device)
        self.arrived = torch.zeros(-(-self.count // self.together), dtype=torch.int32, device=device)
        self.groups = min(GROUPS, self.sms, len(self.arrived))  # each has a batch: the programs of another would idle
        self.places = size
        for piece in pieces:
            self.places |= piece.offset | piece.target
        self.compiled: dict[bool, Compiled] = {}  # for a source on 16 bytes, and for another
        self.made: dict[bool, tuple[object, ...]] = {}

    def __call__(self, source: torch.Tensor) -> None:
        """Copy out of the memory of `source`."""
        aligned = (self.places | source.data_ptr()) % 16 == 0
        if aligned not in self.compiled:
            self._compile(source, aligned)
            return
        bind_thread(self.device)
        compiled = self.compiled[aligned]
        compiled.launch(self.sms, compiled.stream(self.device.index), (source.data_ptr(), *self.made[aligned]))

    def _compile(self, source: torch.Tensor, aligned: bool) -> None:
        """Launch as Triton does, which compiles if need be. The interpreter knows no other way."""
        width = 8 if aligned else source.element_size()
        unit = {8: tl.int64, 4: tl.int32, 2: tl.int16}[width]
        block = 32 * WARPS * PER_THREAD // width
        sizes = (self.size // width, self.count, self.together)
        dependents = not INTERPRETED and limits(self.device).tma
        constants = (unit, block, aligned, triton.next_power_of_2(self.together), self.groups, dependents)
        with launching(self.device):
            kernel = push_kernel[(self.sms,)](source, self.table, self.arrived, *sizes, *constants, num_warps=WARPS)
        if not INTERPRETED:
            self.compiled[aligned] = Compiled(kernel)
            self.made[aligned] = (self.table.data_ptr(), self.arrived.data_ptr(), *sizes, *constants)
