"""Run a fusion for which `auto` chooses. There is one executor for each candidate that was chosen or tried.

Free sizes are symbols of a fusion that only the inputs of a call determine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hostir.call.arguments import sizes_of
from hostir.call.bound import untraced
from hostir.call.executor import Executor
from hostir.call.sizes import bind_sizes
from hostir.call.started import Started
from hostir.choice.choices import Candidate, Choice, Timing
from hostir.choice.ranges import Ranges, key
from hostir.choice.trials import Trial
from hostir.ir.op import Value
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.kernels.dtypes import torch_dtype
from hostir.machines.binding import Part


class TriedCall(NamedTuple):
    """A call in a range of sizes whose candidates are still being tried."""

    trial: Trial
    sizes: Mapping[str, int]


class RangedExecutor(Executor):
    """Runs a fusion for which `auto` chooses. Each call runs the program that is chosen for its sizes.

    The executor of a candidate is made when a call first needs it. In the first calls of a range of sizes, a `Trial`
    may run several candidates in turn. If this object lacks an attribute, the attribute is looked up in `current`, the
    executor of the latest call.

    Args:
        ranges: the choices for all sizes.
        rank: this process's rank among the ranks of the fusion; None if ranks are simulated.
        execute: makes an executor from a program and the name of its kernels.

    Fields:
        ranges: the choices for all sizes.
        executors: the executors made so far, by candidate.
        trials: the trials that have begun and have not ended, by the sizes that stand for their range.
    """

    def __init__(self, ranges: Ranges, rank: int | None, execute: Callable[[Program, str], Executor]) -> None:
        self.ranges = ranges
        self.executors: dict[Candidate, Executor] = {}
        self.trials: dict[str, Trial] = {}
        self._settled: set[str] = set()  # the ranges without a trial, or after it
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
    def choice(self) -> Choice | Ranges:
        """The choices for all sizes. If no size is free, the choice for the sizes that were passed to `compile`."""
        return self.ranges if self.ranges.free else self.ranges.choice(self.ranges.fixed)

    @property
    def called(self) -> tuple[Choice, ...]:
        """The choices for the ranges of sizes that calls have had so far."""
        names = self._settled | self.trials.keys()
        return tuple(choice for name, choice in self.ranges.choices.items() if name in names)

    @property
    def settled(self) -> Executor | None:
        """The executor that all later calls with the sizes of the latest call run; None while candidates are tried."""
        extents, executor = self._latest
        return executor if extents is not None else None

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
        extents, executor = self._latest  # in one read: other threads may call, too
        if extents is not None and (not extents or extents == self._extents(inputs)):
            return executor(*inputs, out=out)
        suitable = self._for(inputs)
        if not isinstance(suitable, TriedCall):
            return suitable(*inputs, out=out)
        executor, outputs = suitable.trial.call(suitable.sizes, inputs, out)
        self._latest = None, executor
        return outputs

    @untraced
    def start(self, *inputs: Any, out: Any = None) -> Started:
        suitable = self._for(inputs)
        if not isinstance(suitable, TriedCall):
            return suitable.start(*inputs, out=out)
        executor, started = suitable.trial.start(suitable.sizes, inputs, out)
        self._latest = None, executor
        return started

    @untraced
    def places(self, *inputs: Any) -> tuple[Part, ...]:
        suitable = self._for(inputs)
        if isinstance(suitable, TriedCall):
            suitable.trial.end()  # the caller is going to use memory of one candidate
            suitable = self._for(inputs)
            assert not isinstance(suitable, TriedCall)
        return suitable.places(*inputs)

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
        self.ranges.budget = 0.0  # no more trials
        self.trials.clear()

    def _drop_stale(self) -> None:
        """Do nothing, because the executors of the candidates drop their plans themselves."""

    def _renew(self) -> None:
        """Restart the trials that have not ended. The executors of the candidates drop their plans themselves."""
        for trial in self.trials.values():
            if not trial.progress.done:
                trial.restart()

    def _extents(self, inputs: Sequence[Any]) -> list[int] | None:
        """Return the extents of a call at `_axes`. Return None for lists of parts, and for inputs of a wrong type."""
        try:
            return [inputs[i].shape[k] for i, k in self._axes]
        except (AttributeError, IndexError, TypeError):
            return None

    def _for(self, inputs: Sequence[Any]) -> Executor | TriedCall:
        """Return the executor for a call with these inputs, or the trial to which the call belongs."""
        latest, executor = self._latest
        extents = self._extents(inputs)
        if extents is not None and extents == latest:
            return executor
        suitable = self._suitable(inputs, executor)
        if suitable is None:  # keep `_latest`: a later, correct call may have the same extents
            return executor
        if not isinstance(suitable, TriedCall):
            self._latest = extents, suitable
        return suitable

    def _suitable(self, inputs: Sequence[Any], latest: Executor) -> Executor | TriedCall | None:
        """Return the executor or the trial for the sizes of a call.

        Return None for inputs without valid sizes, which all executors refuse. Only shapes decide. So if one rank
        refuses its inputs for another reason, it does so in the same executor that the other ranks call.
        """
        program, fixed = self.ranges.first_program, latest.sizes
        sizes: Mapping[str, int] | None
        try:
            if self._simulated:
                sizes = sizes_of(program, inputs, fixed)
            else:
                shaped = [_with_shape_of(x, v) for v, x in zip(program.inputs, inputs, strict=True)]
                sizes = bind_sizes(program, shaped, fixed, rank=self._rank)
        except (HostIRError, RuntimeError, ValueError):  # for example nested tensors, or too many tensors
            return None
        if sizes is None:
            return None
        if (trial := self._trial(sizes)) is not None:
            return TriedCall(trial, sizes)
        return self._executor(self.ranges.candidate(sizes if self.ranges.free else self.ranges.fixed))

    def _trial(self, sizes: Mapping[str, int]) -> Trial | None:
        """Return the trial for the range of these sizes; None if there is none, or if it has ended."""
        name = key(self.ranges.representative(sizes))
        if name in self._settled:
            return None
        if name in self.trials:
            trial = self.trials[name]
            if not trial.is_over:
                return trial
        elif rivals := self.ranges.rivals(sizes):
            trial = self.trials[name] = self._begin(name, sizes, rivals)
            return trial
        self._settled.add(name)
        if (ended := self.trials.pop(name, None)) is not None:
            ended.rest()
        return None

    def _begin(self, name: str, sizes: Mapping[str, int], rivals: Sequence[Timing]) -> Trial:
        """Return a new trial for a range of sizes."""
        execute = weakref.WeakMethod(self._executor)  # so that the last reference destroys this executor at once
        title = f"@{self.ranges.fusion}{f' at {name}' if name else ''} ({self.ranges.number})"
        return Trial(title, rivals, self.ranges, dict(sizes), lambda candidate: execute()(candidate))  # type: ignore[misc]

    def _executor(self, candidate: Candidate) -> Executor:
        if candidate not in self.executors:
            self.executors[candidate] = self._execute(self.ranges.program(candidate), candidate.kernels)
        return self.executors[candidate]


def _with_shape_of(x: Any, value: Value) -> Any:
    """Return a tensor on the CPU with the shape of `x` and the dtype of the input `value`.

    If `x` is not a tensor, return `x`.
    """
    return torch.empty((), dtype=torch_dtype(value.tensor.dtype)).expand(x.shape) if isinstance(x, torch.Tensor) else x
