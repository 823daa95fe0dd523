"""What another process does while a kernel waits: it fills rows and raises their flags. It needs no Triton."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.queues import Queue

import torch

PAUSE = 0.03  # seconds before each block, so that the kernel stands and waits for it


def fill_and_raise(rows: torch.Tensor, flags: torch.Tensor, rounds: Queue) -> None:
    """For each (what to fill in, epoch, order of blocks) from `rounds`, until None: block by block, then its flag."""
    while (task := rounds.get()) is not None:
        source, epoch, order = task
        fill_once(rows, flags, source, epoch, order)


def fill_once(rows: torch.Tensor, flags: torch.Tensor, source: torch.Tensor, epoch: int, order: Sequence[int]) -> None:
    height = len(rows) // len(flags)
    for block in order:
        time.sleep(PAUSE)
        rows[block * height :][:height] = source[block * height :][:height]
        flags[block] = epoch
