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
LONGEST = HERE / "interpreted" / "test_ready.py"  # about as long as the others together
HALVES = [LONGEST], [file for file in FILES if file != LONGEST]  # for two workers


def test_there_is_something_to_interpret():
    assert all(map(Path.is_file, HALVES[0] + HALVES[1]))
    assert min(map(len, HALVES)) > 0


@pytest.mark.slow  # runs no compiler passes, so HOSTIR_SPEC has nothing to check
@pytest.mark.parametrize("files", HALVES, ids=["one half", "the other half"])
def test_the_kernels_pass_in_tritons_interpreter(files):
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
