"""The cost model: estimate how long a call of a host program takes, by simulating the tasks of all ranks."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import inf, log2, prod
from typing import Any

from hostir.choice.platforms import Hardware
from hostir.ir.machine import Done, Ready, uncollected
from hostir.ir.program import Program
from hostir.ir.types import FP8
from hostir.runtime.binding import PushedProduct, Pushes
from hostir.runtime.kernels.tiles import MIN_OWN_ROWS, Gemm, Grid, Tile, block_ends, choose, duration
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

# Tasks of each rank ---------------------------------------------------------------------------------------------------
# The tasks of each rank of a host program: their kind and size, and the tasks that each waits for.
#
# Each rank's program is unrolled as for a run, and every operation becomes a task. So the cost model sees exactly what
# machines run, and needs to know nothing of strategies.


# Kinds of tasks ---------------------------------------------------------------------------------------------------
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


# One rank ---------------------------------------------------------------------------------------------------------
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

    # Operations -----------------------------------------------------------------------------------------------------
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


def flops(tasks: Sequence[CostTask]) -> float:
    """Return the floating point operations of the busiest rank."""
    total: dict[int, float] = {}
    for task in tasks:
        if isinstance(task.what, Gemm):
            total[task.rank] = total.get(task.rank, 0.0) + 2.0 * task.what.m * task.what.n * task.what.k
    return max(total.values(), default=0.0)


# Simulation on a clock ------------------------------------------------------------------------------------------------
# All ranks' tasks run on one clock, and share resources.
#
# This is a fluid model: every task under way has a rate, and the clock advances from the end of one task to the next.
# The computations of a rank share its SMs, of which a collective takes some; the copies of a rank share its link, in
# each direction; the collectives of a team run one after another; a task that waits for another stream starts `edge`
# later. A matmul that waits for flags or raises them is simulated tile by tile: each of n SMs takes every n-th tile in
# the order of the blocks, and begins it when the SM is free and the block has arrived; a flag is raised when all tiles
# of its block have ended.

F32 = 4  # bytes
EPSILON = 1e-9
COOL = 0.2e12  # the most floating point operations of a call that run at the peak: with more, power limits the clock
SLOWEST = 0.81  # the least share of the peak, however long a call computes
LEFTOVER = 0.5  # how useful the SMs that a matmul's last wave leaves are to another matmul: both compete for L2
SMALL = 3.0  # microseconds of a kernel that moves few bytes
STARTED = 0.4  # the share of `poll` that is left if the kernel has started before the blocks arrive
GRAPH, EAGER = "graph", "eager"


def estimates(tasks: Sequence[CostTask], hardware: Hardware, kernels: str) -> Mapping[str, float]:
    """Return the microseconds of a call: `graph` if it is replayed from a CUDA graph, `eager` if it is issued anew.

    In a series of calls, each takes the time of the device, or the host's time to issue it if that is longer.
    """
    costs = Costs(hardware, kernels, flops(tasks))
    device = hardware.begin + Simulation(tasks, costs).run()
    return {GRAPH: device, EAGER: max(device, costs.host(tasks) - hardware.host_lead)}


class Costs:
    """The times of one program's tasks. They depend on its total `work` in FLOP, as power limits the GPU's clock."""

    def __init__(self, hardware: Hardware, kernels: str, work: float) -> None:
        self.hardware = hardware
        self.in_triton = kernels == "triton"
        self.sums_in_triton = kernels != "aten"
        self.family = hardware.kernels["triton" if self.in_triton else "aten"]
        doublings = max(0.0, log2(work / COOL)) if work else 0.0
        rates = self.family.rates.scaled(max(1 - hardware.throttle * doublings, SLOWEST))
        self.rates = replace(rates, read=hardware.memory)  # the rate of reads and writes, as a matmul stores as well

    def launch(self, kind: str) -> float:
        """Return the host's microseconds to issue something."""
        return self.hardware.launch.get("triton matmul" if self.in_triton and kind == "matmul" else kind, 0.0)

    def host(self, tasks: Sequence[CostTask]) -> float:
        """Return the host's microseconds to issue a call, on the rank that issues most."""
        took: dict[int, float] = {}
        for task in tasks:
            pushed = "push" if self.in_product(task.what) else ""
            each = sum(n * self.launch(kind) for kind, n in task.launches.items() if kind != pushed)
            if isinstance(task.what, Traffic):
                each += (self.passes(task.what) - 1) * self.launch("compute")
            if self.polls(task.what):
                each += self.launch("flags") * (bool(task.blocks) + bool(task.raises))
            elif parts := 0 if task.overlapped_sms else max(len(task.blocks), len(task.raises)):
                # A kernel for each block, between stream operations that wait and signal.
                kind = "matmul" if isinstance(task.what, Gemm) else "compute"
                flags = sum(map(len, task.blocks)) + len(task.raises)
                each += (parts - 1) * self.launch(kind) + flags * self.launch("signal")
            took[task.rank] = took.get(task.rank, self.launch("call")) + each
        return max(took.values(), default=0.0)

    @cache  # noqa: B019  # the object lives as long as one simulation, which asks at each event
    def alone(self, task: CostTask) -> float:
        """Return the microseconds of a task if nothing else runs."""
        what, h = task.what, self.hardware
        if task.raises:
            return self.by_blocks(task, 0.0, [])[0]
        if isinstance(what, Gemm):
            return self.gemm(what)
        if isinstance(what, Traffic):
            return SMALL * self.passes(what) + self.moving(what)
        if isinstance(what, CostTransfer):
            return self.transfer(what) if what.ranks > 1 else 0.0
        if isinstance(what, CostCopy):
            return self.copying(what, task.rank)
        if isinstance(what, CostBarrier):
            return h.barrier if what.ranks > 1 else 0.0
        if isinstance(what, Pause):
            return {"signal": h.signal, "kernel": h.kernel_signal}.get(what.kind, what.microseconds)
        return 0.0

    def polls(self, what: What) -> bool:
        """Return True if one kernel computes all blocks, and polls and raises their flags by itself."""
        return self.sums_in_triton if isinstance(what, Traffic) else self.in_triton

    def passes(self, what: Traffic) -> int:
        """Return how many kernels a computation takes that is bound by memory."""
        return 1 if self.sums_in_triton else what.passes

    def moving(self, what: Traffic) -> float:
        """Return the microseconds that memory takes for such a computation."""
        moved = what.bytes if self.sums_in_triton else what.in_aten or what.bytes
        return moved / self.hardware.memory / 1e3

    def copying(self, what: CostCopy, rank: int) -> float:
        """Return the microseconds of a copy; the start of a kernel that copies counts with its first copy."""
        h = self.hardware
        if not what.sms:
            return h.copy + what.bytes / h.link / 1e3
        if self.in_product(what):
            return SMALL * what.first + what.bytes / h.link / 1e3
        rate = h.memory / 2 if what.peer == rank else min(h.stores * what.sms, h.link)
        return h.push * what.first + what.bytes / rate / 1e3

    def in_product(self, what: What) -> bool:
        """Whether a product stores a copy to a peer itself. The next kernel then starts behind it, in SMALL."""
        return self.in_triton and isinstance(what, CostCopy) and what.in_product

    def transfer(self, what: CostTransfer) -> float:
        """Return the microseconds of a collective: the faster of a low-latency and a high-rate protocol."""
        steps = 2 if what.kind == "allreduce" else 1
        moved = what.bytes * (steps * (what.ranks - 1) + 0.5) / what.ranks
        h, rate = self.hardware, self.hardware.rates.get(what.kind, self.hardware.link)
        return min(h.collective + moved / rate / 1e3, h.quick + moved / (rate / 3) / 1e3)

    def gemm(self, what: Gemm) -> float:
        """Return the microseconds of a matmul whose rows are ready, with its fastest tile; at least `streaming`."""
        what = replace(what, block=None, separate=False, overlapped=False)
        return self.family.start + max(self.tiles(what, self.fastest(what)), self.streaming(what))

    @lru_cache(maxsize=1 << 10)  # noqa: B019  # a program has few different matmuls, and every step asks for them
    def fastest(self, what: Gemm, sms: int | None = None) -> Tile:
        """Return the tile, with its best split, with which a matmul is fastest on `sms` SMs, by default all."""
        return choose(what, sms or self.hardware.sms, self.family.tiles[what.dtype], self.family.rates)

    @lru_cache(maxsize=1 << 10)  # noqa: B019  # likewise
    def tiles(self, what: Gemm, tile: Tile, sms: int | None = None) -> float:
        """Return the microseconds of all tiles of a matmul whose rows are ready."""
        return duration(tile, what, sms or self.hardware.sms, self.rates)[1]

    def streaming(self, what: Gemm) -> float:
        """Return the microseconds that memory takes to load a matmul's operands and store its result."""
        moved = (what.m * what.k + what.k * what.n + what.m * what.n) * what.itemsize
        return moved / self.hardware.memory / 1e3

    @cache  # noqa: B019  # as above
    def speed_during(self, task: CostTask, kind: str) -> float:
        """Return the speed of a computation beside a collective of this kind, relative to its speed alone."""
        what, left = task.what, self.hardware.sms - self.family.busy_sms.get(kind, 0)
        if not isinstance(what, Gemm):
            return left / self.hardware.sms
        tile = replace(self.fastest(what), split=0)  # the split was chosen for all SMs; choose it again for those left
        tile = choose(what, left, (tile,), self.family.rates)
        fewer = self.family.start + max(self.tiles(what, tile, left), self.streaming(what))
        return self.alone(task) / fewer

    @cache  # noqa: B019  # as above
    def width(self, task: CostTask) -> float:
        """Return the share of the SMs, or if that is more of the memory's rate, that a computation can use."""
        what = task.what
        if not isinstance(what, Gemm):
            return 1.0
        tile = self.fastest(what)
        busy = Grid.of(tile, what).tiles * self.rates.whole(tile, what)
        filled = busy / (self.hardware.sms * self.tiles(what, tile))
        return min(1.0, max(filled, self.streaming(what) / self.alone(task)))

    def share(self, task: CostTask, left: float) -> float:
        """Return the share of all SMs that a computation gets if `left` is free.

        Where that is less than it can use, a matmul of a single wave gets nothing: it would not end earlier.
        """
        what, width = task.what, self.width(task)
        if width <= left + EPSILON:
            return width
        waits = isinstance(what, Gemm) and Grid.of(self.fastest(what), what).tiles <= self.hardware.sms
        return 0.0 if waits else LEFTOVER * left

    def by_blocks(self, task: CostTask, start: float, arrivals: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """Return when a computation ends whose blocks arrive at the times `arrivals`, and when it raises its flags.

        Both are in the order of its computation; without `arrivals` it waits for nothing. In Triton it is one kernel
        that waits block by block, a matmul tile by tile, on the SMs that overlapped copies and signals leave. Otherwise
        it is one kernel for each block, one after another; or directly after copies by SMs a single kernel, which
        starts when all blocks have arrived.
        """
        what, count = task.what, len(task.raises)
        if isinstance(what, Gemm) and self.in_triton:
            return self.by_tiles(task, what, start, arrivals)
        if task.overlapped_sms and not self.polls(what):
            arrivals = [max(start, *arrivals) + self.hardware.edge + self.hardware.turn]
        parts = len(arrivals) or count or 1
        if isinstance(what, Gemm):
            between, each = self.hardware.turn, self.gemm(replace(what, m=-(-what.m // parts)))
        else:
            assert isinstance(what, Traffic)
            between = 0.0 if self.sums_in_triton else SMALL * what.passes
            each = self.moving(what) / parts
            start += SMALL * self.passes(what)
            if self.sums_in_triton:  # one kernel, which has started and polls
                arrivals = [arrival + STARTED * self.hardware.poll for arrival in arrivals]
        ends = [start]
        for number in range(parts):
            arrival = arrivals[number] if arrivals else start
            ends.append(max(ends[-1], arrival) + (between if number else 0.0) + each)
        return ends[-1], tuple(ends[-(-(i + 1) * parts // count)] for i in range(count))

    def by_tiles(
        self, task: CostTask, what: Gemm, start: float, arrivals: Sequence[float]
    ) -> tuple[float, tuple[float, ...]]:
        """Return as `by_blocks` does for a matmul of one kernel."""
        h, count = self.hardware, len(task.raises)
        start += self.family.start
        if not arrivals:
            tile, streaming = self.fastest(what), self.streaming(what)
            flags = block_ends(tile, what, h.sms, self.rates, [start], count)
            end = start + max(self.tiles(what, tile), streaming)
            return end, tuple(max(t, start + streaming * (i + 1) / count) for i, t in enumerate(flags))
        sms = h.sms - task.overlapped_sms - task.reserved_sms
        rates = self.rates.scaled(h.pushed) if task.overlapped_sms else self.rates
        poll = h.poll * (STARTED if task.overlapped_sms else 1.0)
        begins, tile = [max(start, arrival) + poll for arrival in arrivals], self.fastest(what, sms)
        flags = block_ends(tile, what, sms, rates, begins, count) if count else ()
        return duration(tile, what, sms, rates, begins)[0], flags


class Activity:
    """Work under way: one task, or the tasks of a collective on all its ranks. `left` is its remaining time alone."""

    def __init__(self, tasks: list[CostTask], left: float, since: float) -> None:
        self.tasks, self.left, self.since = tasks, left, since
        self.rate, self.worked = 1.0, 0.0
        self.raises: list[tuple[float, CostTask]] = []  # flags left to raise, with the work before each

    @property
    def task(self) -> CostTask:
        return self.tasks[0]

    @property
    def until(self) -> float:
        """The work left until it ends or raises a flag."""
        return min(self.left, self.raises[0][0] - self.worked) if self.raises else self.left

    def work(self, step: float) -> None:
        if self.rate > 0:
            self.left -= step * self.rate
            self.worked += step * self.rate

    def raised(self) -> list[CostTask]:
        """Return the flags that it raises now; at its end, all that are left."""
        count = sum(work <= self.worked + EPSILON or self.left <= EPSILON for work, _ in self.raises)
        now, self.raises = self.raises[:count], self.raises[count:]
        return [flag for _, flag in now]


class Simulation:
    """The simulation of one call of a program, from the moment it is issued."""

    def __init__(self, tasks: Sequence[CostTask], costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0
        self.ended: dict[CostTask, float] = {}
        self.followers: dict[CostTask, list[tuple[CostTask, float]]] = {}  # what waits for a task, and the time between
        self.missing = {task: len(task.after) + len(task.joins) for task in tasks}
        self.missing |= {flag: 1 for task in tasks for flag in task.raises}
        self.active: list[Activity] = []
        self.arrived: dict[int, int] = {}  # for each collective, by id: the number of ranks that have arrived
        self.earliest = dict.fromkeys(tasks, 0.0)
        for task in tasks:
            for before in task.after:
                self.followers.setdefault(before, []).append((task, 0.0))
            for other in task.joins:
                self.followers.setdefault(other, []).append((task, costs.hardware.edge))
        self.later: list[tuple[float, int, CostTask]] = []
        self.order = {task: n for n, task in enumerate(tasks)}
        for task in [t for t in tasks if not self.missing[t]]:
            self._free(task)

    def run(self) -> float:
        """Return the microseconds until the last rank has ended. A wait at the end, with nothing behind it, is free."""
        over = 0.0
        while self.active or self.later:
            self._rates()
            step = min((a.until / a.rate for a in self.active if a.rate > 0), default=inf)
            if self.later:
                step = min(step, self.later[0][0] - self.now)
            assert step < inf, "tasks wait for each other"
            self.now += step
            for a in self.active:
                a.work(step)
            for flag in [flag for a in self.active for flag in a.raised()]:
                self._pass(flag)
            while self.later and self.later[0][0] <= self.now + EPSILON:
                self._begin(heapq.heappop(self.later)[2])
            ending = [a for a in self.active if a.left <= EPSILON]
            self.active = [a for a in self.active if a.left > EPSILON]
            over = self.now if ending else over
            for task in [task for a in ending for task in a.tasks]:
                self._end(task)
        return over

    def _free(self, task: CostTask) -> None:
        """Begin a task whose dependencies have ended, or schedule it if it starts some time after their end."""
        if self.earliest[task] > self.now:
            heapq.heappush(self.later, (self.earliest[task], self.order[task], task))
        else:
            self._begin(task)

    def _begin(self, task: CostTask) -> None:
        partners = task.partners or [task]
        here = self.arrived[id(partners)] = self.arrived.get(id(partners), 0) + 1
        if here < len(partners):
            return
        if isinstance(task.what, Nothing):
            self._end(task)
            return
        waits = any(task.blocks)
        activity = Activity(list(partners), inf if waits else self.costs.alone(task), self.now)
        self.active.append(activity)
        if waits or task.raises:
            self._set_end(activity)

    def _end(self, task: CostTask) -> None:
        self.ended[task] = self.now
        for follower, pause in self.followers.get(task, ()):
            self.earliest[follower] = max(self.earliest[follower], self.now + pause)
            self._pass(follower)
        if isinstance(task.what, Pause) and task.what.kind:
            for a in self.active:
                if any(task in signals for signals in a.task.blocks):
                    self._set_end(a)

    def _pass(self, task: CostTask) -> None:
        """Count one thing less that a task waits for."""
        self.missing[task] -= 1
        if not self.missing[task]:
            self._free(task)

    def _set_end(self, a: Activity) -> None:
        """Set the end of a computation by blocks, and when it raises flags, as far as its blocks have arrived."""
        task = a.task
        arrivals = [max((self.ended.get(signal, inf) for signal in block), default=0.0) for block in task.blocks]
        if inf in arrivals and not task.raises:
            return
        end, times = self.costs.by_blocks(task, a.since, arrivals)
        a.left = max(end - self.now, 0.0)
        times_of = dict(zip(task.raises, times, strict=True))
        a.raises = [(time - a.since, flag) for flag, time in times_of.items() if self.missing[flag]]

    # Sharing of resources ------------------------------------------------------------------------------------------
    def _rates(self) -> None:
        """Set the rate of all work under way, which is valid until something begins or ends.

        Computations and copies are served in the order in which they began, as by the queues of the device: each gets
        what the earlier ones leave.
        """
        busy: dict[int, str] = {}  # the kind of the collective under way, by rank
        free: dict[int, float] = {}  # the share of the SMs that is left, by rank
        queues: dict[tuple[int, bool], list[Activity]] = {}
        for a in self.active:
            if isinstance(a.task.what, CostTransfer):
                busy |= {task.rank: a.task.what.kind for task in a.tasks}
        for a in self.active:
            a.rate = 1.0
            if isinstance(a.task.what, Gemm | Traffic) and not a.task.blocks:
                left, width = free.get(a.task.rank, 1.0), self.costs.width(a.task)
                share = self.costs.share(a.task, left)
                free[a.task.rank] = left - share
                a.rate = share / width
                if a.task.rank in busy:
                    a.rate *= self.costs.speed_during(a.task, busy[a.task.rank])
            elif isinstance(a.task.what, CostCopy):
                queues.setdefault((a.task.rank, a.task.what.out), []).append(a)
        for queue in queues.values():
            queue[0].rate = self.costs.hardware.crowd if len(queue) > 1 else 1.0
            for a in queue[1:]:
                a.rate = 0.0
        for a in self.active:
            if isinstance(a.task.what, CostTransfer) and any(task.rank in free for task in a.tasks):
                a.rate = self.costs.hardware.hidden.get(a.task.what.kind, 1.0)
