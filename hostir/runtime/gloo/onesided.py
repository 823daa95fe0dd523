"""Run one-sided statements on CPU processes: threads copy, set flags and wait for flags in shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch

from hostir.ir.machine import Ready
from hostir.runtime.binding import Step, completed, compute_block, copy_here
from hostir.runtime.kernels import aten
from hostir.runtime.kernels.table import Kernel
from hostir.runtime.symmetric import BufferInfo, Offer, SharedMemory
from hostir.runtime.unroll import (
    EPOCHS,
    BarrierOp,
    ComputeOp,
    CopyOp,
    Op,
    SignalOp,
    UnrolledProgram,
    WaitSignalOp,
    flag_value,
)

# Threads --------------------------------------------------------------------------------------------------------------
# The steps that one thread of a CPU process executes in a run, and its position among them.

LaneKey = int | tuple[object, ...]  # what a lane runs: the operations of a stream, or the communications of a team


class AbandonedError(Exception):
    """Raised in a lane because another lane of the run failed."""


class Waits(Enum):
    """The kinds of waits of a step."""

    NOTHING = "it works"
    LANE = "another lane of this rank"
    PEER = "another rank"


class ThreadLane:
    """The steps of one thread in a run, and the operation that each belongs to."""

    def __init__(self, key: LaneKey, fail: Callable[[Op, BaseException], None]) -> None:
        self.key = key
        self.fail = fail
        self.steps: list[Step] = []
        self.ops: list[Op] = []
        self.waits: list[Waits] = []
        self.notes: dict[int, Callable[[], str]] = {}  # by step: details of its wait, for messages
        self.cursor: Iterator[Step] | None = None
        self.done = threading.Event()

    def add(self, op: Op, step: Step, waits: Waits = Waits.NOTHING, note: Callable[[], str] | None = None) -> None:
        if note is not None:
            self.notes[len(self.steps)] = note
        self.steps.append(step)
        self.ops.append(op)
        self.waits.append(waits)

    def run(self) -> None:
        # Other threads read the position of the run from the iterator.
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

    def run_on_thread(self, inference: bool) -> None:
        """Do as `run`, in torch's inference mode if the caller is, as each thread has a mode of its own; set `done`."""
        try:
            with torch.inference_mode() if inference else contextlib.nullcontext():
                self.run()
        finally:
            self.done.set()

    @property
    def position(self) -> int:
        """The index of the step being executed; -1 if none is."""
        cursor = self.cursor
        return len(self.steps) - operator.length_hint(cursor) - 1 if cursor else -1


# Shared memory --------------------------------------------------------------------------------------------------------
# CPU processes share memory through files without a name (memfd): peers open a file through the process that made it.
#
# So no file remains, however a rank ends.


class SharedFiles:
    """Shares memory between CPU processes through files, and gives them a lock for memory order."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.lock = -1  # the file that all ranks lock to take turns
        self.unlock: Callable[[], object] | None = None  # closes that file

    @contextlib.contextmanager
    def offering(self, size: int) -> Iterator[str]:
        """Create a file of `size` bytes and yield its path, by which peers map it until the context ends."""
        if not hasattr(os, "memfd_create"):
            raise RuntimeError("only Linux lets processes open each other's memory")
        file = os.memfd_create("hostir")
        try:
            os.ftruncate(file, size)
            yield f"/proc/{os.getpid()}/fd/{file}"
        finally:
            os.close(file)

    def reserve(self, size: int) -> None:
        """Do nothing: the file has its size already."""

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        """Map the files of these ranks, and make the newest file of rank 0 the lock of all ranks."""
        newest = os.open(offers[0].path, os.O_RDWR)
        if self.lock < 0:
            self.lock = newest
            self.unlock = weakref.finalize(self, os.close, self.lock)
        else:
            os.dup2(newest, self.lock, inheritable=False)
            os.close(newest)
        return {
            rank: torch.from_file(offers[rank].path, shared=True, size=offers[rank].bytes, dtype=torch.uint8)
            for rank in ranks
        }

    def synchronize(self) -> None:
        """Do nothing: a call that has returned has ended."""

    def release(self, memories: Sequence[SharedMemory], abort: Callable[[], None], seconds: float) -> str:
        """End the threads that communicate; those that use memory have ended with the call that raised."""
        abort()
        return ""

    def close(self) -> None:
        """Close the lock file, when no call follows."""
        if self.unlock is not None:
            self.unlock()

    def begin(self, unrolled: UnrolledProgram, memory: SharedMemory) -> None:
        """Do nothing: the machine keeps nothing of its own."""

    def prepare(self, memory: SharedMemory) -> None:
        """Do nothing: the memory is ready."""

    def hidden(self, unrolled: UnrolledProgram) -> tuple[BufferInfo, ...]:
        """Return no buffers."""
        return ()

    def notes(self, unrolled: UnrolledProgram) -> str:
        """Return no data."""
        return ""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock of all ranks: what a rank writes before its turn is visible to every rank with a later turn.

        torch copies with plain stores, and Python has no memory fence: on Arm, a flag that is written after the data
        may be visible before them. So a rank sets a flag while it holds the lock, and a rank that has seen the flag
        takes the lock once before it reads the data. It is a file lock of the operating system, which unlocks with
        release and locks with acquire semantics, and unlocks for a process that dies. It excludes processes, not
        threads; hence the mutex.
        """
        with self.mutex:
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self.lock, fcntl.LOCK_UN)


