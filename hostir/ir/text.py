"""Print statements as text. Each statement class has a syntax template, which gives the form of the text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from hostir.ir.op import Codec, Phase, Statement, Value, codecs_of, defaults_of
from hostir.ir.source import HostIRError
from hostir.ir.types import Mesh, TensorType

VERSION = 1  # the version of the text
INDENT = "  "


@dataclass(frozen=True)
class FieldPart:
    """A field in a syntax template."""

    name: str


@dataclass(frozen=True)
class OptionalPart:
    """An optional part of a syntax template.

    The printer leaves the part out if the first field in it has its default value.
    """

    parts: tuple[SyntaxPart, ...]

    @property
    def field(self) -> str:
        return next(p.name for p in self.parts if isinstance(p, FieldPart))


SyntaxPart = str | FieldPart | OptionalPart


@cache
def template(syntax: str) -> tuple[SyntaxPart, ...]:
    """Split a syntax template into literal texts, fields and optional parts."""
    parts: list[SyntaxPart] = []
    for piece in re.split(r"(<\?.*?\?>|\{\w+\})", syntax):
        if piece.startswith("<?"):
            parts.append(OptionalPart(template(piece[2:-2])))
        elif piece.startswith("{"):
            parts.append(FieldPart(piece[1:-1]))
        elif piece:
            parts.append(piece)
    return tuple(parts)


class Printer:
    """Prints the statements of one program in the syntax of its phase.

    The program's first mesh is the default mesh. A type on the default mesh is printed without the name of the mesh.
    """

    def __init__(self, phase: Phase, meshes: tuple[Mesh, ...], *, notes: bool = False) -> None:
        self.phase = phase
        self.default: Mesh | None = meshes[0] if meshes else None
        self.notes = notes

    def type(self, type: TensorType) -> str:
        partial = f" partial({', '.join(type.partial)})" if type.partial else ""
        text = str(TensorType(type.dtype, type.axes)) + partial
        if type.mesh is None:
            return text + " auto"
        return text if type.mesh == self.default else f"{text} on @{type.mesh.name}"

    def binder(self, value: Value, typed: bool) -> str:
        if not typed or not isinstance(value.type, TensorType):
            return str(value)
        return f"{value}: {self.type(value.type)}"

    def block(self, body: Iterable[Statement], depth: int) -> list[str]:
        return [line for s in body for line in self.lines(s, depth)]

    def lines(self, s: Statement, depth: int) -> list[str]:
        pad = INDENT * depth
        blocks = [getattr(s, n) for n, c in codecs_of(type(s)).items() if c is Codec.BLOCK]
        note = f"  // {s.note}" if self.notes and s.note else ""
        text = self.fill(template(s.form(self.phase)), s)
        if not blocks:
            return [pad + text + note]
        inner = blocks[0]
        if len(inner) <= 2 and not any(x.defines(self.phase) or x.bodies for x in inner) and not self.notes_in(inner):
            short = "   ".join(self.lines(x, 0)[0] for x in inner)
            return [f"{pad}{text} {{ {short} }}{note}" if short else f"{pad}{text} {{ }}{note}"]
        return [f"{pad}{text} {{{note}", *self.block(inner, depth + 1), pad + "}"]

    def notes_in(self, body: Iterable[Statement]) -> bool:
        return self.notes and any(s.note for s in body)

    def fill(self, parts: tuple[SyntaxPart, ...], s: Statement) -> str:
        codecs, defaults, text = codecs_of(type(s)), defaults_of(type(s)), ""
        for i, part in enumerate(parts):
            if isinstance(part, str):
                text += part
            elif isinstance(part, OptionalPart):
                if getattr(s, part.field) != defaults[part.field]:
                    text += self.fill(part.parts, s)
            else:
                text += self.show(codecs[part.name], part, s, leads=i == 0)
        return text.rstrip()

    def show(self, codec: Codec, part: FieldPart, s: Statement, leads: bool) -> str:
        got = getattr(s, part.name)
        if codec is Codec.BLOCK:
            return ""
        if isinstance(got, Value) and leads:
            return self.binder(got, typed=declares_type(type(s), self.phase) or _other_than_inferred(s, got))
        if codec is Codec.INTS:
            return f"({', '.join(map(str, got))})"
        return str(got)


def _other_than_inferred(s: Statement, defined: Value) -> bool:
    """Return True if the type of the defined value must be printed, because the parser would infer another type."""
    try:
        return defined.type != s.infer()
    except HostIRError:
        return True


def declares_type(cls: type[Statement], phase: Phase) -> bool:
    """Return True if the text always declares the type of the value that the statement defines.

    It does so in a fusion, and for statements with operands that do not determine the type.
    """
    return phase is Phase.FUSION or cls.infer is Statement.infer
