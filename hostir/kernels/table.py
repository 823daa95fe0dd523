"""Tables of kernels. There is a table for each policy and type of device. It has a kernel for each computation."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch

from hostir.ir.source import did_you_mean, error
from hostir.kernels import aten
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
    """Return the kernels of a policy, by the name of the computation.

    Call a kernel as `table[name](out, *operands, **options)`, with the options of the statement. The policies:

    - `aten`: everything in ATen, which calls cuBLAS for contractions on `cuda`.
    - `cublas`: as `aten`, but some kernels are in Triton: sums of few tensors, sums with flags, and norms, scales and
      quotients of rows.
    - `auto`: as `cublas`, but contractions with flags are also in Triton.
    - `triton`: contractions, sums, and norms, scales and quotients of rows in Triton, the rest in ATen.

    On a CPU, or without Triton, `cublas` and `auto` are the same as `aten`. On `cuda`, ATen lacks some fp8 products. If
    Triton is installed, it computes them with every policy. Raises HostIRError for an unknown policy, and if Triton
    cannot run on the device.

    A result in f64 needs the kernels from `kernels_for`. Kernels in `REPEATABLE` may return a function that repeats the
    call, see `repeating`.

    Some tables also have kernels with flags: they wait for flags of blocks of rows, or raise such flags. They take the
    options `ready`, `done` and `own_rows`:

    - `sum_by_blocks`: with `triton`, and with `auto` and `cublas` on `cuda` if Triton is installed.
    - `matmul_by_blocks`, `linear_by_blocks` and `scaled_matmul_by_blocks`: with `triton`, and with `auto` on `cuda` if
      Triton is installed.

    Without such a kernel, the executor waits for flags, computes block by block, and raises flags.

    With `triton`, the kernels `matmul_pushed`, `linear_pushed` and `scaled_matmul_pushed` also copy a result of few
    rows to peers. They take the option `pushed`.
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
    """Return the kernels for results of dtype `result`: ATen's for f64, which Triton's do not support, else `table`."""
    return aten.KERNELS if result == torch.float64 else table
