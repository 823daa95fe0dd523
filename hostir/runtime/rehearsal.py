"""What a host program of single ranks means: its statements on simulated ranks, one after another in program order.

Whole tensors say nothing of a program in which ranks do different things: who copies what where is what it computes.
So every rank is simulated in this process, on the device of the inputs, in one order that the memory model allows and
that is always the same. A run is held against that as against whole tensors, which shows where it did not compute what
the statements say. It does not show that the statements say something else than was meant, nor races, which
`hostir check` finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.runtime.kernels import aten
from hostir.runtime.local import rehearse
from hostir.runtime.sharding import assemble, bind_sizes


@torch.no_grad()
def rehearsed(
    program: Program,
    inputs: Sequence[torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[torch.Tensor, ...]:
    """The whole outputs of one call of a host program, from whole inputs; arguments as of `reference`.

    The sum of partial sums is in float64, not rounded, whatever `dtype` is. Raises HostIRError for inputs that do not
    fit, and for a program that simulated ranks cannot run, or of which they end with copies of an output that differ.
    """
    bound = bind_sizes(program, inputs, sizes)
    device = inputs[0].device if inputs else torch.device("cpu")
    try:
        machine = rehearse(program, [inputs], bound, aten.KERNELS, dtype=dtype, device=device)
        (outputs,) = machine.run()
        ends = zip(program.outputs, outputs, strict=True)
        whole = tuple(assemble(parts, v.tensor, bound, rounded=False) for v, parts in ends)
    except HostIRError as refused:
        raise _no_result(program, refused) from refused
    except torch.OutOfMemoryError as problem:  # for the inputs of all ranks; statements say it of themselves
        raise _no_result(program, error(str(problem))) from problem
    machine.release()
    return whole


def _no_result(program: Program, refused: HostIRError) -> HostIRError:
    first = refused.diagnostics[0]
    return error(
        f"@{program.name} has no result on simulated ranks to be compared with: {first.message}",
        first.span,
        expected=first.expected,
        hint="leave out --compare",
        notes=first.notes,
    )
