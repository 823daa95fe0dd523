"""Estimate collectives that NCCL does not run: see `hostir.ir.comm_ops.Implemented`.

The constants are fitted together with those in `hostir.choice.hardware`. They describe torch's kernels, which have at
most 24 thread blocks, and hostir's kernel with at most 128. So they are the same for all GPUs with NVLink. Times on
more than 2 ranks were not measured.
"""

from __future__ import annotations

from hostir.choice.cost import CostTransfer
from hostir.choice.hardware import H100, Hardware
from hostir.ir.comm_ops import COPY_ENGINE, LOW_LATENCY, ONE_SHOT, TWO_SHOT

KERNEL = 10.8  # microseconds of a kernel of torch's that moves few bytes
COPY_IN_KERNEL = 853.0  # GB/s at which the kernel of `one_shot` copies its operand, counting reads and writes
READ = 180.0  # GB/s at which the kernel of `one_shot` reads from peers
MOVE = 394.0  # GB/s of `two_shot`, counting bytes as for NCCL: those that leave a rank, and half of those that it keeps
SEPARATE = 4.01  # microseconds by which `two_shot` with a separate result takes longer than in place
EXCHANGE = 5.02  # microseconds of `low_latency` with few bytes
SHORT = 20.0  # microseconds: if a sum by `low_latency` takes no longer, a matmul could hide little of it
SMALL_COPY = 5.17  # microseconds of a copy of few bytes within the GPU


def implemented(transfer: CostTransfer, hardware: Hardware) -> float | None:
    """Return the microseconds of a collective that NCCL does not run; None if NCCL runs it.

    The operand is first copied to the workspace, unless it lies there.
    """
    keyword, _, by = transfer.collective.partition(" by ")
    size, ranks = transfer.bytes / 1e3, transfer.ranks  # kilobytes, so that a rate in GB/s gives microseconds
    copied = 0.0 if transfer.in_workspace else SMALL_COPY + 2 * size / hardware.memory
    if by == LOW_LATENCY:
        sent = (ranks - 1) * size / (1 if keyword == "allreduce" else ranks)
        return EXCHANGE + sent / hardware.sending
    if by == ONE_SHOT and keyword == "allreduce":
        in_kernel = 0.0 if transfer.in_workspace else 2 * size / COPY_IN_KERNEL  # the kernel makes the copy
        return KERNEL + in_kernel + (ranks - 1) * size / READ
    if by in (ONE_SHOT, TWO_SHOT):
        steps = 2 if by == TWO_SHOT else 1
        return copied + KERNEL + SEPARATE * (steps - 1) + size * (steps * (ranks - 1) + 0.5) / ranks / MOVE
    if by == COPY_ENGINE:
        part = size / ranks
        to_workspace = 0.0 if transfer.in_workspace else SMALL_COPY + 2 * part / hardware.memory
        return to_workspace + 2 * hardware.barrier + (ranks - 1) * (hardware.copy + part / hardware.link)
    return None


def is_short(keyword: str, size: int, ranks: int) -> bool:
    """Return True if a sum by `low_latency` is so short that a matmul could hide little of it.

    Args:
        keyword: `allreduce` or `reduce_scatter`.
        size: the bytes of the summed tensor.
        ranks: the number of ranks.
    """
    us = implemented(CostTransfer(f"{keyword} by {LOW_LATENCY}", size, ranks, in_workspace=True), H100)
    return us is not None and us <= SHORT


def is_sooner(by: str, size: int, ranks: int) -> bool:
    """Return True if an all-reduce by `low_latency` is expected to take no longer than one by a kernel of torch's.

    torch's kernel finds its operand in symmetric memory. With `two_shot` it also overwrites the operand with the sum.
    After `low_latency`, a copy does that. All ranks must get the same answer, so the copy has the rate of an H100.

    Args:
        by: torch's kernel, `one_shot` or `two_shot`.
        size: the bytes of the operand.
        ranks: the number of ranks.
    """
    ours, torchs = (
        implemented(CostTransfer(f"allreduce by {each}", size, ranks, in_workspace=True), H100)
        for each in (LOW_LATENCY, by)
    )
    assert ours is not None
    assert torchs is not None
    if by == TWO_SHOT:
        ours += SMALL_COPY + 2 * size / 1e3 / H100.memory
        torchs -= SEPARATE
    return ours <= torchs
