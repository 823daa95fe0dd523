"""A process that fills rows and raises their flags while a kernel waits. Needs neither Triton nor torch."""

from __future__ import annotations

import time
from ctypes import Array
from multiprocessing.queues import Queue
from typing import Any

import numpy as np

PAUSE = 0.03  # seconds before each block, so that the kernel has to wait


def fill_and_raise(rows: Array[Any], flags: Array[Any], rounds: Queue[Any]) -> None:
    """For each (values, epoch, order of blocks) from `rounds`, until None: fill each block, then raise its flag.

    `rows`: blocks of float32, one after another; one block for each of `flags`.
    """
    blocks = np.frombuffer(rows, np.float32).reshape(len(flags), -1)
    while (task := rounds.get()) is not None:
        source, epoch, order = task
        for block in order:
            time.sleep(PAUSE)
            blocks[block] = source.reshape(blocks.shape)[block]
            flags[block] = epoch
