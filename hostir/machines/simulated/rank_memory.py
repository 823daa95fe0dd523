"""Memory of one simulated rank: allocations, symmetric buffers, and checks for overlapping or freed memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hostir.ir.source import HostIRError, error
from hostir.ir.types import DType
from hostir.kernels.dtypes import in_floats, torch_dtype
from hostir.machines.simulated.issuing import Issuer
from hostir.machines.simulated.memory import SimulatedMemory, make_undefined, storage_of
from hostir.machines.simulated.onesided import SymmetricBuffers
from hostir.machines.simulated.tasks import FlagGate, Task


class RankMemory:
    """The memory of one rank.

    `dtype` is the dtype of all buffers of floating-point numbers; None stands for the dtypes that the program declares.
    """

    def __init__(
        self, issuer: Issuer, memory: SimulatedMemory, symmetric: SymmetricBuffers, dtype: torch.dtype | None
    ) -> None:
        self.issuer = issuer
        self.memory = memory
        self.symmetric = symmetric
        self.dtype = dtype

    def new(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.memory.new(name, self.issuer.rank, shape, dtype)

    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool) -> torch.Tensor:
        issuer, name = self.issuer, self.issuer.defined_name
        element = in_floats(torch_dtype(dtype), self.dtype)
        if not symmetric:
            fresh = self.new(name, shape, element)
            self.hand_out(fresh)
            return fresh
        buffer = self.symmetric.allocate((name, issuer.rounds), issuer.rank, shape, element)
        if buffer is None:
            raise issuer.fail(
                f"%{name} was allocated before with another shape or dtype", expected="one shape and dtype"
            )
        return buffer

    def hand_out(self, buffer: torch.Tensor) -> None:
        """Add a task to the current stream that makes new memory undefined.

        Before the stream reaches this task, the previous owner of the memory may still use it.
        """
        stream = self.issuer.current
        task = self.issuer.task(partial(make_undefined, buffer), undefines=(buffer,))
        task.follow(stream.pushing[:1] or stream.tail)
        stream.tail = [*stream.tail, task] if stream.pushing else [task]
        stream.pushing[:1] = [task] if stream.pushing else []

    def free(self, x: torch.Tensor) -> None:
        contents = x.new_empty(0).set_(x.untyped_storage())
        span = self.issuer.statement.span if self.issuer.statement else None
        self.issuer.issue(partial(self.memory.free, storage_of(x), span), writes=(contents,))

    def at(self, view: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the view of rank `rank`'s buffer that corresponds to `view`.

        Raises HostIRError if `view` is not symmetric memory.
        """
        remote = self.symmetric.at(view, rank)
        if remote is None:
            name = self.memory.owners[storage_of(view)][0]
            raise self.issuer.fail(f"%{name} is not symmetric", expected="a view of a buffer from allocate_symmetric")
        return remote

    def flag(self, flags: torch.Tensor, slot: int) -> FlagGate:
        """Return this rank's flag at index `slot` of `flags`."""
        return self.symmetric.flag(self.at(flags, self.issuer.rank), slot)

    def refuse_overlap(self, out: torch.Tensor, reads: Sequence[torch.Tensor]) -> None:
        """Raise HostIRError if the current statement writes memory that it also reads, unless it may work in place.

        The statement writes `out`, and reads the tensors `reads`.
        """
        s = self.issuer.statement
        for n, x in enumerate(reads):
            same = x.data_ptr() == out.data_ptr() and x.shape == out.shape and _steps(x) == _steps(out)
            if self.memory.overlap(x, out) and not (same and s is not None and s.in_place(n)):
                raise self.issuer.fail("it writes memory that it reads", hint="allocate a buffer for the result")

    def used_after_free(self, task: Task) -> HostIRError:
        """Return the error for a task that accesses freed memory."""
        ended = [self.memory.freed[storage] for storage in task.memory if storage in self.memory.freed]
        span, where = self.issuer.where(task)
        if task.statement is None:
            return error(
                f"{where}: its memory was freed before the outputs were read",
                ended[0],
                expected="no output to look at what is freed",
            )
        return error(
            f"{where}: its memory was freed before it ran",
            span,
            expected="the free to follow all uses, and streams that use it to be joined first",
            notes=((ended[0], "freed here"),),
        )


def _steps(x: torch.Tensor) -> list[int]:
    """Return the strides of the axes that are longer than 1."""
    return [stride for extent, stride in zip(x.shape, x.stride(), strict=True) if extent != 1]
