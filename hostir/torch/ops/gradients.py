"""Gradients of operators: record calls for autograd, and compute the gradients of weights.

`register_gradients` does the same as `torch.library.register_autograd`, and takes the same functions for set-up and
backward. In contrast to torch's function, a call executes only a fifth as much Python code, and operators may take and
return lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hostir.ir.source import error, user_span
from hostir.torch.ops.remembered import PLAIN
from hostir.torch.ops.running import MACHINES

Gradients = tuple[Callable[..., Any], Callable[..., Any]]  # the backward and set-up functions
Record = Callable[[Callable[[], Any], Sequence[Any]], Any]
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_functions, _profiled = torch._C._len_torch_function_stack, torch._C._autograd._profiler_enabled
_after_autograd = torch._C._after_autograd_keyset


def needs_autograd_only(tensors: Iterable[Tensor]) -> bool:
    """Return True if torch's dispatcher would run only autograd before the kernel.

    Returns False if there is a dispatch mode, a tensor subclass or a functorch transform.
    """
    return not _modes() and PLAIN.issuperset(map(type, tensors)) and _transforms() is None


def needs_no_dispatcher(tensors: Iterable[Tensor]) -> bool:
    """Return True if a call may skip torch's dispatcher, because the dispatcher would only run autograd.

    Skipping it saves 10 us.
    """
    if torch.compiler.is_compiling() or _functions() or _profiled():
        return False
    return needs_autograd_only(tensors)


def wants_gradients(args: Iterable[Any]) -> bool:
    """Return True if autograd would record a call with these arguments, which are tensors or lists of tensors."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


class Recording:
    """A call of an operator that autograd records.

    Fields:
        formula: the operator's backward and set-up functions.
        run: a function that computes the results.
        args: the arguments of the call.
        flat: the arguments, with lists replaced by their items.
        counts: for each argument, its length if it is a list, otherwise None.
        results: the same for each result. The call sets this field. It stays None if the result is a tensor.
        several: True if `run` returns a tuple of results. The call sets this field.
    """

    __slots__ = ("args", "counts", "flat", "formula", "results", "run", "several")

    def __init__(self, formula: Gradients, run: Callable[[], Any], args: Sequence[Any]) -> None:
        self.formula, self.run, self.args = formula, run, args
        self.flat, self.counts = flattened(args)
        self.results: list[int | None] | None = None
        self.several = False


