"""Write the text of a fusion.

Sizes have names. M is the axis that is gathered or scattered. P0, P1, ... are the other axes of the rows; the first
`outside` of these stand before M in the operand. Communication needs M outermost: `permute` moves it there. Operands
may have any strides. Where memory must be dense, lowering inserts a copy, and the text of the program shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostir.ir import parse
from hostir.ir.program import Program


def fusion(name: str, ranks: int, inputs: Sequence[str], outputs: Sequence[str], body: Sequence[str]) -> Program:
    """Return a fusion on a mesh of `ranks` ranks, from the text of its parts."""
    mesh = " ".join(map(str, range(ranks)))
    head = f"fusion @{name}({', '.join(inputs)}) -> ({', '.join(outputs)})"
    lines = "".join(f"  {line}\n" for line in body)
    return parse(f"hostir 1\nmesh @mesh [didx] = {mesh}\n{head} {{\n{lines}}}\n", f"@{name}")


def extra_sizes(count: int) -> list[str]:
    """Return the names of the sizes of the rows' other axes."""
    return [f"P{i}" for i in range(count)]


def type_of(dtype: str, *sizes: Any) -> str:
    """Return a tensor's type as text."""
    return f"{dtype}[{', '.join(map(str, sizes))}]"


def in_front(x: str, dtype: str, sizes: Sequence[Any], outside: int, partial: str = "") -> tuple[str, list[str], str]:
    """Return an operand with its type, the statements that move M outermost, and the name of the result.

    `sizes` begin with M.
    """
    first, before, after = sizes[0], sizes[1 : outside + 1], sizes[outside + 1 :]
    if not outside:
        return f"{x}: {type_of(dtype, *sizes)}{partial}", [], x
    order = (outside, *range(outside), *range(outside + 1, len(sizes)))
    moved = f"{x}_front: {type_of(dtype, *sizes)}{partial} = permute {x} {order}"
    return f"{x}: {type_of(dtype, *before, first, *after)}{partial}", [moved], f"{x}_front"


def moved_back(dtype: str, sizes: Sequence[Any], outside: int) -> list[str]:
    """Return the statements that copy `%c0`, whose `sizes` begin with M, to `%c`, with M behind `outside` axes."""
    order = (*range(1, outside + 1), 0, *range(outside + 1, len(sizes)))
    result = type_of(dtype, *sizes[1 : outside + 1], sizes[0], *sizes[outside + 1 :])
    return [f"%c_back: {result} = permute %c0 {order}", f"%c: {result} = copy %c_back"]
