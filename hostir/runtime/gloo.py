"""Programs on CPU processes: every stream is a thread, every event an event, and gloo carries what ranks exchange.

A recording is dealt out to lanes: one for the caller's stream, which the calling thread runs itself, one for each
worker stream, and one for each team, whose thread executes the team's communications in the order of issue. So the
order is the same on every rank, whatever the streams do. A rank's messages within a team have another lane, and another
process group, since collectives do not wait for them. Memory and views are made first, in the order of issue, as by a
host that issues everything at once. A call returns when all lanes are done: on this machine calls are synchronous.
"""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from hostir.ir.source import error
from hostir.runtime.kernels.table import Kernel
from hostir.runtime.lifetimes import late_streams
from hostir.runtime.plan import (
    CALLER,
    Allocate,
    Collective,
    Compute,
    Delay,
    Free,
    Mark,
    Messages,
    Op,
    Recording,
    Step,
    Synchronize,
    View,
    Wait,
    bind,
    message_teams_of,
)
from hostir.runtime.session import Groups
from hostir.runtime.timeline import lane_of
from hostir.runtime.trace import Trace

CPU = torch.device("cpu")
Key = int | tuple[object, ...]  # of a lane: a stream, or a team
Jobs = SimpleQueue[Callable[[], None] | None]


class GlooMachine:
    """The threads of an executor on a CPU; they end with it."""

    name = "gloo"
    device = CPU

    def __init__(self, streams: int, kernels: Mapping[str, Kernel], groups: Groups) -> None:
        self.kernels = kernels
        self.groups = groups
        self.messages = Groups(groups.rank, CPU)
        self.queues: dict[Key, Jobs] = {}
        self.broken = ""  # what ended a run while peers may still wait in it
        for stream in range(streams):
            self.queue(stream)

    def plan(self, recording: Recording, trace: Trace | None = None) -> GlooPlan:
        self.messages.prepare(message_teams_of(recording.program))
        return GlooPlan(self, recording, trace)

    def queue(self, key: Key) -> Jobs:
        """The queue of the thread that runs a lane."""
        if key not in self.queues:
            jobs = self.queues[key] = SimpleQueue()
            threading.Thread(target=_work, args=(jobs,), name=f"hostir {key}", daemon=True).start()
            weakref.finalize(self, jobs.put, None)
        return self.queues[key]


def _work(jobs: Jobs) -> None:
    torch.set_grad_enabled(False)  # what a thread is told of gradients holds for it alone
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread must not keep alive the executor that it ends with


class AbandonedError(Exception):
    """Another lane of the run failed."""


class Lane:
    """What one thread does in a run: steps, and the operation of each."""

    def __init__(self, key: Key, fail: Callable[[Op, BaseException], None]) -> None:
        self.key = key
        self.fail = fail
        self.steps: list[Step] = []
        self.ops: list[Op] = []
        self.idle: list[bool] = []  # of each step: whether it only waits for another lane
        self.cursor: Iterator[Step] | None = None
        self.done = threading.Event()

    def add(self, op: Op, step: Step, idle: bool = False) -> None:
        self.steps.append(step)
        self.ops.append(op)
        self.idle.append(idle)

    def run(self) -> None:
        # The iterator counts the steps for whoever asks where the run stands.
        cursor = self.cursor = iter(self.steps)
        try:
            for step in cursor:
                step()
        except AbandonedError:
            pass
        except BaseException as problem:
            self.fail(self.ops[self.position], problem)
        finally:
            self.cursor = None
            self.done.set()

    @property
    def position(self) -> int:
        """The index of the step being executed; -1 where none is."""
        cursor = self.cursor
        return len(self.steps) - operator.length_hint(cursor) - 1 if cursor else -1


