"""Translate the streams and the index expressions of a dump."""

from __future__ import annotations

from collections.abc import Mapping

from hostir.ir.op import Bin, Expr, Lit, Ref, Value
from hostir.ir.sizes import Size
from hostir.ir.source import did_you_mean, error
from hostir.nvfuser.nodes import Formula
from hostir.nvfuser.tokens import Token

STREAMS = 4  # nvFuser's default number of streams


class Streams:
    """The streams that a dump has used so far.

    Fields:
        pool: the number of streams in nvFuser's pool.
        uses_pool: True if the dump uses this pool or defines its size.
        lone: the streams outside the pool, numbered from 0. The dump prints them by address, such as `Stream 0x1f`.
    """

    def __init__(self, streams: int | None) -> None:
        self.pool = STREAMS if streams is None else streams
        self.uses_pool = streams is not None
        self.lone: dict[str, int] = {}

    @property
    def count(self) -> int:
        """The number of streams of the host program."""
        return (self.pool if self.uses_pool else 0) + len(self.lone)

    def of(self, formula: Formula, scope: Mapping[str, Value], loops: Mapping[Value, Size]) -> Expr:
        """Return the expression for a printed stream.

        If the stream has a name from GetCurrentStream, the expression is the value that GetCurrentStream defined. If
        an index is printed, the expression is an index into the pool. nvFuser creates a new stream for each index, but
        the pool has a fixed size, so larger indices wrap around. If an address is printed, such as `Stream 0x1f`, the
        expression is the index of an additional stream after the pool.

        Args:
            formula: the stream as printed.
            scope: the value of each printed name.
            loops: the number of rounds of each loop index.
        """
        if isinstance(formula, Token):
            if (got := scope.get(f"Stream {formula.text}")) is not None:
                return Ref(got)
            if formula.text[:2].lower() == "0x":
                self.uses_pool = True
                return Lit(self.pool + self.lone.setdefault(formula.text, len(self.lone)))
        self.uses_pool = True
        index = self.index(formula, scope)
        if isinstance(index, Lit):
            return Lit(index.value % self.pool)
        return index if self._in_pool(index, loops) else Bin("%", index, Lit(self.pool))

    def _in_pool(self, index: Expr, loops: Mapping[Value, Size]) -> bool:
        """Return True if an index is certainly below the number of streams of the pool."""
        if isinstance(index, Ref):
            rounds = loops[index.value].value
            return rounds is not None and rounds <= self.pool
        right = index.right if isinstance(index, Bin) and index.op == "%" else None
        return isinstance(right, Lit) and right.value <= self.pool

    def index(self, formula: Formula, scope: Mapping[str, Value]) -> Expr:
        """Return the expression for a printed index. A name in it is a loop index in `scope`, or numberOfStreams."""
        if not isinstance(formula, Token):
            left, right = self.index(formula.left, scope), self.index(formula.right, scope)
            if formula.op in "/%" and right == Lit(0):
                raise error("an index is divided by zero", _first(formula).span)
            return Bin(formula.op, left, right)
        if formula.text.isdecimal():
            return Lit(int(formula.text))
        if formula.text == "numberOfStreams":
            return Lit(self.pool)
        loop_index = scope.get(f"index {formula.text}")
        if loop_index is None:
            known = [n.removeprefix("index ") for n in scope if n.startswith("index ")]
            hint = "an index that is not a loop's, such as a rank, has no meaning here: every rank runs one program"
            message, expected = f"'{formula.text}' is no loop index here", f"one of: {', '.join(known) or 'none'}"
            raise error(message, formula.span, expected=expected, hint=did_you_mean(formula.text, known) or hint)
        return Ref(loop_index)


def _first(formula: Formula) -> Token:
    return formula if isinstance(formula, Token) else _first(formula.left)
