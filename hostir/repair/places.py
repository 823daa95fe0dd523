"""Edit a host program at places in its text, and find the block, the names in scope and the stream of a place.

A place is a tuple of indices: the index of a statement in the program's body, then an index in the body of this
statement, and so on. A place names a statement. It also names the position before the statement, where an edit can
insert statements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hostir.ir.op import Expr, Phase, Ref, Statement, Sync, Value, expr_values
from hostir.ir.program import Program
from hostir.ir.types import Kind

BodyPosition = tuple[int, ...]  # a place
Block = tuple[Statement, ...]


def issues(s: Statement) -> bool:
    """Return True if a statement issues work to the current stream. Return False for loops and `if` statements."""
    return not (s.on_host or moves_on(s) or names_stream(s))


def moves_on(s: Statement) -> bool:
    """Return True if a statement may change the current stream."""
    return s.sets_stream is not None or bool(s.bodies)


def names_stream(s: Statement) -> bool:
    """Return True if a statement defines a value for the current stream, as `current_stream` does."""
    defined = s.defines(Phase.HOST)
    return defined is not None and defined.type is Kind.STREAM


@dataclass(frozen=True)
class Edit:
    """An edit: at `place`, remove the next `drop` statements, and insert the statements `new`."""

    place: BodyPosition
    new: Block = ()
    drop: int = 0


Edits = tuple[Edit, ...]


def edited(program: Program, edits: Iterable[Edit]) -> Program:
    """Return the program with all edits applied. The places of all edits refer to the program before the edits.

    A loop or `if` that has no statements left is removed.
    """
    body = program.body
    # The last edit is applied first, so that no edit changes the place of another.
    for edit in sorted(edits, key=lambda e: e.place, reverse=True):
        body = _spliced(body, edit.place, edit)
    return program.with_body(body)


def _spliced(body: Block, place: BodyPosition, edit: Edit) -> Block:
    at, *inner = place
    if not inner:
        return (*body[:at], *edit.new, *body[at + edit.drop :])
    outer = body[at].with_bodies(lambda block: _spliced(block, tuple(inner), edit))
    return (*body[:at], *([outer] if any(outer.bodies) else []), *body[at + 1 :])


def without(body: Block, removed: Sequence[Statement]) -> Block:
    """Return a body without the statement objects in `removed`. Loops and `if`s that become empty are removed, too."""
    kept: list[Statement] = []
    for s in body:
        if any(s is r for r in removed):
            continue
        shortened = s.with_bodies(lambda block: without(block, removed)) if s.bodies else s
        if shortened == s:
            kept.append(s)
        elif any(shortened.bodies):
            kept.append(shortened)
    return tuple(kept)


class Outline:
    """The statements of a host program with their places.

    Fields:
        program: the program.
        statements: all statements with their places, in program order.
        places: the place of each statement, by the `id` of the statement.
        callers_stream: the value of the caller's stream; None if the program does not define one.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.statements = list(_placed(program.body, ()))
        self.places = {id(s): place for place, s in self.statements}
        self.callers_stream = callers_stream(program)

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
        """Return the stream of the last `set_stream` above a place; None if there is no `set_stream` above it."""
        above = [s.sets_stream for at, s in self.statements if at < place and s.sets_stream is not None]
        return above[-1] if above else None

    def stream(self, place: BodyPosition) -> Expr | None:
        """Return an expression for the current stream at a place: the stream of the last `set_stream` above it.

        If there is no `set_stream` above it, this is the caller's stream. Return None if no expression with names in
        scope is known.
        """
        above = self.set_above(place)
        if above is not None:
            return above if self.knows(place, above) else None
        return Ref(self.callers_stream) if self.callers_stream else None

    def knows(self, place: BodyPosition, stream: Expr) -> bool:
        """Return True if all names in a stream expression are in scope at a place."""
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

    def ends(self) -> list[BodyPosition]:
        """Return the places at the end of the program where an edit may insert statements.

        They are the place after the last statement, the place before the final frees, and the place before the final
        frees, barriers and `set_stream` statements.
        """
        body = self.program.body
        places = [len(body)]
        for closing in (_frees, _closes):
            at = len(body)
            while at and closing(body[at - 1]):
                at -= 1
            places.append(at)
        return [(at,) for at in dict.fromkeys(places)]


def _frees(s: Statement) -> bool:
    return s.freed is not None


def _closes(s: Statement) -> bool:
    """Return True if a statement is a free, a barrier or a `set_stream`. Programs often end with such statements."""
    return _frees(s) or s.orders is Sync.MEET or s.sets_stream is not None


def callers_stream(program: Program) -> Value | None:
    """Return the value of the caller's stream; None if the program does not define one.

    A `current_stream` defines it if it comes before every statement that may change the current stream.
    """
    for s in program.body:
        if names_stream(s):
            return s.defines(Phase.HOST)
        if moves_on(s):
            break
    return None


def _defined(body: Block) -> dict[str, Value]:
    """Return the values that the statements of a block define, by name. Values of inner blocks are left out."""
    return {v.name: v for s in body if not s.bodies and (v := s.defines(Phase.HOST))}


def _placed(body: Block, outside: BodyPosition) -> Iterator[tuple[BodyPosition, Statement]]:
    """Yield each statement of a body, and of the blocks inside it, with its place.

    `outside` is the place of the loop or `if` that the body belongs to; it is empty for the program's body.
    """
    for at, s in enumerate(body):
        yield (*outside, at), s
        for inner in s.bodies:
            yield from _placed(inner, (*outside, at))
