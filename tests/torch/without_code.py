"""Backends of torch.compile that run graphs as they are.

Inductor would generate code, for which a C++ compiler takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend


def backend_with(graph_pass: Callable[[torch.fx.Graph], Any]) -> Any:
    """Return a backend that runs each graph after a pass."""

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graph_pass(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)


def configured_pass(graph: torch.fx.Graph) -> None:
    """Run the pass that Inductor is configured to run last on a graph, if it is configured to run one."""
    if (last := inductor.post_grad_custom_post_pass) is not None:
        last(graph)


WITHOUT_CODE = "without_code"  # the name of a backend for `torch.compile(backend=...)`, with the configured pass
register_backend(backend_with(configured_pass), WITHOUT_CODE)
