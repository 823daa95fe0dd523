"""Arrange all ranks as a grid (`Torus`), and compute with integers that have one value for each rank (`PerRank`)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NoReturn, Protocol, cast

import numpy as np

from hostir.check.ordering.order import Clock
from hostir.ir.machine import ARITHMETIC, Frame
from hostir.ir.program import Program
from hostir.ir.types import Mesh


class UnlikeError(Exception):
    """Raised if ranks do different things. Then rank 0 cannot represent all ranks."""


class PerRank:
    """An integer with one value for each rank.

    Arithmetic computes the values of all ranks. A comparison returns its answer if this is the same on all ranks, and
    raises UnlikeError otherwise.
    """

    __slots__ = ("numbers",)

    def __init__(self, numbers: bytes) -> None:
        self.numbers = numbers

    @staticmethod
    def of(values: Any) -> Any:
        """Return a PerRank with these values, one for each rank. If all values are equal, return an int."""
        numbers = np.asarray(values, dtype=np.int64)
        return int(numbers[0]) if (numbers == numbers[0]).all() else PerRank(numbers.tobytes())

    @property
    def values(self) -> Any:
        return np.frombuffer(self.numbers, dtype=np.int64)

    def _unlike(self) -> NoReturn:
        raise UnlikeError

    __str__ = __hash__ = __index__ = _unlike


def _plain(number: Any) -> Any:
    return number.numbers if isinstance(number, PerRank) else number


def _spread(number: Any) -> Any:
    return np.frombuffer(number, dtype=np.int64) if isinstance(number, bytes) else number


@lru_cache(maxsize=1 << 14)
def _computed(compute: Callable[[Any, Any], Any], a: bytes | int, b: bytes | int) -> PerRank | int:
    """Return the result of an arithmetic operation on the values of all ranks.

    Each operand is an int if it has the same value on all ranks. Otherwise it is the bytes of an int64 array of its
    values. Results are cached, because loops repeat the same few operations.
    """
    if compute in (operator.floordiv, operator.mod) and not np.all(_spread(b)):
        raise ZeroDivisionError
    number: PerRank | int = PerRank.of(compute(_spread(a), _spread(b)))
    return number


@lru_cache(maxsize=1 << 14)
def _compared(compare: Callable[[Any, Any], Any], a: bytes, b: bytes | int) -> bool:
    answers = compare(_spread(a), _spread(b))
    if answers.all() or not answers.any():
        return bool(answers.all())
    raise UnlikeError


def _binary(compute: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Return an arithmetic operator of PerRank and its reflected form, for example `__sub__` and `__rsub__`."""
    return (
        lambda a, b: _computed(compute, _plain(a), _plain(b)),
        lambda b, a: _computed(compute, _plain(a), _plain(b)),
    )


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    return lambda a, b: _compared(compare, a.numbers, _plain(b))


for operation in ARITHMETIC.values():
    here, there = _binary(operation)
    setattr(PerRank, f"__{operation.__name__}__", here)
    setattr(PerRank, f"__r{operation.__name__}__", there)
for operation in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    setattr(PerRank, f"__{operation.__name__}__", _comparison(operation))


