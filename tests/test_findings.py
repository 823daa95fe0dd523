"""Findings of `hostir check`: a small program for each under tests/cases/findings, with a repaired twin.

Comments in a case name its findings, and say what two calls do on simulated ranks:

    // error: 12:3: message     position and message of a finding, exactly; `warning:` for a warning
    // run: guilty              the default: some order hangs, raises, gives NaN, or differs from another order
    // run: alike               every order gives the same values
    // run: refused             the program cannot run

The twin `NAME.fixed.hir` has no findings and gives the same values in every order. docs/findings.md links every case
and shows one of them with its output.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hostir as hi
from hostir.__main__ import main
from tests.golden import Golden
from tests.judging.simulated import failure_of
from tests.pages import FENCE, ROOT

FOLDER = Path(__file__).parent / "cases" / "findings"
TWINS = sorted(FOLDER.glob("*.fixed.hir"))
CASES = sorted({*FOLDER.glob("*.hir")} - {*TWINS})
FINDINGS = re.compile(r"^// (error|warning): (\d+:\d+): (.*)$", re.MULTILINE)
RUN = re.compile(r"^// run: (.*)$", re.MULTILINE)
HEAD = re.compile(r"\A(?://.*\n)+")
SHOWN = re.compile(r"^```hir (\w+)\n.*?^```\n\n```finding\n.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"^\[(\w+)\]: (\S+)$", re.MULTILINE)
USE = re.compile(r"\[([a-z0-9]+(?:_[a-z0-9]+)*)\](?![(:])")
SEEDS = 20
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)


def findings(case: Path) -> list[hi.Diagnostic]:
    """Return the findings in a case, or the errors of the parser."""
    try:
        return hi.check(hi.parse(case.read_text(), case.name))
    except hi.HostIRError as wrong:
        return list(wrong.diagnostics)


def run_of(case: Path) -> str:
    comment = RUN.search(case.read_text())
    return comment[1] if comment else "guilty"


@EACH_CASE
def test_a_case_has_exactly_the_findings_of_its_comments(case: Path) -> None:
    listed = [(d.level, f"{d.span.line}:{d.span.column}" if d.span else "", d.message) for d in findings(case)]
    assert sorted(listed) == sorted(FINDINGS.findall(case.read_text())), "\n".join(map(str, findings(case)))


@EACH_CASE
def test_the_repaired_twin_has_no_findings_and_gives_the_same_bits_in_every_order(case: Path) -> None:
    twin = case.with_suffix(".fixed.hir")
    assert findings(twin) == []
    assert failure_of(hi.parse(twin.read_text(), twin.name), SEEDS) == ""


@EACH_CASE
def test_a_case_runs_as_its_comments_say(case: Path) -> None:
    if run_of(case) == "refused":
        assert any(d.level == "error" for d in findings(case))
        return
    guilt = failure_of(hi.parse(case.read_text(), case.name), SEEDS)
    assert bool(guilt) == (run_of(case) == "guilty"), guilt


def test_every_case_has_a_twin_and_names_its_findings() -> None:
    assert {twin.name.replace(".fixed.", ".") for twin in TWINS} == {case.name for case in CASES}
    for case in CASES:
        assert FINDINGS.search(case.read_text()), f"{case.name} names no finding"
        assert run_of(case) in ("guilty", "alike", "refused")


def test_the_page_of_findings_links_every_case() -> None:
    page = (ROOT / "docs/findings.md").read_text()
    links = dict(LINK.findall(page))
    assert links == {case.stem: f"../tests/cases/findings/{case.name}" for case in CASES}
    assert sorted(USE.findall(FENCE.sub("", page))) == sorted(links), "each case is named once"


def test_the_page_of_findings_shows_a_case_and_its_output(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def fresh(shown: re.Match[str]) -> str:
        case = Path(f"{shown[1]}.hir")
        case.write_text(HEAD.sub("", (FOLDER / case).read_text()))
        main(["check", str(case)])
        return f"```hir {case.stem}\n{case.read_text()}```\n\n```finding\n{capsys.readouterr().err}```"

    docs = Golden(ROOT / "docs", accept=pytestconfig.getoption("accept"))
    page = (docs.folder / "findings.md").read_text()
    assert len(SHOWN.findall(page)) == page.count("```hir ") == page.count("```finding") == 1
    docs("findings.md", SHOWN.sub(fresh, page))
