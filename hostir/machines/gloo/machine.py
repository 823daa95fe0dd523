"""The machine of CPU processes and its plans. A thread takes the place of each stream.

The operations of a plan are distributed over lanes: see hostir.machines.gloo.dealer. gloo runs the communications. A
call returns when all lanes are done, so calls are synchronous.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

import torch

from hostir.ir.source import HostIRError, error
from hostir.job.groups import ANEW, Groups
from hostir.job.links import MisalignedError, headline
from hostir.job.offers import KindOfSizes
from hostir.kernels.repeats import Kernel
from hostir.machines.binding import deliver, place
from hostir.machines.gloo.dealer import LaneDealer
from hostir.machines.gloo.lanes import LaneKey, LaneTrace, RunFailure, ThreadLane, Waits
from hostir.machines.gloo.memory import SharedFiles
from hostir.machines.trace import Trace
from hostir.plan.lifetimes import homes, late_streams
from hostir.plan.operations import (
    CALLER,
    Op,
)
from hostir.plan.unroll import message_teams_of
from hostir.plan.unrolled import UnrolledProgram

ENDING = 0.5  # seconds that a thread may take to end
Jobs = SimpleQueue[Callable[[], None] | None]


class GlooMachine:
    """The threads of an executor, and the memory that it shares with its peers.

    The threads end when the machine is garbage-collected, or when `end` is called.
    """

    name = "gloo"
    device = torch.device("cpu")

    def __init__(self, streams: int, kernels: Mapping[str, Kernel], groups: Groups) -> None:
        self.kernels = kernels
        self.groups = groups
        self.symmetric = groups.symmetric(SharedFiles)
        assert isinstance(self.symmetric.sharing, SharedFiles)
        self.sharing = self.symmetric.sharing
        self.messages = groups.messages
        self.queues: dict[LaneKey, Jobs] = {}
        self.threads: list[threading.Thread] = []
        self.ends: list[weakref.finalize[..., GlooMachine]] = []  # each ends the thread of one lane when called
        for stream in range(streams):
            self.queue(stream)

    def plan(
        self,
        unrolled: UnrolledProgram,
        trace: Trace | None = None,
        sizes_key: KindOfSizes = None,
        limit: int | None = None,
    ) -> GlooPlan:
        """Return a plan. All plans for compatible sizes share their symmetric memory: see `SymmetricMemory.of`."""
        self.messages.prepare(message_teams_of(unrolled.program))
        return GlooPlan(self, unrolled, trace, sizes_key, limit)

    def queue(self, key: LaneKey) -> Jobs:
        """Return the job queue of the thread that runs a lane; start the thread if it does not run."""
        if key not in self.queues:
            jobs = self.queues[key] = SimpleQueue()
            self.threads.append(threading.Thread(target=_work, args=(jobs,), name=f"hostir {key}", daemon=True))
            self.threads[-1].start()
            self.ends.append(weakref.finalize(self, jobs.put, None))
        return self.queues[key]

    def end(self) -> None:
        """End the threads. All calls must have returned. Later plans start new threads."""
        for end in self.ends:
            end()
        for thread in self.threads:  # Python may end next, and a thread that returns from gloo after that would crash
            thread.join(ENDING)
        self.ends.clear()
        self.threads.clear()
        self.queues.clear()


def _work(jobs: Jobs) -> None:
    torch.set_grad_enabled(False)  # each thread has a separate gradient mode
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread must not keep its executor alive


class GlooPlan:
    """An unrolled program whose operations are distributed over lanes. A thread runs each lane."""

    def __init__(
        self,
        machine: GlooMachine,
        unrolled: UnrolledProgram,
        trace: Trace | None,
        sizes_key: KindOfSizes,
        limit: int | None,
    ) -> None:
        self.machine = machine
        self.unrolled = unrolled
        self.registers: list[Any] = [None] * len(unrolled.buffers)
        self.homes = homes(unrolled)
        self.failure = RunFailure()
        self.begun = False  # True once an operation that peers can notice may have begun in the latest run
        self.given_up: HostIRError | None = None  # the error with which the watchdog ended a run
        self.memory = machine.symmetric.of(unrolled, self, sizes_key, limit)
        self.runs = 0
        dealer = LaneDealer(machine, unrolled, self.registers, self.memory, self.failure, LaneTrace(unrolled, trace))
        late = late_streams(unrolled)
        for op in unrolled.ops:
            if op.frees not in late:  # buffers that may still be in use are dropped with the run
                dealer.deal(op)
        self.host = dealer.host
        self.lanes, dealer.lanes = dealer.lanes, {}  # steps refer to the dealer, which must not keep them alive
        self.blank = list(self.registers)  # the registers between runs: symmetric buffers and their views
        self.workers = [(lane, machine.queue(key)) for key, lane in self.lanes.items() if key != CALLER]

    def run(
        self, inputs: Sequence[torch.Tensor | None], outs: Sequence[torch.Tensor | None] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Execute one run and return the outputs.

        If `outs` is not None, the outputs are written to these tensors. If a statement fails on any thread, raises
        HostIRError that names the statement.
        """
        if broken := self.machine.groups.broken:
            raise error(f"@{self.unrolled.program.name} cannot run: {broken}", hint=ANEW)
        if self.failure.problem:  # the failed run has left tensors
            self.registers[:] = self.blank
        held = self.unrolled.inputs
        self.registers[held.start : held.stop] = inputs
        if outs is not None:
            place(outs, self.homes, self.registers)
        self.runs += 1
        self.failure.problem = None
        for event in self.failure.events:
            event.clear()
        try:
            self.execute()
        except BaseException:  # lanes catch what their steps raise, and may still run
            self.machine.groups.broken = f"a call of @{self.unrolled.program.name} was interrupted"
            raise
        if self.failure.problem:
            self.refuse(*self.failure.problem)
        if outs is None:
            outputs = tuple([self.registers[i] for i in self.unrolled.outputs])
        else:
            outputs = deliver(outs, self.unrolled.outputs, self.registers)
        self.registers[:] = self.blank
        return outputs

    def execute(self) -> None:
        """Run all lanes, and wait until they are done.

        After a failure, do not wait for the lanes of teams, because they may be stuck in a communication.
        """
        self.begun = False
        self.host.run()
        if self.failure.problem:
            return
        self.begun = True
        if self.memory is not None:
            self.memory.calls += 1
        inference = torch.is_inference_mode_enabled()  # each thread has a separate mode
        for lane, queue in self.workers:
            lane.done.clear()
            queue.put(partial(lane.run_on_thread, inference))
        self.lanes[CALLER].run()
        for lane, _ in self.workers:
            while not lane.done.wait(0.1) and (isinstance(lane.key, int) or not self.failure.problem):
                pass

    def refuse(self, op: Op, problem: BaseException) -> NoReturn:
        """Raise the error that ended the run. `op` is the operation that failed, and `problem` is its exception."""
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

    def give_up(self, problem: HostIRError) -> None:
        """Make the current run fail with this error on all threads. The watchdog calls this."""
        self.given_up = problem
        for op in self.in_flight()[:1]:
            self.failure.record(op, problem)

    def end(self) -> None:
        """Drop all steps now. Otherwise they would keep process groups alive until Python collects reference cycles."""
        self.host = ThreadLane(CALLER, self.failure.record)
        self.lanes, self.workers, self.registers, self.memory = {}, [], [], None

    def in_flight(self) -> list[Op]:
        """Return the operations that the lanes execute now. Operations that wait for a peer come first.

        Operations that wait for another lane are left out, unless all operations wait for another lane. After a
        failure, return only the operation that failed.
        """
        if self.failure.problem:
            return [self.failure.problem[0]]
        lanes = [self.host, *self.lanes.values()]
        standing = [(lane.waits[i], lane.ops[i]) for lane in lanes if (i := lane.position) >= 0]
        at_work = [(waits, op) for waits, op in standing if waits is not Waits.LANE]
        return [op for _, op in sorted(at_work or standing, key=lambda lane: lane[0] is not Waits.PEER)]

    def describe(self, op: Op) -> str:
        """Return a description of an operation that a lane executes now. The text also says what the lane waits for."""
        notes = [lane.notes.get(i) for lane in self.lanes.values() if (i := lane.position) >= 0 and lane.ops[i] is op]
        return self.unrolled.describe(op) + "".join(f", which waits for {note()}" for note in notes if note)

    def reported_problem(self) -> str:
        return ""  # failures are raised to the caller

    def progress(self) -> tuple[int, ...] | None:
        """Return a value that changes whenever a lane begins a step.

        Returns None after a failure, and if no lane waits for a peer.
        """
        if self.failure.problem:
            return None
        at = {lane: lane.position for lane in self.lanes.values()}
        if not any(i >= 0 and lane.waits[i] is Waits.PEER for lane, i in at.items()):
            return None
        return (self.runs, *at.values())
