"""Flags in kernels: waiting for blocks of rows, and small kernels that raise and reset flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from hostir.ir.source import HostIRError, error
from hostir.runtime.kernels.devices import (
    INTERPRETED,
    Compiled,
    bind_thread,
    check_device,
    launch,
    launching,
    limits,
    load,
    only_loads,
)
from hostir.runtime.kernels.layout import Words

# Waiting for blocks ---------------------------------------------------------------------------------------------------
# Rows that arrive while a kernel runs: each block of rows has a flag, and programs of the kernel wait for it.
#
# A flag holds the highest epoch that its block has reached. Whoever fills the block raises the flag afterwards: another
# stream, a copy engine, a peer, in the interpreter another process. The kernel waits by polling, so raising the flag
# must not need the SMs that the waiting kernel holds (in the interpreter: a kernel in the same process).

MAX_POLLS = 20_000_000  # a poll is a round trip to the L2 cache, about a microsecond

_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class ReadyFlags:
    """The flags that a matmul polls for its rows, which are as many equal blocks as there are flags.

    Fields:
        flags: `[blocks]` of int32 or int64, contiguous; others may write it while the kernel runs.
        epoch: block i may be read once `flags[i] >= epoch`.
        timeouts: `[blocks, 2]` of int64, contiguous and zero. When the kernel gives up on a block, it writes
            `(epoch, value seen)` into the block's row; see `timeout_error`. Any non-zero row means that `out` is
            incomplete. May be in pinned host memory, which the host reads without waiting for the GPU; the values are
            final once the kernel has ended.
        first: the block to begin with; the others follow in a circle.
        source: of a sum, the source that own rows stand for.
        polls: how often a program polls flags that have not risen before it gives up. A program on whose part of a tile
            others rely goes on all the same, and polls each later flag once.
        overlapped_sms: SMs of the kernel right before on the same stream, which this one may overlap: it uses the other
            SMs, and ends after that kernel. All earlier work of the stream has ended.
        reserved_sms: SMs that it leaves to kernels of other streams, such as those that raise flags for peers.
    """

    flags: torch.Tensor
    epoch: int
    timeouts: torch.Tensor
    first: int = 0
    source: int = 0
    polls: int = MAX_POLLS
    overlapped_sms: int = 0
    reserved_sms: int = 0


def no_timeouts(blocks: int, device: torch.device | str) -> torch.Tensor:
    """Return a tensor for `ReadyFlags.timeouts` that holds no timeout."""
    return torch.zeros(blocks, 2, dtype=torch.int64, device=device)


def timeout_error(timeouts: torch.Tensor, rank: int, name: str, results: int | None = None) -> HostIRError | None:
    """Return the error for flags called `name` that a kernel on `rank` gave up on; None if there are none.

    `results`: the flags are those of so many blocks of one source after another. Reading `timeouts` waits for the
    current stream, on which the kernel must run, unless it is in pinned memory.
    """
    timed_out = [(block, *entry) for block, entry in enumerate(timeouts.tolist()) if any(entry)]
    if not timed_out:
        return None

    def what(flag: int) -> str:
        return "" if results is None else f", for block {flag % results} of source {flag // results},"

    found = "; ".join(
        f"flag {name}[{flag}]{what(flag)} did not reach epoch {epoch} (stands at {value})"
        for flag, epoch, value in timed_out
    )
    return error(f"rank {rank}: {found}", hint="look at whoever signals it: it is late, dead, or was never asked to")


def block_rows(ready: ReadyFlags, out: torch.Tensor) -> int:
    """Return the rows per block of `out`. Raises TypeError or ValueError if `ready` does not fit `out`."""
    timeouts = ready.timeouts
    pinned = timeouts.device.type == "cpu" and timeouts.is_pinned()
    check_device(out=out, flags=ready.flags, timeouts=None if pinned else timeouts)
    _check_flags(ready.flags, ready.first)
    blocks = ready.flags.numel()
    if timeouts.dtype != torch.int64:
        raise TypeError(f"expected timeouts of int64, got {timeouts.dtype}")
    if timeouts.shape != (blocks, 2) or not timeouts.is_contiguous():
        raise ValueError(f"expected contiguous timeouts of shape {[blocks, 2]}, got shape {list(timeouts.shape)}")
    if ready.polls < 1:
        raise ValueError(f"expected at least one poll of a flag, got {ready.polls}")
    return _height(out, blocks)


def done_rows(done: DoneFlags, out: torch.Tensor) -> int:
    """Return the rows per block of `out`. Raises TypeError or ValueError if `done` does not fit `out`."""
    check_device(out=out, flags=done.flags)
    _check_flags(done.flags, done.first)
    return _height(out, done.flags.numel())


def _check_flags(flags: torch.Tensor, first: int) -> None:
    if flags.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expected flags of int32 or int64, got {flags.dtype}")
    if flags.ndim != 1 or not flags.numel() or not flags.is_contiguous():
        raise ValueError(f"expected a row of flags, got shape {list(flags.shape)}, strides {list(flags.stride())}")
    if not 0 <= first < flags.numel():
        raise ValueError(f"there is no block {first} to begin with: expected 0 to {flags.numel() - 1}")


def _height(x: torch.Tensor, blocks: int) -> int:
    rows = math.prod(x.shape[:-1])
    if rows % blocks:
        raise ValueError(f"{rows} rows do not make {blocks} equal blocks")
    return rows // blocks


class Awaited(NamedTuple):
    """The flags that a kernel polls: the fields of `ReadyFlags` on the device.

    `flags` and `timeouts` are pointers, `blocks` the number of flags, `height` the rows of a block.
    """

    flags: Any
    timeouts: Any
    epoch: Any
    first: Any
    blocks: Any
    height: Any


@triton.jit
def poll(awaited, polls, slot, exists, needed):
    """Poll the flags at `slot`, if they exist, until all that are needed have reached the epoch, or no polls are left.

    Returns which of them have not, and the polls that are left. Reports the needed flags that have not as timeouts.
    """
    value = tl.zeros(slot.shape, dtype=tl.int64)
    absent = exists
    missing = 1
    while (missing > 0) & (polls > 0):
        # One thread polls a flag and passes the value to the others through a barrier. So all threads see the same
        # value, and their later reads are ordered behind everything that was written, anywhere in the system, before
        # the flag rose. It is an atomic because Triton gives no other access a memory order; it adds 0, so that it
        # loses no write.
        value = tl.atomic_add(awaited.flags + slot, 0, mask=exists, sem="acquire", scope="sys").to(tl.int64)
        absent = exists & (value < awaited.epoch)
        missing = tl.sum((absent & needed).to(tl.int32), 0)
        polls -= (missing > 0).to(polls.dtype)
    tl.store(awaited.timeouts + 2 * slot, awaited.epoch, mask=absent & needed)
    tl.store(awaited.timeouts + 2 * slot + 1, value, mask=absent & needed)
    return absent, polls


@triton.jit
def wait_for_rows(awaited, polls, row, end, OWN: tl.constexpr, FLAGS: tl.constexpr, TMA: tl.constexpr):
    """Wait until all blocks that hold a row from `row` to before `end` have reached the epoch.

    With OWN, except the block `first`. FLAGS is the number of blocks, rounded up to a power of 2; with TMA, loads by
    TMA may follow.

    Returns the number, counted from `first` on, of the next block after that of `row` that is not ready yet, and the
    polls that are left: 0 if the program has given up.
    """
    _, _, _, first, blocks, height = awaited
    number = tl.arange(0, FLAGS)
    exists = (number < blocks) & (number >= (1 if OWN else 0))
    block = (first + number) % blocks
    needed = exists & (block >= row // height) & (block <= (end - 1) // height)
    absent, polls = poll(awaited, polls, block, exists, needed)
    behind = (row // height - first + blocks) % blocks
    next_missing = tl.min(tl.where(absent & (number >= behind), number, blocks), 0)
    if TMA and not _INTERPRETED:
        next_missing = _fence_async_proxy(next_missing)
    return next_missing, polls


@triton.jit
def _fence_async_proxy(x):
    """Return `x`, and order later TMA loads behind what ordinary loads would see now.

    TMA reads through the async proxy, which the acquire of a flag by an ordinary atomic does not order: PTX's memory
    model requires a proxy fence between the write and the read. It belongs here, on the reader's side and behind the
    acquire, whoever wrote: a peer's kernel with ordinary stores, or a copy engine, which has no proxy and whose raised
    flag says only that the bytes are in memory. The thread that issues a TMA load must have executed the fence; the
    compiler chooses that thread, so all threads do.
    """
    return tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


# Blocks that are done -------------------------------------------------------------------------------------------------
# Rows that a kernel has written while it goes on: it raises a flag behind each block of them.
#
# Programs count the pieces of a block that they have stored. The one that completes a block releases its flag: what the
# others wrote before they counted happens before that, as each of them counts by a release, and the last one acquires.

MISSED = tl.constexpr(1 << 32)  # what a count is increased by for a piece that lacks its operands: no flag will rise


@dataclass(frozen=True)
class DoneFlags:
    """The flags that a kernel raises behind its result's rows, which are as many equal blocks as there are flags.

    Fields:
        flags: `[blocks]` of int32 or int64, contiguous; others may read them while the kernel runs.
        epoch: `flags[i]` is set to it once block i is in memory, for whoever acquires the flag, anywhere in the system.
            If the kernel gives up on rows that block i needs, it leaves `flags[i]` as it is.
        first: the block to begin with, unless the kernel also waits for flags; the others follow in a circle.
    """

    flags: torch.Tensor
    epoch: int
    first: int = 0


class Raised(NamedTuple):
    """The flags that a kernel raises: the fields of `DoneFlags` on the device.

    `flags` is a pointer, `height` the rows of a block, `counts` points to `[blocks]` of int64, all 0 before and after.
    """

    flags: Any
    epoch: Any
    height: Any
    counts: Any


@triton.jit
def count(raised, block, exists, needed, more):
    """Count `more` pieces of blocks of which `needed` are all, or MISSED for a piece that will be wrong.

    They must be in memory: call `stores_ended` before. Where that completes a block, its count becomes 0 again, for the
    next launch, and its flag rises, unless a piece was missed.
    """
    before = tl.atomic_add(raised.counts + block, more, mask=exists, sem="acq_rel", scope="gpu")
    now = before + more
    complete = exists & (now % MISSED == needed)
    tl.store(raised.counts + block, 0, mask=complete)
    tl.atomic_xchg(raised.flags + block, raised.epoch, mask=complete & (now < MISSED), sem="release", scope="sys")


@triton.jit
def stores_ended(x, wanted, TMA: tl.constexpr):
    """Return `x`; if `wanted`, once what all threads of the program have stored is ordered before what each does next.

    A store by TMA only waits until shared memory has been read. The thread that issued it must wait, and the compiler
    chooses that thread, so all threads do; then the bytes are in memory. The barrier is `tl.debug_barrier`, but Triton
    pipelines no loop that contains that.
    """
    if _INTERPRETED:
        return x
    elif TMA:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.b32 wanted, $2, 0;
            @wanted cp.async.bulk.wait_group 0;
            bar.sync 0;
            mov.b32 $0, $1;
            }""",
            "=r,r,r",
            [x, wanted],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["epoch", "blocks", "words"])
