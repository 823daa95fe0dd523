"""What people read of a choice: aligned tables, in plain text."""

from __future__ import annotations

from collections.abc import Sequence

from hostir.choice.verdict import Choice, Timing


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; what looks like a number stands right."""
    widths = [max(len(line[i]) for line in (headers, *rows)) for i in range(len(headers))]
    return "\n".join(_line(line, widths) for line in (headers, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(w) if _number(cell) else cell.ljust(w) for cell, w in zip(cells, widths, strict=True)]
    return ("  " + "  ".join(padded)).rstrip()


def _number(cell: str) -> bool:
    return cell.replace(".", "").isdecimal() or cell == "-" or cell.endswith(("us", "%", " by", "streams"))


def describe(choice: Choice) -> str:
    """All of a choice: what was taken, the times of the candidates, and why the others were not possible."""
    parts = [f"{choice}"]
    if choice.timings:
        parts += ["", _times(choice)]
    if choice.impossible:
        rows = [[it.candidate.strategy, it.candidate.kernels, it.reason] for it in choice.impossible]
        parts += ["", "not possible:", *(_line(row, _widths(rows)) for row in rows)]
    if choice.notes:
        parts += ["", *(f"note: {note}" for note in choice.notes)]
    return "\n".join(parts)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]


def _times(choice: Choice) -> str:
    best = choice.timings[0].us
    headers = ["strategy", "streams", "kernels", "us", "slower by", "graph us", "eager us"]
    return table(headers, [_row(timing, best) for timing in choice.timings])


def _row(timing: Timing, best: float) -> list[str]:
    c = timing.candidate
    streams = str(c.streams) if c.on_streams else "-"
    slower = f"{timing.us / best - 1:.0%}" if timing.us > best > 0 else "-"
    return [c.strategy, streams, c.kernels, _us(timing.us), slower, _us(timing.graph), _us(timing.eager)]


def _us(time: float | None) -> str:
    return "-" if time is None else f"{time:.1f}" if time < 100 else f"{time:.0f}"
