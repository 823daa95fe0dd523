"""Symmetric memory: buffers, flags and barrier counters of each rank that the other ranks of its host can access.

The ranks meet once for each program and kind of sizes. At this rendezvous each rank allocates one piece of memory for
its buffers, flags and barriers. Each rank then maps the pieces of its peers, by the mechanism of its machine
(`Sharing`). At first, flags are 0 and numbers are NaN.

Sizes are of one kind if one proof holds for all of them, and if this proof allows calls with different buffer sizes
(`hostir.check.Proof`). Each call then uses the beginnings of the buffers. The ranks meet again only for sizes that do
not fit into the buffers. Then they allocate more than these sizes need, if there is enough memory. So sizes that grow
step by step need few rendezvous. The decision to meet depends only on the program and the sizes, so all ranks make the
same decision.

The memory belongs to the process group. Executors of equal programs share it for sizes of one kind, because their calls
run one after another, like the calls of one executor. A plan keeps using the memory for which it was made.

Memory is released only at a rendezvous. First, memory that no plan uses is released. Then the least recently used
memory is released, as long as a limit is exceeded. HOSTIR_SYMMETRIC_LIMIT is the limit for all programs together. If it
is not set, KEPT_BYTES is the limit for the program at the rendezvous. Memory that CUDA graphs of the caller use is
kept.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Protocol

import torch

from hostir.ir.op import Value
from hostir.ir.program import Program, shares_memory
from hostir.ir.source import HostIRError
from hostir.ir.types import FLAG, bind_shape
from hostir.job.hosts import host_identity
from hostir.job.links import AlikeError
from hostir.job.offers import (
    BARRIERS,
    SLOTS,
    WORKSPACE,
    BufferInfo,
    BufferPlace,
    ExchangeTexts,
    KindOfSizes,
    Offer,
    PeerPlace,
    PeerRange,
    ProgramKey,
    first_refusal,
    judge,
)
from hostir.kernels.dtypes import undefined
from hostir.knobs import SYMMETRIC_LIMIT
from hostir.plan.operations import SymmetricOp
from hostir.plan.unrolled import UnrolledProgram

GROWTH = 1.5  # if sizes do not fit into the old buffers, new buffers are larger than needed by this factor
KEPT_BYTES = 4 << 30  # the limit of a rank's memory for one program, if HOSTIR_SYMMETRIC_LIMIT is not set


class Sharing(Protocol):
    """The mechanism of a machine by which ranks access each other's memory.

    Its methods raise OSError or RuntimeError if they fail.
    """

    def offering(self, size: int) -> AbstractContextManager[str]:
        """Allocate `size` bytes on this rank, and return a context manager that gives a path.

        While the context lasts, peers can map the memory by this path.
        """

    def reserve(self, size: int) -> None:
        """Reserve the resources that this rank needs for `map`.

        `size` is the largest number of bytes that a rank offers.
        """

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        """Map the memory of `ranks`, which include this rank; return a tensor of bytes for each of them, filled with 0.

        All ranks call this at the same rendezvous.
        """

    def synchronize(self) -> None:
        """Wait until all work that this rank has issued no longer uses the memory of any rank."""

    def working(self, memories: Sequence[SharedMemory]) -> Callable[[], bool]:
        """Return a function that returns True while work that this rank has issued uses the memory of any rank.

        `memories` is all symmetric memory of this rank. The function may be called after the session has ended.
        """

    def release(self, memories: Sequence[SharedMemory], abort: Callable[[], None], seconds: float) -> str:
        """End the work of a call that ended midway, and wait until this work no longer uses the memory of any rank.

        Work that waits for data from peers stops waiting. Return an empty text if no work uses memory any more.
        Otherwise return the reason why some work may still use it.

        Args:
            memories: all symmetric memory of this rank.
            abort: ends the communications of the process groups.
            seconds: the most seconds that this may take.
        """

    def close(self, done: bool) -> None:
        """Close everything that this rank holds open, because the session ends. Plans keep their memory.

        `done` is False after a failure: then this method does not wait for work that uses memory.
        """

    def begin(self, unrolled: UnrolledProgram, memory: SharedMemory) -> None:
        """Store data of the machine in the field `kept` of new memory, if the data must live as long as the memory."""

    def prepare(self, memory: SharedMemory) -> None:
        """Prepare this rank's memory for the first call, before peers access it. Its buffers are already cleared."""

    def hidden(self, unrolled: UnrolledProgram) -> tuple[BufferInfo, ...]:
        """Return further symmetric buffers that the machine needs to run an unrolled program."""

    def notes(self, unrolled: UnrolledProgram) -> str:
        """Return data about an unrolled program that the machines of the other ranks need."""


