"""The reference results of a program: its statements run one after another on unsharded tensors.

Here a sharded axis is a plain axis, a partial sum is the complete sum, and every communication is a copy. So the
results do not depend on ranks, streams or the order of execution. The results of all other machines can be compared
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostir.call.sizes import bind_sizes
from hostir.ir.machine import Done, Exchange, OptionalMethods, Ready, interpret
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.ir.types import DType
from hostir.kernels.aten import KERNELS
from hostir.kernels.dtypes import in_floats, torch_dtype, undefined


class Whole:
    """An unsharded tensor that is not a view."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get(self) -> torch.Tensor:
        """Return the elements of the tensor. Do not write to them: other tensors may share their memory."""
        return self.tensor

    def put(self, elements: torch.Tensor) -> None:
        """Replace the elements of the tensor."""
        self.tensor = elements


@dataclass(frozen=True)
class WholeView:
    """A view of an unsharded tensor. `part` returns a strided view of the parent, which is then reshaped to `shape`.

    The reshape is a separate step, because a piece of a sharded axis has rows from the part of every rank. No single
    strided view of the parent can have these rows in the shape `shape`.
    """

    parent: Whole | WholeView
    part: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]

    def get(self) -> torch.Tensor:
        """Return the elements of the view. Do not write to them: other tensors may share their memory."""
        return self.part(self.parent.get()).reshape(self.shape)

    def put(self, elements: torch.Tensor) -> None:
        """Replace the elements of the view, in the memory of the parent."""
        whole = self.parent.get().clone()
        part = self.part(whole)
        part.copy_(elements.reshape(part.shape))
        self.parent.put(whole)


WholeHandle = Whole | WholeView


class Reference(OptionalMethods):
    """A machine that computes on unsharded tensors, on one device.

    `dtype` is the dtype of all floating-point tensors. If it is None, they have the dtypes that the program declares.
    """

    rank: int | None = None

    def __init__(self, dtype: torch.dtype | None = torch.float64, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype
        self.device = device

    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> Whole:
        if symmetric:
            raise _no_ranks()
        element = in_floats(torch_dtype(dtype), self.dtype)
        return Whole(torch.full(shape, undefined(element), dtype=element, device=self.device))

    def free(self, x: WholeHandle) -> None:
        x.put(torch.full_like(x.get(), undefined(x.get().dtype)))

    def select(self, x: WholeHandle, axis: int, index: int) -> WholeView:
        shape = tuple(x.get().shape)
        return WholeView(x, lambda t: t.select(axis, index), (*shape[:axis], *shape[axis + 1 :]))

    def chunk(self, x: WholeHandle, axis: int, outer: int, count: int, index: int) -> WholeView:
        shape = tuple(x.get().shape)
        inner = shape[axis] // (outer * count)
        pieces = (outer, count, inner)
        return WholeView(
            x,
            lambda t: t.unflatten(axis, pieces).select(axis + 1, index),
            (*shape[:axis], outer * inner, *shape[axis + 1 :]),
        )

    def reshape(self, x: WholeHandle, shape: tuple[int, ...]) -> WholeView:
        return WholeView(x, lambda t: t, shape)

    def permute(self, x: WholeHandle, axes: tuple[int, ...]) -> WholeView:
        shape = x.get().shape
        return WholeView(x, lambda t: t.permute(axes), tuple(shape[axis] for axis in axes))

    def dense(self, x: WholeHandle) -> WholeHandle:
        return x

    def compute(
        self,
        computation: str,
        out: WholeHandle,
        operands: Sequence[WholeHandle | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        result = torch.empty_like(out.get(), memory_format=torch.contiguous_format)
        assert done is None
        assert ready is None  # there are no flags: `allocate` refuses them
        KERNELS[computation](result, *(None if x is None else x.get() for x in operands), **options)
        out.put(result)

    def communicate(self, exchange: Exchange, x: WholeHandle | None, out: WholeHandle | None) -> None:
        if x is not None and out is not None:  # always true here: an unsharded tensor is on every mesh
            out.put(x.get().reshape(out.get().shape))

    def wait(self, handle: None) -> None:
        """Do nothing: a communication has ended when `communicate` returns."""

    def current_stream(self) -> int:
        return 0

    def set_stream(self, stream: int) -> None:
        """Do nothing: there is one stream."""

    def synchronize(self, stream: int) -> None:
        """Do nothing: every statement has ended before the next one runs."""

    def copy(self, x: WholeHandle, out: WholeHandle, source: int, target: int, sms: int = 0) -> None:
        raise _no_ranks()

    def signal(self, flags: WholeHandle, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        raise _no_ranks()

    def wait_signal(self, flags: WholeHandle, slot: int, epoch: int) -> None:
        raise _no_ranks()

    def barrier(self, team: tuple[int, ...]) -> None:
        raise _no_ranks()


def _no_ranks() -> HostIRError:
    """Return the error for a statement that names ranks: the reference has no ranks."""
    return error("whole tensors have no ranks", hint="run the program on simulated or real ranks")


@torch.no_grad()
def reference(
    program: Program,
    inputs: Sequence[torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[torch.Tensor, ...]:
    """Run a fusion or a host program on unsharded inputs, and return its unsharded outputs.

    The program runs on the device of the inputs. It computes in `dtype`; None stands for the dtypes that the program
    declares. `sizes` must have a value for each symbol that does not follow from the shapes of the inputs. Raises
    HostIRError for inputs that do not fit.
    """
    bound = bind_sizes(program, inputs, sizes)
    handles = [Whole(x.to(in_floats(x.dtype, dtype))) for x in inputs]
    device = inputs[0].device if inputs else "cpu"
    outputs = interpret(program, Reference(dtype, device), bound, handles)
    return tuple(x.get().clone() for x in outputs if x is not None)
