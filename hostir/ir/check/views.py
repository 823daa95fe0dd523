"""Memory as the checker sees it: buffers of ranks, strided views of them, and what events do to them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from hostir.ir.check.regions import Region
from hostir.ir.values import Value


@dataclass(eq=False, slots=True)
class Buffer:
    """A piece of one rank's memory; `persists` where it is the caller's, or symmetric: the program need not free it."""

    rank: int
    name: str
    elements: int
    value: Value | None = None
    persists: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a buffer, in elements."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def region(self) -> Region:
        return Region.of(self.offset, self.shape, self.strides)

    @property
    def dense(self) -> bool:
        """Whether its elements lie side by side, in order."""
        pairs = zip(self.shape, self.strides, packed(self.shape), strict=True)
        return 0 in self.shape or all(n == 1 or s == p for n, s, p in pairs)

    def equals(self, other: View) -> bool:
        """Whether each of its elements is that of the other with the same indices."""
        if self.buffer is not other.buffer or self.offset != other.offset or self.shape != other.shape:
            return False
        return all(n == 1 or s == t for n, s, t in zip(self.shape, self.strides, other.strides, strict=True))


Does = Literal["reads", "writes", "undefines", "frees"]


@dataclass(frozen=True, slots=True)
class Access:
    """One access to memory: to this rank's `buffer`, or to that of the same name of a peer, `rank`.

    What is undefined may not be read until something writes it.
    """

    buffer: Buffer
    region: Region
    does: Does
    rank: int = -1

    @property
    def writes(self) -> bool:
        """Whether the bytes may differ afterwards, so that every other access needs an order with this one."""
        return self.does != "reads"


def access(view: View, does: Does, rank: int = -1) -> Access:
    """An access to a view; `rank` says whose, where it may be a peer's."""
    peer = rank if rank not in (-1, view.buffer.rank) else -1
    return Access(view.buffer, view.region, does, peer)


def whole(buffer: Buffer, does: Does) -> Access:
    """An access to all of this rank's buffer."""
    return Access(buffer, Region.of(0, (buffer.elements,), (1,)), does)


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def dense(buffer: Buffer, shape: tuple[int, ...]) -> View:
    """The view of a whole buffer."""
    return View(buffer, 0, shape, packed(shape))


def rows_of(x: View, block: int, blocks: int) -> View:
    """One of `blocks` equal blocks of the rows of `x`, its leading axes flattened, which have one stride."""
    rows = prod(x.shape[:-1])
    strides = strides_in(x, (rows, *x.shape[-1:]))
    assert strides is not None
    count = rows // blocks
    return View(x.buffer, x.offset + block * count * strides[0], (count, *x.shape[-1:]), strides)


def strides_in(x: View, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides with which a view has another shape, or None where only a copy can have it."""
    if 0 in x.shape:
        return packed(shape)
    merged = [[n, s] for n, s in zip(x.shape, x.strides, strict=True) if n != 1]
    for i in range(len(merged) - 1, 0, -1):
        if merged[i - 1][1] == merged[i][0] * merged[i][1]:
            merged[i - 1 : i + 1] = [[merged[i - 1][0] * merged[i][0], merged[i][1]]]
    strides: list[int] = []
    for n in reversed(shape):
        if n == 1:
            strides.append(1)
            continue
        while merged and merged[-1][0] == 1:
            merged.pop()
        if not merged or merged[-1][0] % n:
            return None
        strides.append(merged[-1][1])
        merged[-1] = [merged[-1][0] // n, merged[-1][1] * n]
    return tuple(reversed(strides))
