"""The cost model: estimates how long a host program takes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, log2, prod
from typing import Any

from hostir.choice.platforms import Hardware
from hostir.ir.interpret import interpret
from hostir.ir.machine import Exchange, Handle, OptionalMethods, Ready
from hostir.ir.op import REGISTRY
from hostir.ir.program import Program
from hostir.ir.types import DType
from hostir.runtime.kernels.tiles import MIN_OWN_ROWS, Gemm, Grid, Tile, choose, duration

# Tasks of each rank ---------------------------------------------------------------------------------------------------
# The tasks of each rank of a host program: their kind and size, and the tasks that each waits for.
#
# The interpreter runs the program once a rank on a machine that computes nothing. So the cost model knows nothing of
# strategies, only statements.

CALLER = -1  # the caller's stream


# Kinds of tasks ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Nothing:
    """No work: a stream waits for another task."""


@dataclass(frozen=True)
class Pause:
    """A stream pauses for a fixed time; with `kind`, the time of a signal.

    A `signal` is the stream's own, `kernel` one by a kernel, and one that a kernel `raised` which copies takes no time.
    """

    microseconds: float = 0.0
    kind: str = ""


@dataclass(frozen=True)
class Traffic:
    """A computation that is bound by memory: `bytes` read and written."""

    bytes: int


@dataclass(frozen=True)
class CostTransfer:
    """A communication of a team: `bytes` of the whole tensor that is gathered, summed or exchanged."""

    kind: str
    bytes: int
    ranks: int


@dataclass(frozen=True)
class CostCopy:
    """A copy between this rank and `peer`, by a copy engine, or by a kernel on `sms` SMs.

    `first` if it is the first copy of its kernel.
    """

    bytes: int
    peer: int
    out: bool
    sms: int = 0
    first: bool = False


@dataclass(frozen=True)
class CostBarrier:
    """A barrier among `ranks` ranks."""

    ranks: int


What = Nothing | Pause | Gemm | Traffic | CostTransfer | CostCopy | CostBarrier


@dataclass(eq=False)
class CostTask:
    """An operation that a rank issues to one of its streams.

    Fields:
        after: the task before it on its lane, which ends before it begins.
        joins: those of other lanes that do.
        partners: every rank's task of the same collective or barrier, itself among them; they begin together.
        blocks: of a matmul that waits while it runs, for each block of rows in its order the signal it waits for.
        beside: on how many SMs the copies run beside which it starts; 0 for none.
        spare: how many SMs it leaves to signals.
        launches: how often the host issues something up to it, by the kind of what is issued.
    """

    rank: int
    what: What
    after: list[CostTask] = field(default_factory=list)
    joins: list[CostTask] = field(default_factory=list)
    partners: list[CostTask] = field(default_factory=list)
    blocks: list[CostTask | None] = field(default_factory=list)
    beside: int = 0
    spare: int = 0
    launches: Mapping[str, int] = field(default_factory=dict)


# One rank ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CostTensor:
    """A tensor's shape and dtype; `symmetric` numbers symmetric buffers in the order of allocation."""

    shape: tuple[int, ...]
    dtype: DType
    symmetric: int = -1

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.bytes


Flags = dict[tuple[int, int, int], list[tuple[int, CostTask]]]  # by rank, buffer and slot: epochs with their signals
Waits = list[tuple[CostTask, int | None, tuple[int, int, int], int]]  # waiting task, block, flag, epoch


@dataclass
class Shared:
    """State that all ranks share: flags, waits for them, and tasks that start together."""

    flags: Flags = field(default_factory=dict)
    waits: Waits = field(default_factory=list)
    meetings: dict[tuple[Any, ...], list[CostTask]] = field(default_factory=dict)


