"""Functions for sharded layers. Each runs a collective together with the matmuls before or after it.

All functions have gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hostir.ir.source import check_known, described, error, user_span
from hostir.job.guest import resolved
from hostir.torch import float8
from hostir.torch.ops import all_gather_matmul as gather
from hostir.torch.ops import collectives, linear
from hostir.torch.ops import matmul_all_reduce as reduction
from hostir.torch.ops import matmul_reduce_scatter as scatter
from hostir.torch.ops import residual_norm as norms
from hostir.torch.ops.gradients import refuse_transforms
from hostir.torch.ops.running import MACHINES

_transforms = torch._C._functorch.peek_interpreter_stack
Ranks = ProcessGroup | DeviceMesh | str  # a DeviceMesh of one dimension


def name_of(group: Ranks) -> str:
    """Return the name of a process group. Raises HostIRError if `group` is not a process group."""
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    return group.group_name if isinstance(group, ProcessGroup) else resolved(group).group_name


def axis_of(x: Tensor, axis: int, what: str) -> int:
    """Return a nonnegative index for `axis`, which may be negative. Raises HostIRError if `x` has no such axis.

    `x` must have two axes or more. The message calls the argument `what`.
    """
    axes = x.ndim
    if not -axes <= axis < axes or axes < 2:
        expected = "a tensor of two axes or more, and one of them"
        raise error(f"{what}={axis} of {described(x)}", user_span(), expected=expected)
    return axis % axes


def ready(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors, cast to autocast's dtype if autocast is enabled.

    Raises HostIRError in a transform of torch.func, and for tensors on a device that hostir does not run on.
    """
    if not torch.compiler.is_dynamo_compiling() and (_transforms() is not None or forward_ad._current_level >= 0):
        refuse_transforms()
    for x in tensors:
        if x.device.type not in MACHINES:
            hint = "tensors on meta have no elements; FakeTensorMode computes shapes" if x.is_meta else ""
            raise error(f"a tensor is on {x.device}", user_span(), expected=f"one of: {', '.join(MACHINES)}", hint=hint)
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return [*tensors]
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def all_gather_matmul(
    a: Tensor,
    b: Tensor | Sequence[Tensor],
    group: Ranks,
    *,
    gather_dim: int = 0,
    return_a: bool = False,
    out: Tensor | Sequence[Tensor] | None = None,
) -> Any:
    """All-gather `a` along an axis, and multiply it with `b`: `all_gather(a) @ b`.

    The function is differentiable. The gradient of `a` is a matmul + reduce-scatter. The gradient of `b` needs the
    gathered `a`. With `return_a` the forward call saves the gathered `a`; otherwise backward gathers `a` again.

    Args:
        a: this rank's part, `[..., K]`, with the same shape on every rank.
        b: this rank's matrix, `[K, N]`, or several matrices. `a` is gathered once for all of them.
        group: the ranks: a process group of torch, its name, or a DeviceMesh of one dimension.
        gather_dim: the axis of `a` to gather along. If it is the last one, `b` has `K * ranks` rows.
        return_a: True to return the gathered `a` as well.
        out: a tensor for each product, to which the product is written. Products then have no gradients. This costs a
            copy if a tensor has other strides than a new result would have.

    Returns:
        The product, or a list of products if `b` is several matrices. With `return_a`, a pair of the gathered `a` and
        the product or the list. If `out` is None, `gather_dim` is the outermost axis in the memory of results, unless
        it is the last axis.
    """
    bs = [b] if isinstance(b, Tensor) else [*b]
    axis, name = axis_of(a, gather_dim, "gather_dim"), name_of(group)
    a, *bs = ready(a, *bs)
    if out is not None:
        products = [out] if isinstance(out, Tensor) else [*out]
        full = a.new_empty(_times(a, axis, name)) if return_a else None
        gather.all_gather_matmul_out.call(a, bs, axis, name, out=products, gathered=full)
    else:
        full, products = gather.all_gather_matmul.call(a, bs, axis, name, return_a)
    result = products[0] if isinstance(b, Tensor) else products
    return (full, result) if return_a else result


