"""Offers of symmetric memory: what ranks post, and whether all of them agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from hostir.ir.onesided_ops import Barrier as BarrierStatement
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, Span, error
from hostir.kernels.dtypes import TORCH

BARRIERS = ""  # in the place of a name: a team's flags, one for each of its barriers and ranks; its round is the team


ALIGNMENT = 64  # bytes: no two buffers share a cache line


ExchangeTexts = Callable[[str, str], list[str]]  # a key and this rank's text: the texts of all ranks
BufferPlace = tuple[str, tuple[int, ...]]  # a name and a round
PeerPlace = tuple[str, tuple[int, ...], int]  # a place, and a peer
KindOfSizes = Hashable  # what sizes have in common that share memory: by default all, their names and values
ProgramKey = tuple[str, KindOfSizes]  # a program's digest, and the kind of its sizes
PeerRange = tuple[str, tuple[int, ...], int, int, int]  # the same, and from which element to before which


@dataclass(frozen=True)
class BufferInfo:
    """The description of one buffer of a rank, for the other ranks. `room`: its bytes, if they are more than these."""

    name: str
    rounds: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    room: int = 0

    @property
    def place(self) -> BufferPlace:
        return self.name, self.rounds

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH[self.dtype]

    @property
    def bytes(self) -> int:
        return -(-max(prod(self.shape) * self.torch_dtype.itemsize, self.room) // ALIGNMENT) * ALIGNMENT

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Offer:
    """The message that a rank gives the others at a rendezvous.

    Fields:
        host: the machine and its process numbers: ranks that differ in it cannot open each other's memory.
        name: the host's name, for people.
        path: path by which peers open the memory.
        buffers: the buffers in it, one after another.
        uses: the places of peers' buffers that it accesses, with the peer.
        reads: the places in `uses` that it copies from.
        touches: the ranges of peers' buffers that it copies from or to.
        notes: further data for the same machine on the other ranks.
        drops: the numbers of memories to release once the new memory exists; all ranks follow rank 0's numbers.
        pinned: the numbers of memories that a graph of this rank's caller uses: they stay on all ranks.
        refusal: the reason if this rank offers nothing.
    """

    host: str = ""
    name: str = ""
    path: str = ""
    buffers: tuple[BufferInfo, ...] = ()
    uses: tuple[PeerPlace, ...] = ()
    reads: tuple[PeerPlace, ...] = ()
    touches: tuple[PeerRange, ...] = ()
    notes: str = ""
    drops: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    refusal: str = ""

    @property
    def bytes(self) -> int:
        return max(sum(buffer.bytes for buffer in self.buffers), ALIGNMENT)

    @classmethod
    def read(cls, text: str) -> Offer:
        it = json.loads(text)
        buffers = [
            BufferInfo(**{**b, "rounds": tuple(b["rounds"]), "shape": tuple(b["shape"])}) for b in it.pop("buffers")
        ]
        uses, reads = (
            tuple((name, tuple(rounds), rank) for name, rounds, rank in it.pop(k)) for k in ("uses", "reads")
        )
        touches = tuple((name, tuple(rounds), rank, *extent) for name, rounds, rank, *extent in it.pop("touches"))
        it |= {"uses": uses, "reads": reads, "touches": touches}
        return cls(**it, buffers=tuple(buffers))


def judge(offers: Sequence[Offer], program: Program) -> HostIRError | None:
    """Return the error in the offers of all ranks, the same on every rank; None if they fit."""
    if refused := first_refusal([offer.refusal for offer in offers]):
        return refused
    if len({offer.host for offer in offers}) > 1:
        there = "; ".join(f"rank {rank}: {offer.name}" for rank, offer in enumerate(offers))
        return error(
            f"the ranks of @{program.name} run on several hosts, which share no memory",
            expected="one host for a program with symmetric buffers or barriers",
            notes=((None, there),),
        )
    held = {(buffer.place, rank): buffer for rank, offer in enumerate(offers) for buffer in offer.buffers}
    first: dict[BufferPlace, tuple[int, BufferInfo]] = {}
    for (place, rank), buffer in held.items():
        other, expected = first.setdefault(place, (rank, buffer))
        if buffer != expected:
            return _different(program, buffer, (other, str(expected)), (rank, str(buffer)))
    for rank, offer in enumerate(offers):
        for name, rounds, peer in offer.uses:
            if ((name, rounds), peer) not in held:
                return _missing(program, name, rank, peer)
    return None


def _different(program: Program, buffer: BufferInfo, one: tuple[int, str], other: tuple[int, str]) -> HostIRError:
    if buffer.name == BARRIERS:
        return _missing(program, BARRIERS, one[0], other[0])
    return error(
        f"%{buffer.name} is {one[1]} on rank {one[0]} and {other[1]} on rank {other[0]}",
        _allocation(program, buffer.name),
        expected="one shape on all ranks",
    )


def _missing(program: Program, name: str, rank: int, peer: int) -> HostIRError:
    if name == BARRIERS:
        first = next(s for s in program.walk() if isinstance(s, BarrierStatement))
        return error(
            f"ranks {min(rank, peer)} and {max(rank, peer)} differ in how many barriers they come to in a call",
            first.span,
            expected="as many on every rank of a team",
        )
    return error(
        f"rank {peer} has no %{name}, which rank {rank} names there",
        _allocation(program, name),
        expected="ranks that all allocate it",
    )


def _allocation(program: Program, name: str) -> Span | None:
    return next((s.span for s in program.walk() if s.symmetric and s.buffer and s.buffer.name == name), None)


def first_refusal(reasons: Sequence[str]) -> HostIRError | None:
    """Return the error of the first rank that cannot share memory; None if all of them can."""
    rank, why = next(((rank, why) for rank, why in enumerate(reasons) if why), (0, ""))
    return error(f"rank {rank} cannot share memory with the others: {why}") if why else None
