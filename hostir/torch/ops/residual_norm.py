"""A sum over ranks with what follows it in a transformer: a residual is added, and the rows are normalized.

The rows may also be quantized to fp8. For few rows on CUDA, one kernel carries out all of it: see
`hostir.machines.normed.NormedSum`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hostir.ir.program import Program
from hostir.ir.source import error, user_span
from hostir.torch.ops import collectives
from hostir.torch.ops.fusions import fusion, type_of
from hostir.torch.ops.gradients import grad_dtype, refuse_twice
from hostir.torch.ops.layouts import empty_rows
from hostir.torch.ops.library import SCATTERED, SUMMED, Operator, define
from hostir.torch.ops.running import THREAD, OperatorCall, Unfit

FLOAT8, FLOAT8_DTYPE = "f8e4m3", torch.float8_e4m3fn


@define(
    "all_reduce_residual_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool quantize, str group_name) "
    "-> Tensor[]",
    SUMMED,
)
def all_reduce_residual_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, quantize: bool, group_name: str
) -> list[Tensor]:
    """Add the residual to the sum of `x` over all ranks, and normalize the rows. Returns what `normed_sum` returns."""
    call = OperatorCall("hostir::all_reduce_residual_norm", group_name)
    return normed_sum(call, x, residual, weight, eps, quantize, None)


@define(
    "reduce_scatter_residual_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool quantize, "
    "int scatter_dim, str group_name) -> Tensor[]",
    SCATTERED,
)
def reduce_scatter_residual_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, quantize: bool, scatter_dim: int, group_name: str
) -> list[Tensor]:
    """Add the residual to this rank's part of the sum of `x`, and normalize the rows.

    Returns what `normed_sum` returns.
    """
    call = OperatorCall("hostir::reduce_scatter_residual_norm", group_name)
    return normed_sum(call, x, residual, weight, eps, quantize, scatter_dim)


def normed_sum(
    call: OperatorCall,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    quantize: bool,
    axis: int | None,
) -> list[Tensor]:
    """Sum `x` over the ranks, add the residual, and normalize the rows, which span the last axis.

    Returns the normalized rows and the sum with the residual. With `quantize`, returns the quantized rows, the scale of
    each row, and the sum with the residual. Raises Unfit for a call that hostir cannot run.

    Args:
        call: the call of the operator.
        x: this rank's summands.
        residual: the tensor to add, with the shape of the results.
        weight: the factors of the columns; None if they are 1.
        eps: is added to the mean of the squares.
        quantize: True to quantize the normalized rows.
        axis: the axis along which the sum is scattered, outermost in the memory of the results; None if every rank gets
            all sums.
    """
    if not x.ndim or axis == x.ndim - 1:
        raise Unfit(f"x has the shape {list(x.shape)}, and its rows must be complete on each rank")
    if not 0 <= eps < math.inf:
        raise Unfit(f"eps is {eps}, and must be a number of at least 0")
    shape, outer, ranks = [*x.shape], axis or 0, call.group.size
    if axis is not None:
        if shape[axis] % ranks:
            raise Unfit(f"its {ranks} ranks do not divide axis {axis}, which is {shape[axis]}")
        shape[axis] //= ranks
    if [*residual.shape] != shape:
        raise Unfit(f"the residual has the shape {list(residual.shape)}, and the sum {shape}")
    if weight is not None and [*weight.shape] != shape[-1:]:
        raise Unfit(f"the weight has the shape {list(weight.shape)}, and a row has {shape[-1]} elements")
    one = [*shape[:-1], 1]
    if THREAD.tracing:
        added = empty_rows(x, shape, outer)
        if not quantize:
            return [torch.empty_like(added), added]
        return [empty_rows(x, shape, outer, FLOAT8_DTYPE), empty_rows(x, one, outer, torch.float32), added]
    inputs = [_rows(x, outer), _rows(residual, outer), *([] if weight is None else [weight])]
    key = shape[-1], eps, weight is not None, axis is not None, quantize
    results = call.execute(norm_fusion, key, inputs)
    lengths = [shape[outer], *shape[:outer], *shape[outer + 1 : -1]] if len(shape) > 1 else []
    return [y.view(*lengths, y.shape[-1]).movedim(0, outer) for y in results]


def _rows(x: Tensor, outer: int) -> Tensor:
    """Return a tensor as a matrix of rows, with the axis `outer` outermost: a view if strides allow it, else a copy."""
    return x.movedim(outer, 0).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def norm_fusion(
    ranks: int, dtype: str, columns: int, eps: float, weighted: bool, scattered: bool, quantized: bool
) -> Program:
    """Return the fusion that sums `%x`, adds `%r`, and normalizes the rows. Its outputs are as for `normed_sum`."""
    M = "M@didx" if scattered else "M"
    rows = type_of(dtype, M, columns)
    inputs = [f"%x: {type_of(dtype, 'M', columns)} partial(didx)", f"%r: {rows}"]
    inputs += [f"%w: {type_of(dtype, columns)}"] * weighted
    body = [
        f"%y: {rows} = reshard %x",
        f"%added: {rows} = add %y, %r",
        f"%normed: {rows} = rms_norm %added eps {eps!r}{' times %w' * weighted}",
    ]
    if quantized:
        body += [
            f"%scales: {type_of('f32', M, 1)} = row_scales %normed to {FLOAT8}",
            f"%quantized: {type_of(FLOAT8, M, columns)} = quantize %normed by %scales to {FLOAT8}",
        ]
    outputs = ["%quantized", "%scales", "%added"] if quantized else ["%normed", "%added"]
    return fusion(f"{'reduce_scatter' if scattered else 'all_reduce'}_residual_norm", ranks, inputs, outputs, body)


def norm_gradients(
    added: Tensor, weight: Tensor | None, eps: float, dy: Tensor, dtype: str
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of an RMS norm: the gradient of its input in float32, and the gradient of its weight.

    Args:
        added: the input of the norm.
        weight: as for the norm.
        eps: as for the norm.
        dy: the gradient of the output of the norm.
        dtype: the name of the dtype of the weight's gradient; empty if that gradient is not computed.
    """
    x, dy = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (added, dy))
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * scale
    d_normed = dy if weight is None else dy * weight
    d_x = (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True)) * scale
    return d_x, (dy * normed).flatten(0, -2).sum(0).to(getattr(torch, dtype)) if dtype else None


