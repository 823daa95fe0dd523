"""Bad input: each file under tests/cases/bad gets one diagnostic at the right position, and no traceback.

Comments in a file say what `hostir` should report:

    error: part of the message          (required)
    at: 5:3                             the line and column it points at
    expected: ..., hint: ..., note: ... parts of these labels
    exit: 1                             the exit code; 2 by default
    run: check --json                   the command and its options; `check` for a .hir, `lower` for a .py
    env: HOSTIR_SPEC=7                  a variable that is set

A `.hir` or `.py` is passed to the command; the last line of a `.cmd` is the whole command line.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hostir.__main__ import main

ROOT = Path(__file__).parent.parent
CASES = sorted(path for path in (ROOT / "tests" / "cases" / "bad").iterdir() if path.is_file())  # no __pycache__
COMMENT = re.compile(r"^(?://|#) (\w+): (.*)$", re.MULTILINE)
PYTHONS = re.compile(r"\bhi\.|\w=|set_device_mesh|parameter|t\.split")  # Python, which a text does not have
DEFAULT = {".hir": "check", ".py": "lower"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_gets_one_clear_diagnostic(
    case: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = case.read_text(encoding="utf-8", errors="replace")
    comments = dict(COMMENT.findall(text))
    monkeypatch.chdir(ROOT)
    if "env" in comments:
        monkeypatch.setenv(*comments["env"].split("=", 1))
    file = str(case.relative_to(ROOT))
    if case.suffix == ".cmd":
        code = main(shlex.split(text.splitlines()[-1]))
    else:
        command, *options = shlex.split(comments.get("run", DEFAULT[case.suffix]))
        code = main([command, file, *options])
    shown = capfd.readouterr()
    assert code == int(comments.get("exit", "2")), shown.err
    assert "Traceback" not in shown.out + shown.err
    assert shown.err.count("error: ") == 1
    if "at" in comments:
        assert f"{file}:{comments['at']}: error: " in shown.err
        assert "^" in shown.err or ":" not in comments["at"]
    for label in ("error", "expected", "hint", "note"):
        if label in comments:
            assert re.search(rf"(^|\s){label}: [^\n]*{re.escape(comments[label])}", shown.err), shown.err
    for hint in re.findall(r"hint: (.*)", shown.err) if case.suffix == ".hir" else []:
        assert "in Python" in hint or not PYTHONS.search(hint), hint


def test_there_are_cases_of_every_file_type() -> None:
    suffixes = [case.suffix for case in CASES]
    assert len(suffixes) >= 40
    assert all(suffixes.count(suffix) >= 10 for suffix in (".hir", ".py", ".cmd"))