def _raise(flags, epoch, timeouts, blocks, words, FLAGS: tl.constexpr, WORDS: tl.constexpr):
    """Raise all flags of a row, unless there are timeouts."""
    missing = 0
    if timeouts is not None:
        number = tl.arange(0, WORDS)
        missing = tl.sum((tl.load(timeouts + number, mask=number < words, other=0) != 0).to(tl.int32), 0)
    number = tl.arange(0, FLAGS)
    tl.atomic_xchg(flags + number, epoch, mask=(number < blocks) & (missing == 0), sem="release", scope="sys")


def raise_flags(done: DoneFlags, timeouts: torch.Tensor | None) -> None:
    """Raise all flags behind the earlier work of the current stream, unless a kernel has reported timeouts."""
    blocks, words = len(done.flags), 0 if timeouts is None else timeouts.numel()
    sizes = triton.next_power_of_2(blocks), triton.next_power_of_2(max(1, words))
    with launching(done.flags.device):
        launch(_raise, 1, done.flags, done.epoch, timeouts, blocks, words, *sizes, num_warps=1)


# Signals by kernels ---------------------------------------------------------------------------------------------------
# A small kernel that raises one flag of a peer.
#
# A stream can raise a flag without an SM, but then waits until everything that its GPU is sending to peers has arrived:
# it cannot overlap a copy, and between two copies it costs 3 us on an H200. This kernel is ordered only behind the
# earlier work of its own stream, and copies of other streams go on.


