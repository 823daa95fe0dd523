"""Finds the regions of a buffer that meet another one without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from hostir.ir.check.regions import Region

T = TypeVar("T")


class Near(Generic[T]):
    """Regions of one buffer, each with something that belongs to it.

    They are sorted by offset within classes of their extent, each twice as long as the one before. So of a class none
    that begins further before a region than the longest of it reaches the region.

    Regions with gaps lie in each other's gaps, as the columns of a matrix do. Those of one outermost stride are classes
    of their own, in which offsets and extents are taken modulo the stride.
    """

    def __init__(self) -> None:
        self.classes: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by stride and extent: offset and number
        self.items: list[tuple[Region, T]] = []

    def add(self, region: Region, item: T) -> None:
        stride = 0 if region.dense else region.dims[0][1]
        places = self.classes.setdefault((stride, _extent(region, stride).bit_length()), [])
        insort(places, (region.offset % stride if stride else region.offset, len(self.items)))
        self.items.append((region, item))

    def meeting(self, region: Region) -> list[T]:
        """What belongs to the regions that have an element in common with this one, as added."""
        found: list[int] = []
        for (stride, bits), places in self.classes.items():
            earliest = region.offset - (1 << bits) + 1
            for first, last in _stretches(earliest, region.offset + _extent(region, stride), stride):
                found += [
                    n for _, n in places[bisect_left(places, (first,)) : bisect_right(places, (last, len(self.items)))]
                ]
        return [self.items[n][1] for n in sorted(found) if self.items[n][0].meets(region)]


def _extent(region: Region, stride: int) -> int:
    """How far a region reaches behind its offset; unless the stride is 0, modulo that."""
    return sum((n - 1) * s for n, s in region.dims if not stride or s % stride)


def _stretches(first: int, last: int, stride: int) -> Iterator[tuple[int, int]]:
    """The integers from the first to the last; unless the stride is 0, modulo that."""
    if not stride:
        yield first, last
    elif last - first + 1 >= stride:
        yield 0, stride - 1
    elif first % stride <= last % stride:
        yield first % stride, last % stride
    else:
        yield 0, last % stride
        yield first % stride, stride - 1
