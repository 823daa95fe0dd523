"""Edits of host programs by place, and what holds at a place: the names in scope, the stream that is current."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hostir.ir.host_ops import Allocate, CurrentStream, Dense, For, FreeBuffer, SetStream, Synchronize
from hostir.ir.onesided_ops import AllocateSymmetric, Barrier, If, Rank
from hostir.ir.op import Phase, Statement
from hostir.ir.program import Names, Program
from hostir.ir.sizes import Size
from hostir.ir.types import Kind
from hostir.ir.values import Bin, Expr, Lit, Ref, Value, expr_values
from hostir.ir.view_ops import ViewOp

Place = tuple[int, ...]  # an index into the program's body, an index into the body of what stands there, ...
Block = tuple[Statement, ...]


def on_host(s: Statement) -> bool:
    """Whether no stream sees it."""
    return isinstance(s, (ViewOp, Allocate, AllocateSymmetric, Rank)) and not isinstance(s, Dense)


@dataclass(frozen=True)
class Edit:
    """Puts statements in front of what stands at a place, or in place of the `drop` first that stand there."""

    place: Place
    new: Block = ()
    drop: int = 0


Edits = tuple[Edit, ...]


def edited(program: Program, edits: Iterable[Edit]) -> Program:
    """The program with some edits, whose places are those of the program as it is; what they leave empty goes too."""
    body = program.body
    for edit in sorted(edits, key=lambda e: e.place, reverse=True):  # the last first: it moves no other
        body = _spliced(body, edit.place, edit)
    return program.with_body(body)


def _spliced(body: Block, place: Place, edit: Edit) -> Block:
    at, *inner = place
    if not inner:
        return (*body[:at], *edit.new, *body[at + edit.drop :])
    outer = body[at]
    assert isinstance(outer, (For, If))
    inside = _spliced(outer.body, tuple(inner), edit)
    return (*body[:at], *([replace(outer, body=inside)] if inside else []), *body[at + 1 :])


def without(body: Block, gone: Sequence[Statement]) -> Block:
    """A body without these very statements, and without the loops and conditions that this leaves empty."""
    kept: list[Statement] = []
    for s in body:
        if any(s is g for g in gone):
            continue
        if not isinstance(s, (For, If)) or (inner := without(s.body, gone)) == s.body:
            kept.append(s)
        elif inner:
            kept.append(replace(s, body=inner))
    return tuple(kept)


class Outline:
    """The statements of a host program with their places."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.statements = list(_placed(program.body, ()))
        self.places = {id(s): place for place, s in self.statements}
        self.user = callers_stream(program)

    def place(self, s: Statement) -> Place:
        return self.places[id(s)]

    def block(self, place: Place) -> Block:
        """The block that a place is in."""
        body = self.program.body
        for at in place[:-1]:
            body = body[at].bodies[0]
        return body

    def end(self, place: Place) -> Place:
        """Behind the last statement of the block that a place is in."""
        return (*place[:-1], len(self.block(place)))

    def setter(self, place: Place) -> SetStream | None:
        """The last `set_stream` above a place."""
        above = [s for at, s in self.statements if at < place and isinstance(s, SetStream)]
        return above[-1] if above else None

    def stream(self, place: Place) -> Expr | None:
        """The stream that is current at a place, as the text above it says; None where that cannot be written."""
        setter = self.setter(place)
        if setter is not None:
            return setter.stream if self.knows(place, setter.stream) else None
        return Ref(self.user) if self.user else None

    def knows(self, place: Place, stream: Expr) -> bool:
        """Whether all names of a stream are in scope at a place."""
        scope = self.scope(place)
        return all(scope.get(v.name) == v for v in expr_values(stream))

    def scope(self, place: Place) -> dict[str, Value]:
        """What is in scope at a place."""
        found = {v.name: v for v in self.program.inputs}
        body = self.program.body
        for at in place[:-1]:
            outer = body[at]
            found |= _defined(body[:at]) | ({outer.index.name: outer.index} if isinstance(outer, For) else {})
            body = outer.bodies[0]
        return found | _defined(body[: place[-1]])

    def all_of(self, *kinds: type[Statement]) -> Iterator[tuple[Place, Statement]]:
        return ((place, s) for place, s in self.statements if isinstance(s, kinds))

    # What is put in ---------------------------------------------------------------------------------------------------
    def fork(self, place: Place, source: Ref | Lit) -> Block:
        """Every other worker waits for a stream; then the stream that is current goes on to be it."""
        index, count = self._index(place), self.program.streams
        worker: Expr = Ref(index)
        if isinstance(source, Lit):
            count, next = count - 1, Bin("+", worker, Lit(source.value + 1))
            if source.value < count:
                worker = Bin("%", next, Lit(count + 1)) if source.value else next
        body = (SetStream(stream=worker), Synchronize(stream=source))
        return (self._for_all(index, body, count), *self._back(place)) if count else ()

    def join(self, place: Place) -> Block:
        """The current stream waits for every worker."""
        index = self._index(place)
        return (self._for_all(index, (Synchronize(stream=Ref(index)),), self.program.streams),)

    def at_callers(self, place: Place) -> Block:
        """What makes the caller's stream current at a place of the program's own block, if anything is needed."""
        if len(place) > 1 or self.user is None:
            return ()
        setter = self.setter(place)
        return () if setter is None or setter.stream == Ref(self.user) else (SetStream(stream=Ref(self.user)),)

    def ends(self) -> list[Place]:
        """Places at the end of the program: in front of barriers and frees that close it, of the frees, of nothing."""
        body = self.program.body
        found = [len(body)]
        for closing in (FreeBuffer, (FreeBuffer, Barrier, SetStream)):
            at = len(body)
            while at and isinstance(body[at - 1], closing):
                at -= 1
            found.append(at)
        return [(at,) for at in dict.fromkeys(found)]

    def _for_all(self, index: Value, body: Block, count: int) -> For:
        return For(index=index, count=Size.of(count), body=body)

    def _index(self, place: Place) -> Value:
        scope, name = self.scope(place), "s"
        while name in scope:
            name += "s"
        return Value(name, Kind.INDEX)

    def _back(self, place: Place) -> Block:
        current = self.stream(place)
        return () if current is None or resets(self.block(place)[place[-1] :]) else (SetStream(stream=current),)


def resets(body: Block) -> bool:
    """Whether a body sets the stream before a stream sees anything of it."""
    first = next((s for s in body if not on_host(s)), None)
    return isinstance(first, SetStream) or (isinstance(first, For) and resets(first.body))


def callers_stream(program: Program) -> Value | None:
    """The value that holds the caller's stream: that of a `current_stream` above every `set_stream`, if any."""
    for s in program.body:
        if isinstance(s, CurrentStream):
            return s.out
        if isinstance(s, (SetStream, For, If)):
            break
    return None


def with_callers_stream(program: Program) -> Program:
    """The program with a value that holds the caller's stream."""
    if callers_stream(program) is not None:
        return program
    return program.with_body((CurrentStream(out=Value(Names.of(program).fresh("user"), Kind.STREAM)), *program.body))


def _defined(body: Block) -> dict[str, Value]:
    return {v.name: v for s in body if not isinstance(s, For) and (v := s.defines(Phase.HOST))}


def _placed(body: Block, outside: Place) -> Iterator[tuple[Place, Statement]]:
    for at, s in enumerate(body):
        yield (*outside, at), s
        for inner in s.bodies:
            yield from _placed(inner, (*outside, at))
