"""Prove a host program free of races, deadlocks and misuse of memory, or report where it is not.

Loops are unrolled for the given sizes; symbols without a value get a small one. Every rank is traced through two calls,
or more if two calls do not show every error. The events of all ranks are joined by the rules of docs/memory-model.md,
and one walk with vector clocks checks all accesses to memory. A finding names both statements, their ranks and streams,
the missing order, and the statement to insert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hostir.check import MAX_CALLS
from hostir.check.alike import Alike, alike
from hostir.check.events import CALLER, Event
from hostir.check.held_sms import calls_needed, kernels_in_the_way
from hostir.check.joining import Trouble
from hostir.check.memory import Buffer
from hostir.check.order import Order
from hostir.check.races import Conflict, RaceDetector, Touch
from hostir.check.signature import small_sizes
from hostir.check.tracer import Tracer
from hostir.check.waits import cyclic_waits, flags_out_of_order
from hostir.ir.machine import uncollected, unrolled_length
from hostir.ir.op import Statement
from hostir.ir.program import Program, format_statement
from hostir.ir.source import UNCHECKED, Diagnostic, HostIRError, Span

MAX_STATEMENTS = 500_000  # over all ranks and calls; checking this many takes about a minute
JOIN = "have the kernel's stream 'synchronize' the others first"
VALUES = "give values: --set NAME=VALUE"


@dataclass(frozen=True)
class Analysis:
    """The result of a check: findings, the order of events (None if not kept), and the sizes and calls checked.

    `resizable`: True if symmetric buffers may have another size in every call (see `RaceDetector`).
    """

    findings: list[Diagnostic]
    order: Order | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    calls: int = 2
    resizable: bool = False


@uncollected()
def analyse_quickly(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Analysis:
    """Do as `analyse`, on rank 0 alone if it represents all ranks and nothing is wrong. The result holds no order."""
    analysis = _of_one_rank(program, sizes or {}, calls)
    return analysis or replace(analyse(program, sizes, calls), order=None)


def _of_one_rank(program: Program, sizes: Mapping[str, int], calls: int | None) -> Analysis | None:
    """Analyse rank 0 alone; return None if all ranks have to be traced.

    All ranks have to be traced if rank 0 does not represent them; or if something is wrong and the program is small
    enough to trace all ranks, whose findings are more precise.
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
    findings = findings_of(program, order)
    more = not findings and not calls and calls_needed(order, program.ranks) > number
    unsure = any(f.kind == "SMs held" for f in findings)
    if more or unsure or (findings and _statements(program, bound, number) <= MAX_STATEMENTS):
        return None
    return Analysis(findings, None, bound, number, order.resizable)


