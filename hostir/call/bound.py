"""Bound calls, and a mark that keeps torch.compile out of executors.

A bound call keeps everything that later calls with similar tensors need: the checks that the tensors must pass, the
plan, and the CUDA graph if there is one.

Dynamo, the tracer of torch.compile, must not trace executors, because hostir has already compiled their programs.
`torch.compiler.disable` has the same effect, but it imports all of torch.compile, and its wrapper costs about 2 us a
call. `untraced` marks the code object instead, which costs a call no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.guards import TensorGuards

from hostir.machines.binding import Part
from hostir.machines.cuda.driver import Allocations
from hostir.machines.cuda.machine import CudaPlan
from hostir.machines.gloo.machine import GlooPlan

F = TypeVar("F", bound=Callable[..., Any])
WHY = "an executor runs a program that hostir has compiled"


def untraced(function: F) -> F:
    """Mark a function for Dynamo, and return it.

    At a call of the function, Dynamo breaks the graph, and does not trace into the function.
    """
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_recursive=True, _torchdynamo_disable_msg=WHY)
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


Plan = CudaPlan | GlooPlan
MAX_BOUND = 256  # an executor keeps so many bound calls: the most recently used ones


class BoundCall:
    """A plan for calls with tensors of certain layouts. These layouts were checked once.

    Args:
        plan: the plan.
        inputs: the inputs of the first such call.
        outs: its tensors of `out=`; None for a call without `out=`.
        where: the addresses of all these tensors if later calls must use the same addresses; None if they may use any
            addresses.
        digest: the digest of the program's text; empty for a rank without a session.

    Fields:
        graph: the CUDA graph that replays the call; None if there is no graph.
        allocations: the caller's allocations that the copies in the graph read or write; None without such copies.
        eager: the number of times that the call was issued statement by statement since its last capture.
        captures: the number of times that the call was captured.
        checksum: a hash of the program and the sizes. It is the same on all ranks.
        without_gradients: True if a tensor requires gradients. Later calls must then be under `torch.no_grad()`.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[Part],
        outs: Sequence[Part] | None,
        where: list[int] | None,
        digest: str,
    ) -> None:
        self.plan = plan
        self.inputs = None if outs is None else len(inputs)  # None without `out=`: the guards count the inputs
        self.where = where
        self.graph: torch.cuda.CUDAGraph | None = None
        self.allocations: Allocations | None = None
        self.eager = self.captures = 0
        self.checksum = crc32(f"{digest} {sorted(plan.unrolled.sizes.items())}".encode())
        self.guard(inputs, outs)

    def guard(self, inputs: Sequence[Part], outs: Sequence[Part] | None) -> None:
        """Make `fits` accept later calls with tensors like these, as long as torch's modes are the same as now."""
        tensors = inputs if outs is None else (*inputs, *outs)
        self.without_gradients = any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
        # The guards of torch.compile compare types, layouts, dtypes, devices and modes in C++.
        all_tensors = all(isinstance(x, torch.Tensor) for x in tensors)
        self.guards = (
            TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check if all_tensors else _never
        )

    def fits(self, inputs: Sequence[Any], outs: Sequence[Any] | None) -> bool:
        """Return True if a call with these arguments can run this plan without further checks.

        Arguments may be of any type.
        """
        if self.inputs != (None if outs is None else len(inputs)):
            return False
        tensors = inputs if outs is None else (*inputs, *outs)
        try:
            for x in tensors:
                if x.is_nested:  # the guards would crash
                    return False
            if not self.guards(*tensors):
                return False
            if self.where is not None and [x.data_ptr() for x in tensors] != self.where:
                return False
        except Exception:  # not a tensor, one without memory, or another number of tensors
            return False
        return not (self.without_gradients and torch.is_grad_enabled())


def _never(*tensors: Any) -> bool:
    """Return False. This function replaces the guards if an argument is None, because guards accept only tensors."""
    return False
