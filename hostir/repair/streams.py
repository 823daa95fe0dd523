"""Suggest edits that order the streams of one rank: forks, joins and `synchronize` statements."""

from __future__ import annotations

from collections.abc import Iterator

from hostir.check.ordering.order import Order
from hostir.check.tracing.events import CALLER, Event
from hostir.ir.host_ops import CurrentStream, For, SetStream, Synchronize
from hostir.ir.op import Bin, Expr, Lit, Ref, Sync, Value
from hostir.ir.program import Names, Program
from hostir.ir.sizes import Size
from hostir.ir.types import Kind
from hostir.repair.places import Block, BodyPosition, Edit, Edits, Outline, callers_stream, moves_on


def with_callers_stream(program: Program) -> Program:
    """Return the program with a value for the caller's stream.

    If the program does not define such a value, add a `current_stream` at the start.
    """
    if callers_stream(program) is not None:
        return program
    return program.with_body((CurrentStream(out=Value(Names.of(program).fresh("user"), Kind.STREAM)), *program.body))


def resets(body: Block) -> bool:
    """Return True if a block sets the current stream before it issues work."""
    first = next((s for s in body if not s.on_host), None)
    if first is None or first.sets_stream is not None:
        return first is not None
    return not first.conditional and any(map(resets, first.bodies))


def fork(outline: Outline, place: BodyPosition, source: Ref | Lit) -> Block:
    """Return a fork: statements that make every other pool stream wait for the stream `source`.

    The statements are for insertion at `place`. After them, the current stream is the same as before.
    """
    index, count = _new_index(outline, place), outline.program.streams
    worker: Expr = Ref(index)
    if isinstance(source, Lit):
        count, next = count - 1, Bin("+", worker, Lit(source.value + 1))
        if source.value < count:
            worker = Bin("%", next, Lit(count + 1)) if source.value else next
    if not count:
        return ()
    body = (SetStream(stream=worker), Synchronize(stream=source))
    return (For(index=index, count=Size.of(count), body=body), *_restore_stream(outline, place))


def join(outline: Outline, place: BodyPosition) -> Block:
    """Return a join: a loop that makes the current stream wait for every pool stream."""
    index = _new_index(outline, place)
    return (For(index=index, count=Size.of(outline.program.streams), body=(Synchronize(stream=Ref(index)),)),)


def set_callers_stream(outline: Outline, place: BodyPosition) -> Block:
    """Return a block with a statement that makes the caller's stream the current stream at a place.

    The block is empty if the caller's stream is the current stream already, or if the place is inside a loop or an
    `if`.
    """
    stream = outline.callers_stream
    if len(place) > 1 or stream is None or outline.set_above(place) in (None, Ref(stream)):
        return ()
    return (SetStream(stream=Ref(stream)),)


def _restore_stream(outline: Outline, place: BodyPosition) -> Block:
    """Return a block with a statement that makes the current stream of `place` the current stream again.

    The statement is for insertion after other inserted statements, which have changed the current stream. The block is
    empty if the statements after `place` set the current stream before they issue work.
    """
    current = outline.stream(place)
    if current is None or resets(outline.block(place)[place[-1] :]):
        return ()
    return (SetStream(stream=current),)


def _new_index(outline: Outline, place: BodyPosition) -> Value:
    """Return a value for a new loop index. No value in scope at the place has the same name."""
    scope, name = outline.scope(place), "s"
    while name in scope:
        name += "s"
    return Value(name, Kind.INDEX)


def synchronizes(outline: Outline, first: Event, second: Event) -> Iterator[Edits]:
    """Yield edits that make the stream of the second event wait for the stream of the first event."""
    for place in _waiting_places(outline, second):
        for stream in _streams_after(outline, first, place):
            yield (Edit(place, (Synchronize(stream=stream),)),)
    if second.statement is not None and outline.program.streams:
        place = outline.place(second.statement)
        yield (Edit(place, join(outline, place)),)


def _waiting_places(outline: Outline, event: Event) -> list[BodyPosition]:
    """Return the places for a `synchronize` that orders an event after work on another stream.

    The result holds the place before the event's statement, and the places after each `set_stream` above this
    statement. If the event is an action of the caller, it holds the places at the end of the program instead. It also
    holds the place before each signal and barrier. If the event comes after a signal or a barrier, a `synchronize`
    before the signal or the barrier may be enough.
    """
    passing = [place for place, s in outline.statements if s.orders & Sync.SIGNAL]
    if event.statement is None:
        return [*outline.ends(), *passing]
    here = outline.place(event.statement)
    set_here = [(*at[:-1], at[-1] + 1) for at, s in outline.statements if at < here and s.sets_stream is not None]
    return list(dict.fromkeys([here, *set_here, *passing]))


def _streams_after(outline: Outline, event: Event, place: BodyPosition) -> list[Expr]:
    """Return candidates for a stream that runs an event, or that has waited for the event.

    A candidate is an expression. All names in it are in scope at `place`.
    """
    lanes = {event.stream, *(str(lane[1]) for lane, _ in event.ends if len(lane) == 2)}
    streams: list[Expr] = []
    if outline.callers_stream and (CALLER in lanes or lanes == {event.stream}):
        streams.append(Ref(outline.callers_stream))
    set_to = [s.sets_stream for _, s in outline.statements if s.sets_stream is not None]
    streams += [s for s in set_to if not (isinstance(s, Ref) and s.value.type is Kind.STREAM)]
    streams += [Lit(int(lane.split()[1])) for lane in sorted(lanes) if lane.startswith("stream ")]
    return [stream for stream in dict.fromkeys(streams) if outline.knows(place, stream)]


def forks(outline: Outline, order: Order, second: Event) -> Iterator[Edits]:
    """Yield edits that insert a fork: every pool stream waits for one source stream.

    The source is the caller's stream, or a pool stream that waits for other ranks. The fork is inserted before the
    top-level statement that contains the second event. Other edits insert the fork before the first top-level statement
    that may change the current stream and is not an `if`.
    """
    if not outline.program.streams:
        return
    positions = [n for n, s in enumerate(outline.program.body) if moves_on(s) and not s.conditional][:1]
    positions += [outline.place(second.statement)[0]] if second.statement is not None else []
    callers = outline.callers_stream
    for at in dict.fromkeys(positions):
        if callers and callers.name in outline.scope((at,)):
            yield (Edit((at,), fork(outline, (at,), Ref(callers))),)
        for worker in _workers_that_wait(order):
            yield (Edit((at,), fork(outline, (at,), Lit(worker))),)


def _workers_that_wait(order: Order) -> list[int]:
    """Return the numbers of the pool streams that wait for other ranks: for barriers, flags or communications."""
    streams = {e.stream for e in order.events if e.statement and e.statement.orders & Sync.WAIT}
    return sorted(int(stream.split()[1]) for stream in streams if stream != CALLER)


def joins(outline: Outline) -> Iterator[Edits]:
    """Yield edits that make the caller's stream wait for every pool stream at the end of the program."""
    if not outline.program.streams:
        return
    for end in outline.ends():
        yield (Edit(end, (*set_callers_stream(outline, end), *join(outline, end))),)
