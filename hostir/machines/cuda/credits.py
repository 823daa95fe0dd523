"""The beginning and the end of a call on CUDA: streams take credits, reset flags and grant credits.

No stream may poll or raise a flag of a call before the previous call has ended. See hostir.machines.cuda.flow_control.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from hostir.machines.binding import Step
from hostir.machines.cuda.context import Issue, PlanContext
from hostir.machines.cuda.driver import in_batches, wait_at_least, write
from hostir.machines.cuda.flags import CudaFlags
from hostir.machines.cuda.flow_control import CREDITS, Slot
from hostir.machines.cuda.streams import join, record, wait
from hostir.plan.endings import CallEnding
from hostir.plan.operations import CALLER, NONE, Op
from hostir.plan.unrolled import UnrolledProgram

if TYPE_CHECKING:
    from hostir.kernels.flags.signals import CallEnd


def uses_flags(unrolled: UnrolledProgram, op: Op) -> bool:
    """Return True if an operation raises flags of any rank, waits for flags, or needs credits to access a peer."""
    return bool(op.raised_flags or op.awaited_flags) or unrolled.touches_peer(op)


def unforked(unrolled: UnrolledProgram) -> list[Op]:
    """Return the operations that use flags on a stream which has not yet waited for the caller's stream in the call."""
    forked = unrolled.order.forked
    return [op for at, op in enumerate(unrolled.ops) if uses_flags(unrolled, op) and not forked(at)]


def takes_credits_first(unrolled: UnrolledProgram) -> bool:
    """Return True if the caller's stream must take the credits at the beginning of the call.

    If the result is False, the first stream that accesses a peer takes the credits. Every other stream waits for that
    stream before it accesses a peer. The result is True if a flag or a lack of free SMs may block that stream before it
    takes the credits. Then the other streams would wait for work that the program does not make them wait for.
    """
    ops, precedes = unrolled.ops, unrolled.order.precedes
    touching = unrolled.touching
    if all(precedes(touching[0], at) for at in touching[1:]):
        return False
    waits_on_sms = any(op.needs_sms and op.awaited_flags for op in ops)  # such a kernel may hold all SMs while it waits
    return any(
        precedes(at, touching[0])
        for at, op in enumerate(ops[: touching[0]])
        if op.awaits or op.awaited_flags or (waits_on_sms and op.needs_sms)
    )


