"""Draw what the host does during a warm call of an all-gather + matmul: by hand, from Python, and from native code.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.host_timeline --out benchmarks/results/host_timeline
    python -m benchmarks.host_timeline --draw benchmarks/results/host_timeline.json docs/images/host_timeline.svg

By hand, a call is `all_gather_into_tensor` and `mm`. hostir's calls are by a strategy and cuBLAS, without `out=`. The
spans are medians of many calls of rank 0. The device has ended its work before each call. To note when a part ends
takes time, too: the time of a call without notes is written beside its spans.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks.chart import STYLE
from benchmarks.harness import synchronize, table, write
from benchmarks.overhead import timed
from examples import patterns
from hostir.job.session import session
from hostir.machines.cuda.taped import IssuedSteps

M, K, N = 2048, 4096, 3584
Part = tuple[str, str, float, float]  # kind, text, begin and end in microseconds since the call began
Stamps = list[tuple[str, str, float]]  # kind and text of a span, and the time at which it ended
KINDS = {"torch": "torch: cuBLAS, NCCL", "step": "a step in Python", "native": "native code", "rest": "checks, results"}


class Stamped:
    """Calls that note when each part of them ends."""

    def __init__(self) -> None:
        self.stamps: Stamps = []

    def end(self, kind: str, text: str) -> None:
        self.stamps.append((kind, text, time.perf_counter() * 1e6))

    def part(self, kind: str, text: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and notes its end."""

        def timed(*arguments: Any, **options: Any) -> Any:
            result = work(*arguments, **options)
            self.end(kind, text)
            return result

        return timed

    def spans(self, call: Callable[[], Any], repeats: int, settle: Callable[[], Any]) -> list[Part]:
        """Return the spans of a call, as medians."""
        runs = []
        for _ in range(repeats):
            settle()
            self.stamps = []
            begin = time.perf_counter() * 1e6
            call()
            self.end("rest", "return")
            runs.append([(kind, text, at - begin) for kind, text, at in self.stamps])
        settle()
        spans, begin = [], 0.0
        for number, (kind, text, _) in enumerate(runs[-1]):
            end = statistics.median(run[number][2] for run in runs)
            spans.append((kind, text, begin, end))
            begin = end
        return spans


def stamped(executor: Any, stamps: Stamped) -> None:
    """Let the parts of an executor's warm calls note their ends."""
    plan = executor.latest.plan
    texts = {id(step): plan.unrolled.text(op) for step, op in zip(plan.steps, plan.ops, strict=True)}
    by_torch = {id(plan.steps[n]) for n in plan.in_captures}
    by_torch |= {id(step) for step, op in zip(plan.steps, plan.ops, strict=True) if op.by_group}

    def steps_of(issued: IssuedSteps) -> IssuedSteps:
        parts = []
        for step in issued.steps:
            native = type(getattr(getattr(step, "func", None), "__self__", None)).__name__ == "Tape"
            kind = "torch" if id(step) in by_torch else "native" if native else "step"
            parts.append(stamps.part(kind, texts.get(id(step), "native code" if native else "nothing"), step))
        return replace(issued, steps=parts)

    if plan.tapes is None or plan.tapes.latest is None:
        plan.in_python = steps_of(plan.in_python)
    else:
        plan.tapes.by_key = {key: taped and steps_of(taped) for key, taped in plan.tapes.by_key.items()}
    run = plan.run

    def begun(*arguments: Any) -> Any:
        stamps.end("rest", "checks")
        return run(*arguments)

    plan.run = begun


