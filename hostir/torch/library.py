"""Register hostir's own operators, `torch.ops.hostir`, and take over torch's, `torch.ops.symm_mem`; with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_group_size_by_name
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.debug._comm_mode import NATIVE_TO_PY_MAPPING

from hostir.ir.source import error, user_span
from hostir.torch import operators
from hostir.torch.operators import operator
from hostir.torch.recording import Gradients, Record, needs_no_dispatcher, register_gradients, wants_gradients

KEYS = ("CPU", "CUDA")


# Checks ---------------------------------------------------------------------------------------------------------------
# In the words of torch's own operators.


def check_gather(a: Tensor, bs: Sequence[Tensor], axis: int) -> None:
    """Raise ValueError as torch's all-gather + matmul does."""
    if a.dim() < 2:
        raise ValueError("A_shard must be a matrix")
    if any(b.dim() != 2 for b in bs):
        raise ValueError("B must be a matrix")
    if not 0 <= axis < a.dim():
        raise ValueError("Invalid gather_dim")


def check_scatter(a: Tensor, b: Tensor, reduce_op: str, axis: int) -> None:
    """Raise ValueError as torch's matmul + reduce-scatter does."""
    if a.dim() < 2:
        raise ValueError("A_shard must be a matrix")
    if not 0 <= axis < a.dim():
        raise ValueError("Invalid gather_dim")  # torch's word for it
    if b.dim() != 2:
        raise ValueError("B must be a matrix")
    check_reduce_op(reduce_op)


def check_reduce_op(reduce_op: str) -> None:
    """Raise ValueError as torch does."""
    if reduce_op not in ("sum", "avg"):
        raise ValueError("reduce_op must be sum or avg")


def check_out(name: str, *tensors: Tensor) -> None:
    """Raise HostIRError if autograd would have to see what an operator writes to tensors of the caller's."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise error(
            f"{name} has no gradients, and a tensor requires them",
            user_span(),
            hint="leave out= away, or call under torch.no_grad()",
        )


# hostir's own operators -----------------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("hostir", "DEF")
KERNELS: dict[str, Callable[..., Any]] = {}
RECORDS: dict[str, Record] = {}  # of those with gradients
Products = tuple[Tensor | None, list[Tensor]]


GATHERED, SCATTERED, SUMMED = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


def define(schema: str, collective: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operator of `torch.ops.hostir`, whose kernel on CPU and CUDA is the function below.

    `collective` is the functional collective of torch that the operator stands for. CommDebugMode counts each call as
    one of these. It does not see what a kernel calls.
    """

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
        for key in KEYS:
            LIBRARY.impl(name, kernel, key)
        KERNELS[name] = kernel
        if collective:
            NATIVE_TO_PY_MAPPING[getattr(torch.ops.hostir, name)] = getattr(torch.ops.c10d_functional, collective)
        return kernel

    return register


