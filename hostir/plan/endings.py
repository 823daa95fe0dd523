"""The end of a call: when a rank may reset its flags and let peers signal again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hostir.plan.operations import CALLER, NONE, BarrierOp, Op, RanksOfTeam, SignalOp
from hostir.plan.unrolled import UnrolledProgram

ENDING = ("matmul", "linear", "scaled_matmul", "sum")  # computations whose kernels can reset flags when they end


@dataclass(frozen=True)
class CallEnding:
    """The operations of a rank that must end before the rank resets its flags and grants credits to its peers.

    A rank may do so once it has waited for all flags of the call, has raised those flags of its own that it raises
    itself, and no longer accesses its symmetric memory or reads from peers. A write to a peer may still be under way if
    a signal to that peer follows it: the peer waits for the signal before it ends its own call. See
    hostir.machines.cuda.flow_control.

    Fields:
        last: the last of these operations; None without any.
        others: the streams of the other operations that may still run when `last` begins.
        stores: True if `last` writes to symmetric memory. A store by TMA may go on after the kernel's last instruction.
    """

    last: Op | None
    others: frozenset[int]
    stores: bool = False

    @classmethod
    def of(cls, unrolled: UnrolledProgram, implied_barriers: Collection[RanksOfTeam] | None = None) -> CallEnding:
        """Return the ending of a rank's calls.

        `implied_barriers`: the teams whose first barrier is replaced by credits. By default, all teams. Such a barrier
        is no step, so nothing waits for it.
        """
        *earlier, last = _before_reset(unrolled, implied_barriers) or [-1]
        if last < 0:
            return cls(None, frozenset())
        ops, precedes = unrolled.ops, unrolled.order.precedes
        others = frozenset([ops[at].stream for at in earlier if not precedes(at, last)])
        symmetric = [x for x in unrolled.accesses[last][1] if unrolled.buffers[x] in unrolled.symmetric]
        return cls(ops[last], others, bool(symmetric))

    @property
    def stream(self) -> int:
        """The stream on which the flags are reset. On a worker stream, they may be reset beside other work."""
        if self.last is None or CALLER in self.others:
            return CALLER
        return self.last.stream

    def within(self, op: Op) -> bool:
        """Return True if the kernel of an operation may reset the flags at its end.

        It is the last to wait for flags, nothing else must still end, and it writes to no symmetric memory.
        """
        return op is self.last and bool(op.awaited_flags) and not self.others and not self.stores


def _before_reset(unrolled: UnrolledProgram, implied_barriers: Collection[RanksOfTeam] | None) -> list[int]:
    """Return the positions of the operations that must end before the reset.

    The wait for a communication of a process group is among them. Until then, the communication may access symmetric
    memory, and the flags tell what the call waits for.
    """
    ops, symmetric, remote = unrolled.ops, unrolled.symmetric, unrolled.remote
    own = frozenset([x for x, buffer in enumerate(unrolled.buffers) if buffer in symmetric]) - remote
    by_groups = {op.starts for op in ops if op.by_group}
    signals = _Signals(unrolled)
    positions = []
    for at, (op, (reads, writes)) in enumerate(zip(ops, unrolled.accesses, strict=True)):
        if isinstance(op, SignalOp):
            if op.peer == unrolled.rank:
                positions.append(at)
            continue
        if (
            not (own.isdisjoint(reads) and own.isdisjoint(writes) and remote.isdisjoint(reads))
            or op.awaited_flags
            or op.by_group
            or (op.awaits != NONE and op.awaits in by_groups)
            or (op.of_team and not _implied(op, implied_barriers))
            or not (remote.isdisjoint(writes) or signals.follow(at, op))
        ):
            positions.append(at)
    return positions


class _Signals:
    """The last signals of a rank: by peer, and by peer and stream."""

    def __init__(self, unrolled: UnrolledProgram) -> None:
        self.unrolled = unrolled
        self.to_peer: dict[int, int] = {}
        self.on_stream: dict[tuple[int, int], int] = {}
        for at, op in enumerate(unrolled.ops):
            if isinstance(op, SignalOp):
                self.to_peer[op.peer] = self.on_stream[op.peer, op.stream] = at

    def follow(self, at: int, op: Op) -> bool:
        """Return True if the rank signals to each peer that operation `at` writes to after this operation has ended."""
        for peer in {self.unrolled.owner(x) for x in op.writes} - {self.unrolled.rank}:
            last = self.to_peer.get(peer)
            if last is None:
                return False
            if self.on_stream.get((peer, op.stream), -1) < at and not self.unrolled.order.precedes(at, last):
                return False
        return True


def _implied(op: Op, implied_barriers: Collection[RanksOfTeam] | None) -> bool:
    """Return True if an operation is a barrier that credits replace."""
    first = isinstance(op, BarrierOp) and op.number == 0
    return first and (implied_barriers is None or op.of_team in implied_barriers)
