"""Find runs that show a finding: run the program on simulated ranks with many schedule seeds, until a run fails."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hostir.call.local import rehearse
from hostir.call.random import random_inputs
from hostir.check.findings import Finding
from hostir.check.tracing.events import Event
from hostir.cli.run import Results, wrong_outputs
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic, HostIRError
from hostir.machines.simulated.tasks import Task

SEEDS = 400
SECONDS = 20.0  # the longest time for trying seeds
MAX_ELEMENTS = 1 << 24  # the most elements of all inputs; with more, many seeds would take too long
TaskKey = tuple[int, int, tuple[int, ...], int]  # rank, statement, rounds, call


def witnesses(
    program: Program, findings: Sequence[Diagnostic], sizes: Mapping[str, int], calls: int = 2
) -> dict[int, tuple[int, str]]:
    """Run the program on simulated ranks with many schedule seeds, to find a run that shows each finding.

    Return a dictionary from the index of a finding to the seed and the failure message of a run that shows it. A
    finding that no run shows has no entry. `hostir run --no-check --repeat CALLS --schedule-seed SEED` repeats a run.

    A run that hangs or raises shows all findings. A run with wrong results shows all findings except some races: it
    shows a race only if the second access of the race came before the first access.
    """
    inputs = [random_inputs(program, sizes, turn) for turn in range(calls)]
    if sum(x.numel() for x in inputs[0]) > MAX_ELEMENTS:
        return {}
    shown: dict[int, tuple[int, str]] = {}
    unseen = {n: f for n, f in enumerate(findings) if isinstance(f, Finding) and f.level == "error"}
    deadline = time.monotonic() + SECONDS
    try:
        machine = rehearse(program, inputs, sizes)
    except HostIRError as refusal:
        return dict.fromkeys(unseen, (0, refusal.diagnostics[0].message))
    in_order: Results | None = None
    for seed in range(SEEDS):
        if not unseen or time.monotonic() > deadline:
            break
        try:
            results = machine.run(seed)
            in_order = in_order or results
            problem = next(iter(wrong_outputs(program, results, in_order)), "")
            positions = _access_positions(machine.ran)
        except HostIRError as failure:
            problem, positions = failure.diagnostics[0].message, None
        if problem:
            for n in [n for n, f in unseen.items() if positions is None or _overtaken(f, positions)]:
                shown[n] = (seed, problem)
                del unseen[n]
    return shown


def _access_positions(tasks: Sequence[Task]) -> dict[TaskKey, list[int]]:
    """Return the positions in a run at which tasks accessed memory, by the key of the task.

    Args:
        tasks: the tasks of the run, in the order in which they ran. A position is an index of this sequence.
    """
    positions: dict[TaskKey, list[int]] = {}
    for position, task in enumerate(tasks):
        if task.memory:
            positions.setdefault((task.rank, id(task.statement), task.rounds, task.call), []).append(position)
    return positions


def _overtaken(finding: Finding, positions: Mapping[TaskKey, list[int]]) -> bool:
    """Return True if a finding can explain the wrong results of a run.

    A race explains them only if its second access came before its first access, or if only the second access came. All
    other findings explain them.
    """
    if finding.category != "race":
        return True
    before, after = finding.events
    first, second = _position(before, positions), _position(after, positions, earliest=after.verb == "moves")
    return second is not None and (first is None or second < first)


def _position(event: Event, positions: Mapping[TaskKey, list[int]], earliest: bool = False) -> int | None:
    """Return the position in a run at which an event accesses memory; None if the run has no such access.

    The event's statement may access memory several times. Then this is usually the position of the last access. In
    three cases it is the position of the first access: if `earliest` is True, if the event reads, and if the event is
    the caller's write of the inputs.
    """
    accesses = positions.get((event.rank, id(event.statement), event.rounds, event.call))
    if not accesses:
        return None
    by_caller = event.statement is None and event.verb == "writes"  # the caller writes the inputs before a call
    return accesses[0] if earliest or by_caller or event.verb == "reads" else accesses[-1]
