"""Keep the plans that CUDA graphs of the caller use, for as long as the graphs exist, and free memory between captures.

A graph holds addresses of memory that its plan owns. The caller may drop the executor and keep the graph, and only CUDA
knows when the graph is gone. So each captured call creates a *user object* of CUDA, which belongs to the graph and to
everything that is made from it. When the last of these is destroyed, and has finished running, CUDA calls a function
for the user object. This function is `sem_post` of the C library, because Python must not run on the threads of CUDA.
See the chapter on graph management of the CUDA driver API, cuGraphRetainUserObject.

To free symmetric memory, torch waits for the device. While a stream captures, CUDA refuses this, and torch ends the
process. But Python may collect garbage at any time. So memory whose owner is gone waits in `LATE` for a call on a
stream that does not capture, while hostir captures nothing on another thread. A capture that the caller makes on
another thread is not noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hostir.machines.cuda.driver import capture_of, check, cuda_driver

NO_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, which is mandatory
MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE: the graph takes over the only reference
SEMAPHORE = 64  # bytes, at least the size of the C type sem_t
LATE: list[Any] = []  # memory whose owner is gone
CAPTURES: list[object] = []  # hostir's own captures that go on now, on any thread
_uses: dict[tuple[int, int], tuple[int, Any]] = {}  # semaphore and plan of each use, by capture and address of the plan
_changing = threading.RLock()  # held while `_uses` changes: threads of several teams make plans at the same time


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc


def hold(plan: Any, stream: torch.cuda.Stream) -> None:
    """Keep a plan until the graph is destroyed that a stream captures now, and everything that is made from it."""
    capture, graph = capture_of(stream)
    if (capture, id(plan)) in _uses:
        return
    libc, user_object = _libc(), ctypes.c_void_p()
    ended = libc.malloc(SEMAPHORE)  # no memory of Python: CUDA may call `sem_post` when the process has ended Python
    libc.sem_init(ctypes.c_void_p(ended), 0, 0)
    post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
    create = cuda_driver().cuUserObjectCreate
    check(create(ctypes.byref(user_object), ctypes.c_void_p(ended), post, 1, NO_SYNC), "a captured graph")
    check(cuda_driver().cuGraphRetainUserObject(ctypes.c_void_p(graph), user_object, 1, MOVE), "a captured graph")
    with _changing:
        _uses[capture, id(plan)] = ended, plan


@contextlib.contextmanager
def capturing(graph: object) -> Iterator[None]:
    """Within this context hostir captures work, and no thread frees memory. `graph` stands for the capture."""
    CAPTURES.append(graph)
    try:
        yield
    finally:
        CAPTURES.remove(graph)


def free_late(owner: object, memory: Any) -> None:
    """Let `memory` live until `owner` is gone, and then until a call that is not captured."""
    weakref.finalize(owner, LATE.append, memory).atexit = False


def release() -> None:
    """Forget the plans whose graphs are gone, and free memory. Must not be called while this thread captures."""
    with _changing:
        for use, (ended, plan) in list(_uses.items()):
            if _libc().sem_trywait(ctypes.c_void_p(ended)) == 0:
                _libc().free(ended)
                del _uses[use]
                if plan.memory is not None and not any(other is plan for _, other in _uses.values()):
                    plan.memory.captured.discard(plan)
        plan = None
    if not CAPTURES:
        LATE.clear()
