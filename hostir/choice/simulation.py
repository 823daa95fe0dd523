"""Estimate the time of a call of a host program: simulate the tasks of all ranks on one clock.

This is a fluid model: every task under way has a rate, and the clock advances from the end of one task to the next.

- The computations of a rank share its SMs. A collective takes some of these SMs.
- The copies of a rank share its link, in each direction.
- The collectives of a team run one after another.
- A task that waits for another stream starts `edge` later.
- A matmul that waits for flags or raises them is simulated tile by tile. Each of n SMs takes every n-th tile, in the
  order of the blocks. An SM begins a tile when the SM is free and the block has arrived. A flag is raised when all
  tiles of its block have ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf, log2

from hostir.choice.collectives import implemented
from hostir.choice.cost import (
    CostBarrier,
    CostCopy,
    CostTask,
    CostTransfer,
    EndOfCall,
    Loads,
    Nothing,
    Pause,
    Shared,
    TaskWork,
    Traffic,
)
from hostir.choice.hardware import Hardware, Kernels
from hostir.kernels.matmul.estimate import Rates, block_ends, choose, collecting, duration, in_l2, right_bytes
from hostir.kernels.matmul.schedule import Grid
from hostir.kernels.matmul.tiles import Gemm, Tile, grouped_tile

EPSILON = 1e-9
UNTHROTTLED_FLOPS = 0.026e12  # a call with more floating point operations is slower: power limits the clock
LEAST_PEAK = 0.76  # the share of the peak that is left however long a call computes
LEFTOVER = 0.9  # the speed of a matmul on SMs that the last wave of another matmul leaves idle: both compete for L2
SMALL = 64e3  # the most bytes of a collective by NCCL's protocol of lowest latency
LOW_LATENCY_SLOWDOWN = 2.4  # times as long per byte by NCCL's protocols of low latency as by its Simple protocol
SHORT_ALL_REDUCE = 1.5e6  # bytes: NCCL 2.28 takes its Simple protocol for longer ones, even if it is slower
BLOCK_BY_BLOCK = 0.913  # the speed of a Triton matmul that raises flags: in this order it finds less in L2
ADDING = 7.14  # microseconds between a product and one that adds to its result, besides the bytes that it reads
IN_SUM = 0.5  # microseconds of a computation that the kernel of a sum over ranks carries out, with few bytes
COLD = Loads()  # the first matmul of a call
GRAPH, EAGER = "graph", "eager"
HOST_ONLY = frozenset({"", "allocate", "stream", "view", "wait"})  # operations that issue nothing to the device


def estimates(tasks: Sequence[CostTask], hardware: Hardware, kernels: str) -> Mapping[str, float]:
    """Return the microseconds of a call: `graph` for a replay of a CUDA graph, `eager` for an eager call.

    In a series of eager calls, each call takes the time of the device or the time of the host, whichever is longer.
    """
    costs = Costs(hardware, kernels, flops(tasks))
    device = Simulation(tasks, costs).run()
    graph, eager = (device + start(tasks, hardware, mode) for mode in (GRAPH, EAGER))
    return {GRAPH: graph, EAGER: max(eager, HostCosts(costs).call(tasks) - hardware.host_lead)}


def driver_calls(tasks: Sequence[CostTask]) -> int:
    """Return the number of operations that one rank issues to the device in a call, on the rank where it is largest."""
    by_rank: dict[int, int] = {}
    for task in tasks:
        issued = sum(n for operation, n in task.launches.items() if operation not in HOST_ONLY)
        by_rank[task.rank] = by_rank.get(task.rank, 0) + issued
    return max(by_rank.values(), default=0)


def collective_us(
    collective: str, size: int, ranks: int, hardware: Hardware, hosts: Sequence[Sequence[int]] = ()
) -> float:
    """Return the estimated microseconds of a collective of all ranks, if nothing else runs.

    Args:
        collective: a keyword of the cost model.
        size: the bytes of the gathered, summed or exchanged tensor.
        ranks: the number of ranks.
        hardware: the constants of the ranks' devices.
        hosts: the ranks of each host; empty if all ranks share a host.
    """
    if ranks == 1:
        return 0.0
    transfer = CostTransfer(collective, size, ranks)
    crossing = Shared(hosts=hosts).crossing(transfer, range(ranks))
    return Costs(hardware, "aten", 0.0).transfer(replace(transfer, crossing=crossing))


def start(tasks: Sequence[CostTask], hardware: Hardware, mode: str) -> float:
    """Return the microseconds that a call takes besides its tasks."""
    work = [task.work for task in tasks]
    if not any(isinstance(each, Gemm) for each in work):
        return hardware.begin
    captured = mode == GRAPH and any(isinstance(each, CostTransfer) and each.by_nccl for each in work)
    return hardware.begin + hardware.first_matmul + hardware.captured * captured


def flops(tasks: Sequence[CostTask]) -> float:
    """Return the number of floating point operations on the rank that has the most."""
    total: dict[int, float] = {}
    for task in tasks:
        if isinstance(task.work, Gemm):
            total[task.rank] = total.get(task.rank, 0.0) + 2.0 * task.work.rows * task.work.n * task.work.k
    return max(total.values(), default=0.0)


class GemmCosts:
    """The times of one program's matmuls.

    They depend on the program's number of floating point operations, `total_flops`, because power limits the GPU's
    clock.
    """

    def __init__(self, hardware: Hardware, family: Kernels, total_flops: float) -> None:
        self.hardware = hardware
        self.family = family
        doublings = max(0.0, log2(total_flops / UNTHROTTLED_FLOPS)) if total_flops else 0.0
        clock = max(1 - hardware.throttle * doublings, LEAST_PEAK)
        self.rates, self.grouped_rates = (
            replace(each.rates.scaled(clock), read=hardware.operands)
            for each in (family, hardware.kernels.get("triton", family))
        )
        self.fastest = cache(self.fastest)  # type: ignore[method-assign]  # a program has few different matmuls
        self.tiles = cache(self.tiles)  # type: ignore[method-assign]

    def rates_of(self, gemm: Gemm) -> Rates:
        """Return the rates of the kernel of a matmul. Grouped matmuls run in Triton."""
        return self.grouped_rates if gemm.grouped else self.rates

    def time(self, gemm: Gemm, loads: Loads = COLD) -> float:
        """Return the microseconds of a matmul with its fastest tile, if all its rows are ready when it starts.

        `loads` is what it finds in L2.
        """
        gemm = replace(gemm, block=None, separate=False, overlapped=False)
        computing = max(self.tiles(gemm, self.fastest(gemm)), self.streaming(gemm, loads))
        return self.family.start + collecting(gemm) + computing

    def time_on(self, gemm: Gemm, sms: int, loads: Loads = COLD) -> float:
        """Return the microseconds of a matmul on `sms` SMs.

        Its tile is the fastest tile on all SMs, with the best split on `sms` SMs.
        """
        tile = replace(self.fastest(gemm), split=0)  # its split was chosen for all SMs; choose it again for `sms`
        tile = tile if gemm.grouped else choose(gemm, sms, (tile,), self.family.rates)
        return self.family.start + collecting(gemm) + max(self.tiles(gemm, tile, sms), self.streaming(gemm, loads))

    def fastest(self, gemm: Gemm, sms: int | None = None) -> Tile:
        """Return the fastest tile for a matmul on `sms` SMs, with its best split.

        By default, `sms` is the number of all SMs. A grouped matmul has one tile, without splits.
        """
        if gemm.grouped:
            return grouped_tile(gemm.m, gemm.itemsize)
        return choose(gemm, sms or self.hardware.sms, self.family.tiles[gemm.dtype], self.family.rates)

    def tiles(self, gemm: Gemm, tile: Tile, sms: int | None = None) -> float:
        """Return the microseconds of all tiles of a matmul, if all its rows are ready when it starts."""
        return duration(tile, gemm, sms or self.hardware.sms, self.rates_of(gemm))[1]

    def streaming(self, gemm: Gemm, loads: Loads = COLD) -> float:
        """Return the microseconds that memory takes to load the operands of a matmul and to store the result.

        While they are loaded, data of earlier kernels that only L2 holds are written to memory.
        """
        elements = gemm.rows * gemm.k + (not loads.cached) * gemm.matrices * gemm.k * gemm.n + gemm.rows * gemm.n
        loaded = elements * gemm.itemsize
        written_back = min(loaded, max(self.hardware.dirty - loads.before, 0.0))
        return (loaded + written_back) / self.hardware.operands / 1e3

    def filled(self, gemm: Gemm) -> float:
        """Return the share of the SMs that the tiles of a matmul keep busy, averaged over the time of the matmul."""
        tile = self.fastest(gemm)
        busy = Grid.of(tile, gemm).tiles * self.rates_of(gemm).unsplit_time(tile, gemm)
        return busy / (self.hardware.sms * self.tiles(gemm, tile))

    def fits_one_wave(self, gemm: Gemm) -> bool:
        """Return True if a matmul has no more tiles than there are SMs."""
        return Grid.of(self.fastest(gemm), gemm).tiles <= self.hardware.sms

    def by_tiles(
        self, task: CostTask, gemm: Gemm, start: float, arrivals: Sequence[float]
    ) -> tuple[float, tuple[float, ...]]:
        """Return the time at which a matmul in one Triton kernel ends, and the times at which it raises its flags.

        The arguments and the results have the same meaning as in `Costs.by_blocks`.
        """
        h, count, rates = self.hardware, len(task.raises), self.rates_of(gemm)
        if count:
            rates = rates.scaled(BLOCK_BY_BLOCK)
        start += self.family.start
        if gemm.collects or (gemm.grouped and arrivals):  # each block when it has arrived, and then all tiles
            whole = collecting(replace(gemm, collects=True))
            start = max([start + whole, *(arrival + h.poll + whole / len(arrivals) for arrival in arrivals)])
            arrivals = ()
        if not arrivals:
            tile, streaming = self.fastest(gemm), self.streaming(gemm, task.loads)
            flags = block_ends(tile, gemm, h.sms, rates, [start], count) if count else ()
            end = start + max(duration(tile, gemm, h.sms, rates)[1] if count else self.tiles(gemm, tile), streaming)
            rows = -(-gemm.rows // tile.m)  # of tiles: each tile that a block needs streams its operands
            streamed = [-(-(i + 1) * rows // count) / rows for i in range(count)]
            return end, tuple(max(t, start + streaming * x) for t, x in zip(flags, streamed, strict=True))
        sms = h.sms - task.overlapped_sms - task.reserved_sms
        poll = h.poll_started if task.overlapped_sms else h.poll
        begins, tile = [max(start, arrival) + poll for arrival in arrivals], self.fastest(gemm, sms)
        flags = block_ends(tile, gemm, sms, rates, begins, count) if count else ()
        spanned = 1 if gemm.separate or gemm.block is None else -(-tile.m // gemm.block)  # by the first tile
        loading, streaming = max(begins[:spanned]), self.streaming(gemm, task.loads)
        end = max(duration(tile, gemm, sms, rates, begins)[0], loading + streaming)
        return end, tuple(max(t, loading + streaming * (i + 1) / count) for i, t in enumerate(flags))


class Costs:
    """The times of one program's tasks on the device."""

    def __init__(self, hardware: Hardware, kernels: str, total_flops: float) -> None:
        self.hardware = hardware
        self.in_triton = kernels == "triton"
        self.sums_in_triton = kernels != "aten"
        self.gemms = GemmCosts(hardware, hardware.kernels["triton" if self.in_triton else "aten"], total_flops)
        self.adding = GemmCosts(hardware, hardware.kernels["aten"], total_flops)  # products that add to their result
        # A simulation calls these at each event. Their results are dropped with this object.
        self.alone = cache(self.alone)  # type: ignore[method-assign]
        self.speed_during = cache(self.speed_during)  # type: ignore[method-assign]
        self.width = cache(self.width)  # type: ignore[method-assign]

    def alone(self, task: CostTask) -> float:
        """Return the microseconds of a task if nothing else runs."""
        work, h = task.work, self.hardware
        if task.raises:
            return self.by_blocks(task, 0.0, [])[0]
        if isinstance(work, Gemm):
            if not task.added:
                return self.gemms.time(work, task.loads)
            return self.adding.time(work, task.loads) + task.added / h.operands / 1e3 + ADDING
        if isinstance(work, Traffic):
            return (h.small_kernel * self.kernel_count(work) or IN_SUM) + self.traffic(work)
        if isinstance(work, CostTransfer):
            return self.transfer(work) if work.ranks > 1 else 0.0
        if isinstance(work, CostCopy):
            return self.copy(work)
        if isinstance(work, CostBarrier):
            return h.barrier if work.ranks > 1 else 0.0
        if isinstance(work, EndOfCall):
            return h.ending if self.in_kernel(work) else h.small_kernel
        if isinstance(work, Pause):
            return {"stream": h.signal, "kernel": h.kernel_signal, "block": h.raised}.get(
                work.sender, work.microseconds
            )
        return 0.0

    def in_kernel(self, end: EndOfCall) -> bool:
        """Return True if the last kernel that waits for flags also ends the call."""
        return {"sum": self.sums_in_triton, "matmul": self.in_triton}.get(end.within, False)

    def polls(self, work: TaskWork) -> bool:
        """Return True if a single kernel computes all blocks.

        This kernel then polls and raises the flags of the blocks.
        """
        return self.sums_in_triton if isinstance(work, Traffic) else self.in_triton

    def kernel_count(self, traffic: Traffic) -> int:
        """Return the number of kernels that a computation needs, if the computation is bound by memory.

        The number is 0 if the kernel of a sum over ranks carries it out.
        """
        if not self.sums_in_triton:
            return traffic.aten_kernels
        return 1 if traffic.in_sum is None else 0

    def traffic(self, traffic: Traffic) -> float:
        """Return the microseconds that memory takes to move the bytes of a computation."""
        in_triton = traffic.bytes if traffic.in_sum is None else traffic.in_sum
        bytes_moved = in_triton if self.sums_in_triton else traffic.aten_bytes or traffic.bytes
        return bytes_moved / self.hardware.memory / 1e3

    def copy(self, copy: CostCopy) -> float:
        """Return the microseconds of a copy. The first copy of a kernel includes the start of the kernel."""
        h = self.hardware
        if not copy.sms:
            return h.copy + copy.bytes / h.link / 1e3
        if self.in_matmul(copy):  # the first copy includes the start of the kernel after the matmul
            return h.small_kernel * copy.first + copy.bytes / h.link / 1e3
        return h.push * copy.first + copy.bytes / min(h.sm_rate * copy.sms, h.link) / 1e3

    def in_matmul(self, work: TaskWork) -> bool:
        """Return True if the work is a copy that a matmul makes when it stores its result directly to the peer."""
        return self.in_triton and isinstance(work, CostCopy) and work.in_matmul

    def transfer(self, transfer: CostTransfer) -> float:
        """Return the microseconds of a collective.

        NCCL takes its fastest protocol; SHORT_ALL_REDUCE is an exception. The slower of links and NICs counts.
        """
        if (time := implemented(transfer, self.hardware)) is not None:
            return time
        bytes_moved = transfer.bytes * (transfer.steps * (transfer.ranks - 1) + 0.5) / transfer.ranks
        h, rate = self.hardware, self.hardware.rates.get(transfer.collective, self.hardware.link)
        moving, latency = bytes_moved / rate / 1e3, 0.0
        if between := transfer.crossing:
            nics = between.senders * h.nic_share(between.sharers)
            moving = max(moving, between.bytes / nics / 1e3)
            latency = transfer.steps * (between.hosts - 1) * h.nic_latency
        sums_all = transfer.collective == "allreduce"
        low = h.low_latency + h.low_latency_step * (transfer.bytes > SMALL) + LOW_LATENCY_SLOWDOWN * moving
        high = h.collective + h.all_reduce * sums_all + moving
        return latency + (high if sums_all and transfer.bytes > SHORT_ALL_REDUCE else min(low, high))

    def speed_during(self, task: CostTask, collective: str) -> float:
        """Return the speed of a computation while a collective runs, relative to its speed when it runs alone."""
        sms = self.hardware.sms - self.gemms.family.busy_sms.get(collective, 0)
        if not isinstance(task.work, Gemm):
            return sms / self.hardware.sms
        return self.gemms.time(task.work, task.loads) / self.gemms.time_on(task.work, sms, task.loads)

    def width(self, task: CostTask) -> float:
        """Return the larger of two shares that a computation uses: its share of the SMs, or of the memory bandwidth."""
        if not isinstance(task.work, Gemm):
            return 1.0
        of_memory = self.gemms.streaming(task.work, task.loads) / self.alone(task)
        return min(1.0, max(self.gemms.filled(task.work), of_memory))

    def share(self, task: CostTask, idle: float) -> float:
        """Return the share of all SMs that a computation gets if the share `idle` is free.

        A matmul gets nothing if its tiles fit one wave and the matmul can use more than `idle`. On fewer SMs it would
        not end earlier than if it waited for all SMs.
        """
        width = self.width(task)
        if width <= idle + EPSILON:
            return width
        waits = isinstance(task.work, Gemm) and self.gemms.fits_one_wave(task.work)
        return 0.0 if waits else LEFTOVER * idle

    def by_blocks(self, task: CostTask, start: float, arrivals: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """Return the time at which a computation ends, and the times at which it raises its flags.

        `arrivals` holds the times at which its blocks arrive, in the order of computation. It is empty if the
        computation waits for nothing. In Triton, one kernel computes all blocks. It waits block by block, or tile by
        tile in a matmul, and runs on the SMs that overlapped copies and signals leave. Without Triton, there is one
        kernel for each block. But after copies by SMs, a single kernel starts when all blocks have arrived.
        """
        work, count = task.work, len(task.raises)
        if isinstance(work, Gemm) and self.in_triton:
            return self.gemms.by_tiles(task, work, start, arrivals)
        if task.overlapped_sms and not self.polls(work):
            arrivals = [max(start, *arrivals) + self.hardware.edge + self.hardware.flag_wait]
        parts = len(arrivals) or count or 1
        if isinstance(work, Gemm):
            part = replace(work, m=max(-(-work.m // parts), 1))
            loads, right = task.loads, right_bytes(work)
            later_loads = Loads(loads.cached or in_l2(work), loads.before + (not loads.cached) * right)
            gap, later = self.hardware.flag_wait, self.gemms.time(part, later_loads)
            part_time = self.gemms.time(part, task.loads)
        else:
            assert isinstance(work, Traffic)
            gap = 0.0 if self.sums_in_triton else self.hardware.small_kernel * work.aten_kernels
            part_time = later = self.traffic(work) / parts
            start += self.hardware.small_kernel * self.kernel_count(work)
            if self.sums_in_triton:  # a single kernel, which has started and polls
                arrivals = [arrival + self.hardware.poll_started for arrival in arrivals]
        ends = [start]
        for number in range(parts):
            arrival = arrivals[number] if arrivals else start
            ends.append(max(ends[-1], arrival) + (gap + later if number else part_time))
        return ends[-1], tuple(ends[-(-(i + 1) * parts // count)] for i in range(count))


class HostCosts:
    """The times in which the host issues the tasks of one program, if no CUDA graph replays them."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def call(self, tasks: Sequence[CostTask]) -> float:
        """Return the microseconds in which the host issues a call, on the rank where this takes longest."""
        by_rank: dict[int, float] = {}
        for task in tasks:
            by_rank[task.rank] = by_rank.get(task.rank, self.launch("call")) + self.issue(task)
        return max(by_rank.values(), default=0.0)

    def launch(self, operation: str) -> float:
        """Return the microseconds that the host takes to issue one operation, such as "matmul"; 0 if unknown."""
        name = "triton matmul" if self.costs.in_triton and operation == "matmul" else operation
        return self.costs.hardware.launch.get(name, 0.0)

    def issue(self, task: CostTask) -> float:
        """Return the microseconds in which the host issues a task."""
        skipped = "push" if self.costs.in_matmul(task.work) else ""
        time = sum(n * self.launch(operation) for operation, n in task.launches.items() if operation != skipped)
        if task.added:  # cuBLAS computes it
            time += self.costs.hardware.launch.get("matmul", 0.0) - self.launch("matmul")
        if isinstance(task.work, Traffic):
            time += (self.costs.kernel_count(task.work) - 1) * self.launch("compute")
        if isinstance(task.work, EndOfCall) and self.costs.in_kernel(task.work):
            time -= self.launch("compute")
        if self.costs.polls(task.work):
            time += self.launch("flags") * (bool(task.blocks) + bool(task.raises))
        elif parts := 0 if task.overlapped_sms else max(len(task.blocks), len(task.raises)):
            # One kernel for each block, between stream operations that wait and signal.
            operation = "matmul" if isinstance(task.work, Gemm) else "compute"
            flags = sum(map(len, task.blocks)) + len(task.raises)
            time += (parts - 1) * self.launch(operation) + flags * self.launch("signal")
        return time


class Activity:
    """Work under way: one task, or the tasks of a collective on all its ranks.

    Fields:
        remaining: the microseconds until its end, if its rate is 1.
        begin: the time at which it began.
        done: the microseconds of work that are done. One microsecond at rate 0.5 counts half.
        raises: the flags that it has not raised yet. Each has the value of `done` at which it is raised.
    """

    def __init__(self, tasks: list[CostTask], remaining: float, begin: float) -> None:
        self.tasks, self.remaining, self.begin = tasks, remaining, begin
        self.rate, self.done = 1.0, 0.0
        self.raises: list[tuple[float, CostTask]] = []

    @property
    def task(self) -> CostTask:
        return self.tasks[0]

    @property
    def until_event(self) -> float:
        """The microseconds until the work ends or raises a flag, if its rate is 1."""
        return min(self.remaining, self.raises[0][0] - self.done) if self.raises else self.remaining

    def advance(self, step: float) -> None:
        """Advance the work by `step` microseconds of the clock."""
        if self.rate > 0:
            self.remaining -= step * self.rate
            self.done += step * self.rate

    def pop_raised(self) -> list[CostTask]:
        """Remove and return the flags that are raised now. At the end of the work, these are all remaining flags."""
        count = sum(done <= self.done + EPSILON or self.remaining <= EPSILON for done, _ in self.raises)
        raised, self.raises = self.raises[:count], self.raises[count:]
        return [flag for _, flag in raised]


class Simulation:
    """The simulation of one call of a program, from the moment when the call is issued.

    Fields:
        ready: the time at which all dependencies of a task have ended. Its partners in a collective may come later.
        begun, ended: the times at which tasks began and ended so far.
        cause: for each task with dependencies, the dependency for which it waited longest.
        added: the time by which a task takes longer because of its cause.
    """

    def __init__(self, tasks: Sequence[CostTask], costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0
        self.ready: dict[CostTask, float] = {}
        self.begun: dict[CostTask, float] = {}
        self.ended: dict[CostTask, float] = {}
        self.cause: dict[CostTask, CostTask] = {}
        self.added: dict[CostTask, float] = {}
        # For each task, the tasks that wait for it, and the time from its end to their start.
        self.followers: dict[CostTask, list[tuple[CostTask, float]]] = {}
        self.missing = {task: len(task.after) + len(task.joins) for task in tasks}  # the number of tasks to wait for
        self.missing |= {flag: 1 for task in tasks for flag in task.raises}
        self.active: list[Activity] = []
        self.arrived: dict[int, int] = {}  # by the id of a collective: the number of ranks that have arrived
        self.earliest = dict.fromkeys(tasks, 0.0)
        for task in tasks:
            for before in task.after:
                self.followers.setdefault(before, []).append((task, 0.0))
            for other in task.joins:
                self.followers.setdefault(other, []).append((task, costs.hardware.edge))
        self.later: list[tuple[float, int, CostTask]] = []  # a heap of tasks that start at a known time
        self.order = {task: n for n, task in enumerate(tasks)}
        for task in [t for t in tasks if not self.missing[t]]:
            self._start(task)

    def run(self) -> float:
        """Return the microseconds until the last rank has ended. If no task follows a wait, the wait takes no time."""
        last_end = 0.0
        while self.active or self.later:
            self._set_rates()
            step = min((a.until_event / a.rate for a in self.active if a.rate > 0), default=inf)
            if self.later:
                step = min(step, self.later[0][0] - self.now)
            assert step < inf, "tasks wait for each other"
            self.now += step
            for a in self.active:
                a.advance(step)
            for flag in [flag for a in self.active for flag in a.pop_raised()]:
                self._dependency_ended(flag)
            while self.later and self.later[0][0] <= self.now + EPSILON:
                self._begin(heapq.heappop(self.later)[2])
            ending = [a for a in self.active if a.remaining <= EPSILON]
            self.active = [a for a in self.active if a.remaining > EPSILON]
            last_end = self.now if ending else last_end
            for task in [task for a in ending for task in a.tasks]:
                self._end(task)
        return last_end

    def _start(self, task: CostTask) -> None:
        """Begin a task when all its dependencies have ended.

        If its earliest time is later than now, schedule it for that time.
        """
        if self.earliest[task] > self.now:
            heapq.heappush(self.later, (self.earliest[task], self.order[task], task))
        else:
            self._begin(task)

    def _begin(self, task: CostTask) -> None:
        """Begin a task. A collective or a barrier begins when the tasks of all its ranks have arrived."""
        partners = task.partners or [task]
        self.ready[task] = self.now
        count = self.arrived[id(partners)] = self.arrived.get(id(partners), 0) + 1
        if count < len(partners):
            return
        self.begun |= dict.fromkeys(partners, self.now)
        if isinstance(task.work, Nothing):
            self._end(task)
            return
        waits = any(task.blocks)
        added = self._added(task)
        self.added |= dict.fromkeys(partners, added)
        activity = Activity(list(partners), inf if waits else self.costs.alone(task) + added, self.now)
        self.active.append(activity)
        if waits or task.raises:
            self._set_end(activity)

    def _added(self, task: CostTask) -> float:
        """Return the microseconds that a task takes longer because of the task for which it waited longest."""
        h, work, cause = self.costs.hardware, task.work, self.cause.get(task)
        if isinstance(work, CostTransfer) and work.by_nccl and cause is not None and isinstance(cause.work, Gemm):
            return h.behind
        return h.waited if isinstance(work, CostCopy) and not work.sms and self._has_waited(cause) else 0.0

    def _has_waited(self, task: CostTask | None) -> bool:
        """Return True if a stream waits before a task without work: for a flag, or for another stream.

        `task` is the latest task of the stream. The stream also waits if this rank and a peer signal each other at the
        same time: each signal takes a while to arrive.
        """
        edge = self.costs.hardware.edge
        while task is not None and isinstance(task.work, Nothing):
            begun = self.begun[task] - EPSILON
            own = next((each for each in task.after if _on_one_stream(each, task)), None)
            others = [*task.after]
            if own is not None:
                others.remove(own)  # once: rank 0 stands for all ranks, so its signal may also be the peer's signal
            ends = [self.ended[each] for each in others] + [self.ended[each] + edge for each in task.joins]
            if any(end >= begun for end in ends):
                return True
            task = own
        return False

    def _end(self, task: CostTask) -> None:
        self.ended[task] = self.now
        for follower, pause in self.followers.get(task, ()):
            if follower not in self.cause or self.now + pause >= self.earliest[follower]:
                self.cause[follower] = task
            self.earliest[follower] = max(self.earliest[follower], self.now + pause)
            self._dependency_ended(follower)
        if isinstance(task.work, Pause) and task.work.sender:
            for a in self.active:
                if any(task in signals for signals in a.task.blocks):
                    self._set_end(a)

    def _dependency_ended(self, task: CostTask) -> None:
        """Record that one of the tasks that `task` waits for has ended. If it was the last one, start `task`."""
        self.missing[task] -= 1
        if not self.missing[task]:
            self._start(task)

    def _set_end(self, a: Activity) -> None:
        """Set the time at which a computation ends, and the times at which it raises its flags.

        These times follow from the arrivals of its blocks so far.
        """
        task = a.task
        arrivals = [max((self.ended.get(signal, inf) for signal in block), default=0.0) for block in task.blocks]
        if inf in arrivals and not task.raises:
            return
        end, times = self.costs.by_blocks(task, a.begin, arrivals)
        a.remaining = max(end - self.now, 0.0)
        times_of = dict(zip(task.raises, times, strict=True))
        a.raises = [(time - a.begin, flag) for flag, time in times_of.items() if self.missing[flag]]

    def _set_rates(self) -> None:
        """Set the rates of all work under way. The rates are valid until some work begins or ends.

        Computations and copies are served in the order in which they began, as in the queues of the device. Each gets
        the SMs, or the share of the link, that earlier computations or copies leave.
        """
        collectives: dict[int, str] = {}  # by rank: the collective under way
        idle: dict[int, float] = {}  # by rank: the share of the SMs that computations leave idle
        queues: dict[tuple[int, bool], list[Activity]] = {}
        multiplying: set[int] = set()  # ranks with a matmul under way
        moving: dict[int, int] = {}  # by rank: the number of computations under way that memory bounds
        for a in self.active:
            if isinstance(a.task.work, CostTransfer):
                collectives |= {task.rank: a.task.work.collective for task in a.tasks}
            elif isinstance(a.task.work, Gemm) and not a.task.blocks:
                multiplying.add(a.task.rank)
            elif isinstance(a.task.work, Traffic) and not a.task.blocks:
                moving[a.task.rank] = moving.get(a.task.rank, 0) + 1
        for a in self.active:
            a.rate = 1.0
            if isinstance(a.task.work, Gemm | Traffic) and not a.task.blocks:
                left, width = idle.get(a.task.rank, 1.0), self.costs.width(a.task)
                if isinstance(a.task.work, Traffic) and a.task.rank in multiplying and left < 1.0:
                    a.rate = self.costs.hardware.during_matmul / moving[a.task.rank]
                else:
                    share = self.costs.share(a.task, left)
                    idle[a.task.rank] = left - share
                    a.rate = share / width
                if a.task.rank in collectives:
                    a.rate *= self.costs.speed_during(a.task, collectives[a.task.rank])
            elif isinstance(a.task.work, CostCopy) and a.task.work.peer != a.task.rank:
                queues.setdefault((a.task.rank, a.task.work.to_peer), []).append(a)
        for queue in queues.values():
            if len({a.task.work.peer for a in queue if isinstance(a.task.work, CostCopy)}) > 1:
                queue[0].rate = self.costs.hardware.crowded
            for a in queue[1:]:
                a.rate = 0.0
        for a in self.active:
            if isinstance(a.task.work, CostTransfer) and any(task.rank in idle for task in a.tasks):
                a.rate = self.costs.hardware.during_computation.get(a.task.work.collective, 1.0)


def _on_one_stream(task: CostTask, other: CostTask) -> bool:
    """Return True if a rank issues both tasks to one stream."""
    if task.op is None or other.op is None or task.rank != other.rank:
        return False
    return task.op.lane == other.op.lane
