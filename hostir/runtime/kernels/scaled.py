"""Products of 8-bit floats with scales: what they are, and the kernels of Triton and of torch that compute them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from hostir.runtime.kernels.layout import rows_or_copy
from hostir.runtime.kernels.tiles import SCALE_BLOCK as BLOCK

if TYPE_CHECKING:
    from hostir.runtime.kernels.flags import DoneFlags, ReadyFlags
    from hostir.runtime.kernels.table import Again
    from hostir.runtime.kernels.tiles import Tile

# Scales ---------------------------------------------------------------------------------------------------------------
# The scales of a product: for whole tensors, for rows of a and columns of b, or for blocks.

ScalePair = tuple[torch.Tensor, torch.Tensor]


class FlatScales(NamedTuple):
    """The scales of 8-bit operands as `flat_scales` returns them, and whether sums are fast, as of `scaled_matmul`."""

    of_a: torch.Tensor
    of_b: torch.Tensor
    fast: bool


def flat_scales(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> ScalePair:
    """Return the scales of `a` `[..., K]` as `[rows, S]`, and those of `b` `[K, N]`: `[1, N]`, or of blocks.

    They are views if the rows of `scale_a` have a single stride. S is 1, or the number of blocks.

    Raises TypeError unless they are float32, ValueError if their shapes do not fit.
    """
    if {scale_a.dtype, scale_b.dtype} != {torch.float32}:
        raise TypeError(f"expected scales of float32, got scale_a of {scale_a.dtype}, scale_b of {scale_b.dtype}")
    (*leading, K), N = a.shape, b.shape[1]
    count, blocks = a.shape[:-1].numel(), (K // BLOCK, -(-N // BLOCK))
    of_all, of_rows = (scale_a.numel() == 1, scale_b.numel() == 1), [*scale_a.shape] == [*leading, 1]
    if (of_all[0] or of_rows) and (of_all[1] or [*scale_b.shape] == [1, N]):
        flat = scale_a.reshape(1, 1) if of_all[0] else rows_or_copy(scale_a)
        return flat.expand(count, 1), scale_b.reshape(1, -1).expand(1, N)
    if K % BLOCK == 0 and ([*scale_a.shape], *scale_b.shape) == ([*leading, blocks[0]], *blocks):
        return rows_or_copy(scale_a), scale_b
    block_wise = f", or {[*leading, blocks[0]]} and {[*blocks]} (block-wise)" if K % BLOCK == 0 else ""
    raise ValueError(
        f"a {[*a.shape]} and b {[*b.shape]} have scales of one element (tensor-wise), {[*leading, 1]} and {[1, N]} "
        f"(row-wise){block_wise}; got {[*scale_a.shape]} and {[*scale_b.shape]}"
    )


def of_blocks(scales: ScalePair | FlatScales, N: int) -> bool:
    """Whether scales that `flat_scales` returned are those of blocks, for `N` columns."""
    return (scales[0].shape[1], *scales[1].shape) != (1, 1, N)


def scaled_matmul_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `a` `[..., K]` times `b` `[K, N]`, with scales and a bias, computed in float64, rounded once to `dtype`.

    Sums are multiplied by their scales, as kernels do it: a zero sum with an infinite scale is NaN.
    """
    of_a, of_b = flat_scales(a, b, scale_a, scale_b)
    flat, N = a.reshape(-1, a.shape[-1]), b.shape[1]
    if not of_blocks((of_a, of_b), N):
        total = (flat.double() @ b.double()) * of_a.double() * of_b.double()
    else:
        total = torch.zeros(len(flat), N, dtype=torch.float64, device=a.device)
        for block, columns in enumerate(of_b.double().repeat_interleave(BLOCK, 1)[:, :N]):
            k = slice(block * BLOCK, (block + 1) * BLOCK)
            total += (flat[:, k].double() @ b[k].double()) * (of_a[:, block, None].double() * columns)
    return (total if bias is None else total + bias.double()).to(dtype).view(*a.shape[:-1], N)


# In Triton ------------------------------------------------------------------------------------------------------------


