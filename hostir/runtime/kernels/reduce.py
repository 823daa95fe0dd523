"""Sums over one axis, as needed after the alltoall of a reduce-scatter."""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from hostir.runtime.kernels.layout import check_device, collapse, launching
from hostir.runtime.kernels.matmul_kernel import from_float32, to_float32

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Bytes that one program loads at a time: 8 loads of 16 bytes in flight in each of 128 threads.
_TILE = 16 << 10


@triton.jit
def _reduce_sum_kernel(
    x, out, P, Q, R, x_p, x_q, x_r, out_p, out_q, BQ: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr
):
    """`out[p, q] = sum over r of x[p, q, r]`; one program sums `BQ` outputs of one `p`, in float64 if `WIDE`."""
    tiles = tl.cdiv(Q, BQ)
    program = tl.program_id(0).to(tl.int64)
    p = program // tiles
    q = (program % tiles * BQ + tl.arange(0, BQ))[None, :]
    r = tl.arange(0, BR).to(tl.int64)[:, None]
    x += p * x_p
    acc = tl.zeros((BR, BQ), dtype=tl.float64 if WIDE else tl.float32)
    for start in range(0, R, BR):
        values = tl.load(x + q * x_q + (start + r) * x_r, mask=(q < Q) & (start + r < R), other=0.0)
        acc += to_float32(values).to(acc.dtype)
    total = tl.sum(acc, axis=0)[None, :].to(tl.float32)
    tl.store(out + p * out_p + q * out_q, from_float32(total, out.dtype.element_ty), mask=q < Q)


def reduce_sum(x: torch.Tensor, out: torch.Tensor, axis: int) -> torch.Tensor:
    """Compute `out = x.sum(axis)` on the current stream; return `out`.

    Accumulates in float32, and float32 inputs in float64: a plain loop in float32 would be less accurate than torch's
    cascade. The sum is bound by memory bandwidth, so this costs no time.

    Args:
        x: any shape and strides; bfloat16, float16 or float32.
        out: the shape of `x` without `axis`, any strides, overwritten; bfloat16, float16 or float32, not necessarily
            the dtype of `x`. It must overlap neither itself nor `x`.
        axis: the axis summed over, counted from the end when negative. An axis of size 0 gives zeros.

    The order of summation depends on shapes and strides alone, so results repeat bit for bit.
    Raises TypeError for a dtype, ValueError for a shape, an axis or a device that does not fit.
    """
    device = check_device(x=x, out=out)
    if x.dtype not in DTYPES or out.dtype not in DTYPES:
        raise TypeError(f"reduce_sum expects {', '.join(map(str, DTYPES))}; got x {x.dtype}, out {out.dtype}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"reduce_sum expects an axis of shape {list(x.shape)}, got axis {axis}")
    axis %= x.ndim
    kept = [*x.shape[:axis], *x.shape[axis + 1 :]]
    if list(out.shape) != kept:
        raise ValueError(f"the sum of {list(x.shape)} over axis {axis} has shape {kept}, but out {list(out.shape)}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out overlaps itself: shape {list(out.shape)}, strides {list(out.stride())}")
    if x.numel() == 0:
        return out.zero_()

    R, x_r = x.shape[axis], x.stride(axis)
    levels = collapse(kept, [*x.stride()[:axis], *x.stride()[axis + 1 :]], out.stride())
    *outer, (P, x_p, out_p), (Q, x_q, out_q) = [(1, 0, 0)] * max(0, 2 - len(levels)) + levels
    along = x_r < x_q  # whether the summed axis has the smaller stride
    tile = _TILE // x.element_size()
    BR = min(triton.next_power_of_2(R), 1024 if along else 8)
    BQ = min(triton.next_power_of_2(Q), tile // BR)
    with launching(device):
        # The kernel takes two kept axes, rarely too few; each position along further ones is a launch.
        for position in itertools.product(*(range(size) for size, _, _ in outer)):
            x_at = sum(i * step for i, (_, step, _) in zip(position, outer, strict=True))
            out_at = sum(i * step for i, (_, _, step) in zip(position, outer, strict=True))
            _reduce_sum_kernel[(P * -(-Q // BQ),)](
                x.as_strided((1,), (1,), x.storage_offset() + x_at),
                out.as_strided((1,), (1,), out.storage_offset() + out_at),
                *(P, Q, R, x_p, x_q, x_r, out_p, out_q),
                BQ=BQ,
                BR=BR,
                WIDE=x.dtype == torch.float32,
            )
    return out


def reduce_sum_reference(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the sum over `axis`, computed in float64: the reference for `reduce_sum`."""
    return x.double().sum(axis)
