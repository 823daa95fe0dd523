"""The benchmark of a block of Llama-3: a full run on CPU processes, and its checks."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.llama_block import HOST_IN_TURN, HOSTIRS, IN_TURN, TORCHS, WAYS, Bench, Case, report
from tests.launch import environment, launch

PASS, PLAIN = "DTensor compiled, hostir's pass", "DTensor compiled"
Results = dict[str, Any]


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_ways_give_the_same_gradients_and_run_the_operators_of_their_names(tmp_path: Path) -> None:
    small = ("--device", "cpu", "--shrink", "32", "--models", "8B", "--tokens", "64", "--repeats", "1")
    command = ("-m", "tests.benchmarks.llama_block_without_code", *small, "--out", str(tmp_path / "block"))
    done = launch(2, *command, env=environment(HOSTIR_CACHE=str(tmp_path)), timeout=220)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "block.json").read_text())["rows"]
    table = (tmp_path / "block.md").read_text()
    assert row["failed"] == {
        "DTensor compiled, async TP": "configuration: rank 0: RuntimeError: async TP is for CUDA",
        # On CPUs torch's operators are plain collectives.
        "torch's operators": "operators: rank 0: RuntimeError: the step that was timed ran no operator "
        "'symm_mem::fused_...'",
    }
    assert row["ways"].keys() == WAYS.keys() - row["failed"].keys()
    assert 0 < row["error_of_bf16"] < 0.05
    for name, way in row["ways"].items():
        assert way["error"] <= (0.1 if "fp8" in name else 1.1 * row["error_of_bf16"]), name
        assert way["issued"]["step"] > 0
        assert way["issued"]["alone"] > 0
        assert way["host_us"] > 0
        assert way["lacking"] == {}
        assert bool(way["operators"]) is (name.startswith("hostir") or name == PASS)
    assert row["ways"][PASS]["operators"] == {"hostir::all_gather_matmul": 4, "hostir::matmul_reduce_scatter": 4}
    assert "| 4 all_gather_matmul, 4 matmul_reduce_scatter |" in table
    assert report([row]) in table


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_steps_are_timed_in_turn_if_their_host_is_compared(tmp_path: Path) -> None:
    small = ("--device", "cpu", "--shrink", "32", "--models", "8B", "--tokens", "64", "--repeats", "1", "--no-alone")
    ways = ("--in-turn", "--ways", f"{PLAIN};hostir eager;hostir compiled")
    command = ("-m", "tests.benchmarks.llama_block_without_code", *small, *ways, "--out", str(tmp_path / "block"))
    done = launch(2, *command, env=environment(HOSTIR_CACHE=str(tmp_path)), timeout=220)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "block.json").read_text())["rows"]
    assert row["failed"] == {}
    assert [*row[IN_TURN]] == [*row[HOST_IN_TURN]] == [PLAIN, "hostir eager", "hostir compiled"]
    assert all(us > 0 for us in (*row[IN_TURN].values(), *row[HOST_IN_TURN].values()))
    header, _, *lines = [line for line in (tmp_path / "block.md").read_text().splitlines() if line.startswith("|")]
    assert "| issued in turn, us | host in turn, us |" in header
    expected = zip(row[IN_TURN].values(), row[HOST_IN_TURN].values(), strict=True)
    assert [line.split(" | ")[8:10] for line in lines] == [[f"{us:.0f}" for us in each] for each in expected]


@pytest.mark.parametrize(
    ("name", "ran"),
    [
        (PLAIN, []),
        (PASS, ["hostir::all_gather_matmul"]),
        ("DTensor compiled, async TP", ["symm_mem::fused_all_gather_matmul"]),
    ],
)
def test_a_step_that_runs_the_operators_of_its_way_is_accepted(name: str, ran: list[str]) -> None:
    WAYS[name].check(Counter(ran))


@pytest.mark.parametrize(
    ("name", "ran", "problem"),
    [
        (PLAIN, ["hostir::all_gather_matmul"], "ran hostir::all_gather_matmul, which is not of this way"),
        (PASS, [], f"ran no operator '{HOSTIRS}...'"),
        ("DTensor compiled, async TP", [], f"ran no operator '{TORCHS}...'"),
        ("hostir eager", ["symm_mem::fused_all_gather_matmul"], "which is not of this way"),
    ],
)
def test_a_step_that_does_not_run_the_operators_of_its_way_fails(name: str, ran: list[str], problem: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(problem)):
        WAYS[name].check(Counter(ran))


class Alone:
    """A session of one rank."""

    rank, size, device = 0, 1, torch.device("cpu")

    def exchange(self, key: str, mine: str, timeout: float) -> list[str]:
        return [mine]


def way(**times: float) -> Results:
    """Return the figures of a way with these times in ms."""
    figures = {"host_us": 9.0, "bytes": 1 << 20, "error": 0.01, "operators": {}, "lacking": {}}
    return {"issued": times, "replayed": {}, **figures}


def test_measured_rows_are_kept_when_a_later_case_fails(tmp_path: Path) -> None:
    options = Namespace(out=tmp_path / "block", of=8, ways=[PLAIN])
    bench = Bench(cast(Any, Alone()), options, cast(Any, None))
    first = {"model": "70B", "tokens": 64, "widths": "full widths", "ways": {PLAIN: way(step=30.0, alone=20.0)}}
    bench.rows.append(first | {"failed": {}, "error_of_bf16": 0.01})

    def fails() -> Case:
        raise MemoryError("too large")

    bench.measure("8B", 128, fails)
    rows = json.loads((tmp_path / "block.json").read_text())["rows"]
    assert rows[0] == bench.rows[0]
    assert rows[1]["failed"] == {"the case": "8B, 128 tokens: rank 0: MemoryError: too large"}
    table = (tmp_path / "block.md").read_text()
    assert f"| {PLAIN} | 30 | 20 | 10 | - | - | - | 9 | 1 | 1.00 | none |" in table
    assert "- the case: 8B, 128 tokens: rank 0: MemoryError: too large" in table
