"""Give operators gradients: what `torch.library.register_autograd` does, with a fifth of its Python in each call.

Its set-up and backward functions serve here as well. Operators may take and return lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Callable[..., Any], Callable[..., Any]]  # backward, and what saves for it
Record = Callable[[Callable[[], Any], Sequence[Any]], Any]
PLAIN = {Tensor, torch.nn.Parameter}
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_functions, _profiled = torch._C._len_torch_function_stack, torch._C._autograd._profiler_enabled
_after_autograd = torch._C._after_autograd_keyset


def seen_by_autograd_alone(tensors: Iterable[Tensor]) -> bool:
    """Return whether of all that torch's dispatcher may call before a kernel, only autograd has to see these."""
    return not _modes() and PLAIN.issuperset(map(type, tensors)) and _transforms() is None


def needs_no_dispatcher(tensors: Iterable[Tensor]) -> bool:
    """Return whether torch's dispatcher would do nothing for these but call autograd and a kernel; it takes 10 us."""
    if torch.compiler.is_compiling() or _functions() or _profiled():
        return False
    return seen_by_autograd_alone(tensors)


def wants_gradients(args: Iterable[Any]) -> bool:
    """Return whether autograd records a call with these tensors, and lists of them."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


@dataclass(slots=True)
class Recording:
    """A call that autograd records: what runs it, and of which lengths the lists among its results are."""

    formula: Gradients
    run: Callable[[], Any]
    args: Sequence[Any]
    lengths: list[int | None] = field(default_factory=list)
    several: bool = False


class Recorded(torch.autograd.Function):
    """A node of autograd's graph, which sees the tensors in lists one by one."""

    @staticmethod
    def forward(ctx: Any, call: Recording, *flat: Any) -> tuple[Tensor | None, ...]:
        result = call.run()
        ctx.formula, setup = call.formula
        setup(ctx, call.args, result)
        call.several = isinstance(result, tuple)
        results = result if call.several else (result,)
        ctx.inputs, ctx.outputs = lengths(call.args), lengths(results)
        call.lengths = ctx.outputs
        return tuple(flattened(results))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = nested(needed[1:], ctx.inputs)
        try:
            found = ctx.formula(ctx, *nested(grads, ctx.outputs))
        finally:
            ctx.needs_input_grad = needed  # for another backward of this node
        lists = zip(found, ctx.inputs, strict=True)
        return None, *flattened([x if x is not None or n is None else [None] * n for x, n in lists])


def lengths(values: Sequence[Any]) -> list[int | None]:
    """Return the lengths of the lists among values, None for the others."""
    return [len(x) if isinstance(x, list) else None for x in values]


def flattened(values: Sequence[Any]) -> list[Any]:
    """Return values, those in lists one by one."""
    flat: list[Any] = []
    for x in values:
        flat += x if isinstance(x, list) else (x,)
    return flat


def nested(flat: Sequence[Any], counts: Sequence[int | None]) -> list[Any]:
    """Return values in lists of these lengths again."""
    left = iter(flat)
    return [next(left) if count is None else list(islice(left, count)) for count in counts]


def register_gradients(
    name: str, formula: Gradients, library: Any, kernels: Mapping[str, Callable[..., Any]]
) -> Record:
    """Give an operator gradients; return what records a call of it, for callers that need no dispatcher.

    Args:
        name: with its namespace, which begins with that of the library.
        formula: backward and set-up as for `torch.library.register_autograd`. Of arguments with defaults, they get
            those that the call has.
        library: where this is registered; it ends with it.
        kernels: of the operator, by the type of device.
    """
    namespace, _, short = name.partition("::")
    overload = getattr(getattr(torch.ops, namespace), short).default
    function: Any = type(short, (Recorded,), {})  # the name of autograd's nodes

    def record(run: Callable[[], Any], args: Sequence[Any]) -> Any:
        call = Recording(formula, run, args)
        results = nested(function.apply(call, *flattened(args)), call.lengths)
        return tuple(results) if call.several else results[0]

    def dispatched(keys: Any, *args: Any, **options: Any) -> Any:
        tensors = [x for arg in args for x in (arg if isinstance(arg, list) else (arg,)) if isinstance(x, Tensor)]
        kernel = kernels.get(tensors[0].device.type) if seen_by_autograd_alone(tensors) else None

        def run() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                if kernel is not None:
                    return kernel(*args, **options)
                return overload.redispatch(keys & _after_autograd, *args, **options)

        return record(run, args) if wants_gradients(args) else run()

    library.impl(short, dispatched, "Autograd", with_keyset=True)
    return record