def _times(a: Tensor, axis: int, name: str) -> list[int]:
    size = torch.distributed.distributed_c10d._get_group_size_by_name(name)  # type: ignore[arg-type]
    return [n * size if k == axis else n for k, n in enumerate(a.shape)]


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, group: Ranks, *, scatter_dim: int = 0, reduce_op: str = "sum", out: Tensor | None = None
) -> Tensor:
    """Multiply, sum over the ranks, and return this rank's part along an axis: `reduce_scatter(a @ b)`.

    Sums are in f32 (in f64 for f64 operands) and are rounded once. The function is differentiable. Backward gathers the
    gradient of the result once, and computes the gradients of `a` and `b` from it.

    Args:
        a: this rank's columns, `[..., K]`, with the same shape on every rank.
        b: this rank's rows, `[K, N]`.
        group: as for `all_gather_matmul`.
        scatter_dim: the axis of the product to scatter. The number of ranks must divide its length.
        reduce_op: `sum` or `avg`.
        out: a tensor that the result is written to. The result then has no gradients.
    """
    axis, name = axis_of(a, scatter_dim, "scatter_dim"), name_of(group)
    a, b = ready(a, b)
    if out is None:
        return scatter.matmul_reduce_scatter.call(a, b, reduce_op, axis, name)
    scatter.matmul_reduce_scatter_out.call(a, b, reduce_op, axis, name, out=out)
    return out


@overload
def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    group: Ranks,
    bias: Tensor | None = None,
    *,
    gather_dim: int | None = 0,
    fp8: bool = False,
) -> Tensor: ...


@overload
def column_parallel_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    group: Ranks,
    bias: Sequence[Tensor | None] | None = None,
    *,
    gather_dim: int | None = 0,
    fp8: bool = False,
) -> list[Tensor]: ...