class GlooPlan:
    """A recording dealt out to lanes."""

    def __init__(self, machine: GlooMachine, recording: Recording, trace: Trace | None) -> None:
        self.machine = machine
        self.recording = recording
        self.trace = trace
        self.registers: list[Any] = [None] * len(recording.buffers)
        self.blank = list(self.registers)
        self.runs = 0
        self.problem: tuple[Op, BaseException] | None = None
        self.events: list[threading.Event] = []
        self.arrivals: dict[int, threading.Event] = {}  # by handle
        self.host = Lane(CALLER, self.fail)
        self.lanes: dict[Key, Lane] = {CALLER: Lane(CALLER, self.fail)}
        late = late_streams(recording)
        for op in recording.ops:
            if not (isinstance(op, Free) and op.buffer in late):  # what may still be in use is dropped with the run
                self.deal(op)
        self.workers = [(lane, machine.queue(key)) for key, lane in self.lanes.items() if key != CALLER]

    # Running ------------------------------------------------------------------------------------------------------
    def run(self, inputs: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Executes one run. Raises HostIRError naming the statement that raised, on whichever thread."""
        if self.machine.broken:
            raise error(f"this executor cannot run again: {self.machine.broken}", hint="start all ranks anew")
        held = self.recording.inputs
        self.registers[held.start : held.stop] = inputs
        self.runs += 1
        self.problem = None
        for event in self.events:
            event.clear()
        try:
            self.execute()
        except KeyboardInterrupt:
            self.machine.broken = "it was interrupted"
            raise
        if self.problem:
            self.refuse(*self.problem)
        outputs = tuple([self.registers[i] for i in self.recording.outputs])
        self.registers[:] = self.blank
        return outputs

    def execute(self) -> None:
        """Runs all lanes; after a failure it does not wait for those that may be stuck in a communication."""
        self.host.run()
        if self.problem:
            return
        for lane, queue in self.workers:
            lane.done.clear()
            queue.put(lane.run)
        self.lanes[CALLER].run()
        for lane, _ in self.workers:
            while not lane.done.wait(0.1) and (isinstance(lane.key, int) or not self.problem):
                pass

    def refuse(self, op: Op, problem: BaseException) -> NoReturn:
        """Raises what ended the run."""
        if any(not isinstance(lane.key, int) for lane, _ in self.workers):
            self.machine.broken = f"{self.recording.describe(op)} failed earlier"
        if not isinstance(problem, Exception):
            raise problem
        raise self.recording.failure(op, problem) from problem

    def fail(self, op: Op, problem: BaseException) -> None:
        """Notes the first failure, and releases the lanes that wait for what will not come."""
        if self.problem is None:
            self.problem = op, problem
        for event in self.events:
            event.set()

    def in_flight(self) -> list[Op]:
        """The operations being executed, communications first; where all lanes wait, what the caller's waits for."""
        lanes = [self.host, *sorted(self.lanes.values(), key=lambda lane: isinstance(lane.key, int))]
        standing = [(lane, i) for lane in lanes if (i := lane.position) >= 0]
        at_work = [lane.ops[i] for lane, i in standing if not lane.idle[i]]
        return at_work or [lane.ops[i] for lane, i in standing]

    def progress(self) -> tuple[int, ...] | None:
        """Changes whenever a lane gets on; None while no communication is being executed."""
        at = {lane: lane.position for lane in self.lanes.values()}
        if not any(isinstance(lane.key, tuple) and i >= 0 and not lane.idle[i] for lane, i in at.items()):
            return None
        return (self.runs, *at.values())

    # Binding ------------------------------------------------------------------------------------------------------
    def lane(self, key: Key) -> Lane:
        if key not in self.lanes:
            self.lanes[key] = Lane(key, self.fail)
        return self.lanes[key]

    def event(self) -> threading.Event:
        self.events.append(threading.Event())
        return self.events[-1]

    def deal(self, op: Op) -> None:
        lane = self.lane(op.stream)
        if isinstance(op, Allocate | View):
            self.host.add(op, bind(op, self.registers, CPU, self.machine.kernels))
        elif isinstance(op, Compute):
            lane.add(op, self.timed(op, bind(op, self.registers, CPU, self.machine.kernels)))
        elif isinstance(op, Free):
            lane.add(op, self.bind_free(op))
        elif isinstance(op, Mark):
            self.arrivals[op.handle] = self.event()
            lane.add(op, self.arrivals[op.handle].set)
        elif isinstance(op, Wait):
            lane.add(op, self.waiting(self.arrivals[op.handle]), idle=True)
        elif isinstance(op, Synchronize):
            reached = self.event()
            self.lane(op.other).add(op, reached.set)
            lane.add(op, self.waiting(reached), idle=True)
        elif not isinstance(op, Delay):  # threads share cores, not SMs: standing still would help nobody
            assert isinstance(op, Collective | Messages)
            self.deal_communication(op, lane)

    def deal_communication(self, op: Collective | Messages, lane: Lane) -> None:
        """The team's thread starts when the stream gets there, and tells whoever waits."""
        ready, arrived = self.event(), self.event()
        self.arrivals[op.handle] = arrived
        collective = isinstance(op, Collective) or op.collective
        group, members = (self.machine.groups if collective else self.machine.messages).of(op.team)
        carry: Callable[..., None] = exchange if isinstance(op, Messages) else COLLECTIVES[op.kind]
        lane.add(op, ready.set)
        team = self.lane(members if collective else ("messages", *members))
        team.add(op, self.waiting(ready), idle=True)
        team.add(op, self.timed(op, lambda: carry(op, self.registers, group, members)))
        team.add(op, arrived.set)

    def waiting(self, event: threading.Event) -> Step:
        def step() -> None:
            event.wait()
            if self.problem:
                raise AbandonedError

        return step

    def bind_free(self, op: Free) -> Step:
        gone = [i for i, buffer in enumerate(self.recording.buffers) if buffer == op.buffer]

        def step() -> None:
            for i in gone:
                self.registers[i] = None

        return step

    def timed(self, op: Op, step: Step) -> Step:
        trace = self.trace
        if trace is None:
            return step
        rank, lane, text, rounds = self.recording.rank, lane_of(op), self.recording.text(op), op.place.rounds

        def timed_step() -> None:
            start = time.time()
            step()
            trace.add(rank, lane, text, start, time.time(), rounds)

        return timed_step


# Communication ----------------------------------------------------------------------------------------------------
# Everything travels as bytes, whatever its dtype. Sums are taken here, in f32 and in the order of the team, so that
# bf16 loses nothing on the way and every run gives the same bits.
Members = tuple[int, ...]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _blocks(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(-1).view(count, -1)


def _places(op: Collective, members: Members) -> list[int]:
    """For each rank of the group, which numbers its ranks in ascending order, its place in the team."""
    return [op.team.index(rank) for rank in members]


def _gather(x: torch.Tensor, blocks: Sequence[torch.Tensor], places: list[int], group: Any) -> None:
    """`blocks[i]` becomes `x` of the team's i-th rank."""
    group.allgather([[_bytes(blocks[i]) for i in places]], [_bytes(x)], AllgatherOptions()).wait()


def _swap(x: torch.Tensor, places: list[int], group: Any) -> torch.Tensor:
    """Sends block i of `x` to the team's i-th rank; returns the blocks received, by the sender's place in the team."""
    sent = _blocks(x, len(places))[places].contiguous()
    received, ordered = torch.empty_like(sent), torch.empty_like(sent)
    group.alltoall_base(_bytes(received), _bytes(sent), [], [], AllToAllOptions()).wait()
    ordered[places] = received
    return ordered


def _sum(blocks: torch.Tensor, out: torch.Tensor) -> None:
    total = blocks[0].float()
    for block in blocks[1:]:
        total += block
    out.view(-1).copy_(total)


def allgather(op: Collective, registers: list[Any], group: Any, members: Members) -> None:
    """Every rank gets all parts."""
    out = registers[op.out]
    _gather(registers[op.x], _blocks(out, len(members)).unbind(0), _places(op, members), group)


def allreduce(op: Collective, registers: list[Any], group: Any, members: Members) -> None:
    """Every rank gets the sum, in place."""
    x = registers[op.out]
    parts = x.new_empty(len(members), x.numel())
    _gather(x, parts.unbind(0), _places(op, members), group)
    _sum(parts, x)


def reduce_scatter(op: Collective, registers: list[Any], group: Any, members: Members) -> None:
    """Each rank gets its block of the sum."""
    _sum(_swap(registers[op.x], _places(op, members), group), registers[op.out])


def alltoall(op: Collective, registers: list[Any], group: Any, members: Members) -> None:
    """Each rank sends a block to each rank."""
    _blocks(registers[op.out], len(members)).copy_(_swap(registers[op.x], _places(op, members), group))


COLLECTIVES = {f.__name__: f for f in (allgather, allreduce, reduce_scatter, alltoall)}


def exchange(op: Messages, registers: list[Any], group: Any, members: Members) -> None:
    """Sends and receives pieces."""
    if [rank for _, rank in op.sends] == [members[group.rank()]]:  # an exchange with itself
        registers[op.receives[0][0]].copy_(registers[op.sends[0][0]])
        return
    sent = [group.send([_bytes(registers[x])], members.index(rank), 0) for x, rank in op.sends]
    received = [group.recv([_bytes(registers[x])], members.index(rank), 0) for x, rank in op.receives]
    for work in (*sent, *received):
        work.wait()
