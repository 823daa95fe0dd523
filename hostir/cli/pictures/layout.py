"""Place the boxes of a scene on a page, and route the lines between the boxes.

Lengths are in pixels. A point is (x, y), and y grows downwards, as in SVG.
"""

from __future__ import annotations

from textwrap import wrap

from hostir.cli.pictures.scene import Arrow, Box, FindingMark, Scene

# Widths of a page. A picture wider than WIDE leaves out rounds of loops; if it is wider than WIDEST, also statements.
NARROWEST, WIDE, WIDEST = 800, 1200, 1600
LEFT, RIGHT, TOP, BOTTOM = 122, 16, 90, 16
HEIGHT, CHANNEL, GAP, GUTTER, LINE = 30, 16, 20, 18, 17
HEAD, REST, WORDS = 6.5, 5.9, 6.1  # width of a character: in a box's first line, in its second line, in other text
# Limits on the second line of a box, in characters. The first limit with which the page is not wider than WIDE is used.
TITLE_LENGTHS = (22, 18, 15, 12)

Point = tuple[float, float]
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


def clip(text: str, longest: int) -> str:
    """Shorten a text to at most `longest` characters. A shortened text ends with an ellipsis."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _column_widths(scene: Scene, longest: int) -> list[float]:
    """Return the width of each column, including the gutter to its right.

    The second line of a box is shortened to at most `longest` characters.
    """
    widths = [0.0] * scene.columns
    for box in scene.boxes:
        text = max(len(box.word) * HEAD, len(clip(box.place + box.operands, longest)) * REST) + 10
        widths[box.last] = max(widths[box.last], text)
    return [width + GUTTER for width in widths]


def scene_width(scene: Scene, longest: int) -> float:
    """Return the width of a scene's page. The second line of a box is shortened to at most `longest` characters."""
    return LEFT + sum(_column_widths(scene, longest)) + RIGHT


class Layout:
    """The positions of a scene's columns, lanes and boxes on a page. The scene is below the text `header`."""

    def __init__(self, scene: Scene, header: str) -> None:
        self.longest = next((n for n in TITLE_LENGTHS if scene_width(scene, n) <= WIDE), TITLE_LENGTHS[-1])
        widths = _column_widths(scene, self.longest)
        self.columns = [(LEFT + sum(widths[:n]), LEFT + sum(widths[: n + 1]) - GUTTER) for n in range(len(widths))]
        self.width = max(NARROWEST, scene_width(scene, self.longest))
        self.header = self.wrapped(header) or [""]
        self.top = LINE * (len(self.header) - 1)  # the height of all lines of the header except the first
        self.lanes: dict[tuple[int, str], float] = {}  # the upper edge of each lane, by rank and name
        self.bottom = float(TOP + self.top)
        for (rank, lane), rows in scene.lanes.items():
            self.bottom += GAP if self.lanes and lane == "caller" else 0
            self.lanes[rank, lane] = self.bottom
            self.bottom += rows * (HEIGHT + CHANNEL)

    def wrapped(self, text: str) -> list[str]:
        """Wrap a text to the width of the page, and return its lines."""
        return wrap(text, int((self.width - 32) / WORDS))

    def place(self, box: Box) -> Rectangle:
        """Return the rectangle of a box."""
        y = self.lanes[box.rank, box.lane] + box.row * (HEIGHT + CHANNEL) + CHANNEL / 2
        return self.columns[box.first][0], y, self.columns[box.last][1], y + HEIGHT

    def line(self, arrow: Arrow) -> str:
        """Return the SVG path of an arrow."""
        return self._tie(arrow) if arrow.way == "meets" else self._step(arrow)

    def _tie(self, arrow: Arrow) -> str:
        """Return the SVG path of a vertical line between the boxes of two ranks that meet in one communication."""
        x = sum(self.columns[arrow.enters]) / 2
        upper, lower = sorted((self.place(arrow.source), self.place(arrow.target)), key=lambda place: place[1])
        return f"M{x:g} {upper[3]:g}V{lower[1]:g}"

    def _step(self, arrow: Arrow) -> str:
        """Return the SVG path of an arrow from its source box to its target box.

        The arrow is straight if the boxes are in one row and in adjacent columns. Otherwise it is a curve.
        """
        source, target = self.place(arrow.source), self.place(arrow.target)
        leaves, enters = self.columns[arrow.leaves][1], self.columns[arrow.enters][0]
        if source[1] == target[1] and arrow.enters == arrow.leaves + 1:
            return f"M{leaves:g} {(source[1] + source[3]) / 2:g}H{enters - 1:g}"
        if arrow.back:
            return _curve((source[0] + source[2]) / 2, source, (target[0] + target[2]) / 2, target)
        return _curve(leaves - 9, source, enters + 9, target)

    def curve(self, a: Box, b: Box) -> str:
        """Return the SVG path of a curve between the middles of two boxes."""
        first, second = self.place(a), self.place(b)
        return _curve((first[0] + first[2]) / 2, first, (second[0] + second[2]) / 2, second)


