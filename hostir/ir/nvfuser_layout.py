"""From printed axes of an nvFuser dump to ours: which IterDomains make one logical axis, and which sizes are equal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice

from hostir.ir.nvfuser_syntax import IterDomain, Tensor
from hostir.ir.sizes import Size, product
from hostir.ir.types import Axis, Factor, TensorType


@dataclass(frozen=True)
class Group:
    """A logical axis: one IterDomain, or those that it was split into, outermost first."""

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
        """Whether the axis was summed away."""
        return self.first.kind == "r"

    @property
    def device(self) -> str:
        """x or y where the whole axis is a device axis, else empty."""
        return self.first.on if len(self.domains) == 1 and self.first.on in ("x", "y") else ""


def readings(tensor: Tensor, alone: Collection[str] = (), *, split: bool = False) -> list[tuple[Group, ...]]:
    """The ways to read the printed axes of a tensor as logical axes, the likeliest first.

    nvFuser prints the axes of the loop domain. An axis of extent ceilDiv(N, D) is the inner part of a split of N, and
    its outer part is an axis of extent D to the left: beside it, or anywhere, where it is on devices or streams, which
    nvFuser moves to the front. Where N is a number, nvFuser prints the quotient, and an axis on devices or streams may
    be the outer part of any axis of known extent to the right, or an axis of its own. What an rfactor or a reshape
    gives (marked `rf`) is not split.

    Args:
        tensor: the tensor as printed.
        alone: x or y, where such an axis is no part of a split, as it holds the parts of a partial sum.
        split: whether a device axis is rather a part of a split than an axis of its own.
    """
    domains = tensor.domains
    parallel = [(d.kind, d.on) for d in domains if d.on]
    if len(set(parallel)) < len(parallel):
        return [tuple(Group((d,)) for d in domains)]  # no layout, which is said where its type is asked for
    outer = {k for k, d in enumerate(domains) if not d.rfactor and (d.kind == "r" or d.on not in alone)}
    splits = list(islice(_splits(domains, outer, 0, ()), _MOST_SPLITS))
    splits.sort(key=lambda parts: _unlikelihood(domains, parts, split))
    missing = _missing(domains, splits[0])
    likely = [parts for parts in splits if _missing(domains, parts) == missing][:_MOST_READINGS]
    return [_grouped(domains, parts) for parts in likely]


_MOST_SPLITS = 512  # that are tried for one tensor: real ones have a few
_MOST_READINGS = 48
Split = tuple[tuple[int, ...], ...]  # for each printed axis, the places of its outer parts, outermost first


def _splits(domains: Sequence[IterDomain], outer: Collection[int], place: int, split: Split) -> Iterator[Split]:
    """Every way to give the axes from `place` on their outer parts, which are among `outer`."""
    if place == len(domains):
        yield split
        return
    taken = {k for outers in split for k in outers}
    free = [k for k, outers in enumerate(split) if k in outer and k not in taken and not outers]
    for outers in _outer_parts(domains, place, free):
        yield from _splits(domains, outer, place + 1, (*split, outers))


def _outer_parts(domains: Sequence[IterDomain], place: int, free: Collection[int]) -> Iterator[tuple[int, ...]]:
    """The outer parts that an axis may have among the free axes to its left; none comes last."""
    inner = domains[place]
    same = [k for k in free if domains[k].kind == inner.kind]
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
    """Axes of these extents, the last one left of `right`: beside it, or on devices or streams."""
    if not extents:
        yield ()
        return
    for k in free:
        if domains[k].extent.size == extents[-1] and (domains[k].on or k == right - 1):
            for outers in _chains(domains, extents[:-1], k, [other for other in free if other != k]):
                yield (*outers, k)


def _missing(domains: Sequence[IterDomain], split: Split) -> int:
    """The number of splits whose outer parts are not there, as where one index of them was selected."""
    return sum(bool(d.extent.splits) and not outers for d, outers in zip(domains, split, strict=True))


def _unlikelihood(domains: Sequence[IterDomain], split: Split, split_devices: bool) -> tuple[int, ...]:
    """What speaks against a reading, the weightiest first.

    nvFuser numbers the two parts of a split one after the other, and behind all axes that were there before.
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


def _grouped(domains: Sequence[IterDomain], split: Split) -> tuple[Group, ...]:
    taken = {outer for outers in split for outer in outers}
    return tuple(
        Group((*(domains[k] for k in outers), domains[place]))
        for place, outers in enumerate(split)
        if place not in taken
    )


class Sizes:
    """Sizes that a dump forces to be equal, though it names them differently: a union-find over products of symbols."""

    def __init__(self, symbols: Iterable[str]) -> None:
        self.order = {name: k for k, name in enumerate(symbols)}
        self.known: dict[str, Size] = {}  # what a symbol stands for, in symbols that stand for themselves

    def resolve(self, size: Size) -> Size:
        result = Size(size.num, size.den)
        for name, power in size.symbols:
            meaning = self.known.get(name, Size(symbols=((name, 1),)))
            for _ in range(abs(power)):
                result = result * meaning if power > 0 else result / meaning
        return result

    def equal(self, a: Size, b: Size) -> bool:
        """Makes two sizes equal, by giving a meaning to the symbol that appeared last; False where they cannot be."""
        ratio = self.resolve(a) / self.resolve(b)
        free = [(self.order[name], name, power) for name, power in ratio.symbols if abs(power) == 1]
        if not ratio.symbols:
            return ratio.is_one
        if not free:
            return True
        _, name, power = max(free)
        symbol = Size(symbols=((name, 1),))
        meaning = symbol / ratio if power == 1 else symbol * ratio
        if not meaning.symbols and meaning.den != 1:
            return False
        self.known[name] = meaning
        self.known = {n: self.resolve(m) for n, m in self.known.items()}
        return True

    def settle(self, type: TensorType) -> TensorType:
        """The type in symbols that stand for themselves, its axes in normal form."""
        return replace(type, axes=tuple(self._axis(axis) for axis in type.axes))

    def _axis(self, axis: Axis) -> Axis:
        return Axis(tuple(Factor(self.resolve(f.extent), f.on) for f in axis.factors)).normal()

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Each symbol that is another size, with that size, in the order in which they first appear."""
        return tuple((name, str(self.known[name])) for name in self.order if name in self.known)
