"""Run a fusion for which `auto` chooses. There is one executor for each candidate that was chosen or tried.

Free sizes are symbols of a fusion that only the inputs of a call determine.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hostir.call.arguments import sizes_of
from hostir.call.bound import untraced
from hostir.call.executor import Executor
from hostir.call.rank import RankExecutor
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
from hostir.plan.unroll import message_teams_of


class RangedExecutor(Executor):
    """Runs a fusion for which `auto` chooses. Each call runs the program that is chosen for its sizes.

    The executor of a candidate is made when a call first needs it. Before the first call of a range of sizes, a `Trial`
    may run several candidates. This holds for plain calls and for calls that are started asynchronously. A started call
    runs the candidate that is the fastest in the trial.

    Calls that the caller captures in a CUDA graph may run another candidate, because the host's time does not count in
    a replay. It is the field `captured` of the choice. Times and sizes determine it, so it is the same on all ranks.
    Each plan for plain calls then gets a second plan, which captures issue: see `CudaPlan.for_captures`.

    If this object lacks an attribute, the attribute is looked up in `current`, the executor of the latest call.

    Args:
        ranges: the choices for all sizes.
        rank: this process's rank among the ranks of the fusion; None if ranks are simulated.
        execute: makes an executor from a program and the name of its kernels.

    Fields:
        ranges: the choices for all sizes.
        executors: the executors made so far, by candidate.
    """

    def __init__(self, ranges: Ranges, rank: int | None, execute: Callable[[Program, str], Executor]) -> None:
        self.ranges = ranges
        self.executors: dict[Candidate, Executor] = {}
        self._settled: set[str] = set()  # the ranges without a trial, or after it
        self._trying: threading.Thread | None = None  # the thread that tries candidates now
        self._execute = execute
        self._simulated, self._rank = rank is None, rank or 0
        largest = self._executor(ranges.candidate(ranges.largest))
        self._latest: tuple[list[int] | None, Executor] = None, largest  # the call's extents at `_axes`, its executor
        self._first = largest  # a trial holds the lock of its calls
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
        return self.ranges if self.ranges.free else self._with_note(self.ranges.choice(self.ranges.fixed))

    @property
    def called(self) -> tuple[Choice, ...]:
        """The choices for the ranges of sizes that calls have had so far."""
        return tuple(self._with_note(choice) for name, choice in self.ranges.choices.items() if name in self._settled)

    @property
    def settled(self) -> Executor | None:
        """The executor that all later calls with the sizes of the latest call run; None before the first call."""
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
        return self._for(inputs, out)(*inputs, out=out)

    @untraced
    def start(self, *inputs: Any, out: Any = None) -> Started:
        # A trial times plain calls of the candidates, also for started calls: what these overlap has no fixed length.
        return self._for(inputs, out).start(*inputs, out=out)

    @untraced
    def places(self, *inputs: Any) -> tuple[Part, ...]:
        # There is nothing to time: the inputs may have no values yet. The first call tries the candidates.
        return self._for(inputs, None, tries=False).places(*inputs)

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

    def _drop_stale(self) -> None:
        """Do nothing, because the executors of the candidates drop their plans themselves."""

    def _renew(self) -> None:
        """Do nothing, because the executors of the candidates drop their plans themselves."""

    def _extents(self, inputs: Sequence[Any]) -> list[int] | None:
        """Return the extents of a call at `_axes`. Return None for lists of parts, and for inputs of a wrong type."""
        try:
            return [inputs[i].shape[k] for i, k in self._axes]
        except (AttributeError, IndexError, TypeError):
            return None

    def _for(self, inputs: Sequence[Any], out: Any, tries: bool = True) -> Executor:
        """Return the executor for a call with these inputs. If it is the first in its range, try candidates before.

        If `tries` is False, or in a capture, leave that to a later call, and return the executor of the best candidate
        known so far.
        """
        latest, executor = self._latest
        extents = self._extents(inputs)
        if extents is not None and extents == latest:
            return executor
        sizes = self._sizes(inputs, executor)
        if sizes is None:  # keep `_latest`: a later, correct call may have the same extents
            return executor
        name, known = key(self.ranges.representative(sizes)), sizes if self.ranges.free else self.ranges.fixed
        if name not in self._settled:
            rivals = self.ranges.rivals(sizes)
            if rivals and (not tries or self._captures()):
                best = self._executor(self.ranges.candidate(known))
                self._latest = (None, best) if tries else self._latest
                return best
            if rivals:
                self._try(name, sizes, rivals, inputs, out)
            self._settled.add(name)
        suitable = self._executor(self.ranges.candidate(known))
        self._latest = extents, suitable
        return suitable

    def _captures(self) -> bool:
        """Return True while the caller captures a CUDA graph. Nothing can be timed then."""
        return self._first.machine == "cuda" and torch.cuda.is_current_stream_capturing()

    def _sizes(self, inputs: Sequence[Any], latest: Executor) -> Mapping[str, int] | None:
        """Return the sizes of a call. `latest` is the executor of the latest call.

        Return None for inputs without valid sizes, which all executors refuse. Only shapes decide. So if one rank
        refuses its inputs for another reason, it does so in the same executor that the other ranks call.
        """
        program, fixed = self.ranges.first_program, latest.sizes
        try:
            if self._simulated:
                return sizes_of(program, inputs, fixed)
            shaped = [_with_shape_of(x, v) for v, x in zip(program.inputs, inputs, strict=True)]
            return bind_sizes(program, shaped, fixed, rank=self._rank)
        except (HostIRError, RuntimeError, ValueError):  # for example nested tensors, or too many tensors
            return None

    def _try(
        self, name: str, sizes: Mapping[str, int], rivals: Sequence[Timing], inputs: Sequence[Any], out: Any
    ) -> None:
        """Try the candidates for a range of sizes, unless another thread of a rank alone has just done this."""
        if (other := self._trying) is not None:
            self.current.calls.refuse_overlap(self.ranges.fusion, other)
        with self._first.calls.lock:
            if name in self._settled:
                return
            self._trying = threading.current_thread()
            try:
                title = f"@{self.ranges.fusion}{f' at {name}' if name else ''} ({self.ranges.number})"
                Trial(title, rivals, self.ranges, sizes, self._executor, self._execute).run(inputs, out)  # type: ignore[arg-type]
                self._settled.add(name)
            finally:
                self._trying = None

    def _executor(self, candidate: Candidate) -> Executor:
        if candidate not in self.executors:
            executor = self.executors[candidate] = self._execute(self.ranges.program(candidate), candidate.kernels)
            if isinstance(executor, RankExecutor):
                # With a strong reference, only the garbage collector would destroy the executor, and its CUDA graphs.
                executor.decided = partial(_decided, weakref.ref(self), candidate)
        return self.executors[candidate]

    def decided(self, candidate: Candidate, sizes: Mapping[str, int]) -> tuple[Executor, str] | None:
        """Return the executor whose program captures run, and a reason why a graph of the executor would be slower.

        Return None before the first call in the range of these sizes, which may try candidates. The reason is empty if
        calls with `out=` may be replayed.

        Args:
            candidate: the candidate that plain calls with these sizes run.
            sizes: the sizes.
        """
        known = sizes if self.ranges.free else self.ranges.fixed
        if key(self.ranges.representative(known)) not in self._settled:
            return None
        choice = self.ranges.choice(known)
        if choice.taken != candidate:
            return self._executor(candidate), ""
        captured, plain = choice.captured, choice.plain
        same = not self._may_differ or captured == candidate or message_teams_of(self.ranges.program(captured))
        if same or not self.ranges.fits(captured, sizes):
            return self._executor(candidate), plain
        return self._executor(captured), plain

    @property
    def _may_differ(self) -> bool:
        """True if captures may run another candidate than plain calls."""
        one: Executor = self._first
        return isinstance(one, RankExecutor) and one.may_differ_in_captures and self.ranges.budget > 0

    def _with_note(self, choice: Choice) -> Choice:
        """Return a choice, with a note if captures run another candidate."""
        taken, captured = choice.taken, choice.captured
        if taken == captured or not self._may_differ:
            return choice
        replays = {timing.candidate: timing.graph for timing in choice.timings}
        times = f"a replay takes {replays[captured]:.0f} us, and one of '{taken}' {replays[taken]:.0f} us"
        return replace(choice, notes=(*choice.notes, f"in CUDA graphs that you capture, '{captured}' runs: {times}"))


def _decided(
    ranged: Callable[[], RangedExecutor | None], candidate: Candidate, sizes: Mapping[str, int]
) -> tuple[Executor, str] | None:
    """Return the result of `RangedExecutor.decided`; None if that executor is gone."""
    it = ranged()
    return None if it is None else it.decided(candidate, sizes)


def _with_shape_of(x: Any, value: Value) -> Any:
    """Return a tensor on the CPU with the shape of `x` and the dtype of the input `value`.

    If `x` is not a tensor, return `x`.
    """
    return torch.empty((), dtype=torch_dtype(value.tensor.dtype)).expand(x.shape) if isinstance(x, torch.Tensor) else x
