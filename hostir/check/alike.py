"""Check rank 0 in place of all ranks, where every rank does the same things relative to its own place.

In most programs all ranks do the same, shifted along the axes of the mesh. If a rank accesses a peer, a row block or a
flag, then the next rank along an axis accesses the next peer, row block or flag. Then a race, a deadlock or a read of
unwritten memory on any rank also happens on rank 0, and checking rank 0 is enough. docs/memory-model.md has the
argument.

Rank 0 is traced with indices that hold one value for each rank. Whatever would make ranks differ, such as a condition
or an epoch that depends on the rank, raises `UnlikeError`; then every rank has to be traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import numpy as np

from hostir.check.events import BlockEvents, Event, Flag, WaitingKernel
from hostir.check.held_sms import Lanes, together
from hostir.check.joining import SIGNAL, Trouble
from hostir.check.memory import Access, View
from hostir.check.order import Clock, Order
from hostir.check.tracer import Tracer
from hostir.ir.machine import ARITHMETIC, Done, Frame, Ready
from hostir.ir.program import Program
from hostir.ir.regions import Dims, Region
from hostir.ir.source import HostIRError
from hostir.ir.types import Mesh

T = TypeVar("T")
# For each axis of the grid: the weight of the digit that rises along the axis; 0 if no digit does.
Steps = tuple[int, ...]


class UnlikeError(Exception):
    """Raised where ranks do different things, so that rank 0 cannot represent all ranks."""


class PerRank:
    """An integer with one value for each rank. A comparison returns the answer if all ranks agree, else raises."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: bytes) -> None:
        self.numbers = numbers

    @staticmethod
    def of(values: Any) -> Any:
        """Return a number with these values, one for each rank; an int if they are all equal."""
        numbers = np.asarray(values, dtype=np.int64)
        return int(numbers[0]) if (numbers == numbers[0]).all() else PerRank(numbers.tobytes())

    @property
    def values(self) -> Any:
        return np.frombuffer(self.numbers, dtype=np.int64)

    def __str__(self) -> str:
        raise UnlikeError

    def __hash__(self) -> int:
        raise UnlikeError

    def __index__(self) -> int:
        raise UnlikeError


def _plain(number: Any) -> Any:
    return number.numbers if isinstance(number, PerRank) else number


def _spread(number: Any) -> Any:
    return np.frombuffer(number, dtype=np.int64) if isinstance(number, bytes) else number


@lru_cache(maxsize=1 << 14)
def _computed(compute: Callable[[Any, Any], Any], a: bytes | int, b: bytes | int) -> PerRank | int:
    """Compute for all ranks at once. Results are cached: loops repeat the same few numbers."""
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
    """Return an operator on the numbers of all ranks, and its reflected form (operands exchanged)."""
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


