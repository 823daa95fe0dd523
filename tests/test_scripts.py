"""Benchmarks and scripts for GPUs can be started, and their documentation says how."""

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


def test_the_imports_of_gpu_scripts_exist() -> None:
    scripts = sorted(map(str, ROOT.glob("tests/gpu/*.py")))
    assert len(scripts) > 5
    env = environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", PYTHONPATH=python_path(ROOT / "tests/gpu"))
    code = f"import sys\nsys.path[:0] = {env['PYTHONPATH'].split(os.pathsep)}\n{IMPORT}"
    done = launch(0, "-c", code, *scripts, env=env, timeout=240)
    assert done.returncode == 0, done.stderr


def test_every_benchmark_starts_as_a_module_and_prints_its_help() -> None:
    """Run `python -m benchmarks.NAME --help` for all benchmarks in one process, which imports torch once."""
    assert len(BENCHMARKS) > 10
    done = launch(0, "-c", HELP, *BENCHMARKS, env=os.environ, timeout=240)
    outputs = dict(re.findall(r"^==> (\w+)\n(.*?)(?=^==> |\Z)", done.stdout, re.MULTILINE | re.DOTALL))
    assert list(outputs) == BENCHMARKS, done.stderr
    for name, text in outputs.items():
        assert text.startswith("usage: "), name
        assert text.endswith("ended with 0\n"), name


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_documents_how_it_starts(name: str) -> None:
    assert f"-m benchmarks.{name}" in (ROOT / "benchmarks" / f"{name}.py").read_text().split('"""')[1]


def test_no_page_documents_another_way_to_start_a_benchmark() -> None:
    files = [file for end in ("md", "py") for file in ROOT.glob(f"**/*.{end}") if ".venv" not in file.parts]
    assert len(files) > 100
    commands = {str(file.relative_to(ROOT)): OTHER_WAY.findall(file.read_text()) for file in files}
    assert {file: lines for file, lines in commands.items() if lines} == {}
    assert OTHER_WAY.search("python " + "benchmarks/check.py")
