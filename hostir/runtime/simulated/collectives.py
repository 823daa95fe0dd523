"""Communication among simulated ranks: collectives, transfers, messages, flags and barriers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Protocol

import torch

from hostir.ir.machine import Exchange, Move
from hostir.ir.source import Diagnostic, HostIRError, Span, error
from hostir.runtime.simulated.tasks import FlagGate, SimulatedMemory, Task, Views, join, make_undefined, storage_of

# Collectives and transfers --------------------------------------------------------------------------------------------
# Communications among simulated ranks: match the ranks' issues with each other, and move data.

Note = tuple[Span | None, str]


class MakeTask(Protocol):
    """Creates a task of the communication that is being issued."""

    def __call__(
        self, run: Callable[[], object] | None, reads: Views = (), writes: Views = (), undefines: Views = ()
    ) -> Task:
        """Return a task without dependencies."""


class CollectiveSide:
    """One rank's side of a collective, which may touch memory at any time between its issue and its end.

    `tail` precedes it on its stream; `start` is its start on this rank; `give` is its end, which writes the result.
    Machines may read `x` early for one peer and late for another, so it is read twice, at any time, and the ranks of a
    team alternate between the two. They may write `out` before any other rank has started, so it is undefined from any
    time on. `peers` are all sides, in the order of the team; `earlier` is the team's previous one on this rank.
    """

    def __init__(
        self,
        exchange: Exchange,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        tail: Sequence[Task],
        start: Task,
        task: MakeTask,
        earlier: CollectiveSide | None,
    ) -> None:
        self.exchange, self.x, self.out, self.start = exchange, x, out, start
        reads = (x,) if x is not None and exchange.takes(start.rank) else ()
        writes = (out,) if out is not None and exchange.gives(start.rank) else ()
        self.taken: list[torch.Tensor | None] = [None, None]
        self.takes = [task(partial(self._snapshot, turn), reads=reads).follow(tail) for turn in (0, 1)]
        self.undefine = task(self._undefine, undefines=writes).follow(tail)
        if reads and writes and x is not None and out is not None and x.data_ptr() == out.data_ptr():
            self.undefine.follow(self.takes)  # in place
        self.give = task(self._fill, writes=writes).follow([start, *self.takes, self.undefine])
        self.give.since = self.takes[0]
        self.peers: list[CollectiveSide] = []
        self.totals: list[torch.Tensor | None] = [None, None]
        if earlier is not None:
            # A team starts in order, and on all machines runs one after another; but programs may rely only on
            # the earlier one's start.
            self.start.follow([earlier.start]).held_by([earlier.give])
            # A link carries one at a time. That takes time, but orders nothing.
            self.takes[0].queued_behind = earlier.give

    @property
    def rank(self) -> int:
        return self.start.rank

    @property
    def shapes(self) -> tuple[object, ...]:
        """Return dtype and shape of what it reads and writes."""
        return tuple(None if t is None else (t.dtype, t.shape) for t in (self.x, self.out))

    def __str__(self) -> str:
        return " to ".join("nothing" if t is None else f"{t.dtype} {list(t.shape)}" for t in (self.x, self.out))

    def agrees(self, other: CollectiveSide) -> bool:
        """Whether two ranks issue the same communication."""
        if self.exchange.kind != other.exchange.kind:
            return False
        if self.exchange.moves is None or other.exchange.moves is None:
            return self.exchange.team == other.exchange.team and self.shapes == other.shapes
        ends = {self.rank, other.rank}
        mine, theirs = ({m for m in p.exchange.moves or () if {m.source, m.target} == ends} for p in (self, other))
        return mine == theirs and all(_fits(m, {self.rank: self, other.rank: other}) for m in mine)

    def _snapshot(self, turn: int) -> None:
        self.totals[turn] = None
        if self.x is not None:
            self.taken[turn] = self.x.reshape(-1).clone()

    def _undefine(self) -> None:
        if self.out is not None and self.exchange.gives(self.rank):
            make_undefined(self.out)

    def _fill(self) -> None:
        n, me = len(self.peers), self.exchange.team.index(self.rank)
        kind, moves = self.exchange.kind, [m for m in self.exchange.moves or () if m.target == self.rank]
        if moves:
            for m in moves:
                source = next(peer for peer in self.peers if peer.rank == m.source).taken[me % 2]
                blocks(self.out, m.put[1])[m.put[0]] = blocks(source, m.take[1])[m.take[0]]
        elif kind == "allreduce":
            blocks(self.out, 1)[0] = self.peers[0].sum(me % 2)
        elif kind == "reduce_scatter":
            blocks(self.out, 1)[0] = blocks(self.peers[0].sum(me % 2), n)[me]
        elif kind in ("allgather", "alltoall"):
            out = blocks(self.out, n)
            for i, peer in enumerate(self.peers):
                taken = peer.taken[me % 2]
                out[i] = blocks(taken, 1)[0] if kind == "allgather" else blocks(taken, n)[me]

    def sum(self, turn: int) -> torch.Tensor:
        """Return the sum over all sides: in f32 or better, in the order of the team, rounded once."""
        total = self.totals[turn]
        if total is None:
            parts = [peer.taken[turn] for peer in self.peers]
            total = self.totals[turn] = self.add([part for part in parts if part is not None])
        return total

    def add(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of some tensors."""
        total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
        for part in parts[1:]:
            total += part
        return total.to(parts[0].dtype)


