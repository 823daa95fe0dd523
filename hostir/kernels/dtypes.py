"""The torch dtypes of hostir's element types."""

from __future__ import annotations

import torch

from hostir.ir.types import FLAG, DType

FLOATS = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = {"i32": torch.int32, "i64": torch.int64}
FP8 = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
TORCH = {**FLOATS, **FP8, **INTEGERS, FLAG.name: torch.int64}

# Integer dtypes by their size in bytes.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype for an element type."""
    return TORCH[dtype.name]


def undefined(dtype: torch.dtype) -> float:
    """Return the content of undefined memory: NaN, or -1 for integers, which is no valid index.

    Its bytes are all 0xFF, also in fp8.
    """
    return float("nan") if dtype.is_floating_point else -1


def in_floats(dtype: torch.dtype, floats: torch.dtype | None) -> torch.dtype:
    """Return the dtype with which a tensor is computed if `floats` replaces all dtypes of floating-point numbers.

    If `floats` is None, no dtype is replaced.
    """
    return dtype if floats is None or not dtype.is_floating_point else floats
