"""Loss curves of a Llama that trains in fp8, beside the same in bf16: hostir's layers, and torch's DTensors.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.losses --out benchmarks/results/2xH100/losses
    torchrun --standalone --nproc-per-node 2 -m benchmarks.losses --device cpu --batch 4 --tokens 256
    python -m benchmarks.losses --draw benchmarks/results/2xH100/losses.json docs/images/losses.svg

All ways train the same model from the same weights, by AdamW, to predict the next byte of the same text: hostir's own
documentation and source. Each step draws other pieces of it, the same for all ways. Parameters are in f32, and autocast
makes products bf16. The linear layers of a way with fp8 multiply in fp8, forward and backward, except the last layer.

A curve is smoothed: each point is the mean of the last SMOOTH losses. The table has the last point of each curve, and
how far a curve is from the first way's in percent, at the end and at most since step SETTLED. The second way computes
as the first does, but rounds in another order, so its distance is that of chance. The exit code is 1 if the last points
differ by more than MARGIN, or if a loss has not fallen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.chart import STYLE
from benchmarks.harness import table, write
from benchmarks.llama_block import compile_in_place, forget
from benchmarks.train import DTENSOR_PLAN
from examples.llama import Llama, full, loss_of, plan
from hostir.job.session import session

ROOT = Path(__file__).parents[1]
STEPS, WARM = 300, 20  # steps; those in which the learning rate grows, if there are enough steps
SMOOTH, SETTLED = 20, 50
MARGIN = 1.0  # percent
VOCABULARY = 256
MODELS = {  # layers, features, heads, heads of keys and values, hidden features, learning rate
    "tiny": (1, 32, 4, 2, 64, 3e-3),
    "3M": (4, 256, 8, 4, 768, 1e-3),
    "100M": (12, 768, 12, 4, 2816, 6e-4),
}
WAYS: dict[str, Any] = {"hostir, bf16": plan(), "DTensor, bf16": DTENSOR_PLAN, "hostir, fp8": plan(fp8=True)}
FIRST = next(iter(WAYS))


# Training -------------------------------------------------------------------------------------------------------------


def text() -> Tensor:
    """Return the bytes of the documentation and the source."""
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("hostir/**/*.py")])
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def drawn(source: Tensor, options: argparse.Namespace, fresh: torch.Generator) -> Tensor:
    """Draw the sequences of a step, `[batch, tokens + 1]`."""
    begins = torch.randint(len(source) - options.tokens - 1, (options.batch, 1), generator=fresh)
    return source[begins + torch.arange(options.tokens + 1)].long()


def trained(options: argparse.Namespace, mesh: DeviceMesh, source: Tensor, way: str, first: bool) -> list[float]:
    """Train a model in a way, on a text. Return the loss of each step."""
    *sizes, rate = MODELS[options.model]
    torch.manual_seed(0)
    model = Llama(VOCABULARY, *sizes).to(options.device)
    parallelize_module(model, mesh, WAYS[way])
    for layer in model.layers if options.backend else ():
        compile_in_place(layer, options.backend, lambda: None)
    if options.backend:  # torch 2.13 loses the gradient of a compiled layer's input while its collective runs
        model.embedding.register_forward_hook(lambda module, inputs, x: x * 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    warm = min(WARM, options.steps // 6)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (warm + 1), total_iters=warm)
    fresh, losses = torch.Generator().manual_seed(1), []
    terminal = Console(stderr=True)
    for _ in track(range(options.steps), way, console=terminal, disable=not (first and terminal.is_terminal)):
        optimizer.zero_grad()
        with torch.autocast(options.device, torch.bfloat16):
            losses.append(loss_of(model, drawn(source, options, fresh).to(options.device)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    forget()
    return [round(float(full(loss)), 5) for loss in losses]


# Results --------------------------------------------------------------------------------------------------------------


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the mean of the last SMOOTH losses at each step. At the beginning there are fewer of them."""
    sums = [0.0, *accumulate(losses)]
    return [(sums[n] - sums[max(n - SMOOTH, 0)]) / min(n, SMOOTH) for n in range(1, len(sums))]


def distances(losses: dict[str, list[float]], way: str) -> list[float]:
    """Return how far the curve of a way is from the first way's at each step, in percent."""
    return [100 * (a / b - 1) for a, b in zip(smooth(losses[way]), smooth(losses[FIRST]), strict=True)]


def problem(losses: dict[str, list[float]], way: str) -> str:
    """Return what is wrong with a way, or an empty text."""
    if not smooth(losses[way])[-1] < losses[way][0]:  # also true for NaN
        return "WRONG: the loss has not fallen"
    return "" if abs(distances(losses, way)[-1]) <= MARGIN else f"WRONG: more than {MARGIN:g} % from the first way"


def report(losses: dict[str, list[float]]) -> str:
    """Return a table with a line for each way."""
    lines = []
    for way, values in losses.items():
        apart = distances(losses, way)
        line = [way, f"{values[0]:.4f}", f"{smooth(values)[-1]:.4f}", f"{apart[-1]:+.2f} %"]
        lines.append([*line, f"{max(map(abs, apart[SETTLED:] or apart)):.2f} %", problem(losses, way)])
    return table(["way", "first loss", "last losses, mean", "from the first way", "at most", "note"], lines)


