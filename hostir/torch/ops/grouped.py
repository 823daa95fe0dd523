"""Operators for tensor-parallel experts: all-gather + grouped matmul, and grouped matmul + combine + reduce-scatter.

Each rank has tokens, and a slice of the matrices of every expert. R is the number of ranks, M the number of tokens of a
rank, k the number of experts that compute a token, and S = M * k the number of rows of a rank: one for each token and
expert. On every rank, the rows of all ranks are `[R, S, ...]`. The rows of each rank are sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hostir.ir.program import Program
from hostir.kernels.table import kernel_table
from hostir.torch.ops import collectives
from hostir.torch.ops.fusions import fusion, type_of
from hostir.torch.ops.gradients import refuse_twice
from hostir.torch.ops.library import GATHERED, SCATTERED, define
from hostir.torch.ops.running import THREAD, OperatorCall, Unfit, do_not_remember, dtype_of

INTEGERS = {torch.int32: "i32", torch.int64: "i64"}


@define("route(Tensor experts, int count, str group_name) -> (Tensor, Tensor, Tensor)", GATHERED)
def route(experts: Tensor, count: int, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """All-gather the experts of the tokens, `[M, k]`; return the order, the offsets and the places of all ranks' rows.

    - `order` `[R, S]` has the token of each row, in the order of the experts.
    - `offsets` `[R, count + 1]` has the first row of each expert, and the row after the last expert's last row.
    - `places` `[R, M, k]` has the row of each token and expert.

    All are i32. Rows of an expert that is negative, or not less than `count`, belong to no expert.
    """
    call = OperatorCall("hostir::route", group_name)
    ranks, (tokens, each) = call.group.size, experts.shape
    if THREAD.tracing:
        shapes = ((ranks, tokens * each), (ranks, count + 1), (ranks, tokens, each))
        order, offsets, places = (experts.new_empty(shape, dtype=torch.int32) for shape in shapes)
        return order, offsets, places
    if experts.dtype not in INTEGERS:
        raise Unfit(f"the experts of the tokens are {experts.dtype}, not one of {', '.join(map(str, INTEGERS))}")
    do_not_remember()
    (full,) = call.execute(_experts_fusion, (each,), [experts], dtype=INTEGERS[experts.dtype])
    by_rank = full.view(ranks, tokens * each)
    in_order, rows = by_rank.sort(stable=True, dim=-1)
    begins = torch.arange(count + 1, dtype=full.dtype, device=full.device).expand(ranks, -1).contiguous()
    places = torch.empty_like(rows).scatter_(-1, rows, torch.arange(rows.shape[1], device=full.device).expand_as(rows))
    offsets = torch.searchsorted(in_order, begins, out_int32=True)
    return (rows // max(each, 1)).int(), offsets, places.view(ranks, tokens, each).int()


def _experts_fusion(ranks: int, dtype: str, each: int) -> Program:
    """Return the fusion that gathers `%experts`. `each` is the number of experts of a token."""
    experts, body = f"%experts: {type_of(dtype, 'M@didx', each)}", f"%full: {type_of(dtype, 'M', each)} = reshard"
    return fusion("route", ranks, [experts], ["%full"], [f"{body} %experts"])


@define(
    "all_gather_grouped_matmul(Tensor x, Tensor[] weights, Tensor order, Tensor offsets, Tensor places, "
    "str group_name) -> (Tensor, Tensor[])",
    GATHERED,
)
def all_gather_grouped_matmul(
    x: Tensor, weights: list[Tensor], order: Tensor, offsets: Tensor, places: Tensor, group_name: str
) -> tuple[Tensor, list[Tensor]]:
    """All-gather the tokens `x` `[M, K]`. Return the rows of all experts `[R, S, K]`, and their grouped products.

    `weights` are `[E, K, N]`, one matrix for each expert. Their products are `[R, S, N]`.
    """
    call = OperatorCall("hostir::all_gather_grouped_matmul", group_name)
    if THREAD.tracing:
        return x.new_empty(*order.shape, x.shape[1]), [x.new_empty(*order.shape, w.shape[2]) for w in weights]
    do_not_remember()
    widths, experts = tuple(w.shape[2] for w in weights), offsets.shape[1] - 1
    _check(x, weights, experts, x.shape[1])
    inputs = [x[None], *weights, order, offsets]
    rows, *products = call.execute(_gather_fusion, (experts, x.shape[1], widths), inputs, dtype=dtype_of([x]))
    return rows, [*products]


def _gather_fusion(ranks: int, dtype: str, experts: int, K: int, widths: tuple[int, ...]) -> Program:
    """Return the fusion of `all_gather_grouped_matmul`. `widths` are the numbers of columns of the matrices."""
    inputs = [f"%x: {type_of(dtype, f'{ranks}@didx', 'M', K)}"]
    inputs += [f"%w{i}: {type_of(dtype, experts, K, n)}" for i, n in enumerate(widths)]
    inputs += [f"%order: {type_of('i32', ranks, 'S')}", f"%offsets: {type_of('i32', ranks, experts + 1)}"]
    body = [f"%rows: {type_of(dtype, ranks, 'S', K)} = permute_rows %x by %order"]
    product = "grouped_matmul %rows, %w{} by %offsets"
    body += [f"%c{i}: {type_of(dtype, ranks, 'S', n)} = {product.format(i)}" for i, n in enumerate(widths)]
    return fusion("all_gather_grouped_matmul", ranks, inputs, ["%rows", *(f"%c{i}" for i in range(len(widths)))], body)


@define(
    "grouped_matmul_reduce_scatter(Tensor[] hs, Tensor[] weights, Tensor order, Tensor offsets, Tensor places, "
    "str group_name) -> Tensor",
    SCATTERED,
)
def grouped_matmul_reduce_scatter(
    hs: list[Tensor], weights: list[Tensor], order: Tensor, offsets: Tensor, places: Tensor, group_name: str
) -> Tensor:
    """Multiply the rows of each expert, add up the rows of each token and the ranks' sums; return this rank's tokens.

    Each of `hs` is `[R, S, K]`, and is multiplied by its matrices `[E, K, N]` in `weights`. The products of all are
    added. The result is `[M, N]`.
    """
    call = OperatorCall("hostir::grouped_matmul_reduce_scatter", group_name)
    tokens, columns = places.shape[1], weights[0].shape[2]
    if THREAD.tracing:
        return hs[0].new_empty(tokens, columns)
    do_not_remember()
    ranks, experts, each = call.group.size, offsets.shape[1] - 1, places.shape[2]
    for h, weight in zip(hs, weights, strict=True):
        _check(h, [weight], experts, h.shape[2])
    key = experts, tuple(h.shape[2] * ranks for h in hs), columns, each
    ones = torch.ones(places.shape, dtype=torch.float32, device=places.device)
    (y,) = call.execute(_scatter_fusion, key, [*hs, *weights, offsets, places, ones], dtype=dtype_of(hs))
    return y.view(tokens, columns)


def _scatter_fusion(ranks: int, dtype: str, experts: int, widths: tuple[int, ...], columns: int, each: int) -> Program:
    """Return the fusion of `grouped_matmul_reduce_scatter`.

    `widths` are the numbers of columns of each of `hs` over all ranks. `each` is the number of experts of a token.
    """
    numbers = range(len(widths))
    inputs = [f"%h{i}: {type_of(dtype, ranks, 'S', f'{K}@didx')}" for i, K in enumerate(widths)]
    inputs += [f"%w{i}: {type_of(dtype, experts, f'{K}@didx', columns)}" for i, K in enumerate(widths)]
    inputs += [f"%offsets: {type_of('i32', ranks, experts + 1)}", f"%places: {type_of('i32', ranks, 'M', each)}"]
    inputs.append(f"%ones: {type_of('f32', ranks, 'M', each)}")
    rows, tokens = (f"{type_of(dtype, ranks, size, columns)} partial(didx)" for size in ("S", "M"))
    body = [f"%y{i}: {rows} = grouped_matmul %h{i}, %w{i} by %offsets" for i in numbers]
    body += [f"%c{i}: {tokens} = combine_rows %y{i} by %places times %ones" for i in numbers]
    total = "%c0"
    for i in numbers[1:]:  # of the sums of each token, which are fewer than the rows
        body.append(f"%t{i}: {tokens} = add {total}, %c{i}")
        total = f"%t{i}"
    body.append(f"%c: {type_of(dtype, f'{ranks}@didx', 'M', columns)} = reshard {total}")
    return fusion("grouped_matmul_reduce_scatter", ranks, inputs, ["%c"], body)


@define(
    "expert_mlp(Tensor x, Tensor gate, Tensor up, Tensor down, Tensor order, Tensor offsets, Tensor places, "
    "Tensor weights, str group_name) -> Tensor",
    SCATTERED,
)
def expert_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    order: Tensor,
    offsets: Tensor,
    places: Tensor,
    weights: Tensor,
    group_name: str,
) -> Tensor:
    """Compute a mixture of experts in one program, without gradients. Return this rank's tokens, `[M, K]`.

    `x` is `[M, K]`, `gate` and `up` are `[E, K, N]`, `down` is `[E, N, K]`, and `weights` `[R, M, k]` are the weights
    of all ranks' tokens.
    """
    call = OperatorCall("hostir::expert_mlp", group_name)
    if THREAD.tracing:
        return torch.empty_like(x)
    do_not_remember()
    experts, (_, each) = offsets.shape[1] - 1, places.shape[1:]
    _check(x, [gate, up], experts, x.shape[1])
    _check(x, [down], experts, gate.shape[2])
    key = experts, x.shape[1], gate.shape[2] * call.group.size, each
    inputs = [x[None], gate, up, down, order, offsets, places, weights.float()]
    (y,) = call.execute(_mixture_fusion, key, inputs, dtype=dtype_of([x]))
    return y.view(x.shape)


def _mixture_fusion(ranks: int, dtype: str, experts: int, K: int, hidden: int, each: int) -> Program:
    """Return the fusion of `expert_mlp`. `hidden` is the number of hidden features over all ranks."""
    wide, inner = f"{hidden}@didx", type_of(dtype, ranks, "S", f"{hidden}@didx")
    inputs = [f"%x: {type_of(dtype, f'{ranks}@didx', 'M', K)}"]
    inputs += [f"%{name}: {type_of(dtype, experts, K, wide)}" for name in ("gate", "up")]
    inputs += [f"%down: {type_of(dtype, experts, wide, K)}", f"%order: {type_of('i32', ranks, 'S')}"]
    inputs += [f"%offsets: {type_of('i32', ranks, experts + 1)}", f"%places: {type_of('i32', ranks, 'M', each)}"]
    inputs.append(f"%weights: {type_of('f32', ranks, 'M', each)}")
    body = [
        f"%rows: {type_of(dtype, ranks, 'S', K)} = permute_rows %x by %order",
        f"%g: {inner} = grouped_matmul %rows, %gate by %offsets",
        f"%u: {inner} = grouped_matmul %rows, %up by %offsets",
        f"%s: {inner} = silu %g",
        f"%h: {inner} = mul %s, %u",
        f"%part: {type_of(dtype, ranks, 'S', K)} partial(didx) = grouped_matmul %h, %down by %offsets",
        f"%y: {type_of(dtype, f'{ranks}@didx', 'M', K)} = combine_rows %part by %places times %weights",
    ]
    return fusion("expert_mlp", ranks, inputs, ["%y"], body)


def _check(x: Tensor, weights: Sequence[Tensor], experts: int, K: int) -> None:
    """Raise Unfit unless the matrices have the dtype of the rows, and fit their columns and the number of experts."""
    for w in weights:
        if w.dim() != 3 or w.shape[0] != experts or w.shape[1] != K:
            raise Unfit(f"a weight has shape {list(w.shape)}, not [{experts}, {K}, N]: {experts} experts, {K} columns")
        if w.dtype != x.dtype:
            raise Unfit(f"operands of several dtypes, {x.dtype} and {w.dtype}")


@define("grouped_outer(Tensor x, Tensor y, Tensor offsets) -> Tensor")
def grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of the matrices of the experts, `[E, K, N]`.

    `x` are the rows of all ranks `[R, S, K]`, and `y` `[R, S, N]` is the gradient of their products.
    """
    out = x.new_empty(offsets.shape[1] - 1, x.shape[2], y.shape[2])
    if not THREAD.tracing:
        kernel_table("auto", x.device.type)["grouped_outer"](out, x, y, offsets)
    return out


