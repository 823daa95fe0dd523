"""Compile a function without or with the overlap pass (`cached_run.py 0|1`), on the ranks of test_overlap.py.

Each rank prints a line of JSON: the operators that ran in forward and backward, the hits of Inductor's cache, and the
report of the pass.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import profile

import hostir.torch

warnings.simplefilter("ignore", FutureWarning)  # torch warns about names that torch 2.11 needs


def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return a result of matmuls only: for other operations Inductor starts a C++ compiler, which takes ten seconds."""
    full = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD.group_name)
    return funcol.reduce_scatter_tensor_autograd(full @ up @ down, "sum", 0, dist.group.WORLD.group_name)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    up, down = torch.randn(8, 16), torch.randn(16, 8)
    x = torch.randn(4, 8, requires_grad=True)
    expected: Any = torch.autograd.grad(layers(x, up, down).sum(), x)
    options = hostir.torch.overlap_pass.options() if sys.argv[1] == "1" else None
    compiled = torch.compile(layers, fullgraph=True, options=options)
    for _ in range(2):  # the first call compiles
        with profile() as events:
            gradient = torch.autograd.grad(compiled(x, up, down).sum(), x)
        torch.testing.assert_close(gradient, expected)
    names = {event.name for event in events.events()}
    observed = {
        "ran": sorted(name for name in names if name.startswith(("hostir::", "_c10d_functional::"))),
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "report": str(hostir.torch.overlap_pass.report),
    }
    print(json.dumps(observed) + "\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
