"""Replace two Python functions of `torch.distributed._symmetric_memory`, which torch's fused operators call.

Libraries call these functions directly to pass their own matmul kernel in `mm_out_op`, as vLLM does with FlashInfer's
fp8 matmul. Such a call does not go through the dispatcher, so hostir replaces the functions in their module. hostir
runs a call if it knows what `mm_out_op` computes. Torch's function runs every other call.
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
from hostir.torch.ops.all_gather_matmul import gathered_products
from hostir.torch.ops.all_gather_scaled_matmul import gathered_scaled_products
from hostir.torch.ops.gradients import wants_gradients
from hostir.torch.ops.library import check_operands
from hostir.torch.ops.running import THREAD, OperatorCall, Unfit, leave_to_torch
from hostir.torch.ops.scaled_matmul_reduce_scatter import scattered_scaled_product
from hostir.torch.ops.scaled_operands import ScaledRight, check_lengths


class GatherCall(NamedTuple):
    """The arguments of a call of torch's `_fused_all_gather_matmul_impl`, in the order of its parameters."""

    mm_out_op: Callable[..., Any]
    A_shard: Tensor
    Bs: list[Tensor]
    A_scale: Tensor | None
    kwargs_list: list[dict[str, Any]]
    out_dtypes: list[torch.dtype | None]
    gather_dim: int
    group_name: str
    return_A: bool  # noqa: N815  # torch's name

    def compute(self, call: OperatorCall) -> tuple[Tensor | None, list[Tensor]]:
        """All-gather `A_shard`, and multiply it with each of `Bs`.

        Returns the gathered tensor and the products. The gathered tensor is None if `return_A` is False.

        Raises Unfit for a call that hostir cannot run.
        """
        check_lengths(self.Bs, kwargs_list=self.kwargs_list, out_dtypes=self.out_dtypes)
        scaled = _has_scales(self.mm_out_op, self.A_scale)
        for kwargs, dtype in zip(self.kwargs_list, self.out_dtypes, strict=True):
            _check_arguments(kwargs, SCALED if scaled else (), dtype)
        _check_gradients(self.A_shard, *self.Bs, self.A_scale, *[x for each in self.kwargs_list for x in each.values()])
        if self.A_scale is None:
            if any(dtype not in (None, b.dtype) for b, dtype in zip(self.Bs, self.out_dtypes, strict=True)):
                raise Unfit("its results have another dtype than its operands")
            return gathered_products(call, self.A_shard, self.Bs, self.gather_dim, self.return_A)
        rights = [_right_side(*each) for each in zip(self.Bs, self.kwargs_list, self.out_dtypes, strict=True)]
        full, _, products = gathered_scaled_products(
            call, self.A_shard, self.A_scale, rights, self.gather_dim, return_a=self.return_A
        )
        return full, products


class ScatterCall(NamedTuple):
    """The arguments of a call of torch's `_fused_scaled_matmul_reduce_scatter_impl`, in the order of its parameters."""

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

    def compute(self, call: OperatorCall) -> Tensor:
        """Multiply `A` with `B`, sum over all ranks, and return this rank's part.

        Raises Unfit for a call that hostir cannot run.
        """
        check_operands(self.A, [self.B], self.scatter_dim_after_maybe_reshape)
        if not _has_scales(self.mm_out_op, self.A_scale) or self.A_scale is None:
            raise Unfit("its product has no scales")
        _check_arguments(self.kwargs, SCALED, self.out_dtype)
        _check_gradients(self.A, self.B, self.A_scale, *self.kwargs.values())
        right, axis = _right_side(self.B, self.kwargs, self.out_dtype), self.orig_scatter_dim
        return scattered_scaled_product(call, self.A, self.A_scale, right, self.reduce_op, axis, self.output_shape)


SCALED = ("scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")  # arguments of a scaled `mm_out_op`
FLASHINFER = "vllm", "_flashinfer_scaled_mm_out"  # package and name of vLLM's function around FlashInfer's matmul


def _right_side(b: Tensor, kwargs: Mapping[str, Any], dtype: torch.dtype | None) -> ScaledRight:
    bias, result_scale = kwargs.get("bias"), kwargs.get("scale_result")
    return ScaledRight(b, kwargs["scale_b"], bias, result_scale, dtype, kwargs.get("use_fast_accum"))


