"""Take over two Python functions of `torch.distributed._symmetric_memory` by which torch computes its fused operators.

Libraries call these functions to multiply by a kernel of their own, as vLLM does with FlashInfer's fp8 matmul. Such a
call passes by the dispatcher, so hostir replaces the functions in their module. It computes a call itself where it
knows what the caller's kernel computes; any other call goes to torch's function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from hostir.ir.source import error, user_span, warn_once
from hostir.torch import library, operators, scaled
from hostir.torch.operators import IN_TORCH, Operator, operator
from hostir.torch.programs import Unfit
from hostir.torch.recording import wants_gradients

ALL_GATHER, REDUCE_SCATTER = "_fused_all_gather_matmul_impl", "_fused_scaled_matmul_reduce_scatter_impl"

# Calls ----------------------------------------------------------------------------------------------------------------
# Fields are the parameters of torch's functions, in their order.


class GatherCall(NamedTuple):
    """A call of `_fused_all_gather_matmul_impl`."""

    mm_out_op: Callable[..., Any]
    A_shard: Tensor
    Bs: list[Tensor]
    A_scale: Tensor | None
    kwargs_list: list[dict[str, Any]]
    out_dtypes: list[torch.dtype | None]
    gather_dim: int
    group_name: str
    return_A: bool  # noqa: N815  # torch's name


class ScatterCall(NamedTuple):
    """A call of `_fused_scaled_matmul_reduce_scatter_impl`."""

    mm_out_op: Callable[..., Any]
    A: Tensor
    B: Tensor
    A_scale: Tensor | None
    kwargs: dict[str, Any]
    out_dtype: torch.dtype | None
    reduce_op: str
    orig_scatter_dim: int
    scatter_dim_after_maybe_reshape: int
    group_name: str
    output_shape: list[int]


def all_gather(op: Operator, call: GatherCall) -> tuple[Tensor | None, list[Tensor]]:
    """Gather `A_shard`, and multiply it with each of `Bs`. Raises Unfit."""
    library.check_gather(call.A_shard, call.Bs, call.gather_dim)
    scaled.check_lists(call.Bs, {"kwargs_list": call.kwargs_list, "out_dtypes": call.out_dtypes})
    with_scales = _has_scales(call.mm_out_op, call.A_scale)
    for kwargs, dtype in zip(call.kwargs_list, call.out_dtypes, strict=True):
        _check_arguments(kwargs, SCALED if with_scales else (), dtype)
    _check_gradients(call.A_shard, *call.Bs, call.A_scale, *[x for kwargs in call.kwargs_list for x in kwargs.values()])
    if call.A_scale is None:
        if any(dtype not in (None, b.dtype) for b, dtype in zip(call.Bs, call.out_dtypes, strict=True)):
            raise Unfit("its results have another dtype than its operands")
        return operators.all_gather_matmul(op, call.A_shard, call.Bs, call.gather_dim, call.return_A)
    every: dict[str, list[Any]] = {name: [kwargs.get(name) for kwargs in call.kwargs_list] for name in SCALED}
    full, _, products = scaled.all_gather_scaled_matmul(
        *(op, call.A_shard),
        bs=call.Bs,
        scale=call.A_scale,
        b_scales=every["scale_b"],
        axis=call.gather_dim,
        biases=every["bias"],
        result_scales=every["scale_result"],
        out_dtypes=call.out_dtypes,
        fast=every["use_fast_accum"],
    )
    return full if call.return_A else None, products


def reduce_scatter(op: Operator, call: ScatterCall) -> Tensor:
    """Multiply `A` with `B`, sum over all ranks, and return this rank's part. Raises Unfit."""
    library.check_scatter(call.A, call.B, call.reduce_op, call.scatter_dim_after_maybe_reshape)
    if not 0 <= call.orig_scatter_dim < len(call.output_shape):
        raise ValueError("Invalid scatter dim for 3D+ output tensor")
    if not _has_scales(call.mm_out_op, call.A_scale) or call.A_scale is None:
        raise Unfit("its product has no scales")
    _check_arguments(call.kwargs, SCALED, call.out_dtype)
    _check_gradients(call.A, call.B, call.A_scale, *call.kwargs.values())
    return scaled.scaled_matmul_reduce_scatter(
        *(op, call.A, call.B, call.A_scale, call.kwargs["scale_b"]),
        average=call.reduce_op == "avg",
        axis=call.orig_scatter_dim,
        output_shape=call.output_shape,
        bias=call.kwargs.get("bias"),
        out_dtype=call.out_dtype,
        fast=bool(call.kwargs.get("use_fast_accum")),
    )


