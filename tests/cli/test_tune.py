"""`hostir explain`, `hostir tune` and `--strategy auto`: their output and their exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostir as hi
from examples import patterns
from hostir import knobs
from hostir.__main__ import main
from hostir.choice import cache
from hostir.choice.cache import Entry
from hostir.choice.candidates import candidates_of
from hostir.choice.choices import Choice
from hostir.choice.decision import choose
from hostir.cli.auto import platform_of
from hostir.cli.explain import table
from hostir.cli.tune import _combinations
from hostir.ir import source as notices

ROOT = Path(__file__).parents[2]
ROWS = "examples/patterns.py:allgather_matmul_rows"
LARGE = ("--ranks", "8", "--set", "S=1", "--set", "M=8192", "--set", "N=3584", "--set", "K=8192", "--set", "dtype=bf16")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    notices._warned.clear()
    with knobs.scope(cache=tmp_path):
        yield


def shown(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main(arguments) == code
    return capfd.readouterr()


def test_explain_prints_the_choice_the_times_and_why_other_candidates_are_impossible(
    capfd: pytest.CaptureFixture[str],
) -> None:
    out, err = shown(capfd, "explain", "examples/patterns.py:weight_gathered", "--machine", "h200x4")
    assert not err
    first, *rest = out.splitlines()
    assert re.fullmatch(
        r"@weight_gathered runs '\w+.*' \(estimated \d+ us, the fastest of \d+\) on 4 x h200 as estimated elsewhere",
        first,
    )
    assert "not possible:" in rest
    assert sum("no matmul has %b_full as its left side" in line for line in rest) == 4
    possible = rest[: rest.index("not possible:")]
    times = [line.split() for line in possible if line.startswith(("  sequential", "  pipeline"))]
    assert len(times) == 10


def test_the_columns_of_explain_are_aligned(capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capfd, "explain", ROWS, *LARGE, "--machine", "h200x8")
    lines = out.split("\n\n")[1].splitlines()
    assert len(lines) > 5
    assert len({len(line) for line in lines}) == 1
    assert table(["a", "us"], [["long name", "1.5"], ["b", "100"]]).splitlines() == [
        "  a           us",
        "  long name  1.5",
        "  b          100",
    ]


def test_explain_as_json_is_the_choice(capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capfd, "explain", ROWS, *LARGE, "--json")
    choice = Choice.from_json(json.loads(out))
    assert choice.source == "estimated"
    assert choice.strategy in ("fused", "ring")
    assert choice.timings[0].us < choice.timings[-1].us


def test_explain_of_this_cpu_uses_its_measurements(capfd: pytest.CaptureFixture[str]) -> None:
    program = patterns.allgather_matmul_rows(2).program()
    platform = platform_of(program, "cpu")
    every = candidates_of(program, platform, for_testing=True).programs
    entries = {c: Entry.measured(p, 10.0 if c.strategy == "ring" else 99.5) for c, p in every.items()}
    cache.write(cache.key_of(program, {}, platform), program.name, entries)
    out, _ = shown(capfd, "explain", ROWS, "--ranks", "2", "--device", "cpu")
    assert re.match(
        r"@allgather_matmul_rows runs 'ring, 1 stream, aten' \(measured 10 us, the fastest of 6\) on 2 x .* CPU", out
    )
    assert "99.5" in out
    assert out.count("not possible") == 1
    assert "it lowers to the same program as 'ring'" in out
    assert "'ring, 1 stream, aten': its copy from a peer overlaps with matmul" in out


def test_lower_and_check_with_auto_use_the_choice_of_explain(capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capfd, "explain", ROWS, *LARGE, "--json")
    choice = Choice.from_json(json.loads(out))
    text, note = shown(capfd, "lower", ROWS, *LARGE, "--strategy", "auto")
    fusion = patterns.allgather_matmul_rows(8, S=1, M=8192, N=3584, K=8192, dtype="bf16")
    assert hi.parse(text) == hi.lower(fusion, choice.strategy, choice.streams)
    assert f"note: {choice}" in note
    out, _ = shown(capfd, "check", ROWS, "--strategy", "auto")
    assert "nothing to report" in out
    out, _ = shown(capfd, "lower", ROWS, *LARGE, "--strategy", "auto", "--after", choice.strategy)
    assert "program @" in out


def test_run_on_simulated_ranks_accepts_auto(capfd: pytest.CaptureFixture[str]) -> None:
    out, note = shown(capfd, "run", ROWS, "--strategy", "auto", "--compare")
    assert "ok" in out
    assert f"note: {choose(patterns.allgather_matmul_rows())}" in note


def test_a_note_says_why_nothing_can_be_overlapped(capfd: pytest.CaptureFixture[str]) -> None:
    _, note = shown(capfd, "lower", "tests/choice/fusions.py:gathered_weight", "--strategy", "auto")
    assert re.search(r"note: @gathered_weight runs 'sequential.*' \(fallback", note)
    assert re.search(r"note: ring is not possible here: .*no matmul has %b_full as its left side", note)


LAYER = """hostir 1
mesh @mesh [didx] = 0 1
fusion @layer(%a: bf16[M@didx, K], %b: bf16[K, 1792]) -> (%c) {
  %full: bf16[M, K] = allgather %a over didx
  %c: bf16[M, 1792] auto = matmul %full, %b
}
"""


def test_explain_shows_the_ranges_of_an_unbound_size(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "layer.hir"
    file.write_text(LAYER)
    arguments = ("explain", str(file), "--machine", "h200x2", "--set", "K=4096")
    out, err = shown(capfd, *arguments)
    assert not err
    first, empty, head, *rest = out.splitlines()
    assert first == "@layer runs on 2 x h200 as estimated elsewhere, by the M of each call:"
    assert not empty
    assert head.split() == ["M", "from", "to", "strategy", "streams", "kernels", "times", "at", "M=", "us", "symmetric"]
    assert rest[0].split()[0] == "0"
    assert rest[-1].split()[1] == "-"
    out, _ = shown(capfd, *arguments, "--json")
    assert len(json.loads(out)["ranges"]) == len(rest)
    out, _ = shown(capfd, "explain", str(file), "--machine", "h200x2")
    assert "bind all of them but one to see its ranges: --set K=..." in out
    _, err = shown(capfd, "lower", str(file), "--strategy", "auto", "--set", "K=4096", code=2)
    assert "depends on the size 'M'" in err
    assert "'hostir explain' shows" in err


def test_several_values_of_a_size_make_every_combination() -> None:
    assert list(_combinations([])) == [()]
    combinations = list(_combinations(["M=1,2", "K=3", "N=4,5"]))
    assert combinations == [(f"M={m}", "K=3", f"N={n}") for m in (1, 2) for n in (4, 5)]
