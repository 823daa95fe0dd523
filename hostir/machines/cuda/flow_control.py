"""Flow control on CUDA: the flags that a rank resets after a call, and the credits that allow peers to signal again.

A flag holds an epoch. Every call starts with its flags at 0, so all replays of a CUDA graph are alike. Every rank ends
a call by resetting the flags that peers raised. It then grants each of these peers a *credit*, the right to signal
again: it adds 1 to a counter in the peer's memory. Before a rank accesses a peer in a call, it waits until it has a
credit from every rank whose flags it raises in the call. Then it sets its counter back to 0. A rank never grants
a peer a second credit before the peer has consumed the first one: the rank's next call ends only after the peer has
raised its flags, and the peer consumes the credit before it raises them.

A credit also says that the rank no longer uses what its peers may access: its own symmetric memory, and the memory of
peers that it reads. Its writes to peers have arrived, or the peer waits for them before it ends its own call. So the
credits of a team can replace its first barrier, if no rank of the team does anything that concerns a peer before the
barrier. Credits say nothing about ranks that are reached only through a third rank. So they cannot replace the first
barrier of a second team.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from hostir.job.offers import BARRIERS, BufferPlace, Offer, PeerRange
from hostir.job.symmetric import SharedMemory
from hostir.machines.cuda.driver import MemoryOp, write
from hostir.plan.operations import CALLER, ElementRange, Op, RanksOfTeam, overlap
from hostir.plan.unrolled import UnrolledProgram

# The buffer of a rank's counter of credits. The buffers of barriers have the same empty name, but a team as rounds.
CREDITS: BufferPlace = ("", ())
Slot = tuple[BufferPlace, int]  # a flag of some rank
# The team of a barrier, and this rank's ranges of symmetric memory and its flags that are used before the barrier.
FirstBarrier = tuple[RanksOfTeam, list[tuple[BufferPlace, ElementRange]], list[Slot]]
NO_STREAM = CALLER - 1  # stands for an access outside the order of any stream
ALWAYS_RAISED = 1 << 62  # a value that is at least as high as any epoch


def notes(unrolled: UnrolledProgram) -> str:
    """Return a JSON text for peers: the highest epoch of each flag that this rank raises, and its first barrier."""
    raised: dict[tuple[int, Slot], int] = {}
    homes = _homes(unrolled)
    for op in unrolled.ops:
        for flags, slot, epoch in op.raised_flags:
            key = unrolled.owner(flags), (homes[unrolled.buffers[flags]], slot)
            raised[key] = max(raised.get(key, 0), epoch)
    signals = [[peer, *place, slot, epoch] for (peer, (place, slot)), epoch in raised.items()]
    return json.dumps({"signals": signals, "first_barrier": _first_barrier(unrolled)})


def _homes(unrolled: UnrolledProgram) -> dict[int, BufferPlace]:
    """Return the name and the rounds of each symmetric buffer. The keys are the registers of the buffers."""
    return {register: op.home for register, op in unrolled.symmetric.items()}


def _first_barrier(unrolled: UnrolledProgram) -> FirstBarrier | None:
    """Return the first barrier of a call, and the memory and the flags of this rank that are used before the barrier.

    Returns None if there is no barrier, or if the rank communicates or accesses a peer before the barrier. Only the
    first barrier of the call counts. If a rank is in two teams, credits do not order the rank's work before the barrier
    of the second team.
    """
    homes, at = _homes(unrolled), unrolled.extents
    touched: list[tuple[BufferPlace, ElementRange]] = []
    raised: list[Slot] = []
    for op in unrolled.ops:
        if op.of_team:
            return op.of_team, touched, raised
        if op.by_group or op.awaits or op.awaited_flags or unrolled.touches_peer(op):
            return None
        local = (r for r in unrolled.tensors(op) if unrolled.buffers[r] in homes)
        touched += [(homes[unrolled.buffers[r]], at[r]) for r in local]
        raised += [(homes[unrolled.buffers[flags]], slot) for flags, slot, _ in op.raised_flags]
    return None


@dataclass(frozen=True)
class FlowControl:
    """The flags that a rank resets at the end of a call, and the credits that it takes and grants.

    Fields:
        signaled: the peers whose flags this rank raises. This rank needs a credit from each of these peers.
        signalers: the peers that raise this rank's flags. This rank grants a credit to each of these peers.
        raised: this rank's flags that signals raise in a call, with the last epoch of each flag.
        unawaited: the flags in `raised` for which no statement of this rank waits until the flag has its last epoch.
            The end of the call waits for these flags.
        stream_ordered: this rank's flags that only this rank raises, on the same stream that waits for them. The order
            of the stream replaces these flags.
        implied_barriers: the teams that need no first barrier, because credits replace it.
    """

    signaled: frozenset[int]
    signalers: frozenset[int]
    raised: dict[Slot, int] = field(default_factory=dict)
    unawaited: dict[Slot, int] = field(default_factory=dict)
    stream_ordered: frozenset[Slot] = frozenset()
    implied_barriers: frozenset[RanksOfTeam] = frozenset()

    @classmethod
    def of(cls, unrolled: UnrolledProgram, offers: Sequence[Offer]) -> FlowControl:
        """Return a rank's flow control, derived from the notes in the offers of all ranks.

        All ranks derive the same pairs of ranks that signal each other, and the same implied barriers.
        """
        me = unrolled.rank
        all_notes = [json.loads(offer.notes) for offer in offers]
        raised: dict[Slot, int] = {}
        raisers: dict[Slot, set[int]] = {}
        for rank, rank_notes in enumerate(all_notes):
            for peer, name, rounds, slot, epoch in rank_notes["signals"]:
                if peer == me:
                    key = (name, tuple(rounds)), slot
                    raised[key] = max(raised.get(key, 0), epoch)
                    raisers.setdefault(key, set()).add(rank)
        streams = _streams(unrolled)
        stream_ordered = frozenset(slot for slot, by in raisers.items() if by == {me} and len(streams[slot]) == 1)
        raised = {slot: epoch for slot, epoch in raised.items() if slot not in stream_ordered}
        signals = {(rank, peer) for rank, n in enumerate(all_notes) for peer, *_ in n["signals"] if peer != rank}
        pairs, implied_barriers = _with_barriers(signals, all_notes, offers)
        awaited = _awaited(unrolled)
        return cls(
            signaled=frozenset(peer for rank, peer in pairs if rank == me),
            signalers=frozenset(rank for rank, peer in pairs if peer == me),
            raised=raised,
            unawaited={
                slot: epoch for slot, epoch in raised.items() if raisers[slot] != {me} and awaited.get(slot, 0) < epoch
            },
            stream_ordered=stream_ordered,
            implied_barriers=implied_barriers,
        )


def _with_barriers(
    signals: set[tuple[int, int]], all_notes: Sequence[dict[str, Any]], offers: Sequence[Offer]
) -> tuple[set[tuple[int, int]], frozenset[RanksOfTeam]]:
    """Return the pairs of ranks that signal each other, and the teams that need no first barrier because of credits.

    In each pair, the first rank raises flags of the second rank. `signals` are the pairs that follow from signals
    alone; barriers add further pairs. Credits replace a team's first barrier only if every two ranks of the team
    signal each other for other reasons, too. Then they grant each other credits even without this barrier.
    """
    counts = {b.rounds: b.shape[0] for offer in offers for b in offer.buffers if b.name == BARRIERS and b.rounds}
    touched = [touch for offer in offers for touch in offer.touches]
    unneeded = {team for team in counts if all(_begins_with(all_notes, touched, team, rank) for rank in team)}
    certain = signals.union(*(permutations(t, 2) for t, n in counts.items() if n > 1 or t not in unneeded))
    implied_barriers = frozenset(team for team in unneeded if certain.issuperset(permutations(team, 2)))
    return certain.union(*(permutations(team, 2) for team in unneeded - implied_barriers)), implied_barriers


def _begins_with(
    all_notes: Sequence[dict[str, Any]], touched: Sequence[PeerRange], team: RanksOfTeam, rank: int
) -> bool:
    """Return True if a rank's first barrier is a barrier of `team`, and nothing before this barrier concerns a peer.

    `touched` are the ranges of symmetric memory that ranks access on their peers.
    """
    if all_notes[rank]["first_barrier"] is None:
        return False
    first_team, local, raised = all_notes[rank]["first_barrier"]
    others = [rank_notes["signals"] for other, rank_notes in enumerate(all_notes) if other != rank]
    by_peers = {(name, tuple(rounds), slot) for each in others for peer, name, rounds, slot, _ in each if peer == rank}
    if tuple(first_team) != team or any((name, tuple(rounds), slot) in by_peers for (name, rounds), slot in raised):
        return False
    remote: dict[BufferPlace, list[ElementRange]] = {}
    for name, rounds, peer, *extent in touched:
        if peer == rank:
            remote.setdefault((name, rounds), []).append((extent[0], extent[1]))
    return not any(overlap(extent, remote.get((name, tuple(rounds)), ())) for (name, rounds), extent in local)


def flow_control_of(unrolled: UnrolledProgram, memory: SharedMemory) -> FlowControl:
    """Return the flow control that all plans with this symmetric memory share. All these plans use the same flags."""
    if FlowControl not in memory.kept:
        memory.kept[FlowControl] = FlowControl.of(unrolled, memory.offers)
    flow_control: FlowControl = memory.kept[FlowControl]
    return flow_control


def prepare(rank: int, memory: SharedMemory) -> None:
    """Initialise a rank's memory for its first call: set its credits and raise the flags that stream order replaces."""
    flow_control: FlowControl = memory.kept[FlowControl]
    memory.buffers[CREDITS, rank].fill_(len(flow_control.signaled))
    for place, slot in flow_control.stream_ordered:
        memory.buffers[place, rank][slot] = ALWAYS_RAISED


