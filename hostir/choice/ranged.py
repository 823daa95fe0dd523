"""Execute a fusion with free sizes: by an executor for each way to run it, made when a call first needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hostir.choice.choices import Candidate
from hostir.choice.ranges import Ranges
from hostir.ir.op import Value
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.runtime.arguments import sizes_of
from hostir.runtime.executor import Executor, untraced
from hostir.runtime.sharding import Part, bind_sizes, torch_dtype
from hostir.runtime.started import Started


class RangedExecutor(Executor):
    """Runs a fusion with free sizes: each call by the program that is chosen for its sizes.

    Its other properties are those of the executor `current`.

    Args:
        ranges: which candidate runs at which sizes.
        rank: this process's rank among those of the fusion; None if ranks are simulated.
        execute: makes the executor of a program, with its kernels.

    Fields:
        choice: the `Ranges`.
        executors: those made so far, by candidate.
    """

    def __init__(self, ranges: Ranges, rank: int | None, execute: Callable[[Program, str], Executor]) -> None:
        self.choice = ranges
        self.executors: dict[Candidate, Executor] = {}
        self._execute = execute
        self._simulated, self._rank = rank is None, rank or 0
        largest = self._executor(ranges.candidate(ranges.largest))
        self._latest: tuple[list[int] | None, Executor] = None, largest  # with the extents of its call, at `_axes`
        if largest.session is not None:
            largest.session.members.add(self)
        self._axes = [  # of the inputs that this rank holds: axes that free sizes determine
            (i, k)
            for i, value in enumerate(ranges.plain.inputs)
            if value.tensor.mesh is None or self._rank in value.tensor.mesh.devices
            for k, size in enumerate(value.tensor.shape)
            if not size.names.isdisjoint(ranges.free)
        ]

    @property
    def current(self) -> Executor:
        """The executor of the latest call or, before the first, that of the largest sizes."""
        return self._latest[1]

    def __getattr__(self, name: str) -> Any:
        if name == "_latest":  # not yet made
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
    def graph_refusal(self) -> str | None:
        return self.current.graph_refusal

    @untraced
    def synchronize(self) -> None:
        self.current.synchronize()

    def _leave(self, reason: str) -> None:
        """Make no more executors, for which this one has kept the process group. Those that there are refuse calls."""
        current = self.current
        self._execute = lambda program, kernels: current

    def _drop_stale(self) -> None:
        """Do nothing: the plans are those of its executors."""

    def _for(self, inputs: Sequence[Any]) -> Executor:
        """Return the executor of a call."""
        latest, executor = self._latest  # at once, as other threads call too
        try:
            extents = [inputs[i].shape[k] for i, k in self._axes]
        except (AttributeError, IndexError, TypeError):  # lists of parts, and what no executor takes
            extents = None
        if extents is not None and extents == latest:
            return executor
        chosen = self._chosen(inputs, executor)
        if chosen is None:  # what comes next may have these extents, and be right
            return executor
        self._latest = extents, chosen
        return chosen

    def _chosen(self, inputs: Sequence[Any], latest: Executor) -> Executor | None:
        """Return the executor for the sizes of a call; None for inputs that have none, which any executor refuses.

        Shapes alone decide, so that a rank which refuses its inputs for another reason does so in the call that the
        others make.
        """
        plain, given = self.choice.plain, latest.sizes
        sizes: Mapping[str, int] | None
        try:
            if self._simulated:
                sizes = sizes_of(plain, inputs, given)
            else:
                shaped = [_like(x, v) for v, x in zip(plain.inputs, inputs, strict=True)]
                sizes = bind_sizes(plain, shaped, given, rank=self._rank)
        except (HostIRError, RuntimeError, ValueError):  # such as of nested tensors, or of too many
            return None
        return None if sizes is None else self._executor(self.choice.candidate(sizes))

    def _executor(self, candidate: Candidate) -> Executor:
        if candidate not in self.executors:
            self.executors[candidate] = self._execute(self.choice.program(candidate), candidate.kernels)
        return self.executors[candidate]


def _like(x: Any, value: Value) -> Any:
    """Return a tensor of the same shape, on the CPU, as an input is to be."""
    return torch.empty((), dtype=torch_dtype(value.tensor.dtype)).expand(x.shape) if isinstance(x, torch.Tensor) else x
