"""Products of rows in groups by `torch._grouped_mm`, and checks of the offsets of groups."""

from __future__ import annotations

import functools

import torch

from hostir.ir.source import error

_BYTES = 16  # `torch._grouped_mm` takes addresses and strides that are multiples of this


def valid_offsets(offsets: torch.Tensor, rows: int) -> list[int]:
    """Return the offsets of groups as integers. The host waits for them.

    Raises HostIRError if they decrease, or lie outside `rows` rows.
    """
    begins: list[int] = offsets.tolist()
    wrong = next((n for n, begin in enumerate(begins) if not (begins[n - 1] if n else 0) <= begin <= rows), None)
    if wrong is not None:
        place = f"after {begins[wrong - 1]}" if wrong else "at the beginning"
        raise error(
            f"offset {begins[wrong]} of group {wrong}, {place}, does not fit {rows} rows",
            expected=f"offsets that do not decrease, from 0 to {rows}",
        )
    return begins


def takes_grouped(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if `torch._grouped_mm` computes `out[T, N]` from `x[T, K]` and `w[E, K, N]` on the device."""
    if not out.is_cuda or out.dtype != torch.bfloat16 or not out.numel() or not x.numel() or not _hopper(out.device):
        return False
    columns = w.stride(2) == 1 or w.stride(1) == 1
    steps = [w.stride(0), w.stride(1) if w.stride(2) == 1 else w.stride(2), x.stride(0)]
    places = [x.data_ptr(), w.data_ptr(), *(step * x.element_size() for step in steps)]
    return columns and x.stride(1) == 1 and all(place % _BYTES == 0 for place in places)


@functools.cache
def _hopper(device: torch.device) -> bool:
    return hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability(device) == (9, 0)


def grouped_by_library(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> None:
    """Compute a grouped matmul by `torch._grouped_mm`, without waiting for the offsets. Rows of no group become 0.

    `torch._grouped_mm` takes the end of each group, and leaves the rows after the last end undefined. Its first group
    begins at row 0. Offsets that decrease or exceed the rows are limited, so that nothing outside is accessed.
    """
    limited = offsets.clamp(0, len(x)).cummax(0).values.to(torch.int32)
    row = torch.arange(len(x), dtype=torch.int32, device=x.device)
    idle = (row < limited[0]) | (row >= limited[-1])
    out.copy_(torch._grouped_mm(x, w, offs=limited[1:]).masked_fill_(idle[:, None], 0))
