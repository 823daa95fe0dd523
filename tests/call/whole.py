"""Run simulated ranks on unsharded inputs, and return unsharded outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hostir.call.local import rehearse, run_local
from hostir.call.parts import assemble
from hostir.call.sizes import bind_sizes
from hostir.ir.program import Program


def run_whole(
    program: Program, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int] | None = None, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Do as `run_local`, and return unsharded outputs. Raise HostIRError if copies of an output differ."""
    bound = bind_sizes(program, inputs, sizes)
    outputs = run_local(program, inputs, bound, **options)
    return tuple(assemble(parts, v.tensor, bound) for v, parts in zip(program.outputs, outputs, strict=True))


def planned(
    program: Program, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int] | None = None
) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return a function that does as `run_whole` under a seed. It plans the call once, which takes most of the time."""
    bound = bind_sizes(program, inputs, sizes)
    machine = rehearse(program, [inputs], bound)

    def run(seed: int) -> tuple[torch.Tensor, ...]:
        (outputs,) = machine.run(seed)
        return tuple(assemble(parts, v.tensor, bound) for v, parts in zip(program.outputs, outputs, strict=True))

    return run