def call(name: str, tensors: Sequence[Tensor], *args: Any, **options: Any) -> Any:
    """Call an operator of `torch.ops.hostir`; `tensors` are all those among its arguments.

    Where torch's dispatcher has nothing to add, which takes it 10 us, its kernel is called at once: no tracer, no mode,
    no profiler, no tensors that are not plain.
    """
    if not needs_no_dispatcher(tensors):
        return getattr(torch.ops.hostir, name)(*args, **options)

    def run() -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return KERNELS[name](*args, **options)

    return RECORDS[name](run, args) if wants_gradients(tensors) and name in RECORDS else run()


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function below as what tracers run of an operator: it gives results without data."""
    return torch.library.register_fake(f"hostir::{name}", lib=LIBRARY)


# With `linear`, matrices are transposed: [N, K], as weights of torch.nn.Linear.
AG_MM = (
    "all_gather_matmul(Tensor a, Tensor[] bs, int gather_dim, str group_name, bool return_a, bool linear=False) "
    "-> (Tensor?, Tensor[])"
)
AG_MM_BACKWARD = (
    "all_gather_matmul_backward(Tensor a, Tensor[] dys, Tensor[] bs, int gather_dim, str group_name, bool linear, "
    "str[] dtypes) -> (Tensor, Tensor[])"
)
AG_MM_OUT = (
    "all_gather_matmul_out(Tensor a, Tensor[] bs, int gather_dim, str group_name, *, Tensor(a!)[] out, "
    "Tensor(b!)? gathered = None) -> ()"
)
AG_GATED = (
    "all_gather_gated(Tensor a, Tensor gate, Tensor up, int gather_dim, str group_name, bool return_a) "
    "-> (Tensor, Tensor?)"
)
MM_RS = (
    "matmul_reduce_scatter(Tensor a, Tensor b, str reduce_op, int scatter_dim, str group_name, bool linear=False) "
    "-> Tensor"
)
MM_RS_OUT = (
    "matmul_reduce_scatter_out(Tensor a, Tensor b, str reduce_op, int scatter_dim, str group_name, *, "
    "Tensor(a!) out) -> ()"
)
AG = "all_gather(Tensor x, int gather_dim, str group_name) -> Tensor"
RS = "reduce_scatter(Tensor x, str reduce_op, int scatter_dim, str group_name) -> Tensor"


@define(AG_MM, GATHERED)
def _all_gather_matmul(
    a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, return_a: bool, linear: bool = False
) -> Products:
    check_gather(a, bs, gather_dim)
    op = operator("hostir::all_gather_matmul", group_name)
    right = [b.t() for b in bs] if linear else bs
    return op.run(lambda: operators.all_gather_matmul(op, a, right, gather_dim, return_a))


@fake("all_gather_matmul")
def _(a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, return_a: bool, linear: bool = False) -> Products:
    check_gather(a, bs, gather_dim)
    full = gathered_like(a, gather_dim, group_name)
    return full if return_a else None, [with_columns(full, b.shape[0 if linear else 1], gather_dim) for b in bs]


def gathered_like(x: Tensor, axis: int, group_name: str) -> Tensor:
    """Return a new tensor like the gathered one: with that axis first in memory, but for the last one."""
    shape = list(x.shape)
    shape[axis] *= _get_group_size_by_name(group_name)  # type: ignore[arg-type]
    if axis == x.ndim - 1:
        return x.new_empty(shape)
    return x.new_empty([shape[axis], *shape[:axis], *shape[axis + 1 :]]).movedim(0, axis)


def with_columns(full: Tensor, columns: int, axis: int) -> Tensor:
    """Return a new tensor like the product of a gathered one and a matrix."""
    first = 0 if axis == full.ndim - 1 else axis
    moved = full.movedim(first, 0)
    return full.new_empty([*moved.shape[:-1], columns]).movedim(0, first)


@define(AG_MM_OUT, GATHERED)
def _all_gather_matmul_out(
    a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, *, out: list[Tensor], gathered: Tensor | None = None
) -> None:
    check_gather(a, bs, gather_dim)
    op = operator("hostir::all_gather_matmul_out", group_name)
    every = [*out] if gathered is None else [*out, gathered]
    check_out(op.name, a, *bs, *every)
    rows = [x if gather_dim in (0, a.ndim - 1) else x.movedim(gather_dim, 0) for x in every]
    if len(out) != len(bs):
        raise error(f"out has {len(out)} tensors", user_span(), expected=f"{len(bs)}, one for each matrix")
    if bs and all(x.is_contiguous() for x in rows):
        flat = [x if x.ndim == 2 else x.flatten(0, -2) for x in rows]
        op.run(lambda: operators.all_gather_matmul(op, a, bs, gather_dim, gathered is not None, flat))
        return
    full, products = op.run(lambda: operators.all_gather_matmul(op, a, bs, gather_dim, gathered is not None))
    for mine, x in zip(every, [*products, full], strict=False):
        mine.copy_(x)


@fake("all_gather_matmul_out")
def _(
    a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, *, out: list[Tensor], gathered: Tensor | None = None
) -> None:
    check_gather(a, bs, gather_dim)


@define(AG_GATED, GATHERED)
def _all_gather_gated(
    a: Tensor, gate: Tensor, up: Tensor, gather_dim: int, group_name: str, return_a: bool
) -> tuple[Tensor, Tensor | None]:
    check_gather(a, [gate, up], gather_dim)
    op = operator("hostir::all_gather_gated", group_name)
    right = [gate.t(), up.t()]
    full, (y,) = op.run(lambda: operators.all_gather_matmul(op, a, right, gather_dim, return_a, gated=True))
    return y, full


@fake("all_gather_gated")
def _(
    a: Tensor, gate: Tensor, up: Tensor, gather_dim: int, group_name: str, return_a: bool
) -> tuple[Tensor, Tensor | None]:
    check_gather(a, [gate, up], gather_dim)
    full = gathered_like(a, gather_dim, group_name)
    return with_columns(full, gate.shape[0], gather_dim), full if return_a else None


@define(MM_RS, SCATTERED)
def _matmul_reduce_scatter(
    a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str, linear: bool = False
) -> Tensor:
    check_scatter(a, b, reduce_op, scatter_dim)
    op = operator("hostir::matmul_reduce_scatter", group_name)
    right = b.t() if linear else b
    return op.run(lambda: operators.matmul_reduce_scatter(op, a, right, reduce_op == "avg", scatter_dim))


@fake("matmul_reduce_scatter")
def _(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str, linear: bool = False) -> Tensor:
    check_scatter(a, b, reduce_op, scatter_dim)
    return scattered_like(a, b.shape[0 if linear else 1], scatter_dim, group_name, a.dtype)


def scattered_like(a: Tensor, columns: int, axis: int, group_name: str, dtype: torch.dtype) -> Tensor:
    """Return a new tensor like this rank's part of a product."""
    shape = [*a.shape[:-1], columns]
    shape[axis] //= _get_group_size_by_name(group_name)  # type: ignore[arg-type]
    return a.new_empty(shape, dtype=dtype)


