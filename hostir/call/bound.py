"""Bound calls, the data of a warm call with known tensors; and a mark that keeps torch.compile out of executors.

Dynamo, the tracer of torch.compile, must not trace executors: hostir has already compiled what they run.
`torch.compiler.disable` has the same effect, but it imports all of torch.compile, and its wrapper costs about 2 us a
call. `untraced` marks the code object instead, which adds nothing to a call.
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
    """Mark a function so that Dynamo breaks the graph at its calls, and compiles neither it nor its callees."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_recursive=True, _torchdynamo_disable_msg=WHY)
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


Plan = CudaPlan | GlooPlan
MAX_BOUND = 256  # bound calls that an executor keeps: the most recently used ones


class BoundCall:
    """A call that was checked and has a plan, for later calls with tensors of the same layouts.

    Args:
        plan: the plan that it runs.
        tensors: its inputs, and the tensors of `out=`.
        where: the addresses of `tensors`, if later calls must use the same ones; None if any addresses fit.
        digest: the digest of the program's text; empty for a rank without a session.

    Fields:
        graph: its CUDA graph, if it has one.
        allocations: the caller's allocations that copies of the graph are bound to; None if it has no copies.
        eager: how often it was issued statement by statement since its last capture.
        captures: how often it was captured.
        checksum: a hash of its program and sizes, the same on all ranks.
        without_gradients: True if a tensor requires gradients, so that the call needs `torch.no_grad()`.
    """

    def __init__(self, plan: Plan, tensors: Sequence[Part], where: list[int] | None, digest: str) -> None:
        self.plan = plan
        self.count = len(tensors)
        self.where = where
        self.graph: torch.cuda.CUDAGraph | None = None
        self.allocations: Allocations | None = None
        self.eager = self.captures = 0
        self.checksum = crc32(f"{digest} {sorted(plan.unrolled.sizes.items())}".encode())
        self.without_gradients = any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
        # The guards of torch.compile compare types, layouts, dtypes, devices and modes in C++.
        all_tensors = all(isinstance(x, torch.Tensor) for x in tensors)
        self.guards = (
            TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check if all_tensors else _never
        )

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Return True if this bound call can run these arguments, of any type. After False, `_bind` decides."""
        try:  # the guards would crash on nested tensors
            where = [x.is_nested or x.data_ptr() for x in tensors]
        except Exception:  # not a tensor, or one without memory
            return False
        if True in where if self.where is None else where != self.where:
            return False
        if len(where) != self.count or not self.guards(*tensors):
            return False
        return not (self.without_gradients and torch.is_grad_enabled())


def _never(*tensors: Any) -> bool:
    """Return False. It stands for the guards, which accept only tensors, in calls that have a None for a part."""
    return False
