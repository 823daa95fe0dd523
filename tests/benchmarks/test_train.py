"""The benchmark of training: runs on CPU processes with tiny sizes, and its checks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.llama_block import ISSUED, WAYS
from benchmarks.train import HEADERS, NEEDS_CUDA, problem, report
from tests.launch import environment, launch

PASS, EAGER, ASYNC = "DTensor compiled, hostir's pass", "hostir eager", "DTensor compiled, async TP"
Results = dict[str, Any]

# Runs the benchmark with a backend of torch.compile that generates no code. FAULTS are a way and what is wrong with it:
# the optimizer does nothing, or each gradient is 1.01 times as large.
SCRIPT = """
import json, sys
from benchmarks import train
from tests.torch.without_code import WITHOUT_CODE

faults, run_of = json.loads(sys.argv.pop(1)), train.run_of

def faulty(setting, way):
    run = run_of(setting, way)
    if faults.get(way) == "optimizer":
        run.optimizer.step = lambda: None
    for parameter in run.model.parameters() if faults.get(way) == "gradients" else ():
        parameter.register_hook(lambda gradient: gradient * 1.01)
    return run

train.run_of = faulty
sys.exit(train.main([*sys.argv[1:], "--backend", WITHOUT_CODE]))
"""


def trained(tmp_path: Path, ranks: int, ways: list[str], *options: str, **faults: str) -> tuple[int, Results, str]:
    """Run the benchmark. Return its exit code, the row of its results, and its table."""
    small = ("--device", "cpu", "--shrink", "64", "--models", "8B", "--tokens", "32", "--steps", "2")
    command = ("-c", SCRIPT, json.dumps(faults), *small, *options, "--ways", ";".join(ways))
    env = environment(HOSTIR_CACHE=str(tmp_path), PYTHONWARNINGS="ignore")
    done = launch(ranks, *command, "--out", str(tmp_path / "train"), env=env, timeout=150)
    assert (tmp_path / "train.json").exists(), done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "train.json").read_text())["rows"]
    return done.returncode, row, (tmp_path / "train.md").read_text()


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(160)
def test_all_ways_train_alike_and_run_the_operators_of_their_names(tmp_path: Path) -> None:
    ways = ["DTensor eager", ASYNC, PASS, EAGER, "hostir eager, fp8"]
    code, row, table = trained(tmp_path, 2, ways, "--layers", "2")
    assert [*row["ways"]] == ways
    assert row["ways"].pop(ASYNC) == {"failed": NEEDS_CUDA}
    for name, way in row["ways"].items():
        assert problem(row, name) == "", name
        assert way[ISSUED]["us"] > 0
        assert 0 < way["first step s"] <= way["warm s"]
        assert way["error"] < (0.1 if "fp8" in name else 1e-5), name
        assert way[ISSUED]["change"] > 0
        assert abs(way[ISSUED]["loss"] / row["ways"]["DTensor eager"][ISSUED]["loss"] - 1) < 1e-2
    counts = {name: way["operators"] for name, way in row["ways"].items()}
    assert counts["DTensor eager"] == {}
    # The pass sees the layers only; hostir's plan also has the output.
    assert counts[PASS] == {"hostir::all_gather_matmul": 8, "hostir::matmul_reduce_scatter": 8}
    assert counts[EAGER] == {"hostir::all_gather_matmul": 9, "hostir::matmul_reduce_scatter": 9}
    assert counts["hostir eager, fp8"]["hostir::all_gather_scaled_matmul"] == 8
    assert f"| {ASYNC} |" in table
    assert f"| {NEEDS_CUDA} |" in table
    assert "| 9 all_gather_matmul, 9 matmul_reduce_scatter |" in table
    assert code == 0


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(160)
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("optimizer", "WRONG: issued, no weight has changed"),
        (
            "gradients",
            "RuntimeError: WRONG: the gradients of all parameters are off by 1.00e-02, and may be by 1.00e-05",
        ),
    ],
)
def test_a_way_that_trains_wrongly_is_reported(fault: str, text: str, tmp_path: Path) -> None:
    code, row, table = trained(tmp_path, 2, ["DTensor eager", EAGER], "--layers", "1", **{EAGER: fault})
    assert code == 1
    assert problem(row, "DTensor eager") == ""
    assert problem(row, EAGER) == text
    assert f"| {text} |" in table
    assert (ISSUED in row["ways"][EAGER]) is (fault == "optimizer")  # a way with wrong gradients is not timed


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(160)
def test_replicas_train_on_different_tokens(tmp_path: Path) -> None:
    ways = ["DTensor eager", EAGER]
    code, row, table = trained(tmp_path, 4, ways, "--layers", "1", "--of", "4", "--dp", "2")
    assert code == 0, table
    assert {way: problem(row, way) for way in ways} == dict.fromkeys(ways, "")
    assert "1 layers, 2 replicas |" in table
    for way in ways:
        result = row["ways"][way][ISSUED]
        assert result["tokens/s"] * result["us"] == pytest.approx(2 * 32 * 1e6)


def row_of(**ways: Results) -> Results:
    """Return a row with the results of ways."""
    figures = {"first step s": 1.0, "warm s": 2.0, "bytes": 1 << 30, "error": 0.01, "operators": {}}
    return {
        **{"model": "70B", "tokens": 64, "layers": 2, "dp": 1},
        "ways": {way: figures | results for way, results in ways.items()},
    }


def result(loss: float = 1.0, change: float = 1.0) -> Results:
    return {"us": 100.0, "tokens/s": 640000.0, "loss": loss, "change": change}


@pytest.mark.parametrize(
    ("way", "second", "text"),
    [
        (EAGER, result(), ""),
        (EAGER, result(loss=1.04, change=0.85), ""),
        (EAGER, result(loss=1.06), "WRONG: issued, its loss is 1.0600, not 1.0000"),
        ("hostir eager, fp8", result(loss=1.06), ""),
        (EAGER, result(loss=float("nan")), "WRONG: issued, its loss is nan, not 1.0000"),
        (EAGER, result(change=0.75), "WRONG: issued, its change of the weights is 0.7500, not 1.0000"),
        (EAGER, result(change=0.0), "WRONG: issued, no weight has changed"),
    ],
)
def test_loss_and_change_of_the_weights_are_compared_with_the_first_way(way: str, second: Results, text: str) -> None:
    row = row_of(**{"DTensor eager": {ISSUED: result()}, way: {ISSUED: second}})
    assert problem(row, way) == text
    assert problem(row, "DTensor eager") == ""
    line = report([row]).splitlines()[-1]
    assert line.endswith(f"| none | {text} |")
    assert line.count("|") == len(HEADERS) + 1


def test_a_failed_graph_is_reported_next_to_the_other_figures() -> None:
    row = row_of(**{EAGER: {ISSUED: result(), "lacking": "replayed: RuntimeError: refused"}})
    assert report([row]).endswith("| replayed: RuntimeError: refused |")


def test_a_step_whose_backward_is_not_fused_is_refused() -> None:
    forward = Counter({"hostir::all_gather_matmul": 4, "hostir::matmul_reduce_scatter": 4})
    for name in (PASS, EAGER):
        WAYS[name].check(forward + forward, blocks=2)
        with pytest.raises(RuntimeError, match="ran 4 fused all_gather, not 8"):
            WAYS[name].check(forward, blocks=2)
