"""Check structure: names, scopes, phases, types, and the buffers behind names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from math import isfinite, prod

from hostir.ir.op import (
    VALUE_CODECS,
    Bin,
    Codec,
    Expr,
    Lit,
    Phase,
    Ref,
    Statement,
    Value,
    codecs_of,
    defaults_of,
    expr_values,
)
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.source import Diagnostic, HostIRError, described, did_you_mean
from hostir.ir.types import DTYPES, FLAG, FP8, STREAM, Axis, Factor, Kind, Mesh, TensorType

# Field types of programs ----------------------------------------------------------------------------------------------
# Field types of a program. The parser guarantees them; a program built in Python may violate them.

KNOWN = "_well_formed"


def malformed(program: Program) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each field of the program and its statements that holds a value of the wrong type."""
    parts: dict[str, tuple[bool, str]] = {
        "name": (isinstance(program.name, str), "a name"),
        "phase": (isinstance(program.phase, Phase), "a Phase"),
        "meshes": (bool(program.meshes) and _all(program.meshes, _is_mesh), "meshes, at least one"),
        "inputs": (_all(program.inputs, _is_value), "values"),
        "outputs": (_all(program.outputs, _is_value), "values"),
        "body": (isinstance(program.body, tuple), "statements"),
        "streams": (_is_int(program.streams), "an integer from 0"),
        "aliases": (isinstance(program.aliases, tuple), "pairs of names"),
    }
    for name, (holds, expected) in parts.items():
        if not holds:
            yield Diagnostic(f"field '{name}' of the program is {described(getattr(program, name))}", expected=expected)
            return
    yield from _block(program.body)


def _block(body: tuple[object, ...]) -> Iterator[Diagnostic]:
    for s in body:
        if not isinstance(s, Statement):  # isinstance, as a program built in Python may hold anything
            yield Diagnostic(f"{described(s)} stands among the statements", expected="statements")
            continue
        for name, codec in codecs_of(type(s)).items():
            held = getattr(s, name)
            left_out = held is None and defaults_of(type(s)).get(name, Codec) is None
            if not left_out and not _holds(codec, held):
                what = f"field '{name}' of '{s.keyword()}' is {described(held)}"
                yield Diagnostic(what, s.span, expected=codec.value)
            elif codec is Codec.BLOCK:
                yield from _block(held)


def _holds(codec: Codec, held: object) -> bool:
    """Return True if a value fits a field of this codec."""
    if codec in VALUE_CODECS:
        return _is_value(held)
    if codec in (Codec.STREAM, Codec.INDEX):
        return _is_expr(held)
    if codec is Codec.SIZE:
        return _is_size(held)
    if codec is Codec.INT:
        return _is_int(held)
    if codec is Codec.INTS:
        return _all(held, _is_int)
    if codec is Codec.NUMBER:
        return isinstance(held, float) and isfinite(held)
    return isinstance(held, tuple if codec is Codec.BLOCK else str)


def _all(held: object, is_one: object) -> bool:
    assert callable(is_one)
    return isinstance(held, tuple) and all(map(is_one, held))


def _is_int(held: object) -> bool:
    return isinstance(held, int) and not isinstance(held, bool) and held >= 0


def _is_name(held: object) -> bool:
    return isinstance(held, str)


def _is_expr(held: object) -> bool:
    if isinstance(held, Bin):
        return held.op in ("+", "-", "*", "/", "%") and _is_expr(held.left) and _is_expr(held.right)
    return _is_value(held.value) if isinstance(held, Ref) else isinstance(held, Lit) and _is_int(held.value)


def _is_size(held: object) -> bool:
    """Return True if a value is a size, and an integer if it has no symbols."""
    if not isinstance(held, Size) or not (_is_int(held.num) and _is_int(held.den) and held.num and held.den):
        return False
    return held.den == 1 or bool(held.symbols)


def _is_value(held: object) -> bool:
    if not isinstance(held, Value) or not isinstance(held.name, str):
        return False
    return isinstance(held.type, Kind) or (isinstance(held.type, TensorType) and _is_tensor_type(held.type))


def _is_tensor_type(held: TensorType) -> bool:
    """Return True if a value is a sound tensor type. Cached with the type, which many statements share."""
    if KNOWN not in vars(held):
        vars(held)[KNOWN] = _is_sound(held)
    return bool(vars(held)[KNOWN])


def _is_sound(held: TensorType) -> bool:
    if held.dtype not in (*DTYPES.values(), FLAG):
        return False
    if not (held.mesh is None or _is_mesh(held.mesh)) or not _all(held.axes, _is_axis):
        return False
    if not _all(held.partial, _is_name):
        return False
    marks = [mark for axis in held.axes for mark in axis.marks if mark != STREAM] + list(held.partial)
    known = held.mesh.axes if held.mesh else ()
    return len(set(marks)) == len(marks) and all(mark in known for mark in marks)


