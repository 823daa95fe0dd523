"""Matmul + reduce-scatter: sum finished rows of the product over the ranks while other rows are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed.distributed_c10d import _get_group_size_by_name

from hostir.ir.program import Program
from hostir.torch.ops import all_gather_matmul as gather
from hostir.torch.ops.collectives import dtype_of_sum, is_average, mean
from hostir.torch.ops.fusions import extra_sizes, fusion, in_front, moved_back, type_of
from hostir.torch.ops.gradients import grad_dtype, refuse_twice, weight_gradient
from hostir.torch.ops.layouts import check_shape, collapsed, into
from hostir.torch.ops.library import SCATTERED, Operator, check_operands, check_out, define, takes_over
from hostir.torch.ops.running import THREAD, OperatorCall, Unfit, dtype_of


@takes_over(
    "fused_matmul_reduce_scatter",
    cuda=symm_mem._fused_matmul_reduce_scatter,
    cpu=symm_mem._fused_matmul_reduce_scatter_fallback,
)
def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """Multiply A with B, sum or average over all ranks, and return this rank's part along `scatter_dim`."""
    return scattered_product(
        OperatorCall("symm_mem::fused_matmul_reduce_scatter", group_name), A, B, reduce_op, scatter_dim
    )


@define(
    "matmul_reduce_scatter(Tensor a, Tensor b, str reduce_op, int scatter_dim, str group_name, bool linear=False) "
    "-> Tensor",
    SCATTERED,
)
def matmul_reduce_scatter(
    a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str, linear: bool = False
) -> Tensor:
    """Multiply `a` with `b`, sum or average over all ranks, and return this rank's part along `scatter_dim`.

    With `linear`, multiply with the transpose of `b`.
    """
    call = OperatorCall("hostir::matmul_reduce_scatter", group_name)
    return scattered_product(call, a, b, reduce_op, scatter_dim, linear)


@define(
    "matmul_reduce_scatter_out(Tensor a, Tensor b, str reduce_op, int scatter_dim, str group_name, *, "
    "Tensor(a!) out) -> ()",
    SCATTERED,
)
def matmul_reduce_scatter_out(
    a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str, *, out: Tensor
) -> None:
    """Multiply `a` with `b`, sum or average over all ranks, and write this rank's part to `out`."""
    call = OperatorCall("hostir::matmul_reduce_scatter_out", group_name)
    check_out(call.name, a, b, out)
    into(out, lambda y: scattered_product(call, a, b, reduce_op, scatter_dim, out=y))


def scattered_product(
    call: OperatorCall, a: Tensor, b: Tensor, reduce_op: str, axis: int, linear: bool = False, out: Tensor | None = None
) -> Tensor:
    """Multiply `a` with `b`, sum or average over all ranks, and return this rank's part along `axis`.

    The result is `out`, or a new tensor if `out` is None. `out` must be contiguous. With `linear`, multiply with the
    transpose of `b`. Raises Unfit for a call that hostir cannot run.
    """
    check_operands(a, [b], axis)
    b, average = b.t() if linear else b, is_average(reduce_op)
    last, ranks = axis == a.ndim - 1, call.group.size
    shape = [*a.shape[:-1], b.shape[1]]
    length = shape[axis]
    shape[axis] //= ranks
    if THREAD.tracing:
        return a.new_empty(shape)
    gather.check_rows([b], a.shape[-1])
    if length % ranks:
        raise Unfit(f"its {ranks} ranks do not divide axis {axis} of the product, which is {length}")
    x, outside = collapsed(a, 0 if last else axis, joined=True)
    result = dtype_of_sum(a, average)
    key: tuple[Any, ...] = (a.shape[-1] * ranks, b.shape[1], x.ndim - 2, *(() if last else (outside,)), result)
    collapsed_shape = [*x.shape[:-1], b.shape[1]]
    collapsed_shape[-1 if last else outside] //= ranks
    dense = None if out is None else check_shape(out, shape).view(collapsed_shape)
    # A sum in a wider dtype than `out` needs separate memory, and is copied to `out` at the end.
    target = None if dense is None or result != dtype_of([a]) else [dense]
    (y,) = call.execute(columns_fusion if last else rows_fusion, key, [x, b], target)
    y = mean(y, ranks, a.dtype) if average else y
    if dense is None or out is None:
        return y.view(shape)
    if target is None:
        dense.copy_(y)
    return out


