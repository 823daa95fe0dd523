"""The events of the checker: moments in the run of one rank, and the sides of what several ranks do together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hostir.check.tracing.memory import Access, View
from hostir.ir.machine import Done, Exchange, Ready
from hostir.ir.op import Statement

CALLER = "caller's stream"
Lane = tuple[object, ...]  # a sequence whose events happen in order, such as a stream: (rank, stream)
Ends = list[tuple[Lane, int]]  # ticks of lanes: once one of them is in a vector clock, the event has ended


@dataclass(eq=False, slots=True, repr=False)  # a repr would print all earlier events as well
class Event:
    """A moment in the run of one rank, such as the start or the end of a statement.

    Fields:
        number: the number of events that its rank issued before it.
        lane, tick: its lane, and its position there from 1; None and 0 if only its edges order it.
        ends: ticks of lanes; any one of them shows that the event has ended. By default its tick.
        after: the events that directly happen before it.
        held: other events that it has to wait for on some machines or at some sizes. They can cause a deadlock, but
            they order nothing.
        verb: its action, for messages; `statement` is None for actions of the caller.
        sms: True if it needs SMs.
        small: True if one SM is enough: the SM that a waiting kernel leaves to events issued before the kernel.
        seen: computes its vector clock, as a new array, from the clock of the event that it follows; None if the two
            clocks are equal.
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
    """One rank's side of a collective or message. Event `take` reads `x`, `give` writes `out`; they may be the same."""

    exchange: Exchange
    x: View | None
    out: View | None
    begin: Event
    take: Event
    give: Event
    end: Event


@dataclass(eq=False, slots=True)
class Flag:
    """A signal sent, or a wait for one, of the flag `slot` of the symmetric buffer `flags` at `rank`."""

    event: Event
    rank: int
    flags: str
    slot: int
    epoch: tuple[int, int]  # call, epoch

    @property
    def place(self) -> tuple[int, str, int]:
        return self.rank, self.flags, self.slot


@dataclass(eq=False, slots=True)
class Pushing:
    """The copies by SMs, and their signals, at the end of a stream so far.

    Rule 12 of docs/memory-model.md lets a waiting kernel overlap them.

    Fields:
        begin: the start of the first copy, after all earlier events of the stream.
        last: the last copy or signal; they run one after the other.
        signalled: True if `last` is a signal.
    """

    begin: Event
    last: Event
    signalled: bool = False


@dataclass(eq=False, slots=True)
class WaitingKernel:
    """A computation that holds SMs while it waits for flags. `overlapped`: the last copy that it may overlap."""

    start: Event
    end: Event
    overlapped: Event | None = None
    waits: list[Flag] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class BlockEvents:
    """The events of a computation by blocks of rows. Each event lies in one block of `ready` and in one of `done`.

    Fields:
        units: the events that write the result, in the order of its rows.
        parts: the events that read the operand with awaited blocks, source by source; for a product, `units` itself.
        waits, signals: the flags, in the order of parts and of units.
    """

    ready: Ready | None
    done: Done | None
    units: list[Event]
    parts: list[Event]
    waits: list[Flag] = field(default_factory=list)
    signals: list[Flag] = field(default_factory=list)