def _is_axis(held: object) -> bool:
    return isinstance(held, Axis) and bool(held.factors) and _all(held.factors, _is_factor)


def _is_factor(held: object) -> bool:
    return isinstance(held, Factor) and _is_size(held.extent) and (held.on is None or isinstance(held.on, str))


def _is_mesh(held: object) -> bool:
    if not isinstance(held, Mesh) or not isinstance(held.name, str) or not _all(held.axes, _is_name):
        return False
    if not _all(held.shape, _is_int) or not _all(held.devices, _is_int) or not held.devices:
        return False
    fits = len(held.axes) == len(held.shape) in (1, 2) and prod(held.shape) == len(held.devices)
    return fits and len(set(held.devices)) == len(held.devices)


# Index expressions ----------------------------------------------------------------------------------------------------
# Facts about index expressions that hold for all values of loop indices.

_UNIT = Lit(1)


def constant(expr: Expr) -> int | None:
    """Return the value of a constant expression, else None."""
    terms = _terms(expr)
    return terms.get(_UNIT, 0) if terms.keys() <= {_UNIT} else None


def divisions_by_zero(expr: Expr) -> Iterator[Bin]:
    """Yield the parts of an expression that divide by a literal zero."""
    if isinstance(expr, Bin):
        if expr.op in "/%" and constant(expr.right) == 0:
            yield expr
        yield from divisions_by_zero(expr.left)
        yield from divisions_by_zero(expr.right)


def _terms(expr: Expr) -> dict[Expr, int]:
    """Return the expression as a sum: the factor of each term. The constant is the factor of `_UNIT`."""
    if isinstance(expr, Lit):
        return {_UNIT: expr.value} if expr.value else {}
    if isinstance(expr, Bin):
        left, right = _terms(expr.left), _terms(expr.right)
        if expr.op in "+-":
            sign = 1 if expr.op == "+" else -1
            total = {part: left.get(part, 0) + sign * right.get(part, 0) for part in {**left, **right}}
            return {part: factor for part, factor in total.items() if factor}
        for one, other in ((left, right), (right, left)):
            if expr.op == "*" and one.keys() <= {_UNIT}:
                times = one.get(_UNIT, 0)
                return {part: factor * times for part, factor in other.items() if times}
    return {expr: 1}


# Buffers --------------------------------------------------------------------------------------------------------------
# Buffers behind the names of a host program: which may be freed, reached by peers, and returned to the caller.


class Buffers:
    """Tracks the buffer behind each value. The caller passes the statements of a program in order.

    Only facts that hold on every rank and in every round are checked here; the tracer checks the rest.
    """

    def __init__(self, program: Program) -> None:
        self.inputs = {v.name for v in program.inputs}
        self.roots = {name: name for name in self.inputs}  # by the name of a value: the name of its buffer
        self.written: set[str] = set()
        self.densed: dict[str, Value] = {}  # by input: the result of `dense`, which may be the input or a copy
        self.symmetric: set[str] = set()

    def see(self, s: Statement) -> Iterator[Diagnostic]:
        """Record a statement; yield findings about frees of memory that the program does not own."""
        for value in s.values(Codec.WRITE):
            if root := self.roots.get(value.name):
                self.written.add(root)
                yield from self._both(s, value, root)
        if s.freed and (root := self.roots.get(s.freed.name)):
            yield from self._free(s, s.freed, root)
        if s.buffer:
            self.roots[s.buffer.name] = s.buffer.name
            self.written.discard(s.buffer.name)
            (self.symmetric.add if s.symmetric else self.symmetric.discard)(s.buffer.name)
        view = s.defines(Phase.HOST)
        if s.viewed and view and (root := self.roots.get(s.viewed.name)):
            self.roots[view.name] = root
            if s.may_copy:
                self.densed.setdefault(root, view)
                yield from self._dense(s, s.viewed, root)

    def _dense(self, s: Statement, x: Value, root: str) -> Iterator[Diagnostic]:
        """Yield a finding unless `x` is an input, or a view of one, that nothing writes."""
        if root not in self.inputs:
            yield Diagnostic(
                f"{_named(x, root)} is not an input",
                s.span,
                expected="an input, or a view of one: all other memory has known strides",
                hint="copy it to a buffer if it is not dense",
            )
        elif root in self.written:
            yield from self._both(s, x, root)

    def _both(self, s: Statement, value: Value, root: str) -> Iterator[Diagnostic]:
        if root in self.densed:
            yield Diagnostic(
                f"{_named(value, root)} is written, and {self.densed[root]} may be its memory or a copy of it",
                s.span,
                expected="no write to an input that is made dense",
                hint="copy the input to a buffer instead, and write there",
            )

    def _free(self, s: Statement, x: Value, root: str) -> Iterator[Diagnostic]:
        view = "" if x.name == root else "a view of "
        if root in self.inputs:
            yield Diagnostic(
                f"{x} is {view}an input: only the caller may free an input", s.span, hint="remove this line"
            )
        elif root in self.symmetric:
            yield Diagnostic(
                f"{x} is {view}a symmetric buffer: it lasts from call to call", s.span, hint="remove this line"
            )

    def reach(self, s: Statement) -> Iterator[Diagnostic]:
        """Yield findings about a statement that reaches memory of a peer that is not symmetric."""
        if s.remote is None or (root := self.roots.get(s.remote.name)) is None:
            return
        if root not in self.symmetric:
            yield Diagnostic(
                f"{s.keyword()} cannot reach {_named(s.remote, root)} at a peer",
                s.span,
                expected="a buffer of allocate_symmetric, or a view of one",
            )

    def unwritten_outputs(self, outputs: Collection[Value]) -> Iterator[Diagnostic]:
        """Yield findings about outputs that no statement writes."""
        for value in dict.fromkeys(outputs):
            root = self.roots.get(value.name)
            if root is not None and root not in self.written | self.inputs:
                yield Diagnostic(
                    f"the output {_named(value, root)} is never written",
                    value.span,
                    expected="a statement that writes it",
                )