class CostMachine(OptionalMethods):
    """One rank of the cost model, driven by the interpreter as a machine."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank: int | None = rank
        self.me = rank
        self.shared = shared
        self.tasks: list[CostTask] = []
        self.last: dict[Any, CostTask] = {}  # by stream, and by team for communications
        self.counts: dict[Any, int] = {}
        self.stream = CALLER
        self.symmetric = 0
        self.launched: dict[str, int] = {}
        self.pushing: list[CostTask] = []  # copies and signals of a push kernel, if it was issued last
        self.spare = 0  # SMs that a matmul which waits leaves to signals before it

    def issue(self, what: What, *joins: CostTask | None, lane: Any = None, launch: str = "") -> CostTask:
        """Add a task after the latest one of its lane (the current stream unless given), and after `joins`."""
        lane = self.stream if lane is None else lane
        self.launched[launch] = self.launched.get(launch, 0) + 1
        after = [self.last[lane]] if lane in self.last else []
        others = [t for t in joins if t is not None and t not in after]
        task = CostTask(self.me, what, after, others, launches=dict(self.launched))
        self.launched.clear()
        self.tasks.append(task)
        self.last[lane] = task
        self.pushing = []
        return task

    def push(self, what: What) -> CostTask:
        """Add a copy by SMs, or a signal after one: to the kernel that was issued last, or to a new one."""
        behind = self.pushing
        task = self.issue(what, launch="" if behind else "push")
        self.pushing = [*behind, task]
        return task

    def launch(self, kind: str) -> None:
        """Count host work that no stream sees."""
        self.launched[kind] = self.launched.get(kind, 0) + 1

    def number(self, key: Any) -> int:
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key]

    def meet(self, task: CostTask, *key: Any) -> None:
        partners = self.shared.meetings.setdefault(key, [])
        partners.append(task)
        task.partners = partners

    def close(self) -> None:
        """End a call: with symmetric memory, a kernel resets its flags."""
        if self.symmetric:
            self.issue(Traffic(0), lane=CALLER, launch="compute")

    # The machine protocol -------------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> CostTensor:
        if not symmetric:
            self.launch("allocate")
            return CostTensor(shape, dtype)
        self.symmetric += 1
        return CostTensor(shape, dtype, self.symmetric)

    def free(self, x: Handle) -> None:
        self.launch("view")

    def select(self, x: CostTensor, axis: int, index: int) -> CostTensor:
        self.launch("view")
        return CostTensor((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype, x.symmetric)

    def chunk(self, x: CostTensor, axis: int, outer: int, count: int, index: int) -> CostTensor:
        self.launch("view")
        shape = (*x.shape[:axis], x.shape[axis] // count, *x.shape[axis + 1 :])
        return CostTensor(shape, x.dtype, x.symmetric)

    def reshape(self, x: CostTensor, shape: tuple[int, ...]) -> CostTensor:
        self.launch("view")
        return CostTensor(shape, x.dtype, x.symmetric)

    def permute(self, x: CostTensor, axes: tuple[int, ...]) -> CostTensor:
        self.launch("view")
        return CostTensor(tuple(x.shape[i] for i in axes), x.dtype, x.symmetric)

    def dense(self, x: CostTensor) -> CostTensor:
        return x  # callers' tensors are assumed dense

    def compute(
        self,
        kind: str,
        out: CostTensor,
        operands: Sequence[CostTensor | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
    ) -> None:
        read = [x for x in operands if x is not None]
        if not REGISTRY[kind].contracts:
            self.issue(Traffic(out.bytes + sum(x.bytes for x in read)), launch="compute")
            return
        k = read[0].shape[-1]
        beside = self.pushing if ready else []
        if ready and ready.own is not None and prod(ready.own.shape[:-1]) < MIN_OWN_ROWS:
            self.issue(Traffic(2 * ready.own.bytes), launch="compute")
        rows = prod(out.shape[:-1])
        separate = bool(ready and ready.own is not None and prod(ready.own.shape[:-1]) >= MIN_OWN_ROWS)
        block = max(rows // ready.blocks, 1) if ready else None
        overlapped = bool(beside) and beside[-1] is self.last.get(self.stream)
        gemm = Gemm(rows, out.shape[-1], k, out.dtype.name, 1, block, separate, overlapped)
        task = self.issue(gemm, launch="matmul")
        if ready is None:
            return
        if overlapped:
            first = beside[0]
            assert isinstance(first.what, CostCopy)
            task.beside, task.after, task.joins = first.what.sms, [*first.after], [*first.joins]
        task.blocks, task.spare = [None] * ready.blocks, self.spare
        for turn, slot in enumerate(ready.order):
            if slot == ready.first and ready.own is not None:
                continue
            self.shared.waits.append((task, turn, (self.me, ready.flags.symmetric, slot), ready.epoch))

    def communicate(self, exchange: Exchange, x: CostTensor | None, out: CostTensor | None) -> CostTask:
        whole = max(b.bytes for b in (x, out) if b is not None) if (x or out) else 0
        if exchange.moves is not None:
            whole = sum(_sent(move.take[1], x) for move in exchange.moves if move.source == self.me) or whole
        lane = ("team", exchange.team, exchange.moves is None)
        before = self.last.get(self.stream)
        task = self.issue(
            CostTransfer(exchange.kind, whole, len(exchange.team)), before, lane=lane, launch="communicate"
        )
        if exchange.moves is None:
            self.meet(task, "communication", exchange.team, self.number(lane))
        return task

    def wait(self, handle: CostTask) -> None:
        self.issue(Nothing(), handle, launch="wait")

    def copy(self, x: CostTensor, out: CostTensor, source: int, target: int, sms: int = 0) -> None:
        if sms:
            self.push(CostCopy(x.bytes, target, source == self.me, sms, first=not self.pushing))
            return
        if source == target:  # by a kernel
            self.issue(Traffic(2 * x.bytes), launch="compute")
            return
        peer = target if source == self.me else source
        self.issue(CostCopy(x.bytes, peer, out=source == self.me), launch="copy")

    def signal(self, flags: CostTensor, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        if sms:
            task = self.issue(Pause(kind="kernel"), launch="push")
            if task.after and isinstance(task.after[0].what, Nothing):
                # What it takes is counted from the end of what its stream waits for.
                task.after = [*task.after[0].after, *task.after[0].joins]
            self.spare = 1
        elif self.pushing:
            task = self.push(Pause(kind="raised"))
        else:
            task = self.issue(Pause(kind="signal"), launch="signal")
        self.shared.flags.setdefault((peer, flags.symmetric, slot), []).append((epoch, task))

    def wait_signal(self, flags: CostTensor, slot: int, epoch: int) -> None:
        task = self.issue(Nothing(), launch="signal")
        self.shared.waits.append((task, None, (self.me, flags.symmetric, slot), epoch))

    def barrier(self, team: tuple[int, ...]) -> None:
        task = self.issue(CostBarrier(len(team)), launch="barrier")
        self.meet(task, "barrier", team, self.number(("barrier", team)))

    def current_stream(self) -> int:
        return self.stream

    def set_stream(self, stream: int) -> None:
        self.launch("stream")
        self.stream = stream

    def synchronize(self, stream: int) -> None:
        self.issue(Nothing(), self.last.get(stream), launch="synchronize")

    def delay(self, microseconds: int) -> None:
        self.issue(Pause(float(microseconds)), launch="delay")


def _sent(pieces: int, x: CostTensor | None) -> int:
    return 0 if x is None else x.bytes // pieces


def tasks_of(program: Program, sizes: Mapping[str, int]) -> list[CostTask]:
    """Return all ranks' tasks, each rank's in issue order. Raises HostIRError if sizes do not fit the program."""
    shared, tasks = Shared(), []
    for rank in range(program.ranks):
        machine = CostMachine(rank, shared)
        inputs = [_input(machine, v.tensor, sizes) for v in program.inputs]
        interpret(program, machine, sizes, inputs)
        machine.close()
        tasks += machine.tasks
    for waiter, turn, flag, epoch in shared.waits:
        sent = [task for number, task in shared.flags.get(flag, ()) if number >= epoch]
        if not sent:
            continue
        if turn is None or (sent[0].rank == waiter.rank and not waiter.beside):  # there before it begins
            waiter.after.append(sent[0])
        else:
            waiter.blocks[turn] = sent[0]
    return tasks


def _input(machine: CostMachine, type: Any, sizes: Mapping[str, int]) -> CostTensor | None:
    if type.mesh is not None and machine.me not in type.mesh.devices:
        return None
    return CostTensor(tuple(n.bind(sizes) for n in type.local_shape), type.dtype)


def flops(tasks: Sequence[CostTask]) -> float:
    """Return the floating point operations of the busiest rank."""
    total: dict[int, float] = {}
    for task in tasks:
        if isinstance(task.what, Gemm):
            total[task.rank] = total.get(task.rank, 0.0) + 2.0 * task.what.m * task.what.n * task.what.k
    return max(total.values(), default=0.0)


# Simulation on a clock ------------------------------------------------------------------------------------------------
# The time of a host program: all ranks' tasks run on one clock, with the resources that they share.
#
# A fluid model, advanced from one end of a task to the next. Matmuls of one rank share its SMs; a collective takes some
# of them; copies of one rank share its link in either direction; collectives of a team run one after another; what
# waits for another stream starts a little later than that. A matmul that waits while it runs is computed tile by
# tile: each SM takes every n-th tile in the order of the blocks, and begins it when the SM is free and the block is
# there.

EPSILON = 1e-9
COOL = 0.2e12  # floating point operations of a call that power does not limit yet
SLOWEST = 0.81  # of the peak, however long a call computes
SPARE = 0.5  # how far SMs that a matmul's last wave leaves help another one, as both want the L2
SMALL = 3.0  # microseconds of a kernel that moves little
STARTED = 0.4  # share of `poll` that is left if a matmul has started beside the copies
GRAPH, EAGER = "graph", "eager"


def estimates(
    program: Program, sizes: Mapping[str, int], hardware: Hardware, kernels: str = "aten"
) -> Mapping[str, float]:
    """Return the microseconds of a call: `graph` if replayed from a CUDA graph, `eager` if issued anew.

    Of calls in a row each takes the time of the device, or of the host if that is longer.
    """
    tasks = tasks_of(program, sizes)
    costs = Costs(hardware, kernels, flops(tasks))
    device = Simulation(tasks, costs).run()
    return {GRAPH: device, EAGER: max(device, costs.host(tasks) - hardware.ahead)}


class Costs:
    """The time of each task alone, for one program: the clock, and so the peak, depends on its total work."""

    def __init__(self, hardware: Hardware, kernels: str, work: float) -> None:
        self.hardware = hardware
        self.in_triton = kernels == "triton"
        self.family = hardware.kernels["triton" if self.in_triton else "aten"]
        doublings = max(0.0, log2(work / COOL)) if work else 0.0
        rates = self.family.rates.scaled(max(1 - hardware.throttle * doublings, SLOWEST))
        self.rates = replace(rates, read=hardware.memory)  # as the matmul stores as well

    def launch(self, kind: str) -> float:
        """Return the host's microseconds to issue something."""
        return self.hardware.launch.get("triton matmul" if self.in_triton and kind == "matmul" else kind, 0.0)

    def host(self, tasks: Sequence[CostTask]) -> float:
        """Return the host's microseconds to issue a call, on the rank that issues most."""
        took: dict[int, float] = {}
        for task in tasks:
            each = sum(n * self.launch(kind) for kind, n in task.launches.items())
            if task.blocks and self.in_triton:
                each += self.launch("flags")
            elif task.blocks and not task.beside:  # one matmul a block, behind a wait
                each += (len(task.blocks) - 1) * self.launch("matmul") + len(task.blocks) * self.launch("signal")
            took[task.rank] = took.get(task.rank, self.launch("call")) + each
        return max(took.values(), default=0.0)

    def alone(self, task: CostTask) -> float:
        """Return the microseconds of a task that has the machine to itself."""
        what, h = task.what, self.hardware
        if isinstance(what, Gemm):
            return self.gemm(what)
        if isinstance(what, Traffic):
            return SMALL + what.bytes / h.memory / 1e3
        if isinstance(what, CostTransfer):
            return self.transfer(what) if what.ranks > 1 else 0.0
        if isinstance(what, CostCopy):
            return self.copying(what, task.rank)
        if isinstance(what, CostBarrier):
            return h.barrier if what.ranks > 1 else 0.0
        if isinstance(what, Pause):
            return {"signal": h.signal, "kernel": h.kernel_signal}.get(what.kind, what.microseconds)
        return 0.0

    def copying(self, what: CostCopy, rank: int) -> float:
        """Return the microseconds of a copy; a kernel's start counts once, with its first copy."""
        h = self.hardware
        if not what.sms:
            return h.copy + what.bytes / h.link / 1e3
        rate = h.memory / 2 if what.peer == rank else min(h.stores * what.sms, h.link)
        return h.push * what.first + what.bytes / rate / 1e3

    def transfer(self, what: CostTransfer) -> float:
        """Return the microseconds of a collective: the faster of a low-latency and a high-rate protocol."""
        steps = 2 if what.kind == "allreduce" else 1
        moved = steps * what.bytes * (what.ranks - 0.5) / what.ranks
        h, rate = self.hardware, self.hardware.rates.get(what.kind, self.hardware.link)
        return min(h.collective + moved / rate / 1e3, h.quick + moved / (rate / 3) / 1e3)

    def gemm(self, what: Gemm) -> float:
        """Return the microseconds of a matmul whose rows are ready, with its fastest tile; at least memory's time."""
        what = replace(what, block=None, separate=False, overlapped=False)
        return self.family.start + max(self.tiles(what, self.fastest(what)), self.streaming(what))

    @lru_cache(maxsize=1 << 10)  # noqa: B019  # the matmuls of a program are few, and asked for at every step
    def fastest(self, what: Gemm, sms: int | None = None) -> Tile:
        """Return the tile with which a matmul is fastest on all SMs, or on `sms`, split as suits best."""
        return choose(what, sms or self.hardware.sms, self.family.tiles[what.dtype], self.family.rates)

    @lru_cache(maxsize=1 << 10)  # noqa: B019
    def tiles(self, what: Gemm, tile: Tile, sms: int | None = None) -> float:
        """Return the microseconds of all tiles of a matmul whose rows are ready."""
        return duration(tile, what, sms or self.hardware.sms, self.rates)[1]

    def streaming(self, what: Gemm) -> float:
        """Return the microseconds that memory takes to load a matmul's operands and store its result."""
        moved = (what.m * what.k + what.k * what.n + what.m * what.n) * what.itemsize
        return moved / self.hardware.memory / 1e3

    def beside(self, task: CostTask, kind: str) -> float:
        """Return the relative speed of a computation beside a collective; 1 is its speed alone."""
        what, left = task.what, self.hardware.sms - self.family.busy_sms.get(kind, 0)
        if not isinstance(what, Gemm):
            return left / self.hardware.sms
        tile = replace(self.fastest(what), split=0)  # it was chosen without knowing of this
        tile = choose(what, left, (tile,), self.family.rates)
        fewer = self.family.start + max(self.tiles(what, tile, left), self.streaming(what))
        return self.alone(task) / fewer

    def width(self, task: CostTask) -> float:
        """Return the share of the SMs, or of the memory's rate, that a computation can use."""
        what = task.what
        if not isinstance(what, Gemm):
            return 1.0
        tile = self.fastest(what)
        busy = Grid.of(tile, what).tiles * self.rates.whole(tile, what)
        filled = busy / (self.hardware.sms * self.tiles(what, tile))
        return min(1.0, max(filled, self.streaming(what) / self.alone(task)))

    def share(self, task: CostTask, left: float) -> float:
        """Return a computation's share of the SMs left; a matmul of one wave gains nothing from part of them."""
        what, width = task.what, self.width(task)
        if width <= left + EPSILON:
            return width
        waits = isinstance(what, Gemm) and Grid.of(self.fastest(what), what).tiles <= self.hardware.sms
        return 0.0 if waits else SPARE * left

    def arriving(self, task: CostTask, start: float, arrivals: Sequence[float]) -> float:
        """Return when a matmul ends whose blocks of rows arrive at times `arrivals`, in its own order.

        With Triton one kernel waits tile by tile, on the SMs that neither the copies that it overlaps use nor signals
        need. Other kernels run once a block, one after another; behind copies by SMs once in all, when all blocks have
        arrived.
        """
        what, h = task.what, self.hardware
        assert isinstance(what, Gemm)
        if not self.in_triton and task.beside:
            return max(start, *arrivals) + h.edge + h.turn + self.gemm(what)
        if not self.in_triton:
            block = self.gemm(replace(what, m=what.block or what.m))
            for number, arrival in enumerate(arrivals):
                start = max(start, arrival) + (h.turn if number else 0.0) + block
            return start
        sms = h.sms - task.beside - task.spare
        rates = self.rates.scaled(h.pushed) if task.beside else self.rates
        poll = h.poll * (STARTED if task.beside else 1.0)
        begins = [max(start + self.family.start, arrival) + poll for arrival in arrivals]
        return duration(self.fastest(what, sms), what, sms, rates, begins)[0]


