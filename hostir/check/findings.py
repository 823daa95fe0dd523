"""Build the diagnostics about the order of events.

Each names the error, the statements involved, and what to do about the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hostir.check.ordering.joining import Trouble
from hostir.check.ordering.races import Conflict, Touch
from hostir.check.tracing.events import CALLER, Event
from hostir.check.tracing.memory import Buffer
from hostir.ir.op import Statement
from hostir.ir.program import Program, format_statement
from hostir.ir.source import Diagnostic, Span

MAX_NOTES = 8  # a finding about more events than this lists only the first four and the last four
SAME = "every rank of a team issues the same ones in the same order"
TROUBLES = {  # by category: message and hint; {} stands for the detail
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
    """A diagnostic about events that are in a wrong order, or that have no order and need one.

    Fields:
        buffer: the name of the buffer that the events access; empty if the finding is not about a buffer.
        events: the events that the finding is about.
        times: the number of occurrences of the finding, over all ranks, rounds and calls.
    """

    buffer: str = ""
    events: tuple[Event, ...] = ()
    times: int = 1


def in_program_order(finding: Diagnostic) -> tuple[bool, int, int]:
    """Return the key by which findings are sorted: errors first, then by position in the text."""
    return (
        finding.level != "error",
        finding.span.line if finding.span else 0,
        finding.span.column if finding.span else 0,
    )


class FindingBuilder:
    """Builds the findings about one program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def conflict(self, c: Conflict, times: int) -> Finding:
        """Return the finding for a conflict. `times` is the number of occurrences of the conflict."""
        return _often(self._conflict(c), times)

    def _conflict(self, c: Conflict) -> Finding:
        # The caller overwrites its tensors after it has read the outputs. A race with this overwrite of an output is
        # reported as a race with the read.
        reads = c.second.event.verb == "overwrites" and not c.buffer.persists
        if c.category == "unwritten" and c.first is not None:
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
        if c.category != "race":
            message = f"{self.place(second, c.buffer)} {_does(second)} %{c.buffer.name} after it was freed"
            return self.finding(c.category, message, [first.event, second.event], c.buffer, hint="free it later")
        message = (
            f"race on %{c.buffer.name}: {self.place(second, c.buffer)} {'reads' if reads else _does(second)} it, "
            f"while {self.place(first, c.buffer)} {_may(first)} it"
        )
        expected = f"an order between {_stream_of(first.event)} and {_stream_of(second.event)}"
        hint = _ordering(c)
        return self.finding("race", message, [first.event, second.event], c.buffer, expected=expected, hint=hint)

    def troubles(self, troubles: Iterable[Trouble]) -> Iterator[Finding]:
        """Yield the findings for troubles. All troubles with the same category and statements become one finding."""
        grouped: dict[tuple[object, ...], list[Trouble]] = {}
        for t in troubles:
            sides = frozenset(id(event.statement) for event in t.events if event is not None)
            grouped.setdefault((t.category, sides), []).append(t)
        for same in grouped.values():
            yield _often(self.trouble(same[0]), len(same))

    def trouble(self, t: Trouble) -> Finding:
        events = [event for event in t.events if event is not None]
        message, hint = (text.format(t.detail) for text in TROUBLES[t.category])
        # In these categories the first event blocks the others.
        first = t.category in ("deadlock", "SMs held", "queues shared")
        level = "warning" if t.category == "sent again" else "error"
        finding = self.finding(t.category, message, events, None, hint=hint, at=events[0] if first else None)
        missing = [n for n, event in enumerate(t.events) if event is None]
        lost = [(None, f"rank {t.detail.split()[n]} has none here") for n in missing] if t.detail else []
        return replace(finding, notes=(*finding.notes, *lost), level=level)

    def finding(
        self,
        category: str,
        message: str,
        events: list[Event],
        buffer: Buffer | None,
        expected: str = "",
        hint: str = "",
        at: Event | None = None,
    ) -> Finding:
        """Return a finding. It points at event `at`, by default the last event that belongs to a statement."""
        at = at or next((e for e in reversed(events) if e.statement is not None), None)
        shown = events if len(events) <= MAX_NOTES else [*events[: MAX_NOTES // 2], *events[-MAX_NOTES // 2 :]]
        notes = tuple((_span(e), f"{_where(e)}: {self.does(e)}") for e in shown)
        return Finding(
            message,
            _span(at) if at else buffer.value.span if buffer and buffer.value else None,
            expected,
            hint,
            notes,
            category=category,
            buffer=buffer.name if buffer else "",
            events=tuple(events),
        )

    def place(self, touch: Touch, buffer: Buffer) -> str:
        who = self.what(touch.event)
        return who if touch.event.rank == buffer.rank else f"{who} of another rank"

    def what(self, event: Event) -> str:
        """Return the text of the event's statement; "the caller" if the event belongs to no statement."""
        return f"'{format_statement(event.statement, self.program)}'" if event.statement is not None else "the caller"

    def does(self, event: Event) -> str:
        """Return the text of the event's statement.

        If the event belongs to no statement, return a description of the caller's action.
        """
        if event.statement is not None:
            return self.what(event)
        return {
            "writes": "the caller writes its inputs",
            "reads": "the caller reads the outputs",
            "overwrites": "the caller goes on, and overwrites its inputs and outputs",
        }[event.verb]


def leaks(buffers: Iterable[Buffer]) -> Iterator[Finding]:
    """Yield a warning for each leaked buffer. If several ranks leak the buffer of the same name, yield one warning."""
    for buffer in {b.name: b for b in buffers}.values():
        span = buffer.value.span if buffer.value else None
        yield Finding(
            f"%{buffer.name} is neither freed nor an output: it takes memory until the call ends",
            span,
            hint=f"'free %{buffer.name}' on the caller's stream, after its last use",
            level="warning",
            category="leak",
            buffer=buffer.name,
        )


def _ordering(c: Conflict) -> str:
    """Return a hint for a race: it names the statements to insert so that the two accesses are ordered."""
    assert c.first is not None
    first, second = c.first.event, c.second.event
    if first.rank != second.rank:
        if first.call != second.call:
            return "end the program with a barrier, so that no rank begins a call before all have ended the last one"
        return "'signal' after the first and 'wait_signal' before the second, or a barrier between them"
    handle = getattr(first.statement, "handle", None)
    if handle is not None:
        waited = next((str(lane[1]) for lane, _ in first.ends if len(lane) == 2), None)
        if waited in (None, second.stream):  # no stream waits, or this stream waits too late
            return f"'wait {handle}' on {_stream(second)} before it"
        return f"on {_stream(second)}, 'synchronize' the stream that waits for {handle}, {waited}, before it"
    if second.statement is not None and first.statement is not None and _in_blocks(first.statement):
        block = "'wait_signal' for the flag of this block before it"
        return f"on {_stream(second)}, {block}, or 'synchronize' {_stream(first)} for all blocks"
    user = "the stream that 'current_stream' gives at the beginning"
    if first.stream == CALLER and second.stream != CALLER:
        return f"on {_stream(second)}, 'synchronize %user' before it, %user being {user}"
    if first.stream != second.stream:
        return f"on {_stream(second)}, 'synchronize {first.stream.removeprefix('stream ')}' before it"
    return "wait for the communication before memory that it uses is touched"


def _where(event: Event) -> str:
    rounds = f", round {', '.join(map(str, event.rounds))}" if event.rounds else ""
    return f"rank {event.rank}, {_stream(event)}{rounds}, call {event.call + 1}"


def _stream_of(event: Event) -> str:
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
    """Return the finding with its field `times` set. If `times` is more than 1, add a note with this number."""
    more = ((None, f"{times} places of these calls show it, over all ranks, rounds and calls"),) if times > 1 else ()
    return replace(finding, times=times, notes=(*finding.notes, *more))