# Ranks as a grid ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Torus:
    """All ranks as a row-major grid that is a ring along each axis.

    A rotation moves every rank by one along an axis.
    """

    shape: tuple[int, ...]

    @staticmethod
    def of(program: Program) -> Torus | None:
        """Return the grid whose axes hold the teams of all meshes; None if there is no such grid."""
        ranks = tuple(range(program.ranks))
        if len(ranks) == 1 or any(mesh.devices != ranks for mesh in program.meshes):
            return None
        shapes = {tuple(n for n in mesh.shape if n > 1) for mesh in program.meshes}
        shapes = {shape for shape in shapes if len(shape) > 1} or {(len(ranks),)}
        return Torus(shapes.pop()) if len(shapes) == 1 else None

    def places(self, ranks: Any) -> tuple[Any, ...]:
        """Return the coordinates of each rank: one array for each axis."""
        return np.unravel_index(ranks, self.shape)

    @cached_property
    def opposite(self) -> list[int]:
        """For each rank, the rank at the opposite distance from rank 0: the coordinates are negated."""
        places = [-along for along in self.places(np.arange(prod(self.shape)))]
        ranks: list[int] = np.ravel_multi_index(places, self.shape, mode="wrap").tolist()
        return ranks

    def axes_of(self, team: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes along which a team of rank 0 lies; raise unless the team has all ranks along these axes."""
        axes = tuple(axis for axis, places in enumerate(self.places(team)) if places.any())
        if prod(self.shape[axis] for axis in axes) != len(team):
            raise UnlikeError
        return axes

    # Clocks of one event on several ranks. A clock lists the lanes of rank 0, then the lanes of rank 1, and so on.
    def seen_from(self, rank: int, clock: Clock) -> Clock:
        """Return the vector clock of an event on a rank, given the clock of the same event on rank 0."""
        inner, places = len(clock), prod(self.shape)
        for extent in self.shape:
            inner, places = inner // extent, places // extent
            if by := rank // places % extent:
                rows = clock.reshape(-1, extent, inner)
                clock = np.concatenate((rows[:, -by:], rows[:, :-by]), axis=1).reshape(-1)
        return clock

    def latest(self, axes: tuple[int, ...], clock: Clock) -> Clock:
        """Return the clock of an event that follows one event on all ranks along some axes, given rank 0's clock."""
        by_place = clock.reshape(*self.shape, -1)
        return np.broadcast_to(by_place.max(axis=axes, keepdims=True), by_place.shape).reshape(-1)


class _Tracer(Tracer):
    """Traces rank 0 with the index values of all ranks at once."""

    def __init__(self, program: Program, sizes: Mapping[str, int], torus: Torus) -> None:
        super().__init__(0, program, sizes)
        self.torus = torus

    def compute(
        self,
        kind: str,
        out: View,
        operands: Sequence[View | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        """Trace a computation of rank 0.

        `_Rotations` checks later that its blocks correspond to blocks of other ranks.
        """
        of_rank_0 = ready and replace(ready, first=_at(ready.first, 0), own_first=_at(ready.own_first, 0))
        super().compute(kind, out, operands, options, of_rank_0, done and replace(done, first=0))
        if ready is not None or done is not None:
            blocks = self.trace.by_blocks[-1]
            blocks.ready, blocks.done = ready, done


class _Frame(Frame):
    """The index values of a program on all ranks at once."""

    def place(self, mesh: Mesh, over: str) -> int:
        axis = mesh.axes.index(over)
        places = np.arange(len(mesh.devices)) // prod(mesh.shape[axis + 1 :]) % mesh.shape[axis]
        place: int = PerRank.of(places)
        return place

    def member(self, team: tuple[int, ...], place: Any) -> int:
        """Return rank 0's peer; raise unless every rank's peer is at the same distance along each axis."""
        assert isinstance(self.machine, _Tracer)
        stride = team[1] if len(team) > 1 else 1
        return _peer(_plain(place), len(team), stride, self.machine.torus)


_Tracer.frame = _Frame


@lru_cache(maxsize=1 << 12)
def _peer(place: bytes | int, count: int, stride: int, torus: Torus) -> int:
    """Return rank 0's peer at a place in its team of ranks `stride` apart; raise if distances to peers differ."""
    ranks = np.arange(prod(torus.shape))
    peers = ranks + (_spread(place) - ranks // stride % count) * stride
    for peer, rank, extent in zip(torus.places(peers), torus.places(ranks), torus.shape, strict=True):
        away = (peer - rank) % extent
        if (away != away[0]).any():
            raise UnlikeError
    return int(peers[0])


def alike(program: Program, sizes: Mapping[str, int], calls: int) -> Alike | None:
    """Return the order of events as seen from rank 0, which represents all ranks; None if ranks differ."""
    torus = Torus.of(program)
    if torus is None:
        return None
    tracer = _Tracer(program, sizes, torus)
    try:
        for _ in range(calls):
            tracer.call()
        if tracer.misuse.problems:
            return None
        return Alike(tracer)
    except (UnlikeError, HostIRError):
        return None


class Alike(Order):
    """The order of rank 0's events, and of what other ranks do to its memory and its flags.

    An event of another rank is a copy of the event by which rank 0 does the same to a peer. The copy's clock is the
    original's, rotated by the rank: what rank 0 knows of rank 2, rank 3 knows of rank 5.
    """

    def __init__(self, tracer: _Tracer) -> None:
        self.torus = tracer.torus
        self.count = tracer.program.ranks
        sides = [side for sides in tracer.trace.collectives.values() for side in sides]
        if tracer.trace.messages or any(side.exchange.moves is not None for side in sides):
            raise UnlikeError
        _Rotations(tracer).check()
        kinds = dict.fromkeys(event.lane[1:] for event in tracer.trace.events if event.lane is not None)
        self.width = len(kinds)  # lanes of a rank
        tracer.trace.events += [copy for event in tracer.trace.events for copy in self._at_rank_0(event)]
        tracer.trace.signals = [self._signal(flag, tracer.trace.events) for flag in tracer.trace.signals]
        for flag in tracer.trace.waits:
            flag.slot = _at(flag.slot, 0)
        super().__init__([tracer.trace])
        # The lane of a signal exists once, so it has no counterpart on other ranks.
        if any(lane[1] == SIGNAL for lane in self.lanes):
            raise UnlikeError
        self.lanes = {
            (rank, *tail): rank * self.width + n for rank in range(self.count) for n, tail in enumerate(kinds)
        }

    def _at_rank_0(self, event: Event) -> Iterator[Event]:
        """Keep an event's accesses to rank 0's memory.

        Yield copies of the event for other ranks that access this memory.
        """
        far = [access for access in event.accesses if access.rank > 0]
        event.accesses = [_access(access, 0) for access in event.accesses if access.rank < 0]
        for access in far:
            rank = self.torus.opposite[access.rank]
            yield self.copy(event, rank, [_access(access, rank)])

    def _signal(self, flag: Flag, events: list[Event]) -> Flag:
        """Return the signal that rank 0 receives when all ranks send this one: another rank sends it."""
        rank = self.torus.opposite[flag.rank]
        event = flag.event
        if rank:
            event = self.copy(event, rank, [])
            events.append(event)
        return Flag(event, 0, flag.flags, _at(flag.slot, rank), flag.epoch)

    def copy(self, event: Event, rank: int, accesses: Sequence[Access] = ()) -> Event:
        """Copy an event of rank 0 as the same event of another rank."""
        lane = event.lane and (rank, *event.lane[1:])
        ends = [((rank, *lane[1:]), tick) for lane, tick in event.ends]
        twin = Event(rank, event.call, event.verb, event.statement, event.rounds, event.stream, event.number)
        twin.lane, twin.tick, twin.ends, twin.seen = lane, event.tick, ends, partial(self.torus.seen_from, rank)
        twin.after, twin.accesses = [event], [*accesses]
        return twin

    # Methods that join all ranks use rank 0 alone; the clocks of other ranks are rotations of rank 0's.
    def _of_each(self, team: tuple[int, ...], issued: list[dict[tuple[int, ...], list[T]]]) -> list[list[T]]:
        return [issued[0].get(team, [])]

    def _moment(self, after: list[Event], team: tuple[int, ...]) -> Event:
        moment = super()._moment(after, team)
        moment.seen = partial(self.torus.latest, self.torus.axes_of(team))
        return moment

    def stuck(self) -> Iterator[Trouble]:
        """Yield one kernel that may be in a cycle of kernels that block each other.

        Yield nothing if there is no cycle.
        """
        import networkx as nx

        lanes, kernels = Lanes(self), self.ranks[0].kernels
        graph: Any = nx.DiGraph()
        for kernel in kernels:
            for rank in range(self.count):
                other = self._kernel(kernel, rank, lanes) if rank else kernel
                for holder in kernels:
                    if (other is holder or together(self, other, holder)) and lanes.any_held(other, holder):
                        graph.add_edge(kernel, holder)
        for component in nx.strongly_connected_components(graph):
            first = min(component, key=kernels.index)
            if len(component) > 1 or graph.has_edge(first, first):
                yield Trouble("SMs held", [first.start])
                return

    def _kernel(self, kernel: WaitingKernel, rank: int, lanes: Lanes) -> WaitingKernel:
        """Return the same kernel as it runs on another rank."""
        other = WaitingKernel(self.copy(kernel.start, rank), self.copy(kernel.end, rank))
        self.clocks[other.start] = self.torus.seen_from(rank, self.clocks[kernel.start])
        lanes.latest[other] = self.torus.seen_from(rank, lanes.latest[kernel])
        return other


def _at(number: Any, rank: int) -> int:
    """Return the value of a number on a rank."""
    return int(number.values[rank]) if isinstance(number, PerRank) else int(number)


def _differs(number: object) -> bool:
    """Return True if a number differs from rank to rank."""
    return isinstance(number, PerRank)


def _access(access: Access, rank: int) -> Access:
    """Translate a remote access to the buffer coordinates of the rank that owns the memory."""
    region = access.region
    if _differs(region.offset):
        region = Region(_at(region.offset, rank), region.dims)
    return Access(access.buffer, region, access.does)


# Memory that rotates with the ranks -----------------------------------------------------------------------------------
class _Rotations:
    """Maps the addresses that a rank uses to the addresses that the next rank along an axis uses in the same way.

    An address maps to itself, or its digit of weight `step` rises by one modulo the number of ranks along the axis.
    So regions correspond from rank to rank, and overlap on every rank as they do on rank 0.
    """

    def __init__(self, tracer: _Tracer) -> None:
        self.tracer = tracer
        self.shape = tracer.torus.shape
        self.places = tracer.torus.places(np.arange(prod(self.shape)))
        self.steps: dict[tuple[str, int], int] = {}  # by buffer and axis; buffers left out do not rotate along the axis

    def check(self) -> None:
        """Raise UnlikeError unless every address maps to the next rank's address along each axis."""
        computed = self.tracer.trace.by_blocks
        in_blocks = {id(event) for blocks in computed for event in (*blocks.parts, *blocks.units)}
        of_blocks = {id(flag) for blocks in computed for flag in (*blocks.waits, *blocks.signals)}
        flags = [*self.tracer.trace.signals, *self.tracer.trace.waits]
        plain = [event for event in self.tracer.trace.events if id(event) not in in_blocks]
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
                if (access.buffer.name, axis) in self.steps:
                    self._region(access, axis, _one_place if step else _all_places)
        if any(_differs(flag.epoch[1]) for flag in flags):
            raise UnlikeError
        for flag, steps in going:
            if any((flag.flags, axis) in self.steps for axis, step in enumerate(steps) if not step):
                raise UnlikeError

    def _weigh(self, moving: Sequence[tuple[Access, Steps]], going: Sequence[tuple[Flag, Steps]]) -> None:
        """Record the weights of the digits that rise in addresses of accesses and in slots of flags."""
        weights = [(access.buffer.name, steps) for access, steps in moving]
        weights += [(flag.flags, steps) for flag, steps in going]
        for name, steps in dict.fromkeys(weights):
            for axis, step in enumerate(steps):
                if step:
                    self._need(name, axis, step)

    def _moving(self, address: Any) -> Steps:
        """Return the weight of the digit of an address that rises along each axis; 0 if the address stays the same."""
        return _steps(address.numbers, self.shape) if _differs(address) else (0,) * len(self.shape)

    def _need(self, buffer: str, axis: int, step: int) -> None:
        if self.steps.setdefault((buffer, axis), step) != step:
            raise UnlikeError

    def _apart(self) -> None:
        """Raise unless the digits of a buffer for different axes are disjoint, which makes rotations independent."""
        digits: dict[str, list[tuple[int, int]]] = {}
        for (buffer, axis), step in self.steps.items():
            digits.setdefault(buffer, []).append((step, step * self.shape[axis]))
        if any(map(_overlap, digits.values())):
            raise UnlikeError

    def _region(self, access: Access, axis: int, fits: Callable[[int, Dims, int, int], bool]) -> None:
        region, step = access.region, self.steps[access.buffer.name, axis]
        if not fits(_at(region.offset, 0), region.dims, step, self.shape[axis]):
            raise UnlikeError

    # Computations by blocks: blocks correspond as their flags do, whatever their indices ---------------------------
    def _by_blocks(self, blocks: BlockEvents) -> tuple[list[tuple[Access, Steps]], list[tuple[Flag, Steps]]]:
        """Return the accesses and flags of a computation, each with the weights of the digits that rise."""
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
            local = range(_at(ready.own_first, 0) * size, (_at(ready.own_first, 0) + ready.own_blocks) * size)
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
                (first + turns) % ready.results for first in (_at(ready.first, 0), self._of_ranks(ready.first))
            )
            if (units[here[:, 0] * size] // size != there).any():
                raise UnlikeError
        return accesses, flags

    def _turned(self, blocks: BlockEvents) -> Any:
        """Return, for each part of a computation on rank 0, the index of the corresponding part on each rank."""
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
        """Return the accesses of items, each with the weights of the digits that rise.

        Item n of rank 0 corresponds to item `turned[n]` of each rank. Items may begin with accesses that only some of
        them have; these are left out.
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
        """Return the values of a number on all ranks."""
        return number.values if isinstance(number, PerRank) else np.full(prod(self.shape), number, dtype=np.int64)


def _overlap(digits: Sequence[tuple[int, int]]) -> bool:
    """Return True if any two digits overlap. A digit is given by its lowest weight and the weight above it."""
    return any(higher % end for (_, end), (higher, _) in pairwise(sorted(digits)))


@lru_cache(maxsize=1 << 12)
def _steps(numbers: bytes, shape: tuple[int, ...]) -> Steps:
    """Return for each axis the weight of the digit in which the addresses of ranks along it differ; 0 if they agree."""
    return _steps_of(np.frombuffer(numbers, dtype=np.int64), shape)[0]


def _steps_of(values: Any, shape: tuple[int, ...]) -> list[Steps]:
    """Do as `_steps` for several addresses: each row of `values` holds one address on all ranks.

    Raises UnlikeError unless this digit alone rises by one per rank, modulo the number of ranks along the axis.
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
    """Return True if all elements of a region share the digit of weight `step`."""
    inner = sum((n - 1) * s for n, s in dims if s < step)
    return offset % step + inner < step and all(s < step or s % (step * count) == 0 for _, s in dims)


@lru_cache(maxsize=1 << 16)
def _all_places(offset: int, dims: Dims, step: int, count: int) -> bool:
    """Return True if a region stays the same when this digit of its elements rises by one, modulo `count`."""
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
