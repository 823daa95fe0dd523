"""From printed axes of an nvFuser dump to ours: which IterDomains make one logical axis, and which sizes are equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hostir.ir.nvfuser_syntax import IterDomain, Tensor
from hostir.ir.sizes import Size
from hostir.ir.types import Axis, Factor, TensorType


@dataclass(frozen=True)
class Group:
    """A logical axis: one IterDomain, or those that it was split into, outermost first."""

    domains: tuple[IterDomain, ...]

    @property
    def reduced(self) -> bool:
        """Whether the axis was summed away."""
        return self.domains[0].kind == "r"

    @property
    def device(self) -> str:
        """x or y where the whole axis is a device axis, else empty."""
        return self.domains[0].on if len(self.domains) == 1 and self.domains[0].on in ("x", "y") else ""

    def find(self, on: str) -> IterDomain | None:
        return next((d for d in self.domains if d.on == on), None)


def groups(tensor: Tensor) -> tuple[Group, ...]:
    """The logical axes of a printed tensor.

    nvFuser prints the axes of the loop domain. An axis of extent ceilDiv(N, D) is the inner part of a split of N, and
    its outer part is an axis of extent D to the left: beside it, or at the front, where nvFuser moves the axes on
    devices and streams without changing their order. What a reshape gives (marked `rf`) is not split.
    """
    found: list[Group] = []
    for k, domain in enumerate(tensor.domains):
        outer = _outer_parts(found, domain, tensor.domains[k + 1 :])
        parts = [d for place in outer for d in found[place].domains]
        found = [group for place, group in enumerate(found) if place not in outer]
        found.append(Group((*parts, domain)))
    return tuple(found)


def _outer_parts(found: list[Group], domain: IterDomain, later: Sequence[IterDomain]) -> list[int]:
    """Where the outer parts of a split stand among the axes so far, outermost first; none unless all are there."""
    places: list[int] = []
    for extent in reversed(domain.extent.splits if not domain.rfactor else ()):
        fits = [k for k, group in enumerate(found) if k not in places and _is_outer(group, extent, domain.kind)]
        beside = places[0] - 1 if places else len(found) - 1
        if beside not in fits or found[beside].domains[0].on:
            fits = [k for k in fits if found[k].domains[0].on]
            beside = fits[-1 - min(_claims(extent, domain.kind, later), len(fits) - 1)] if fits else -1
        if beside < 0:
            return []
        places.insert(0, beside)
    return places


def _is_outer(group: Group, extent: Size, kind: str) -> bool:
    first = group.domains[0]
    return len(group.domains) == 1 and first.kind == kind and first.extent.size == extent and not first.rfactor


def _claims(extent: Size, kind: str, later: Sequence[IterDomain]) -> int:
    """How many outer parts of this extent the splits further right need from the front, as there is none on the way."""
    free = claims = 0
    for domain in later:
        if domain.on and _is_outer(Group((domain,)), extent, kind):
            free += 1
        for _ in range(domain.extent.splits.count(extent) if domain.kind == kind and not domain.rfactor else 0):
            free, claims = (free - 1, claims) if free else (free, claims + 1)
    return claims


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
