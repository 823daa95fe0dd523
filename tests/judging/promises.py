"""Promises: rules of the memory model made stronger than machines guarantee, to test that the model is tight.

A promise changes the checker's tracer or order to add an order that no rule gives. With a promise the checker accepts
wrong programs, and real processes must show that they are wrong. `tests/cases/promises` has a program for each promise;
`python -m benchmarks.judge --promise NAME` finds random ones.

CPU processes cannot show two things. Rules 11 and 12 are about SMs, and threads do not wait for SMs: a program that
breaks these rules hangs on a GPU only. On CPUs, freed memory is not reused within a call, because all buffers of a call
are allocated before its streams start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

import hostir as hi
from hostir.check.ordering.order import Order
from hostir.check.ordering.races import RaceDetector
from hostir.check.tracing import blocks
from hostir.check.tracing.events import CALLER, Event
from hostir.check.tracing.trace import RankTrace
from hostir.check.tracing.tracer import Tracer
from hostir.ir.program import Program
from hostir.machines.simulated.rank import RankMachine
from tests.launch import ROOT

FOLDER = ROOT / "tests" / "cases" / "promises"
Method = Callable[..., Any]


@dataclass
class Promise:
    """An order that the checker assumes and no machine guarantees.

    Fields:
        rule: the rule of docs/memory-model.md that it strengthens.
        says: the order that it adds.
        changes: a class or module, the name of a method or function, and its replacement, which gets the original and
            then the arguments.
        calls: the number of calls that the checker analyses; None for the usual number.
    """

    rule: str
    says: str
    changes: list[tuple[type | ModuleType, str, Method]] = field(default_factory=list)
    calls: int | None = None

    @contextlib.contextmanager
    def assumed(self) -> Iterator[None]:
        """Let the checker assume the promise inside the context."""
        with contextlib.ExitStack() as stack:
            for owner, name, instead in self.changes:
                stack.enter_context(patch.object(owner, name, _changed(getattr(owner, name), instead)))
            yield

    def accepts(self, program: Program) -> bool:
        """Return True if the checker accepts a program with this promise."""
        with self.assumed():
            return not any(finding.level == "error" for finding in hi.check(program, calls=self.calls))


def _changed(method: Method, instead: Method) -> Method:
    return lambda *args, **kwargs: instead(method, *args, **kwargs)


PROMISES: dict[str, Promise] = {}


def promise(rule: str, says: str, owner: type | ModuleType, method: str) -> Callable[[Method], Method]:
    """Register a promise under the name of the function that replaces the method."""

    def add(instead: Method) -> Method:
        PROMISES[instead.__name__] = Promise(rule, says, [(owner, method, instead)])
        return instead

    return add


def also(name: str, owner: type, method: str) -> Callable[[Method], Method]:
    """Let a promise change another method."""

    def add(instead: Method) -> Method:
        PROMISES[name].changes.append((owner, method, instead))
        return instead

    return add


def streams(rank: RankTrace) -> list[Event]:
    """Return the last event of each stream of a rank."""
    return [event for lane, event in rank.tails.items() if len(lane) == 2]


# The promises -----------------------------------------------------------------------------------------------------
@promise("1", "the streams of a rank run in the order of issue, like one stream", RankTrace, "step")
def one_stream(step: Method, self: RankTrace, verb: str, accesses: Any, after: Any = (), sms: bool = False) -> Event:
    return step(self, verb, accesses, [*after, *streams(self)], sms)


@promise("2", "synchronize waits for all streams of the rank", Tracer, "synchronize")
def synchronize_waits_for_all(synchronize: Method, self: Tracer, stream: Any) -> None:
    self.trace.step("waits", [], after=streams(self.trace))


@promise("3", "a collective accesses memory after all ranks have started it", Order, "_join_sides")
def read_when_all_have_come(join: Method, self: Order, sides: Any) -> None:
    join(self, sides)
    come = self._moment([side.begin for side in sides], sides[0].exchange.team)
    for side in sides:
        side.take.after.append(come)


@promise("3", "a collective accesses memory after the earlier collectives of the team", RankTrace, "collective")
def collectives_in_turn(collective: Method, self: RankTrace, exchange: Any, *rest: Any) -> Event:
    earlier = self.collectives.get(tuple(sorted(exchange.team)), [])[-1:]
    end = collective(self, exchange, *rest)
    side = self.collectives[tuple(sorted(exchange.team))][-1]
    side.take.after += [before.begin for before in earlier] + [side.begin]
    side.begin.after += [before.take for before in earlier]
    self.follow(side.take, "turns", exchange.team)
    return end


@promise("3", "teams (0 1) and (1 0) have separate queues of collectives", RankTrace, "collective")
def a_queue_for_each_order(collective: Method, self: RankTrace, exchange: Any, *rest: Any) -> Event:
    every = self.collectives
    key = tuple(sorted(exchange.team))
    self.collectives = {key: every.setdefault(exchange.team, [])}
    end = collective(self, exchange, *rest)
    self.collectives = every
    return end


@also("a_queue_for_each_order", RankMachine, "communicate")
def simulated_queues(communicate: Method, self: RankMachine, exchange: Any, *rest: Any) -> Any:
    """Let the simulated ranks have separate queues too: they compute the expected result."""
    every = self.parts
    self.parts = {tuple(sorted(exchange.team)): every.setdefault(exchange.team, [])}
    handle = communicate(self, exchange, *rest)
    self.parts = every
    return handle


@promise("4", "after a wait for a communication, the outputs of all ranks are written", RankTrace, "collective")
def written_everywhere(collective: Method, self: RankTrace, exchange: Any, *rest: Any) -> Event:
    end = collective(self, exchange, *rest)
    side = self.collectives[tuple(sorted(exchange.team))][-1]
    self.follow(side.take, "moves", len(self.events))
    return end


@also("written_everywhere", Order, "_join_sides")
def written_when_waited(join: Method, self: Order, sides: Any) -> None:
    join(self, sides)
    for side in sides:
        side.end.after += [other.take for other in sides if other is not side]


@promise("5", "the inputs are ready when any stream begins", RankTrace, "event")
def inputs_are_there(event: Method, self: RankTrace, verb: str, *rest: Any, **more: Any) -> Event:
    new = event(self, verb, *rest, **more)
    begins = [e for e in self.events if e.call == self.turn and e.statement is None and e.verb == "writes"]
    new.after += [e for e in begins[:1] if e is not new]
    return new


@promise("5", "a call ends after all streams have finished", RankTrace, "step")
def all_streams_end(
    step: Method, self: RankTrace, verb: str, accesses: Any, after: Any = (), sms: bool = False
) -> Event:
    ends = self.statement is None and self.current == CALLER and verb == "reads"
    return step(self, verb, accesses, [*after, *(streams(self) if ends else [])], sms)


@promise("6", "a send ends after the receiver has the data", Order, "_join_messages")
def sent_is_received(join: Method, self: Order) -> None:
    join(self)
    posted = [side for rank in self.ranks for sides in rank.messages.values() for side in sides]
    gives = [side.give for side in posted]
    for side in posted:
        side.end.after += [give for give in gives if side.take in give.after and give is not side.give]


@promise("6", "a collective ends after the earlier messages of the rank", RankTrace, "collective")
def messages_in_turn_with_collectives(collective: Method, self: RankTrace, exchange: Any, *rest: Any) -> Event:
    end = collective(self, exchange, *rest)
    end.after += [event for lane, event in self.tails.items() if lane[1] == "messages"]
    return end


@promise("7", "copies between ranks need no order with statements of the peer", RaceDetector, "_unordered")
def copies_tell_the_peer(unordered: Method, self: RaceDetector, touch: Any, *rest: Any) -> Iterator[Any]:
    return (other for other in unordered(self, touch, *rest) if other.event.rank == touch.event.rank)


@promise("8", "a wait for a flag is ordered after the latest signal", Order, "enough")
def waits_for_the_latest(enough: Method, self: Order, wait: Any) -> Any:
    return enough(self, wait)[-1:]


@promise("9", "a barrier waits for all streams of each rank", Tracer, "barrier")
def barrier_of_all_streams(barrier: Method, self: Tracer, team: Any) -> None:
    self.trace.step("waits", [], after=streams(self.trace))
    barrier(self, team)


@promise("10", "a waiting matmul starts after all of its flags are set", Order, "_join_flags")
def begins_with_all_flags(join: Method, self: Order) -> None:
    join(self)
    for kernel in (kernel for rank in self.ranks for kernel in rank.kernels):
        signals = [self.partners[flag] for flag in kernel.waits if flag in self.partners]
        for flag in kernel.waits:
            flag.event.after += [signal for signal in signals if signal not in flag.event.after]


@promise("13", "the flag of a block is set after all blocks are done", blocks, "_blocks")
def done_with_all_blocks(make: Method, *arguments: Any) -> Any:
    made = make(*arguments)
    seen = [end for flag in made.signals for end in flag.event.ends]
    for flag in made.signals:
        flag.event.after, flag.event.ends = [*made.units], seen
    for event in (*made.units, *made.parts):
        event.ends = seen
    return made


PROMISES["one_call"] = Promise("calls", "one call shows all races", calls=1)


def of(name: str) -> Program:
    """Return the hand-written program of a promise."""
    return hi.parse((FOLDER / f"{name}.hir").read_text(), f"{name}.hir")
