"""Tables of kernels. Each policy has a table for each type of device. Each table has a kernel for each computation."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch

from hostir.ir.source import did_you_mean, error
from hostir.kernels import aten
from hostir.kernels.contractions import (
    BY_BLOCKS,
    BY_ROWS,
    GROUPED_BY_BLOCKS,
    GROUPED_OF_EITHER,
    PUSHED,
    scaled_matmul_of_either,
    sum_by_blocks,
    sum_of_few,
    triton_kernels,
)
from hostir.kernels.repeats import Kernel

POLICIES = ("auto", "triton", "cublas", "aten")
ADDING = "matmul plus"  # a product that is added to its old result, without flags


def kernel_table(policy: str, device_type: str) -> Mapping[str, Kernel]:
    """Return the kernels of a policy, by the name of the computation.

    Call a kernel as `table[name](out, *operands, **options)`, with the options of the statement. The policies:

    - `aten`: ATen computes everything. It calls cuBLAS for contractions on `cuda`.
    - `cublas`: Triton kernels compute sums of few tensors, sums with flags, RMS norms, fp8 scales, quantized rows,
      rows by an index, and the products of rows in groups that `torch._grouped_mm` does not support. ATen computes the
      rest.
    - `auto`: the same as `cublas`, but Triton kernels also compute contractions with flags.
    - `triton`: Triton kernels compute contractions, products of rows in groups, rows by an index, sums, RMS norms, fp8
      scales, and quantized rows. ATen computes the rest.

    On a CPU, or without Triton, `cublas` and `auto` are the same as `aten`. On `cuda`, ATen lacks some fp8 products. If
    Triton is installed, Triton kernels compute these products with every policy. Raises HostIRError for an unknown
    policy, and if Triton cannot run on the device.

    With the policy `triton` on `cuda`, cuBLAS computes `matmul ... plus` without flags: on an H100, the addition adds 1
    to 4 % to cuBLAS's time (10 % if K is small), and 6 to 23 % to Triton's. The host issues it by torch, which takes
    longer than to launch a Triton kernel. See `kernel_for`.

    For results in f64, use the kernels that `kernels_for` returns. Kernels in `REPEATABLE` may return a function that
    repeats the call, see `repeating`.

    Some tables also have kernels with flags: they wait for flags of blocks of rows, or raise such flags. They take the
    options `ready`, `done` and `own_rows`:

    - `sum_by_blocks`, with the policy `triton`, and with `auto` and `cublas` on `cuda` if Triton is installed.
    - `matmul_by_blocks`, `linear_by_blocks` and `scaled_matmul_by_blocks`, with the policy `triton`, and with `auto` on
      `cuda` if Triton is installed.

    - `grouped_matmul_by_blocks`, with the policy `triton`. With the others, there is a launch for each block.

    If a table lacks such a kernel, the executor itself waits for the flags, computes block by block, and raises the
    flags.

    With `triton`, the kernels `matmul_pushed`, `linear_pushed` and `scaled_matmul_pushed` also copy a result of few
    rows to peers. They take the option `pushed`.
    """
    if policy not in POLICIES:
        hint = did_you_mean(policy, POLICIES)
        raise error(f"unknown kernels '{policy}'", expected=f"one of: {', '.join(POLICIES)}", hint=hint)
    if policy == "triton":
        adding = {} if device_type == "cpu" else {ADDING: aten.matmul}
        return {**aten.KERNELS, **triton_kernels(device_type), **BY_BLOCKS, **GROUPED_BY_BLOCKS, **PUSHED, **adding}
    if device_type != "cuda" or importlib.util.find_spec("triton") is None:
        return aten.KERNELS
    scaled = {**aten.KERNELS, "scaled_matmul": scaled_matmul_of_either}  # ATen lacks scales of blocks
    if policy == "aten":
        return scaled
    by_blocks = BY_BLOCKS if policy == "auto" else {"sum_by_blocks": sum_by_blocks}
    return {**scaled, "sum": sum_of_few, **BY_ROWS, **GROUPED_OF_EITHER, **by_blocks}  # ATen waits for offsets


def kernels_for(table: Mapping[str, Kernel], result: torch.dtype) -> Mapping[str, Kernel]:
    """Return the kernels for results of dtype `result`.

    For f64 these are ATen's kernels, because Triton's kernels do not support f64. For other dtypes it is `table`.
    """
    return aten.KERNELS if result == torch.float64 else table


def kernel_for(table: Mapping[str, Kernel], result: torch.dtype, computation: str, operands: int) -> Kernel:
    """Return the kernel of a computation without flags that has so many operands, for results of dtype `result`."""
    kernels = kernels_for(table, result)
    adding = kernels.get(ADDING) if computation == "matmul" and operands > 2 else None
    return kernels[computation] if adding is None else adding
