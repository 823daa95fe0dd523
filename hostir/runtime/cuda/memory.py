"""Symmetric memory of GPUs, and how flags go from one call to the next in it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hostir.runtime.symmetric import BARRIERS, BufferInfo, Offer, Place, SharedMemory, Touch
from hostir.runtime.unroll import (
    CALLER,
    AllocateOp,
    BarrierOp,
    ComputeOp,
    CopyOp,
    Extent,
    Op,
    SignalOp,
    SymmetricOp,
    SynchronizeOp,
    UnrolledProgram,
    ViewOp,
    WaitSignalOp,
    extents,
    overlap,
)

# Flag reset and credits -----------------------------------------------------------------------------------------------
# How flags go from one call to the next on CUDA, so that a call is the same in every replay of a CUDA graph.
#
# A flag there holds the epoch itself, and each call finds its flags at 0. So a call ends, on every rank, by putting the
# flags that others raised back to 0, and by giving each of these others a *permit* to raise them anew: it adds 1 to a
# count at that peer. And before it touches a peer a call waits until it has the permits of all whose flags it raises,
# and takes them away. A rank cannot give a second permit before the first is taken, since a call does not end before
# all the flags that peers raise in it have risen.
#
# A permit says more: that the rank is done with the call before. If a call has done nothing that concerns a peer before
# its first barrier, on any rank of the team, the permits of the team are that barrier. They say nothing of ranks that
# are known through a third, so a second team's barrier stays.

PERMITS: Place = ("", ())  # one count; a team's barriers have the same name, and the team as their round
Team = tuple[int, ...]
Slot = tuple[Place, int]  # a flag of some rank
Opening = tuple[Team, list[tuple[Place, Extent]], list[Slot]]  # a barrier, and what a rank has touched and raised
NOWHERE = CALLER - 1  # no stream
FOREVER = 1 << 62  # what a flag holds that nobody has to raise


def notes(unrolled: UnrolledProgram) -> str:
    """What a rank tells the others: the highest epoch of each flag that it raises, and the barrier it begins with."""
    raised: dict[tuple[int, Slot], int] = {}
    homes = _homes(unrolled)
    for op in unrolled.ops:
        if isinstance(op, SignalOp):
            key = op.peer, (homes[unrolled.buffers[op.flags]], op.slot)
            raised[key] = max(raised.get(key, 0), op.epoch)
    signals = [[peer, *place, slot, epoch] for (peer, (place, slot)), epoch in raised.items()]
    return json.dumps({"signals": signals, "opening": _opening(unrolled)})


def _homes(unrolled: UnrolledProgram) -> dict[int, Place]:
    """The symmetric buffers, by register."""
    return {op.out: (op.name, op.rounds) for op in unrolled.ops if isinstance(op, SymmetricOp)}


def _opening(unrolled: UnrolledProgram) -> Opening | None:
    """The first barrier, where this call touches no peer before it, and what of its own it touches before.

    Only the first: what comes before the second of another team, on ranks that are in both, is more than permits say.
    """
    me, homes, at = unrolled.rank, _homes(unrolled), extents(unrolled)
    own = {op.out for op in unrolled.ops if isinstance(op, SymmetricOp) and op.rank == me}
    theirs = homes.keys() - own
    touched: list[tuple[Place, Extent]] = []
    raised: list[Slot] = []
    for op in unrolled.ops:
        if isinstance(op, BarrierOp):
            return op.team, touched, raised
        if isinstance(op, CopyOp) and not theirs.intersection(unrolled.buffers[r] for r in (op.x, op.out)):
            mine = (r for r in (op.x, op.out) if unrolled.buffers[r] in own)
            touched += [(homes[unrolled.buffers[r]], at[r]) for r in mine]
        elif isinstance(op, SignalOp) and op.peer == me:
            raised.append((homes[unrolled.buffers[op.flags]], op.slot))
        elif not isinstance(op, AllocateOp | SymmetricOp | ViewOp | SynchronizeOp):
            return None
    return None


@dataclass(frozen=True)
class Handover:
    """What a rank owes its peers in a call, and they it.

    Fields:
        owners: the peers whose flags it raises.
        users: the peers that raise its own.
        raised: its own flags that ranks raise by signals in a call, with the last epoch of each.
        unseen: those of them that no statement of its own waits for.
        settled: its own flags that only it raises, on the stream that waits for them: their order says enough.
        opening: the teams whose first barrier the permits stand for.
    """

    owners: frozenset[int]
    users: frozenset[int]
    raised: dict[Slot, int] = field(default_factory=dict)
    unseen: dict[Slot, int] = field(default_factory=dict)
    settled: frozenset[Slot] = frozenset()
    opening: frozenset[Team] = frozenset()

    @classmethod
    def of(cls, unrolled: UnrolledProgram, offers: Sequence[Offer]) -> Handover:
        """That of a rank that has met the others; all ranks find the same pairs and teams."""
        me = unrolled.rank
        said = [json.loads(offer.notes) for offer in offers]
        raised: dict[Slot, int] = {}
        raisers: dict[Slot, set[int]] = {}
        for rank, it in enumerate(said):
            for peer, name, rounds, slot, epoch in it["signals"]:
                if peer == me:
                    key = (name, tuple(rounds)), slot
                    raised[key] = max(raised.get(key, 0), epoch)
                    raisers.setdefault(key, set()).add(rank)
        streams = _streams(unrolled)
        settled = frozenset(slot for slot, by in raisers.items() if by == {me} and len(streams[slot]) == 1)
        raised = {slot: epoch for slot, epoch in raised.items() if slot not in settled}
        signals = {(rank, peer) for rank, it in enumerate(said) for peer, *_ in it["signals"] if peer != rank}
        pairs, opening = _with_barriers(signals, said, offers)
        awaited = _awaited(unrolled)
        return cls(
            owners=frozenset(peer for rank, peer in pairs if rank == me),
            users=frozenset(rank for rank, peer in pairs if peer == me),
            raised=raised,
            unseen={slot: epoch for slot, epoch in raised.items() if awaited.get(slot, 0) < epoch},
            settled=settled,
            opening=opening,
        )


def _with_barriers(
    signals: set[tuple[int, int]], said: Sequence[dict[str, Any]], offers: Sequence[Offer]
) -> tuple[set[tuple[int, int]], frozenset[Team]]:
    """All pairs of a rank and a peer whose flags it raises, and the teams whose first barrier raises none.

    A barrier may be left to the permits only where every two of its team have permits for each other by other flags.
    """
    counts = {b.rounds: b.shape[0] for offer in offers for b in offer.buffers if b.name == BARRIERS and b.rounds}
    touched = [touch for offer in offers for touch in offer.touches]
    claimed = {team for team in counts if all(_claims(said, touched, team, rank) for rank in team)}
    certain = signals.union(*(permutations(t, 2) for t, n in counts.items() if n > 1 or t not in claimed))
    opening = frozenset(team for team in claimed if certain.issuperset(permutations(team, 2)))
    return certain.union(*(permutations(team, 2) for team in claimed - opening)), opening


def _claims(said: Sequence[dict[str, Any]], touched: Sequence[Touch], team: Team, rank: int) -> bool:
    """Whether a rank has done nothing that concerns a peer when it comes to its first barrier, with this team."""
    if said[rank]["opening"] is None:
        return False
    first, own, raised = said[rank]["opening"]
    others = [it["signals"] for other, it in enumerate(said) if other != rank]
    rivals = {(name, tuple(rounds), slot) for it in others for peer, name, rounds, slot, _ in it if peer == rank}
    if tuple(first) != team or any((name, tuple(rounds), slot) in rivals for (name, rounds), slot in raised):
        return False
    theirs: dict[Place, list[Extent]] = {}
    for name, rounds, peer, *extent in touched:
        if peer == rank:
            theirs.setdefault((name, rounds), []).append((extent[0], extent[1]))
    return not any(overlap(extent, theirs.get((name, tuple(rounds)), ())) for (name, rounds), extent in own)


def prepare(unrolled: UnrolledProgram, memory: SharedMemory) -> None:
    """Makes a rank's flags ready for its first call: it may raise everyone's, and some of its own nobody has to."""
    handover = Handover.of(unrolled, memory.offers)
    memory.buffers[PERMITS, unrolled.rank].fill_(len(handover.owners))
    for place, slot in handover.settled:
        memory.buffers[place, unrolled.rank][slot] = FOREVER


def waits(unrolled: UnrolledProgram) -> Iterator[tuple[Slot, int, Op]]:
    """The flags that a rank waits for: the epoch, and what waits."""
    homes = _homes(unrolled)
    for op in unrolled.ops:
        if isinstance(op, WaitSignalOp):
            yield (homes[unrolled.buffers[op.flags]], op.slot), op.epoch, op
        elif isinstance(op, ComputeOp) and op.ready is not None:
            place = homes[unrolled.buffers[op.ready.flags]]
            yield from (((place, slot), op.ready.epoch, op) for slot in op.ready.awaited)


def _streams(unrolled: UnrolledProgram) -> dict[Slot, set[int]]:
    """The streams that raise or wait for each of a rank's own flags."""
    homes, found = _homes(unrolled), dict[Slot, set[int]]()
    for op in unrolled.ops:
        if isinstance(op, SignalOp) and op.peer == unrolled.rank:
            found.setdefault((homes[unrolled.buffers[op.flags]], op.slot), set()).add(op.stream)
    for slot, _, op in waits(unrolled):
        beside = (
            isinstance(op, ComputeOp) and op.beside
        )  # it does not wait for what comes right before it on its stream
        found.setdefault(slot, set()).update({op.stream, NOWHERE} if beside else {op.stream})
    return found


