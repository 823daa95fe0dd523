"""Register operators with torch: hostir's operators, and hostir's kernels for operators of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.debug._comm_mode import NATIVE_TO_PY_MAPPING

from hostir.ir.source import error, user_span
from hostir.torch.ops.gradients import (
    Gradients,
    Record,
    needs_autograd_only,
    register_gradients,
    repeat,
    tensors_of,
    wants_gradients,
)
from hostir.torch.ops.remembered import Executed, Remembered, flattened_result, key_of
from hostir.torch.ops.running import (
    SETTINGS,
    THREAD,
    Unfit,
    group_named,
    leave_to_torch,
)

_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_profiled = torch._C._autograd._profiler_enabled
LIBRARY = torch.library.Library("hostir", "DEF")
OPERATORS: list[Operator] = []  # all operators of `torch.ops.hostir`
GATHERED, SCATTERED, SUMMED = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


class Operator:
    """An operator of `torch.ops.hostir`.

    Fields:
        name: the name with the namespace, such as `hostir::all_gather`.
        compute: the function that computes a call. It raises Unfit if hostir cannot run the call.
        record: the function that makes a call and records it for autograd. None for an operator without gradients.
        remembers: True if calls may be remembered: see `Remembered`.
    """

    record: Record | None = None
    remembers = True

    def __init__(self, name: str, compute: Callable[..., Any]) -> None:
        self.name, self.compute = name, compute
        namespace, _, self.short_name = name.partition("::")
        self.packet = getattr(getattr(torch.ops, namespace), self.short_name)

    def kernel(self, *args: Any, **options: Any) -> Any:
        """Compute a call on CPU or CUDA. If hostir cannot run it, return what `refuse` returns."""
        if THREAD.executed is not None:  # the operator that makes this call does more than this call
            THREAD.executed.others = True
        if THREAD.tracing:
            return self.computed(args, options)
        if self.group_index is None:
            key, tensors = None, list[Tensor]()
        else:
            key, tensors = key_of((self.name, SETTINGS.strategy, SETTINGS.graphs), args, options)
        if key is None or self.group_index is None:
            with torch._C._AutoDispatchBelowAutograd():
                return self.computed(args, options)
        group = group_named(args[self.group_index])
        known = next((call for call in group.remembered.get(key, ()) if call.fits(*tensors)), None)
        if known is not None:
            return repeat(known, tensors, args, None)
        before, THREAD.executed = THREAD.executed, (executed := Executed())
        try:
            with torch._C._AutoDispatchBelowAutograd():
                result = self.computed(args, options)
        finally:
            THREAD.executed = before
        group.remember(key, Remembered.of(self.name, group.name, executed, tensors, args, result))
        return result

    def recalled(self, args: Sequence[Any], options: dict[str, Any]) -> tuple[Remembered | None, list[Tensor]]:
        """Return the remembered call that a call with these arguments repeats, or None; and the tensors among them."""
        if THREAD.tracing or self.group_index is None:
            return None, []
        if THREAD.executed is not None:
            THREAD.executed.others = True
        key, tensors = key_of((self.name, SETTINGS.strategy, SETTINGS.graphs), args, options)
        if key is not None:
            for call in group_named(args[self.group_index]).remembered.get(key, ()):  # a loop makes no function calls
                if call.fits(*tensors):
                    return call, tensors
        return None, tensors

    @cached_property
    def group_index(self) -> int | None:
        """The position of the argument `group_name`; None if there is none, or if calls are not remembered."""
        if not self.remembers:
            return None
        names = [argument.name for argument in self.packet.default._schema.arguments if not argument.kwarg_only]
        return names.index("group_name") if "group_name" in names else None

    def computed(self, args: Sequence[Any], options: Any) -> Any:
        """Return the result of `compute`. If hostir cannot run the call, return the result of `refuse`."""
        try:
            return self.compute(*args, **options)
        except Unfit as unfit:
            why = str(unfit)
        return self.refuse(why, args, options)

    def refuse(self, why: str, args: Sequence[Any], options: Any) -> Any:
        """Raise HostIRError for a call that hostir cannot run."""
        raise error(f"hostir cannot run {self.name}: {why}", user_span())

    def fake(self, *args: Any, **options: Any) -> Any:
        """Return results with shapes, dtypes and strides, but without data. Tracers call this."""
        before, THREAD.tracing = THREAD.tracing, True
        try:
            return self.kernel(*args, **options)
        finally:
            THREAD.tracing = before

    def call(self, *args: Any, **options: Any) -> Any:
        """Call the operator.

        The call skips torch's dispatcher, which takes 10 us. It goes through the dispatcher if a tracer, a mode, a
        profiler or a tensor subclass needs that.
        """
        if torch.compiler.is_dynamo_compiling() or _modes() or _functions() or _profiled():
            return self.packet(*args, **options)
        known, tensors = self.recalled(args, options)
        if known is not None:
            return repeat(known, tensors, args, self.record)
        if not needs_autograd_only(tensors_of((*args, *options.values()))):
            return self.packet(*args, **options)
        if self.record is not None and wants_gradients(args):
            return self.record(lambda: flattened_result(self.kernel(*args, **options)), args)
        return self.kernel(*args, **options)

    def differentiate(self, backward: Callable[..., Any], setup: Callable[..., Any]) -> None:
        """Register gradients. `backward` and `setup` are as for `torch.library.register_autograd`."""
        self.record = register_gradients(self, (backward, setup), LIBRARY)


def define(
    schema: str, collective: str = "", fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that defines an operator of `torch.ops.hostir`.

    The decorated function is the kernel on CPU and on CUDA.

    Args:
        schema: the operator's schema, as for `torch.library.define`.
        collective: the name of the functional collective that CommDebugMode counts for each call. CommDebugMode does
            not see the communication inside the operator.
        fake: a function that returns results without data. By default, the kernel is called with `THREAD.tracing` set,
            and returns such results. For an operator that returns nothing, the default does nothing.
    """

    def register(compute: Callable[..., Any]) -> Operator:
        short_name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
        operator = Operator(f"hostir::{short_name}", compute)
        operator.remembers = bool(collective) and not schema.endswith("-> ()")
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(short_name, operator.kernel, key)
        default = _nothing if schema.endswith("-> ()") else operator.fake
        torch.library.register_fake(operator.name, fake or default, lib=LIBRARY)
        if collective:
            NATIVE_TO_PY_MAPPING[operator.packet] = getattr(torch.ops.c10d_functional, collective)
        OPERATORS.append(operator)
        return operator

    return register


