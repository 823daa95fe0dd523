"""The data of a trace: the events of one rank, and the rank's sides of communications, signals and waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hostir.check.tracing.memory import Access, View
from hostir.ir.machine import Done, Exchange, Ready
from hostir.ir.op import Statement

CALLER = "caller's stream"
Lane = tuple[object, ...]  # a sequence of events that happen in order, such as a stream: (rank, stream)
Ends = list[tuple[Lane, int]]  # lanes and ticks: an event has ended for a vector clock that has reached one of them


@dataclass(eq=False, slots=True, repr=False)  # a repr would print all earlier events as well
class Event:
    """A moment in the run of one rank, such as the start or the end of a statement.

    Fields:
        rank: the rank.
        call: the number of the call, from 0.
        verb: the action of the event, for messages.
        statement: the statement that the event belongs to; None for actions of the caller.
        rounds: the indices of the loops around the statement.
        stream: the stream that was current when the event was issued.
        number: the number of events that the rank had issued before this event.
        lane: the lane of the event; None if only edges order the event. A lane is a sequence of events that happen in
            order.
        tick: the position of the event in its lane, from 1; 0 without a lane.
        after: the events that directly happen before this event.
        held: other events that this event waits for on some machines or at some sizes. Such a wait can cause a
            deadlock, but it orders no accesses.
        ends: pairs of a lane and a tick. A vector clock that has reached one of these ticks shows that the event has
            ended.
        accesses: the accesses of the event to memory.
        sms: True if the event needs SMs.
        small: True if one SM is enough. A waiting kernel leaves one SM to small events that were issued before it.
        seen: a function that computes the vector clock of this event from the clock of the event that it follows. It
            returns a new array. None if the two clocks are equal.
    """

    rank: int
    call: int
    verb: str
    statement: Statement | None
    rounds: tuple[int, ...]
    stream: str
    number: int = 0
    lane: Lane | None = None
    tick: int = 0
    after: list[Event] = field(default_factory=list)
    held: list[Event] = field(default_factory=list)
    ends: Ends = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    sms: bool = False
    small: bool = False
    seen: Callable[[Any], Any] | None = None


@dataclass(eq=False, slots=True)
class Side:
    """One rank's side of a collective or of a message.

    Fields:
        exchange: the communication.
        x, out: the tensor that the rank sends, and the tensor that it receives; None if there is no such tensor.
        begin, end: the events at which the communication begins and ends on this rank.
        take: the event that reads `x`.
        give: the event that writes `out`. It may be the same event as `take`.
    """

    exchange: Exchange
    x: View | None
    out: View | None
    begin: Event
    take: Event
    give: Event
    end: Event


@dataclass(eq=False, slots=True)
class Flag:
    """A signal of a flag, or a wait for a flag.

    The flag is element `slot` of the symmetric buffer `flags` on rank `rank`. `epoch` holds two numbers: the number of
    the call, and the epoch that the signal sets or that the wait needs.
    """

    event: Event
    rank: int
    flags: str
    slot: int
    epoch: tuple[int, int]

    @property
    def place(self) -> tuple[int, str, int]:
        return self.rank, self.flags, self.slot


@dataclass(eq=False, slots=True)
class Pushing:
    """The copies by SMs that were issued last to a stream, and the signals of these copies.

    A waiting kernel that is issued next may overlap them (rule 12 of docs/memory-model.md).

    Fields:
        begin: an event before the first copy. It happens after all earlier events of the stream.
        last: the last copy or signal. The copies and signals happen one after another.
        signalled: True if `last` is a signal.
    """

    begin: Event
    last: Event
    signalled: bool = False


@dataclass(eq=False, slots=True)
class WaitingKernel:
    """A kernel that holds SMs while it waits for flags.

    Fields:
        start, end: the events at which the kernel starts and ends.
        overlapped: the last event of the copies and signals by SMs that the kernel may overlap; None if there are no
            such copies.
        waits: the flags that the kernel waits for.
    """

    start: Event
    end: Event
    overlapped: Event | None = None
    waits: list[Flag] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class BlockEvents:
    """The events of a computation by blocks of rows.

    The events cut the rows so finely that each event lies in one block of `ready` and in one block of `done`.

    Fields:
        ready: the flags that the computation waits for, if any.
        done: the flags that the computation sets, if any.
        units: the events that write the result, in the order of its rows.
        parts: the events that read the first operand, in the order of its rows. For a sum these are the rows of one
            source after another. For a matmul, `parts` and `units` are the same events.
        waits: the waits for flags, in the order of `parts`.
        signals: the signals of flags, in the order of `units`.
    """

    ready: Ready | None
    done: Done | None
    units: list[Event]
    parts: list[Event]
    waits: list[Flag] = field(default_factory=list)
    signals: list[Flag] = field(default_factory=list)
