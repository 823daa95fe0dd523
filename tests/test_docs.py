from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import hostir as hi
from hostir import knobs
from hostir.ir.op import REGISTRY, Phase
from hostir.ir.reference import markdown
from tests.golden import Golden
from tests.pages import ROOT, blocks, check_console, check_python

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pytest.fixture(scope="module")
def docs(pytestconfig: pytest.Config) -> Golden:
    """Holds a page against the text it is made from; `pytest --accept` writes it."""
    return Golden(DOCS, accept=pytestconfig.getoption("accept"))


@EACH
def test_the_python_of_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    check_python(page, tmp_path)


@EACH
def test_the_commands_of_a_page_run_and_print_what_it_says(page: Path, tmp_path: Path) -> None:
    check_console(page, tmp_path)


@EACH
def test_the_programs_of_a_page_check(page: Path) -> None:
    for block in blocks(page):
        if block.language == "hir" and not block.word:
            assert hi.check(hi.parse(block.text, page.name)) == []


@EACH
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_memory_model_says_of_every_statement_where_it_runs() -> None:
    page = (DOCS / "memory-model.md").read_text()
    told = {word for line in page.splitlines() if line.startswith("|") for word in re.findall(r"`(\w+)", line)}
    assert {word for word, statement in REGISTRY.items() if Phase.HOST in statement.phases} <= told


def test_the_language_reference_is_fresh(docs: Golden) -> None:
    docs("language.md", markdown() + "\n")


def test_the_table_of_environment_variables_is_fresh(docs: Golden) -> None:
    rows = "".join(f"| `{row.name}` | {row.expected} | {row.default} | {row.doc} |\n" for row in knobs.table())
    page = (DOCS / "environment.md").read_text()
    docs("environment.md", re.sub(r"(?<=\|---\|---\|---\|---\|\n)(\|.*\n)*", lambda _: rows, page))


def test_the_performance_table_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/patterns.json").read_text())["results"]

    def fastest(times: dict[str, float]) -> float:
        return times["by hand"] / min(t for name, t in times.items() if name.startswith("S="))

    rows = []
    for r in measured:
        eager, graph = r["eager"], r["graph"]
        share = r["communication"] / (r["communication"] + r["gemm"])
        cells = [f"{r['gemm']:.0f}", f"{r['communication']:.0f}", f"{share:.0%}", f"{eager['by hand']:.0f}"]
        ratios = [eager["by hand"] / eager["sequential aten"], fastest(eager), fastest(graph)]
        cells += [f"{ratio:.2f}" for ratio in ratios]
        rows.append(f"| {r['kind']} {r['row']} | {' | '.join(cells)} |")
    assert "\n".join(rows) in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize(("name", "most", "rows"), [("2", 1 << 15, 19), ("4", 1 << 15, 19), ("push_4", 2048, 9)])
def test_the_tables_of_one_sided_strategies_are_what_was_measured(name: str, most: int, rows: int) -> None:
    measured = json.loads((ROOT / f"benchmarks/results/allgather_matmul_{name}.json").read_text())["rows"]
    page = (ROOT / "docs/performance.md").read_text()
    told = [r for r in measured if r["M"] <= most]
    assert len(told) == rows
    for r in told:
        times = f"{r['gemm_us']:.0f} | {min(r['nccl_us'], r['copies_us']):.0f}"
        scores = f"{r['best_peer']} | {r['score_peer']:.2f} | {r['best_ours']} | {r['score_ours']:.2f}"
        assert f"| {r['model']} M={r['M']} | {times} | {scores} |\n" in page
