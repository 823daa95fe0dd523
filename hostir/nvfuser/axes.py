"""Find the logical axes that printed IterDomains may form."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice

from hostir.ir.sizes import Size, product
from hostir.nvfuser.nodes import IterDomain, TensorNode


@dataclass(frozen=True)
class LogicalAxis:
    """A logical axis: one IterDomain, or the IterDomains that it was split into, outermost first."""

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
        """True if the axis was summed away."""
        return self.first.iter_type == "r"

    @property
    def device(self) -> str:
        """x or y if the unsplit axis is a device axis, else empty."""
        return self.first.on if len(self.domains) == 1 and self.first.on in ("x", "y") else ""


def readings(tensor: TensorNode, alone: Collection[str] = (), *, split: bool = False) -> list[tuple[LogicalAxis, ...]]:
    """Return the ways to read the printed axes of a tensor as logical axes, the likeliest first.

    nvFuser prints the axes of the loop domain. An axis of extent ceilDiv(N, D) is the inner part of a split of N. Its
    outer part is an axis of extent D to the left: directly beside it; or anywhere, if it is on devices or streams,
    which nvFuser moves to the front. If N is a number, nvFuser prints the quotient. Then an axis on devices or streams
    may be the outer part of any axis of known extent to the right, or a separate axis. Results of an rfactor or a
    reshape (marked `rf`) are not split.

    Args:
        tensor: the tensor as printed.
        alone: x or y if such an axis is not part of a split because it holds the parts of a partial sum.
        split: whether a device axis is more likely part of a split than a separate axis.
    """
    domains = tensor.domains
    parallel = [(d.iter_type, d.on) for d in domains if d.on]
    if len(set(parallel)) < len(parallel):
        return [tuple(LogicalAxis((d,)) for d in domains)]  # no valid layout: reported when its type is needed
    outer = {k for k, d in enumerate(domains) if not d.rfactor and (d.iter_type == "r" or d.on not in alone)}
    splits = list(islice(_splits(domains, outer, 0, ()), _MAX_SPLITS))
    splits.sort(key=lambda parts: _unlikelihood(domains, parts, split))
    missing = _missing(domains, splits[0])
    likely = [parts for parts in splits if _missing(domains, parts) == missing][:_MAX_READINGS]
    return [_grouped(domains, parts) for parts in likely]


_MAX_SPLITS = 512  # the most readings tried for one tensor; real tensors have a few
_MAX_READINGS = 48
Split = tuple[tuple[int, ...], ...]  # for each printed axis, the places of its outer parts, outermost first


def _splits(domains: Sequence[IterDomain], outer: Collection[int], place: int, split: Split) -> Iterator[Split]:
    """Yield every assignment of outer parts, taken from `outer`, to the axes from `place` on."""
    if place == len(domains):
        yield split
        return
    taken = {k for outers in split for k in outers}
    free = [k for k, outers in enumerate(split) if k in outer and k not in taken and not outers]
    for outers in _outer_parts(domains, place, free):
        yield from _splits(domains, outer, place + 1, (*split, outers))


def _outer_parts(domains: Sequence[IterDomain], place: int, free: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yield the outer parts that an axis may have among the free axes to its left; no outer parts come last."""
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
    """Yield the free axes with these extents left of `right`: adjacent ones, or those on devices or streams."""
    if not extents:
        yield ()
        return
    for k in free:
        if domains[k].extent.size == extents[-1] and (domains[k].on or k == right - 1):
            for outers in _chains(domains, extents[:-1], k, [other for other in free if other != k]):
                yield (*outers, k)


def _missing(domains: Sequence[IterDomain], split: Split) -> int:
    """Return the number of splits whose outer parts are missing, for example because one index of them was selected."""
    return sum(bool(d.extent.splits) and not outers for d, outers in zip(domains, split, strict=True))


def _unlikelihood(domains: Sequence[IterDomain], split: Split, split_devices: bool) -> tuple[int, ...]:
    """Return a sort key: the evidence against a reading, the strongest first.

    nvFuser gives the two parts of a split consecutive numbers, higher than those of all earlier axes.
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