def _differentiate(operator: Operator) -> None:
    """Register the gradients of one of the two operators.

    The gradient of the sum is the gradient of the residual. For a reduce-scatter, backward gathers it.
    """

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, weight, ctx.eps, quantize, *ctx.where = inputs
        if quantize:
            raise error(
                f"{operator.name} has no gradients if it quantizes, and a tensor requires them",
                user_span(),
                hint="leave out quantize=True, or call under torch.no_grad()",
            )
        ctx.set_materialize_grads(False)
        ctx.dtype = "" if weight is None else grad_dtype(weight)
        ctx.save_for_backward(output[1], weight)

    def backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
        refuse_twice(operator.name)
        (added, weight), (d_normed, d_added) = ctx.saved_tensors, grads
        *axis, group = ctx.where
        d_weight, total = None, d_added
        if d_normed is not None:
            d_x, d_weight = norm_gradients(added, weight, ctx.eps, d_normed, ctx.dtype)
            total = (d_x if d_added is None else d_x + d_added).to(added.dtype)
        d_sum = None
        if total is not None and ctx.needs_input_grad[0]:
            d_sum = collectives.all_gather.packet(total, axis[0], group) if axis else total.clone()
        return d_sum, total, d_weight, *[None] * (2 + len(ctx.where))

    operator.differentiate(backward, setup)


for _operator in (all_reduce_residual_norm, reduce_scatter_residual_norm):
    _differentiate(_operator)
