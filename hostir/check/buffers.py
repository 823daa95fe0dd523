"""Check how a host program uses its buffers: which buffers it frees, accesses at peers, and returns as outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hostir.ir.op import (
    Codec,
    Phase,
    Statement,
    Value,
)
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic


class Buffers:
    """Tracks which buffer each value of a program refers to, and yields findings about statements that misuse buffers.

    The caller passes the statements to `see` in program order. This class checks only properties that are the same on
    every rank and in every round of a loop. `hostir.check.tracing` checks the other properties.
    """

    def __init__(self, program: Program) -> None:
        self.inputs = {v.name for v in program.inputs}
        self.roots = {name: name for name in self.inputs}  # by the name of a value: the name of its buffer
        self.written: set[str] = set()
        self.densed: dict[str, Value] = {}  # by input: the result of its `dense`, which may be the input or a copy
        self.symmetric: set[str] = set()

    def see(self, s: Statement) -> Iterator[Diagnostic]:
        """Record a statement. Yield findings about memory that the statement writes, frees or makes dense."""
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
        """Yield a finding if the operand `x` of a `dense` is not memory of an input, or if this input is written."""
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
        why = "a symmetric buffer: it lasts from call to call" if root in self.symmetric else ""
        why = "an input: only the caller may free an input" if root in self.inputs else why
        if why:
            yield Diagnostic(f"{x} is {view}{why}", s.span, hint="remove this line")

    def reach(self, s: Statement) -> Iterator[Diagnostic]:
        """Yield a finding if a statement accesses a buffer at a peer and this buffer is not symmetric."""
        if s.remote is None or (root := self.roots.get(s.remote.name)) is None:
            return
        if root not in self.symmetric:
            yield Diagnostic(
                f"{s.keyword()} cannot reach {_named(s.remote, root)} at a peer",
                s.span,
                expected="a buffer of allocate_symmetric, or a view of one",
            )

    def unwritten_outputs(self, outputs: Collection[Value]) -> Iterator[Diagnostic]:
        """Yield a finding for each output buffer that no statement writes.

        The caller calls this after the last statement.
        """
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
