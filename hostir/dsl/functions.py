"""Define the functions with which users build a fusion. Each adds an input or statements, and returns the result.

The fusion being built is the fusion of the innermost `with hi.Fusion(...)` block.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

from hostir.dsl.fusion import apply, building, check_name, dtype_name, operand, sizes
from hostir.dsl.tensors import SizeLike, Tensor
from hostir.ir import comm_ops, expert_ops, scaled_ops, tensor_ops, view_ops
from hostir.ir.sizes import product
from hostir.ir.source import Span, described, did_you_mean, error, user_span
from hostir.ir.types import DTYPES


def tensor(name: str, shape: Sequence[SizeLike], dtype: Any = "bf16") -> Tensor:
    """Declare an input of the fusion being built, and return it. A call takes inputs in the order of declaration.

    Raises HostIRError outside `with hi.Fusion(...)`, for a name that is taken, and for an invalid size or dtype.

    Args:
        name: letters, digits and `_`, not starting with a digit.
        shape: the shape of the unsharded tensor. A size is an integer, a name that gets its value at run time ("M"), or
            a product or quotient of these ("M/8").
        dtype: `f64`, `f32`, `f16`, `bf16`, `f8e4m3`, `f8e5m2`, `i32` or `i64`, or the torch dtype.
            Integers are indices: nothing computes with them.
    """
    span = user_span()
    fusion = building(span)
    check_name(name, "a tensor", span)
    if name in fusion._names.taken:
        raise error(f"%{name} is defined twice", span, hint="give it another name")
    if (dtype_text := dtype_name(dtype)) not in DTYPES:
        hint = did_you_mean(dtype_text, DTYPES)
        raise error(f"unknown dtype {described(dtype)}", span, expected=f"one of: {', '.join(DTYPES)}", hint=hint)
    t = fusion._new(name, DTYPES[dtype_text], sizes(shape, span), span)
    fusion.inputs.append(t)
    return t


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the product `a[..., K] @ b[K, N]`, of shape `[..., N]`. It is also written `a @ b`.

    If `b` has more than two axes, matrices are multiplied in pairs: `a[..., M, K] @ b[..., K, N]`, of shape
    `[..., M, N]`. The leading axes of `a` and `b` are then equal.

    Operands and result have the same dtype. Sums are accumulated in f32, or in f64 if the operands are f64. Raises
    HostIRError if the contracted sizes, the leading axes or the dtypes differ, or if `b` has fewer than two axes.
    """
    span = user_span()
    left, right = operand(a, span), operand(b, span)
    batched = len(right.tensor.axes) > 2
    return apply(tensor_ops.BatchedMatmul if batched else tensor_ops.Matmul, a=left, b=right)


