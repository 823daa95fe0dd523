"""Conversions in kernels between float32 and narrower dtypes, on the GPU and in Triton's interpreter.

The interpreter holds bfloat16 and 8-bit floats as raw integers. Arithmetic on these integers is meaningless. When the
interpreter converts them to float32, it loses subnormals or NaN. When it converts from float32, it truncates, but the
GPU rounds to nearest even. So in the interpreter, the functions of this module compute on the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hostir.kernels.devices import INTERPRETED

_ON_BITS = tl.constexpr(INTERPRETED)


@triton.jit
def to_float32(x):
    """Return `x` (any float type) as float32, exactly."""
    if _ON_BITS and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        return (bits << 16).to(tl.float32, bitcast=True)
    elif _ON_BITS and x.dtype == tl.float8e5:  # the upper half of a float16
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif _ON_BITS and x.dtype == tl.float8e4nv:
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint32)
        size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120  # exponents differ by 127 - 7
        size = tl.where((bits & 0x7F) == 0x7F, float("nan"), size)
        return tl.where(bits >= 0x80, -size, size)
    else:
        return x.to(tl.float32)


@triton.jit
def _from_float32_to_8_bits(x, MANTISSA: tl.constexpr):
    """Return the bits of `x` as an 8-bit float, rounded to nearest even. `x` is NaN, or in the range of that type."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    LEAST: tl.constexpr = 121 if MANTISSA == 3 else 113  # float32 exponent bits of the least normal number
    sign, bits = x.to(tl.uint32, bitcast=True) >> 31, x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    normal = ((bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED) - ((LEAST - 1) << MANTISSA)
    # After this addition the lowest bits hold the value as a multiple of the least subnormal number.
    size = bits.to(tl.float32, bitcast=True)
    subnormal = (size * 2.0 ** (127 - LEAST + MANTISSA) + 2.0**23).to(tl.uint32, bitcast=True) & 0xFF
    rounded = tl.where(bits < (LEAST << 23), subnormal, normal)
    rounded = tl.where(x == x, rounded, 0x7F)
    return (rounded | (sign << 7)).to(tl.uint8)


@triton.jit
def from_float32(x, dtype: tl.constexpr):
    """Return the float32 tensor `x` as `dtype`, rounded to nearest even."""
    if _ON_BITS and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # To round to nearest even, add just under half of the dropped part, and one more if the kept part is odd. This
        # could turn a NaN into an infinity, so NaN is handled separately.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif _ON_BITS and (dtype == tl.float8e4nv or dtype == tl.float8e5):
        return _from_float32_to_8_bits(x, 3 if dtype == tl.float8e4nv else 2).to(dtype, bitcast=True)
    else:
        return x.to(dtype)
