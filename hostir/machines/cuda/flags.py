"""Flags and barriers on CUDA. Streams and kernels set flags of peers, and streams wait for flags of this rank.

The host only issues work, and waits for nothing. A flag holds an epoch, and is reset to 0 at the end of a call: see
hostir.machines.cuda.flow_control. So all work can be captured into a CUDA graph, and every replay is correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from hostir.ir.machine import Ready
from hostir.job.offers import BARRIERS, BufferPlace
from hostir.job.symmetric import SharedMemory
from hostir.machines.binding import Step
from hostir.machines.cuda.context import Issue, PlanContext
from hostir.machines.cuda.driver import in_batches, wait_at_least, write
from hostir.machines.cuda.flow_control import flow_control_of, waits
from hostir.machines.cuda.streams import own_stream
from hostir.plan.operations import BarrierOp, Op, SignalOp, WaitSignalOp

FLAG_BYTES = 8


class CudaFlags:
    """The flags of a plan: their addresses, and the steps of signals, waits and barriers.

    The fields grow while the steps of the plan are made.

    Fields:
        sent: the peer, buffer, slot and epoch of each signal that has a step so far. A repeated signal gets no step.
        barriers: the barriers that have a step so far. A barrier that credits replace is not listed.
    """

    def __init__(self, context: PlanContext, memory: SharedMemory) -> None:
        self.context = context
        self.memory = memory
        self.rank = context.unrolled.rank
        self.flow_control = flow_control_of(context.unrolled, memory)
        self.sent: set[tuple[int, BufferPlace, int, int]] = set()
        self.barriers: list[BarrierOp] = []

    def place(self, register: int) -> BufferPlace:
        """Return the symmetric buffer to which the tensor in a register belongs."""
        unrolled = self.context.unrolled
        return unrolled.symmetric[unrolled.buffers[register]].home

    def address(self, place: BufferPlace, slot: int, rank: int) -> int:
        """Return the address of the flag at `slot` of the buffer `place` of a rank."""
        return self.memory.buffers[place, rank].data_ptr() + slot * FLAG_BYTES

    def signal(self, op: SignalOp) -> Step | None:
        """Return the step that raises a flag.

        Returns None if an earlier step of the call raises the flag to this epoch, or if stream order replaces the flag.
        """
        flag = self.raised(op)
        if not flag or self.is_sent(op):
            return None
        if not op.sms:
            return self.context.on(op.stream, in_batches([write(flag, op.epoch)]))
        kernel, streams, stream = self.signal_kernel(flag, op.epoch), self.context.streams, op.stream
        return lambda: kernel(streams[stream])

    def signal_kernel(self, flag: int, epoch: int) -> Callable[[torch.cuda.Stream], None]:
        from hostir.kernels.flags.signals import SignalKernel  # which needs Triton

        return SignalKernel(self.context.device, flag, epoch)

    def raised(self, op: SignalOp) -> int:
        """Return the address of the flag that a signal raises; 0 if stream order replaces the flag."""
        place = self.place(op.flags)
        ordered = op.peer == self.rank and (place, op.slot) in self.flow_control.stream_ordered
        return 0 if ordered else self.address(place, op.slot, op.peer)

    def is_sent(self, op: SignalOp) -> bool:
        """Record a signal; return True if an earlier step of the call sends the same signal.

        The same signal must not be sent twice, because the second signal might arrive after the flag is reset.
        """
        signal = op.peer, self.place(op.flags), op.slot, op.epoch
        sent = signal in self.sent
        self.sent.add(signal)
        return sent

    def wait_signal(self, op: WaitSignalOp) -> Step | None:
        """Return the step that makes the stream wait for a flag; None if stream order replaces the flag."""
        if (self.place(op.flags), op.slot) in self.flow_control.stream_ordered:
            return None
        return self.context.on(op.stream, self.wait_all(op.flags, [op.slot], op.epoch))

    def wait_all(self, flags: int, slots: Sequence[int], epoch: int) -> Issue:
        place = self.place(flags)
        return in_batches([wait_at_least(self.address(place, slot, self.rank), epoch) for slot in slots])

    def needed(self, ready: Ready, block: int) -> list[int]:
        """Return the slots of the flags that a block of the result waits for.

        Flags that stream order replaces are left out.
        """
        place, ordered = self.place(ready.flags), self.flow_control.stream_ordered
        return [slot for slot in ready.needed(block) if (place, slot) not in ordered]

    def barrier(self, op: BarrierOp) -> Step | None:
        """Return the step that signals this rank's arrival to its team and waits for all other ranks of the team.

        Returns None if credits replace the barrier.
        """
        if op.number == 0 and op.team in self.flow_control.implied_barriers:
            return None
        self.barriers.append(op)
        size, place = len(op.team), (BARRIERS, op.team)
        position, first = op.team.index(self.rank), op.number * size
        others = [rank for rank in op.team if rank != self.rank]
        signals = [write(self.address(place, first + position, rank), 1) for rank in others]
        slots = [first + op.team.index(rank) for rank in others]
        waiting = [wait_at_least(self.address(place, slot, self.rank), 1) for slot in slots]
        return self.context.on(op.stream, in_batches([*signals, *waiting]))

    def arrivals(self) -> list[int]:
        """Return the addresses of this rank's flags that peers raise in barriers."""
        return [
            self.address((BARRIERS, op.team), op.number * len(op.team) + number, self.rank)
            for op in self.barriers
            for number, rank in enumerate(op.team)
            if rank != self.rank
        ]

    @cached_property
    def diagnosis(self) -> torch.cuda.Stream:
        """The stream on which flags are read while all other streams may be blocked."""
        return own_stream(self, self.context.device, priority=0)

    def missing(self) -> list[tuple[Op, str]]:
        """Return the operations that wait for flags which have not risen, and a description of each for messages.

        The description states the flag's value, or the ranks that have not come to a barrier. This function does not
        wait for the streams of the call, because they may never end.
        """
        values: dict[BufferPlace, list[int]] = {}
        with torch.cuda.stream(self.diagnosis):
            for (place, rank), buffer in self.memory.buffers.items():
                if rank == self.rank and (place, rank) in self.memory.flags:
                    values[place] = buffer.cpu().view(-1).tolist()
        waiting: list[tuple[Op, str]] = []
        for barrier in self.barriers:
            row = values[BARRIERS, barrier.team][barrier.number * len(barrier.team) :]
            late = [rank for rank, came in zip(barrier.team, row, strict=False) if not came and rank != self.rank]
            waiting += [(barrier, f"rank {', '.join(map(str, late))} has not come")] if late else []
        for (place, slot), epoch, op in waits(self.context.unrolled):
            if (value := values[place][slot]) < epoch:
                waiting.append((op, f"flag %{place[0]}[{slot}] stands at {value}, not at {epoch}"))
        return waiting
