"""Map an operator's tensors to the operands of a fusion, and its outputs to the operator's results.

Operands are views with as few axes as strides allow, so that few fusions serve all calls. Results have the strides that
torch's functions give them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hostir.ir.source import error, user_span


def collapsed(x: Tensor, axis: int, last: int = 1, joined: bool = False) -> tuple[Tensor, int]:
    """Collapse axes where strides allow; return the view and the new index of `axis`.

    The axes before `axis` become one, and the axes behind it, except for the `last` ones, become one. They become one
    with `axis` itself if nothing is before it, or if `joined`. With `last=0` the view has at least two axes.
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
    """Return a view in which the axes from `first` up to `end` are one; None if strides do not allow it."""
    if end - first < 2:
        return x
    try:
        return x.view(*x.shape[:first], prod(x.shape[first:end]), *x.shape[end:])
    except RuntimeError:
        return None


def expanded(rows: Tensor, part: Tensor, axis: int, ranks: int) -> Tensor:
    """View gathered rows with the axes of the gathered tensor: those of `part`, with `axis` `ranks` times as long."""
    if part.ndim == 2:
        return rows
    others = [n for k, n in enumerate(part.shape[:-1]) if k != axis]
    return rows.view(part.shape[axis] * ranks, *others, rows.shape[-1]).movedim(0, axis)


def unaliased(result: Tensor, operand: Tensor, ranks: int) -> Tensor:
    """Return a result in separate memory: on one rank, a gathered tensor is a view of the operand."""
    if ranks > 1 or result.untyped_storage().data_ptr() != operand.untyped_storage().data_ptr():
        return result
    return result.clone(memory_format=torch.contiguous_format)


def empty_rows(x: Tensor, shape: Sequence[int], axis: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of this shape, with `axis` outermost in memory."""
    return x.new_empty([shape[axis], *shape[:axis], *shape[axis + 1 :]], dtype=dtype).movedim(0, axis)


def gathered_like(
    x: Tensor, axis: int, ranks: int, columns: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty tensor like the gathered `x`, or with `columns` like its product; for tracers."""
    shape = [*x.shape]
    shape[axis] *= ranks
    if columns is not None:
        shape[-1] = columns
    return empty_rows(x, shape, 0 if axis == x.ndim - 1 else axis, dtype)


def check_shape(out: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `out`. Raises HostIRError unless it has the shape of the result."""
    if list(out.shape) != [*shape]:
        raise error(f"out= has shape {list(out.shape)}", user_span(), expected=f"the shape of the result, {[*shape]}")
    return out


def into(out: Tensor, compute: Callable[[Tensor], Any]) -> None:
    """Compute into `out`, which may have any strides, by a function that writes to a contiguous tensor."""
    dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    compute(dense)
    if dense is not out:
        out.copy_(dense)
