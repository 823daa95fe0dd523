"""Ranges for profilers: the work that a statement issues is in a range with the statement's text.

torch.profiler shows the ranges of `record_function` on the host, and on the streams of the GPU. Nsight Systems shows
NVTX ranges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from hostir.machines.binding import Step
from hostir.plan.operations import Op
from hostir.plan.unrolled import UnrolledProgram

profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled  # True in a thread that torch.profiler records


def in_ranges(unrolled: UnrolledProgram, ops: Sequence[Op], steps: Sequence[Step]) -> list[Step]:
    """Return the steps of a plan, each in the range of its operation's statement."""
    return [_in_range(range_name(unrolled, op), step) for op, step in zip(ops, steps, strict=True)]


def range_name(unrolled: UnrolledProgram, op: Op) -> str:
    """Return the name of an operation's range: the program, the text of the statement, and its rounds."""
    rounds = f" in round {', '.join(map(str, op.place.rounds))}" if op.place.rounds else ""
    return f"@{unrolled.program.name}: {unrolled.text(op)}{rounds}"


def _in_range(text: str, step: Step) -> Step:
    def ranged() -> object:
        with torch.profiler.record_function(text), nvtx_range(text):
            return step()

    return ranged


def nvtx_range(text: str) -> contextlib.AbstractContextManager[object]:
    """Return the context of an NVTX range; one that does nothing if torch was built without NVTX."""
    try:
        torch.cuda.nvtx.mark("")
    except RuntimeError:
        return contextlib.nullcontext()
    return torch.cuda.nvtx.range(text)
