"""State that simulated ranks share: symmetric buffers, the flags in them, and barriers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch

from hostir.ir.source import error
from hostir.machines.simulated.collectives import Note, disagreement
from hostir.machines.simulated.memory import SimulatedMemory, storage_of
from hostir.machines.simulated.tasks import FlagGate, Task, join

Site = tuple[str, tuple[int, ...]]  # an allocation in a program: the name of the buffer, and the round


class SymmetricBuffers:
    """The symmetric buffers of all ranks. A buffer belongs to one allocation of the program and to one rank.

    A rank may use a peer's buffer before the peer has planned the allocation of the buffer. So the first use creates
    the buffer.
    """

    def __init__(self, memory: SimulatedMemory) -> None:
        self.memory = memory
        self.buffers: dict[tuple[Site, int], torch.Tensor] = {}
        self.places: dict[int, tuple[Site, int]] = {}  # by storage: the allocation and the rank
        self.flags: dict[tuple[int, int], FlagGate] = {}  # by storage and element
        self.allocated: set[tuple[Site, int]] = set()
        self.named: dict[tuple[Site, int], Task] = {}  # the first task of another rank that accesses it

    def allocate(self, place: Site, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a rank's buffer, which is the same in every call.

        Return None if the buffer already exists with another shape or dtype.
        """
        self.allocated.add((place, rank))
        buffer = self._buffer(place, rank, shape, dtype)
        return buffer if buffer.shape == torch.Size(shape) and buffer.dtype == dtype else None

    def at(self, view: torch.Tensor, rank: int) -> torch.Tensor | None:
        """Return the view of rank `rank`'s buffer that corresponds to `view`; None if `view` is not symmetric memory.

        `view` may be a view of any rank's buffer.
        """
        place, owner = self.places.get(storage_of(view), (None, rank))
        if place is None:
            return None
        known = self.buffers[place, owner]
        buffer = self._buffer(place, rank, known.shape, known.dtype)
        return buffer.as_strided(view.shape, view.stride(), view.storage_offset())

    def flag(self, flags: torch.Tensor, slot: int) -> FlagGate:
        """Return the flag at index `slot` of `flags`, a view of a symmetric buffer."""
        storage, element = storage_of(flags), int(flags[slot].storage_offset())
        name = self.places[storage][0][0]
        return self.flags.setdefault((storage, element), FlagGate(f"%{name}[{element}]"))

    def touch(self, view: torch.Tensor, rank: int, task: Task) -> None:
        """Record that `task`, a task of another rank, accesses `view`, a view of a buffer of rank `rank`."""
        self.named.setdefault((self.places[storage_of(view)][0], rank), task)

    def reset(self) -> None:
        """Reset all flags to their state before the first call."""
        for flag in self.flags.values():
            flag.reset()

    def check(self, note: Callable[[Task], Note]) -> None:
        """Raise HostIRError if a task accesses the buffer of a rank that never allocates it."""
        for (place, rank), task in self.named.items():
            if (place, rank) not in self.allocated:
                span, where = note(task)
                raise error(f"{where}: rank {rank} has no %{place[0]}", span, expected="ranks that all allocate it")

    def _buffer(self, place: Site, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if (place, rank) not in self.buffers:
            buffer = self.buffers[place, rank] = self.memory.new(place[0], rank, shape, dtype)
            self.places[storage_of(buffer)] = place, rank
        return self.buffers[place, rank]


BarrierSide = tuple[Task, Task]  # two tasks of one rank: its arrival at a barrier, and the end of its wait


def meet(issued: Sequence[Mapping[tuple[int, ...], list[BarrierSide]]], note: Callable[[Task], Note]) -> list[Task]:
    """Join the n-th barriers of all ranks of a team, for every n and every team; return the tasks that join them.

    `issued[rank][team]` are the barriers of a rank in issue order. `note` takes a task, and returns the place of the
    task's statement in the text and a description of the statement. Raises HostIRError if the ranks of a team issue
    different numbers of barriers.
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
