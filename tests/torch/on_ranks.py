"""Registry of the cases of a script, and tensors and comparisons for its ranks.

    torchrun --standalone --nproc-per-node 2 tests/torch/operator_cases.py [NAME ...]

runs all cases of a script, or the named ones, and each rank prints `PASS name rank`. With DEVICE=cuda they run on GPUs.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

DEVICE = os.environ.get("DEVICE", "cpu")
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OPS = torch.ops.symm_mem
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-1}  # relative to the largest value
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Register a case of the script that is run; scripts also import helpers from each other."""
    if function.__module__ == "__main__":
        CASES[function.__name__] = function
    return function


def case_of_gpus(function: Callable[[], None]) -> Callable[[], None]:
    """Register a case that needs GPUs."""
    return case(function) if DEVICE == "cuda" else function


def main(*cpu_only: str) -> None:
    """Run the cases that the arguments name, or all; those in `cpu_only` do not run on GPUs by default."""
    warnings.simplefilter("ignore", FutureWarning)  # torch warns about names that torch 2.11 needs
    torch.use_deterministic_algorithms(True, warn_only=DEVICE == "cuda")  # also fills new memory with NaN
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    torch.manual_seed(int.from_bytes(os.environ.get("SEED", "").encode()) + RANK)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    for name in sys.argv[1:] or [name for name in CASES if DEVICE == "cpu" or name not in cpu_only]:
        CASES[name]()
        print(f"PASS {name} {RANK}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


# Groups and tensors -----------------------------------------------------------------------------------------------
def group() -> str:
    return dist.group.WORLD.group_name


def tp_mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (RANKS,), mesh_dim_names=("tp",))


def broadcast(x: Tensor) -> Tensor:
    """Return the tensor of rank 0 on every rank."""
    dist.broadcast(x, 0)
    return x


def with_parameters_of_rank_0(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        broadcast(parameter.data)
    return module


def replicated(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a random tensor that is the same on all ranks."""
    return broadcast(torch.randn(shape).to(dtype))


def part(x: Tensor, axis: int) -> Tensor:
    """Return this rank's part of a tensor."""
    return x.chunk(RANKS, axis)[RANK]


def parts_of_all(x: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(RANKS)]
    dist.all_gather(parts, x.contiguous())
    return parts


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


# Comparisons ------------------------------------------------------------------------------------------------------
def assert_near(result: Tensor | None, exact: Tensor | None) -> None:
    """Assert that a result has the shape of the exact result, and is near it within BOUNDS."""
    assert result is not None
    assert exact is not None
    assert result.shape == exact.shape
    bound = BOUNDS[result.dtype] * max(exact.abs().max().item(), 1e-3) if exact.numel() else 0.0
    torch.testing.assert_close(result.double(), exact.double(), rtol=0, atol=bound)


def assert_gradients_near(sharded: nn.Module, exact: nn.Module) -> None:
    """Assert that the gradients of a sharded module are near those of the unsharded module in float64."""
    parameters, exact_parameters = dict(sharded.named_parameters()), dict(exact.named_parameters())
    assert parameters.keys() == exact_parameters.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert_near(full(parameter.grad), exact_parameters[name].grad)


def assert_like_unsharded(
    sharded: nn.Module, unsharded: nn.Module, x: Tensor, weights: Tensor, y: Tensor, x_grad: Tensor | None, axis: int
) -> None:
    """Assert that result and gradients equal those of the unsharded module in float64.

    The loss is the sum of `y * weights`; `y` and `x_grad` are this rank's parts along `axis`, or full tensors.
    """
    exact, exact_x = copy.deepcopy(unsharded).double(), leaf(x.double())
    exact_y = exact(exact_x)
    (exact_y * weights).sum().backward()
    assert_near(y, exact_y if y.shape == exact_y.shape else part(exact_y, axis))
    assert_near(x_grad, exact_x.grad if x_grad.shape == x.shape else part(exact_x.grad, axis))
    assert_gradients_near(sharded, exact)
