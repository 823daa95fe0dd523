"""docs/architecture.md: its names exist, its reading order is short enough, and its picture shows the rooms."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from docs import rooms
from tests.pages import FENCE, ROOT

PAGE = ROOT / "docs/architecture.md"
PICTURE = ROOT / "docs/images/rooms.svg"
MOST_TO_READ = 2000
PROSE = FENCE.sub("", PAGE.read_text(encoding="utf-8"))
LINKED = re.findall(r"\[`([^`]+)`\]\(\.\./([^)]+)\)", PROSE)
ORDER = re.findall(r"^\| \[`[^`]+`\]\(\.\./([^)]+)\) \| (.*?) \| (\d+) \|$", PROSE, re.MULTILINE)
COUNT = re.compile(r"\d[\d,]*(?= lines| files)")


@cache
def definitions(path: str) -> dict[str, ast.stmt]:
    """Return the classes, functions, methods (as `Class.method`) and constants of a file."""
    nodes: dict[str, ast.stmt] = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            nodes |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = node
        if isinstance(node, ast.ClassDef):
            nodes |= {f"{node.name}.{m.name}": m for m in node.body if isinstance(m, ast.FunctionDef)}
    return nodes


def length(path: str, what: str) -> int:
    """Return the number of lines of the definitions in a file that `what` names; of all lines if it begins with all."""
    if what.startswith("all"):
        return len((ROOT / path).read_text(encoding="utf-8").splitlines())
    nodes = [definitions(path)[name] for name in re.findall(r"`(\w+)`", what)]
    firsts = [min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) for node in nodes]
    return sum((node.end_lineno or 0) - first + 1 for node, first in zip(nodes, firsts, strict=True))


@pytest.mark.parametrize(("name", "path"), LINKED)
def test_the_names_that_the_page_links_are_defined_in_the_linked_file(name: str, path: str) -> None:
    assert name == path or name in definitions(path)


def test_every_class_and_function_that_the_page_names_is_linked() -> None:
    known = {name for name, _ in LINKED} | {name for _, what, _ in ORDER for name in re.findall(r"`(\w+)`", what)}
    known |= definitions("hostir/plan/operations.py").keys()  # operations that the page prints
    spans = re.findall(r"`([^`]+)`", PROSE)
    named = {span for span in spans if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)*|[\w.]+\(\)", span)}
    assert named
    assert named <= known


def test_every_path_that_the_page_names_exists() -> None:
    paths = re.findall(r"`((?:hostir|tests|docs|examples|benchmarks)/[\w/.]*)`", PROSE)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_reading_order_is_at_most_two_thousand_lines_and_gives_their_numbers() -> None:
    assert len(ORDER) > 10
    lengths = [length(path, what) for path, what, _ in ORDER]
    assert sum(lengths) <= MOST_TO_READ
    stated = [(path, int(count)) for path, _, count in ORDER]
    wrong = [(path, n) for (path, count), n in zip(stated, lengths, strict=True) if abs(n - count) > 10 + n // 5]
    assert wrong == [], "files with another number of lines than the page states"


def every_room() -> dict[str, rooms.Room]:
    tops = [room for row in rooms.layers() for room in row]
    return {room.path: room for top in tops for room in (top, *top.inner)}


def test_the_picture_has_every_room_of_the_package() -> None:
    package = ROOT / "hostir"
    folders = {init.parent for init in package.rglob("__init__.py")} - {package}
    modules = {module.with_suffix("") for module in package.glob("*.py") if module.name != "__init__.py"}
    assert every_room().keys() == {path.relative_to(ROOT).as_posix() for path in folders | modules}


def test_the_page_names_every_room_and_no_other() -> None:
    named = {path.removesuffix(".py") for path in re.findall(r"`(hostir/[\w/]+(?:\.py)?)`", PROSE)}
    inside = {Path(path).with_suffix("").as_posix() for path, _, _ in ORDER}
    assert named - inside == every_room().keys() - {"hostir/__main__"}


def test_the_steps_of_the_picture_are_the_headings_of_the_page() -> None:
    headings = re.findall(r"^## (\d)\. (\w+).*?: (.*)$", PROSE, re.MULTILINE)
    steps = {(f"{n} {word.lower()}", room) for n, word, where in headings for room in re.findall(r"`([^`]+)`", where)}
    drawn = {(step, room) for room, here in rooms.STEPS.items() for step in here}
    assert drawn == steps
    assert rooms.STEPS.keys() <= every_room().keys()


def test_the_picture_is_up_to_date() -> None:
    drawn, again = PICTURE.read_text(encoding="utf-8"), rooms.draw(rooms.layers())
    hint = "python docs/rooms.py docs/images/rooms.svg"
    assert COUNT.sub("N", drawn) == COUNT.sub("N", again), hint
    counts = [[int(n.replace(",", "")) for n in COUNT.findall(text)] for text in (drawn, again)]
    assert all(abs(old - new) <= max(100, new // 5) for old, new in zip(*counts, strict=True)), hint
