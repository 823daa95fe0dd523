"""Processes that tests start find the modules of the caller."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, environment, launch, python_path

# Like older versions of pytest-benchmark, which warn in every run with `-n`.
BENCHMARK = """
import warnings
import pytest

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if config.getoption("dist", "no") != "no":
        warnings.warn(UserWarning("Benchmarks are automatically disabled because xdist plugin is active."))
"""


def test_a_process_that_a_test_starts_finds_modules_on_the_path_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_caller.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-c", "import of_the_caller, tests.launch; print(tests.launch.__file__)"]
    done = subprocess.run(command, cwd="/", env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(ROOT / "tests/launch.py"), done.stderr


def test_tests_set_the_python_path_only_by_the_helper() -> None:
    sets = re.compile(r"""["']PYTHONPATH["']\s*(?::|\]\s*=)|\bPYTHONPATH=""")
    places = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted({*(ROOT / "tests").rglob("*.py")} - {Path(__file__)})
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if sets.search(line) and "python_path(" not in line
    ]
    assert not places, f"{', '.join(places)}: use tests.launch.environment or python_path, which keep the caller's path"


@pytest.mark.slow
def test_parallel_tests_run_although_a_benchmark_plugin_warns(tmp_path: Path) -> None:
    (tmp_path / "benchmark_plugin.py").write_text(BENCHMARK)
    package = tmp_path / "benchmark_plugin-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: benchmark-plugin\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[pytest11]\nbenchmark = benchmark_plugin\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "tests/ir/test_types.py"]
    env = environment(PYTHONPATH=python_path(tmp_path))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no luck')", 1),
        ("raise ValueError('no luck')", 1),
        ("raise KeyboardInterrupt", -2),
        ("import threading; threading.Timer(0.1, print, ['at the end']).start()", 0),
        ("import atexit; atexit.register(print, 'at the end')", 0),
    ],
)
def test_a_forked_process_ends_as_python_does(code: str, end: int) -> None:
    brief, full = (
        launch(0, "-c", f"print('begun'); {code}", env=environment(), timeout=60, finalize=finalize)
        for finalize in (False, True)
    )
    assert brief.returncode == full.returncode == end
    assert brief.stdout == full.stdout
    assert ("at the end\n" in brief.stdout) == ("at the end" in code)
    assert brief.stderr == full.stderr
