"""Draw the order of a program's events: `hostir check FILE --graph OUT.svg`.

A picture of the order of a program's events: `hostir check FILE --graph OUT.svg`.

Rows are the streams of each rank and its communications; a box stands right of all boxes that come before it. Arrows
show happens-before, without arrows that others imply. Conflicts are red.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from html import escape
from textwrap import wrap

from hostir.check.findings import Finding
from hostir.check.ordering.order import Order
from hostir.check.proof import Analysis
from hostir.cli.pictures.scene import (
    COMMUNICATION,
    COMPUTATION,
    OTHER,
    Arrow,
    Box,
    FindingMark,
    Scene,
    boxes_of,
    closest,
    merged,
    nearby,
    stage,
)
from hostir.ir.program import Program

MAX_BOXES, MIN_BOXES, MAX_RANKS, MAX_FINDINGS = 150, 16, 8, 4  # limits of a picture
MAX_LISTED = 12  # the most findings listed as text

# In pixels.
NARROWEST, WIDE, WIDEST = 800, 1200, 1600  # wider than WIDE: leave out rounds; wider than WIDEST: leave out statements
LEFT, RIGHT, TOP, BOTTOM = 122, 16, 90, 16
HEIGHT, CHANNEL, GAP, GUTTER, LINE = 30, 16, 20, 18, 17
HEAD, REST, WORDS = 6.5, 5.9, 6.1  # width of a character: in a box's first line, in its second line, in running text
TITLE_LENGTHS = (22, 18, 15, 12)  # limits on a box's second line, in characters; the first that fits is used

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

Point = tuple[float, float]
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


def draw(program: Program, analysis: Analysis) -> str:
    """Return the picture as SVG: the ranks, rounds and calls that findings name. One line lists what is left out."""
    title = f"@{program.name}: {_count(len(analysis.findings), 'finding') or 'no findings'}"
    header = [f"{name} = {value}" for name, value in sorted((analysis.sizes or {}).items())]
    if analysis.order is None:
        return _Page(title, header, Scene((), (), ()), analysis).text()
    scene, left_out = _choose(program, analysis, analysis.order)
    return _Page(title, header + left_out, scene, analysis).text()


def _choose(program: Program, analysis: Analysis, order: Order) -> tuple[Scene, list[str]]:
    """Return a scene with as many rounds as fit, and descriptions of everything left out."""
    numbered = {n: f for n, f in enumerate(analysis.findings, 1) if isinstance(f, Finding) and f.events}
    stuck = {n: f for n, f in numbered.items() if f.kind == "deadlock"}  # other findings may follow from it
    findings = dict(list((stuck or numbered).items())[:MAX_FINDINGS])
    centre = {event for f in findings.values() for event in f.events}
    calls = 1 + max((event.call for event in centre), default=0)
    ranks = _ranks(program, {event.rank for event in centre})
    boxes = boxes_of(program, order, ranks, calls, centre)
    rounds = sorted({box.rounds[0][0] for box in boxes if box.rounds})

    def near(reach: int) -> list[Box]:
        return merged(nearby(boxes, centre, reach), centre)

    def scene(some: Sequence[Box]) -> Scene:
        return stage(order, some, findings)

    def too_much(reach: int) -> bool:
        some = near(reach)
        return len(some) > MAX_BOXES or _width(scene(some), TITLE_LENGTHS[-1]) > WIDE

    candidates = near(max(0, bisect_left(range(1 + max(rounds, default=0)), True, key=too_much) - 1))
    kept = {turn[0] for box in candidates for turn in box.rounds}
    most = MAX_BOXES
    chosen = scene(closest(candidates, centre, most))
    while most > MIN_BOXES and _width(chosen, TITLE_LENGTHS[-1]) > WIDEST:
        most -= most // 4
        chosen = scene(closest(candidates, centre, most))
    left_out = [
        f"{_spans('call', range(1, calls + 1))} of {order.ranks[0].turn}",
        _ranks_left_out(program, order, ranks),
        _unless_empty(_spans("round", [n for n in rounds if n not in kept]), "of loops not drawn"),
        _unless_empty(_count(len(candidates) - len(chosen.boxes), "statement"), "farther off not drawn"),
        _unless_empty(_count(len(numbered) - len(findings), "finding"), "more not marked"),
    ]
    return chosen, [text for text in left_out if text]


def _ranks(program: Program, named: set[int]) -> list[int]:
    """Return the ranks to draw: the ranks that findings name and one more; two ranks if no rank is named."""
    others = [rank for rank in range(program.ranks) if rank not in named]
    return sorted({*sorted(named)[:MAX_RANKS], *others[: 1 if named else 2]})


def _ranks_left_out(program: Program, order: Order, ranks: Sequence[int]) -> str:
    def issued(rank: int) -> list[object]:
        return [(id(e.statement), e.rounds, e.verb, e.stream) for e in order.ranks[rank].events]

    others = [rank for rank in range(program.ranks) if rank not in ranks]
    known = [issued(rank) for rank in ranks]
    alike = all(issued(rank) in known for rank in others)
    return _unless_empty(_spans("rank", others), "alike, not drawn" if alike else "not drawn")


def _unless_empty(what: str, how: str) -> str:
    return what and f"{what} {how}"


def _spans(what: str, numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as "ranks 0, 2 to 7"; empty without numbers."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][-1] + 1:
            spans[-1][1:] = [n]
        else:
            spans.append([n])
    text = ", ".join(" to ".join(map(str, span)) for span in spans)
    return text and f"{what}{'s' if len(numbers) > 1 else ''} {text}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}" if number else ""


def _clip(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _widths(scene: Scene, longest: int) -> list[float]:
    """Return the width of each column, gutter included."""
    widths = [0.0] * scene.columns
    for box in scene.boxes:
        text = max(len(box.word) * HEAD, len(_clip(box.place + box.operands, longest)) * REST) + 10
        widths[box.last] = max(widths[box.last], text)
    return [width + GUTTER for width in widths]


def _width(scene: Scene, longest: int) -> float:
    return LEFT + sum(_widths(scene, longest)) + RIGHT


class _Page:
    """Lays out a scene and writes it from back to front: lanes, arrows, boxes, findings."""

    def __init__(self, title: str, header: list[str], scene: Scene, analysis: Analysis) -> None:
        self.title, self.scene, self.findings = title, scene, analysis.findings
        self.longest = next((n for n in TITLE_LENGTHS if _width(scene, n) <= WIDE), TITLE_LENGTHS[-1])
        widths = _widths(scene, self.longest)
        self.columns = [(LEFT + sum(widths[:n]), LEFT + sum(widths[: n + 1]) - GUTTER) for n in range(len(widths))]
        self.width = max(NARROWEST, _width(scene, self.longest))
        self.header = self._wrapped("; ".join(header)) or [""]
        self.top = LINE * (len(self.header) - 1)
        self.rows: dict[tuple[int, str], float] = {}
        self.bottom = float(TOP + self.top)
        for (rank, lane), rows in scene.lanes.items():
            self.bottom += GAP if self.rows and (rank, "caller") == (rank, lane) else 0
            self.rows[rank, lane] = self.bottom
            self.bottom += rows * (HEIGHT + CHANNEL)
        self.red = {box for mark in scene.marks for box in mark.boxes}
        self.cycle = {arrow for mark in scene.marks for arrow in mark.cycle}
        self.taken = [self.place(box) for box in scene.boxes]  # rectangles that labels should not cover

    def place(self, box: Box) -> Rectangle:
        y = self.rows[box.rank, box.lane] + box.row * (HEIGHT + CHANNEL) + CHANNEL / 2
        return self.columns[box.first][0], y, self.columns[box.last][1], y + HEIGHT

    def text(self) -> str:
        words = self._words()
        height = self.bottom + BOTTOM + LINE * len(words) + BOTTOM
        box = f'viewBox="0 0 {self.width:g} {height:g}" width="{self.width:g}" height="{height:g}"'
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', STYLE, *_heads(), *self._top(), *self._lanes()]
        calm = [arrow for arrow in self.scene.arrows if arrow not in self.cycle]
        parts += dict.fromkeys(self._arrow(arrow, INK[arrow.way]) for arrow in calm)
        parts += [self._arrow(arrow, INK["red"]) for arrow in self.scene.arrows if arrow in self.cycle]
        parts += [_path(self._way(a, b), "conflict") for mark in self.scene.marks for a, b in mark.pairs]
        parts += [self._box(box) for box in self.scene.boxes]
        parts += [self._label(mark) for mark in self.scene.marks]
        for n, (style, line) in enumerate(words):
            parts.append(f'<text class="{style}" x="16" y="{self.bottom + BOTTOM + LINE * (n + 1):g}">{line}</text>')
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _top(self) -> list[str]:
        drawn = [f'<text class="title" x="16" y="30">{escape(self.title)}</text>']
        for n, line in enumerate(self.header):
            drawn.append(f'<text class="quiet" x="16" y="{50 + LINE * n}">{escape(line)}</text>')
        x, y = 16, 72 + self.top
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
            y, height = self.rows[rank, lane], rows * (HEIGHT + CHANNEL)
            span = self.width - LEFT + 6 - RIGHT
            yield f'<rect class="group" x="{LEFT - 6}" y="{y + 2:g}" width="{span:g}" height="{height - 4}" rx="3"/>'
            yield f'<text class="lane" x="{LEFT - 14}" y="{y + height / 2 + 4:g}">{lane}</text>'
            if lane == next(name for r, name in self.rows if r == rank):
                yield f'<text class="rank" x="16" y="{y + height / 2 + 4:g}">rank {rank}</text>'

    def _box(self, box: Box) -> str:
        left, top, right, bottom = self.place(box)
        fill, line = ("#ffebe9", INK["red"]) if box in self.red else FILLS[box.role]
        size = f'width="{right - left:g}" height="{bottom - top:g}"'
        colors = f'fill="{fill}" stroke="{line}" stroke-width="{2 if box in self.red else 1}"'
        x, room = (left + right) / 2, max(self.longest, int((right - left - 10) / REST))
        rest = escape(_clip(box.place + box.operands, room))
        head = f'<text class="head" x="{x:g}" y="{top + 13:g}">{escape(box.word)}</text>'
        tail = f'<text class="rest" x="{x:g}" y="{top + 24:g}">{rest}</text>'
        role = "box red" if box in self.red else "box"
        frame = f'<rect class="{role}" x="{left:g}" y="{top:g}" {size} rx="3" {colors}/>'
        return f"<g><title>{escape(box.title)}</title>{frame}{head}{tail}</g>"

    # Lines ------------------------------------------------------------------------------------------------------------
    def _arrow(self, arrow: Arrow, color: str) -> str:
        head = "red" if color == INK["red"] else arrow.way
        if arrow.way == "meets":
            return _path(self._tie(arrow), "arrow", color)
        return _path(self._step(arrow), "arrow", color, head)

    def _tie(self, arrow: Arrow) -> str:
        """Return the path of a vertical line between the sides of one communication."""
        x = sum(self.columns[arrow.enters]) / 2
        upper, lower = sorted((self.place(arrow.source), self.place(arrow.target)), key=lambda place: place[1])
        return f"M{x:g} {upper[3]:g}V{lower[1]:g}"

    def _step(self, arrow: Arrow) -> str:
        """Return the path of an arrow from the right end of a box to the left end of another."""
        source, target = self.place(arrow.source), self.place(arrow.target)
        leaves, enters = self.columns[arrow.leaves][1], self.columns[arrow.enters][0]
        if source[1] == target[1] and arrow.enters == arrow.leaves + 1:
            return f"M{leaves:g} {(source[1] + source[3]) / 2:g}H{enters - 1:g}"
        if arrow.back:
            return _curve((source[0] + source[2]) / 2, source, (target[0] + target[2]) / 2, target)
        return _curve(leaves - 9, source, enters + 9, target)

    def _way(self, a: Box, b: Box) -> str:
        first, second = self.place(a), self.place(b)
        return _curve((first[0] + first[2]) / 2, first, (second[0] + second[2]) / 2, second)

    # Words ------------------------------------------------------------------------------------------------------------
    def _label(self, mark: FindingMark) -> str:
        """Return a short label of a conflict, placed where it hides the least area."""
        about = f" on %{mark.finding.buffer}" if mark.finding.buffer else ""
        text = f"{mark.number}: {mark.finding.kind}{about}"
        half = len(text) * (HEAD + 0.7) / 2 + 6
        inside = [(min(max(x, LEFT + half), self.width - RIGHT - half), y) for x, y in self._spots(mark)]
        x, y = min(inside, key=lambda spot: self._hidden(_pill(spot, half)))
        self.taken.append(_pill((x, y), half))
        frame = f'x="{x - half:g}" y="{y - 8:g}" width="{2 * half:g}" height="16" rx="8"'
        words = f'<text class="pill" x="{x:g}" y="{y + 4:g}">{escape(text)}</text>'
        return f'<g><rect {frame} fill="#fff" stroke="{INK["red"]}"/>{words}</g>'

    def _spots(self, mark: FindingMark) -> list[Point]:
        """Return label positions: along the first lines of a mark, then around its last box."""
        spots: list[Point] = []
        for a, b in [*mark.pairs, *((arrow.source, arrow.target) for arrow in mark.cycle)][:4]:
            (l0, t0, r0, _), (l1, t1, r1, _) = self.place(a), self.place(b)
            for t in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8):
                y = t0 - 9 if t0 == t1 else t0 * (1 - t) + t1 * t + HEIGHT / 2
                spots.append(((l0 + r0) / 2 * (1 - t) + (l1 + r1) / 2 * t, y))
        left, top, right, bottom = self.place(mark.boxes[-1])
        return [*spots, ((left + right) / 2, bottom + 9), ((left + right) / 2, top - 9)]

    def _hidden(self, area: Rectangle) -> float:
        """Return the occupied area, in square pixels, that a rectangle would hide."""
        left, top, right, bottom = area
        shared = (
            max(0.0, min(right, r) - max(left, x)) * max(0.0, min(bottom, b) - max(top, y)) for x, y, r, b in self.taken
        )
        return sum(shared)

    def _words(self) -> list[tuple[str, str]]:
        """Return the findings as lines of text with their styles."""
        lines = []
        for number, finding in enumerate(self.findings[:MAX_LISTED], 1):
            at = f"line {finding.span.line}: " if finding.span else ""
            level = "warning: " if finding.level == "warning" else ""
            styles = {
                "finding": f"{number}. {at}{level}{finding.message}",
                "quiet": finding.hint and f"hint: {finding.hint}",
            }
            for style, text in styles.items():
                lines += [(style, escape(line)) for line in self._wrapped(text)]
        if len(self.findings) > MAX_LISTED:
            lines.append(("quiet", f"and {len(self.findings) - MAX_LISTED} more"))
        return lines

    def _wrapped(self, text: str) -> list[str]:
        return wrap(text, int((self.width - 32) / WORDS))


def _curve(x0: float, a: Rectangle, x1: float, b: Rectangle) -> str:
    """Return a curve from one box to another above or below it; in the same row it passes over the boxes between."""
    if a[1] == b[1]:
        return f"M{x0:g} {a[1]:g}C{x0:g} {a[1] - 13:g} {x1:g} {b[1] - 13:g} {x1:g} {b[1] - 1:g}"
    down = a[1] < b[1]
    y0, y1 = (a[3], b[1] - 1) if down else (a[1], b[3] + 1)
    middle = (y0 + y1) / 2
    return f"M{x0:g} {y0:g}C{x0:g} {middle:g} {x1:g} {middle:g} {x1:g} {y1:g}"


def _path(way: str, style: str, color: str = "", head: str = "") -> str:
    ink = f' stroke="{color}"' if color else ""
    end = f' marker-end="url(#{head})"' if head else ""
    return f'<path class="{style}" d="{way}"{ink}{end}/>'


def _heads() -> Iterable[str]:
    for name in ("order", "ranks", "red"):
        shape = f'<path d="M0 0L6 3L0 6Z" fill="{INK[name]}"/>'
        size = 'viewBox="0 0 6 6" refX="5.4" refY="3" markerWidth="6" markerHeight="6"'
        yield f'<marker id="{name}" {size} markerUnits="userSpaceOnUse" orient="auto">{shape}</marker>'


def _pill(spot: Point, half: float) -> Rectangle:
    x, y = spot
    return x - half, y - 8, x + half, y + 8
