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
    """`a[..., K] @ b[K, N]` of shape `[..., N]`; also written `a @ b`.

    Both have one dtype, which the result gets; products are added up in f32. Raises HostIRError where the contracted
    sizes or the dtypes differ, or where `b` has other than two axes.
    """
    span = user_span()
    return apply(tensor_ops.Matmul, a=operand(a, span), b=operand(b, span))


def linear(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a[..., K] @ weight[N, K]^T + bias[N]` of shape `[..., N]`: what `torch.nn.Linear` computes.

    All have one dtype, which the result gets; products are added up in f32. Raises HostIRError where sizes or dtypes
    do not fit.
    """
    span = user_span()
    added = None if bias is None else operand(bias, span)
    return apply(tensor_ops.Linear, a=operand(a, span), weight=operand(weight, span), bias=added)


def add(x: Tensor, y: Tensor) -> Tensor:
    """The elementwise sum, also written `x + y`.

    Axes align from the last one on, and one of size 1 is repeated, as in torch. Raises HostIRError where sizes do not
    align or dtypes differ.
    """
    span = user_span()
    return apply(tensor_ops.Add, x=operand(x, span), y=operand(y, span))


def mul(x: Tensor, y: Tensor) -> Tensor:
    """The elementwise product, also written `x * y`; axes, dtypes and errors are as for `add`."""
    span = user_span()
    return apply(tensor_ops.Mul, x=operand(x, span), y=operand(y, span))


def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`, elementwise, in the shape and dtype of `x`."""
    return apply(tensor_ops.Relu, x=operand(x, user_span()))


def gelu(x: Tensor) -> Tensor:
    """The exact Gaussian error linear unit, `x * (1 + erf(x / sqrt 2)) / 2`, elementwise."""
    return apply(tensor_ops.Gelu, x=operand(x, user_span()))


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))`, elementwise."""
    return apply(tensor_ops.Silu, x=operand(x, user_span()))


def cast(x: Tensor, dtype: Any) -> Tensor:
    """The same values in another dtype, rounded to nearest even.

    `dtype` is `"f32"`, `"f16"` or `"bf16"`, or torch's dtype of that kind; HostIRError for any other.
    """
    return apply(tensor_ops.Cast, x=operand(x, user_span()), dtype=dtype_name(dtype))


def sum(x: Tensor, axis: int) -> Tensor:
    """The sum over one axis, added up in f32. The axis goes away; a negative one counts from the end.

    Raises HostIRError where there is no such axis.
    """
    span = user_span()
    value = operand(x, span)
    count = len(value.tensor.axes)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -count <= axis < count:
        raise error(f"{value} has no axis {described(axis)}", span, expected=f"an axis below {count}")
    return apply(tensor_ops.Sum, x=value, axis=axis % count)


def reshape(x: Tensor, shape: Sequence[Extent]) -> Tensor:
    """The same elements, in row-major order, in another shape; one size may be -1 for what the others leave.

    Raises HostIRError where the number of elements differs.
    """
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
    """The axes in another order: axis `i` of the result is axis `axes[i]` of `x`, as in torch.

    Raises HostIRError unless `axes` names each axis once.
    """
    span = user_span()
    value = operand(x, span)
    if not isinstance(axes, Sequence) or any(isinstance(i, bool) or not isinstance(i, int) for i in axes):
        raise error(f"not an order of axes: {described(axes)}", span, expected="a list of integers, such as (1, 0)")
    count = len(value.tensor.axes)
    return apply(view_ops.Permute, x=value, axes=tuple(i % count if -count <= i < 0 else i for i in axes))


def reshard(x: Tensor) -> Tensor:
    """The same tensor with another sharding, or on another mesh: annotate the result with its mesh and axes.

    Lowering makes the communication that leads there. A result without annotation is replicated.
    """
    value = operand(x, user_span())
    return apply(comm_ops.Reshard, value.tensor.shape, x=value)
