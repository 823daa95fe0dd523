"""Communications among simulated ranks: which rank's call belongs to which, and what moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

import torch

from hostir.ir.machine import Exchange, Move
from hostir.ir.source import Diagnostic, HostIRError, Span
from hostir.runtime.tasks import Task, Views, join

Note = tuple[Span | None, str]


class Issue(Protocol):
    """Makes a task of the communication that is being issued."""

    def __call__(self, run: Callable[[], object] | None, reads: Views = (), writes: Views = ()) -> Task:
        """A task that follows nothing yet."""


class Part:
    """One rank's side of a communication.

    `come` is when it has begun on this rank, `take` reads its tensor once all ranks have come, `give` writes the
    result. `peers` are all sides, in the order of the team; `earlier` is the one before it of its team, on this rank.
    """

    def __init__(
        self,
        exchange: Exchange,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        come: Task,
        task: Issue,
        earlier: Part | None,
    ) -> None:
        self.exchange, self.x, self.out, self.come = exchange, x, out, come
        reads = (x,) if x is not None and exchange.takes(come.rank) else ()
        writes = (out,) if out is not None and exchange.gives(come.rank) else ()
        self.take = task(self._snapshot, reads=reads).follow([come])
        self.give = task(self._fill, writes=writes).follow([self.take])
        self.give.since = self.take
        self.peers: list[Part] = []
        self.taken: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        if earlier is not None:
            # A team starts in order; what has ended is known to those who wait for it, and to nobody else.
            self.come.follow([earlier.come])
            self.take.follow([earlier.take])
            self.take.alone = earlier.give  # its wires carry one at a time; that is a matter of time, not of order

    @property
    def rank(self) -> int:
        return self.take.rank

    @property
    def shapes(self) -> tuple[object, ...]:
        """Dtype and shape of what it reads and writes."""
        return tuple(None if t is None else (t.dtype, t.shape) for t in (self.x, self.out))

    def __str__(self) -> str:
        return " to ".join("nothing" if t is None else f"{t.dtype} {list(t.shape)}" for t in (self.x, self.out))

    def agrees(self, other: Part) -> bool:
        """Whether two ranks mean the same communication."""
        if self.exchange.kind != other.exchange.kind:
            return False
        if self.exchange.moves is None or other.exchange.moves is None:
            return self.shapes == other.shapes
        ends = {self.rank, other.rank}
        mine, theirs = ({m for m in p.exchange.moves or () if {m.source, m.target} == ends} for p in (self, other))
        return mine == theirs and all(_fits(m, {self.rank: self, other.rank: other}) for m in mine)

    def _snapshot(self) -> None:
        self.total = None
        if self.x is not None:
            self.taken = self.x.reshape(-1).clone()

    def _fill(self) -> None:
        n, me = len(self.peers), self.exchange.team.index(self.rank)
        kind, moves = self.exchange.kind, [m for m in self.exchange.moves or () if m.target == self.rank]
        if moves:
            for m in moves:
                source = self.peers[self.exchange.team.index(m.source)].taken
                blocks(self.out, m.put[1])[m.put[0]] = blocks(source, m.take[1])[m.take[0]]
        elif kind == "allreduce":
            blocks(self.out, 1)[0] = self.peers[0].sum()
        elif kind == "reduce_scatter":
            blocks(self.out, 1)[0] = blocks(self.peers[0].sum(), n)[me]
        elif kind in ("allgather", "alltoall"):
            out = blocks(self.out, n)
            for i, peer in enumerate(self.peers):
                out[i] = blocks(peer.taken, 1)[0] if kind == "allgather" else blocks(peer.taken, n)[me]

    def sum(self) -> torch.Tensor:
        """The sum of what all sides hold: in f32, in the order of the team, rounded once."""
        if self.total is None:
            parts = [peer.taken for peer in self.peers if peer.taken is not None]
            total = parts[0].to(torch.float32, copy=True)
            for part in parts[1:]:
                total += part
            self.total = total.to(parts[0].dtype)
        return self.total


def blocks(x: torch.Tensor | None, count: int) -> torch.Tensor:
    """A dense tensor as `count` equal blocks, `[count, elements]`."""
    assert x is not None
    return x.view(count, -1)


def _fits(move: Move, sides: Mapping[int, Part]) -> bool:
    x, out = sides[move.source].x, sides[move.target].out
    if x is None or out is None or x.dtype != out.dtype:
        return False
    return x.numel() * move.put[1] == out.numel() * move.take[1]


def match(issued: Sequence[Mapping[tuple[int, ...], list[Part]]], note: Callable[[Task], Note]) -> list[Task]:
    """Joins the sides of every communication; `issued[rank][team]` are a rank's sides in the order issued.

    Returns the tasks of joining. Raises HostIRError where ranks differ in what they issue to a team; `note` says where
    a task comes from.
    """
    joints: list[Task] = []
    for team in dict.fromkeys(team for rank in issued for team in rank):
        calls = [issued[rank].get(team, []) if rank < len(issued) else [] for rank in team]
        for number, peers in enumerate(zip_longest(*calls)):
            sides = [part for part in peers if part is not None]
            if len(sides) < len(team) or not all(a.agrees(b) for i, a in enumerate(sides) for b in sides[:i]):
                notes = [None if part is None else _note(note(part.take), part) for part in peers]
                raise disagreement("communication", team, number, notes)
            start = join(part.come for part in sides)
            met = join(part.take.follow([start]) for part in sides)
            for part in sides:
                part.peers = sides
                part.give.follow([met])
            joints += [start, met]
    return joints


def _note(where: Note, part: Part) -> Note:
    return where[0], f"{where[1]}, {part}"


def disagreement(what: str, team: Sequence[int], number: int, notes: Sequence[Note | None]) -> HostIRError:
    """Ranks of a team differ in their communication or barrier `number`; no note for a rank that issues none."""
    said = [note or (None, f"rank {rank} issues only {number}") for rank, note in zip(team, notes, strict=True)]
    return HostIRError(
        Diagnostic(
            f"the ranks {' '.join(map(str, team))} differ in {what} {number + 1} of their team",
            expected="every rank of a team to issue the same communications in the same order",
            notes=tuple(said),
        )
    )