# Products -------------------------------------------------------------------------------------------------------------

SCALED = ("scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")  # arguments of a scaled product
FLASHINFER = "vllm", "_flashinfer_scaled_mm_out"  # package and name of the function that vLLM wraps FlashInfer's in


def _has_scales(product: Any, scale: Tensor | None) -> bool:
    """Return True if a product is of scaled operands. Raises Unfit for a product that hostir does not know."""
    module, name = str(getattr(product, "__module__", "")), str(getattr(product, "__name__", product))
    known = product is torch.ops.aten._scaled_mm.out or (module.partition(".")[0], name) == FLASHINFER
    if not known and product is not torch.ops.aten.mm.out:
        raise Unfit(f"hostir does not know what its mm_out_op computes, {module}.{name}")
    if known != (scale is not None):
        raise Unfit(f"its mm_out_op, {name}, goes {'with' if known else 'without'} an A_scale")
    return known


def _check_arguments(kwargs: Mapping[str, Any], known: Collection[str], dtype: torch.dtype | None) -> None:
    """Raise Unfit for arguments of a product that hostir does not know, and for a scaled one without `scale_b`."""
    if unknown := sorted(kwargs.keys() - set(known)):
        raise Unfit(f"its mm_out_op is given {', '.join(unknown)}")
    if "scale_b" in known and kwargs.get("scale_b") is None:
        raise Unfit("its mm_out_op is given no scale_b")
    if kwargs.get("out_dtype") not in (None, dtype):
        raise Unfit(f"its mm_out_op returns {kwargs['out_dtype']}, and its results are {dtype}")


def _check_gradients(*operands: Any) -> None:
    """Raise Unfit if autograd would record the call. Torch's function then says that it has no gradients."""
    if wants_gradients([x for x in operands if isinstance(x, Tensor)]):
        raise Unfit("a tensor requires gradients, which it does not have")


# Replacement ----------------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[type[Any], Callable[..., Any]]] = {
    ALL_GATHER: (GatherCall, all_gather),
    REDUCE_SCATTER: (ScatterCall, reduce_scatter),
}
_taken: dict[str, Any] = {}  # hostir's functions in torch's module, by name


def full_name(name: str) -> str:
    """Return the name of a function with its module, as reports and messages have it."""
    return f"{symm_mem.__name__}.{name}"


def check_signatures(strict: bool) -> list[str]:
    """Return the functions that hostir can take over. Warn of any whose signature it does not know, or raise."""
    fitting = []
    for name, (call, _) in FUNCTIONS.items():
        function = getattr(symm_mem, name, None)
        parameters = None if function is None else tuple(inspect.signature(function).parameters)
        if parameters == call._fields:
            fitting.append(name)
            continue
        has = "lacks it" if parameters is None else f"has it with the parameters {', '.join(parameters)}"
        message = f"hostir does not take over {full_name(name)}: torch {torch.__version__} {has}"
        expected = f"the parameters {', '.join(call._fields)}"
        if strict:
            hint = "without strict=True, hostir.torch.install leaves it to torch"
            raise error(message, user_span(), expected=expected, hint=hint)
        warn_once((name, parameters), f"{message}; expected: {expected}.", "torch runs the calls of this function")
    return fitting


def take_over(names: Collection[str]) -> None:
    """Replace functions in torch's module."""
    for name in names:
        _taken[name] = _replacement(name, getattr(symm_mem, name), *FUNCTIONS[name])
        setattr(symm_mem, name, _taken[name])


def taken() -> tuple[str, ...]:
    """Return the names of the functions that hostir has taken over."""
    return tuple(map(full_name, _taken))


def give_back() -> None:
    """Put torch's functions back, except where somebody else has replaced hostir's: there hostir's call torch's."""
    for name, replacement in _taken.items():
        if getattr(symm_mem, name) is replacement:
            setattr(symm_mem, name, replacement.__wrapped__)
    _taken.clear()


def _replacement(
    name: str, torchs: Callable[..., Any], call_type: type[Any], compute: Callable[[Operator, Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(torchs)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if IN_TORCH.active or name not in _taken:  # also from torch's operators, which hostir left to torch
            return torchs(*args, **kwargs)
        call = call_type(*args, **kwargs)
        op = operator(full_name(name), call.group_name, lambda: torchs(*args, **kwargs))

        def below_autograd() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return compute(op, call)

        return op.run(below_autograd)

    return replacement
