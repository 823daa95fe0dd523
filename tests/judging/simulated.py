"""Verdicts of the simulated ranks on a program: they run it in many orders and compare the bits of the outputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hostir.call.local import rehearse
from hostir.call.random import random_inputs
from hostir.check.proof import analyse_quickly
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic, HostIRError
from hostir.ir.tensor_ops import ByBlocks
from hostir.machines.simulated.machine import LocalMachine


def failure_of(program: Program | LocalMachine, seeds: int) -> str:
    """Return the failure of one of the first `seeds` schedules, or "" if all give the same bits."""
    machine, first = rehearsal(program) if isinstance(program, Program) else program, None
    for seed in range(seeds):
        bits = outcome(machine, seed)
        if isinstance(bits, str):
            return f"seed {seed}: {bits}"
        first = first or bits
        if bits != first:
            return f"seed {seed}: other bits than under seed 0"
    return ""


def calls_of(program: Program) -> int:
    """Return the number of calls that the proof analyses; at least one for each rank if kernels wait for flags."""
    waits = any(isinstance(s, ByBlocks) and s.ready is not None for s in program.walk())
    return max(analyse_quickly(program).calls, program.ranks if waits else 2)


def rehearsal(program: Program) -> LocalMachine | str:
    """Return simulated ranks for the calls of a program, each with other inputs, or the error of planning them."""
    try:
        return rehearse(program, [random_inputs(program, {}, seed=call) for call in range(calls_of(program))])
    except HostIRError as wrong:
        return wrong.diagnostics[0].message


def outcome(machine: LocalMachine | str, seed: int, watch: bool = False) -> list[bytes] | str:
    """Return the bits of all outputs in one schedule, or the error; `watch` reports races as errors."""
    if isinstance(machine, str):
        return machine
    try:
        calls = machine.run(seed, watch=watch)
    except HostIRError as wrong:
        return wrong.diagnostics[0].message
    parts = [part for outputs in calls for output in outputs for part in output if part is not None]
    if any(part.isnan().any() for part in parts):
        return "NaN in an output"
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]


def errors(findings: Iterable[Diagnostic]) -> tuple[str, ...]:
    """Return the messages of errors, without warnings."""
    return tuple(d.message for d in findings if d.level == "error")
