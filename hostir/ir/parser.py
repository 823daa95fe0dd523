"""Parse programs: a Lark grammar generated from the statements; names are resolved and types inferred."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from hostir.ir.op import (
    REGISTRY,
    VALUE_CODECS,
    Bin,
    Codec,
    Expr,
    FieldPart,
    Lit,
    OptionalPart,
    Phase,
    Ref,
    Statement,
    SyntaxPart,
    Value,
    codecs_of,
    defaults_of,
    template,
)
from hostir.ir.program import VERSION, Program
from hostir.ir.sizes import DIGITS, Size
from hostir.ir.source import WIDEST, HostIRError, Span, did_you_mean, error
from hostir.ir.types import DTYPES, FLAG, STREAM, Axis, Factor, Kind, Mesh, TensorType, Type

# The grammar ----------------------------------------------------------------------------------------------------------
# The Lark grammar, generated from the registry; and the messages for texts that do not follow it.

BASE = r"""
start: _HOSTIR INT mesh* head
mesh: _MESH AT "[" NAME ("," NAME)* "]" "=" (row | grid)
grid: ("(" row ")")+
row: INT+
head: PHASE AT "(" [params] ")" "->" "(" [names] ")" [_STREAMS INT] block
params: binder ("," binder)*
names: VALUE ("," VALUE)*
binder: VALUE [":" type]
type: NAME "[" [axis ("," axis)*] "]" [partial] [place]
partial: _PARTIAL "(" NAME ("," NAME)* ")"
place: AUTO | _ON AT
axis: factor | "(" factor+ ")"
factor: size [AT]
size: (INT | NAME) ((STAR | SLASH) (INT | NAME))*
?expr: product ((PLUS | MINUS) product)*
?product: atom ((STAR | SLASH | PERCENT) atom)*
?atom: INT | VALUE | "(" expr ")"
ints: "(" [INT ("," INT)*] ")"
block: "{" _statement* "}"

VALUE: /%[A-Za-z_]\w*/
AT: /@[A-Za-z_]\w*/
NAME: /[A-Za-z_]\w*/
INT: /\d+/
NUMBER: /-?\d+(\.\d+)?(e[+-]?\d+)?/
PHASE.3: /(fusion|program)(?![\w.])/
AUTO.3: /auto(?![\w.])/
STAR: "*"
SLASH: "/"
PERCENT: "%"
PLUS: "+"
MINUS: "-"
COMMENT.9: /\/\/[^\n]*/
%ignore COMMENT
%ignore /\s+/
"""

FRAGMENT = {
    Codec.STREAM: "expr",
    Codec.INDEX: "expr",
    Codec.SIZE: "size",
    Codec.INT: "INT",
    Codec.INTS: "ints",
    Codec.NUMBER: "NUMBER",
    Codec.NAME: "NAME",
    Codec.BLOCK: "block",
} | dict.fromkeys(VALUE_CODECS, "VALUE")


@cache
def grammar() -> tuple[str, dict[str, tuple[type[Statement], Phase]]]:
    """Return the grammar's text, and the statement and phase behind each of its rules."""
    words = {"hostir", "mesh", "streams", "partial", "on"}
    rules: dict[str, tuple[type[Statement], Phase]] = {}
    lines: list[str] = []

    def piece(part: SyntaxPart, cls: type[Statement], leads: bool) -> str:
        if isinstance(part, FieldPart):
            codec = codecs_of(cls)[part.name]
            return "binder" if leads and codec in (Codec.DEFINE, Codec.WRITE) else FRAGMENT[codec]
        if isinstance(part, OptionalPart):
            return "[" + " ".join(piece(p, cls, False) for p in part.parts) + "]"
        tokens = re.findall(r"\w+|->|\.\.|[^\s\w]", part)
        words.update(t for t in tokens if t.isidentifier())
        return " ".join(f"_{t.upper()}" if t.isidentifier() else f'"{t}"' for t in tokens)

    for keyword, cls in REGISTRY.items():
        phase_of = {cls.form(phase): phase for phase in Phase if phase in cls.phases}  # equal forms make one rule
        for form, phase in phase_of.items():
            rule = f"{keyword}_{phase.name.lower()}"
            rules[rule] = (cls, phase)
            lines.append(f"{rule}: " + " ".join(piece(p, cls, i == 0) for i, p in enumerate(template(form))))
    terminals = [f"_{w.upper()}.2: /{w}(?![\\w.])/" for w in sorted(words)]
    return "\n".join([BASE, "_statement: " + " | ".join(rules), *lines, *terminals]), rules