@dataclass(frozen=True)
class Rooms:
    """The symmetric buffers of a program, and the number of bytes that each of them has on every rank.

    Fields:
        buffers: the buffers as the program declares them, and those that its collectives share.
        bytes: the number of bytes of each buffer, by name.
    """

    buffers: tuple[Value, ...]
    bytes: Mapping[str, int]

    @staticmethod
    def of(program: Program, sizes: Mapping[str, int]) -> Rooms:
        """Return the buffers of a program with exactly the bytes that they need for some sizes."""
        buffers = tuple(s.buffer for s in program.walk() if s.symmetric and s.buffer is not None)
        buffers += tuple(s.workspace for s in program.walk() if s.workspace is not None)
        bytes = dict[str, int]()
        for value in buffers:  # different branches of an `if` may allocate buffers of one name
            bytes[value.name] = max(bytes.get(value.name, 0), _bytes(value, sizes))
        return Rooms(buffers, bytes)

    def hold(self, sizes: Mapping[str, int]) -> bool:
        """Return True if these sizes of the program fit into the buffers."""
        return all(_bytes(value, sizes) <= self.bytes[value.name] for value in self.buffers)

    def grown(self) -> Rooms:
        """Return larger buffers: each has GROWTH times as many bytes. Only buffers of flags keep their size."""
        fixed = {value.name for value in self.buffers if value.tensor.dtype == FLAG}
        return replace(self, bytes={name: n if name in fixed else int(n * GROWTH) for name, n in self.bytes.items()})


def _bytes(value: Value, sizes: Mapping[str, int]) -> int:
    return prod(bind_shape(value.tensor.local_shape, sizes)) * value.tensor.dtype.bytes


