"""Gradients of operators: record calls for autograd, and compute the gradients of weights.

`register_gradients` does the same as `torch.library.register_autograd`, and takes the same functions for set-up and
backward. In contrast to torch's function, a call executes only a fifth as much Python code, and operators may take and
return lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hostir.ir.source import error, user_span
from hostir.torch.ops.remembered import PLAIN, Remembered, Structure, flattened, flattened_result
from hostir.torch.ops.running import MACHINES

Gradients = tuple[Callable[..., Any], Callable[..., Any]]  # the backward and set-up functions
FlatCall = Callable[[], tuple[list[Any], Structure]]
Record = Callable[..., Any]
TENSOR = Structure(None, several=False)  # a tensor alone
NAMES = {x: str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}  # of dtypes
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_after_autograd = torch._C._after_autograd_keyset


def needs_autograd_only(tensors: Sequence[Tensor]) -> bool:
    """Return True if torch's dispatcher would run only autograd before the kernel of an operator.

    Returns False if there is a dispatch mode, a tensor subclass or a functorch transform, and for tensors on a device
    on which hostir has no kernels.
    """
    plain = PLAIN.issuperset(map(type, tensors)) and tensors[0].device.type in MACHINES
    return plain and not _modes() and _transforms() is None


def wants_gradients(args: Iterable[Any]) -> bool:
    """Return True if autograd would record a call with these arguments, which are tensors or lists of tensors."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


class Recording:
    """A call of an operator that autograd records.

    Fields:
        formula: the operator's backward and set-up functions.
        run: a function that returns the tensors of the result as one list, and the structure of the result.
        args: the arguments of the call.
        flat: the arguments, with lists replaced by their items.
        arguments: the structure of `args`; if it is None, the constructor finds it.
        structure: the structure of the result. The call sets this field.
    """

    __slots__ = ("args", "arguments", "flat", "formula", "run", "structure")

    def __init__(self, formula: Gradients, run: FlatCall, args: Sequence[Any], arguments: Structure | None) -> None:
        self.formula, self.run, self.args = formula, run, args
        self.arguments = flattened(args)[1] if arguments is None else arguments
        self.flat: list[Any] = []
        for x in args:
            self.flat += x if type(x) is list else (x,)
        self.structure = TENSOR


class Recorded(torch.autograd.Function):
    """Autograd function that runs a `Recording`.

    Lists of tensors are flattened, because autograd does not look into lists.
    """

    @staticmethod
    def forward(ctx: Any, call: Recording, *args: Any) -> Any:
        flat, structure = call.run()
        ctx.formula, setup = call.formula
        setup(ctx, call.args, structure.nest(flat))
        ctx.arguments, ctx.structure, call.structure = call.arguments, structure, structure
        return flat[0] if structure.counts is None else tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needed, structure = ctx.needs_input_grad, ctx.structure
        ctx.needs_input_grad = ctx.arguments.nest(needed[1:])
        try:
            nested = structure.nest(grads)
            results = ctx.formula(ctx, *nested) if structure.several else ctx.formula(ctx, nested)
        finally:
            ctx.needs_input_grad = needed  # restore it for another backward pass through this node
        flat: list[Tensor | None] = [None]
        for x, count in zip(results, ctx.arguments.counts, strict=True):
            flat += (x,) if count is None else x if x is not None else [None] * count
        return tuple(flat)


def repeat(known: Remembered, tensors: Sequence[Tensor], args: Sequence[Any], record: Record | None) -> Any:
    """Repeat a remembered call with other tensors, and return the result. Autograd records it if it needs gradients.

    Args:
        known: the remembered call.
        tensors: the tensors among the arguments.
        args: the arguments.
        record: the function that records a call of the operator for autograd; None for an operator without gradients.
    """
    if record is not None and known.gradients and torch.is_grad_enabled():
        return record(partial(known.run, tensors), args, known.arguments)
    flat, structure = known.run(tensors)
    return structure.nest(flat)


def register_gradients(operator: Any, formula: Gradients, library: Any) -> Record:
    """Register an operator's gradients with torch.

    Returns a function `record(run, args, arguments)`, which makes a call that skips the dispatcher and records it for
    autograd. The parameters are as for `Recording`.

    Args:
        operator: the operator, an `Operator`.
        formula: the backward and set-up functions, as for `torch.library.register_autograd`. An argument that the call
            leaves at its default is not passed to them.
        library: the library of the namespace. The registration ends when the library is destroyed.
    """
    overload, name = operator.packet.default, operator.short_name
    function: Any = type(name, (Recorded,), {})  # the class's name is the name of autograd's nodes
    # `Function.apply` also looks for functorch's transforms, which callers exclude, and takes 3 us.
    apply = super(torch.autograd.Function, function).apply

    def record(run: FlatCall, args: Sequence[Any], arguments: Structure | None = None) -> Any:
        call = Recording(formula, run, args, arguments)
        flat = apply(call, *call.flat)
        return flat if call.structure.counts is None else call.structure.nest(flat)

    def dispatched(keys: Any, *args: Any, **options: Any) -> Any:
        known, tensors = operator.recalled(args, options)
        if known is not None and not _modes() and forward_ad._current_level < 0:
            if known.gradients:
                return repeat(known, tensors, args, record)
            flat, structure = known.run(tensors)  # as in a compiled graph: one function call less
            return structure.nest(flat)
        if forward_ad._current_level >= 0 or (_transforms() is not None and wants_gradients(args)):
            refuse_transforms()
        at_once = needs_autograd_only(tensors_of(args))

        def run() -> Any:
            if at_once:
                return operator.kernel(*args, **options)
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keys & _after_autograd, *args, **options)

        return record(lambda: flattened_result(run()), args) if wants_gradients(args) else run()

    library.impl(name, dispatched, "Autograd", with_keyset=True)
    return record


def tensors_of(args: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments, some of which are lists."""
    return [x for arg in args for x in (arg if isinstance(arg, list) else (arg,)) if isinstance(x, Tensor)]


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
    return NAMES[dtype] if b.requires_grad else ""


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
    if 0 < axis < x.ndim - 1:
        x, dy = x.movedim(axis, 0), dy.movedim(axis, 0)
    if x.ndim > 2:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    left, right = (dy.t(), x) if linear else (x.t(), dy)
    if dtype_name == NAMES[x.dtype]:
        return left @ right
    dtype = getattr(torch, dtype_name)
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
    weights = [*bs] if linear else [b.t() for b in bs]
    if len(dys) == 1:
        return dys[0], weights[0]
    if _modes():  # torch.compile would concatenate the weights in the forward graph, and store the result
        return torch.cat([*dys], dim=-1), torch.ops.hostir.stack_rows(weights, dys[0])
    return torch.cat([*dys], dim=-1), torch.cat(weights)