def rows_fusion(ranks: int, dtype: str, K: int, columns: int, extra: int, outside: int, result: str) -> Program:
    """Return the fusion that sums `%a @ %b` over the ranks and scatters M, an axis of the rows.

    `K` is the number of columns of `%a` over all ranks. `columns` is the number of columns of `%b`. The sum has the
    dtype `result`. The docstring of the module `hostir.torch.ops.fusions` explains `extra` and `outside`.
    """
    others, part = extra_sizes(extra), "M@didx"
    a, body, front = in_front("%a", dtype, ("M", *others, f"{K}@didx"), outside)
    inputs = [a, f"%b: {type_of(dtype, f'{K}@didx', columns)}"]
    sizes = (part, *others, columns)
    if extra > 1:  # kernels take rows with at most two strides
        rows = "*".join(others)
        body += [f"%a_rows: {type_of(dtype, 'M', rows, f'{K}@didx')} = reshape {front}"]
        body += _summed("%c_rows", (part, rows, columns), "matmul %a_rows, %b", dtype, result)
        body += [f"%c0: {type_of(result, *sizes)} = reshape %c_rows"]
    else:
        body += _summed("%c0", sizes, f"matmul {front}, %b", dtype, result)
    if outside:
        body += moved_back(result, sizes, outside)
    return fusion("matmul_reduce_scatter", ranks, inputs, ["%c" if outside else "%c0"], body)


def columns_fusion(ranks: int, dtype: str, K: int, columns: int, extra: int, result: str) -> Program:
    """Return the fusion that sums `%a @ %b` over the ranks and scatters the columns of the sum.

    The parameters are as for `rows_fusion`.
    """
    rows = ("M", *extra_sizes(extra))
    inputs = [f"%a: {type_of(dtype, *rows, f'{K}@didx')}", f"%b: {type_of(dtype, f'{K}@didx', columns)}"]
    body = _summed("%c", (*rows, f"{columns}@didx"), "matmul %a, %b", dtype, result)
    return fusion("matmul_reduce_scatter", ranks, inputs, ["%c"], body)


def _summed(name: str, sizes: Sequence[Any], product: str, dtype: str, result: str) -> list[str]:
    """Return the statements that compute `product`, sum it over the ranks in the dtype `result`, and scatter the sum.

    `product` is the text of the product, and `dtype` is its dtype. The scattered sum has the name `name` and the sizes
    `sizes`.
    """
    if result == dtype:
        return [f"{name}: {type_of(dtype, *sizes)} = {product}"]
    unsharded = [str(n).removesuffix("@didx") for n in sizes]
    return [
        f"%part: {type_of(dtype, *unsharded)} partial(didx) = {product}",
        f"%wide: {type_of(result, *unsharded)} partial(didx) = cast %part to {result}",
        f"{name}: {type_of(result, *sizes)} = reshard %wide",
    ]


def differentiate(scatter: Operator, gathered_products: Callable[..., gather.Products]) -> None:
    """Register the gradients of `scatter`, a matmul + reduce-scatter.

    `gathered_products(dy, weights, axis, group, return_a)` is an all-gather + matmul. It gathers `dy`, the gradient of
    the result, once. It multiplies the gathered `dy` with the weight for the input gradient, and returns the gathered
    `dy` for the weight's gradient.
    """

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, ctx.reduce_op, ctx.axis, ctx.group, *rest = inputs
        ctx.linear, ctx.dtype = rest == [True], grad_dtype(b)
        ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_twice(scatter.name)
        a, b = ctx.saved_tensors
        wants_a, wants_b, *_ = ctx.needs_input_grad
        if ctx.reduce_op == "avg":
            dy = dy / _get_group_size_by_name(ctx.group)
        weights = [b if ctx.linear else b.t()] if wants_a else []
        full, products = gathered_products(dy, weights, ctx.axis, ctx.group, wants_b)
        d_b = None
        if wants_b and full is not None:
            d_b = weight_gradient(a, full, ctx.axis, ctx.dtype, ctx.linear)
        return products[0] if wants_a else None, d_b, *[None] * (len(ctx.needs_input_grad) - 2)

    scatter.differentiate(backward, setup)


def _gathered(dy: Tensor, weights: list[Tensor], axis: int, group: str, return_a: bool) -> gather.Products:
    return gather.all_gather_matmul.call(dy, weights, axis, group, return_a)


def _fused_gathered(dy: Tensor, weights: list[Tensor], axis: int, group: str, return_a: bool) -> gather.Products:
    return gather.fused_all_gather_matmul.call(dy, weights, axis, group, return_A=return_a)


# All-gather + matmul computes the input gradient of matmul + reduce-scatter, and the other way round.
gather.differentiate(gather.all_gather_matmul, matmul_reduce_scatter)
gather.differentiate(gather.fused_all_gather_matmul, fused_matmul_reduce_scatter)
differentiate(matmul_reduce_scatter, _gathered)
differentiate(fused_matmul_reduce_scatter, _fused_gathered)
