"""Ready flags: rows may arrive in blocks while a kernel runs, and its programs wait for the flag of each block.

A flag holds the highest epoch that its block has reached. Another stream, a copy engine or a peer fills the block and
then raises the flag. In the interpreter, another process does both. The kernel waits by polling, and holds its SMs
while it waits. So the work that raises the flag must not need these SMs. In the interpreter, it must not be a kernel of
the same process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hostir.ir.source import HostIRError, error
from hostir.kernels.devices import (
    INTERPRETED,
    check_device,
)
from hostir.kernels.flags.signals import CallEnd
from hostir.kernels.layout import launch_layout

MAX_POLLS = 20_000_000  # a poll takes a round trip to the L2 cache, about a microsecond

IN_INTERPRETER = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class ReadyFlags:
    """The flags that a kernel polls for its rows. The rows are split evenly into `len(flags)` blocks.

    Fields:
        flags: `[blocks]` of int32 or int64, contiguous. Other streams and peers may write it while the kernel runs.
        epoch: block i may be read once `flags[i] >= epoch`.
        timeouts: `[blocks, 2]` of int64, contiguous and zero. When the kernel gives up on a block, it writes
            `(epoch, value seen)` into the block's row; see `timeout_error`. Any non-zero row means that `out` is
            incomplete. The tensor may be in pinned host memory, which the host reads without waiting for the GPU. The
            values are final once the kernel has ended.
        first: the index of the block to begin with. The other blocks follow in a circle.
        source: in a sum, the index of the source that `own_rows` replace.
        polls: the number of polls after which a program gives up on flags that have not risen. If other programs need
            its part of a tile, the program goes on nevertheless, and polls each later flag once.
        overlapped_sms: the number of SMs that the previous kernel of the stream holds, if this kernel may start before
            that kernel ends; else 0. This kernel uses the other SMs, and ends after the previous kernel. All work of
            the stream before the previous kernel has ended when this kernel starts.
        reserved_sms: the number of SMs that the kernel leaves to other streams. For example, kernels that raise flags
            of peers need them.
        ending: the end of a call, which the kernel carries out when it ends; None if something else ends the call.
    """

    flags: torch.Tensor
    epoch: int
    timeouts: torch.Tensor
    first: int = 0
    source: int = 0
    polls: int = MAX_POLLS
    overlapped_sms: int = 0
    reserved_sms: int = 0
    ending: CallEnd | None = None

    @property
    def ends(self) -> int:
        """The size of the `CallEnd` that the kernel carries out; 0 without one."""
        return 0 if self.ending is None else self.ending.size


def fits_32_bits(epoch: int) -> bool:
    """Return True if an epoch fits into 32 bits. For a larger epoch, Triton compiles another kernel."""
    return -(1 << 31) <= epoch < 1 << 31


def ready_layout(ready: ReadyFlags | None) -> tuple[object, ...] | None:
    """Return a key of all properties of ready flags that a prepared launch depends on; None without flags.

    The addresses and the value of the epoch are not in the key: a prepared launch serves any of them.
    """
    if ready is None:
        return None
    timeouts = ready.timeouts
    pinned = timeouts.device.type == "cpu" and timeouts.is_pinned()
    return (
        *(launch_layout(ready.flags), launch_layout(timeouts), pinned, fits_32_bits(ready.epoch)),
        *(ready.first, ready.source, ready.polls, ready.overlapped_sms, ready.reserved_sms, ready.ends),
    )


def no_timeouts(blocks: int, device: torch.device | str) -> torch.Tensor:
    """Return a tensor for `ReadyFlags.timeouts` that holds no timeout."""
    return torch.zeros(blocks, 2, dtype=torch.int64, device=device)


def timeout_error(timeouts: torch.Tensor, rank: int, name: str, results: int | None = None) -> HostIRError | None:
    """Return the error for the flags that a kernel on `rank` gave up on; None if it gave up on no flag.

    Args:
        timeouts: the tensor `ReadyFlags.timeouts`. Reading it waits for the current stream, on which the kernel must
            have been launched. Reading pinned memory does not wait.
        rank: the rank, for the message.
        name: the name of the flags, for the message.
        results: the number of blocks of one source, if `timeouts` holds the blocks of several sources one after
            another.
    """
    timed_out = [(block, *entry) for block, entry in enumerate(timeouts.tolist()) if any(entry)]
    if not timed_out:
        return None

    def location(flag: int) -> str:
        return "" if results is None else f", for block {flag % results} of source {flag // results},"

    missing = "; ".join(
        f"flag {name}[{flag}]{location(flag)} did not reach epoch {epoch} (stands at {value})"
        for flag, epoch, value in timed_out
    )
    return error(f"rank {rank}: {missing}", hint="look at whoever signals it: it is late, dead, or was never asked to")


def block_rows(ready: ReadyFlags, out: torch.Tensor) -> int:
    """Return the number of rows of a block of `out`. Raises TypeError or ValueError if `ready` does not fit `out`."""
    timeouts = ready.timeouts
    pinned = timeouts.device.type == "cpu" and timeouts.is_pinned()
    check_device(out=out, flags=ready.flags, timeouts=None if pinned else timeouts)
    check_flags(ready.flags, ready.first)
    blocks = ready.flags.numel()
    if timeouts.dtype != torch.int64:
        raise TypeError(f"expected timeouts of int64, got {timeouts.dtype}")
    if timeouts.shape != (blocks, 2) or not timeouts.is_contiguous():
        raise ValueError(f"expected contiguous timeouts of shape {[blocks, 2]}, got shape {list(timeouts.shape)}")
    if ready.polls < 1:
        raise ValueError(f"expected at least one poll of a flag, got {ready.polls}")
    return block_height(out, blocks)


def check_flags(flags: torch.Tensor, first: int) -> None:
    """Raise TypeError or ValueError unless `flags` is a valid tensor of flags and `first` an index into it."""
    if flags.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expected flags of int32 or int64, got {flags.dtype}")
    if flags.ndim != 1 or not flags.numel() or not flags.is_contiguous():
        raise ValueError(f"expected a row of flags, got shape {list(flags.shape)}, strides {list(flags.stride())}")
    if not 0 <= first < flags.numel():
        raise ValueError(f"there is no block {first} to begin with: expected 0 to {flags.numel() - 1}")


def block_height(x: torch.Tensor, blocks: int) -> int:
    """Return the number of rows of a block, if `x` is split evenly into `blocks` blocks of rows.

    Raises ValueError if the rows do not split evenly.
    """
    rows = math.prod(x.shape[:-1])
    if rows % blocks:
        raise ValueError(f"{rows} rows do not make {blocks} equal blocks")
    return rows // blocks


class Awaited(NamedTuple):
    """The flags that a kernel polls: the fields of `ReadyFlags` on the device.

    `flags` and `timeouts` are pointers, `blocks` is the number of flags, and `height` is the number of rows of a block.
    """

    flags: Any
    timeouts: Any
    epoch: Any
    first: Any
    blocks: Any
    height: Any


@triton.jit
def poll(awaited, polls, slot, exists, needed):
    """Poll the flags with the indices `slot` until all needed flags have reached the epoch, or no polls are left.

    `exists` masks the slots that have a flag, and `needed` masks the flags to wait for. Reports a timeout for each
    needed flag that has not reached the epoch. Returns two values: a mask of all flags that have not reached the epoch,
    and the number of polls that are left.
    """
    value = tl.zeros(slot.shape, dtype=tl.int64)
    absent = exists
    missing = 1
    while (missing > 0) & (polls > 0):
        # One thread polls a flag and passes the value to the other threads through a barrier. So all threads see the
        # same value, and their later reads see everything that was written, anywhere in the system, before the flag
        # rose. The poll is an atomic because Triton gives no other access a memory order. It adds 0, so no write to the
        # flag is lost.
        value = tl.atomic_add(awaited.flags + slot, 0, mask=exists, sem="acquire", scope="sys").to(tl.int64)
        absent = exists & (value < awaited.epoch)
        missing = tl.sum((absent & needed).to(tl.int32), 0)
        polls -= (missing > 0).to(polls.dtype)
    tl.store(awaited.timeouts + 2 * slot, awaited.epoch, mask=absent & needed)
    tl.store(awaited.timeouts + 2 * slot + 1, value, mask=absent & needed)
    return absent, polls


@triton.jit
def wait_for_rows(awaited, polls, row, end, OWN: tl.constexpr, FLAGS: tl.constexpr, TMA: tl.constexpr):
    """Wait until the flags of all blocks with rows in `[row, end)` have reached the epoch.

    If OWN is True, block `first` needs no flag. FLAGS is the number of blocks, rounded up to a power of 2. TMA is True
    if TMA loads of the rows may follow.

    Returns `(next_missing, polls)`. Blocks are counted from block `first` on. `next_missing` is the first block that is
    not ready, among the block of `row` and the blocks after it. If all of these are ready, it is the number of blocks.
    `polls` is the number of polls that are left. It is 0 if the program has given up.
    """
    _, _, _, first, blocks, height = awaited
    number = tl.arange(0, FLAGS)
    exists = (number < blocks) & (number >= (1 if OWN else 0))
    block = (first + number) % blocks
    needed = exists & (block >= row // height) & (block <= (end - 1) // height)
    absent, polls = poll(awaited, polls, block, exists, needed)
    behind = (row // height - first + blocks) % blocks
    next_missing = tl.min(tl.where(absent & (number >= behind), number, blocks), 0)
    if TMA and not IN_INTERPRETER:
        next_missing = _fence_async_proxy(next_missing)
    return next_missing, polls


@triton.jit
def _fence_async_proxy(x):
    """Return `x`. Later TMA loads see everything that ordinary loads would see now.

    TMA reads through the async proxy. An acquire by an ordinary atomic does not order such reads: PTX's memory model
    requires a proxy fence between the write and the read. The fence belongs here, in the reader and after the acquire.
    This holds for rows that a peer's kernel wrote with ordinary stores, and for rows from a copy engine, which has no
    proxy. The thread that issues a TMA load must have executed the fence. The compiler chooses that thread, so all
    threads execute it.
    """
    return tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )
