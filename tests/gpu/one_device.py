"""Programs, inputs and delays for tests on one CUDA device.

Kernels are so short that a missing order would not show, so `torch.cuda._sleep` delays the stream under test.
"""

from __future__ import annotations

import torch

from hostir.call.executor import Executor
from hostir.ir import parse
from hostir.ir.program import Program
from tests.call.programs import ag_matmul

SLEEP = 100_000_000  # cycles: about 50 ms
NAN = float("nan")


def alone(body: str, inputs: str, streams: int = 2) -> Program:
    head = f"hostir 1\nmesh @mesh [didx] = 0\nprogram @p({inputs}) -> (%c) streams {streams} {{\n"
    return parse(f"{head}  %user = current_stream\n{body}\n}}\n", "p.hir")


def pipeline(dtype: str = "f32") -> Program:
    return parse(ag_matmul("0", dtype, m=64, k=128, n=256))


def inputs_of(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 1, 64, 128).to(dtype), torch.randn(128, 256).to(dtype)


def is_product(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if `c` is about as accurate as torch's `a @ b`."""
    exact, plain = a.double() @ b.double(), a @ b
    limit = 1.1 * (plain - exact).abs().max() + torch.finfo(a.dtype).eps * exact.abs().max()
    return bool((c - exact).abs().max() <= limit)


def delay_kernels(executor: Executor, operation: str) -> None:
    """Delay every kernel of an operation on its stream."""
    kernel = executor._machine.kernels[operation]

    def delayed(out: torch.Tensor, *operands: torch.Tensor, **options: object) -> None:
        torch.cuda._sleep(SLEEP)
        kernel(out, *operands, **options)

    executor._machine.kernels = {**executor._machine.kernels, operation: delayed}


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    torch.cuda.synchronize()
    blocks = [torch.full((1 << n,), NAN) for n in range(8, 24) for _ in range(2)]
    del blocks


def descriptor_modes() -> list[bool]:
    """Return the values of `use_descriptors` to test: True needs a GPU with TMA."""
    return [False, True] if torch.cuda.get_device_capability() >= (9, 0) else [False]