@triton.jit(do_not_specialize=["flag", "epoch"])
def _signal(flag, epoch):
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), epoch.to(tl.int64), sem="release", scope="sys")


_compiled: dict[tuple[object, ...], Compiled] = {}  # signals and pushes, by what they are compiled for, of all plans


class SignalKernel:
    """A kernel that sets the int64 at the address `flag` to `epoch`."""

    def __init__(self, device: torch.device, flag: int, epoch: int) -> None:
        self.device, self.arguments = device, (flag, epoch)
        key = device, *(n.bit_length() > 31 for n in self.arguments)  # Triton passes larger numbers in 64 bits
        self.compiled = _loaded(key, device, _signal, self.arguments, {"num_warps": 1})

    def __call__(self, stream: torch.cuda.Stream | None) -> None:
        """Launch on a stream; None in the interpreter, which has no streams."""
        if self.compiled is None or stream is None:
            with launching(self.device):
                _signal[(1,)](*self.arguments, num_warps=1)
            return
        bind_thread(self.device)
        self.compiled.launch(1, stream.cuda_stream, self.arguments)


def _loaded(
    key: tuple[object, ...], device: torch.device, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]
) -> Compiled | None:
    """Return the compiled kernel with this key, and load it first if necessary; None in the interpreter."""
    if key in _compiled or INTERPRETED:
        return _compiled.get(key)
    with launching(device):
        compiled = load(kernel, arguments, options)
    return None if compiled is None else _compiled.setdefault(key, compiled)


