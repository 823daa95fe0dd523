"""Finds the regions of a buffer that meet another one without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Generic, TypeVar

from hostir.ir.check.regions import Region

T = TypeVar("T")


class Near(Generic[T]):
    """Regions of one buffer, each with something that belongs to it.

    They are sorted by offset within classes of their extent, each twice as long as the one before. So of a class none
    that begins further before a region than the longest of it reaches the region.
    """

    def __init__(self) -> None:
        self.classes: dict[int, list[tuple[int, int]]] = {}  # offset and number
        self.items: list[tuple[Region, T]] = []

    def add(self, region: Region, item: T) -> None:
        places = self.classes.setdefault((region.last - region.offset).bit_length(), [])
        insort(places, (region.offset, len(self.items)))
        self.items.append((region, item))

    def meeting(self, region: Region) -> list[T]:
        """What belongs to the regions that have an element in common with this one, as added."""
        found: list[int] = []
        for bits, places in self.classes.items():
            first = bisect_left(places, (region.offset - (1 << bits) + 1,))
            found += [n for _, n in places[first : bisect_right(places, (region.last, len(self.items)))]]
        return [self.items[n][1] for n in sorted(found) if self.items[n][0].meets(region)]
