"""Compute with strided views: the sets of elements that views access, and the strides of reshaped views.

Shapes and strides count elements, as in torch. All questions about sets of elements get exact answers, for every view.

The answers are fast if the strides of a view nest: one step along an axis leads past all elements that the inner axes
reach. This holds for every view that `select`, `chunk`, `permute` or `reshape` makes of a dense buffer. Two such views
are compared axis by axis, from the outermost axis inwards. With other views, the steps along an axis may be compared
one by one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np

Dims = tuple[tuple[int, int], ...]  # extent and stride, outermost first


@dataclass(frozen=True)
class Region:
    """The elements `offset + i0 * stride0 + i1 * stride1 + ...` of a buffer.

    Fields:
        offset: the position of the first element in the buffer.
        dims: the extent and the stride of each axis, with the largest stride first. Axes are merged where possible, so
            views of the same elements in different shapes have equal regions.
    """

    offset: int
    dims: Dims

    @staticmethod
    def of(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Region:
        """Return the region of a view; `offset` and `strides` count elements."""
        return Region(offset, _dims(shape, strides))

    @property
    def empty(self) -> bool:
        """True if the region has no elements."""
        return any(n == 0 for n, _ in self.dims)

    @cached_property
    def last(self) -> int:
        """The position of the last element in the buffer."""
        return self.offset + _span(self.dims)

    @property
    def dense(self) -> bool:
        """True if the region has no gaps."""
        return _dense(self.dims)

    def meets(self, other: Region) -> bool:
        """Return True if the two regions have an element in common."""
        if self.offset > other.last or other.offset > self.last:  # true of most pairs
            return False
        return self == other or _meet(self.offset, self.dims, other.offset, other.dims)


@lru_cache(maxsize=1 << 12)  # the views of different ranks have the same shapes
def _dims(shape: tuple[int, ...], strides: tuple[int, ...]) -> Dims:
    pairs = sorted(((n, s) for n, s in zip(shape, strides, strict=True) if n != 1), key=lambda d: -d[1])
    dims: list[tuple[int, int]] = []
    for n, s in pairs:
        if dims and dims[-1][1] == n * s:
            dims[-1] = (dims[-1][0] * n, s)
        else:
            dims.append((n, s))
    return tuple(dims)


def _span(dims: Dims) -> int:
    return sum((n - 1) * s for n, s in dims)


@lru_cache(maxsize=1 << 16)
def _meet(a: int, dims: Dims, b: int, others: Dims) -> bool:
    if a > b + _span(others) or b > a + _span(dims):
        return False
    if (dims or others) and (not dims or (others and others[0][1] > dims[0][1])):
        a, dims, b, others = b, others, a, dims
    if not dims or (_dense(dims) and _dense(others)):
        return True  # the ranges of both sets overlap and have no gaps
    (n, s), inner = dims[0], dims[1:]
    m, t = others[0] if others else (1, s)
    if t == s:
        return _meet_in_step(a, n, inner, b, m, others[1:], s)
    if s % t == 0 and m * t > s:
        per = s // t  # the number of steps of `others` that are as long as one step of `dims`
        full, rest = divmod(m, per)
        if rest and _meet(a, dims, b + full * s, ((rest, t), *others[1:])):
            return True
        return _meet(a, dims, b, ((full, s), (per, t), *others[1:]))
    first = max(0, -((a + _span(inner) - b) // s))
    last = min(n - 1, (b + _span(others) - a) // s)
    return any(_meet(a + i * s, inner, b, others) for i in range(first, last + 1))


def _dense(dims: Dims) -> bool:
    return not dims or (len(dims) == 1 and dims[0][1] == 1)


def _meet_in_step(a: int, n: int, inner: Dims, b: int, m: int, other: Dims, s: int) -> bool:
    """Return True if two sets with the same outermost stride `s` have an element in common.

    A set consists of copies of an inner set, each `s` elements after the previous copy. So only the distance between a
    copy of the first inner set and a copy of the second inner set matters. Each possible distance is tried once.

    Args:
        a, n, inner: the first element, the number of copies and the inner axes of the first set.
        b, m, other: the first element, the number of copies and the inner axes of the second set.
        s: the stride.
    """
    gap = b - a
    for steps in range(-((_span(inner) - gap) // s), (gap + _span(other)) // s + 1):
        if max(0, steps) <= min(n - 1, m - 1 + steps) and _meet(a + steps * s, inner, b, other):
            return True
    return False


@lru_cache(maxsize=256)
def _runs(region: Region) -> Any:
    """Return the contiguous runs of elements of a region, in ascending order.

    The result is an array with one row `[first, last + 1]` for each run.
    """
    dims, length = region.dims, 1
    if dims and dims[-1][1] == 1:
        dims, length = dims[:-1], dims[-1][0]
    starts = np.array([region.offset], dtype=np.int64)
    for n, s in dims:
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * s).reshape(-1)
    return np.stack([starts, starts + length], axis=1)


def covered(region: Region, by: Iterable[Region], within: Region | None = None) -> bool:
    """Return True if every element of `region` is in at least one of the regions `by`.

    If `within` is given, elements of `region` outside `within` are ignored.
    """
    near = [r for r in dict.fromkeys(by) if r.offset <= region.last and region.offset <= r.last]
    if any(r == region or (_dense(r.dims) and r.offset <= region.offset and region.last <= r.last) for r in near):
        return True
    mine = _runs(region) if within is None else _common(_runs(region), _runs(within))
    if not near or not len(mine):
        return not len(mine)
    runs = np.concatenate([_runs(r) for r in near])
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    fresh = np.concatenate([[True], runs[1:, 0] > reach[:-1]])  # True for each run that no earlier run touches
    starts, ends = runs[fresh, 0], np.append(reach[:-1][fresh[1:]], reach[-1])
    at = np.searchsorted(starts, mine[:, 0], side="right") - 1
    return bool(np.all((at >= 0) & (mine[:, 1] <= ends[at])))


def _common(runs: Any, others: Any) -> Any:
    """Return the intersection of two arrays of runs, as an array of runs."""
    first = np.searchsorted(others[:, 1], runs[:, 0], side="right")
    count = np.maximum(np.searchsorted(others[:, 0], runs[:, 1], side="left") - first, 0)
    mine = np.repeat(np.arange(len(runs)), count)
    nth = np.arange(len(mine)) - np.repeat(np.cumsum(count) - count, count)
    other = others[first[mine] + nth]
    return np.stack([np.maximum(runs[mine, 0], other[:, 0]), np.minimum(runs[mine, 1], other[:, 1])], axis=1)


Extents = tuple[int, ...]


@lru_cache(maxsize=1 << 12)
def dense_strides(shape: Extents) -> Extents:
    """Return the strides of a dense tensor in row-major order."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=1 << 12)