def blocks(x: torch.Tensor | None, count: int) -> torch.Tensor:
    """Return a dense tensor as `count` equal blocks, `[count, elements]`."""
    assert x is not None
    return x.view(count, -1)


def _fits(move: Move, sides: Mapping[int, CollectiveSide]) -> bool:
    x, out = sides[move.source].x, sides[move.target].out
    if x is None or out is None or x.dtype != out.dtype:
        return False
    return x.numel() * move.put[1] == out.numel() * move.take[1]


def match(issued: Sequence[Mapping[tuple[int, ...], list[CollectiveSide]]], note: Callable[[Task], Note]) -> list[Task]:
    """Join the sides of every collective; `issued[rank][team]` are a rank's sides in issue order.

    A team is named by its ranks in ascending order. Returns the tasks that join. Raises HostIRError if ranks differ in
    what they issue to a team; `note` describes where a task comes from.
    """
    joints: list[Task] = []
    for team in dict.fromkeys(team for rank in issued for team in rank):
        calls = [issued[rank].get(team, []) if rank < len(issued) else [] for rank in team]
        for number, peers in enumerate(zip_longest(*calls)):
            sides = [part for part in peers if part is not None]
            if len(sides) < len(team) or not all(a.agrees(b) for i, a in enumerate(sides) for b in sides[:i]):
                notes = [None if part is None else _note(note(part.start), part) for part in peers]
                raise disagreement("communication", team, number, notes)
            joints += _meet(sides)
    return joints


def _meet(sides: Sequence[CollectiveSide]) -> list[Task]:
    """Join the sides of one collective: each ends after the others that it receives from have started and read."""
    by_rank = {part.rank: part for part in sides}
    for part in sides:
        part.peers = [by_rank[rank] for rank in part.exchange.team]
    if sides[0].exchange.moves is None:
        start = join(part.start for part in sides)
        read = [join(part.takes[turn] for part in sides) for turn in (0, 1)]
        for place, part in enumerate(sides[0].peers):
            part.give.follow([start, read[place % 2]])
        return [start, *read]
    for part in sides:
        turn = part.exchange.team.index(part.rank) % 2
        for source in {move.source for move in part.exchange.moves or () if move.target == part.rank}:
            part.give.follow([by_rank[source].start, by_rank[source].takes[turn]])
        others = {move.target for move in part.exchange.moves or () if move.source == part.rank} - {part.rank}
        part.give.held_by(by_rank[target].start for target in others)
    return []


def _note(where: Note, part: CollectiveSide) -> Note:
    return where[0], f"{where[1]}, {part}"


