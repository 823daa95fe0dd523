"""Allocate memory that outlives a call outside the caller's memory pools.

A caller may have made a memory pool current for its thread. CUDA graph trees do this in the warm-up run of
`torch.compile(mode="reduce-overhead")`. When the run ends, only its outputs may be in the pool.
`torch.cuda.use_mem_pool` makes a pool current in the same way. From torch 2.8 on, such a pool serves one thread. So
another thread allocates outside it.

The pool of a CUDA graph capture serves a stream, not a thread. So nothing that outlives a capture may be allocated in
it: an executor makes no plan in a capture, and a captured kernel takes its workspace from the graph's own pool.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def outside_pools(device: torch.device, work: Callable[[], T]) -> T:
    """Do work in a new thread and return its result. The tensors that it allocates are outside the caller's pools.

    The work runs on the caller's current stream. On a CPU there are no pools, and the work runs in this thread.
    """
    if device.type != "cuda":
        return work()
    stream, context = torch.cuda.current_stream(device), contextvars.copy_context()
    inference, results, problems = torch.is_inference_mode_enabled(), list[T](), list[BaseException]()

    def run() -> None:
        try:
            with torch.cuda.stream(stream), torch.inference_mode(inference), torch.no_grad():
                results.append(context.run(work))
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="hostir outside pools")
    thread.start()
    _join(thread)
    if problems:
        raise problems[0]
    return results[0]


def _join(thread: threading.Thread) -> None:
    """Wait for the end of a thread. Raise an exception of a signal handler only after this."""
    try:
        thread.join()
    except BaseException:
        thread.join()
        raise
