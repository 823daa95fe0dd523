"""What users call on tensors. Each adds one statement to the fusion being built and gives its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostir.described import described
from hostir.dsl.fusion import apply, building, dtype_name, operand, sizes
from hostir.dsl.tensor import Extent, Tensor
from hostir.ir import comm_ops, tensor_ops, view_ops
from hostir.ir.sizes import product
from hostir.ir.source import error, user_span


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a[..., K] @ b[K, N]`: any number of leading axes on the left, two on the right."""
    span = user_span()
    return apply(tensor_ops.Matmul, a=operand(a, span), b=operand(b, span))


def linear(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a[..., K] @ weight[N, K]^T + bias[N]`."""
    span = user_span()
    added = None if bias is None else operand(bias, span)
    return apply(tensor_ops.Linear, a=operand(a, span), weight=operand(weight, span), bias=added)


def add(x: Tensor, y: Tensor) -> Tensor:
    """The elementwise sum; axes align at the end."""
    span = user_span()
    return apply(tensor_ops.Add, x=operand(x, span), y=operand(y, span))


def mul(x: Tensor, y: Tensor) -> Tensor:
    """The elementwise product; axes align at the end."""
    span = user_span()
    return apply(tensor_ops.Mul, x=operand(x, span), y=operand(y, span))


def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return apply(tensor_ops.Relu, x=operand(x, user_span()))


def gelu(x: Tensor) -> Tensor:
    """The exact Gaussian error linear unit."""
    return apply(tensor_ops.Gelu, x=operand(x, user_span()))


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))`."""
    return apply(tensor_ops.Silu, x=operand(x, user_span()))


def cast(x: Tensor, dtype: Any) -> Tensor:
    """The same values in another dtype: `f32`, `f16` or `bf16`, or torch's dtype of that kind."""
    return apply(tensor_ops.Cast, x=operand(x, user_span()), dtype=dtype_name(dtype))


def sum(x: Tensor, axis: int) -> Tensor:
    """The sum over one axis, which goes away; negative counts from the end."""
    span = user_span()
    value = operand(x, span)
    count = len(value.tensor.axes)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -count <= axis < count:
        raise error(f"{value} has no axis {described(axis)}", span, expected=f"an axis below {count}")
    return apply(tensor_ops.Sum, x=value, axis=axis % count)


def reshape(x: Tensor, shape: Sequence[Extent]) -> Tensor:
    """The same elements in another shape, in which one size may be -1: what the others leave."""
    span = user_span()
    value = operand(x, span)
    given = list(shape) if isinstance(shape, Sequence) else []
    unknown = [k for k, size in enumerate(given) if isinstance(size, int) and size == -1]
    if len(unknown) == 1:
        at, total = unknown[0], product(value.tensor.shape)
        known = product(sizes([*shape[:at], *shape[at + 1 :]], span, building(span)))
        if not total.divisible_by(known):
            raise error(f"{value} has {total} elements, which {known} does not divide", span)
        shape = [*shape[:at], total / known, *shape[at + 1 :]]
    new = sizes(shape, span, building(span))
    if product(new) != product(value.tensor.shape):
        raise error(f"{value} has {product(value.tensor.shape)} elements, the new shape {product(new)}", span)
    return apply(view_ops.Reshape, new, x=value)


def permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The axes in another order: axis `i` of the result is axis `axes[i]` of `x`."""
    span = user_span()
    value = operand(x, span)
    if not isinstance(axes, Sequence) or any(isinstance(i, bool) or not isinstance(i, int) for i in axes):
        raise error(f"not an order of axes: {described(axes)}", span, expected="a list of integers, such as (1, 0)")
    count = len(value.tensor.axes)
    return apply(view_ops.Permute, x=value, axes=tuple(i % count if -count <= i < 0 else i for i in axes))


def reshard(x: Tensor) -> Tensor:
    """The same tensor, to lie otherwise: annotate the result with a mesh and axes. Unannotated, it is replicated."""
    value = operand(x, user_span())
    return apply(comm_ops.Reshard, value.tensor.shape, x=value)
