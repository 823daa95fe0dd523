"""Checks of indices on the device: offsets of groups, and indices of rows. The host does not wait for them.

Kernels limit an index that does not fit, so that they access nothing outside. A kernel before them reports such an
index in a word, which the host reads later.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hostir.kernels.devices import launch, launching
from hostir.kernels.layout import collapse

_BLOCK = 1024  # indices that a program checks


@triton.jit(do_not_specialize=["number", "length", "limit"])
def _check_kernel(indices, word, number, length, limit, row, step, ASCENDING: tl.constexpr, BLOCK: tl.constexpr):
    """Check `number` indices in rows of `length`. Store one that does not fit, with its place, in `word`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, column = place < number, place % length
    at = indices + place // length * row + column * step
    index = tl.load(at, mask=here, other=0).to(tl.int64)
    if ASCENDING:
        before = tl.load(at - step, mask=here & (column > 0), other=0).to(tl.int64)
        wrong = here & ((index < before) | (index < 0) | (index > limit))
    else:
        wrong = here & ((index < 0) | (index >= limit))
    shown = tl.minimum(tl.maximum(index, -0x80000000), 0x7FFFFFFF) & 0xFFFFFFFF
    report = tl.max(tl.where(wrong, ((place + 1) << 32) | shown, 0), 0)
    tl.store(word, report, mask=report > 0)


def check_indices(indices: torch.Tensor, limit: int, word: torch.Tensor, *, ascending: bool) -> None:
    """Launch a kernel that checks indices, and stores one that does not fit in `word`: see `misfit`.

    Args:
        limit: indices must be at least 0 and less than `limit`.
        word: `[1]` of int64, 0 before. It may be in pinned memory.
        ascending: True if indices must not decrease along the last axis, and may equal `limit`.
    """
    if not indices.numel():
        return
    lead = collapse(indices.shape[:-1], indices.stride()[:-1])
    if len(lead) > 1:
        for part in indices:
            check_indices(part, limit, word, ascending=ascending)
        return
    with launching(indices.device):
        launch(
            *(_check_kernel, triton.cdiv(indices.numel(), _BLOCK), indices, word, indices.numel()),
            *(indices.shape[-1], limit, lead[0][1] if lead else 0, indices.stride(-1)),
            ASCENDING=ascending,
            BLOCK=_BLOCK,
            num_warps=4,
        )


def misfit(word: int) -> tuple[int, int] | None:
    """Return the place and the value of an index that `check_indices` has reported; None if it has reported none.

    The place counts all indices in order. If the axes of the indices do not merge, it counts those of one part. Values
    are limited to 32 bits.
    """
    if not word:
        return None
    value = word & 0xFFFFFFFF
    return (word >> 32) - 1, value - (1 << 32) if value >> 31 else value
