"""The CUDA machine and its plans. Each rank has one CUDA device, with streams, events, NCCL and symmetric memory.

A run issues all work and returns. The host never waits for the device. The caller's stream is the stream that is
current when the call is made. A run can be captured into a CUDA graph: memory comes from torch's allocator, events have
no timing, and nothing queries the device.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllToAllOptions,
)

from hostir.ir.program import Program, shares_memory
from hostir.ir.source import HostIRError
from hostir.job.groups import Groups
from hostir.job.links import headline
from hostir.job.offers import KindOfSizes
from hostir.kernels.contractions import BY_CUBLAS
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.layout import Words
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernel_for
from hostir.knobs import NATIVE, PROFILE
from hostir.machines.binding import MAX_PLANS, Step
from hostir.machines.cuda import FEW
from hostir.machines.cuda.binder import CudaBinder
from hostir.machines.cuda.context import PlanContext
from hostir.machines.cuda.cublas import CublasStreams
from hostir.machines.cuda.graphs import uniform_only
from hostir.machines.cuda.memory import PeerMemory
from hostir.machines.cuda.native import DriverError, launcher
from hostir.machines.cuda.nccl import NativeCollectives
from hostir.machines.cuda.ranges import in_ranges, profiler_runs
from hostir.machines.cuda.streams import current, workers
from hostir.machines.cuda.taped import IssuedSteps, Tapes
from hostir.machines.cuda.timeline import Timeline
from hostir.machines.cuda.timeouts import Timeouts
from hostir.plan.lifetimes import homes
from hostir.plan.operations import (
    CALLER,
    NONE,
    ComputeOp,
    Op,
)
from hostir.plan.unroll import message_teams_of
from hostir.plan.unrolled import UnrolledProgram


class CudaMachine:
    """A device, its worker streams, its symmetric memory, and the process groups of this rank's teams.

    Messages have separate process groups. In a shared group, collectives would wait for messages, because NCCL runs the
    operations of a group in order.
    """

    name = "cuda"

    def __init__(self, device: torch.device, program: Program, kernels: Mapping[str, Kernel], groups: Groups) -> None:
        self.device = device
        self.kernels = kernels
        self.groups = groups
        self.timeouts = Timeouts(groups.rank)
        self.words = Words(device, MAX_PLANS + 1)  # one more: an executor makes a plan before it drops the oldest
        self.symmetric = groups.symmetric(lambda: PeerMemory(device, groups.rank, groups.all_ranks))
        self.messages = groups.messages
        self.teams = [team for team in message_teams_of(program) if groups.rank in team]
        self.streams = workers(device, program.streams)
        if shares_memory(program):  # each stream then follows the same stream of the previous call
            self.streams = groups.streams.setdefault(program.digest, self.streams)
            self.timeouts = groups.timeouts.setdefault(program.digest, self.timeouts)
        self.cublas_streams: dict[int, CublasStreams] = {}
        self.profiled = PROFILE.get()
        self.launcher = launcher() if NATIVE.get() and not self.profiled else None  # None: Python issues all steps

    @property
    def native_collectives(self) -> NativeCollectives:
        """The collectives that native code issues for the session. The first use allocates pinned memory."""
        if self.groups.native is None:
            seconds = self.groups.timeout.total_seconds()
            self.groups.native = NativeCollectives(seconds, self.device, self.groups.rank)
        native: NativeCollectives = self.groups.native
        return native

    def kernel(self, op: ComputeOp) -> Kernel:
        """Return the kernel of a computation. During captures, it calls cuBLAS on a private stream."""
        kernel = kernel_for(self.kernels, torch_dtype(op.dtype), op.computation, len(op.operands))
        if kernel not in BY_CUBLAS:
            return kernel
        if op.stream not in self.cublas_streams:
            priority = 0 if op.stream == CALLER else self.streams[op.stream].priority
            self.cublas_streams[op.stream] = CublasStreams(self.device, op.stream, priority)
        return self.cublas_streams[op.stream].wrap(kernel)

    def plan(
        self,
        unrolled: UnrolledProgram,
        timeline: Timeline | None = None,
        sizes_key: KindOfSizes = None,
        limit: int | None = None,
        first: Sequence[torch.Tensor | None] = (),
    ) -> CudaPlan:
        """Return a plan. All plans for compatible sizes share their symmetric memory: see `SymmetricMemory.of`.

        `first` are the inputs of the first call. Kernels are compiled and loaded for the alignment of their addresses.
        """
        self.connect([team for team in self.teams if team not in self.messages.made])
        return CudaPlan(self, unrolled, timeline, sizes_key, limit, first)

    def connect(self, teams: Sequence[tuple[int, ...]]) -> None:
        """Create this rank's process groups for messages, and connect their ranks.

        Without this method, NCCL would connect the ranks at the first message.
        """
        self.messages.prepare(teams)
        for team in teams:
            x = torch.zeros(len(team), device=self.device)
            self.messages.made[team].alltoall_base(torch.empty_like(x), x, [], [], AllToAllOptions()).wait()
        if teams:
            torch.cuda.synchronize(self.device)


class CudaPlan:
    """An unrolled program bound to a device: a list of steps, which are closures over one list of registers.

    Fields:
        for_captures: the plan that captures by the caller issue, or the error that they raise. None if they issue this
            plan.
        plain: a reason why the executor captures no run of the plan: plain calls are faster, or are being timed.
        settled: True if `for_captures` and `plain` do not change any more.
    """

    for_captures: CudaPlan | HostIRError | None = None
    plain = ""
    settled = False

    def __init__(
        self,
        machine: CudaMachine,
        unrolled: UnrolledProgram,
        timeline: Timeline | None,
        sizes_key: KindOfSizes = None,
        limit: int | None = None,
        first: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.machine = machine
        self.unrolled = unrolled
        self.timeline = timeline
        self.registers: list[Any] = [None] * len(unrolled.buffers)
        self.streams = [*machine.streams, torch.cuda.default_stream(machine.device)]  # CALLER indexes the last
        outputs = list(enumerate(zip(homes(unrolled), unrolled.outputs, strict=True)))
        # A run computes some outputs in the caller's tensors, and copies the other outputs to them at its end.
        self.placed = [(home, i) for i, (home, _) in outputs if home != NONE]
        self.copied = [(x, i) for i, (home, x) in outputs if home == NONE and x != NONE]
        self.uniform_only = uniform_only(unrolled)
        self.memory = machine.symmetric.of(unrolled, self, sizes_key, limit)
        context = PlanContext(
            unrolled=unrolled,
            device=machine.device,
            registers=self.registers,
            streams=self.streams,
            kernels=machine.kernels,
            kernel=machine.kernel,
            timeouts=machine.timeouts,
            words=machine.words,
        )
        binder = CudaBinder(machine, context, self.memory, timeline)
        binder.bind()
        self.one_sided = binder.one_sided
        self.steps = binder.steps
        self.cursor: Iterator[Step] = iter(self.steps)  # its position says how many steps the latest run has begun
        self.issuing = self.in_python = IssuedSteps.of(self.steps)  # what the latest run issues
        taped = machine.launcher is not None and timeline is None
        collectives = machine.native_collectives if taped and binder.recordable else None
        self.tapes = Tapes(machine.launcher, collectives) if taped else None
        self.in_captures = binder.in_captures  # by position: the steps that a capture issues instead
        self.recordable = binder.recordable  # by position: the NCCL backends of collectives that native code can issue
        self.ops = binder.ops  # the operation of each step
        self.switches = binder.switches  # the steps that only make another stream the current one, and this stream
        self.launches = binder.launches  # the steps that only launch kernels of Triton, with their operations
        self.engine_copies = binder.engine_copies  # the buffers that copy engines copy to or from a peer
        self.unnoticed = binder.unnoticed  # the number of first steps of a run that no peer and no later run can notice
        self.reports = machine.timeouts.read  # the words to which kernels report timeouts
        self.blank = list(self.registers)  # the registers between runs: symmetric buffers and their views
        self.load(first)

    def load(self, first: Sequence[torch.Tensor | None]) -> None:
        """Compile and load the Triton kernels that a run launches, for inputs with the addresses of `first`.

        Raises HostIRError if a kernel is too large for the GPU. The error names the kernel's statement. All ranks with
        the same layouts raise it, before they issue any work of a call.
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
        """Load the kernels of an operation: run its step in the context of `loading`, which launches nothing."""
        try:
            step()
        except Exception as problem:
            raise self.unrolled.failure(op, problem) from problem

    def stand_ins(self, inputs: Mapping[int, torch.Tensor | None]) -> list[Any]:
        """Return a list with a stand-in for the tensor that each register holds in a run.

        `inputs` holds the caller's inputs, by their registers. The memory that a run allocates is aligned. So a
        stand-in for a tensor in such memory has the tensor's offset as its address.
        """
        from hostir.kernels.devices import StandIn  # which needs Triton

        standins = list(self.registers)
        for register, (buffer, shape, strides, offset) in self.unrolled.layouts.items():
            dtype, x, base = torch_dtype(self.unrolled.dtypes[buffer]), self.registers[register], inputs.get(buffer)
            begin = offset * dtype.itemsize + (0 if base is None else base.data_ptr())
            address = begin if x is None else x.data_ptr()
            standins[register] = StandIn.of(shape, strides, dtype, self.machine.device, address)
        return standins

    @property
    def copied_with_peers(self) -> list[int]:
        """The positions of the caller's tensors that copy engines copy to or from a peer.

        Positions count the inputs first, and then the `out=` tensors.
        """
        inputs = self.unrolled.inputs
        tensors = [*enumerate(range(inputs.start, inputs.stop)), *((len(inputs) + i, x) for x, i in self.placed)]
        return [position for position, register in tensors if register in self.engine_copies]

    @property
    def eager_only(self) -> str:
        """The reason why the executor captures no run of the plan; empty if it captures them.

        A replay of a graph begins a few microseconds later on the device than a kernel that is launched. If a run has
        few driver calls, the replay does not save this time on the host either.
        """
        latest = self.tapes.latest if self.tapes is not None else None
        if not self.uniform_only and latest is not None and 0 < latest.issued <= FEW:
            return f"its {latest.issued} driver calls are issued as fast as a graph"
        return self.uniform_only or self.plain

    def run(
        self,
        inputs: Sequence[torch.Tensor | None],
        outs: Sequence[Any] | None = None,
        capturing: bool = False,
        caller: torch.cuda.Stream | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Issue one run and return the outputs.

        If `outs` is not None, the outputs are written to these tensors. `capturing` is True if the current stream is
        part of a capture. `caller` is the current stream, if the caller knows it. If a launch fails, raises HostIRError
        that names the statement.
        """
        registers, held = self.registers, self.unrolled.inputs
        self.streams[CALLER] = caller or current(self.machine.device)
        registers[held.start : held.stop] = inputs
        if outs is not None:
            for home, i in self.placed:
                registers[home] = outs[i]
        if capturing or self.machine.profiled or profiler_runs():
            steps = self.steps_in_python(capturing)
        else:
            steps = self.in_python if self.tapes is None else self.tapes.steps(self)
        self.issuing = steps
        self.cursor = cursor = iter(steps.steps)  # `in_flight` reads its position, which costs the run nothing
        try:
            for step in cursor:
                step()
            if outs is None:
                return tuple(map(registers.__getitem__, self.unrolled.outputs))
            for register, i in self.copied:
                outs[i].copy_(registers[register])
            return tuple(outs)
        except BaseException as problem:
            self.join_workers()
            issued = problem.place + 1 if isinstance(problem, DriverError) else self.issued
            if not issued:  # interrupted before the first step
                raise
            failure = self.unrolled.failure(self.ops[issued - 1], problem)
            if issued > self.unnoticed and not capturing:
                self.machine.groups.abandoned = headline(failure)
            if not isinstance(problem, Exception):
                raise
            raise failure from problem
        finally:
            registers[:] = self.blank

    def steps_in_python(self, capturing: bool) -> IssuedSteps:
        """Return the steps to issue for a run that is captured or profiled."""
        steps = [self.in_captures.get(i, step) for i, step in enumerate(self.steps)] if capturing else self.steps
        if self.machine.profiled or profiler_runs():
            steps = in_ranges(self.unrolled, self.ops, steps)
        return IssuedSteps.of(steps)

    def join_workers(self) -> None:
        """Make the caller's stream the current stream, and make it wait for the work on all worker streams.

        Memory that is freed after this is not reused too early.
        """
        caller = self.streams[CALLER]
        for stream in self.machine.streams:
            with contextlib.suppress(RuntimeError):  # a stream of a capture cannot wait for a worker outside it
                caller.wait_stream(stream)
        torch.cuda.set_stream(caller)

    @property
    def issued(self) -> int:
        """The number of steps that the latest run has begun to issue."""
        return self.issuing.ends[-1 - operator.length_hint(self.cursor)]

    @property
    def noticed(self) -> bool:
        """True if the latest run has begun a step that affects peers, waits for a flag, or raises a flag."""
        return self.issued > self.unnoticed

    def in_flight(self) -> list[Op]:
        """Return a list with the last operation that the host issued in the latest run; empty if it issued none."""
        issued = self.issued
        return self.ops[issued - 1 : issued] if issued else []

    def describe(self, op: Op) -> str:
        return self.unrolled.describe(op)

    def progress(self) -> None:
        """Return None, because the host never waits in a run, so there is no progress to watch.

        `Executor.synchronize` watches the device.
        """

    def give_up(self, problem: HostIRError) -> None:
        """Do nothing: work that was issued cannot be stopped."""

    def problem(self) -> HostIRError | None:
        """Return an error for the timeouts and the misfits that the device has reported so far, or None.

        This method does not wait for the device. Every call and the watchdog's thread use it. If a kernel has given up
        waiting, a late signal or late data of a peer would count for the next call. So in this case the method also
        marks the groups as abandoned: the ranks then renew their shared state before the next call.
        """
        reports = self.machine.timeouts
        problem = reports.problem()
        if problem is not None and reports.lost and self.memory is not None and len(self.memory.offers) > 1:
            self.machine.groups.abandoned = headline(problem)
        reports.lost = False
        return problem

    def reported_problem(self) -> str:
        problem = self.problem()
        return headline(problem) if problem is not None else ""

    def busy(self) -> list[tuple[Op, str]]:
        """Return the operations that may be unfinished, and a description of each.

        This method must not be called during a capture.
        """
        pool = len(self.machine.streams)
        running = {i if i < pool else CALLER for i, stream in enumerate(self.streams) if not stream.query()}
        unfinished = [op for op in self.unrolled.ops if op.by_group and op.stream in running]
        missing = self.one_sided.flags.missing() if self.one_sided else []
        return [*missing, *((op, "it may be in flight") for op in unfinished)]
