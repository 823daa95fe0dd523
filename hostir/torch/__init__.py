"""Use hostir from torch: functions, layers, parallel styles, and a pass over graphs of torch.compile.

All of them run on torch's process groups and have gradients. `install` makes hostir run the fused operators of
`torch.ops.symm_mem`.
"""

from __future__ import annotations

from torch import Tensor  # in `hostir`, the annotation torch.Tensor resolves to this module's Tensor

from hostir.torch.expert_styles import TensorParallelExperts
from hostir.torch.experts import GroupedExperts, expert_mlp
from hostir.torch.functional import (
    all_gather_matmul,
    all_reduce,
    all_reduce_residual_norm,
    column_parallel_linear,
    gated_linear,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter_residual_norm,
    row_parallel_linear,
)
from hostir.torch.installing import install, uninstall
from hostir.torch.modules import ColumnParallelLinear, GatedMLP, QKVParallelLinear, RowParallelLinear
from hostir.torch.overlap import OverlapPass, overlap_pass
from hostir.torch.reporting import report
from hostir.torch.step_profile import StepProfile, StepWork, profile_step
from hostir.torch.styles import ColwiseParallel, RowwiseParallel
from hostir.torch.traps import ShardingWarning

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "GatedMLP",
    "GroupedExperts",
    "OverlapPass",
    "QKVParallelLinear",
    "RowParallelLinear",
    "RowwiseParallel",
    "ShardingWarning",
    "StepProfile",
    "StepWork",
    "Tensor",
    "TensorParallelExperts",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_residual_norm",
    "column_parallel_linear",
    "expert_mlp",
    "gated_linear",
    "install",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "overlap_pass",
    "profile_step",
    "reduce_scatter_residual_norm",
    "report",
    "row_parallel_linear",
    "uninstall",
]
