"""A few seconds of the soak test; `python -m benchmarks.soak --seconds 600` runs the full one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import soak
from examples import patterns


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(280)
def test_two_ranks_survive_threads_forks_and_signals_between_calls(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = soak.main(["--seconds", "5", "--hold", "1.5", "--out", str(tmp_path / "soak")])
    printed, errors = capfd.readouterr()
    assert code == 0, errors
    assert "2 of 2 ranks came to the end" in printed
    counts = json.loads((tmp_path / "soak.json").read_text())["counts"]
    for counter in ("calls gathered", "calls reduced"):
        assert counts["0"][counter] == counts["1"][counter] > 0
        assert f"| {counter} | {counts['0'][counter]} |" in (tmp_path / "soak.md").read_text()


def test_wrong_results_and_missing_refusals_are_reported() -> None:
    def zeros(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.zeros(2 * len(a), b.shape[1]),)

    caller = soak.Caller("gathered", patterns.allgather_matmul_rows(ranks=2, M="M").program(), "push", 0, 0.0)
    problems = set()
    for number in range(60):
        try:
            caller.call(zeros, number)  # right only for zero rows
        except AssertionError as problem:
            problems |= {word for word in ("is wrong", "is not refused") if word in str(problem)}
    assert problems == {"is wrong", "is not refused"}
    assert caller.counts["calls gathered"] < 30


@pytest.mark.parametrize("ended", [(0,), (0, 1)])
def test_a_rank_that_does_not_finish_is_a_failure(ended: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "".join(f'COUNTS [{rank}, {{"calls gathered": 3}}]\n' for rank in ended)
    monkeypatch.setattr(soak, "launch", lambda *_, **__: subprocess.CompletedProcess([], 0, printed, ""))
    assert soak.main(["--seconds", "1"]) == int(len(ended) != 2)