# The picture ----------------------------------------------------------------------------------------------------------
# In pixels.
LEFT, WIDTH, TOP, HEIGHT, GAP, SMALL, BOTTOM = 60, 620, 100, 230, 46, 120, 40
COLOURS = ("#8c959f", "#57ab5a", "#3f6fb5")


def draw(data: dict[str, Any]) -> str:
    """Return an SVG with the curves, and below them their distances from the first way's."""
    losses, environment = data["losses"], data["environment"]
    curves = {way: smooth(values) for way, values in losses.items()}
    points = [value for curve in curves.values() for value in curve]
    low, high = min(points), max(points)
    apart = {way: distances(losses, way) for way in losses if way != FIRST}
    width, height = LEFT + WIDTH + 24, TOP + HEIGHT + GAP + SMALL + BOTTOM
    where = f"{environment['gpus']} x {environment['gpu']}" if "gpus" in environment else "CPU processes"
    tokens = data["batch"] * data["tokens"]
    title = f"Loss of a Llama with {data['parameters'] / 1e6:.1f} M parameters, {data['ranks']} ranks on {where}"
    about = f"{len(points) // len(curves)} steps of {tokens} bytes of hostir's own text; means of {SMOOTH} steps"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        *(STYLE, '<rect class="page" width="100%" height="100%"/>'),
        f'<text class="title" x="16" y="28">{escape(title)}</text>',
        f'<text class="quiet" x="16" y="45">{escape(about)}</text>',
        *_legend(list(losses)),
        *_panel(TOP, HEIGHT, low, high, curves, "loss", losses, [low + (high - low) * n / 4 for n in range(5)]),
        *_panel(TOP + HEIGHT + GAP, SMALL, -2, 2, apart, f"% from {FIRST}", losses, [-2, -MARGIN, 0, MARGIN, 2]),
        f'<text class="quiet middle" x="{LEFT + WIDTH / 2}" y="{height - 10}">step</text>',
    ]
    return "\n".join([*parts, "</svg>\n"])


def _legend(ways: Sequence[str]) -> Iterator[str]:
    for n, way in enumerate(ways):
        x = 16 + 130 * n
        yield f'<path d="M{x} 64h18" stroke="{COLOURS[n]}" stroke-width="2.5"/>'
        yield f'<text x="{x + 24}" y="68">{escape(way)}</text>'


def _panel(
    top: float,
    height: float,
    low: float,
    high: float,
    curves: dict[str, list[float]],
    name: str,
    ways: dict[str, Any],
    ticks: Sequence[float],
) -> Iterator[str]:
    """Yield the axes of a panel, and its curves, limited to the panel."""

    def y(value: float) -> float:
        return top + height * (high - min(max(value, low), high)) / ((high - low) or 1)

    yield f'<text class="quiet" x="{LEFT}" y="{top - 8}">{escape(name)}</text>'
    for tick in ticks:
        yield f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{LEFT + WIDTH}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4:.1f}">{tick:.3g}</text>'
    steps = max(len(curve) for curve in curves.values())
    for number in range(0, steps + 1, max(steps // 6, 1)):
        x = LEFT + WIDTH * number / steps
        yield f'<text class="quiet middle" x="{x:.1f}" y="{top + height + 16}">{number}</text>'
    for way, curve in curves.items():
        colour = COLOURS[list(ways).index(way)]
        places = (f"{LEFT + WIDTH * (n + 1) / steps:.1f} {y(value):.1f}" for n, value in enumerate(curve))
        yield f'<path d="M{"L".join(places)}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in all ways; print the table, and write it on rank 0. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"), help="only draw results")
    parser.add_argument("--model", choices=MODELS, default="100M")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--backend", help="compile each layer by this backend of torch.compile")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.draw:
        given, picture = options.draw
        if not given.is_file():
            parser.error(f"there are no results in {given}: write them with --out")
        picture.write_text(draw(json.loads(given.read_text())), encoding="utf-8")
        return 0
    with session(options.device) as job:
        if job is None:
            parser.error("it needs several ranks: start it with torchrun")
        if options.tokens % job.size:
            parser.error(f"{job.size} ranks cannot share {options.tokens} tokens: pass a multiple with --tokens")
        mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("tp",))
        source = text()  # once: files may change while the benchmark runs
        losses = {way: trained(options, mesh, source, way, job.rank == 0) for way in WAYS}
        if job.rank == 0:
            print(report(losses), flush=True)
            sizes = {name: getattr(options, name) for name in ("model", "batch", "tokens")}
            count = sum(x.numel() for x in Llama(VOCABULARY, *MODELS[options.model][:-1]).parameters())
            of_text = {"bytes": len(source), "sha256": hashlib.sha256(source.numpy().tobytes()).hexdigest()}
            data = {**sizes, "ranks": job.size, "parameters": count, "text": of_text, "losses": losses}
            if options.out is not None:
                write(options.out, "Losses in fp8 and bf16", report(losses), data)
    return int(any(problem(losses, way) for way in losses))


if __name__ == "__main__":
    sys.exit(main())
