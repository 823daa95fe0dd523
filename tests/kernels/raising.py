"""What another process does while a kernel waits: fill rows and raise their flags. It needs no Triton and no torch."""

from __future__ import annotations

import time
from ctypes import Array
from multiprocessing.queues import Queue
from typing import Any

import numpy as np

PAUSE = 0.03  # seconds before each block, so that the kernel stands and waits for it


def fill_and_raise(rows: Array[Any], flags: Array[Any], rounds: Queue[Any]) -> None:
    """For each (what to fill in, epoch, order of blocks) from `rounds`, until None: block by block, then its flag.

    `rows`: blocks of float32 one behind the other, a block for each of `flags`.
    """
    blocks = np.frombuffer(rows, np.float32).reshape(len(flags), -1)
    while (task := rounds.get()) is not None:
        source, epoch, order = task
        for block in order:
            time.sleep(PAUSE)
            blocks[block] = source.reshape(blocks.shape)[block]
            flags[block] = epoch
