"""Benchmarks, and scripts that only a machine with GPUs can run: that they start, and in one way."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.launch import environment, launch, python_path

ROOT = Path(__file__).parent.parent
MAIN = 'if __name__ == "__main__":'
BENCHMARKS = sorted(file.stem for file in (ROOT / "benchmarks").glob("*.py") if MAIN in file.read_text())
IMPORT = """
import runpy, sys
for script in sys.argv[1:]:
    print(script, file=sys.stderr)
    runpy.run_path(script, run_name="imported")
"""
HELP = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    print("==>", name, flush=True)
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("ended with", end.code, flush=True)
"""
OTHER_WAY = re.compile(r"(?:python|torchrun)\b[^\n`]*[ /]benchmarks/\w+\.py")


def test_what_scripts_import_exists() -> None:
    scripts = sorted(map(str, ROOT.glob("tests/gpu/*.py")))
    assert len(scripts) > 5
    env = environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", PYTHONPATH=python_path(ROOT / "tests/gpu"))
    code = f"import sys\nsys.path[:0] = {env['PYTHONPATH'].split(os.pathsep)}\n{IMPORT}"
    done = launch(0, "-c", code, *scripts, env=env, timeout=240)
    assert done.returncode == 0, done.stderr


def test_every_benchmark_starts_as_a_module_and_says_what_it_measures() -> None:
    """As `python -m benchmarks.NAME --help` would, but in one process that has torch: each loads it."""
    assert len(BENCHMARKS) > 10
    done = launch(0, "-c", HELP, *BENCHMARKS, env=os.environ, timeout=240)
    said = dict(re.findall(r"^==> (\w+)\n(.*?)(?=^==> |\Z)", done.stdout, re.MULTILINE | re.DOTALL))
    assert list(said) == BENCHMARKS, done.stderr
    for name, text in said.items():
        assert text.startswith("usage: "), name
        assert text.endswith("ended with 0\n"), name


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_documents_how_it_starts(name: str) -> None:
    assert f"-m benchmarks.{name}" in (ROOT / "benchmarks" / f"{name}.py").read_text().split('"""')[1]


def test_nothing_documents_another_way_to_start_a_benchmark() -> None:
    files = [file for end in ("md", "py") for file in ROOT.glob(f"**/*.{end}") if ".venv" not in file.parts]
    assert len(files) > 100
    found = {str(file.relative_to(ROOT)): OTHER_WAY.findall(file.read_text()) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}
    assert OTHER_WAY.search("python " + "benchmarks/check.py")
