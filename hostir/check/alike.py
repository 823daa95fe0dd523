"""Check rank 0 in place of all ranks, where every rank does the same things relative to its own place.

In most programs each rank does what its neighbours along the axes of the mesh do, shifted by one rank: its peers, and
the rows and flags that belong to ranks, are those next to the neighbour's. Then a race, a deadlock or a read of
unwritten memory on any rank also happens on rank 0, and checking rank 0 is enough. docs/memory-model.md has the
argument.

Rank 0 is traced with indices that hold their value on every rank. Anything that would make ranks differ, such as a
condition or an epoch, raises `UnlikeError`; then every rank has to be traced.
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

from hostir.check.order import SIGNAL, Clock, Lanes, Order, Trouble, together
from hostir.check.tracer import Access, BlockEvents, Event, Flag, Tracer, View, WaitingKernel
from hostir.ir.machine import ARITHMETIC, Done, Frame, Ready
from hostir.ir.program import Program
from hostir.ir.regions import Dims, Region
from hostir.ir.source import HostIRError
from hostir.ir.types import Mesh

T = TypeVar("T")
Steps = tuple[int, ...]  # for each axis of the grid: the weight of the digit that goes up along it, 0 where none does


class UnlikeError(Exception):
    """Raised where ranks do different things, so that rank 0 cannot stand for all."""


class PerRank:
    """An integer with a value for each rank. A comparison gives the answer that all ranks share, or raises."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: bytes) -> None:
        self.numbers = numbers

    @staticmethod
    def of(values: Any) -> Any:
        """Return a number with these values; an int where they are all the same."""
        found = np.asarray(values, dtype=np.int64)
        return int(found[0]) if (found == found[0]).all() else PerRank(found.tobytes())

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
    found = compare(_spread(a), _spread(b))
    if found.all() or not found.any():
        return bool(found.all())
    raise UnlikeError