@dataclass(frozen=True)
class Torus:
    """All ranks, arranged as a row-major grid. Along each axis the ranks form a ring.

    Fields:
        shape: the number of ranks along each axis.
    """

    shape: tuple[int, ...]

    @staticmethod
    def of(program: Program) -> Torus | None:
        """Return a grid in which every team of the program's meshes is either the complete grid or lies along one axis.

        Return None if there is no such grid, or if the program has only one rank.
        """
        ranks = tuple(range(program.ranks))
        if len(ranks) == 1 or any(mesh.devices != ranks for mesh in program.meshes):
            return None
        shapes = {tuple(n for n in mesh.shape if n > 1) for mesh in program.meshes}
        shapes = {shape for shape in shapes if len(shape) > 1} or {(len(ranks),)}
        return Torus(shapes.pop()) if len(shapes) == 1 else None

    def places(self, ranks: Any) -> tuple[Any, ...]:
        """Return the coordinates of `ranks` in the grid: one array for each axis."""
        return np.unravel_index(ranks, self.shape)

    @cached_property
    def opposite(self) -> list[int]:
        """For each rank r, the rank with the negated coordinates of r.

        If rank 0 accesses rank r, and all ranks do the same, then the opposite rank of r accesses rank 0.
        """
        places = [-along for along in self.places(np.arange(prod(self.shape)))]
        ranks: list[int] = np.ravel_multi_index(places, self.shape, mode="wrap").tolist()
        return ranks

    def axes_of(self, team: tuple[int, ...]) -> tuple[int, ...]:
        """Return the grid axes along which a team of rank 0 lies.

        Raise UnlikeError if the team does not contain all ranks along these axes.
        """
        axes = tuple(axis for axis, places in enumerate(self.places(team)) if places.any())
        if prod(self.shape[axis] for axis in axes) != len(team):
            raise UnlikeError
        return axes

    def peer(self, place: PerRank | int, count: int, stride: int) -> int:
        """Return the peer of rank 0: the rank at position `place` in its team.

        Raise UnlikeError if, along some grid axis, the distance from a rank to its peer is not the same for all ranks.

        Args:
            place: the position of the peer in its team. It may differ from rank to rank.
            count: the number of ranks in a team.
            stride: the difference between the numbers of successive ranks of a team.
        """
        return _peer(_plain(place), count, stride, self)

    # The next methods compute with vector clocks. A clock lists the lanes of rank 0, then the lanes of rank 1, ...
    def seen_from(self, rank: int, clock: Clock) -> Clock:
        """Return the vector clock of an event on `rank`, given the vector clock of the same event on rank 0."""
        inner, places = len(clock), prod(self.shape)
        for extent in self.shape:
            inner, places = inner // extent, places // extent
            if by := rank // places % extent:
                rows = clock.reshape(-1, extent, inner)
                clock = np.concatenate((rows[:, -by:], rows[:, :-by]), axis=1).reshape(-1)
        return clock

    def latest(self, axes: tuple[int, ...], clock: Clock) -> Clock:
        """Return the vector clock of an event of rank 0 that comes after the same event on several ranks.

        These ranks are all ranks along some grid axes.

        Args:
            axes: the grid axes.
            clock: the clock of the earlier event on rank 0. The clocks of the same event on other ranks are rotations
                of it.
        """
        by_place = clock.reshape(*self.shape, -1)
        return np.broadcast_to(by_place.max(axis=axes, keepdims=True), by_place.shape).reshape(-1)


def at(number: Any, rank: int) -> int:
    """Return the value of a number on `rank`. An int has the same value on all ranks."""
    return int(number.values[rank]) if isinstance(number, PerRank) else int(number)


@lru_cache(maxsize=1 << 12)
def _peer(place: bytes | int, count: int, stride: int, torus: Torus) -> int:
    ranks = np.arange(prod(torus.shape))
    peers = ranks + (_spread(place) - ranks // stride % count) * stride
    for peer, rank, extent in zip(torus.places(peers), torus.places(ranks), torus.shape, strict=True):
        away = (peer - rank) % extent
        if (away != away[0]).any():
            raise UnlikeError
    return int(peers[0])


class OnTorus(Protocol):
    """A machine that stands for all ranks of a torus."""

    @property
    def torus(self) -> Torus:
        """The ranks."""


class PerRankFrame(Frame):
    """The values of a program's indices, for a machine of the kind `OnTorus`.

    An index that differs from rank to rank is a `PerRank`.
    """

    def place(self, mesh: Mesh, over: str) -> int:
        axis = mesh.axes.index(over)
        places = np.arange(len(mesh.devices)) // prod(mesh.shape[axis + 1 :]) % mesh.shape[axis]
        place: int = PerRank.of(places)
        return place

    def member(self, team: tuple[int, ...], place: Any) -> int:
        """Return the peer of rank 0: the rank at position `place` in its team.

        The position may differ from rank to rank. Raise UnlikeError if the distance from a rank to its peer is not the
        same for all ranks.
        """
        stride = team[1] if len(team) > 1 else 1
        return cast("OnTorus", self.machine).torus.peer(place, len(team), stride)
