"""Run a fusion with free sizes. There is one executor for each candidate that was chosen for some sizes.

Free sizes are symbols of a fusion that only the inputs of a call determine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hostir.call.arguments import sizes_of
from hostir.call.bound import untraced
from hostir.call.executor import Executor
from hostir.call.sizes import bind_sizes
from hostir.call.started import Started
from hostir.choice.choices import Candidate
from hostir.choice.ranges import Ranges
from hostir.ir.op import Value
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.kernels.dtypes import torch_dtype
from hostir.machines.binding import Part


class RangedExecutor(Executor):
    """Runs a fusion with free sizes. Each call runs the program that is chosen for its sizes.

    The executor of a candidate is made when a call first needs it. If this object lacks an attribute, the attribute is
    looked up in `current`, the executor of the latest call.

    Args:
        ranges: the choices for all sizes.
        rank: this process's rank among the ranks of the fusion; None if ranks are simulated.
        execute: makes an executor from a program and the name of its kernels.

    Fields:
        choice: the choices for all sizes.
        executors: the executors made so far, by candidate.
    """

    def __init__(self, ranges: Ranges, rank: int | None, execute: Callable[[Program, str], Executor]) -> None:
        self.choice = ranges
        self.executors: dict[Candidate, Executor] = {}
        self._execute = execute
        self._simulated, self._rank = rank is None, rank or 0
        largest = self._executor(ranges.candidate(ranges.largest))
        self._latest: tuple[list[int] | None, Executor] = None, largest  # the call's extents at `_axes`, its executor
        if largest.session is not None:
            largest.session.members.add(self)
        self._axes = [  # (input, axis) for the axes with free sizes of the inputs that this rank holds
            (i, k)
            for i, value in enumerate(ranges.first_program.inputs)
            if value.tensor.mesh is None or self._rank in value.tensor.mesh.devices
            for k, size in enumerate(value.tensor.shape)
            if not size.names.isdisjoint(ranges.free)
        ]

    @property
    def current(self) -> Executor:
        """The executor of the latest call. Before the first call, it is the executor for the largest sizes."""
        return self._latest[1]

    def __getattr__(self, name: str) -> Any:
        if name == "_latest":  # not set yet
            raise AttributeError(name)
        return getattr(self.current, name)

    @untraced
    def __call__(self, *inputs: Any, out: Any = None) -> tuple[Any, ...]:
        return self._for(inputs)(*inputs, out=out)

    @untraced
    def start(self, *inputs: Any, out: Any = None) -> Started:
        return self._for(inputs).start(*inputs, out=out)

    @untraced
    def places(self, *inputs: Any) -> tuple[Part, ...]:
        return self._for(inputs).places(*inputs)

    @property
    def tape(self) -> str:
        return self.current.tape

    @property
    def graph_refusal(self) -> str | None:
        return self.current.graph_refusal

    @untraced
    def synchronize(self) -> None:
        self.current.synchronize()

    def _leave(self, reason: str) -> None:
        """Make no more executors, because the process group is gone. The existing executors refuse calls."""
        current = self.current
        self._execute = lambda program, kernels: current

    def _drop_stale(self) -> None:
        """Do nothing, because the executors of the candidates drop their plans themselves."""

    def _for(self, inputs: Sequence[Any]) -> Executor:
        """Return the executor of the candidate for a call with these inputs."""
        latest, executor = self._latest  # in one read: other threads may call, too
        try:
            extents = [inputs[i].shape[k] for i, k in self._axes]
        except (AttributeError, IndexError, TypeError):  # lists of parts, or inputs that every executor refuses
            extents = None
        if extents is not None and extents == latest:
            return executor
        suitable = self._suitable(inputs, executor)
        if suitable is None:  # keep `_latest`: a later, correct call may have the same extents
            return executor
        self._latest = extents, suitable
        return suitable

    def _suitable(self, inputs: Sequence[Any], latest: Executor) -> Executor | None:
        """Return the executor for the sizes of a call; None for inputs without valid sizes, which all executors refuse.

        Only shapes decide. So if one rank refuses its inputs for another reason, it does so in the same executor that
        the other ranks call.
        """
        program, fixed = self.choice.first_program, latest.sizes
        sizes: Mapping[str, int] | None
        try:
            if self._simulated:
                sizes = sizes_of(program, inputs, fixed)
            else:
                shaped = [_with_shape_of(x, v) for v, x in zip(program.inputs, inputs, strict=True)]
                sizes = bind_sizes(program, shaped, fixed, rank=self._rank)
        except (HostIRError, RuntimeError, ValueError):  # for example nested tensors, or too many tensors
            return None
        return None if sizes is None else self._executor(self.choice.candidate(sizes))

    def _executor(self, candidate: Candidate) -> Executor:
        if candidate not in self.executors:
            self.executors[candidate] = self._execute(self.choice.program(candidate), candidate.kernels)
        return self.executors[candidate]


def _with_shape_of(x: Any, value: Value) -> Any:
    """Return a tensor on the CPU with the shape of `x` and the dtype of the input `value`.

    If `x` is not a tensor, return `x`.
    """
    return torch.empty((), dtype=torch_dtype(value.tensor.dtype)).expand(x.shape) if isinstance(x, torch.Tensor) else x
