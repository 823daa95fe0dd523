"""Memory that the CPU processes of a host share: files without a name (memfd) that all processes map.

A peer opens such a file by a path in /proc of the process that created it. So no file is left behind, however a rank
ends.
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
    """The shared files of this process, and the file lock that orders memory accesses of the ranks of this host."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.lock = -1  # descriptor of the file that the ranks of this host lock in turn
        self.unlock: Callable[[], object] | None = None  # closes that file

    @contextlib.contextmanager
    def offering(self, size: int) -> Iterator[str]:
        """Create a file of `size` bytes and yield its path. Peers can map the file until the context ends."""
        if not hasattr(os, "memfd_create"):
            raise RuntimeError("only Linux lets processes open each other's memory")
        file = os.memfd_create("hostir")
        try:
            os.ftruncate(file, size)
            yield f"/proc/{os.getpid()}/fd/{file}"
        finally:
            os.close(file)

    def reserve(self, size: int) -> None:
        """Do nothing: `offering` has set the size of the file."""

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        """Map the files of `ranks`, and return the bytes of each rank.

        The newest file of the first rank of this host also becomes the lock file, which the ranks of a host lock in
        turn.
        """
        host = offers[min(ranks)].host
        newest = os.open(next(offer.path for offer in offers if offer.host == host), os.O_RDWR)
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
        """Do nothing, because all work of a call has ended when the call returns."""

    def working(self, memories: Sequence[SharedMemory]) -> Callable[[], bool]:
        """Return a function that returns False: all work of a call has ended when the call returns."""
        return lambda: False

    def release(self, memories: Sequence[SharedMemory], abort: Callable[[], None], seconds: float) -> str:
        """Call `abort` to end communications. Threads that use memory have already ended with the call that failed."""
        abort()
        return ""

    def close(self, done: bool) -> None:
        """Close the lock file. No call may follow."""
        if self.unlock is not None:
            self.unlock()

    def begin(self, unrolled: UnrolledProgram, memory: SharedMemory) -> None:
        """Do nothing: this machine keeps no data with the memory."""

    def prepare(self, memory: SharedMemory) -> None:
        """Do nothing: the memory needs no preparation."""

    def hidden(self, unrolled: UnrolledProgram) -> tuple[BufferInfo, ...]:
        """Return an empty tuple, because this machine adds no buffers to the buffers of the program."""
        return ()

    def notes(self, unrolled: UnrolledProgram) -> str:
        """Return an empty text, because peers need no facts about this rank's calls."""
        return ""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock of the ranks of this host within the context.

        Everything that a rank writes before its turn is visible to every rank with a later turn. This is needed because
        torch copies with plain stores, and Python has no memory fence. On Arm, a flag that is written after some data
        may become visible before the data. So a rank sets a flag while it holds the lock. A rank that has seen the flag
        takes the lock once before it reads the data.

        The lock is a file lock of the operating system. Locking has acquire semantics, and unlocking has release
        semantics. If a process dies, its lock is released. A file lock excludes other processes, but not other threads
        of this process, so there is a mutex as well.
        """
        with self.mutex:
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self.lock, fcntl.LOCK_UN)