class Activity:
    """Running work: one task, or the tasks of a collective on all its ranks."""

    def __init__(self, tasks: list[CostTask], left: float, since: float) -> None:
        self.tasks, self.left, self.since = tasks, left, since
        self.rate = 1.0

    @property
    def task(self) -> CostTask:
        return self.tasks[0]


class Simulation:
    """The simulation of one call of a program, from the moment it is issued."""

    def __init__(self, tasks: Sequence[CostTask], costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0
        self.ended: dict[CostTask, float] = {}
        self.followers: dict[CostTask, list[tuple[CostTask, float]]] = {}  # each with the time in between
        self.missing = {task: len(task.after) + len(task.joins) for task in tasks}
        self.active: list[Activity] = []
        self.arrived: dict[int, int] = {}  # of a collective: how many ranks have arrived
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
        """Return the microseconds until the last rank is done."""
        while self.active or self.later:
            self._rates()
            step = min((a.left / a.rate for a in self.active if a.rate > 0), default=inf)
            if self.later:
                step = min(step, self.later[0][0] - self.now)
            assert step < inf, "tasks wait for each other"
            self.now += step
            for a in self.active:
                a.left -= step * a.rate if a.rate > 0 else 0.0
            while self.later and self.later[0][0] <= self.now + EPSILON:
                self._begin(heapq.heappop(self.later)[2])
            over = [a for a in self.active if a.left <= EPSILON]
            self.active = [a for a in self.active if a.left > EPSILON]
            for a in over:
                for task in a.tasks:
                    self._end(task)
        return self.now

    def _free(self, task: CostTask) -> None:
        """Begin a task whose dependencies have ended, or schedule it for the time when their results are usable."""
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
        waits = [signal for signal in task.blocks if signal is not None]
        activity = Activity(list(partners), inf if waits else self.costs.alone(task), self.now)
        self.active.append(activity)
        if waits:
            self._set_end(activity)

    def _end(self, task: CostTask) -> None:
        self.ended[task] = self.now
        for follower, pause in self.followers.get(task, ()):
            self.earliest[follower] = max(self.earliest[follower], self.now + pause)
            self.missing[follower] -= 1
            if not self.missing[follower]:
                self._free(follower)
        if isinstance(task.what, Pause) and task.what.kind:
            for a in self.active:
                if task in a.task.blocks:
                    self._set_end(a)

    def _set_end(self, a: Activity) -> None:
        """Set the end of a matmul that waits for blocks, once the signals of all of them have been sent."""
        if any(signal is not None and signal not in self.ended for signal in a.task.blocks):
            return
        task = a.task
        arrivals = [0.0 if signal is None else self.ended[signal] for signal in task.blocks]
        end = self.costs.arriving(task, a.since, arrivals)
        a.left = max(end - self.now, 0.0)

    # Who gets how much ---------------------------------------------------------------------------------------------
    def _rates(self) -> None:
        """Set the rate of all running work, valid until something begins or ends.

        Computations and copies that began first are served first, as the device's own queues do: what is left over
        goes to the next.
        """
        busy: dict[int, str] = {}  # the collective that runs on a rank
        free: dict[int, float] = {}  # the share of a rank's SMs that is left
        queues: dict[tuple[int, bool], list[Activity]] = {}
        for a in self.active:
            if isinstance(a.task.what, CostTransfer):
                busy |= {task.rank: a.task.what.kind for task in a.tasks}
        for a in self.active:
            a.rate = 0.0 if a.left == inf else 1.0
            if isinstance(a.task.what, Gemm | Traffic) and not a.task.blocks:
                left, width = free.get(a.task.rank, 1.0), self.costs.width(a.task)
                share = self.costs.share(a.task, left)
                free[a.task.rank] = left - share
                a.rate = share / width
                if a.task.rank in busy:
                    a.rate *= self.costs.beside(a.task, busy[a.task.rank])
            elif isinstance(a.task.what, CostCopy):
                queues.setdefault((a.task.rank, a.task.what.out), []).append(a)
        for queue in queues.values():
            queue[0].rate = self.costs.hardware.crowd if len(queue) > 1 else 1.0
            for a in queue[1:]:
                a.rate = 0.0
        for a in self.active:
            if isinstance(a.task.what, CostTransfer) and any(task.rank in free for task in a.tasks):
                a.rate = self.costs.hardware.hidden.get(a.task.what.kind, 1.0)
