"""Check the structure of programs: names, scopes, phases and types. Every other check assumes a correct structure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from hostir.check.buffers import Buffers
from hostir.check.fields import malformed
from hostir.ir.comm_ops import check_team
from hostir.ir.op import (
    Bin,
    Codec,
    Expr,
    Lit,
    Phase,
    Ref,
    Statement,
    Value,
    codecs_of,
    expr_values,
)
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic, HostIRError, did_you_mean
from hostir.ir.types import FLAG, FP8, INTEGERS, Kind, TensorType

MAX_STREAMS = 1024  # in the pool of a rank; few devices support more than a hundred distinct streams
MAX_RANKS = 65536
_UNIT = Lit(1)


def check_structure(program: Program, *, explicit: bool = False) -> list[Diagnostic]:
    """Return all errors in the structure of a program, in program order.

    With `explicit`, two more things are errors: a declared type that differs from the type that its statement infers,
    and a change of sharding in a fusion without a communication. Host programs are always checked in this way.
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
    # Only if there are no other findings: a wrong statement may be the one that should write the output.
    return list(checker.buffers.unwritten_outputs(program.outputs)) if program.phase is Phase.HOST else []


def verify(program: Program, *, explicit: bool = False) -> Program:
    """Return the program if its structure is correct; otherwise raise a HostIRError with all errors.

    `explicit` has the same meaning as in `check_structure`.
    """
    _verify(program, explicit or program.phase is Phase.HOST)
    return program


@lru_cache(maxsize=256)
def _verify(program: Program, explicit: bool) -> None:
    """Raise a HostIRError with all errors in the structure of a program.

    Correct programs are cached, because many strategies begin with the same passes. Errors are not cached: equal
    programs may have different positions in their texts.
    """
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
        """Yield the findings about the statements of `body`, in order.

        `around` is the innermost loop or `if` around them.
        """
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
        if isinstance(value.type, TensorType) and value.type.partial and value.type.dtype.name in FP8 | INTEGERS:
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
        """Yield a finding if a statement misuses flags.

        A statement must not read, write or view flags as numbers. It must not allocate them in a buffer that peers
        cannot signal.
        """
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
            check_team(s, self.program.ranks)
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
    """Return True if two types are equal, apart from Stream marks and from the way in which axes are written.

    A type without a mesh agrees with every mesh.
    """
    same_mesh = a.mesh is None or b.mesh is None or a.mesh == b.mesh
    return same_mesh and a.host().axes == b.host().axes and a.dtype == b.dtype and a.partial == b.partial


def divisions_by_zero(expr: Expr) -> Iterator[Bin]:
    """Yield the divisions in an expression that have a divisor of 0 for all values of the indices."""
    if isinstance(expr, Bin):
        if expr.op in "/%" and not _terms(expr.right):
            yield expr
        yield from divisions_by_zero(expr.left)
        yield from divisions_by_zero(expr.right)


def _terms(expr: Expr) -> dict[Expr, int]:
    """Return an expression as a sum, in the form of a dictionary from each term to its factor.

    The constant part is the factor of the term `_UNIT`. The expression 0 is {}.
    """
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
