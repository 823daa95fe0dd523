"""Use hostir from torch: its operators by name, taken over or added by hostir, with process groups and gradients."""

from __future__ import annotations

from torch import Tensor  # annotations of `hostir` say torch.Tensor, and find this module under that name

from hostir.torch.functional import (
    all_gather_matmul,
    all_reduce,
    column_parallel_linear,
    gated_linear,
    matmul_all_reduce,
    matmul_reduce_scatter,
    row_parallel_linear,
)
from hostir.torch.installing import install, uninstall
from hostir.torch.modules import ColumnParallelLinear, GatedMLP, QKVParallelLinear, RowParallelLinear
from hostir.torch.overlap import OverlapPass, overlap_pass
from hostir.torch.reporting import report
from hostir.torch.styles import ColwiseParallel, RowwiseParallel
from hostir.torch.traps import ShardingWarning

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "GatedMLP",
    "OverlapPass",
    "QKVParallelLinear",
    "RowParallelLinear",
    "RowwiseParallel",
    "ShardingWarning",
    "Tensor",
    "all_gather_matmul",
    "all_reduce",
    "column_parallel_linear",
    "gated_linear",
    "install",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "overlap_pass",
    "report",
    "row_parallel_linear",
    "uninstall",
]
