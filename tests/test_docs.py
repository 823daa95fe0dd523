from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import hostir as hi
from hostir import knobs
from hostir.cli.ops import markdown
from hostir.ir.op import REGISTRY, Phase
from tests import python_interface
from tests.golden import Golden
from tests.pages import ROOT, blocks, check_console, check_python

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pytest.fixture(scope="module")
def docs(pytestconfig: pytest.Config) -> Golden:
    """Compare a page with the text that it is generated from; `pytest --accept` writes it."""
    return Golden(DOCS, accept=pytestconfig.getoption("accept"))


@EACH
def test_the_python_of_a_page_runs_and_prints_the_outputs_of_the_page(page: Path, tmp_path: Path) -> None:
    check_python(page, tmp_path)


@EACH
def test_the_commands_of_a_page_run_and_print_the_outputs_of_the_page(page: Path, tmp_path: Path) -> None:
    check_console(page, tmp_path)


@EACH
def test_the_checker_accepts_the_programs_of_a_page(page: Path) -> None:
    for block in blocks(page):
        if block.language == "hir" and not block.word:
            assert hi.check(hi.parse(block.text, page.name)) == []


@EACH
def test_the_links_of_a_page_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_memory_model_lists_every_statement_of_host_programs() -> None:
    page = (DOCS / "memory-model.md").read_text()
    listed = {word for line in page.splitlines() if line.startswith("|") for word in re.findall(r"`(\w+)", line)}
    assert {word for word, statement in REGISTRY.items() if Phase.HOST in statement.phases} <= listed


def test_the_language_reference_is_up_to_date(docs: Golden) -> None:
    docs("language.md", markdown() + "\n")


def test_the_page_of_the_python_interface_is_up_to_date(docs: Golden) -> None:
    docs("python.md", python_interface.markdown())


def test_the_page_of_the_python_interface_has_every_public_name() -> None:
    named = [name.partition(".")[0] for _, names in python_interface.SECTIONS for name in names]
    assert sorted(set(hi.__all__)) == sorted({*named} - {"LoopAxis"})
    for name, members in (*python_interface.INTERNAL.items(), *python_interface.FOR_USERS.items()):
        assert members <= vars(getattr(hi, name)).keys()


def test_the_table_of_environment_variables_is_up_to_date(docs: Golden) -> None:
    rows = "".join(f"| `{row.name}` | {row.expected} | {row.default} | {row.doc} |\n" for row in knobs.table())
    page = (DOCS / "environment.md").read_text()
    docs("environment.md", re.sub(r"(?<=\|---\|---\|---\|---\|\n)(\|.*\n)*", lambda _: rows, page))


def test_the_table_of_patterns_shows_the_results() -> None:
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


def test_the_table_of_arrivals_shows_the_results() -> None:
    measured = json.loads((ROOT / "benchmarks/results/arrivals_8.json").read_text())["rows"]
    page = (ROOT / "docs/performance.md").read_text()
    assert len(measured) == 12
    for r in measured:
        t = {name.replace(" triton", ""): time for name, time in r["times"].items()}
        fused = min(r["times"]["fused aten"], t["fused"])
        times = (t["gemm"], t["copies"], fused, t["fused 2 streams"], t["push"], r["host_us"][r["best"]])
        assert f"| {r['model']} M={r['M']} | {' | '.join(f'{time:.0f}' for time in times)} |\n" in page


def test_the_page_gives_the_host_times_of_the_results() -> None:
    measured = json.loads((ROOT / "benchmarks/results/2xH200/overhead.json").read_text())["results"]
    page = " ".join((ROOT / "docs/performance.md").read_text().split())
    for strategy in ("sequential", "fused", "push"):
        ratios = [r["ratio"] for r in measured if re.search(rf" \+ .*, {strategy}, (issued|results)", r["what"])]
        least, most = (f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
        assert re.search(rf"`{strategy}`[^`]* {least} to {most}\b", page), (strategy, least, most)
    layers = ("column_parallel_linear, no gradients", "row_parallel_linear, no gradients")
    least, most = sorted(f"{r['ratio']:.2f}" for r in measured if r["what"] in layers)
    page = " ".join((ROOT / "docs/torch.md").read_text().split())
    assert f"without gradients take {least} to {most} times as long as by hand" in page


def test_the_table_of_one_sided_strategies_on_4_gpus_shows_the_results() -> None:
    measured = json.loads((ROOT / "benchmarks/results/allgather_matmul_4.json").read_text())["rows"]
    page = (ROOT / "docs/performance.md").read_text()
    assert len(measured) == 19
    for r in measured:
        times = f"{r['gemm_us']:.0f} | {min(r['nccl_us'], r['copies_us']):.0f}"
        scores = f"{r['best_peer']} | {r['score_peer']:.2f} | {r['best_ours']} | {r['score_ours']:.2f}"
        assert f"| {r['model']} M={r['M']} | {times} | {scores} |\n" in page
