"""Generate a Lark grammar from the registered statement classes, parse texts with it, and explain syntax errors."""

from __future__ import annotations

import re
from functools import cache

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from hostir.ir.op import REGISTRY, VALUE_CODECS, Codec, Phase, Statement, codecs_of
from hostir.ir.source import HostIRError, Span, did_you_mean, error
from hostir.ir.text import FieldPart, OptionalPart, SyntaxPart, template

BASE = r"""
start: _HOSTIR INT mesh* head
mesh: _MESH AT "[" NAME ("," NAME)* "]" "=" (row | grid) [_HOSTS INT]
grid: ("(" (row | grid) ")")+
row: INT+
head: PHASE AT "(" [params] ")" "->" "(" [names] ")" [_STREAMS INT] block
params: binder ("," binder)*
names: VALUE ("," VALUE)*
binder: VALUE [":" type]
type: NAME "[" [axis ("," axis)*] "]" [partial] [place]
partial: _PARTIAL "(" NAME ("," NAME)* ")"
place: AUTO | _ON AT
axis: factor | "(" factor+ ")"
factor: size [AT]
size: (INT | NAME) ((STAR | SLASH) (INT | NAME))*
?expr: product ((PLUS | MINUS) product)*
?product: atom ((STAR | SLASH | PERCENT) atom)*
?atom: INT | VALUE | "(" expr ")"
ints: "(" [INT ("," INT)*] ")"
block: "{" _statement* "}"

VALUE: /%[A-Za-z_]\w*/
AT: /@[A-Za-z_]\w*/
NAME: /[A-Za-z_]\w*/
INT: /\d+/
NUMBER: /-?\d+(\.\d+)?(e[+-]?\d+)?/
PHASE.3: /(fusion|program)(?![\w.])/
AUTO.3: /auto(?![\w.])/
STAR: "*"
SLASH: "/"
PERCENT: "%"
PLUS: "+"
MINUS: "-"
COMMENT.9: /\/\/[^\n]*/
%ignore COMMENT
%ignore /\s+/
"""

FRAGMENT = {
    Codec.STREAM: "expr",
    Codec.INDEX: "expr",
    Codec.SIZE: "size",
    Codec.INT: "INT",
    Codec.INTS: "ints",
    Codec.NUMBER: "NUMBER",
    Codec.NAME: "NAME",
    Codec.BLOCK: "block",
} | dict.fromkeys(VALUE_CODECS, "VALUE")


@cache
def grammar() -> tuple[str, dict[str, tuple[type[Statement], Phase]]]:
    """Return the text of the grammar, and a map from the name of a statement rule to its statement class and phase."""
    words = {"hostir", "mesh", "hosts", "streams", "partial", "on"}
    rules: dict[str, tuple[type[Statement], Phase]] = {}
    lines: list[str] = []

    def piece(part: SyntaxPart, cls: type[Statement], leads: bool) -> str:
        if isinstance(part, FieldPart):
            codec = codecs_of(cls)[part.name]
            return "binder" if leads and codec in (Codec.DEFINE, Codec.WRITE) else FRAGMENT[codec]
        if isinstance(part, OptionalPart):
            return "[" + " ".join(piece(p, cls, False) for p in part.parts) + "]"
        tokens = re.findall(r"\w+|->|\.\.|[^\s\w]", part)
        words.update(t for t in tokens if t.isidentifier())
        return " ".join(f"_{t.upper()}" if t.isidentifier() else f'"{t}"' for t in tokens)

    for keyword, cls in REGISTRY.items():
        # A statement with the same syntax in both phases has one rule.
        phase_of = {cls.form(phase): phase for phase in Phase if phase in cls.phases}
        for form, phase in phase_of.items():
            rule = f"{keyword}_{phase.name.lower()}"
            rules[rule] = (cls, phase)
            lines.append(f"{rule}: " + " ".join(piece(p, cls, i == 0) for i, p in enumerate(template(form))))
    terminals = [f"_{w.upper()}.2: /{w}(?![\\w.])/" for w in sorted(words)]
    return "\n".join([BASE, "_statement: " + " | ".join(rules), *lines, *terminals]), rules


@cache
def _lark() -> Lark:
    return Lark(grammar()[0], parser="lalr", maybe_placeholders=True, propagate_positions=True)


def tree_of(text: str, file: str) -> Tree[Token]:
    """Return the parse tree of a text. Raise HostIRError at the first unexpected word."""
    try:
        return _lark().parse(text)
    except UnexpectedInput as unexpected:
        raise _syntax_error(unexpected, text, file) from None


def _syntax_error(unexpected: UnexpectedInput, text: str, file: str) -> HostIRError:
    lines = text.split("\n")
    expects = _expected(unexpected)
    if isinstance(unexpected, UnexpectedToken) and unexpected.token.type == "$END":
        last = len(text.rstrip().split("\n"))
        span = Span(file, last, len(lines[last - 1].rstrip()) + 1, 1, lines[last - 1])
        return error("the text ends too early", span, expected=_one_of(expects))
    line, column = unexpected.line, unexpected.column
    source = lines[line - 1]
    word = (re.match(r"[%@]?\w+|\S", source[column - 1 :]) or [source[column - 1 : column]])[0]
    span = Span(file, line, column, len(word), source)
    starts = {f"_{k.upper()}" for k in REGISTRY} & set(expects)
    if len(starts) > 3:
        if word in REGISTRY:
            return error(f"'{word}' does not stand alone: it defines a value", span, hint=f"write '%x = {word} ...'")
        hint = did_you_mean(word, REGISTRY)
        return error(f"unknown statement '{word}'", span, expected="a statement or '}'", hint=hint)
    near = did_you_mean(word, [_spell(e).strip("'") for e in expects])
    return error(f"unexpected '{word}'", span, expected=_one_of(expects), hint=near)


def _expected(unexpected: UnexpectedInput) -> list[str]:
    """Return the names of the terminals that the grammar allows at the place of a syntax error."""
    if isinstance(unexpected, UnexpectedToken):
        return sorted(unexpected.accepts or unexpected.expected)
    return sorted(unexpected.allowed or ()) if isinstance(unexpected, UnexpectedCharacters) else []


def _spell(terminal: str) -> str:
    """Return the text that stands for a terminal in messages: a description such as `a %name`, or a word in quotes."""
    named = {
        "VALUE": "a %name",
        "AT": "a @name",
        "NAME": "a name",
        "INT": "an integer",
        "PHASE": "'fusion' or 'program'",
    }
    if terminal in named:
        return named[terminal]
    pattern = next((t.pattern.value for t in _lark().terminals if t.name == terminal), terminal)
    return "'" + re.sub(r"\(\?!.*|\\", "", pattern) + "'"


def _one_of(terminals: list[str]) -> str:
    spelled = [_spell(t) for t in terminals]
    return spelled[0] if len(spelled) == 1 else "one of: " + ", ".join(spelled) if spelled else ""
