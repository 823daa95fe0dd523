"""Allocate memory that outlives a call outside the caller's memory pools."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def outside_pools(device: torch.device, work: Callable[[], T]) -> T:
    """Do work in a new thread and return its result, so that the caller's memory pools hold none of its tensors.

    A caller may have made a memory pool current for its thread: CUDA graph trees do this in the warm-up run of
    `torch.compile(mode="reduce-overhead")`, and free the pool after it. Tensors that an executor keeps must not be in
    this pool. The work runs on the caller's current stream.
    """
    stream, context = torch.cuda.current_stream(device), contextvars.copy_context()
    inference, results, problems = torch.is_inference_mode_enabled(), list[T](), list[BaseException]()

    def run() -> None:
        try:
            with torch.cuda.stream(stream), torch.inference_mode(inference), torch.no_grad():
                results.append(context.run(work))
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="hostir plans")
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
