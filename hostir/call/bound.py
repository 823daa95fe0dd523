"""Bound calls: what a warm call with known tensors needs.

Keep Dynamo, the tracer of torch.compile, out of executors: they run what hostir has compiled already.

`torch.compiler.disable` does so too, but it imports all of torch.compile, and its wrapper costs each call some 2 us.
Here the code object itself is marked, which costs a call nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.guards import TensorGuards

from hostir.machines.binding import Part
from hostir.machines.cuda.driver import Allocations
from hostir.machines.cuda.machine import CudaPlan
from hostir.machines.gloo.machine import GlooPlan

if TYPE_CHECKING:
    pass


F = TypeVar("F", bound=Callable[..., Any])
WHY = "an executor runs a program that hostir has compiled"


def untraced(function: F) -> F:
    """Mark a function so that Dynamo breaks its graph at a call of it, and compiles neither it nor what it calls."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_recursive=True, _torchdynamo_disable_msg=WHY)
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


# Remember what is known of a call, for later calls with the same kinds of tensors.

Plan = CudaPlan | GlooPlan
MAX_BOUND = 256  # bound calls that an executor keeps, the latest used ones


class BoundCall:
    """A call that has been checked and has a plan: it fits tensors of its layouts, if need be at its addresses only.

    Args:
        plan: the plan that it runs.
        tensors: its inputs, and the tensors of `out=`.
        where: their addresses; None if it fits any addresses.
        digest: of the program, where other ranks run it.

    Fields:
        graph: its CUDA graph, if it has one.
        allocations: the caller's allocations that copies of the graph are bound to, if there are any.
        eager: the number of times it was issued statement by statement since it was last captured.
        captures: the number of times it was captured.
        kind: a number of its program and sizes, the same on all ranks.
        without_gradients: whether it is allowed only under `torch.no_grad()`, as a tensor requires gradients.
    """

    def __init__(self, plan: Plan, tensors: Sequence[Part], where: list[int] | None, digest: str) -> None:
        self.plan = plan
        self.count = len(tensors)
        self.where = where
        self.graph: torch.cuda.CUDAGraph | None = None
        self.allocations: Allocations | None = None
        self.eager = self.captures = 0
        self.kind = crc32(f"{digest} {sorted(plan.unrolled.sizes.items())}".encode())
        self.without_gradients = any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
        # torch.compile's guards compare types, layouts, dtypes, devices and modes with those of a call, in C++.
        here = all(isinstance(x, torch.Tensor) for x in tensors)
        self.guards = TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check if here else _never

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Whether this is the bound call for these arguments, of any type. If it returns False, `_bind` decides."""
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
    """Fit no call: guards need tensors, and a rank that holds no part of one passes None."""
    return False
