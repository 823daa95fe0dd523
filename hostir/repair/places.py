"""Places in a program where statements can be inserted.

Edits of host programs by place; and facts about a place: the names in scope, the current stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hostir.ir.host_ops import CurrentStream, For, SetStream, Synchronize
from hostir.ir.op import (
    Bin,
    Expr,
    Lit,
    Phase,
    Ref,
    Statement,
    Sync,
    Value,
    expr_values,
)
from hostir.ir.program import Names, Program
from hostir.ir.sizes import Size
from hostir.ir.types import Kind

BodyPosition = tuple[int, ...]  # an index into the program's body, an index into the body of that statement, ...
Block = tuple[Statement, ...]


def issues(s: Statement) -> bool:
    """Return True if a statement itself issues work to the current stream."""
    return not (s.on_host or moves_on(s) or names_stream(s))


def moves_on(s: Statement) -> bool:
    """Return True if a statement may change the current stream."""
    return s.sets_stream is not None or bool(s.bodies)


def names_stream(s: Statement) -> bool:
    """Return True if a statement gives the current stream a name."""
    defined = s.defines(Phase.HOST)
    return defined is not None and defined.type is Kind.STREAM


@dataclass(frozen=True)
class Edit:
    """An insertion of the statements `new` at a place; they replace the first `drop` statements there."""

    place: BodyPosition
    new: Block = ()
    drop: int = 0


Edits = tuple[Edit, ...]


def edited(program: Program, edits: Iterable[Edit]) -> Program:
    """Return the program with these edits applied. Places refer to `program`; blocks that become empty are removed."""
    body = program.body
    # From the last to the first: then no edit shifts a later one.
    for edit in sorted(edits, key=lambda e: e.place, reverse=True):
        body = _spliced(body, edit.place, edit)
    return program.with_body(body)


def _spliced(body: Block, place: BodyPosition, edit: Edit) -> Block:
    at, *inner = place
    if not inner:
        return (*body[:at], *edit.new, *body[at + edit.drop :])
    outer = body[at].with_bodies(lambda block: _spliced(block, tuple(inner), edit))
    return (*body[:at], *([outer] if any(outer.bodies) else []), *body[at + 1 :])


def without(body: Block, gone: Sequence[Statement]) -> Block:
    """Return a body without these statement objects, and without loops and conditions that become empty."""
    kept: list[Statement] = []
    for s in body:
        if any(s is g for g in gone):
            continue
        less = s.with_bodies(lambda block: without(block, gone)) if s.bodies else s
        if less == s:
            kept.append(s)
        elif any(less.bodies):
            kept.append(less)
    return tuple(kept)


class Outline:
    """The statements of a host program with their places."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.statements = list(_placed(program.body, ()))
        self.places = {id(s): place for place, s in self.statements}
        self.user = callers_stream(program)

    def place(self, s: Statement) -> BodyPosition:
        return self.places[id(s)]

    def block(self, place: BodyPosition) -> Block:
        """Return the block that contains a place."""
        body = self.program.body
        for at in place[:-1]:
            body = body[at].bodies[0]
        return body

    def end(self, place: BodyPosition) -> BodyPosition:
        """Return the place at the end of the block that contains `place`."""
        return (*place[:-1], len(self.block(place)))

    def set_above(self, place: BodyPosition) -> Expr | None:
        """Return the stream of the last `set_stream` above a place, if any."""
        above = [s.sets_stream for at, s in self.statements if at < place and s.sets_stream is not None]
        return above[-1] if above else None

    def stream(self, place: BodyPosition) -> Expr | None:
        """Return the current stream at a place by the text above it.

        None if the stream's names are not in scope there.
        """
        above = self.set_above(place)
        if above is not None:
            return above if self.knows(place, above) else None
        return Ref(self.user) if self.user else None

    def knows(self, place: BodyPosition, stream: Expr) -> bool:
        """Return True if all names of a stream are in scope at a place."""
        scope = self.scope(place)
        return all(scope.get(v.name) == v for v in expr_values(stream))

    def scope(self, place: BodyPosition) -> dict[str, Value]:
        """Return the values in scope at a place, by name."""
        values = {v.name: v for v in self.program.inputs}
        body = self.program.body
        for at in place[:-1]:
            index = body[at].defines(Phase.HOST)
            values |= _defined(body[:at]) | ({index.name: index} if index else {})
            body = body[at].bodies[0]
        return values | _defined(body[: place[-1]])

    # Statements to insert ---------------------------------------------------------------------------------------------
    def fork(self, place: BodyPosition, source: Ref | Lit) -> Block:
        """Return statements that make every other pool stream wait for `source`, then restore the current stream."""
        index, count = self._index(place), self.program.streams
        worker: Expr = Ref(index)
        if isinstance(source, Lit):
            count, next = count - 1, Bin("+", worker, Lit(source.value + 1))
            if source.value < count:
                worker = Bin("%", next, Lit(count + 1)) if source.value else next
        body = (SetStream(stream=worker), Synchronize(stream=source))
        return (self._for_all(index, body, count), *self._back(place)) if count else ()

    def join(self, place: BodyPosition) -> Block:
        """Return statements that make the current stream wait for every pool stream."""
        index = self._index(place)
        return (self._for_all(index, (Synchronize(stream=Ref(index)),), self.program.streams),)

    def at_callers(self, place: BodyPosition) -> Block:
        """Return the statements needed to make the caller's stream current at a place of the outermost block."""
        if len(place) > 1 or self.user is None:
            return ()
        return () if self.set_above(place) in (None, Ref(self.user)) else (SetStream(stream=Ref(self.user)),)

    def ends(self) -> list[BodyPosition]:
        """Return places at the program's end: before closing barriers and frees, before closing frees, and last."""
        body = self.program.body
        places = [len(body)]
        for closing in (_frees, _closes):
            at = len(body)
            while at and closing(body[at - 1]):
                at -= 1
            places.append(at)
        return [(at,) for at in dict.fromkeys(places)]

    def _for_all(self, index: Value, body: Block, count: int) -> For:
        return For(index=index, count=Size.of(count), body=body)

    def _index(self, place: BodyPosition) -> Value:
        scope, name = self.scope(place), "s"
        while name in scope:
            name += "s"
        return Value(name, Kind.INDEX)

    def _back(self, place: BodyPosition) -> Block:
        current = self.stream(place)
        return () if current is None or resets(self.block(place)[place[-1] :]) else (SetStream(stream=current),)


