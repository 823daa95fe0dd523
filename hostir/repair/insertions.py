"""Suggest edits that may repair a finding of the checker. An edit inserts, moves or removes statements.

The search in `hostir.repair.repair` checks which of the edits repair the finding, and picks the best of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from hostir.check.findings import Finding
from hostir.check.ordering.order import Order
from hostir.check.tracing.events import Event
from hostir.ir.host_ops import FreeBuffer, Wait
from hostir.ir.op import Statement, Value
from hostir.repair.missing import held_up
from hostir.repair.places import Block, BodyPosition, Edit, Edits, Outline
from hostir.repair.ranks import barriers, unawaited_signals, unsent_signals
from hostir.repair.streams import forks, joins, set_callers_stream, synchronizes

REPAIRABLE = {"race", "flag shared", "leak", "nobody sends", "SMs held"}


def repairable(finding: Finding, order: Order | None) -> bool:
    """Return True if this module suggests edits for the category of a finding.

    It suggests edits for a deadlock only if no statement signals the epoch that a wait in the deadlock needs.
    """
    if finding.category == "deadlock" and order is not None:
        return bool(held_up(order, finding.events))
    return finding.category in REPAIRABLE


def for_handles(outline: Outline) -> Iterator[Edits]:
    """Yield edits that insert the missing wait for a communication: the first one in the program that lacks a wait.

    There is one edit for each place in the communication's block where the wait can be inserted.
    """
    for place, s in outline.statements:
        handle = s.started
        if handle is None:
            continue
        below = outline.block(place)[place[-1] + 1 :]
        if not any(x.awaited == handle for x in below):
            yield from _waits(handle, place, below)
            return


def _waits(handle: Value, place: BodyPosition, below: Block) -> Iterator[Edits]:
    """Yield edits that insert a wait for a handle: directly after the statement at `place`, or later in its block.

    `below` holds the later statements of the block. No wait is inserted directly after a statement that only runs on
    the host, or after another wait.
    """
    for n, s in enumerate((None, *below), place[-1] + 1):
        if s is None or not (s.on_host or s.awaited is not None):
            yield (Edit((*place[:-1], n), (Wait(handle=handle),)),)


def for_leaks(outline: Outline, names: Container[str]) -> Edits:
    """Return edits that free the buffers `names`, each at the end of the block that allocates it."""
    ends: dict[BodyPosition, list[Statement]] = {}
    for place, s in outline.statements:
        value = None if s.symmetric else s.buffer
        freed = any(x.freed == value for x in outline.block(place))
        if value is not None and value.name in names and not freed:
            ends.setdefault(outline.end(place), []).append(FreeBuffer(x=value))
    return tuple(Edit(end, (*set_callers_stream(outline, end), *frees)) for end, frees in ends.items())


def for_finding(finding: Finding, outline: Outline, order: Order) -> Iterator[Edits]:
    """Yield edits that may repair a finding.

    The finding is about events that are not ordered, about a missing signal, or about SMs that a kernel holds.
    """
    if finding.category == "nobody sends":
        yield from unsent_signals(outline, order, finding.events[0])
        return
    if finding.category == "deadlock":
        for waiting in {id(w.event.statement): w.event for w in held_up(order, finding.events)}.values():
            yield from unsent_signals(outline, order, waiting, finding.events)
        return
    if finding.category == "SMs held":  # a join repairs it only if the kernel belongs to the next call
        yield from joins(outline)
        return
    first, second = finding.events[:2]
    yield from unawaited_signals(outline, order, first, second)  # a rank may signal to itself, too
    if first.rank != second.rank:
        yield from barriers(outline, first, second)
    elif _issued(first) > _issued(second):
        first, second = second, first
    yield from _later_frees(outline, first, second)
    yield from _earlier_waits(outline, first, second)
    yield from forks(outline, order, second)
    yield from joins(outline)
    yield from synchronizes(outline, first, second)


def _issued(event: Event) -> tuple[int, int]:
    """Return a key that sorts the events of a rank in the order in which the rank issues them."""
    return event.call, event.number


def _earlier_waits(outline: Outline, first: Event, second: Event) -> Iterator[Edits]:
    """Yield edits that move the wait for a communication to an earlier place.

    The communication is the statement of the first event. The second event uses memory of the communication. The new
    place of the wait is directly after the communication, or before the statement of the second event.
    """
    s = first.statement
    handle = s.started if s is not None else None
    if s is None or handle is None:
        return
    place = outline.place(s)
    below = enumerate(outline.block(place)[place[-1] + 1 :], place[-1] + 1)
    wait = next(((*place[:-1], n) for n, x in below if x.awaited == handle), None)
    if wait is None:
        return
    targets = [(*place[:-1], place[-1] + 1)]
    if second.statement is not None:
        user = outline.place(second.statement)[: len(place)]
        targets += [user] if user[:-1] == place[:-1] and user > place else []
    for target in targets:
        yield Edit(wait, drop=1), Edit(target, (Wait(handle=handle),))


def _later_frees(outline: Outline, first: Event, second: Event) -> Iterator[Edits]:
    """Yield edits that move a free to the end of its block. The free is the statement of one of the events."""
    for s in (first.statement, second.statement):
        if s is not None and s.freed is not None:
            place = outline.place(s)
            end = outline.end(place)
            yield Edit(place, drop=1), Edit(end, (*set_callers_stream(outline, end), s))