def _awaited(unrolled: UnrolledProgram) -> dict[Slot, int]:
    """The highest epoch of each flag that a rank waits for."""
    awaited: dict[Slot, int] = {}
    for slot, epoch, _ in waits(unrolled):
        awaited[slot] = max(awaited.get(slot, 0), epoch)
    return awaited


# Peer memory ----------------------------------------------------------------------------------------------------------
# Memory that the GPUs of one host see of each other: torch's symmetric memory, on its CUDA backend, without multicast.
#
# Streams copy to and from it with copy engines, set flags in it, and wait for flags in their own.


class PeerMemory:
    """How GPUs share memory.

    Args:
        device: this rank's.
        rank: this rank.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device = device
        self.rank = rank
        self.mine = torch.empty(0)  # between `reserve` and `map`
        self.handle: Any = None  # of the memory that was mapped last
        self.handles: WeakKeyDictionary[SharedMemory, Any] = WeakKeyDictionary()  # torch unmaps peers' memory with them

    @contextlib.contextmanager
    def offering(self, size: int) -> Iterator[str]:
        """The number of this rank's GPU."""
        if why := why_not(self.device):
            raise RuntimeError(why)
        try:
            yield str(self.device.index)
        finally:  # where a meeting was refused
            self.mine, self.handle = torch.empty(0), None

    def reserve(self, size: int) -> None:
        """Allocates: between ranks what only torch's symmetric memory can share."""
        if not dist.is_initialized():
            self.mine = torch.zeros(size, dtype=torch.uint8, device=self.device)
            return
        import torch.distributed._symmetric_memory as symmetric_memory  # here, as it takes its time to load

        self.mine = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device).zero_()

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        """Maps the memory of these peers; all ranks meet in it."""
        mine, self.mine = self.mine, torch.empty(0)
        if len(offers) == 1:
            return {self.rank: mine}
        import torch.distributed._symmetric_memory as symmetric_memory

        world = dist.group.WORLD
        assert world is not None
        handle = symmetric_memory.rendezvous(mine, world)
        self.handle = handle
        maps = {peer: handle.get_buffer(peer, mine.shape, torch.uint8) for peer in ranks if peer != self.rank}
        return {self.rank: mine, **maps}

    def synchronize(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize(self.device)

    def begin(self, unrolled: UnrolledProgram, memory: SharedMemory) -> None:
        """Puts flags as the first call finds them, on whatever stream it will be."""
        self.handles[memory], self.handle = self.handle, None
        prepare(unrolled, memory)
        torch.cuda.synchronize(self.device)

    def hidden(self, unrolled: UnrolledProgram) -> tuple[BufferInfo, ...]:
        """The count of permits."""
        return (BufferInfo(*PERMITS, (1,), "int64"),)

    def notes(self, unrolled: UnrolledProgram) -> str:
        """What ranks must know of each other's calls."""
        return notes(unrolled)


def why_not(device: torch.device) -> str:
    """Why this GPU cannot share its memory; nothing where it can."""
    import torch.distributed._symmetric_memory as symmetric_memory

    backend = symmetric_memory.get_backend(device)
    if backend != "CUDA":
        return (
            f"torch's symmetric memory is set to the {backend} backend, whose memory streams cannot wait on; "
            "call torch.distributed._symmetric_memory.set_backend('CUDA') first, or unset TORCH_SYMMMEM"
        )
    here, ranks_here = device.index, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for other in range(min(ranks_here, torch.cuda.device_count())):
        if other != here and not torch.cuda.can_device_access_peer(here, other):
            return f"GPU {here} cannot reach the memory of GPU {other}"
    return ""
