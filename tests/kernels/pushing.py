"""Pieces for tests of copies by kernels: random data, with guards around each target."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

from hostir.kernels.flags.copies import Piece, PushKernel

GUARD = 64  # bytes around each target that must stay as they are


@dataclass
class Job:
    """A source, and a target and a flag for each of its pieces."""

    source: torch.Tensor
    targets: list[torch.Tensor]
    offsets: list[int]
    flags: torch.Tensor
    size: int
    push: PushKernel

    @classmethod
    def random(cls, random: Random, device: str, pieces: int, size: int, shift: int, sms: int = 3) -> Job:
        """Create pieces of `size` bytes. Sources and targets begin `shift` bytes after a multiple of 16."""
        buffer = torch.empty(shift + 3 * size, dtype=torch.uint8, device=device).random_(0, 256)
        source = buffer.view(torch.int16) if shift % 2 == 0 and size % 2 == 0 else buffer
        offsets = [shift + size * random.randrange(3) for _ in range(pieces)]
        targets = [torch.full((2 * GUARD + shift + size,), 7, dtype=torch.uint8, device=device) for _ in offsets]
        flags = torch.zeros(pieces, dtype=torch.int64, device=device)
        pieces = [
            Piece(offset, target.data_ptr() + GUARD + shift, flags.data_ptr() + 8 * i if i % 4 != 3 else 0, i + 1)
            for i, (offset, target) in enumerate(zip(offsets, targets, strict=True))
        ]
        push = PushKernel(torch.device(device, 0) if device == "cuda" else torch.device(device), pieces, size, sms)
        return cls(source, targets, offsets, flags, size, push)

    def check(self, shift: int) -> None:
        """Assert that all pieces have arrived, nothing around them has changed, and all flags have risen."""
        buffer = self.source.view(torch.uint8)
        for offset, target in zip(self.offsets, self.targets, strict=True):
            begin = GUARD + shift
            assert torch.equal(target[begin : begin + self.size], buffer[offset : offset + self.size])
            assert (target[:begin] == 7).all()
            assert (target[begin + self.size :] == 7).all()
        assert self.flags.tolist() == [i + 1 if i % 4 != 3 else 0 for i in range(len(self.offsets))]
        assert not self.push.arrived.any(), "the next call must find the count of arrived programs at 0"


@dataclass
class Peers:
    """Memory of peers to which a matmul stores pieces of its rows. Each piece has a flag and guards around it.

    Piece i has rows `[tops[i], tops[i] + height)`.
    """

    targets: list[torch.Tensor]
    tops: list[int]
    height: int
    flags: torch.Tensor
    push: PushKernel

    @classmethod
    def of(cls, out: torch.Tensor, tops: list[int], height: int, shift: int = 0) -> Peers:
        """Create targets for these rows of `out`, `[..., N]`. Each begins `shift` bytes after a multiple of 16."""
        row, device = out.shape[-1] * out.element_size(), out.device
        targets = [torch.full((2 * GUARD + shift + height * row,), 7, dtype=torch.uint8, device=device) for _ in tops]
        flags = torch.zeros(len(tops), dtype=torch.int64, device=device)
        pieces = [
            Piece(top * row, target.data_ptr() + GUARD + shift, flags.data_ptr() + 8 * i if i % 4 != 3 else 0, i + 1)
            for i, (top, target) in enumerate(zip(tops, targets, strict=True))
        ]
        return cls(targets, tops, height, flags, PushKernel(device, pieces, height * row, 3))

    def check(self, out: torch.Tensor, shift: int = 0) -> None:
        """Assert that all pieces of `out` have arrived, nothing around them has changed, and all flags have risen."""
        flat, begin = out.reshape(-1, out.shape[-1]), GUARD + shift
        for top, target in zip(self.tops, self.targets, strict=True):
            rows = flat[top : top + self.height].contiguous().view(torch.uint8).view(-1)
            end = begin + len(rows)
            assert torch.equal(target[begin:end], rows)
            assert (target[:begin] == 7).all()
            assert (target[end:] == 7).all()
        assert self.flags.tolist() == [i + 1 if i % 4 != 3 else 0 for i in range(len(self.tops))]
        assert not self.push.arrived.any(), "the next call must find the count of arrived programs at 0"