# The end of a call ----------------------------------------------------------------------------------------------------
# The end of a call, as one small kernel: it resets this rank's flags to 0, and then grants each peer a credit.
#
# See hostir.runtime.cuda.memory. A stream could do it without an SM, but takes almost a microsecond for each flag.


@triton.jit(do_not_specialize=["flag_count", "credit_count"])
def _reset_flags(flags, credits, flag_count, credit_count, FLAGS: tl.constexpr, CREDITS: tl.constexpr):
    """Set the int64 at each address in `flags` to 0, then add 1 to that at each address in `credits`."""
    number = tl.arange(0, FLAGS)
    address = tl.load(flags + number, mask=number < flag_count, other=0).to(tl.pointer_type(tl.int64))
    tl.store(address, tl.zeros((FLAGS,), tl.int64), mask=number < flag_count)
    tl.debug_barrier()  # orders the stores of all threads before the release of one
    number = tl.arange(0, CREDITS)
    address = tl.load(credits + number, mask=number < credit_count, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_add(address, 1, mask=number < credit_count, sem="release", scope="sys")


class FlagResetKernel:
    """A kernel that resets flags and then grants credits, on the current stream.

    Args:
        device: this rank's device.
        flags: addresses of the int64 that are set to 0.
        credits: addresses of the int64 counters, of peers, that are increased by 1 afterwards.
    """

    def __init__(self, device: torch.device, flags: Sequence[int], credits: Sequence[int]) -> None:
        self.device = device
        self.addresses = [torch.tensor([*row, 0], dtype=torch.int64, device=device) for row in (flags, credits)]
        sizes = len(flags), len(credits)
        self.rest = (*sizes, *(triton.next_power_of_2(max(1, size)) for size in sizes))
        self.arguments = (*(row.data_ptr() for row in self.addresses), *self.rest)
        with launching(device):
            self.compiled = load(_reset_flags, (*self.addresses, *self.rest), {"num_warps": 1})

    def __call__(self) -> None:
        if self.compiled is None:
            with launching(self.device):
                _reset_flags[(1,)](*self.addresses, *self.rest, num_warps=1)
            return
        bind_thread(self.device)
        self.compiled.launch(1, self.compiled.stream(self.device.index), self.arguments)


# Copies to peers ------------------------------------------------------------------------------------------------------
# A kernel that copies to peers: a few SMs write pieces of memory to other GPUs, and raise flags behind them.
#
# A copy engine moves large pieces faster, but takes microseconds to begin each copy and to signal behind it. The next
# kernel of the stream may start while this one copies (programmatic dependent launch, see
# ReadyFlags.overlapped_sms), and use rows as soon as their flags rise.

WARPS = 1 if INTERPRETED else 16
PER_THREAD = 64  # bytes that a thread loads before it stores them
BATCH = 2 << 20  # bytes per batch: at its end every program waits until all its writes have arrived
MAX_PIECES = 32  # per batch
GROUPS = 2  # of programs, which take turns with batches: while those of one wait, those of the other write


@dataclass(frozen=True)
class Piece:
    """A contiguous range of the source to copy, and the flag to raise behind it.

    Fields:
        offset: of the first byte, in the source.
        target: the address to copy it to. If that is where it already is, nothing is copied.
        flag: the address of an int64 to set to `epoch`; 0 for none. No other piece of the kernel has the same flag.
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
    arrived,  # [batches] of int32, 0 before and after: programs that are done, plus 1 once the batch before is complete
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

    Each group takes every GROUPS-th batch, and each of its programs a part of it. A batch is complete once all programs
    of its group are done with it and the batch before is complete. The program that completes it raises its flags.
    """
    if DEPENDENTS:
        gdc_launch_dependents()
    group, program = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    programs = _programs_of(group, GROUPS)
    source = source.to(tl.int64, bitcast=True)
    unit = tl.arange(0, BLOCK)
    for first in range(group * together, pieces, GROUPS * together):
        count = min(together, pieces - first)
        # The pieces of a batch form one sequence of units, of which each program copies an equal part.
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
    """Mark a batch as complete for the next ones, and raise its flags and those of batches that it completes.

    Flags are raised last: a release behind them would wait until they have reached the peers. So flags of two batches
    may rise in either order, but none before all earlier pieces have arrived.
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
    """A kernel on the current stream that copies pieces and raises flags.

    A flag rises once its piece and all pieces before it have arrived. Pieces are copied in any order, so the target of
    one must overlap neither the source nor the target of another.

    A matmul that makes the source can do all of this itself (`multiply`): see `Pushed`.

    Args:
        device: this rank's device.
        pieces: what to copy where, in the order of the flags.
        size: of each piece, in bytes.
        sms: the number of SMs to use; all of them if the device has fewer.
        words: where its table is; by default in memory of its own.
        place: of the kernel in its plan, see `Words`.
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
        self.groups = min(GROUPS, self.sms, len(self.arrived))  # each has a batch: further groups would idle
        self.alignment = size  # all sizes and addresses, ored: their common low zero bits
        for piece in pieces:
            self.alignment |= piece.offset | piece.target
        self.offsets, self.kind = {piece.offset for piece in pieces}, (self.count, size, self.alignment % 16 == 0)
        # The kernel and its arguments behind the source, by whether all is aligned to 16 bytes.
        self.launches: dict[bool, tuple[Compiled | None, tuple[object, ...]]] = {}

    def __call__(self, source: torch.Tensor) -> None:
        """Copy from the memory of `source`."""
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
        """Prepare launches for such a source; in the interpreter there is no compiled kernel."""
        width = 8 if aligned else source.element_size()
        unit = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[width]
        block = 32 * WARPS * PER_THREAD // width
        sizes = (self.size // width, self.count, self.together)
        dependents = not INTERPRETED and limits(self.device).tma
        constants = (unit, block, aligned, triton.next_power_of_2(self.together), self.groups, dependents)
        tensors = self.table, self.arrived
        key = self.device, sizes[0] < 1 << 31, source.data_ptr() % 16 == 0, *constants
        given = source, *tensors, *sizes, *constants
        compiled = _loaded(key, self.device, push_kernel, given, {"num_warps": WARPS})
        made = tensors if compiled is None else tuple(t.data_ptr() for t in tensors)
        self.launches[aligned] = compiled, (*made, *sizes, *constants)


# Copies to peers by the kernel that makes the rows --------------------------------------------------------------------
# A kernel that stores its result to peers as well: of few rows, that takes less time than a kernel behind it.


class Pushed(NamedTuple):
    """Copies of rows that the kernel makes itself: the fields of a `PushKernel` on the device.

    `table` and `arrived` are pointers, `count` is the number of pieces, `height` the rows of a piece.
    """

    table: Any
    arrived: Any
    count: Any
    height: Any


@triton.jit
def push_tile(pushed, x, row, end, column, N, ALIGNED: tl.constexpr):
    """Store a tile `x`, rounded, to all pieces that have some of its rows.

    The tile begins at row `row`, of which those before `end` exist, and at `column` of `N`. ALIGNED: targets are on 16
    bytes.
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
    """Count this program as done; the last one of the launch raises the flags of all pieces.

    So whatever any program has stored to a peer is there before a flag rises: see `push_kernel`.
    """
    tl.debug_barrier()  # orders the writes of all threads before the arrival that one thread signals
    if tl.atomic_add(pushed.arrived, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(pushed.arrived, 0)
        number = tl.arange(0, PIECES)
        exists = number < pushed.count
        flags = tl.load(pushed.table + 2 * pushed.count + number, mask=exists, other=0)
        epochs = tl.load(pushed.table + 3 * pushed.count + number, mask=exists, other=0)
        tl.atomic_xchg(flags.to(tl.pointer_type(tl.int64)), epochs, mask=flags != 0, sem="release", scope="sys")


def pushed_rows(pushed: PushKernel, out: torch.Tensor) -> int:
    """Return the rows of each piece. Raises ValueError unless pieces are whole rows of `out`, which is dense."""
    row = out.shape[-1] * out.element_size()
    if not out.is_contiguous():
        raise ValueError(f"expected a dense result to copy to peers, got strides {list(out.stride())}")
    if row == 0 or pushed.size % row or any(offset % row for offset in pushed.offsets):
        raise ValueError(f"expected pieces of whole rows of {row} bytes, got {pushed.size} bytes")
    return pushed.size // row
