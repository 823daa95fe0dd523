"""Files in shared memory that all processes of a host map.

CPU processes share memory through files without a name (memfd): peers open a file through the process that made it.

So no file remains, however a rank ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from hostir.job.offers import BufferInfo, Offer
from hostir.job.symmetric import SharedMemory
from hostir.plan.unrolled import UnrolledProgram


class SharedFiles:
    """Shares memory between CPU processes through files, and gives them a lock for memory order."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.lock = -1  # the file that all ranks lock to take turns
        self.unlock: Callable[[], object] | None = None  # closes that file

    @contextlib.contextmanager
    def offering(self, size: int) -> Iterator[str]:
        """Create a file of `size` bytes and yield its path, by which peers map it until the context ends."""
        if not hasattr(os, "memfd_create"):
            raise RuntimeError("only Linux lets processes open each other's memory")
        file = os.memfd_create("hostir")
        try:
            os.ftruncate(file, size)
            yield f"/proc/{os.getpid()}/fd/{file}"
        finally:
            os.close(file)

    def reserve(self, size: int) -> None:
        """Do nothing: the file has its size already."""

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        """Map the files of these ranks, and make the newest file of rank 0 the lock of all ranks."""
        newest = os.open(offers[0].path, os.O_RDWR)
        if self.lock < 0:
            self.lock = newest
            self.unlock = weakref.finalize(self, os.close, self.lock)
        else:
            os.dup2(newest, self.lock, inheritable=False)
            os.close(newest)
        return {
            rank: torch.from_file(offers[rank].path, shared=True, size=offers[rank].bytes, dtype=torch.uint8)
            for rank in ranks
        }

    def synchronize(self) -> None:
        """Do nothing: a call that has returned has ended."""

    def release(self, memories: Sequence[SharedMemory], abort: Callable[[], None], seconds: float) -> str:
        """End the threads that communicate; those that use memory have ended with the call that raised."""
        abort()
        return ""

    def close(self) -> None:
        """Close the lock file, when no call follows."""
        if self.unlock is not None:
            self.unlock()

    def begin(self, unrolled: UnrolledProgram, memory: SharedMemory) -> None:
        """Do nothing: the machine keeps nothing of its own."""

    def prepare(self, memory: SharedMemory) -> None:
        """Do nothing: the memory is ready."""

    def hidden(self, unrolled: UnrolledProgram) -> tuple[BufferInfo, ...]:
        """Return no buffers."""
        return ()

    def notes(self, unrolled: UnrolledProgram) -> str:
        """Return no data."""
        return ""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock of all ranks: what a rank writes before its turn is visible to every rank with a later turn.

        torch copies with plain stores, and Python has no memory fence: on Arm, a flag that is written after the data
        may be visible before them. So a rank sets a flag while it holds the lock, and a rank that has seen the flag
        takes the lock once before it reads the data. It is a file lock of the operating system, which unlocks with
        release and locks with acquire semantics, and unlocks for a process that dies. It excludes processes, not
        threads; hence the mutex.
        """
        with self.mutex:
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self.lock, fcntl.LOCK_UN)
