"""Memory in which the programs of one launch meet: sums of parts, and a ticket for each tile that is split."""

from __future__ import annotations

import threading

import torch

_CAPTURED_TICKETS = 1 << 18  # for all graphs of a device; a launch takes about as many as there are multiprocessors
_LINE = 32  # tickets of a line of cache: the first of a launch lies on a boundary, as Triton compiled for

_lock = threading.Lock()
_by_stream: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
_for_graphs: dict[torch.device, list[torch.Tensor]] = {}


def workspace(device: torch.device, stream: int, sums: int, tickets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`sums` of float32 and `tickets` of int32, all 0, for one launch on the current stream, which leaves tickets at 0.

    `stream` is the handle of the current stream, 0 on a CPU.

    Launches on one stream follow each other, so they share memory, which is kept. A captured launch may be replayed on
    any stream, beside any other: its sums come from the memory of its graph, and its tickets belong to it for ever.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _sums(device, sums), _captured(device, tickets)
    key = device, stream
    found = _by_stream.get(key)
    if found is not None and len(found[0]) >= sums and len(found[1]) >= tickets:
        return found
    with _lock:
        if device.type == "cuda" and device not in _for_graphs:
            _for_graphs[device] = [torch.zeros(_CAPTURED_TICKETS, dtype=torch.int32, device=device)]
            torch.cuda.current_stream(device).synchronize()
        if found is not None:
            sums, tickets = max(sums, len(found[0])), max(tickets, len(found[1]))
        made = _sums(device, sums), torch.zeros(tickets, dtype=torch.int32, device=device)
        _by_stream[key] = made
    return made


def _sums(device: torch.device, sums: int) -> torch.Tensor:
    return torch.empty(sums, dtype=torch.float32, device=device)


def _captured(device: torch.device, tickets: int) -> torch.Tensor:
    """Tickets that no other launch uses. Without any left, or before the first launch, the graph zeroes its own."""
    tickets = -(-tickets // _LINE) * _LINE
    with _lock:
        left = _for_graphs.get(device)
        if left is None or len(left[0]) < tickets:
            return torch.zeros(tickets, dtype=torch.int32, device=device)
        taken, left[0] = left[0][:tickets], left[0][tickets:]
    return taken
