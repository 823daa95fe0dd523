"""Completion flags: a kernel raises a flag as soon as it has stored a block of rows, and goes on with other blocks.

The programs of the kernel count the pieces of a block that they have stored. The program that completes a block raises
its flag with a release. Each count is a release, too, and the last count is also an acquire. So everything that the
programs wrote before they counted happens before the flag rises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hostir.kernels.devices import (
    check_device,
    launch,
    launching,
)
from hostir.kernels.flags.ready import IN_INTERPRETER, block_height, check_flags, fits_32_bits
from hostir.kernels.layout import launch_layout


def done_layout(done: DoneFlags | None) -> tuple[object, ...] | None:
    """Return a key of all properties of completion flags that a prepared launch depends on; None without flags.

    The address of the flags and the value of the epoch are not in the key: a prepared launch serves any of them.
    """
    return None if done is None else (launch_layout(done.flags), fits_32_bits(done.epoch))


def done_rows(done: DoneFlags, out: torch.Tensor) -> int:
    """Return the number of rows of a block of `out`. Raises TypeError or ValueError if `done` does not fit `out`."""
    check_device(out=out, flags=done.flags)
    check_flags(done.flags, done.first)
    return block_height(out, done.flags.numel())


# Added to a block's count if a piece was computed before its operands arrived. The block's flag then does not rise.
MISSED = tl.constexpr(1 << 32)


@dataclass(frozen=True)
class DoneFlags:
    """Completion flags of one kernel. The rows of its output are split evenly into `len(flags)` blocks.

    Fields:
        flags: `[blocks]` of int32 or int64, contiguous. Other kernels and peers may read it while the kernel runs.
        epoch: the value that the kernel writes to `flags[i]` once block i is stored. A thread that reads it with an
            acquire, anywhere in the system, sees the block. If the kernel gives up on rows that block i needs, it does
            not change `flags[i]`.
        first: the index of the block to begin with. The other blocks follow in a circle. A kernel that also waits for
            flags ignores `first`.
    """

    flags: torch.Tensor
    epoch: int
    first: int = 0


class Raised(NamedTuple):
    """The flags that a kernel raises: the fields of `DoneFlags` on the device.

    `flags` is a pointer, and `height` is the number of rows of a block. `counts` points to an int64 for each block,
    which is 0 before and after the launch.
    """

    flags: Any
    epoch: Any
    height: Any
    counts: Any


@triton.jit
def count(raised, block, exists, needed, more):
    """Add `more` to the count of each block in `block`, and raise the flags of the blocks that are now complete.

    `more` is the number of pieces that this program has stored. MISSED is added to it if one of these pieces is wrong.

    `exists` masks the blocks. The pieces must be in memory: call `stores_ended` before. A block is complete when all
    its pieces have been counted: `needed` is their number. The count of the block then becomes 0 for the next launch.
    The flag of the block rises unless MISSED was added to the count.
    """
    before = tl.atomic_add(raised.counts + block, more, mask=exists, sem="acq_rel", scope="gpu")
    now = before + more
    complete = exists & (now % MISSED == needed)
    tl.store(raised.counts + block, 0, mask=complete)
    tl.atomic_xchg(raised.flags + block, raised.epoch, mask=complete & (now < MISSED), sem="release", scope="sys")


@triton.jit
def stores_ended(x, wanted, TMA: tl.constexpr):
    """Return `x`. If `wanted`, first wait until the stores of all threads of the program have ended.

    Without TMA, a barrier suffices, and `wanted` is ignored. After a TMA store, Triton waits only until the hardware
    has read the shared memory. The thread that issued the store must also wait until the bytes are in memory. The
    compiler chooses that thread, so all threads wait. The barrier is the instruction of `tl.debug_barrier`; Triton
    would not pipeline a loop that contains `tl.debug_barrier` itself.
    """
    if IN_INTERPRETER:
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
    """Raise all flags, unless `timeouts` holds a timeout (a word that is not 0)."""
    missing = 0
    if timeouts is not None:
        number = tl.arange(0, WORDS)
        missing = tl.sum((tl.load(timeouts + number, mask=number < words, other=0) != 0).to(tl.int32), 0)
    number = tl.arange(0, FLAGS)
    tl.atomic_xchg(flags + number, epoch, mask=(number < blocks) & (missing == 0), sem="release", scope="sys")


def raise_flags(done: DoneFlags, timeouts: torch.Tensor | None) -> None:
    """Launch a kernel on the current stream that raises all flags, unless an earlier kernel has reported timeouts."""
    blocks, words = len(done.flags), 0 if timeouts is None else timeouts.numel()
    sizes = {"FLAGS": triton.next_power_of_2(blocks), "WORDS": triton.next_power_of_2(max(1, words))}
    with launching(done.flags.device):
        launch(_raise, 1, done.flags, done.epoch, timeouts, blocks, words, **sizes, num_warps=1)
