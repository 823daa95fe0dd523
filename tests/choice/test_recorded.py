"""The cost model against times that other programs took on H200: peers, and a matmul before a reduction."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.regret import estimates_of, rows_of
from hostir.choice import simulation
from hostir.choice.cost import tasks_of
from hostir.choice.hardware import H200
from tests.choice.fusions import scattered_rows

OFTEN = 0.9
PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())
SUMS = json.loads(Path(__file__).with_name("sums.json").read_text())["rows"]


def test_estimates_of_the_peers_are_near_their_times() -> None:
    ratios = []
    for row in [row for row in rows_of(PEERS) if row["M"] >= 2048]:
        times = {name: time["graph"] for name, time in row["times"].items()}
        ratios += [estimate["graph"] / times[name] for name, estimate in estimates_of(row, H200).items()]
    assert len(ratios) >= 30
    assert sum(0.85 < ratio < 1.18 for ratio in ratios) >= OFTEN * len(ratios), sorted(ratios)


def test_estimates_of_a_matmul_and_a_reduction_by_nccl_are_near_their_times() -> None:
    ratios = {}
    for row in [row for row in SUMS if "sequential_us" in row]:
        (estimate,) = estimates_of({**row, "times": {"sequential aten": {}}}, H200).values()
        ratios[row["kind"], row["M"], row["N"], row["K"]] = estimate["graph"] / row["sequential_us"]
    assert len(ratios) == 20
    assert all(0.95 < ratio < 1.08 for (_, m, *_), ratio in ratios.items() if m >= 1536), ratios
    # Of calls back to back, the beginning of one runs while the one before it ends. The estimates include it.
    assert all(0.9 < ratio < 1.35 for ratio in ratios.values()), ratios


def test_estimates_of_blocks_sent_when_computed_are_near_their_times() -> None:
    ratios = {}
    for row in [row for row in SUMS if "scatter_us" in row]:
        shape = row["M"], row["N"], row["K"]
        tasks = tasks_of(scattered_rows(row["ranks"], *shape), {})
        ratios[row["ranks"], shape] = simulation.estimates(tasks, H200, "triton")["graph"] / row["scatter_us"]
    assert len(ratios) == 18
    assert sum(0.9 < ratio < 1.1 for ratio in ratios.values()) >= 15, list(ratios.items())
    assert all(0.85 < ratio < 1.16 for ratio in ratios.values()), list(ratios.items())
