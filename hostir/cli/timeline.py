"""Run `hostir timeline`: predict when each statement of a program runs, and print it, draw it, or compare two ways."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from hostir.check import prove
from hostir.choice.decision import with_hosts_of
from hostir.choice.hardware import REFERENCE
from hostir.choice.platforms import planned
from hostir.choice.timeline import PredictedSpan, PredictedTimeline, timeline
from hostir.cli.explain import table
from hostir.cli.loading import load_named
from hostir.cli.lowering import lowered, refuse_lowering
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import error
from hostir.lower import AUTO

MOST = 40  # statements that are printed for a rank


def describe(predicted: PredictedTimeline, rank: int) -> str:
    """Return a timeline as text: what the resources of a rank do, its statements, and the critical path."""
    spans = predicted.of_rank(rank)
    headers = ["begin us", "end us", "waits us", "rank", "lane", "statement"]
    shown, left = spans[:MOST], len(spans) - MOST
    parts = [
        f"@{predicted.program} on {predicted.machine}, kernels {predicted.kernels}: {predicted.us:.1f} us on the "
        f"device; the host issues a call in {predicted.host_us:.0f} us",
        table([f"rank {rank}", "us", "share %"], _busy(predicted, rank)),
        f"statements of rank {rank}:\n" + table(headers, [_row(span) for span in shown]),
    ]
    if left > 0:
        parts[-1] += f"\n  ... and {left} more: --json, --trace or -o has all"
    parts.append("critical path:\n" + table(headers, [_row(span) for span in predicted.critical[-MOST:]]))
    return "\n\n".join(parts)


def compared(timelines: Mapping[str, PredictedTimeline], rank: int) -> str:
    """Return a table with a column for each of several timelines, by name."""
    columns = [_figures(each, rank) for each in timelines.values()]
    rows = [[name, *(f"{column[name]:.1f}" for column in columns)] for name in columns[0]]
    return table([f"us, rank {rank}", *(f"{name} us" for name in timelines)], rows)


def _figures(predicted: PredictedTimeline, rank: int) -> dict[str, float]:
    """Return the microseconds of a call, of the resources of a rank, and of its exposed communication, by name."""
    busy = predicted.busy(rank)
    return {"device": predicted.us, "host": predicted.host_us, **busy, "exposed": predicted.exposed(rank)}


def _busy(predicted: PredictedTimeline, rank: int) -> list[list[str]]:
    """Return the rows of the table of resources: the name, the microseconds, and the share of the call."""
    times = {name: us for name, us in (predicted.busy(rank) | {"exposed": predicted.exposed(rank)}).items() if us}
    return [[name, f"{us:.1f}", f"{100 * us / predicted.us:.0f}"] for name, us in times.items()]


def _row(span: PredictedSpan) -> list[str]:
    return [f"{span.begin:.1f}", f"{span.end:.1f}", f"{span.waited:.1f}", str(span.rank), span.lane, str(span)]


def timeline_command(source: Program, sizes: dict[str, int], options: Namespace) -> int:
    """Predict the timelines that the command line asks for, and print or write them; return the exit code."""
    machine = options.machine or REFERENCE.name
    for path, endings in ((options.trace, (".json",)), (options.out, (".svg",))):
        if path and Path(path).suffix not in endings:
            raise error(f"a timeline in {path}", expected=f"a file ending in {endings[0]}")
    if options.against and source.phase is Phase.HOST:
        raise error(f"@{source.name} is a host program already", hint="--against is for another strategy of a fusion")
    if source.phase is not Phase.HOST:
        source = with_hosts_of(source, planned(source, machine, options.hosts))
    strategies = [options.strategy, *options.against]
    timelines: dict[str, PredictedTimeline] = {}
    for strategy in strategies:
        chosen = Namespace(**{**vars(options), "strategy": strategy})
        program = lowered(source, sizes, chosen, proved=False)
        bound = {name: size for name, size in sizes.items() if name in program.size_names}
        predicted = timeline(program, machine=machine, hosts=options.hosts, sizes=bound, kernels=options.kernels)
        timelines[chosen.strategy or program.name] = predicted
    first, *_ = timelines.values()
    if not 0 <= options.rank < source.ranks:
        raise error(f"--rank {options.rank}", expected=f"a rank from 0 to {source.ranks - 1}")
    for path in filter(None, (options.trace, options.out)):
        _write(timelines, Path(path))
    if options.json:
        print(json.dumps([each.to_json() for each in timelines.values()], indent=1))
        return 0
    print(describe(first, options.rank))
    if len(timelines) > 1:
        print("\n" + compared(timelines, options.rank))
    return 0


def _write(timelines: Mapping[str, PredictedTimeline], path: Path) -> None:
    """Write each timeline to a file. The names of further files contain the strategy."""
    for number, (name, predicted) in enumerate(timelines.items()):
        file = path.with_stem(f"{path.stem}-{name}") if number else path
        trace = predicted.trace()
        (trace.to_svg if file.suffix == ".svg" else trace.to_chrome)(file)


def main(options: Namespace) -> int:
    """Run `hostir timeline`; return its exit code."""
    program, sizes = load_named(options)
    refuse_lowering(program, options)
    if program.phase is Phase.HOST:  # the timeline of a program that may deadlock would mean nothing
        program.check_sizes(sizes)
        prove(program, sizes)
    if program.phase is not Phase.HOST and options.strategy is None:
        options.strategy = AUTO
    return timeline_command(program, sizes, options)
