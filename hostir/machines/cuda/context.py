"""The parts of a CUDA plan that the steps of its operations use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hostir.kernels.contractions import IN_TRITON
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernels_for
from hostir.machines.binding import Step
from hostir.machines.cuda.timeouts import Timeouts
from hostir.plan.operations import ComputeOp, Op
from hostir.plan.unrolled import UnrolledProgram

if TYPE_CHECKING:
    from hostir.kernels.layout import Words

Issue = Callable[[int], None]  # issues work to the stream with the given handle


@dataclass
class PlanContext:
    """The parts of a plan that the steps of its one-sided operations use.

    Fields:
        unrolled: the plan's unrolled program.
        device: this rank's device.
        registers, streams: the lists of the plan; their elements change with every call.
        kernels: the kernels by computation.
        kernel: returns the kernel of one computation, for its stream.
        timeouts: receives the timeouts of kernels that wait for flags.
        words: device memory for the numbers that kernels read.
        launches: the steps that only launch kernels of Triton, with their operations.
    """

    unrolled: UnrolledProgram
    device: torch.device
    registers: list[Any]
    streams: Sequence[torch.cuda.Stream]
    kernels: Mapping[str, Kernel]
    kernel: Callable[[ComputeOp], Kernel]
    timeouts: Timeouts
    words: Words
    launches: list[tuple[Op, Step]] = field(default_factory=list)

    def on(self, stream: int, issue: Issue) -> Step:
        """Return the step that issues work to a stream."""
        streams = self.streams
        return lambda: issue(streams[stream].cuda_stream)

    def in_triton(self, op: ComputeOp) -> bool:
        """Return True if the kernel of a computation, or of one of its blocks, launches kernels of Triton."""
        return kernels_for(self.kernels, torch_dtype(op.dtype))[op.computation] in IN_TRITON

    def launching(self, op: Op, step: Step) -> Step:
        """Record that a step launches kernels of Triton for an operation; return the step."""
        self.launches.append((op, step))
        return step
