"""Linear layers in fp8: rows are quantized, gathered with their scales and multiplied; operators with gradients.

The recipe is that of torchao's `rowwise_with_gw_hp`: e4m3 for all, a scale for each row of the left side and each
column of the right one, found anew at each call and rounded up to a power of two. The output and the gradient of the
input are products in fp8; the gradient of the weight is a product in the layer's own dtype. That reads rows as they
travelled, x gathered in fp8, or x and dy of a row-parallel layer, where torchao would gather them once more.

Scales that are powers of two do not round, and fp8 rounds alike with each of them. So ranks, which see a part of a row
or of a column, quantize as one rank does that sees all of it, but for numbers 2^14 times smaller than the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hostir.ir.source import error, user_span
from hostir.runtime.kernels import aten
from hostir.torch import scaled
from hostir.torch.library import (
    GATHERED,
    SCATTERED,
    call,
    check_gather,
    check_scatter,
    define,
    differentiable,
    fake,
    gathered_like,
    grad_dtype,
    refuse_twice,
    scattered_like,
    side_by_side,
    weight_gradient,
    with_columns,
)
from hostir.torch.operators import operator

FLOAT8 = "f8e4m3"
Quantized = tuple[Tensor, Tensor]

# Products of scaled rows ----------------------------------------------------------------------------------------------
# `scales` are `one`, `sharded`, `replicated`, `sharded_blocks` or `replicated_blocks`: see `scaled.gathered_program`.
# The result has the scales of all rows if they are gathered. A reduce-scatter's scales are told by their shapes.

AG_SMM = (
    "all_gather_scaled_matmul(Tensor a, Tensor a_scale, Tensor[] bs, Tensor[] b_scales, int gather_dim, "
    "str group_name, str scales, Tensor?[] biases, ScalarType out_dtype, bool use_fast_accum=False) "
    "-> (Tensor, Tensor, Tensor[])"
)
SMM_RS = (
    "scaled_matmul_reduce_scatter(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, str reduce_op, int scatter_dim, "
    "str group_name, ScalarType out_dtype, Tensor? bias=None, bool use_fast_accum=False) -> Tensor"
)


@define(AG_SMM, GATHERED)
def _all_gather_scaled_matmul(
    a: Tensor,
    a_scale: Tensor,
    bs: list[Tensor],
    b_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    scales: str,
    biases: list[Tensor | None],
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    check_gather(a, bs, gather_dim)
    op, count = operator("hostir::all_gather_scaled_matmul", group_name), len(bs)
    rest = biases, [None] * count, [out_dtype] * count, [use_fast_accum] * count
    given = op, a, bs, a_scale, b_scales, gather_dim
    full, every, products = op.run(lambda: scaled.all_gather_scaled_matmul(*given, *rest, scales))
    return full, every.clone() if every is a_scale else every, products


@fake("all_gather_scaled_matmul")
def _(
    a: Tensor,
    a_scale: Tensor,
    bs: list[Tensor],
    b_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    scales: str,
    biases: list[Tensor | None],
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    check_gather(a, bs, gather_dim)
    full = gathered_like(a, gather_dim, group_name)
    sharded = scales.startswith("sharded")
    every = with_columns(full.float(), a_scale.shape[-1], gather_dim) if sharded else a_scale.clone()
    return full, every, [with_columns(full.to(out_dtype), b.shape[1], gather_dim) for b in bs]


@define(SMM_RS, SCATTERED)
def _scaled_matmul_reduce_scatter(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    check_scatter(a, b, reduce_op, scatter_dim)
    op, shape = operator("hostir::scaled_matmul_reduce_scatter", group_name), [*a.shape[:-1], b.shape[1]]
    given = op, a, b, a_scale, b_scale, reduce_op == "avg", scatter_dim, shape
    return op.run(lambda: scaled.scaled_matmul_reduce_scatter(*given, bias, out_dtype, use_fast_accum))


@fake("scaled_matmul_reduce_scatter")
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    check_scatter(a, b, reduce_op, scatter_dim)
    return scattered_like(a, b.shape[1], scatter_dim, group_name, out_dtype)


# Rows -----------------------------------------------------------------------------------------------------------------


@define("quantize_rows(Tensor x) -> (Tensor, Tensor)")
def _quantize_rows(x: Tensor) -> Quantized:
    """Return `x` in fp8, and the scales of its rows, `[..., 1]`: powers of two, by which it is to be multiplied."""
    kernels: Any = aten
    if x.is_cuda:
        from hostir.runtime.kernels import quantize as kernels  # loads Triton: only where it is used
    scale = torch.empty([*x.shape[:-1], 1], dtype=torch.float32, device=x.device)
    kernels.row_scales(scale, x, dtype=FLOAT8)
    bits = scale.view(torch.int32)
    bits.add_(0x7FFFFF).bitwise_and_(0x7F800000)  # the exponent alone, of the next power of two
    rows = torch.empty(x.shape, dtype=aten.FP8[FLOAT8], device=x.device)
    kernels.quantize(rows, x, scale, dtype=FLOAT8)
    return rows, scale


@fake("quantize_rows")
def _(x: Tensor) -> Quantized:
    return x.new_empty(x.shape, dtype=aten.FP8[FLOAT8]), x.new_empty([*x.shape[:-1], 1], dtype=torch.float32)


def quantize_rows(x: Tensor) -> Quantized:
    """Return rows in fp8 and their scales, `[..., 1]`."""
    found: Quantized = call("quantize_rows", [x], x)
    return found


def quantize_columns(b: Tensor) -> Quantized:
    """Return a matrix `[K, N]` in fp8, and the scales of its columns, `[1, N]`; each column dense in memory."""
    q, scale = quantize_rows(b.t().contiguous())
    return q.t(), scale.t()


def widened(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return quantized rows in a wider dtype."""
    return (q.float() * scale).to(dtype)


