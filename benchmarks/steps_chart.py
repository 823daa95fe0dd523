"""Draw an SVG bar chart of steps: how much faster training, blocks and decoding are than compiled DTensor or NCCL.

    python -m benchmarks.steps_chart benchmarks/results/2xH100 docs/images/steps.svg

The folder has the results of `train`, `llama_block` and `generate`. All steps are replayed from CUDA graphs. Colours
follow the reader's light or dark theme. The tooltip of a bar has the way and the time of its step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.chart import STYLE

# In pixels.
BAR, SPACE, BETWEEN = 26, 26, 44  # width of a bar; space between cases; space between kinds of steps
LEFT, RIGHT, TOP, HEIGHT, BOTTOM = 52, 24, 96, 240, 66
MOST = 1.4  # the ratio at the upper end of the axis
BLOCKS = ("llama_block", "llama_block_sizes")
TRAINED = ("DTensor compiled", "DTensor compiled, async TP", "DTensor compiled, hostir's pass", "hostir compiled")
DECODED = ("NCCL", "two-shot", "hostir")
SERIES = {  # the classes of bars, with the words of the legend
    "peer": "torch's async TP, or its two-shot all-reduce",
    "ours": "hostir's compiler pass, or its all-reduce",
    "layers": "hostir's layers, compiled",
}
CLASS = {TRAINED[1]: "peer", TRAINED[2]: "ours", TRAINED[3]: "layers", DECODED[1]: "peer", DECODED[2]: "ours"}
MORE_STYLE = STYLE.replace("</style>", ".layers { fill: #8fb1de }\n</style>")


@dataclass(frozen=True)
class Case:
    """A group of bars.

    Fields:
        kind: the kind of step, such as "training".
        name: the line below the bars.
        base: the time of the way with ratio 1, in microseconds.
        times: the times of the other ways.
    """

    kind: str
    name: str
    base: float
    times: dict[str, float]


def cases(results: Path) -> Iterator[Case]:
    """Yield the cases in the results of a machine."""

    def rows_of(name: str) -> list[dict[str, Any]]:
        return json.loads((results / f"{name}.json").read_text())["rows"]

    for row in rows_of("train"):
        times = {way: figures["replayed"]["us"] for way, figures in row["ways"].items() if way in TRAINED}
        yield Case("training", f"{row['model']}, {row['layers']} layers", times.pop(TRAINED[0]), times)
    blocks = [row for name in BLOCKS for row in rows_of(name)]
    for row in sorted(blocks, key=lambda row: (-int(row["model"].removesuffix("B")), row["tokens"])):
        times = {way: figures["replayed"]["step"] for way, figures in row["ways"].items() if way in TRAINED}
        yield Case(
            "a block, forward and backward", f"{row['model']}, {row['tokens']} tokens", times.pop(TRAINED[0]), times
        )
    for row in rows_of("generate"):
        times = {way: figures["graph us"] for way, figures in row["ways"].items()}
        yield Case("decoding", f"{row['model']}, batch {row['batch']}", times.pop(DECODED[0]), times)


def draw(drawn: Sequence[Case], environment: dict[str, Any]) -> str:
    """Return the chart of some cases as SVG."""
    parts, x, kind, begun = list[str](), float(LEFT + SPACE), "", 0.0
    names = list[tuple[str, float, float]]()
    for case in drawn:
        if case.kind != kind:
            x += BETWEEN if kind else 0
            kind, begun = case.kind, x
            names.append((kind, begun, begun))
        bars = [(way, case.times[way]) for way in CLASS if way in case.times]
        for n, (way, us) in enumerate(bars):
            parts += _bar(case, way, case.base / us, us, x + n * BAR)
        end = x + len(bars) * BAR
        parts.append(
            f'<text class="quiet middle" x="{(x + end) / 2:g}" y="{TOP + HEIGHT + 17}">{escape(case.name)}</text>'
        )
        names[-1] = (kind, begun, end)
        x = end + SPACE + max(0, 6 * len(case.name) - len(bars) * BAR - SPACE + 8)
    for name, left, right in names:
        parts.append(f'<text class="model" x="{(left + right) / 2:g}" y="{TOP + HEIGHT + 42}">{escape(name)}</text>')
    width, height = round(x + RIGHT), TOP + HEIGHT + BOTTOM
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    page = '<rect class="page" width="100%" height="100%"/>'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', MORE_STYLE, page]
    return "\n".join([*head, *_heading(environment), *_grid(width), *parts, "</svg>\n"])


def _y(ratio: float) -> float:
    return TOP + HEIGHT * (1 - min(ratio, MOST) / MOST)


def _bar(case: Case, way: str, ratio: float, us: float, x: float) -> Iterator[str]:
    y = _y(ratio)
    tip = f"{case.kind}, {case.name}: {way}: {us / 1000:.2f} ms, {ratio:.2f} x"
    bar = f'<rect class="{CLASS[way]}" x="{x:g}" y="{y:.1f}" width="{BAR - 2}" height="{TOP + HEIGHT - y:.1f}"/>'
    yield f"<g><title>{escape(tip)}</title>{bar}</g>"
    yield f'<text class="value" x="{x + BAR / 2 - 1:g}" y="{y - 4:.1f}">{ratio:.2f}</text>'


def _heading(environment: dict[str, Any]) -> Iterator[str]:
    title = f"Steps of Llama 3 on {environment['gpus']} x {environment['gpu']}, replayed from CUDA graphs"
    yield f'<text class="title" x="16" y="28">{escape(title)}</text>'
    yield (
        '<text class="quiet" x="16" y="47">speed as a multiple of compiled DTensor (training, blocks) or of NCCL'
        " (decoding); widths of a rank of 8; training with 8192 tokens</text>"
    )
    x = 16
    for series, words in SERIES.items():
        yield f'<rect class="{series}" x="{x}" y="62" width="12" height="12"/><text x="{x + 18}" y="72">{words}</text>'
        x += round(18 + 6.3 * len(words) + 30)


def _grid(width: int) -> Iterator[str]:
    for tenths in range(0, round(MOST * 10) + 1, 2):
        y = _y(tenths / 10)
        style = "end" if tenths in (0, 10) else "grid"
        yield f'<path class="{style}" d="M{LEFT} {y:g}H{width - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:g}">{tenths / 10:.1f}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the folder of a machine's results")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    options = parser.parse_args()
    environment = json.loads((options.results / "train.json").read_text())["environment"]
    options.picture.write_text(draw(list(cases(options.results)), environment), encoding="utf-8")


if __name__ == "__main__":
    main()
