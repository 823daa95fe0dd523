"""The parts of a CUDA plan that the steps of its operations use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hostir.kernels.contractions import IN_TRITON
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernel_for
from hostir.machines.binding import Step
from hostir.machines.cuda.timeouts import Timeouts
from hostir.plan.operations import ComputeOp, Op
from hostir.plan.unrolled import UnrolledProgram

if TYPE_CHECKING:
    from hostir.kernels.layout import Words

Issue = Callable[[int], None]  # issues work to the stream with the given handle


@dataclass
class PlanContext:
    """The parts of a plan that the steps of its operations use.

    Fields:
        unrolled: the plan's unrolled program.
        device: this rank's device.
        registers, streams: the lists of the plan. Their elements change with every call.
        kernels: the kernel of each computation, by its name.
        kernel: a function that returns the kernel of an operation, adapted to the operation's stream.
        timeouts: the object to which kernels that wait for flags or data report timeouts.
        words: a pool of device memory for the numbers that kernels read.
        launches: the steps that only launch Triton kernels, with their operations.
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
        """Return the step that issues work to the stream with index `stream`."""
        streams = self.streams
        return lambda: issue(streams[stream].cuda_stream)

    def in_triton(self, op: ComputeOp) -> bool:
        """Return True if the kernel that computes the operation, or one of its blocks, launches Triton kernels."""
        return kernel_for(self.kernels, torch_dtype(op.dtype), op.computation, len(op.operands)) in IN_TRITON

    def launching(self, op: Op, step: Step) -> Step:
        """Record that a step launches Triton kernels for an operation; return the step."""
        self.launches.append((op, step))
        return step
