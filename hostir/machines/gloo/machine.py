"""Run programs on CPU processes: each stream is a thread, each event a threading event; gloo runs collectives.

Programs on CPU processes: each stream is a thread, each event a threading event, and gloo runs communications.

An unrolled program is distributed over lanes: one for the caller's stream, which the calling thread runs itself, one
for each worker stream, and one for each team, whose thread executes the team's communications in the order of issue.
So the order is the same on every rank, whatever the streams do. A rank's messages within a team have another lane,
and another process group, since collectives do not wait for them. Memory and views are made first, in the order of
issue, as by a host that issues everything at once. Copies, signals and barriers belong to the streams: they work on
memory that the ranks share. A call returns when all lanes are done: on this machine calls are synchronous.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

import torch

from hostir.ir.source import HostIRError, error
from hostir.job.groups import ANEW, Groups
from hostir.job.links import MisalignedError, headline
from hostir.job.offers import KindOfSizes
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernels_for
from hostir.machines.binding import Step, bind_allocate, bind_compute, bind_view, deliver, place
from hostir.machines.gloo.collectives import COLLECTIVES, exchange
from hostir.machines.gloo.lanes import AbandonedError, LaneKey, ThreadLane, Waits
from hostir.machines.gloo.memory import SharedFiles
from hostir.machines.gloo.onesided import GlooOneSided
from hostir.machines.trace import Trace
from hostir.plan.lifetimes import homes, late_streams
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
from hostir.plan.unroll import message_teams_of
from hostir.plan.unrolled import UnrolledProgram

CPU = torch.device("cpu")
POLL = timedelta(milliseconds=50)  # how long a lane waits for a collective before it looks if the run has failed
ENDING = 0.5  # seconds that a thread may take to end
Jobs = SimpleQueue[Callable[[], None] | None]


class GlooMachine:
    """An executor's threads on a CPU, which end with it, and the memory that it shares with its peers."""

    name = "gloo"
    device = CPU

    def __init__(self, streams: int, kernels: Mapping[str, Kernel], groups: Groups) -> None:
        self.kernels = kernels
        self.groups = groups
        self.symmetric = groups.symmetric(SharedFiles)
        assert isinstance(self.symmetric.sharing, SharedFiles)
        self.sharing = self.symmetric.sharing
        self.messages = groups.messages
        self.queues: dict[LaneKey, Jobs] = {}
        self.threads: list[threading.Thread] = []
        self.ends: list[weakref.finalize[..., GlooMachine]] = []  # each, when called, ends the thread of a lane
        for stream in range(streams):
            self.queue(stream)

    def plan(
        self, unrolled: UnrolledProgram, trace: Trace | None = None, kind: KindOfSizes = None, limit: int | None = None
    ) -> GlooPlan:
        """Return a plan, whose symmetric memory is that of a kind of sizes; see `SymmetricMemory.of`."""
        self.messages.prepare(message_teams_of(unrolled.program))
        return GlooPlan(self, unrolled, trace, kind, limit)

    def queue(self, key: LaneKey) -> Jobs:
        """Return the queue of the thread that runs a lane."""
        if key not in self.queues:
            jobs = self.queues[key] = SimpleQueue()
            self.threads.append(threading.Thread(target=_work, args=(jobs,), name=f"hostir {key}", daemon=True))
            self.threads[-1].start()
            self.ends.append(weakref.finalize(self, jobs.put, None))
        return self.queues[key]

    def end(self) -> None:
        """End the threads, once the last call has returned. Later plans get others."""
        for end in self.ends:
            end()
        for thread in self.threads:  # Python may end next, and a thread that came back from gloo then would crash
            thread.join(ENDING)
        self.ends.clear()
        self.threads.clear()
        self.queues.clear()


def _work(jobs: Jobs) -> None:
    torch.set_grad_enabled(False)  # the gradient mode is a thread's own
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread must not keep alive the executor that it ends with


