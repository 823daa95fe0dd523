"""Symmetric buffers, flags and barriers of simulated ranks.

State that simulated ranks share: symmetric buffers, the flags in them, and barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch

from hostir.ir.source import error
from hostir.machines.simulated.collectives import Note, disagreement
from hostir.machines.simulated.memory import SimulatedMemory, storage_of
from hostir.machines.simulated.tasks import FlagGate, Task, join

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
