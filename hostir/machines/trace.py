"""Traces: the statements that ran and their times, written as a Chrome trace for Perfetto or as an SVG picture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

from hostir.ir.op import REGISTRY, Statement
from hostir.ir.source import described, error, user_span

# Kinds of events. COMMUNICATION is also the name of the lane that shows communications.
COMMUNICATION = "communication"
MATMUL = "matmul"
OTHER = "other"
COLORS = {COMMUNICATION: "#e07b39", MATMUL: "#3f6fb5", OTHER: "#9aa5b1"}

# The picture, in pixels.
WIDTH, LEFT, RIGHT, TOP, LANE, GAP, BOTTOM = 1200, 190, 24, 64, 20, 10, 44
CHARACTER = 6.2  # of the text in a bar


class TraceEvent(NamedTuple):
    """A statement that ran on one stream of one rank.

    `start` and `end` are in seconds. `rounds` holds the round of each loop around the statement, outermost first.
    """

    rank: int
    stream: str
    statement: str
    start: float
    end: float
    rounds: tuple[int, ...] = ()

    @property
    def keyword(self) -> str:
        """The statement's keyword, for example `allgather` in `%h = allgather %x -> %y over didx`."""
        words = re.findall(r"(?<![%@\w])[a-z_]+", self.statement)
        return next((word for word in words if word in REGISTRY), self.statement)

    @property
    def activity(self) -> str:
        """The activity of the statement: communication, matmul or other. It decides the colour of the bar."""
        statement = REGISTRY.get(self.keyword, Statement)
        return COMMUNICATION if statement.transfers else MATMUL if statement.contracts else OTHER

    @property
    def label(self) -> str:
        """A short name: the keyword and the innermost round."""
        return f"{self.keyword} {self.rounds[-1]}" if self.rounds else self.keyword


class TraceMark(NamedTuple):
    """A moment on a stream of a rank, in seconds: the arrival of rows for which a kernel waits, with a text."""

    rank: int
    stream: str
    text: str
    at: float


