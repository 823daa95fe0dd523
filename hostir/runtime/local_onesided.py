"""What simulated ranks share: symmetric buffers, the flags in them, and barriers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch

from hostir.ir.source import error
from hostir.runtime.collectives import Note, disagreement
from hostir.runtime.local_memory import Memory, storage_of
from hostir.runtime.tasks import Flag, Task, join

Place = tuple[str, tuple[int, ...]]  # where a program allocates: the name that it gives, and the round


class Symmetric:
    """The symmetric buffers of all ranks. What ranks allocate at one place of the program belongs together.

    A rank that names a peer's buffer may plan before the peer does; so the first that asks makes it.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.buffers: dict[tuple[Place, int], torch.Tensor] = {}
        self.places: dict[int, tuple[Place, int]] = {}  # by storage: where and at which rank
        self.flags: dict[tuple[int, int], Flag] = {}  # by storage and element
        self.allocated: set[tuple[Place, int]] = set()
        self.named: dict[tuple[Place, int], Task] = {}  # the first task that touches it from another rank

    def allocate(self, place: Place, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A rank's buffer, the same in every call; None where the place has one of another shape or dtype."""
        self.allocated.add((place, rank))
        buffer = self._buffer(place, rank, shape, dtype)
        return buffer if buffer.shape == torch.Size(shape) and buffer.dtype == dtype else None

    def at(self, view: torch.Tensor, rank: int) -> torch.Tensor | None:
        """The same view of a rank's buffer; None for a view of what is not symmetric."""
        place, owner = self.places.get(storage_of(view), (None, rank))
        if place is None:
            return None
        own = self.buffers[place, owner]
        peer = self._buffer(place, rank, own.shape, own.dtype)
        return peer.as_strided(view.shape, view.stride(), view.storage_offset())

    def flag(self, flags: torch.Tensor, slot: int) -> Flag:
        """The flag at a slot of a view."""
        return self.flags.setdefault((storage_of(flags), int(flags[slot].storage_offset())), Flag())

    def touch(self, view: torch.Tensor, rank: int, task: Task) -> None:
        """A task of another rank touches this view of a rank's buffer."""
        self.named.setdefault((self.places[storage_of(view)][0], rank), task)

    def reset(self) -> None:
        """As the first call finds it: no signal was sent."""
        for flag in self.flags.values():
            flag.reset()

    def check(self, note: Callable[[Task], Note]) -> None:
        """Raises where a task touches the buffer of a rank that never allocated it."""
        for (place, rank), task in self.named.items():
            if (place, rank) not in self.allocated:
                span, where = note(task)
                raise error(f"{where}: rank {rank} has no %{place[0]}", span, expected="ranks that all allocate it")

    def _buffer(self, place: Place, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if (place, rank) not in self.buffers:
            buffer = self.buffers[place, rank] = self.memory.new(place[0], rank, shape, dtype)
            self.places[storage_of(buffer)] = place, rank
        return self.buffers[place, rank]


Side = tuple[Task, Task]  # of a barrier, on one rank: when it comes, and when it goes on


def meet(issued: Sequence[Mapping[tuple[int, ...], list[Side]]], note: Callable[[Task], Note]) -> list[Task]:
    """Joins the barriers of all ranks, the n-th of each team with each other; returns the tasks of joining.

    Raises HostIRError where the ranks of a team differ in how many they issue.
    """
    joints: list[Task] = []
    for team in dict.fromkeys(team for rank in issued for team in rank):
        calls = [issued[rank].get(team, []) if rank < len(issued) else [] for rank in team]
        for number, sides in enumerate(zip_longest(*calls)):
            if any(side is None for side in sides):
                raise disagreement("barrier", team, number, [None if s is None else note(s[0]) for s in sides])
            met = join(come for come, _ in sides)
            for _, go in sides:
                go.follow([met])
            joints.append(met)
    return joints
