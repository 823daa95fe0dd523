"""Unroll a program for rank 0 so that its tasks stand for those of all ranks.

In most programs all ranks do the same, shifted along the axes of the mesh. If rank 0 signals to a peer, another rank
sends the same signal to rank 0 at the same time. So the cost model can simulate rank 0 alone: where rank 0 sends a
signal, it also receives one.

Rank 0 is unrolled with indices that hold one value for each rank (`hostir.check.one_rank.torus`). Everything that would
make the tasks of ranks differ raises `UnlikeError`, for example a condition that depends on the rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from hostir.check.one_rank.torus import PerRank, PerRankFrame, Torus, UnlikeError, at
from hostir.ir.machine import Done, Exchange, Ready, interpret, uncollected
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.plan.communications import Flight
from hostir.plan.operations import SignalOp
from hostir.plan.unroll import StreamValue, Unroller
from hostir.plan.unrolled import RegisterView, UnrolledProgram


@uncollected()
def unroll_for_all(program: Program, sizes: Mapping[str, int]) -> UnrolledProgram | None:
    """Unroll a program for rank 0, so that its tasks stand for those of all ranks; return None if ranks differ.

    A signal of the result does not have the flag that rank 0 sets, but the flag of rank 0 that another rank sets by the
    same signal. Its `peer` is the rank to which rank 0 sends it.
    """
    torus = Torus.of(program)
    if torus is None:
        return None
    unroller = ForAll(program, sizes, torus)
    try:
        outputs = interpret(program, unroller, sizes, unroller.dense_inputs(), unroller, PerRankFrame)
        unroller.flags.check()
        return unroller.finish(outputs)
    except (UnlikeError, HostIRError):  # an error has its own message if each rank is unrolled
        return None


class ForAll(Unroller):
    """A machine that records the operations of rank 0 (see `unroll_for_all`)."""

    def __init__(self, program: Program, sizes: Mapping[str, int], torus: Torus) -> None:
        super().__init__(program, 0, sizes)
        self.torus, self.flags = torus, Slots(torus)

    def select(self, x: RegisterView, axis: int, index: Any) -> RegisterView:
        return super().select(x, axis, at(index, 0))

    def chunk(self, x: RegisterView, axis: int, outer: int, count: int, index: Any) -> RegisterView:
        return super().chunk(x, axis, outer, count, at(index, 0))

    def communicate(self, exchange: Exchange, x: RegisterView | None, out: RegisterView | None) -> Flight:
        if exchange.moves is not None:
            raise UnlikeError
        self.torus.axes_of(exchange.team)
        return super().communicate(exchange, x, out)

    def barrier(self, team: tuple[int, ...]) -> None:
        self.torus.axes_of(team)
        super().barrier(team)

    def signal(self, flags: RegisterView, slot: Any, epoch: Any, peer: int, sms: int = 0) -> None:
        slots = self.flags.sent(slot, peer)
        self.flags.add(self.row(flags, epoch), slots)
        register = self.registers.flags(flags, epoch, 0)
        self.ops.add(SignalOp(*self.ops.here, register, int(slots[0]), epoch, peer, sms))

    def wait_signal(self, flags: RegisterView, slot: Any, epoch: Any) -> None:
        self.flags.add(self.row(flags, epoch), self.flags.of_ranks(slot))
        super().wait_signal(flags, at(slot, 0), epoch)

    def compute(
        self,
        computation: str,
        out: RegisterView,
        operands: Sequence[RegisterView | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        if ready is not None and done is not None:  # flags are raised in the order of the awaited blocks
            raise UnlikeError
        if ready is not None:
            self.flags.add_ready(self.row(ready.flags, ready.epoch), ready)
            ready = replace(ready, first=at(ready.first, 0), own_first=at(ready.own_first, 0))
        if done is not None:
            row, firsts = self.row(done.flags, done.epoch), self.flags.of_ranks(done.first)
            for turn in range(done.blocks):
                self.flags.add(row, (firsts + turn) % done.blocks)
            done = replace(done, first=at(done.first, 0))
        super().compute(computation, out, operands, options, ready, done)

    def stream_number(self, stream: StreamValue | int) -> int:
        if isinstance(stream, PerRank):
            raise UnlikeError
        return super().stream_number(stream)

    def row(self, flags: RegisterView, epoch: Any) -> int:
        """Return the buffer of a row of flags.

        Raise UnlikeError for a part of a row, and for an epoch that differs from rank to rank.
        """
        if flags != self.registers.contents[flags.buffer] or isinstance(epoch, PerRank):
            raise UnlikeError
        return flags.buffer


class Slots:
    """The slots of flags on all ranks. A slot of rank 0 has one counterpart on each rank.

    Fields:
        counterparts: for each row of flags and slot of rank 0, an array with its counterpart on each rank.
    """

    def __init__(self, torus: Torus) -> None:
        self.torus = torus
        self.counterparts: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.ready: dict[tuple[int, bytes, bytes, int, int, int], Ready] = {}

    @cached_property
    def ranks(self) -> Any:
        return np.arange(prod(self.torus.shape))

    def of_ranks(self, number: Any) -> Any:
        """Return an array with the value of a number on each rank."""
        return number.values if isinstance(number, PerRank) else np.full(len(self.ranks), number, dtype=np.int64)

    def sent(self, slot: Any, peer: int) -> Any:
        """Return, for each rank, the slot that is set there by a signal that rank 0 sends to `peer`."""
        places = zip(self.torus.places(self.ranks), self.torus.places(peer), strict=True)
        senders = np.ravel_multi_index([rank - away for rank, away in places], self.torus.shape, mode="wrap")
        return self.of_ranks(slot)[senders]

    def add(self, row: int, slots: Any) -> None:
        """Record that slots of all ranks are counterparts. Raise UnlikeError if one of them has another counterpart."""
        numbers = slots.tobytes()
        if self.counterparts[row].setdefault(int(slots[0]), numbers) != numbers:
            raise UnlikeError

    def add_ready(self, row: int, ready: Ready) -> None:
        """Record the blocks for which a computation waits."""
        first, own = (self.of_ranks(number).tobytes() for number in (ready.first, ready.own_first))
        self.ready[row, first, own, ready.results, ready.blocks, ready.own_blocks] = ready

    def check(self) -> None:
        """Raise UnlikeError if two slots have one counterpart, or if ranks wait for blocks in another order."""
        for slots in self.counterparts.values():
            columns = np.sort(np.stack([np.frombuffer(each, dtype=np.int64) for each in slots.values()]), axis=0)
            if (columns[1:] == columns[:-1]).any():
                raise UnlikeError
        for (row, *_), ready in self.ready.items():
            firsts, owns, known = self.of_ranks(ready.first), self.of_ranks(ready.own_first), self.counterparts[row]
            on = [
                replace(ready, first=first, own_first=own)
                for first, own in zip(firsts.tolist(), owns.tolist(), strict=True)
            ]
            for turn in range(ready.results):
                needed = [each.needed(each.order[turn]) for each in on]
                if any(slot not in known for slot in needed[0]):
                    raise UnlikeError
                expected = [np.frombuffer(known[slot], dtype=np.int64).tolist() for slot in needed[0]]
                found = [sorted(slots) for slots in needed]
                if needed[0] and found != [sorted(slots) for slots in zip(*expected, strict=True)]:
                    raise UnlikeError
