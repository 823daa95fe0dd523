"""Memory that peers can access.

Memory that GPUs of one host share: torch's symmetric memory, on its CUDA backend, without multicast.

Streams copy to and from a peer's memory with copy engines, set flags in it, and wait for flags in their own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hostir.ir.types import FLAG
from hostir.job.groups import world
from hostir.job.offers import BufferInfo, Offer
from hostir.job.symmetric import SharedMemory
from hostir.machines.cuda.driver import in_batches
from hostir.machines.cuda.flow_control import CREDITS, flow_control_of, notes, prepare, raised_flags
from hostir.machines.cuda.streams import own_stream
from hostir.plan.unrolled import UnrolledProgram

PATIENT, RELEASING = 0.25, 0.6  # parts of the timeout in which the GPU may end by itself, and then with raised flags
PAUSE = 0.01  # seconds between two looks at a GPU whose flags are raised
# The priority of the stream that raises flags; CUDA clamps it to its range. Streams of other priorities have other
# hardware queues. In the queue of a waiting stream it would wait, too: the GPU then does not end its work in time, and
# the ranks raise an error.
HIGHEST = -100


class PeerMemory:
    """Allocates this rank's symmetric memory and maps that of its peers.

    Args:
        device: this rank's device.
        rank: this rank.
        group: returns the registered process group of all ranks.
    """

    def __init__(self, device: torch.device, rank: int, group: Callable[[], Any] = world) -> None:
        self.device = device
        self.rank = rank
        self.group = group
        self.mine = torch.empty(0)  # between `reserve` and `map`
        self.aside: torch.cuda.Stream | None = None  # for flags that are raised while all other streams may wait
        self.handle: Any = None  # torch's handle of the memory that was mapped last: with it torch unmaps peers' memory

    @contextlib.contextmanager
    def offering(self, size: int) -> Iterator[str]:
        """Yield the index of this rank's GPU, for peers; drop the memory if the rendezvous fails."""
        if why := why_not(self.device):
            raise RuntimeError(why)
        try:
            yield str(self.device.index)
        finally:  # whether the rendezvous succeeded or not
            self.mine, self.handle = torch.empty(0), None

    def reserve(self, size: int) -> None:
        """Allocate `size` bytes of zeros: torch's symmetric memory if there are peers, else ordinary memory."""
        if not dist.is_initialized():
            self.mine = torch.zeros(size, dtype=torch.uint8, device=self.device)
            return
        import torch.distributed._symmetric_memory as symmetric_memory  # here, as it takes its time to load

        self.mine = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device).zero_()

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        """Map the memory of these ranks; collective over all ranks."""
        mine, self.mine = self.mine, torch.empty(0)
        if len(offers) == 1:
            return {self.rank: mine}
        import torch.distributed._symmetric_memory as symmetric_memory

        handle = symmetric_memory.rendezvous(mine, self.group())
        self.handle = handle
        maps = {peer: handle.get_buffer(peer, mine.shape, torch.uint8) for peer in ranks if peer != self.rank}
        return {self.rank: mine, **maps}

    def synchronize(self) -> None:
        """Wait until the GPU is idle."""
        torch.cuda.synchronize(self.device)

    def release(self, memories: Sequence[SharedMemory], abort: Callable[[], None], seconds: float) -> str:
        """Wait until the GPU is idle; if it waits for peers too long, raise all flags that it may wait for.

        The calls before the one that ended midway end by themselves. What is released reads NaN.
        """
        problems = list[str]()

        def wait() -> None:
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as problem:
                problems.append(str(problem))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(PATIENT * seconds)
        deadline = time.monotonic() + RELEASING * seconds
        abort()
        if waiting.is_alive() and self.aside is not None:
            self.raise_flags(self.aside, memories, lambda: waiting.is_alive() and time.monotonic() < deadline)
        waiting.join(max(deadline - time.monotonic(), 0.0))
        if waiting.is_alive():
            problems.append(f"its GPU has not ended its work after {(PATIENT + RELEASING) * seconds:g} s")
        if not problems:
            wait()  # for the flags that were raised last
        return "".join(problems[:1])

    def raise_flags(
        self, aside: torch.cuda.Stream, memories: Sequence[SharedMemory], needed: Callable[[], bool]
    ) -> None:
        """Raise all of this rank's flags, over an empty memory, again and again: calls reset them and wait again."""
        with torch.cuda.stream(aside):
            for memory in memories:
                memory.clear(self.rank)
        issue, issued = in_batches(raised_flags(self.rank, memories)), torch.cuda.Event()
        while needed():
            if issued.query():
                issue(aside.cuda_stream)
                issued.record(aside)
            time.sleep(PAUSE)

    def close(self) -> None:
        """Do nothing: the memory goes with the plans that use it."""

    def begin(self, unrolled: UnrolledProgram, memory: SharedMemory) -> None:
        """Keep torch's handle, and derive the flow control."""
        memory.kept["handle"], self.handle = self.handle, None
        flow_control_of(unrolled, memory)
        if self.aside is None:  # now: a GPU that waits might not make it
            self.aside = own_stream(self, self.device, HIGHEST)

    def prepare(self, memory: SharedMemory) -> None:
        """Initialise flags for the first call, on whatever stream it will be made."""
        prepare(self.rank, memory)
        torch.cuda.synchronize(self.device)

    def hidden(self, unrolled: UnrolledProgram) -> tuple[BufferInfo, ...]:
        """Return the buffers that no statement names: the counter of credits."""
        return (BufferInfo(*CREDITS, (1,), FLAG.name),)

    def notes(self, unrolled: UnrolledProgram) -> str:
        """Return what peers must know about this rank's calls, as text."""
        return notes(unrolled)


def why_not(device: torch.device) -> str:
    """Return the reason why this GPU cannot share its memory; empty if it can."""
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
