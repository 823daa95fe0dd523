"""Find what follows a sum over ranks in the graph of a transformer: a residual is added, and the rows are normalized.

`hostir::all_reduce_residual_norm` and `hostir::reduce_scatter_residual_norm` compute both together with the sum. The
norm of a graph must round as they do: the rows are widened to float32, and rounded once, at the end. If a weight is
multiplied only after that, the operator normalizes without a weight, and the multiplication stays in the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from hostir.torch.graphs import AS_DTYPE, argument, depends, equal, keeps_rows, shape_of, value
from hostir.torch.ops.running import DTYPES

aten = torch.ops.aten
NORMS = (aten.rms_norm.default, aten._fused_rms_norm.default)
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


@dataclass(frozen=True)
class ResidualNorm:
    """A residual and a norm after a sum.

    Fields:
        added: the node that adds the residual to the sum.
        residual: the node of the residual.
        normed: the node of the normalized rows.
        weight: the node with the factors of the columns; None if they are 1.
        eps: is added to the mean of the squares.
    """

    added: Node
    residual: Node
    normed: Node
    weight: Node | None
    eps: float


def residual_norm_after(total: Node) -> ResidualNorm | None:
    """Return the residual and the norm that follow `total`, a sum over ranks; None if anything else uses the sum."""
    (user, *others) = total.users or (None,)
    if user is None or others:
        return None
    if keeps_rows(user) and user.target is not AS_DTYPE:
        return residual_norm_after(user)
    terms = [x for x in user.args if x is not total]
    if user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2 or len(terms) != 1:
        return None
    residual: Any = terms[0]
    if not isinstance(residual, Node) or not all(equal(shape_of(x), shape_of(user)) for x in (total, residual)):
        return None
    dtypes = {value(x).dtype for x in (total, residual, user)}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        return None
    for normed, weight, eps in _norms(user):
        fits = weight is None or (equal(shape_of(weight), shape_of(user)[-1:]) and value(weight).dtype in dtypes)
        if fits and value(normed).dtype in dtypes and (weight is None or not depends(weight, user)):
            return ResidualNorm(user, residual, normed, weight, eps) if 0 <= eps < math.inf else None
    return None


def _norms(rows: Node) -> Iterator[tuple[Node, Node | None, float]]:
    """Yield the norms of some rows: the node of the result, the weight, and eps."""
    for user in rows.users:
        if user.target in NORMS and user.args[0] is rows:
            yield from _one_node(user)
    wide = _wide(rows)
    for square in wide.users if wide is not None else ():
        if wide is not None and _is_square(square, wide):
            yield from _many_nodes(rows, wide, square)


def _one_node(norm: Node) -> Iterator[tuple[Node, Node | None, float]]:
    eps, weight = argument(norm, 3, "eps"), argument(norm, 2, "weight")
    if not isinstance(eps, float) or len(norm.args[1]) != 1:  # type: ignore[arg-type]
        return
    if norm.target is NORMS[0]:
        yield norm, weight, eps
    elif [user.args[1] for user in norm.users if user.target is operator.getitem] == [0]:
        yield next(iter(norm.users)), weight, eps


def _many_nodes(rows: Node, wide: Node, square: Node) -> Iterator[tuple[Node, Node | None, float]]:
    """Yield the norm that begins with the squares of the widened rows."""
    mean = _only_user(square, aten.mean.dim)
    if mean is None or not _keeps_last_axis(mean):
        return
    biased = _only_user(mean, aten.add.Tensor, aten.add.Scalar)
    if biased is None or biased.kwargs or len(biased.args) != 2 or not isinstance(biased.args[1], int | float):
        return
    scale = _only_user(biased, aten.rsqrt.default)
    scaled = None if scale is None else _only_user(scale, aten.mul.Tensor)
    if scaled is None or {*scaled.args} != {wide, scale}:
        return
    weight, result = None, scaled
    if (product := _only_user(scaled, aten.mul.Tensor)) is not None and len({*product.args}) == 2:
        (factors,) = (x for x in product.args if x is not scaled)
        narrow = _before_cast(factors, rows)
        if isinstance(narrow, Node) and len(shape_of(narrow)) == 1:
            weight, result = narrow, product
    if wide is not rows:
        cast = _only_user(result, *CASTS)
        if cast is None or not _casts(cast, value(rows).dtype):
            return
        result = cast
    yield result, weight, float(biased.args[1])


def _only_user(node: Node, *targets: Any) -> Node | None:
    """Return the only user of a node, if it calls one of the targets; else None."""
    users = [*node.users]
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _wide(rows: Node) -> Node | None:
    """Return the rows in the dtype in which hostir normalizes them; None if the graph has no such node."""
    dtype = torch.promote_types(value(rows).dtype, torch.float32)
    if value(rows).dtype == dtype:
        return rows
    return next((x for x in rows.users if _casts(x, dtype)), None)


def _casts(node: Node, dtype: torch.dtype) -> bool:
    """Return True if a node only changes the dtype of its operand, to `dtype`."""
    if node.target not in CASTS:
        return False
    x = node.args[0]
    return value(node).dtype == dtype and value(node).device == value(x).device  # type: ignore[arg-type]


def _before_cast(node: Any, rows: Node) -> Any:
    """Return the operand of a cast from the dtype of `rows`; any other node itself."""
    cast = isinstance(node, Node) and node.target in CASTS and value(node.args[0]).dtype == value(rows).dtype  # type: ignore[arg-type]
    return node.args[0] if cast else node


def _is_square(node: Node, x: Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    return node.target is aten.mul.Tensor and [*node.args] == [x, x]


def _keeps_last_axis(mean: Node) -> bool:
    """Return True if a mean is over the last axis only, which it keeps with length 1."""
    axes, last = argument(mean, 1, "dim"), len(shape_of(mean)) - 1
    kept = argument(mean, 2, "keepdim", False) and argument(mean, 3, "dtype") is None
    return bool(kept) and [axis % (last + 1) for axis in axes or ()] == [last]
