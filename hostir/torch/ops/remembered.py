"""Remember the steps of an operator's call, so that a later call with the same layouts repeats them directly.

An operator finds the executor of a fusion, makes views of its tensors as operands, and makes views of the executor's
outputs as results. All of these steps depend only on layouts and on arguments that are not tensors. If a call did
nothing else, it is remembered. A later call then makes the same views and runs the same executor. On one rank, an
output may be an input, and the operator copies it; later calls make the same copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from hostir.call.executor import Executor
from hostir.torch.reporting import LEDGER

PLAIN = {Tensor, torch.nn.Parameter}
SIMPLE = {int, bool, str, float, type(None)}


class Structure(NamedTuple):
    """The structure of a value that is a tensor, a list, or a tuple of tensors, lists and other objects.

    Fields:
        counts: for each element of the tuple, its length if it is a list, else None. For a list alone, its length; None
            for a tensor alone.
        several: True for a tuple.
    """

    counts: Sequence[int | None] | None
    several: bool = True

    def nest(self, flat: Sequence[Any]) -> Any:
        """Return the value from its elements, in which lists are flattened."""
        if self.counts is None:
            return flat[0]
        values: tuple[Any, ...] = ()
        begin = 0
        for count in self.counts:
            end = begin + (1 if count is None else count)
            values += (flat[begin] if count is None else [*flat[begin:end]],)
            begin = end
        return values if self.several else values[0]


def flattened(values: Sequence[Any]) -> tuple[list[Any], Structure]:
    """Return the elements of a tuple as one list, in which lists are replaced by their items; and the structure."""
    flat: list[Any] = []
    counts: tuple[int | None, ...] = ()
    for x in values:
        if type(x) is list:
            flat += x
            counts += (len(x),)
        else:
            flat += (x,)
            counts += (None,)
    return flat, Structure(counts)


def flattened_result(result: Any) -> tuple[list[Any], Structure]:
    """Return the tensors of an operator's result as one list, and the structure of the result."""
    if isinstance(result, tuple):
        return flattened(result)
    flat, structure = flattened((result,))
    return flat, Structure(structure.counts if type(result) is list else None, several=False)


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
        outputs: the outputs of the executor, and then copies of some of them.
        copied: for each of these copies, the position of the copied output.
        versions: for each element of `outputs`, the number of in-place changes before it was noted.
        others: True if the call cannot be repeated by running `executor` and copying outputs. For example, it ran a
            second executor, or it wrote to tensors of the caller.
    """

    __slots__ = ("copied", "executor", "operands", "others", "outputs", "versions")

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.operands: Sequence[Tensor] = ()
        self.outputs: list[Tensor] = []
        self.copied: list[int] = []
        self.versions: list[int] = []
        self.others = False

    def note(self, executor: Executor, operands: Sequence[Tensor], outputs: Sequence[Tensor], *, into: bool) -> None:
        """Record that an executor has run. `into` is True if it has written to tensors of the caller."""
        self.others = self.others or into or self.executor is not None
        self.executor, self.operands, self.outputs, self.versions = executor, operands, [*outputs], _versions(outputs)

    def note_copy(self, of: Tensor, copy: Tensor) -> None:
        """Record that the output `of` of the executor was copied to contiguous memory."""
        places = [i for i, x in enumerate(self.outputs[: len(self.outputs) - len(self.copied)]) if x is of]
        self.others = self.others or not places
        self.copied += places[:1]
        self.outputs.append(copy)
        self.versions += _versions([copy])

    @property
    def is_simple(self) -> bool:
        """True if the call ran exactly one executor, did not change the executor's outputs, and did nothing else."""
        return self.executor is not None and not self.others and self.versions == _versions(self.outputs)


