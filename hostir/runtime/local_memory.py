"""The memory of simulated ranks: NaN until it is written, and out of bounds once it is freed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from hostir.ir.source import Span

NAN = float("nan")


class Memory:
    """Every buffer of every rank on some device, each a storage of its own."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.owners: dict[int, tuple[str, int]] = {}  # of each storage: its buffer's name, and the rank
        self.freed: dict[int, Span | None] = {}  # by storage: where
        self.buffers: list[torch.Tensor] = []

    def new(self, name: str, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A dense buffer: NaN, or 0 where there is none."""
        memory = torch.zeros(max(prod(shape), 1), dtype=dtype, device=self.device)  # one at least, to have an address
        if dtype.is_floating_point:
            self.buffers.append(memory.fill_(NAN))
        buffer = memory[: prod(shape)].view(tuple(shape))
        self.owners[storage_of(buffer)] = name, rank
        return buffer

    def overlap(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether two views have an element in common."""
        if storage_of(x) != storage_of(y):
            return False
        marks = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool)
        marks.as_strided(x.shape, x.stride(), int(x.storage_offset())).fill_(True)
        return bool(marks.as_strided(y.shape, y.stride(), int(y.storage_offset())).any())

    def free(self, storage: int, span: Span | None) -> None:
        """From here on, this memory may not be touched."""
        self.freed[storage] = span

    def reset(self) -> None:
        """As before the first run."""
        self.freed.clear()
        for buffer in self.buffers:
            buffer.fill_(NAN)


def spoil(x: torch.Tensor) -> None:
    """Leaves a view undefined: it holds NaN, or 0 where there is none."""
    x.fill_(NAN if x.dtype.is_floating_point else 0)


def storage_of(x: torch.Tensor) -> int:
    """Which memory a tensor lies in."""
    return x.untyped_storage().data_ptr()
