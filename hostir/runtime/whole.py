"""Running a program on whole tensors, wherever its ranks are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hostir.ir.program import Program
from hostir.runtime.executor import Executor, Part
from hostir.runtime.inputs import check_apart, written_inputs
from hostir.runtime.session import Session
from hostir.runtime.sharding import assemble, bind_sizes, shard


def run(program: Program, *inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Runs a host program once on whole tensors and returns whole tensors, on every machine.

    Under torchrun every rank gives the same inputs and gets the same outputs: each takes its parts, and at the end the
    ranks send each other theirs. For tests and small runs. `options` are those of Executor.
    """
    executor = Executor(program, **options)
    sizes = bind_sizes(program, inputs, executor.sizes)
    executor.sizes = sizes
    if executor.machine == "local":
        outputs = executor(*inputs)
    else:
        check_apart(program, written_inputs(program), inputs)  # of which the parts are copies
        parts = executor(
            *[shard(x, v.tensor, executor.rank, sizes) for v, x in zip(program.inputs, inputs, strict=True)]
        )
        outputs = tuple(zip(*everyones(parts, executor.session), strict=True))
    return tuple(assemble(parts, v.tensor, sizes) for v, parts in zip(program.outputs, outputs, strict=True))


def everyones(parts: Sequence[Part], joined: Session | None) -> list[Sequence[Part]]:
    """The parts of each rank of a job, on all of them."""
    if joined is None:
        return [parts]
    gathered: list[Any] = [None] * joined.size
    dist.all_gather_object(gathered, [None if x is None else x.cpu() for x in parts])
    return [[None if x is None else x.to(joined.device) for x in theirs] for theirs in gathered]
