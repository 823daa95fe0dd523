"""Products of rows in groups by `torch._grouped_mm`, and checks of offsets of groups and of indices of rows."""

from __future__ import annotations

import functools

import torch

from hostir.ir.source import error

_BYTES = 16  # `torch._grouped_mm` takes addresses and strides that are multiples of this


def valid_offsets(offsets: torch.Tensor, rows: int) -> list[int]:
    """Return the offsets of groups as integers. The host waits for them.

    Raises HostIRError if they decrease, or lie outside `rows` rows, and while a CUDA graph is captured.
    """
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise error(
            "ATen's product of groups waits for their offsets, so no graph can be captured",
            hint="use Triton's kernels: kernels='triton' in Python, --kernels triton on the command line",
        )
    begins: list[int] = offsets.tolist()
    wrong = next((n for n, begin in enumerate(begins) if not (begins[n - 1] if n else 0) <= begin <= rows), None)
    if wrong is not None:
        place = f"after {begins[wrong - 1]}" if wrong else "at the beginning"
        raise error(
            f"offset {begins[wrong]} of group {wrong}, {place}, does not fit {rows} rows",
            expected=f"offsets that do not decrease, from 0 to {rows}",
        )
    return begins


def valid_index(index: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an index of rows as i64, so that torch's operators accept it.

    Raises HostIRError on a CPU if the index does not fit `rows` rows. On a GPU, where the host does not wait for the
    index, it is limited to the rows.
    """
    index = index.long()
    if not index.is_cpu:
        return index.clamp(0, max(rows - 1, 0))
    wrong = index[(index < 0) | (index >= rows)]
    if wrong.numel():
        raise error(f"index {wrong[0].item()} is not one of {rows} rows", expected=f"an index from 0 to {rows - 1}")
    return index


def takes_grouped(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if `torch._grouped_mm` takes the operands.

    They are `x[T, K]` and `w[E, K, N]` for a grouped matmul, or the transpose `x[K, T]` and `w[T, N]` for sums of outer
    products. It takes bf16 on Hopper, with one stride of 1 and other strides that are multiples of 16 bytes.
    """
    if not out.is_cuda or {out.dtype, x.dtype} != {torch.bfloat16} or not _hopper(out.device):
        return False
    if not out.numel() or not x.numel():
        return False
    for t in (x, w):
        step = t.stride(-2) if t.stride(-1) == 1 else t.stride(-1)
        places = [t.data_ptr(), *(s * t.element_size() for s in (step, *t.stride()[:-2]))]
        if 1 not in t.stride()[-2:] or any(place % _BYTES for place in places):
            return False
    return True


@functools.cache
def _hopper(device: torch.device) -> bool:
    return hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability(device) == (9, 0)


def grouped_by_library(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> None:
    """Compute a grouped matmul by `torch._grouped_mm`, without waiting for the offsets. Rows of no group become 0.

    `torch._grouped_mm` takes the end of each group, and leaves the rows after the last end undefined. Its first group
    begins at row 0. Offsets that decrease or exceed the rows are limited, so that nothing outside is accessed.
    """
    limited = _limited(offsets, len(x))
    row = torch.arange(len(x), dtype=torch.int32, device=x.device)
    idle = (row < limited[0]) | (row >= limited[-1])
    out.copy_(torch._grouped_mm(x, w, offs=limited[1:]).masked_fill_(idle[:, None], 0))


def outer_by_library(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> None:
    """Compute a grouped outer product by `torch._grouped_mm`, without waiting for the offsets.

    The rows before the first group are a group of their own, because the first group of `torch._grouped_mm` begins at
    row 0. Its sum is dropped.
    """
    out.copy_(torch._grouped_mm(x.t(), y, offs=_limited(offsets, len(x)))[1:])


def _limited(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the offsets as i32, limited so that they do not decrease and fit the rows."""
    return offsets.clamp(0, rows).cummax(0).values.to(torch.int32)