@uncollected()
def analyse(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Analysis:
    """Trace all ranks of a host program whose structure is sound, and check the order of their events.

    Unless `calls` is given, enough consecutive calls are checked to show the errors of any number of calls.
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
    """Trace `calls` calls on all ranks, and check their events."""
    tracers = [Tracer(rank, program, sizes) for rank in range(program.ranks)]
    try:
        for tracer in tracers:
            for _ in range(calls):
                tracer.call()
    except HostIRError as refused:
        return Analysis(list(refused.diagnostics), None, sizes, calls)
    if problems := {key: problem for tracer in tracers for key, problem in tracer.misuse.problems.items()}:
        return Analysis(sorted(problems.values(), key=_in_program_order), None, sizes, calls)
    order = Order([tracer.trace for tracer in tracers])
    return Analysis(findings_of(program, order), order, sizes, calls, order.resizable)


def shared_queues(program: Program, sizes: Mapping[str, int]) -> list[Diagnostic]:
    """Return the deadlocks of an otherwise sound program on a device whose streams share hardware queues.

    The check assumes a single queue: a wait blocks everything that its rank issues later, to any stream.
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
    order.resizable = memory.resizable
    findings: list[Finding] = list(build.troubles([*cyclic_waits(order, left), *flags_out_of_order(order)]))
    if not left:
        memory.finish()
        findings += build.troubles(order.stuck() if isinstance(order, Alike) else kernels_in_the_way(order))
        findings += build.leaks(buffer for rank in order.ranks for buffer in rank.leaked)
    findings += [build.conflict(c, times) for c, times in _most_specific(memory.conflicts.values())]
    memory.forget()
    return sorted(findings, key=_in_program_order)


def _most_specific(conflicts: Iterable[tuple[Conflict, int]]) -> list[tuple[Conflict, int]]:
    """Drop conflicts with an `allocate` if another conflict reports the same missing order between two streams."""
    every = list(conflicts)
    streams = {(id(c.second.event.statement), c.first.event.stream) for c, _ in every if c.first and not _of_new(c)}
    return [(c, n) for c, n in every if not (_of_new(c) and _sides(c) in streams)]


def _of_new(conflict: Conflict) -> bool:
    return conflict.first is not None and conflict.first.event.verb == "allocates"


def _sides(conflict: Conflict) -> tuple[int, str]:
    return id(conflict.second.event.statement), conflict.first.event.stream if conflict.first else ""


def _in_program_order(finding: Diagnostic) -> tuple[bool, int, int]:
    """Return the sort key of a finding: errors first, then by position in the text."""
    return (
        finding.level != "error",
        finding.span.line if finding.span else 0,
        finding.span.column if finding.span else 0,
    )


def _unchecked(program: Program, why: str, hint: str) -> Diagnostic:
    """Return the error that a program was not checked for races, with the reason; `prove` refuses such a program."""
    return Diagnostic(f"@{program.name} was not checked for races: {why}", hint=hint, kind=UNCHECKED)


# Findings -------------------------------------------------------------------------------------------------------------
# Diagnostics about the order of events: the error, the statements involved, and what to do about it.

MAX_NOTES = 8  # the most events that a finding lists; of a longer cycle it lists the first four and the last four
SAME = "every rank of a team issues the same ones in the same order"
TROUBLES = {  # by kind: message and hint; {} stands for the detail
    "collectives differ": ("ranks {} differ in the collectives of their team", SAME),
    "barriers differ": ("ranks {} differ in the barriers of their team", SAME),
    "messages differ": (
        "a message is sent and received with different sizes or dtypes",
        "the same number of elements and the same dtype on both sides",
    ),
    "message without partner": (
        "a message has no partner: no rank issues its other side",
        "a recv for each send, in the same order, on the rank that the send names",
    ),
    "nobody sends": (
        "nobody sends the signal that is waited for: epoch {} of this flag",
        "send it in the same call, to this rank and this flag",
    ),
    "sent twice": ("two ranks send epoch {} of one flag", "a flag for each of them, or epochs that rise"),
    "sent again": (
        "epoch {} of one flag is sent again: no wait tells the second signal from the first",
        "give each signal a different epoch, or send it once",
    ),
    "stale epoch": ("a stale epoch: {} of one flag", "epochs of a flag rise"),
    "flag shared": (
        "one flag is shared: nothing orders the signals of epochs {}",
        "a flag for each stream, or an order between the signals",
    ),
    "deadlock": ("deadlock: these wait for each other in a cycle", "let one of them come first on every rank"),
    "queues shared": (
        "these wait for each other in a cycle: streams share a hardware queue, as there are more streams than queues",
        "use fewer streams, issue the awaited work first, or set CUDA_DEVICE_MAX_CONNECTIONS higher, up to 32",
    ),
    "SMs held": (
        "a kernel holds all SMs while it waits for work that needs them",
        "have the awaited work start before it, or use copies between ranks, which need no SMs",
    ),
}


@dataclass(frozen=True)
class Finding(Diagnostic):
    """A diagnostic about the order of `events`."""

    buffer: str = ""
    events: tuple[Event, ...] = ()
    times: int = 1  # the number of its occurrences over all ranks, rounds and calls


class FindingBuilder:
    """Builds the findings about one program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    # Memory -----------------------------------------------------------------------------------------------------------
    def conflict(self, c: Conflict, times: int) -> Finding:
        """Return the finding for a conflict that occurs this many times."""
        return _often(self._conflict(c), times)

    def _conflict(self, c: Conflict) -> Finding:
        # The caller reads an output before it overwrites the output.
        reads = c.second.event.verb == "overwrites" and not c.buffer.persists
        if c.kind == "unwritten" and c.first is not None:
            left = self.what(c.first.event)
            message = f"{self.place(c.second, c.buffer)} reads %{c.buffer.name}, rows of which {left} leaves undefined"
            events = [c.first.event, c.second.event]
            hint = f"write these rows of %{c.buffer.name} before they are read, or read the `own` rows instead"
            return self.finding("unwritten", message, events, c.buffer, hint=hint)
        if c.first is None:
            message = f"{self.place(c.second, c.buffer)} reads %{c.buffer.name}, parts of which nobody has written"
            hint = f"write all of %{c.buffer.name} first, or read less of it"
            return self.finding("unwritten", message, [c.second.event], c.buffer, hint=hint)
        first, second = c.first, c.second
        if c.kind != "race":
            message = f"{self.place(second, c.buffer)} {_does(second)} %{c.buffer.name} after it was freed"
            return self.finding(c.kind, message, [first.event, second.event], c.buffer, hint="free it later")
        message = (
            f"race on %{c.buffer.name}: {self.place(second, c.buffer)} {'reads' if reads else _does(second)} it, "
            f"while {self.place(first, c.buffer)} {_may(first)} it"
        )
        expected = f"an order between {self.stream(first.event)} and {self.stream(second.event)}"
        hint = self.repair(c)
        return self.finding("race", message, [first.event, second.event], c.buffer, expected=expected, hint=hint)

    def repair(self, c: Conflict) -> str:
        """Return a hint: the statements to insert so that the two accesses are ordered."""
        assert c.first is not None
        first, second = c.first.event, c.second.event
        if first.rank != second.rank:
            if first.call != second.call:
                return (
                    "end the program with a barrier, so that no rank begins a call before all have ended the last one"
                )
            return "'signal' after the first and 'wait_signal' before the second, or a barrier between them"
        handle = getattr(first.statement, "handle", None)
        if handle is not None:
            waited = next((str(lane[1]) for lane, _ in first.ends if len(lane) == 2), None)
            if waited in (None, second.stream):  # nobody waits, or too late
                return f"'wait {handle}' on {_stream(second)} before it"
            return f"on {_stream(second)}, 'synchronize' the stream that waits for {handle}, {waited}, before it"
        if second.statement is not None and first.statement is not None and _in_blocks(first.statement):
            block = "'wait_signal' for the flag of this block before it"
            return f"on {_stream(second)}, {block}, or 'synchronize' {_stream(first)} for all blocks"
        user = "the stream that 'current_stream' gives at the beginning"
        if first.stream == CALLER and second.stream != CALLER:
            return f"on {_stream(second)}, 'synchronize %user' before it, %user being {user}"
        if second.stream == CALLER and first.stream != CALLER:
            return f"on the caller's stream, 'synchronize {first.stream.removeprefix('stream ')}' before it"
        if first.stream != second.stream:
            return f"on {_stream(second)}, 'synchronize {first.stream.removeprefix('stream ')}' before it"
        return "wait for the communication before memory that it uses is touched"

    def leaks(self, buffers: Iterable[Buffer]) -> Iterator[Finding]:
        for buffer in {b.name: b for b in buffers}.values():
            span = buffer.value.span if buffer.value else None
            yield Finding(
                f"%{buffer.name} is neither freed nor an output: it takes memory until the call ends",
                span,
                hint=f"'free %{buffer.name}' on the caller's stream, after its last use",
                level="warning",
                kind="leak",
                buffer=buffer.name,
            )

    # Ranks ------------------------------------------------------------------------------------------------------------
    def troubles(self, troubles: Iterable[Trouble]) -> Iterator[Finding]:
        """Yield one finding for each kind of trouble and set of statements, with the number of times it occurs."""
        grouped: dict[tuple[object, ...], list[Trouble]] = {}
        for t in troubles:
            sides = frozenset(id(event.statement) for event in t.events if event is not None)
            grouped.setdefault((t.kind, sides), []).append(t)
        for same in grouped.values():
            yield _often(self.trouble(same[0]), len(same))

    def trouble(self, t: Trouble) -> Finding:
        events = [event for event in t.events if event is not None]
        message, hint = (text.format(t.detail) for text in TROUBLES[t.kind])
        first = t.kind in ("deadlock", "SMs held", "queues shared")  # the first event is the one that blocks the others
        level = "warning" if t.kind == "sent again" else "error"
        finding = self.finding(t.kind, message, events, None, hint=hint, at=events[0] if first else None)
        missing = [n for n, event in enumerate(t.events) if event is None]
        lost = [(None, f"rank {t.detail.split()[n]} has none here") for n in missing] if t.detail else []
        return replace(finding, notes=(*finding.notes, *lost), level=level)

    # Words ------------------------------------------------------------------------------------------------------------
    def finding(
        self,
        kind: str,
        message: str,
        events: list[Event],
        buffer: Buffer | None,
        expected: str = "",
        hint: str = "",
        at: Event | None = None,
    ) -> Finding:
        """Return a finding that points at an event: by default the last one that belongs to a statement."""
        at = at or next((e for e in reversed(events) if e.statement is not None), None)
        shown = events if len(events) <= MAX_NOTES else [*events[: MAX_NOTES // 2], *events[-MAX_NOTES // 2 :]]
        notes = tuple((_span(e), f"{self.where(e)}: {self.does(e)}") for e in shown)
        return Finding(
            message,
            _span(at) if at else buffer.value.span if buffer and buffer.value else None,
            expected,
            hint,
            notes,
            kind=kind,
            buffer=buffer.name if buffer else "",
            events=tuple(events),
        )

    def place(self, touch: Touch, buffer: Buffer) -> str:
        who = self.what(touch.event)
        return who if touch.event.rank == buffer.rank else f"{who} of another rank"

    def what(self, event: Event) -> str:
        """Return the text of the event's statement, or "the caller"."""
        return f"'{format_statement(event.statement, self.program)}'" if event.statement is not None else "the caller"

    def does(self, event: Event) -> str:
        """Return the text of the event's statement, or a description of the caller's action."""
        if event.statement is not None:
            return self.what(event)
        return {
            "writes": "the caller writes its inputs",
            "reads": "the caller reads the outputs",
            "overwrites": "the caller goes on, and overwrites its inputs and outputs",
        }[event.verb]

    def where(self, event: Event) -> str:
        rounds = f", round {', '.join(map(str, event.rounds))}" if event.rounds else ""
        return f"rank {event.rank}, {_stream(event)}{rounds}, call {event.call + 1}"

    def stream(self, event: Event) -> str:
        transfer = event.statement is not None and event.statement.started is not None
        if transfer and (event.lane is None or event.lane[1] == "team"):
            return f"the communication of rank {event.rank}"
        return f"{_stream(event)} of rank {event.rank}"


def _in_blocks(s: Statement) -> bool:
    """Return True if a statement sets a flag after each block of its result."""
    return any(use.raises and use.rows for use in s.flag_operands)


def _does(touch: Touch) -> str:
    return "writes" if touch.access.does == "undefines" else touch.access.does


def _may(touch: Touch) -> str:
    if touch.event.verb == "allocates":
        return "may not yet have allocated"
    return {"reads": "may still read", "frees": "frees"}.get(touch.access.does, "may still write")


def _stream(event: Event) -> str:
    return "the caller's stream" if event.stream == CALLER else event.stream


def _span(event: Event) -> Span | None:
    return event.statement.span if event.statement is not None else None


def _often(finding: Finding, times: int) -> Finding:
    """Return the finding with a note of how many times it occurs, if more than once."""
    more = ((None, f"{times} places of these calls show it, over all ranks, rounds and calls"),) if times > 1 else ()
    return replace(finding, times=times, notes=(*finding.notes, *more))
