"""Computations on CUDA that wait for flags or raise flags.

Such a computation is one kernel, or one kernel for each block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hostir.ir.machine import Ready
from hostir.kernels import aten
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.repeats import Again, Kernel, repeating
from hostir.kernels.table import kernel_for, kernels_for
from hostir.knobs import TIMEOUT
from hostir.machines.binding import Step, bind_compute, completed, compute_block
from hostir.machines.cuda.context import PlanContext
from hostir.machines.cuda.credits import CallBoundary
from hostir.machines.cuda.driver import in_batches, wait_at_least, write
from hostir.machines.cuda.flags import CudaFlags
from hostir.plan.endings import ENDING
from hostir.plan.operations import NONE, ComputeOp

if TYPE_CHECKING:
    from hostir.kernels.flags.done import DoneFlags
    from hostir.kernels.flags.ready import ReadyFlags
    from hostir.kernels.flags.signals import CallEnd

SECONDS_PER_POLL = 1e-6  # a kernel's poll takes a round trip to the L2 cache
# A step, and the step that a capture issues instead; None if a capture issues the same step.
CapturedStep = tuple[Step, Step | None]


class BlockSteps:
    """Makes the steps of a plan's computations that wait for flags or raise flags.

    `behind_products` holds the ids of the computations that directly follow a pushed product.
    """

    def __init__(self, context: PlanContext, flags: CudaFlags, call: CallBoundary, behind_products: Set[int]) -> None:
        self.context = context
        self.flags = flags
        self.call = call
        self.behind_products = behind_products

    def compute(self, op: ComputeOp) -> Iterator[CapturedStep]:
        """Yield the steps of a computation that waits for flags or raises flags.

        If there is a kernel that polls and raises flags, a step launches it. Otherwise the steps launch one kernel for
        each block. There is one exception: a computation without `own_rows` that directly follows this rank's copies by
        SMs. Such a computation could not start much before its last block is ready. So the stream waits for all blocks,
        and then runs one kernel.
        """
        kernel = kernels_for(self.context.kernels, torch_dtype(op.dtype)).get(f"{op.computation}_by_blocks")
        end = self.call.end_within(op) if kernel is not None and op.computation in ENDING else None
        if op.ready is not None and id(op) in self.behind_products:
            op = replace(op, ready=replace(op.ready, overlapped_sms=0))
        ready = op.ready
        if kernel is not None:
            yield self.in_one_kernel(op, kernel, end), None
        elif ready is not None and ready.overlapped_sms and ready.own_rows is None and op.done is None:
            yield from self.after_all_blocks(op, ready)
        else:
            yield from self.by_blocks(op)

    def in_one_kernel(self, op: ComputeOp, kernel: Kernel, end: CallEnd | None) -> Step:
        registers, out, operands, options = self.context.registers, op.out, op.operands, dict(op.options)
        own_rows = NONE if op.ready is None or op.ready.own_rows is None else op.ready.own_rows
        flags = {"ready": self.ready_flags(op, end), "done": self.done_flags(op)}

        def by_blocks(out: torch.Tensor, own_rows: torch.Tensor | None, *operands: torch.Tensor) -> Again | None:
            return kernel(out, *operands, own_rows=own_rows, **flags, **options)

        call = repeating(by_blocks)
        return self.context.launching(
            op, lambda: call(registers[out], registers[own_rows], *[registers[x] for x in operands])
        )

    def ready_flags(self, op: ComputeOp, end: CallEnd | None) -> ReadyFlags | None:
        """Return the flags that the kernel of an operation polls; None if it polls no flags."""
        from hostir.kernels.flags.ready import ReadyFlags  # which needs Triton

        ready = op.ready
        if ready is None:
            return None
        return ReadyFlags(
            self.context.registers[ready.flags],
            ready.epoch,
            self.context.timeouts.of(self.context.unrolled, op, ready.blocks),
            first=ready.first,
            source=ready.own_first // ready.results,
            polls=int(TIMEOUT.get() / 2 / SECONDS_PER_POLL),  # half the timeout, so that the kernel reports first
            overlapped_sms=ready.overlapped_sms,
            reserved_sms=ready.reserved_sms,
            ending=end,
        )

    def done_flags(self, op: ComputeOp) -> DoneFlags | None:
        """Return the flags that the kernel of an operation raises; None if it raises no flags."""
        from hostir.kernels.flags.done import DoneFlags  # which needs Triton

        done = op.done
        return None if done is None else DoneFlags(self.context.registers[done.flags], done.epoch, done.first)

    def after_all_blocks(self, op: ComputeOp, ready: Ready) -> Iterator[CapturedStep]:
        place, flags = self.flags.place(ready.flags), self.flags
        addresses = [flags.address(place, block, flags.rank) for block in range(ready.blocks)]
        yield self.context.on(op.stream, in_batches([wait_at_least(each, ready.epoch) for each in addresses])), None
        yield self.launched(op, partial(bind_compute, op, self.context.registers))

    def by_blocks(self, op: ComputeOp) -> Iterator[CapturedStep]:
        """Yield the steps that compute an operation block by block.

        The stream waits for the flags of a block before it computes the block. Then it raises the flags of the rows
        that are now complete.
        """
        context, ready, done = self.context, op.ready, op.done
        order = ready.order if ready is not None else done.order if done is not None else ()
        blocks, computed = len(order), set[int]()
        for block in order:
            slots = [] if ready is None else self.flags.needed(ready, block)
            if ready is not None and slots:
                yield context.on(op.stream, self.flags.wait_all(ready.flags, slots, ready.epoch)), None

            def compute(kernel: Kernel, block: int = block) -> Step:
                return partial(compute_block, op, context.registers, kernel, block, blocks, self.add_up)

            yield self.launched(op, compute)
            computed.add(block)
            if done is not None and (raised := completed(done, block, blocks, computed)):
                place, rank = self.flags.place(done.flags), self.flags.rank
                writes = [write(self.flags.address(place, slot, rank), done.epoch) for slot in raised]
                yield context.on(op.stream, in_batches(writes)), None

    def launched(self, op: ComputeOp, compute: Callable[[Kernel], Step]) -> CapturedStep:
        """Return the step that calls a computation's kernel, and the one for captures. `compute` makes both."""
        kernel = kernel_for(self.context.kernels, torch_dtype(op.dtype), op.computation, len(op.operands))
        captured, step = self.context.kernel(op), compute(kernel)
        if self.context.in_triton(op):
            self.context.launching(op, step)
        return step, compute(captured) if captured is not kernel else None

    def add_up(self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, activation: str) -> None:
        aten.add_up(out, parts, activation=activation)
