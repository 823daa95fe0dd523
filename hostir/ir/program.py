"""A program: plain immutable data, in one of two phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hostir.described import described
from hostir.ir.divisions import divisions_of, misfits
from hostir.ir.op import Codec, Phase, Statement, codecs_of
from hostir.ir.printer import INDENT, VERSION, Printer
from hostir.ir.sizes import DIGITS, Division, Size, binding
from hostir.ir.source import Diagnostic, HostIRError, did_you_mean, error, user_span
from hostir.ir.types import Mesh, TensorType
from hostir.ir.values import Value


@dataclass(frozen=True)
class Program:
    """A fusion or a host program. `parse(str(p)) == p`, and equal programs print the same bytes up to comments.

    `str(p)` is the whole text, with the comments that passes left behind statements; reading it back drops them.

    `meshes[0]` is the mesh of every tensor that names none. `streams` is the size of the pool of worker streams.
    `aliases` are names of sizes that a foreign text uses, each with the size it equals (`("i5", "i4")`): they may be
    bound too, to that very value. They are not part of the program's text.

    Fields:
        name: without `@`.
        phase: whether it is a fusion or a host program.
        meshes: those that its tensors lie on.
        inputs, outputs: the values that a call takes and gives, each with its `name` and `type`.
        body: the statements, outermost first.
        streams: the number of worker streams.
    """

    name: str
    phase: Phase
    meshes: tuple[Mesh, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    body: tuple[Statement, ...]
    streams: int = 0
    aliases: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return format_program(self)

    def _repr_markdown_(self) -> str:
        return f"```\n{self}```"

    @property
    def ranks(self) -> int:
        """How many ranks it needs: one more than the highest device of its meshes."""
        return 1 + max(device for mesh in self.meshes for device in mesh.devices)

    def walk(self) -> Iterator[Statement]:
        """Every statement, outer before inner, in order."""
        return _walk(self.body)

    @property
    def size_names(self) -> frozenset[str]:
        """The symbols that must be bound to run it."""
        values = [*self.inputs, *(v for s in self.walk() for v in s.named)]
        named = {n for v in values if isinstance(v.type, TensorType) for n in v.type.names}
        for s in self.walk():
            named |= {n for f, c in codecs_of(type(s)).items() if c is Codec.SIZE for n in getattr(s, f).names}
        return frozenset(named)

    @property
    def digest(self) -> str:
        """A hash of the text without its comments, the same on every rank that runs the same program."""
        import hashlib  # seldom needed, and not quickly loaded

        return hashlib.sha256(format_program(self, notes=False).encode()).hexdigest()[:16]

    @cached_property
    def divisions(self) -> tuple[Division, ...]:
        """What it divides sizes by: they must be multiples of that."""
        return divisions_of(self.inputs, self.walk())

    def misfits(self, sizes: Mapping[str, int]) -> list[Diagnostic]:
        """Which of these sizes are no multiples of what the program divides them by."""
        return misfits(self.name, self.divisions, sizes)

    def check_whole(self, sizes: Mapping[str, int]) -> None:
        """Raises where a size that is bound is no multiple of what the program divides it by."""
        if found := self.misfits(sizes):
            raise HostIRError(*found)

    def given_sizes(self, given: Mapping[str, int] | None) -> dict[str, int]:
        """Sizes as a caller gives them, of some symbols or all. Raises for an unknown name and for what is no size."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise error(f"sizes={described(given)}", user_span(), expected="a dictionary such as {'M': 4096}")
        self._refuse_unknown(given)
        for name, size in given.items():
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 10**DIGITS:
                message = f"the size {described(name)}={described(size)} of @{self.name}"
                raise error(message, user_span(), expected=f"an integer from 0, of at most {DIGITS} digits")
        return dict(given)

    def _refuse_unknown(self, sizes: Mapping[str, int]) -> None:
        names = self.size_names | dict(self.aliases).keys()
        if unknown := next((name for name in sizes if name not in names), None):
            hint = did_you_mean(unknown, names)
            expected = f"one of: {', '.join(sorted(names)) or 'none'}"
            raise error(f"@{self.name} has no size '{unknown}'", expected=expected, hint=hint)

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Raises unless just the program's symbols are bound, to sizes that it divides, and aliases to their equals."""
        names, aliases = self.size_names, dict(self.aliases)
        self._refuse_unknown(sizes)
        if missing := sorted(names - sizes.keys()):
            raise error(f"the size '{missing[0]}' of @{self.name} is not bound", hint=binding(missing[0]))
        for name, meaning in aliases.items():
            if name in sizes and sizes[name] != (value := Size.of(meaning).bind(sizes)):
                same = f"{name} equals {meaning}" if str(value) != meaning else f"{name} is {meaning}"
                raise error(f"{name}={sizes[name]} does not fit @{self.name}, where {same}", expected=f"{name}={value}")
        self.check_whole(sizes)

    def with_body(self, body: Iterable[Statement]) -> Program:
        return replace(self, body=tuple(body))


def format_program(program: Program, *, notes: bool = True) -> str:
    """The program's text, with `notes` as comments behind statements: what passes left there for people to read."""
    printer = Printer(program.phase, program.meshes, notes=notes)
    lines = [f"hostir {VERSION}", *(f"mesh {mesh}" for mesh in program.meshes)]
    head = f"{program.phase.value} @{program.name}"
    inputs = [printer.binder(v, typed=True) for v in program.inputs]
    outputs = ", ".join(map(str, program.outputs))
    tail = f") -> ({outputs})" + (f" streams {program.streams}" if program.streams else "") + " {"
    one_line = f"{head}({', '.join(inputs)}{tail}"
    if len(one_line) <= 120:
        lines.append(one_line)
    else:
        lines += [f"{head}(", ",\n".join(f"{INDENT * 2}{i}" for i in inputs), tail]
    lines += printer.block(program.body, 1)
    return "\n".join([*lines, "}"]) + "\n"


def format_statement(statement: Statement, program: Program) -> str:
    """One statement on one line, without the body of a loop: for messages and traces."""
    text = Printer(program.phase, program.meshes).lines(statement, 0)[0]
    return text.removesuffix("{").rstrip()


def _walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    for s in body:
        yield s
        for inner in s.bodies:
            yield from _walk(inner)


def rewrite(body: Iterable[Statement], change: Callable[[Statement], Iterable[Statement]]) -> tuple[Statement, ...]:
    """Replaces each statement by what `change` gives for it, inner bodies first."""
    done: list[Statement] = []
    for s in body:
        blocks: dict[str, Any] = {
            n: rewrite(getattr(s, n), change) for n, c in codecs_of(type(s)).items() if c is Codec.BLOCK
        }
        done.extend(change(replace(s, **blocks) if blocks else s))
    return tuple(done)


class Names:
    """Gives fresh names: `a`, then `a_1`, `a_2`, ... in the order they are asked for."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = set(taken)

    @staticmethod
    def of(program: Program) -> Names:
        names = {v.name for v in program.inputs}
        return Names(names | {v.name for s in program.walk() for v in s.named})

    def fresh(self, wish: str) -> str:
        name, n = wish, 0
        while name in self.taken:
            n += 1
            name = f"{wish}_{n}"
        self.taken.add(name)
        return name
