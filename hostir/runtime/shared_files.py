"""Memory that CPU processes share, without a name in any file system: peers open it through the process that made it.

So nothing is left behind, however a rank ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch

from hostir.runtime.plan import Recording
from hostir.runtime.symmetric import Buffer, Offer, SharedMemory


class SharedFiles:
    """How CPU processes share memory, and take turns."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.lock = -1  # the file by which all ranks take turns

    @contextlib.contextmanager
    def offering(self, size: int) -> Iterator[str]:
        """The memory's path, as long as peers need it to map the memory."""
        if not hasattr(os, "memfd_create"):
            raise RuntimeError("only Linux lets processes open each other's memory")
        file = os.memfd_create("hostir")
        try:
            os.ftruncate(file, size)
            yield f"/proc/{os.getpid()}/fd/{file}"
        finally:
            os.close(file)

    def reserve(self, size: int) -> None:
        """The file is there."""

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        """Maps the files of these ranks."""
        newest = os.open(offers[0].path, os.O_RDWR)  # a turn is a lock on rank 0's newest memory, which that keeps
        if self.lock < 0:
            self.lock = newest
            weakref.finalize(self, os.close, self.lock)
        else:
            os.dup2(newest, self.lock)
            os.close(newest)
        return {
            rank: torch.from_file(offers[rank].path, shared=True, size=offers[rank].bytes, dtype=torch.uint8)
            for rank in ranks
        }

    def settle(self) -> None:
        """A call that has returned has ended."""

    def begin(self, recording: Recording, memory: SharedMemory) -> None:
        """Nothing is left to do."""

    def hidden(self, recording: Recording) -> tuple[Buffer, ...]:
        """Nothing."""
        return ()

    def notes(self, recording: Recording) -> str:
        """Nothing."""
        return ""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """What comes before a rank's turn is visible to every rank whose turn comes later, on any CPU.

        torch copies with plain stores, and nothing that Python has is a fence: on Arm a flag written after them may be
        seen before them. So a rank sets a flag in its turn, and one that has seen it set takes a turn before it reads
        what the flag stands for. Turns are a lock in the kernel, which is let go with release and taken with acquire,
        and by the kernel itself where a process dies. The file lock is between processes only; hence the mutex.
        """
        with self.mutex:
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self.lock, fcntl.LOCK_UN)
