"""One-sided operations on CPU processes: threads copy, set flags and poll flags in memory that the ranks share.

A flag holds the number of the call and the epoch of the latest signal, as one number that only rises: see `flag_value`.
For each barrier, every rank of the team has a row of flags, with one flag for each rank. A rank that arrives sets its
flag in the rows of all ranks, and polls the flags in its row. Threads sleep between two polls, because there are more
threads than cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from hostir.ir.machine import Ready
from hostir.job.symmetric import SharedMemory
from hostir.kernels import aten
from hostir.kernels.repeats import Kernel
from hostir.machines.binding import Step, completed, compute_block, copy_here
from hostir.machines.gloo.lanes import AbandonedError, LaneTrace, RunFailure, ThreadLane, Waits
from hostir.plan.operations import EPOCHS, BarrierOp, ComputeOp, CopyOp, Op, SignalOp, WaitSignalOp, flag_value
from hostir.plan.unrolled import UnrolledProgram

MIN_PAUSE, MAX_PAUSE = 2e-5, 1e-3  # seconds between two polls of a flag
Flags = Any  # a row of flags as a numpy array: one load reads a flag, and one store sets it


class GlooOneSided:
    """Adds the one-sided operations of a plan to the lanes of its streams.

    `turn` returns a context manager that holds the lock of the ranks of this host: see `SharedFiles.turn`.
    """

    def __init__(
        self,
        unrolled: UnrolledProgram,
        registers: list[Any],
        memory: SharedMemory | None,
        failure: RunFailure,
        trace: LaneTrace,
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.unrolled = unrolled
        self.registers = registers
        self.memory = memory
        self.failure = failure
        self.trace = trace
        self.turn = turn

    @property
    def call(self) -> int:
        """The number of the current call, which is the same on all ranks.

        All plans with the same memory share one count of calls.
        """
        assert self.memory is not None
        return self.memory.calls

    def deal(self, op: CopyOp | SignalOp | WaitSignalOp | BarrierOp, lane: ThreadLane) -> None:
        """Add a one-sided operation to the lane of its stream."""
        if isinstance(op, CopyOp):
            lane.add(op, self.trace.timed(op, partial(self.copy, op)))
        elif isinstance(op, SignalOp):
            lane.add(op, partial(self.set, self.flags(op.flags), op.slot, op.epoch))
        elif isinstance(op, WaitSignalOp):
            self.deal_wait(op, op.flags, op.slot, op.epoch, lane)
        else:
            self.deal_barrier(op, lane)

    def deal_wait(self, op: Op, flags: int, slot: int, epoch: int, lane: ThreadLane, operand: str = "") -> None:
        row, name = self.flags(flags), self.unrolled.flag_name(flags, slot)

        def reached() -> bool:
            return bool(row[slot] >= flag_value(self.call, epoch))

        def standing() -> str:
            call, at = divmod(int(row[slot]), EPOCHS)
            where = f"at epoch {at} of call {call}" if call else "at 0"
            return f"epoch {epoch} of call {self.call} of flag {name}{operand}: the flag stands {where}"

        lane.add(op, self.until(reached), Waits.PEER, standing)

    def deal_barrier(self, op: BarrierOp, lane: ThreadLane) -> None:
        assert self.memory is not None
        me, team = self.unrolled.rank, op.team
        rows = [self.memory.barriers(team, rank)[op.number].numpy() for rank in team]
        arrivals, place = rows[team.index(me)], team.index(me)

        def missing() -> list[int]:
            return [rank for rank, arrival in zip(team, arrivals, strict=True) if arrival < flag_value(self.call, 0)]

        def standing() -> str:
            return f"rank {', '.join(map(str, missing()))} in call {self.call}"

        lane.add(op, partial(self.arrive, rows, place))
        lane.add(op, self.until(lambda: not missing()), Waits.PEER, standing)

    def deal_blocks(self, op: ComputeOp, kernel: Kernel, lane: ThreadLane) -> None:
        """Add a computation that runs block by block.

        For each block, it waits for the flags of the block, computes the block, and sets the flags that the block
        completes. A trace shows the computation as one event.
        """
        (start, end), ready, done = self.trace.bracket(op), op.ready, op.done
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
                if self.failure.problem:
                    raise AbandonedError
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
            with self.turn():
                pass  # from here on, all data that were written before the flag are visible

        return step


def _operands_block(ready: Ready, slot: int) -> str:
    """Return a text for messages: the name of the block of an operand that the flag at `slot` announces."""
    if ready.blocks == ready.results:
        return f", for block {slot}"
    source, block = divmod(slot, ready.results)
    return f", for block {block} of source {source}"