def _binary(compute: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Return an operator on the numbers of all ranks, and the same with its operands exchanged."""
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
    """All ranks as a row-major grid that closes along each of its axes. A rotation adds one place to every rank's."""

    shape: tuple[int, ...]

    @staticmethod
    def of(program: Program) -> Torus | None:
        """Return the grid along whose axes the teams of all meshes lie; None where there is none."""
        ranks = tuple(range(program.ranks))
        if len(ranks) == 1 or any(mesh.devices != ranks for mesh in program.meshes):
            return None
        shapes = {tuple(n for n in mesh.shape if n > 1) for mesh in program.meshes}
        shapes = {shape for shape in shapes if len(shape) > 1} or {(len(ranks),)}
        return Torus(shapes.pop()) if len(shapes) == 1 else None

    def places(self, ranks: Any) -> tuple[Any, ...]:
        """Return the place of each rank along each axis."""
        return np.unravel_index(ranks, self.shape)

    @cached_property
    def opposite(self) -> list[int]:
        """For each rank, the one that stands to rank 0 as rank 0 stands to it."""
        places = [-along for along in self.places(np.arange(prod(self.shape)))]
        found: list[int] = np.ravel_multi_index(places, self.shape, mode="wrap").tolist()
        return found

    def axes_of(self, team: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes along which a team of rank 0 lies; raise unless it has all ranks along them."""
        axes = tuple(axis for axis, places in enumerate(self.places(team)) if places.any())
        if prod(self.shape[axis] for axis in axes) != len(team):
            raise UnlikeError
        return axes

    # The clocks of an event on several ranks, which have the lanes of each rank in turn.
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
        """Return the clock of what follows the same event on all ranks along some axes, given that of rank 0's."""
        by_place = clock.reshape(*self.shape, -1)
        return np.broadcast_to(by_place.max(axis=axes, keepdims=True), by_place.shape).reshape(-1)


class _Tracer(Tracer):
    """Traces rank 0 with index values of all ranks at once."""

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
        """Trace a computation of rank 0. What makes its blocks those of other ranks is left to `_Rotations`."""
        of_rank_0 = ready and replace(ready, first=_at(ready.first, 0), own_first=_at(ready.own_first, 0))
        super().compute(kind, out, operands, options, of_rank_0, done and replace(done, first=0))
        if ready is not None or done is not None:
            self.by_blocks[-1].ready, self.by_blocks[-1].done = ready, done


class _Frame(Frame):
    """The index values of a program on all ranks at once."""

    def place(self, mesh: Mesh, over: str) -> int:
        axis = mesh.axes.index(over)
        places = np.arange(len(mesh.devices)) // prod(mesh.shape[axis + 1 :]) % mesh.shape[axis]
        place: int = PerRank.of(places)
        return place

    def member(self, team: tuple[int, ...], place: Any) -> int:
        """Return rank 0's peer; raise unless every rank's is as far from it along each axis."""
        assert isinstance(self.machine, _Tracer)
        stride = team[1] if len(team) > 1 else 1
        return _peer(_plain(place), len(team), stride, self.machine.torus)


_Tracer.frame = _Frame


@lru_cache(maxsize=1 << 12)
def _peer(place: bytes | int, count: int, stride: int, torus: Torus) -> int:
    """Return rank 0's peer at a place in its team, in which ranks are `stride` apart; raise where others' differ."""
    ranks = np.arange(prod(torus.shape))
    peers = ranks + (_spread(place) - ranks // stride % count) * stride
    for peer, rank, extent in zip(torus.places(peers), torus.places(ranks), torus.shape, strict=True):
        away = (peer - rank) % extent
        if (away != away[0]).any():
            raise UnlikeError
    return int(peers[0])


def alike(program: Program, sizes: Mapping[str, int], calls: int) -> Alike | None:
    """Return the order of events as seen from rank 0, which stands for all ranks; None where ranks differ."""
    torus = Torus.of(program)
    if torus is None:
        return None
    tracer = _Tracer(program, sizes, torus)
    try:
        for _ in range(calls):
            tracer.call()
        if tracer.problems:
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
        sides = [side for sides in tracer.collectives.values() for side in sides]
        if tracer.messages or any(side.exchange.moves is not None for side in sides):
            raise UnlikeError
        _Rotations(tracer).check()
        kinds = dict.fromkeys(event.lane[1:] for event in tracer.events if event.lane is not None)
        self.width = len(kinds)  # lanes of a rank
        tracer.events += [copy for event in tracer.events for copy in self._at_rank_0(event)]
        tracer.signals = [self._signal(flag, tracer.events) for flag in tracer.signals]
        for flag in tracer.waits:
            flag.slot = _at(flag.slot, 0)
        super().__init__([tracer])
        if any(lane[1] == SIGNAL for lane in self.lanes):  # such lanes say nothing about other ranks
            raise UnlikeError
        self.lanes = {
            (rank, *kind): rank * self.width + n for rank in range(self.count) for n, kind in enumerate(kinds)
        }

    def _at_rank_0(self, event: Event) -> Iterator[Event]:
        """Keep an event's accesses to rank 0's memory; yield copies for what other ranks do to that memory."""
        far = [access for access in event.accesses if access.rank > 0]
        event.accesses = [_access(access, 0) for access in event.accesses if access.rank < 0]
        for access in far:
            rank = self.torus.opposite[access.rank]
            yield self.copy(event, rank, [_access(access, rank)])

    def _signal(self, flag: Flag, events: list[Event]) -> Flag:
        """Return the signal that arrives at rank 0 where rank 0 sends this one: some other rank sends it."""
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
        made = Event(rank, event.call, event.verb, event.statement, event.rounds, event.stream, event.number)
        made.lane, made.tick, made.ends, made.seen = lane, event.tick, ends, partial(self.torus.seen_from, rank)
        made.after, made.accesses = [event], [*accesses]
        return made

    # Methods that join all ranks use rank 0 alone, and rotate its clocks for the others.
    def _of_each(self, team: tuple[int, ...], issued: list[dict[tuple[int, ...], list[T]]]) -> list[list[T]]:
        return [issued[0].get(team, [])]

    def _moment(self, after: list[Event], team: tuple[int, ...]) -> Event:
        moment = super()._moment(after, team)
        moment.seen = partial(self.torus.latest, self.torus.axes_of(team))
        return moment

    def stuck(self) -> Iterator[Trouble]:
        """Yield a kernel that may be in a cycle of kernels that block each other; without one there is no cycle."""
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
    """Whether a number differs from rank to rank."""
    return isinstance(number, PerRank)


def _access(access: Access, rank: int) -> Access:
    """Return an access that a rank makes, as one to memory of the rank that it accesses."""
    region = access.region
    if _differs(region.offset):
        region = Region(_at(region.offset, rank), region.dims)
    return Access(access.buffer, region, access.does)


# Memory that goes round with the ranks --------------------------------------------------------------------------------
class _Rotations:
    """Map the addresses of each rank's buffers to those that the next rank along an axis uses in the same way.

    An address maps to itself, or to the one whose digit of weight `step` is one higher modulo the ranks along the axis.
    So all regions correspond, and overlap on every rank as they do on rank 0.
    """

    def __init__(self, tracer: _Tracer) -> None:
        self.tracer = tracer
        self.shape = tracer.torus.shape
        self.places = tracer.torus.places(np.arange(prod(self.shape)))
        self.steps: dict[tuple[str, int], int] = {}  # by buffer and axis; those that are not here do not go round

    def check(self) -> None:
        """Raise UnlikeError unless every address maps to that of the next rank along each axis."""
        computed = self.tracer.by_blocks
        in_blocks = {id(event) for blocks in computed for event in (*blocks.parts, *blocks.units)}
        of_blocks = {id(flag) for blocks in computed for flag in (*blocks.waits, *blocks.signals)}
        flags = [*self.tracer.signals, *self.tracer.waits]
        plain = [event for event in self.tracer.events if id(event) not in in_blocks]
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
        """Take over the weights of digits in which addresses of accesses and slots of flags go up."""
        weights = [(access.buffer.name, steps) for access, steps in moving]
        weights += [(flag.flags, steps) for flag, steps in going]
        for name, steps in dict.fromkeys(weights):
            for axis, step in enumerate(steps):
                if step:
                    self._need(name, axis, step)

    def _moving(self, address: Any) -> Steps:
        """Return the weights of the digits in which an address goes up along each axis, 0 where it stays the same."""
        return _steps(address.numbers, self.shape) if _differs(address) else (0,) * len(self.shape)

    def _need(self, buffer: str, axis: int, step: int) -> None:
        if self.steps.setdefault((buffer, axis), step) != step:
            raise UnlikeError

    def _apart(self) -> None:
        """Raise unless a buffer's digits of different axes are different ones, so that no rotation moves another's."""
        digits: dict[str, list[tuple[int, int]]] = {}
        for (buffer, axis), step in self.steps.items():
            digits.setdefault(buffer, []).append((step, step * self.shape[axis]))
        if any(map(_overlap, digits.values())):
            raise UnlikeError

    def _region(self, access: Access, axis: int, fits: Callable[[int, Dims, int, int], bool]) -> None:
        region, step = access.region, self.steps[access.buffer.name, axis]
        if not fits(_at(region.offset, 0), region.dims, step, self.shape[axis]):
            raise UnlikeError

    # Computations by blocks: their blocks correspond as their flags do, whatever their numbers ----------------------
    def _by_blocks(self, blocks: BlockEvents) -> tuple[list[tuple[Access, Steps]], list[tuple[Flag, Steps]]]:
        """Return the accesses and flags of a computation, with the weights of digits in which they go up."""
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
            own = range(_at(ready.own_first, 0) * size, (_at(ready.own_first, 0) + ready.own_blocks) * size)
            inside = turned[own.start : own.stop] - self._of_ranks(ready.own_first) * size
            if ((inside < 0) | (inside >= len(own))).any():
                raise UnlikeError
            accesses += self._columns([blocks.parts[n].accesses[:1] for n in own], inside)
            awaited = [n for n in range(len(turned)) if n not in own]
            flags += zip(blocks.waits, _steps_of(turned[awaited] // size, self.shape), strict=True)
        if done is not None:
            size = count // done.blocks
            flags += zip(blocks.signals, _steps_of(units[::size] // size, self.shape), strict=True)
        if ready is not None and done is not None:  # each block may wait for the one before
            size, turns = count // ready.results, np.arange(ready.results)[:, None]
            here, there = (
                (first + turns) % ready.results for first in (_at(ready.first, 0), self._of_ranks(ready.first))
            )
            if (units[here[:, 0] * size] // size != there).any():
                raise UnlikeError
        return accesses, flags

    def _turned(self, blocks: BlockEvents) -> Any:
        """Return, for each part of a computation on rank 0, which part corresponds to it on each rank."""
        count, ready, done = len(blocks.units), blocks.ready, blocks.done
        flags = [(ready.flags.buffer.name, ready.results)] if ready else []
        flags += [(done.flags.buffer.name, done.blocks)] if done else []
        found = np.tile(np.arange(len(blocks.parts))[:, None], (1, prod(self.shape)))
        digits: list[tuple[int, int]] = []
        for axis, extent in enumerate(self.shape):
            steps = {self.steps[name, axis] * (count // n) for name, n in flags if (name, axis) in self.steps}
            if not steps:
                continue
            step = steps.pop()
            if steps or len(found) % (step * extent):
                raise UnlikeError
            digits.append((step, step * extent))
            place = found // step % extent
            found += ((place + self.places[axis]) % extent - place) * step
        if _overlap(digits):
            raise UnlikeError
        return found

    def _columns(self, items: Sequence[Sequence[Access]], turned: Any) -> list[tuple[Access, Steps]]:
        """Return the accesses of items, with the weights of digits in which they go up.

        Item n of rank 0 corresponds to item `turned[n]` of each rank. What only some items access, first, is left out.
        """
        found: list[tuple[Access, Steps]] = []
        common = min(map(len, items), default=0)
        for column in zip(*(item[len(item) - common :] for item in items), strict=True):
            if all(access is column[0] for access in column):
                found.append((column[0], self._moving(column[0].region.offset)))
                continue
            if any(access.region.dims != column[0].region.dims for access in column):
                raise UnlikeError
            offsets = np.stack([self._of_ranks(access.region.offset) for access in column])
            found += zip(column, _steps_of(np.take_along_axis(offsets, turned, 0), self.shape), strict=True)
        return found

    def _of_ranks(self, number: Any) -> Any:
        """Return the values of a number on all ranks."""
        return number.values if isinstance(number, PerRank) else np.full(prod(self.shape), number, dtype=np.int64)


def _overlap(digits: Sequence[tuple[int, int]]) -> bool:
    """Whether digits, each from a weight to another, are not different ones."""
    return any(higher % end for (_, end), (higher, _) in pairwise(sorted(digits)))


@lru_cache(maxsize=1 << 12)
def _steps(numbers: bytes, shape: tuple[int, ...]) -> Steps:
    """Return for each axis the weight of the digit in which ranks' addresses differ along it, 0 where they do not."""
    return _steps_of(np.frombuffer(numbers, dtype=np.int64), shape)[0]


def _steps_of(values: Any, shape: tuple[int, ...]) -> list[Steps]:
    """Return the same for each of several addresses, which have a row each.

    Raises UnlikeError unless that digit alone rises by one per rank, modulo the ranks along the axis.
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
    """Whether all elements of a region share the digit of weight `step`."""
    inner = sum((n - 1) * s for n, s in dims if s < step)
    return offset % step + inner < step and all(s < step or s % (step * count) == 0 for _, s in dims)


@lru_cache(maxsize=1 << 16)
def _all_places(offset: int, dims: Dims, step: int, count: int) -> bool:
    """Whether a region stays the same when this digit of all its elements rises by one, modulo the number of ranks."""
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
