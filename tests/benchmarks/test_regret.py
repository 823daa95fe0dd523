"""Regret of the choice by estimates, on the committed results: a change of the cost model must not raise it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from math import log
from statistics import geometric_mean

import pytest

from benchmarks.regret import ALLOWED, NEAR, RESULTS, Recorded, Regret, estimates_of, recorded, rows_of, summaries
from hostir.choice.hardware import H200


@dataclass(frozen=True)
class Limits:
    """Limits of the regrets of some tables: the geometric mean, the maximum and the number of rows over ALLOWED.

    `of_four` is the maximum if four candidates are measured. `near` is the lowest share of estimates within 10 %.
    """

    rows: int
    mean: float
    largest: float
    over: int
    of_four: float
    near: float


# What the estimates reach today, by groups of tables. The tables without a group are older, or on more than 2 GPUs.
GROUPS = {
    "2xH100/matmul_reduce_scatter_2": "scattered sums",
    "2xH100/matmul_all_reduce_2": "all-reduces",
    "2xH200/allgather_matmul_2": "gathered rows",
    "2xH200/scaled_matmul_2": "gathered rows in fp8",
    **dict.fromkeys(
        (
            *("2xH200/matmul_all_reduce_2", "2xH200/matmul_reduce_scatter_2", "2xH200/mlp_2", "2xH200/reshard_2"),
            "2xH200/scaled_matmul_scatter_2",
        ),
        "sums",
    ),
}
LIMITS = {
    "h100": Limits(rows=34, mean=1.020, largest=1.17, over=4, of_four=1.01, near=0.90),
    "h100 scattered sums": Limits(rows=18, mean=1.016, largest=1.12, over=3, of_four=1.01, near=0.91),
    "h100 all-reduces": Limits(rows=27, mean=1.009, largest=1.06, over=2, of_four=1.01, near=0.94),
    "h200 gathered rows": Limits(rows=19, mean=1.006, largest=1.05, over=0, of_four=1.01, near=0.93),
    "h200 gathered rows in fp8": Limits(rows=6, mean=1.043, largest=1.24, over=1, of_four=1.01, near=0.84),
    "h200 sums": Limits(rows=38, mean=1.018, largest=1.131, over=4, of_four=1.01, near=0.90),
    "h200": Limits(rows=60, mean=1.026, largest=1.21, over=11, of_four=1.03, near=0.88),
}


@cache
def results() -> tuple[Recorded, ...]:
    return tuple(recorded())


def limits_of(result: Recorded) -> str:
    return f"{result.hardware.name} {GROUPS.get(result.name, '')}".rstrip()


@pytest.mark.slow
@pytest.mark.xdist_group("regret")
@pytest.mark.parametrize("name", LIMITS)
def test_the_regret_of_the_choice_by_estimates_does_not_grow(name: str) -> None:
    rows = [row for result in results() if limits_of(result) == name for row in result.rows]
    regrets, ratios, limits = [row.regret for row in rows], [x for row in rows for x in row.ratios], LIMITS[name]
    assert len(rows) >= limits.rows
    assert geometric_mean(regrets) <= limits.mean
    assert max(regrets) <= limits.largest
    assert sum(regret > ALLOWED for regret in regrets) <= limits.over
    assert max(row.of_four for row in rows) <= limits.of_four
    assert sum(abs(log(ratio)) <= log(1 + NEAR) for ratio in ratios) >= limits.near * len(ratios)


@pytest.mark.xdist_group("regret")
def test_the_committed_table_shows_the_present_cost_model() -> None:
    committed = json.loads((RESULTS / "regret.json").read_text())["results"]
    again = "python -m benchmarks.regret --out benchmarks/results/regret; pytest tests/test_measured.py --accept"
    assert committed == summaries(results()), again


def test_regret_is_the_time_of_the_lowest_estimate_over_the_fastest() -> None:
    times = {"a": 10.0, "b": 12.0, "c": 8.0, "d": 9.0, "e": 7.0, "sequential x": 6.0}
    estimates = dict(zip(times, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), strict=True))
    row = Regret("row", times, estimates, recorded="b")
    assert row.best == "sequential x"
    assert row.regret == pytest.approx(10 / 6)
    assert row.of_four == 1.0  # the sequential program is always measured
    assert row.of(row.recorded) == 2.0


def test_rows_of_all_benchmarks_with_candidates_are_read() -> None:
    environment = {"gpu": "NVIDIA H200", "gpus": 8}
    times = {"sequential aten": 208.0, "S=4 streams=2 aten": 284.0, "by hand": 207.0}
    old = {"row": "8B M=4096", "kind": "allreduce", "shape": [4096, 4096, 1792], "graph": times, "eager": {}}
    new = {"model": "8B", "M": 64, "N": 1792, "K": 4096, "ranks": 4, "dtype": "f16"}
    new["times"] = {"NCCL + cuBLAS": {"eager": 1.0}, "fused triton": {"eager": None, "graph": 25.0}}
    others = [{"what": "import", "ours us": 5.0}, {**new, "kind": "decode"}, {"model": "8B", "times": {"gemm": 45.6}}]
    first, second = rows_of({"environment": environment, "results": [old, new, *others]})
    assert (first["kind"], first["M"], first["ranks"], first["dtype"]) == ("all_reduce", 4096, 8, "bf16")
    assert first["times"]["pipeline 4 slices 2 streams aten"] == {"eager": None, "graph": 284.0}
    assert (second["kind"], second["ranks"], second["dtype"]) == ("allgather", 4, "f16")
    (other_kernel,) = rows_of({"environment": {"commit": "af38f7b"}, "rows": [new]})
    assert list(other_kernel["times"]) == ["NCCL + cuBLAS"]


def test_estimates_use_the_constants_of_the_machine() -> None:
    row = {"kind": "allgather", "M": 2048, "N": 1792, "K": 4096, "ranks": 2, "dtype": "bf16"}
    row["times"] = {"fused triton": {}, "pipeline 2 slices 2 streams aten": {}, "NCCL + cuBLAS": {}}
    fast, slow = estimates_of(row, H200), estimates_of(row, replace(H200, link=H200.link / 100))
    assert fast.keys() == {"fused triton", "pipeline 2 slices 2 streams aten"}
    assert slow["fused triton"]["graph"] > 5 * fast["fused triton"]["graph"]
