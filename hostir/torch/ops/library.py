"""Register operators with torch: operators of hostir, and operators of torch that hostir takes over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.debug._comm_mode import NATIVE_TO_PY_MAPPING

from hostir.ir.source import error, user_span
from hostir.torch.ops.gradients import Gradients, Record, needs_no_dispatcher, register_gradients, wants_gradients
from hostir.torch.ops.running import MACHINES, THREAD, Unfit, leave_to_torch

LIBRARY = torch.library.Library("hostir", "DEF")
OPERATORS: list[Operator] = []  # of `torch.ops.hostir`
GATHERED, SCATTERED, SUMMED = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


class Operator:
    """An operator of `torch.ops.hostir`.

    Fields:
        name: with the namespace, such as `hostir::all_gather`.
        compute: computes a call; raises Unfit if hostir cannot.
        record: records a call for autograd; None for an operator without gradients.
    """

    record: Record | None = None

    def __init__(self, name: str, compute: Callable[..., Any]) -> None:
        self.name, self.compute = name, compute
        namespace, _, self.short_name = name.partition("::")
        self.packet = getattr(getattr(torch.ops, namespace), self.short_name)

    def kernel(self, *args: Any, **options: Any) -> Any:
        """Compute a call on CPU or CUDA; where hostir cannot, `refuse` it."""
        try:
            return self.compute(*args, **options)
        except Unfit as unfit:
            why = str(unfit)
        return self.refuse(why, args, options)

    def refuse(self, why: str, args: Sequence[Any], options: Any) -> Any:
        """Raise HostIRError for a call that hostir cannot run."""
        raise error(f"hostir cannot run {self.name}: {why}", user_span())

    def fake(self, *args: Any, **options: Any) -> Any:
        """Return the results of a call without data; for tracers."""
        before, THREAD.tracing = THREAD.tracing, True
        try:
            return self.kernel(*args, **options)
        finally:
            THREAD.tracing = before

    def call(self, tensors: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        """Call the operator; `tensors` are all tensors among its arguments.

        The call skips torch's dispatcher, which takes 10 us, unless there is a tracer, a mode, a profiler or a subclass
        of tensors.
        """
        if not needs_no_dispatcher(tensors):
            return self.packet(*args, **options)

        def run() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return self.kernel(*args, **options)

        return self.record(run, args) if self.record is not None and wants_gradients(tensors) else run()

    def differentiate(self, backward: Callable[..., Any], setup: Callable[..., Any]) -> None:
        """Give the operator gradients, with functions as for `torch.library.register_autograd`."""
        self.record = register_gradients(self.name, (backward, setup), LIBRARY, self.kernel)


def define(
    schema: str, collective: str = "", fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """Define an operator of `torch.ops.hostir`. The function below computes it on CPU and CUDA.

    Args:
        schema: as for `torch.library.define`.
        collective: the functional collective of torch that the operator stands for. CommDebugMode counts a call as one
            of these, because it does not see the communication inside a kernel.
        fake: returns the results without data. By default the operator's kernel does, while `THREAD.tracing`. An
            operator that returns nothing needs none.
    """

    def register(compute: Callable[..., Any]) -> Operator:
        short_name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
        operator = Operator(f"hostir::{short_name}", compute)
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
    """An operator of `torch.ops.symm_mem` that `install` takes over.

    Fields:
        torchs: torch's functions, by the type of device. They run the calls that hostir cannot run.
        formula: backward and set-up; None for an operator without gradients.
    """

    formula: Gradients | None = None

    def __init__(self, name: str, compute: Callable[..., Any], torchs: dict[str, Callable[..., Any]]) -> None:
        super().__init__(name, compute)
        self.torchs = torchs

    @cached_property
    def group_index(self) -> int:
        """The position of `group_name` among the arguments."""
        return [argument.name for argument in self.packet.default._schema.arguments].index("group_name")

    def refuse(self, why: str, args: Sequence[Any], options: Any) -> Any:
        """Leave a call to torch's function."""
        torchs = self.torchs[args[0].device.type]
        return leave_to_torch(self.name, args[self.group_index], why, lambda: torchs(*args, **options))

    def call(self, tensors: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        """Make a call that autograd does not record. Skip the dispatcher if `needs_no_dispatcher` allows it."""
        if tensors[0].device.type not in MACHINES or not needs_no_dispatcher(tensors):
            return self.packet(*args, **options)
        with torch._C._AutoDispatchBelowAutograd():
            return self.kernel(*args, **options)

    def differentiate(self, backward: Callable[..., Any], setup: Callable[..., Any]) -> None:
        self.formula = backward, setup

    def register(self, library: Any) -> None:
        """Register the kernels, and the gradients, in a library that implements `symm_mem`."""
        for key in ("CPU", "CUDA"):
            library.impl(self.short_name, self.kernel, key, allow_override=True)
        if self.formula is not None:
            register_gradients(self.name, self.formula, library, self.kernel)


def takes_over(
    name: str, *, cuda: Callable[..., Any], cpu: Callable[..., Any]
) -> Callable[[Callable[..., Any]], TakenOver]:
    """Let the function below compute an operator of `torch.ops.symm_mem`, once `install` has taken it over.

    `cuda` and `cpu` are torch's functions. For CPU, torch has no kernel; `cpu` is the function of plain collectives
    by which torch traces the operator.
    """
    return lambda compute: TakenOver(f"symm_mem::{name}", compute, {"cuda": cuda, "cpu": cpu})


def check_operands(a: Tensor, bs: Sequence[Tensor], axis: int = 0) -> None:
    """Raise ValueError unless `a` has rows, columns and this axis, and all `bs` are matrices.

    The messages are torch's; it says `gather_dim` for the axis of a scatter, too.
    """
    if a.dim() < 2:
        raise ValueError("A_shard must be a matrix")
    for b in bs:
        if b.dim() != 2:
            raise ValueError("B must be a matrix")
    if not 0 <= axis < a.dim():
        raise ValueError("Invalid gather_dim")


def check_out(name: str, *tensors: Tensor) -> None:
    """Raise HostIRError if a tensor of a call with `out` requires gradients, which such a call does not have."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise error(
            f"{name} has no gradients, and a tensor requires them",
            user_span(),
            hint="leave out= away, or call under torch.no_grad()",
        )