def disagreement(what: str, team: Sequence[int], number: int, notes: Sequence[Note | None]) -> HostIRError:
    """Return the error for ranks that differ in a team's communication or barrier `number`; None is a missing one."""
    said = [note or (None, f"rank {rank} issues only {number}") for rank, note in zip(team, notes, strict=True)]
    return HostIRError(
        Diagnostic(
            f"the ranks {' '.join(map(str, team))} differ in {what} {number + 1} of their team",
            expected="every rank of a team to issue the same communications in the same order",
            notes=tuple(said),
        )
    )


# Messages -------------------------------------------------------------------------------------------------------------
# Messages among simulated ranks: `send`, `recv` and `exchange`, which meet in pairs.


class MessageSide:
    """One rank's message: `start` is its start, `take` reads what it sends, `give` writes what it receives.

    It ends after whichever of the two it has; then the rank's next message in the team starts.
    """

    def __init__(
        self,
        exchange: Exchange,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        start: Task,
        task: MakeTask,
        earlier: MessageSide | None,
    ) -> None:
        self.x, self.out, self.start = x, out, start
        self.to = next((m.target for m in exchange.moves or () if x is not None and m.source == start.rank), None)
        self.source = next((m.source for m in reversed(exchange.moves or ()) if out is not None), None)
        self.take = None if x is None else task(self._take, reads=(x,)).follow([start])
        self.give = None if out is None else task(self._give, writes=(out,)).follow([start])
        self.sender: MessageSide | None = None
        self.taken: torch.Tensor | None = None
        self.ends[-1].since = self.ends[-1]
        if earlier is not None:
            start.follow(earlier.ends)

    @property
    def ends(self) -> list[Task]:
        """The tasks after which it has ended."""
        return [task for task in (self.take, self.give) if task is not None]

    def meet(self, sender: MessageSide) -> None:
        """Receive what `sender` sends."""
        assert sender.take is not None
        assert self.give is not None
        sender.take.held_by([self.start])
        self.give.follow([sender.start, sender.take])
        self.sender = sender

    def _take(self) -> None:
        assert self.x is not None
        self.taken = self.x.reshape(-1).clone()

    def _give(self) -> None:
        assert self.out is not None
        assert self.sender is not None
        assert self.sender.taken is not None
        self.out.view(-1).copy_(self.sender.taken)


def pair(issued: Sequence[Sequence[MessageSide]], note: Callable[[Task], Note]) -> None:
    """Match the messages of one team: the k-th from a rank to another with the k-th that the other receives.

    `issued` are each rank's messages in the order issued. Raises HostIRError for one that has no partner, or another
    size or dtype than its partner.
    """
    sent: dict[tuple[int, int], list[MessageSide]] = {}
    received: dict[tuple[int, int], list[MessageSide]] = {}
    for message in (message for messages in issued for message in messages):
        if message.to is not None:
            sent.setdefault((message.start.rank, message.to), []).append(message)
        if message.source is not None:
            received.setdefault((message.source, message.start.rank), []).append(message)
    for ends in dict.fromkeys([*sent, *received]):
        for number, (sender, receiver) in enumerate(zip_longest(sent.get(ends, []), received.get(ends, []))):
            if sender is None or receiver is None or not _message_fits(sender, receiver):
                raise _mismatch(ends, number, sender, receiver, note)
            receiver.meet(sender)


def _message_fits(sender: MessageSide, receiver: MessageSide) -> bool:
    x, out = sender.x, receiver.out
    return x is not None and out is not None and x.dtype == out.dtype and x.numel() == out.numel()


def _mismatch(
    ends: tuple[int, int],
    number: int,
    sender: MessageSide | None,
    receiver: MessageSide | None,
    note: Callable[[Task], Note],
) -> HostIRError:
    sides = ((sender, f"rank {ends[0]} sends only {number}"), (receiver, f"rank {ends[1]} receives only {number}"))
    notes = tuple((None, fewer) if side is None else _message_note(side, side is sender, note) for side, fewer in sides)
    return HostIRError(
        Diagnostic(
            f"message {number + 1} from rank {ends[0]} to rank {ends[1]} has no partner that fits",
            expected="as many sent as received, each of one dtype and number of elements on both sides",
            notes=notes,
        )
    )