def _by_token(rows: Tensor, places: Tensor) -> Tensor:
    """Return the sum of the rows of each token of all ranks, `[R * M, K]`."""
    ranks, tokens, each = places.shape
    index = places.reshape(ranks, tokens * each, 1).long().expand(-1, -1, rows.shape[2])
    return rows.gather(1, index).view(ranks * tokens, each, rows.shape[2]).sum(1)


# The two operators are each other's gradients, because one gathers what the other scatters.
def _gather_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    _, weights, order, offsets, places, ctx.group = inputs
    ctx.save_for_backward(output[0], order, offsets, places, *weights)


def _gather_backward(ctx: Any, d_rows: Tensor | None, d_products: Sequence[Tensor | None]) -> tuple[Any, ...]:
    refuse_twice(all_gather_grouped_matmul.name)
    rows, order, offsets, places, *weights = ctx.saved_tensors
    wants_x, wants_ws, *_ = ctx.needs_input_grad
    used = [(d, w) for d, w in zip(d_products, weights, strict=True) if d is not None]
    d_x = None
    if wants_x and used:
        ds, right = [d for d, _ in used], [w.transpose(1, 2) for _, w in used]
        d_x = grouped_matmul_reduce_scatter.packet(ds, right, order, offsets, places, ctx.group)
    if wants_x and d_rows is not None:
        d = collectives.reduce_scatter.packet(_by_token(d_rows, places), "sum", 0, ctx.group)
        d_x = d if d_x is None else d_x + d
    pairs = zip(d_products, wants_ws, strict=True)
    d_ws = [grouped_outer.packet(rows, d, offsets) if wants and d is not None else None for d, wants in pairs]
    return d_x, d_ws, None, None, None, None


def _scatter_setup(ctx: Any, inputs: Any, output: Any) -> None:
    hs, weights, order, offsets, places, ctx.group = inputs
    kept = [h if weight.requires_grad else None for h, weight in zip(hs, weights, strict=True)]
    ctx.save_for_backward(order, offsets, places, *kept, *weights)


def _scatter_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    refuse_twice(grouped_matmul_reduce_scatter.name)
    order, offsets, places, *pairs = ctx.saved_tensors
    hs, weights = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    wants_hs, wants_ws, *_ = ctx.needs_input_grad
    right = [w.transpose(1, 2) for w, wants in zip(weights, wants_hs, strict=True) if wants]
    rows, products = all_gather_grouped_matmul.packet(dy, right, order, offsets, places, ctx.group)
    of = iter(products)
    d_hs = [next(of) if wants else None for wants in wants_hs]
    d_ws = [grouped_outer.packet(h, rows, offsets) if wants else None for h, wants in zip(hs, wants_ws, strict=True)]
    return d_hs, d_ws, None, None, None, None


all_gather_grouped_matmul.differentiate(_gather_backward, _gather_setup)
grouped_matmul_reduce_scatter.differentiate(_scatter_backward, _scatter_setup)
