"""All-gather + matmul: multiply the rows of all ranks while they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from hostir.ir.program import Program
from hostir.ir.source import error, user_span
from hostir.lower.rows import SLICES
from hostir.torch.ops import collectives
from hostir.torch.ops.fusions import extra_sizes, fusion, in_front, type_of
from hostir.torch.ops.gradients import grad_dtype, refuse_twice, side_by_side, weight_gradients
from hostir.torch.ops.layouts import (
    check_shape,
    collapsed,
    contiguous,
    expanded,
    gathered_like,
    gathered_shape,
    unaliased,
)
from hostir.torch.ops.library import GATHERED, LIBRARY, Operator, check_operands, check_out, define, takes_over
from hostir.torch.ops.running import THREAD, OperatorCall, Unfit

Products = tuple[Tensor | None, list[Tensor]]  # the gathered tensor, or None unless `return_a`; the products


@takes_over(
    "fused_all_gather_matmul", cuda=symm_mem._fused_all_gather_matmul, cpu=symm_mem._fused_all_gather_matmul_fallback
)
def fused_all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> Products:
    """All-gather A along an axis, and multiply it with each of Bs. Return the gathered A and the products.

    The gathered A is None if `return_A` is False.
    """
    return gathered_products(OperatorCall("symm_mem::fused_all_gather_matmul", group_name), A, Bs, gather_dim, return_A)


@define(
    "all_gather_matmul(Tensor a, Tensor[] bs, int gather_dim, str group_name, bool return_a, bool linear=False) "
    "-> (Tensor?, Tensor[])",
    GATHERED,
)
def all_gather_matmul(
    a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, return_a: bool, linear: bool = False
) -> Products:
    """All-gather `a` along an axis, and multiply it with each of `bs`.

    With `linear`, multiply with the transpose of each of `bs`. Returns the gathered `a` and the products. The gathered
    `a` is None if `return_a` is False.
    """
    call = OperatorCall("hostir::all_gather_matmul", group_name)
    return gathered_products(call, a, bs, gather_dim, return_a, linear)


@define(
    "all_gather_matmul_out(Tensor a, Tensor[] bs, int gather_dim, str group_name, *, Tensor(a!)[] out, "
    "Tensor(b!)? gathered = None) -> ()",
    GATHERED,
)
def all_gather_matmul_out(
    a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, *, out: list[Tensor], gathered: Tensor | None = None
) -> None:
    """All-gather `a`, and write its products with `bs` to `out`.

    If `gathered` is not None, write the gathered `a` to it. All these tensors may have any strides.
    """
    call = OperatorCall("hostir::all_gather_matmul_out", group_name)
    results = [*out] if gathered is None else [*out, gathered]
    check_out(call.name, a, *bs, *results)
    check_operands(a, bs, gather_dim)
    if len(out) != len(bs):
        raise error(f"out has {len(out)} tensors", user_span(), expected=f"{len(bs)}, one for each matrix")
    if THREAD.tracing:
        return
    for x, columns in zip(results, [*(b.shape[1] for b in bs), None], strict=False):
        check_shape(x, gathered_shape(a, gather_dim, call.group.size, columns))
    if not bs:
        if gathered is not None:
            gathered.copy_(collectives.gathered(call, a, gather_dim))
        return
    rows = [x if gather_dim in (0, a.ndim - 1) else x.movedim(gather_dim, 0) for x in results]
    dense = [contiguous(x) for x in rows]
    flat = [x if x.ndim == 2 else x.flatten(0, -2) for x in dense]
    gathered_products(call, a, bs, gather_dim, gathered is not None, out=flat)
    for x, y in zip(rows, dense, strict=True):
        if x is not y:
            x.copy_(y)


def gathered_products(
    call: OperatorCall,
    a: Tensor,
    bs: Sequence[Tensor],
    axis: int,
    return_a: bool,
    linear: bool = False,
    gated: bool = False,
    out: Sequence[Tensor] | None = None,
) -> Products:
    """All-gather `a` along an axis, and multiply it with each of `bs`.

    Returns the gathered `a` and the products. The gathered `a` is None if `return_a` is False. Raises Unfit for a call
    that hostir cannot run.

    Args:
        call: the call of the operator.
        a: this rank's part, `[..., K]`.
        bs: this rank's matrices.
        axis: the axis of `a` to gather along.
        return_a: True to return the gathered `a`.
        linear: True to multiply with the transpose of each of `bs`, as linear layers do with their weights.
        gated: True to return one result instead of two products: `silu(a @ b0) * (a @ b1)`.
        out: contiguous matrices to which the results are written. There is one for each product. If `return_a` is True,
            a last one is for the gathered `a`.
    """
    check_operands(a, bs, axis)
    bs = [b.t() for b in bs] if linear else bs
    contracted, ranks = axis == a.ndim - 1, call.group.size
    if THREAD.tracing:
        products = [gathered_like(a, axis, ranks, b.shape[1]) for b in bs[: 1 if gated else None]]
        return gathered_like(a, axis, ranks) if return_a else None, products
    if not bs:
        return collectives.gathered(call, a, axis) if return_a else None, []
    K = a.shape[-1] * (ranks if contracted else 1)
    check_rows(bs, K)
    columns = tuple([b.shape[1] for b in bs])
    if gated and columns[0] != columns[1]:
        raise Unfit(f"the two matrices have {columns[0]} and {columns[1]} columns")
    x, outside = collapsed(a, 0 if contracted else axis)
    rows = [x.shape[outside], *x.shape[:outside], *x.shape[outside + 1 : -1]]
    slices = next((n for n in SLICES if rows[0] % n == 0), 1) if contracted else 0
    rows[0] *= 1 if contracted else ranks
    dense = None
    if out is not None:
        widths = [*columns, *([K] if return_a else [])]
        dense = [check_shape(y, [prod(rows), n]).view(*rows, n) for y, n in zip(out, widths, strict=True)]
    results = [
        *call.execute(gather_fusion, (K, columns, x.ndim - 2, outside, slices, return_a, gated), [x, *bs], dense)
    ]
    full = unaliased(results.pop(), a, ranks) if return_a else None
    if contracted:
        results = [y.view(*a.shape[:-1], y.shape[-1]) for y in results]
        return None if full is None else full.view(*a.shape[:-1], K), results
    return None if full is None else expanded(full, a, axis, ranks), [expanded(y, a, axis, ranks) for y in results]


def check_rows(bs: Sequence[Tensor], K: int) -> None:
    """Raise Unfit unless each of `bs` has `K` rows, the number of columns of the left operand."""
    for b in bs:
        if b.shape[0] != K:
            raise Unfit(f"A has {K} columns, and B has {b.shape[0]} rows")


def gather_fusion(
    ranks: int,
    dtype: str,
    K: int,
    columns: tuple[int, ...],
    extra: int,
    outside: int,
    slices: int,
    return_a: bool,
    gated: bool,
) -> Program:
    """Return the fusion that gathers `%a` and multiplies it with matrices.

    Args:
        ranks: the number of ranks.
        dtype: the dtype of all tensors.
        K: the number of columns of the gathered `%a`.
        columns: the number of columns of each matrix.
        extra: the number of axes of the rows besides M.
        outside: the number of these axes that stand before M.
        slices: 0 if `%a` is sharded on M. Otherwise `%a` is sharded on its columns, and the outermost axis has the size
            `slices * M`.
        return_a: True if the gathered `%a` is an output.
        gated: True if the output is `silu(%a @ %b0) * (%a @ %b1)`, and not the products.
    """
    others = extra_sizes(extra)
    rows = (f"{slices}*M" if slices else "M", *others)
    a, body, front = in_front("%a", dtype, ("M@didx", *others, K), outside)
    if slices:
        a, body, front = f"%a: {type_of(dtype, *rows, f'{K}@didx')}", [], "%a"
    body.append(f"%a_full: {type_of(dtype, *rows, K)} = reshard {front}")
    body += [f"%c{i}: {type_of(dtype, *rows, n)} = matmul %a_full, %b{i}" for i, n in enumerate(columns)]
    outputs = [f"%c{i}" for i in range(len(columns))]
    if gated:
        result = type_of(dtype, *rows, columns[0])
        body += [f"%s: {result} = silu %c0", f"%y: {result} = mul %s, %c1"]
        outputs = ["%y"]
    inputs = [a, *(f"%b{i}: {type_of(dtype, K, n)}" for i, n in enumerate(columns))]
    name = "all_gather_gated" if gated else "all_gather_matmul"
    return fusion(name, ranks, inputs, outputs + ["%a_full"] * return_a, body)


@define(
    "all_gather_matmul_backward(Tensor a, Tensor[] dys, Tensor[] bs, int gather_dim, str group_name, bool linear, "
    "str[] dtypes) -> (Tensor, Tensor[])"
)
def all_gather_matmul_backward(
    a: Tensor, dys: list[Tensor], bs: list[Tensor], gather_dim: int, group_name: str, linear: bool, dtypes: list[str]
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of an all-gather + matmul: the gradient of `a`, and the gradients of the weights.

    The weights' gradients need the gathered `a`, so `a` is gathered again. The all-gather overlaps the matmul for the
    gradient of `a`. The reduce-scatter of the gradient of `a` overlaps the matmuls for the weights' gradients.

    `dtypes` holds a name for each weight: the name of the dtype of the weight's gradient. If the name is empty, the
    gradient is not computed.
    """
    full = collectives.start_gathered(OperatorCall("hostir::all_gather", group_name), a, gather_dim)
    addend = _addend(dys, bs, gather_dim, linear)
    x = full()
    d_a = collectives.start_scattered(OperatorCall("hostir::reduce_scatter", group_name), addend, gather_dim)
    d_bs = weight_gradients(x, dys, gather_dim, dtypes, linear)
    return d_a(), d_bs


