"""One-sided statements on CPU processes: threads copy, set flags and look at flags in memory that the ranks share.

A flag holds the highest epoch of the latest call that was signalled, and rises; see `plan.flag_value`. A barrier is a
row of such flags on every rank of the team, one for each of them: a rank sets its own everywhere, and looks at its own
row. Who waits looks again and again, and sleeps in between, as there are more threads than cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from hostir.ir.machine import Ready
from hostir.runtime.kernels.blocks import with_rows
from hostir.runtime.kernels.kernel import Kernel
from hostir.runtime.lanes import AbandonedError, Lane, Waits
from hostir.runtime.plan import EPOCHS, Barrier, Compute, Copy, Op, Recording, Signal, Step, WaitSignal, flag_value
from hostir.runtime.shared_files import SharedFiles
from hostir.runtime.symmetric import SharedMemory

SHORTEST, LONGEST = 2e-5, 1e-3  # seconds between two looks at a flag
Flags = Any  # a row of flags as numpy sees it: an element is one load or store


class Machine(Protocol):
    """What the operations need of a machine: which call it is in, and the memory that ranks share."""

    calls: int
    sharing: SharedFiles


class Plan(Protocol):
    """What they need of the plan that they belong to."""

    recording: Recording
    registers: list[Any]
    memory: SharedMemory | None
    problem: tuple[Op, BaseException] | None

    @property
    def machine(self) -> Machine:
        """Where it runs."""

    def timed(self, op: Op, step: Step) -> Step:
        """The step, with its time in the trace if there is one."""

    def bracket(self, op: Op) -> tuple[Step, Step]:
        """Steps that begin and end a bar in the trace."""


class OneSided:
    """Deals the one-sided operations of a plan to the lanes of its streams."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.machine = plan.machine
        self.turn = plan.machine.sharing.turn
        self.registers = plan.registers

    def deal(self, op: Copy | Signal | WaitSignal | Barrier, lane: Lane) -> None:
        if isinstance(op, Copy):
            lane.add(op, self.plan.timed(op, partial(self.copy, op)))
        elif isinstance(op, Signal):
            lane.add(op, partial(self.set, self.flags(op.flags), op.slot, op.epoch))
        elif isinstance(op, WaitSignal):
            self.deal_wait(op, self.flags(op.flags), op.slot, op.epoch, lane)
        else:
            self.deal_barrier(op, lane)

    def deal_wait(self, op: Op, flags: Flags, slot: int, epoch: int, lane: Lane) -> None:
        def reached() -> bool:
            return bool(flags[slot] >= flag_value(self.machine.calls, epoch))

        def standing() -> str:
            call, at = divmod(int(flags[slot]), EPOCHS)
            where = f"at epoch {at} of call {call}" if call else "at 0"
            return f"epoch {epoch} of call {self.machine.calls} of flag {slot}: the flag stands {where}"

        lane.add(op, self.until(reached), Waits.PEER, standing)

    def deal_barrier(self, op: Barrier, lane: Lane) -> None:
        assert self.plan.memory is not None
        me, team = self.plan.recording.rank, op.team
        rows = [self.plan.memory.barriers(team, rank)[op.number].numpy() for rank in team]
        own, place = rows[team.index(me)], team.index(me)

        def missing() -> list[int]:
            return [rank for rank, came in zip(team, own, strict=True) if came < flag_value(self.machine.calls, 0)]

        def standing() -> str:
            return f"rank {', '.join(map(str, missing()))} in call {self.machine.calls}"

        lane.add(op, partial(self.come, rows, place))
        lane.add(op, self.until(lambda: not missing()), Waits.PEER, standing)

    def deal_blocks(self, op: Compute, ready: Ready, kernel: Kernel, lane: Lane) -> None:
        """Block after block, each behind a wait for its flag; in a trace it is one bar."""
        flags, start, end = self.flags(ready.flags), *self.plan.bracket(op)
        lane.add(op, start)
        for block in ready.order:
            if block in ready.awaited:
                self.deal_wait(op, flags, block, ready.epoch, lane)
            lane.add(op, partial(self.compute, op, ready, kernel, block))
        lane.add(op, end)

    def flags(self, register: int) -> Flags:
        return self.registers[register].numpy()

    # Steps --------------------------------------------------------------------------------------------------------
    def copy(self, op: Copy) -> None:
        out, x = self.registers[op.out], self.registers[op.x]
        if out.data_ptr() != x.data_ptr():  # else the caller made it in its place
            out.copy_(x)

    def set(self, flags: Flags, slot: int, epoch: int) -> None:
        with self.turn():
            flags[slot] = flag_value(self.machine.calls, epoch)

    def come(self, rows: list[Flags], place: int) -> None:
        with self.turn():
            for row in rows:
                row[place] = flag_value(self.machine.calls, 0)

    def compute(self, op: Compute, ready: Ready, kernel: Kernel, block: int) -> None:
        out, a, *others = self.registers[op.out], *(self.registers[x] for x in op.operands)
        own = self.registers[ready.own] if ready.own is not None and block == ready.first else None
        for out_part, a_part in with_rows(out, a, block, ready.blocks, own):
            kernel(out_part, a_part, *others, **op.options)

    def until(self, reached: Callable[[], bool]) -> Step:
        def step() -> None:
            pause = SHORTEST
            while not reached():
                if self.plan.problem:
                    raise AbandonedError
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)
            with self.turn():
                pass  # what was written before the flag can be read from here on

        return step
