"""Bind an unrolled program on CPU processes: distribute its operations over lanes. A thread runs each lane.

Each stream has a lane, and each team has a lane. The calling thread runs the lane of the caller's stream. A team's lane
executes the team's collectives in the order of issue, whatever the streams do. So the order is the same on every rank.
The messages of a team have a separate lane and a separate process group, because collectives must not wait for
messages.

Allocations and views run first, in the order of issue, as if a host issued the complete program at once. Copies,
signals and barriers work on memory that the ranks share. They run on the lanes of the streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hostir.job.symmetric import SharedMemory
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.table import kernels_for
from hostir.machines.binding import Step, bind_allocate, bind_compute, bind_view
from hostir.machines.gloo.collectives import COLLECTIVES, exchange
from hostir.machines.gloo.lanes import AbandonedError, LaneKey, LaneTrace, RunFailure, ThreadLane, Waits
from hostir.machines.gloo.onesided import GlooOneSided
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
from hostir.plan.unrolled import UnrolledProgram

if TYPE_CHECKING:
    from hostir.machines.gloo.machine import GlooMachine

POLL = timedelta(seconds=0.1)  # a thread that waits for a collective checks this often whether the run has failed


class LaneDealer:
    """Distributes the operations of a plan over lanes.

    Fields:
        host: the lane that runs before all other lanes. It has the allocations, and the views of the allocated buffers.
        lanes: the other lanes, by stream or team.
        arrivals: for each handle, the event that is set when the communication of the handle has ended.
    """

    def __init__(
        self,
        machine: GlooMachine,
        unrolled: UnrolledProgram,
        registers: list[Any],
        memory: SharedMemory | None,
        failure: RunFailure,
        trace: LaneTrace,
    ) -> None:
        self.machine = machine
        self.unrolled = unrolled
        self.registers = registers
        self.memory = memory
        self.failure = failure
        self.trace = trace
        self.one_sided = GlooOneSided(unrolled, registers, memory, failure, trace, machine.sharing.turn)
        self.host = ThreadLane(CALLER, failure.record)
        self.lanes: dict[LaneKey, ThreadLane] = {CALLER: ThreadLane(CALLER, failure.record)}
        self.arrivals: dict[int, threading.Event] = {}

    def lane(self, key: LaneKey) -> ThreadLane:
        if key not in self.lanes:
            self.lanes[key] = ThreadLane(key, self.failure.record)
        return self.lanes[key]

    def deal(self, op: Op) -> None:
        DEAL[type(op)](self, op, self.lane(op.stream))

    def deal_symmetric(self, op: SymmetricOp, lane: ThreadLane) -> None:
        assert self.memory is not None
        self.registers[op.out] = self.memory.buffer(op)

    def deal_allocate(self, op: AllocateOp, lane: ThreadLane) -> None:
        self.host.add(op, bind_allocate(op, self.registers, self.machine.device))

    def deal_view(self, op: ViewOp, lane: ThreadLane) -> None:
        """Make a view now if it is a view of a symmetric buffer. Else add a step that makes the view in every run."""
        step = bind_view(op, self.registers)
        if self.registers[op.x] is None:
            self.host.add(op, step)
        else:
            step()

    def deal_compute(self, op: ComputeOp, lane: ThreadLane) -> None:
        kernel = kernels_for(self.machine.kernels, torch_dtype(op.dtype))[op.computation]
        if op.ready is not None or op.done is not None:
            self.one_sided.deal_blocks(op, kernel, lane)
        else:
            lane.add(op, self.trace.timed(op, bind_compute(op, self.registers, kernel)))

    def deal_mark(self, op: MarkOp, lane: ThreadLane) -> None:
        self.arrivals[op.handle] = self.failure.event()
        lane.add(op, self.arrivals[op.handle].set)

    def deal_await(self, op: WaitOp, lane: ThreadLane) -> None:
        lane.add(op, self.waiting(self.arrivals[op.handle]), Waits.LANE)

    def deal_synchronize(self, op: SynchronizeOp, lane: ThreadLane) -> None:
        reached = self.failure.event()
        self.lane(op.other).add(op, reached.set)
        lane.add(op, self.waiting(reached), Waits.LANE)

    def deal_nothing(self, op: Op, lane: ThreadLane) -> None:
        """Ignore a delay. Its purpose is to let a communication get SMs first, but threads have no SMs."""

    def deal_one_sided(self, op: CopyOp | SignalOp | WaitSignalOp | BarrierOp, lane: ThreadLane) -> None:
        self.one_sided.deal(op, lane)

    def deal_free(self, op: FreeOp, lane: ThreadLane) -> None:
        freed = [i for i, buffer in enumerate(self.unrolled.buffers) if buffer == op.buffer]

        def step() -> None:
            for i in freed:
                self.registers[i] = None

        lane.add(op, step)

    def deal_communication(self, op: CollectiveOp | MessagesOp, lane: ThreadLane) -> None:
        """Add a communication to its team's lane.

        The communication starts when the operation's stream reaches the operation. When the communication ends, an
        event is set.
        """
        ready, arrived = self.failure.event(), self.failure.event()
        self.arrivals[op.handle] = arrived
        collective = isinstance(op, CollectiveOp) or op.collective
        group, members = (self.machine.groups if collective else self.machine.messages).of(op.team)
        carry: Callable[..., None] = exchange if isinstance(op, MessagesOp) else COLLECTIVES[op.communication]
        lane.add(op, ready.set)
        team = self.lane(members if collective else ("messages", *members))
        team.add(op, self.waiting(ready), Waits.LANE)
        team.add(op, self.trace.timed(op, lambda: carry(op, self.registers, group, members, self.finish)), Waits.PEER)
        team.add(op, arrived.set)

    def finish(self, work: Any) -> None:
        """Wait for a collective. Raise AbandonedError if the run has failed, because peers may then never take part."""
        while True:
            try:
                work.wait(POLL)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises gloo's error, unless the collective has just ended
                    return
                if self.failure.problem:
                    raise AbandonedError from None

    def waiting(self, event: threading.Event) -> Step:
        def step() -> None:
            event.wait()
            if self.failure.problem:
                raise AbandonedError

        return step


# The method that deals each class of operations; a test compares the keys with all classes of operations.
DEAL: dict[type[Op], Callable[[LaneDealer, Any, ThreadLane], None]] = {
    AllocateOp: LaneDealer.deal_allocate,
    SymmetricOp: LaneDealer.deal_symmetric,
    ViewOp: LaneDealer.deal_view,
    FreeOp: LaneDealer.deal_free,
    ComputeOp: LaneDealer.deal_compute,
    CopyOp: LaneDealer.deal_one_sided,
    SignalOp: LaneDealer.deal_one_sided,
    WaitSignalOp: LaneDealer.deal_one_sided,
    BarrierOp: LaneDealer.deal_one_sided,
    CollectiveOp: LaneDealer.deal_communication,
    MessagesOp: LaneDealer.deal_communication,
    MarkOp: LaneDealer.deal_mark,
    WaitOp: LaneDealer.deal_await,
    SynchronizeOp: LaneDealer.deal_synchronize,
    DelayOp: LaneDealer.deal_nothing,
}
