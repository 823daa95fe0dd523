"""Define device meshes, and the ways in which a tensor axis is distributed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from hostir.ir.source import Span, described, did_you_mean, error, user_span
from hostir.ir.types import STREAM

NAME = re.compile(r"[A-Za-z_]\w*")  # a valid name in a program's text


class ParallelType(Enum):
    """The way in which a tensor axis is distributed.

    `DIDx` and `DIDy` shard the axis over an axis of the mesh: `DIDx` is the last axis of the mesh, and `DIDy` is the
    axis before it. `Stream` does not shard the axis, but divides it into slices. The `pipeline` strategy communicates
    one slice and at the same time computes another slice on another stream.
    """

    DIDx = "didx"
    DIDy = "didy"
    Stream = STREAM


class DeviceMesh:
    """The ranks that hold a tensor, arranged along one or more named axes.

    Raises HostIRError for a rank that occurs twice, for rows of different lengths, and for invalid names of axes.

    Args:
        devices: the ranks: `range(8)` for one axis, `[[0, 1, 2, 3], [4, 5, 6, 7]]` for two axes, lists of such lists
            for more. Arrays of integers are accepted, too.
        names: one name for each axis, outermost first; by default `("didx",)` or `("didy", "didx")`. A mesh of more
            axes needs names, such as `("dp", "cp", "tp")`.
        hosts: the number of hosts for which the program is planned, by `hi.timeline` and `hostir explain` for example.
            The program's ranks fill the hosts in order, equally many on each. If one mesh of a program states it, it
            holds for the program. A job finds out which of its ranks share a host, and warns if they are others.

    Fields:
        devices: the ranks in row-major order.
        shape: the number of ranks along each axis.
        names: the names of the axes.
        hosts: the number of hosts; None if it is not stated.
    """

    def __init__(self, devices: Iterable[Any], names: Sequence[str] | None = None, *, hosts: int | None = None) -> None:
        span = user_span()
        self.devices: tuple[int, ...]
        self.devices, self.shape = _grid(devices, span)
        if any(isinstance(d, bool) or not isinstance(d, int) or d < 0 for d in self.devices):
            raise error(
                f"a mesh names devices by rank, not {described(list(self.devices))}", span, expected="integers from 0"
            )
        if len(set(self.devices)) != len(self.devices):
            raise error(
                f"the mesh names a device twice: {described(list(self.devices))}", span, expected="each device once"
            )
        self.names = _names(names, len(self.shape), span)
        if hosts is not None and (isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1):
            raise error(f"hosts={described(hosts)}", span, expected="an integer from 1")
        self.hosts = hosts

    def axis_name(self, on: ParallelType | str, span: Span | None) -> str:
        """Return the name of the mesh axis that `on` means: DIDx, DIDy or a name. Raise if there is no such axis."""
        if on is ParallelType.DIDx:
            return self.names[-1]
        if on is ParallelType.DIDy:
            if len(self.names) < 2:
                raise error("DIDy needs a mesh of two or more axes", span, hint="such as DeviceMesh([[0, 1], [2, 3]])")
            return self.names[-2]
        if not isinstance(on, str) or on not in self.names:
            known = ", ".join(self.names)
            hint = did_you_mean(on, self.names) if isinstance(on, str) else ""
            raise error(
                f"the mesh has no axis {described(on)}", span, expected=f"one of: {known}, or a ParallelType", hint=hint
            )
        return on

    def ranks(self, name: str) -> int:
        """Return the number of ranks along the mesh axis `name`."""
        return self.shape[self.names.index(name)]

    def __repr__(self) -> str:
        axes = ", ".join(f"{n} {name}" for n, name in zip(self.shape, self.names, strict=True))
        return f"mesh of {axes}"


def _grid(devices: Any, span: Span | None) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return the devices in row-major order, and the shape of the mesh. Raise if rows have different lengths."""
    level: list[Any] = [_nested(devices)]
    shape: list[int] = []
    while isinstance(level[0], list):
        lengths = {len(part) if isinstance(part, list) else 0 for part in level}
        if len(lengths) > 1 or 0 in lengths:
            break
        shape += lengths
        level = [device for part in level for device in part]
    if not shape or any(isinstance(device, list) for device in level):
        raise error(
            f"no mesh can be made of {described(devices)}",
            span,
            expected="devices in a line or in rows of equal length: range(8), or [[0, 1], [2, 3]]",
        )
    return tuple(level), tuple(shape)


def _nested(x: Any) -> Any:
    """Convert arrays, tensors and other iterables to lists, also inside; return any other object unchanged."""
    x = x.tolist() if hasattr(x, "tolist") and not isinstance(x, type) else x
    return [_nested(part) for part in x] if isinstance(x, Iterable) and not isinstance(x, str) else x


def _names(names: Sequence[str] | None, axes: int, span: Span | None) -> tuple[str, ...]:
    if names is not None and not isinstance(names, str | list | tuple):
        expected = "a list of names, such as ['tp', 'dp']"
        raise error(f"no names of mesh axes: {described(names)}", span, expected=expected)
    if not names and axes > 2:
        raise error(f"a mesh of {axes} axes has no default names", span, hint="such as names=('dp', 'cp', 'tp')")
    axis_names = (names,) if isinstance(names, str) else tuple(names) if names else ("didy", "didx")[-axes:]
    for name in axis_names:
        if not isinstance(name, str) or not NAME.fullmatch(name) or name == STREAM:
            raise error(
                f"{described(name)} cannot name a mesh axis",
                span,
                expected=f"letters, digits and _, not starting with a digit, and not '{STREAM}'",
            )
    if len(axis_names) != axes or len(set(axis_names)) != axes:
        what = f"the mesh has {axes} axes, not {len(set(axis_names))}: {described(axis_names)}"
        raise error(what, span, expected="one name an axis")
    return axis_names