# Layers ---------------------------------------------------------------------------------------------------------------
# Weights are those of torch.nn.Linear. What backward reads of the input is returned, in fp8, as it was gathered.

COLUMNS = (
    "float8_column_linear(Tensor x, Tensor[] weights, int gather_dim, str group_name) -> (Tensor, Tensor, Tensor[])"
)
ROWS = "float8_row_linear(Tensor x, Tensor weight, int scatter_dim, str group_name) -> (Tensor, Tensor, Tensor)"


def _gathered(x: Tensor, bs: Sequence[Tensor], axis: int, group: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Quantize rows and columns; return the gathered rows, their scales, and the products."""
    (q, scale), right = quantize_rows(x), [quantize_columns(b) for b in bs]
    rights, scales = [b for b, _ in right], [t for _, t in right]
    every = q, scale, rights, scales, axis, group, "sharded", [None] * len(bs), x.dtype
    found: tuple[Tensor, Tensor, list[Tensor]] = call("all_gather_scaled_matmul", [q, scale, *rights, *scales], *every)
    return found


def _scattered(q: Tensor, scale: Tensor, b: Tensor, axis: int, group: str) -> Tensor:
    """Quantize columns; return this rank's rows of the sum of products."""
    right, of_b = quantize_columns(b)
    every = q, scale, right, of_b, "sum", axis, group, b.dtype
    y: Tensor = call("scaled_matmul_reduce_scatter", [q, scale, right, of_b], *every)
    return y


@define(COLUMNS, GATHERED)
def _column_linear(
    x: Tensor, weights: list[Tensor], gather_dim: int, group_name: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return _gathered(x, [w.t() for w in weights], gather_dim, group_name)


@fake("float8_column_linear")
def _(x: Tensor, weights: list[Tensor], gather_dim: int, group_name: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    check_gather(x, weights, gather_dim)
    full = gathered_like(x, gather_dim, group_name)
    products = [with_columns(full, w.shape[0], gather_dim) for w in weights]
    return full.to(aten.FP8[FLOAT8]), with_columns(full.float(), 1, gather_dim), products


@define(ROWS, SCATTERED)
def _row_linear(x: Tensor, weight: Tensor, scatter_dim: int, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = quantize_rows(x)
    return _scattered(q, scale, weight.t(), scatter_dim, group_name), q, scale


@fake("float8_row_linear")
def _(x: Tensor, weight: Tensor, scatter_dim: int, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    check_scatter(x, weight, "sum", scatter_dim)
    y = scattered_like(x, weight.shape[0], scatter_dim, group_name, x.dtype)
    return y, x.new_empty(x.shape, dtype=aten.FP8[FLOAT8]), x.new_empty([*x.shape[:-1], 1], dtype=torch.float32)


def _check_dtypes(x: Tensor, weights: Sequence[Tensor]) -> None:
    if any(w.dtype != x.dtype for w in weights):
        dtypes = ", ".join(sorted({str(w.dtype) for w in weights}))
        raise error(
            f"fp8 products of an input of {x.dtype} and weights of {dtypes}",
            user_span(),
            expected="one dtype, which the result has as well; autocast makes it one",
        )


def column_linear(x: Tensor, weights: Sequence[Tensor], axis: int, group: str) -> list[Tensor]:
    """Return `gather(x) @ weight^T` for each weight, of quantized rows."""
    _check_dtypes(x, weights)
    *_, products = call("float8_column_linear", [x, *weights], x, weights, axis, group)
    return products


def row_linear(x: Tensor, weight: Tensor, axis: int, group: str) -> Tensor:
    """Return this rank's rows of the sum of `x @ weight^T`, of quantized rows."""
    _check_dtypes(x, [weight])
    y, *_ = call("float8_row_linear", [x, weight], x, weight, axis, group)
    return y


def _columns_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    x, weights, ctx.axis, ctx.group = inputs
    q, scale, _ = output
    ctx.mark_non_differentiable(q, scale)
    ctx.dtype, ctx.dtypes = x.dtype, [grad_dtype(w) for w in weights]
    ctx.save_for_backward(*((q, scale) if any(ctx.dtypes) else (None, None)), *weights)


def _columns_backward(ctx: Any, d_q: None, d_scale: None, d_products: list[Tensor | None]) -> tuple[Any, ...]:
    refuse_twice("hostir::float8_column_linear")
    q, scale, *weights = ctx.saved_tensors
    used = [i for i, dy in enumerate(d_products) if dy is not None]
    dys = [dy for dy in d_products if dy is not None]
    d_x, d_ws = None, list[Tensor | None]([None] * len(weights))
    if ctx.needs_input_grad[0] and used:
        dy, weight = side_by_side(dys, [weights[i] for i in used], linear=True)
        d_x = _scattered(*quantize_rows(dy), weight, ctx.axis, ctx.group)
    if any(ctx.dtypes):
        x = widened(q, scale, ctx.dtype)
        for i, dy in zip(used, dys, strict=True):
            d_ws[i] = weight_gradient(x, dy, ctx.axis, ctx.dtypes[i], True) if ctx.dtypes[i] else None
    return d_x, d_ws, None, None


def _rows_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    x, weight, ctx.axis, ctx.group = inputs
    _, q, scale = output
    ctx.mark_non_differentiable(q, scale)
    ctx.x_dtype, ctx.dtype = x.dtype, grad_dtype(weight)
    ctx.save_for_backward(*((q, scale) if ctx.dtype else (None, None)), weight)


def _rows_backward(ctx: Any, dy: Tensor | None, d_q: None, d_scale: None) -> tuple[Any, ...]:
    refuse_twice("hostir::float8_row_linear")
    q, scale, weight = ctx.saved_tensors
    if dy is None:
        return None, None, None, None
    full, every, (d_x,) = _gathered(dy, [weight], ctx.axis, ctx.group)
    d_w = None
    if ctx.dtype:
        x, dy = widened(q, scale, ctx.x_dtype), widened(full, every, ctx.x_dtype)
        d_w = weight_gradient(x, dy, ctx.axis, ctx.dtype, True)
    return d_x if ctx.needs_input_grad[0] else None, d_w, None, None


differentiable("float8_column_linear", (_columns_backward, _columns_setup))
differentiable("float8_row_linear", (_rows_backward, _rows_setup))
