"""Golden files: expected texts of tests, kept as files under tests/cases that people review."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Golden:
    """Compares texts with the files of a folder; with ``accept`` it writes them instead."""

    folder: Path
    accept: bool

    def __call__(self, name: str, text: str) -> None:
        """Fail with a unified diff unless the file ``name`` of the folder holds exactly ``text``."""
        __tracebackhide__ = True
        path = self.folder / name
        if self.accept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            raise AssertionError(f"{path} does not exist; `pytest --accept` writes it, with this text:\n{text}")
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            raise AssertionError(
                f"{self._diff(path, expected, text)}\n`pytest --accept` makes the new text the expected one"
            )

    def _diff(self, path: Path, expected: str, text: str) -> str:
        # repr shows the difference that a plain diff hides: a missing last newline, trailing blanks.
        lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), str(path), "this run", lineterm="")
        return "\n".join(lines) or f"{path}: {expected[-40:]!r} expected at the end, {text[-40:]!r} found"
