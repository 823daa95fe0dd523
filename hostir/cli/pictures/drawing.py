"""Draw the order of a program's events as SVG, for `hostir check FILE --graph OUT.svg`.

Each stream of a rank is a lane, and each rank has one more lane for its communications. A box stands to the right of
all boxes that happen before it. Arrows show happens-before. An arrow is left out if a path of other arrows implies it.
Conflicts are red.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from hostir.check.proof import Analysis
from hostir.cli.pictures.layout import (
    BOTTOM,
    CHANNEL,
    HEAD,
    HEIGHT,
    LEFT,
    LINE,
    REST,
    RIGHT,
    WORDS,
    Labels,
    Layout,
    clip,
)
from hostir.cli.pictures.scene import COMMUNICATION, COMPUTATION, OTHER, Arrow, Box, FindingMark, Scene
from hostir.cli.pictures.selection import choose, count
from hostir.ir.program import Program

MAX_LISTED = 12  # the most findings listed as text

FILLS = {COMMUNICATION: ("#fbeee5", "#e07b39"), COMPUTATION: ("#e8eff8", "#3f6fb5"), OTHER: ("#f6f8fa", "#9aa5b1")}
MEANINGS = {"order": "comes before", "ranks": "comes before, on another rank", "meets": "start together"}
INK = {"order": "#8c959f", "ranks": "#8250df", "meets": "#8250df", "red": "#cf222e"}
STYLE = """<style>
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.rank { font-weight: 600 }
.lane { fill: #57606a; text-anchor: end; font-size: 11px }
.head { text-anchor: middle; font-size: 10.5px }
.rest { fill: #57606a; text-anchor: middle; font-size: 9px }
.pill { fill: #cf222e; text-anchor: middle; font-size: 10.5px; font-weight: 600 }
.quiet { fill: #57606a; font-size: 11px }
.finding { font-size: 11px }
.group { fill: #f3f5f7 }
.arrow { fill: none; stroke-width: 1.2 }
.conflict { fill: none; stroke: #cf222e; stroke-width: 1.6; stroke-dasharray: 5 3 }
</style>
<rect width="100%" height="100%" fill="#fff"/>"""


def draw(program: Program, analysis: Analysis) -> str:
    """Return a picture of a program and its findings, as SVG.

    It shows the ranks, rounds and calls that the findings name. The header says which parts are left out.
    """
    title = f"@{program.name}: {count(len(analysis.findings), 'finding') or 'no findings'}"
    header = [f"{name} = {value}" for name, value in sorted((analysis.sizes or {}).items())]
    if analysis.order is None:
        return _Page(title, header, Scene((), (), ()), analysis).text()
    scene, left_out = choose(program, analysis, analysis.order)
    return _Page(title, header + left_out, scene, analysis).text()


class _Page:
    """Writes a scene as SVG.

    It writes lanes first, then arrows, then boxes, then findings. Each layer lies on top of the earlier layers.
    """

    def __init__(self, title: str, header: list[str], scene: Scene, analysis: Analysis) -> None:
        self.title, self.scene, self.findings = title, scene, analysis.findings
        self.layout = Layout(scene, "; ".join(header))
        self.labels = Labels(self.layout, scene)
        self.red = {box for mark in scene.marks for box in mark.boxes}
        self.cycle = {arrow for mark in scene.marks for arrow in mark.cycle}

    def text(self) -> str:
        """Return the page as SVG."""
        words = self._words()
        height = self.layout.bottom + BOTTOM + LINE * len(words) + BOTTOM
        box = f'viewBox="0 0 {self.layout.width:g} {height:g}" width="{self.layout.width:g}" height="{height:g}"'
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', STYLE, *_heads(), *self._top(), *self._lanes()]
        outside = [arrow for arrow in self.scene.arrows if arrow not in self.cycle]
        parts += dict.fromkeys(self._arrow(arrow, INK[arrow.way]) for arrow in outside)
        parts += [self._arrow(arrow, INK["red"]) for arrow in self.scene.arrows if arrow in self.cycle]
        parts += [_path(self.layout.curve(a, b), "conflict") for mark in self.scene.marks for a, b in mark.pairs]
        parts += [self._box(box) for box in self.scene.boxes]
        parts += [self._label(mark) for mark in self.scene.marks]
        for n, (style, line) in enumerate(words):
            parts.append(
                f'<text class="{style}" x="16" y="{self.layout.bottom + BOTTOM + LINE * (n + 1):g}">{line}</text>'
            )
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _top(self) -> list[str]:
        """Return the title, the header, and the legend of colors and arrows."""
        drawn = [f'<text class="title" x="16" y="30">{escape(self.title)}</text>']
        for n, line in enumerate(self.layout.header):
            drawn.append(f'<text class="quiet" x="16" y="{50 + LINE * n}">{escape(line)}</text>')
        x, y = 16, 72 + self.layout.top
        for role, (fill, line) in FILLS.items():
            drawn.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{fill}" stroke="{line}"/>')
            drawn.append(f'<text class="quiet" x="{x + 18}" y="{y}">{role}</text>')
            x += 42 + round(len(role) * WORDS)
        for way, meaning in MEANINGS.items():
            drawn.append(_path(f"M{x} {y - 4}h18", "arrow", INK[way], "" if way == "meets" else way))
            drawn.append(f'<text class="quiet" x="{x + 26}" y="{y}">{meaning}</text>')
            x += 50 + round(len(meaning) * WORDS)
        return drawn

    def _lanes(self) -> Iterable[str]:
        for (rank, lane), rows in self.scene.lanes.items():
            y, height = self.layout.lanes[rank, lane], rows * (HEIGHT + CHANNEL)
            span = self.layout.width - LEFT + 6 - RIGHT
            yield f'<rect class="group" x="{LEFT - 6}" y="{y + 2:g}" width="{span:g}" height="{height - 4}" rx="3"/>'
            yield f'<text class="lane" x="{LEFT - 14}" y="{y + height / 2 + 4:g}">{lane}</text>'
            if lane == next(name for r, name in self.layout.lanes if r == rank):
                yield f'<text class="rank" x="16" y="{y + height / 2 + 4:g}">rank {rank}</text>'

    def _box(self, box: Box) -> str:
        left, top, right, bottom = self.layout.place(box)
        fill, line = ("#ffebe9", INK["red"]) if box in self.red else FILLS[box.role]
        size = f'width="{right - left:g}" height="{bottom - top:g}"'
        colors = f'fill="{fill}" stroke="{line}" stroke-width="{2 if box in self.red else 1}"'
        x, room = (left + right) / 2, max(self.layout.longest, int((right - left - 10) / REST))
        rest = escape(clip(box.place + box.operands, room))
        head = f'<text class="head" x="{x:g}" y="{top + 13:g}">{escape(box.word)}</text>'
        tail = f'<text class="rest" x="{x:g}" y="{top + 24:g}">{rest}</text>'
        role = "box red" if box in self.red else "box"
        frame = f'<rect class="{role}" x="{left:g}" y="{top:g}" {size} rx="3" {colors}/>'
        return f"<g><title>{escape(box.title)}</title>{frame}{head}{tail}</g>"

    def _arrow(self, arrow: Arrow, color: str) -> str:
        head = "" if arrow.way == "meets" else "red" if color == INK["red"] else arrow.way
        return _path(self.layout.line(arrow), "arrow", color, head)

    def _label(self, mark: FindingMark) -> str:
        """Return the label of a finding as SVG.

        The label shows the number and the category of the finding, and the buffer if the finding is about one.
        """
        about = f" on %{mark.finding.buffer}" if mark.finding.buffer else ""
        text = f"{mark.number}: {mark.finding.category}{about}"
        half = len(text) * (HEAD + 0.7) / 2 + 6
        x, y = self.labels.place(mark, half)
        frame = f'x="{x - half:g}" y="{y - 8:g}" width="{2 * half:g}" height="16" rx="8"'
        words = f'<text class="pill" x="{x:g}" y="{y + 4:g}">{escape(text)}</text>'
        return f'<g><rect {frame} fill="#fff" stroke="{INK["red"]}"/>{words}</g>'

    def _words(self) -> list[tuple[str, str]]:
        """Return the lines of text below the picture, which describe the findings. Each item is a style and a line."""
        lines = []
        for number, finding in enumerate(self.findings[:MAX_LISTED], 1):
            at = f"line {finding.span.line}: " if finding.span else ""
            level = "warning: " if finding.level == "warning" else ""
            styles = {
                "finding": f"{number}. {at}{level}{finding.message}",
                "quiet": finding.hint and f"hint: {finding.hint}",
            }
            for style, text in styles.items():
                lines += [(style, escape(line)) for line in self.layout.wrapped(text)]
        if len(self.findings) > MAX_LISTED:
            lines.append(("quiet", f"and {len(self.findings) - MAX_LISTED} more"))
        return lines


def _path(way: str, style: str, color: str = "", head: str = "") -> str:
    ink = f' stroke="{color}"' if color else ""
    end = f' marker-end="url(#{head})"' if head else ""
    return f'<path class="{style}" d="{way}"{ink}{end}/>'


def _heads() -> Iterable[str]:
    """Yield the SVG definition of the arrow head of each color."""
    for name in ("order", "ranks", "red"):
        shape = f'<path d="M0 0L6 3L0 6Z" fill="{INK[name]}"/>'
        size = 'viewBox="0 0 6 6" refX="5.4" refY="3" markerWidth="6" markerHeight="6"'
        yield f'<marker id="{name}" {size} markerUnits="userSpaceOnUse" orient="auto">{shape}</marker>'
