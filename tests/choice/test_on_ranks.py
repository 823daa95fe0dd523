"""Choosing a strategy on real gloo processes. The ranks run tests/choice/cases_on_ranks.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import environment, launch

SCRIPT = Path(__file__).with_name("cases_on_ranks.py")
ROOT = SCRIPT.parents[2]
CASES = [
    "measurements_are_agreed_on_cached_and_used",
    "without_measurements_rank_0_warns_and_all_agree",
    "a_wrong_candidate_is_not_timed",
    "a_candidate_that_no_rank_can_run_is_not_timed",
    "a_candidate_that_the_first_call_refuses_is_not_timed",
    "too_few_ranks_are_refused_on_all",
    "a_fusion_that_no_strategy_lowers_is_refused_on_all_with_the_reason",
    "a_failure_of_rank_0_is_raised_on_all",
    "each_call_runs_the_program_of_its_range_on_all_ranks",
    "a_call_that_one_rank_refuses_fails_on_all",
    "a_program_that_takes_too_much_symmetric_memory_is_refused_on_all",
]
FUSION = ("examples/patterns.py:allgather_matmul", "--set", "S=2", "--set", "K=32", "--set", "N=16", "--device", "cpu")
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(180)]


def on_two_ranks(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return launch(2, *command, env=environment(HOSTIR_CACHE=str(folder)), timeout=120)


def hostir(folder: Path, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    return on_two_ranks(folder, "-m", "hostir", command, *FUSION, *options)


def rows(printed: str) -> Sequence[list[str]]:
    return [line.split() for line in printed.splitlines() if line.startswith("  S=")]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Fill a cache with `hostir tune`; return it and the command's output. Each test works on a copy of the cache."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, hostir(folder, "tune", "--set", "M=32,64", "--runs", "2")


@pytest.mark.slow
def test_ranks_measure_and_agree_on_a_choice(tmp_path: Path) -> None:
    done = on_two_ranks(tmp_path, str(SCRIPT), *CASES)
    assert done.returncode == 0, done.stderr
    passed = set(re.findall(r"PASS (\w+) (\d)", done.stdout))
    assert passed == {(name, rank) for name in CASES for rank in "01"}


@pytest.mark.xdist_group("tuned")
def test_tune_fills_the_cache_and_run_uses_it(
    tmp_path: Path, tuned: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    filled, first = tuned
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    assert first.returncode == 0, first.stderr
    assert [(row[3], row[-2:]) for row in rows(first.stdout)] == [
        ("M=32", ["measured", "now"]),
        ("M=64", ["measured", "now"]),
    ]
    assert "\x1b" not in first.stdout + first.stderr  # no progress bar without a terminal
    assert len(list((tmp_path / "tuning").glob("*.json"))) == 2

    second = hostir(tmp_path, "tune", "--set", "M=64,128", "--runs", "2")
    assert second.returncode == 0, second.stderr
    assert [row[-1] for row in rows(second.stdout)] == ["cache", "now"]
    assert rows(second.stdout)[0][:-3] == rows(first.stdout)[1][:-2]  # the same times

    run = hostir(tmp_path, "run", "--set", "M=64", "--strategy", "auto", "--compare")
    assert run.returncode == 0, run.stderr
    assert "ok" in run.stdout
    taken = " ".join(rows(first.stdout)[1])
    strategy = re.search(r"runs '(\w+),.*' \(measured [\d.]+ us, the fastest of \d+\)", run.stderr)
    assert strategy, run.stderr
    assert strategy[1] in taken
    assert run.stderr.count("(measured") == 1  # only rank 0 prints


@pytest.mark.slow
def test_tune_measures_the_sizes_that_ranges_are_chosen_for(tmp_path: Path) -> None:
    file = tmp_path / "layer.hir"
    text = "hostir 1\nmesh @mesh [didx] = 0 1\nfusion @layer(%a: f32[M@didx, 4], %b: f32[4, 2]) -> (%c) {\n"
    file.write_text(text + "  %full: f32[M, 4] = allgather %a over didx\n  %c: f32[M, 2] auto = matmul %full, %b\n}\n")
    done = on_two_ranks(tmp_path, "-m", "hostir", "tune", str(file), "--device", "cpu", "--runs", "1")
    assert done.returncode == 0, done.stderr
    measured = [line.split() for line in done.stdout.splitlines() if line.startswith("  layer")]
    assert [row[1] for row in measured] == [f"M={2 << power}" for power in range(16)]
    assert all(row[-2:] == ["measured", "now"] for row in measured)
    shown = on_two_ranks(tmp_path, "-m", "hostir", "explain", str(file), "--device", "cpu")
    assert shown.returncode == 0, shown.stderr
    assert "measured" in shown.stdout
    assert "estimated" not in shown.stdout


@pytest.mark.xdist_group("tuned")
def test_tune_measures_again_only_when_asked(
    tmp_path: Path, tuned: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    shutil.copytree(tuned[0], tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    again = hostir(tmp_path, "tune", "--set", "M=32", "--runs", "1", "--again")
    assert again.returncode == 0, again.stderr
    assert rows(again.stdout)[0][-1] == "now"
    assert len(contents(tmp_path) - before) == 1


def contents(folder: Path) -> set[str]:
    return {file.read_text() for file in (folder / "tuning").glob("*.json")}


@pytest.mark.slow
def test_a_calibration_is_kept_and_scales_the_estimates_of_this_machine(tmp_path: Path) -> None:
    done = on_two_ranks(tmp_path, "-m", "hostir", "tune", "--calibrate", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    printed = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert printed.keys() == {"program", "memory", "matmul", "gather", "launch"}
    us, estimate = map(float, printed["memory"])
    assert us == pytest.approx(estimate, rel=0.05)  # estimated with the scaled constants
    (file,) = (tmp_path / "tuning").glob("*.json")
    file.write_text("{")
    ignored = hostir(tmp_path, "tune", "--set", "M=32", "--runs", "1")
    assert ignored.returncode == 0, ignored.stderr
    assert f"{file} are ignored: it is damaged" in ignored.stderr


@pytest.mark.slow
def test_tune_needs_a_file_or_a_calibration(tmp_path: Path) -> None:
    done = on_two_ranks(tmp_path, "-m", "hostir", "tune", "--device", "cpu")
    assert done.returncode != 0
    assert "the following arguments are required: FILE[:NAME]" in done.stderr


def test_a_cache_that_cannot_be_written_ends_every_rank_with_a_diagnostic(tmp_path: Path) -> None:
    (tmp_path / "tuning").write_text("")
    done = hostir(tmp_path, "tune", "--set", "M=32", "--runs", "1")
    assert done.returncode != 0
    assert done.stderr.count("error: cannot write the tuning cache") == 2
    assert "hostir/choice" not in done.stderr.replace("hostir/choice/cache.py", "")  # no traceback through hostir
