"""The torch dtypes of hostir's element types."""

from __future__ import annotations

import torch

from hostir.ir.types import FLAG, DType

FLOATS = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TORCH = {**FLOATS, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, FLAG.name: torch.int64}

# Integer dtypes by their size in bytes.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype for an element type."""
    return TORCH[dtype.name]
