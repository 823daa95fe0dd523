"""Check that the addresses and flags that ranks use rotate with the ranks, so that rank 0 represents all ranks.

All ranks form a grid (see `hostir.check.one_rank.torus`). The *digit* of weight w of an address, along a grid axis with
n ranks, is `address // w % n`. For example, if a buffer has one block of w elements for each rank, this digit is the
number of the block. From one rank to the next along the axis, an address stays the same, or one of its digits rises by
one modulo n.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from hostir.check.one_rank.torus import PerRank, Torus, UnlikeError, at
from hostir.check.tracing.events import BlockEvents, Flag
from hostir.check.tracing.memory import Access
from hostir.check.tracing.trace import RankTrace
from hostir.ir.regions import Dims

# For each axis of the grid: the weight of the digit that rises from rank to rank; 0 if the address stays the same.
Steps = tuple[int, ...]


class Rotations:
    """Checks that the addresses of every rank are rotations of rank 0's addresses (see the module's docstring).

    For each buffer and grid axis, the same digit must rise in the addresses of all accesses. Then two regions overlap
    on every rank if they overlap on rank 0.

    Fields:
        steps: for each pair of a buffer and a grid axis, the weight of the digit that rises. A pair is left out if no
            digit of the buffer's addresses rises along the axis.
    """

    def __init__(self, trace: RankTrace, torus: Torus) -> None:
        self.trace = trace
        self.shape = torus.shape
        self.places = torus.places(np.arange(prod(self.shape)))
        self.steps: dict[tuple[str, int], int] = {}

    def check(self) -> None:
        """Raise UnlikeError if some address or some slot of a flag does not rotate with the ranks.

        The slot of a flag is its index in its row of flags.
        """
        computed = self.trace.by_blocks
        in_blocks = {id(event) for blocks in computed for event in (*blocks.parts, *blocks.units)}
        of_blocks = {id(flag) for blocks in computed for flag in (*blocks.waits, *blocks.signals)}
        flags = [*self.trace.signals, *self.trace.waits]
        plain = [event for event in self.trace.events if id(event) not in in_blocks]
        moving = [(access, self._moving(access.region.offset)) for event in plain for access in event.accesses]
        going = [(flag, self._moving(flag.slot)) for flag in flags if id(flag) not in of_blocks]
        self._weigh(moving, going)
        for blocks in computed:
            accesses, its_flags = self._by_blocks(blocks)
            self._weigh(accesses, its_flags)
            moving += accesses
            going += its_flags
        self._apart()
        for access, steps in moving:
            for axis, step in enumerate(steps):
                fits = _one_place if step else _all_places
                weight = self.steps.get((access.buffer.name, axis))
                if weight and not fits(at(access.region.offset, 0), access.region.dims, weight, self.shape[axis]):
                    raise UnlikeError
        if any(isinstance(flag.epoch[1], PerRank) for flag in flags):
            raise UnlikeError
        for flag, steps in going:
            if any((flag.flags, axis) in self.steps for axis, step in enumerate(steps) if not step):
                raise UnlikeError

    def _weigh(self, moving: Sequence[tuple[Access, Steps]], going: Sequence[tuple[Flag, Steps]]) -> None:
        """Record in `steps` which digit of a buffer's addresses rises from rank to rank along each grid axis.

        Raise UnlikeError if it is not the same digit in all addresses of the buffer.

        Args:
            moving: accesses, each with the `Steps` of its address.
            going: flags, each with the `Steps` of its slot.
        """
        weights = [(access.buffer.name, steps) for access, steps in moving]
        weights += [(flag.flags, steps) for flag, steps in going]
        for name, steps in dict.fromkeys(weights):
            for axis, step in enumerate(steps):
                if step and self.steps.setdefault((name, axis), step) != step:
                    raise UnlikeError

    def _moving(self, address: Any) -> Steps:
        """Return, for each grid axis, the amount by which an address grows from one rank to the next (see `_steps`)."""
        return _steps(address.numbers, self.shape) if isinstance(address, PerRank) else (0,) * len(self.shape)

    def _apart(self) -> None:
        """Raise UnlikeError if, for some buffer, the digits that rise along two grid axes overlap.

        Rotations along these axes would then not be independent of each other.
        """
        digits: dict[str, list[tuple[int, int]]] = {}
        for (buffer, axis), step in self.steps.items():
            digits.setdefault(buffer, []).append((step, step * self.shape[axis]))
        if any(map(_overlap, digits.values())):
            raise UnlikeError

    def _by_blocks(self, blocks: BlockEvents) -> tuple[list[tuple[Access, Steps]], list[tuple[Flag, Steps]]]:
        """Return the accesses and the flags of a computation by blocks.

        Each comes with its `Steps`. For each grid axis, one digit of the address or slot may rise from rank to rank
        (see the module's docstring). `Steps` has the weight of this digit, or 0 if no digit rises.
        """
        turned, count = self._turned(blocks), len(blocks.units)
        units, ready, done = turned[:count] % count, blocks.ready, blocks.done
        if (turned % count != np.tile(units, (len(turned) // count, 1))).any():
            raise UnlikeError
        accesses = self._columns([part.accesses for part in blocks.parts], turned)
        if blocks.units is not blocks.parts:
            accesses += self._columns([unit.accesses for unit in blocks.units], units)
        flags: list[tuple[Flag, Steps]] = []
        if ready is not None:
            size = count // ready.results
            local = range(at(ready.own_first, 0) * size, (at(ready.own_first, 0) + ready.own_blocks) * size)
            inside = turned[local.start : local.stop] - self._of_ranks(ready.own_first) * size
            if ((inside < 0) | (inside >= len(local))).any():
                raise UnlikeError
            accesses += self._columns([blocks.parts[n].accesses[:1] for n in local], inside)
            awaited = [n for n in range(len(turned)) if n not in local]
            flags += zip(blocks.waits, _steps_of(turned[awaited] // size, self.shape), strict=True)
        if done is not None:
            size = count // done.blocks
            flags += zip(blocks.signals, _steps_of(units[::size] // size, self.shape), strict=True)
        if ready is not None and done is not None:  # each block may wait for the previous block
            size, turns = count // ready.results, np.arange(ready.results)[:, None]
            here, there = (
                (first + turns) % ready.results for first in (at(ready.first, 0), self._of_ranks(ready.first))
            )
            if (units[here[:, 0] * size] // size != there).any():
                raise UnlikeError
        return accesses, flags

    def _turned(self, blocks: BlockEvents) -> Any:
        """Return the parts of other ranks that correspond to the parts of rank 0 in a computation by blocks.

        The result is an array. Row n holds, for each rank, the number of the part that corresponds to rank 0's part n.
        """
        count, ready, done = len(blocks.units), blocks.ready, blocks.done
        flags = [(ready.flags.buffer.name, ready.results)] if ready else []
        flags += [(done.flags.buffer.name, done.blocks)] if done else []
        parts = np.tile(np.arange(len(blocks.parts))[:, None], (1, prod(self.shape)))
        digits: list[tuple[int, int]] = []
        for axis, extent in enumerate(self.shape):
            steps = {self.steps[name, axis] * (count // n) for name, n in flags if (name, axis) in self.steps}
            if not steps:
                continue
            step = steps.pop()
            if steps or len(parts) % (step * extent):
                raise UnlikeError
            digits.append((step, step * extent))
            place = parts // step % extent
            parts += ((place + self.places[axis]) % extent - place) * step
        if _overlap(digits):
            raise UnlikeError
        return parts

    def _columns(self, items: Sequence[Sequence[Access]], turned: Any) -> list[tuple[Access, Steps]]:
        """Match the accesses of the parts of a computation by blocks; return each access with its `Steps`.

        The accesses of all parts are lined up from the end: column k holds access k of every part. Leading accesses
        that only some parts have are dropped. If all parts share one access, it is returned once.

        Args:
            items: the accesses of each part.
            turned: row n holds, for each rank, the number of the part that corresponds to rank 0's part n.

        Raises UnlikeError if the accesses of a column differ in more than their offsets.
        """
        columns: list[tuple[Access, Steps]] = []
        common = min(map(len, items), default=0)
        for column in zip(*(item[len(item) - common :] for item in items), strict=True):
            if all(access is column[0] for access in column):
                columns.append((column[0], self._moving(column[0].region.offset)))
                continue
            if any(access.region.dims != column[0].region.dims for access in column):
                raise UnlikeError
            offsets = np.stack([self._of_ranks(access.region.offset) for access in column])
            columns += zip(column, _steps_of(np.take_along_axis(offsets, turned, 0), self.shape), strict=True)
        return columns

    def _of_ranks(self, number: Any) -> Any:
        """Return an array with the value of a number on each rank."""
        return number.values if isinstance(number, PerRank) else np.full(prod(self.shape), number, dtype=np.int64)


def _overlap(digits: Sequence[tuple[int, int]]) -> bool:
    """Return True if any two digits overlap.

    A digit is a pair: its weight w, and w times the number of its values.
    """
    return any(higher % end for (_, end), (higher, _) in pairwise(sorted(digits)))


@lru_cache(maxsize=1 << 12)
def _steps(numbers: bytes, shape: tuple[int, ...]) -> Steps:
    """Return, for each grid axis, the amount by which an address grows from one rank to the next.

    This is the weight of the digit that rises by one modulo the number of ranks along the axis; 0 if the address stays
    the same.

    Args:
        numbers: the values of one address on all ranks, as the bytes of an int64 array.
        shape: the number of ranks along each grid axis.
    """
    return _steps_of(np.frombuffer(numbers, dtype=np.int64), shape)[0]


def _steps_of(values: Any, shape: tuple[int, ...]) -> list[Steps]:
    """Return the result of `_steps` for several addresses.

    Each row of `values` holds the values of one address on all ranks. Along each axis, an address may stay the same, or
    one digit may rise by one from rank to rank, modulo the number of ranks along the axis. Raise UnlikeError for every
    other change.
    """
    values = values.reshape(-1, *shape)
    steps = []
    for axis, count in enumerate(shape, 1):
        following = np.roll(values, -1, axis)
        step = (following - values).max(axis=tuple(range(1, values.ndim)), keepdims=True)
        last = values // np.maximum(step, 1) % count == count - 1
        if (following != values + step - count * step * last).any():
            raise UnlikeError
        steps.append(step.reshape(-1).tolist())
    return [*zip(*steps, strict=True)]


@lru_cache(maxsize=1 << 16)
def _one_place(offset: int, dims: Dims, step: int, count: int) -> bool:
    """Return True if the addresses of all elements of a region have the same digit of weight `step`.

    `count` is the number of values of this digit.
    """
    inner = sum((n - 1) * s for n, s in dims if s < step)
    return offset % step + inner < step and all(s < step or s % (step * count) == 0 for _, s in dims)


@lru_cache(maxsize=1 << 16)
def _all_places(offset: int, dims: Dims, step: int, count: int) -> bool:
    """Return True if a region stays the same when one digit rises by one in the addresses of all its elements.

    The digit has the weight `step` and `count` values, so it rises modulo `count`.
    """
    if offset // step % count:
        return False
    across, inner = 0, offset % step
    for n, s in dims:
        if s % (step * count) == 0:
            continue
        if s <= step < n * s and step % s == 0 and n * s % (step * count) == 0:
            across += 1
            inner += step - s
        else:
            inner += (n - 1) * s
    return across == 1 and inner < step
