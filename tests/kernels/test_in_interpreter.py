"""Runs the tests in `interpreted` in a process in which Triton interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))
LONG = [HERE / "interpreted" / f"test_{name}.py" for name in ("grouped", "ready", "split_tiles")]
PARTS = {"long": LONG, "others": [file for file in FILES if file not in LONG]}


def test_there_is_something_to_interpret():
    assert all(file in FILES for file in LONG)
    assert len(FILES) > 2 * len(LONG)


@pytest.mark.parametrize("part", [pytest.param("long", marks=pytest.mark.slow), "others"])
def test_the_kernels_pass_in_tritons_interpreter(part):
    files = PARTS[part]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *map(str, files)],
        cwd=HERE.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    assert set(re.findall(r"^PASSED \S+/(\w+\.py)::", report, re.MULTILINE)) == {file.name for file in files}, report
    assert "SKIPPED" not in report, report
