"""Kernels, copies and collectives on CPU processes that sleep for known times and compute nothing.

The times are those of the cost model for a machine without contention, slowed down. So a measured timeline shows who
waits for whom, and nothing else. As on a GPU, the computations of a rank share its SMs, copies in one direction share a
link, and a collective begins when its last rank comes. A collective between hosts takes the time of their NICs. A
computation that waits for flags or raises flags holds no SMs here.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hostir.choice.cost import CostCopy, RankTasks, Shared, Traffic
from hostir.choice.hardware import H100, Hardware
from hostir.choice.simulation import Costs
from hostir.kernels.matmul.tiles import Gemm
from hostir.machines.binding import completed
from hostir.machines.gloo.dealer import DEAL, LaneDealer
from hostir.machines.gloo.lanes import ThreadLane, Waits
from hostir.plan.operations import CollectiveOp, ComputeOp, CopyOp, DelayOp
from hostir.plan.unrolled import UnrolledProgram

KERNELS = "cublas"  # the family of kernels whose times are slept: one kernel for each block
# An H100 of one SM without contention and without the small times between statements.
SLEEPING: Hardware = replace(
    H100,
    name="sleeping",
    sms=1,
    throttle=0.0,
    kernels={name: replace(family, busy_sms={}) for name, family in H100.kernels.items()},
    during_computation={},
    crowded=1.0,
    barrier=0.0,
    signal=0.0,
    kernel_signal=0.0,
    raised=0.0,
    edge=0.0,
    flag_wait=0.0,
    poll=0.0,
    poll_started=0.0,
    during_matmul=0.0,
    ending=0.0,
    begin=0.0,
    first_matmul=0.0,
    captured=0.0,
    all_reduce=0.0,
    behind=0.0,
    waited=0.0,
    dirty=0.0,
    low_latency_step=0.0,
)


class InTurn:
    """A lock that threads get in the order in which they ask for it, as kernels get the SMs of a GPU."""

    def __init__(self) -> None:
        self.lock, self.queue = threading.Lock(), deque[threading.Event]()

    def __enter__(self) -> None:
        mine = threading.Event()
        with self.lock:
            self.queue.append(mine)
            first = self.queue[0] is mine
        if not first:
            mine.wait()

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.queue.popleft()
            if self.queue:
                self.queue[0].set()


class Sleeper:
    """Adds the operations of one rank to lanes, as steps that sleep.

    Args:
        unrolled: the unrolled program of the rank.
        slower: the factor by which the times are longer than those of the cost model.
        hardware: the constants of the cost model.
        hosts: the ranks of each host; empty if all ranks share a host.
    """

    def __init__(
        self, unrolled: UnrolledProgram, slower: float, hardware: Hardware, hosts: Sequence[Sequence[int]]
    ) -> None:
        tasks = RankTasks(unrolled, Shared(hosts=hosts)).tasks
        self.tasks = {id(task.op): task for task in tasks if task.launches}  # the others are flags of these
        self.costs, self.slower = Costs(hardware, KERNELS, 0.0), slower
        self.sms, self.links = InTurn(), {True: InTurn(), False: InTurn()}
        if hosts:  # when this rank gets rows from a peer, so does the peer from this rank, over this rank's link out
            self.links[False] = self.links[True]

    def sleep(self, microseconds: float, begin: float | None = None) -> None:
        """Sleep for some microseconds of the cost model, from `begin` or from now."""
        left = microseconds * self.slower / 1e6 - (0.0 if begin is None else time.time() - begin)
        time.sleep(max(left, 0.0))

    def alone(self, op: ComputeOp | CopyOp | CollectiveOp, held: InTurn) -> None:
        """Hold a resource for the time of an operation."""
        with held:
            self.sleep(self.costs.alone(self.tasks[id(op)]))

    def compute(self, dealer: LaneDealer, op: ComputeOp, lane: ThreadLane) -> None:
        """Add a computation. If it waits for flags or raises flags, add its blocks."""
        if op.ready is None and op.done is None:
            lane.add(op, dealer.trace.timed(op, partial(self.alone, op, self.sms)))
            return
        (start, end), one_sided, computed = dealer.trace.bracket(op), dealer.one_sided, set[int]()
        order = op.ready.order if op.ready is not None else op.done.order if op.done is not None else ()
        lane.add(op, start)
        for number, block in enumerate(order):
            if not number:
                lane.add(op, partial(self.start, op))
            for slot in op.ready.needed(block) if op.ready is not None else ():
                one_sided.deal_wait(op, op.ready.flags, slot, op.ready.epoch, lane)
            lane.add(op, partial(self.block, op, len(order)))
            computed.add(block)
            for slot in completed(op.done, block, len(order), computed) if op.done is not None else ():
                lane.add(op, partial(one_sided.set, one_sided.flags(op.done.flags), slot, op.done.epoch))
        lane.add(op, end)

    def start(self, op: ComputeOp) -> None:
        """Sleep for the time in which a kernel for all blocks starts. Matmuls have a kernel for each block."""
        if isinstance(self.tasks[id(op)].work, Traffic):
            self.sleep(self.costs.hardware.small_kernel)

    def block(self, op: ComputeOp, blocks: int) -> None:
        """Sleep for the time of one of `blocks` blocks of a computation."""
        work, costs = self.tasks[id(op)].work, self.costs
        if isinstance(work, Gemm):
            self.sleep(costs.gemms.time(replace(work, m=-(-work.m // blocks))))
        else:
            assert isinstance(work, Traffic)
            self.sleep(costs.traffic(work) / blocks)

    def copy(self, dealer: LaneDealer, op: CopyOp, lane: ThreadLane) -> None:
        work = self.tasks[id(op)].work
        held = self.links[work.to_peer] if isinstance(work, CostCopy) else self.sms
        lane.add(op, dealer.trace.timed(op, partial(self.alone, op, held)))

    def delay(self, dealer: LaneDealer, op: DelayOp, lane: ThreadLane) -> None:
        lane.add(op, partial(self.sleep, float(op.microseconds)))

    def collective(self, dealer: LaneDealer, op: CollectiveOp, lane: ThreadLane) -> None:
        """Add a collective: a meeting of its ranks, and a sleep that begins when the last rank comes."""
        ready, arrived = dealer.failure.event(), dealer.failure.event()
        dealer.arrivals[op.handle] = arrived
        group, members = dealer.machine.groups.of(op.team)
        lane.add(op, ready.set)
        team = dealer.lane(members)
        team.add(op, dealer.waiting(ready), Waits.LANE)
        team.add(op, dealer.trace.timed(op, partial(self.meet, op, group)), Waits.PEER)
        team.add(op, arrived.set)

    def meet(self, op: CollectiveOp, group: Any) -> None:
        latest = torch.tensor([time.time()], dtype=torch.float64)
        group.allreduce([latest], dist.ReduceOp.MAX).wait()
        self.sleep(self.costs.alone(self.tasks[id(op)]), latest.item())


@contextlib.contextmanager
def sleeping(slower: float, hardware: Hardware = SLEEPING, hosts: Sequence[Sequence[int]] = ()) -> Iterator[None]:
    """Let operations of gloo plans that are made in this context sleep, and compute nothing.

    The arguments have the same meaning as in `Sleeper`.
    """
    sleepers: dict[int, Sleeper] = {}

    def sleeper(dealer: LaneDealer) -> Sleeper:
        return sleepers.setdefault(id(dealer.unrolled), Sleeper(dealer.unrolled, slower, hardware, hosts))

    table: dict[type, Callable[[LaneDealer, Any, ThreadLane], None]] = {
        ComputeOp: lambda dealer, op, lane: sleeper(dealer).compute(dealer, op, lane),
        CopyOp: lambda dealer, op, lane: sleeper(dealer).copy(dealer, op, lane),
        DelayOp: lambda dealer, op, lane: sleeper(dealer).delay(dealer, op, lane),
        CollectiveOp: lambda dealer, op, lane: sleeper(dealer).collective(dealer, op, lane),
    }
    before, interval = {cls: DEAL[cls] for cls in table}, sys.getswitchinterval()
    DEAL.update(table)
    sys.setswitchinterval(1e-4)  # a thread that wakes must not wait for another one
    try:
        yield
    finally:
        DEAL.update(before)
        sys.setswitchinterval(interval)
