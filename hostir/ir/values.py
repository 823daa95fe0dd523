"""Values and index expressions: what the fields of statements hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hostir.ir.source import Span, error
from hostir.ir.types import TensorType, Type


@dataclass(frozen=True)
class Value:
    """A name and its type. Equal names in one program are one value; the span is where it was defined."""

    name: str
    type: Type
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def tensor(self) -> TensorType:
        if not isinstance(self.type, TensorType):
            raise error(f"%{self.name} is a {self.type}, not a tensor", self.span, expected="a tensor")
        return self.type

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Lit:
    """An integer in an index expression."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Ref:
    """A loop index, or a stream, in an index expression."""

    value: Value

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Bin:
    """`left op right` on indices; op is one of + - * / %, of which / rounds down."""

    op: str
    left: Expr
    right: Expr

    def __str__(self) -> str:
        return f"{_operand(self.left)} {self.op} {_operand(self.right)}"


Expr = Lit | Ref | Bin
ZERO = Lit(0)


def _operand(expr: Expr) -> str:
    return f"({expr})" if isinstance(expr, Bin) else str(expr)


def expr_values(expr: Expr) -> Iterator[Value]:
    """The values an expression uses."""
    if isinstance(expr, Ref):
        yield expr.value
    elif isinstance(expr, Bin):
        yield from expr_values(expr.left)
        yield from expr_values(expr.right)


def rename_expr(expr: Expr, names: dict[str, Value]) -> Expr:
    """The expression with every value replaced whose name is in `names`."""
    if isinstance(expr, Ref):
        return Ref(names.get(expr.value.name, expr.value))
    if isinstance(expr, Bin):
        return Bin(expr.op, rename_expr(expr.left, names), rename_expr(expr.right, names))
    return expr
