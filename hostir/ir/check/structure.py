"""Structure: names, scopes, phases and types. What every program must satisfy first of all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from hostir.ir.check.buffers import Buffers
from hostir.ir.check.forms import malformed
from hostir.ir.check.indices import divisions_by_zero
from hostir.ir.comm_ops import Reshard
from hostir.ir.host_ops import Allocate
from hostir.ir.onesided_ops import AllocateSymmetric
from hostir.ir.op import Codec, Phase, Statement, codecs_of
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic, HostIRError, did_you_mean
from hostir.ir.tensor_ops import TensorOp
from hostir.ir.types import FLAG, Kind, TensorType
from hostir.ir.values import Ref, Value, expr_values
from hostir.ir.view_ops import ViewOp

MOST_STREAMS = 1024  # in the pool of a rank; few devices tell more than a hundred apart
MOST_RANKS = 65536


def check_structure(program: Program, *, settled: bool = False) -> list[Diagnostic]:
    """Every structural finding, in program order; empty for a sound program.

    `settled` asks more of a fusion: that its shardings are propagated and every change of sharding explicit, so that
    each declared type is what the statement gives. Host programs are always held to that.
    """
    if found := list(malformed(program)):
        return found
    checker = _Checker(program, settled or program.phase is Phase.HOST)
    try:
        for finding in checker.run():
            found.append(finding)  # what was found before an error counts as well
    except HostIRError as wrong:
        found += wrong.diagnostics
    if found:
        return found
    # Asked last, and of a sound program only: a statement that is wrong may be the one that meant to write the output.
    return list(checker.buffers.unwritten_outputs(program.outputs)) if program.phase is Phase.HOST else []


def verify(program: Program, *, settled: bool = False) -> Program:
    """The program itself, or a HostIRError with all findings about its structure."""
    _verify(program, settled or program.phase is Phase.HOST)
    return program


@lru_cache(maxsize=256)
def _verify(program: Program, settled: bool) -> None:
    """Once for equal programs, as strategies begin with the same passes. What raises is not kept: spans may differ."""
    if found := check_structure(program, settled=settled):
        raise HostIRError(*found)


class _Checker:
    def __init__(self, program: Program, settled: bool) -> None:
        self.program = program
        self.phase = program.phase
        self.settled = settled
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
        if self.program.streams > MOST_STREAMS:
            yield Diagnostic(
                f"@{self.program.name} has a pool of {self.program.streams} streams", expected=f"at most {MOST_STREAMS}"
            )
        for mesh in self.program.meshes:
            if (device := max(mesh.devices)) >= MOST_RANKS:
                yield Diagnostic(f"mesh @{mesh.name} names device {device}", expected=f"devices below {MOST_RANKS}")

    def data(self, value: Value, role: str) -> Iterator[Diagnostic]:
        if _holds_flags(value):
            yield Diagnostic(
                f"the {role} {value} holds flags",
                value.span,
                expected="numbers: flags are what a program's own ranks tell each other",
            )

    def block(self, body: tuple[Statement, ...], around: Statement | None = None) -> Iterator[Diagnostic]:
        """Statements in order; `around` is the innermost loop or condition."""
        for s in body:
            if self.phase not in s.phases:
                yield Diagnostic(f"'{s.keyword()}' does not belong to a {self.phase.value}", s.span)
                continue
            found = [d for v in s.uses(self.phase) for d in self.known(v, s)]
            found = found or list(self.flags(s)) or list(self.typed(s))
            yield from found
            yield from self.indices(s)
            if isinstance(s, Reshard) and self.settled:
                yield Diagnostic("a reshard is left after communications were chosen", s.span)
            if around and isinstance(s, AllocateSymmetric):
                yield Diagnostic(
                    f"{s.out} lasts from call to call: it cannot be allocated in a block",
                    s.span,
                    hint=f"allocate it in front of the '{around.keyword()}'",
                )
            if self.phase is Phase.HOST:
                yield from self.buffers.see(s)
                if not found:
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

    def known(self, value: Value, s: Statement | None) -> Iterator[Diagnostic]:
        span = s.span if s else value.span
        if value.name not in self.scope:
            hint = did_you_mean(f"{value}", [f"%{name}" for name in self.scope])
            yield Diagnostic(f"{value} is not defined here", span, hint=hint)
        elif self.scope[value.name] != value:
            yield Diagnostic(f"{value} is used as {value.type} but defined as {self.scope[value.name].type}", span)

    def flags(self, s: Statement) -> Iterator[Diagnostic]:
        """Flags are signalled and waited for; no statement reads, writes or views them."""
        if isinstance(s, Allocate) and _holds_flags(s.out):
            yield Diagnostic(f"no peer can signal {s.out}", s.span, hint=f"{s.out}: {s.out.type} = allocate_symmetric")
        for value in dict.fromkeys(s.values(Codec.READ, Codec.WRITE, Codec.ALIAS)):
            if _holds_flags(value):
                yield Diagnostic(
                    f"{value} holds flags, which {s.keyword()} cannot use",
                    s.span,
                    expected="numbers: flags are for signal, wait_signal and the 'ready' of a matmul or linear",
                )

    def typed(self, s: Statement) -> Iterator[Diagnostic]:
        try:
            s.verify()
            if self.settled:
                s.verify_layout()
            expected = s.infer() if self.settled or not isinstance(s, TensorOp) else None
        except HostIRError as wrong:
            yield from wrong.diagnostics
            return
        result = s.out if isinstance(s, (TensorOp, ViewOp)) else s.defines(self.phase)
        if result is None:
            return
        if isinstance(s, TensorOp) and (found := list(self.computed(s))):
            yield from found
            return
        declared = result.type
        if isinstance(expected, TensorType) and isinstance(declared, TensorType):
            if self.settled and not _agree(expected, declared):
                yield Diagnostic(
                    f"{result} is declared {declared}, but {s.keyword()} gives {expected}",
                    s.span,
                    expected=str(expected),
                )
        elif isinstance(expected, Kind) and expected is not declared:
            yield Diagnostic(f"{result} is a {declared}, but {s.keyword()} gives a {expected}", s.span)

    def computed(self, s: TensorOp) -> Iterator[Diagnostic]:
        dtype, shape = s.result()
        declared = s.out.tensor
        if declared.dtype != dtype or declared.shape != shape:
            gives = f"{dtype}[{', '.join(map(str, shape))}]"
            yield Diagnostic(f"{s.out} is {declared}, but {s.keyword()} gives {gives}", s.span, expected=gives)

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
    """Equal up to Stream marks and normal form."""
    same_mesh = a.mesh is None or b.mesh is None or a.mesh == b.mesh
    return same_mesh and a.host().axes == b.host().axes and a.dtype == b.dtype and a.partial == b.partial
