"""Order the events of rank 0 so that a check of rank 0 represents all ranks.

In most programs all ranks do the same, shifted along the axes of the mesh. If a rank accesses a peer, a block of rows
or a flag, then the next rank along an axis accesses the next peer, block of rows or flag. Then a race, a deadlock or a
read of unwritten memory on any rank also happens on rank 0, and checking rank 0 is enough. docs/memory-model.md has the
argument.

Rank 0 is traced with indices that hold one value for each rank. Everything that would make ranks differ raises
`UnlikeError`, for example a condition or an epoch that depends on the rank. Then every rank has to be traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hostir.check.one_rank.rotations import Rotations
from hostir.check.one_rank.torus import PerRank, PerRankFrame, Torus, UnlikeError, at
from hostir.check.ordering.held_sms import Lanes, together
from hostir.check.ordering.joining import SIGNAL, Trouble
from hostir.check.ordering.order import Order
from hostir.check.tracing.events import Event, Flag, WaitingKernel
from hostir.check.tracing.memory import Access, View
from hostir.check.tracing.tracer import Tracer
from hostir.ir.machine import Done, Ready
from hostir.ir.program import Program
from hostir.ir.regions import Region
from hostir.ir.source import HostIRError

T = TypeVar("T")


class _Tracer(Tracer):
    """Traces rank 0. An index that differs from rank to rank is a `PerRank`, which holds the values of all ranks."""

    def __init__(self, program: Program, sizes: Mapping[str, int], torus: Torus) -> None:
        super().__init__(0, program, sizes)
        self.torus = torus

    def compute(
        self,
        computation: str,
        out: View,
        operands: Sequence[View | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        """Trace a computation of rank 0, which may be cut into blocks of rows.

        The first block may differ from rank to rank. The trace keeps its number on every rank. `Rotations` checks later
        that the blocks of all ranks correspond to each other.
        """
        of_rank_0 = ready and replace(ready, first=at(ready.first, 0), own_first=at(ready.own_first, 0))
        super().compute(computation, out, operands, options, of_rank_0, done and replace(done, first=0))
        if ready is not None or done is not None:
            blocks = self.trace.by_blocks[-1]
            blocks.ready, blocks.done = ready, done


_Tracer.frame = PerRankFrame


def alike(program: Program, sizes: Mapping[str, int], calls: int) -> Alike | None:
    """Trace rank 0, and return the order of its events, which represents all ranks.

    Return None if ranks do not do the same.
    """
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
    """The order of the events of rank 0, and of events of other ranks that access the memory or the flags of rank 0.

    If an event of rank 0 accesses a peer, the same event of some other rank accesses rank 0. The event of the other
    rank is a copy of rank 0's event. Its vector clock is the clock of rank 0's event, rotated by the rank. For example,
    rank 3's clock counts as many events of rank 5 as rank 0's clock counts of rank 2.
    """

    def __init__(self, tracer: _Tracer) -> None:
        self.torus = tracer.torus
        self.count = tracer.program.ranks
        sides = [side for sides in tracer.trace.collectives.values() for side in sides]
        if tracer.trace.messages or any(side.exchange.moves is not None for side in sides):
            raise UnlikeError
        Rotations(tracer.trace, tracer.torus).check()
        kinds = dict.fromkeys(event.lane[1:] for event in tracer.trace.events if event.lane is not None)
        self.width = len(kinds)  # lanes of a rank
        tracer.trace.events += [copy for event in tracer.trace.events for copy in self._at_rank_0(event)]
        tracer.trace.signals = [self._signal(flag, tracer.trace.events) for flag in tracer.trace.signals]
        for flag in tracer.trace.waits:
            flag.slot = at(flag.slot, 0)
        super().__init__([tracer.trace])
        # The lane of a signal exists once, so it has no counterpart on other ranks.
        if any(lane[1] == SIGNAL for lane in self.lanes):
            raise UnlikeError
        self.lanes = {
            (rank, *tail): rank * self.width + n for rank in range(self.count) for n, tail in enumerate(kinds)
        }

    def _at_rank_0(self, event: Event) -> Iterator[Event]:
        """Remove the accesses of an event to peers, and yield events of other ranks that access rank 0 instead.

        If rank 0 accesses a peer, some other rank accesses rank 0 in the same way. The event of this other rank is a
        copy of rank 0's event.
        """
        far = [access for access in event.accesses if access.rank > 0]
        event.accesses = [_access(access, 0) for access in event.accesses if access.rank < 0]
        for access in far:
            rank = self.torus.opposite[access.rank]
            yield self.copy(event, rank, [_access(access, rank)])

    def _signal(self, flag: Flag, events: list[Event]) -> Flag:
        """Return the signal that rank 0 receives if every rank sends a signal in the way that rank 0 sends `flag`."""
        rank = self.torus.opposite[flag.rank]
        event = flag.event
        if rank:
            event = self.copy(event, rank, [])
            events.append(event)
        return Flag(event, 0, flag.flags, at(flag.slot, rank), flag.epoch)

    def copy(self, event: Event, rank: int, accesses: Sequence[Access] = ()) -> Event:
        """Return the event of another rank that corresponds to an event of rank 0.

        Args:
            event: the event of rank 0.
            rank: the other rank.
            accesses: the accesses of the new event to the memory of rank 0.
        """
        lane = event.lane and (rank, *event.lane[1:])
        ends = [((rank, *lane[1:]), tick) for lane, tick in event.ends]
        twin = Event(rank, event.call, event.verb, event.statement, event.rounds, event.stream, event.number)
        twin.lane, twin.tick, twin.ends, twin.seen = lane, event.tick, ends, partial(self.torus.seen_from, rank)
        twin.after, twin.accesses = [event], [*accesses]
        return twin

    # These methods join all ranks, but they use only rank 0: the clocks of other ranks are rotations of its clocks.
    def _of_each(self, team: tuple[int, ...], issued: list[dict[tuple[int, ...], list[T]]]) -> list[list[T]]:
        return [issued[0].get(team, [])]

    def _moment(self, after: list[Event], team: tuple[int, ...]) -> Event:
        moment = super()._moment(after, team)
        moment.seen = partial(self.torus.latest, self.torus.axes_of(team))
        return moment

    def stuck(self) -> Iterator[Trouble]:
        """Yield one trouble if waiting kernels may block each other in a cycle.

        The trouble names one kernel of the cycle.
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
        """Return the kernel of another rank that corresponds to a kernel of rank 0.

        Also record the vector clocks of the new kernel in `clocks` and `lanes`.
        """
        other = WaitingKernel(self.copy(kernel.start, rank), self.copy(kernel.end, rank))
        self.clocks[other.start] = self.torus.seen_from(rank, self.clocks[kernel.start])
        lanes.latest[other] = self.torus.seen_from(rank, lanes.latest[kernel])
        return other


def _access(access: Access, rank: int) -> Access:
    """Return the access that `rank` makes to the memory of rank 0 when rank 0 makes `access`.

    If `rank` is 0, `access` is an access of rank 0 to its memory. Otherwise it is an access of rank 0 to a peer,
    and the result is the corresponding access of `rank` to rank 0.
    """
    region = access.region
    offset: Any = region.offset
    if isinstance(offset, PerRank):
        region = Region(at(offset, rank), region.dims)
    return Access(access.buffer, region, access.does)
