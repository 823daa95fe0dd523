"""What the checker would accept if it promised more than machines keep: each rule of the memory model, made stronger.

A promise is a change to the checker's tracer or order, which adds an order that no rule gives. Under it the checker
accepts programs that are wrong, and real processes must show that they are: `tests/cases/promises` has one for each,
and random ones are found too (`python -m benchmarks.judge --promise NAME`).

CPU processes cannot show three things. Rules 11 and 12 are about SMs, for which threads do not wait: a program that
breaks them hangs on a GPU alone. Memory that a `free` gives back is not handed to the next `allocate` within a call
there: all of a call's buffers are made before its streams begin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hostir as hi
from hostir.check.order import Order, RaceDetector
from hostir.check.tracer import CALLER, Event, Tracer
from hostir.ir.program import Program
from hostir.runtime.simulated.rank import RankMachine

FOLDER = Path(__file__).parent / "cases" / "promises"
Method = Callable[..., Any]


@dataclass
class Promise:
    """Something that the checker believes and no machine keeps.

    Fields:
        rule: of docs/memory-model.md, which says less.
        says: the order that it adds.
        changes: for a class and a method of it, what runs instead; that gets the method, and then its arguments.
        calls: how many calls the checker looks at, if not as many as it takes.
    """

    rule: str
    says: str
    changes: list[tuple[type, str, Method]] = field(default_factory=list)
    calls: int | None = None

    @contextlib.contextmanager
    def believed(self) -> Iterator[None]:
        """The checker believes it meanwhile."""
        with contextlib.ExitStack() as stack:
            for owner, name, instead in self.changes:
                stack.enter_context(patch.object(owner, name, _changed(getattr(owner, name), instead)))
            yield

    def accepts(self, program: Program) -> bool:
        """Whether the checker accepts a program if it believes this."""
        with self.believed():
            return not any(found.level == "error" for found in hi.check(program, calls=self.calls))


def _changed(method: Method, instead: Method) -> Method:
    return lambda *args, **kwargs: instead(method, *args, **kwargs)


PROMISES: dict[str, Promise] = {}


def promise(rule: str, says: str, owner: type, method: str) -> Callable[[Method], Method]:
    """Adds a promise, named as the function that changes the method."""

    def add(instead: Method) -> Method:
        PROMISES[instead.__name__] = Promise(rule, says, [(owner, method, instead)])
        return instead

    return add


def also(name: str, owner: type, method: str) -> Callable[[Method], Method]:
    """Has a promise change another method, too."""

    def add(instead: Method) -> Method:
        PROMISES[name].changes.append((owner, method, instead))
        return instead

    return add


def streams(tracer: Tracer) -> list[Event]:
    """What was issued last to each stream of a rank."""
    return [event for lane, event in tracer.tails.items() if len(lane) == 2]


# The promises -----------------------------------------------------------------------------------------------------
@promise("1", "a rank's streams run in the order of issue, as if they were one", Tracer, "step")
def one_stream(step: Method, self: Tracer, verb: str, accesses: Any, after: Any = (), sms: bool = False) -> Event:
    return step(self, verb, accesses, [*after, *streams(self)], sms)


@promise("2", "synchronize waits for all streams of the rank, not for one", Tracer, "synchronize")
def synchronize_waits_for_all(synchronize: Method, self: Tracer, stream: Any) -> None:
    self.step("waits", [], after=streams(self))


@promise("3", "a collective touches memory when all ranks have come", Order, "_join_sides")
def read_when_all_have_come(join: Method, self: Order, sides: Any) -> None:
    join(self, sides)
    come = self._moment([side.begin for side in sides], sides[0].exchange.team)
    for side in sides:
        side.take.after.append(come)


@promise("3", "a collective touches memory in its turn, behind the team's earlier ones", Tracer, "_collective")
def collectives_in_turn(collective: Method, self: Tracer, exchange: Any, *rest: Any) -> Event:
    earlier = self.collectives.get(tuple(sorted(exchange.team)), [])[-1:]
    end = collective(self, exchange, *rest)
    side = self.collectives[tuple(sorted(exchange.team))][-1]
    side.take.after += [before.begin for before in earlier] + [side.begin]
    side.begin.after += [before.take for before in earlier]
    self.follow(side.take, "turns", exchange.team)
    return end


@promise("3", "teams (0 1) and (1 0) have a queue of collectives each", Tracer, "_collective")
def a_queue_for_each_order(collective: Method, self: Tracer, exchange: Any, *rest: Any) -> Event:
    every = self.collectives
    key = tuple(sorted(exchange.team))
    self.collectives = {key: every.setdefault(exchange.team, [])}
    end = collective(self, exchange, *rest)
    self.collectives = every
    return end


@also("a_queue_for_each_order", RankMachine, "communicate")
def simulated_queues(communicate: Method, self: RankMachine, exchange: Any, *rest: Any) -> Any:
    """Simulated ranks have to say what was meant."""
    every = self.parts
    self.parts = {tuple(sorted(exchange.team)): every.setdefault(exchange.team, [])}
    made = communicate(self, exchange, *rest)
    self.parts = every
    return made


@promise("4", "who has waited for a communication knows that every rank's out is written", Tracer, "_collective")
def written_everywhere(collective: Method, self: Tracer, exchange: Any, *rest: Any) -> Event:
    end = collective(self, exchange, *rest)
    side = self.collectives[tuple(sorted(exchange.team))][-1]
    self.follow(side.take, "moves", len(self.events))
    return end


@also("written_everywhere", Order, "_join_sides")
def written_when_waited(join: Method, self: Order, sides: Any) -> None:
    join(self, sides)
    for side in sides:
        side.end.after += [other.take for other in sides if other is not side]


@promise("5", "all streams begin with the inputs there", Tracer, "event")
def inputs_are_there(event: Method, self: Tracer, verb: str, *rest: Any, **more: Any) -> Event:
    made = event(self, verb, *rest, **more)
    begins = [e for e in self.events if e.call == self.turn and e.statement is None and e.verb == "writes"]
    made.after += [e for e in begins[:1] if e is not made]
    return made


@promise("5", "a call ends when all streams have got there", Tracer, "step")
def all_streams_end(step: Method, self: Tracer, verb: str, accesses: Any, after: Any = (), sms: bool = False) -> Event:
    ends = self.statement is None and self.current == CALLER and verb == "reads"
    return step(self, verb, accesses, [*after, *(streams(self) if ends else [])], sms)


@promise("6", "a send ends when its receiver has it", Order, "_join_messages")
def sent_is_received(join: Method, self: Order) -> None:
    join(self)
    posted = [side for rank in self.ranks for sides in rank.messages.values() for side in sides]
    gives = [side.give for side in posted]
    for side in posted:
        side.end.after += [give for give in gives if side.take in give.after and give is not side.give]


@promise("6", "a collective ends behind the rank's earlier messages", Tracer, "_collective")
def messages_in_turn_with_collectives(collective: Method, self: Tracer, exchange: Any, *rest: Any) -> Event:
    end = collective(self, exchange, *rest)
    end.after += [event for lane, event in self.tails.items() if lane[1] == "messages"]
    return end


@promise("7", "copies between ranks need no order with what the peer does", RaceDetector, "_unordered")
def copies_tell_the_peer(unordered: Method, self: RaceDetector, touch: Any, *rest: Any) -> Iterator[Any]:
    return (other for other in unordered(self, touch, *rest) if other.event.rank == touch.event.rank)


@promise("8", "a wait for a flag sees the latest signal", Order, "enough")
def waits_for_the_latest(enough: Method, self: Order, wait: Any) -> Any:
    return enough(self, wait)[-1:]


@promise("9", "a barrier waits for all streams of each rank", Tracer, "barrier")
def barrier_of_all_streams(barrier: Method, self: Tracer, team: Any) -> None:
    self.step("waits", [], after=streams(self))
    barrier(self, team)


@promise("10", "a matmul that waits begins when all of its flags are there", Order, "_join_flags")
def begins_with_all_flags(join: Method, self: Order) -> None:
    join(self)
    for kernel in (kernel for rank in self.ranks for kernel in rank.kernels):
        signals = [self.partners[flag] for flag in kernel.waits if flag in self.partners]
        for flag in kernel.waits:
            flag.event.after += [signal for signal in signals if signal not in flag.event.after]


@promise("13", "the flag of a block says that all blocks are done", Tracer, "_blocks")
def done_with_all_blocks(make: Method, self: Tracer, *given: Any) -> Any:
    blocks = make(self, *given)
    seen = [end for flag in blocks.signals for end in flag.event.ends]
    for flag in blocks.signals:
        flag.event.after, flag.event.ends = [*blocks.units], seen
    for event in (*blocks.units, *blocks.parts):
        event.ends = seen
    return blocks


PROMISES["one_call"] = Promise("calls", "what holds for one call holds for the next", calls=1)


def of(name: str) -> Program:
    """The hand-written program of a promise."""
    return hi.parse((FOLDER / f"{name}.hir").read_text(), f"{name}.hir")
