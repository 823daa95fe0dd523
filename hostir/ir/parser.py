"""Turn the parse tree of a text into a program: resolve names, and infer the types that the text leaves out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lark import Token, Tree

from hostir.ir.grammar import grammar, tree_of
from hostir.ir.op import VALUE_CODECS, Bin, Codec, Expr, Lit, Phase, Ref, Statement, Value, codecs_of, defaults_of
from hostir.ir.program import Program, check_hosts
from hostir.ir.sizes import DIGITS, Size
from hostir.ir.source import WIDEST, HostIRError, Span, did_you_mean, error
from hostir.ir.text import VERSION, OptionalPart, SyntaxPart, template
from hostir.ir.types import DTYPES, FLAG, STREAM, Axis, Factor, Kind, Mesh, TensorType, Type

MAX_DEPTH = 64  # the most nested blocks, and the most operators in one index expression


def read(text: str, file: str) -> Program:
    """Parse a text into a program with resolved names."""
    return TreeReader(text, file).program(tree_of(text, file))


def _rows(grid: Tree[Token]) -> list[Tree[Token]]:
    """Return the innermost rows of a mesh."""
    return [grid] if grid.data == "row" else [row for part in _parts(grid) for row in _rows(part)]


def _shape(grid: Tree[Token]) -> tuple[int, ...] | None:
    """Return the extents of a mesh, outermost first. Return None if rows have different lengths."""
    parts = _parts(grid)
    inner = {()} if grid.data == "row" else {_shape(part) for part in parts}
    shape = inner.pop()
    return None if inner or shape is None else (len(parts), *shape)


def _parts(tree: Tree[Token]) -> list[Any]:
    """Return the children of a tree. Their type is Any, because the grammar decides if a child is a tree or a token."""
    return tree.children


def _fields(parts: tuple[SyntaxPart, ...]) -> list[str]:
    """Return the names of the fields in a template, in order."""
    nested = (_fields(p.parts) if isinstance(p, OptionalPart) else [p.name] for p in parts if not isinstance(p, str))
    return [name for names in nested for name in names]


def _spelled(form: str) -> str:
    """Return a syntax template as text for messages. Optional parts are left out, and a field is shown as `%field`."""
    return re.sub(r"\{(\w+)\}", r"%\1", re.sub(r"<\?.*?\?>", "", form))


class Source:
    """The text of a program. Its methods turn tokens of the text into spans, integers, sizes and errors."""

    def __init__(self, text: str, file: str) -> None:
        self.lines = text.split("\n")
        self.file = file

    def span(self, token: Token) -> Span:
        line = token.line or 1
        return Span(self.file, line, token.column or 0, min(len(token), WIDEST), self.lines[line - 1])

    def span_of(self, tree: Tree[Token]) -> Span:
        """Return the span of a statement, or of the first line of a loop."""
        line, column, text = tree.meta.line, tree.meta.column, self.lines[tree.meta.line - 1]
        end = tree.meta.end_column if tree.meta.end_line == line else len(text.rstrip()) + 1
        return Span(self.file, line, column, min(end - column, WIDEST), text)

    def fail(self, message: str, token: Token, *, expected: str = "", hint: str = "") -> HostIRError:
        """Return an error that points at a word."""
        return error(message, self.span(token), expected=expected, hint=hint)

    def size(self, tree: Tree[Token]) -> Size:
        return Size.of("".join(_parts(tree)), self.span(_parts(tree)[0]))

    def integer(self, token: Token) -> int:
        if len(token) > DIGITS:
            message, expected = f"an integer of {len(token)} digits", f"an integer of at most {DIGITS} digits"
            raise self.fail(message, token, expected=expected)
        return int(token)


class TypeReader:
    """Reads one tensor type.

    Fields:
        text: the text of the program.
        meshes: the meshes that are defined so far, by name.
        phase: the phase of the program.
        mesh: the mesh of the type. It is the first mesh until the type names another mesh.
        marks: the mesh axes that the type has used so far. A type may use a mesh axis only once.
    """

    def __init__(self, text: Source, meshes: Mapping[str, Mesh], phase: Phase) -> None:
        self.text, self.meshes, self.phase = text, meshes, phase
        self.mesh: Mesh | None = next(iter(meshes.values()))
        self.marks: list[str] = []

    def read(self, tree: Tree[Token]) -> TensorType:
        name, *axes, partial, place = _parts(tree)
        known = DTYPES if self.phase is Phase.FUSION else DTYPES | {FLAG.name: FLAG}
        if str(name) not in known:
            expected, hint = f"one of: {', '.join(known)}", did_you_mean(name, known)
            raise self.text.fail(f"unknown dtype '{name}'", name, expected=expected, hint=hint)
        if place:
            token = _parts(place)[0]
            self.mesh = None if token == "auto" else self.meshes.get(token[1:])
            if self.mesh is None and token != "auto":
                meshes = [f"@{name}" for name in self.meshes]
                expected, hint = f"one of: {', '.join(meshes)}", did_you_mean(token, meshes)
                raise self.text.fail(f"unknown mesh {token}", token, expected=expected, hint=hint)
            if self.mesh is None and self.phase is Phase.HOST:
                hint = "in a host program every tensor lies on a mesh"
                raise self.text.fail("'auto' belongs to a fusion", token, hint=hint)
        read = [self.axis(a) for a in axes if a is not None]
        over = [self.mark(t) for t in (_parts(partial) if partial else ())]
        return TensorType(known[str(name)], tuple(read), self.mesh, tuple(sorted(over)))

    def axis(self, tree: Tree[Token]) -> Axis:
        factors, mesh = [], self.mesh
        for factor in _parts(tree):
            size, at = _parts(factor)
            extent = self.text.size(size)
            on = None if at is None else STREAM if at == "@stream" else self.mark(at)
            if on == STREAM and self.phase is Phase.HOST:
                hint = "in a host program a loop takes its place"
                raise self.text.fail("a Stream axis belongs to a fusion", at, hint=hint)
            if on and mesh and on in mesh.axes and not extent.divisible_by(mesh.size(on)):
                ranks = mesh.size(on)
                message, expected = f"{ranks} ranks do not divide {extent}", f"an extent that {ranks} divides"
                raise self.text.fail(message, at, expected=expected)
            factors.append(Factor(extent, on))
        return Axis(tuple(factors))

    def mark(self, token: Token) -> str:
        name, mesh = token.lstrip("@"), self.mesh
        if mesh is None:
            message = f"an 'auto' tensor has no mesh yet, so it cannot lie on {name}"
            raise self.text.fail(message, token, hint="remove 'auto', or the mark")
        if name not in mesh.axes:
            expected, hint = f"one of: {', '.join(mesh.axes)}", did_you_mean(name, mesh.axes)
            raise self.text.fail(f"the mesh has no axis '{name}'", token, expected=expected, hint=hint)
        if name in self.marks:
            raise self.text.fail(f"two axes on {name}", token, expected="each mesh axis at most once in a type")
        self.marks.append(name)
        return name


class TreeReader:
    """Turns a parse tree into a program: resolves names in their scopes, and infers types that the text leaves out."""

    def __init__(self, text: str, file: str) -> None:
        self.text = Source(text, file)
        self.meshes: dict[str, Mesh] = {}
        self.scope: dict[str, Value] = {}
        self.phase = Phase.HOST
        self.depth = 0  # nesting depth of the current block

    def program(self, tree: Tree[Token]) -> Program:
        version, *meshes, head = _parts(tree)
        if self.text.integer(version) != VERSION:
            hint = "another release of hostir wrote this text: read it with that one, or lower the fusion again"
            raise self.text.fail(f"text version {version}", version, expected=f"hostir {VERSION}", hint=hint)
        for mesh in meshes:
            self.mesh(mesh)
        phase, name, params, outputs, streams, block = _parts(head)
        if not self.meshes:
            hint = "write a line such as 'mesh @mesh [didx] = 0 1 2 3' above"
            raise self.text.fail(f"{name} has no mesh", name, hint=hint)
        check_hosts(self.meshes.values(), self.text.span(_parts(meshes[0])[0]))
        self.phase = Phase(str(phase))
        pool = self.text.integer(streams) if streams else 0
        inputs = tuple(self.parameter(p) for p in (_parts(params) if params else ()))
        body = self.block(block)
        outs = tuple(self.value(t) for t in (_parts(outputs) if outputs else ()))
        for token, out in zip(_parts(outputs) if outputs else (), outs, strict=True):
            if not isinstance(out.type, TensorType):
                raise self.text.fail(f"the output {out} is a {out.type}", token, expected="a tensor")
        return Program(str(name)[1:], self.phase, tuple(self.meshes.values()), inputs, outs, body, pool)

    def mesh(self, tree: Tree[Token]) -> None:
        name, *names, grid, stated = _parts(tree)
        span, axes = self.text.span(name), tuple(map(str, names))
        rows, shape = _rows(grid), _shape(grid)
        devices = tuple(self.text.integer(d) for row in rows for d in _parts(row))
        if shape is None or len(axes) != len(shape):
            named = f"{len(axes)} named {'axis' if len(axes) == 1 else 'axes'}"
            lengths = ", ".join(str(len(_parts(row))) for row in rows)
            grid_text = f"rows of {lengths}" if grid.data == "grid" else "one line of"
            expected = "[x] = 0 1 2 3, or [y, x] = (0 1) (2 3), or [z, y, x] = ((0 1) (2 3)) ((4 5) (6 7))"
            raise error(f"mesh {name} has {named}, and {grid_text} devices", span, expected=expected)
        if len(set(devices)) != len(devices) or len(set(axes)) != len(axes):
            raise error(f"mesh {name} names a device or an axis twice", span, expected="each device and each axis once")
        if STREAM in axes:
            raise error(f"a mesh axis cannot be called '{STREAM}'", span, hint="it marks the slices of a pipeline")
        if name[1:] in self.meshes:
            raise error(f"mesh {name} is defined twice", span, hint="give it another name")
        self.meshes[name[1:]] = Mesh(name[1:], axes, shape, devices, self.hosts(stated))

    def hosts(self, stated: Token | None) -> int:
        if stated is not None and self.text.integer(stated) == 0:
            raise self.text.fail("0 hosts", stated, expected="at least 1")
        return 0 if stated is None else self.text.integer(stated)

    def parameter(self, tree: Tree[Token]) -> Value:
        token, type = _parts(tree)
        if type is None:
            raise self.text.fail(f"the input {token} has no type", token, expected=f"{token}: bf16[...]")
        return self.define(token, TypeReader(self.text, self.meshes, self.phase).read(type))

    def define(self, token: Token, type: Type) -> Value:
        name = str(token)[1:]
        if name in self.scope:
            notes = ((self.scope[name].span, "first defined here"),)
            raise error(f"{token} is defined twice", self.text.span(token), notes=notes, hint="give it another name")
        self.scope[name] = Value(name, type, self.text.span(token))
        return self.scope[name]

    def value(self, token: Token) -> Value:
        value = self.scope.get(token[1:])
        if value is None:
            hint = did_you_mean(token, [f"%{name}" for name in self.scope])
            raise self.text.fail(f"{token} is not defined here", token, hint=hint)
        return value

    def block(self, tree: Tree[Token]) -> tuple[Statement, ...]:
        self.depth += 1
        body = tuple(self.statement(s) for s in _parts(tree))
        self.depth -= 1
        return body

    def statement(self, tree: Tree[Token]) -> Statement:
        rules = grammar()[1]
        cls, phase = rules[tree.data]
        span = self.text.span_of(tree)
        if self.phase not in cls.phases:
            message = f"'{cls.keyword()}' does not belong to a {self.phase.value}"
            raise error(message, span, expected=f"a statement of a {self.phase.value}")
        if cls.form(self.phase) != cls.form(phase):
            message = f"'{cls.keyword()}' has another form in a {self.phase.value}"
            raise error(message, span, expected=f"'{_spelled(cls.form(self.phase))}'")
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
                # `bound` replaces this temporary type after it has inferred the type from the other fields.
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
        type: Type | None = TypeReader(self.text, self.meshes, self.phase).read(declared) if declared else None
        if name == "handle":
            if declared:
                raise self.text.fail(f"{token} is a handle, not a tensor", token, expected=f"{token} without a type")
            type = Kind.HANDLE
        if type is None:
            type = cls(**operands, span=span).infer()
        if type is None:
            raise self.text.fail(f"{token} needs its type", token, expected=f"{token}: bf16[...] = ...")
        operands[name] = self.define(token, type)
        return cls(**operands, span=span)

    def field(self, codec: Codec, child: Any) -> Any:
        if codec in VALUE_CODECS:
            return self.value(child)
        if codec in (Codec.STREAM, Codec.INDEX):
            return self.index(child)
        if codec is Codec.SIZE:
            return self.text.size(child)
        if codec is Codec.INT:
            return self.text.integer(child)
        if codec is Codec.INTS:
            return tuple(self.text.integer(t) for t in _parts(child) if t is not None)
        if codec is Codec.BLOCK:
            return self.block(child)
        if codec is Codec.NUMBER:
            return float(child)
        return str(child)

    def index(self, tree: Tree[Token] | Token) -> Expr:
        if isinstance(tree, Tree):
            operators = sum(len(part.children) // 2 for part in tree.iter_subtrees())
            if operators > MAX_DEPTH:
                span = self.text.span_of(tree)
                raise error(f"an index expression with {operators} operators", span, expected=f"at most {MAX_DEPTH}")
        return self.expr(tree)

    def expr(self, tree: Tree[Token] | Token) -> Expr:
        if isinstance(tree, Token):
            if tree.type == "INT":
                return Lit(self.text.integer(tree))
            value = self.value(tree)
            if isinstance(value.type, TensorType) or value.type is Kind.HANDLE:
                raise self.text.fail(f"{tree} is a {value.type}", tree, expected="a loop index or a stream")
            return Ref(value)
        left, *rest = _parts(tree)
        result = self.expr(left)
        for op, right in zip(rest[::2], rest[1::2], strict=True):
            result = Bin(str(op), result, self.expr(right))
        return result
