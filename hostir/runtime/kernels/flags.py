"""Flags in kernels: blocks of rows that a kernel waits for, and small kernels that raise flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from hostir.ir.source import HostIRError, error
from hostir.runtime.kernels.layout import (
    INTERPRETED,
    Compiled,
    bind_thread,
    check_device,
    launching,
    limits,
    rows,
    rows_or_copy,
)

# Blocks ---------------------------------------------------------------------------------------------------------------
# The rows of one block of a tensor, where a computation goes block by block.


def block_of(x: torch.Tensor, other: torch.Tensor, block: int, blocks: int) -> list[torch.Tensor]:
    """The rows of one of equal blocks: one tensor where the rows of both tensors have one stride, else several.

    Tensors of equal leading axes are cut alike.
    """
    flat = rows(x)
    if flat is not None and rows(other) is not None:
        height = len(flat) // blocks
        return [flat[block * height : (block + 1) * height]]
    height = x.shape[:-1].numel() // blocks
    return _rows_of(x, block * height, (block + 1) * height)


def with_rows(
    out: torch.Tensor, a: torch.Tensor, block: int, blocks: int, own: torch.Tensor | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One of equal blocks of the rows of `out`, and the rows of `a`, or else of `own`, of which it is a product."""
    outs = block_of(out, a, block, blocks)
    if own is None:
        return list(zip(outs, block_of(a, out, block, blocks), strict=True))
    parts = rows_or_copy(own).split([part.shape[:-1].numel() for part in outs])
    return [(part, mine.view(*part.shape[:-1], own.shape[-1])) for part, mine in zip(outs, parts, strict=True)]