def _has_scales(product: Any, scale: Tensor | None) -> bool:
    """Return True if `product`, an `mm_out_op`, multiplies scaled operands, and False if it is a plain matmul.

    Raises Unfit if hostir does not know `product`, if a scaled matmul has no `scale`, or if a plain matmul has a
    `scale`.
    """
    module, name = str(getattr(product, "__module__", "")), str(getattr(product, "__name__", product))
    scaled = product is torch.ops.aten._scaled_mm.out or (module.partition(".")[0], name) == FLASHINFER
    if not scaled and product is not torch.ops.aten.mm.out:
        raise Unfit(f"hostir does not know what its mm_out_op computes, {module}.{name}")
    if scaled != (scale is not None):
        raise Unfit(f"its mm_out_op, {name}, goes {'with' if scaled else 'without'} an A_scale")
    return scaled


def _check_arguments(kwargs: Mapping[str, Any], known: Collection[str], dtype: torch.dtype | None) -> None:
    """Raise Unfit unless hostir knows all arguments of an `mm_out_op`.

    Args:
        kwargs: the arguments that the caller passes.
        known: the names that are allowed. If `scale_b` is among them, `kwargs` must have it.
        dtype: the dtype of the results; an `out_dtype` in `kwargs` must be the same.
    """
    if unknown := sorted(kwargs.keys() - set(known)):
        raise Unfit(f"its mm_out_op is given {', '.join(unknown)}")
    if "scale_b" in known and kwargs.get("scale_b") is None:
        raise Unfit("its mm_out_op is given no scale_b")
    if kwargs.get("out_dtype") not in (None, dtype):
        raise Unfit(f"its mm_out_op returns {kwargs['out_dtype']}, and its results are {dtype}")


def _check_gradients(*operands: Any) -> None:
    """Raise Unfit if autograd would record the call: hostir does not differentiate it."""
    if wants_gradients([x for x in operands if isinstance(x, Tensor)]):
        raise Unfit("a tensor requires gradients, which it does not have")


FUNCTIONS: dict[str, type[GatherCall] | type[ScatterCall]] = {
    "_fused_all_gather_matmul_impl": GatherCall,
    "_fused_scaled_matmul_reduce_scatter_impl": ScatterCall,
}
_taken: dict[str, Any] = {}  # hostir's functions in torch's module, by name


def full_name(name: str) -> str:
    """Return the name of a torch function with its module, for reports and messages."""
    return f"{symm_mem.__name__}.{name}"


def check_signatures(strict: bool) -> list[str]:
    """Return the names of those functions in torch's module that have the parameters hostir expects.

    For any other function, warn once, or raise HostIRError if `strict`.
    """
    fitting = []
    for name, call in FUNCTIONS.items():
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
    """Replace these functions of torch's module by hostir's functions."""
    for name in names:
        _taken[name] = _replacement(name, getattr(symm_mem, name), FUNCTIONS[name])
        setattr(symm_mem, name, _taken[name])


def taken() -> tuple[str, ...]:
    """Return the full names of the functions that hostir has replaced."""
    return tuple(map(full_name, _taken))


def give_back() -> None:
    """Put torch's functions back into torch's module.

    If other code has replaced hostir's function in the meantime, that replacement stays. It may still call hostir's
    function. hostir's function then calls torch's function.
    """
    for name, replacement in _taken.items():
        if getattr(symm_mem, name) is replacement:
            setattr(symm_mem, name, replacement.__wrapped__)
    _taken.clear()


def _replacement(
    name: str, torchs: Callable[..., Any], arguments: type[GatherCall] | type[ScatterCall]
) -> Callable[..., Any]:
    @functools.wraps(torchs)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if THREAD.in_torch or name not in _taken:  # a call that hostir has left to torch, or after give_back()
            return torchs(*args, **kwargs)
        bound = arguments(*args, **kwargs)
        call = OperatorCall(full_name(name), bound.group_name)
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return bound.compute(call)
        except Unfit as unfit:
            why = str(unfit)
        return leave_to_torch(call.name, call.group.name, why, lambda: torchs(*args, **kwargs))

    return replacement
