"""Record the events that one rank issues, the lanes of the events, and the edges between the events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hostir.check.tracing.events import CALLER, BlockEvents, Event, Flag, Lane, Pushing, Side, WaitingKernel
from hostir.check.tracing.memory import Access, Buffer, View
from hostir.ir.machine import Exchange, Observer
from hostir.ir.op import Statement
from hostir.ir.source import HostIRError, error


class RankTrace(Observer):
    """The events of one rank over all calls, in the order of issue.

    A lane is a sequence of events that happen in order, such as the events of a stream. `hostir.check.ordering.joining`
    joins `collectives`, `messages`, `barriers`, `signals` and `waits` with the same fields of other ranks.

    Fields:
        sizes: the values of all symbols.
        turn: the number of the current call, from 0.
        current: the current stream.
        statement: the current statement; None during actions of the caller.
        rounds: the indices of the loops around the current statement.
        tails: the last event of each lane.
        pushing: for each stream, the copies by SMs that were issued last to it, with their signals.
        collectives, messages, barriers: for each team, the collectives, messages or barriers that the rank has issued.
        kernels: the kernels that wait for flags.
        by_blocks: the computations that wait for flags or set flags.
        kept: the symmetric buffers, by name.
        leaked: the buffers that were neither freed nor outputs when their call ended.
    """

    def __init__(self, rank: int, sizes: Mapping[str, int]) -> None:
        self.rank = rank
        self.sizes = sizes
        self.turn = 0
        self.current = CALLER
        self.statement: Statement | None = None
        self.rounds: tuple[int, ...] = ()
        self.events: list[Event] = []
        self.tails: dict[Lane, Event] = {}
        self.pushing: dict[str, Pushing] = {}
        self.collectives: dict[tuple[int, ...], list[Side]] = {}  # by team
        self.messages: dict[tuple[int, ...], list[Side]] = {}
        self.barriers: dict[tuple[int, ...], list[Event]] = {}
        self.signals: list[Flag] = []
        self.waits: list[Flag] = []
        self.kernels: list[WaitingKernel] = []
        self.by_blocks: list[BlockEvents] = []
        self.kept: dict[str, Buffer] = {}
        self.leaked: list[Buffer] = []

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.statement, self.rounds = statement, rounds

    def at_caller(self) -> None:
        """Make the caller's stream current. The next events are actions of the caller."""
        self.statement, self.rounds, self.current = None, (), CALLER

    def event(self, verb: str, accesses: list[Access], after: Sequence[Event] = (), sms: bool = False) -> Event:
        """Add and return an event of the current statement. The event is not on a lane.

        Args:
            verb: the action of the event, for messages.
            accesses: the event's accesses to memory. Accesses without elements are dropped.
            after: the events that directly happen before it.
            sms: True if it needs SMs.
        """
        event = Event(self.rank, self.turn, verb, self.statement, self.rounds, self.current, len(self.events))
        event.accesses = [a for a in accesses if not a.region.empty]
        event.after, event.sms = list(after), sms
        self.events.append(event)
        return event

    def tail(self, *lane: object) -> list[Event]:
        """Return a list with the last event of a lane. The list is empty if the lane has no events."""
        last = self.tails.get((self.rank, *lane))
        return [last] if last else []

    def issued(self, stream: str) -> list[Event]:
        """Return the latest events of a stream.

        Once they have ended, all work that was issued to the stream has ended.
        """
        return self.tail(stream) + ([self.pushing[stream].last] if stream in self.pushing else [])

    def follow(self, event: Event, *lane: object) -> Event:
        """Put an event at the end of a lane of this rank, and return the event."""
        key = (self.rank, *lane)
        before = self.tails.get(key)
        if before is not None:
            event.after.append(before)
        event.lane, event.tick = key, before.tick + 1 if before else 1
        event.ends.append((key, event.tick))
        self.tails[key] = event
        return event

    def step(self, verb: str, accesses: list[Access], after: Sequence[Event] = (), sms: bool = False) -> Event:
        """Add and return an event on the current stream, after everything that was issued to this stream.

        The arguments are the same as in `event`.
        """
        pushing = self.pushing.pop(self.current, None)
        earlier = [*after, pushing.last] if pushing else after
        return self.follow(self.event(verb, accesses, earlier, sms), self.current)

    def push(self, verb: str, accesses: list[Access]) -> Event:
        """Add and return the event of a copy by SMs, or of the signal directly after such a copy.

        A waiting kernel that is issued next may overlap this event. A signal has no accesses.
        """
        pushing = self.pushing.get(self.current)
        if pushing is None:
            begin = self.step("begins", [])
            pushing = self.pushing[self.current] = Pushing(begin, begin)
        event = self.follow(self.event(verb, accesses, [pushing.last], sms=bool(accesses)), "pushes", self.current)
        pushing.last, pushing.signalled = event, not accesses
        return event

    def collective(
        self, exchange: Exchange, x: View | None, out: View | None, reads: list[Access], writes: list[Access]
    ) -> Event:
        """Add the events of this rank's side of a collective, and return the event at which it ends.

        The collective may access its memory as soon as this rank's stream reaches it (rule 3 of docs/memory-model.md).
        """
        team = tuple(sorted(exchange.team))
        sides = self.collectives.setdefault(team, [])
        moves = self.event("moves", [*reads, *writes], self.issued(self.current))
        begin = self.event("begins", [], self.issued(self.current), sms=True)
        begin.held += [side.end for side in sides[-1:]]
        end = self.event("ends", [], [moves, self.follow(begin, "team", team)])
        moves.ends = end.ends
        sides.append(Side(exchange, x, out, begin, moves, moves, end))
        return end

    def message(
        self, exchange: Exchange, x: View | None, out: View | None, reads: list[Access], writes: list[Access]
    ) -> Event:
        """Add the events of this rank's side of a message, and return the event at which it ends.

        The message reads its operand after this rank's earlier sends to the team. It writes its result after this
        rank's earlier receives.
        """
        team = exchange.team
        begin = self.event("begins", [], [*self.issued(self.current), *self.tail("messages", team)])
        take = self.follow(self.event("reads", reads, [begin], sms=True), "sends", team)
        give = self.follow(self.event("writes", writes, [begin], sms=True), "receives", team)
        end = self.follow(self.event("ends", [], [take, give]), "messages", team)
        self.messages.setdefault(team, []).append(Side(exchange, x, out, begin, take, give, end))
        return end

    def lasting(self) -> Iterator[tuple[Event, Event]]:
        """Yield two events for each waiting kernel and each communication: its start and its end.

        Such a kernel or communication may hold SMs until other ranks act.
        """
        yield from ((kernel.start, kernel.end) for kernel in self.kernels)
        for sides in (*self.collectives.values(), *self.messages.values()):
            yield from ((side.begin, side.end) for side in sides)

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        """Return an error that says why the current statement cannot be traced."""
        span = self.statement.span if self.statement else None
        return error(f"rank {self.rank}: {message}", span, expected=expected, hint=hint)