def is_dense(shape: Extents, strides: Extents) -> bool:
    """Return True if the elements are contiguous in row-major order. The strides of axes of extent 1 do not matter."""
    return 0 in shape or all(n == 1 or s == t for n, s, t in zip(shape, strides, dense_strides(shape), strict=True))


@lru_cache(maxsize=1 << 12)
def view_strides(shape: Extents, strides: Extents, new: Extents) -> Extents | None:
    """Return the strides of a tensor after a reshape to the shape `new`; None if the reshape needs a copy.

    A reshape needs a copy exactly if torch's `Tensor.view` refuses it. The old axes are merged as far as possible: an
    axis merges with its inner axes if its stride equals the extent of the merged inner axes times their stride. Each
    merged axis must be the product of some of the new axes.
    """
    if prod(shape) != prod(new):
        return None
    if 0 in shape:
        return strides if shape == new else dense_strides(new)
    if not shape:
        return (1,) * len(new)
    new_strides: list[int] = []
    left = list(new)
    # The number of elements and the innermost stride of the axes that are merged at this point of the loop.
    size, step = 1, strides[-1]
    for axis in range(len(shape) - 1, -1, -1):
        size *= shape[axis]
        if axis and (shape[axis - 1] == 1 or strides[axis - 1] == size * step):
            continue  # the next axis merges too
        taken = 1
        while left and (taken < size or left[-1] == 1):
            new_strides.append(taken * step)
            taken *= left.pop()
        if taken != size:
            return None
        size, step = 1, strides[axis - 1]
    return tuple(reversed(new_strides))


T = TypeVar("T")


class Near(Generic[T]):
    """A search index for regions of one buffer. It finds all regions that have a common element with a query region.

    Each region is stored with a value. Regions are grouped into classes by their extent, the distance from their first
    to their last element. All extents in a class are below the same power of two. Within a class, regions are sorted by
    offset. So a query has to look only at regions that begin at most this power of two before the queried region.

    Two regions with gaps, such as two columns of a matrix, may have no common element although their ranges overlap.
    So regions with gaps are also grouped by their outermost stride, and compared modulo this stride.
    """

    def __init__(self) -> None:
        # For each outermost stride (0 without gaps) and class of extents: pairs of an offset and an index of `items`.
        self.classes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.items: list[tuple[Region, T]] = []

    def add(self, region: Region, item: T) -> None:
        stride = 0 if region.dense else region.dims[0][1]
        places = self.classes.setdefault((stride, _extent(region, stride).bit_length()), [])
        insort(places, (region.offset % stride if stride else region.offset, len(self.items)))
        self.items.append((region, item))

    def meeting(self, region: Region) -> list[T]:
        """Return the values of the regions that have an element in common with `region`, in insertion order."""
        numbers: list[int] = []
        for (stride, bits), places in self.classes.items():
            earliest = region.offset - (1 << bits) + 1
            for first, last in _stretches(earliest, region.offset + _extent(region, stride), stride):
                numbers += [
                    n for _, n in places[bisect_left(places, (first,)) : bisect_right(places, (last, len(self.items)))]
                ]
        return [self.items[n][1] for n in sorted(numbers) if self.items[n][0].meets(region)]


def _extent(region: Region, stride: int) -> int:
    """Return the distance from the first to the last element of a region.

    If `stride` is not 0, positions are taken modulo `stride`. So an axis is ignored if its stride is a multiple of
    `stride`.
    """
    return sum((n - 1) * s for n, s in region.dims if s % stride) if stride else region.last - region.offset


def _stretches(first: int, last: int, stride: int) -> Iterator[tuple[int, int]]:
    """Take the integers from `first` to `last` modulo `stride`; yield them as one or two ranges (first, last).

    If `stride` is 0, yield the range unchanged.
    """
    if not stride:
        yield first, last
    elif last - first + 1 >= stride:
        yield 0, stride - 1
    elif first % stride <= last % stride:
        yield first % stride, last % stride
    else:
        yield 0, last % stride
        yield first % stride, stride - 1
