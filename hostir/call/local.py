"""Run a program on simulated ranks, from the caller's tensors to the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hostir.call.arguments import check_local, check_out_apart, check_out_tensors, sequence_of, sizes_of
from hostir.call.bound import untraced
from hostir.call.executor import Executor
from hostir.call.parts import shard
from hostir.call.room import memory_for
from hostir.call.sizes import bind_sizes, solve_sizes
from hostir.call.started import Started
from hostir.check import prove
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import error
from hostir.machines.binding import Part
from hostir.machines.simulated.machine import KernelChoice, LocalMachine
from hostir.machines.simulated.rank import Parts
from hostir.machines.trace import Trace
from hostir.plan.unroll import unroll

Inputs = Sequence[torch.Tensor | Parts]  # a call's inputs: unsharded tensors, or for each input the parts of all ranks


def rehearse(
    program: Program,
    calls: Sequence[Inputs],
    sizes: Mapping[str, int] | None = None,
    kernels: KernelChoice = "auto",
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LocalMachine:
    """Return a simulated machine with a plan for consecutive calls of a host program.

    The machine's method `run(seed)` executes the calls.

    Args:
        program: a host program that passes the checks.
        calls: the inputs of each call. Each input is an unsharded tensor, or a list with the part of every rank (None
            for a rank without a part). All calls use the same memory of the caller. So the shapes must be equal.
        sizes: values of symbols that do not follow from the inputs' shapes.
        kernels: the kernels that compute: `auto`, `aten`, or `triton` (under TRITON_INTERPRET=1); or a kernel table.
        dtype: the dtype of all floating-point tensors; None for the dtypes that the program declares.
        device: the device of the inputs.

    Raises HostIRError for inputs that do not fit, and for a statement that cannot be planned.
    """
    if program.phase is not Phase.HOST:
        raise error(f"@{program.name} is a fusion", expected="a host program", hint="lower it first")
    machine = LocalMachine([program] * program.ranks, kernels, dtype, device)
    bound: dict[str, int] = {}
    with memory_for(f"@{program.name} on {program.ranks} simulated ranks"):
        for number, inputs in enumerate(calls):
            parts, call_sizes = _distribute(program, inputs, sizes or {}, device)
            if number and call_sizes != bound:
                expected = f"the sizes of call 1, {bound}"
                raise error(f"call {number + 1} of @{program.name} has other sizes", expected=expected)
            bound = call_sizes
            for rank in machine.ranks:
                rank.plan(bound, [part[rank.rank] for part in parts])
    return machine


def run_calls(
    program: Program,
    calls: Sequence[Inputs],
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    kernels: str = "auto",
    watch: bool = False,
    trace: Trace | None = None,
) -> list[list[Parts]]:
    """Run consecutive calls of a host program on simulated ranks.

    After each call the simulated caller reads the outputs, overwrites inputs and outputs, and then writes the next
    call's inputs. Streams, teams, flags and symmetric buffers persist from call to call.

    Args:
        program, calls, sizes, kernels: the same as in `rehearse`.
        seed: selects the order of execution: 0 is program order, any other number is an order that the memory model
            allows.
        watch: True to raise for unordered accesses and reads of undefined memory, as in `LocalMachine.run`.
        trace: receives an event for each executed statement.

    Returns:
        The part of every rank for each call and output, `outputs[call][i][rank]`.

    Raises HostIRError for inputs that do not fit, and the errors of `LocalMachine.run`.
    """
    machine = rehearse(program, calls, sizes, kernels)
    outputs = machine.run(seed, watch=watch)
    if trace is not None:
        machine.record(trace)
    return outputs


def run_local(
    program: Program,
    inputs: Inputs,
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    kernels: str = "auto",
    watch: bool = False,
    trace: Trace | None = None,
    out: Any = None,
) -> list[Parts]:
    """Run one call with `run_calls`; return the part of every rank for each output, `outputs[i][rank]`.

    `out` holds tensors of the caller. The outputs are copied to these tensors, and the function returns them. For each
    output, `out` has a list with the part of every rank. If there is only one output, `out` may be this list.
    """
    (outputs,) = run_calls(program, [inputs], sizes, seed=seed, kernels=kernels, watch=watch, trace=trace)
    return outputs if out is None else _deliver(program, inputs, outputs, out)


def _deliver(program: Program, inputs: Inputs, outputs: list[Parts], out: Any) -> list[Parts]:
    """Copy outputs to the caller's tensors `out`, and return these.

    Raises HostIRError before any copy if they do not fit.
    """
    targets = sequence_of(out)
    if len(outputs) == 1 and not isinstance(targets[0] if targets else None, list | tuple):
        targets = (targets,)
    if any(not isinstance(parts, list | tuple) or len(parts) != program.ranks for parts in targets):
        raise error(
            f"out= of @{program.name} does not hold lists of parts", expected=f"{program.ranks} for each output"
        )
    for rank in range(program.ranks):
        check_out_tensors(program, rank, [x[rank] for x in targets], [x[rank] for x in outputs], torch.device("cpu"))
    unsharded = all(isinstance(x, torch.Tensor) for x in inputs)
    by_rank = [inputs] if unsharded else list(zip(*inputs, strict=True))
    check_out_apart(program, _flat(zip(*targets, strict=True)), _flat(by_rank))
    for mine, parts in zip(targets, outputs, strict=True):
        for x, part in zip(mine, parts, strict=True):
            if part is not None:
                x.copy_(part)
    return [list(parts) for parts in targets]


def _flat(groups: Iterable[Iterable[Any]]) -> list[Any]:
    return [x for group in groups for x in group]


def _distribute(
    program: Program, inputs: Inputs, known_sizes: Mapping[str, int], device: torch.device | str
) -> tuple[list[Parts], dict[str, int]]:
    """Return the parts of all ranks for each input, and the values of all symbols."""
    ranks = range(program.ranks)
    unsharded = [x for x in inputs if isinstance(x, torch.Tensor)]
    if len(unsharded) == len(inputs):
        sizes = bind_sizes(program, unsharded, known_sizes, device=device)
        pairs = zip(program.inputs, unsharded, strict=True)
        return [[shard(x, v.tensor, rank, sizes) for rank in ranks] for v, x in pairs], sizes
    parts = [x for x in inputs if not isinstance(x, torch.Tensor)]
    if unsharded or any(not isinstance(part, list | tuple) or len(part) != len(ranks) for part in parts):
        raise error(
            f"the inputs of @{program.name} are neither all whole nor all in parts",
            expected=f"only tensors, or only lists of {len(ranks)} parts",
        )
    sizes = dict(known_sizes)
    for rank in ranks:
        sizes = solve_sizes(program, [part[rank] for part in parts], sizes, rank=rank, device=device)
    program.check_sizes(sizes)
    return parts, sizes


class LocalExecutor(Executor):
    """An executor on simulated ranks."""

    machine = "local"

    @untraced
    def __call__(self, *inputs: Any, out: Any = None) -> tuple[Any, ...]:
        check_local(self.program, self._written, inputs, self.sizes)
        checked = self.check or self.symmetric_limit is not None
        if checked and (bound := sizes_of(self.program, inputs, self.sizes)) is not None:
            self._check_local(bound)
        parts = run_local(
            self.program, inputs, self.sizes, seed=self.seed, kernels=self.kernels, trace=self.trace, out=out
        )
        return tuple(parts)

    @untraced
    def start(self, *inputs: Any, out: Any = None) -> Started:
        return Started(self(*inputs, out=out))

    @untraced
    def places(self, *inputs: Any) -> tuple[Part, ...]:
        _distribute(self.program, inputs, self.sizes, "cpu")  # refuses what a call refuses
        return tuple(None for _ in inputs)

    @property
    def graph_refusal(self) -> str | None:
        return f"machine '{self.machine}' has no CUDA graphs"

    @untraced
    def synchronize(self) -> None:
        """Return at once: calls on simulated ranks have ended when they return."""

    def _check_local(self, sizes: Mapping[str, int]) -> None:
        """Raise HostIRError if the proof fails for these sizes, or if symmetric memory exceeds its limit."""
        if self.check:
            prove(self.program, sizes)
        if self.symmetric_limit is not None:
            self._check_limit(unroll(self.program, self.rank, sizes).memory[1], sizes)