def linear(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `a[..., K] @ weight[N, K]^T + bias[N]`, of shape `[..., N]`, as `torch.nn.Linear` does.

    Operands and result have the same dtype. Sums are accumulated in f32, or in f64 if the operands are f64. Raises
    HostIRError if the sizes or dtypes of the operands do not fit each other.
    """
    span = user_span()
    added = None if bias is None else operand(bias, span)
    return apply(tensor_ops.Linear, a=operand(a, span), weight=operand(weight, span), bias=added)


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: Any = "bf16",
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Return `(a * scale_a)[..., K] @ (b * scale_b)[K, N] + bias[N]` for fp8 operands. The shape is `[..., N]`.

    Both scales are f32. They have the same granularity, which determines the shapes of `scale_a` and `scale_b`:

    - tensor-wise: each scale has one element;
    - row-wise: `[..., 1]`, one scale for each row of `a`, and `[1, N]`, one scale for each column of `b`;
    - block-wise: `[..., K/128]`, one scale for 128 elements of a row of `a`, and `[K/128, N/128]`, one scale for 128 x
      128 elements of `b`.

    If K is sharded over R ranks, each rank may have separate tensor-wise or row-wise scales. Then the shapes are
    `[..., R]` and `[R, ...]`, sharded like K. Sums are accumulated in f32. Raises HostIRError for other dtypes, and for
    scales that do not fit.

    Args:
        a, b: the operands, in `f8e4m3` or `f8e5m2`. On GPUs, the columns of `b` must be contiguous in memory, as in the
            transpose of a contiguous `[N, K]` tensor.
        scale_a, scale_b: the scales of the operands.
        dtype: the dtype of the result: `bf16`, `f16` or `f32`. Ranks also communicate partial sums in this dtype.
        bias: a tensor in the dtype of the result.
        fast: True allows tensor cores to accumulate as with `use_fast_accum` of `torch._scaled_mm`.
    """
    span = user_span()
    if not isinstance(fast, bool):
        raise error(f"fast is {described(fast)}", span, expected="True or False")
    return apply(
        scaled_ops.ScaledMatmul,
        a=operand(a, span),
        b=operand(b, span),
        scale_a=operand(scale_a, span),
        scale_b=operand(scale_b, span),
        dtype=dtype_name(dtype),
        bias=None if bias is None else operand(bias, span),
        accumulate="fast" if fast else "",
    )


def grouped_matmul(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    dtype: Any = None,
) -> Tensor:
    """Return the products of rows in groups with a matrix for each group, as in a mixture of experts.

    Row t of the result is `x[t] @ w[e]` for `offsets[e] <= t < offsets[e + 1]`. Rows of no group become 0. The shapes
    are `x[..., T, K]`, `w[E, K, N]`, `offsets[..., E + 1]` and, for the result, `[..., T, N]`. Sums are accumulated in
    f32, or in f64 if the operands are f64.

    Offsets are `i32` or `i64`, do not decrease, and lie between 0 and T. They are read on the device, when the kernel
    runs. Raises HostIRError if the shapes or dtypes do not fit.

    Operands in fp8 need scales in f32: `scale_x[..., T, 1]`, one for each row, and `scale_w[E, 1, N]`, one for each
    column of each matrix. They multiply the sums. If K is sharded, all ranks have the same scales.

    Args:
        x: the rows, group after group.
        w: the matrices. In fp8, their columns should be contiguous in memory on GPUs, as in the transposes of
            contiguous `[N, K]` matrices.
        offsets: the first row of each group, and the end of the last one.
        scale_x, scale_w: the scales of fp8 operands.
        dtype: the dtype of the result of fp8 operands: `bf16` (the default), `f16` or `f32`.
    """
    span = user_span()
    operands: dict[str, Any] = {"x": operand(x, span), "w": operand(w, span), "offsets": operand(offsets, span)}
    if scale_x is None and scale_w is None:
        if dtype is not None:
            hint = "hi.cast converts the result"
            raise error("a product without scales has the dtype of its operands", span, expected="no dtype", hint=hint)
        return apply(expert_ops.GroupedMatmul, **operands)
    if scale_x is None or scale_w is None:
        missing = "scale_x" if scale_x is None else "scale_w"
        raise error(f"{missing} is missing", span, expected="both scales, or none")
    operands |= {"scale_x": operand(scale_x, span), "scale_w": operand(scale_w, span)}
    return apply(expert_ops.GroupedMatmul, **operands, dtype=dtype_name(dtype or "bf16"))


def grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of the outer products of the rows of each group: the gradient of the matrices of a grouped matmul.

    Matrix e of the result is `x[rows of e]^T @ y[rows of e]`, for the rows from `offsets[e]` up to `offsets[e + 1]`; 0
    for a group without rows. The shapes are `x[T, K]`, `y[T, N]`, `offsets[E + 1]` and, for the result, `[E, K, N]`.
    With one leading axis in `x`, `y` and `offsets`, the sum is also over this axis. Dtypes and offsets are as in
    `grouped_matmul`. Raises HostIRError if the shapes or dtypes do not fit.
    """
    span = user_span()
    return apply(expert_ops.GroupedOuter, x=operand(x, span), y=operand(y, span), offsets=operand(offsets, span))


def permute_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of `x[..., T, K]` in the order of `index[..., S]`. The shape is `[..., S, K]`.

    Row s of the result is `x[index[s]]`. A row may occur any number of times. The index is `i32` or `i64`, from 0 to
    T - 1, and is read on the device. Raises HostIRError if the shapes or dtypes do not fit.
    """
    span = user_span()
    return apply(expert_ops.PermuteRows, x=operand(x, span), index=operand(index, span))


def combine_rows(y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums of rows of `y[..., S, K]`, by `index[..., T, k]`. The shape is `[..., T, K]`.

    Row t of the result is the sum over j of `weights[t, j] * y[index[t, j]]`. The weights have the shape of the index,
    and the dtype of `y` or f32. The index is `i32` or `i64`, from 0 to S - 1, and is read on the device. Sums are
    computed in f32 (in f64 if `y` is f64) and rounded once. Weighted sums of a partial sum are a partial sum, so ranks
    reduce the combined rows. Raises HostIRError if the shapes or dtypes do not fit.
    """
    span = user_span()
    return apply(expert_ops.CombineRows, y=operand(y, span), index=operand(index, span), weights=operand(weights, span))


SCALES = ("tensor", "rows", "blocks")


def quantize(
    x: Tensor, dtype: Any = "f8e4m3", scales: str = "rows", scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convert `x` to fp8; return the fp8 tensor and its f32 scales: `q, scale = quantize(x)`.

    `x` is about `q * scale`. A scale is `max(amax / limit, 2^-126)`. `amax` is the largest absolute value of the
    elements that share the scale. `limit` is the largest value of the dtype: 448 for `f8e4m3`, 57344 for `f8e5m2`. `q`
    is `x / scale` in f32, limited to the dtype's range and rounded to nearest even. If all elements are zero, the scale
    is 2^-126 and `q` is zero.

    A NaN turns all elements with the same scale into NaN. An infinity makes its scale infinite. Then the infinity
    itself becomes NaN, and the other elements with this scale become zero. A product with a NaN or an infinite scale is
    NaN.

    Args:
        x: the tensor to convert.
        dtype: `f8e4m3` or `f8e5m2`.
        scales: the elements that share a scale: `tensor` for all elements, `rows` for the elements of a row, `blocks`
            for 128 consecutive elements of a row. With `tensor`, the ranks of a sharded tensor gather the scales of all
            rows, so that every rank uses the largest scale.
        scale: the scale to use, for example from earlier batches. If it is given, no scale is computed. Its shape is
            `[1, ..., 1]`, `[..., 1]` or `[..., K/128]`.
    """
    span = user_span()
    value, dtype_text = operand(x, span), dtype_name(dtype)
    if scale is None:
        if scales not in SCALES:
            hint = did_you_mean(scales, SCALES) if isinstance(scales, str) else ""
            raise error(f"unknown scales {described(scales)}", span, expected=f"one of: {', '.join(SCALES)}", hint=hint)
        block = scaled_ops.BLOCK if scales == "blocks" else 0
        scale = apply(scaled_ops.RowScales, name="scale", x=value, dtype=dtype_text, block=block)
        if scales == "tensor":
            scale = apply(scaled_ops.Largest, name="scale", x=operand(scale, span))
    q = apply(scaled_ops.Quantize, name="quantized", x=value, scale=operand(scale, span), dtype=dtype_text)
    return q, scale


def add(x: Tensor | float, y: Tensor | float) -> Tensor:
    """Return the elementwise sum. It is also written `x + y`.

    Operands are broadcast as in torch: axes are aligned from the last one, and axes of size 1 are expanded. One operand
    may be a number, which becomes a part of the program. For a number that changes from call to call, declare an input
    such as `hi.tensor("scale", [1], dtype)`. Raises HostIRError if sizes do not match or dtypes differ, and for a
    number that is not finite.
    """
    span = user_span()
    tensor, number = with_number(x, y, span)
    if number is None:
        return apply(tensor_ops.Add, x=operand(x, span), y=operand(y, span))
    return apply(tensor_ops.Offset, x=operand(tensor, span), amount=number)


def mul(x: Tensor | float, y: Tensor | float) -> Tensor:
    """Return the elementwise product. It is also written `x * y`.

    Broadcasting, numbers and errors are the same as in `add`.
    """
    span = user_span()
    tensor, number = with_number(x, y, span)
    if number is None:
        return apply(tensor_ops.Mul, x=operand(x, span), y=operand(y, span))
    return apply(tensor_ops.Scale, x=operand(tensor, span), factor=number)


def with_number(x: Any, y: Any, span: Span | None) -> tuple[Any, float | None]:
    """Return the tensor among two operands, and the other operand as a float if it is a number.

    If neither operand is a number, return `x` and None. Raise HostIRError for a number that is not finite.
    """
    for tensor, value in ((x, y), (y, x)):
        if not isinstance(value, bool) and isinstance(value, Real) and not isinstance(tensor, Real):
            return tensor, finite(value, span)
    return x, None


def finite(value: Real, span: Span | None) -> float:
    """Return a number as a float; raise HostIRError if it is infinite, NaN, or too large for a float."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise error(f"a tensor meets the number {described(value)}", span, expected="a finite number")
    return number


def _subtract(x: Any, y: Any) -> Tensor:
    """Append to the fusion the statements that compute `x - y`; return the result.

    If `y` is a number, one statement adds `-y` to `x`. Otherwise one statement negates `y`, which is exact, and another
    statement adds the two tensors.
    """
    span = user_span()
    tensor, number = with_number(x, y, span)
    if number is not None and tensor is x:
        return apply(tensor_ops.Offset, x=operand(x, span), amount=-number)
    right = operand(y, span)
    negated = apply(tensor_ops.Scale, name=f"minus_{right.name}", x=right, factor=-1.0)
    return add(x, negated)


def _divide(x: Any, y: Any) -> Tensor:
    """Append to the fusion a statement that computes `x / y` for a number `y`; return the result.

    The statement multiplies `x` by `1 / y`.
    """
    span = user_span()
    tensor, number = with_number(x, y, span)
    if number is None or tensor is y:
        hint = "multiply with an input that holds the inverse"
        raise error("a fusion divides by numbers only", span, expected="such as x / 3", hint=hint)
    if not number or not math.isfinite(1 / number):
        raise error(f"{operand(x, span)} is divided by {described(y)}, which has no inverse", span)
    return mul(x, 1 / number)


Tensor.operators = {"@": matmul, "+": add, "*": mul, "-": _subtract, "/": _divide}


def relu(x: Tensor) -> Tensor:
    """Return `max(x, 0)`, elementwise, with the shape and dtype of `x`."""
    return apply(tensor_ops.Relu, x=operand(x, user_span()))


def gelu(x: Tensor) -> Tensor:
    """Return the exact Gaussian error linear unit, `x * (1 + erf(x / sqrt 2)) / 2`, elementwise."""
    return apply(tensor_ops.Gelu, x=operand(x, user_span()))


def silu(x: Tensor) -> Tensor:
    """Return `x / (1 + exp(-x))`, elementwise."""
    return apply(tensor_ops.Silu, x=operand(x, user_span()))


def cast(x: Tensor, dtype: Any) -> Tensor:
    """Convert the elements to another dtype, with rounding to nearest even; return the converted tensor.

    `dtype` is a dtype that `tensor` accepts. A cast to fp8 converts as torch does, without a scale. To convert with a
    scale, use `quantize`. Raises HostIRError for an unknown dtype.
    """
    return apply(tensor_ops.Cast, x=operand(x, user_span()), dtype=dtype_name(dtype))


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` for each row of `x`, as `torch.nn.RMSNorm` over the last axis does.

    It is computed in f32 (in f64 if `x` is f64), and rounded once. `x[..., N]`, `weight[N]` and the result have the
    same dtype. If the last axis is sharded, it is gathered first. Raises HostIRError if sizes or dtypes do not fit.
    """
    span = user_span()
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= sys.float_info.max:
        raise error(f"eps is {described(eps)}", span, expected="a finite number of at least 0, such as 1e-6")
    scaled = None if weight is None else operand(weight, span)
    return apply(tensor_ops.RmsNorm, x=operand(x, span), eps=float(eps), weight=scaled)


def sum(x: Tensor, axis: int) -> Tensor:
    """Return the sum of the elements along `axis`. The result does not have this axis.

    It is computed in f32, or in f64 if `x` is f64. A negative axis counts from the end. Raises HostIRError if there is
    no such axis.
    """
    span = user_span()
    value = operand(x, span)
    count = len(value.tensor.axes)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -count <= axis < count:
        raise error(f"{value} has no axis {described(axis)}", span, expected=f"an axis below {count}")
    return apply(tensor_ops.Sum, x=value, axis=axis % count)


def reshape(x: Tensor, shape: Sequence[SizeLike]) -> Tensor:
    """Return the tensor in another shape. The elements keep their row-major order.

    One size may be -1: it is inferred from the other sizes. Raises HostIRError if the number of elements differs.
    """
    span = user_span()
    value = operand(x, span)
    new_sizes = list(shape) if isinstance(shape, Sequence) else []
    unknown = [k for k, size in enumerate(new_sizes) if isinstance(size, int) and size == -1]
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
    """Return the tensor with its axes in another order: axis `i` of the result is axis `axes[i]` of `x`.

    Raises HostIRError unless `axes` names each axis once.
    """
    span = user_span()
    value = operand(x, span)
    if not isinstance(axes, Sequence) or any(isinstance(i, bool) or not isinstance(i, int) for i in axes):
        raise error(f"not an order of axes: {described(axes)}", span, expected="a list of integers, such as (1, 0)")
    count = len(value.tensor.axes)
    return apply(view_ops.Permute, x=value, axes=tuple(i % count if -count <= i < 0 else i for i in axes))


def reshard(x: Tensor) -> Tensor:
    """Return the tensor with another sharding, or on another mesh.

    Users annotate the result with its mesh and its sharding. Lowering inserts the communication. A result without
    annotation is replicated. If `x` is a partial sum, declared with `x.partial(mesh)`, the terms of all ranks are
    added.
    """
    value = operand(x, user_span())
    return apply(comm_ops.Reshard, value.tensor.shape, x=value)
