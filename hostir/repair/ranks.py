"""Suggest edits that order the events of different ranks: barriers, signals, and waits for flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hostir.check.ordering.order import Order
from hostir.check.tracing.events import Event
from hostir.ir.onesided_ops import Barrier
from hostir.ir.op import Statement, Value
from hostir.repair.missing import MissingFlags
from hostir.repair.places import BodyPosition, Edit, Edits, Outline, issues, moves_on
from hostir.repair.streams import join, set_callers_stream


def barriers(outline: Outline, first: Event, second: Event) -> Iterator[Edits]:
    """Yield edits that insert a barrier to order two events of different ranks.

    There is an edit for each place of `_barrier_places`. For each place at the end of the program, there is also an
    edit with a join before the barrier: the caller's stream waits for all pool streams.
    """
    statements = [s for s in (first.statement, second.statement) if s is not None]
    for x, axis in dict.fromkeys((s.remote, s.peer_place[1]) for s in statements if s.remote and s.peer_place):
        for place in _barrier_places(outline, statements):
            if (operand := _on_mesh_of(outline, x, place)) is not None:
                yield (Edit(place, (Barrier(x=operand, over=axis),)),)
        for end in outline.ends():
            operand = _on_mesh_of(outline, x, end)
            if operand is not None and outline.program.streams:
                join_first = (*set_callers_stream(outline, end), *join(outline, end))
                yield (Edit(end, (*join_first, Barrier(x=operand, over=axis))),)


def _barrier_places(outline: Outline, statements: Sequence[Statement]) -> list[BodyPosition]:
    """Return the places for a barrier that may order some statements.

    The result holds the places before and after each statement. For each loop or `if` around a statement, it holds the
    start and the end of the body, and the places before and after the loop or `if`. It also holds the start and the end
    of the program.
    """
    places: list[BodyPosition] = []
    for s in reversed(statements):
        place = outline.place(s)
        places += [place, (*place[:-1], place[-1] + 1)]
        for depth in range(len(place) - 1, 0, -1):
            loop = place[:depth]
            places += [(*loop, 0), outline.end((*loop, 0)), loop, (*loop[:-1], loop[-1] + 1)]
    return list(dict.fromkeys([*places, _start(outline), *outline.ends()]))


def _start(outline: Outline) -> BodyPosition:
    """Return the place before the first top-level statement that issues work or may change the current stream."""
    return (next((n for n, s in enumerate(outline.program.body) if issues(s) or moves_on(s)), 0),)


def _on_mesh_of(outline: Outline, x: Value, place: BodyPosition) -> Value | None:
    """Return a value on the mesh of `x` that a statement at `place` can name; None if there is no such value.

    The value is an input of the program if an input is on this mesh. Otherwise it is `x` itself.
    """
    inputs = [v for v in outline.program.inputs if v.tensor.mesh == x.tensor.mesh]
    return inputs[0] if inputs else outline.scope(place).get(x.name)


def unawaited_signals(outline: Outline, order: Order, first: Event, second: Event) -> Iterator[Edits]:
    """Yield edits that order two events by a flag that a rank signals, but that nothing waits for yet.

    An edit makes the statement of one of the events wait for this flag.
    """
    users = [event.statement for event in (second, first) if event.statement is not None]
    missing = MissingFlags(outline, order)
    yield from missing.waits(users)
    yield from missing.kernels(users)


def unsent_signals(outline: Outline, order: Order, waiting: Event, deadlock: Sequence[Event] = ()) -> Iterator[Edits]:
    """Yield edits for a wait without a signal: insert the signal, remove the wait, or replace the wait by a barrier.

    Args:
        outline: the statements of the program with their places.
        order: the order of the program's events.
        waiting: the event that waits.
        deadlock: if the wait is part of a deadlock, the events of the deadlock.
    """
    yield from MissingFlags(outline, order, deadlock).signals(waiting)
    s = waiting.statement
    if s is None or not s.flag_operands or not s.orders:
        return
    place, x = outline.place(s), s.flag_operands[0].flags
    mesh, operand = x.tensor.mesh, _on_mesh_of(outline, x, place)
    yield (Edit(place, drop=1),)
    for axis in mesh.axes if mesh and operand else ():
        yield (Edit(place, (Barrier(x=operand or x, over=axis),), drop=1),)
