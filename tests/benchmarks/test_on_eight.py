"""The script for many GPUs: on CPU processes, from one end to the other, with tiny sizes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.on_eight import PARTS, options
from tests.launch import ROOT, launch


@pytest.mark.torchrun
@pytest.mark.timeout(200)
def test_the_script_runs_the_parts_that_are_wanted_and_says_how_each_went(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HOSTIR_CACHE": str(tmp_path)}
    tiny = ("--device", "cpu", "--shrink", "64", "--rows", "8B:2048", "--only", "reduce_scatter,patterns,stress")
    done = launch(2, "-m", "benchmarks.on_eight", "--out", str(tmp_path / "on_eight"), *tiny, env=env, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = json.loads((tmp_path / "on_eight/on_eight.json").read_text())["parts"]
    assert [text.split(",")[0] for text in parts.values()] == ["ok", "needs GPUs", "ok"]
    log = (tmp_path / "on_eight/on_eight.log").read_text()
    assert "on_eight: stress: ok" in log
    assert "0 mismatches, 0 hangs" in log
    assert (tmp_path / "on_eight/matmul_reduce_scatter_2.md").exists()


def test_parts_are_named_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert options(["--out", "x"]).only == [part.name for part in PARTS]
    with pytest.raises(SystemExit):
        options(["--out", "x", "--only", "stress,nothing"])
    assert "no part nothing" in capsys.readouterr().err
