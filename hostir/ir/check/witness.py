"""Small sizes that stand for all: values for the symbols of a program with which everything in it is whole.

What the orders of a program depend on is how often its loops go round. So a symbol that counts rounds gets more of them
than there are streams, where that can be, and the others get the least that divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import lcm

from hostir.ir.host_ops import For
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.source import HostIRError

TRIES = 4096


def small_sizes(program: Program, given: Mapping[str, int]) -> dict[str, int] | None:
    """A value for every symbol of a program, or None where no small ones are found."""
    bound = {name: value for name, value in given.items() if name in program.size_names}
    free = sorted(program.size_names - bound.keys())
    if not free:
        return bound
    sizes = [division.size for division in program.divisions]
    rounds = {n for s in program.walk() if isinstance(s, For) for n in s.count.names}
    least = lcm(*(size.den for size in sizes), *(n for mesh in program.meshes for n in mesh.shape))
    many = 2 * program.streams + 1
    counts = [least * -(-many // least), many, 3, 2, 1]
    extents = [least, 2 * least, 4 * least, least**2, least * many, 1]
    choices = [counts if name in rounds else extents for name in free]
    for _, values in zip(range(TRIES), product(*choices), strict=False):
        candidate = bound | dict(zip(free, values, strict=True))
        if _whole(sizes, candidate):
            return candidate
    return None


def _whole(sizes: list[Size], values: Mapping[str, int]) -> bool:
    try:
        return all(size.bind(values) for size in sizes)
    except HostIRError:
        return False
