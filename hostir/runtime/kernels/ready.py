"""Rows that arrive while a kernel runs: a flag for each block of them, and how a program of the kernel waits for it.

A flag holds the highest epoch that its block has reached. Whoever fills the block raises the flag afterwards: another
stream, a copy engine, a peer, in the interpreter another process. The kernel waits by looking again and again, so what
raises the flag must not need the SMs (in the interpreter: a kernel in the same process) that the waiting kernel holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hostir.ir.source import HostIRError, error
from hostir.runtime.kernels.launch import INTERPRETED, check_device

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