def _nothing(*args: Any, **options: Any) -> None:
    pass


class TakenOver(Operator):
    """An operator of `torch.ops.symm_mem` that hostir runs after a call of `install`.

    Fields:
        torchs: for each type of device, a function that runs the calls that hostir cannot run.
        formula: the backward and set-up functions. None for an operator without gradients.
    """

    formula: Gradients | None = None

    def __init__(self, name: str, compute: Callable[..., Any], torchs: dict[str, Callable[..., Any]]) -> None:
        super().__init__(name, compute)
        self.torchs = torchs

    def refuse(self, why: str, args: Sequence[Any], options: Any) -> Any:
        """Leave a call to torch's function, and return its result. Raises HostIRError in strict mode."""
        torchs = self.torchs[args[0].device.type]
        assert self.group_index is not None
        return leave_to_torch(self.name, args[self.group_index], why, lambda: torchs(*args, **options))

    def differentiate(self, backward: Callable[..., Any], setup: Callable[..., Any]) -> None:
        self.formula = backward, setup

    def register(self, library: Any) -> None:
        """Register the kernels and the gradients in `library`, a torch library of kernels for `symm_mem`."""
        for key in ("CPU", "CUDA"):
            library.impl(self.short_name, self.kernel, key, allow_override=True)
        if self.formula is not None:
            register_gradients(self, self.formula, library)


def takes_over(
    name: str, *, cuda: Callable[..., Any], cpu: Callable[..., Any]
) -> Callable[[Callable[..., Any]], TakenOver]:
    """Return a decorator for a function that computes an operator of `torch.ops.symm_mem` after `install`.

    Args:
        name: the operator's name, without the namespace.
        cuda: torch's kernel on CUDA. It runs the calls that hostir cannot run.
        cpu: the function that runs such calls on CPU, where torch has no kernel. It uses plain collectives.
    """
    return lambda compute: TakenOver(f"symm_mem::{name}", compute, {"cuda": cuda, "cpu": cpu})


def check_operands(a: Tensor, bs: Sequence[Tensor], axis: int = 0) -> None:
    """Raise ValueError unless `a` has two axes or more and the axis `axis`, and all `bs` are matrices.

    The messages are torch's messages. They call the axis `gather_dim`, even if it is the axis of a scatter.
    """
    if a.dim() < 2:
        raise ValueError("A_shard must be a matrix")
    for b in bs:
        if b.dim() != 2:
            raise ValueError("B must be a matrix")
    if not 0 <= axis < a.dim():
        raise ValueError("Invalid gather_dim")


def check_out(name: str, *tensors: Tensor) -> None:
    """Raise HostIRError if a tensor requires gradients, because a call with `out` has no gradients.

    `name` is the name of the operator.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise error(
            f"{name} has no gradients, and a tensor requires them",
            user_span(),
            hint="leave out out=, or call under torch.no_grad()",
        )
