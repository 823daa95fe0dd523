"""The checker's model of memory: the buffers of each rank, strided views of buffers, and accesses to views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hostir.ir.op import Value
from hostir.ir.regions import Region


@dataclass(eq=False, slots=True)
class Buffer:
    """A buffer of one rank.

    Fields:
        rank: the rank that owns the memory.
        name: the name of the buffer in the program.
        elements: the number of elements.
        value: the value in the program, for messages.
        persists: True if the program need not free the buffer. Examples are an input, a symmetric buffer, and a copy by
            `dense`.
    """

    rank: int
    name: str
    elements: int
    value: Value | None = None
    persists: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a buffer. Its offset and strides are numbers of elements."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def region(self) -> Region:
        return Region.of(self.offset, self.shape, self.strides)

    @property
    def dense(self) -> bool:
        """True if the elements are contiguous, in row-major order."""
        pairs = zip(self.shape, self.strides, packed(self.shape), strict=True)
        return 0 in self.shape or all(n == 1 or s == p for n, s, p in pairs)

    def select(self, axis: int, index: int) -> View:
        """Return the view of the elements at one index of an axis. The result does not have this axis."""
        shape, strides = (each[:axis] + each[axis + 1 :] for each in (self.shape, self.strides))
        return View(self.buffer, self.offset + index * self.strides[axis], shape, strides)

    def permute(self, axes: tuple[int, ...]) -> View:
        """Return the view with its axes permuted: axis i of the result is axis `axes[i]` of this view."""
        return View(self.buffer, self.offset, tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes))

    def equals(self, other: View) -> bool:
        """Return True if both views have the same elements at the same indices."""
        if self.buffer is not other.buffer or self.offset != other.offset or self.shape != other.shape:
            return False
        return all(n == 1 or s == t for n, s, t in zip(self.shape, self.strides, other.strides, strict=True))


Does = Literal["reads", "writes", "undefines", "frees"]


@dataclass(frozen=True, slots=True)
class Access:
    """An access to a region of a buffer.

    Fields:
        buffer: the buffer of the accessing rank.
        region: the accessed elements.
        does: the kind of access. If an access `undefines` elements, nothing may read them until something writes them.
        rank: -1 if the access is to `buffer` itself. Otherwise the access is to the buffer of the same name on the peer
            `rank`.
    """

    buffer: Buffer
    region: Region
    does: Does
    rank: int = -1

    @property
    def writes(self) -> bool:
        """True if the access may change the bytes.

        Then it must be ordered with every other access to the same bytes.
        """
        return self.does != "reads"


def access(view: View, does: Does, rank: int = -1) -> Access:
    """Return an access to the elements of a view.

    The access is to the memory of `rank`. -1 stands for the rank that the view belongs to.
    """
    peer = rank if rank not in (-1, view.buffer.rank) else -1
    return Access(view.buffer, view.region, does, peer)


def access_all(buffer: Buffer, does: Does) -> Access:
    """Return an access to all elements of a buffer of this rank."""
    return Access(buffer, Region.of(0, (buffer.elements,), (1,)), does)


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of this shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def dense(buffer: Buffer, shape: tuple[int, ...]) -> View:
    """Return a dense view of this shape that has all elements of a buffer."""
    return View(buffer, 0, shape, packed(shape))


def rows_of(x: View, block: int, blocks: int, inner: int = 1) -> View | None:
    """Return block number `block` of the rows of `x`, which are cut into `blocks` equal blocks.

    The last `inner` axes form a row, and the axes before them number the rows. The axes that number rows are merged if
    the strides allow it. If `blocks` divides the extent of the first merged axis, the blocks cut this axis. If the
    extent divides `blocks`, each index of the axis holds an equal number of blocks, and these cut the next axis in the
    same way. Otherwise return None: no view holds exactly the rows of a block.
    """
    last = max(len(x.shape) - inner, 0)
    offset, axes = x.offset, list(_merged(x.shape[:last], x.strides[:last]))
    while blocks > 1 and axes:
        extent, stride = axes.pop(0)
        if extent % blocks == 0:
            offset += block * (extent // blocks) * stride
            axes.insert(0, (extent // blocks, stride))
            blocks = 1
        elif blocks % extent == 0:
            blocks //= extent
            offset, block = offset + block // blocks * stride, block % blocks
        else:
            return None
    shape, strides = (n for n, _ in axes), (s for _, s in axes)
    return View(x.buffer, offset, (*shape, *x.shape[last:]), (*strides, *x.strides[last:]))


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Merge adjacent axes where the strides allow it, and drop axes of extent 1.

    Return the extent and the stride of each remaining axis.
    """
    merged: list[tuple[int, int]] = []
    for n, s in zip(shape, strides, strict=True):
        if n != 1 and merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        elif n != 1:
            merged.append((n, s))
    return tuple(merged)


def strides_in(x: View, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of the view `x` after it is reshaped to `shape`; None if the reshape needs a copy."""
    if 0 in x.shape:
        return packed(shape)
    merged = [*_merged(x.shape, x.strides)]
    strides: list[int] = []
    for n in reversed(shape):
        if n == 1:
            strides.append(1)
            continue
        while merged and merged[-1][0] == 1:
            merged.pop()
        if not merged or merged[-1][0] % n:
            return None
        extent, stride = merged.pop()
        strides.append(stride)
        merged.append((extent // n, stride * n))
    return tuple(reversed(strides))