class Remembered:
    """A call of an operator that later calls with the same layouts repeat. `Remembered.of` creates such an object.

    Args:
        name: the name of the operator.
        group: the name of the process group.
        executed: what the call has executed.
        tensors: the tensors among the arguments of the call.
        arguments: the structure of the arguments.
        operands: each operand of the executor, as a view of one of `tensors`.
        results: each tensor of the result, as a view of one of `executed.outputs`; None in the place of a None.
        structure: the structure of the result.

    Fields:
        fits: a function that returns True for tensors of the same layouts, in the same modes of torch.
        gradients: True if a tensor requires gradients. The tensors of all calls that fit are alike in this.
    """

    def __init__(
        self,
        name: str,
        group: str,
        executed: Executed,
        tensors: Sequence[Tensor],
        arguments: Structure,
        operands: Sequence[FirstView],
        results: Sequence[FirstView | None],
        structure: Structure,
    ) -> None:
        assert executed.executor is not None
        self.operator, self.copied, self.arguments, self.structure = name, executed.copied, arguments, structure
        self.settled: Executor = getattr(executed.executor, "settled", None) or executed.executor
        self.row = name, group, executed.executor, self.settled, False  # of the report
        self.operands = [(view.of, view.layout) for view in operands]
        self.results = [(-1, None) if view is None else (view.of, view.layout) for view in results]  # -1 for None
        self.gradients = any(x.requires_grad for x in tensors)
        # The guards of torch.compile compare types, layouts, dtypes, devices and modes in C++.
        self.fits = TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check

    @staticmethod
    def of(
        name: str, group: str, executed: Executed, tensors: Sequence[Tensor], args: Sequence[Any], result: Any
    ) -> Remembered | None:
        """Return a record of a call that has just been made, or None.

        It is None if the call did more than make views, run one executor and copy some of its outputs.

        Args:
            name, group, executed, tensors: as for the class.
            args: the arguments of the call.
            result: the result of the call.
        """
        if result is None or not executed.is_simple or not _apart(tensors) or not _apart(executed.outputs):
            return None
        flat, structure = flattened_result(result)
        operands = [FirstView.find(x, tensors) for x in executed.operands]
        results = [None if x is None else FirstView.find(x, executed.outputs) for x in flat]
        views = [view for view in operands if view is not None]
        if len(views) < len(operands) or [x is None for x in flat] != [view is None for view in results]:
            return None
        return Remembered(name, group, executed, tensors, flattened(args)[1], views, results, structure)

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], Structure]:
        """Repeat the call with other tensors. Return the tensors of the result as one list, and its structure."""
        executor = self.settled
        operands: list[Tensor] = []
        flat: list[Tensor | None] = []
        calls = executor.calls
        before, calls.operator = calls.operator, self.operator
        try:
            with torch._C._AutoDispatchBelowAutograd():
                for i, layout in self.operands:  # loops, as a comprehension would be a function call
                    operands += (tensors[i] if layout is None else tensors[i].as_strided(*layout),)
                outputs = executor(*operands)
                for i in self.copied:
                    outputs += (outputs[i].clone(memory_format=torch.contiguous_format),)
                for i, layout in self.results:
                    flat += (None if i < 0 else outputs[i] if layout is None else outputs[i].as_strided(*layout),)
        finally:
            calls.operator = before
        LEDGER.by_hostir[self.row] += 1
        return flat, self.structure


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of in-place changes of each tensor; 0 for inference tensors, which do not count them."""
    return [0 if x.is_inference() else x._version for x in tensors]


def _apart(tensors: Sequence[Tensor]) -> bool:
    """Return True if all tensors have elements, and no two have the same address."""
    addresses = [x.data_ptr() for x in tensors]
    return len(set(addresses)) == len(addresses) and 0 not in addresses


def key_of(
    name: tuple[Any, ...], args: Sequence[Any], options: dict[str, Any]
) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
    """Return the key by which a call is remembered, and the tensors among its arguments.

    The key begins with `name`. It has the arguments, with shapes in the place of tensors. It is None for a call that
    cannot be remembered.
    """
    key: list[Any] = [*name, *options]
    tensors: list[Tensor] = []
    try:
        for x in (*args, *options.values()) if options else args:
            for item in x if type(x) is list else (x,):
                if type(item) in PLAIN:
                    tensors += (item,)  # no method call, here and below: a call with gradients takes 20 us in all
                    key += (item.shape,)
                elif type(item) in SIMPLE:
                    key += (item,)
                else:
                    return None, []
            if type(x) is list:
                key += (list,)  # ends it
    except RuntimeError:  # a nested tensor has no shape
        return None, []
    return (tuple(key), tensors) if tensors else (None, [])
