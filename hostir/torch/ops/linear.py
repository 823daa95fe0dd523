"""Operators for linear layers that need special gradients: a gated pair of layers, and layers with replicated input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hostir.torch.ops import collectives
from hostir.torch.ops.all_gather_matmul import gathered_products
from hostir.torch.ops.gradients import grad_dtype, refuse_twice, side_by_side, weight_gradient, weight_gradients
from hostir.torch.ops.library import GATHERED, SUMMED, define
from hostir.torch.ops.matmul_all_reduce import matmul_all_reduce
from hostir.torch.ops.matmul_reduce_scatter import matmul_reduce_scatter
from hostir.torch.ops.running import OperatorCall


@define("stack_rows(Tensor[] matrices, Tensor gradient) -> Tensor", fake=lambda matrices, _: torch.cat(matrices))
def stack_rows(matrices: list[Tensor], gradient: Tensor) -> Tensor:
    """Concatenate the rows of matrices. A compiled graph does this in the backward pass, because of `gradient`."""
    return torch.cat(matrices)


@define(
    "all_gather_gated(Tensor a, Tensor gate, Tensor up, int gather_dim, str group_name, bool return_a) "
    "-> (Tensor, Tensor?)",
    GATHERED,
)
def all_gather_gated(
    a: Tensor, gate: Tensor, up: Tensor, gather_dim: int, group_name: str, return_a: bool
) -> tuple[Tensor, Tensor | None]:
    """All-gather `a` along an axis. Return `silu(a @ gate^T) * (a @ up^T)` and the gathered `a`.

    The gathered `a` is None if `return_a` is False.
    """
    call = OperatorCall("hostir::all_gather_gated", group_name)
    full, (y,) = gathered_products(call, a, [gate, up], gather_dim, return_a, linear=True, gated=True)
    return y, full


def _gated_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    a, gate, up, ctx.axis, ctx.group, _ = inputs
    ctx.gathered, ctx.dtypes = output[1] is not None, [grad_dtype(w) for w in (gate, up)]
    ctx.save_for_backward(output[1] if ctx.gathered else a, gate, up)


def _gated_backward(ctx: Any, dy: Tensor | None, d_full: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of `all_gather_gated`. Compute the operator's two products again from the gathered rows."""
    refuse_twice(all_gather_gated.name)
    x, gate, up = ctx.saved_tensors
    wants_a, *wanted = ctx.needs_input_grad[:3]
    d_a = None
    if wants_a and d_full is not None:
        d_a = collectives.reduce_scatter.packet(d_full, "sum", ctx.axis, ctx.group)
    if dy is None:
        return d_a, None, None, None, None, None
    if not ctx.gathered:
        x = collectives.all_gather.packet(x, ctx.axis, ctx.group)
    g, u = x @ gate.t(), x @ up.t()
    d_u = dy * torch.nn.functional.silu(g)
    d_g = torch.ops.aten.silu_backward(dy * u, g)
    if wants_a:
        operands = side_by_side([d_g, d_u], [gate, up], linear=True)
        part = matmul_reduce_scatter.call(*operands, "sum", ctx.axis, ctx.group)
        d_a = part if d_a is None else d_a + part
    products = zip((d_g, d_u), ctx.dtypes, wanted, strict=True)
    d_ws = [weight_gradient(x, d, ctx.axis, dtype, True) if wants else None for d, dtype, wants in products]
    return d_a, *d_ws, None, None, None


@define("replicated_linear(Tensor x, Tensor[] weights, str group_name) -> Tensor[]")
def replicated_linear(x: Tensor, weights: list[Tensor], group_name: str) -> list[Tensor]:
    """Return `x @ weight^T` for each of this rank's weights. `x` is the same on all ranks."""
    return [torch.nn.functional.linear(x, w) for w in weights]


@define(
    "replicated_linear_backward(Tensor x, Tensor[] dys, Tensor[] weights, str group_name, str[] dtypes) "
    "-> (Tensor, Tensor[])",
    SUMMED,
)
def replicated_linear_backward(
    x: Tensor, dys: list[Tensor], weights: list[Tensor], group_name: str, dtypes: list[str]
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of `x` and of the weights.

    The all-reduce of the gradient of `x` overlaps the matmuls for the weights' gradients. `dtypes` are as for
    `all_gather_matmul_backward`.
    """
    dy, weight = side_by_side(dys, weights, linear=True)
    d_x = collectives.start_reduced(OperatorCall("hostir::all_reduce", group_name), dy @ weight)
    d_ws = weight_gradients(x, dys, 0, dtypes, True)
    return d_x(), d_ws


def _replicated_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    x, weights, ctx.group = inputs
    ctx.single, ctx.dtypes = x.dim() == 1, [grad_dtype(w) for w in weights]
    ctx.save_for_backward(x if any(ctx.dtypes) else None, *[w if x.requires_grad else None for w in weights])


def _replicated_backward(ctx: Any, d_products: list[Tensor | None]) -> tuple[Any, ...]:
    refuse_twice(replicated_linear.name)
    x, *weights = ctx.saved_tensors
    used = [i for i, dy in enumerate(d_products) if dy is not None]
    dys, dtypes = [dy for dy in d_products if dy is not None], [ctx.dtypes[i] for i in used]
    if ctx.single:  # compute with a matrix of one row
        x, dys = None if x is None else x[None], [dy[None] for dy in dys]
    d_x, d_ws = None, list[Tensor | None]([None] * len(weights))
    d_weights: list[Tensor] = []
    if not ctx.needs_input_grad[0]:
        d_weights = weight_gradients(x, dys, 0, dtypes, True)
    elif any(dtypes):
        rights = [weights[i] for i in used]
        d_x, d_weights = replicated_linear_backward.call(x, dys, rights, ctx.group, dtypes)
    elif used:
        operands = side_by_side(dys, [weights[i] for i in used], linear=True)
        d_x = matmul_all_reduce.call(*operands, ctx.group)
    for i in used:
        d_ws[i] = d_weights.pop(0) if ctx.dtypes[i] else None
    return d_x[0] if d_x is not None and ctx.single else d_x, d_ws, None


all_gather_gated.differentiate(_gated_backward, _gated_setup)
replicated_linear.differentiate(_replicated_backward, _replicated_setup)
