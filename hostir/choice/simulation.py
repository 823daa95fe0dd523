"""Estimate how long a call of a host program takes: simulate the tasks of all ranks on one clock.

This is a fluid model: every task under way has a rate, and the clock advances from the end of one task to the next.
The computations of a rank share its SMs, of which a collective takes some; the copies of a rank share its link, in
each direction; the collectives of a team run one after another; a task that waits for another stream starts `edge`
later. A matmul that waits for flags or raises them is simulated tile by tile: each of n SMs takes every n-th tile in
the order of the blocks, and begins it when the SM is free and the block has arrived; a flag is raised when all tiles
of its block have ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import inf, log2

from hostir.choice.cost import CostBarrier, CostCopy, CostTask, CostTransfer, Nothing, Pause, Traffic, What
from hostir.choice.hardware import Hardware
from hostir.runtime.kernels.tiles import Gemm, Grid, Tile, block_ends, choose, duration

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
    device = Simulation(tasks, costs).run()
    return {GRAPH: device, EAGER: max(device, costs.host(tasks) - hardware.host_lead)}


def flops(tasks: Sequence[CostTask]) -> float:
    """Return the floating point operations of the busiest rank."""
    total: dict[int, float] = {}
    for task in tasks:
        if isinstance(task.what, Gemm):
            total[task.rank] = total.get(task.rank, 0.0) + 2.0 * task.what.m * task.what.n * task.what.k
    return max(total.values(), default=0.0)


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
