"""Makes the changes of a page in a copy of hostir. A change is anchored by a name, not by a line or a file.

    ```python after NAME     definitions after a class, function, method or table
    ```python in NAME        methods of a class, or entries of a table
    ```python import NAME    names of other modules, which the module that defines NAME imports

NAME must be defined once in hostir, or be written as `module.NAME`. Changes that a module already has are skipped, so a
page still runs for somebody who has followed it.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = ast.Assign | ast.AnnAssign
DEFINITION = ast.FunctionDef | ast.ClassDef | TABLE


class Anchor(NamedTuple):
    """A definition of hostir: its file, its syntax tree, and the body that it is part of."""

    path: Path
    node: DEFINITION
    body: list[ast.stmt]


def definitions(body: list[ast.stmt]) -> dict[str, DEFINITION]:
    """Return the classes, functions and variables that statements define. The first definition of a name counts."""
    by_name: dict[str, DEFINITION] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            by_name.setdefault(node.name, node)
        elif isinstance(node, TABLE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                by_name.setdefault(ast.unparse(target), node)
    return by_name


def anchors(root: Path, name: str) -> Iterator[Anchor]:
    """Yield the definitions called `name`, `Class.name` or `module.name`."""
    *outer, last = name.split(".")
    for path in sorted((root / "hostir").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if last not in text:
            continue
        body = ast.parse(text).body
        if outer and outer != [path.stem]:
            owner = definitions(body).get(outer[0])
            body = owner.body if isinstance(owner, ast.ClassDef) else []
        if last in definitions(body):
            yield Anchor(path, definitions(body)[last], body)


def anchor(root: Path, name: str) -> Anchor:
    """Return the definition called `name`. Fails unless there is exactly one."""
    candidates = list(anchors(root, name))
    paths = [str(candidate.path.relative_to(root)) for candidate in candidates]
    assert len(candidates) == 1, (
        f"a page changes hostir at {name!r}, which must be defined once; it is defined in {paths}"
    )
    return candidates[0]


def edit(root: Path, verb: str, name: str, text: str) -> None:
    """Make one change of a page."""
    at = anchor(root, name)
    source = at.path.read_text(encoding="utf-8")
    text = textwrap.dedent(text)
    if verb == "import":
        sources = {word: anchor(root, word).path for word in text.split()}
        text = "".join(f"from {_dotted(root, path)} import {n}\n" for n, path in sources.items() if path != at.path)
    change = {"after": _after, "in": _inside, "import": _imported}[verb]
    at.path.write_text(change(at, source, text), encoding="utf-8")


def _dotted(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts)


def _after(at: Anchor, source: str, text: str) -> str:
    if definitions(ast.parse(text).body).keys() <= definitions(at.body).keys():
        return source
    return _inserted(source, at.node, text, blank_lines=1 if at.node.col_offset else 2)


def _inside(at: Anchor, source: str, text: str) -> str:
    if isinstance(at.node, ast.ClassDef):
        return _after(Anchor(at.path, _last_definition(at.node), at.node.body), source, text)
    assert isinstance(at.node, TABLE)
    table = at.node.value
    if isinstance(table, ast.DictComp):
        table = table.generators[0].iter
    assert isinstance(table, ast.Dict | ast.Tuple), f"{ast.unparse(at.node)} is no table"
    entries = text.strip().rstrip(",")
    parsed = ast.parse(f"{{{entries}}}" if isinstance(table, ast.Dict) else f"({entries},)", mode="eval").body
    if {*map(ast.unparse, _keys(parsed))} <= {*map(ast.unparse, _keys(table))}:
        return source
    last = (table.values if isinstance(table, ast.Dict) else table.elts)[-1]
    offset = _offset(source, last)
    return f"{source[:offset]},\n    {entries}{source[offset:]}"


def _imported(at: Anchor, source: str, text: str) -> str:
    body = ast.parse(source).body
    if {*map(ast.dump, _names(ast.parse(text).body))} <= {*map(ast.dump, _names(body))}:
        return source
    last = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)][-1]
    return _inserted(source, last, text, blank_lines=0)


def _inserted(source: str, node: ast.stmt, text: str, blank_lines: int) -> str:
    """Put text after a statement, indented like the statement."""
    offset = _offset(source, node)
    indented = textwrap.indent(text.rstrip(), " " * node.col_offset)
    return source[:offset] + "\n" * (blank_lines + 1) + indented + source[offset:]


def _offset(source: str, node: ast.stmt | ast.expr) -> int:
    """Return the index in the source of the end of a node."""
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    line = lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode()
    return len("".join(lines[: node.end_lineno - 1])) + len(line)


def _last_definition(node: ast.ClassDef) -> ast.FunctionDef:
    return [statement for statement in node.body if isinstance(statement, ast.FunctionDef)][-1]


def _keys(table: ast.expr) -> list[ast.expr]:
    return [key for key in table.keys if key] if isinstance(table, ast.Dict) else list(getattr(table, "elts", []))


def _names(body: list[ast.stmt]) -> Iterator[ast.alias]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (ast.alias(alias.name, alias.asname) for alias in node.names)