class Recorded(torch.autograd.Function):
    """Autograd function that runs a `Recording`.

    Lists of tensors are flattened, because autograd does not look into lists.
    """

    @staticmethod
    def forward(ctx: Any, call: Recording, *flat: Any) -> Any:
        result = call.run()
        ctx.formula, setup = call.formula
        setup(ctx, call.args, result)
        ctx.inputs, ctx.outputs = call.counts, (None,)
        if type(result) is Tensor:
            return result
        call.several = isinstance(result, tuple)
        flat_results, call.results = flattened(result if call.several else (result,))
        ctx.outputs = call.results
        return tuple(flat_results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = nested(needed[1:], ctx.inputs)
        try:
            results = ctx.formula(ctx, *nested(grads, ctx.outputs))
        finally:
            ctx.needs_input_grad = needed  # restore it for another backward pass through this node
        lists = zip(results, ctx.inputs, strict=True)
        return None, *flattened([x if x is not None or n is None else [None] * n for x, n in lists])[0]


def flattened(values: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
    """Return the values as one list, in which lists are replaced by their items; and the length of each list.

    For a value that is not a list, the length is None.
    """
    flat: list[Any] = []
    counts: list[int | None] = []
    for x in values:
        if type(x) is list:
            flat += x
            counts += (len(x),)
        else:
            flat += (x,)
            counts += (None,)
    return flat, counts


def nested(flat: Sequence[Any], counts: Sequence[int | None]) -> list[Any]:
    """Undo `flattened`: return the values."""
    values, begin = list[Any](), 0
    for count in counts:
        end = begin + (1 if count is None else count)
        values += (flat[begin] if count is None else [*flat[begin:end]],)
        begin = end
    return values


def register_gradients(name: str, formula: Gradients, library: Any, kernel: Callable[..., Any]) -> Record:
    """Register an operator's gradients with torch.

    Returns a function `record(run, args)`, which makes a call that skips the dispatcher and records it for autograd.

    Args:
        name: the operator's name, with the namespace.
        formula: the backward and set-up functions, as for `torch.library.register_autograd`. An argument that the call
            leaves at its default is not passed to them.
        library: the library of the namespace. The registration ends when the library is destroyed.
        kernel: the operator's kernel on CPU and CUDA.
    """
    namespace, _, short = name.partition("::")
    overload = getattr(getattr(torch.ops, namespace), short).default
    function: Any = type(short, (Recorded,), {})  # the class's name is the name of autograd's nodes
    # `Function.apply` also looks for functorch's transforms, which `needs_no_dispatcher` has excluded, and takes 3 us.
    apply = super(torch.autograd.Function, function).apply

    def record(run: Callable[[], Any], args: Sequence[Any]) -> Any:
        call = Recording(formula, run, args)
        flat = apply(call, *call.flat)
        if call.results is None:
            return flat
        results = nested(flat, call.results)
        return tuple(results) if call.several else results[0]

    def dispatched(keys: Any, *args: Any, **options: Any) -> Any:
        if forward_ad._current_level >= 0 or (_transforms() is not None and wants_gradients(args)):
            refuse_transforms()
        tensors = [x for arg in args for x in (arg if isinstance(arg, list) else (arg,)) if isinstance(x, Tensor)]
        at_once = needs_autograd_only(tensors) and tensors[0].device.type in MACHINES

        def run() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                if at_once:
                    return kernel(*args, **options)
                return overload.redispatch(keys & _after_autograd, *args, **options)

        return record(run, args) if wants_gradients(args) else run()

    library.impl(short, dispatched, "Autograd", with_keyset=True)
    return record


def refuse_transforms() -> NoReturn:
    """Raise the HostIRError for a call in a transform of torch.func, or for a call with forward-mode gradients."""
    raise error(
        "torch.func transforms and forward-mode gradients do not go through hostir's functions",
        user_span(),
        expected="a call outside torch.vmap, torch.func.grad, forward_ad.dual_level and their like",
    )


def refuse_twice(name: str) -> None:
    """Raise HostIRError if autograd records the backward pass of operator `name`, which has no second derivatives."""
    if torch.is_grad_enabled():
        raise error(
            f"the gradients of {name} cannot be differentiated again",
            user_span(),
            expected="a backward call without create_graph=True, and no transform of torch.func",
        )


def grad_dtype(b: Tensor) -> str:
    """Return the name of the dtype that the gradient of `b` must have; an empty string if `b` requires no gradient.

    torch defines `grad_dtype` only for leaf tensors. This rank's part of a sharded weight is not a leaf. For it,
    `local_weight` in `hostir.torch.modules` stores the dtype in the attribute `dtype_of_gradient`.
    """
    dtype = (b.grad_dtype or b.dtype) if b.is_leaf else getattr(b, "dtype_of_gradient", b.dtype)
    return str(dtype).removeprefix("torch.") if b.requires_grad else ""


def weight_gradient(x: Tensor, dy: Tensor, axis: int, dtype_name: str, linear: bool) -> Tensor:
    """Return the gradient of a weight: `x^T @ dy`, or its transpose if `linear`.

    The product sums over all axes except the last axis of `x` and of `dy`.

    Args:
        x: the input of the matmul.
        dy: the gradient of its output.
        axis: the axis of `x` and `dy` that is outermost in memory.
        dtype_name: the dtype of the gradient. If it is `float32` and the operands are in half precision, the product is
            not rounded to half precision.
        linear: True for the gradient of a transposed weight, as in a linear layer.
    """
    if torch.is_autocast_enabled(x.device.type):  # autocast would round the product
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
    """Return the gradients of several weights with the same input `x`.

    `dtypes` holds the name of each gradient's dtype. Weights with an empty name are left out.
    """
    pairs = zip(dys, dtypes, strict=True)
    return [weight_gradient(x, dy, axis, dtype, linear) for dy, dtype in pairs if dtype]


def side_by_side(dys: Sequence[Tensor], bs: Sequence[Tensor], linear: bool) -> tuple[Tensor, Tensor]:
    """Return the operands of one matmul that computes the input gradient of several matmuls.

    The left operand concatenates the columns of the gradients `dys`. The right operand concatenates the rows of the
    transposes of `bs`. If `linear` is True, `bs` are already transposed.
    """
    weights = bs if linear else [b.t() for b in bs]
    return (dys[0], weights[0]) if len(dys) == 1 else (torch.cat([*dys], dim=-1), torch.cat([*weights]))
