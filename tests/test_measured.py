"""Every benchmark has a committed result or is named as not measured, and pages show the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import commit
from benchmarks.scores import BY_HAND, COMPILED, HOSTIR, TORCH, scored
from tests import measured
from tests.golden import Golden
from tests.measured import MARKED, NAMES, OTHERS, RESULTS, ROOT, TABLES, files_of, filled, started


@pytest.fixture(scope="module")
def pages(pytestconfig: pytest.Config) -> Golden:
    return Golden(ROOT, accept=pytestconfig.getoption("accept"))


def test_every_benchmark_has_a_result_or_is_named_as_not_measured() -> None:
    assert started() == sorted([*NAMES, *OTHERS])
    assert {name for names in NAMES.values() for name in names if not files_of(name)} == set()


def test_every_result_belongs_to_a_benchmark_and_has_a_table_with_a_stamp() -> None:
    known = {file for names in NAMES.values() for name in names for file in files_of(name)}
    assert known == {*RESULTS.rglob("*.json")}
    for file in known:
        assert measured.stamp(file).startswith("date 20"), file


def test_the_list_of_results_is_up_to_date(pages: Golden) -> None:
    pages("benchmarks/results/README.md", measured.overview())


def test_the_tables_of_pages_show_the_results(pages: Golden) -> None:
    folders = {"docs/performance.md": RESULTS / measured.MACHINE, "docs/choosing.md": RESULTS}
    texts = {name: (ROOT / name).read_text() for name in folders}
    assert {Path(mark[1]).name for text in texts.values() for mark in MARKED.finditer(text)} == {*TABLES}
    for name, text in texts.items():
        pages(name, filled(text, folders[name]))


def test_the_summary_of_the_readme_shows_the_results(pages: Golden) -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(measured.SUMMARISED.findall(readme)) == 1
    pages("README.md", measured.SUMMARISED.sub(lambda _: measured.summary(), readme))


def result(folder: Path, name: str, data: dict[str, Any]) -> str:
    """Return the table of a result on a page."""
    (folder / f"{name}.json").write_text(json.dumps(data))
    (folder / f"{name}.md").write_text("# Title\n\ndate 2026-01-01, commit abc, gpu H100, gpus 2\n\nrows\n")
    return filled(f"<!-- measured: {name} -->\nold\n<!-- end -->\n", folder)


def test_a_page_shows_a_result_with_its_stamp(tmp_path: Path) -> None:
    times: dict[str, Any] = {
        BY_HAND: {"ours": False, "eager": 160.0, "graph": 150.0, "error": 1.0},
        COMPILED: {"ours": True, "graph": 100.0, "error": 1.0},
    }
    row = {"kind": "allgather", "model": "70B", "M": 4096, "N": 3584, "K": 8192, "ranks": 2, "dtype": "bf16"}
    row |= {"gemm_us": 90.0, "nccl_us": 80.0, "triton_us": None, "times": times, "failed": {}}
    compiled = scored(row | {"compiled": {"mode": "graph", "choice": "fused aten"}})
    text = result(tmp_path, "allgather_matmul_2", {"rows": [compiled], "not_measured": ["8B M=64"]})
    assert (
        "| 70B 4096,3584,8192 | 90 | 80 NCCL | NCCL + cuBLAS, graph | 0.600 | fused aten, graph | 0.900 | 1.50 |"
        in text
    )
    assert "faster than the best peer issued alike in 1 of 1 rows; the median is 1.50 x." in text
    assert "Not measured, as time was short: 8B M=64." in text
    assert "Made: date 2026-01-01, commit abc, gpu H100, gpus 2." in text
    assert "old" not in text
    times |= {HOSTIR: {"ours": True, "eager": 100.0, "graph": 300.0}, TORCH: {"ours": False, "eager": 120.0}}
    del times[COMPILED]
    by_mode = scored(row | {"kind": "torch_operators", "model": "70B-gather"})
    text = result(tmp_path, "torch_operators_2", {"rows": [by_mode], "not_measured": []})
    assert "| torch fused | 0.750 | 0.900 | NCCL + cuBLAS | 0.600 | 0.300 |" in text
    assert (
        "eager: faster than the best peer in 1 of 1 rows, median 1.20 x; graph: faster than the best peer in 0" in text
    )
    way = {"issued": {"step": 30.0, "alone": 20.0}, "replayed": {"step": 25.0}, "host_us": 9.0}
    way |= {"operators": {"hostir::all_gather_matmul": 4}}
    text = result(tmp_path, "llama_block", {"rows": [{"model": "8B", "tokens": 64, "ways": {"hostir eager": way}}]})
    assert "| 8B, 64 tokens: hostir eager | 30 | 10 | 25 | - | 9 | 4 hostir::all_gather_matmul |" in text
    assert "| lower it | 3 | - | - |" in result(
        tmp_path, "overhead", {"results": [{"what": "lower it", "ours us": 3.0}]}
    )


def test_a_page_states_that_nothing_was_measured(tmp_path: Path) -> None:
    text = filled("<!-- measured: overhead -->\n| old |\n<!-- end -->\n", tmp_path)
    assert text == "<!-- measured: overhead -->\nNot measured.\n<!-- end -->\n"


def test_a_variable_gives_the_commit_of_a_copy_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc1234")
    assert commit() == "abc1234"
