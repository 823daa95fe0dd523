"""Define types of values: dtypes, device meshes, tensor axes and their sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod

from hostir.ir.sizes import ONE, Size, product

STREAM = "stream"  # marks an axis whose slices run on streams in turn


@dataclass(frozen=True)
class DType:
    """An element type: its name in the text and its size in bytes."""

    name: str
    bytes: int

    def __str__(self) -> str:
        return self.name


FP8 = {d.name: d for d in (DType("f8e4m3", 1), DType("f8e5m2", 1))}  # only with scales: see `scaled_matmul`
INTEGERS = {d.name: d for d in (DType("i32", 4), DType("i64", 8))}  # only as indices: nothing computes with them
FLOATS = {d.name: d for d in (DType("f64", 8), DType("f32", 4), DType("f16", 2), DType("bf16", 2))} | FP8
DTYPES = FLOATS | INTEGERS
FLAG = DType("flag", 8)  # only in host programs: signals set flags, and streams wait for them


@dataclass(frozen=True)
class Mesh:
    """A grid of devices with one or more named axes, outermost first.

    `devices` lists the grid in row-major order. nvFuser calls the last axis DIDx and the axis before it DIDy. The text
    of a program uses the names in `axes`, such as `didx` or `tp`. `hosts` is the number of hosts for which the program
    is planned, 0 if it is not stated. Ranks fill the hosts in order, equally many on each. A job on other hosts also
    runs the program, and warns.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    devices: tuple[int, ...]
    hosts: int = 0

    def size(self, axis: str) -> int:
        return self.shape[self.axes.index(axis)]

    @cached_property
    def places(self) -> dict[int, int]:
        """A map from each device to its index in `devices`."""
        return {device: place for place, device in enumerate(self.devices)}

    def coordinate(self, device: int, axis: str) -> int:
        """Return the position of a device on a mesh axis."""
        k = self.axes.index(axis)
        return self.places[device] // prod(self.shape[k + 1 :]) % self.shape[k]

    def team(self, device: int, axis: str) -> tuple[int, ...]:
        """Return the team of a device along a mesh axis, in the order of the axis.

        The team is the device itself and all devices that differ from it only in their position on the axis.
        """
        return self._teams[axis][device]

    def teams(self, axis: str) -> tuple[tuple[int, ...], ...]:
        return tuple(dict.fromkeys(self._teams[axis].values()))

    @cached_property
    def _teams(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """The teams along each mesh axis, by mesh axis and device. All members of a team share one tuple."""
        teams_of: dict[str, dict[int, tuple[int, ...]]] = {}
        for k, axis in enumerate(self.axes):
            stride, block = prod(self.shape[k + 1 :]), prod(self.shape[k:])
            firsts = (start + i for start in range(0, len(self.devices), block) for i in range(stride))
            teams = [self.devices[first : first + block : stride] for first in firsts]
            teams_of[axis] = {device: team for team in teams for device in team}
        return teams_of

    def __str__(self) -> str:
        parts = [str(device) for device in self.devices]
        for n in self.shape[:0:-1]:  # from the innermost axis outwards
            parts = [f"({' '.join(parts[i : i + n])})" for i in range(0, len(parts), n)]
        return f"@{self.name} [{', '.join(self.axes)}] = {' '.join(parts)}" + f" hosts {self.hosts}" * bool(self.hosts)


@dataclass(frozen=True)
class Factor:
    """One factor of a tensor axis, with its sharding.

    `on` is a mesh axis if the factor is split into equal contiguous blocks over the ranks of this mesh axis. It is
    STREAM if a loop runs over slices of the factor. Otherwise it is None.
    """

    extent: Size
    on: str | None = None

    def __str__(self) -> str:
        return f"{self.extent}@{self.on}" if self.on else str(self.extent)


@dataclass(frozen=True)
class Axis:
    """A logical axis as the product of its factors, outermost first. `(8@didx 512)` is 4096 rows, 512 on each rank."""

    factors: tuple[Factor, ...]

    @staticmethod
    def of(extent: Size | int | str, on: str | None = None) -> Axis:
        return Axis((Factor(Size.of(extent), on),))

    @cached_property
    def extent(self) -> Size:
        return self.factors[0].extent if len(self.factors) == 1 else product([f.extent for f in self.factors])

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """The marks of the factors, outermost first: mesh axes that shard a factor, and STREAM for a sliced factor."""
        return tuple(f.on for f in self.factors if f.on)

    def resized(self, extent: Size) -> Axis:
        """Return the axis with another extent and the same sharding. Only the innermost factor changes.

        The new extent of this factor may be a fraction. Later checks report this.
        """
        if extent == self.extent:
            return self
        *outer, last = self.factors
        return Axis((*outer, replace(last, extent=last.extent * extent / self.extent)))

    def without(self, *marks: str) -> Axis:
        """Return the axis in normal form, without its sharding over the mesh axes in `marks`.

        If STREAM is in `marks`, the axis is no longer sliced.
        """
        return Axis(tuple(replace(f, on=None) if f.on in marks else f for f in self.factors)).normal()

    def normal(self) -> Axis:
        """Return the same layout with as few factors as possible.

        Neighbouring factors that are neither sharded nor sliced are merged. If such a factor follows a sharded factor,
        it becomes a part of the sharded factor. A sliced factor is not changed.
        """
        merged: list[Factor] = []
        for factor in self.factors:
            last = merged[-1] if merged else None
            if last and factor.on is None and last.on != STREAM:
                merged[-1] = Factor(last.extent * factor.extent, last.on)
            elif not (factor.extent.is_one and factor.on is None):
                merged.append(factor)
        return Axis(tuple(merged) or (Factor(ONE),))

    def __str__(self) -> str:
        if len(self.factors) == 1:
            return str(self.factors[0])
        return f"({' '.join(map(str, self.factors))})"


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor: its dtype, its logical axes with their sharding, and its mesh.

    `mesh` is None ("auto") in a fusion until sharding has been propagated. `partial` names the mesh axes over which
    each rank holds only one term of a sum.

    Derived properties are cached, because passes, checks and simulated ranks read them often.
    """

    dtype: DType
    axes: tuple[Axis, ...]
    mesh: Mesh | None = None
    partial: tuple[str, ...] = ()

    @cached_property
    def shape(self) -> tuple[Size, ...]:
        return tuple(axis.extent for axis in self.axes)

    @cached_property
    def names(self) -> frozenset[str]:
        """The size symbols in the type."""
        return frozenset(n for axis in self.axes for f in axis.factors for n in f.extent.names)

    def axis_on(self, mark: str) -> int | None:
        """Return the index of the tensor axis that is sharded over the mesh axis `mark`; None if there is no such axis.

        If `mark` is STREAM, return the index of the axis that is sliced.
        """
        return next((k for k, axis in enumerate(self.axes) if mark in axis.marks), None)

    def local_factor(self, factor: Factor) -> Size:
        """Return the extent of a factor on one rank."""
        if factor.on in (None, STREAM) or self.mesh is None:
            return factor.extent
        return factor.extent / self.mesh.size(factor.on or "")

    @cached_property
    def local_shape(self) -> tuple[Size, ...]:
        """Return the shape of the part that one rank holds."""
        return tuple(product([self.local_factor(f) for f in axis.factors]) for axis in self.axes)

    def with_axes(self, axes: Iterable[Axis]) -> TensorType:
        return replace(self, axes=tuple(axes))

    def host(self) -> TensorType:
        """Return the type that the tensor has in a host program, which has loops instead of sliced axes.

        No axis is sliced by STREAM, and all axes are in normal form.
        """
        return self._host

    @cached_property
    def _host(self) -> TensorType:
        return self.with_axes(axis.without(STREAM) for axis in self.axes)

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.axes))}]"
        if self.partial:
            text += f" partial {', '.join(self.partial)}"
        return text


class Kind(Enum):
    """The types of values that are not tensors."""

    STREAM = "stream"
    HANDLE = "handle"
    INDEX = "index"

    def __str__(self) -> str:
        return self.value


Type = TensorType | Kind


def bind_shape(shape: Iterable[Size], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape as integers; `sizes` holds the values of the symbols."""
    return tuple(size.bind(sizes) for size in shape)