# Statements -----------------------------------------------------------------------------------------------------------
# Threads copy, set flags and poll flags in memory that the ranks share.
#
# A flag holds the latest call and epoch that was signalled, as one number that only rises; see `flag_value`. For each
# barrier, every rank of the team has a row of such flags, one for each rank: a rank sets its flag in all rows, and
# polls the flags of its own row. Threads sleep between two polls, as there are more threads than cores.

MIN_PAUSE, MAX_PAUSE = 2e-5, 1e-3  # seconds between two polls of a flag
Flags = Any  # a row of flags as a numpy array, of which an element is read or written by one load or store


class SharedMachine(Protocol):
    """The part of a machine that one-sided operations use."""

    sharing: SharedFiles


class LanePlan(Protocol):
    """The part of a plan that one-sided operations use."""

    unrolled: UnrolledProgram
    registers: list[Any]
    memory: SharedMemory | None
    problem: tuple[Op, BaseException] | None

    @property
    def machine(self) -> SharedMachine:
        """The machine that it runs on."""

    def timed(self, op: Op, step: Step) -> Step:
        """Return a step that does the same and records an event, if there is a trace."""

    def bracket(self, op: Op) -> tuple[Step, Step]:
        """Return a step that begins an event of the trace, and one that ends it."""


class GlooOneSided:
    """Adds the one-sided operations of a plan to the lanes of its streams."""

    def __init__(self, plan: LanePlan) -> None:
        self.plan = plan
        self.turn = plan.machine.sharing.turn
        self.registers = plan.registers

    @property
    def call(self) -> int:
        """The number of the call, counted over all plans with the same memory, and so the same on every rank."""
        assert self.plan.memory is not None
        return self.plan.memory.calls

    def deal(self, op: CopyOp | SignalOp | WaitSignalOp | BarrierOp, lane: ThreadLane) -> None:
        """Add a one-sided operation to the lane of its stream."""
        if isinstance(op, CopyOp):
            lane.add(op, self.plan.timed(op, partial(self.copy, op)))
        elif isinstance(op, SignalOp):
            lane.add(op, partial(self.set, self.flags(op.flags), op.slot, op.epoch))
        elif isinstance(op, WaitSignalOp):
            self.deal_wait(op, op.flags, op.slot, op.epoch, lane)
        else:
            self.deal_barrier(op, lane)

    def deal_wait(self, op: Op, flags: int, slot: int, epoch: int, lane: ThreadLane, what: str = "") -> None:
        row, name = self.flags(flags), self.plan.unrolled.flag_name(flags, slot)

        def reached() -> bool:
            return bool(row[slot] >= flag_value(self.call, epoch))

        def standing() -> str:
            call, at = divmod(int(row[slot]), EPOCHS)
            where = f"at epoch {at} of call {call}" if call else "at 0"
            return f"epoch {epoch} of call {self.call} of flag {name}{what}: the flag stands {where}"

        lane.add(op, self.until(reached), Waits.PEER, standing)

    def deal_barrier(self, op: BarrierOp, lane: ThreadLane) -> None:
        assert self.plan.memory is not None
        me, team = self.plan.unrolled.rank, op.team
        rows = [self.plan.memory.barriers(team, rank)[op.number].numpy() for rank in team]
        own, place = rows[team.index(me)], team.index(me)

        def missing() -> list[int]:
            return [rank for rank, came in zip(team, own, strict=True) if came < flag_value(self.call, 0)]

        def standing() -> str:
            return f"rank {', '.join(map(str, missing()))} in call {self.call}"

        lane.add(op, partial(self.arrive, rows, place))
        lane.add(op, self.until(lambda: not missing()), Waits.PEER, standing)

    def deal_blocks(self, op: ComputeOp, kernel: Kernel, lane: ThreadLane) -> None:
        """Add a computation block by block, each after waits for its flags and before the flags that it completes.

        In a trace it is one event.
        """
        (start, end), ready, done = self.plan.bracket(op), op.ready, op.done
        order = ready.order if ready is not None else done.order if done is not None else ()
        blocks, computed = len(order), set[int]()
        add_up = aten.add_up if kernel is aten.sum else None
        lane.add(op, start)
        for block in order:
            if ready is not None:
                for slot in ready.needed(block):
                    self.deal_wait(op, ready.flags, slot, ready.epoch, lane, _operands_block(ready, slot))
            lane.add(op, partial(compute_block, op, self.registers, kernel, block, blocks, add_up))
            computed.add(block)
            if done is not None:
                flags = self.flags(done.flags)
                for slot in completed(done, block, blocks, computed):
                    lane.add(op, partial(self.set, flags, slot, done.epoch))
        lane.add(op, end)

    def flags(self, register: int) -> Flags:
        return self.registers[register].numpy()

    # Steps --------------------------------------------------------------------------------------------------------
    def copy(self, op: CopyOp) -> None:
        copy_here(self.registers[op.out], self.registers[op.x], torch.Tensor.copy_)

    def set(self, flags: Flags, slot: int, epoch: int) -> None:
        with self.turn():
            flags[slot] = flag_value(self.call, epoch)

    def arrive(self, rows: list[Flags], place: int) -> None:
        with self.turn():
            for row in rows:
                row[place] = flag_value(self.call, 0)

    def until(self, reached: Callable[[], bool]) -> Step:
        def step() -> None:
            pause = MIN_PAUSE
            while not reached():
                if self.plan.problem:
                    raise AbandonedError
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
            with self.turn():
                pass  # from here on the data that were written before the flag are visible

        return step


def _operands_block(ready: Ready, slot: int) -> str:
    """Return which part of an operand a flag is about, for messages."""
    if ready.blocks == ready.results:
        return f", for block {slot}"
    source, block = divmod(slot, ready.results)
    return f", for block {block} of source {source}"
