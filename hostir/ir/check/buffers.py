"""Names of buffers in the text of a host program: what may be freed, reached by peers, and given to the caller."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hostir.ir.host_ops import Allocate, Dense, FreeBuffer
from hostir.ir.onesided_ops import AllocateSymmetric, Copy
from hostir.ir.op import Codec, Statement
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic
from hostir.ir.types import TensorType
from hostir.ir.values import Value
from hostir.ir.view_ops import ViewOp


class Buffers:
    """The buffer behind each value. Fed with statements in program order, by whoever walks the program.

    What holds on every rank and in every round is decided here; what depends on them, on the unrolled program.
    """

    def __init__(self, program: Program) -> None:
        self.inputs = {v.name for v in program.inputs}
        self.roots = {name: name for name in self.inputs}  # by the name of a value: that of its buffer
        self.written: set[str] = set()
        self.densed: dict[str, Value] = {}  # by input: what may be that memory, or a copy of it
        self.symmetric: set[str] = set()

    def see(self, s: Statement) -> Iterator[Diagnostic]:
        """Takes note of a statement; yields findings about memory that is not the program's to free."""
        for value in s.values(Codec.WRITE):
            if root := self.roots.get(value.name):
                self.written.add(root)
                yield from self._both(s, value, root)
        if isinstance(s, FreeBuffer) and (root := self.roots.get(s.x.name)):
            yield from self._free(s, root)
        if isinstance(s, (Allocate, AllocateSymmetric)) and isinstance(s.out.type, TensorType):
            self.roots[s.out.name] = s.out.name
            self.written.discard(s.out.name)
            (self.symmetric.add if isinstance(s, AllocateSymmetric) else self.symmetric.discard)(s.out.name)
        if isinstance(s, ViewOp) and (root := self.roots.get(s.x.name)):
            self.roots[s.out.name] = root
            if isinstance(s, Dense):
                yield from self._dense(s, root)

    def _dense(self, s: Dense, root: str) -> Iterator[Diagnostic]:
        """Findings about what is made dense: an input that nothing writes."""
        self.densed.setdefault(root, s.out)
        if root not in self.inputs:
            yield Diagnostic(
                f"{_told(s.x, root)} is no input",
                s.span,
                expected="an input, or a view of one: of all other memory the strides are known",
                hint="copy it to a buffer, if it is not dense",
            )
        elif root in self.written:
            yield from self._both(s, s.x, root)

    def _both(self, s: Statement, value: Value, root: str) -> Iterator[Diagnostic]:
        if root in self.densed:
            yield Diagnostic(
                f"{_told(value, root)} is written, and {self.densed[root]} may be its memory or a copy of it",
                s.span,
                expected="an input that nothing writes, as it is made dense",
                hint="copy the input to a buffer instead, and write there",
            )

    def _free(self, s: FreeBuffer, root: str) -> Iterator[Diagnostic]:
        view = "" if s.x.name == root else "a view of "
        if root in self.inputs:
            yield Diagnostic(
                f"{s.x} is {view}an input: an input is the caller's to free", s.span, hint="take this line out"
            )
        elif root in self.symmetric:
            yield Diagnostic(
                f"{s.x} is {view}a symmetric buffer: it lasts from call to call", s.span, hint="take this line out"
            )

    def reach(self, s: Statement) -> Iterator[Diagnostic]:
        """Findings about a sound statement that names memory of a peer which the peer has not laid open."""
        if not isinstance(s, Copy) or (root := self.roots.get(s.remote.name)) is None:
            return
        if root not in self.symmetric:
            yield Diagnostic(
                f"{s.keyword()} cannot reach {_told(s.remote, root)} at a peer",
                s.span,
                expected="a buffer of allocate_symmetric, or a view of one",
            )

    def unwritten_outputs(self, outputs: Collection[Value]) -> Iterator[Diagnostic]:
        """Findings about outputs that no statement writes."""
        for value in dict.fromkeys(outputs):
            root = self.roots.get(value.name)
            if root is not None and root not in self.written | self.inputs:
                yield Diagnostic(
                    f"the output {_told(value, root)} is never written",
                    value.span,
                    expected="a statement that writes it",
                )


def _told(value: Value, root: str) -> str:
    return f"{value}" if value.name == root else f"{value}, a view of %{root},"
