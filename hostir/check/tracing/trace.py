"""The events that one rank issues, on its lanes, and the edges between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hostir.check.tracing.events import CALLER, BlockEvents, Event, Flag, Lane, Pushing, Side, WaitingKernel
from hostir.check.tracing.memory import Access, Buffer, View
from hostir.ir.machine import Exchange, Observer
from hostir.ir.op import Statement
from hostir.ir.source import HostIRError, error


class RankTrace(Observer):
    """The events of one rank over all calls, in the order of issue.

    `hostir.check.ordering.joining` joins `collectives`, `messages`, `barriers`, `signals` and `waits` with other ranks.

    Fields:
        sizes: the values of all symbols.
        turn: the number of the current call, from 0.
        current: the current stream.
        statement, rounds: the current statement, None for the caller, and the indices of the loops around it.
        tails: the last event of each lane.
        pushing: the copies by SMs at the end of each stream.
        kept: the symmetric buffers, by name.
        leaked: buffers that are neither freed nor outputs when their call ends.
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
        """Go to the caller's stream: the next events are actions of the caller."""
        self.statement, self.rounds, self.current = None, (), CALLER

    def event(self, verb: str, accesses: list[Access], after: Sequence[Event] = (), sms: bool = False) -> Event:
        """Add an event of the current statement, without putting it on a lane."""
        event = Event(self.rank, self.turn, verb, self.statement, self.rounds, self.current, len(self.events))
        event.accesses = [a for a in accesses if not a.region.empty]
        event.after, event.sms = list(after), sms
        self.events.append(event)
        return event

    def tail(self, *lane: object) -> list[Event]:
        """Return the last event of a lane, if any."""
        last = self.tails.get((self.rank, *lane))
        return [last] if last else []

    def issued(self, stream: str) -> list[Event]:
        """Return the last events of a stream: once they have ended, everything issued to it so far has ended."""
        return self.tail(stream) + ([self.pushing[stream].last] if stream in self.pushing else [])

    def follow(self, event: Event, *lane: object) -> Event:
        """Put an event at the end of a lane."""
        key = (self.rank, *lane)
        before = self.tails.get(key)
        if before is not None:
            event.after.append(before)
        event.lane, event.tick = key, before.tick + 1 if before else 1
        event.ends.append((key, event.tick))
        self.tails[key] = event
        return event

    def step(self, verb: str, accesses: list[Access], after: Sequence[Event] = (), sms: bool = False) -> Event:
        """Add an event on the current stream, after everything issued to it so far."""
        pushing = self.pushing.pop(self.current, None)
        earlier = [*after, pushing.last] if pushing else after
        return self.follow(self.event(verb, accesses, earlier, sms), self.current)

    def push(self, verb: str, accesses: list[Access]) -> Event:
        """Add a copy by SMs, or the signal directly after one: a waiting kernel may overlap it."""
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
        """Add the events of a collective, which may use its memory once this rank's stream reaches it (rule 3)."""
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
        """Add the events of a message: it reads after earlier sends and writes after earlier receives of its team."""
        team = exchange.team
        begin = self.event("begins", [], [*self.issued(self.current), *self.tail("messages", team)])
        take = self.follow(self.event("reads", reads, [begin], sms=True), "sends", team)
        give = self.follow(self.event("writes", writes, [begin], sms=True), "receives", team)
        end = self.follow(self.event("ends", [], [take, give]), "messages", team)
        self.messages.setdefault(team, []).append(Side(exchange, x, out, begin, take, give, end))
        return end

    def lasting(self) -> Iterator[tuple[Event, Event]]:
        """Yield start and end of work that may hold SMs until other ranks act: waiting kernels and communications."""
        yield from ((kernel.start, kernel.end) for kernel in self.kernels)
        for sides in (*self.collectives.values(), *self.messages.values()):
            yield from ((side.begin, side.end) for side in sides)

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        """Return the error that the current statement cannot be traced."""
        span = self.statement.span if self.statement else None
        return error(f"rank {self.rank}: {message}", span, expected=expected, hint=hint)
