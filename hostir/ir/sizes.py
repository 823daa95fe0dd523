"""Define the sizes of axes: integers, symbols that get values at run time, and products and quotients of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd

from hostir.ir.source import HostIRError, Span, described, did_you_mean, error

DIGITS = 18  # the most digits of an integer in a size: it fits in 64 bits
MAX_CHARACTERS = 1000  # the longest text of a size
_TERM = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*))\s*")


@dataclass(frozen=True, repr=False)
class Size:
    """A size of the form `num * symbols / den`, in lowest terms: `4096`, `M`, `M/8`, `4*M*K`.

    `symbols` holds pairs of a symbol and its power. The power is negative for a symbol in the denominator.
    """

    num: int = 1
    den: int = 1
    symbols: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(value: Size | int | str, span: Span | None = None) -> Size:
        """Return the size for an integer, for the name of a symbol, or for a text such as `"M*K/8"`.

        Raise HostIRError for any other value.
        """
        if isinstance(value, Size):
            return value
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise error(
                f"a size must be an integer or a name, not {described(value)}",
                span,
                expected="such as 4096, 'M', 'M/8'",
            )
        if isinstance(value, int):
            if abs(value) >= 10**DIGITS:
                raise _too_long(span)
            if value < 1:
                hint = "give the size a name, such as 'M', which may be 0 in a call" if value == 0 else ""
                raise error(f"a size must be at least 1, not {value}", span, hint=hint)
            return Size(value)
        return _parse(value, span)

    @property
    def value(self) -> int | None:
        """The integer value; None if the size has symbols."""
        return self.num if not self.symbols and self.den == 1 else None

    @property
    def is_one(self) -> bool:
        return self.num == 1 and self.den == 1 and not self.symbols

    @property
    def is_integer(self) -> bool:
        """True if the size is an integer for all values of its symbols."""
        return self.den == 1 and all(power > 0 for _, power in self.symbols)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.symbols)

    def __mul__(self, other: Size | int) -> Size:
        return _combine(self, Size(other) if isinstance(other, int) else other, 1)

    def __truediv__(self, other: Size | int) -> Size:
        return _combine(self, Size(other) if isinstance(other, int) else other, -1)

    def divisible_by(self, other: Size | int) -> bool:
        """Return True if `other` divides the size, or if it may divide the size for some values of the symbols."""
        quotient = self / other
        return quotient.is_integer or bool(quotient.symbols)

    def bind(self, values: Mapping[str, int]) -> int:
        """Return the size as an integer; `values` holds the values of the symbols.

        Raise HostIRError if a value is missing or the result is not an integer.
        """
        num, den = self.num, self.den
        for name, power in self.symbols:
            if name not in values:
                hint = did_you_mean(name, values) or binding(name)
                raise error(
                    f"unknown size '{name}'",
                    expected=f"one of: {', '.join(sorted(values)) or 'none is bound'}",
                    hint=hint,
                )
            num, den = (num * values[name] ** power, den) if power > 0 else (num, den * values[name] ** -power)
        if not den or num % den:
            bound = ", ".join(f"{n}={values[n]}" for n, _ in self.symbols)
            raise error(
                f"the size {self} {'is not an integer' if den else 'divides by zero'} for {bound}: {num}/{den}",
                hint=f"choose sizes so that {self} is an integer",
            )
        return num // den

    def __str__(self) -> str:
        up = [name for name, power in self.symbols for _ in range(power)]
        down = [name for name, power in self.symbols for _ in range(-power)]
        if self.num != 1 or not up:
            up.insert(0, str(self.num))
        if self.den != 1:
            down.insert(0, str(self.den))
        return "/".join(["*".join(up), *down])

    __repr__ = __str__  # the same as in the text, for printed shapes


ONE = Size()


def binding(name: str) -> str:
    """Return a hint that tells users how to give the symbol `name` a value."""
    return f"bind it: sizes={{'{name}': ...}} in Python, --set {name}=... on the command line"


@dataclass(frozen=True)
class Division:
    """A quotient of sizes that must be an integer, because something is split into equal parts.

    Fields:
        size: the quotient.
        why: a text for messages that names the thing that is split.
        span: the place in the program that needs the quotient.
    """

    size: Size
    why: str = field(compare=False)
    span: Span | None = field(compare=False)


@lru_cache(maxsize=4096)
def _combine(a: Size, b: Size, sign: int) -> Size:
    num, den = (a.num * b.num, a.den * b.den) if sign > 0 else (a.num * b.den, a.den * b.num)
    powers = dict(a.symbols)
    for name, power in b.symbols:
        powers[name] = powers.get(name, 0) + sign * power
    common = gcd(num, den)
    return Size(num // common, den // common, tuple(sorted((n, p) for n, p in powers.items() if p)))


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes; 1 if there are no sizes."""
    result = ONE
    for size in sizes:
        result = result * size
    return result


def _near(text: str) -> str:
    """Return integers near a quotient of two numbers, as the end of a message; an empty string for other sizes."""
    if not (quotient := re.fullmatch(r"(\d+)/(\d+)", text)):
        return ""
    above, below = map(int, quotient.groups())
    low = above // below * below
    return ", such as " + " or ".join(f"{n}/{below}" for n in (low, low + below) if n)


@lru_cache(maxsize=4096)
def _parse(text: str, span: Span | None) -> Size:
    if len(text) > MAX_CHARACTERS and not text.isdecimal():
        raise error(f"a size of {len(text)} characters", span, expected=f"at most {MAX_CHARACTERS}")
    result, operator, rest = ONE, "*", text
    while True:
        term = _TERM.match(rest)
        if term and term[1] and len(term[1]) > DIGITS:
            raise _too_long(span)
        if term and term[1] and int(term[1]) < 1:
            raise error(f"a size must be at least 1, not {term[1]}", span)
        if not term:
            raise error(
                f"cannot read the size '{text}'", span, expected="integers and names joined by * and /, such as 'M/8'"
            )
        one = Size(int(term[1])) if term[1] else Size(symbols=((term[2], 1),))
        result = result * one if operator == "*" else result / one
        rest = rest[term.end() :]
        if not rest:
            if result.den != 1 and not result.symbols:
                raise error(f"the size '{text}' is not an integer", span, expected=f"an integer{_near(text)}")
            if max(result.num, result.den) >= 10**DIGITS:
                raise _too_long(span)
            return result
        operator, rest = rest[0], rest[1:]
        if operator not in "*/":
            raise error(
                f"cannot read the size '{text}'", span, expected="integers and names joined by * and /, such as 'M/8'"
            )


def _too_long(span: Span | None) -> HostIRError:
    return error(f"a size of more than {DIGITS} digits", span, expected=f"a number below 10^{DIGITS}")