def _frees(s: Statement) -> bool:
    return s.freed is not None


def _closes(s: Statement) -> bool:
    return _frees(s) or s.orders is Sync.MEET or s.sets_stream is not None


def resets(body: Block) -> bool:
    """Return True if a body sets the stream before it issues any work."""
    first = next((s for s in body if not s.on_host), None)
    if first is None or first.sets_stream is not None:
        return first is not None
    return not first.conditional and any(map(resets, first.bodies))


def callers_stream(program: Program) -> Value | None:
    """Return the value of a `current_stream` before any `set_stream`: the caller's stream; None without one."""
    for s in program.body:
        if names_stream(s):
            return s.defines(Phase.HOST)
        if moves_on(s):
            break
    return None


def with_callers_stream(program: Program) -> Program:
    """Return the program with a value that holds the caller's stream."""
    if callers_stream(program) is not None:
        return program
    return program.with_body((CurrentStream(out=Value(Names.of(program).fresh("user"), Kind.STREAM)), *program.body))


def _defined(body: Block) -> dict[str, Value]:
    return {v.name: v for s in body if not s.bodies and (v := s.defines(Phase.HOST))}


def _placed(body: Block, outside: BodyPosition) -> Iterator[tuple[BodyPosition, Statement]]:
    for at, s in enumerate(body):
        yield (*outside, at), s
        for inner in s.bodies:
            yield from _placed(inner, (*outside, at))
