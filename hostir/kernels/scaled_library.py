"""Scaled matmuls by torch._scaled_mm, which calls cuBLAS, or CUTLASS for row-wise scales."""

from __future__ import annotations

import functools

import torch

from hostir.kernels.layout import rows_or_copy
from hostir.kernels.matmul.tiles import SCALE_BLOCK as BLOCK
from hostir.kernels.scales import ScalePair, flat_scales, of_blocks

_QUANTUM = 16  # K and N must be multiples of it


@functools.cache
def _takes_blocks(device: torch.device) -> bool:
    """Return True if cuBLAS takes block-wise scales on a GPU. It does so only on Hopper, since CUDA 12.9."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def scaled_by_library(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast: bool = False,
) -> bool:
    """Compute `scaled_matmul` by `torch._scaled_mm` and return True; or return False and write nothing.

    Returns False on a CPU, if `torch._scaled_mm` does not support the operands, and if it would need a copy of an
    operand or of the result.
    """
    K, N = a.shape[-1], b.shape[1]
    if not out.is_cuda or out.numel() == 0 or K == 0 or K % _QUANTUM or N % _QUANTUM:
        return False
    if b.stride(0) != 1 or a.stride(-1) != 1 or a.dtype == b.dtype == torch.float8_e5m2:
        return False
    flat_a, flat_out = rows_or_copy(a), rows_or_copy(out)
    if flat_a.data_ptr() != a.data_ptr() or flat_out.data_ptr() != out.data_ptr() or out.stride(-1) != 1:
        return False
    strides = (flat_a.stride(0), b.stride(1), flat_out.stride(0) * out.element_size())
    if any(stride % 16 for stride in strides) or any(t.data_ptr() % 16 for t in (a, b, out)):
        return False
    scales = _scales_of_library(out, a, b, scale_a, scale_b, bias)
    if scales is None:
        return False
    added = None if bias is None else bias.contiguous()
    torch._scaled_mm(flat_a, b, *scales, added, out_dtype=out.dtype, use_fast_accum=fast, out=flat_out)
    return True


def _aligned(scales: torch.Tensor) -> torch.Tensor:
    """Return scales that are contiguous, and begin where `torch._scaled_mm` can read 16 bytes at once."""
    dense = scales.contiguous()
    return dense.clone() if dense.data_ptr() % 16 else dense


def _scales_of_library(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
) -> ScalePair | None:
    """Return the scales in the layouts that `torch._scaled_mm` reads.

    Returns None if `torch._scaled_mm` does not support these scales, or does not support them together with this bias.
    """
    of_bias = out.dtype if bias is None else bias.dtype
    if scale_a.numel() == scale_b.numel() == 1:
        takes = bias is None or of_bias == out.dtype in (torch.bfloat16, torch.float16)
        return (scale_a.reshape(()), scale_b.reshape(())) if takes else None
    if {out.dtype, of_bias} != {torch.bfloat16}:
        return None
    K, N = b.shape
    of_a, of_b = scales = flat_scales(a, b, scale_a, scale_b)
    if not of_blocks(scales, N):
        return _aligned(of_a), _aligned(of_b)
    # cuBLAS reads block-wise scales by columns, four at a time, along the rows of a and along K.
    fours = len(of_a) % 4 == 0 and K % (4 * BLOCK) == 0 and N % BLOCK == 0
    if not fours or bias is not None or not _takes_blocks(out.device):
        return None
    return of_a.t().contiguous().t(), of_b.t().contiguous().t()
