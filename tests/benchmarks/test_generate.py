"""The benchmark of decoding: a run on CPU processes with tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import environment, launch


@pytest.mark.torchrun
@pytest.mark.timeout(100)
def test_prefill_and_steps_are_timed_for_each_way(tmp_path: Path) -> None:
    small = ("--device", "cpu", "--shrink", "32", "--models", "8B", "--layers", "1", "--batches", "2")
    options = (*small, "--context", "16", "--repeats", "1", "--out", str(tmp_path / "generate"))
    env = environment(HOSTIR_CACHE=str(tmp_path), PYTHONWARNINGS="ignore")
    done = launch(2, "-m", "benchmarks.generate", *options, env=env, timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "generate.json").read_text())["rows"]
    assert [*row["ways"]] == ["NCCL", "hostir"]
    for way in row["ways"].values():
        assert way["error"] < 1e-5
        assert way["eager us"] * way["eager tokens/s"] == pytest.approx(2 * 1e6)
        assert way["prefill us"] * way["prefill tokens/s"] == pytest.approx(2 * 16 * 1e6)
        assert way["bytes"] == 0  # it is measured on GPUs only
    header = (tmp_path / "generate.md").read_text().split("\n\n")[2].splitlines()[0]
    assert "| prefill us | prefill tokens/s | peak MiB | symmetric MiB |" in header
