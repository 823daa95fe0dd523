"""Prove a host program free of races, deadlocks and misuse of memory, or report where it is not.

Loops are unrolled for given sizes; symbols that are not bound get small ones. Every rank is traced through as
many calls as asked; the ranks' events are joined; then one walk with vector clocks checks all accesses to memory. The
rules are those of docs/memory-model.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hostir.check.alike import Alike, alike
from hostir.check.deadlocks import calls_needed, cyclic_waits, flags_out_of_order, kernels_in_the_way
from hostir.check.findings import Finding, FindingBuilder
from hostir.check.order import Conflict, Order, RaceDetector
from hostir.check.signature import small_sizes
from hostir.check.tracer import Buffer, Event, Tracer
from hostir.ir.machine import uncollected, unrolled_length
from hostir.ir.program import Program
from hostir.ir.source import UNCHECKED, Diagnostic, HostIRError

MAX_STATEMENTS = 500_000  # statements, over all ranks and calls: about a minute
MAX_CALLS = 32  # that are checked
JOIN = "have the kernel's stream 'synchronize' the others first"
VALUES = "give values: --set NAME=VALUE"


@dataclass(frozen=True)
class Analysis:
    """The findings of a check, the order of events (None if it got not that far), and the sizes and calls it used."""

    findings: list[Diagnostic]
    order: Order | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    calls: int = 2


@uncollected()
def analyse_quickly(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Analysis:
    """Analyse rank 0 alone where it stands for all ranks and nothing is wrong; all ranks otherwise. Keep no order."""
    found = _of_one_rank(program, sizes or {}, calls)
    return found or replace(analyse(program, sizes, calls), order=None)


def _of_one_rank(program: Program, sizes: Mapping[str, int], calls: int | None) -> Analysis | None:
    """Analyse rank 0 alone; return None unless it stands for all ranks and nothing is wrong."""
    if misfits := program.misfits(sizes):
        return Analysis(misfits)
    bound, number = small_sizes(program, sizes), calls or 2
    try:
        length = unrolled_length(program.body, bound) if bound is not None else 0
    except HostIRError as too_long:
        return Analysis(list(too_long.diagnostics), None, bound or {}, number)
    if bound is None or number * length > MAX_STATEMENTS:
        return None
    order = alike(program, bound, number)
    if order is None:
        return None
    found = findings_of(program, order)
    more = not found and not calls and calls_needed(order, program.ranks) > number
    unsure = any(f.kind == "SMs held" for f in found)
    if more or unsure or (found and _statements(program, bound, number) <= MAX_STATEMENTS):
        return None
    return Analysis(found, None, bound, number)


@uncollected()
def analyse(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Analysis:
    """Trace all ranks of a host program whose structure is sound, and check every order of their events.

    Unless `calls` is given, enough successive calls are checked to show the errors of any number of calls.
    """
    if misfits := program.misfits(sizes or {}):
        return Analysis(misfits)
    bound, number = small_sizes(program, sizes or {}), calls or 2
    if bound is None:
        names = ", ".join(sorted(program.size_names))
        return Analysis([_unchecked(program, f"no small values of {names} make all its sizes whole", VALUES)])
    while True:
        statements = _statements(program, bound, number)
        if statements > MAX_STATEMENTS:
            total = f"{statements} statements over all ranks and {number} calls"
            why = f"it comes to {total}, and {MAX_STATEMENTS} is the most"
            return Analysis([_unchecked(program, why, "check fewer rounds, ranks or calls")], sizes=bound, calls=number)
        analysis = _walked(program, bound, number)
        if calls or analysis.order is None or any(found.level == "error" for found in analysis.findings):
            return analysis
        needed = calls_needed(analysis.order, program.ranks)
        if needed <= number:
            return analysis
        if needed > MAX_CALLS:
            why = (
                f"what needs SMs in a call may still wait {number - 1} calls later, beside a kernel that waits as well"
            )
            return Analysis([_unchecked(program, why, JOIN)], sizes=bound, calls=number)
        number = needed


def _walked(program: Program, sizes: Mapping[str, int], calls: int) -> Analysis:
    """Trace this many calls of all ranks, and check their events."""
    tracers = [Tracer(rank, program, sizes) for rank in range(program.ranks)]
    try:
        for tracer in tracers:
            for _ in range(calls):
                tracer.call()
    except HostIRError as refused:
        return Analysis(list(refused.diagnostics), None, sizes, calls)
    if problems := {key: problem for tracer in tracers for key, problem in tracer.problems.items()}:
        return Analysis(sorted(problems.values(), key=_in_program_order), None, sizes, calls)
    order = Order(tracers)
    return Analysis(findings_of(program, order), order, sizes, calls)


def shared_queues(program: Program, sizes: Mapping[str, int]) -> list[Diagnostic]:
    """Return deadlocks of an otherwise sound program on a device whose streams share hardware queues.

    A wait in such a queue holds back all that was issued to the queue later, whatever its stream.
    """
    tracers = [Tracer(rank, program, sizes) for rank in range(program.ranks)]
    for tracer in tracers:
        tracer.call()
        last: Event | None = None
        for event in tracer.events:
            if last is not None and event.lane is not None:
                event.after.append(last)
            if event.verb == "waits":
                last = event
    order = Order(tracers)
    left = order.run(lambda event, clock: None)
    cycle = [replace(trouble, kind="queues shared") for trouble in cyclic_waits(order, left)]
    return list(FindingBuilder(program).troubles(cycle))


def _statements(program: Program, sizes: Mapping[str, int], calls: int) -> int:
    return program.ranks * calls * unrolled_length(program.body, sizes)


def findings_of(program: Program, order: Order) -> list[Diagnostic]:
    """Return the findings about an order of events, errors first."""
    build = FindingBuilder(program)
    if order.troubles:
        return list(build.troubles(order.troubles))
    memory = RaceDetector(order)
    left = order.run(memory.visit)
    found: list[Finding] = list(build.troubles([*cyclic_waits(order, left), *flags_out_of_order(order)]))
    if not left:
        memory.finish()
        found += build.troubles(order.stuck() if isinstance(order, Alike) else kernels_in_the_way(order))
        found += build.leaks(_leaked(order.ranks))
    found += [build.conflict(c, times) for c, times in _most_specific(memory.conflicts.values())]
    memory.forget()
    return sorted(found, key=_in_program_order)


def _most_specific(conflicts: Iterable[tuple[Conflict, int]]) -> list[tuple[Conflict, int]]:
    """Drop conflicts with an `allocate` where another conflict reports the same missing order between two streams."""
    every = list(conflicts)
    streams = {(id(c.second.event.statement), c.first.event.stream) for c, _ in every if c.first and not _of_new(c)}
    return [(c, n) for c, n in every if not (_of_new(c) and _sides(c) in streams)]


def _of_new(conflict: Conflict) -> bool:
    return conflict.first is not None and conflict.first.event.verb == "allocates"


def _sides(conflict: Conflict) -> tuple[int, str]:
    return id(conflict.second.event.statement), conflict.first.event.stream if conflict.first else ""


def _leaked(tracers: Sequence[Tracer]) -> list[Buffer]:
    """Return the buffers that are neither freed nor outputs."""
    gone = {buffer for t in tracers for buffer in t.freed}
    gone |= {view.buffer for t in tracers for outputs in t.outputs for view in outputs if view}
    return [buffer for t in tracers for buffer in t.buffers if buffer not in gone]


def _in_program_order(found: Diagnostic) -> tuple[bool, int, int]:
    """Sort key of findings: errors first, then by position in the text."""
    return found.level != "error", found.span.line if found.span else 0, found.span.column if found.span else 0


def _unchecked(program: Program, why: str, hint: str) -> Diagnostic:
    """Return the error that a program was not proved; `prove` turns it into a refusal."""
    return Diagnostic(f"@{program.name} was not checked for races: {why}", hint=hint, kind=UNCHECKED)
