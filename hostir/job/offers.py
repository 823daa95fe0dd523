"""Offers of symmetric memory: the messages that ranks exchange at a rendezvous, and the check that they agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from hostir.ir import comm_ops
from hostir.ir.onesided_ops import Barrier as BarrierStatement
from hostir.ir.program import Program, shared_across
from hostir.ir.source import HostIRError, Span, error
from hostir.job.hosts import ranks_by_host, ranks_text
from hostir.kernels.dtypes import TORCH

# The name of the buffers that hold a team's flags for barriers: one flag for each barrier of a call and each rank. The
# team takes the place of the rounds of these buffers.
BARRIERS = ""


# The buffers of collectives that name an implementation: into the workspace they copy their operands, and slots
# receive data from peers. Empty slots are zero.
WORKSPACE: tuple[str, tuple[int, ...]] = (comm_ops.WORKSPACE, ())
SLOTS: tuple[str, tuple[int, ...]] = (comm_ops.SLOTS, ())

ALIGNMENT = 64  # bytes: no two buffers share a cache line


ExchangeTexts = Callable[[str, str], list[str]]  # takes a key and this rank's text, returns the texts of all ranks
BufferPlace = tuple[str, tuple[int, ...]]  # the name of a buffer, and the indices of the loops around its allocation
PeerPlace = tuple[str, tuple[int, ...], int]  # the same for a buffer of a peer, and the peer's rank
KindOfSizes = Hashable  # a key that is equal for sizes that share memory; by default the sizes themselves
ProgramKey = tuple[str, KindOfSizes]  # a program's digest, and the kind of its sizes
PeerRange = tuple[str, tuple[int, ...], int, int, int]  # a PeerPlace, the first element, and the one after the last


@dataclass(frozen=True)
class BufferInfo:
    """The description of one symmetric buffer of a rank, for the other ranks.

    Fields:
        name, rounds: the name of the buffer, and the indices of the loops around its allocation.
        shape, dtype: the buffer's shape and dtype for the sizes at the rendezvous.
        room: the number of bytes to allocate for the buffer, if the buffer gets more bytes than its shape needs.
    """

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
    """The message that a rank sends to the other ranks at a rendezvous: a description of the memory that it offers.

    Fields:
        host: an identity of the rank's host. Ranks with different identities cannot open each other's memory.
        name: the name of the host, for messages.
        path: the path by which peers open the memory.
        buffers: the buffers in the memory, one after another.
        uses: the buffers of peers that the rank accesses.
        reads: the buffers in `uses` that the rank copies from.
        touches: the ranges of peers' buffers that the rank copies from or to.
        notes: further data of the rank's machine for the machines of the other ranks.
        drops: the numbers of older memories to release when the new memory exists. All ranks release the memories that
            rank 0 names.
        pinned: the numbers of memories that a CUDA graph of this rank's caller uses. No rank releases them.
        refusal: the reason why this rank offers no memory; empty if it offers memory.
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
    """Return the error if the offers of all ranks do not fit together; return None if they do.

    Every rank has the same offers, so every rank returns the same error.
    """
    if refused := first_refusal([offer.refusal for offer in offers]):
        return refused
    if refused := _across_hosts(offers, program):
        return refused
    copied = next((s for s in program.walk() if s.workspace is not None), None)
    if copied is not None and len(offers) != program.ranks:
        return error(
            f"'{copied.keyword()} ... by' needs the symmetric memory of exactly the {program.ranks} ranks of "
            f"@{program.name}, and there are {len(offers)}",
            copied.span,
            expected="a job or a group with as many ranks",
            hint="leave out 'by': NCCL runs the collective without this limit",
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


def _across_hosts(offers: Sequence[Offer], program: Program) -> HostIRError | None:
    """Return the error if a rank accesses memory of a rank on another host."""
    hosts = ranks_by_host([offer.host for offer in offers])
    pair = shared_across(program, hosts) if len(hosts) > 1 else None
    if pair is None:
        return None
    there = "; ".join(f"{ranks_text(ranks)}: {offers[ranks[0]].name}" for ranks in hosts)
    return error(
        f"ranks {pair[0]} and {pair[1]} of @{program.name} run on different hosts, which share no memory",
        expected="ranks of one host for copies, signals and barriers",
        hint=f"lower it by 'hierarchical' on hi.DeviceMesh(..., hosts={len(hosts)}), by 'pipeline' or 'sequential'",
        notes=((None, there),),
    )


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
    """Return the error for the first rank that cannot share memory; return None if all ranks can.

    `reasons` has a text for each rank: the reason why the rank cannot share memory, or an empty text if it can.
    """
    rank, why = next(((rank, why) for rank, why in enumerate(reasons) if why), (0, ""))
    return error(f"rank {rank} cannot share memory with the others: {why}") if why else None
