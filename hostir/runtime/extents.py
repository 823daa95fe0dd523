"""Where in its buffer each register lies: from its first element to its last, whatever lies between."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from hostir.runtime.plan import Allocate, Recording, Symmetric, View

Extent = tuple[int, int]  # elements of a buffer, from the first to the one behind the last


def extents(recording: Recording) -> dict[int, Extent]:
    """Those of a program's own buffers, symmetric ones of peers among them, and of views."""
    found: dict[int, Extent] = {}
    for op in recording.ops:
        if isinstance(op, Allocate | Symmetric):
            found[op.out] = 0, prod(op.shape)
        elif isinstance(op, View):
            last = sum((size - 1) * stride for size, stride in zip(op.shape, op.stride, strict=True))
            found[op.out] = op.offset, op.offset + (last + 1 if prod(op.shape) else 0)
    return found


def overlap(one: Extent, others: Iterable[Extent]) -> bool:
    """Whether one shares an element with another."""
    low, high = one
    return any(low < end and start < high for start, end in others)