def column_parallel_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    group: Ranks,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    gather_dim: int | None = 0,
    fp8: bool = False,
) -> Tensor | list[Tensor]:
    """Compute a column-parallel linear layer: all-gather the tokens, and compute this rank's columns of the output.

    The function is differentiable. If a weight requires a gradient, the gathered x is saved for backward, as with
    DTensor. The gradient of a weight has the dtype `weight.grad_dtype`.

    With `fp8`, each call quantizes the rows of x and of the weights to e4m3, and computes a scale for each row. x is
    gathered and saved in e4m3. The error of an element is at most 1/16 of its value. The error of a sum of products is
    at most 1/7 of the sum of the products' absolute values. For random numbers, the error of the complete product is
    about 4 % in norm. The gradients of x and of the weights are also products in fp8, with about the same error. Those
    of the weights are computed from the x that was gathered in e4m3.

    Args:
        x: this rank's tokens, `[..., K]`; with `gather_dim=None`, all tokens.
        weight: this rank's rows of the weight, `[N/ranks, K]` as in `torch.nn.Linear`, or several weights, such as q, k
            and v. x is gathered once for all of them.
        group: as for `all_gather_matmul`.
        bias: this rank's part, `[N/ranks]`, or a list with a bias or None for each weight.
        gather_dim: the axis of the tokens. With None, x must be the same on all ranks, and nothing is gathered.
            Backward then sums the gradient of x over the ranks while it computes the gradients of the weights.
        fp8: True to multiply in fp8. x must be bf16, f16 or f32, and `gather_dim` must not be the last axis.

    Returns:
        This rank's columns for all tokens, `[..., N/ranks]`. If `weight` is several weights, a list with one tensor for
        each weight.
    """
    one = isinstance(weight, Tensor)
    weights = [weight] if isinstance(weight, Tensor) else [*weight]
    biases = [bias] if bias is None or isinstance(bias, Tensor) else [*bias]
    if bias is not None and len(biases) != len(weights):
        raise error(f"{len(biases)} biases for {len(weights)} weights", user_span(), expected="one for each weight")
    name = name_of(group)
    if gather_dim is None and fp8:
        expected = "gather_dim, the axis of this rank's tokens; or fp8=False"
        raise error("fp8 is for an input that is gathered", user_span(), expected=expected)
    axis = 0 if gather_dim is None else axis_of(x, gather_dim, "gather_dim")
    x, *weights = ready(x, *weights)
    if gather_dim is None:
        products = linear.replicated_linear.call(x, weights, name)
    elif fp8:
        products = float8.column_linear(x, weights, axis, name)
    else:
        keeps = torch.is_grad_enabled() and True in [w.requires_grad for w in weights]
        _, products = gather.all_gather_matmul.call(x, weights, axis, name, keeps, True)
    if bias is not None:
        products = [y if b is None else y + b.to(y.dtype) for y, b in zip(products, biases, strict=True)]
    return products[0] if one else products


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    group: Ranks,
    bias: Tensor | None = None,
    *,
    scatter_dim: int = 0,
    reduce: str = "scatter",
    fp8: bool = False,
) -> Tensor:
    """Compute a row-parallel linear layer: multiply this rank's columns, sum over the ranks, and scatter the tokens.

    The function is differentiable. Backward gathers the gradient of the result once, and computes the gradients of `x`
    and `weight` from it. With `reduce="all"`, every rank gets all tokens, and backward does not communicate. The
    gradient of the result must then be the same on all ranks (see `matmul_all_reduce`).

    With `fp8`, operands are quantized as in `column_parallel_linear`. x is saved in e4m3, and the gradient of the
    result is gathered in e4m3. The gradients of x and of the weight are computed from these e4m3 tensors. The ranks'
    partial sums are not quantized.

    Args:
        x: this rank's columns of all tokens, `[..., K/ranks]`.
        weight: this rank's columns of the weight, `[N, K/ranks]` as in `torch.nn.Linear`.
        group: as for `all_gather_matmul`.
        bias: a vector `[N]`, the same on all ranks. It is added once. Unless `reduce` is `all`, each rank's gradient of
            the bias sums over this rank's tokens only.
        scatter_dim: the axis of the tokens.
        reduce: `scatter` to return this rank's tokens, or `all` to return all tokens on every rank.
        fp8: True to multiply in fp8. x must be bf16, f16 or f32, `reduce` must be `scatter`, and `scatter_dim` must not
            be the last axis.

    Returns:
        This rank's tokens, `[..., N]`, or all tokens if `reduce` is `all`.
    """
    check_known("reduction", reduce, ("scatter", "all"))
    if fp8 and reduce == "all":
        raise error(
            "fp8 products are not summed on all ranks",
            user_span(),
            expected='reduce="scatter", or fp8=False with "all"',
        )
    axis, name = axis_of(x, scatter_dim, "scatter_dim"), name_of(group)
    x, weight = ready(x, weight)
    if reduce == "all":
        addends = [] if bias is None else [bias.to(x.dtype)]
        return reduction.matmul_all_reduce.call(x, weight, name, True, *addends)
    if fp8:
        y = float8.row_linear(x, weight, axis, name)
    else:
        y = scatter.matmul_reduce_scatter.call(x, weight, "sum", axis, name, True)
    return y if bias is None else y + bias.to(y.dtype)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor, group: Ranks, *, gather_dim: int = 0) -> Tensor:
    """Compute the first half of a gated MLP: all-gather the tokens, and return `silu(x @ gate^T) * (x @ up^T)`.

    The function is differentiable. The gathered x is saved if a weight requires a gradient. Backward computes the two
    products again.

    Args:
        x: this rank's tokens, `[..., K]`.
        gate, up: this rank's rows of the weights, `[N/ranks, K]`.
        group: as for `all_gather_matmul`.
        gather_dim: the axis of the tokens. If it is the last axis, the weights have `K * ranks` columns.
    """
    axis, name = axis_of(x, gather_dim, "gather_dim"), name_of(group)
    x, gate, up = ready(x, gate, up)
    keeps = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    y, _ = linear.all_gather_gated.call(x, gate, up, axis, name, keeps)
    return y


