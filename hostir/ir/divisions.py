"""Collect the quotients of sizes that must be integers, and report sizes that make a quotient a fraction.

For example, a size M that is sharded over 8 ranks needs the division M/8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm

from hostir.ir.op import Codec, Statement, Value, codecs_of
from hostir.ir.sizes import Division, Size
from hostir.ir.source import Diagnostic
from hostir.ir.types import TensorType


def divisions_of(inputs: Iterable[Value], statements: Iterable[Statement]) -> tuple[Division, ...]:
    """Return every `Division` that a program needs.

    Several values and statements may need the same quotient. Then the result has a `Division` for each of them, because
    their messages give different reasons. The `Division` with the most helpful reason comes first. A Stream axis of a
    fusion adds no division. It only asks the strategy to use slices.
    """
    statements = tuple(statements)
    named = {id(v): v for v in (*inputs, *(v for s in statements for v in s.named))}
    values = [v for v in named.values() if isinstance(v.type, TensorType)]
    every = [d for v in values for d in _sharding(v)]
    every += [d for s in statements for d in s.divisions()]
    every += [d for v in values for d in _axes(v)]
    every += [d for s in statements for d in _written(s)]
    return tuple(dict.fromkeys(d for d in every if not d.size.is_integer))


def _sharding(value: Value) -> Iterator[Division]:
    for factor, local, over in _factors(value):
        if over and factor.is_integer:
            yield Division(local, f"{value} is{over}", value.span)


def _axes(value: Value) -> Iterator[Division]:
    for factor, local, over in _factors(value):
        yield Division(local, f"{value} has an axis of {factor}{over and ','}{over}", value.span)


def _factors(value: Value) -> Iterator[tuple[Size, Size, str]]:
    """Yield each factor of the value's axes if the factor's extent on one rank may be a fraction.

    Each tuple holds the factor's extent, its extent on one rank, and a text such as ` sharded over 8 ranks`. The text
    is empty if the factor is not sharded.
    """
    type = value.tensor.host()
    for axis in type.axes:
        for factor in axis.factors:
            local = type.local_factor(factor)
            if local.is_integer:
                continue
            over = "" if local == factor.extent else f" sharded over {factor.extent / local} ranks"
            yield factor.extent, local, over


def _written(s: Statement) -> Iterator[Division]:
    for name, codec in codecs_of(type(s)).items():
        if codec is Codec.SIZE:
            size: Size = getattr(s, name)
            yield Division(size, f"'{s.keyword()}' has {name} {size}", s.span)


def misfits(program: str, divisions: Sequence[Division], sizes: Mapping[str, int]) -> list[Diagnostic]:
    """Check the quotients of `divisions` at given sizes; return a diagnostic for each quotient that is no integer.

    Quotients with the same dividend share one diagnostic. `sizes` holds the values of the symbols. `program` is the
    name of the program, for messages.
    """
    alike: dict[tuple[Size, Size], list[Division]] = {}
    for division in divisions:
        alike.setdefault(_apart(division.size), []).append(division)
    wrong = []
    for (dividend, divisor), of in alike.items():
        names = sorted(dividend.names | divisor.names)
        if not names or not all(sizes.get(name, 0) > 0 for name in names):
            continue
        multiple = divisor * lcm(*(division.size.den for division in of))
        if dividend.bind(sizes) % multiple.bind(sizes):
            bound = ", ".join(f"{name}={sizes[name]}" for name in names)
            wrong.append(_refusal(program, bound, dividend, multiple, of, sizes))
    return wrong


def _apart(size: Size) -> tuple[Size, Size]:
    """Return a key for a quotient: its dividend, and the symbols of its divisor.

    Quotients with the same key are reported together. For `3*M/8` the key is (`M`, 1): the 3 is dropped, because it
    has no common divisor with 8. For `3*M/8/K` the key is (`3*M`, `K`).
    """
    above = tuple((name, power) for name, power in size.symbols if power > 0)
    below = tuple((name, -power) for name, power in size.symbols if power < 0)
    return Size(size.num if below else 1, 1, above), Size(1, 1, below)


def _refusal(
    program: str, bound: str, dividend: Size, multiple: Size, of: Sequence[Division], sizes: Mapping[str, int]
) -> Diagnostic:
    (first, *others) = _strongest(of)
    meant = f"{multiple}" if multiple.value is not None else f"{multiple} = {multiple.bind(sizes)}"
    why = " and ".join(division.why for division in (first, *others))
    expected = ""
    if multiple.value is not None and dividend.symbols == ((name := min(dividend.names), 1),):
        low = sizes[name] // multiple.value * multiple.value
        near = [f"{name}={n}" for n in (low, low + multiple.value) if n]
        expected = f"such as {' or '.join(near)}"
    return Diagnostic(
        f"{bound} does not fit @{program}: {dividend} must be a multiple of {meant}, because {why}",
        first.span,
        expected=expected,
        notes=tuple((division.span, division.why) for division in others),
    )


def _strongest(of: Sequence[Division]) -> list[Division]:
    """Return the divisions that no other division implies.

    A division by 16 implies the division by 8 of the same dividend, because 16 is a multiple of 8.
    """
    kept: list[Division] = []
    for division in of:
        if all(other.size.den % division.size.den for other in kept):
            kept = [other for other in kept if division.size.den % other.size.den] + [division]
    return kept
