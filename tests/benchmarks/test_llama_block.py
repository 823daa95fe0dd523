"""The benchmark of a block of Llama-3, from one end to the other on CPU processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.llama_block import WAYS, report
from tests.launch import environment, launch


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_ways_give_the_same_gradients(tmp_path: Path) -> None:
    env = environment(HOSTIR_CACHE=str(tmp_path))
    small = ("--device", "cpu", "--shrink", "32", "--models", "8B", "--tokens", "64", "--repeats", "1")
    ways = [name for name in WAYS if "pass" not in name]  # which is for inductor, not for aot_eager
    small += ("--ways", ";".join(ways))
    command = ("-m", "benchmarks.llama_block", *small, "--backend", "aot_eager", "--out", str(tmp_path / "block"))
    done = launch(2, *command, env=env, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "block.json").read_text())["rows"]
    assert row["failed"] == {"DTensor compiled, async TP": "async TP is for CUDA"}
    assert row["ways"].keys() == {*ways} - row["failed"].keys()
    base = row["ways"]["DTensor eager"]["error"]
    assert 0 < base < 0.05
    for name, way in row["ways"].items():
        assert way["error"] <= (0.1 if "fp8" in name else 1.1 * base), name
        assert way["us"] > 0
        assert way["host_us"] > 0
    assert report([row]) in (tmp_path / "block.md").read_text()
    assert "hostir::all_gather_matmul" in done.stdout