def scaled_matmul(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast: bool = False,
    ready: ReadyFlags | None = None,
    done: DoneFlags | None = None,
    own: torch.Tensor | None = None,
    use_descriptors: bool | None = None,
    tile: Tile | None = None,
) -> Again | None:
    """Compute `out[..., n] = sum over k of (scale_a * a[..., k]) * (scale_b * b[k, n]) (+ bias[n])` in Triton.

    Args:
        out: `[..., N]` of bfloat16, float16 or float32, rounded once.
        a: `[..., K]` of float8_e4m3fn or float8_e5m2.
        b: `[K, N]` of either type too. Tensor cores read 8-bit operands along K: where `b` is not contiguous along K,
            each call copies it.
        scale_a: float32: one element, or the axes of `a` with 1 (row-wise) or `K / 128` (block-wise) as the last one.
            With flags of `ready` the scales of rows are read behind these, and those of `own` rows are among them.
        scale_b: float32: one element, `[1, N]`, or block-wise `[K / 128, N / 128]`, the latter rounded up.
        bias: `[N]` of any type that `out` may have, added before rounding.
        fast: let tensor cores add up the products all along K. On Hopper they keep fewer bits of a sum than float32
            has. Else, and always block-wise, they add up those of 128 elements, and the sums are added in float32.
        ready, done, own, use_descriptors, tile: as in `hostir.runtime.kernels.matmul.matmul`. Block-wise, the columns
            and steps of the tile must divide 128.

    Returns what `hostir.runtime.kernels.matmul.multiply` does. Raises TypeError and ValueError as `matmul` does, and
    for scales that do not fit, or a GPU without tensor cores for 8-bit floats.
    """
    from hostir.runtime.kernels.matmul import multiply  # loads Triton: only where it is used

    along_k, scales, copied = readable(a, b, scale_a, scale_b)
    again = multiply(
        *(a, along_k, out),
        bias=bias,
        ready=ready,
        done=done,
        own=own,
        use_descriptors=use_descriptors,
        tile=tile,
        scales=FlatScales(*scales, fast),
    )
    return None if copied else again


def readable(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[torch.Tensor, ScalePair, bool]:
    """Return `b` with a stride of 1 along K, the scales as `flat_scales` does, and whether any of these is a copy."""
    along_k = b if b.stride(0) == 1 or b.shape[0] == 1 else b.t().contiguous().t()
    scales = flat_scales(a, b, scale_a, scale_b)
    return along_k, scales, along_k is not b or scales[0].data_ptr() != scale_a.data_ptr()


# In torch -------------------------------------------------------------------------------------------------------------
# torch._scaled_mm: cuBLAS, or CUTLASS for scales of rows.

_QUANTUM = 16  # elements that K and N are multiples of


@functools.cache
def _takes_blocks(device: torch.device) -> bool:
    """Whether cuBLAS has scales of blocks on a GPU: only on Hopper, from CUDA 12.9 on."""
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
    """Compute as `scaled_matmul` by `torch._scaled_mm` on a GPU, and return whether it does so.

    It does for operands that it takes without copies of more than scales; else nothing is written.
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


def _scales_of_library(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
) -> ScalePair | None:
    """Return the scales as `torch._scaled_mm` reads them; None if it has no product with these and the bias."""
    of_bias = out.dtype if bias is None else bias.dtype
    if scale_a.numel() == scale_b.numel() == 1:
        takes = bias is None or of_bias == out.dtype in (torch.bfloat16, torch.float16)
        return (scale_a.reshape(()), scale_b.reshape(())) if takes else None
    if {out.dtype, of_bias} != {torch.bfloat16}:
        return None
    K, N = b.shape
    of_a, of_b = scales = flat_scales(a, b, scale_a, scale_b)
    if not of_blocks(scales, N):
        return of_a.contiguous(), of_b.contiguous()
    # cuBLAS reads scales of blocks by columns, four at once, along the rows of a and along K.
    fours = len(of_a) % 4 == 0 and K % (4 * BLOCK) == 0 and N % BLOCK == 0
    if not fours or bias is not None or not _takes_blocks(out.device):
        return None
    return of_a.t().contiguous().t(), of_b.t().contiguous().t()
