"""Matmul + reduce-scatter of scaled fp8 matrices.

Each rank applies its scales to its product. The products are summed in the output dtype, which is wider than fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from hostir.ir.program import Program
from hostir.ir.scaled_ops import BLOCK
from hostir.torch.ops.collectives import is_average, mean
from hostir.torch.ops.fusions import extra_sizes, fusion, in_front, moved_back, type_of
from hostir.torch.ops.layouts import collapsed
from hostir.torch.ops.library import SCATTERED, check_operands, define, takes_over
from hostir.torch.ops.running import THREAD, OperatorCall, Unfit
from hostir.torch.ops.scaled_operands import (
    RESULTS,
    ScaledProduct,
    ScaledRight,
    are_of_blocks,
    check_right_scale,
    fp8_dtype,
    left_scale,
    product_of,
    right_scale,
)


class FusedArguments(NamedTuple):
    """The arguments of torch's `fused_scaled_matmul_reduce_scatter`, as in its schema.

    `output_shape` is the shape of the product before axis `orig_scatter_dim` is scattered. If it is None, the
    product has the shape of `A @ B`.
    """

    A: Tensor
    B: Tensor
    A_scale: Tensor
    B_scale: Tensor
    reduce_op: str
    orig_scatter_dim: int
    scatter_dim_after_maybe_reshape: int
    group_name: str
    output_shape: list[int] | None
    bias: Tensor | None = None
    result_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False


def _with_shape(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of torch's function, which passes the shape of the product if a call passes no output shape."""

    def call(*args: Any) -> Any:
        it = FusedArguments(*args)
        return torchs(*it._replace(output_shape=it.output_shape or [*it.A.shape[:-1], it.B.shape[1]]))

    return call


@takes_over(
    "fused_scaled_matmul_reduce_scatter",
    cuda=_with_shape(symm_mem._fused_scaled_matmul_reduce_scatter),
    cpu=_with_shape(symm_mem._fused_scaled_matmul_reduce_scatter_fallback),
)
def fused_scaled_matmul_reduce_scatter(*args: Any) -> Tensor:
    """Multiply A with B, sum or average over all ranks, and return this rank's part.

    `args` are the fields of `FusedArguments`.
    """
    it = FusedArguments(*args)
    check_operands(it.A, [it.B], it.scatter_dim_after_maybe_reshape)
    call = OperatorCall("symm_mem::fused_scaled_matmul_reduce_scatter", it.group_name)
    right = ScaledRight(it.B, it.B_scale, it.bias, None, it.out_dtype, it.use_fast_accum)
    return scattered_scaled_product(call, it.A, it.A_scale, right, it.reduce_op, it.orig_scatter_dim, it.output_shape)