class CallBoundary:
    """Makes the steps that begin and end a call, and the steps before a stream's first access to a peer.

    Fields:
        ending: the operations that must end before the flags are reset.
        ends_in_kernel: True if a kernel of the program resets the flags when it ends.
        credits_taken: the event that a stream records after it has taken the credits; None before that step is made.
        after_credits: the streams that take the credits or wait for this event.
        start: the event that the caller's stream records at the beginning of the call.
        forked: the streams that wait for `start`.
    """

    def __init__(self, context: PlanContext, flags: CudaFlags) -> None:
        self.context = context
        self.flags = flags
        self.flow_control = flags.flow_control
        self.credits_taken: torch.cuda.Event | None = None
        self.after_credits = set[int]()
        self.start = torch.cuda.Event()
        self.forked = set[int]()
        self.unforked = {id(op) for op in unforked(context.unrolled)}
        self.ending = CallEnding.of(context.unrolled, flags.flow_control.implied_barriers)
        self.ends_in_kernel = False

    def begin_call(self) -> list[Step]:
        """Return the steps that begin a call, on the caller's stream."""
        streams = self.context.streams
        marks: list[Step] = [partial(_record, streams, CALLER, self.start)] if self.unforked else []
        if not takes_credits_first(self.context.unrolled):
            return marks
        self.credits_taken = torch.cuda.Event()
        self.after_credits.add(CALLER)
        take = self.context.on(CALLER, self.take_credits())
        return [*marks, take, partial(_record, streams, CALLER, self.credits_taken)]

    def before(self, op: Op) -> list[Step]:
        """Return the steps that come before an operation, on the operation's stream.

        The stream may have to wait for the beginning of the call. Before its first access to a peer, it takes the
        credits, or waits for the stream that takes them: see `takes_credits_first`.
        """
        streams, unrolled, fork = self.context.streams, self.context.unrolled, list[Step]()
        if id(op) in self.unforked and op.stream not in self.forked:  # else it might run before the last call has ended
            self.forked.add(op.stream)
            fork = [partial(_wait, streams, op.stream, self.start)]
        if not unrolled.touches_peer(op) or op.stream in self.after_credits:
            return fork
        self.after_credits.add(op.stream)
        if self.credits_taken is not None:
            return [*fork, partial(_wait, streams, op.stream, self.credits_taken)]
        self.credits_taken = torch.cuda.Event()
        others = {unrolled.ops[at].stream for at in unrolled.touching} - {op.stream}
        mark = [partial(_record, streams, op.stream, self.credits_taken)] if others else []
        return [*fork, self.context.on(op.stream, self.take_credits()), *mark]

    def take_credits(self) -> Issue:
        """Return a function that makes a stream wait for all credits and then consume them.

        This rank needs one credit from each peer whose flags it raises.
        """
        count = self.flags.address(CREDITS, 0, self.flags.rank)
        needed = len(self.flow_control.signaled)
        return in_batches([wait_at_least(count, needed), write(count, 0)] if needed else [])

    def end_within(self, op: Op) -> CallEnd | None:
        """Return the end of the call if the kernel of an operation may carry it out, else None.

        The kernel must wait for flags, and nothing else must have to end before the flags are reset.
        """
        if not self.ending.within(op) or not self.early:
            return None
        self.ends_in_kernel = self.end is not None
        return self.end

    @property
    def early(self) -> bool:
        """True if the flags may be reset before the rest of the call has ended.

        The call must have waited for all its flags, and every peer that this rank signals must signal this rank. Then
        the call no longer waits for any peer, not even for a credit. Else the flags tell what the call waits for.
        """
        return not self.flow_control.unawaited and self.flow_control.signaled <= self.flow_control.signalers

    @cached_property
    def end(self) -> CallEnd | None:
        """The reset of this rank's flags and the credits for peers; None if there are neither flags nor peers.

        Read it only after the steps of all barriers have been made.
        """
        memory = self.flags.memory
        flags = [*map(self.local, self.flow_control.raised), *self.flags.arrivals()]
        counters = [self.flags.address(CREDITS, 0, peer) for peer in sorted(self.flow_control.signalers)]
        if not flags and not counters:
            return None
        key = "end of the call", *flags, NONE, *counters
        if key not in memory.kept:  # plans for all sizes share it, so new sizes need no memory for it
            memory.kept[key] = self.end_of(flags, counters)
        end: CallEnd = memory.kept[key]
        return end

    def end_of(self, flags: Sequence[int], counters: Sequence[int]) -> CallEnd:
        from hostir.kernels.flags.signals import CallEnd  # which needs Triton

        return CallEnd(self.context.device, flags, counters)

    def end_call(self) -> list[tuple[int, Step]]:
        """Return the steps that end a call, each with the stream that must be current.

        They make the caller's stream wait for all other streams. Unless a kernel of the program ends the call, they
        also wait for late flags, reset this rank's flags, and grant credits to peers.
        """
        streams = self.context.streams
        late = [wait_at_least(self.local(slot), epoch) for slot, epoch in self.flow_control.unawaited.items()]
        stream = self.ending.stream if self.early else CALLER

        def joins(stream: int, others: Iterable[int]) -> list[tuple[int, Step]]:
            return [(CALLER, partial(join, streams, stream, other, torch.cuda.Event())) for other in others]

        unjoined = set(self.context.unrolled.order.unjoined)
        end: list[tuple[int, Step]] = []
        if self.end is not None and not self.ends_in_kernel:
            end = [(stream, self.end)]
            if stream != CALLER:
                return [
                    *joins(stream, sorted(self.ending.others - {stream})),
                    *end,
                    *joins(CALLER, sorted(unjoined | {stream})),
                ]
        wait: list[tuple[int, Step]] = [(CALLER, self.context.on(CALLER, in_batches(late)))] if late else []
        return [*joins(CALLER, sorted(unjoined)), *wait, *end]

    def local(self, slot: Slot) -> int:
        """Return the address of this rank's flag that `slot` names."""
        return self.flags.address(*slot, self.flags.rank)


def _record(streams: Sequence[torch.cuda.Stream], stream: int, event: torch.cuda.Event) -> None:
    record(event, streams[stream])


def _wait(streams: Sequence[torch.cuda.Stream], stream: int, event: torch.cuda.Event) -> None:
    wait(event, streams[stream])
