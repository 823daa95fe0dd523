"""The cost model against measurements: in 9 of 10 cases its candidate is within 5 % of the fastest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from hostir.choice import simulation
from hostir.choice.cost import tasks_of
from hostir.choice.hardware import H200
from hostir.kernels.matmul.tiles import Gemm
from tests.choice.fusions import scattered_rows
from tests.choice.recorded import MeasuredCandidate, Recorded, estimates, lowered, read, recorded

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
FILES = [
    RESULTS / "patterns.json",
    Path(__file__).with_name("peers.json"),
    *sorted(RESULTS.glob("allgather_matmul*.json")),
]
PAGE = ROOT / "docs/choosing.md"
CLOSE = 1.05
OFTEN = 0.9


def losses(rows: list[Recorded]) -> dict[str, float]:
    """Return the loss of the model's candidate for each mode of each fusion with several measured candidates."""
    by_case = {}
    for row in rows:
        for slices in sorted({candidate.slices for candidate in row.times}):
            candidates = row.of_fusion(slices)
            if len(candidates) > 1:
                loss, taken = row.loss(candidates)
                by_case[f"{row.pattern} {row.row} {row.dtype} {row.ranks} ranks S={slices} {row.mode}: {taken}"] = loss
    return by_case


def misses(losses: dict[str, float]) -> dict[str, float]:
    """Return the losses over CLOSE."""
    return {name: round(loss, 3) for name, loss in losses.items() if loss > CLOSE}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_models_candidate_is_near_the_fastest_in_9_of_10_cases_as_the_page_says(path: Path) -> None:
    rows = read(path)
    by_case = losses(rows)
    assert len(by_case) >= 10
    wrong = misses(by_case)
    assert len(wrong) <= (1 - OFTEN) * len(by_case), f"{len(wrong)} of {len(by_case)}: {wrong}"
    ranks = " and ".join(map(str, sorted({row.ranks for row in rows})))
    mean_loss, worst = mean(by_case.values()) - 1, max(by_case.values()) - 1
    near = len(by_case) - len(wrong)
    figures = f"{ranks} | {len(by_case)} | {near} | {mean_loss:.1%} | {worst:.0%}".replace("%", " %")
    assert f"| `{path.name}` | {figures} |" in PAGE.read_text().splitlines()


def test_estimates_of_the_peers_are_near_their_times() -> None:
    ratios = [
        row.estimate(candidate) / time
        for row in read(Path(__file__).with_name("peers.json"))
        if row.mode == "graph" and row.shape[0] >= 2048
        for candidate, time in row.times.items()
    ]
    assert len(ratios) >= 30
    assert sum(0.85 < ratio < 1.18 for ratio in ratios) >= OFTEN * len(ratios), sorted(ratios)


SCATTERS = json.loads(Path(__file__).with_name("peers_reduce_scatter.json").read_text())["rows"]


def test_estimates_of_a_matmul_and_a_reduction_by_nccl_are_near_their_times() -> None:
    ratios = {}
    for row in [row for row in SCATTERS if "sequential_us" in row]:
        shape = row["M"], row["N"], row["K"]
        program = lowered(row["kind"], shape, row["ranks"], row["dtype"], "sequential", 1, 1)
        ratios[row["kind"], *shape] = estimates(program, {}, H200)["graph"] / row["sequential_us"]
    assert len(ratios) >= 20
    assert sum(0.95 < ratio < 1.06 for ratio in ratios.values()) >= OFTEN * len(ratios) - 1, ratios
    assert all(0.9 < ratio < 1.1 for (_, m, *_), ratio in ratios.items() if m >= 128), ratios


def test_estimates_of_blocks_sent_when_computed_are_near_their_times() -> None:
    ratios = {}
    for row in [row for row in SCATTERS if "scatter_us" in row]:
        shape = row["M"], row["N"], row["K"]
        program = scattered_rows(row["ranks"], *shape)
        tasks = tasks_of(program, {})
        # The peer's matmul is another kernel. Its two barriers and memsets are not in the program.
        alone = simulation.Costs(H200, "triton", simulation.flops(tasks)).gemms.time(Gemm(*shape, "bf16"))
        beside = row["scatter_us"] - row["scatter_gemm_us"] - 2 * (H200.barrier + simulation.SMALL_KERNEL)
        ratios[row["ranks"], shape] = simulation.estimates(tasks, H200, "triton")["graph"] / (alone + beside)
    assert len(ratios) == 18
    # Some rows took less time than their matmul alone: such differences are not exact.
    assert sum(0.92 < ratio < 1.08 for ratio in ratios.values()) >= OFTEN * len(ratios), list(ratios.items())


def test_estimates_use_the_constants_of_the_measured_hardware() -> None:
    row = read(RESULTS / "allgather_matmul_f32_2.json")[0]
    slow = replace(row, hardware=replace(row.hardware, link=row.hardware.link / 100))
    fused = next(candidate for candidate in row.times if candidate.strategy == "fused")
    assert slow.estimate(fused) > 5 * row.estimate(fused)


def test_results_of_both_benchmarks_are_read() -> None:
    environment = {"gpu": "NVIDIA H200", "gpus": 8}
    old = {"row": "8B", "kind": "reduce_scatter", "shape": [4096, 4096, 1792], "graph": {"sequential aten": 208.0}}
    old["graph"] |= {"S=4 streams=2 aten": 284.0, "by hand": 207.0, "S=2 streams=2 aten 16 CTAs": 1.0}
    new = {"model": "8B", "M": 64, "N": 1792, "K": 4096, "ranks": 4, "dtype": "f16"}
    new["times"] = {
        "NCCL + cuBLAS": {"ours": False, "eager": 1.0},
        "sequential aten": {"ours": True, "eager": 30.0, "graph": 28.0, "host_eager_us": 9.0},
        "pipeline 2 slices 2 streams triton": {"ours": True, "eager": 60.0},
        "fused triton": {"ours": True, "eager": None, "graph": 25.0},
    }
    (first,) = recorded({"environment": environment, "results": [old]})
    assert first.pattern == "reduce_scatter"
    assert first.times == {
        MeasuredCandidate("sequential", 1, 1, "aten"): 208.0,
        MeasuredCandidate("pipeline", 4, 2, "aten"): 284.0,
    }
    graph, eager = recorded({"environment": environment, "rows": [new]})
    assert (graph.ranks, graph.dtype, graph.shape) == (4, "f16", (64, 1792, 4096))
    assert graph.times == {
        MeasuredCandidate("sequential", 1, 1, "aten"): 28.0,
        MeasuredCandidate("fused", 1, 1, "triton"): 25.0,
    }
    assert eager.times == {
        MeasuredCandidate("sequential", 1, 1, "aten"): 30.0,
        MeasuredCandidate("pipeline", 2, 2, "triton"): 60.0,
    }


def test_a_model_that_takes_the_slowest_candidate_would_fail() -> None:
    rows = read(FILES[0])
    worst = [max(row.times.values()) / min(row.times.values()) for row in rows]
    assert sum(loss > CLOSE for loss in worst) > OFTEN * len(worst)
