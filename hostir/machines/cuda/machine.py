"""Run programs on one CUDA device per rank, with CUDA streams and events and NCCL; the host never waits.

Binds an unrolled program to streams, events and NCCL, and runs it.

A run issues all work and returns; the caller's stream is the one that is current when the call is made. A run can be
captured into a CUDA graph: memory comes from torch's allocator, events have no timing, nothing queries the device.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllToAllOptions,
)

from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.job.groups import Groups
from hostir.job.links import headline
from hostir.job.offers import KindOfSizes
from hostir.job.symmetric import shares_memory
from hostir.kernels.contractions import BY_CUBLAS, IN_TRITON
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.layout import Words
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernels_for
from hostir.machines.binding import MAX_PLANS, Step, bind_allocate, bind_compute, bind_view
from hostir.machines.cuda.graphs import CublasStreams, uniform_only
from hostir.machines.cuda.memory import PeerMemory
from hostir.machines.cuda.nccl import awaited_at_once, collective, messages
from hostir.machines.cuda.onesided import CudaOneSided, Timeouts, uses_flags
from hostir.machines.cuda.streams import current, join, workers
from hostir.machines.cuda.timeline import Timeline
from hostir.plan.lifetimes import homes, late_streams
from hostir.plan.operations import (
    CALLER,
    NONE,
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
from hostir.plan.unroll import message_teams_of
from hostir.plan.unrolled import UnrolledProgram

CYCLES_PER_US = 2000  # of a clock near 2 GHz


class CudaMachine:
    """A device, its worker streams, its symmetric memory, and the process groups of this rank's teams.

    Messages have groups of their own: NCCL runs the operations of a group in order, and collectives must not wait for
    messages.
    """

    name = "cuda"

    def __init__(self, device: torch.device, program: Program, kernels: Mapping[str, Kernel], groups: Groups) -> None:
        self.device = device
        self.kernels = kernels
        self.groups = groups
        self.timeouts = Timeouts(groups.rank)
        self.words = Words(device, MAX_PLANS + 1)  # an executor drops the oldest plan when it has made the new one
        self.symmetric = groups.symmetric(lambda: PeerMemory(device, groups.rank, groups.whole))
        self.messages = groups.messages
        self.teams = [team for team in message_teams_of(program) if groups.rank in team]
        self.streams = workers(device, program.streams)
        if shares_memory(program):  # a stream of a call follows the same stream of the call before
            self.streams = groups.streams.setdefault(program.digest, self.streams)
            self.timeouts = groups.timeouts.setdefault(program.digest, self.timeouts)
        self.cublas_streams: dict[int, CublasStreams] = {}

    def kernel(self, op: ComputeOp) -> Kernel:
        """Return the kernel of a computation, for its stream."""
        kernel = kernels_for(self.kernels, torch_dtype(op.dtype))[op.kind]
        if kernel not in BY_CUBLAS:
            return kernel
        if op.stream not in self.cublas_streams:
            priority = 0 if op.stream == CALLER else self.streams[op.stream].priority
            self.cublas_streams[op.stream] = CublasStreams(self.device, priority)
        return self.cublas_streams[op.stream].wrap(kernel)

    def plan(
        self,
        unrolled: UnrolledProgram,
        timeline: Timeline | None = None,
        kind: KindOfSizes = None,
        limit: int | None = None,
        first: Sequence[torch.Tensor | None] = (),
    ) -> CudaPlan:
        """Return a plan that uses the symmetric memory shared by all compatible sizes; see `SymmetricMemory.of`.

        `first`: the inputs of the first call. Kernels are loaded for such addresses.
        """
        self.connect([team for team in self.teams if team not in self.messages.made])
        return CudaPlan(self, unrolled, timeline, kind, limit, first)

    def connect(self, teams: Sequence[tuple[int, ...]]) -> None:
        """Create this rank's groups for messages, and connect them: NCCL would else do it at the first message."""
        self.messages.prepare(teams)
        for team in teams:
            x = torch.zeros(len(team), device=self.device)
            self.messages.made[team].alltoall_base(torch.empty_like(x), x, [], [], AllToAllOptions()).wait()
        if teams:
            torch.cuda.synchronize(self.device)


