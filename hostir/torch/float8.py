"""Compute linear layers in fp8: quantize rows, gather the rows with their scales, and multiply. Layers have gradients.

The recipe is similar to torchao's `rowwise`. Operands are quantized to e4m3. There is a scale for each row of the left
operand, and for each column of the right operand. Each call computes new scales and rounds them up to powers of two.
The output, the gradient of the input and the gradient of the weight are products in fp8.

The gradient of the weight is a sum over rows: `dy^T @ x`. Its operands are quantized rows that this rank already has:
x as the forward pass multiplied it, and dy as the gradient of the input multiplies it. torchao would quantize the
columns of both anew. The scales differ from row to row, but a sum has one scale. It is the largest product of the scale
of a row of x and the scale of the same row of dy. In a row with a smaller product, x and dy are each multiplied by
about the square root of the ratio of the two products. The factors are powers of two. So this rounds only numbers that
become too small for e4m3 (`aten.transpose_rows`).

A rank that sees only a part of a row or column may choose another scale than a rank that sees all of it. Because all
scales are powers of two, both ranks round an element to the same value. Elements more than 14,000 times smaller than
the largest element are an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hostir.ir.source import error, user_span
from hostir.kernels import aten
from hostir.kernels.contractions import scaled_matmul_of_either
from hostir.torch.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from hostir.torch.ops.gradients import grad_dtype, refuse_twice
from hostir.torch.ops.library import GATHERED, SCATTERED, check_operands, define
from hostir.torch.ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter

FLOAT8 = "f8e4m3"
ALIGNMENT = 16  # cuBLAS multiplies fp8 if the number of products in each sum is a multiple of this
_modes = torch._C._len_torch_dispatch_stack
Quantized = tuple[Tensor, Tensor]


def kernels_for(x: Tensor) -> Any:
    """Return the module with the kernels for a tensor: Triton's on CUDA, and else ATen's."""
    if not x.is_cuda:
        return aten
    from hostir.kernels import quantize  # imported here because it loads Triton

    return quantize


def _empty_quantized(xs: Sequence[Tensor], axis: int) -> Quantized:
    x = xs[0]
    shape = [*x.shape]
    if len(xs) > 1:
        shape[axis] = sum(x.shape[axis] for x in xs)
    return x.new_empty(shape, dtype=aten.FP8[FLOAT8]), x.new_empty([*shape[:-1], 1], dtype=torch.float32)


def _fake_quantized(xs: Sequence[Tensor], axis: int, after: Tensor | None = None) -> Quantized:
    return _empty_quantized(xs if len(xs) == 1 else [torch.cat([*xs], axis)], axis)


@define("quantize_rows(Tensor[] xs, int axis, Tensor? after=None) -> (Tensor, Tensor)", fake=_fake_quantized)
def rows_quantizer(xs: Sequence[Tensor], axis: int, after: Tensor | None = None) -> Quantized:
    """Quantize each row of `xs`. Return the rows in fp8 and the scales of the rows in f32, `[..., 1]`.

    Scales are powers of two. The product of a row in fp8 and the scale of the row approximates the row. Several
    tensors are quantized as one: matrices that are one below the other with `axis=0`, or tensors side by side with
    `axis=-1`. A compiled graph computes `after` first. So weights that only the backward pass needs in this form are
    quantized there, and not stored.
    """
    rows, scale = _empty_quantized(xs, axis)
    kernels_for(rows).quantize_rows(rows, scale, xs, axis=axis)
    return rows, scale


def quantize_rows(x: Tensor) -> Quantized:
    """Quantize each row of `x`. Return the rows in fp8 and the scales of the rows, `[..., 1]`.

    torch.compile sees operators of ATen, and can compute them in the kernel that produces `x`.
    """
    if not is_traced():
        return rows_quantizer.call([x], 0)
    scale = aten.power_of_two_scales(x)
    return (x.float() / scale).to(aten.FP8[FLOAT8]), scale


def quantize_columns(bs: Sequence[Tensor], after: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Quantize each column of matrices `[K, N]`. Return them in fp8, column-major, and their scales.

    One kernel quantizes all of them, and transposes those that are row-major. torch.compile would take several kernels.
    """
    widths = [b.shape[1] for b in bs]
    q, scale = rows_quantizer.call([b.t() for b in bs], 0, after)
    return [part.t() for part in q.split(widths)], [part.t() for part in scale.split(widths)]


