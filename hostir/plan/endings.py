"""The end of a call: when a rank may reset its flags and let peers signal again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hostir.plan.operations import CALLER, BarrierOp, Op, RanksOfTeam, SignalOp
from hostir.plan.unrolled import UnrolledProgram


@dataclass(frozen=True)
class CallEnding:
    """The operations of a rank that must end before the rank resets its flags and grants credits to its peers.

    A rank may do so when it waits for no more flags, raises no more flags of its own, and uses neither its own
    symmetric memory nor what it reads from peers. What it sends to peers does not matter: a peer waits for it before
    the peer ends its own call. See hostir.machines.cuda.flow_control.

    Fields:
        last: the last of these operations; None without any.
        others: the streams of those that need not have ended before operation `last` begins.
    """

    last: Op | None
    others: frozenset[int]

    @classmethod
    def of(cls, unrolled: UnrolledProgram, implied_barriers: Collection[RanksOfTeam] | None = None) -> CallEnding:
        """Return the ending of a rank's calls.

        `implied_barriers` are the teams whose first barrier credits replace, so that it need not end; by default all.
        """
        *earlier, last = _before_reset(unrolled, implied_barriers) or [-1]
        if last < 0:
            return cls(None, frozenset())
        ops, precedes = unrolled.ops, unrolled.order.precedes
        return cls(ops[last], frozenset([ops[at].stream for at in earlier if not precedes(at, last)]))

    @property
    def stream(self) -> int:
        """The stream that resets the flags. If it is a worker stream, other work of the caller may hide the reset."""
        if self.last is None or self.last.by_group or CALLER in self.others:
            return CALLER
        return self.last.stream

    def within(self, op: Op) -> bool:
        """Return True if an operation is the last to wait for flags, so that its kernel may reset them at its end."""
        return op is self.last and bool(op.awaited_flags) and not self.others


def _before_reset(unrolled: UnrolledProgram, implied_barriers: Collection[RanksOfTeam] | None) -> list[int]:
    """Return the positions of the operations that must end before the reset.

    Collectives of process groups are among them, so that the flags tell what a call waits for while one is in flight.
    """
    symmetric, remote = unrolled.symmetric, unrolled.remote
    own = frozenset([x for x, buffer in enumerate(unrolled.buffers) if buffer in symmetric]) - remote
    positions = []
    for at, op in enumerate(unrolled.ops):
        if isinstance(op, SignalOp):
            if op.peer == unrolled.rank:
                positions.append(at)
            continue
        reads = op.reads
        if (
            not (own.isdisjoint(reads) and own.isdisjoint(op.writes) and remote.isdisjoint(reads))
            or op.awaited_flags
            or op.by_group
            or (op.of_team and not _implied(op, implied_barriers))
        ):
            positions.append(at)
    return positions


def _implied(op: Op, implied_barriers: Collection[RanksOfTeam] | None) -> bool:
    """Return True if an operation is a barrier that credits replace."""
    first = isinstance(op, BarrierOp) and op.number == 0
    return first and (implied_barriers is None or op.of_team in implied_barriers)
