"""Find the logical axes of a printed tensor.

nvFuser may have split a logical axis into several axes before it printed the tensor. A printed axis is an IterDomain.
It is a device axis if it lies on deviceIdx.x or deviceIdx.y, and a stream axis if it lies on streamIdx.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice

from hostir.ir.sizes import Size, product
from hostir.nvfuser.nodes import IterDomain, TensorNode


@dataclass(frozen=True)
class LogicalAxis:
    """A logical axis of a tensor: one printed IterDomain, or the IterDomains of a split axis, outermost first."""

    domains: tuple[IterDomain, ...]

    @property
    def first(self) -> IterDomain:
        """The outermost IterDomain."""
        return self.domains[0]

    @cached_property
    def extent(self) -> Size:
        """The extent of the logical axis."""
        return product(d.extent.size for d in self.domains)

    @property
    def reduced(self) -> bool:
        """True if a reduction has removed the axis."""
        return self.first.iter_type == "r"

    @property
    def device(self) -> str:
        """The letter of deviceIdx, x or y, if the axis is a device axis that is not split; else an empty string."""
        return self.first.on if len(self.domains) == 1 and self.first.on in ("x", "y") else ""


def readings(tensor: TensorNode, alone: Collection[str] = (), *, split: bool = False) -> list[tuple[LogicalAxis, ...]]:
    """Return the possible readings of a printed tensor, the likeliest first.

    A reading assigns each printed axis to a logical axis. It is returned as a tuple of logical axes.

    If nvFuser splits an axis of extent N by D, it prints an outer part of extent D and an inner part of extent N/D. If
    N is a symbol, the inner part is printed as ceilDiv(N, D), so the split is visible. The outer part is directly left
    of the inner part. But nvFuser moves device and stream axes to the front. So an outer part on a device or a stream
    may be anywhere to the left of its inner part.

    If N is a number, the inner part is printed as a number, so the split is not visible. Then a device or stream axis
    may be a separate axis. It may also be the outer part of any axis to its right that has a number as its extent.

    An axis marked `rf` is the result of an rfactor or a reshape. It is never a part of a split.

    Args:
        tensor: the printed tensor.
        alone: the device axes, x or y, that hold the terms of a partial sum. They are not parts of a split.
        split: True if a device axis is more likely a part of a split than a separate axis.
    """
    domains = tensor.domains
    parallel = [(d.iter_type, d.on) for d in domains if d.on]
    if len(set(parallel)) < len(parallel):
        return [tuple(LogicalAxis((d,)) for d in domains)]  # invalid: an error is raised when the type is needed
    outer = {k for k, d in enumerate(domains) if not d.rfactor and (d.iter_type == "r" or d.on not in alone)}
    splits = list(islice(_splits(domains, outer, 0, ()), _MAX_SPLITS))
    splits.sort(key=lambda parts: _unlikelihood(domains, parts, split))
    missing = _missing(domains, splits[0])
    likely = [parts for parts in splits if _missing(domains, parts) == missing][:_MAX_READINGS]
    return [_grouped(domains, parts) for parts in likely]


_MAX_SPLITS = 512  # the most readings that are compared for one tensor; real tensors have a few
_MAX_READINGS = 48
Split = tuple[tuple[int, ...], ...]  # for each printed axis, the indices of the axes that are its outer parts


def _splits(domains: Sequence[IterDomain], outer: Collection[int], place: int, split: Split) -> Iterator[Split]:
    """Yield every way to choose the outer parts of the printed axes. The choices for the axes before `place` are fixed.

    Args:
        domains: the printed axes.
        outer: the indices of axes that may be outer parts.
        place: the index of the first axis for which outer parts are still to be chosen.
        split: the outer parts that were chosen for the axes before `place`.
    """
    if place == len(domains):
        yield split
        return
    taken = {k for outers in split for k in outers}
    free = [k for k, outers in enumerate(split) if k in outer and k not in taken and not outers]
    for outers in _outer_parts(domains, place, free):
        yield from _splits(domains, outer, place + 1, (*split, outers))


def _outer_parts(domains: Sequence[IterDomain], place: int, free: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yield the possible outer parts of the printed axis at index `place`. Each item is a tuple of indices of axes.

    `free` holds the indices of the axes that may be outer parts; they are to the left of `place`. The last item is (),
    which stands for no outer parts.
    """
    inner = domains[place]
    same = [k for k in free if domains[k].iter_type == inner.iter_type]
    if inner.extent.splits and not inner.rfactor:
        yield from _chains(domains, inner.extent.splits, place, same)
    elif not inner.on and not inner.rfactor and inner.extent.size.value is not None:
        folded = [k for k in same if domains[k].on and domains[k].extent.size.value is not None]
        for count in range(len(folded), 0, -1):
            yield from combinations(sorted(folded, key=lambda k: domains[k].number), count)
    yield ()


def _chains(
    domains: Sequence[IterDomain], extents: Sequence[Size], right: int, free: Collection[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the tuples of axes that may be the outer parts of the axis at index `right`, outermost first.

    An outer part is directly left of the next inner part, or it is a device or stream axis.

    Args:
        domains: the printed axes.
        extents: the extents that the outer parts must have, outermost first.
        right: the index of the axis.
        free: the indices of the axes that may be outer parts.
    """
    if not extents:
        yield ()
        return
    for k in free:
        if domains[k].extent.size == extents[-1] and (domains[k].on or k == right - 1):
            for outers in _chains(domains, extents[:-1], k, [other for other in free if other != k]):
                yield (*outers, k)


def _missing(domains: Sequence[IterDomain], split: Split) -> int:
    """Return the number of axes that are printed as inner parts of a split, but that have no outer parts in `split`.

    For example, a select may have removed the outer parts.
    """
    return sum(bool(d.extent.splits) and not outers for d, outers in zip(domains, split, strict=True))


def _unlikelihood(domains: Sequence[IterDomain], split: Split, split_devices: bool) -> tuple[int, ...]:
    """Return a sort key for a reading: the less likely the reading, the higher the key.

    Each entry of the key counts contradictions to one kind of evidence, and the strongest evidence is first. One kind
    of evidence is the numbers of the axes: nvFuser gives the two parts of a split consecutive numbers, which are higher
    than the numbers of all axes that existed before the split.

    Args:
        domains: the printed axes.
        split: the outer parts of each axis in this reading.
        split_devices: True if a device axis is more likely a part of a split than a separate axis.
    """
    numbers = [d.number for d in domains]
    inner_of = {outer: inner for inner, outers in enumerate(split) for outer in outers}
    against = 0
    if numbers != sorted(numbers):
        for k, domain in enumerate(domains):
            if domain.on and domain.number + 1 in numbers[k + 1 :]:
                against += inner_of.get(k) != numbers.index(domain.number + 1)
    order = [domains[outer].number for outers in split for outer in outers]
    return (
        _missing(domains, split),
        against,
        sum((split_devices or d.on == "stream") != (k in inner_of) for k, d in enumerate(domains) if d.on),
        sum(a > b for a, b in combinations(order, 2)),
        sum(inner - outer for outer, inner in inner_of.items()),
    )


def _grouped(domains: Sequence[IterDomain], split: Split) -> tuple[LogicalAxis, ...]:
    taken = {outer for outers in split for outer in outers}
    return tuple(
        LogicalAxis((*(domains[k] for k in outers), domains[place]))
        for place, outers in enumerate(split)
        if place not in taken
    )