def measured(ranks: int, device: torch.device, repeats: int) -> tuple[dict[str, list[Part]], dict[str, float]]:
    """Return the spans of a call by each way, and the time of a call without notes."""
    a = torch.randn(1, 1, M // ranks, K, device=device).bfloat16()
    b = torch.randn(K, N, device=device).bfloat16()
    fusion = patterns.allgather_matmul(ranks=ranks, S=1, M=M, K=K, N=N, dtype="bf16")
    settle, stamps = partial(synchronize, device), Stamped()
    gather = stamps.part("torch", "all-gather", dist.all_gather_into_tensor)
    multiply = stamps.part("torch", "mm", torch.mm)

    def hand(gather: Callable[..., Any], multiply: Callable[..., Any]) -> None:
        full = a.new_empty(M, K)
        gather(full, a.view(-1, K))
        multiply(full, b)

    by_hand = "by hand: NCCL, cuBLAS"
    whole = {by_hand: timed(partial(hand, dist.all_gather_into_tensor, torch.mm), repeats, settle)}
    ways = {by_hand: stamps.spans(partial(hand, gather, multiply), repeats, settle)}
    for strategy in ("sequential", "ring", "push"):
        for name, native in (("from Python", False), ("native", True)):
            with hi.knobs.scope(native=native):
                executor = hi.Executor(hi.lower(fusion, strategy))
                whole[f"{strategy}, {name}"] = timed(partial(executor, a, b), repeats, settle)
            stamped(executor, stamps)
            ways[f"{strategy}, {name}"] = stamps.spans(partial(executor, a, b), repeats, settle)
            dist.barrier()  # no rank frees symmetric memory while others use it
    return ways, whole


# The picture ----------------------------------------------------------------------------------------------------------
# In pixels.
LEFT, WIDTH, TOP, ROW, BAR, RIGHT, BOTTOM = 176, 640, 84, 38, 24, 150, 44
COLOURS = {"torch": "#d29922", "step": "#8fb1de", "native": "#3f6fb5", "rest": "#b4bcc5"}


def draw(data: dict[str, Any]) -> str:
    """Return an SVG with a row of spans for each way."""
    ways, whole, environment = data["ways"], data["whole"], data["environment"]
    longest = max(spans[-1][3] for spans in ways.values())
    width, height = LEFT + WIDTH + RIGHT, TOP + ROW * len(ways) + BOTTOM
    where = f"{environment.get('gpus', 1)} x {environment.get('gpu', 'no GPU')}"
    about = f"all-gather + matmul, M = {M}, K = {K}, N = {N}, {data['ranks']} ranks on {where}; medians of rank 0"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        *(STYLE, '<rect class="page" width="100%" height="100%"/>'),
        '<text class="title" x="16" y="28">What the host does during a warm call</text>',
        f'<text class="quiet" x="16" y="45">{escape(about)}</text>',
    ]
    for number, (kind, text) in enumerate(KINDS.items()):
        x = 16 + 160 * number
        parts.append(f'<rect x="{x}" y="56" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 18}" y="66">{text}</text>')
    for number, (way, spans) in enumerate(ways.items()):
        parts += _row(way, spans, whole[way], TOP + ROW * number, WIDTH / longest)
    unit = next(unit for unit in (5, 10, 20, 50, 100, 200, 500, 1000) if longest / unit <= 10 or unit == 1000)
    for at in range(0, int(longest) + 1, unit):
        x = LEFT + at * WIDTH / longest
        parts.append(f'<path class="end" d="M{x:.1f} {height - BOTTOM}v5"/>')
        parts.append(f'<text class="quiet middle" x="{x:.1f}" y="{height - BOTTOM + 18}">{at}</text>')
    parts.append(f'<text class="quiet middle" x="{LEFT + WIDTH / 2}" y="{height - 8}">microseconds of the host</text>')
    return "\n".join([*parts, "</svg>\n"])


def _row(way: str, spans: Sequence[Part], us: float, y: float, scale: float) -> Iterator[str]:
    yield f'<text x="16" y="{y + BAR / 2 + 4}">{escape(way)}</text>'
    for kind, text, begin, end in spans:
        box = (
            f'x="{LEFT + begin * scale:.1f}" y="{y}" width="{max((end - begin) * scale - 0.6, 0.4):.1f}" height="{BAR}"'
        )
        yield f'<rect {box} fill="{COLOURS[kind]}"><title>{escape(text)}: {end - begin:.1f} us</title></rect>'
    place = f'x="{LEFT + spans[-1][3] * scale + 4:.1f}" y="{y + BAR / 2 + 4}"'
    yield f'<text class="quiet" {place}>{us:.0f} us without notes</text>'


def report(ways: dict[str, list[Part]], whole: dict[str, float]) -> str:
    """Return a table with a line for each way."""
    lines = []
    for way, spans in ways.items():
        sums = [sum(end - begin for each, _, begin, end in spans if each == kind) for kind in KINDS]
        lines.append([way, *(f"{us:.1f}" if us else "" for us in sums), f"{spans[-1][3]:.1f}", f"{whole[way]:.1f}"])
    return table(["way", *(f"{text}, us" for text in KINDS.values()), "all, us", "without notes, us"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"), help="only draw results")
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args(arguments)
    if options.draw:
        given, picture = options.draw
        if not given.is_file():
            parser.error(f"there are no results in {given}: write them with --out")
        picture.write_text(draw(json.loads(given.read_text())), encoding="utf-8")
        return
    with session() as job:
        if job is None or job.device.type != "cuda":
            parser.error("it needs several ranks on GPUs: start it with torchrun")
        with torch.no_grad():
            ways, whole = measured(job.size, job.device, options.repeats)
        if job.rank == 0:
            print(report(ways, whole), flush=True)
            if options.out is not None:
                data = {"ranks": job.size, "ways": ways, "whole": whole}
                write(options.out, "What the host does during a warm call", report(ways, whole), data)


if __name__ == "__main__":
    main()