def matmul_all_reduce(
    a: Tensor, b: Tensor, group: Ranks, *, addend: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply, sum over the ranks, and add `addend`: `all_reduce(a @ b) + addend`, the same on every rank.

    Sums are in f32 (in f64 for f64 operands) and are rounded once. The function is differentiable. If `dy` is the
    gradient of the result, then the gradient of `a` is `dy @ b^T`, and the gradient of `b` is `a^T @ dy`. Backward does
    not communicate, so `dy` must be the same on all ranks. This is the case if all ranks compute the same loss from the
    result.

    Args:
        a: this rank's columns, `[..., K/ranks]`. Every rank has the same number of rows.
        b: this rank's rows, `[K/ranks, N]`.
        group: as for `all_gather_matmul`.
        addend: a bias, `[N]`, or a tensor with the shape of the result. It is the same on every rank and is added once.
        out: a tensor that the result is written to. The result then has no gradients.
    """
    name = name_of(group)
    a, b, *rest = ready(a, b, *([] if addend is None else [addend]))
    if out is None:
        return reduction.matmul_all_reduce.call(a, b, name, False, *rest)
    reduction.matmul_all_reduce_out.call(a, b, name, out=out, addend=rest[0] if rest else None)
    return out


def all_reduce(x: Tensor, group: Ranks, *, out: Tensor | None = None) -> Tensor:
    """All-reduce: return the sum of `x` over the ranks, on every rank.

    Sums are in f32 (in f64 for f64 operands) and are rounded once. The function is differentiable. The gradient of `x`
    is the gradient of the result. Backward does not communicate, so this gradient must be the same on all ranks, as for
    `matmul_all_reduce`.

    Args:
        x: this rank's addend, with the same shape on every rank.
        group: as for `all_gather_matmul`.
        out: a tensor that the result is written to. The result then has no gradients.
    """
    name = name_of(group)
    (x,) = ready(x)
    if out is None:
        return collectives.all_reduce.call(x, name)
    collectives.all_reduce_out.call(x, name, out=out)
    return out


@overload
def all_reduce_residual_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    group: Ranks,
    *,
    eps: float = 1e-6,
    quantize: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def all_reduce_residual_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, group: Ranks, *, eps: float = 1e-6, quantize: bool
) -> tuple[Tensor, ...]: ...


def all_reduce_residual_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, group: Ranks, *, eps: float = 1e-6, quantize: bool = False
) -> tuple[Tensor, ...]:
    """All-reduce `x`, add the residual, and compute the RMS norm of the rows: `rms_norm(all_reduce(x) + residual)`.

    For few rows on CUDA, one kernel computes all of this. The sum is in f32 (in f64 for f64 operands). The sum, the sum
    with the residual, and the norm are each rounded once, as by separate functions. All ranks get the same bits.

    The function is differentiable without `quantize`. Backward does not communicate, so the gradients of the results
    must be the same on all ranks, as for `matmul_all_reduce`.

    Args:
        x: this rank's addend, `[..., N]`, with the same shape on every rank.
        residual: the tensor to add, with the shape of `x`, the same on every rank.
        weight: the factors of the columns, `[N]`, the same on every rank; None if they are 1.
        group: as for `all_gather_matmul`.
        eps: is added to the mean of the squares of a row.
        quantize: True to quantize the normalized rows to e4m3, with a scale for each row: the largest absolute value of
            the row, divided by 448. The results then have no gradients.

    Returns:
        The normalized rows, and the sum with the residual, which is the next residual. With `quantize`, the quantized
        rows, their scales in f32, `[..., 1]`, and the sum with the residual.
    """
    name = name_of(group)
    x, residual, *rest = ready(x, residual, *([] if weight is None else [weight]))
    factors = rest[0] if rest else None
    return tuple(norms.all_reduce_residual_norm.call(x, residual, factors, float(eps), quantize, name))


@overload
def reduce_scatter_residual_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    group: Ranks,
    *,
    scatter_dim: int = 0,
    eps: float = 1e-6,
    quantize: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def reduce_scatter_residual_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    group: Ranks,
    *,
    scatter_dim: int = 0,
    eps: float = 1e-6,
    quantize: bool,
) -> tuple[Tensor, ...]: ...


def reduce_scatter_residual_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    group: Ranks,
    *,
    scatter_dim: int = 0,
    eps: float = 1e-6,
    quantize: bool = False,
) -> tuple[Tensor, ...]:
    """Reduce-scatter `x`, add the residual, and compute the RMS norm: `rms_norm(reduce_scatter(x) + residual)`.

    It computes and rounds as `all_reduce_residual_norm` does. The function is differentiable without `quantize`.
    Backward gathers the gradient of the sum.

    Args:
        x: this rank's addend, `[..., N]`, with the same shape on every rank.
        residual: this rank's part of the tensor to add.
        weight: the factors of the columns, `[N]`, the same on every rank; None if they are 1. Each rank's gradient of
            the weight sums over this rank's rows only.
        group: as for `all_gather_matmul`.
        scatter_dim: the axis to scatter, not the last one. The number of ranks must divide its length. It is the
            outermost axis in the memory of the results.
        eps: is added to the mean of the squares of a row.
        quantize: as for `all_reduce_residual_norm`.

    Returns:
        This rank's part of what `all_reduce_residual_norm` returns.
    """
    axis, name = axis_of(x, scatter_dim, "scatter_dim"), name_of(group)
    x, residual, *rest = ready(x, residual, *([] if weight is None else [weight]))
    factors, settings = rest[0] if rest else None, (float(eps), quantize, axis, name)
    return tuple(norms.reduce_scatter_residual_norm.call(x, residual, factors, *settings))
