"""What a caller gives as inputs: without gradients, and apart in memory where a program writes one of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hostir.ir.host_ops import Dense
from hostir.ir.notices import warn_once
from hostir.ir.op import Codec, Phase
from hostir.ir.program import Program
from hostir.ir.source import error
from hostir.runtime.plan import Compute, Recording
from hostir.runtime.recorder import record
from hostir.runtime.sharding import bind_sizes, solve_sizes
from hostir.runtime.tensors import overlaps_itself, share_memory, without_plain_memory


def written_inputs(program: Program) -> frozenset[str]:
    """The names of the inputs that a program writes, as they are or through views."""
    inputs = {value.name: value.name for value in program.inputs}
    written: set[str] = set()
    for s in program.walk():
        seen = next((inputs.get(x.name) for x in s.values(Codec.ALIAS)), None)
        if (made := s.defines(Phase.HOST)) is not None:
            inputs.pop(made.name, None)
            if seen is not None:
                inputs[made.name] = seen
        written.update(inputs[x.name] for x in s.values(Codec.WRITE) if x.name in inputs)
    return frozenset(written)


def check_apart(program: Program, written: Collection[str], inputs: Sequence[Any]) -> None:
    """Raises HostIRError where one of the inputs `written` shares memory with another of the same rank, or with itself.

    The program was proved right for inputs apart from each other. What is no tensor with memory passes: others say so.
    """
    pairs = list(zip(program.inputs, inputs, strict=False))
    held = [(v, x) for v, x in pairs if isinstance(x, torch.Tensor) and without_plain_memory(x) is None]
    for value, x in held:
        if value.name in written and overlaps_itself(x):
            raise error(
                f"elements of input {value}, which @{program.name} writes, share memory",
                value.span,
                expected=f"memory for each element, not strides {list(x.stride())} for shape {list(x.shape)}",
                hint=f"pass {value.name}.clone(memory_format=torch.contiguous_format)",
            )
        for other, y in held if value.name in written else ():
            if other is not value and share_memory(x, y):
                raise error(
                    f"input {value}, which @{program.name} writes, shares memory with input {other}",
                    value.span,
                    expected="inputs apart in memory, where one of them is written",
                    hint=f"pass {other.name}.clone()",
                )


def refuse_gradients(program: Program, inputs: Sequence[Any]) -> None:
    """Autograd knows nothing of what an executor computes, so that gradients would silently be lost."""
    if not torch.is_grad_enabled():
        return
    for value, x in zip(program.inputs, inputs, strict=False):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise error(
                f"input {value} requires gradients, which do not pass through a program",
                value.span,
                hint=f"pass {value.name}.detach(), or call under torch.no_grad()",
            )


def check_local(program: Program, written: Collection[str], inputs: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Refuses what a real rank would: simulated ranks compute with dense copies, and without gradients."""
    parts = [x if isinstance(x, list | tuple) else [x] for x in inputs]
    ranks = list(enumerate(zip(*parts, strict=False)))
    for _, mine in ranks:
        refuse_gradients(program, mine)
        if written:
            check_apart(program, written, mine)
    odd = [(rank, mine) for rank, mine in ranks if any(_not_dense(x) for x in mine)]
    if not odd or len(ranks) != program.ranks or not all(isinstance(x, list | tuple) for x in inputs):
        return  # of whole tensors every rank gets a dense part
    for rank, mine in ranks:
        sizes = solve_sizes(program, mine, sizes, rank=rank, device="cpu")
    for rank, mine in odd:
        tell_copies(record(program, rank, sizes, mine))


def tell_copies(recording: Recording) -> None:
    """Warns, once for each, of inputs that every call copies, as the program needs them dense and they are not."""
    program = recording.program
    copies = [op for op in recording.ops if isinstance(op, Compute) and isinstance(op.place.statement, Dense)]
    for register in dict.fromkeys(op.operands[0] for op in copies if op.operands[0] in recording.inputs):
        name = program.inputs[recording.inputs.index(register)].name
        message = f"Every call of @{program.name} copies its input %{name}, which must be dense and is not contiguous."
        warn_once(program.name, message, f"pass {name}.contiguous(), made once, to save the copies")


def sizes_of(program: Program, inputs: Sequence[Any], given: Mapping[str, int]) -> Mapping[str, int] | None:
    """The sizes of a call of the local machine; None where inputs are neither all whole nor all in parts."""
    if all(isinstance(x, torch.Tensor) for x in inputs):
        return bind_sizes(program, inputs, given, device="cpu")
    if not all(isinstance(x, list | tuple) and len(x) == program.ranks for x in inputs):
        return None  # which is said where they are taken apart
    for rank, mine in enumerate(zip(*inputs, strict=True)):
        given = solve_sizes(program, mine, given, rank=rank, device="cpu")
    program.check_sizes(dict(given))
    return given


def _not_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and without_plain_memory(x) is None and not x.is_contiguous()
