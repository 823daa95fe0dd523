"""Conversions between float32 and the types of operands, right on the GPU and in Triton's interpreter.

The interpreter holds bfloat16 as raw 16-bit integers: arithmetic on it is meaningless, widening loses subnormals and
narrowing truncates where the GPU rounds to nearest even. There the conversions are done on the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hostir.runtime.kernels.launch import INTERPRETED

_ON_BITS = tl.constexpr(INTERPRETED)


@triton.jit
def to_float32(x):
    """`x` (any float type) as float32, exactly."""
    if _ON_BITS and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def from_float32(x, dtype: tl.constexpr):
    """The float32 tensor `x` as `dtype`, rounded to nearest even."""
    if _ON_BITS and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # Adding just under half of the dropped part, and one more when the kept part is odd, rounds to nearest even;
        # a NaN could overflow into an infinity, so it is set apart.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)
