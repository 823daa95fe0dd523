"""The benchmark of loss curves: a small run on CPU processes, its verdicts and its picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.losses import FIRST, SMOOTH, WAYS, distances, draw, main, problem, report, smooth
from tests.launch import environment, launch

FP8 = "hostir, fp8"


def falling(factor: float = 1.0, steps: int = 60) -> list[float]:
    return [factor * (1 + 4 * math.exp(-step / 10)) for step in range(steps)]


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_small_model_trains_in_all_ways_and_its_curves_are_written(tmp_path: Path) -> None:
    small = ["--device", "cpu", "--model", "tiny", "--tokens", "16", "--batch", "4", "--steps", "18"]
    env = environment(HOSTIR_CACHE=str(tmp_path), PYTHONWARNINGS="ignore")
    done = launch(2, "-m", "benchmarks.losses", *small, "--out", str(tmp_path / "losses"), env=env, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    data = json.loads((tmp_path / "losses.json").read_text())
    assert [*data["losses"]] == [*WAYS]
    assert {len(values) for values in data["losses"].values()} == {18}
    first, fp8 = (data["losses"][way] for way in (FIRST, FP8))
    assert first != fp8, "fp8 rounds differently"
    assert main(["--draw", str(tmp_path / "losses.json"), str(tmp_path / "losses.svg")]) == 0
    assert (tmp_path / "losses.svg").read_text() == draw(data)


def test_it_asks_for_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "start it with torchrun" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--draw", str(tmp_path / "none.json"), str(tmp_path / "none.svg")])
    assert "none.json: write them with --out" in capsys.readouterr().err


def test_a_curve_is_the_mean_of_the_last_losses() -> None:
    assert smooth([3.0, 1.0]) == [3.0, 2.0]
    assert smooth([9.0, *[1.0] * SMOOTH]) == pytest.approx([9.0, *((9 + n) / (n + 1) for n in range(1, SMOOTH)), 1.0])


@pytest.mark.parametrize(
    ("fp8", "expected"),
    [
        (falling(1.009), ""),
        (falling(1.011), "WRONG: more than 1 % from the first way"),
        (falling(0.989), "WRONG: more than 1 % from the first way"),
        ([2.0] * 60, "WRONG: the loss has not fallen"),
        ([*falling()[:-1], math.nan], "WRONG: the loss has not fallen"),
    ],
)
def test_a_curve_that_does_not_fall_or_ends_elsewhere_is_wrong(fp8: list[float], expected: str) -> None:
    losses = {FIRST: falling(), FP8: fp8}
    assert problem(losses, FP8) == expected
    assert expected in report(losses)
    assert not problem(losses, FIRST)


def test_the_picture_has_a_line_for_each_way_and_for_each_distance() -> None:
    ways = [*WAYS]
    losses = {way: falling(1 + n / 200) for n, way in enumerate(ways)}
    data = {"losses": losses, "environment": {}, "batch": 2, "tokens": 8, "ranks": 2, "parameters": 3.2e6}
    text = draw(data)
    ElementTree.fromstring(text)
    assert "3.2 M parameters" in text
    assert "60 steps of 16 bytes" in text
    curves = [line for line in text.splitlines() if 'fill="none"' in line]
    assert len(curves) == len(ways) + len(ways) - 1
    assert distances(losses, ways[1]) == pytest.approx([0.5] * 60)
