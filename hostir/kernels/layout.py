"""Layouts of tensors for kernels: merged axes, views of rows and of blocks of rows, and strides of TMA descriptors.

The module also has a pool of small device arrays that kernels read.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch


def launch_layout(t: torch.Tensor | None) -> tuple[object, ...] | None:
    """Return a key of all properties of a tensor that a prepared launch depends on; None without a tensor.

    The key says whether the address is a multiple of 16. It does not hold the address itself.
    """
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0)


def collapse(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Merge neighbouring axes as far as all of `strides` allow.

    Returns `(size, stride, stride, ...)` for each merged axis, outermost first, with one stride per argument. Axes of
    size 1 are dropped. A shape with a zero in it becomes one axis of size 0.
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
    """Return `t[..., K]` as a view `[M, K]`, with its leading axes flattened.

    Return None if there is no such view, because the rows have no constant stride.
    """
    if t.ndim == 2:
        return t
    if t.is_contiguous() and t.shape[-1]:  # the same result as below, in a quarter of the time
        return t.view(-1, t.shape[-1])
    levels = collapse(t.shape[:-1], t.stride()[:-1])
    if len(levels) > 1:
        return None
    size, stride = levels[0] if levels else (1, t.shape[-1])
    return t.as_strided((size, t.shape[-1]), (stride, t.stride(-1)))


def rows_or_copy(t: torch.Tensor) -> torch.Tensor:
    """Return `t[..., K]` as `[M, K]`: a view if the rows have a constant stride, else a contiguous copy."""
    flat = rows(t)
    return t.reshape(-1, t.shape[-1]) if flat is None else flat


def row_pieces(
    parts: Sequence[tuple[torch.Tensor, int]], count: int, cuts: Iterable[int] = ()
) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
    """Cut `count` rows of several tensors into the same pieces, so that each piece is one view in every tensor.

    Rows are counted along the flattened leading axes. Within a piece, the rows of a tensor have a constant stride.

    Args:
        parts: the tensors, of any layouts, each with the index of its first row to take.
        count: the number of rows to take from each tensor.
        cuts: further rows at which a piece must begin, counted from the first row taken.

    Returns `(start, views)` for each piece: its first row, counted from the first row taken, and its rows in each
    tensor as views `[rows, K]`.
    """
    merged = [collapse(t.shape[:-1], t.stride()[:-1]) or [(1, t.shape[-1])] for t, _ in parts]
    turns = {
        row - first
        for (_, first), ((run, _), *_) in zip(parts, (levels[::-1] for levels in merged), strict=True)
        for row in range(first // run * run, first + count, run)
    }
    chosen = sorted(row for row in {0, count, *turns, *cuts} if 0 <= row <= count)
    return [
        (start, tuple(_rows_at(t, s, first + start, stop - start) for (t, first), s in zip(parts, merged, strict=True)))
        for start, stop in itertools.pairwise(chosen)
    ]


def source_pieces(
    parts: Sequence[tuple[torch.Tensor, int]], sources: int, height: int, count: int
) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
    """Cut `count` rows of several tensors into sources. Return the same as `row_pieces`: one piece for each source.

    Args:
        parts: the tensors, each with the index of its first row to take, counted as rows of the first tensor.
        sources: the number of leading axes that count sources. The views do not have these axes.
        height: the number of rows of a source.
        count: the number of rows to take.
    """

    def view(t: torch.Tensor, number: int) -> torch.Tensor:
        for extent in reversed(t.shape[:sources]):
            number, index = divmod(number, extent)
            at.insert(0, index)
        return t[tuple(at)]

    pieces = []
    for n in range(count // height if height else 0):
        views = []
        for t, first in parts:
            at: list[int] = []
            views.append(view(t, first // height + n))
        pieces.append((n * height, tuple(views)))
    return pieces


def _rows_at(t: torch.Tensor, levels: Sequence[tuple[int, ...]], start: int, count: int) -> torch.Tensor:
    """Return rows `[start, start + count)` of `t` as a view `[count, K]`.

    These rows must have a constant stride.

    `levels` are the merged leading axes of `t`, as `collapse` returns them.
    """
    left, offset = start, int(t.storage_offset())
    for size, stride in reversed(levels):
        left, index = divmod(left, size)
        offset += index * stride
    return t.as_strided((count, t.shape[-1]), (levels[-1][1], t.stride(-1)), offset)


def block_of(x: torch.Tensor, other: torch.Tensor, block: int, blocks: int) -> list[torch.Tensor]:
    """Return the rows of one block of `x` as views. `block` is the index of the block among `blocks` equal blocks.

    Returns one view `[rows, K]` if the block's rows have a constant stride in `x` and also in `other`, else several
    views. `other` must have the same leading axes as `x`. A call with `x` and `other` swapped cuts the block in the
    same way.
    """
    flat = rows(x)
    if flat is not None and rows(other) is not None:
        height = len(flat) // blocks
        return [flat[block * height : (block + 1) * height]]
    height = x.shape[:-1].numel() // blocks
    return _rows_of(x, block * height, (block + 1) * height)


def with_rows(
    out: torch.Tensor, a: torch.Tensor, block: int, blocks: int, own_rows: torch.Tensor | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of views that together cover one block: rows of `out`, and the rows to multiply for them.

    The rows to multiply are rows of `own_rows`, or of `a` if `own_rows` is None.
    """
    outs = block_of(out, a, block, blocks)
    if own_rows is None:
        return list(zip(outs, block_of(a, out, block, blocks), strict=True))
    parts = rows_or_copy(own_rows).split([part.shape[:-1].numel() for part in outs])
    return [(part, mine.view(*part.shape[:-1], own_rows.shape[-1])) for part, mine in zip(outs, parts, strict=True)]


