"""Find schedules that show a finding: seeds of the simulated ranks under which a program with findings fails."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hostir.check.proof import Finding
from hostir.check.tracer import Event
from hostir.cli.run import Results, what_is_wrong
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic, HostIRError
from hostir.runtime.sharding import random_inputs
from hostir.runtime.simulated.machine import rehearse
from hostir.runtime.simulated.tasks import Task

SEEDS = 400
SECONDS = 20.0  # for trying seeds
MAX_ELEMENTS = 1 << 24  # of the inputs; larger runs take too long to try many seeds
TaskKey = tuple[int, int, tuple[int, ...], int]  # rank, statement, rounds, call


def witnesses(
    program: Program, findings: Sequence[Diagnostic], sizes: Mapping[str, int], calls: int = 2
) -> dict[int, tuple[int, str]]:
    """Find runs that show findings; return, by a finding's index, a seed and the error of its run.

    The run is that of `hostir run --no-check --repeat CALLS --schedule-seed SEED`. A run shows a race if it hangs or
    raises, or if its results are wrong and the second access came first. Findings that no seed shows are left out.
    """
    inputs = [random_inputs(program, sizes, turn) for turn in range(calls)]
    if sum(x.numel() for x in inputs[0]) > MAX_ELEMENTS:
        return {}
    shown: dict[int, tuple[int, str]] = {}
    left = {n: f for n, f in enumerate(findings) if isinstance(f, Finding) and f.level == "error"}
    deadline = time.monotonic() + SECONDS
    try:
        machine = rehearse(program, inputs, sizes)
    except HostIRError as refused:
        return dict.fromkeys(left, (0, refused.diagnostics[0].message))
    in_order: Results | None = None
    for seed in range(SEEDS):
        if not left or time.monotonic() > deadline:
            break
        try:
            results = machine.run(seed)
            in_order = in_order or results
            wrong = next(iter(what_is_wrong(program, results, in_order)), "")
            places = _places(machine.ran)
        except HostIRError as failed:
            wrong, places = failed.diagnostics[0].message, None
        if wrong:
            for n in [n for n, f in left.items() if places is None or _overtaken(f, places)]:
                shown[n] = (seed, wrong)
                del left[n]
    return shown


def _places(ran: Sequence[Task]) -> dict[TaskKey, list[int]]:
    """Return the positions at which each statement of each rank, round and call accessed memory."""
    found: dict[TaskKey, list[int]] = {}
    for place, task in enumerate(ran):
        if task.memory:
            found.setdefault((task.rank, id(task.statement), task.rounds, task.call), []).append(place)
    return found


def _overtaken(finding: Finding, places: Mapping[TaskKey, list[int]]) -> bool:
    """Whether the second of a finding's two accesses came first; other findings only need the run to go wrong."""
    if finding.kind != "race":
        return True
    before, after = finding.events
    first, second = _when(before, places), _when(after, places, at_first=after.verb == "moves")
    return second is not None and (first is None or second < first)


def _when(event: Event, places: Mapping[TaskKey, list[int]], at_first: bool = False) -> int | None:
    found = places.get((event.rank, id(event.statement), event.rounds, event.call))
    if not found:
        return None
    arrives = event.statement is None and event.verb == "writes"  # of what the caller does, at the beginning of a call
    return found[0] if at_first or arrives or event.verb == "reads" else found[-1]
