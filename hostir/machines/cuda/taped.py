"""Record a run of a plan on a tape, and issue later runs from the tape by native code.

The second run of a plan on the same stream, with tensors of the same alignment, is recorded. In later runs, one call of
a C function issues each segment of the tape, instead of many closures. Some steps remain in Python, for example steps
that only torch can run, and steps that allocate or free memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hostir.ir.source import logger
from hostir.machines.binding import Step
from hostir.machines.cuda.native import native
from hostir.machines.cuda.nccl import NativeCollectives, record_collective
from hostir.machines.cuda.products import UNIT, record_product
from hostir.machines.cuda.tape import (
    COLLECTIVE,
    Memory,
    Segment,
    TapeEntry,
    TapeWriter,
    without_redundant_waits,
)
from hostir.plan.operations import CALLER, AllocateOp, CollectiveOp, ComputeOp, ViewOp

if TYPE_CHECKING:
    from hostir.machines.cuda.machine import CudaPlan

LOG = logger(__name__)
MANY = 1000
ALIGNMENT = 16  # bytes: Triton compiles kernels for the alignment of addresses within this unit
MAX_RECORDINGS = 32  # of runs on one stream of the caller, each with another alignment; then products stay with torch
MAX_TAPES = 8  # the number of tapes that a plan keeps: callers have few streams, and most tensors are aligned
aten = torch.ops.aten
WITHOUT_WORK = aten.empty_strided.default, aten.record_stream.default  # beside the operators that make views


@dataclass(frozen=True)
class IssuedSteps:
    """The steps that a run issues.

    Fields:
        steps: the steps, in order.
        ends: for each n, the number of steps of the plan that have begun when the first n elements of `steps` have
            begun.
        text: the steps as text, with the driver calls of each segment; empty without a tape.
        issued: the number of driver calls by native code and of computations that Python issues; 0 without a tape. Any
            other step that Python issues counts as MANY.
    """

    steps: Sequence[Step]
    ends: Sequence[int]
    text: str = ""
    issued: int = 0

    @staticmethod
    def of(steps: Sequence[Step]) -> IssuedSteps:
        """Return the steps of a plan as they are, without a tape."""
        return IssuedSteps(steps, range(len(steps) + 1))


class Tapes:
    """The tapes of a plan. The key of a tape is the caller's stream and the alignment of the call's tensors.

    Each stream and each alignment needs a separate tape. Kernels are compiled for the alignment of addresses, and
    workspaces belong to streams.

    An address on a tape belongs to one tensor. In a run whose tensors overlap, it could belong to several. So a run is
    not recorded if two of the caller's tensors overlap. If the caller passes a tensor in this rank's symmetric memory,
    which has fixed addresses, the key has the address of the tensor.

    Args:
        module: the native launcher.
        collectives: the collectives that native code issues for the session; None to leave all collectives to torch.
    """

    def __init__(self, module: Any, collectives: NativeCollectives | None = None) -> None:
        self.module, self.collectives = module, collectives
        self.unit = ALIGNMENT  # of the keys, in bytes
        self.registers: tuple[int, ...] | None = None  # of the caller's tensors; None before the first run
        self.symmetric = range(0)  # the addresses of this rank's symmetric memory
        self.by_key: dict[tuple[int, ...], IssuedSteps | None] = {}  # None: seen once
        self.recordings = Counter[int]()  # by the caller's stream, of a plan with products

    def steps(self, plan: CudaPlan) -> IssuedSteps:
        """Return the steps to issue for the plan's next run. The tensors of the run must be in the plan's registers."""
        if self.registers is None:
            self.registers = (*plan.unrolled.inputs, *(home for home, _ in plan.placed))
            self.unit = UNIT if plan.in_captures else ALIGNMENT
            own = [register for register, op in plan.unrolled.symmetric.items() if op.rank == plan.unrolled.rank]
            if ranges := ranges_of(plan, own):
                self.symmetric = range(ranges[0].start, max(each.stop for each in ranges))
        symmetric, caller = self.symmetric, plan.streams[CALLER].cuda_stream
        key = self.module.key(caller, plan.registers, self.registers, symmetric.start, symmetric.stop, self.unit)
        if key in self.by_key:
            return self.by_key[key] or self.recording(plan, key, self.registers)
        if len(self.by_key) >= MAX_TAPES:
            self.by_key.clear()
        self.by_key[key] = None
        return plan.in_python

    @property
    def latest(self) -> IssuedSteps | None:
        """The latest tape; None if there is none yet."""
        return next((taped for taped in reversed(self.by_key.values()) if taped is not None), None)

    def recording(self, plan: CudaPlan, key: tuple[int, ...], registers: tuple[int, ...]) -> IssuedSteps:
        """Return a single step, which issues the plan's run in Python and records it.

        If two of the tensors in `registers` overlap, return the plan's steps in Python, which record nothing.
        """
        if any(one.stop > other.start for one, other in pairwise(ranges_of(plan, registers))):
            return plan.in_python
        ends = [0, 0]
        return IssuedSteps([partial(self.record, plan, key, registers, ends)], ends)

    def record(self, plan: CudaPlan, key: tuple[int, ...], registers: tuple[int, ...], ends: list[int]) -> None:
        """Issue a run in Python, and keep its tape for later runs with the same key.

        If only torch can issue the steps, the plan needs no tapes: Python issues all later runs. If no product can be
        recorded, or if alignments within UNIT differ too often, products stay with torch.
        """
        taped = TapedRun(plan, self.module, key[0], self.unit == UNIT, self.collectives)
        self.by_key[key] = steps = taped.tape(ends)
        if self.unit == UNIT:
            self.recordings[key[0]] += 1
            products = [reason for number, reason in taped.reasons.items() if number in plan.in_captures]
            refused = all(products)
            if refused or self.recordings[key[0]] >= MAX_RECORDINGS:
                self.unit = ALIGNMENT
                self.by_key.clear()
                reasons = {*products, "" if refused else "alignments differ too often"}
                LOG.info("@%s: products by torch: %s", plan.unrolled.program.name, ", ".join(sorted(reasons - {""})))
            if refused:
                symmetric = self.symmetric
                key = self.module.key(key[0], plan.registers, registers, symmetric.start, symmetric.stop, ALIGNMENT)
                self.by_key[key] = steps
        if not taped.has_segments:
            plan.tapes = None


def ranges_of(plan: CudaPlan, registers: Sequence[int]) -> list[range]:
    """Return the range of addresses of each tensor in these registers, in the order of the addresses."""
    held = [
        (x, plan.unrolled.extents[register][1]) for register in registers if (x := plan.registers[register]) is not None
    ]
    return [range(begin, begin + size) for begin, size in sorted((x.data_ptr(), n * x.element_size()) for x, n in held)]


class TapedRun:
    """Records one run of a plan, and makes native steps from its driver calls.

    Args:
        plan: the plan, with the tensors of a call in its registers.
        module: the native launcher.
        caller: the handle of the caller's stream.
        products: True to record products by cuBLAS.
        collectives: as for `Tapes`.
    """

    def __init__(
        self, plan: CudaPlan, module: Any, caller: int, products: bool, collectives: NativeCollectives | None
    ) -> None:
        self.plan, self.module, self.products, self.collectives = plan, module, products, collectives
        self.reasons: dict[int, str] = {}  # by step: why native code cannot issue a product or a collective
        self.streams = (*(stream.cuda_stream for stream in plan.machine.streams), caller)
        self.pending: list[TapeEntry] = []  # entries that are not in a segment yet
        self.steps: list[Step] = []
        self.ends = [0]
        self.lines: list[str] = []
        self.events: dict[int, int] = {}  # the numbers of the events in the text, by handle
        self.issued = 0
        self.has_segments = False

    def tape(self, ends: list[int]) -> IssuedSteps:
        """Issue all steps of the plan, and return the steps that a later run issues instead.

        While this method issues the steps, `ends[-1]` is the number of steps that have begun.
        """
        from hostir.kernels.devices import bind_thread  # which needs Triton

        plan, writer = self.plan, TapeWriter(self.memories, {handle: n for n, handle in enumerate(self.streams)})
        entries: list[Sequence[TapeEntry]] = []
        with writer, TorchWork() as work:
            for number, (step, op) in enumerate(zip(plan.steps, plan.ops, strict=True)):
                writer.entries, writer.place, writer.complete, work.seen = [], number, True, False
                ends[-1] = number + 1
                step()
                by_nccl = op.by_group and not (isinstance(op, CollectiveOp) and op.by)
                recorded = writer.complete and not work.seen and not by_nccl
                if not recorded and (record_again := self.recording_of(number)) is not None:
                    writer.entries, writer.complete = [], True
                    self.reasons[number] = record_again(self.module, writer)
                    recorded = writer.complete and not self.reasons[number]
                entries.append(writer.entries if recorded else ())
        with torch.cuda.device(plan.machine.device):  # in this thread it may be another one
            bind_thread(plan.machine.device)
            self.make_steps(entries)
        if writer.kept:  # this step does nothing, but keeps workspaces alive as long as the steps that use them
            self.add(partial(len, writer.kept), len(plan.steps))
        return IssuedSteps(self.steps, self.ends, "\n".join(self.lines), self.issued)

    def recording_of(self, number: int) -> Callable[[Any, TapeWriter], str] | None:
        """Return a function that records a step of a library, or None if only torch can issue this step.

        The function returns the reason why it cannot record the step, or an empty text.
        """
        plan = self.plan
        if self.products and number in plan.in_captures:
            return partial(record_product, plan, number)
        if self.collectives is not None and number in plan.recordable:
            return partial(record_collective, plan, number, self.collectives, plan.recordable[number])
        return None

    def make_steps(self, entries: Sequence[Sequence[TapeEntry]]) -> None:
        """Make the steps of later runs. `entries` are the tape entries of each step of the plan.

        A step that allocates memory, makes a view or sets the current stream may run before the entries that are still
        pending. A step that frees memory may not. Views that only native code would use are left out. So is a change of
        the current stream that no step notices.
        """
        plan, views, switch = self.plan, self.views_for_python(entries), None
        stream = now = CALLER  # the streams that are current in the plan, and in later runs
        for number, (step, op) in enumerate(zip(plan.steps, plan.ops, strict=True)):
            if entries[number]:
                self.pending += entries[number]
            elif step in plan.switches:
                stream, switch = plan.switches[step], step
            elif not isinstance(op, ViewOp):
                if not isinstance(op, AllocateOp):
                    self.flush(number)
                    reason = f", as {self.reasons[number]}" if self.reasons.get(number) else ""
                    self.lines.append(f"by Python: {plan.unrolled.describe(op)}{reason}")
                    self.issued += 1 if isinstance(op, ComputeOp) else MANY
                if switch is not None and stream != now:
                    self.add(switch, number)
                    now = stream
                self.add(step, number + 1)
            elif op.out in views:
                self.add(step, number + 1)
        self.flush(len(plan.steps))
        if switch is not None and stream != now:
            self.add(switch, len(plan.steps))

    def add(self, step: Step, end: int) -> None:
        """Add a step. `end` is the number of the plan's steps that count as begun once the added step has begun."""
        self.steps.append(step)
        self.ends.append(end)

    def views_for_python(self, entries: Sequence[Sequence[TapeEntry]]) -> set[int]:
        """Return the registers of the views that are outputs, or that steps in Python read or write."""
        plan, registers = self.plan, set(self.plan.unrolled.outputs)
        for step, op, recorded in [*zip(plan.steps, plan.ops, entries, strict=True)][::-1]:
            if isinstance(op, ViewOp):
                registers |= {op.x} if op.out in registers else set()
            elif not recorded and step not in plan.switches:
                registers.update((*op.reads, *op.writes))
        return registers

    def flush(self, end: int) -> None:
        """Add a step that issues the pending entries.

        `end` is the number of the plan's steps that count as begun once the added step has begun.
        """
        if not self.pending:
            return
        first = next((entry for entry in self.pending if entry.kind == COLLECTIVE), None)
        if first is not None and self.collectives is not None:
            text, number, last = self.plan.describe(self.plan.ops[first.place]), first.stream, self.pending[-1].place
            self.pending.append(self.collectives.entry(text, last, number, self.streams[number]))
        complete = not self.lines and end == len(self.plan.steps)
        segment = Segment.of(without_redundant_waits(self.pending, self.events, complete=complete))
        self.add(partial(native(self.module, segment, self.streams), self.plan.registers), end)
        self.lines.append(str(segment))
        self.issued += len(segment.entries)
        self.pending = []
        self.has_segments = True

    def memories(self) -> list[Memory]:
        """Return the memory of each buffer in the plan's registers. Views of buffers have no entry.

        The address of a buffer may change from call to call, so it has a slot. The address of symmetric memory is
        fixed, so it has no slot.
        """
        unrolled, registers = self.plan.unrolled, self.plan.registers
        names = {register: f"%{register}" for register in range(len(registers))}
        for held, values in ((unrolled.outputs, unrolled.program.outputs), (unrolled.inputs, unrolled.program.inputs)):
            names |= {register: str(value) for register, value in zip(held, values, strict=True)}
        memories: list[Memory] = []
        for register, buffer in enumerate(unrolled.buffers):
            x = registers[register]
            if register != buffer or not isinstance(x, torch.Tensor):
                continue
            symmetric = unrolled.symmetric.get(register)
            name = names[register] if symmetric is None else f"%{symmetric.home[0]} of rank {symmetric.rank}"
            size = unrolled.extents[register][1] * x.element_size()
            memories.append(Memory(name, x.data_ptr(), size, register if symmetric is None else None))
        return memories


class TorchWork(TorchDispatchMode):
    """A mode that sets `seen` to True when torch runs an operator that issues work to a stream."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or not (func.is_view or func in WITHOUT_WORK)
        return func(*args, **(kwargs or {}))
