from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hostir.__main__ import main
from tests.pages import ROOT, blocks, check_console, check_python, environment

README = ROOT / "README.md"
MOST_LINES = 170


def test_the_python_of_the_readme_runs_and_prints_its_outputs(tmp_path: Path) -> None:
    check_python(README, tmp_path)


@pytest.mark.torchrun
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    check_console(README, tmp_path)


def test_commands_that_are_not_run_are_said_to_need_gpus() -> None:
    aside = [block for block in blocks(README) if block.word and block.language == "console"]
    assert aside
    for block in aside:
        assert block.word == "gpu"
        lines = README.read_text().splitlines()[: block.line - 2]
        assert "GPU" in next(line for line in reversed(lines) if line)


def test_the_readme_is_short() -> None:
    assert README.read_text().count("\n") <= MOST_LINES


def test_the_links_of_the_readme_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (ROOT / link).exists(), link


def test_the_page_of_patterns_lists_the_patterns_of_the_examples() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/patterns.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    source = (ROOT / "examples/patterns.py").read_text()
    listed = re.findall(
        r"^(?:PATTERNS|NORMED|EXPERTS|SCALED) = \((?: *#[^\n]*)?(.*?)\)", source, re.MULTILINE | re.DOTALL
    )
    assert len(listed) == 4
    assert sorted(named) == sorted(re.findall(r"\w+", " ".join(listed)))


def test_the_picture_is_up_to_date(tmp_path: Path) -> None:
    command = re.search(r"`hostir (run .*?--trace) (docs/images/\S+)`", README.read_text())
    assert command
    again = tmp_path / "again.svg"
    assert main([*command[1].replace("examples", str(ROOT / "examples")).split(), str(again)]) == 0
    drawn, redrawn = (re.findall(r"<title>(.*?)\n", path.read_text()) for path in (ROOT / command[2], again))
    assert sorted(drawn) == sorted(redrawn)


@pytest.mark.slow
@pytest.mark.torchrun
def test_the_demo_runs_and_reports_an_error_for_each_run() -> None:
    ours = f"BIN={Path(sys.executable).parent}", "RANKS=2"  # each rank imports torch
    done = subprocess.run(
        ["make", "-o", ".venv/.ready", "demo", *ours], cwd=ROOT, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("==> ") == 5
    assert "program @ag_matmul" in done.stdout
    assert re.findall(r"ran on (.*)", done.stdout) == [
        "8 simulated ranks, kernels aten",
        "8 simulated ranks, kernels triton",
        "2 ranks on cpu, kernels aten",
        "2 ranks on cpu, kernels triton",
    ]
    errors = [float(error) for error in re.findall(r"maximum error (\S+)", done.stdout)]
    assert len(errors) == 4
    assert all(0 < error < 4e-3 for error in errors)  # bf16 rounds to 2^-9 = 2e-3
