"""What is known of index expressions whatever the loops' indices are."""

from __future__ import annotations

from collections.abc import Iterator

from hostir.ir.values import Bin, Expr, Lit

_UNIT = Lit(1)


def constant(expr: Expr) -> int | None:
    """Its value, where that follows from literals alone."""
    terms = _terms(expr)
    return terms.get(_UNIT, 0) if terms.keys() <= {_UNIT} else None


def divisions_by_zero(expr: Expr) -> Iterator[Bin]:
    """The parts of an expression that divide by a literal zero."""
    if isinstance(expr, Bin):
        if expr.op in "/%" and constant(expr.right) == 0:
            yield expr
        yield from divisions_by_zero(expr.left)
        yield from divisions_by_zero(expr.right)


def _terms(expr: Expr) -> dict[Expr, int]:
    """The expression as a sum: the factor of each part that is not a sum itself. A constant is that of the unit."""
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
