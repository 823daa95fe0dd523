"""Matmul + all-reduce: sum finished rows of the product over the ranks while other rows are multiplied.

All ranks have the same result and compute the same loss from it. So the gradient of the result is the same on all
ranks. It is also the gradient of each rank's product. For this reason, backward does not communicate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hostir.ir.program import Program
from hostir.torch.ops.all_gather_matmul import check_rows
from hostir.torch.ops.fusions import extra_sizes, fusion, type_of
from hostir.torch.ops.gradients import grad_dtype, refuse_twice, weight_gradient
from hostir.torch.ops.layouts import check_shape, collapsed, into
from hostir.torch.ops.library import SUMMED, check_operands, check_out, define
from hostir.torch.ops.running import THREAD, OperatorCall, Unfit


@define(
    "matmul_all_reduce(Tensor a, Tensor b, str group_name, bool linear=False, Tensor? addend=None) -> Tensor", SUMMED
)
def matmul_all_reduce(
    a: Tensor, b: Tensor, group_name: str, linear: bool = False, addend: Tensor | None = None
) -> Tensor:
    """Return `all_reduce(a @ b) + addend`. With `linear`, multiply with `b^T`. The addend is optional."""
    return summed_product(OperatorCall("hostir::matmul_all_reduce", group_name), a, b, addend, linear)


@define(
    "matmul_all_reduce_out(Tensor a, Tensor b, str group_name, *, Tensor(a!) out, Tensor? addend=None) -> ()", SUMMED
)
def matmul_all_reduce_out(a: Tensor, b: Tensor, group_name: str, *, out: Tensor, addend: Tensor | None = None) -> None:
    """Write `all_reduce(a @ b) + addend` to `out`. The addend is optional."""
    call = OperatorCall("hostir::matmul_all_reduce_out", group_name)
    check_out(call.name, a, b, out, *(() if addend is None else (addend,)))
    into(out, lambda y: summed_product(call, a, b, addend, out=y))


def summed_product(
    call: OperatorCall,
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    linear: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return `all_reduce(a @ b) + addend`, in `out` or in a new tensor. `out` must be contiguous.

    With `linear`, multiply with the transpose of `b`. The addend has one row, or it has the shape of the result. Raises
    Unfit for a call that hostir cannot run.
    """
    check_operands(a, [b])
    b = b.t() if linear else b
    shape = [*a.shape[:-1], b.shape[1]]
    if THREAD.tracing:
        return a.new_empty(shape)
    check_rows([b], a.shape[-1])
    if addend is not None and list(addend.shape) not in (shape, shape[-1:]):
        raise Unfit(f"the addend has shape {list(addend.shape)}, and the product {shape}")
    x, _ = collapsed(a, 0, joined=True)
    inputs = [x, b]
    if addend is not None:
        fewer = addend.ndim > 1 and x.ndim < addend.ndim
        inputs.append(addend.reshape(*x.shape[:-1], b.shape[1]) if fewer else addend)
    key = (a.shape[-1] * call.group.size, b.shape[1], x.ndim - 2, 0 if addend is None else 1 + (addend.ndim > 1))
    dense = None if out is None else [check_shape(out, shape).view(*x.shape[:-1], b.shape[1])]
    (y,) = call.execute(sum_fusion, key, inputs, dense)
    return y.view(shape) if out is None else out


def sum_fusion(ranks: int, dtype: str, K: int, columns: int, extra: int, addend: int) -> Program:
    """Return the fusion that all-reduces `%a @ %b` and adds `%z`.

    `extra` is the number of axes of the rows besides M. `addend` is 0 if there is no `%z`, 1 if `%z` has one row, and 2
    if `%z` has as many rows as the result.
    """
    others = extra_sizes(extra)
    rows = "*".join(("M", *others))
    a, b = f"%a: {type_of(dtype, 'M', *others, f'{K}@didx')}", f"%b: {type_of(dtype, f'{K}@didx', columns)}"
    body, left, z = [], "%a", "%z"
    if extra:
        body, left = [f"%a_rows: {type_of(dtype, rows, f'{K}@didx')} = reshape %a"], "%a_rows"
    if extra and addend > 1:
        z = "%z_rows"
        body.append(f"%z_rows: {type_of(dtype, rows, columns)} = reshape %z")
    body.append(f"%y0: {type_of(dtype, rows, columns)} = matmul {left}, %b")
    last = "%y0"
    if addend:
        body.append(f"%y1: {type_of(dtype, rows, columns)} = add {last}, {z}")
        last = "%y1"
    if extra:
        body.append(f"%y: {type_of(dtype, 'M', *others, columns)} = reshape {last}")
        last = "%y"
    third = [f"%z: {type_of(dtype, *(('M', *others) if addend > 1 else ()), columns)}"] if addend else []
    return fusion("matmul_all_reduce", ranks, [a, b, *third], [last], body)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, _, *rest = inputs
    addend = rest[1] if len(rest) > 1 else None
    ctx.linear, ctx.dtype = rest[:1] == [True], grad_dtype(b)
    ctx.axes = 0 if addend is None else addend.ndim
    ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    refuse_twice(matmul_all_reduce.name)
    a, b = ctx.saved_tensors
    wants_a, wants_b, *others = ctx.needs_input_grad
    d_a = dy @ (b if ctx.linear else b.t()) if wants_a else None
    d_b = weight_gradient(a, dy, 0, ctx.dtype, ctx.linear) if wants_b else None
    rest: list[Tensor | None] = [None] * len(others)
    if len(others) > 2 and others[2]:
        rest[2] = dy if ctx.axes > 1 else dy.sum(dim=tuple(range(dy.ndim - 1)))
    return d_a, d_b, *rest


matmul_all_reduce.differentiate(_backward, _setup)
