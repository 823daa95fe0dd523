"""Prove a host program free of races, deadlocks and misuse of memory, or report where it has such an error.

Loops are unrolled for the given sizes. A symbol without a value gets a small value. Every rank is traced through two
calls, or through more calls if two calls do not show every error. The events of all ranks are joined by the rules of
docs/memory-model.md. Then one walk with vector clocks checks all accesses to memory. A finding names both statements,
their ranks and streams, the missing order, and the statement to insert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hostir.check.findings import Finding, FindingBuilder, in_program_order, leaks
from hostir.check.limits import MAX_CALLS
from hostir.check.one_rank.alike import Alike, alike
from hostir.check.ordering.held_sms import calls_needed, kernels_in_the_way
from hostir.check.ordering.order import Order
from hostir.check.ordering.races import RaceDetector
from hostir.check.ordering.waits import cyclic_waits, flags_out_of_order
from hostir.check.small_sizes import small_sizes
from hostir.check.tracing.events import Event
from hostir.check.tracing.tracer import Tracer
from hostir.ir.machine import uncollected, unrolled_length
from hostir.ir.program import Program
from hostir.ir.source import UNCHECKED, Diagnostic, HostIRError

MAX_STATEMENTS = 500_000  # over all ranks and calls; checking this many takes about a minute
JOIN = "have the kernel's stream 'synchronize' the others first"
VALUES = "give values: --set NAME=VALUE"


@dataclass(frozen=True)
class Analysis:
    """The result of checking a host program.

    Fields:
        findings: the errors and warnings, errors first.
        order: the order of the events that were checked; None if the caller does not need it, or if tracing failed.
        sizes: the values of all symbols for which the program was checked.
        calls: the number of consecutive calls that were checked.
        resizable: True if symmetric buffers may have different sizes in different calls (see `RaceDetector`).
    """

    findings: list[Diagnostic]
    order: Order | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    calls: int = 2
    resizable: bool = False


@uncollected()
def analyse_quickly(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Analysis:
    """Check a host program as `analyse` does, but trace only rank 0 if this is enough.

    The arguments and the findings are the same. Tracing rank 0 is enough if rank 0 represents all ranks and the check
    finds nothing (see `_of_one_rank`). The result has no `order`.
    """
    return replace(_of_one_rank(program, sizes or {}, calls) or analyse(program, sizes, calls), order=None)


def _of_one_rank(program: Program, sizes: Mapping[str, int], calls: int | None) -> Analysis | None:
    """Check a program by tracing rank 0 alone. Return None if all ranks have to be traced.

    All ranks have to be traced in these cases:
    - Rank 0 does not represent all ranks.
    - More calls have to be checked than were traced.
    - There are findings, and the program is small enough to trace all ranks. With all ranks, findings are more precise.
    - A kernel may hold SMs that other kernels need. The events of one rank are not enough to decide this.
    - There are no small sizes that fit, or rank 0 alone has too many statements. `analyse` reports both as errors.
    """
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
    analysis = judge(program, order, bound, number)
    findings = analysis.findings
    more = not findings and not calls and calls_needed(order, program.ranks) > number
    unsure = any(f.category == "SMs held" for f in findings)
    if more or unsure or (findings and _statements(program, bound, number) <= MAX_STATEMENTS):
        return None
    return analysis


@uncollected()
def analyse(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Analysis:
    """Trace all ranks of a host program, and check the order of their events. The program has no structural errors.

    `calls` is the number of consecutive calls to check. By default, this is the number that is enough to find every
    error that any number of calls can have.
    """
    if misfits := program.misfits(sizes or {}):
        return Analysis(misfits)
    bound, number = small_sizes(program, sizes or {}), calls or 2
    if bound is None:
        names = ", ".join(sorted(program.size_names))
        return Analysis([_unchecked(program, f"no small values of {names} make all its sizes integers", VALUES)])
    while True:
        statements = _statements(program, bound, number)
        if statements > MAX_STATEMENTS:
            why = f"{statements} statements over all ranks and {number} calls are more than {MAX_STATEMENTS}"
            return Analysis([_unchecked(program, why, "check fewer rounds, ranks or calls")], sizes=bound, calls=number)
        analysis = _traced(program, bound, number)
        if calls or analysis.order is None or any(finding.level == "error" for finding in analysis.findings):
            return analysis
        needed = calls_needed(analysis.order, program.ranks)
        if needed <= number:
            return analysis
        if needed > MAX_CALLS:
            why = f"work that needs SMs may still wait for them {number - 1} calls later, beside a kernel that waits"
            return Analysis([_unchecked(program, why, JOIN)], sizes=bound, calls=number)
        number = needed


def _traced(program: Program, sizes: Mapping[str, int], calls: int) -> Analysis:
    """Trace `calls` consecutive calls on all ranks, and check their events."""
    tracers = [Tracer(rank, program, sizes) for rank in range(program.ranks)]
    try:
        for tracer in tracers:
            for _ in range(calls):
                tracer.call()
    except HostIRError as refused:
        return Analysis(list(refused.diagnostics), None, sizes, calls)
    if problems := {key: problem for tracer in tracers for key, problem in tracer.misuse.problems.items()}:
        return Analysis(sorted(problems.values(), key=in_program_order), None, sizes, calls)
    order = Order([tracer.trace for tracer in tracers])
    return judge(program, order, sizes, calls)


def shared_queues(program: Program, sizes: Mapping[str, int]) -> list[Diagnostic]:
    """Return the deadlocks that a correct program has on a device whose streams share hardware queues.

    The check assumes that all streams of a rank share one queue. Then a wait blocks everything that the rank issues
    after the wait, on every stream.
    """
    tracers = [Tracer(rank, program, sizes) for rank in range(program.ranks)]
    for tracer in tracers:
        tracer.call()
        last: Event | None = None
        for event in tracer.trace.events:
            if last is not None and event.lane is not None:
                event.after.append(last)
            if event.verb == "waits":
                last = event
    order = Order([tracer.trace for tracer in tracers])
    left = order.run(lambda event, clock: None)
    cycle = [replace(trouble, category="queues shared") for trouble in cyclic_waits(order, left)]
    return list(FindingBuilder(program).troubles(cycle))


def _statements(program: Program, sizes: Mapping[str, int], calls: int) -> int:
    return program.ranks * calls * unrolled_length(program.body, sizes)


def judge(program: Program, order: Order, sizes: Mapping[str, int], calls: int) -> Analysis:
    """Check the traced events of a program, and return the result. The findings are in program order, errors first."""
    build = FindingBuilder(program)
    if order.troubles:
        return Analysis(list(build.troubles(order.troubles)), order, sizes, calls)
    memory = RaceDetector(order)
    left = order.run(memory.visit)
    findings: list[Finding] = list(build.troubles([*cyclic_waits(order, left), *flags_out_of_order(order)]))
    if not left:
        memory.finish()
        findings += build.troubles(order.stuck() if isinstance(order, Alike) else kernels_in_the_way(order))
        findings += leaks(buffer for rank in order.ranks for buffer in rank.leaked)
    findings += [build.conflict(c, times) for c, times in memory.most_specific()]
    memory.forget()
    return Analysis(sorted(findings, key=in_program_order), order, sizes, calls, memory.resizable)


def _unchecked(program: Program, why: str, hint: str) -> Diagnostic:
    """Return the error for a program that was not checked for races. `why` is the reason.

    `prove` refuses a program with this error.
    """
    return Diagnostic(f"@{program.name} was not checked for races: {why}", hint=hint, category=UNCHECKED)