def _named(value: Value, root: str) -> str:
    return f"{value}" if value.name == root else f"{value}, a view of %{root},"


# Structure ------------------------------------------------------------------------------------------------------------
# Structure: names, scopes, phases and types. Every program must pass this check before any other.

MAX_STREAMS = 1024  # in the pool of a rank; few devices support more than a hundred distinct streams
MAX_RANKS = 65536


def check_structure(program: Program, *, explicit: bool = False) -> list[Diagnostic]:
    """Return all structural findings in program order; empty for a sound program.

    With `explicit`, all shardings of a fusion must be propagated, and every change of sharding must be explicit: each
    declared type equals the type that the statement infers. Host programs are always checked this way.
    """
    if findings := list(malformed(program)):
        return findings
    checker = _Checker(program, explicit or program.phase is Phase.HOST)
    try:
        for finding in checker.run():
            findings.append(finding)  # keeps the findings before an error
    except HostIRError as wrong:
        findings += wrong.diagnostics
    if findings:
        return findings
    # Last, and only for a sound program: a wrong statement may be the one that was meant to write the output.
    return list(checker.buffers.unwritten_outputs(program.outputs)) if program.phase is Phase.HOST else []


def verify(program: Program, *, explicit: bool = False) -> Program:
    """Return the program; raise a HostIRError with all findings about its structure."""
    _verify(program, explicit or program.phase is Phase.HOST)
    return program


@lru_cache(maxsize=256)
def _verify(program: Program, explicit: bool) -> None:
    """Verify equal programs once: strategies begin with the same passes. Errors are not cached, as spans may differ."""
    if findings := check_structure(program, explicit=explicit):
        raise HostIRError(*findings)


