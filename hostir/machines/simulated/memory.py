"""Memory of simulated ranks: it is undefined until it is written, and must not be accessed once it is freed.

Undefined memory holds NaN. Undefined integers are -1, which is no valid index.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from hostir.ir.source import Span
from hostir.kernels.dtypes import undefined


class SimulatedMemory:
    """The buffers of all simulated ranks. Each buffer has separate storage."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.owners: dict[int, tuple[str, int]] = {}  # by storage: the name of the buffer, and its rank
        self.freed: dict[int, Span | None] = {}  # by storage: the statement that frees it
        self.buffers: list[torch.Tensor] = []

    def new(self, name: str, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a contiguous buffer with undefined contents."""
        elements = max(prod(shape), 1)  # at least one, to have an address
        memory = torch.empty(elements, dtype=dtype, device=self.device)
        make_undefined(memory)
        self.buffers.append(memory)
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
        """Restore the state before the first run: no memory is freed, and all memory is undefined."""
        self.freed.clear()
        for buffer in self.buffers:
            make_undefined(buffer)


def make_undefined(x: torch.Tensor) -> None:
    """Make the elements of a view undefined: fill it with NaN, or with -1 if they are integers."""
    x.fill_(undefined(x.dtype))


def storage_of(x: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which identifies the storage."""
    return x.untyped_storage().data_ptr()
