"""docs/extending.md: a new statement changes few files, and the page still runs for somebody who has followed it.

tests/test_docs.py makes the changes of the page and runs the result.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.structure import statements_of, touched
from tests.edits import anchor, edit
from tests.pages import ROOT, blocks

PAGE = ROOT / "docs/extending.md"
MOST = {
    "An elementwise statement": 3,
    "A statement of another kind": 7,
}  # one of the three files has the function for users


@pytest.mark.parametrize("title", MOST)
def test_a_new_statement_changes_few_files(title: str) -> None:
    assert 2 <= len(touched(ROOT, statements_of(ROOT)[title])) <= MOST[title]


def test_changes_are_made_only_once(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hostir", tmp_path / "hostir", ignore=shutil.ignore_patterns("__pycache__"))
    changes = [block for block in blocks(PAGE) if block.verb]
    results: list[dict[Path, str]] = []
    for _ in range(2):
        for block in changes:
            edit(tmp_path, block.verb, block.word, block.text)
        results.append({path: path.read_text() for path in tmp_path.rglob("*.py")})
    assert len(changes) > 10
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("name", "where"), [("Unheard", r"\[\]"), ("silu", r"functions\.py.*aten\.py"), ("Silu.x", r"\[\]")]
)
def test_an_anchor_that_is_not_defined_exactly_once_is_named(name: str, where: str) -> None:
    with pytest.raises(AssertionError, match=f"'{name}', which must be defined once; it is defined in .*{where}"):
        anchor(ROOT, name)


BEFORE = """import os

TABLE = {
    "red": 1,
}
NAMES = {n: n for n in ("red",)}


class Red:
    x = 1

    def paint(self): ...

    y = 2
"""
AFTER = """import os
from hostir.deep.shapes import Circle

TABLE = {
    "red": 1,
    "blue": 2,
}
NAMES = {n: n for n in ("red",
    "blue",)}


class Red:
    x = 1

    def paint(self): ...

    def mix(self): ...

    y = 2


class Blue: ...
"""


def test_definitions_methods_entries_and_imports_are_inserted_at_their_anchors(tmp_path: Path) -> None:
    module = tmp_path / "hostir/deep/colours.py"
    module.parent.mkdir(parents=True)
    module.write_text(BEFORE)
    (module.parent / "shapes.py").write_text("class Circle: ...\n")
    edit(tmp_path, "after", "Red", "class Blue: ...\n")
    edit(tmp_path, "in", "Red", "    def mix(self): ...\n")
    edit(tmp_path, "in", "TABLE", '"blue": 2\n')
    edit(tmp_path, "in", "colours.NAMES", '"blue"\n')
    edit(tmp_path, "import", "TABLE", "Circle\n")
    edit(tmp_path, "import", "TABLE", "Red\n")  # skipped, because the module defines it
    assert module.read_text() == AFTER