class CudaPlan:
    """An unrolled program bound to a device: a flat list of steps (closures) over one list of registers."""

    def __init__(
        self,
        machine: CudaMachine,
        unrolled: UnrolledProgram,
        timeline: Timeline | None,
        kind: KindOfSizes = None,
        limit: int | None = None,
        first: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.machine = machine
        self.unrolled = unrolled
        self.timeline = timeline
        self.registers: list[Any] = [None] * len(unrolled.buffers)
        self.streams = [*machine.streams, torch.cuda.default_stream(machine.device)]  # CALLER indexes the last
        self.steps: list[Step] = []
        self.in_captures: dict[int, Step] = {}  # by position: the steps that are others during a capture
        self.ops: list[Op] = []  # the operation of each step
        self.launches: list[tuple[Op, Step]] = []  # what launches kernels of Triton, and issues nothing else
        self.cursor: Iterator[Step] = iter(self.steps)
        self.current = CALLER
        self.late = late_streams(unrolled)
        outputs = list(enumerate(zip(homes(unrolled), unrolled.outputs, strict=True)))
        self.placed = [(home, i) for i, (home, _) in outputs if home != NONE]  # outputs in the caller's tensors
        self.copied = [(x, i) for i, (home, x) in outputs if home == NONE and x != NONE]  # those copied there last
        self.freed_later: list[FreeOp] | None = None  # those behind a product that its copies will be bound with
        self.awaited_at_once = awaited_at_once(unrolled)
        self.engine_copies = set[int]()  # the buffers that copy engines copy to or from a peer
        self.inlined = set[int]()  # the handles of collectives that run on the caller's stream itself
        self.eager_only = uniform_only(unrolled)  # why its runs must not be captured; empty if they may
        self.memory = machine.symmetric.of(unrolled, self, kind, limit)
        self.one_sided: CudaOneSided | None = None
        if self.memory is not None:
            self.one_sided = CudaOneSided(
                *(unrolled, self.memory, machine.device, self.registers, self.streams),
                *(machine.kernels, machine.kernel, machine.timeouts, machine.words),
            )
        self.unnoticed = sys.maxsize  # how many steps, from the first, neither peers nor the next run notice
        for step in self.one_sided.begin_call() if self.one_sided else ():
            self.append(unrolled.ops[0], step)
        if self.one_sided is not None and self.one_sided.credits_taken is not None:
            self.unnoticed = 0
        kept = self.kept_to_the_end() if self.one_sided else set()
        for op in unrolled.ops:
            if op.frees not in kept:
                self.add(op)
        for buffer in sorted(self.late):
            self.mark(unrolled.ops[-1], buffer)
        if self.current != CALLER:
            self.append(unrolled.ops[-1], self.switch(CALLER))
        self.unnoticed = min(self.unnoticed, len(self.steps))
        for step in self.one_sided.end_call() if self.one_sided else ():
            self.append(unrolled.ops[-1], step)
        self.blank = list(self.registers)  # between runs: only symmetric buffers and their views
        self.load(first)

    def load(self, first: Sequence[torch.Tensor | None]) -> None:
        """Compile and load the kernels of Triton that a run launches, for inputs with the addresses of `first`.

        Raises HostIRError for the statement of a kernel that is too large, on all ranks with such tensors. Nothing of a
        call has been issued then.
        """
        launches = [*self.launches, *(self.one_sided.launches if self.one_sided else ())]
        if not launches:
            return
        from hostir.kernels.devices import loading  # which needs Triton

        self.registers[:] = self.stand_ins(dict(zip(self.unrolled.inputs, first, strict=False)))
        try:
            with loading():
                for op, step in launches:
                    self.load_for(op, step)
        finally:
            self.registers[:] = self.blank

    def load_for(self, op: Op, step: Step) -> None:
        """Load the kernels of an operation by its step."""
        try:
            step()
        except Exception as problem:
            raise self.unrolled.failure(op, problem) from problem

    def stand_ins(self, inputs: Mapping[int, torch.Tensor | None]) -> list[Any]:
        """Return a stand-in for the tensor in each register, the inputs by their registers.

        What is in memory that a run allocates is as aligned as its place there.
        """
        from hostir.kernels.devices import StandIn  # which needs Triton

        made = list(self.registers)
        for register, (buffer, shape, strides, offset) in self.unrolled.layouts.items():
            dtype, x, base = torch_dtype(self.unrolled.dtypes[buffer]), self.registers[register], inputs.get(buffer)
            begin = offset * dtype.itemsize + (0 if base is None else base.data_ptr())
            address = begin if x is None else x.data_ptr()
            made[register] = StandIn.of(shape, strides, dtype, self.machine.device, address)
        return made

    def kept_to_the_end(self) -> set[int]:
        """Return the buffers that are dropped with the run, when the caller's stream has joined all others."""
        allocated = self.unrolled.allocated
        kept = {buffer for buffer in self.late if buffer not in allocated or allocated[buffer].stream == CALLER}
        for buffer in kept:
            del self.late[buffer]
        return kept

    @property
    def copied_with_peers(self) -> list[int]:
        """The positions among a call's inputs and `out=` tensors of those that copy engines copy to or from a peer."""
        inputs = self.unrolled.inputs
        tensors = [*enumerate(range(inputs.start, inputs.stop)), *((len(inputs) + i, x) for x, i in self.placed)]
        return [position for position, register in tensors if register in self.engine_copies]

    # Running ------------------------------------------------------------------------------------------------------
    def run(
        self,
        inputs: Sequence[torch.Tensor | None],
        given: Sequence[Any] | None = None,
        capturing: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """Issue one run, with the outputs in the tensors `given` if there are any; return the outputs.

        `capturing`: the current stream is part of a capture.

        Raises HostIRError that names the statement whose launch failed.
        """
        registers, held = self.registers, self.unrolled.inputs
        self.streams[CALLER] = current(self.machine.device)
        registers[held.start : held.stop] = inputs
        if given is not None:
            for home, i in self.placed:
                registers[home] = given[i]
        # `in_flight` reads the position of this iterator, which costs the run nothing.
        self.cursor = cursor = iter(self.steps)
        if capturing:
            self.cursor = cursor = iter([self.in_captures.get(i, step) for i, step in enumerate(self.steps)])
        try:
            for step in cursor:
                step()
            if given is None:
                return tuple([registers[i] for i in self.unrolled.outputs])
            for register, i in self.copied:
                given[i].copy_(registers[register])
            return tuple(given)
        except BaseException as problem:
            self.join_workers()
            if not (at := self.in_flight()):  # interrupted before the first step
                raise
            failure = self.unrolled.failure(at[0], problem)
            if self.noticed and not capturing:
                self.machine.groups.abandoned = headline(failure)
            if not isinstance(problem, Exception):
                raise
            raise failure from problem
        finally:
            registers[:] = self.blank

    def join_workers(self) -> None:
        """Make the caller's stream wait for all issued work, so that memory freed now is not reused too early."""
        caller = self.streams[CALLER]
        for stream in self.machine.streams:
            with contextlib.suppress(RuntimeError):  # a worker that is no part of a capture cannot be waited for
                caller.wait_stream(stream)
        torch.cuda.set_stream(caller)

    @property
    def issued(self) -> int:
        """The number of steps that the latest run has begun to issue."""
        return len(self.ops) - operator.length_hint(self.cursor)

    @property
    def noticed(self) -> bool:
        """Whether the latest run has begun a step that peers can notice, or that waits for a flag or raises one."""
        return self.issued > self.unnoticed

    def in_flight(self) -> list[Op]:
        """Return the operation that the host issued last."""
        issued = self.issued
        return self.ops[issued - 1 : issued] if issued else []

    def describe(self, op: Op) -> str:
        return self.unrolled.describe(op)

    def progress(self) -> None:
        """Return None: the host never waits in a run. `Executor.synchronize` watches the device."""

    def give_up(self, problem: HostIRError) -> None:
        """Do nothing: what is issued runs on."""

    def problem(self) -> HostIRError | None:
        """Return what the device has reported so far, without waiting. Every call and the watchdog's thread ask.

        What peers signal late to a kernel that gave up waiting would count for the next call, so the call is abandoned.
        """
        found = self.machine.timeouts.problem()
        if found is not None and self.memory is not None and len(self.memory.offers) > 1:
            self.machine.groups.abandoned = headline(found)
        return found

    def reported_problem(self) -> str:
        found = self.problem()
        return headline(found) if found is not None else ""

    def busy(self) -> list[tuple[Op, str]]:
        """Return the operations that may be unfinished, each with a description. Not to be called during a capture."""
        pool = len(self.machine.streams)
        running = {i if i < pool else CALLER for i, stream in enumerate(self.streams) if not stream.query()}
        unfinished = [op for op in self.unrolled.ops if op.by_group and op.stream in running]
        missing = self.one_sided.missing() if self.one_sided else []
        return [*missing, *((op, "it may be in flight") for op in unfinished)]

    # Binding ------------------------------------------------------------------------------------------------------
    @property
    def flagged(self) -> CudaOneSided:
        """The one-sided operations, of a program that has some."""
        assert self.one_sided is not None
        return self.one_sided

    def append(self, op: Op, step: Step) -> None:
        self.steps.append(step)
        self.ops.append(op)

    def add(self, op: Op) -> None:
        """Bind one operation to its stream."""
        if op.by_group or uses_flags(self.unrolled, op):
            self.unnoticed = min(self.unnoticed, len(self.steps))
        for step in self.one_sided.before(op) if self.one_sided else ():
            self.append(op, step)
        BIND[type(op)](self, op)

    def here(self, op: Op, step: Step) -> None:
        """Add a step that runs on the operation's stream as the current one."""
        if op.stream != self.current:
            self.append(op, self.switch(op.stream))
            self.current = op.stream
        self.direct(op, step)

    def direct(self, op: Op, step: Step | None) -> None:
        """Add a step that issues to its streams by itself, whatever stream is current; None for none."""
        if step is not None:
            self.append(op, self.timeline.timed(op, step, self.streams) if self.timeline else step)

    def switch(self, stream: int) -> Step:
        streams, set_stream = self.streams, torch.cuda.set_stream
        return lambda: set_stream(streams[stream])

    def add_allocate(self, op: AllocateOp) -> None:
        self.here(op, bind_allocate(op, self.registers, self.machine.device))

    def add_symmetric(self, op: SymmetricOp) -> None:
        """Set its register now: it is the same in every run."""
        assert self.memory is not None
        self.registers[op.out] = self.memory.buffer(op)

    def add_view(self, op: ViewOp) -> None:
        view = bind_view(op, self.registers)
        if self.registers[op.x] is None:
            self.append(op, view)
        else:  # of a symmetric buffer: it is the same in every run
            view()

    def add_compute(self, op: ComputeOp) -> None:
        if self.one_sided is not None and id(op) in self.one_sided.products:
            self.freed_later = []
            return
        if op.ready is not None or op.done is not None:
            self.here(op, self.flagged.compute(op))
        else:
            kernel, captured = (
                kernels_for(self.machine.kernels, torch_dtype(op.dtype))[op.kind],
                self.machine.kernel(op),
            )
            compute = bind_compute(op, self.registers, kernel)
            self.here(op, compute)
            if kernel in IN_TRITON:
                self.launches.append((op, compute))
            if captured is not kernel:
                self.in_captures[len(self.steps) - 1] = bind_compute(op, self.registers, captured)

    def add_copy(self, op: CopyOp) -> None:
        if self.add_push(op):
            return
        if self.unrolled.touches_peer(op):
            self.engine_copies.update(self.unrolled.buffers[register] for register in self.unrolled.tensors(op))
            self.direct(op, self.flagged.copy(op))
        else:
            self.here(op, self.flagged.copy_here(op))

    def add_signal(self, op: SignalOp) -> None:
        if not self.add_push(op):
            self.direct(op, self.flagged.signal(op))

    def add_push(self, op: CopyOp | SignalOp) -> bool:
        """Return whether one kernel carries out the operation with others; bind it with the last of them."""
        pushes, pushed = self.flagged.pushes.get(id(op)), self.flagged.products.get(id(op))
        if pushes is None or op is not pushes.ops[-1]:
            return pushes is not None
        if pushed is not None:
            self.here(pushed.product, self.flagged.pushed_product(pushed.product, pushes))
            freed, self.freed_later = self.freed_later or [], None
            for each in freed:
                self.add_free(each)
        else:
            self.here(pushes.ops[0], self.flagged.push(pushes))
        return True

    def add_wait_signal(self, op: WaitSignalOp) -> None:
        self.direct(op, self.flagged.wait_signal(op))

    def add_barrier(self, op: BarrierOp) -> None:
        self.direct(op, self.flagged.barrier(op))

    def add_collective(self, op: CollectiveOp) -> None:
        inline = op.handle in self.awaited_at_once
        if inline:
            self.inlined.add(op.handle)
        self.here(op, collective(op, self.registers, *self.machine.groups.of(op.team), inline))

    def add_messages(self, op: MessagesOp) -> None:
        groups = self.machine.groups if op.collective else self.machine.messages
        self.here(op, messages(op, self.registers, *groups.of(op.team), self.machine.device))

    def add_wait(self, op: WaitOp) -> None:
        registers, handle = self.registers, op.handle
        if handle not in self.inlined:  # else the order of the stream does
            self.here(op, lambda: registers[handle].wait())

    def add_delay(self, op: DelayOp) -> None:
        self.here(op, partial(torch.cuda._sleep, op.microseconds * CYCLES_PER_US))

    def add_synchronize(self, op: SynchronizeOp) -> None:
        self.append(op, partial(join, self.streams, op.stream, op.other, torch.cuda.Event()))

    def add_mark(self, op: MarkOp) -> None:
        registers, streams, event = self.registers, self.streams, torch.cuda.Event()

        def step() -> None:
            event.record(streams[op.stream])
            registers[op.handle] = event  # waiting on it is like waiting on a Work

        self.append(op, step)

    def add_free(self, op: FreeOp) -> None:
        if self.freed_later is not None:
            self.freed_later.append(op)
            return
        registers = self.registers
        gone = [i for i, buffer in enumerate(self.unrolled.buffers) if buffer == op.buffer]
        self.mark(op, op.buffer)

        def step() -> None:
            for i in gone:
                registers[i] = None

        self.append(op, step)

    def mark(self, op: Op, buffer: int) -> None:
        """Tell the allocator which streams may still use a buffer when it is freed."""
        registers, streams = self.registers, self.streams

        def recording(stream: int) -> Step:
            return lambda: registers[buffer].record_stream(streams[stream])

        for stream in self.late.pop(buffer, ()):
            self.append(op, recording(stream))


# What each operation is on CUDA; a test compares the keys with the operations that there are.
BIND: dict[type[Op], Callable[[CudaPlan, Any], None]] = {
    AllocateOp: CudaPlan.add_allocate,
    SymmetricOp: CudaPlan.add_symmetric,
    ViewOp: CudaPlan.add_view,
    FreeOp: CudaPlan.add_free,
    ComputeOp: CudaPlan.add_compute,
    CopyOp: CudaPlan.add_copy,
    SignalOp: CudaPlan.add_signal,
    WaitSignalOp: CudaPlan.add_wait_signal,
    BarrierOp: CudaPlan.add_barrier,
    CollectiveOp: CudaPlan.add_collective,
    MessagesOp: CudaPlan.add_messages,
    MarkOp: CudaPlan.add_mark,
    WaitOp: CudaPlan.add_wait,
    SynchronizeOp: CudaPlan.add_synchronize,
    DelayOp: CudaPlan.add_delay,
}
