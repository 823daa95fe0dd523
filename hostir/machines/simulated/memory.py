"""Memory of simulated ranks: it holds NaN until it is written, and must not be accessed once it is freed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from hostir.ir.source import Span

NAN = float("nan")


class SimulatedMemory:
    """The buffers of all simulated ranks. Each buffer has separate storage."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.owners: dict[int, tuple[str, int]] = {}  # by storage: the name of the buffer, and its rank
        self.freed: dict[int, Span | None] = {}  # by storage: the statement that frees it
        self.buffers: list[torch.Tensor] = []

    def new(self, name: str, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a contiguous buffer that holds NaN, or 0 for dtypes without NaN."""
        elements = max(prod(shape), 1)  # at least one, to have an address
        memory = torch.zeros(elements, dtype=dtype, device=self.device)
        if dtype.is_floating_point:
            self.buffers.append(memory.fill_(NAN))
        buffer = memory[: prod(shape)].view(tuple(shape))
        self.owners[storage_of(buffer)] = name, rank
        return buffer

    def overlap(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Return True if two views have an element in common."""
        if storage_of(x) != storage_of(y):
            return False
        marks = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool)
        marks.as_strided(x.shape, x.stride(), int(x.storage_offset())).fill_(True)
        return bool(marks.as_strided(y.shape, y.stride(), int(y.storage_offset())).any())

    def free(self, storage: int, span: Span | None) -> None:
        """Mark a storage as freed: it must not be accessed any more. `span` is the place of the `free` in the text."""
        self.freed[storage] = span

    def reset(self) -> None:
        """Restore the state before the first run: no memory is freed, and all floating-point memory holds NaN."""
        self.freed.clear()
        for buffer in self.buffers:
            buffer.fill_(NAN)


def make_undefined(x: torch.Tensor) -> None:
    """Make the elements of a view undefined: fill it with NaN, or with 0 for dtypes without NaN."""
    x.fill_(NAN if x.dtype.is_floating_point else 0)


def storage_of(x: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which identifies the storage."""
    return x.untyped_storage().data_ptr()
