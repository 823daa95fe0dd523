"""Draw the packages (*rooms*) of hostir as SVG: the import order, the size of each room, and the steps in it.

    python docs/rooms.py docs/images/rooms.svg

The rows are the layers of the import contract in pyproject.toml, in its order. Sizes are counted in the files. The
words come from the table in CONTRIBUTING.md and from docstrings. Colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent

# The steps of docs/architecture.md, by the room in which each takes place.
STEPS = {
    "hostir/dsl": ("1 build",),
    "hostir/lower": ("2 lower",),
    "hostir/ir": ("3 print",),
    "hostir/check": ("4 check",),
    "hostir/plan": ("5 unroll",),
    "hostir/machines": ("6 bind",),
    "hostir/call": ("7 launch",),
    "hostir/kernels": ("8 compute",),
}

# Sizes in pixels.
WIDTH, MARGIN, GAP, PAD, TOP = 920, 16, 10, 12, 68
ROW, LINE, INNER = 52, 15, 80  # heights: the least of a room; a line of text; a room inside a room
CHARACTER, PILL = 6.2, 20  # mean width of a small character; height of a step's mark

STYLE = """<style>
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
.page { fill: #ffffff }
.title { font-size: 16px; font-weight: 600 }
.name { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; font-weight: 600 }
.quiet { fill: #57606a; font-size: 11px }
.size { text-anchor: end }
.room { fill: #f3f5f8; stroke: #b4bcc5 }
.inner { fill: #ffffff; stroke: #b4bcc5 }
.step { fill: #3f6fb5 }
.on-step { fill: #ffffff; font-size: 11px; font-weight: 600; text-anchor: middle }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.page, .inner { fill: #0d1117 }
.quiet { fill: #9198a1 }
.room { fill: #161b22 }
.room, .inner { stroke: #3d444d }
.step { fill: #4184e4 }
.on-step { fill: #ffffff }
}
</style>"""


@dataclass(frozen=True)
class Room:
    """A package of hostir, or a module beside the packages: its path without a suffix, its description and its size."""

    path: str
    words: str
    files: int
    lines: int
    inner: tuple[Room, ...] = ()

    @property
    def size(self) -> str:
        """Number of files and lines; lines are rounded to hundreds, so that small changes keep the picture valid."""
        lines = f"{max(round(self.lines, -2), 100):,} lines"
        return lines if self.files == 1 else f"{self.files} files, {lines}"


def layers(root: Path = ROOT) -> list[list[Room]]:
    """Return the rooms by layer, from the layer that may import all others to the layer that imports no other."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    table = re.findall(r"^\| `(hostir/\w+)` \| (.*?) \|$", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    words = {path: re.sub("`", "", text) for path, text in table}
    return [[_room(root, name.strip().replace(".", "/"), words) for name in row.split("|")] for row in rows]


def _room(root: Path, path: str, words: dict[str, str]) -> Room:
    module = root / f"{path}.py"
    if module.is_file():
        return Room(path, _summary(module), 1, _lines(module))
    files = sorted((root / path).rglob("*.py"))
    inner = sorted(file.parent.relative_to(root).as_posix() for file in (root / path).glob("*/__init__.py"))
    text = words[path] if path in words else _summary(root / path / "__init__.py")
    return Room(path, text, len(files), sum(map(_lines, files)), tuple(_room(root, each, words) for each in inner))


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _summary(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(re.split(r"\.(?:\s|$)", text, maxsplit=1)[0].replace("`", "").split())


def draw(rows: Sequence[Sequence[Room]]) -> str:
    """Return the SVG of these layers."""
    parts: list[str] = []
    y = TOP
    for row in rows:
        widths = _widths(row)
        height = max(_height(room, width) for room, width in zip(row, widths, strict=True))
        x = MARGIN
        for room, width in zip(row, widths, strict=True):
            parts += _box(room, x, y, width, height, "room")
            x += width + GAP
        y += height + GAP
    total = y - GAP + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}">',
            STYLE,
            '<rect class="page" width="100%" height="100%"/>',
            f'<text class="title" x="{MARGIN}" y="28">The rooms of hostir</text>',
            f'<text class="quiet" x="{MARGIN}" y="47">A room imports only from rooms below it, '
            "and not from those beside it. In blue: the steps of a program's life.</text>",
            *parts,
            "</svg>\n",
        ]
    )


def _widths(row: Sequence[Room]) -> list[int]:
    """Return the widths of a row's rooms: equal shares, and two shares for a room with inner rooms."""
    shares = [2 if room.inner else 1 for room in row]
    free = WIDTH - 2 * MARGIN - GAP * (len(row) - 1)
    widths = [free * share // sum(shares) for share in shares[1:]]
    return [free - sum(widths), *widths]


def _height(room: Room, width: int) -> int:
    text = ROW + LINE * (len(_wrapped(room.words, width)) - 1)
    return text + 2 * INNER + 3 * GAP if room.inner else text


def _box(room: Room, x: int, y: int, width: int, height: int, style: str) -> Iterator[str]:
    name = room.path.removeprefix("hostir/")
    yield f'<g><title>{room.path}: {room.size}</title><rect class="{style}" rx="5" x="{x}" y="{y}" width="{width}"'
    yield f' height="{height}"/><text class="name" x="{x + PAD}" y="{y + 21}">{escape(name)}</text>'
    yield f'<text class="quiet size" x="{x + width - PAD}" y="{y + 21}">{room.size}</text></g>'
    for n, line in enumerate(_wrapped(room.words, width)):
        yield f'<text class="quiet" x="{x + PAD}" y="{y + 40 + n * LINE}">{escape(line)}</text>'
    at = x + PAD + len(name) * 8 + 8
    for step in STEPS.get(room.path, ()):
        wide = round(len(step) * CHARACTER + 18)
        yield f'<rect class="step" rx="{PILL // 2}" x="{at}" y="{y + 6}" width="{wide}" height="{PILL}"/>'
        yield f'<text class="on-step" x="{at + wide / 2:g}" y="{y + 20}">{step}</text>'
        at += wide + 6
    wide = (width - 3 * GAP) // 2
    for n, each in enumerate(room.inner):
        top = y + height - (2 - n // 2) * (INNER + GAP)
        yield from _box(each, x + GAP + n % 2 * (wide + GAP), top, wide, INNER, "inner")


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(words, int((width - 2 * PAD) / CHARACTER)) or [""]


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.parse_args().picture.write_text(draw(layers()), encoding="utf-8")


if __name__ == "__main__":
    main()