@cache
def _lark() -> Lark:
    return Lark(grammar()[0], parser="lalr", maybe_placeholders=True, propagate_positions=True)


def tree_of(text: str, file: str) -> Tree[Token]:
    """Return the parse tree of a text. Raise HostIRError at the first unexpected word."""
    try:
        return _lark().parse(text)
    except UnexpectedInput as unexpected:
        raise _syntax_error(unexpected, text, file) from None


def _syntax_error(unexpected: UnexpectedInput, text: str, file: str) -> HostIRError:
    lines = text.split("\n")
    expects = _expected(unexpected)
    if isinstance(unexpected, UnexpectedToken) and unexpected.token.type == "$END":
        last = len(text.rstrip().split("\n"))
        span = Span(file, last, len(lines[last - 1].rstrip()) + 1, 1, lines[last - 1])
        return error("the text ends too early", span, expected=_one_of(expects))
    line, column = unexpected.line, unexpected.column
    source = lines[line - 1]
    word = (re.match(r"[%@]?\w+|\S", source[column - 1 :]) or [source[column - 1 : column]])[0]
    span = Span(file, line, column, len(word), source)
    starts = {f"_{k.upper()}" for k in REGISTRY} & set(expects)
    if len(starts) > 3:
        if word in REGISTRY:
            return error(f"'{word}' does not stand alone: it defines a value", span, hint=f"write '%x = {word} ...'")
        hint = did_you_mean(word, REGISTRY)
        return error(f"unknown statement '{word}'", span, expected="a statement or '}'", hint=hint)
    near = did_you_mean(word, [_spell(e).strip("'") for e in expects])
    return error(f"unexpected '{word}'", span, expected=_one_of(expects), hint=near)


def _expected(unexpected: UnexpectedInput) -> list[str]:
    """Return the terminals that the grammar allows at the place of the error."""
    if isinstance(unexpected, UnexpectedToken):
        return sorted(unexpected.accepts or unexpected.expected)
    return sorted(unexpected.allowed or ()) if isinstance(unexpected, UnexpectedCharacters) else []


def _spell(terminal: str) -> str:
    """Return the name of a terminal in messages."""
    named = {
        "VALUE": "a %name",
        "AT": "a @name",
        "NAME": "a name",
        "INT": "an integer",
        "PHASE": "'fusion' or 'program'",
    }
    if terminal in named:
        return named[terminal]
    pattern = next((t.pattern.value for t in _lark().terminals if t.name == terminal), terminal)
    return "'" + re.sub(r"\(\?!.*|\\", "", pattern) + "'"


def _one_of(terminals: list[str]) -> str:
    spelled = [_spell(t) for t in terminals]
    return spelled[0] if len(spelled) == 1 else "one of: " + ", ".join(spelled) if spelled else ""


# From a parse tree to a program ---------------------------------------------------------------------------------------
# Turn the parse tree of a text into a program: resolve names and infer the types that the text leaves out.

MAX_DEPTH = 64  # the most nested blocks, and the most operators in one index expression


def read(text: str, file: str) -> Program:
    """Parse a text into a program with resolved names."""
    return TreeReader(text, file).program(tree_of(text, file))


def _parts(tree: Tree[Token]) -> list[Any]:
    """Return a tree's children. Lark's types do not tell tokens, trees and None apart; the grammar does."""
    return tree.children


def _fields(parts: tuple[SyntaxPart, ...]) -> list[str]:
    """Return the fields of a template, in order."""
    nested = (_fields(p.parts) if isinstance(p, OptionalPart) else [p.name] for p in parts if not isinstance(p, str))
    return [name for names in nested for name in names]