class Labels:
    """Places the labels of findings. A label hides as little as possible of boxes and of earlier labels."""

    def __init__(self, layout: Layout, scene: Scene) -> None:
        self.layout = layout
        self.occupied = [layout.place(box) for box in scene.boxes]

    def place(self, mark: FindingMark, half: float) -> Point:
        """Choose a position for the label of a finding, mark its area as occupied, and return its centre.

        `half` is half the width of the label.
        """
        limit = self.layout.width - RIGHT - half
        spots = [(min(max(x, LEFT + half), limit), y) for x, y in self._spots(mark)]
        centre = min(spots, key=lambda spot: self._hidden(_label_area(spot, half)))
        self.occupied.append(_label_area(centre, half))
        return centre

    def _spots(self, mark: FindingMark) -> list[Point]:
        """Return possible centres for the label of a finding.

        They lie along the first four red lines of the finding, and below and above its last box.
        """
        spots: list[Point] = []
        for a, b in [*mark.pairs, *((arrow.source, arrow.target) for arrow in mark.cycle)][:4]:
            (l0, t0, r0, _), (l1, t1, r1, _) = self.layout.place(a), self.layout.place(b)
            for t in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8):
                y = t0 - 9 if t0 == t1 else t0 * (1 - t) + t1 * t + HEIGHT / 2
                spots.append(((l0 + r0) / 2 * (1 - t) + (l1 + r1) / 2 * t, y))
        left, top, right, bottom = self.layout.place(mark.boxes[-1])
        return [*spots, ((left + right) / 2, bottom + 9), ((left + right) / 2, top - 9)]

    def _hidden(self, area: Rectangle) -> float:
        """Return the area of boxes and earlier labels that a label in this rectangle would hide, in square pixels."""
        left, top, right, bottom = area
        shared = (
            max(0.0, min(right, r) - max(left, x)) * max(0.0, min(bottom, b) - max(top, y))
            for x, y, r, b in self.occupied
        )
        return sum(shared)


def _curve(x0: float, a: Rectangle, x1: float, b: Rectangle) -> str:
    """Return the SVG path of a curve from `x0` at the edge of box `a` to `x1` at the edge of box `b`.

    If both boxes are in one row, the curve is an arc above the boxes between them.
    """
    if a[1] == b[1]:
        return f"M{x0:g} {a[1]:g}C{x0:g} {a[1] - 13:g} {x1:g} {b[1] - 13:g} {x1:g} {b[1] - 1:g}"
    down = a[1] < b[1]
    y0, y1 = (a[3], b[1] - 1) if down else (a[1], b[3] + 1)
    middle = (y0 + y1) / 2
    return f"M{x0:g} {y0:g}C{x0:g} {middle:g} {x1:g} {middle:g} {x1:g} {y1:g}"


def _label_area(centre: Point, half: float) -> Rectangle:
    x, y = centre
    return x - half, y - 8, x + half, y + 8
