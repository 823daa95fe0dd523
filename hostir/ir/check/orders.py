"""Proves a host program free of races, deadlocks and misuse of memory, or says where it is not.

Loops are unrolled for given sizes; symbols that are not bound get small ones. Every rank is traced, through as many
calls as asked; what ranks issue is joined; then one walk with vector clocks looks at all accesses to memory. The rules
are those of docs/memory-model.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hostir.ir.check.alike import Alike, alike
from hostir.ir.check.findings import Finding, Words
from hostir.ir.check.kernels import kernels_in_the_way
from hostir.ir.check.order import Order
from hostir.ir.check.races import Memory
from hostir.ir.check.stuck import circles, flags_out_of_order
from hostir.ir.check.tracer import Tracer
from hostir.ir.check.views import Buffer
from hostir.ir.check.witness import small_sizes
from hostir.ir.interpret import unrolled
from hostir.ir.program import Program
from hostir.ir.source import UNCHECKED, Diagnostic, HostIRError

MOST = 500_000  # statements, over all ranks and calls: about a minute
VALUES = "give values: --set NAME=VALUE"


@dataclass(frozen=True)
class Analysis:
    """What a check found, with the orders that it looked at, if it got so far, and the sizes that it did so for."""

    findings: list[Diagnostic]
    order: Order | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


def look(program: Program, sizes: Mapping[str, int] | None = None, calls: int = 2) -> Analysis:
    """Looks at one rank where that stands for all and is right; at all ranks otherwise."""
    bound = small_sizes(program, sizes or {})
    if bound is None or calls * unrolled(program.body, bound) > MOST:
        return analyse(program, sizes, calls)
    order = alike(program, bound, calls)
    if order is None:
        return analyse(program, sizes, calls)
    found = _findings(program, order)
    if found and _statements(program, bound, calls) <= MOST:
        return analyse(program, sizes, calls)
    return Analysis(found, None, bound)


def analyse(program: Program, sizes: Mapping[str, int] | None = None, calls: int = 2) -> Analysis:
    """Traces all ranks of a host program whose structure is sound, and looks at all orders."""
    bound = small_sizes(program, sizes or {})
    if bound is None:
        names = ", ".join(sorted(program.size_names))
        return Analysis([_unchecked(program, f"no small values of {names} make all its sizes whole", VALUES)])
    statements = _statements(program, bound, calls)
    if statements > MOST:
        why = f"it comes to {statements} statements over all ranks and {calls} calls, and at most {MOST} are looked at"
        return Analysis([_unchecked(program, why, "check fewer rounds, ranks or calls")], sizes=bound)
    tracers = [Tracer(rank, program, bound) for rank in range(program.ranks)]
    try:
        for tracer in tracers:
            for _ in range(calls):
                tracer.call()
    except HostIRError as refused:
        return Analysis(list(refused.diagnostics), sizes=bound)
    if problems := {key: problem for tracer in tracers for key, problem in tracer.problems.items()}:
        return Analysis(sorted(problems.values(), key=_in_program_order), sizes=bound)
    order = Order(tracers)
    return Analysis(_findings(program, order), order, bound)


def _statements(program: Program, sizes: Mapping[str, int], calls: int) -> int:
    return program.ranks * calls * unrolled(program.body, sizes)


def _findings(program: Program, order: Order) -> list[Diagnostic]:
    """What is wrong with an order, errors first."""
    words = Words(program)
    if order.troubles:
        return list(words.troubles(order.troubles))
    memory = Memory(order)
    left = order.run(memory.visit)
    found: list[Finding] = list(words.troubles([*circles(order, left), *flags_out_of_order(order)]))
    if not left:
        memory.finish()
        found += words.troubles(order.stuck() if isinstance(order, Alike) else kernels_in_the_way(order))
        found += words.leaks(_leaked(order.ranks))
    found += [words.conflict(c, times) for c, times in memory.conflicts.values()]
    return sorted(found, key=_in_program_order)


def _leaked(tracers: Sequence[Tracer]) -> list[Buffer]:
    """Buffers that are neither freed nor outputs."""
    freed = {buffer for t in tracers for buffer in t.freed}
    given = {view.buffer for t in tracers for outputs in t.outputs for view in outputs if view}
    return [buffer for t in tracers for buffer in t.buffers if buffer not in freed | given]


def _in_program_order(found: Diagnostic) -> tuple[bool, int, int]:
    """Errors first, each group by where it stands in the text."""
    return found.level != "error", found.span.line if found.span else 0, found.span.column if found.span else 0


def _unchecked(program: Program, why: str, hint: str) -> Diagnostic:
    """Not proved is an error to those who ask for a proof; `prove` lets it pass with a warning."""
    return Diagnostic(f"@{program.name} was not checked for races: {why}", hint=hint, kind=UNCHECKED)
