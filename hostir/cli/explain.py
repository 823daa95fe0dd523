"""Run `hostir explain`: print the strategy that is chosen for a fusion, as a table or as JSON."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence

from hostir.choice.choices import Candidate, Choice, Timing
from hostir.choice.decision import Decider, check_ranks, check_sizes
from hostir.choice.overlaps import normed_clauses, overlap_clauses
from hostir.choice.ranges import Range, Ranges, free_sizes
from hostir.cli.auto import platform_of
from hostir.cli.loading import load_named
from hostir.ir.program import Program
from hostir.ir.source import amount, error, is_first_rank
from hostir.knobs import KERNELS, SYMMETRIC_LIMIT
from hostir.lower.strategies import fusion_of
from hostir.plan.unroll import unroll


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as plain text with aligned columns. Numbers are aligned to the right."""
    widths = [max(len(line[i]) for line in (headers, *rows)) for i in range(len(headers))]
    return "\n".join(_line(line, widths) for line in (headers, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(w) if _is_numeric(cell) else cell.ljust(w) for cell, w in zip(cells, widths, strict=True)]
    return ("  " + "  ".join(padded)).rstrip()


def _is_numeric(cell: str) -> bool:
    """Return True if a cell is a number or the header of a column of numbers."""
    return (
        cell.replace(".", "").isdecimal()
        or cell == "-"
        or cell.endswith(("us", "%", " by", "streams", "bytes", "iB", "symmetric"))
    )


def describe(choice: Choice) -> str:
    """Return a choice as text: the chosen candidate, the times of all candidates, and the impossible candidates.

    For each impossible candidate, the text gives the reason.
    """
    parts = [f"{choice}"]
    if choice.timings:
        parts += ["", _times(choice)]
    if choice.impossible:
        rows = [[i.candidate.strategy, i.candidate.kernels, i.reason] for i in choice.impossible]
        parts += ["", "not possible:", *(_line(row, _widths(rows)) for row in rows)]
    if choice.notes:
        parts += ["", *(f"note: {note}" for note in choice.notes)]
    return "\n".join(parts)


def describe_ranges(ranges: Ranges) -> str:
    """Return the ranges of a free size as text: a table with one row for each range.

    A row shows the chosen candidate, and its time at one size of the range.
    """
    if len(ranges.free) > 1:
        return f"{ranges}\n\nbind all of them but one to see its ranges: --set {ranges.free[0]}=..."
    (name,) = ranges.free
    rows = [_range_row(ranges, row) for row in ranges.ranges]
    headers = [f"{name} from", "to", "strategy", "streams", "kernels", "times", f"at {name}=", "us", "symmetric"]
    notes = dict.fromkeys(note for row in ranges.ranges for note in (*row.choice.fallbacks, *row.choice.notes))
    note_lines = "".join(f"\nnote: {note}" for note in notes)
    return f"{str(ranges).splitlines()[0]}\n\n{table(headers, rows)}" + (f"\n{note_lines}" if note_lines else "")


def _range_row(ranges: Ranges, row: Range) -> list[str]:
    """Return the cells of the table's row for one range."""
    choice, (name,) = row.choice, ranges.free
    last = "-" if row.last is None else str(row.last)
    size = ranges.representative({name: row.first})[name]
    best = choice.timings[0]
    times = [choice.source, str(size), time_text(best.us), _symmetric(best)]
    return [str(row.first), last, choice.strategy, _streams(choice.taken), choice.kernels, *times]


def _streams(candidate: Candidate) -> str:
    return str(candidate.streams) if candidate.shows_streams else "-"


def _symmetric(timing: Timing) -> str:
    return amount(timing.symmetric) if timing.symmetric else "-"


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]


def _times(choice: Choice) -> str:
    best = choice.timings[0].us
    headers = ["strategy", "streams", "kernels", "us", "slower by", "graph us", "eager us", "symmetric"]
    return table(headers, [_row(timing, best) for timing in choice.timings])


def _row(timing: Timing, best: float) -> list[str]:
    """Return the cells of the table's row for one candidate. `best` is the time of the fastest candidate."""
    c = timing.candidate
    slower = f"{timing.us / best - 1:.0%}" if timing.us > best > 0 else "-"
    times = [time_text(timing.us), slower, time_text(timing.graph), time_text(timing.eager)]
    return [c.strategy, _streams(c), c.kernels, *times, _symmetric(timing)]


def time_text(time: float | None) -> str:
    """Return a time in microseconds as text."""
    return "-" if time is None else f"{time:.1f}" if time < 100 else f"{time:.0f}"


def explain_command(program: Program, sizes: Mapping[str, int], options: Namespace) -> int:
    """Print the choice for a fusion, or for each range of sizes if a size is free; return the exit code."""
    fusion = fusion_of(program)
    free = free_sizes(fusion, sizes)
    if not free:
        check_sizes(fusion, dict(sizes))
    if options.device is not None and (options.machine, options.hosts) != (None, None):
        option = "--hosts" if options.machine is None else "--machine"
        raise error(
            f"{option} names another machine, and --device a device of this machine", hint="leave one of them out"
        )
    platform = platform_of(fusion, options.device, options.machine, options.hosts)
    check_ranks(fusion, platform)
    decider = Decider(fusion, platform, KERNELS.get(options.kernels), options.calls, SYMMETRIC_LIMIT.get())
    if not is_first_rank():
        return 0
    if free:
        ranges = Ranges(decider, sizes)
        check_sizes(fusion, ranges.representative(dict.fromkeys(free, 1)))
        print(json.dumps(ranges.to_json(), indent=1) if options.json else describe_ranges(ranges))
        return 0
    choice = decider.choice(sizes)
    if options.json:
        print(json.dumps(choice.to_json(), indent=1))
        return 0
    print(describe(choice))
    host = decider.program_of(choice.taken)
    unrolled = unroll(host, host.meshes[0].devices[0], sizes)
    clauses = overlap_clauses(unrolled) + (normed_clauses(unrolled) if choice.taken.kernels == "triton" else ())
    print("\n" + "\n".join(f"'{choice.taken}': {clause}" for clause in clauses))
    return 0


def main(options: Namespace) -> int:
    """Run `hostir explain`; return its exit code."""
    program, sizes = load_named(options)
    return explain_command(program, sizes, options)
