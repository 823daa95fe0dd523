"""Remember the steps of an operator's call, so that a later call with the same layouts repeats them directly.

An operator finds the executor of a fusion, makes views of its tensors as operands, and makes views of the executor's
outputs as results. All of these steps depend only on layouts and on arguments that are not tensors. If a call did
nothing else, it is remembered. A later call then makes the same views and runs the same executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from hostir.call.executor import Executor
from hostir.torch.reporting import LEDGER

PLAIN = {Tensor, torch.nn.Parameter}
SIMPLE = {int, bool, str, float, type(None)}


@dataclass(frozen=True, slots=True)
class FirstView:
    """A view that begins at the first element of a tensor.

    Fields:
        of: the position of the tensor in a list of tensors.
        layout: sizes and strides of the view; None for the tensor itself.
    """

    of: int
    layout: tuple[Sequence[int], Sequence[int]] | None

    @staticmethod
    def find(x: Tensor, tensors: Sequence[Tensor]) -> FirstView | None:
        """Return a description of `x` as a view of one of `tensors`; None if `x` is not a view of any of them.

        All `tensors` must have different addresses.
        """
        for i, y in enumerate(tensors):
            if x.data_ptr() == y.data_ptr() and x.dtype == y.dtype:
                return FirstView(i, None if x is y else (x.shape, x.stride()))
        return None


class Executed:
    """Collects what a call of an operator has executed so far.

    Fields:
        executor: the executor of the fusion; None if no executor has run yet.
        operands: the inputs of the executor.
        outputs: the outputs of the executor.
        versions: for each output, the number of in-place changes before the executor returned.
        others: True if the call cannot be repeated by running `executor` alone. For example, it ran a second executor,
            or it wrote to tensors of the caller.
    """

    __slots__ = ("executor", "operands", "others", "outputs", "versions")

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.operands: Sequence[Tensor] = ()
        self.outputs: Sequence[Tensor] = ()
        self.versions: list[int] = []
        self.others = False

    def note(self, executor: Executor, operands: Sequence[Tensor], outputs: Sequence[Tensor], *, into: bool) -> None:
        """Record that an executor has run. `into` is True if it has written to tensors of the caller."""
        self.others = self.others or into or self.executor is not None
        self.executor, self.operands, self.outputs, self.versions = executor, operands, outputs, _versions(outputs)

    @property
    def is_simple(self) -> bool:
        """True if the call ran exactly one executor, did not change the executor's outputs, and did nothing else."""
        return self.executor is not None and not self.others and self.versions == _versions(self.outputs)


class Remembered:
    """A call of an operator that later calls with the same layouts repeat. `Remembered.of` creates such an object."""

    def __init__(
        self,
        executor: Executor,
        tensors: Sequence[Tensor],
        operands: Sequence[FirstView],
        results: Sequence[Any] | FirstView,
    ) -> None:
        self.executor, self.results = executor, results
        self.settled: Executor = getattr(executor, "settled", None) or executor  # that of the chosen candidate
        self.operands = [(view.of, view.layout) for view in operands]
        # The guards of torch.compile compare types, layouts, dtypes, devices and modes in C++.
        self.fits = TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check

    @staticmethod
    def of(executed: Executed, tensors: Sequence[Tensor], result: Any) -> Remembered | None:
        """Return a record of a call that has just been made.

        Return None if the call did more than make views and run one executor.

        Args:
            executed: what the call has executed.
            tensors: all tensors among the arguments of the call.
            result: the result of the call.
        """
        executor = executed.executor
        if (
            result is None
            or executor is None
            or not executed.is_simple
            or not _apart(tensors)
            or not _apart(executed.outputs)
        ):
            return None
        operands = [FirstView.find(x, tensors) for x in executed.operands]
        views = [view for view in operands if view is not None]
        try:
            results = _template(result, executed.outputs)
        except LookupError:
            return None
        return Remembered(executor, tensors, views, results) if len(views) == len(operands) else None

    def run(self, operator: str, group: str, tensors: Sequence[Tensor]) -> Any:
        """Repeat the call with other tensors, and return the result."""
        operands = [
            tensors[i] if layout is None else tensors[i].as_strided(layout[0], layout[1]) for i, layout in self.operands
        ]
        executor = self.settled
        calls = executor.calls
        before, calls.operator = calls.operator, operator
        try:
            outputs = executor(*operands)
        finally:
            calls.operator = before
        LEDGER.by_hostir[operator, group, self.executor, executor, False] += 1
        return _filled(self.results, outputs)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of in-place changes of each tensor; 0 for inference tensors, which do not count them."""
    return [0 if x.is_inference() else x._version for x in tensors]


def _apart(tensors: Sequence[Tensor]) -> bool:
    """Return True if all tensors have elements, and no two have the same address."""
    addresses = [x.data_ptr() for x in tensors]
    return len(set(addresses)) == len(addresses) and 0 not in addresses


def _template(result: Any, outputs: Sequence[Tensor]) -> Any:
    """Return `result` with a `FirstView` in the place of each tensor.

    Each `FirstView` describes the tensor as a view of one of `outputs`. Raises LookupError if this is not possible.
    """
    if result is None:
        return None
    if isinstance(result, tuple | list):
        return type(result)(_template(x, outputs) for x in result)
    view = FirstView.find(result, outputs)
    if view is None:
        raise LookupError
    return view


def _filled(template: Any, outputs: Sequence[Tensor]) -> Any:
    """Return the template with views of `outputs` in the place of each `FirstView`."""
    if type(template) is FirstView:
        x, layout = outputs[template.of], template.layout
        return x if layout is None else x.as_strided(layout[0], layout[1])
    return type(template)([None if x is None else _filled(x, outputs) for x in template])


def key_of(
    name: tuple[str, ...], args: Sequence[Any], options: dict[str, Any]
) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
    """Return the key by which a call is remembered, and the tensors among its arguments.

    The key begins with `name`. It has the arguments, with layouts in the place of tensors. It is None for a call that
    cannot be remembered.
    """
    key: list[Any] = [*name, *options]
    tensors: list[Tensor] = []
    try:
        for x in (*args, *options.values()) if options else args:
            for item in x if type(x) is list else (x,):
                if type(item) in PLAIN:
                    tensors += (item,)  # no method call, here and below: a call with gradients takes 20 us in all
                    key += (type(item), item.shape, item.stride(), item.dtype, item.requires_grad)
                elif type(item) in SIMPLE:
                    key += (item,)
                else:
                    return None, []
            if type(x) is list:
                key += (list,)  # ends it
    except RuntimeError:  # a nested tensor has no shape
        return None, []
    return (tuple(key), tensors) if tensors else (None, [])
