"""Choose small values for the symbols of a program. A check with these values represents all values.

The values make all sizes of the program integers. The order of events depends on the number of rounds of each loop. So
a symbol that counts rounds is larger than the number of streams, if possible. Other symbols are as small as possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product as product_of
from math import lcm

from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.source import HostIRError

TRIES = 4096


def small_sizes(program: Program, chosen: Mapping[str, int]) -> dict[str, int] | None:
    """Return a value for every symbol of a program: the value in `chosen` if it has one, else a small value.

    Return None if no small values make all sizes integers.
    """
    bound = {name: value for name, value in chosen.items() if name in program.size_names}
    free = sorted(program.size_names - bound.keys())
    if not free:
        return bound
    sizes = [division.size for division in program.divisions]
    rounds = {n for s in program.walk() if s.bodies for n in s.repeats.names}
    least = lcm(*(size.den for size in sizes), *(n for mesh in program.meshes for n in mesh.shape))
    many = 2 * program.streams + 1
    counts = [least * -(-many // least), many, 3, 2, 1]
    extents = [least, 2 * least, 4 * least, least**2, least * many, 1]
    choices = [counts if name in rounds else extents for name in free]
    for _, values in zip(range(TRIES), product_of(*choices), strict=False):
        candidate = bound | dict(zip(free, values, strict=True))
        if _all_integers(sizes, candidate):
            return candidate
    return None


def _all_integers(sizes: list[Size], values: Mapping[str, int]) -> bool:
    try:
        return all(size.bind(values) for size in sizes)
    except HostIRError:
        return False