def _message_note(message: MessageSide, sends: bool, note: Callable[[Task], Note]) -> Note:
    span, text = note(message.start)
    tensor = message.x if sends else message.out
    assert tensor is not None
    return span, f"{text}, {tensor.dtype} {list(tensor.shape)}"


# Symmetric buffers, flags, barriers -----------------------------------------------------------------------------------
# State that simulated ranks share: symmetric buffers, the flags in them, and barriers.

Site = tuple[str, tuple[int, ...]]  # where a program allocates: the name that it gives, and the round


class SymmetricBuffers:
    """The symmetric buffers of all ranks. Allocations of all ranks at one place of the program belong together.

    A rank may name a peer's buffer before the peer has planned it; so the first to ask creates it.
    """

    def __init__(self, memory: SimulatedMemory) -> None:
        self.memory = memory
        self.buffers: dict[tuple[Site, int], torch.Tensor] = {}
        self.places: dict[int, tuple[Site, int]] = {}  # by storage: where and at which rank
        self.flags: dict[tuple[int, int], FlagGate] = {}  # by storage and element
        self.allocated: set[tuple[Site, int]] = set()
        self.named: dict[tuple[Site, int], Task] = {}  # the first task that touches it from another rank

    def allocate(self, place: Site, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a rank's buffer, the same in every call; None if it exists with another shape or dtype."""
        self.allocated.add((place, rank))
        buffer = self._buffer(place, rank, shape, dtype)
        return buffer if buffer.shape == torch.Size(shape) and buffer.dtype == dtype else None

    def at(self, view: torch.Tensor, rank: int) -> torch.Tensor | None:
        """Return the same view of a rank's buffer; None for a view of memory that is not symmetric."""
        place, owner = self.places.get(storage_of(view), (None, rank))
        if place is None:
            return None
        own = self.buffers[place, owner]
        peer = self._buffer(place, rank, own.shape, own.dtype)
        return peer.as_strided(view.shape, view.stride(), view.storage_offset())

    def flag(self, flags: torch.Tensor, slot: int) -> FlagGate:
        """Return the flag at a slot of a view."""
        storage, element = storage_of(flags), int(flags[slot].storage_offset())
        name = self.places[storage][0][0]
        return self.flags.setdefault((storage, element), FlagGate(f"%{name}[{element}]"))

    def touch(self, view: torch.Tensor, rank: int, task: Task) -> None:
        """Record that a task of another rank touches this view of a rank's buffer."""
        self.named.setdefault((self.places[storage_of(view)][0], rank), task)

    def reset(self) -> None:
        """Reset all flags to their state before the first call."""
        for flag in self.flags.values():
            flag.reset()

    def check(self, note: Callable[[Task], Note]) -> None:
        """Raise HostIRError if a task touches the buffer of a rank that never allocated it."""
        for (place, rank), task in self.named.items():
            if (place, rank) not in self.allocated:
                span, where = note(task)
                raise error(f"{where}: rank {rank} has no %{place[0]}", span, expected="ranks that all allocate it")

    def _buffer(self, place: Site, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if (place, rank) not in self.buffers:
            buffer = self.buffers[place, rank] = self.memory.new(place[0], rank, shape, dtype)
            self.places[storage_of(buffer)] = place, rank
        return self.buffers[place, rank]


BarrierSide = tuple[Task, Task]  # of a barrier, on one rank: when the rank arrives, and when it continues


def meet(issued: Sequence[Mapping[tuple[int, ...], list[BarrierSide]]], note: Callable[[Task], Note]) -> list[Task]:
    """Join the barriers of all ranks, the n-th of each team with each other; return the tasks that join.

    Raises HostIRError where the ranks of a team differ in how many they issue.
    """
    joints: list[Task] = []
    for team in dict.fromkeys(team for rank in issued for team in rank):
        calls = [issued[rank].get(team, []) if rank < len(issued) else [] for rank in team]
        for number, sides in enumerate(zip_longest(*calls)):
            if any(side is None for side in sides):
                raise disagreement("barrier", team, number, [None if s is None else note(s[0]) for s in sides])
            met = join(arrived for arrived, _ in sides)
            for _, go in sides:
                go.follow([met])
            joints.append(met)
    return joints
