"""Symmetric buffers of CPU processes: memory that the ranks of one host share, and the order in which they see it.

Ranks meet once for each set of sizes that they run a program with: each makes one piece of memory that holds its
buffers, its flags and what its barriers count with, and maps the pieces of the others. The memory never has a name in
a file system: peers open it through the process that made it, so nothing is left behind, however a rank ends. It
belongs to the executor, is 0 in flags and NaN in numbers at first, and stays as long as the executor and its outputs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

import torch

from hostir.ir.onesided_ops import AllocateSymmetric
from hostir.ir.onesided_ops import Barrier as BarrierStatement
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, Span, error
from hostir.ir.types import FLAG
from hostir.runtime.plan import FLAGS, Barrier, Recording, Symmetric
from hostir.runtime.sharding import TORCH

ALIGNMENT = 64  # bytes: no two buffers share a cache line
BARRIERS = ""  # in the place of a name: a team's row of flags, one for each of its barriers; its round is the team
Exchange = Callable[[str, str], list[str]]  # a key and this rank's text: the texts of all ranks
Place = tuple[str, tuple[int, ...]]  # a name and a round
Use = tuple[str, tuple[int, ...], int]  # a place, and a peer


@dataclass(frozen=True)
class Buffer:
    """One buffer of a rank, as it describes it to the others."""

    name: str
    rounds: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def place(self) -> Place:
        return self.name, self.rounds

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes(self) -> int:
        return -(-prod(self.shape) * self.kind.itemsize // ALIGNMENT) * ALIGNMENT

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor at the beginning of some bytes."""
        return memory.view(self.kind)[: prod(self.shape)].view(self.shape)

    def __str__(self) -> str:
        names = {dtype: name for name, dtype in TORCH.items()} | {FLAGS: FLAG.name}
        return f"{names[self.kind]}{list(self.shape)}"


@dataclass(frozen=True)
class Offer:
    """What a rank gives at a meeting.

    Fields:
        host: the machine and its process numbers: ranks that differ in it cannot open each other's memory.
        name: the host's name, for people.
        path: where peers open the memory.
        buffers: what lies in it, one after another.
        uses: the places of peers' buffers that it touches, with the peer.
        refusal: why there is none of all this.
    """

    host: str = ""
    name: str = ""
    path: str = ""
    buffers: tuple[Buffer, ...] = ()
    uses: tuple[Use, ...] = ()
    refusal: str = ""

    @property
    def bytes(self) -> int:
        return max(sum(buffer.bytes for buffer in self.buffers), ALIGNMENT)

    def map(self) -> torch.Tensor:
        """The memory itself, as bytes."""
        return torch.from_file(self.path, shared=True, size=self.bytes, dtype=torch.uint8)

    @classmethod
    def read(cls, text: str) -> Offer:
        it = json.loads(text)
        buffers = [Buffer(b["name"], tuple(b["rounds"]), tuple(b["shape"]), b["dtype"]) for b in it.pop("buffers")]
        uses = [(name, tuple(rounds), rank) for name, rounds, rank in it.pop("uses")]
        return cls(**it, buffers=tuple(buffers), uses=tuple(uses))


def shares_memory(program: Program) -> bool:
    """Whether its ranks have to meet before they run it: the same on every rank."""
    return any(isinstance(s, AllocateSymmetric | BarrierStatement) for s in program.walk())


class SharedMemory:
    """The memory of all ranks for one set of sizes."""

    def __init__(self, offers: Mapping[int, Offer], maps: Mapping[int, torch.Tensor]) -> None:
        self.buffers: dict[tuple[Place, int], torch.Tensor] = {}
        for rank, memory in maps.items():
            at = 0
            for buffer in offers[rank].buffers:
                self.buffers[buffer.place, rank] = buffer.of(memory[at : at + buffer.bytes])
                at += buffer.bytes

    def buffer(self, op: Symmetric) -> torch.Tensor:
        """A symmetric buffer of some rank."""
        return self.buffers[(op.name, op.rounds), op.rank]

    def barriers(self, team: tuple[int, ...]) -> dict[int, torch.Tensor]:
        """For each rank of a team a row of flags: the latest call in which it has come to each of its barriers."""
        return {rank: self.buffers[(BARRIERS, team), rank] for rank in team}


