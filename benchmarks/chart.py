"""Draw an SVG bar chart of the scores that a benchmark such as `allgather_matmul` wrote: hostir's and the best peer's.

    python -m benchmarks.chart benchmarks/results/allgather_matmul.json docs/images/allgather_matmul.svg

Colours follow the reader's light or dark theme. The tooltip of a bar has the candidate and its time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.scores import EAGER, GRAPH, Result, benchmark_of, in_order

# In pixels.
BAR, SPACE, BETWEEN = 23, 12, 30  # width of one of a row's two bars; space between rows; space between models
LEFT, RIGHT, TOP, HEIGHT, BOTTOM = 52, 24, 108, 280, 62
NARROWEST, NARROWEST_MODEL = 560, 132
OVER = 3  # how far marks reach beyond the bars
LEGEND = (("peer", "best peer"), ("ours", "ours"), ("other", "other candidates"), ("must", "must reach"))
LEGEND_GAP, CHARACTER = 30, 6.3

STYLE = """<style>
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
.page { fill: #ffffff }
.title { font-size: 16px; font-weight: 600 }
.quiet { fill: #57606a; font-size: 11px }
.middle { text-anchor: middle }
.model { text-anchor: middle; font-weight: 600 }
.tick { fill: #57606a; text-anchor: end; font-size: 11px }
.grid { stroke: #e4e8ec; stroke-width: 1 }
.end { stroke: #8c959f; stroke-width: 1 }
.peer { fill: #b4bcc5 }
.ours { fill: #3f6fb5 }
.value { font-size: 10px; text-anchor: middle }
.on-ours { fill: #ffffff; font-weight: 600 }
.other { stroke: #ffffff; stroke-width: 1.5; stroke-opacity: .6 }
.must { stroke: #cf222e; stroke-width: 2.4 }
.goal { stroke: #1a7f37; stroke-width: 2; stroke-dasharray: 4 3 }
.plate { fill: #b4bcc5 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.page { fill: #0d1117 }
.quiet, .tick { fill: #9198a1 }
.grid { stroke: #262c36 }
.end { stroke: #656c76 }
.peer, .plate { fill: #59636e }
.ours { fill: #4184e4 }
.on-ours { fill: #ffffff }
.other { stroke: #0d1117 }
.must { stroke: #ff7b72 }
.goal { stroke: #57ab5a }
}
</style>"""


def draw(data: dict[str, Any]) -> str:
    """Return the chart of a run as SVG. `data` is the JSON of the run. Raise ValueError if it has no rows."""
    if not data["rows"]:
        raise ValueError("no rows to draw")
    ordered = in_order(data["rows"])
    panels = [(model, list(rows)) for model, rows in groupby(ordered, key=lambda row: row["model"])]
    bars, width = _bars(panels)
    width = max(width, NARROWEST)
    height = TOP + HEIGHT + BOTTOM
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
            STYLE,
            '<rect class="page" width="100%" height="100%"/>',
            *_heading(data["environment"], ordered),
            *_grid(width),
            *bars,
            "</svg>\n",
        ]
    )


def _bars(panels: Sequence[tuple[str, list[Result]]]) -> tuple[list[str], int]:
    """Return the SVG of the bars of all rows, and the width of the picture."""
    parts: list[str] = []
    x: float = LEFT + SPACE
    for model, rows in panels:
        wide = (2 * BAR + SPACE) * len(rows) - SPACE
        room = max(wide, NARROWEST_MODEL)
        for n, row in enumerate(rows):
            parts += _row(row, x + (room - wide) / 2 + n * (2 * BAR + SPACE))
        middle, first = x + room / 2, rows[0]
        x += room + BETWEEN
        parts.append(f'<text class="model" x="{middle:g}" y="{TOP + HEIGHT + 36}">{escape(model)}</text>')
        parts.append(f'<text class="quiet middle" x="{middle:g}" y="{TOP + HEIGHT + 51}">{_size(first)}</text>')
    return parts, round(x - BETWEEN + RIGHT)


def _size(row: Result) -> str:
    """Return the extents of a model, such as `N=1792/rank K=4096`."""
    _, *names = benchmark_of(row).shape.split(",")
    extents = zip(names, (row["N"], row["K"]), strict=True)
    return " ".join("=".join([name[0], f"{extent}{name[1:]}"]) for name, extent in extents if name != "-")


def _row(row: Result, x: float) -> Iterator[str]:
    """Yield the two bars of a row and its marks, such as the goal. `x` is the left edge."""
    yield f'<text class="quiet middle" x="{x + BAR:g}" y="{TOP + HEIGHT + 17}">{row["M"]}</text>'
    yield from _bar(row, x, "peer")
    yield from _bar(row, x + BAR, "ours")
    for mark in ("goal", "must"):
        if row[mark] is not None:
            name = {"goal": "goal", "must": "must reach"}[mark]
            line = f'<path class="{mark}" d="M{x - OVER:g} {_y(row[mark]):.1f}h{2 * (BAR + OVER)}"/>'
            yield f"<g><title>{name} {row[mark]:.2f}</title>{line}</g>"


def _bar(row: Result, x: float, side: str) -> Iterator[str]:
    score = row[f"score_{side}"]
    if score is None:
        yield f'<text class="value" x="{x + BAR / 2:g}" y="{TOP + HEIGHT - 6}">-</text>'
        return
    y, base = _y(score), TOP + HEIGHT
    tip = f"{row['model']} M={row['M']}: {row[f'best_{side}']}: {score:.2f}, {row[f'{side}_us']:.0f} us"
    bar = f'<rect class="{side}" x="{x:g}" y="{y:.1f}" width="{BAR - 1}" height="{base - y:.1f}"/>'
    others = "".join(
        f'<path class="other" d="M{x:g} {_y(other):.1f}h{BAR - 1}"/>' for other in _others(row, side == "ours", score)
    )
    yield f"<g><title>{escape(tip)}</title>{bar}{others}</g>"
    on = " on-ours" if side == "ours" else ""
    plate = f'<rect class="{side}" x="{x:g}" y="{base - 19}" width="{BAR - 1}" height="19"/>'  # above other candidates
    yield plate + f'<text class="value{on}" x="{x + (BAR - 1) / 2:g}" y="{base - 6}">{_short(score)}</text>'


def _others(row: Result, ours: bool, best: float) -> list[float]:
    """Return the scores of all candidates of a side except the best, each in its faster mode.

    The side is hostir if `ours` is True, else the peers.
    """
    of_side = [t for t in row["times"].values() if t["ours"] is ours]
    scores = sorted(row["floor_us"] / min(t[mode] for mode in (EAGER, GRAPH) if mode in t) for t in of_side)
    return [score for score in scores[:-1] if score < best]


def _heading(environment: dict[str, Any], rows: Sequence[Result]) -> Iterator[str]:
    first = rows[0]
    gpu = environment.get("gpu", "GPU")
    benchmark, machine = benchmark_of(first), f"{first.get('emulated_on', first['ranks'])} x {gpu}"
    title = f"{benchmark.title} on {machine}, {first['dtype']}: floor / time"
    yield f'<text class="title" x="16" y="28">{escape(title)}</text>'
    known = [f"{key} {environment[key]}" for key in ("torch", "nccl", "triton", "date", "commit") if key in environment]
    subtitle = f"1.0: as fast as the slower of the two alone, cuBLAS and {benchmark.collective}"
    yield f'<text class="quiet" x="16" y="47">{subtitle}</text>'
    yield f'<text class="quiet" x="16" y="62">{escape(", ".join(known))}</text>'
    x = 16.0
    for mark, words in (*LEGEND, ("goal", "goal")):
        if mark in ("must", "goal") and all(row[mark] is None for row in rows):
            continue
        yield _sign(mark, x)
        yield f'<text x="{x + 20:g}" y="87">{words}</text>'
        x += 20 + len(words) * CHARACTER + LEGEND_GAP


def _sign(mark: str, x: float) -> str:
    """Return the symbol that stands for a bar or a mark in the legend."""
    if mark == "other":
        return f'<rect class="plate" x="{x:g}" y="77" width="12" height="12"/><path class="other" d="M{x:g} 83h12"/>'
    if mark in ("must", "goal"):
        return f'<path class="{mark}" d="M{x:g} 83h14"/>'
    return f'<rect class="{mark}" x="{x:g}" y="77" width="12" height="12"/>'


def _grid(width: int) -> Iterator[str]:
    yield f'<text class="tick" x="{LEFT - 8}" y="{TOP + HEIGHT + 17}">M</text>'
    for tenths in range(0, 11, 2):
        y = _y(tenths / 10)
        style = "end" if tenths in (0, 10) else "grid"
        yield f'<path class="{style}" d="M{LEFT} {y:g}H{width - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:g}">{tenths / 10:.1f}</text>'


def _y(score: float) -> float:
    return TOP + HEIGHT * (1 - score)


def _short(score: float) -> str:
    """Return a score as text, such as `.83` or `1.02`."""
    return f"{score:.2f}".removeprefix("0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the JSON of a run")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    options = parser.parse_args()
    options.picture.write_text(draw(json.loads(options.results.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