def quantize_stack(bs: Sequence[Tensor], after: Tensor) -> Quantized:
    """Quantize each column of matrices that are one below the other. Return one matrix, and its scales, `[1, N]`."""
    q, scale = rows_quantizer.call([b.t() for b in bs], -1, after)
    return q.t(), scale.t()


def _empty_gradient(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, dtype: str) -> Tensor:
    return x.new_empty(dy.shape[-1], x.shape[-1], dtype=getattr(torch, dtype))


@define(
    "float8_weight_gradient(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, str dtype) -> Tensor",
    fake=_empty_gradient,
)
def float8_weight_gradient(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, dtype: str) -> Tensor:
    """Return `dy^T @ x`, `[N, K]` in `dtype`, of rows in fp8.

    Args:
        dy: `[outer, inner, N]` in fp8, for `outer * inner` rows.
        dy_scale: the scales of its rows, `[outer, inner, 1]`: powers of two.
        x: `[outer, inner, K]` in fp8.
        x_scale: the scales of its rows, as for `dy`.
        dtype: the dtype of the result: `bfloat16`, `float16` or `float32`.
    """
    out, rows = _empty_gradient(dy, dy_scale, x, x_scale, dtype), x.shape[:-1].numel()
    if not rows:
        return out.zero_()
    kernels, length = kernels_for(x), -(-rows // ALIGNMENT) * ALIGNMENT
    scales = dy_scale.new_empty(2, 4)[:, 0]  # 16 bytes apart, for cuBLAS
    left, right = (each.new_empty(each.shape[-1], length) for each in (dy, x))
    kernels.transpose_rows(left, right, scales, dy, x, dy_scale, x_scale)  # tensor cores read fp8 along the sum
    multiply = scaled_matmul_of_either if x.is_cuda else aten.scaled_matmul
    multiply(out, left, right.t(), scales[:1], scales[1:])
    return out


def _rows_of(x: Tensor, axis: int) -> Tensor:
    """Return `x[..., K]` as `[outer, inner, K]`, with rows in the order of memory if `axis` is outermost there."""
    outer, *inner, columns = x.movedim(axis, 0).shape
    return x.movedim(axis, 0).reshape((outer, prod(inner), columns) if inner else (1, outer, columns))


def _weight_gradients(
    x: Quantized, dy: Quantized, axis: int, widths: Sequence[int], dtypes: Sequence[str]
) -> list[Tensor | None]:
    """Return the gradients of several weights with the same input, from their output gradients side by side.

    If all gradients are needed, they are parts of one tensor.

    Args:
        x: the rows of the input in fp8, and their scales.
        dy: the gradients of the outputs, side by side, in fp8, and the scales of their rows.
        axis: the axis of `x` and `dy` that is outermost in memory.
        widths: the numbers of columns of the outputs.
        dtypes: the dtype of each gradient; empty for a weight that needs none.
    """
    if not any(dtypes):
        return [None] * len(widths)
    rows, others = _rows_of(dy[0], axis), (_rows_of(dy[1], axis), _rows_of(x[0], axis), _rows_of(x[1], axis))
    if len(set(dtypes)) == 1:
        return [*_weight_gradient(rows, others, dtypes[0]).split([*widths])]
    pairs = zip(rows.split([*widths], -1), dtypes, strict=True)
    return [_weight_gradient(each, others, dtype) if dtype else None for each, dtype in pairs]


def _weight_gradient(dy: Tensor, others: tuple[Tensor, Tensor, Tensor], dtype: str) -> Tensor:
    """Return `float8_weight_gradient` in any dtype. `others` are its arguments between `dy` and `dtype`."""
    if dtype == "float64":
        return float8_weight_gradient.call(dy, *others, "float32").double()
    result: Tensor = float8_weight_gradient.call(dy, *others, dtype)
    return result


def is_traced() -> bool:
    """Return True if torch.compile or a dispatch mode records the operators that are called."""
    return torch.compiler.is_dynamo_compiling() or bool(_modes())


def _gathered(x: Tensor, bs: Sequence[Tensor], axis: int, group: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Quantize `x` and `bs`, all-gather `x`, and multiply the gathered rows with each of `bs`.

    Returns the gathered rows in fp8, the scales of these rows, and the products.
    """
    biases: list[None] = [None] * len(bs)
    args = *quantize_rows(x), *quantize_columns(bs, x), axis, group, "sharded", biases, x.dtype
    return all_gather_scaled_matmul.call(*args)


def _scattered(q: Tensor, scale: Tensor, bs: Sequence[Tensor], axis: int, group: str) -> Tensor:
    """Quantize `bs`, one below the other, and reduce-scatter the product of `q` and them; return this rank's rows.

    `q` holds rows in fp8, and `scale` holds the scales of these rows.
    """
    return scaled_matmul_reduce_scatter.call(q, scale, *quantize_stack(bs, q), "sum", axis, group, bs[0].dtype)


@define(
    "float8_column_linear(Tensor x, Tensor[] weights, int gather_dim, str group_name) -> (Tensor, Tensor, Tensor[])",
    GATHERED,
)
def float8_column_linear(
    x: Tensor, weights: list[Tensor], gather_dim: int, group_name: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """All-gather `x` in fp8, and multiply it with the transpose of each weight.

    Returns the gathered rows in fp8, the scales of these rows, and the products.

    Backward reads the gathered rows and their scales.
    """
    check_operands(x, weights, gather_dim)
    return _gathered(x, [w.t() for w in weights], gather_dim, group_name)


@define(
    "float8_row_linear(Tensor x, Tensor weight, int scatter_dim, str group_name) -> (Tensor, Tensor, Tensor)", SCATTERED
)
def float8_row_linear(x: Tensor, weight: Tensor, scatter_dim: int, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `x @ weight^T` in fp8, and reduce-scatter the product.

    Returns this rank's rows of the sum, `x` in fp8, and the scales of `x`.

    Backward reads `x` in fp8 and the scales of `x`.
    """
    check_operands(x, [weight], scatter_dim)
    q, scale = quantize_rows(x)
    return _scattered(q, scale, [weight.t()], scatter_dim, group_name), q, scale


def _check_dtypes(x: Tensor, weights: Sequence[Tensor]) -> None:
    if any(w.dtype != x.dtype for w in weights):
        dtypes = ", ".join(sorted({str(w.dtype) for w in weights}))
        raise error(
            f"fp8 products of an input of {x.dtype} and weights of {dtypes}",
            user_span(),
            expected="one dtype, which the result has as well; autocast makes it one",
        )


def _shows_steps(weights: Sequence[Tensor]) -> bool:
    """Return True if torch.compile traces this call, and can see its steps.

    It cannot read `grad_dtype`, which only leaf tensors have. Then the call stays one operator.
    """
    return torch.compiler.is_dynamo_compiling() and not any(w.is_leaf and w.requires_grad for w in weights)


def _wants_gradients(x: Tensor, weights: Sequence[Tensor]) -> bool:
    # If no input of an autograd.Function requires gradients, and it has as many arguments as `forward` has parameters,
    # torch 2.13 cannot trace it.
    return torch.is_grad_enabled() and any(each.requires_grad for each in (x, *weights))


def _grad_dtype_traced(b: Tensor) -> str:
    """Return `grad_dtype` of a weight of a traced call, for which `_shows_steps` is True."""
    return grad_dtype(b) if b.requires_grad else ""


def column_linear(x: Tensor, weights: Sequence[Tensor], axis: int, group: str) -> list[Tensor]:
    """Return `all_gather(x) @ weight^T` for each weight. The call quantizes `x` and the weights to fp8."""
    _check_dtypes(x, weights)
    if _shows_steps(weights):
        if not _wants_gradients(x, weights):
            return _gathered(x, [w.t() for w in weights], axis, group)[2]
        return [*TracedColumnLinear.apply(axis, group, list(map(_grad_dtype_traced, weights)), x, *weights)]
    *_, products = float8_column_linear.call(x, weights, axis, group)
    return products


def row_linear(x: Tensor, weight: Tensor, axis: int, group: str) -> Tensor:
    """Return `reduce_scatter(x @ weight^T)`. The call quantizes `x` and `weight` to fp8."""
    _check_dtypes(x, [weight])
    if _shows_steps([weight]):
        if not _wants_gradients(x, [weight]):
            return _scattered(*quantize_rows(x), [weight.t()], axis, group)
        return TracedRowLinear.apply(axis, group, _grad_dtype_traced(weight), x, weight)
    y, *_ = float8_row_linear.call(x, weight, axis, group)
    return y


def _columns_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    _, weights, ctx.axis, ctx.group = inputs
    q, scale, _ = output
    ctx.mark_non_differentiable(q, scale)
    _save_columns(ctx, [grad_dtype(w) for w in weights], q, scale, weights)


def _save_columns(ctx: Any, dtypes: list[str], q: Tensor, scale: Tensor, weights: Sequence[Tensor]) -> None:
    """Save what the gradients of `float8_column_linear` need. `dtypes` has the dtype of each weight's gradient."""
    ctx.dtypes = dtypes
    ctx.save_for_backward(*((q, scale) if any(dtypes) else (None, None)), *weights)


def _columns_backward(ctx: Any, d_q: None, d_scale: None, d_products: list[Tensor | None]) -> tuple[Any, ...]:
    refuse_twice(float8_column_linear.name)
    return *_column_gradients(ctx, ctx.needs_input_grad[0], d_products), None, None


def _column_gradients(
    ctx: Any, for_x: bool, d_products: Sequence[Tensor | None]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of x, if `for_x`, and of the weights."""
    q, scale, *weights = ctx.saved_tensors
    used = [i for i, dy in enumerate(d_products) if dy is not None]
    dys = [dy for dy in d_products if dy is not None]
    d_x: Tensor | None = None
    d_ws: list[Tensor | None] = [None] * len(weights)
    if not used:
        return d_x, d_ws
    # torch.compile would read several gradients twice: to find the largest elements, and to quantize them.
    rows: Quantized = quantize_rows(dys[0]) if len(dys) == 1 else rows_quantizer.call(dys, -1)
    if for_x:
        d_x = _scattered(*rows, [weights[i] for i in used], ctx.axis, ctx.group)
    widths, dtypes = [dy.shape[-1] for dy in dys], [ctx.dtypes[i] for i in used]
    for i, d_w in zip(used, _weight_gradients((q, scale), rows, ctx.axis, widths, dtypes), strict=True):
        d_ws[i] = d_w
    return d_x, d_ws


def _rows_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    _, weight, ctx.axis, ctx.group = inputs
    _, q, scale = output
    ctx.mark_non_differentiable(q, scale)
    _save_rows(ctx, grad_dtype(weight), q, scale, weight)


def _save_rows(ctx: Any, dtype: str, q: Tensor, scale: Tensor, weight: Tensor) -> None:
    """Save what the gradients of `float8_row_linear` need. `dtype` is the dtype of the weight's gradient."""
    ctx.dtype = dtype
    ctx.save_for_backward(*((q, scale) if dtype else (None, None)), weight)


def _rows_backward(ctx: Any, dy: Tensor | None, d_q: None, d_scale: None) -> tuple[Any, ...]:
    refuse_twice(float8_row_linear.name)
    if dy is None:
        return None, None, None, None
    return *_row_gradients(ctx, ctx.needs_input_grad[0], dy), None, None


def _row_gradients(ctx: Any, for_x: bool, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x, if `for_x`, and of the weight."""
    q, scale, weight = ctx.saved_tensors
    full, full_scale, (d_x,) = _gathered(dy, [weight], ctx.axis, ctx.group)
    (d_w,) = _weight_gradients((q, scale), (full, full_scale), ctx.axis, [weight.shape[0]], [ctx.dtype])
    return d_x if for_x else None, d_w


float8_column_linear.differentiate(_columns_backward, _columns_setup)
float8_row_linear.differentiate(_rows_backward, _rows_setup)


class TracedColumnLinear(torch.autograd.Function):
    """`float8_column_linear` for torch.compile, which sees its steps.

    So the kernel that produces x, such as a norm, can quantize it, and x need not be stored in 16 bits. A weight whose
    product is not used gets a gradient of zeros, and not None: torch.compile makes the missing gradients.
    """

    @staticmethod
    def forward(ctx: Any, axis: int, group: str, dtypes: list[str], x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.group = axis, group
        q, scale, products = _gathered(x, [w.t() for w in weights], axis, group)
        _save_columns(ctx, dtypes, q, scale, weights)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *d_products: Tensor) -> tuple[Any, ...]:
        d_x, d_weights = _column_gradients(ctx, ctx.needs_input_grad[3], d_products)
        return None, None, None, d_x, *d_weights


class TracedRowLinear(torch.autograd.Function):
    """`float8_row_linear` for torch.compile, which sees its steps: see `TracedColumnLinear`."""

    @staticmethod
    def forward(ctx: Any, axis: int, group: str, dtype: str, x: Tensor, weight: Tensor) -> Tensor:
        ctx.axis, ctx.group = axis, group
        q, scale = quantize_rows(x)
        _save_rows(ctx, dtype, q, scale, weight)
        return _scattered(q, scale, [weight.t()], axis, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_row_gradients(ctx, ctx.needs_input_grad[3], dy)
