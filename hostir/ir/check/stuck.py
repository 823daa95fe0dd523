"""Ranks that wait for each other: circles of waits, kernels that hold the SMs others need, flags set out of order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise, zip_longest

from hostir.ir.check.order import Order, Trouble
from hostir.ir.check.trace import Event, Flag, Kernel


def circles(left: list[Event]) -> Iterator[Trouble]:
    """What the events that were never reached wait for: a circle, shown once."""
    stuck = set(left)
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
    return list(kept.values())


def flags_out_of_order(order: Order) -> Iterator[Trouble]:
    """Signals of one flag that do not come one after another with rising epochs."""
    sent: dict[tuple[int, str, int], list[Flag]] = {}
    for rank in order.ranks:
        for flag in rank.signals:
            sent.setdefault(flag.place, []).append(flag)
    for flags in sent.values():
        flags.sort(key=lambda f: f.epoch)
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

    While kernel K runs, nothing else on its rank that needs SMs and did not come before K's start can begin. Whatever
    follows such an event is held up too. If that holds for a flag that K waits for, K may never end. Kernels of several
    ranks that run at the same time are looked at together: the first of each rank, the second of each, and so on.
    """
    followers = order.followers()
    for kernels in zip_longest(*(rank.kernels for rank in order.ranks)):
        running = [kernel for kernel in kernels if kernel is not None]
        while running:
            cause = _held_up(order, running, followers)
            stuck = [k for k in running if any(order.partners.get(flag.event) in cause for flag in k.waits)]
            if len(stuck) == len(running):
                kernel = stuck[0]
                flag = next(f for f in kernel.waits if order.partners.get(f.event) in cause)
                signal = order.partners[flag.event]
                yield Trouble("SMs held", [kernel.start, cause[signal], signal])
                return
            running = stuck


def _held_up(order: Order, running: list[Kernel], followers: dict[Event, list[Event]]) -> dict[Event, Event]:
    """Every event that cannot come while these kernels run, with the one that needs the SMs and holds it up."""
    holding = {kernel.start.rank: kernel for kernel in running}
    cause: dict[Event, Event] = {}
    for event in order.events:
        kernel = holding.get(event.rank)
        if event.sms and kernel and event is not kernel.start and not _before(order, event, kernel.start):
            cause[event] = event
    todo = deque(cause)
    while todo:
        event = todo.popleft()
        for follower in followers.get(event, ()):
            if follower not in cause:
                cause[follower] = cause[event]
                todo.append(follower)
    return cause