class SymmetricMemory:
    """The symmetric memory of an executor on one rank.

    Args:
        rank: this rank.
        exchange: gives a text under a key, and gets those of all ranks.
    """

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self.exchange = exchange
        self.met: dict[tuple[tuple[str, int], ...], SharedMemory] = {}  # by sizes
        self.meetings = 0
        self.mutex = threading.Lock()
        self.lock = -1  # the file by which all ranks take turns

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """What comes before a rank's turn is visible to every rank whose turn comes later, on any CPU.

        torch copies with plain stores, and nothing that Python has is a fence: on Arm a flag written after them may be
        seen before them. So a rank sets a flag in its turn, and one that has seen it set takes a turn before it reads
        what the flag stands for. Turns are a lock in the kernel, which is let go with release and taken with acquire,
        and by the kernel itself where a process dies. The file lock is between processes only; hence the mutex.
        """
        with self.mutex:
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self.lock, fcntl.LOCK_UN)

    def of(self, recording: Recording) -> SharedMemory | None:
        """The memory for a recording's sizes; ranks meet where there is none yet. None where the program needs none.

        Raises HostIRError on every rank where they cannot share memory, or disagree on what they share.
        """
        if not shares_memory(recording.program):
            return None
        key = tuple(sorted(recording.sizes.items()))
        if key not in self.met:
            self.met[key] = self.meet(recording)
        return self.met[key]

    def meet(self, recording: Recording) -> SharedMemory:
        """Makes this rank's memory, and maps that of the ranks that it has to do with."""
        self.meetings += 1
        with contextlib.ExitStack() as until_all_have_mapped:
            offer = self.offer(recording, until_all_have_mapped)
            offers = [Offer.read(text) for text in self.tell("symmetric memory", json.dumps(asdict(offer)))]
            if refused := judge(offers, recording.program):
                raise refused
            maps, why = self.map(offers)
            if refused := _refusal(self.tell("symmetric memory, mapped", why)):
                raise refused
        return SharedMemory(dict(enumerate(offers)), maps)

    def offer(self, recording: Recording, files: contextlib.ExitStack) -> Offer:
        """This rank's memory, as its first call finds it."""
        buffers, uses = _needs(recording)
        if not hasattr(os, "memfd_create"):
            return Offer(refusal="only Linux lets processes open each other's memory")
        offer = Offer(buffers=buffers, uses=uses)
        try:
            file = os.memfd_create("hostir")
            files.callback(os.close, file)
            os.ftruncate(file, offer.bytes)
            offer = replace(offer, host=_host(), name=os.uname().nodename, path=f"/proc/{os.getpid()}/fd/{file}")
            mine = SharedMemory({self.rank: offer}, {self.rank: offer.map()})
        except (OSError, RuntimeError) as problem:
            return Offer(refusal=str(problem))
        for buffer in mine.buffers.values():
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
        return offer

    def map(self, offers: Sequence[Offer]) -> tuple[dict[int, torch.Tensor], str]:
        """The memory of this rank and of the peers that it names; or why it cannot be mapped."""
        try:
            if self.lock < 0:
                self.lock = os.open(offers[0].path, os.O_RDWR)  # a turn is a lock on rank 0's memory
                weakref.finalize(self, os.close, self.lock)
            ranks = {self.rank, *(rank for *_, rank in offers[self.rank].uses)}
            return {rank: offers[rank].map() for rank in ranks}, ""
        except (OSError, RuntimeError) as problem:
            return {}, str(problem)

    def tell(self, what: str, mine: str) -> list[str]:
        return self.exchange(f"{what} {self.meetings}", mine)


def _needs(recording: Recording) -> tuple[tuple[Buffer, ...], tuple[Use, ...]]:
    """What lies in this rank's memory, and what it names at its peers."""
    rank, buffers, uses = recording.rank, [], []
    barriers: dict[tuple[int, ...], int] = {}
    for op in recording.ops:
        if isinstance(op, Barrier):
            barriers[op.team] = op.number + 1
        elif isinstance(op, Symmetric) and op.rank == rank:
            buffers.append(Buffer(op.name, op.rounds, op.shape, str(op.dtype).removeprefix("torch.")))
        elif isinstance(op, Symmetric):
            uses.append((op.name, op.rounds, op.rank))
    for team, count in barriers.items():
        buffers.append(Buffer(BARRIERS, team, (count,), "int64"))
        uses += [(BARRIERS, team, peer) for peer in team if peer != rank]
    return tuple(buffers), tuple(uses)


def _host() -> str:
    """What ranks have in common that can open each other's memory: a running kernel, and how it numbers processes."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


# Agreeing ---------------------------------------------------------------------------------------------------------
def judge(offers: Sequence[Offer], program: Program) -> HostIRError | None:
    """What is wrong with the offers of all ranks: the same on every rank; None where they fit."""
    if refused := _refusal([offer.refusal for offer in offers]):
        return refused
    if len({offer.host for offer in offers}) > 1:
        there = "; ".join(f"rank {rank}: {offer.name}" for rank, offer in enumerate(offers))
        return error(
            f"the ranks of @{program.name} run on several hosts, which share no memory",
            expected="one host for a program with symmetric buffers or barriers",
            notes=((None, there),),
        )
    held = {(buffer.place, rank): buffer for rank, offer in enumerate(offers) for buffer in offer.buffers}
    first: dict[Place, tuple[int, Buffer]] = {}
    for (place, rank), buffer in held.items():
        other, expected = first.setdefault(place, (rank, buffer))
        if buffer != expected:
            return _different(program, buffer, (other, str(expected)), (rank, str(buffer)))
    for rank, offer in enumerate(offers):
        for name, rounds, peer in offer.uses:
            if ((name, rounds), peer) not in held:
                return _missing(program, name, rank, peer)
    return None


def _different(program: Program, buffer: Buffer, one: tuple[int, str], other: tuple[int, str]) -> HostIRError:
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
    return next((s.span for s in program.walk() if isinstance(s, AllocateSymmetric) and s.out.name == name), None)


def _refusal(said: Sequence[str]) -> HostIRError | None:
    rank, why = next(((rank, why) for rank, why in enumerate(said) if why), (0, ""))
    return error(f"rank {rank} cannot share memory with the others: {why}") if why else None