def _addend(dys: list[Tensor], bs: list[Tensor], axis: int, linear: bool) -> Tensor:
    """Return this rank's addend of the input gradient, which is the sum over all ranks.

    `axis` is the outermost axis in the memory of the addend, unless `axis` is the last axis.
    """
    dy, weight = side_by_side(dys, bs, linear)
    return dy @ weight if axis == dy.ndim - 1 else (dy.movedim(axis, 0) @ weight).movedim(0, axis)


@torch.library.register_torch_dispatch("hostir::all_gather_matmul_backward", CommDebugMode, lib=LIBRARY)
def _(mode: CommDebugMode, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    """Compute `all_gather_matmul_backward` under CommDebugMode. Run each of its two collectives in a separate operator.

    CommDebugMode counts one collective for an operator, and would miss the other one.
    """
    a, dys, bs, axis, group, linear, dtypes = args
    ops, dispatch = torch.ops.hostir, mode.__torch_dispatch__
    full = dispatch(ops.all_gather.default, types, (a, axis, group))
    d_a = dispatch(ops.reduce_scatter.default, types, (_addend(dys, bs, axis, linear), "sum", axis, group))
    return d_a, weight_gradients(full, dys, axis, dtypes, linear)


def differentiate(gather: Operator, scatter: Operator) -> None:
    """Register the gradients of `gather`, an all-gather + matmul.

    `scatter`, a matmul + reduce-scatter, computes the gradient of `a`. The gradient of a weight is `a^T @ dy`, with all
    rows of the gathered `a`. If the forward call did not return the gathered `a`, backward gathers `a` again.
    """

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # otherwise zeros are scattered if the gathered tensor is unused
        a, bs, ctx.axis, ctx.group, *rest = inputs
        full = output[0]
        ctx.gathered, ctx.linear = full is not None, rest[1:] == [True]
        ctx.dtypes = [grad_dtype(b) for b in bs]
        x = (a if full is None else full) if any(ctx.dtypes) else None
        ctx.save_for_backward(x, *[b if a.requires_grad else None for b in bs])

    def backward(ctx: Any, d_full: Tensor | None, d_products: list[Tensor | None]) -> tuple[Any, ...]:
        refuse_twice(gather.name)
        x, *bs = ctx.saved_tensors
        used = [i for i, dy in enumerate(d_products) if dy is not None]
        dys, dtypes = [dy for dy in d_products if dy is not None], [ctx.dtypes[i] for i in used]
        d_a, d_bs = None, [None] * len(bs)
        wants_a, again = ctx.needs_input_grad[0] and used, any(dtypes) and not ctx.gathered
        if wants_a and again:
            weights = [bs[i] for i in used]
            d_a, d_weights = all_gather_matmul_backward.call(x, dys, weights, ctx.axis, ctx.group, ctx.linear, dtypes)
        else:
            if wants_a:
                operands = side_by_side(dys, [bs[i] for i in used], ctx.linear)
                d_a = scatter.call(*operands, "sum", ctx.axis, ctx.group)
            x = collectives.all_gather.packet(x, ctx.axis, ctx.group) if again else x
            d_weights = weight_gradients(x, dys, ctx.axis, dtypes, ctx.linear)
        for i in used:
            d_bs[i] = d_weights.pop(0) if ctx.dtypes[i] else None
        if ctx.needs_input_grad[0] and d_full is not None:
            part = collectives.reduce_scatter.packet(d_full, "sum", ctx.axis, ctx.group)
            d_a = part if d_a is None else d_a + part
        return (d_a, d_bs, *[None] * (len(ctx.needs_input_grad) - 2))  # a call may leave out defaults

    gather.differentiate(backward, setup)