class SharedMemory:
    """The symmetric memory for one program and kind of sizes: this rank's memory, and the mapped memory of its peers.

    Fields:
        number: the number of the rendezvous at which the memory was allocated, the same on all ranks.
        offers: the offers of all ranks at this rendezvous.
        rooms: the number of bytes of each buffer.
        flat: for each buffer and rank, a tensor with one axis that holds all elements for which the buffer has room.
        buffers: for each buffer and rank, a tensor of the elements that the sizes at the rendezvous use.
        flags: the rows of flags among the buffers, each with the rank that owns it.
        read: the buffers that a peer reads. Each item names a buffer and the rank that owns it.
        plans: the plans that use the memory.
        captured: the items of `plans` that CUDA graphs of the caller use.
        used: the time of the latest call that was bound to the memory, in seconds of this rank's clock.
        calls: the number of runs of all plans, if the machine counts runs. It is the same on every rank.
        gone: True once the memory was released. Plans that use it must be dropped.
        kept: the data of the machine that lives as long as the memory.
        given: the addresses of bytes that the caller writes: see `give`.
    """

    def __init__(self, number: int, offers: Sequence[Offer], rooms: Rooms, maps: Mapping[int, torch.Tensor]) -> None:
        self.number = number
        self.offers = offers
        self.rooms = rooms
        self.read = {use for offer in offers for use in offer.reads}
        self.plans = weakref.WeakSet[Any]()
        self.captured = weakref.WeakSet[Any]()
        self.used, self.calls = 0.0, 0
        self.gone = False
        self.kept: dict[Hashable, Any] = {}
        self.given = set[tuple[int, int]]()
        self.flags = set[tuple[BufferPlace, int]]()
        self.flat: dict[tuple[BufferPlace, int], torch.Tensor] = {}
        self.buffers: dict[tuple[BufferPlace, int], torch.Tensor] = {}
        for rank, memory in maps.items():
            at = 0
            for buffer in offers[rank].buffers:
                if buffer.dtype == FLAG.name:
                    self.flags.add((buffer.place, rank))
                flat = self.flat[buffer.place, rank] = memory[at : at + buffer.bytes].view(buffer.torch_dtype)
                self.buffers[buffer.place, rank] = flat[: prod(buffer.shape)].view(buffer.shape)
                at += buffer.bytes

    def buffer(self, op: SymmetricOp) -> torch.Tensor:
        """Return the symmetric buffer of an operation, with the shape that the sizes of the call need."""
        place = (op.name, op.rounds), op.rank
        buffer = self.buffers[place]
        return buffer if buffer.shape == op.shape else self.flat[place][: prod(op.shape)].view(op.shape)

    def give(self, x: torch.Tensor) -> None:
        """Leave a tensor in this rank's memory to the caller: `clear` and `overwrite` do not change it."""
        dense = next((k for k in range(x.dim()) if x[(0,) * k].is_contiguous()), x.dim()) if x.numel() else 0
        for index in itertools.product(*map(range, x.shape[:dense])):
            block = x[index]
            self.given.add((block.data_ptr(), block.data_ptr() + block.numel() * block.itemsize))

    def ungiven(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of a flat buffer that do not belong to the caller."""
        at, here, size = 0, buffer.data_ptr(), buffer.itemsize
        for begin, end in sorted(((begin - here) // size, -((here - end) // size)) for begin, end in self.given):
            if at < len(buffer) and begin < len(buffer) and end > at:
                yield buffer[at : max(begin, at)]
                at = end
        yield buffer[at:]

    def clear(self, rank: int) -> None:
        """Fill the buffers of a rank: flags and slots with 0, and others with NaN or -1, because they are undefined."""
        for (place, owner), buffer in self.flat.items():
            if owner == rank:
                zero = place == SLOTS or (place, owner) in self.flags
                for part in self.ungiven(buffer):
                    part.fill_(0 if zero else undefined(buffer.dtype))

    def overwrite(self, rank: int, page: torch.Tensor, *, slots: bool = False) -> None:
        """Overwrite all buffers of a rank except flags and slots with copies of a page of bytes; or only the slots.

        The copies are issued to the current stream. They run on copy engines and need no kernels.

        Args:
            rank: the rank whose buffers are overwritten.
            page: a uint8 tensor in pinned memory.
            slots: True to overwrite only the slots.
        """
        for (place, owner), buffer in self.flat.items():
            if owner == rank and (place, owner) not in self.flags and (place == SLOTS) == slots:
                for part in self.ungiven(buffer.view(torch.uint8)):
                    for piece in part.split(len(page)):
                        piece.copy_(page[: len(piece)], non_blocking=True)

    def barriers(self, team: tuple[int, ...], rank: int) -> torch.Tensor:
        """Return a rank's flags for the barriers of a team.

        The shape is [number of barriers in a call, number of ranks]. Ranks are in the order of the team.
        """
        return self.buffers[(BARRIERS, team), rank]


class SymmetricMemory:
    """All symmetric memory of a process group, seen from one rank.

    Args:
        rank: this rank.
        exchange: posts this rank's text under a key, and returns the texts of all ranks.
        sharing: the mechanism of the machine by which ranks access each other's memory.

    Fields:
        met: the memory for each program and kind of sizes. Its keys are the same on every rank.
        meetings: the number of rendezvous so far.
        released: the number of memories that were released so far.
    """

    def __init__(self, rank: int, exchange: ExchangeTexts, sharing: Sharing) -> None:
        self.rank = rank
        self.exchange = exchange
        self.sharing = sharing
        self.met: dict[ProgramKey, SharedMemory] = {}
        self.meetings = self.released = 0

    def end(self, done: bool) -> None:
        """Release the memory of all programs, because the session ends. CUDA graphs of the caller keep their memory.

        `done` is False after a failure: then this rank may still use the memory.
        """
        self.met.clear()
        self.sharing.close(done)

    def working(self) -> Callable[[], bool]:
        """Return a function that returns True while work that this rank has issued uses the memory of any rank."""
        return self.sharing.working(list(self.met.values()))

    @property
    def bytes(self) -> int:
        """The number of bytes of symmetric memory on this rank."""
        return sum(memory.offers[self.rank].bytes for memory in list(self.met.values()))

    def of(
        self, unrolled: UnrolledProgram, plan: object, kind: KindOfSizes = None, limit: int | None = None
    ) -> SharedMemory | None:
        """Return the symmetric memory for a plan; return None if the plan's program uses no symmetric memory.

        If no memory has room for the sizes, all ranks meet and allocate new memory. Every rank raises a HostIRError if
        the ranks cannot share memory, or if they disagree about the buffers.

        Args:
            unrolled: the unrolled program of the plan.
            plan: the plan. It is recorded as a user of the memory.
            kind: the kind of the sizes; None if the sizes share memory with no other sizes.
            limit: the largest number of bytes for the program. If it is set, buffers get only as many bytes as the
                sizes need.
        """
        if not shares_memory(unrolled.program):
            return None
        key = unrolled.program.digest, tuple(sorted(unrolled.sizes.items())) if kind is None else kind
        memory = next((each for each in self.all_of(key) if each.rooms.hold(unrolled.sizes)), None)
        if memory is None:
            outgrown = self.met.get(key)
            memory = self.meet(unrolled, larger=outgrown is not None and limit is None)
            if outgrown is not None and not outgrown.gone:  # older plans still use it, and may be captured
                self.met[key[0], (outgrown.number, key[1])] = outgrown
            self.met[key] = memory
        memory.plans.add(plan)
        return memory

    def all_of(self, key: ProgramKey) -> list[SharedMemory]:
        """Return all memory for a program and kind of sizes, the oldest first.

        A plan uses the oldest memory that has room for its sizes. So all ranks choose the same memory, even if one of
        them makes its plan later than the others, for example because its tensors have other strides.
        """
        digest, kind = key
        memories = [m for (its, of), m in self.met.items() if its == digest and of in (kind, (m.number, kind))]
        return sorted(memories, key=lambda memory: memory.number)

    def renew(self, abort: Callable[[], None], seconds: float) -> None:
        """Reset all memory to its initial contents, after a call that ended midway. All ranks call this.

        A rank waits until no rank uses any memory, clears its memory, and waits until all ranks have cleared their
        memory.

        Args:
            abort: ends the communications of this rank that are under way.
            seconds: the seconds that the other ranks wait for this rank.
        """
        where, memories = "the symmetric memory after a call that ended midway", list(self.met.values())
        if refused := first_refusal(self.exchange(f"{where}, idle", self.sharing.release(memories, abort, seconds))):
            raise refused
        for memory in memories:
            self.prepare(memory)
        self.exchange(f"{where}, cleared", "")

    def prepare(self, memory: SharedMemory) -> None:
        """Clear this rank's part of a memory, and prepare it for the first call."""
        memory.clear(self.rank)
        memory.calls = 0
        self.sharing.prepare(memory)

    def meet(self, unrolled: UnrolledProgram, *, larger: bool) -> SharedMemory:
        """Meet all ranks: allocate this rank's memory, and map the memory of its peers. Return the new memory.

        If this fails on a rank, raise an AlikeError on every rank. With `larger`, allocate more than the sizes need, if
        all ranks have enough memory.
        """
        rooms = Rooms.of(unrolled.program, unrolled.sizes)
        memory = self.allocate(unrolled, rooms.grown() if larger else rooms)
        if larger and isinstance(memory, HostIRError):
            memory = self.allocate(unrolled, rooms)
        if isinstance(memory, HostIRError):
            raise AlikeError(*memory.diagnostics)
        return memory

    def allocate(self, unrolled: UnrolledProgram, rooms: Rooms) -> SharedMemory | HostIRError:
        """Allocate and map new memory on all ranks, and return it. Return the error instead if a rank fails.

        `rooms` has the number of bytes of each buffer. Every rank returns the same error.
        """
        self.meetings += 1
        with contextlib.ExitStack() as until_all_have_mapped:
            offer = self.offer(unrolled, rooms, until_all_have_mapped)
            where = f"the symmetric memory of @{unrolled.program.name}"
            offers = [Offer.read(text) for text in self.exchange(where, json.dumps(asdict(offer)))]
            if refused := judge(offers, unrolled.program):
                return refused
            drops = set(offers[0].drops).difference(*(offer.pinned for offer in offers))
            if drops:
                self.sharing.synchronize()
            why = self.excess(unrolled.program, offer, drops) or self.reserve(offers)
            if refused := first_refusal(self.exchange(f"{where}, made", why)):
                return refused
            memory, why = self.map(unrolled, offers, rooms)
            if refused := first_refusal(self.exchange(f"{where}, mapped", why)):
                return refused
        self._release(drops)  # no rank uses it any more: all ranks have reported new memory
        assert memory is not None
        return memory

    def gave(self, x: torch.Tensor, digests: Set[str]) -> bool:
        """Return True if `SharedMemory.give` has left a tensor to the caller. `digests` are those of its programs."""
        memories = (memory for (digest, _), memory in self.met.items() if digest in digests)
        return any(begin <= x.data_ptr() < end for memory in memories for begin, end in memory.given)

    def discard(self) -> None:
        """Release the memory that no plan of any rank uses. All ranks call this."""
        unused = [memory.number for memory in self.met.values() if not memory.plans]
        if unused:
            self.sharing.synchronize()
        by_rank = map(json.loads, self.exchange("the symmetric memory that is not used", json.dumps(unused)))
        self._release(set.intersection(*map(set, by_rank)))

    def _release(self, numbers: Set[int]) -> None:
        """Release the memories with these numbers. No rank uses them any more."""
        for key in [key for key, memory in self.met.items() if memory.number in numbers]:
            self.met.pop(key).gone = True
            self.released += 1

    def offer(
        self,
        unrolled: UnrolledProgram,
        rooms: Rooms,
        until_all_have_mapped: contextlib.ExitStack,
    ) -> Offer:
        buffers, uses, reads = _needs(unrolled, rooms)
        buffers += self.sharing.hidden(unrolled)
        size = Offer(buffers=buffers).bytes
        try:
            path = until_all_have_mapped.enter_context(self.sharing.offering(size))
            where = host_identity(), platform.node(), path
            notes, drops = self.sharing.notes(unrolled), self.surplus(unrolled.program, size)
            pinned = tuple(memory.number for memory in self.met.values() if memory.captured)
            return Offer(*where, buffers, uses, reads, touches(unrolled), notes, drops, pinned)
        except (OSError, RuntimeError) as problem:
            return Offer(refusal=str(problem))

    def surplus(self, program: Program, size: int) -> tuple[int, ...]:
        """Return the numbers of the memories to release before `size` more bytes are allocated for a program.

        The result holds the memories that no plan uses. If a limit is still exceeded, it also holds the least recently
        used memories.
        """
        limit = SYMMETRIC_LIMIT.get()
        surplus = [memory.number for memory in self.met.values() if not memory.plans]
        held = [
            memory
            for (digest, _), memory in self.met.items()
            if memory.number not in surplus and (limit is not None or digest == program.digest)
        ]
        excess = (
            sum(memory.offers[self.rank].bytes for memory in held) + size - (KEPT_BYTES if limit is None else limit)
        )
        for memory in sorted(held, key=lambda memory: memory.used):
            if excess > 0 and not memory.captured:
                surplus.append(memory.number)
                excess -= memory.offers[self.rank].bytes
        return tuple(surplus)

    def excess(self, program: Program, offer: Offer, drops: Set[int]) -> str:
        """Return an error text if this rank's memory would exceed HOSTIR_SYMMETRIC_LIMIT, else an empty text.

        Args:
            program: the program that needs new memory.
            offer: this rank's offer for the new memory.
            drops: the numbers of the memories that will be released.
        """
        limit = SYMMETRIC_LIMIT.get()
        kept = sum(memory.offers[self.rank].bytes for memory in self.met.values() if memory.number not in drops)
        if limit is None or kept + offer.bytes <= limit:
            return ""
        others = f", {kept} more are in use" if kept else ""
        return f"@{program.name} needs {offer.bytes} bytes{others}, and HOSTIR_SYMMETRIC_LIMIT allows {limit}"

    def reserve(self, offers: Sequence[Offer]) -> str:
        """Reserve the resources to map the offered memory; return an error text if this fails, else an empty text.

        The ranks exchange these texts. So no rank waits for a rank that failed.
        """
        try:
            self.sharing.reserve(max(offer.bytes for offer in offers))
        except (OSError, RuntimeError) as problem:
            return str(problem)
        return ""

    def map(self, unrolled: UnrolledProgram, offers: Sequence[Offer], rooms: Rooms) -> tuple[SharedMemory | None, str]:
        """Map the memory of this rank and its peers, and prepare it for the first call.

        Return the memory and an empty text. If this fails, return None and the error text. The peers are the ranks that
        this rank accesses, and the ranks that access this rank.
        """
        users = (rank for rank, offer in enumerate(offers) if any(peer == self.rank for *_, peer in offer.uses))
        ranks = {self.rank, *users, *(peer for *_, peer in offers[self.rank].uses)}
        try:
            memory = SharedMemory(self.meetings, offers, rooms, self.sharing.map(offers, ranks))
        except (OSError, RuntimeError) as problem:
            return None, str(problem)
        self.sharing.begin(unrolled, memory)
        self.prepare(memory)
        return memory, ""


def _needs(
    unrolled: UnrolledProgram, rooms: Rooms
) -> tuple[tuple[BufferInfo, ...], tuple[PeerPlace, ...], tuple[PeerPlace, ...]]:
    """Return the buffers that a rank offers to peers, the peers' buffers that it accesses, and those that it reads.

    The third item of the result is a part of the second item. The flags of barriers are in the first and in the second
    item, but not in the third.
    """
    rank, uses = unrolled.rank, []
    mine = (op for op in unrolled.symmetric.values() if op.rank == rank)
    # The workspace comes first, because torch's operators need it at one offset on all ranks.
    shared = [place for place in (WORKSPACE, SLOTS) if place[0] in rooms.bytes]
    buffers = [BufferInfo(*place, (), "f32", rooms.bytes[place[0]]) for place in shared]
    uses += [(*SLOTS, peer) for peer in range(unrolled.program.ranks) if SLOTS in shared and peer != rank]
    buffers += [BufferInfo(*op.home, op.shape, op.dtype.name, rooms.bytes[op.name]) for op in mine]
    theirs: dict[int, PeerPlace] = {x: (*op.home, op.rank) for x, op in unrolled.symmetric.items() if op.rank != rank}
    barriers = Counter(op.of_team for op in unrolled.ops if op.of_team)
    for team, count in barriers.items():
        buffers.append(BufferInfo(BARRIERS, team, (count, len(team)), FLAG.name))
        uses += [(BARRIERS, team, peer) for peer in team if peer != rank]
    sources = {unrolled.buffers[register] for op in unrolled.ops for register in op.reads}
    return tuple(buffers), (*theirs.values(), *uses), tuple(use for x, use in theirs.items() if x in sources)


def touches(unrolled: UnrolledProgram) -> tuple[PeerRange, ...]:
    """Return the ranges of peers' buffers that a rank copies from or copies to."""
    theirs = {register: op for register, op in unrolled.symmetric.items() if op.rank != unrolled.rank}
    touched = dict.fromkeys(register for op in unrolled.ops for register in unrolled.tensors(op))
    peers = ((theirs[unrolled.buffers[x]], unrolled.extents[x]) for x in touched if unrolled.buffers[x] in theirs)
    return tuple(dict.fromkeys((*op.home, op.rank, *extent) for op, extent in peers))