@dataclass
class Trace:
    """A timeline of the statements that ran. Pass a trace to `hi.Executor` or `hi.run`, and write it to a file.

    If each rank is a process, each process records only its events. `extend` adds the events of other processes.

    Fields:
        title: the title of the picture.
        events: the statements that ran, in any order.
        marks: the arrivals of rows for which a kernel waits, on simulated ranks.
    """

    title: str = "hostir"
    events: list[TraceEvent] = field(default_factory=list)
    marks: list[TraceMark] = field(default_factory=list)

    def add(
        self, rank: int, stream: str, statement: str, start: float, end: float, rounds: tuple[int, ...] = ()
    ) -> None:
        """Record that a statement ran from `start` to `end`, in seconds on a clock that all ranks share."""
        self.events.append(TraceEvent(rank, stream, statement, start, end, rounds))

    def extend(self, events: Iterable[TraceEvent]) -> None:
        self.events.extend(events)

    @property
    def lanes(self) -> dict[int, list[str]]:
        """The labels of each rank's streams, in order: the caller's stream, numbered streams, then communications."""
        streams: dict[int, set[str]] = {}
        for event in self.events:
            streams.setdefault(event.rank, set()).add(event.stream)
        return {rank: sorted(streams[rank], key=_place) for rank in sorted(streams)}

    def to_chrome(self, path: str | Path) -> None:
        """Write a file in Chrome's trace format. Each rank is a process, and each stream of a rank is a track."""
        rows = ",\n".join(json.dumps(row) for row in self._chrome())
        other = json.dumps({"title": self.title})
        text = f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n{rows}\n]}}\n'
        _write(path, text)

    def _chrome(self) -> list[dict[str, object]]:
        first = min((e.start for e in self.events), default=0.0)
        tracks = {(rank, lane): i for rank, lanes in self.lanes.items() for i, lane in enumerate(lanes)}
        rows: list[dict[str, object]] = []
        for rank in self.lanes:
            rows.append(_metadata("process_name", rank, 0, name=f"rank {rank}"))
            rows.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        for (rank, lane), track in tracks.items():
            rows.append(_metadata("thread_name", rank, track, name=lane))
            rows.append(_metadata("thread_sort_index", rank, track, sort_index=track))
        for e in sorted(self.events, key=lambda e: (e.start, e.rank)):
            times = {"ts": round((e.start - first) * 1e6, 3), "dur": round((e.end - e.start) * 1e6, 3)}
            place = {"pid": e.rank, "tid": tracks[e.rank, e.stream]}
            args = {"args": {"rounds": list(e.rounds)}} if e.rounds else {}
            rows.append({"name": e.statement, "cat": e.activity, "ph": "X", **times, **place, **args})
        for m in (m for m in self.marks if (m.rank, m.stream) in tracks):
            at = {"ts": round((m.at - first) * 1e6, 3), "pid": m.rank, "tid": tracks[m.rank, m.stream]}
            rows.append({"name": m.text, "ph": "i", "s": "t", **at})  # an instant of a thread
        return rows

    def to_svg(self, path: str | Path) -> None:
        """Write an SVG picture. Each rank is a group of streams, and time goes from left to right.

        Pointing at a bar shows the bar's statement. A black line in a bar is the moment at which rows arrived for which
        the kernel waits. Pointing at it shows which rows.
        """
        _write(path, self._svg())

    def _svg(self) -> str:
        first = min((e.start for e in self.events), default=0.0)
        span = max((e.end for e in self.events), default=0.0) - first or 1e-6
        rows, y = {}, TOP
        body: list[str] = []
        for rank, lanes in self.lanes.items():
            height = LANE * len(lanes)
            body.append(f'<rect class="group" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{height}"/>')
            body.append(f'<text class="rank" x="16" y="{y + height / 2 + 4:g}">rank {rank}</text>')
            for lane in lanes:
                rows[rank, lane] = y
                body.append(f'<text class="lane" x="{LEFT - 8}" y="{y + LANE - 6}">{escape(lane)}</text>')
                y += LANE
            y += GAP
        bottom, scale = y - GAP, (WIDTH - LEFT - RIGHT) / span
        grid = [
            f'<path class="tick" d="M{LEFT + t * scale:.1f} {TOP}V{bottom + 5}"/>'
            f'<text class="time" x="{LEFT + t * scale:.1f}" y="{bottom + 19}">{label}</text>'
            for t, label in _ticks(span)
        ]
        bars = [self._bar(e, LEFT + (e.start - first) * scale, rows[e.rank, e.stream], scale) for e in self.events]
        bars += [
            f'<path class="mark" d="M{LEFT + (m.at - first) * scale:.2f} {rows[m.rank, m.stream]}v{LANE}">'
            f"<title>{escape(m.text)}</title></path>"
            for m in self.marks
            if (m.rank, m.stream) in rows
        ]
        height = bottom + BOTTOM
        box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
        return "\n".join([head, STYLE, *self._legend(), *body, *grid, *bars, "</svg>"]) + "\n"

    def _bar(self, e: TraceEvent, x: float, y: int, scale: float) -> str:
        width = max((e.end - e.start) * scale, 0.75)
        rounds = f", round {', '.join(map(str, e.rounds))}" if e.rounds else ""
        tip = f"{e.statement}\n{_time(e.end - e.start)}{rounds}"
        size = f'width="{width:.2f}" height="{LANE - 4}"'
        bar = f'<rect x="{x:.2f}" y="{y + 2}" {size} rx="1.5" fill="{COLORS[e.activity]}"/>'
        fits = len(e.label) * CHARACTER + 6 <= width
        text = f'<text class="bar" x="{x + width / 2:.2f}" y="{y + LANE - 6}">{escape(e.label)}</text>' if fits else ""
        return f"<g><title>{escape(tip)}</title>{bar}{text}</g>"

    def _legend(self) -> list[str]:
        drawn = [f'<text class="title" x="16" y="30">{escape(self.title)}</text>']
        x = LEFT
        for activity, color in COLORS.items():
            drawn.append(f'<rect x="{x}" y="42" width="12" height="12" rx="1.5" fill="{color}"/>')
            drawn.append(f'<text class="legend" x="{x + 18}" y="52">{activity}</text>')
            x += 40 + round(len(activity) * 7)
        return drawn


STYLE = """<style>
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.rank { font-weight: 600 }
.lane { fill: #57606a; text-anchor: end; font-size: 11px }
.time { fill: #57606a; text-anchor: middle; font-size: 11px }
.bar { fill: #fff; text-anchor: middle; font-size: 10.5px }
.group { fill: #f3f5f7 }
.tick { stroke: #d0d7de; stroke-width: 1 }
.mark { stroke: #24292f; stroke-width: 2 }
</style>
<rect width="100%" height="100%" fill="#fff"/>"""


def _write(path: str | Path, text: str) -> None:
    if not isinstance(path, str | Path):
        raise error(f"not a path: {described(path)}", user_span(), expected="a str or a pathlib.Path")
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise error(f"cannot write {path}: {problem.strerror or problem}", user_span()) from None


def _metadata(event: str, rank: int, track: int, **args: object) -> dict[str, object]:
    return {"name": event, "ph": "M", "pid": rank, "tid": track, "args": args}


def _place(lane: str) -> tuple[bool, bool, int, str]:
    """Return the sort key of a stream. The caller's stream comes first, then streams by number, then communications."""
    number = re.search(r"\d+", lane)
    return lane.startswith(COMMUNICATION), lane != "caller", int(number[0]) if number else 0, lane


def _unit(seconds: float) -> tuple[float, str]:
    return (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1.0, "s")


def _time(seconds: float) -> str:
    factor, unit = _unit(seconds)
    return f"{seconds * factor:.4g} {unit}"


def _ticks(span: float) -> list[tuple[float, str]]:
    """Return at most eleven round times in seconds, from 0 to `span`, each with a label."""
    factor, unit = _unit(span)
    step = next(m * 10.0**e for e in range(-9, 12) for m in (1, 2, 5) if span * factor <= m * 10.0**e * 10)
    return [(i * step / factor, f"{i * step:g} {unit}") for i in range(int(span * factor / step) + 1)]