@define(
    "scaled_matmul_reduce_scatter(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, str reduce_op, int scatter_dim, "
    "str group_name, ScalarType out_dtype, Tensor? bias=None, bool use_fast_accum=False) -> Tensor",
    SCATTERED,
)
def scaled_matmul_reduce_scatter(
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
    """Multiply `a` with `b`, sum or average over all ranks, and return this rank's part along `scatter_dim`."""
    check_operands(a, [b], scatter_dim)
    call = OperatorCall("hostir::scaled_matmul_reduce_scatter", group_name)
    right = ScaledRight(b, b_scale, bias, None, out_dtype, use_fast_accum)
    return scattered_scaled_product(call, a, a_scale, right, reduce_op, scatter_dim)


def scattered_scaled_product(
    call: OperatorCall,
    a: Tensor,
    scale: Tensor,
    right: ScaledRight,
    reduce_op: str,
    axis: int,
    output_shape: Sequence[int] | None = None,
) -> Tensor:
    """Multiply `a` with a scaled right operand, sum or average over all ranks, and return this rank's part.

    The result is contiguous. As in torch, each rank adds the bias to its product before the sum. Raises Unfit for a
    call that hostir cannot run, and ValueError for wrong shapes.

    Args:
        call: the call of the operator.
        a: this rank's left operand, in fp8.
        scale: the scales of `a`.
        right: this rank's right operand, and the dtype of the result.
        reduce_op: `sum` or `avg`.
        axis: the axis of `output_shape` to scatter along.
        output_shape: the shape of the product. By default `[*a.shape[:-1], columns]`.
    """
    b, bias, ranks, average = right.b, right.bias, call.group.size, is_average(reduce_op)
    output_shape = [*(output_shape or (*a.shape[:-1], b.shape[1]))]
    if not 0 <= axis < len(output_shape):
        raise ValueError("Invalid scatter dim for 3D+ output tensor")
    shape = [n // ranks if k == axis else n for k, n in enumerate(output_shape)]
    if THREAD.tracing:
        return a.new_empty(shape, dtype=right.out_dtype)
    layout = layout_of_scales(a, scale, right)
    if prod(output_shape[:-1]) != prod(a.shape[:-1]) or output_shape[-1] != b.shape[1]:
        raise ValueError(f"output_shape {output_shape} does not fit A of shape {[*a.shape]} and B of {[*b.shape]}")
    if axis == len(shape) - 1:
        raise Unfit("it scatters the columns of the product, of which scales are no rows")
    if output_shape[axis] % ranks:
        raise Unfit(f"its {ranks} ranks do not divide axis {axis} of the product, which is {output_shape[axis]}")
    if right.out_dtype not in RESULTS:
        raise Unfit(f"partial sums in {right.out_dtype or b.dtype} would be added over ranks: give out_dtype")
    # The sum for an average may overflow in f16.
    summed = torch.float32 if average and right.out_dtype == torch.float16 else right.out_dtype
    dtype, product = fp8_dtype(a, "A"), product_of(a, right, summed)
    x, outside = collapsed(a.reshape(*output_shape[:-1], a.shape[-1]), axis, joined=True)
    if layout == "one":
        scale = scale.float().reshape([1] * x.ndim)
    else:
        scale = left_scale(scale.expand(*a.shape[:-1], scale.shape[-1]), x, outside)
    inputs = [x, scale, b, right_scale(right.scale, layout == "blocks")]
    if bias is not None:
        product = replace(product, bias=product.dtype)
        inputs.append(bias.to(summed))
    key = (a.shape[-1] * ranks, product, layout, x.ndim - 2, outside)
    (y,) = call.execute(scatter_fusion, key, inputs, dtype=dtype)
    return (mean(y, ranks, right.out_dtype) if average else y).view(shape)


def layout_of_scales(a: Tensor, scale: Tensor, right: ScaledRight) -> str:
    """Return the layout of the scales of both operands. The result is one of the words that `scatter_fusion` explains.

    Raises ValueError if the shapes of the scales do not fit the operands.
    """
    by_rows = scale.numel() > 1
    if [*scale.shape[:-1]] == [*a.shape[:-1]] and are_of_blocks(a, scale, right):
        return "blocks" if by_rows or right.scale.numel() > 1 else "one"
    if by_rows and [*scale.shape] != [*a.shape[:-1], 1]:
        raise ValueError(
            "For row-wise scaling, the leading dims of A_scale must match the leading dims of A, and its last one is 1 "
            f"(A shape: {a.shape}, A_scale shape: {scale.shape})"
        )
    by_rows = by_rows or right.scale.numel() > 1
    check_right_scale(right, by_rows)
    return "rows" if by_rows else "one"


def scatter_fusion(
    ranks: int, dtype: str, K: int, product: ScaledProduct, scales: str, extra: int, outside: int
) -> Program:
    """Return the fusion that sums the scaled products `%a @ %b` over the ranks and scatters M, an axis of the rows.

    Each rank has scales for its operands.

    Args:
        ranks: the number of ranks.
        dtype: the dtype of `%a`.
        K: the number of columns of `%a` over all ranks.
        product: the properties of the product, which include its right operand and its result.
        scales: the layout of the scales. `one`: each operand has one scale. `rows`: each row of `%a` and each column of
            `%b` has a scale. `blocks`: there is a scale for each 128 elements of a row of `%a`, and for each 128x128
            block of `%b`.
        extra: the number of axes of the rows besides M.
        outside: the number of these axes that stand before M.
    """
    others, part = extra_sizes(extra), "M@didx"
    a, body, front = in_front("%a", dtype, ("M", *others, f"{K}@didx"), outside)
    lead = [1] * (extra + 1) if scales == "one" else ["M", *others]
    columns = product.columns
    along = f"{K // BLOCK if scales == 'blocks' else ranks}@didx"
    across = {"one": 1, "rows": columns, "blocks": columns // BLOCK}[scales]
    inputs = [
        a,
        f"%s: {type_of('f32', *lead, along)}",
        f"%b: {type_of(product.b, f'{K}@didx', columns)}",
        f"%t: {type_of('f32', along, across)}",
    ]
    scale, rows, plus = "%s", others, ""
    if product.bias:
        inputs.append(f"%bias: {type_of(product.bias, columns)} partial(didx)")
        plus = " plus %bias"
    if extra > 1:  # kernels take rows with at most two strides
        rows = ["*".join(others)]
        body.append(f"%a_rows: {type_of(dtype, 'M', *rows, f'{K}@didx')} = reshape {front}")
        front = "%a_rows"
        if scales != "one":
            body.append(f"%s_rows: {type_of('f32', 'M', *rows, along)} = reshape %s")
            scale = "%s_rows"
    fast = " accumulate fast" if product.fast else ""
    body.append(
        f"{'%c0' if extra < 2 else '%c_rows'}: {type_of(product.dtype, part, *rows, columns)} = "
        f"scaled_matmul {front}, %b scaled {scale}, %t{plus} to {product.dtype}{fast}"
    )
    sizes = (part, *others, columns)
    if extra > 1:
        body.append(f"%c0: {type_of(product.dtype, *sizes)} = reshape %c_rows")
    if outside:
        body += moved_back(product.dtype, sizes, outside)
    return fusion("scaled_matmul_reduce_scatter", ranks, inputs, ["%c" if outside else "%c0"], body)
