"""The tasks of a host program for the cost model: what each rank does, and which tasks each task waits for.

Each rank's program is unrolled as for a run, and every operation becomes a task. So the cost model sees exactly what
machines run, and needs to know nothing of strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from hostir.ir.machine import Done, Ready, uncollected
from hostir.ir.program import Program
from hostir.ir.types import FP8
from hostir.runtime.binding import PushedProduct, Pushes
from hostir.runtime.kernels.tiles import MIN_OWN_ROWS, Gemm
from hostir.runtime.order import CALLER, NONE
from hostir.runtime.unroll import (
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
    UnrolledProgram,
    ViewOp,
    WaitOp,
    WaitSignalOp,
    unroll,
)

F32 = 4  # bytes


@dataclass(frozen=True)
class Nothing:
    """No work: a stream waits for another task."""


@dataclass(frozen=True)
class Pause:
    """A fixed time on a stream: that of a `delay`, or with `kind` that of a signal.

    Kinds are `signal`, sent by the stream itself or by a computation; `kernel`, sent by a kernel of its own; and
    `raised`, sent by the kernel of the copies before it, which takes no extra time.
    """

    microseconds: float = 0.0
    kind: str = ""


@dataclass(frozen=True)
class Traffic:
    """A computation that is bound by memory.

    Fields:
        bytes: what it reads and writes.
        passes: the kernels of ATen that compute it.
        in_aten: what these read and write; 0 for the same bytes.
    """

    bytes: int
    passes: int = 1
    in_aten: int = 0


@dataclass(frozen=True)
class CostTransfer:
    """A collective or messages of a team. `bytes` is the size of the whole tensor, gathered, summed or exchanged."""

    kind: str
    bytes: int
    ranks: int


@dataclass(frozen=True)
class CostCopy:
    """A copy to `peer` if `out`, else from it: by a copy engine if `sms` is 0, else by a kernel on `sms` SMs.

    `first` is whether it is the first copy of its kernel; `in_product`, whether a product of Triton stores it itself.
    """

    bytes: int
    peer: int
    out: bool
    sms: int = 0
    first: bool = False
    in_product: bool = False


@dataclass(frozen=True)
class CostBarrier:
    """A barrier among `ranks` ranks."""

    ranks: int


What = Nothing | Pause | Gemm | Traffic | CostTransfer | CostCopy | CostBarrier


@dataclass(eq=False)
class CostTask:
    """An operation that a rank issues to a lane: one of its streams, or the sequence of a team's communications.

    Fields:
        after: the tasks that end before it begins, on its own lane.
        joins: the tasks that end before it begins, on other lanes.
        partners: every rank's task of the same collective or barrier, itself included; they begin together.
        blocks: for a computation that waits for flags, the signals of each block, in the order in which it computes
            them.
        raises: for a computation that raises flags, those signals, in the order in which it computes their blocks.
        overlapped_sms: the number of SMs of the copies that it overlaps; 0 if there are none.
        reserved_sms: the number of SMs that it leaves to signals.
        launches: what the host issues after the previous task, up to and with this one: numbers by kind.
    """

    rank: int
    what: What
    after: list[CostTask] = field(default_factory=list)
    joins: list[CostTask] = field(default_factory=list)
    partners: list[CostTask] = field(default_factory=list)
    blocks: list[list[CostTask]] = field(default_factory=list)
    raises: list[CostTask] = field(default_factory=list)
    overlapped_sms: int = 0
    reserved_sms: int = 0
    launches: Mapping[str, int] = field(default_factory=dict)


FlagKey = tuple[int, Any, int]  # rank, symmetric buffer, element


@dataclass
class Shared:
    """State that the tasks of all ranks share: flags, waits for flags, and tasks that begin together."""

    flags: dict[FlagKey, list[tuple[int, CostTask]]] = field(default_factory=dict)  # epochs and their signals
    waits: list[tuple[CostTask, int | None, FlagKey, int]] = field(default_factory=list)  # task, block, flag, epoch
    meetings: dict[tuple[Any, ...], list[CostTask]] = field(default_factory=dict)


class RankTasks:
    """Builds the tasks of one rank from its unrolled program."""

    def __init__(self, unrolled: UnrolledProgram, shared: Shared) -> None:
        self.unrolled = unrolled
        self.shared = shared
        self.tasks: list[CostTask] = []
        self.last: dict[Any, CostTask] = {}  # the latest task of each lane
        self.communications: dict[int, CostTask] = {}  # by handle
        self.counts: Counter[Any] = Counter()  # the number of collectives and of barriers of each team so far
        self.stream = CALLER
        self.launched: dict[str, int] = {}  # what the host has issued since the latest task: numbers by kind
        self.bytes = {NONE: 0} | {
            register: prod(x.shape) * unrolled.dtypes[x.buffer].bytes for register, x in unrolled.layouts.items()
        }
        runs = Pushes.of(unrolled)
        self.pushes = {id(op): run for run in runs for op in run.ops}
        self.in_products = {id(op) for each in PushedProduct.of(unrolled, runs) for op in each.pushes.ops}
        self.pushed: dict[int, CostTask] = {}  # by stream: the first task of the latest kernel that copies
        for op in unrolled.ops:
            TASKS[type(op)](self, op)
        if unrolled.symmetric:  # a kernel resets flags at the end of a call
            self.issue(CALLER, Traffic(0), launch="compute")

    def issue(self, lane: Any, what: What, *joins: CostTask | None, launch: str = "") -> CostTask:
        """Add a task after the latest one of its lane, and after `joins`."""
        if isinstance(lane, int) and lane != self.stream:
            self.stream = lane
            self.launch("stream")
        self.launch(launch)
        after = [self.last[lane]] if lane in self.last else []
        others = [t for t in joins if t is not None and t not in after]
        task = CostTask(self.unrolled.rank, what, after, others, launches=self.launched)
        self.launched = {}
        self.tasks.append(task)
        self.last[lane] = task
        return task

    def meet(self, task: CostTask, *key: Any) -> None:
        self.counts[key] += 1
        partners = self.shared.meetings.setdefault((*key, self.counts[key]), [])
        partners.append(task)
        task.partners = partners

    def launch(self, kind: str) -> None:
        """Count something that the host issues before the next task, or for it."""
        self.launched[kind] = self.launched.get(kind, 0) + 1

    def total(self, registers: Sequence[int]) -> int:
        return sum([self.bytes[register] for register in registers])

    def flag(self, flags: int, slot: int) -> FlagKey:
        """Return the key of a flag, which is the same on all ranks."""
        row = self.unrolled.layouts[flags]
        home = self.unrolled.symmetric[row.buffer]
        return home.rank, home.home, row.offset + slot * row.strides[0]

    def allocate(self, op: AllocateOp) -> None:
        self.launch("allocate")

    def view(self, op: ViewOp) -> None:
        if op.x not in self.unrolled.symmetric:  # views of symmetric buffers are made once for all calls
            self.launch("view")

    def free(self, op: FreeOp) -> None:
        self.launch("view")

    def nothing(self, op: SymmetricOp) -> None:
        """Do nothing: symmetric buffers are there before a call."""

    def compute(self, op: ComputeOp) -> None:
        contracts, ready = op.place.statement.contracts, op.ready
        mine = NONE if ready is None or ready.own is None else ready.own
        own = 0 if mine == NONE else prod(self.unrolled.layouts[mine].shape[:-1])
        if contracts and 0 < own < MIN_OWN_ROWS:  # the kernel copies so few
            self.issue(op.stream, Traffic(2 * self.bytes[mine]), launch="compute")
        what = self.gemm(op, own) if contracts else self.traffic(op)
        task = self.issue(op.stream, what, launch="matmul" if contracts else "compute")
        if ready is not None:
            self.by_blocks(task, op, ready)
        if op.done is not None:
            self.raising(task, op, op.done)

    def gemm(self, op: ComputeOp, own: int) -> Gemm:
        """Return the matmul of an operation, whose own rows are `own` in number and apart from the others."""
        out, ready = self.unrolled.layouts[op.out], op.ready
        rows, k = prod(out.shape[:-1]), self.unrolled.layouts[op.operands[0]].shape[-1]
        dtype, result = self.gemm_dtype(op), self.unrolled.dtypes[out.buffer].bytes
        plain = Gemm(rows, out.shape[-1], k, dtype, result=result if dtype.startswith("f8") else None)
        if ready is None:
            return plain
        block = max(rows // ready.results, 1)
        return replace(plain, block=block, separate=own >= MIN_OWN_ROWS, overlapped=ready.overlapped_sms > 0)

    def traffic(self, op: ComputeOp) -> Traffic:
        """Return the traffic of a computation that is no matmul.

        ATen adds up in f32, one kernel a source, if own rows take the place of a source's, or something is added.
        """
        moved = self.total((op.out, *op.operands))
        own = op.ready is not None and op.ready.own is not None
        addends = [register for register in op.operands[1:] if register != NONE]
        activation = bool(op.options.get("activation"))
        if op.kind != "sum" or not (own or addends or activation):
            return Traffic(moved)
        out, x = self.unrolled.layouts[op.out], self.unrolled.layouts[op.operands[0]]
        more = max(x.shape[op.options["axis"]] - 1, 0) + len(addends)
        size = self.unrolled.dtypes[out.buffer].bytes
        each = (size + F32) + more * (size + 2 * F32) + activation * 2 * F32 + (F32 + size)
        return Traffic(moved, 2 + more + activation, prod(out.shape) * each)

    def gemm_dtype(self, op: ComputeOp) -> str:
        """Return the dtype of a matmul's operands, as `Gemm` names it."""
        layouts, (a, _, *scales) = self.unrolled.layouts, op.operands
        name = self.unrolled.dtypes[layouts[a].buffer].name
        if name not in FP8:
            return name
        return "f8" if op.options["fast"] and layouts[scales[0]].shape[-1] == 1 else "f8s"

    def by_blocks(self, task: CostTask, op: ComputeOp, ready: Ready) -> None:
        """Make a task wait for the flags of its blocks while it runs."""
        task.overlapped_sms, task.reserved_sms = ready.overlapped_sms, ready.reserved_sms
        if ready.overlapped_sms:
            first = self.pushed[op.stream]
            task.after, task.joins = [*first.after], [*first.joins]
        task.blocks = [[] for _ in ready.order]
        for turn, block in enumerate(ready.order):
            for slot in ready.needed(block):
                self.shared.waits.append((task, turn, self.flag(ready.flags, slot), ready.epoch))

    def raising(self, task: CostTask, op: ComputeOp, done: Done) -> None:
        """Make a task raise its flags, each after a block of its result."""
        order = done.order
        if op.ready is not None:  # its order is that of the blocks that it waits for
            first = -(-op.ready.first * done.blocks // op.ready.results)
            order = tuple((first + n) % done.blocks for n in range(done.blocks))
        for slot in order:
            flag = CostTask(task.rank, Pause(kind="signal"))
            self.tasks.append(flag)
            task.raises.append(flag)
            self.shared.flags.setdefault(self.flag(done.flags, slot), []).append((done.epoch, flag))

    def collective(self, op: CollectiveOp) -> None:
        task = self.communicate(op, CostTransfer(op.kind, max(self.bytes[op.x], self.bytes[op.out]), len(op.team)))
        self.meet(task, "communication", op.team)

    def messages(self, op: MessagesOp) -> None:
        moved = max(self.total(op.reads), self.total(op.writes))  # links are full duplex
        self.communicate(op, CostTransfer("messages", moved, len(op.team)), op.collective)

    def communicate(self, op: CollectiveOp | MessagesOp, what: CostTransfer, collective: bool = True) -> CostTask:
        before = self.last.get(op.stream)
        task = self.issue(("team", op.team, collective), what, before, launch="communicate")
        self.communications[op.handle] = task
        return task

    def mark(self, op: MarkOp) -> None:
        if op.stream in self.last:
            self.communications[op.handle] = self.last[op.stream]

    def wait(self, op: WaitOp) -> None:
        self.issue(op.stream, Nothing(), self.communications.get(op.handle), launch="wait")

    def copy(self, op: CopyOp) -> None:
        source, target = self.unrolled.owner(op.x), self.unrolled.owner(op.out)
        out = source == self.unrolled.rank
        if not op.sms and source == target:  # by a kernel
            self.issue(op.stream, Traffic(2 * self.bytes[op.x]), launch="compute")
        elif not op.sms:
            self.issue(op.stream, CostCopy(self.bytes[op.x], target if out else source, out), launch="copy")
        else:
            first = op is self.pushes[id(op)].ops[0]
            copy = CostCopy(self.bytes[op.x], target, out, op.sms, first, id(op) in self.in_products)
            task = self.issue(op.stream, copy, launch="push" if first else "")
            if first:
                self.pushed[op.stream] = task

    def signal(self, op: SignalOp) -> None:
        if op.sms:
            task = self.issue(op.stream, Pause(kind="kernel"), launch="push")
            if task.after and isinstance(task.after[0].what, Nothing):
                # The time of such a signal is measured from the end of the copy that its stream waits for.
                task.after = [*task.after[0].after, *task.after[0].joins]
        elif id(op) in self.pushes:
            task = self.issue(op.stream, Pause(kind="raised"))
        else:
            task = self.issue(op.stream, Pause(kind="signal"), launch="signal")
        self.shared.flags.setdefault(self.flag(op.flags, op.slot), []).append((op.epoch, task))

    def wait_signal(self, op: WaitSignalOp) -> None:
        task = self.issue(op.stream, Nothing(), launch="signal")
        self.shared.waits.append((task, None, self.flag(op.flags, op.slot), op.epoch))

    def barrier(self, op: BarrierOp) -> None:
        self.meet(self.issue(op.stream, CostBarrier(len(op.team)), launch="barrier"), "barrier", op.team)

    def synchronize(self, op: SynchronizeOp) -> None:
        self.issue(op.stream, Nothing(), self.last.get(op.other), launch="synchronize")

    def delay(self, op: DelayOp) -> None:
        self.issue(op.stream, Pause(float(op.microseconds)), launch="delay")


# The method that adds the tasks of each kind of operation; a test compares the keys with all kinds.
TASKS: dict[type[Op], Callable[[RankTasks, Any], None]] = {
    AllocateOp: RankTasks.allocate,
    SymmetricOp: RankTasks.nothing,
    ViewOp: RankTasks.view,
    FreeOp: RankTasks.free,
    ComputeOp: RankTasks.compute,
    CopyOp: RankTasks.copy,
    SignalOp: RankTasks.signal,
    WaitSignalOp: RankTasks.wait_signal,
    BarrierOp: RankTasks.barrier,
    CollectiveOp: RankTasks.collective,
    MessagesOp: RankTasks.messages,
    MarkOp: RankTasks.mark,
    WaitOp: RankTasks.wait,
    SynchronizeOp: RankTasks.synchronize,
    DelayOp: RankTasks.delay,
}


@uncollected()
def tasks_of(program: Program, sizes: Mapping[str, int]) -> list[CostTask]:
    """Return all ranks' tasks, each rank's in issue order. Raises HostIRError if sizes do not fit the program."""
    shared = Shared()
    tasks = [t for rank in range(program.ranks) for t in RankTasks(unroll(program, rank, sizes), shared).tasks]
    for waiter, turn, flag, epoch in shared.waits:
        sent = [task for number, task in shared.flags.get(flag, ()) if number >= epoch]
        if not sent:
            continue
        there = sent[0].rank == waiter.rank and not waiter.overlapped_sms  # set before the waiter begins
        if turn is None or there:
            waiter.after.append(sent[0])
        else:
            waiter.blocks[turn].append(sent[0])
    return tasks
