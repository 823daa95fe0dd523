"""Find events that wait for each other in a cycle, and flags whose signals are out of order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hostir.check.ordering.joining import Trouble
from hostir.check.ordering.order import Order
from hostir.check.tracing.events import Event, Flag


def cyclic_waits(order: Order, left: list[Event]) -> Iterator[Trouble]:
    """Yield one cycle of events that wait for each other, if there is one.

    `left` holds the events that `Order.run` did not reach. If one of them is a wait that another signal with a higher
    epoch could end, the signals of its flag are not ordered. In this case, yield a trouble about these signals instead
    of a cycle.
    """
    stuck = set(left)
    for wait in (wait for rank in order.ranks for wait in rank.waits if wait.event in stuck):
        first = order.partners.get(wait)
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
        event = next((before for before in (*event.after, *event.held) if before in stuck), None)
    if event is not None:
        yield Trouble("deadlock", _one_per_statement(path[seen[event] :]))


def _one_per_statement(cycle: list[Event]) -> list[Event | None]:
    """Return the events of a cycle, but only one event for each combination of statement, round and rank.

    The cycle is rotated so that the first event belongs to the statement that comes first in the program.
    """
    kept: dict[tuple[int, int, tuple[int, ...]], Event] = {}
    for event in reversed(cycle):
        if event.statement is not None:
            kept.setdefault((event.rank, id(event.statement), event.rounds), event)
    events = list(kept.values())
    first = min(range(len(events)), key=lambda n: _place(events[n]), default=0)
    return [*events[first:], *events[:first]]


def _place(event: Event) -> tuple[int, int, int, int]:
    span = event.statement.span if event.statement else None
    return event.call, span.line if span else 0, span.column if span else 0, event.rank


def flags_out_of_order(order: Order) -> Iterator[Trouble]:
    """Yield a trouble for each pair of successive signals of a flag that are out of order.

    The signals must be ordered, and their epochs must rise.
    """
    for sent in order.sent.values():
        flags = sorted(sent, key=lambda f: (f.epoch, f.event.rank, f.event.number))
        # Events behind a deadlock have no clock.
        for lower, higher in pairwise(f for f in flags if f.event in order.clocks):
            events: list[Event | None] = [lower.event, higher.event]
            first, second = _epochs(lower, higher)
            if lower.epoch == higher.epoch and lower.event.rank != higher.event.rank:
                yield Trouble("sent twice", events, first)
            elif lower.epoch == higher.epoch and _before(order, lower.event, higher.event):
                yield Trouble("sent again", events, first)
            elif _before(order, higher.event, lower.event):
                yield Trouble("stale epoch", [higher.event, lower.event], f"{first} after {second}")
            elif not _before(order, lower.event, higher.event):
                yield Trouble("flag shared", events, f"{first} and {second}")


def _epochs(a: Flag, b: Flag) -> list[str]:
    """Return the epochs of two signals as texts.

    If the signals belong to different calls, the texts also name the calls.
    """
    return [f"{f.epoch[1]}" + (f" of call {f.epoch[0] + 1}" if a.epoch[0] != b.epoch[0] else "") for f in (a, b)]


def _before(order: Order, first: Event, second: Event) -> bool:
    return order.known(first, order.clocks[second])
