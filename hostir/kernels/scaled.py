"""The scaled matmul of 8-bit floats in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hostir.kernels.scales import FlatScales, ScalePair, flat_scales

if TYPE_CHECKING:
    from hostir.kernels.flags.done import DoneFlags
    from hostir.kernels.flags.ready import ReadyFlags
    from hostir.kernels.matmul.tiles import Tile
    from hostir.kernels.repeats import Again


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
    own_rows: torch.Tensor | None = None,
    use_descriptors: bool | None = None,
    tile: Tile | None = None,
) -> Again | None:
    """Compute `out[..., n] = sum over k of (scale_a * a[..., k]) * (scale_b * b[k, n]) (+ bias[n])` in Triton.

    Args:
        out: `[..., N]` of bfloat16, float16 or float32, rounded once.
        a: `[..., K]` of float8_e4m3fn or float8_e5m2.
        b: `[K, N]` of float8_e4m3fn or float8_e5m2. Tensor cores read 8-bit operands along K. If `b` is not contiguous
            along K, each call copies it.
        scale_a: float32, either with one element, or with the shape of `a` in which 1 (row-wise) or `K / 128`
            (block-wise) replaces K. With `ready`, the kernel reads the scales of a row after it has waited for the row.
            `scale_a` also holds the scales of `own_rows`.
        scale_b: float32, either with one element, or with the shape `[1, N]` (row-wise) or `[K / 128, N / 128]`
            (block-wise), where `N / 128` is rounded up.
        bias: `[N]` of any type that `out` may have, added before rounding.
        fast: True to let tensor cores add up all products along K. On Hopper, sums in tensor cores have fewer bits than
            float32. If `fast` is False or scales are block-wise, tensor cores add up 128 products at a time, and these
            sums are added in float32.
        ready, done, own_rows, use_descriptors, tile: as in `hostir.kernels.matmul.matmul.matmul`. With block-wise
            scales, `n` and `k` of the tile must divide 128.

    Returns the same as `hostir.kernels.matmul.matmul.multiply`. Raises TypeError and ValueError as `matmul` does, and
    for scales that do not fit, or a GPU without tensor cores for 8-bit floats.
    """
    from hostir.kernels.matmul.matmul import multiply  # loads Triton: only where it is used

    along_k, scales, copied = readable(a, b, scale_a, scale_b)
    again = multiply(
        *(a, along_k, out),
        bias=bias,
        ready=ready,
        done=done,
        own_rows=own_rows,
        use_descriptors=use_descriptors,
        tile=tile,
        scales=FlatScales(*scales, fast),
    )
    return None if copied else again


def readable(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[torch.Tensor, ScalePair, bool]:
    """Return operands that the kernel can read: `b` with a stride of 1 along K, and the scales from `flat_scales`.

    The last result is True if `b` or the scales of `a` were copied.
    """
    along_k = b if b.stride(0) == 1 or b.shape[0] == 1 else b.t().contiguous().t()
    scales = flat_scales(a, b, scale_a, scale_b)
    return along_k, scales, along_k is not b or scales[0].data_ptr() != scale_a.data_ptr()
