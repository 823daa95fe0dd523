"""Split the text of a dump into tokens, and step through the tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hostir.ir.source import HostIRError, Span, error

MAX_DEPTH = 60  # the deepest nesting of loops, parentheses and operators
T = TypeVar("T")
_TOKEN = re.compile(
    r"(?P<comment>//.*)"
    r"|%HostIrContainer|->"
    r"|0[xX][0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
    r"|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
    r"|\S",
    re.ASCII,
)
_RANK = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:", re.ASCII)  # the prefix that mpirun adds to each line


@dataclass(frozen=True)
class Token:
    """A word, a number or a sign, with its position. `leads` is True if it is the first token of its line."""

    text: str
    span: Span
    leads: bool


def tokens(text: str, file: str) -> list[Token]:
    """Split a text into tokens, and drop comments. This never fails: an unknown character is a token."""
    result: list[Token] = []
    for number, line in enumerate(text.split("\n"), 1):
        prefix = _RANK.match(line)
        leads = True
        for match in _TOKEN.finditer(line, prefix.end() if prefix else 0):
            if match["comment"] is not None:
                continue
            result.append(Token(match[0], Span(file, number, match.start() + 1, len(match[0]), line), leads))
            leads = False
    return result


class Cursor:
    """A position in the tokens of a text. The methods read tokens and raise a HostIRError at an unexpected token.

    Fields:
        tokens: all tokens.
        end: the token that stands for the end of the text.
        at: the index of the next token.
        depth: the current depth of nesting.
    """

    def __init__(self, text: str, file: str) -> None:
        self.tokens = tokens(text, file)
        last = self.tokens[-1].span if self.tokens else Span(file, 1)
        self.end = Token("", Span(file, last.line, last.column + last.width, 1, last.text), True)
        self.at = 0
        self.depth = 0

    @property
    def next(self) -> Token:
        return self.peek(0)

    def peek(self, n: int) -> Token:
        return self.tokens[self.at + n] if self.at + n < len(self.tokens) else self.end

    def take(self) -> Token:
        token = self.next
        self.at += 1
        return token

    def skip(self, text: str) -> bool:
        """If the next token is `text`, take it and return True. Otherwise return False."""
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
        if self.depth > MAX_DEPTH:
            raise error(f"more than {MAX_DEPTH} levels of nesting", self.next.span)
        result = read()
        self.depth -= 1
        return result

    def step_over(self) -> None:
        """Skip the value of an option: all tokens before the next comma or closing parenthesis outside brackets."""
        open = 0
        while self.next is not self.end and (open or self.next.text not in (",", ")")):
            open += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(self.take().text, 0)

    def integer(self) -> int:
        if not re.fullmatch(r"\d{1,18}", self.next.text, re.ASCII):
            raise self.unexpected("an integer")
        return int(self.take().text)

    def listed(self, read: Callable[[], T], start: str, end: str) -> tuple[T, ...]:
        """Read a list of items, separated by commas, between the signs `start` and `end`."""
        items: list[T] = []
        self.expect(start)
        while not self.skip(end):
            items.append(read())
            if self.next.text != end:
                self.expect(",")
        return tuple(items)

    def integers(self, end: str) -> tuple[int, ...]:
        numbers: list[int] = []
        while not self.skip(end):
            numbers.append(self.integer())
        return tuple(numbers)

    def word(self, expected: str) -> Token:
        if not re.fullmatch(r"[A-Za-z_][\w.]*", self.next.text, re.ASCII):
            raise self.unexpected(expected)
        return self.take()
