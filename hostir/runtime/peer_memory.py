"""Memory that the GPUs of one host see of each other: torch's symmetric memory, on its CUDA backend, without multicast.

Streams copy to and from it with copy engines, set flags in it, and wait for flags in their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hostir.runtime.handover import PERMITS, notes, prepare
from hostir.runtime.plan import Recording
from hostir.runtime.symmetric import Buffer, Offer, SharedMemory


class PeerMemory:
    """How GPUs share memory.

    Args:
        device: this rank's.
        rank: this rank.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device = device
        self.rank = rank
        self.mine = torch.empty(0)  # between `reserve` and `map`
        self.handle: Any = None  # of the memory that was mapped last
        self.handles: WeakKeyDictionary[SharedMemory, Any] = WeakKeyDictionary()  # torch unmaps peers' memory with them

    @contextlib.contextmanager
    def offering(self, size: int) -> Iterator[str]:
        """The number of this rank's GPU."""
        if why := why_not(self.device):
            raise RuntimeError(why)
        try:
            yield str(self.device.index)
        finally:  # where a meeting was refused
            self.mine, self.handle = torch.empty(0), None

    def reserve(self, size: int) -> None:
        """Allocates: between ranks what only torch's symmetric memory can share."""
        if not dist.is_initialized():
            self.mine = torch.zeros(size, dtype=torch.uint8, device=self.device)
            return
        import torch.distributed._symmetric_memory as symmetric_memory  # here, as it takes its time to load

        self.mine = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device).zero_()

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        """Maps the memory of these peers; all ranks meet in it."""
        mine, self.mine = self.mine, torch.empty(0)
        if len(offers) == 1:
            return {self.rank: mine}
        import torch.distributed._symmetric_memory as symmetric_memory

        world = dist.group.WORLD
        assert world is not None
        handle = symmetric_memory.rendezvous(mine, world)
        self.handle = handle
        maps = {peer: handle.get_buffer(peer, mine.shape, torch.uint8) for peer in ranks if peer != self.rank}
        return {self.rank: mine, **maps}

    def settle(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize(self.device)

    def begin(self, recording: Recording, memory: SharedMemory) -> None:
        """Puts flags as the first call finds them, on whatever stream it will be."""
        self.handles[memory], self.handle = self.handle, None
        prepare(recording, memory)
        torch.cuda.synchronize(self.device)

    def hidden(self, recording: Recording) -> tuple[Buffer, ...]:
        """The count of permits."""
        return (Buffer(*PERMITS, (1,), "int64"),)

    def notes(self, recording: Recording) -> str:
        """What ranks must know of each other's calls."""
        return notes(recording)


def why_not(device: torch.device) -> str:
    """Why this GPU cannot share its memory; nothing where it can."""
    import torch.distributed._symmetric_memory as symmetric_memory

    backend = symmetric_memory.get_backend(device)
    if backend != "CUDA":
        return (
            f"torch's symmetric memory is set to the {backend} backend, whose memory streams cannot wait on; "
            "call torch.distributed._symmetric_memory.set_backend('CUDA') first, or unset TORCH_SYMMMEM"
        )
    here, ranks_here = device.index, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for other in range(min(ranks_here, torch.cuda.device_count())):
        if other != here and not torch.cuda.can_device_access_peer(here, other):
            return f"GPU {here} cannot reach the memory of GPU {other}"
    return ""
