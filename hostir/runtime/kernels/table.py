"""Which kernel computes what: one table for each policy and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hostir.ir.source import error
from hostir.runtime.kernels import aten
from hostir.runtime.kernels.layout import collapse

Kernel = Callable[..., None]  # f(out, *operands, **options)
POLICIES = ("auto", "triton", "aten")


def kernel_table(policy: str, device_type: str) -> Mapping[str, Kernel]:
    """A kernel for each kind of computation: `table[kind](out, *operands, **options)`, options as in the statement.

    `policy` is `aten`, `triton` (contractions and sums in Triton, the rest in ATen) or `auto`: what suits the device,
    `cpu` or `cuda`. Raises HostIRError for an unknown policy, and where Triton cannot run on the device.
    """
    if policy not in POLICIES:
        raise error(f"unknown kernels '{policy}'", expected=f"one of: {', '.join(POLICIES)}")
    return {**aten.KERNELS, **_triton_kernels(device_type)} if policy == "triton" else aten.KERNELS


def _triton_kernels(device_type: str) -> dict[str, Kernel]:
    try:  # only here: where nobody asks for Triton, it need not be installed
        from hostir.runtime.kernels.launch import INTERPRETED
        from hostir.runtime.kernels.matmul import matmul as triton_matmul
        from hostir.runtime.kernels.reduce import reduce_sum
    except ImportError as problem:
        hint = "pip install triton, or use kernels='aten'"
        raise error(f"kernels='triton' cannot be loaded: {problem}", hint=hint) from None
    if device_type == "cpu" and not INTERPRETED:
        raise error(
            "kernels='triton' on a CPU needs Triton's interpreter",
            expected="TRITON_INTERPRET=1 in the environment when Python starts",
            hint="set it, or use kernels='aten'",
        )

    def matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        contract(out, a, b, None, False)

    def linear(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        contract(out, a, weight, bias, True)

    def contract(
        out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, transpose_b: bool
    ) -> None:
        if len(collapse(a.shape[:-1], a.stride()[:-1], out.stride()[:-1])) <= 2:  # the kernel takes [batch, rows, K]
            triton_matmul(a, b, out, bias=bias, transpose_b=transpose_b)
            return
        for out_part, a_part in zip(out, a, strict=True):
            contract(out_part, a_part, b, bias, transpose_b)

    def sum(out: torch.Tensor, x: torch.Tensor, *, axis: int) -> None:
        reduce_sum(x, out, axis)

    return {"matmul": matmul, "linear": linear, "sum": sum}
