"""Keeps Dynamo, the tracer of torch.compile, out of executors: they run what hostir has compiled already.

`torch.compiler.disable` does so too, with a wrapper that costs each call some 2 us, and by importing all of
torch.compile. Here the code itself is marked, which costs calls nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])
WHY = "an executor runs a program that hostir has compiled"


def untraced(function: F) -> F:
    """A function at which Dynamo breaks its graph: it compiles neither that nor anything that it calls."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_recursive=True, _torchdynamo_disable_msg=WHY)
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