class GlooPlan:
    """An unrolled program distributed over lanes, one a thread."""

    def __init__(
        self, machine: GlooMachine, unrolled: UnrolledProgram, trace: Trace | None, kind: KindOfSizes, limit: int | None
    ) -> None:
        self.machine = machine
        self.unrolled = unrolled
        self.trace = trace
        self.registers: list[Any] = [None] * len(unrolled.buffers)
        self.homes = homes(unrolled)
        self.problem: tuple[Op, BaseException] | None = None
        self.begun = False  # whether an operation that peers see may have begun in the latest run
        self.given_up: HostIRError | None = None  # the error with which the watchdog ended a run
        self.events: list[threading.Event] = []
        self.arrivals: dict[int, threading.Event] = {}  # by handle
        self.memory = machine.symmetric.of(unrolled, self, kind, limit)
        self.runs = 0
        self.one_sided = GlooOneSided(self)
        self.host = ThreadLane(CALLER, self.fail)
        self.lanes: dict[LaneKey, ThreadLane] = {CALLER: ThreadLane(CALLER, self.fail)}
        late = late_streams(unrolled)
        for op in unrolled.ops:
            if op.frees not in late:  # what may still be in use is dropped with the run
                self.deal(op)
        self.blank = list(self.registers)  # symmetric buffers and their views last
        self.workers = [(lane, machine.queue(key)) for key, lane in self.lanes.items() if key != CALLER]

    # Running ------------------------------------------------------------------------------------------------------
    def run(
        self, inputs: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Execute one run, into the tensors `given` for the outputs if there are any.

        Raises HostIRError naming the statement that raised, on whichever thread.
        """
        if broken := self.machine.groups.broken:
            raise error(f"@{self.unrolled.program.name} cannot run: {broken}", hint=ANEW)
        if self.problem:  # what the run that failed has left
            self.registers[:] = self.blank
        held = self.unrolled.inputs
        self.registers[held.start : held.stop] = inputs
        if given is not None:
            place(given, self.homes, self.registers)
        self.runs += 1
        self.problem = None
        for event in self.events:
            event.clear()
        try:
            self.execute()
        except BaseException:  # lanes catch what their steps raise, and may still run
            self.machine.groups.broken = f"a call of @{self.unrolled.program.name} was interrupted"
            raise
        if self.problem:
            self.refuse(*self.problem)
        if given is None:
            outputs = tuple([self.registers[i] for i in self.unrolled.outputs])
        else:
            outputs = deliver(given, self.unrolled.outputs, self.registers)
        self.registers[:] = self.blank
        return outputs

    def execute(self) -> None:
        """Run all lanes; after a failure do not wait for those that may be stuck in a communication."""
        self.begun = False
        self.host.run()
        if self.problem:
            return
        self.begun = True
        if self.memory is not None:
            self.memory.calls += 1
        inference = torch.is_inference_mode_enabled()  # the mode is a thread's own, too
        for lane, queue in self.workers:
            lane.done.clear()
            queue.put(partial(lane.run_on_thread, inference))
        self.lanes[CALLER].run()
        for lane, _ in self.workers:
            while not lane.done.wait(0.1) and (isinstance(lane.key, int) or not self.problem):
                pass

    def refuse(self, op: Op, problem: BaseException) -> NoReturn:
        """Raise the error that ended the run."""
        shared = self.memory is not None or any(not isinstance(lane.key, int) for lane, _ in self.workers)
        if isinstance(problem, MisalignedError):
            if self.begun and shared:
                self.machine.groups.broken = f"{self.unrolled.describe(op)} failed earlier"
            raise problem
        failure = self.unrolled.failure(op, problem)
        if shared and (self.begun or problem is self.given_up):
            self.machine.groups.abandoned = headline(failure)
        if not isinstance(problem, Exception):
            raise problem
        raise failure from problem

    def fail(self, op: Op, problem: BaseException) -> None:
        """Record the first failure, and release the lanes that wait for events that will not occur."""
        if self.problem is None:
            self.problem = op, problem
        for event in self.events:
            event.set()

    def give_up(self, problem: HostIRError) -> None:
        """End the run under way with this error, on whichever threads it waits."""
        self.given_up = problem
        for op in self.in_flight()[:1]:
            self.fail(op, problem)

    def end(self) -> None:
        """Drop the steps. They refer to this plan, and would keep its process groups until garbage is collected."""
        self.lanes, self.workers, self.registers, self.memory = {}, [], [], None
        self.one_sided = GlooOneSided(self)

    def in_flight(self) -> list[Op]:
        """Return the operations being executed, those first that wait for a peer; else the caller's lane's first.

        After a failure, the operation that failed.
        """
        if self.problem:
            return [self.problem[0]]
        lanes = [self.host, *self.lanes.values()]
        standing = [(lane.waits[i], lane.ops[i]) for lane in lanes if (i := lane.position) >= 0]
        at_work = [(waits, op) for waits, op in standing if waits is not Waits.LANE]
        return [op for _, op in sorted(at_work or standing, key=lambda it: it[0] is not Waits.PEER)]

    def describe(self, op: Op) -> str:
        """Describe an operation in flight, and what it waits for."""
        notes = [lane.notes.get(i) for lane in self.lanes.values() if (i := lane.position) >= 0 and lane.ops[i] is op]
        return self.unrolled.describe(op) + "".join(f", which waits for {note()}" for note in notes if note)

    def reported_problem(self) -> str:
        return ""  # failures are raised to the caller

    def progress(self) -> tuple[int, ...] | None:
        """Return a value that changes when a lane progresses; None while none waits for a peer, and after a failure."""
        if self.problem:
            return None
        at = {lane: lane.position for lane in self.lanes.values()}
        if not any(i >= 0 and lane.waits[i] is Waits.PEER for lane, i in at.items()):
            return None
        return (self.runs, *at.values())

    # Binding ------------------------------------------------------------------------------------------------------
    def lane(self, key: LaneKey) -> ThreadLane:
        if key not in self.lanes:
            self.lanes[key] = ThreadLane(key, self.fail)
        return self.lanes[key]

    def event(self) -> threading.Event:
        self.events.append(threading.Event())
        return self.events[-1]

    def deal(self, op: Op) -> None:
        DEAL[type(op)](self, op, self.lane(op.stream))

    def deal_symmetric(self, op: SymmetricOp, lane: ThreadLane) -> None:
        assert self.memory is not None
        self.registers[op.out] = self.memory.buffer(op)

    def deal_allocate(self, op: AllocateOp, lane: ThreadLane) -> None:
        self.host.add(op, bind_allocate(op, self.registers, CPU))

    def deal_view(self, op: ViewOp, lane: ThreadLane) -> None:
        """Make a view: of a symmetric buffer once, else in every run."""
        step = bind_view(op, self.registers)
        if self.registers[op.x] is None:
            self.host.add(op, step)
        else:
            step()

    def deal_compute(self, op: ComputeOp, lane: ThreadLane) -> None:
        kernel = kernels_for(self.machine.kernels, torch_dtype(op.dtype))[op.kind]
        if op.ready is not None or op.done is not None:
            self.one_sided.deal_blocks(op, kernel, lane)
        else:
            lane.add(op, self.timed(op, bind_compute(op, self.registers, kernel)))

    def deal_mark(self, op: MarkOp, lane: ThreadLane) -> None:
        self.arrivals[op.handle] = self.event()
        lane.add(op, self.arrivals[op.handle].set)

    def deal_await(self, op: WaitOp, lane: ThreadLane) -> None:
        lane.add(op, self.waiting(self.arrivals[op.handle]), Waits.LANE)

    def deal_synchronize(self, op: SynchronizeOp, lane: ThreadLane) -> None:
        reached = self.event()
        self.lane(op.other).add(op, reached.set)
        lane.add(op, self.waiting(reached), Waits.LANE)

    def deal_nothing(self, op: Op, lane: ThreadLane) -> None:
        """Do nothing for a delay: threads share cores, not SMs, and standing still would help nobody."""

    def deal_one_sided(self, op: CopyOp | SignalOp | WaitSignalOp | BarrierOp, lane: ThreadLane) -> None:
        self.one_sided.deal(op, lane)

    def deal_free(self, op: FreeOp, lane: ThreadLane) -> None:
        gone = [i for i, buffer in enumerate(self.unrolled.buffers) if buffer == op.buffer]

        def step() -> None:
            for i in gone:
                self.registers[i] = None

        lane.add(op, step)

    def deal_communication(self, op: CollectiveOp | MessagesOp, lane: ThreadLane) -> None:
        """Add a communication to its team's thread: it starts when the stream gets there, and signals its end."""
        ready, arrived = self.event(), self.event()
        self.arrivals[op.handle] = arrived
        collective = isinstance(op, CollectiveOp) or op.collective
        group, members = (self.machine.groups if collective else self.machine.messages).of(op.team)
        carry: Callable[..., None] = exchange if isinstance(op, MessagesOp) else COLLECTIVES[op.kind]
        lane.add(op, ready.set)
        team = self.lane(members if collective else ("messages", *members))
        team.add(op, self.waiting(ready), Waits.LANE)
        team.add(op, self.timed(op, lambda: carry(op, self.registers, group, members, self.finish)), Waits.PEER)
        team.add(op, arrived.set)

    def finish(self, work: Any) -> None:
        """Wait for a collective; raise AbandonedError once the run has failed, as peers may never take part."""
        while True:
            try:
                work.wait(POLL)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what gloo reports, unless the collective has ended right now
                    return
                if self.problem:
                    raise AbandonedError from None

    def waiting(self, event: threading.Event) -> Step:
        def step() -> None:
            event.wait()
            if self.problem:
                raise AbandonedError

        return step

    def timed(self, op: Op, step: Step) -> Step:
        if self.trace is None:
            return step
        start, end = self.bracket(op)

        def timed_step() -> None:
            start()
            step()
            end()

        return timed_step

    def bracket(self, op: Op) -> tuple[Step, Step]:
        """Return the steps before and after an operation, for the trace."""
        trace = self.trace
        if trace is None:
            return _nothing, _nothing
        rank, lane, text, rounds = self.unrolled.rank, op.lane, self.unrolled.text(op), op.place.rounds
        begun = [0.0]

        def start() -> None:
            begun[0] = time.time()

        def end() -> None:
            trace.add(rank, lane, text, begun[0], time.time(), rounds)

        return start, end


def _nothing() -> None:
    """Do nothing."""


# What each operation is on a CPU process; a test compares the keys with the operations that there are.
DEAL: dict[type[Op], Callable[[GlooPlan, Any, ThreadLane], None]] = {
    AllocateOp: GlooPlan.deal_allocate,
    SymmetricOp: GlooPlan.deal_symmetric,
    ViewOp: GlooPlan.deal_view,
    FreeOp: GlooPlan.deal_free,
    ComputeOp: GlooPlan.deal_compute,
    CopyOp: GlooPlan.deal_one_sided,
    SignalOp: GlooPlan.deal_one_sided,
    WaitSignalOp: GlooPlan.deal_one_sided,
    BarrierOp: GlooPlan.deal_one_sided,
    CollectiveOp: GlooPlan.deal_communication,
    MessagesOp: GlooPlan.deal_communication,
    MarkOp: GlooPlan.deal_mark,
    WaitOp: GlooPlan.deal_await,
    SynchronizeOp: GlooPlan.deal_synchronize,
    DelayOp: GlooPlan.deal_nothing,
}
