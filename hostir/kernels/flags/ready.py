"""Flags in kernels: waiting for blocks of rows, and small kernels that raise and reset flags.

Rows that arrive while a kernel runs: each block of rows has a flag, and programs of the kernel wait for it.

A flag holds the highest epoch that its block has reached. Whoever fills the block raises the flag afterwards: another
stream, a copy engine, a peer, in the interpreter another process. The kernel waits by polling, so raising the flag
must not need the SMs that the waiting kernel holds (in the interpreter: a kernel in the same process).
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
from hostir.kernels.layout import launch_layout

MAX_POLLS = 20_000_000  # a poll is a round trip to the L2 cache, about a microsecond

IN_INTERPRETER = tl.constexpr(INTERPRETED)


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


def fits_32_bits(epoch: int) -> bool:
    """Return True if an epoch fits into 32 bits. Triton compiles another kernel for a larger one."""
    return -(1 << 31) <= epoch < 1 << 31


def ready_layout(ready: ReadyFlags | None) -> tuple[object, ...] | None:
    """Return everything about flags that a launch depends on, except their address and the value of the epoch."""
    if ready is None:
        return None
    timeouts = ready.timeouts
    pinned = timeouts.device.type == "cpu" and timeouts.is_pinned()
    return (
        *(launch_layout(ready.flags), launch_layout(timeouts), pinned, fits_32_bits(ready.epoch)),
        *(ready.first, ready.source, ready.polls, ready.overlapped_sms, ready.reserved_sms),
    )


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

    def location(flag: int) -> str:
        return "" if results is None else f", for block {flag % results} of source {flag // results},"

    missing = "; ".join(
        f"flag {name}[{flag}]{location(flag)} did not reach epoch {epoch} (stands at {value})"
        for flag, epoch, value in timed_out
    )
    return error(f"rank {rank}: {missing}", hint="look at whoever signals it: it is late, dead, or was never asked to")


def block_rows(ready: ReadyFlags, out: torch.Tensor) -> int:
    """Return the rows per block of `out`. Raises TypeError or ValueError if `ready` does not fit `out`."""
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
    """Raise TypeError or ValueError unless `flags` can be flags of blocks, polled from `first` on."""
    if flags.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expected flags of int32 or int64, got {flags.dtype}")
    if flags.ndim != 1 or not flags.numel() or not flags.is_contiguous():
        raise ValueError(f"expected a row of flags, got shape {list(flags.shape)}, strides {list(flags.stride())}")
    if not 0 <= first < flags.numel():
        raise ValueError(f"there is no block {first} to begin with: expected 0 to {flags.numel() - 1}")


def block_height(x: torch.Tensor, blocks: int) -> int:
    """Return the rows of each block, if those of `x` are `blocks` equal blocks; else raise ValueError."""
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
    if TMA and not IN_INTERPRETER:
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
