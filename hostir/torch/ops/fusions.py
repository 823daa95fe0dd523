"""Write the text of a fusion, the sharded computation that an operator runs.

The axes of a tensor of rows have symbolic sizes. M is the size of the axis that is gathered or scattered. P0, P1, ...
are the sizes of the other axes. The last axis of a matmul's operand is not among them. In the functions of all
families, `extra` is the number of these other axes, and `outside` is the number of other axes that stand before M in
the operand.

Communication needs M outermost, so the fusion moves it there by `permute`. Operands may have any strides. If a
statement needs contiguous memory, lowering inserts a copy, which the text of the program shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostir.ir import parse
from hostir.ir.program import Program


def fusion(name: str, ranks: int, inputs: Sequence[str], outputs: Sequence[str], body: Sequence[str]) -> Program:
    """Return a fusion on a mesh of `ranks` ranks, parsed from the given parts of its text.

    `inputs` are names with types, such as `%a: bf16[M, 64]`. `outputs` are names. `body` holds the statements.
    """
    mesh = " ".join(map(str, range(ranks)))
    head = f"fusion @{name}({', '.join(inputs)}) -> ({', '.join(outputs)})"
    lines = "".join(f"  {line}\n" for line in body)
    return parse(f"hostir 1\nmesh @mesh [didx] = {mesh}\n{head} {{\n{lines}}}\n", f"@{name}")


def extra_sizes(count: int) -> list[str]:
    """Return the names of `count` sizes: P0, P1, ..."""
    return [f"P{i}" for i in range(count)]


def type_of(dtype: str, *sizes: Any) -> str:
    """Return the text of a tensor's type, such as `bf16[M, 4096]`."""
    return f"{dtype}[{', '.join(map(str, sizes))}]"


def in_front(x: str, dtype: str, sizes: Sequence[Any], outside: int, partial: str = "") -> tuple[str, list[str], str]:
    """Return the text that declares the operand `x` and makes M its outermost axis.

    Args:
        x: the operand's name.
        dtype: its dtype.
        sizes: its sizes, with M first.
        outside: the number of axes that stand before M in the operand.
        partial: the text after the type, such as ` partial(didx)`.

    Returns:
        The operand's declaration, the statements that move M, and the name of the moved tensor.
    """
    first, before, after = sizes[0], sizes[1 : outside + 1], sizes[outside + 1 :]
    if not outside:
        return f"{x}: {type_of(dtype, *sizes)}{partial}", [], x
    order = (outside, *range(outside), *range(outside + 1, len(sizes)))
    moved = f"{x}_front: {type_of(dtype, *sizes)}{partial} = permute {x} {order}"
    return f"{x}: {type_of(dtype, *before, first, *after)}{partial}", [moved], f"{x}_front"


def moved_back(dtype: str, sizes: Sequence[Any], outside: int) -> list[str]:
    """Return the statements that copy `%c0` to `%c`, and move M from the first position to position `outside`.

    `sizes` are the sizes of `%c0`.
    """
    order = (*range(1, outside + 1), 0, *range(outside + 1, len(sizes)))
    result = type_of(dtype, *sizes[1 : outside + 1], sizes[0], *sizes[outside + 1 :])
    return [f"%c_back: {result} = permute %c0 {order}", f"%c: {result} = copy %c_back"]
