"""Flag reset and credits: when a rank may signal its peers again.

Resets flags between calls on CUDA, so that a call is the same in every replay of a CUDA graph.

A flag holds the epoch itself, and every call starts with its flags at 0. So on every rank a call ends by resetting
the flags that peers raised to 0, and then grants each of these peers a *credit*, the right to signal them again: it
adds 1 to a counter in the peer's memory. Before a call touches a peer, it waits until it has a credit from every rank
whose flags it raises, and sets its counter back to 0. A rank cannot grant a second credit before the first is
consumed, since a call does not end before all flags that peers raise in it have risen.

A credit also says that the rank has finished the previous call. If no rank of a team does anything that concerns a
peer before the team's first barrier, the credits of the team replace that barrier. They say nothing about ranks that
are reached only through a third rank, so the first barrier of a second team stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from hostir.ir.types import FLAG
from hostir.job.offers import BARRIERS, BufferPlace, Offer, PeerRange
from hostir.job.symmetric import SharedMemory
from hostir.kernels.dtypes import torch_dtype
from hostir.machines.cuda.driver import MemoryOp, write
from hostir.plan.operations import CALLER, ElementRange, Op, RanksOfTeam, overlap
from hostir.plan.unrolled import UnrolledProgram

CREDITS: BufferPlace = ("", ())  # one counter; a team's barriers have the same name, and the team as their rounds
Slot = tuple[BufferPlace, int]  # a flag of some rank
FirstBarrier = tuple[
    RanksOfTeam, list[tuple[BufferPlace, ElementRange]], list[Slot]
]  # its team; own rows and flags used before it
NO_STREAM = CALLER - 1  # the index of no stream
ALWAYS_RAISED = 1 << 62  # the value of a flag that nobody has to raise


def notes(unrolled: UnrolledProgram) -> str:
    """Return, as JSON for the peers, the highest epoch of each flag that this rank raises, and its first barrier."""
    raised: dict[tuple[int, Slot], int] = {}
    homes = _homes(unrolled)
    for op in unrolled.ops:
        for flags, slot, epoch in op.raised_flags:
            key = unrolled.owner(flags), (homes[unrolled.buffers[flags]], slot)
            raised[key] = max(raised.get(key, 0), epoch)
    signals = [[peer, *place, slot, epoch] for (peer, (place, slot)), epoch in raised.items()]
    return json.dumps({"signals": signals, "first_barrier": _first_barrier(unrolled)})


def _homes(unrolled: UnrolledProgram) -> dict[int, BufferPlace]:
    """Map the register of each symmetric buffer to its name and rounds."""
    return {register: op.home for register, op in unrolled.symmetric.items()}


def _first_barrier(unrolled: UnrolledProgram) -> FirstBarrier | None:
    """Return the first barrier with what this rank uses of its own memory before it; None if a peer is touched first.

    Only the very first barrier: credits do not cover what ranks in two teams do before the second team's barrier.
    """
    homes, at = _homes(unrolled), unrolled.extents
    touched: list[tuple[BufferPlace, ElementRange]] = []
    raised: list[Slot] = []
    for op in unrolled.ops:
        if op.of_team:
            return op.of_team, touched, raised
        if op.by_group or op.awaits or op.awaited_flags or unrolled.touches_peer(op):
            return None
        mine = (r for r in unrolled.tensors(op) if unrolled.buffers[r] in homes)
        touched += [(homes[unrolled.buffers[r]], at[r]) for r in mine]
        raised += [(homes[unrolled.buffers[flags]], slot) for flags, slot, _ in op.raised_flags]
    return None


@dataclass(frozen=True)
class FlowControl:
    """The flags that a rank resets at the end of a call, and the credits that it takes and grants.

    Fields:
        signaled: the peers whose flags this rank raises; it needs a credit from each.
        signalers: the peers that raise this rank's flags; it grants a credit to each.
        raised: this rank's flags that are raised by signals in a call, with the last epoch of each.
        unawaited: the flags in `raised` whose last epoch no statement of this rank waits for.
        stream_ordered: this rank's flags that only it raises, on the one stream that waits for them: the order of the
            stream replaces them.
        implied_barriers: the teams whose first barrier the credits replace.
    """

    signaled: frozenset[int]
    signalers: frozenset[int]
    raised: dict[Slot, int] = field(default_factory=dict)
    unawaited: dict[Slot, int] = field(default_factory=dict)
    stream_ordered: frozenset[Slot] = frozenset()
    implied_barriers: frozenset[RanksOfTeam] = frozenset()

    @classmethod
    def of(cls, unrolled: UnrolledProgram, offers: Sequence[Offer]) -> FlowControl:
        """Derive it from the notes that all ranks exchanged; all ranks find the same pairs and teams."""
        me = unrolled.rank
        all_notes = [json.loads(offer.notes) for offer in offers]
        raised: dict[Slot, int] = {}
        raisers: dict[Slot, set[int]] = {}
        for rank, it in enumerate(all_notes):
            for peer, name, rounds, slot, epoch in it["signals"]:
                if peer == me:
                    key = (name, tuple(rounds)), slot
                    raised[key] = max(raised.get(key, 0), epoch)
                    raisers.setdefault(key, set()).add(rank)
        streams = _streams(unrolled)
        stream_ordered = frozenset(slot for slot, by in raisers.items() if by == {me} and len(streams[slot]) == 1)
        raised = {slot: epoch for slot, epoch in raised.items() if slot not in stream_ordered}
        signals = {(rank, peer) for rank, it in enumerate(all_notes) for peer, *_ in it["signals"] if peer != rank}
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
    """Return all pairs (rank, peer whose flags it raises), and the teams whose first barrier needs no flags.

    Credits replace a barrier only if every two ranks of its team grant each other credits because of other flags.
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
    """Whether the first barrier of a rank is one of `team`, and it does nothing that concerns a peer before it."""
    if all_notes[rank]["first_barrier"] is None:
        return False
    first, own, raised = all_notes[rank]["first_barrier"]
    others = [it["signals"] for other, it in enumerate(all_notes) if other != rank]
    rivals = {(name, tuple(rounds), slot) for it in others for peer, name, rounds, slot, _ in it if peer == rank}
    if tuple(first) != team or any((name, tuple(rounds), slot) in rivals for (name, rounds), slot in raised):
        return False
    theirs: dict[BufferPlace, list[ElementRange]] = {}
    for name, rounds, peer, *extent in touched:
        if peer == rank:
            theirs.setdefault((name, rounds), []).append((extent[0], extent[1]))
    return not any(overlap(extent, theirs.get((name, tuple(rounds)), ())) for (name, rounds), extent in own)