def _spelled(form: str) -> str:
    """Return a template as shown in messages."""
    return re.sub(r"\{(\w+)\}", r"%\1", re.sub(r"<\?.*?\?>", "", form))


class TreeReader:
    """Turns a parse tree into a program: resolves names in their scopes and infers the types the text leaves out."""

    def __init__(self, text: str, file: str) -> None:
        self.lines = text.split("\n")
        self.file = file
        self.meshes: dict[str, Mesh] = {}
        self.scope: dict[str, Value] = {}
        self.phase = Phase.HOST
        self.depth = 0  # nesting depth of the current block

    def span(self, token: Token) -> Span:
        line = token.line or 1
        return Span(self.file, line, token.column or 0, min(len(token), WIDEST), self.lines[line - 1])

    def span_of(self, tree: Tree[Token]) -> Span:
        """Return the span of a statement, or of the first line of a loop."""
        line, column, text = tree.meta.line, tree.meta.column, self.lines[tree.meta.line - 1]
        end = tree.meta.end_column if tree.meta.end_line == line else len(text.rstrip()) + 1
        return Span(self.file, line, column, min(end - column, WIDEST), text)

    def program(self, tree: Tree[Token]) -> Program:
        version, *meshes, head = _parts(tree)
        if self.integer(version) != VERSION:
            raise error(f"text version {version}", self.span(version), expected=f"hostir {VERSION}")
        for mesh in meshes:
            self.mesh(mesh)
        phase, name, params, outputs, streams, block = _parts(head)
        if not self.meshes:
            raise error(
                f"{name} has no mesh", self.span(name), hint="write a line such as 'mesh @mesh [didx] = 0 1 2 3' above"
            )
        self.phase = Phase(str(phase))
        pool = self.integer(streams) if streams else 0
        inputs = tuple(self.parameter(p) for p in (_parts(params) if params else ()))
        body = self.block(block)
        outs = tuple(self.value(t) for t in (_parts(outputs) if outputs else ()))
        for token, out in zip(_parts(outputs) if outputs else (), outs, strict=True):
            if not isinstance(out.type, TensorType):
                raise error(f"the output {out} is a {out.type}", self.span(token), expected="a tensor")
        return Program(str(name)[1:], self.phase, tuple(self.meshes.values()), inputs, outs, body, pool)

    def mesh(self, tree: Tree[Token]) -> None:
        name, *names, grid = _parts(tree)
        span, axes = self.span(name), tuple(map(str, names))
        rows = [[self.integer(d) for d in _parts(row)] for row in (_parts(grid) if grid.data == "grid" else [grid])]
        devices = tuple(d for row in rows for d in row)
        shape = (len(rows), len(rows[0])) if grid.data == "grid" else (len(devices),)
        if len(axes) != len(shape) or len({len(row) for row in rows}) != 1:
            named = f"{len(axes)} named {'axis' if len(axes) == 1 else 'axes'}"
            grid_text = (
                f"rows of {', '.join(str(len(row)) for row in rows)} devices"
                if len(shape) == 2
                else "one line of devices"
            )
            raise error(
                f"mesh {name} has {named}, and {grid_text}", span, expected="[x] = 0 1 2 3, or [y, x] = (0 1) (2 3)"
            )
        if len(set(devices)) != len(devices) or len(set(axes)) != len(axes):
            raise error(f"mesh {name} names a device or an axis twice", span, expected="each device and each axis once")
        if STREAM in axes:
            raise error(f"a mesh axis cannot be called '{STREAM}'", span, hint="it marks the slices of a pipeline")
        if name[1:] in self.meshes:
            raise error(f"mesh {name} is defined twice", span, hint="give it another name")
        self.meshes[name[1:]] = Mesh(name[1:], axes, shape, devices)

    def parameter(self, tree: Tree[Token]) -> Value:
        token, type = _parts(tree)
        if type is None:
            raise error(f"the input {token} has no type", self.span(token), expected=f"{token}: bf16[...]")
        return self.define(token, self.tensor_type(type))

    def define(self, token: Token, type: Type) -> Value:
        name = str(token)[1:]
        if name in self.scope:
            notes = ((self.scope[name].span, "first defined here"),)
            raise error(f"{token} is defined twice", self.span(token), notes=notes, hint="give it another name")
        self.scope[name] = Value(name, type, self.span(token))
        return self.scope[name]

    def value(self, token: Token) -> Value:
        value = self.scope.get(token[1:])
        if value is None:
            raise error(
                f"{token} is not defined here",
                self.span(token),
                hint=did_you_mean(token, [f"%{n}" for n in self.scope]),
            )
        return value

    def tensor_type(self, tree: Tree[Token]) -> TensorType:
        name, *axes, partial, place = _parts(tree)
        known = DTYPES if self.phase is Phase.FUSION else DTYPES | {FLAG.name: FLAG}
        if str(name) not in known:
            raise error(
                f"unknown dtype '{name}'",
                self.span(name),
                expected=f"one of: {', '.join(known)}",
                hint=did_you_mean(name, known),
            )
        mesh: Mesh | None = next(iter(self.meshes.values()))
        if place:
            token = _parts(place)[0]
            mesh = None if token == "auto" else self.meshes.get(token[1:])
            if mesh is None and token != "auto":
                raise error(
                    f"unknown mesh {token}",
                    self.span(token),
                    expected=f"one of: {', '.join(f'@{n}' for n in self.meshes)}",
                    hint=did_you_mean(token, [f"@{n}" for n in self.meshes]),
                )
            if mesh is None and self.phase is Phase.HOST:
                raise error(
                    "'auto' belongs to a fusion", self.span(token), hint="in a host program every tensor lies on a mesh"
                )
        marks: list[str] = []
        read = [self.axis(a, mesh, marks) for a in axes if a is not None]
        over = [self.mark(t, mesh, marks) for t in (_parts(partial) if partial else ())]
        return TensorType(known[str(name)], tuple(read), mesh, tuple(sorted(over)))

    def axis(self, tree: Tree[Token], mesh: Mesh | None, marks: list[str]) -> Axis:
        factors = []
        for factor in _parts(tree):
            size, at = _parts(factor)
            extent = self.size(size)
            on = None if at is None else STREAM if at == "@stream" else self.mark(at, mesh, marks)
            if on == STREAM and self.phase is Phase.HOST:
                raise error(
                    "a Stream axis belongs to a fusion", self.span(at), hint="in a host program a loop takes its place"
                )
            if on and mesh and on in mesh.axes and not extent.divisible_by(mesh.size(on)):
                raise error(
                    f"{mesh.size(on)} ranks do not divide {extent}",
                    self.span(at),
                    expected=f"an extent that {mesh.size(on)} divides",
                )
            factors.append(Factor(extent, on))
        return Axis(tuple(factors))

    def mark(self, token: Token, mesh: Mesh | None, marks: list[str]) -> str:
        name = token.lstrip("@")
        if mesh is None:
            raise error(
                f"an 'auto' tensor has no mesh yet, so it cannot lie on {name}",
                self.span(token),
                hint="remove 'auto', or the mark",
            )
        known = mesh.axes
        if name not in known:
            raise error(
                f"the mesh has no axis '{name}'",
                self.span(token),
                expected=f"one of: {', '.join(known)}",
                hint=did_you_mean(name, known),
            )
        if name in marks:
            raise error(f"two axes on {name}", self.span(token), expected="each mesh axis at most once in a type")
        marks.append(name)
        return name

    def size(self, tree: Tree[Token]) -> Size:
        first = _parts(tree)[0]
        return Size.of("".join(_parts(tree)), self.span(first))

    def integer(self, token: Token) -> int:
        if len(token) > DIGITS:
            raise error(
                f"an integer of {len(token)} digits",
                self.span(token),
                expected=f"an integer of at most {DIGITS} digits",
            )
        return int(token)

    def block(self, tree: Tree[Token]) -> tuple[Statement, ...]:
        self.depth += 1
        body = tuple(self.statement(s) for s in _parts(tree))
        self.depth -= 1
        return body

    def statement(self, tree: Tree[Token]) -> Statement:
        rules = grammar()[1]
        cls, phase = rules[tree.data]
        span = self.span_of(tree)
        if self.phase not in cls.phases:
            raise error(
                f"'{cls.keyword()}' does not belong to a {self.phase.value}",
                span,
                expected=f"a statement of a {self.phase.value}",
            )
        if cls.form(self.phase) != cls.form(phase):
            raise error(
                f"'{cls.keyword()}' has another form in a {self.phase.value}",
                span,
                expected=f"'{_spelled(cls.form(self.phase))}'",
            )
        codecs, defaults = codecs_of(cls), defaults_of(cls)
        operands: dict[str, Any] = {}
        binder: tuple[str, Tree[Token]] | None = None
        block = any(c is Codec.BLOCK for c in codecs.values())
        if block and self.depth == MAX_DEPTH:
            raise error(f"blocks {MAX_DEPTH + 1} deep", span, expected=f"at most {MAX_DEPTH} within each other")
        outer = dict(self.scope) if block else self.scope
        for name, child in zip(_fields(template(cls.form(phase))), _parts(tree), strict=True):
            if isinstance(child, Tree) and child.data == "binder":
                binder = (name, child)
                # Replaced once its type is inferred from the other fields.
                operands[name] = Value(_parts(child)[0][1:], Kind.INDEX)
            elif codecs[name] is Codec.DEFINE:
                operands[name] = self.define(child, Kind.INDEX)
            else:
                operands[name] = defaults[name] if child is None else self.field(codecs[name], child)
        if block:
            self.scope = outer
        if binder is None:
            return cls(**operands, span=span)
        return self.bound(cls, operands, *binder, span)

    def bound(
        self, cls: type[Statement], operands: dict[str, Any], name: str, tree: Tree[Token], span: Span
    ) -> Statement:
        token, declared = _parts(tree)
        type: Type | None = self.tensor_type(declared) if declared else None
        if name == "handle":
            if declared:
                raise error(f"{token} is a handle, not a tensor", self.span(token), expected=f"{token} without a type")
            type = Kind.HANDLE
        if type is None:
            type = cls(**operands, span=span).infer()
        if type is None:
            raise error(f"{token} needs its type", self.span(token), expected=f"{token}: bf16[...] = ...")
        operands[name] = self.define(token, type)
        return cls(**operands, span=span)

    def field(self, codec: Codec, child: Any) -> Any:
        if codec in VALUE_CODECS:
            return self.value(child)
        if codec in (Codec.STREAM, Codec.INDEX):
            return self.index(child)
        if codec is Codec.SIZE:
            return self.size(child)
        if codec is Codec.INT:
            return self.integer(child)
        if codec is Codec.INTS:
            return tuple(self.integer(t) for t in _parts(child) if t is not None)
        if codec is Codec.BLOCK:
            return self.block(child)
        if codec is Codec.NUMBER:
            return float(child)
        return str(child)

    def index(self, tree: Tree[Token] | Token) -> Expr:
        if isinstance(tree, Tree):
            operators = sum(len(part.children) // 2 for part in tree.iter_subtrees())
            if operators > MAX_DEPTH:
                span = self.span_of(tree)
                raise error(f"an index expression with {operators} operators", span, expected=f"at most {MAX_DEPTH}")
        return self.expr(tree)

    def expr(self, tree: Tree[Token] | Token) -> Expr:
        if isinstance(tree, Token):
            if tree.type == "INT":
                return Lit(self.integer(tree))
            value = self.value(tree)
            if isinstance(value.type, TensorType) or value.type is Kind.HANDLE:
                raise error(f"{tree} is a {value.type}", self.span(tree), expected="a loop index or a stream")
            return Ref(value)
        left, *rest = _parts(tree)
        result = self.expr(left)
        for op, right in zip(rest[::2], rest[1::2], strict=True):
            result = Bin(str(op), result, self.expr(right))
        return result
