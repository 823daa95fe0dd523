"""Memory that the GPUs of one host share: torch's symmetric memory, on its CUDA backend, without multicast.

Streams copy to and from a peer's memory with copy engines, set flags in it, and wait for flags in local memory.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hostir.ir.types import FLAG
from hostir.job.groups import world
from hostir.job.links import headline
from hostir.job.offers import SLOTS, WORKSPACE, BufferInfo, Offer
from hostir.job.symmetric import SharedMemory
from hostir.knobs import set_by_launcher
from hostir.machines.cuda.driver import in_batches
from hostir.machines.cuda.flow_control import CREDITS, flow_control_of, notes, prepare, raised_flags
from hostir.machines.cuda.streams import calling_streams, own_stream
from hostir.machines.cuda.uses import free_late, release
from hostir.plan.unrolled import UnrolledProgram

# When the next means is tried, as fractions of the timeout. First the GPU may end by itself. Then its flags are raised.
# Last, NCCL's communications are aborted, while flags are still raised.
PATIENT, RAISING, ABORTED = 0.25, 0.5, 0.85
PAGE = 1 << 20  # bytes of NaN that one copy stores
PAUSE = 0.01  # seconds between two looks at the GPU
# What fills the slots of `low_latency`, as an int16. No byte is 0, so all data look as if they had arrived. The kernel
# inverts the bits to 0x7FFE, which is NaN in bf16 and f16. Two of them are NaN in f32. In fp8, the byte 0x7F is NaN.
ARRIVED = -(1 << 15) + 1
# The priority of the stream that raises flags. CUDA clamps it to its range. Streams of another priority have other
# hardware queues. If this stream shared a queue with a stream that waits, it would wait, too. Then the GPU would not
# end its work in time, and the ranks would raise an error.
HIGHEST = -100


class PeerMemory:
    """Allocates this rank's symmetric memory and maps its peers' memory.

    Args:
        device: this rank's device.
        rank: this rank.
        group: a function that returns the registered process group of all ranks.
    """

    def __init__(self, device: torch.device, rank: int, group: Callable[[], Any] = world) -> None:
        self.device = device
        self.rank = rank
        self.group = group
        self.mine = torch.empty(0)  # between `reserve` and `map`
        self.aside: torch.cuda.Stream | None = None  # for flags that are raised while all other streams may wait
        self.nans = torch.empty(0, dtype=torch.uint8)  # pinned bytes, which are NaN in every dtype
        self.summands = torch.empty(0, dtype=torch.uint8)  # pinned bytes, which hold ARRIVED
        self.host_group: Any = None  # the registered group of the ranks of this host, if there are several hosts
        self.handle: Any = None  # torch's handle of the latest mapped memory; peers stay mapped as long as it lives

    @contextlib.contextmanager
    def offering(self, size: int) -> Iterator[str]:
        """Enter the context of a rendezvous, and yield a text for peers: the index of this rank's GPU.

        When the context ends, this object drops its references to the memory. If the rendezvous failed, this frees the
        memory.
        """
        if why := why_not(self.device):
            raise RuntimeError(why)
        try:
            yield str(self.device.index)
        finally:  # whether the rendezvous succeeded or not
            self.mine, self.handle = torch.empty(0), None

    def reserve(self, size: int) -> None:
        """Allocate `size` bytes of zeros, in torch's symmetric memory if there are peers, else in ordinary memory."""
        if not dist.is_initialized():
            self.mine = torch.zeros(size, dtype=torch.uint8, device=self.device)
            return
        import torch.distributed._symmetric_memory as symmetric_memory  # imported here, because it takes long to load

        self.mine = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device).zero_()

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        """Map the memory of `ranks`, and return the bytes of each rank. All ranks must call this."""
        mine, self.mine = self.mine, torch.empty(0)
        here = [rank for rank, offer in enumerate(offers) if offer.host == offers[self.rank].host]
        if len(here) == 1:
            return {self.rank: mine}
        import torch.distributed._symmetric_memory as symmetric_memory

        handle = symmetric_memory.rendezvous(mine, self.group_of(here, len(offers)))
        self.handle = handle
        peers = (peer for peer in ranks if peer != self.rank)
        maps = {peer: handle.get_buffer(here.index(peer), mine.shape, torch.uint8) for peer in peers}
        return {self.rank: mine, **maps}

    def group_of(self, here: Sequence[int], ranks: int) -> Any:
        """Return the registered process group of the ranks of this host: the group of all ranks if there is one host.

        Args:
            here: the ranks of this host, in ascending order.
            ranks: the number of all ranks.
        """
        if len(here) == ranks:
            return self.group()
        if self.host_group is None:
            everyone = dist.get_process_group_ranks(self.group())
            self.host_group = dist.new_group([everyone[rank] for rank in here], use_local_synchronization=True)
        return self.host_group

    def synchronize(self) -> None:
        """Wait until the GPU is idle."""
        torch.cuda.synchronize(self.device)

    def working(self, memories: Sequence[SharedMemory]) -> Callable[[], bool]:
        """Return a function that returns True while streams have work: those of calls, the default, and the current."""
        streams, device = calling_streams(self.device), self.device
        streams += [kept for memory in memories for kept in memory.kept.values() if isinstance(kept, torch.cuda.Stream)]

        def working() -> bool:
            cuda = device.type == "cuda"
            more = (torch.cuda.default_stream(device), torch.cuda.current_stream(device)) if cuda else ()
            return not all(stream.query() for stream in (*streams, *more))

        return working

    def release(self, memories: Sequence[SharedMemory], abort: Callable[[], None], seconds: float) -> str:
        """Wait until all calls have ended on the GPU. If calls wait for peers too long, raise all flags of this rank.

        hostir calls this after a call that ended midway. The calls before that call end without help. Calls that end
        only because this method raises their flags read NaN. This method polls the streams, because a thread that waits
        for the complete device may keep the driver from issuing the work that raises the flags. Another thread aborts
        NCCL. The abort frees memory, and the driver does not return from that before the device is idle. Meanwhile this
        thread can still raise flags.

        Args:
            memories: all symmetric memory of this rank.
            abort: a function that aborts the process groups, so that NCCL stops waiting.
            seconds: the timeout.

        Returns the reason why the GPU does not become idle; empty if the GPU is idle.
        """
        working, began, problems = self.working(memories), time.monotonic(), list[str]()

        def is_busy() -> bool:
            """Return True if the GPU works, or if NCCL is being aborted."""
            return aborting.is_alive() or working()

        def must_wait(fraction: float) -> bool:
            """Return True if `is_busy` and less than this fraction of the timeout has passed."""
            return time.monotonic() - began < fraction * seconds and is_busy()

        def end_communications() -> None:
            try:
                abort()
            except Exception as problem:  # from NCCL
                problems.append(headline(problem))

        aborting = threading.Thread(target=end_communications, name="hostir aborts NCCL", daemon=True)
        try:
            while must_wait(PATIENT):
                time.sleep(PAUSE)
            if is_busy():
                self.raise_flags(memories, partial(must_wait, RAISING))
            waiting = is_busy()
            aborting.start()
            if waiting:
                self.raise_flags(memories, partial(must_wait, ABORTED))
            while must_wait(ABORTED):
                time.sleep(PAUSE)
            if is_busy():
                return f"its GPU has not ended its work after {ABORTED * seconds:g} s"
            self.synchronize()  # wait for the writes that raised flags last
        except RuntimeError as problem:
            if aborting.ident is None:
                end_communications()
            problems.insert(0, str(problem))
        return problems[0] if problems else ""

    def raise_flags(self, memories: Sequence[SharedMemory], needed: Callable[[], bool]) -> None:
        """Fill this rank's buffers with NaN once, and raise its flags repeatedly while `needed` returns True.

        It is not enough to raise the flags once: a call that ends resets its flags, and the next call waits for them
        again. The signals of torch's kernels are set and reset in turn. The slots of `low_latency` are filled
        repeatedly, because its kernel empties them. Copy engines fill the buffers and set these signals, because
        kernels that wait may hold all SMs. All work goes to the stream `aside`.
        """
        aside = self.aside
        if aside is None:
            return
        with torch.cuda.stream(aside):
            for memory in memories:
                memory.overwrite(self.rank, self.nans)
        issue, issued = in_batches(raised_flags(self.rank, memories)), torch.cuda.Event()
        pads = [pad for memory in memories for pad in self.signal_pads(memory)]
        on_host = partial(torch.full_like, device="cpu", pin_memory=self.device.type == "cuda")
        states = itertools.cycle([[on_host(pad, state) for pad in pads] for state in (1, 0)])
        while needed():
            if issued.query():
                issue(aside.cuda_stream)
                with torch.cuda.stream(aside):
                    for pad, state in zip(pads, next(states), strict=True):
                        pad.copy_(state, non_blocking=True)
                    for memory in memories:
                        memory.overwrite(self.rank, self.summands, slots=True)
                issued.record(aside)
            time.sleep(PAUSE)

    def signal_pads(self, memory: SharedMemory) -> list[torch.Tensor]:
        """Return this rank's signal pad in a list. The list is empty if no kernel of torch uses `memory`.

        A signal pad is an int32 tensor through which torch's kernels for symmetric memory synchronize with peers. To
        signal a peer, a kernel waits until a signal in the peer's pad is 0, and sets it to 1. To wait for a peer, a
        kernel waits until a signal in its rank's pad is 1, and sets it to 0.
        """
        handle = memory.kept.get("handle")
        if handle is None or (WORKSPACE, self.rank) not in memory.flat:
            return []
        return [handle.get_signal_pad(self.rank).view(torch.int32)]

    def close(self, done: bool) -> None:
        """Free the memory that no plan uses. Other memory is freed by a later call, when its plans are gone.

        After a failure, all is left to a later call: to free memory, CUDA waits for the device.
        """
        if done and not torch.cuda.is_current_stream_capturing():
            release()

    def begin(self, unrolled: UnrolledProgram, memory: SharedMemory) -> None:
        """Set up new symmetric memory: store torch's handle and the flow control in `memory`.

        The first call also creates the stream that raises flags, and a page of NaN bytes.
        """
        memory.kept["handle"], self.handle = self.handle, None
        free_late(memory, (*memory.flat.values(), memory.kept["handle"]))
        if (SLOTS, self.rank) in memory.flat:
            from hostir.kernels.low_latency import PROGRAMS  # which needs Triton

            memory.kept["calls"] = torch.zeros(PROGRAMS, dtype=torch.int32, device=self.device)
        flow_control_of(unrolled, memory)
        if self.aside is None:  # create it now: a GPU that waits for peers might not be able to
            self.aside = own_stream(self, self.device, HIGHEST)
            pinned = self.device.type == "cuda"
            self.nans = torch.full((PAGE,), 0xFF, dtype=torch.uint8, pin_memory=pinned)
            self.summands = torch.full((PAGE // 2,), ARRIVED, dtype=torch.int16, pin_memory=pinned).view(torch.uint8)

    def prepare(self, memory: SharedMemory) -> None:
        """Initialise the flags for the first call of a program, and wait until they are initialised.

        Because of this wait, the first call may be made on any stream.
        """
        prepare(self.rank, memory)
        for pad in self.signal_pads(memory):
            pad.zero_()
        if (calls := memory.kept.get("calls")) is not None:
            calls.zero_()
        torch.cuda.synchronize(self.device)

    def hidden(self, unrolled: UnrolledProgram) -> tuple[BufferInfo, ...]:
        """Return the buffers that this machine adds to the buffers of the program: the counter of credits."""
        return (BufferInfo(*CREDITS, (1,), FLAG.name),)

    def notes(self, unrolled: UnrolledProgram) -> str:
        """Return the facts about this rank's calls that peers need, as text."""
        return notes(unrolled)


def why_not(device: torch.device) -> str:
    """Return the reason why this GPU cannot share its memory; empty if the GPU can share it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    backend = symmetric_memory.get_backend(device)
    if backend != "CUDA":
        return (
            f"torch's symmetric memory is set to the {backend} backend, whose memory streams cannot wait on; "
            "call torch.distributed._symmetric_memory.set_backend('CUDA') first, or unset TORCH_SYMMMEM"
        )
    here, ranks_here = device.index, set_by_launcher("LOCAL_WORLD_SIZE", 1)
    for other in range(min(ranks_here, torch.cuda.device_count())):
        if other != here and not torch.cuda.can_device_access_peer(here, other):
            return f"GPU {here} cannot reach the memory of GPU {other}"
    return ""