def flow_control_of(unrolled: UnrolledProgram, memory: SharedMemory) -> FlowControl:
    """Return the flow control of all plans with a memory: their sizes are of one kind, and have the same flags."""
    if FlowControl not in memory.kept:
        memory.kept[FlowControl] = FlowControl.of(unrolled, memory.offers)
    found: FlowControl = memory.kept[FlowControl]
    return found


def prepare(rank: int, memory: SharedMemory) -> None:
    """Initialise a rank's flags for its first call: it has all credits, and its stream-ordered flags are raised."""
    flow_control: FlowControl = memory.kept[FlowControl]
    memory.buffers[CREDITS, rank].fill_(len(flow_control.signaled))
    for place, slot in flow_control.stream_ordered:
        memory.buffers[place, rank][slot] = ALWAYS_RAISED


def raised_flags(rank: int, memories: Sequence[SharedMemory]) -> list[MemoryOp]:
    """Return the writes that raise all of a rank's flags, whatever waits for them."""
    flags = [
        buffer
        for memory in memories
        for (_, owner), buffer in memory.whole.items()
        if owner == rank and buffer.dtype == torch_dtype(FLAG)
    ]
    return [write(row.data_ptr() + i * row.itemsize, ALWAYS_RAISED) for row in flags for i in range(row.numel())]


def waits(unrolled: UnrolledProgram) -> Iterator[tuple[Slot, int, Op]]:
    """Yield each flag that a rank waits for, with the epoch and the operation that waits."""
    homes = _homes(unrolled)
    for op in unrolled.ops:
        for flags, slot, epoch in op.awaited_flags:
            yield (homes[unrolled.buffers[flags]], slot), epoch, op


def _streams(unrolled: UnrolledProgram) -> dict[Slot, set[int]]:
    """Return, for each of a rank's own flags, the streams that raise it or wait for it."""
    homes, found = _homes(unrolled), dict[Slot, set[int]]()
    for op in unrolled.ops:
        for flags, number, _ in op.raised_flags:
            if unrolled.owner(flags) == unrolled.rank:
                by = {op.stream, NO_STREAM} if unrolled.tensors(op) else {op.stream}
                found.setdefault((homes[unrolled.buffers[flags]], number), set()).update(by)
    for slot, _, op in waits(unrolled):
        found.setdefault(slot, set()).update({op.stream, NO_STREAM} if op.starts_early else {op.stream})
    return found


def _awaited(unrolled: UnrolledProgram) -> dict[Slot, int]:
    """Return the highest epoch that a rank waits for, by flag."""
    awaited: dict[Slot, int] = {}
    for slot, epoch, _ in waits(unrolled):
        awaited[slot] = max(awaited.get(slot, 0), epoch)
    return awaited