@define(MM_RS_OUT, SCATTERED)
def _matmul_reduce_scatter_out(
    a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str, *, out: Tensor
) -> None:
    check_scatter(a, b, reduce_op, scatter_dim)
    op = operator("hostir::matmul_reduce_scatter_out", group_name)
    check_out(op.name, a, b, out)
    given = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    op.run(lambda: operators.matmul_reduce_scatter(op, a, b, reduce_op == "avg", scatter_dim, given))
    if given is not out:
        out.copy_(given)


@fake("matmul_reduce_scatter_out")
def _(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str, *, out: Tensor) -> None:
    check_scatter(a, b, reduce_op, scatter_dim)


@define(AG, GATHERED)
def _all_gather(x: Tensor, gather_dim: int, group_name: str) -> Tensor:
    op = operator("hostir::all_gather", group_name)
    return op.run(lambda: operators.all_gather(op, x, gather_dim))


@fake("all_gather")
def _(x: Tensor, gather_dim: int, group_name: str) -> Tensor:
    return x.new_empty(_moved_shape(x, gather_dim, group_name, times=True)).movedim(0, gather_dim)


@define(RS, SCATTERED)
def _reduce_scatter(x: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    check_reduce_op(reduce_op)
    op = operator("hostir::reduce_scatter", group_name)
    return op.run(lambda: operators.reduce_scatter(op, x, reduce_op == "avg", scatter_dim))


@fake("reduce_scatter")
def _(x: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    return x.new_empty(_moved_shape(x, scatter_dim, group_name, times=False)).movedim(0, scatter_dim)


def _moved_shape(x: Tensor, axis: int, group_name: str, times: bool) -> list[int]:
    ranks = _get_group_size_by_name(group_name)  # type: ignore[arg-type]
    first, *others = x.movedim(axis, 0).shape
    return [first * ranks if times else first // ranks, *others]


# Gradients ------------------------------------------------------------------------------------------------------------
# The input gradient of all-gather + matmul is a matmul + reduce-scatter, and the other way round. Weight gradients are
# `a^T @ dy` over all rows: of the gathered tensor if the forward call returned it, else gathered again, and in the
# backward of matmul + reduce-scatter of the gathered `dy`, with the gather that the input gradient needs anyway.


def refuse_twice(name: str) -> None:
    """Raise if the backward call itself is recorded, as for second derivatives."""
    if torch.is_grad_enabled():
        raise error(
            f"the gradients of {name} cannot be differentiated again",
            user_span(),
            expected="a backward call without create_graph=True, and no transform of torch.func",
        )


def grad_dtype(b: Tensor) -> str:
    """Return the name of the dtype of a tensor's gradient, for a leaf its `grad_dtype`; empty if it gets none.

    Of others torch says none; `hostir.torch.modules.local_weight` does.
    """
    dtype = (b.grad_dtype or b.dtype) if b.is_leaf else getattr(b, "dtype_of_gradient", b.dtype)
    return str(dtype).removeprefix("torch.") if b.requires_grad else ""


def weight_gradient(x: Tensor, dy: Tensor, axis: int, dtype_name: str, linear: bool) -> Tensor:
    """Return `x^T @ dy`, or its transpose if `linear`, summed over all axes but the last.

    `axis` is the outermost one in memory. A product of half-precision operands in f32 has not been rounded before.
    """
    if torch.is_autocast_enabled(x.device.type):  # it would narrow the product, whatever its dtype is to be
        with torch.autocast(x.device.type, enabled=False):
            return weight_gradient(x, dy, axis, dtype_name, linear)
    x, dy = ((t.movedim(axis, 0) if 0 < axis < t.ndim - 1 else t).flatten(0, -2) for t in (x, dy))
    left, right = (dy.t(), x) if linear else (x.t(), dy)
    dtype = getattr(torch, dtype_name)
    if dtype == x.dtype:
        return left @ right
    if x.is_cuda and dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def weight_gradients(x: Tensor, dys: Sequence[Tensor], axis: int, dtypes: Sequence[str], linear: bool) -> list[Tensor]:
    """Return the gradients of weights with one input; those with an empty dtype are left out."""
    pairs = zip(dys, dtypes, strict=True)
    return [weight_gradient(x, dy, axis, dtype, linear) for dy, dtype in pairs if dtype]


def side_by_side(dys: Sequence[Tensor], bs: Sequence[Tensor], linear: bool) -> tuple[Tensor, Tensor]:
    """Return `dys` and the transposes of `bs`, side by side: what is multiplied for the input gradient."""
    weights = bs if linear else [b.t() for b in bs]
    return (dys[0], weights[0]) if len(dys) == 1 else (torch.cat([*dys], dim=-1), torch.cat([*weights]))


@define(AG_MM_BACKWARD)
def _all_gather_matmul_backward(
    a: Tensor,
    dys: list[Tensor],
    bs: list[Tensor],
    gather_dim: int,
    group_name: str,
    linear: bool,
    dtypes: list[str],
) -> tuple[Tensor, list[Tensor]]:
    """Both gradients of all-gather + matmul, where `a` has to be gathered once more.

    Each of the two collectives runs beside the matmul that does not need it. `dtypes` are the names of those of the
    weights' gradients, empty for those that nobody wants.
    """
    gather, scatter = (operator(f"hostir::{name}", group_name) for name in ("all_gather", "reduce_scatter"))
    gathered = gather.run(lambda: operators.start_all_gather(gather, a, gather_dim))
    part = _addend(dys, bs, gather_dim, linear)
    full = gathered()
    scattered = scatter.run(lambda: operators.start_reduce_scatter(scatter, part, gather_dim))
    d_bs = weight_gradients(full, dys, gather_dim, dtypes, linear)
    return scattered(), d_bs


def _addend(dys: list[Tensor], bs: list[Tensor], axis: int, linear: bool) -> Tensor:
    """Return what this rank adds to the gradient of the gathered input; `axis` is outermost, if not the last one."""
    dy, weight = side_by_side(dys, bs, linear)
    return dy @ weight if axis == dy.ndim - 1 else (dy.movedim(axis, 0) @ weight).movedim(0, axis)


@torch.library.register_torch_dispatch("hostir::all_gather_matmul_backward", CommDebugMode, lib=LIBRARY)
def _(mode: CommDebugMode, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    """Call each of the two collectives as an operator: CommDebugMode counts one collective for an operator."""
    a, dys, bs, axis, group, linear, dtypes = args
    ops, called = torch.ops.hostir, mode.__torch_dispatch__
    full = called(ops.all_gather.default, types, (a, axis, group))
    d_a = called(ops.reduce_scatter.default, types, (_addend(dys, bs, axis, linear), "sum", axis, group))
    return d_a, weight_gradients(full, dys, axis, dtypes, linear)


@fake("all_gather_matmul_backward")
def _(
    a: Tensor,
    dys: list[Tensor],
    bs: list[Tensor],
    gather_dim: int,
    group_name: str,
    linear: bool,
    dtypes: list[str],
) -> tuple[Tensor, list[Tensor]]:
    moved = a.movedim(gather_dim, 0)
    d_bs = [b.new_empty(b.shape, dtype=getattr(torch, name)) for b, name in zip(bs, dtypes, strict=True) if name]
    return a.new_empty(moved.shape).movedim(0, gather_dim), d_bs


def gathering(name: str, scatter: Any) -> Gradients:
    """Return backward and set-up of an all-gather + matmul, whose input gradient `scatter` computes."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # zeros for a gathered tensor that nobody uses would be scattered
        a, bs, ctx.axis, ctx.group, *rest = inputs
        full = output[0]
        ctx.gathered, ctx.linear = full is not None, rest[1:] == [True]
        ctx.dtypes = [grad_dtype(b) for b in bs]
        x = (a if full is None else full) if any(ctx.dtypes) else None
        ctx.save_for_backward(x, *[b if a.requires_grad else None for b in bs])

    def backward(ctx: Any, d_full: Tensor | None, d_products: list[Tensor | None]) -> tuple[Any, ...]:
        refuse_twice(name)
        x, *bs = ctx.saved_tensors
        used = [i for i, dy in enumerate(d_products) if dy is not None]
        dys, dtypes = [dy for dy in d_products if dy is not None], [ctx.dtypes[i] for i in used]
        d_a, d_bs = None, [None] * len(bs)
        wants_a, again = ctx.needs_input_grad[0] and used, any(dtypes) and not ctx.gathered
        if wants_a and again:
            weights = [bs[i] for i in used]
            every = x, dys, weights, ctx.axis, ctx.group, ctx.linear, dtypes
            d_a, found = call("all_gather_matmul_backward", [x, *dys, *weights], *every)
        else:
            if wants_a:
                d_a = scatter(*side_by_side(dys, [bs[i] for i in used], ctx.linear), "sum", ctx.axis, ctx.group)
            x = torch.ops.hostir.all_gather(x, ctx.axis, ctx.group) if again else x
            found = weight_gradients(x, dys, ctx.axis, dtypes, ctx.linear)
        for i in used:
            d_bs[i] = found.pop(0) if ctx.dtypes[i] else None
        if ctx.needs_input_grad[0] and d_full is not None:
            mine = torch.ops.hostir.reduce_scatter(d_full, "sum", ctx.axis, ctx.group)
            d_a = mine if d_a is None else d_a + mine
        return (d_a, d_bs, *[None] * (len(ctx.needs_input_grad) - 2))  # torch leaves defaults away

    return backward, setup


def scattering(name: str, gather: Any) -> Gradients:
    """Return backward and set-up of a matmul + reduce-scatter, whose input gradient `gather` computes."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, ctx.reduce_op, ctx.axis, ctx.group, *rest = inputs
        ctx.linear, ctx.dtype = rest == [True], grad_dtype(b)
        ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_twice(name)
        a, b = ctx.saved_tensors
        wants_a, wants_b, *_ = ctx.needs_input_grad
        if ctx.reduce_op == "avg":
            dy = dy / _get_group_size_by_name(ctx.group)
        weights = [b if ctx.linear else b.t()] if wants_a else []
        full, products = gather(dy, weights, ctx.axis, ctx.group, return_a=wants_b)
        d_b = weight_gradient(a, full, ctx.axis, ctx.dtype, ctx.linear) if wants_b else None
        return products[0] if wants_a else None, d_b, *[None] * (len(ctx.needs_input_grad) - 2)

    return backward, setup


def _gated_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    a, gate, up, ctx.axis, ctx.group, _ = inputs
    ctx.gathered, ctx.dtypes = output[1] is not None, [grad_dtype(w) for w in (gate, up)]
    ctx.save_for_backward(output[1] if ctx.gathered else a, gate, up)


def _gated_backward(ctx: Any, dy: Tensor | None, d_full: Tensor | None) -> tuple[Any, ...]:
    """The two products are computed again, from the gathered rows."""
    refuse_twice("hostir::all_gather_gated")
    x, gate, up = ctx.saved_tensors
    wants_a, *wanted = ctx.needs_input_grad[:3]
    scatter = torch.ops.hostir.reduce_scatter
    d_a = scatter(d_full, "sum", ctx.axis, ctx.group) if wants_a and d_full is not None else None
    if dy is None:
        return d_a, None, None, None, None, None
    if not ctx.gathered:
        x = torch.ops.hostir.all_gather(x, ctx.axis, ctx.group)
    g, u = x @ gate.t(), x @ up.t()
    d_u = dy * torch.nn.functional.silu(g)
    d_g = torch.ops.aten.silu_backward(dy * u, g)
    if wants_a:
        both = side_by_side([d_g, d_u], [gate, up], linear=True)
        part = _scatter(*both, "sum", ctx.axis, ctx.group)
        d_a = part if d_a is None else d_a + part
    products = zip((d_g, d_u), ctx.dtypes, wanted, strict=True)
    d_ws = [weight_gradient(x, d, ctx.axis, dtype, True) if wants else None for d, dtype, wants in products]
    return d_a, *d_ws, None, None, None


def collective(name: str, other: str) -> Gradients:
    """Return backward and set-up of an all-gather or a reduce-scatter, of which the other is the gradient."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        _, *ctx.rest = inputs

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_twice(name)
        ops = torch.ops.hostir
        if other == "reduce_scatter":
            axis, group = (0, *ctx.rest)[-2:]
            return ops.reduce_scatter(dy, "sum", axis, group), *[None] * len(ctx.rest)
        reduce_op, *where, group = ctx.rest
        dy = dy / _get_group_size_by_name(group) if reduce_op == "avg" else dy
        return ops.all_gather(dy, where[0] if where else 0, group), *[None] * len(ctx.rest)

    return backward, setup


def differentiable(name: str, formula: Gradients) -> None:
    """Give an operator of `torch.ops.hostir` gradients: backward and set-up as of `register_autograd`."""
    kernels = {key.lower(): KERNELS[name] for key in KEYS}
    RECORDS[name] = register_gradients(f"hostir::{name}", formula, LIBRARY, kernels)


def _gather(dy: Tensor, bs: list[Tensor], *args: Any, return_a: bool) -> Any:
    return call("all_gather_matmul", [dy, *bs], dy, bs, *args, return_a)


def _scatter(dy: Tensor, b: Tensor, *args: Any) -> Any:
    return call("matmul_reduce_scatter", (dy, b), dy, b, *args)


differentiable("all_gather_matmul", gathering("hostir::all_gather_matmul", _scatter))
differentiable("matmul_reduce_scatter", scattering("hostir::matmul_reduce_scatter", _gather))
differentiable("all_gather_gated", (_gated_backward, _gated_setup))
differentiable("all_gather", collective("hostir::all_gather", "reduce_scatter"))
differentiable("reduce_scatter", collective("hostir::reduce_scatter", "all_gather"))


# All-reduces ----------------------------------------------------------------------------------------------------------
# All ranks have one result, and compute one loss of it: the gradient of the result is the same on all of them, and that
# of what a rank adds to the sum is this gradient itself. So backward does not communicate.

MM_AR = "matmul_all_reduce(Tensor a, Tensor b, str group_name, bool linear=False, Tensor? addend=None) -> Tensor"
MM_AR_OUT = "matmul_all_reduce_out(Tensor a, Tensor b, str group_name, *, Tensor(a!) out, Tensor? addend=None) -> ()"
AR = "all_reduce(Tensor x, str group_name) -> Tensor"
AR_OUT = "all_reduce_out(Tensor x, str group_name, *, Tensor(a!) out) -> ()"


def check_product(a: Tensor, b: Tensor) -> None:
    """Raise ValueError in the words of torch's fused operators."""
    if a.dim() < 2:
        raise ValueError("A_shard must be a matrix")
    if b.dim() != 2:
        raise ValueError("B must be a matrix")


@define(MM_AR, SUMMED)
def _matmul_all_reduce(
    a: Tensor, b: Tensor, group_name: str, linear: bool = False, addend: Tensor | None = None
) -> Tensor:
    check_product(a, b)
    op = operator("hostir::matmul_all_reduce", group_name)
    return op.run(lambda: operators.matmul_all_reduce(op, a, b.t() if linear else b, addend))


@fake("matmul_all_reduce")
def _(a: Tensor, b: Tensor, group_name: str, linear: bool = False, addend: Tensor | None = None) -> Tensor:
    check_product(a, b)
    return a.new_empty([*a.shape[:-1], b.shape[0 if linear else 1]])


@define(MM_AR_OUT, SUMMED)
def _matmul_all_reduce_out(a: Tensor, b: Tensor, group_name: str, *, out: Tensor, addend: Tensor | None = None) -> None:
    check_product(a, b)
    op = operator("hostir::matmul_all_reduce_out", group_name)
    check_out(op.name, *(x for x in (a, b, out, addend) if x is not None))
    given = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    op.run(lambda: operators.matmul_all_reduce(op, a, b, addend, given))
    if given is not out:
        out.copy_(given)


@fake("matmul_all_reduce_out")
def _(a: Tensor, b: Tensor, group_name: str, *, out: Tensor, addend: Tensor | None = None) -> None:
    check_product(a, b)


@define(AR, SUMMED)
def _all_reduce(x: Tensor, group_name: str) -> Tensor:
    op = operator("hostir::all_reduce", group_name)
    return op.run(lambda: operators.all_reduce(op, x))


@fake("all_reduce")
def _(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


@define(AR_OUT, SUMMED)
def _all_reduce_out(x: Tensor, group_name: str, *, out: Tensor) -> None:
    op = operator("hostir::all_reduce_out", group_name)
    check_out(op.name, x, out)
    given = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    op.run(lambda: operators.all_reduce(op, x, given))
    if given is not out:
        out.copy_(given)


@fake("all_reduce_out")
def _(x: Tensor, group_name: str, *, out: Tensor) -> None:
    return None


def _summed_setup(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, _, *rest = inputs
    addend = rest[1] if len(rest) > 1 else None
    ctx.linear, ctx.dtype = rest[:1] == [True], grad_dtype(b)
    ctx.axes = 0 if addend is None else addend.ndim
    ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)


def _summed_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    refuse_twice("hostir::matmul_all_reduce")
    a, b = ctx.saved_tensors
    wants_a, wants_b, *others = ctx.needs_input_grad
    d_a = dy @ (b if ctx.linear else b.t()) if wants_a else None
    d_b = weight_gradient(a, dy, 0, ctx.dtype, ctx.linear) if wants_b else None
    rest: list[Tensor | None] = [None] * len(others)
    if len(others) > 2 and others[2]:
        rest[2] = dy if ctx.axes > 1 else dy.sum(dim=tuple(range(dy.ndim - 1)))
    return d_a, d_b, *rest


def _all_reduce_setup(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _all_reduce_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    refuse_twice("hostir::all_reduce")
    return dy.clone(), None


differentiable("matmul_all_reduce", (_summed_backward, _summed_setup))
differentiable("all_reduce", (_all_reduce_backward, _all_reduce_setup))


# Linear layers of an input that is whole on every rank ----------------------------------------------------------------
# The product is each rank's own; the gradient of the input is summed over the ranks, beside those of the weights.

LINEARS = "replicated_linear(Tensor x, Tensor[] weights, str group_name) -> Tensor[]"
LINEARS_BACKWARD = (
    "replicated_linear_backward(Tensor x, Tensor[] dys, Tensor[] weights, str group_name, str[] dtypes) "
    "-> (Tensor, Tensor[])"
)


@define(LINEARS)
def _replicated_linear(x: Tensor, weights: list[Tensor], group_name: str) -> list[Tensor]:
    return [torch.nn.functional.linear(x, w) for w in weights]


@fake("replicated_linear")
def _(x: Tensor, weights: list[Tensor], group_name: str) -> list[Tensor]:
    return [x.new_empty([*x.shape[:-1], w.shape[0]]) for w in weights]


@define(LINEARS_BACKWARD, SUMMED)
def _replicated_linear_backward(
    x: Tensor, dys: list[Tensor], weights: list[Tensor], group_name: str, dtypes: list[str]
) -> tuple[Tensor, list[Tensor]]:
    op = operator("hostir::all_reduce", group_name)
    dy, weight = side_by_side(dys, weights, linear=True)
    summed = op.run(lambda: operators.start_all_reduce(op, dy @ weight))
    d_ws = weight_gradients(x, dys, 0, dtypes, True)
    return summed(), d_ws


@fake("replicated_linear_backward")
def _(
    x: Tensor, dys: list[Tensor], weights: list[Tensor], group_name: str, dtypes: list[str]
) -> tuple[Tensor, list[Tensor]]:
    pairs = zip(weights, dtypes, strict=True)
    return x.new_empty(x.shape), [w.new_empty(w.shape, dtype=getattr(torch, dtype)) for w, dtype in pairs if dtype]


def _linears_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    x, weights, ctx.group = inputs
    ctx.single, ctx.dtypes = x.dim() == 1, [grad_dtype(w) for w in weights]
    ctx.save_for_backward(x if any(ctx.dtypes) else None, *[w if x.requires_grad else None for w in weights])


def _linears_backward(ctx: Any, d_products: list[Tensor | None]) -> tuple[Any, ...]:
    refuse_twice("hostir::replicated_linear")
    x, *weights = ctx.saved_tensors
    used = [i for i, dy in enumerate(d_products) if dy is not None]
    dys, dtypes = [dy for dy in d_products if dy is not None], [ctx.dtypes[i] for i in used]
    if ctx.single:  # as a matrix of one row
        x, dys = None if x is None else x[None], [dy[None] for dy in dys]
    d_x, d_ws = None, list[Tensor | None]([None] * len(weights))
    found: list[Tensor] = []
    if not ctx.needs_input_grad[0]:
        found = weight_gradients(x, dys, 0, dtypes, True)
    elif any(dtypes):
        mine = [weights[i] for i in used]
        d_x, found = call("replicated_linear_backward", [x, *dys, *mine], x, dys, mine, ctx.group, dtypes)
    elif used:
        both = side_by_side(dys, [weights[i] for i in used], linear=True)
        d_x = call("matmul_all_reduce", both, *both, ctx.group)
    for i in used:
        d_ws[i] = found.pop(0) if ctx.dtypes[i] else None
    return d_x[0] if d_x is not None and ctx.single else d_x, d_ws, None


differentiable("replicated_linear", (_linears_backward, _linears_setup))
