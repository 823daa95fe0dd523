"""Map an operator's tensors to the operands of a fusion, and the fusion's outputs to the operator's results.

An operand is a view of the operator's tensor with as few axes as its strides allow. So tensors of many shapes share one
compiled fusion. Results have the same strides as the results of torch's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hostir.ir.source import error, user_span
from hostir.torch.ops.running import THREAD


def collapsed(x: Tensor, axis: int, last: int = 1, joined: bool = False) -> tuple[Tensor, int]:
    """Merge axes of `x` where strides allow it; return the view and the new index of `axis`.

    The axes before `axis` are merged into one axis. The axes after `axis` are merged into another axis. If all axes
    before `axis` have size 1, `axis` moves to the front. If, in addition, `last` is 1, `axis` is then merged with the
    axes after it.

    Args:
        x: the tensor.
        axis: the axis that a collective gathers or scatters.
        last: the number of last axes that are never merged, 1 or 0. With 0, the view has at least two axes.
        joined: True to merge `axis` with the axes after it in every case.
    """
    end = x.ndim - last
    if prod(x.shape[:axis]) > 1:
        inner = merged(x, axis if joined else axis + 1, end)
        x = x if inner is None else inner
        outer = merged(x, 0, axis)
        return (x, axis) if outer is None else (outer, 1)
    x = x if axis == 0 else x.movedim(axis, 0)
    for first in (0, 1) if last else (1,):
        if (view := merged(x, first, end)) is not None:
            return view, 0
    return x, 0


def merged(x: Tensor, first: int, end: int) -> Tensor | None:
    """Return a view in which the axes `first` to `end - 1` are merged into one; None if strides do not allow it."""
    if end - first < 2:
        return x
    try:
        return x.view(*x.shape[:first], prod(x.shape[first:end]), *x.shape[end:])
    except RuntimeError:
        return None


def expanded(rows: Tensor, part: Tensor, axis: int, ranks: int) -> Tensor:
    """Return gathered rows as a view with the axes of the gathered tensor.

    Args:
        rows: an output of a fusion. Its outermost axis is the gathered axis.
        part: this rank's part of the tensor before it was gathered.
        axis: the gathered axis of `part`.
        ranks: the number of ranks.
    """
    if part.ndim == 2:
        return rows
    others = [n for k, n in enumerate(part.shape[:-1]) if k != axis]
    return rows.view(part.shape[axis] * ranks, *others, rows.shape[-1]).movedim(0, axis)


def unaliased(result: Tensor, operand: Tensor, ranks: int) -> Tensor:
    """Return `result` in memory that it does not share with `operand`.

    If there is only one rank, a gathered tensor may be a view of the operand. Such a tensor is copied.
    """
    if ranks > 1 or result.untyped_storage().data_ptr() != operand.untyped_storage().data_ptr():
        return result
    copy = result.clone(memory_format=torch.contiguous_format)
    if THREAD.executed is not None:
        THREAD.executed.note_copy(result, copy)
    return copy


def empty_rows(x: Tensor, shape: Sequence[int], axis: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor of this shape on the device of `x`. `axis` is the outermost axis in memory."""
    return x.new_empty([shape[axis], *shape[:axis], *shape[axis + 1 :]], dtype=dtype).movedim(0, axis)


def gathered_like(
    x: Tensor, axis: int, ranks: int, columns: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return an uninitialized tensor with the layout of the gathered `x`, or of its product with `columns` columns.

    Tracers get this tensor as a result, because they need only shapes and strides.
    """
    return empty_rows(x, gathered_shape(x, axis, ranks, columns), 0 if axis == x.ndim - 1 else axis, dtype)


def gathered_shape(x: Tensor, axis: int, ranks: int, columns: int | None = None) -> list[int]:
    """Return the shape of the gathered `x`, or of its product with a matrix of `columns` columns."""
    shape = [*x.shape]
    shape[axis] *= ranks
    if columns is not None:
        shape[-1] = columns
    return shape


def check_shape(out: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `out`. Raises HostIRError unless it has the shape `shape`."""
    if list(out.shape) != [*shape]:
        raise error(f"out= has shape {list(out.shape)}", user_span(), expected=f"the shape of the result, {[*shape]}")
    return out


def into(out: Tensor, compute: Callable[[Tensor], Any]) -> None:
    """Write the result of `compute` to `out`, which may have any strides.

    `compute` writes to its argument, which is always contiguous.
    """
    dense = contiguous(out)
    compute(dense)
    if dense is not out:
        out.copy_(dense)


def contiguous(out: Tensor) -> Tensor:
    """Return `out` if it is contiguous, else an uninitialized contiguous tensor of the same shape."""
    return out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