def with_all_rows(
    out: torch.Tensor, a: torch.Tensor, blocks: int, first: int, own: torch.Tensor | None = None
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """`with_rows` of every block, `own` for block `first`: in one go, for less of the host's time."""
    outs, parts = rows(out), rows(a)
    if outs is None or parts is None or not len(outs):
        return [with_rows(out, a, block, blocks, own if block == first else None) for block in range(blocks)]
    height = len(outs) // blocks
    pairs = list(zip(outs.split(height), parts.split(height), strict=True))
    if own is not None:
        pairs[first] = pairs[first][0], rows_or_copy(own)
    return [[pair] for pair in pairs]


def _rows_of(x: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """Rows `start` to `stop` of the flattened leading axes, as views of several axes."""
    inner = x.shape[1:-1].numel()
    if start == stop:
        return []
    if start % inner == 0 and stop % inner == 0:
        return [x[start // inner : stop // inner]]
    cuts = [
        (i, max(start - i * inner, 0), min(stop - i * inner, inner)) for i in range(start // inner, -(-stop // inner))
    ]
    return [part for i, low, high in cuts for part in _rows_of(x[i], low, high)]


# Waiting for blocks ---------------------------------------------------------------------------------------------------
# Rows that arrive while a kernel runs: a flag for each block of them, and how a program of the kernel waits for it.
#
# A flag holds the highest epoch that its block has reached. Whoever fills the block raises the flag afterwards: another
# stream, a copy engine, a peer, in the interpreter another process. The kernel waits by looking again and again, so
# what raises the flag must not need the SMs (in the interpreter: a kernel in the same process) that the waiting kernel
# holds.

LOOKS = 20_000_000  # a look is a round trip to the L2 cache, about a microsecond

_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class ReadyFlags:
    """Which flags say that the rows of a matrix have come. The rows are as many equal blocks as there are flags.

    Fields:
        flags: `[blocks]` of int32 or int64, contiguous; others may write it while the kernel runs.
        epoch: block i may be read once `flags[i] >= epoch`.
        stalls: `[blocks, 2]` of int64, contiguous and zero. The kernel leaves `(epoch, value seen)` in the row of a
            block that it has given up waiting for; see `stall_error`. Not zero means that `out` is not whole. It may
            lie in pinned memory of the host, which then looks without waiting for the GPU: what it sees is final once
            the kernel has ended.
        first: the block to begin with; the others follow in a circle.
        looks: how often a program looks at flags that have not risen before it gives up. Where others count on its part
            of a tile, it goes on all the same, and looks once at each later flag.
        beside: multiprocessors of a kernel just before on the same stream, beside which this one starts: it uses the
            others, and ends after that kernel. What else came before on the stream has ended.
        spare: multiprocessors that it leaves to kernels of other streams: those that raise flags elsewhere.
    """

    flags: torch.Tensor
    epoch: int
    stalls: torch.Tensor
    first: int = 0
    looks: int = LOOKS
    beside: int = 0
    spare: int = 0


def no_stalls(blocks: int, device: torch.device | str) -> torch.Tensor:
    """The `stalls` of `ReadyFlags` before anything has stalled."""
    return torch.zeros(blocks, 2, dtype=torch.int64, device=device)


def stall_error(stalls: torch.Tensor, rank: int, name: str) -> HostIRError | None:
    """What a kernel that gave up has to say, on `rank`, of the flags called `name`; None if it did not give up.

    Reading `stalls` waits for the current stream, on which the kernel must be, unless they lie in pinned memory.
    """
    stalled = [(block, *entry) for block, entry in enumerate(stalls.tolist()) if any(entry)]
    if not stalled:
        return None
    found = "; ".join(
        f"flag {name}[{block}] did not reach epoch {epoch} (stands at {value})" for block, epoch, value in stalled
    )
    return error(f"rank {rank}: {found}", hint="look at whoever signals it: it is late, dead, or was never asked to")


def block_rows(ready: ReadyFlags, out: torch.Tensor) -> int:
    """How many of the rows of `out` are a block; TypeError or ValueError where the flags and their like do not fit."""
    flags, stalls = ready.flags, ready.stalls
    pinned = stalls.device.type == "cpu" and stalls.is_pinned()
    check_device(out=out, flags=flags, stalls=None if pinned else stalls)
    if flags.dtype not in (torch.int32, torch.int64) or stalls.dtype != torch.int64:
        raise TypeError(f"expected flags of int32 or int64 and stalls of int64, got {flags.dtype} and {stalls.dtype}")
    if flags.ndim != 1 or not flags.numel() or not flags.is_contiguous():
        raise ValueError(f"expected a row of flags, got shape {list(flags.shape)}, strides {list(flags.stride())}")
    blocks = flags.numel()
    if stalls.shape != (blocks, 2) or not stalls.is_contiguous():
        raise ValueError(f"expected contiguous stalls of shape {[blocks, 2]}, got shape {list(stalls.shape)}")
    if not 0 <= ready.first < blocks:
        raise ValueError(f"there is no block {ready.first} to begin with: expected 0 to {blocks - 1}")
    if ready.looks < 1:
        raise ValueError(f"expected at least one look at a flag, got {ready.looks}")
    rows = math.prod(out.shape[:-1])
    if rows % blocks:
        raise ValueError(f"{rows} rows do not make {blocks} equal blocks")
    return rows // blocks


@triton.jit
def wait_for_rows(
    flags,
    stalls,
    epoch,
    first,
    blocks,
    height,
    looks,
    row,
    end,
    OWN: tl.constexpr,
    FLAGS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Wait until all blocks that hold a row from `row` to before `end` have reached `epoch`; with OWN, but `first`.

    Returns the number, counted from `first` on, of the next block after that of `row` which has not come; and the looks
    that are left, none when the program has given up.
    """
    number = tl.arange(0, FLAGS)
    exists = (number < blocks) & (number >= (1 if OWN else 0))
    block = (first + number) % blocks
    needed = exists & (block >= row // height) & (block <= (end - 1) // height)
    value = tl.zeros((FLAGS,), dtype=tl.int64)
    absent = exists
    awaited = 1
    while (awaited > 0) & (looks > 0):
        # One thread looks at a flag and hands on through a barrier what it saw. So all threads see the same, and what
        # they read later comes after what was written, by whomever in the system, before the flag rose. An atomic,
        # because Triton gives no other access an order; it adds 0 in one go where the flag lies, so no write is lost.
        value = tl.atomic_add(flags + block, 0, mask=exists, sem="acquire", scope="sys").to(tl.int64)
        absent = exists & (value < epoch)
        awaited = tl.sum((absent & needed).to(tl.int32), 0)
        looks -= (awaited > 0).to(looks.dtype)
    tl.store(stalls + 2 * block, epoch, mask=absent & needed)
    tl.store(stalls + 2 * block + 1, value, mask=absent & needed)
    behind = (row // height - first + blocks) % blocks
    come = tl.min(tl.where(absent & (number >= behind), number, blocks), 0)
    if TMA and not _INTERPRETED:
        come = _fence_async_proxy(come)
    return come, looks


@triton.jit
def _fence_async_proxy(x):
    """`x`; what is loaded by TMA afterwards is at least as new as what ordinary loads would see.

    TMA reads through a proxy of its own, which the acquire of a flag by an ordinary atomic does not bind: in PTX's
    memory model a fence between the proxies must lie on the way from the write to the read. It belongs here, on the
    reader's side and after the acquire, whoever wrote: a peer's kernel with ordinary stores, or a copy engine, which
    has no proxy, and of which the raised flag says only that the bytes are in memory. The thread that issues a TMA load
    must have executed it; the compiler chooses that thread, so all of them do.
    """
    return tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


# One flag of a peer ---------------------------------------------------------------------------------------------------
# A peer's flag, raised by one small kernel.
#
# A stream can raise it without an SM, but only once all that its GPU has under way to peers has arrived; so it cannot
# do so beside a copy, and between two copies it costs 3 us on an H200. This kernel releases what came before it on its
# own stream, and lets copies of other streams go on.


@triton.jit(do_not_specialize=["flag", "epoch"])
def _raise(flag, epoch):
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), epoch.to(tl.int64), sem="release", scope="sys")


class Raising:
    """What sets the int64 at the address `flag` to `epoch`."""

    def __init__(self, device: torch.device, flag: int, epoch: int) -> None:
        self.device, self.arguments = device, (flag, epoch)
        self.compiled: Compiled | None = None

    def __call__(self, stream: torch.cuda.Stream | None) -> None:
        """Launch on a stream; the interpreter knows none."""
        if self.compiled is None or stream is None:
            with launching(self.device), torch.cuda.stream(stream):
                kernel = _raise[(1,)](*self.arguments, num_warps=1)
            self.compiled = None if INTERPRETED else Compiled(kernel)
            return
        bind_thread(self.device)
        self.compiled.launch(1, stream.cuda_stream, self.arguments)


# The end of a call ----------------------------------------------------------------------------------------------------
# The end of a call, by one small kernel: this rank's flags go back to 0, and then every peer's count of permits rises.
#
# See hostir.runtime.cuda.memory. A stream could do it without an SM, but takes almost a microsecond for each flag.


@triton.jit(do_not_specialize=["flag_count", "count_count"])
def _end(flags, counts, flag_count, count_count, FLAGS: tl.constexpr, COUNTS: tl.constexpr):
    """`flags` and `counts` are rows of addresses of int64."""
    number = tl.arange(0, FLAGS)
    address = tl.load(flags + number, mask=number < flag_count, other=0).to(tl.pointer_type(tl.int64))
    tl.store(address, tl.zeros((FLAGS,), tl.int64), mask=number < flag_count)
    tl.debug_barrier()  # the release of one thread then covers what all of them have stored
    number = tl.arange(0, COUNTS)
    address = tl.load(counts + number, mask=number < count_count, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_add(address, 1, mask=number < count_count, sem="release", scope="sys")


class Ending:
    """What ends a call on the current stream.

    Args:
        device: this rank's.
        flags: addresses of int64 to become 0.
        counts: addresses of int64, of peers, to rise by 1 afterwards.
    """

    def __init__(self, device: torch.device, flags: Sequence[int], counts: Sequence[int]) -> None:
        self.device = device
        self.addresses = [torch.tensor([*row, 0], dtype=torch.int64, device=device) for row in (flags, counts)]
        sizes = len(flags), len(counts)
        self.rest = (*sizes, *(triton.next_power_of_2(max(1, size)) for size in sizes))
        self.arguments = (*(row.data_ptr() for row in self.addresses), *self.rest)
        self.compiled: Compiled | None = None

    def __call__(self) -> None:
        if self.compiled is None:
            with launching(self.device):
                kernel = _end[(1,)](*self.addresses, *self.rest, num_warps=1)
            self.compiled = None if INTERPRETED else Compiled(kernel)
            return
        bind_thread(self.device)
        self.compiled.launch(1, self.compiled.stream(self.device.index), self.arguments)


# Copies to peers ------------------------------------------------------------------------------------------------------
# Copies to peers by a kernel: a few multiprocessors write pieces of memory to other GPUs, and raise flags behind them.
#
# A copy engine moves large pieces faster, but takes microseconds to begin each copy and to signal behind it. The kernel
# that follows on the stream may start while this one copies (programmatic dependent launch, see ReadyFlags.beside), and
# take what has come as its flag rises.

WARPS = 1 if INTERPRETED else 16
PER_THREAD = 64  # bytes that a thread loads before it stores them
BATCH = 2 << 20  # bytes between two looks at who is done: each waits until all that was written has arrived
MAX_PIECES = 32  # pieces in a batch
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
    MAX_PIECES: tl.constexpr,
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
            _hand_on(table, arrived, batch, pieces, together, MAX_PIECES, GROUPS)


@triton.jit
def _programs_of(group, GROUPS: tl.constexpr):
    return (tl.num_programs(0) - group + GROUPS - 1) // GROUPS


@triton.jit
def _hand_on(table, arrived, batch, pieces, together, MAX_PIECES: tl.constexpr, GROUPS: tl.constexpr):
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
    number = tl.arange(0, MAX_PIECES)
    for first in range(batch * together, end * together, together):
        raised = number < min(together, pieces - first)
        flags = tl.load(table + 2 * pieces + first + number, mask=raised, other=0)
        epochs = tl.load(table + 3 * pieces + first + number, mask=raised, other=0)
        tl.atomic_xchg(flags.to(tl.pointer_type(tl.int64)), epochs, mask=flags != 0, sem="release", scope="sys")


class PushKernel:
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
        self.together = min(max(BATCH // max(size, 1), 1), MAX_PIECES, self.count)
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