class _Checker:
    def __init__(self, program: Program, explicit: bool) -> None:
        self.program = program
        self.phase = program.phase
        self.explicit = explicit
        self.scope: dict[str, Value] = {}
        self.buffers = Buffers(program)

    def run(self) -> Iterator[Diagnostic]:
        yield from self.limits()
        for value in self.program.inputs:
            yield from self.define(value, None)
            yield from self.data(value, "input")
        yield from self.block(self.program.body)
        for value in self.program.outputs:
            yield from self.known(value, None)
            yield from self.data(value, "output")

    def limits(self) -> Iterator[Diagnostic]:
        if self.program.streams > MAX_STREAMS:
            yield Diagnostic(
                f"@{self.program.name} has a pool of {self.program.streams} streams", expected=f"at most {MAX_STREAMS}"
            )
        for mesh in self.program.meshes:
            if (device := max(mesh.devices)) >= MAX_RANKS:
                yield Diagnostic(f"mesh @{mesh.name} names device {device}", expected=f"devices below {MAX_RANKS}")

    def data(self, value: Value, role: str) -> Iterator[Diagnostic]:
        if _holds_flags(value):
            yield Diagnostic(
                f"the {role} {value} holds flags",
                value.span,
                expected="numbers: flags are only for communication between a program's ranks",
            )

    def block(self, body: tuple[Statement, ...], around: Statement | None = None) -> Iterator[Diagnostic]:
        """Check statements in order; `around` is the innermost loop or condition."""
        for s in body:
            if self.phase not in s.phases:
                yield Diagnostic(f"'{s.keyword()}' does not belong to a {self.phase.value}", s.span)
                continue
            findings = [d for v in s.uses(self.phase) for d in self.known(v, s)]
            findings = findings or list(self.flags(s)) or list(self.typed(s))
            yield from findings
            yield from self.indices(s)
            if self.explicit and not s.explicit:
                yield Diagnostic(f"a {s.keyword()} is left after communications were chosen", s.span)
            if around and s.symmetric:
                yield Diagnostic(
                    f"{s.buffer} lasts from call to call: it cannot be allocated in a block",
                    s.span,
                    hint=f"allocate it before the '{around.keyword()}'",
                )
            if self.phase is Phase.HOST:
                yield from self.buffers.see(s)
                if not findings:
                    yield from self.buffers.reach(s)
            outer = dict(self.scope)
            if defined := s.defines(self.phase):
                yield from self.define(defined, s)
            for inner in s.bodies:
                yield from self.block(inner, s)
            if s.bodies:
                self.scope = outer

    def define(self, value: Value, s: Statement | None) -> Iterator[Diagnostic]:
        if value.name in self.scope:
            yield Diagnostic(f"{value} is defined twice", s.span if s else value.span, hint="give it another name")
        self.scope[value.name] = value
        if isinstance(value.type, TensorType) and value.type.partial and value.type.dtype.name in FP8:
            over = ", ".join(value.type.partial)
            yield Diagnostic(
                f"{value} is a partial sum over {over} in {value.type.dtype}",
                s.span if s else value.span,
                expected="partial sums in f64, f32, f16 or bf16",
            )

    def known(self, value: Value, s: Statement | None) -> Iterator[Diagnostic]:
        span = s.span if s else value.span
        if value.name not in self.scope:
            hint = did_you_mean(f"{value}", [f"%{name}" for name in self.scope])
            yield Diagnostic(f"{value} is not defined here", span, hint=hint)
        elif self.scope[value.name] != value:
            yield Diagnostic(f"{value} is used as {value.type} but defined as {self.scope[value.name].type}", span)

    def flags(self, s: Statement) -> Iterator[Diagnostic]:
        """Check that flags are only signalled and waited for; nothing reads, writes or views them."""
        if s.buffer and not s.symmetric and _holds_flags(s.buffer):
            hint = f"{s.buffer}: {s.buffer.type} = allocate_symmetric"
            yield Diagnostic(f"no peer can signal {s.buffer}", s.span, hint=hint)
        for value in dict.fromkeys(s.values(Codec.READ, Codec.WRITE, Codec.ALIAS)):
            if _holds_flags(value):
                yield Diagnostic(
                    f"{value} holds flags, which {s.keyword()} cannot use",
                    s.span,
                    expected="numbers: flags are for signal, wait_signal, and 'ready' and 'done' of computations",
                )

    def typed(self, s: Statement) -> Iterator[Diagnostic]:
        try:
            s.verify()
            if self.explicit:
                s.verify_layout()
            expected = s.infer() if self.explicit else None
        except HostIRError as wrong:
            yield from wrong.diagnostics
            return
        result = next(s.values(Codec.DEFINE, Codec.WRITE), None)
        if result is None:
            return
        declared = result.type
        if isinstance(expected, TensorType) and isinstance(declared, TensorType):
            if not _agree(expected, declared):
                yield Diagnostic(
                    f"{result} is declared {declared}, but {s.keyword()} gives {expected}",
                    s.span,
                    expected=str(expected),
                )
        elif isinstance(expected, Kind) and expected is not declared:
            yield Diagnostic(f"{result} is a {declared}, but {s.keyword()} gives a {expected}", s.span)

    def indices(self, s: Statement) -> Iterator[Diagnostic]:
        for name, codec in codecs_of(type(s)).items():
            if codec not in (Codec.STREAM, Codec.INDEX):
                continue
            expr = getattr(s, name)
            for division in divisions_by_zero(expr):
                yield Diagnostic(f"'{division}' divides by zero", s.span, expected="a divisor of at least 1")
            if codec is Codec.STREAM and isinstance(expr, Ref):
                continue
            for value in expr_values(expr):
                if value.type is Kind.STREAM:
                    yield Diagnostic(f"{value} is a stream", s.span, expected="an index")


def _holds_flags(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype == FLAG


def _agree(a: TensorType, b: TensorType) -> bool:
    """Return True if two types are equal up to Stream marks and normal form."""
    same_mesh = a.mesh is None or b.mesh is None or a.mesh == b.mesh
    return same_mesh and a.host().axes == b.host().axes and a.dtype == b.dtype and a.partial == b.partial
