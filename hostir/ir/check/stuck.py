"""Ranks that wait for each other: circles of waits, kernels that hold the SMs others need, flags set out of order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from hostir.ir.check.order import Order, Trouble
from hostir.ir.check.trace import Event, Kernel


def circles(order: Order, left: list[Event]) -> Iterator[Trouble]:
    """What the events that were never reached wait for: a circle, shown once.

    A wait that a signal of a higher epoch would end is no such thing: then the signals of its flag are out of order.
    """
    stuck = set(left)
    for wait in (wait for rank in order.ranks for wait in rank.waits if wait.event in stuck):
        first = order.partners.get(wait.event)
        others = [f.event for f in order.enough(wait) if f.event not in stuck]
        if first in stuck and others:
            yield Trouble("flag shared", [others[0], first], f"from {wait.epoch[1]} on")
            return
    event = next((e for e in left if e.statement is not None), left[0] if left else None)
    seen: dict[Event, int] = {}
    path: list[Event] = []
    while event is not None and event not in seen:
        seen[event] = len(path)
        path.append(event)
        event = next((before for before in event.after if before in stuck), None)
    if event is not None:
        yield Trouble("deadlock", _told_apart(path[seen[event] :]))


def _told_apart(circle: list[Event]) -> list[Event | None]:
    """A circle of events, each statement of a rank once."""
    kept: dict[tuple[int, int, tuple[int, ...]], Event] = {}
    for event in reversed(circle):
        if event.statement is not None:
            kept.setdefault((event.rank, id(event.statement), event.rounds), event)
    events = list(kept.values())
    first = min(range(len(events)), key=lambda n: _place(events[n]), default=0)
    return [*events[first:], *events[:first]]


def _place(event: Event) -> tuple[int, int, int, int]:
    span = event.statement.span if event.statement else None
    return event.call, span.line if span else 0, span.column if span else 0, event.rank


def flags_out_of_order(order: Order) -> Iterator[Trouble]:
    """Signals of one flag that do not come one after another with rising epochs."""
    for sent in order.sent.values():
        flags = sorted(sent, key=lambda f: f.epoch)
        for lower, higher in pairwise(f for f in flags if f.event in order.clocks):  # a deadlock cuts the rest off
            events: list[Event | None] = [lower.event, higher.event]
            if lower.epoch == higher.epoch:
                yield Trouble("sent twice", events, f"{lower.epoch[1]}")
            elif _before(order, higher.event, lower.event):
                yield Trouble("stale epoch", [higher.event, lower.event], f"{lower.epoch[1]} after {higher.epoch[1]}")
            elif not _before(order, lower.event, higher.event):
                yield Trouble("flag shared", events, f"{lower.epoch[1]} and {higher.epoch[1]}")


def _before(order: Order, first: Event, second: Event) -> bool:
    return order.known(first, order.clocks[second])


def kernels_in_the_way(order: Order) -> Iterator[Trouble]:
    """Kernels that hold all SMs of a rank while they wait for what needs these SMs, itself or something before it.

    While kernel K runs, nothing else on its rank that needs SMs and did not come before K's start can begin, nor what
    follows it. If that is so for a flag that K waits for, K may never end. Kernels of several ranks may hold each other
    up in a circle; what they hold up together is what each of them does, less what came before the start of one.
    """
    kernels = [kernel for rank in order.ranks for kernel in rank.kernels]
    followers = order.followers()
    held = {kernel: _held_up(order, [kernel], followers) for kernel in kernels}
    waits = {k: [signal for flag in k.waits if (signal := order.partners.get(flag.event))] for k in kernels}
    holders = {k: [other for other in kernels if any(s in held[other] for s in waits[k])] for k in kernels}
    for kernel in kernels:
        for running in _rings(order, [kernel], holders):
            cause = _held_up(order, running, followers)
            stuck = [next((s for s in waits[k] if s in cause), None) for k in running]
            if all(stuck) and (signal := stuck[0]):
                yield Trouble("SMs held", [kernel.start, cause[signal], signal])
                return


def _rings(order: Order, path: list[Kernel], holders: dict[Kernel, list[Kernel]]) -> Iterator[list[Kernel]]:
    """Circles of kernels, each held up by the next, that may run at the same time: one a rank, none before another."""
    for holder in holders[path[-1]]:
        if holder is path[0]:
            yield path
        elif all(_together(order, holder, other) for other in path):
            yield from _rings(order, [*path, holder], holders)


def _together(order: Order, a: Kernel, b: Kernel) -> bool:
    ordered = _before(order, a.end, b.start) or _before(order, b.end, a.start)
    return a.start.rank != b.start.rank and not ordered


def _held_up(order: Order, running: list[Kernel], followers: dict[Event, list[Event]]) -> dict[Event, Event]:
    """Every event that cannot come while these kernels run, with the one that needs the SMs and holds it up."""
    holding = {kernel.start.rank: kernel for kernel in running}
    cause: dict[Event, Event] = {}
    for event in order.events:
        if event.sms and event.rank in holding and not any(_begun(order, event, kernel) for kernel in running):
            cause[event] = event
    todo = deque(cause)
    while todo:
        event = todo.popleft()
        for follower in followers.get(event, ()):
            if follower not in cause:
                cause[follower] = cause[event]
                todo.append(follower)
    return cause


def _begun(order: Order, event: Event, kernel: Kernel) -> bool:
    """Whether an event has come by the time that a kernel runs, whatever the schedule."""
    return event is kernel.start or _before(order, event, kernel.start)
