"""Reads the parts of which the statements of an nvFuser dump are made: tensors, meshes, extents, index expressions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from hostir.ir.nvfuser_syntax import Devices, Extent, Formula, IterDomain, Operation, Tensor, Token, tokens
from hostir.ir.sizes import Size
from hostir.ir.source import HostIRError, Span, error
from hostir.ir.types import DTYPES, DType

TENSOR = re.compile(r"(T\d{1,18})(?:_(?:g|l|s|t|sym))?(?:_(\w+))?", re.ASCII)
_DOMAIN = re.compile(r"([a-z])([A-Z]\w*?|[a-z]+Idx(?:\.([xyz]))?|)(\d{1,18})", re.ASCII)
_STREAM_AXES = ("streamIdx", "StreamIdx", "Stream")
_DEEPEST = 60  # loops, parentheses and operators inside one another
FLOATS = {"float": DTYPES["f32"], "__half": DTYPES["f16"], "__bfloat": DTYPES["bf16"]}

T = TypeVar("T")


class Scanner:
    """Walks over the tokens of a text. Every mistake raises a HostIRError at its place."""

    def __init__(self, text: str, file: str) -> None:
        self.tokens = tokens(text, file)
        last = self.tokens[-1].span if self.tokens else Span(file, 1)
        self.end = Token("", Span(file, last.line, last.column + last.width, 1, last.text), True)
        self.at = 0
        self.depth = 0
        self.symbols: dict[str, None] = {}  # the names of sizes, in the order in which they first appear

    # Tokens ------------------------------------------------------------------------------------------------------
    @property
    def next(self) -> Token:
        return self.ahead(0)

    def ahead(self, n: int) -> Token:
        return self.tokens[self.at + n] if self.at + n < len(self.tokens) else self.end

    def take(self) -> Token:
        token = self.next
        self.at += 1
        return token

    def skip(self, text: str) -> bool:
        """Takes a token if it is this one."""
        if self.next.text != text:
            return False
        self.at += 1
        return True

    def expect(self, *texts: str) -> Token:
        if self.next.text not in texts:
            raise self.unexpected(" or ".join(f"'{t}'" for t in texts))
        return self.take()

    def unexpected(self, expected: str) -> HostIRError:
        if self.next is self.end:
            return error("the dump ends too early", self.end.span, expected=expected)
        return error(f"unexpected '{self.next.text}'", self.next.span, expected=expected)

    def deeper(self, read: Callable[[], T]) -> T:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise error(f"more than {_DEEPEST} levels of nesting", self.next.span)
        result = read()
        self.depth -= 1
        return result

    def step_over(self) -> None:
        """Takes the value of an option that has no meaning here."""
        open = 0
        while self.next is not self.end and (open or self.next.text not in (",", ")")):
            open += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(self.take().text, 0)

    def integer(self) -> int:
        if not re.fullmatch(r"\d{1,18}", self.next.text, re.ASCII):
            raise self.unexpected("an integer")
        return int(self.take().text)

    # Tensors -----------------------------------------------------------------------------------------------------
    def tensor(self) -> Tensor:
        head = self.next
        match = TENSOR.fullmatch(head.text)
        if match is None:
            raise self.unexpected("a tensor, such as T0_g_float[iS0{i0}, iS1{i2}]")
        self.take()
        self.expect("[")
        domains: list[IterDomain] = []
        while not self.skip("]"):
            domains.append(self.domain())
            if self.next.text != "]":
                self.expect(",")
        devices = self.devices() if self.next.text == "(" and self.ahead(1).text == "DeviceMesh" else None
        while self.next.text in ("ca_pos", "produce_pos"):
            self.take()
            self.expect("(")
            self.integer()
            self.expect(")")
        return Tensor(match[1], self.dtype(match[2], head), tuple(domains), devices, head.span)

    def dtype(self, name: str | None, head: Token) -> DType:
        if name is None:  # the first versions did not print it
            return DTYPES["f32"]
        if name not in FLOATS:
            expected = f"one of: {', '.join(FLOATS)}"
            raise error(f"tensors of '{name}' have no meaning here", head.span, expected=expected)
        return FLOATS[name]

    def devices(self) -> Devices:
        self.expect("(")
        span = self.expect("DeviceMesh").span
        self.expect("{")
        grid = self.next.text == "{"
        rows: list[tuple[int, ...]] = []
        while grid and self.skip("{"):
            rows.append(self.integers("}"))
        if not grid:
            rows.append(self.integers("}"))
        else:
            self.expect("}")
        self.expect(")")
        all = [d for row in rows for d in row]
        if not all or len({len(row) for row in rows}) > 1 or len(set(all)) != len(all):
            expected = "{0 1 2 3} or {{0 1}{2 3}}"
            raise error("a mesh needs devices, each once, in rows of one length", span, expected=expected)
        return Devices(tuple(rows), grid)

    def integers(self, end: str) -> tuple[int, ...]:
        found: list[int] = []
        while not self.skip(end):
            found.append(self.integer())
        return tuple(found)

    def team(self) -> tuple[int, ...]:
        span = self.expect("(").span
        team = self.integers(")")
        if not team or len(set(team)) != len(team):
            raise error("a team needs devices, each once", span, expected="such as (0 1 2 3)")
        return team

    def word(self, expected: str) -> Token:
        if not re.fullmatch(r"[A-Za-z_][\w.]*", self.next.text, re.ASCII):
            raise self.unexpected(expected)
        return self.take()

    def domain(self) -> IterDomain:
        head = self.next
        match = _DOMAIN.fullmatch(head.text)
        if match is None:
            raise self.unexpected("an axis, such as iS0{i0} or ideviceIdx.x1{i2}")
        self.take()
        kind, parallel, device, number = match.groups()
        on = device if parallel.startswith("deviceIdx") else "stream" if parallel in _STREAM_AXES else ""
        if kind not in "irb" or on is None or on == "z" or not (on or parallel == "S"):
            hint = "host statements know serial, deviceIdx.x, deviceIdx.y and streamIdx axes"
            raise error(f"the axis '{head.text}' has no meaning here", head.span, hint=hint)
        self.expect("{")
        extent = self.extent()
        if self.next.text in (":", "ex"):
            message = f"the axis '{head.text}' has an offset or is expanded"
            raise error(message, self.next.span, expected="a plain extent")
        self.expect("}")
        rfactor = self.next.text.startswith("rf")
        if re.fullmatch(r"(rf)?(_[pc])*", self.next.text) and self.next is not self.end:
            self.take()
        return IterDomain(kind, on, int(number), extent, rfactor, head.span)

    # Extents and indices -----------------------------------------------------------------------------------------
    def extent(self) -> Extent:
        left = self.deeper(self.extent_atom)
        while self.next.text in ("*", "/", "+", "-", "%"):
            sign = self.take()
            if sign.text not in "*/":
                raise error(f"'{sign.text}' in a size", sign.span, expected="products and quotients")
            right = self.deeper(self.extent_atom)
            left = Extent(left.size * right.size if sign.text == "*" else left.size / right.size)
        return left

    def extent_atom(self) -> Extent:
        if self.next.text == "ceilDiv":
            self.take()
            self.expect("(")
            whole = self.extent()
            self.expect(",")
            part = self.extent()
            self.expect(")")
            return Extent(whole.size / part.size, (*whole.splits, part.size))
        if self.skip("("):
            inner = self.extent()
            self.expect(")")
            return inner
        if self.next.text[:1].isdecimal():
            span = self.next.span
            return Extent(Size.of(self.integer(), span))
        name = self.word("a size").text
        if "." in name:
            raise error(f"'{name}' is no size", self.ahead(-1).span, expected="an integer or a name")
        self.symbols.setdefault(name)
        return Extent(Size.of(name))

    def formula(self) -> Formula:
        left = self.deeper(self.term)
        for _ in self.signs("+", "-"):
            left = Operation(self.take().text, left, self.deeper(self.term))
        return left

    def term(self) -> Formula:
        left = self.atom()
        for _ in self.signs("*", "/", "%"):
            left = Operation(self.take().text, left, self.atom())
        return left

    def signs(self, *signs: str) -> Iterator[None]:
        """Goes on while one of these signs is next; so many in a row are no index expression of nvFuser's."""
        for n in itertools.count():
            if self.next.text not in signs:
                return
            if n == _DEEPEST:
                raise error(f"more than {_DEEPEST} operators in a row", self.next.span)
            yield

    def atom(self) -> Formula:
        if self.skip("("):
            inner = self.formula()
            self.expect(")")
            return inner
        if not re.fullmatch(r"0[xX][0-9a-fA-F]+|\d{1,18}|[A-Za-z_]\w*", self.next.text, re.ASCII):
            raise self.unexpected("a loop index or an integer")
        return self.take()
