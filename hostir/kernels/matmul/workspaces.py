"""Workspaces: memory that the programs of one launch share. Each stream and each captured launch has a workspace.

A workspace holds the sums of split tiles, a ticket (a counter) for each split tile, and a count for each block of rows
that has a completion flag.
"""

from __future__ import annotations

import threading

import torch

from hostir.kernels.parameters import TAPING
from hostir.kernels.pools import outside_pools

_CAPTURED_TICKETS = 1 << 18  # the reserve for all graphs of a device; a launch takes about one ticket per SM
LINE = 32  # tickets per cache line. A launch's tickets begin at a line: the kernel is compiled for that alignment.

_lock = threading.Lock()
_by_stream: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
_for_graphs: dict[torch.device, list[torch.Tensor]] = {}


def workspace(device: torch.device, stream: int, sums: int, tickets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for one launch on the current stream: `sums` of float32, and `tickets` of int32 that are 0.

    `stream` is the handle of the current stream, 0 on a CPU. The launch leaves its tickets at 0.

    Launches on one stream run in order, so all of them share one workspace, which is kept. A captured launch may be
    replayed on any stream, in parallel with any other launch. So its sums come from the memory pool of its graph, and
    no other launch ever gets its tickets.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _sums(device, sums), _captured(device, tickets)
    key = device, stream
    held = _by_stream.get(key)
    if held is not None and len(held[0]) >= sums and len(held[1]) >= tickets:
        TAPING.keep(*held)
        return held
    with _lock:
        if held is not None:
            # Powers of 2, so that sizes which grow from call to call seldom need new memory.
            sums, tickets = (
                max(len(buffer), 1 << (n - 1).bit_length()) for n, buffer in zip((sums, tickets), held, strict=True)
            )
        buffers = _by_stream[key] = outside_pools(device, lambda: _kept(device, sums, tickets))
    TAPING.keep(*buffers)
    return buffers


def _kept(device: torch.device, sums: int, tickets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate a workspace. On CUDA, the first workspace of a device also allocates the reserve for graphs."""
    if device.type == "cuda" and device not in _for_graphs:
        _for_graphs[device] = [torch.zeros(_CAPTURED_TICKETS, dtype=torch.int32, device=device)]
        torch.cuda.current_stream(device).synchronize()
    return _sums(device, sums), torch.zeros(tickets, dtype=torch.int32, device=device)


def _sums(device: torch.device, sums: int) -> torch.Tensor:
    """Return uninitialized memory for `sums` elements of float32."""
    return torch.empty(sums, dtype=torch.float32, device=device)


def _captured(device: torch.device, tickets: int) -> torch.Tensor:
    """Return tickets that no other launch uses. They come from a reserve.

    If the reserve does not suffice, the graph that is being captured allocates and zeroes them.
    """
    tickets = -(-tickets // LINE) * LINE
    with _lock:
        left = _for_graphs.get(device)
        if left is None or len(left[0]) < tickets:
            return torch.zeros(tickets, dtype=torch.int32, device=device)
        taken, left[0] = left[0][:tickets], left[0][tickets:]
    return taken
