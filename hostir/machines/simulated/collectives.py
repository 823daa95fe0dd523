"""Collectives and transfers among simulated ranks.

Each rank issues its side of a collective. The sides of all ranks are matched, and tasks move the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Protocol

import torch

from hostir.ir.machine import Exchange, Move
from hostir.ir.source import Diagnostic, HostIRError, Span
from hostir.machines.simulated.memory import make_undefined
from hostir.machines.simulated.tasks import Task, Views, join

Note = tuple[Span | None, str]


class MakeTask(Protocol):
    """The type of a function that creates a task for the communication that is being issued."""

    def __call__(
        self, run: Callable[[], object] | None, reads: Views = (), writes: Views = (), undefines: Views = ()
    ) -> Task:
        """Return a task without dependencies."""


class CollectiveSide:
    """One rank's side of a collective. The side may access memory at any time between its issue and its end.

    A real machine may read `x` early for one peer and late for another. The simulation imitates this with two tasks
    that copy `x`, independently of each other. Ranks at even positions of the team receive the first copy. Ranks at odd
    positions receive the second copy.

    A real machine may also write `out` before any other rank has started. The simulation imitates this with a task that
    makes `out` undefined. This task may run long before the result is written.

    Args:
        x, out: the tensors that the side reads and writes.
        tail: the tasks directly before the side on its stream.
        start: the task that starts the collective on this rank.
        task: a function that creates the other tasks of the side.
        earlier: this rank's side of the team's previous collective.

    Fields:
        takes: the two tasks that read `x`.
        taken: the two copies of `x`.
        undefine: the task that makes `out` undefined.
        give: the task that writes `out` and ends the collective.
        peers: the sides of all ranks, in the order of the team.
        totals: the sum of the first copies of all ranks, and the sum of the second copies. A sum is None until it is
            computed.
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
            # On all machines the collectives of a team run one after another. But a program may rely only on the order
            # of their starts.
            self.start.follow([earlier.start]).held_by([earlier.give])
            # A link carries one collective at a time. This takes time, but orders nothing.
            self.takes[0].queued_behind = earlier.give

    @property
    def rank(self) -> int:
        return self.start.rank

    @property
    def shapes(self) -> tuple[object, ...]:
        """The dtype and shape of `x` and of `out`."""
        return tuple(None if t is None else (t.dtype, t.shape) for t in (self.x, self.out))

    def __str__(self) -> str:
        return " to ".join("nothing" if t is None else f"{t.dtype} {list(t.shape)}" for t in (self.x, self.out))

    def agrees(self, other: CollectiveSide) -> bool:
        """Return True if this side and `other` belong to the same communication."""
        if self.exchange.named != other.exchange.named:
            return False
        if self.exchange.moves is None or other.exchange.moves is None:
            return self.exchange.team == other.exchange.team and self.shapes == other.shapes
        ends = {self.rank, other.rank}
        here, there = ({m for m in p.exchange.moves or () if {m.source, m.target} == ends} for p in (self, other))
        return here == there and all(_fits(m, {self.rank: self, other.rank: other}) for m in here)

    def _snapshot(self, turn: int) -> None:
        self.totals[turn] = None
        if self.x is not None:
            self.taken[turn] = self.x.reshape(-1).clone()

    def _undefine(self) -> None:
        if self.out is not None and self.exchange.gives(self.rank):
            make_undefined(self.out)

    def _fill(self) -> None:
        n, me = len(self.peers), self.exchange.team.index(self.rank)
        communication, moves = (
            self.exchange.communication,
            [m for m in self.exchange.moves or () if m.target == self.rank],
        )
        if moves:
            for m in moves:
                source = next(peer for peer in self.peers if peer.rank == m.source).taken[me % 2]
                blocks(self.out, m.put[1])[m.put[0]] = blocks(source, m.take[1])[m.take[0]]
        elif communication == "allreduce":
            blocks(self.out, 1)[0] = self.peers[0].sum(me % 2)
        elif communication == "reduce_scatter":
            blocks(self.out, 1)[0] = blocks(self.peers[0].sum(me % 2), n)[me]
        elif communication in ("allgather", "alltoall"):
            out = blocks(self.out, n)
            for i, peer in enumerate(self.peers):
                taken = peer.taken[me % 2]
                out[i] = blocks(taken, 1)[0] if communication == "allgather" else blocks(taken, n)[me]

    def sum(self, turn: int) -> torch.Tensor:
        """Return the sum of the copies with index `turn` of all sides.

        The copies are added in f32 or better, in the order of the team. The sum is rounded once.
        """
        total = self.totals[turn]
        if total is None:
            parts = [peer.taken[turn] for peer in self.peers]
            total = self.totals[turn] = self.add([part for part in parts if part is not None])
        return total

    def add(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of `parts`. They are added in order, in f32 or better, and the sum is rounded once."""
        total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
        for part in parts[1:]:
            total += part
        return total.to(parts[0].dtype)


def blocks(x: torch.Tensor | None, count: int) -> torch.Tensor:
    """Return the `count` equal blocks of a contiguous tensor, as a view `[count, elements]`."""
    assert x is not None
    return x.view(count, -1)


def _fits(move: Move, sides: Mapping[int, CollectiveSide]) -> bool:
    x, out = sides[move.source].x, sides[move.target].out
    if x is None or out is None or x.dtype != out.dtype:
        return False
    return x.numel() * move.put[1] == out.numel() * move.take[1]


def match(issued: Sequence[Mapping[tuple[int, ...], list[CollectiveSide]]], note: Callable[[Task], Note]) -> list[Task]:
    """Join the sides of every collective with edges, and return the tasks that join them.

    `issued[rank][team]` are the sides of a rank in issue order. `team` is the team's ranks in ascending order. `note`
    takes a task, and returns the place of the task's statement in the text and a description of the statement.

    Raises HostIRError if the ranks of a team issue different communications.
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
    """Join the sides of one collective with edges, and return the tasks that join them.

    A side ends after all sides from which it receives have started and have read their tensors.
    """
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


def disagreement(operation: str, team: Sequence[int], number: int, notes: Sequence[Note | None]) -> HostIRError:
    """Return the error for the ranks of a team that disagree about their communication or barrier with index `number`.

    `operation` is `communication` or `barrier`. `notes` has a note for each rank. The note is None if the rank issues
    fewer communications or barriers.
    """
    described = [note or (None, f"rank {rank} issues only {number}") for rank, note in zip(team, notes, strict=True)]
    return HostIRError(
        Diagnostic(
            f"the ranks {' '.join(map(str, team))} differ in {operation} {number + 1} of their team",
            expected="every rank of a team to issue the same communications in the same order",
            notes=tuple(described),
        )
    )
