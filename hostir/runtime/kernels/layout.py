"""How a tensor lies in memory, as the kernels see it: merged axes, row views, and what TMA can describe."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# The widest stride a tensor map can hold, in bytes (CUDA driver API, cuTensorMapEncodeTiled).
_STRIDE_LIMIT = 1 << 40


def collapse(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Merge neighbouring axes as far as every one of `strides` walks them uniformly.

    Returns `(size, stride, stride, ...)` for each axis that is left, outermost first, one stride for each argument.
    Axes of size 1 vanish. A shape with a zero in it becomes one axis of size 0.
    """
    if 0 in shape:
        return [(0, *(0 for _ in strides))]
    merged: list[tuple[int, ...]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(outer == size * step for outer, step in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return merged


def rows(t: torch.Tensor) -> torch.Tensor | None:
    """`t[..., K]` as a view `[M, K]`, M the product of the leading axes, or None when no single row stride fits."""
    if t.ndim == 2:
        return t
    if t.is_contiguous() and t.shape[-1]:  # what is said below, in a quarter of the time
        return t.view(-1, t.shape[-1])
    levels = collapse(t.shape[:-1], t.stride()[:-1])
    if len(levels) > 1:
        return None
    size, stride = levels[0] if levels else (1, t.shape[-1])
    return t.as_strided((size, t.shape[-1]), (stride, t.stride(-1)))


def rows_or_copy(t: torch.Tensor) -> torch.Tensor:
    """`t[..., K]` as `[M, K]`: a view where a single row stride fits, else a dense copy."""
    flat = rows(t)
    return t.reshape(-1, t.shape[-1]) if flat is None else flat


def descriptor_strides(t: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> list[int] | str:
    """Strides (in elements) for a TMA descriptor of `shape` over the memory of `t`, or the reason why there is none.

    The rules are those of `cuTensorMapEncodeTiled`: a base on 16 bytes, unit stride innermost, every other stride a
    multiple of 16 bytes, and each axis stepping over whole copies of the axis inside it. An axis of size 1 is never
    stepped along, so a stride that does not fit is replaced by one that does.
    """
    if t.data_ptr() % 16:
        return "its first element is not on a 16-byte boundary"
    if shape[-1] > 1 and strides[-1] != 1:
        return f"its innermost stride is {strides[-1]}, not 1"
    quantum = 16 // t.element_size()
    legal = [1]
    span = shape[-1]
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1 and (stride % quantum or stride < span or stride % legal[0] or stride >= _STRIDE_LIMIT):
            stride = -(-span // quantum) * quantum
        if stride % quantum:
            return f"its stride of {stride} elements is not a multiple of 16 bytes"
        if stride < span or stride % legal[0] or stride * t.element_size() >= _STRIDE_LIMIT:
            return f"its stride of {stride} elements does not step over whole rows"
        legal.insert(0, stride)
        span = size * stride
    return legal