def with_all_rows(
    out: torch.Tensor, a: torch.Tensor, blocks: int, first: int, own_rows: torch.Tensor | None = None
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the result of `with_rows` for every block, with `own_rows` for block `first` only.

    This takes less time than one call of `with_rows` per block.
    """
    outs, parts = rows(out), rows(a)
    if outs is None or parts is None or not len(outs):
        return [with_rows(out, a, block, blocks, own_rows if block == first else None) for block in range(blocks)]
    height = len(outs) // blocks
    pairs = list(zip(outs.split(height), parts.split(height), strict=True))
    if own_rows is not None:
        pairs[first] = pairs[first][0], rows_or_copy(own_rows)
    return [[pair] for pair in pairs]


def _rows_of(x: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """Return rows `[start, stop)` of `x` as one or more views. Rows are counted along the flattened leading axes."""
    inner = x.shape[1:-1].numel()
    if start == stop:
        return []
    if start % inner == 0 and stop % inner == 0:
        return [x[start // inner : stop // inner]]
    cuts = [
        (i, max(start - i * inner, 0), min(stop - i * inner, inner)) for i in range(start // inner, -(-stop // inner))
    ]
    return [part for i, low, high in cuts for part in _rows_of(x[i], low, high)]


# The widest stride a tensor map can hold, in bytes (CUDA driver API, cuTensorMapEncodeTiled).
_STRIDE_LIMIT = 1 << 40


def descriptor_strides(t: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> list[int] | str:
    """Return strides (in elements) for a TMA descriptor of `shape` over the memory of `t`.

    If `strides` break a rule of TMA (`cuTensorMapEncodeTiled`), returns a string that describes the problem. The rules:

    - The address is a multiple of 16 bytes.
    - The innermost stride is 1.
    - Every other stride is a multiple of 16 bytes and of the next inner stride.
    - Every other stride is at least the extent of the next inner axis.

    The stride of an axis of size 1 is never used. If it breaks a rule, a valid stride replaces it.
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


class Words:
    """A pool of small device arrays (tables and counters of kernels), shared by all plans of an executor.

    Args:
        device: the device of the arrays.
        owners: the expected number of owners (kernels) that are alive at a time. The pool allocates that many arrays at
            once.
    """

    def __init__(self, device: torch.device, owners: int) -> None:
        self.device, self.owners = device, owners
        self.free: dict[tuple[int, int], list[torch.Tensor]] = {}

    def of(self, owner: object, numbers: Sequence[int], place: int) -> torch.Tensor:
        """Return an int64 array with these numbers, aligned to 128 bytes.

        The array returns to the pool when `owner` is garbage-collected. The numbers are copied on the current stream,
        and the host does not wait. The caller must order this copy after all work of earlier owners of the array.
        Arrays of different places never share memory. A plan uses one place for each of its kernels.
        """
        size = -(-len(numbers) // 16) * 16
        free = self.free.setdefault((place, size), [])
        if not free:
            free.extend(torch.empty(self.owners, size, dtype=torch.int64, device=self.device).unbind())
        words = free.pop()
        weakref.finalize(owner, free.append, words).atexit = False
        values = torch.tensor([*numbers], dtype=torch.int64, device="cpu")  # even if torch's default device is another
        values = values.pin_memory() if self.device.type == "cuda" else values
        return words[: len(values)].copy_(values, non_blocking=True)
