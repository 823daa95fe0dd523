"""Runs the kernels' own tests in a process where Triton interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))


def test_there_is_something_to_interpret():
    assert FILES  # without any, the test below would be one that is skipped


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_kernels_hold_in_tritons_interpreter(file):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        cwd=HERE.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    passed = re.search(r"(\d+) passed", report)
    assert passed, report
    assert int(passed.group(1)) > 0, report
    assert "skipped" not in report, report