def raised_flags(rank: int, memories: Sequence[SharedMemory]) -> list[MemoryOp]:
    """Return the writes that raise all flags of a rank above every epoch, so that nothing waits for them any more."""
    flags = [
        buffer
        for memory in memories
        for (place, owner), buffer in memory.flat.items()
        if owner == rank and (place, owner) in memory.flags
    ]
    return [write(row.data_ptr() + i * row.itemsize, ALWAYS_RAISED) for row in flags for i in range(row.numel())]


def waits(unrolled: UnrolledProgram) -> Iterator[tuple[Slot, int, Op]]:
    """Yield a triple for each wait of a rank: the flag, the epoch, and the operation that waits."""
    homes = _homes(unrolled)
    for op in unrolled.ops:
        for flags, slot, epoch in op.awaited_flags:
            yield (homes[unrolled.buffers[flags]], slot), epoch, op


def _streams(unrolled: UnrolledProgram) -> dict[Slot, set[int]]:
    """Return, for each flag of this rank, the streams of this rank that raise the flag or wait for it.

    NO_STREAM is among these streams if an operation raises the flag before the operation ends, or if it may start
    before earlier work of its stream has ended.
    """
    homes, streams = _homes(unrolled), dict[Slot, set[int]]()
    for op in unrolled.ops:
        for flags, number, _ in op.raised_flags:
            if unrolled.owner(flags) == unrolled.rank:
                by = {op.stream, NO_STREAM} if unrolled.tensors(op) else {op.stream}
                streams.setdefault((homes[unrolled.buffers[flags]], number), set()).update(by)
    for slot, _, op in waits(unrolled):
        streams.setdefault(slot, set()).update({op.stream, NO_STREAM} if op.starts_early else {op.stream})
    return streams


def _awaited(unrolled: UnrolledProgram) -> dict[Slot, int]:
    """Return, for each flag, the highest epoch for which a rank waits."""
    awaited: dict[Slot, int] = {}
    for slot, epoch, _ in waits(unrolled):
        awaited[slot] = max(awaited.get(slot, 0), epoch)
    return awaited
