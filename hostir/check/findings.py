"""Describe findings: both statements, their ranks and streams, the order that is missing, and what to insert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hostir.check.order import Conflict, Touch, Trouble
from hostir.check.tracer import CALLER, Buffer, Event
from hostir.ir.program import Program, format_statement
from hostir.ir.source import Diagnostic, Span

MAX_NOTES = 8  # places that one finding lists: of a long cycle the first and the last
SAME = "every rank of a team issues the same ones in the same order"
TROUBLES = {  # what is wrong and what to do, with room for the detail
    "collectives differ": ("ranks {} differ in the collectives of their team", SAME),
    "barriers differ": ("ranks {} differ in the barriers of their team", SAME),
    "messages differ": (
        "a message is received as something else than was sent",
        "as many elements of one dtype on both sides",
    ),
    "message without partner": (
        "a message has no partner: nobody takes its other end",
        "a recv for each send, in the same order, on the rank that the send names",
    ),
    "nobody sends": (
        "nobody sends the signal that is waited for: epoch {} of this flag",
        "send it in the same call, to this rank and this flag",
    ),
    "sent twice": ("two ranks send epoch {} of one flag", "a flag for each of them, or epochs that rise"),
    "sent again": (
        "epoch {} of one flag is sent again: no wait tells the second signal from the first",
        "give each signal an epoch of its own, or send it once",
    ),
    "stale epoch": ("a stale epoch: {} of one flag", "epochs of a flag rise"),
    "flag shared": (
        "one flag is shared: nothing orders the signals of epochs {}",
        "a flag for each stream, or an order between the signals",
    ),
    "deadlock": ("deadlock: these wait for each other in a circle", "let one of them come first on every rank"),
    "queues shared": (
        "these wait for each other in a circle where streams share a hardware queue, as there are more than queues",
        "use fewer streams, issue what is waited for first, or give CUDA_DEVICE_MAX_CONNECTIONS more than 8, up to 32",
    ),
    "SMs held": (
        "a kernel holds all SMs while it waits for what needs them",
        "let what it waits for begin before it, or use copies between ranks, which need no SMs",
    ),
}


@dataclass(frozen=True)
class Finding(Diagnostic):
    """A diagnostic about the order of events. `events` are those concerned; the span points at the last of them."""

    buffer: str = ""
    events: tuple[Event, ...] = ()
    times: int = 1  # in how many places of the unrolled program, over all ranks and calls


class FindingBuilder:
    """Builds the findings about one program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    # Memory -----------------------------------------------------------------------------------------------------------
    def conflict(self, c: Conflict, times: int) -> Finding:
        """Return the finding for a conflict that was seen so many times."""
        return _often(self._conflict(c), times)

    def _conflict(self, c: Conflict) -> Finding:
        reads = c.second.event.verb == "overwrites" and not c.buffer.persists  # the caller takes an output first
        if c.kind == "unwritten" and c.first is not None:
            left = self.what(c.first.event)
            message = f"{self.place(c.second, c.buffer)} reads %{c.buffer.name}, rows of which {left} leaves undefined"
            events = [c.first.event, c.second.event]
            hint = f"write these rows of %{c.buffer.name} before they are read, or read what they stand for"
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
        """Return a hint: what to insert so that the two accesses are ordered."""
        assert c.first is not None
        first, second = c.first.event, c.second.event
        if first.rank != second.rank:
            if first.call != second.call:
                return (
                    "end the program with a barrier, so that no rank begins a call while another is in the one before"
                )
            return "'signal' behind the first and 'wait_signal' before the second, or a barrier between them"
        handle = getattr(first.statement, "handle", None)
        if handle is not None:
            waited = next((str(lane[1]) for lane, _ in first.ends if len(lane) == 2), None)
            if waited in (None, second.stream):  # nobody waits, or too late
                return f"'wait {handle}' on {_stream(second)} before it"
            return f"on {_stream(second)}, 'synchronize' the stream that waits for {handle}, {waited}, before it"
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
                hint=f"'free %{buffer.name}' on the caller's stream, behind all that uses it",
                level="warning",
                kind="leak",
                buffer=buffer.name,
            )

    # Ranks ------------------------------------------------------------------------------------------------------------
    def troubles(self, troubles: Iterable[Trouble]) -> Iterator[Finding]:
        """Yield one finding for each set of statements in trouble, with the number of times."""
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
        found = self.finding(t.kind, message, events, None, hint=hint, at=events[0] if first else None)
        missing = [n for n, event in enumerate(t.events) if event is None]
        lost = [(None, f"rank {t.detail.split()[n]} has none here") for n in missing] if t.detail else []
        return replace(found, notes=(*found.notes, *lost), level=level)

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
        """Return the text of the event's statement, or what the caller does."""
        if event.statement is not None:
            return self.what(event)
        return {
            "writes": "the caller writes its inputs",
            "reads": "the caller reads the outputs",
            "overwrites": "the caller goes on, and overwrites what is its own",
        }[event.verb]

    def where(self, event: Event) -> str:
        rounds = f", round {', '.join(map(str, event.rounds))}" if event.rounds else ""
        return f"rank {event.rank}, {_stream(event)}{rounds}, call {event.call + 1}"

    def stream(self, event: Event) -> str:
        if event.lane is None or event.lane[1] == "team":
            return f"the communication of rank {event.rank}"
        return f"{_stream(event)} of rank {event.rank}"


def _does(touch: Touch) -> str:
    return "writes" if touch.access.does == "undefines" else touch.access.does


def _may(touch: Touch) -> str:
    if touch.event.verb == "allocates":
        return "may not have given"
    return {"reads": "may still read", "frees": "frees"}.get(touch.access.does, "may still write")


def _stream(event: Event) -> str:
    return "the caller's stream" if event.stream == CALLER else event.stream


def _span(event: Event) -> Span | None:
    return event.statement.span if event.statement is not None else None


def _often(found: Finding, times: int) -> Finding:
    """Return a finding that says how many places show it."""
    more = ((None, f"{times} places of these calls show it, over all ranks, rounds and calls"),) if times > 1 else ()
    return replace(found, times=times, notes=(*found.notes, *more))
