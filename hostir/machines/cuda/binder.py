"""Bind an unrolled program on CUDA: turn its operations into steps, which are closures that issue work to streams."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from hostir.ir.comm_ops import LOW_LATENCY
from hostir.job.offers import SLOTS, WORKSPACE
from hostir.job.symmetric import SharedMemory
from hostir.kernels.aten import matmul, matmul_of_rows, takes_rows
from hostir.kernels.contractions import IN_TRITON
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernel_for
from hostir.machines.binding import Step, bind_allocate, bind_compute, bind_view
from hostir.machines.cuda.blocks import BlockSteps, CapturedStep
from hostir.machines.cuda.context import PlanContext
from hostir.machines.cuda.copies import CopySteps
from hostir.machines.cuda.credits import CallBoundary, uses_flags
from hostir.machines.cuda.flags import CudaFlags
from hostir.machines.cuda.implementations import SymmetricCollectives
from hostir.machines.cuda.nccl import collective, messages, recordable
from hostir.machines.cuda.streams import join, record, wait
from hostir.machines.cuda.timeline import Timeline
from hostir.plan.lifetimes import awaited_at_once, late_streams
from hostir.plan.operations import (
    CALLER,
    AllocateOp,
    BarrierOp,
    CollectiveOp,
    ComputeOp,
    CopyOp,
    DelayOp,
    FreeOp,
    MarkOp,
    MessagesOp,
    Op,
    SignalOp,
    SymmetricOp,
    SynchronizeOp,
    ViewOp,
    WaitOp,
    WaitSignalOp,
)

if TYPE_CHECKING:
    from hostir.machines.cuda.machine import CudaMachine

CYCLES_PER_US = 2000  # cycles per microsecond of a GPU clock near 2 GHz


class CudaOneSided:
    """Makes the steps of a plan's one-sided operations, which access the symmetric memory of all ranks.

    Copy engines or SMs make the copies. Streams or kernels set flags and wait for flags.
    """

    def __init__(self, context: PlanContext, memory: SharedMemory) -> None:
        self.launches = context.launches
        self.flags = CudaFlags(context, memory)
        self.call = CallBoundary(context, self.flags)
        self.copies = CopySteps(context, self.flags)
        self.blocks = BlockSteps(context, self.flags, self.call, self.copies.behind_products)


def _apply(function: Callable[[torch.Tensor], None], registers: list[Any], register: int) -> None:
    function(registers[register])


def _one_after_another(steps: Sequence[Step]) -> None:
    for step in steps:
        step()


class BufferFrees:
    """Makes the steps that free a plan's buffers, and the steps that tell the allocator which streams use a buffer.

    `late` holds, by buffer, the streams that may still use the buffer when it is freed.
    """

    def __init__(self, context: PlanContext) -> None:
        self.context = context
        self.late = late_streams(context.unrolled)

    def drop_with_the_run(self) -> set[int]:
        """Return the buffers that are dropped at the end of the run, and remove them from `late`.

        At the end of the run, the caller's stream has joined all other streams. So the allocator need not know which
        streams use these buffers.
        """
        allocated = self.context.unrolled.allocated
        buffers = {buffer for buffer in self.late if buffer not in allocated or allocated[buffer].stream == CALLER}
        for buffer in buffers:
            del self.late[buffer]
        return buffers

    def free(self, buffer: int) -> list[Step]:
        """Return the steps that free a buffer and its views."""
        registers = self.context.registers
        freed = [i for i, owner in enumerate(self.context.unrolled.buffers) if owner == buffer]

        def step() -> None:
            for i in freed:
                registers[i] = None

        return [*self.marks(buffer), step]

    def marks(self, buffer: int) -> list[Step]:
        """Return the steps that tell the allocator which streams may still use a buffer when it is freed."""
        registers, streams = self.context.registers, self.context.streams

        def recording(stream: int) -> Step:
            return lambda: registers[buffer].record_stream(streams[stream])

        return [recording(stream) for stream in self.late.pop(buffer, ())]


class CudaBinder:
    """Makes the steps of a plan, one operation after another.

    Fields:
        memory, one_sided: the symmetric memory and its operations; None if the program has no symmetric memory.
        implementations: makes the steps of collectives that NCCL does not run; None if NCCL runs all collectives.
        steps, ops: the steps in issue order, and the operation of each step.
        in_captures: steps that replace elements of `steps` during a capture, by the positions of these elements.
        launches: the steps that only launch Triton kernels, with their operations.
        current: the stream that is current after the last step.
        freed: the operations that free memory before the next allocation. They are bound when that allocation is. At
            the end of a run no steps are needed, because the run drops all buffers.
        in_one_kernel: True between the first and the last of several operations that one kernel carries out: a pushed
            product and the copies of its result, or a sum and its norm. Operations that free memory are bound after it.
        awaited_at_once: the handles of communications that the next operation awaits. Their collectives may run on the
            caller's stream.
        inlined: the handles of the collectives that have been bound to the caller's stream so far.
        recordable: the NCCL backends of the collectives that native code can issue, by the positions of their steps.
        marks: the handles that are events of a stream, and not torch's `Work` objects.
        switches: the steps that only make another stream the current one, and the index of this stream.
        engine_copies: the buffers that copy engines copy to or from symmetric memory.
        unnoticed: the number of steps at the beginning of a run that have no effect on peers or on the next run.
    """

    def __init__(
        self, machine: CudaMachine, context: PlanContext, memory: SharedMemory | None, timeline: Timeline | None
    ) -> None:
        self.machine = machine
        self.context = context
        self.memory = memory
        self.one_sided = None if memory is None else CudaOneSided(context, memory)
        self.implementations: SymmetricCollectives | None = None
        rank = context.unrolled.rank
        if memory is not None and ((WORKSPACE, rank) in memory.flat or (SLOTS, rank) in memory.flat):
            self.implementations = SymmetricCollectives(
                context, memory, machine.groups.all_ranks, machine.groups.timeout.total_seconds()
            )
        self.timeline = timeline
        self.steps: list[Step] = []
        self.ops: list[Op] = []
        self.in_captures: dict[int, Step] = {}
        self.launches: list[tuple[Op, Step]] = []
        self.current = CALLER
        self.frees = BufferFrees(context)
        self.freed: list[FreeOp] = []
        self.in_one_kernel = False
        self.awaited_at_once = awaited_at_once(context.unrolled)
        self.inlined = set[int]()
        self.recordable: dict[int, Any] = {}
        self.checked = set[tuple[int, int, bool]]()  # indices: their register, limit and order
        self.marks = set[int]()
        self.engine_copies = set[int]()
        self.switches: dict[Step, int] = {}
        self.unnoticed = sys.maxsize

    def bind(self) -> None:
        """Add the steps that begin a call, the steps of all operations, and the steps that end the call."""
        ops = self.context.unrolled.ops
        for step in self.one_sided.call.begin_call() if self.one_sided else ():
            self.append(ops[0], step)
        if self.one_sided is not None and self.one_sided.call.credits_taken is not None:
            self.unnoticed = 0
        dropped_last = self.frees.drop_with_the_run() if self.one_sided else set()
        for op in ops:
            if op.frees not in dropped_last:
                self.add(op)
        for buffer in sorted(self.frees.late):
            for step in self.frees.marks(buffer):
                self.append(ops[-1], step)
        self.change_to(CALLER)
        self.unnoticed = min(self.unnoticed, len(self.steps))
        for stream, step in self.one_sided.call.end_call() if self.one_sided else ():
            self.change_to(stream)
            self.append(ops[-1], step)
        self.change_to(CALLER)

    @property
    def flagged(self) -> CudaOneSided:
        """The one-sided operations of a program that has symmetric memory."""
        assert self.one_sided is not None
        return self.one_sided

    def append(self, op: Op, step: Step) -> None:
        self.steps.append(step)
        self.ops.append(op)

    def add(self, op: Op) -> None:
        """Add the steps of one operation."""
        if self.unnoticed == sys.maxsize and (op.by_group or uses_flags(self.context.unrolled, op)):
            self.unnoticed = len(self.steps)
        for step in self.one_sided.call.before(op) if self.one_sided else ():
            self.append(op, step)
        BIND[type(op)](self, op)

    def here(self, op: Op, step: Step) -> None:
        """Add a step that issues work to the current stream. First make the operation's stream the current one."""
        if op.stream != self.current:
            self.append(op, self.switch(op.stream))
            self.current = op.stream
        self.direct(op, step)

    def direct(self, op: Op, step: Step | None) -> None:
        """Add a step that names its streams. The current stream does not matter to it. Do nothing if `step` is None."""
        if step is not None:
            timeline, inline = self.timeline, op.starts in self.inlined
            self.append(op, timeline.timed(op, step, self.context.streams, inline) if timeline else step)

    def change_to(self, stream: int) -> None:
        """Make a stream the current one after all operations, unless it is already."""
        if stream != self.current:
            self.append(self.context.unrolled.ops[-1], self.switch(stream))
            self.current = stream

    def switch(self, stream: int) -> Step:
        streams, set_stream = self.context.streams, torch.cuda.set_stream
        step: Step = lambda: set_stream(streams[stream])  # noqa: E731
        self.switches[step] = stream
        return step

    def add_allocate(self, op: AllocateOp) -> None:
        if not self.in_one_kernel:
            for each in self.freed:
                for step in self.frees.free(each.buffer):
                    self.append(each, step)
            self.freed.clear()
        if self.implementations is not None and op.out in self.implementations.needless:
            return
        if self.implementations is not None and op.out in self.implementations.buffers:
            self.context.registers[op.out] = self.implementations.space(op.out)
        else:
            self.here(op, bind_allocate(op, self.context.registers, self.context.device))

    def add_symmetric(self, op: SymmetricOp) -> None:
        """Put a symmetric buffer into its register now, and add no step, because every run uses the same buffer."""
        assert self.memory is not None
        self.context.registers[op.out] = self.memory.buffer(op)

    def add_view(self, op: ViewOp) -> None:
        view = bind_view(op, self.context.registers)
        if self.context.registers[op.x] is None:
            self.append(op, view)
        else:  # a view of a symmetric buffer is the same in every run
            view()

    def add_compute(self, op: ComputeOp) -> None:
        if self.one_sided is not None and id(op) in self.one_sided.copies.products:
            self.in_one_kernel = True
            return
        if self.implementations is not None and id(op) in self.implementations.normed:
            self.add_normed(op, self.implementations)
            return
        self.check_indices(op)
        if op.ready is not None or op.done is not None:
            self.add_by_blocks(op, [*self.flagged.blocks.compute(op)])
        else:
            kernel = kernel_for(self.machine.kernels, torch_dtype(op.dtype), op.computation, len(op.operands))
            captured = self.machine.kernel(op)
            compute = bind_compute(op, self.context.registers, self.in_few_calls(op, kernel))
            self.here(op, compute)
            if kernel in IN_TRITON:
                self.launches.append((op, compute))
            if captured is not kernel:
                self.in_captures[len(self.steps) - 1] = bind_compute(op, self.context.registers, captured)

    def add_by_blocks(self, op: ComputeOp, steps: Sequence[CapturedStep]) -> None:
        """Add the steps of a computation that waits for flags or raises flags. A timeline measures them as one step."""
        if self.timeline:
            self.here(op, partial(_one_after_another, [captured or step for step, captured in steps]))
            return
        for step, captured in steps:
            self.here(op, step)
            if captured is not None:
                self.in_captures[len(self.steps) - 1] = captured

    def check_indices(self, op: ComputeOp) -> None:
        """Add steps that check the indices which a kernel of Triton will read, unless an earlier step has checked them.

        Indices that are written once stay as they were checked.
        """
        unrolled, registers = self.context.unrolled, self.context.registers
        if not op.place.statement.index_operands or not self.context.in_triton(op):
            return
        from hostir.kernels.misfits import check_indices  # needs Triton

        words = self.context.timeouts.of_indices(unrolled, op)
        for (operand, register, limit), word in zip(unrolled.indices(op), words, strict=True):
            key = register, limit, operand.ascending
            if key in self.checked and self.writers[unrolled.buffers[register]] <= 1:
                continue
            self.checked.add(key)
            check = partial(check_indices, limit=limit, word=word[:1], ascending=operand.ascending)
            step = partial(_apply, check, registers, register)
            self.launches.append((op, step))
            self.here(op, step)

    @cached_property
    def writers(self) -> Counter[int]:
        """The number of operations that write to each buffer."""
        unrolled = self.context.unrolled
        return Counter(unrolled.buffers[register] for op in unrolled.ops for register in op.writes)

    def add_normed(self, op: ComputeOp, implementations: SymmetricCollectives) -> None:
        """If an operation is the last one that the kernel of a sum carries out, add the step that launches it."""
        normed = implementations.normed[id(op)]
        if op is normed.computations[-1]:
            self.here(normed.collective, implementations.normed_sum(normed))
            self.in_one_kernel = False

    def in_few_calls(self, op: ComputeOp, kernel: Kernel) -> Kernel:
        """Return a kernel that computes the same in fewer function calls, if the layouts allow it; else `kernel`."""
        if kernel is not matmul or len(op.operands) != 2:
            return kernel
        layouts = [self.context.unrolled.layouts[register] for register in (op.out, *op.operands)]
        return matmul_of_rows if takes_rows(*[(x.shape, x.strides) for x in layouts]) else kernel

    def add_copy(self, op: CopyOp) -> None:
        if self.add_push(op):
            return
        if self.context.unrolled.touches_peer(op):
            self.engine_copies.update(
                self.context.unrolled.buffers[register] for register in self.context.unrolled.tensors(op)
            )
            self.direct(op, self.flagged.copies.copy(op))
        else:
            self.here(op, self.flagged.copies.copy_within(op))

    def add_signal(self, op: SignalOp) -> None:
        if not self.add_push(op):
            self.direct(op, self.flagged.flags.signal(op))

    def add_push(self, op: CopyOp | SignalOp) -> bool:
        """Return True if one kernel carries out this operation together with other operations.

        If this operation is the last one that the kernel carries out, add the step that launches the kernel.
        """
        pushes, pushed = self.flagged.copies.pushes.get(id(op)), self.flagged.copies.products.get(id(op))
        if pushes is None or op is not pushes.ops[-1]:
            return pushes is not None
        if pushed is not None:
            self.here(pushed.product, self.flagged.copies.pushed_product(pushed.product, pushes))
            self.in_one_kernel = False
        else:
            self.here(pushes.ops[0], self.flagged.copies.push(pushes))
        return True

    def add_wait_signal(self, op: WaitSignalOp) -> None:
        self.direct(op, self.flagged.flags.wait_signal(op))

    def add_barrier(self, op: BarrierOp) -> None:
        self.direct(op, self.flagged.flags.barrier(op))

    def add_collective(self, op: CollectiveOp) -> None:
        if op.by and self.implementations is not None:
            (self.inlined if self.implementations.inline else self.marks).add(op.handle)
            if id(op) in self.implementations.normed:
                self.in_one_kernel = True
                return
            if op.by != LOW_LATENCY:
                self.engine_copies.update(self.context.unrolled.buffers[register] for register in (op.x, op.out))
            self.here(op, self.implementations.collective(op))
            return
        inline = op.handle in self.awaited_at_once
        if inline:
            self.inlined.add(op.handle)
        group, members = self.machine.groups.of(op.team)
        backend = group._get_backend(self.context.device)
        start = collective(op, self.context.registers, backend, members, inline)
        self.here(op, self.implementations.in_order(op, start) if self.implementations and not inline else start)
        if inline and recordable(op, members):
            self.recordable[len(self.steps) - 1] = backend

    def add_messages(self, op: MessagesOp) -> None:
        groups = self.machine.groups if op.collective else self.machine.messages
        start = messages(op, self.context.registers, *groups.of(op.team), self.context.device)
        self.here(op, self.implementations.in_order(op, start) if self.implementations and op.collective else start)

    def add_wait(self, op: WaitOp) -> None:
        registers, streams, handle, stream = self.context.registers, self.context.streams, op.handle, op.stream
        if handle in self.marks:
            self.here(op, lambda: wait(registers[handle], streams[stream]))
        elif handle not in self.inlined:  # an inlined collective is ordered by the stream itself
            self.here(op, lambda: registers[handle].wait())

    def add_delay(self, op: DelayOp) -> None:
        self.here(op, partial(torch.cuda._sleep, op.microseconds * CYCLES_PER_US))

    def add_synchronize(self, op: SynchronizeOp) -> None:
        self.append(op, partial(join, self.context.streams, op.stream, op.other, torch.cuda.Event()))

    def add_mark(self, op: MarkOp) -> None:
        registers, streams, event = self.context.registers, self.context.streams, torch.cuda.Event()
        self.marks.add(op.handle)

        def step() -> None:
            record(event, streams[op.stream])
            registers[op.handle] = event  # waiting on it is like waiting on a Work

        self.append(op, step)

    def add_free(self, op: FreeOp) -> None:
        self.freed.append(op)


# The method that binds each class of operations; a test compares the keys with all classes of operations.
BIND: dict[type[Op], Callable[[CudaBinder, Any], None]] = {
    AllocateOp: CudaBinder.add_allocate,
    SymmetricOp: CudaBinder.add_symmetric,
    ViewOp: CudaBinder.add_view,
    FreeOp: CudaBinder.add_free,
    ComputeOp: CudaBinder.add_compute,
    CopyOp: CudaBinder.add_copy,
    SignalOp: CudaBinder.add_signal,
    WaitSignalOp: CudaBinder.add_wait_signal,
    BarrierOp: CudaBinder.add_barrier,
    CollectiveOp: CudaBinder.add_collective,
    MessagesOp: CudaBinder.add_messages,
    MarkOp: CudaBinder.add_mark,
    WaitOp: CudaBinder.add_wait,
    SynchronizeOp: CudaBinder.add_synchronize,
    DelayOp: CudaBinder.add_delay,
}
