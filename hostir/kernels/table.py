"""Tables of kernels by kind of computation, for each policy and device.

The kernel of each kind of computation, by policy and device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from hostir.ir.source import did_you_mean, error
from hostir.kernels import aten

if TYPE_CHECKING:
    pass
from hostir.kernels.contractions import (
    BY_BLOCKS,
    BY_ROWS,
    PUSHED,
    scaled_matmul_of_either,
    sum_by_blocks,
    sum_of_few,
    triton_kernels,
)
from hostir.kernels.repeats import Kernel

POLICIES = ("auto", "triton", "cublas", "aten")


def kernel_table(policy: str, device_type: str) -> Mapping[str, Kernel]:
    """Return a kernel for each kind of computation: `table[kind](out, *operands, **options)`, options as in statements.

    `policy` is one of

    - `aten`;
    - `cublas`: contractions by cuBLAS; sums in Triton, where that is installed; the rest in ATen;
    - `triton`: contractions and sums in Triton, the rest in ATen;
    - `auto`: what suits the device, `cpu` or `cuda`.

    Products of fp8 that ATen lacks on `cuda` are Triton's with all of them, if it is installed.
    Raises HostIRError for an unknown policy, and if Triton cannot run on the device.

    Results in f64 need those of `kernels_for`. Kernels in `REPEATABLE` may return a function that repeats the call, see
    `repeating`.

    With `triton`, and with `auto` and `cublas` on `cuda` if Triton is installed, sums of few tensors are in Triton, and
    `sum_by_blocks` waits for flags of blocks of rows, or raises them, by itself. With `triton` and `auto` so do
    `matmul_by_blocks`, `linear_by_blocks` and `scaled_matmul_by_blocks`. All take the options `ready`, `done` and
    `own`. Without them, the executor waits for flags, computes block by block, and raises flags. With `triton`,
    contractions also come as kernels that store few rows to peers as well: `matmul_pushed`, `linear_pushed` and
    `scaled_matmul_pushed`, with the option `pushed`.
    """
    if policy not in POLICIES:
        hint = did_you_mean(policy, POLICIES)
        raise error(f"unknown kernels '{policy}'", expected=f"one of: {', '.join(POLICIES)}", hint=hint)
    if policy == "triton":
        return {**aten.KERNELS, **triton_kernels(device_type), **BY_BLOCKS, **PUSHED}
    if device_type != "cuda" or importlib.util.find_spec("triton") is None:
        return aten.KERNELS
    scaled = {**aten.KERNELS, "scaled_matmul": scaled_matmul_of_either}  # ATen lacks scales of blocks
    if policy == "aten":
        return scaled
    by_blocks = BY_BLOCKS if policy == "auto" else {"sum_by_blocks": sum_by_blocks}
    return {**scaled, "sum": sum_of_few, **BY_ROWS, **by_blocks}


def kernels_for(table: Mapping[str, Kernel], result: torch.dtype) -> Mapping[str, Kernel]:
    """Return the kernels for results of a dtype: those of the table, but ATen's for f64, which Triton's do not take."""
    return aten.KERNELS if result == torch.float64 else table
