"""The benchmark of all-gather + matmul: its command line, scores, reports and checks. Measuring needs GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hostir as hi
from benchmarks.allgather_matmul import VARIANTS, Judge, parse_options, patterns
from benchmarks.comparison import Candidate, WrongResultError
from benchmarks.scores import GOAL, MODELS, MUST, Row, file_name, line, report, rows, scored
from hostir.lower import STRATEGIES as KNOWN
from hostir.lower.strategies import strategies
from tests.benchmarks.results_of_a_run import result, run

COMMITTED = Path(__file__).parents[2] / "benchmarks/results"
RESULTS = sorted(COMMITTED.glob("allgather_matmul*.json"))
ROW = Row("70B", 2048, 3584, 8192)


def figures(**changes: Any) -> dict[str, Any]:
    """Return a row with a floor of 100 us."""
    times = {
        "NCCL + cuBLAS": {"ours": False, "eager": 160.0, "graph": 150.0},
        "torch fused": {"ours": False, "eager": 900.0},
        "ring aten": {"ours": True, "graph": 140.0},
        "fused triton": {"ours": True, "eager": 130.0, "graph": 125.0},
    }
    parts = {"gemm_us": 100.0, "nccl_us": 80.0, "copies_us": 50.0}
    return {"model": "70B", "M": 2048, "ranks": 8, "dtype": "bf16", **parts, "times": times, **changes}


# Rows -------------------------------------------------------------------------------------------------------------
def test_rows_come_in_order_of_importance() -> None:
    every = [str(row) for row in rows()]
    assert len(every) == len(set(every)) == 19
    assert every[:5] == ["70B M=2048", "70B M=4096", "70B M=8192", "70B M=16384", "8B M=2048"]
    assert every[-1] == "nvFuser M=32768"


def test_rows_are_chosen_by_model_and_by_size() -> None:
    assert [str(row) for row in rows("8B:2048,405B")][:3] == ["8B M=2048", "405B M=2048", "405B M=4096"]
    assert len(rows("8B:2048,405B")) == 7
    assert rows("70B:2048") == [ROW]


@pytest.mark.parametrize("wanted", ["9B", "8B:100", "8B:2048,", "nvFuser:64"])
def test_an_unknown_row_is_refused(wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--rows", wanted])
    assert "no row" in capsys.readouterr().err


def test_the_rows_of_a_rank_divide_into_slices_on_2_4_and_8_ranks() -> None:
    assert all(row.M % (8 * variant.slices) == 0 for row in rows() for variant in VARIANTS)


def test_every_large_row_of_a_model_has_a_required_score() -> None:
    required = {(model, m) for model, by_m in MUST.items() for m in by_m}
    assert required == {(row.model, row.M) for row in rows() if row.M >= 2048 and row.model in list(MODELS)[:3]}
    assert all(MUST[model][m] < GOAL[model][m] < 1 for model, m in required)


# The command line -------------------------------------------------------------------------------------------------
def test_the_command_line_selects_strategies() -> None:
    assert parse_options([]).only == tuple(strategies())
    implemented = {"sequential by low_latency", "sequential by copy_engine"}
    assert {variant.strategy for variant in VARIANTS} == {*KNOWN, *implemented} - {"chain"}, "it gathers as `ring` does"
    assert parse_options(["--only", "fused,ring"]).only == ("fused", "ring")


def test_an_unknown_strategy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--only", "fused,rnig"])
    assert "no strategy rnig" in capsys.readouterr().err


def test_all_rows_are_measured_unless_some_are_named() -> None:
    assert parse_options([]).rows == rows()


# Scores -----------------------------------------------------------------------------------------------------------
def test_the_floor_is_the_slower_of_the_gemm_and_the_better_all_gather() -> None:
    assert scored(figures())["floor_us"] == 100
    assert scored(figures(nccl_us=120.0, copies_us=110.0))["floor_us"] == 110


def test_each_side_is_scored_by_its_best_candidate_in_its_best_mode() -> None:
    row = scored(figures())
    assert (row["best_peer"], row["score_peer"]) == ("NCCL + cuBLAS, graph", 0.6667)
    assert (row["best_ours"], row["score_ours"]) == ("fused triton, graph", 0.8)


def test_the_hidden_share_is_1_at_the_floor_and_0_without_overlap() -> None:
    times = {"a": {"ours": True, "eager": 150.0, "graph": 100.0}, "b": {"ours": True, "eager": 175.0}}
    times_of = scored(figures(times=times))["times"]
    assert (times_of["a"]["hidden_eager"], times_of["a"]["hidden_graph"], times_of["b"]["hidden_eager"]) == (0, 1, -0.5)


def test_a_row_is_met_if_it_reaches_its_required_score() -> None:
    row = scored(figures())
    assert (row["must"], row["goal"], row["met"]) == (0.78, 0.90, True)
    assert scored(figures(gemm_us=97.0))["met"] is False


def test_the_required_score_of_a_small_row_is_near_the_best_peer() -> None:
    row = scored(figures(M=512))
    assert (row["must"], row["goal"], row["met"]) == (0.6534, 0.80, True)
    slow = {"peer": {"ours": False, "graph": 120.0}, "ring": {"ours": True, "graph": 125.0}}
    assert scored(figures(M=64, times=slow))["met"] is False


@pytest.mark.parametrize("other", [{"ranks": 4}, {"dtype": "f16"}, {"model": "nvFuser", "M": 32768}])
def test_fewer_ranks_other_dtypes_and_nvfusers_row_have_no_required_score(other: dict[str, Any]) -> None:
    row = scored(figures(**other))
    assert (row["must"], row["goal"], row["met"]) == (None, None, None)


def test_a_row_without_a_right_hostir_candidate_has_no_score_and_is_not_met() -> None:
    times = {"torch fused": {"ours": False, "eager": 125.0}}
    row = scored(figures(times=times))
    assert (row["best_ours"], row["score_ours"], row["met"]) == (None, None, False)
    assert "NO" in line({**row, "N": 1, "K": 1})


def test_a_small_row_without_a_peer_has_no_required_score() -> None:
    row = scored(figures(M=64, times={"ring aten": {"ours": True, "graph": 125.0}}))
    assert (row["score_peer"], row["must"], row["met"]) == (None, None, None)


# Reports ----------------------------------------------------------------------------------------------------------
def test_the_report_has_a_line_for_each_row_and_for_each_candidate() -> None:
    results = run()["rows"]
    scores, every, alone = (part.splitlines() for part in report(results).split("\n\n") if part.startswith("|"))
    assert len(scores) == len(alone) == 2 + len(results)
    assert len(every) == 2 + sum(len(row["times"]) for row in results)
    assert scores[2].startswith("| 8B 64,1792,4096 |")
    assert len({line.count("|") for line in scores}) == len({line.count("|") for line in every}) == 1


def test_the_report_lists_failures() -> None:
    row = result(ROW) | {"failed": {"ring aten, eager": "before timing: rank 1: WRONG: 8 rows hold NaN or infinity"}}
    assert "- 70B M=2048: ring aten, eager: before timing: rank 1: WRONG: 8 rows" in report([row])
    assert "Not scored" not in report([result(ROW)])


def test_on_fewer_ranks_the_table_has_no_required_score() -> None:
    first = report([result(ROW, ranks=4)]).splitlines()[2]
    assert first.endswith("| - | - |")


def test_the_file_name_of_results_has_ranks_and_dtype_unless_they_are_8_and_bf16() -> None:
    assert file_name("x", 8, "bf16") == "x"
    assert file_name("x", 4, "bf16") == "x_4"
    assert file_name("x", 2, "f16") == "x_f16_2"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_scores_of_every_committed_run_follow_from_its_times(path: Path) -> None:
    results = json.loads(path.read_text())["rows"]
    assert [scored(row) for row in results] == results
    assert report(results) in path.with_suffix(".md").read_text()


# Right or wrong ---------------------------------------------------------------------------------------------------
def operands(ranks: int = 4) -> Any:
    """Return operands like `Operands`, on a CPU and far smaller."""
    torch.manual_seed(0)
    row = Row("tiny", 1024, 96, 128)
    gathered, b = torch.randn(row.M, row.K).bfloat16(), torch.randn(row.N, row.K).bfloat16().t()
    return SimpleNamespace(row=row, ranks=ranks, gathered=gathered, b=b)


def candidate(c: torch.Tensor) -> Candidate:
    """Return a candidate that gives a fresh copy of `c` at every call."""
    return Candidate("some", "eager", True, lambda: c.clone())


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.kernels == "aten"], ids=str)
def test_the_judge_accepts_the_row_order_of_every_strategy(variant: Any) -> None:
    of, row = operands(), Row("tiny", 1024, 96, 128)
    sizes = {"M": row.M, "K": row.K, "N": row.N}
    fusion = patterns.allgather_matmul(ranks=4, S=variant.slices, dtype="bf16", **sizes)
    executor = hi.Executor(hi.lower(fusion, variant.strategy, variant.streams), machine="local", kernels="aten")
    parts = [x.view(variant.slices, 1, -1, row.K) for x in of.gathered.chunk(4)]
    (outs,) = executor(parts, [of.b] * 4)
    assert Judge(of).check(candidate(outs[3]))


def test_a_candidate_that_leaves_rows_unwritten_is_wrong() -> None:
    of = operands()
    c = torch.empty(1, 4, 256, 96).bfloat16()

    def forgets() -> torch.Tensor:
        c.view(1024, 96)[:1000] = (of.gathered @ of.b)[:1000]
        return c

    with pytest.raises(WrongResultError, match="24 rows hold NaN"):
        Judge(of).check(Candidate("some", "graph", True, forgets))


def test_a_single_stale_row_is_wrong_even_outside_the_sample() -> None:
    of = operands()
    judge = Judge(of)
    unseen = next(i for i in range(of.row.M) if i not in judge.sample.tolist())
    c = of.gathered @ of.b
    c[unseen] = c[unseen + 1]
    with pytest.raises(WrongResultError, match=f"1 rows differ from torch's, row {unseen}"):
        judge.check(candidate(c.view(1, 4, 256, 96)))


def test_a_result_rounded_twice_is_wrong() -> None:
    of = operands()
    halves = [(of.gathered[:, k : k + 64] @ of.b[k : k + 64]) for k in (0, 64)]
    with pytest.raises(WrongResultError, match="and torch's is"):
        Judge(of).check(candidate((halves[0] + halves[1]).view(1, 4, 256, 96)))


def test_ranks_in_another_order_are_wrong() -> None:
    of = operands()
    with pytest.raises(WrongResultError):
        Judge(of).check(candidate((of.gathered @ of.b).view(1, 4, 256, 96).flip(1)))
