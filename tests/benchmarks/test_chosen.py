"""The regret of the choices of `hi.compile`: medians of several runs. Rows may count as equal within their spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chosen import ChosenRow, figures, main, rows_of
from benchmarks.scores import BY_HAND, CAPTURED, COMPILED


def row(chosen: float, best: float = 10.0, *, model: str = "8B", **others: Any) -> dict[str, Any]:
    """A row in which the choice takes `chosen` and the fastest candidate takes `best` microseconds, eager."""
    times = {
        COMPILED: {"ours": True, "eager": chosen, "graph": chosen + 1},
        CAPTURED: {"ours": True, "graph": 2 * best},
        "ring triton": {"ours": True, "eager": best, "graph": best + 1},
        BY_HAND: {"ours": False, "eager": 12.0, "graph": 9.0},
        "torch fused": {"ours": False, "eager": 11.0},
    }
    return {"model": model, "M": 64, "compiled": {"mode": "eager", "choice": "ring triton"}, "times": times, **others}


def test_a_choice_is_compared_with_the_fastest_candidate_and_with_peers_that_are_issued_alike() -> None:
    found = figures(row(11.0))
    assert found["regret"] == pytest.approx(1.1)
    assert found["captured"] == pytest.approx(20 / 11, abs=1e-4)
    assert found["by_hand"] == pytest.approx(12 / 11)
    assert found["peer"] == pytest.approx(1.0)
    assert found["captured_by_hand"] == found["captured_peer"] == pytest.approx(9 / 20)


def test_a_choice_that_replays_its_own_graph_is_compared_with_peers_that_python_calls() -> None:
    replayed = row(11.0)
    replayed["compiled"]["mode"] = "graph"
    found = figures(replayed)
    assert found["by_hand"] == pytest.approx(12 / 12)
    assert found["peer"] == pytest.approx(11 / 12)
    del replayed["times"][CAPTURED]
    assert not any(name.startswith("captured") for name in figures(replayed))


def test_a_call_in_a_loop_takes_as_long_as_the_device_or_the_host_whichever_takes_longer() -> None:
    looped = row(11.0)
    assert not any(name.startswith("loop") for name in figures(looped)), "the times of the host are not known"
    times = looped["times"]
    times[COMPILED] |= {"host_eager_us": 30.0, "host_graph_us": 5.0}
    times[BY_HAND] |= {"host_eager_us": 90.0, "host_graph_us": 4.0}
    times["torch fused"] |= {"host_eager_us": 10.5}
    found = figures(looped)
    assert found["loop_by_hand"] == pytest.approx(90 / 30)
    assert found["loop_peer"] == pytest.approx(11 / 30)
    looped["compiled"]["mode"] = "graph"
    assert figures(looped)["loop_by_hand"] == pytest.approx(90 / 12)


@pytest.mark.parametrize(
    ("regrets", "choices", "less_spread"),
    [
        ((1.04, 1.10, 1.07), "aaa", 1.07),
        ((0.99, 1.06, 1.03), "aaa", 1.0),
        ((0.99, 1.06, 1.03), "aba", 1.03),
        ((1.2,), "a", 1.2),
        ((0.9,), "a", 0.9),
    ],
)
def test_a_row_counts_as_equal_if_runs_with_the_same_choice_differ_by_more_than_its_regret(
    regrets: tuple[float, ...], choices: str, less_spread: float
) -> None:
    row = ChosenRow("row", [{"regret": value} for value in regrets], [*choices])
    assert row.less_spread == pytest.approx(less_spread)


def test_the_table_has_the_medians_of_all_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, chosen in enumerate((10.0, 12.0, 10.6)):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        peers_only = row(10.0, model="405B")
        del peers_only["compiled"]
        rows = [row(chosen), row(10.2, model="70B"), peers_only, *([row(10.0, model="405B")] if number == 1 else ())]
        (folder / "mlp_2.json").write_text(json.dumps({"rows": rows}))
        (folder / "on_eight.json").write_text(json.dumps({"parts": {}}))
    folders = [str(folder) for folder in sorted(tmp_path.iterdir())]
    assert [each.name for each in rows_of(map(Path, folders))] == [
        "mlp_2: 8B M=64",
        "mlp_2: 70B M=64",
        "mlp_2: 405B M=64",
    ]
    main([*folders, "--out", str(tmp_path / "chosen"), "--worst", "1"])
    header, _, line, everything, worst = capsys.readouterr().out.splitlines()
    cells = dict(zip(header.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True))
    assert cells["runs"] == "1 to 3"
    assert cells["regret"] == f"{(1.06 * 1.02) ** (1 / 3):.3f}"
    assert cells["regret, max"] == "1.06"
    assert cells["regret, <= 1.05"] == "67%"
    assert cells["less spread"] == f"{1.02 ** (1 / 3):.3f}", "8B differs by .2 between runs, and the others by nothing"
    assert cells["x NCCL + cuBLAS"] == f"{12 / 10.6:.2f}"
    assert cells["captured x best peer"] == f"{9 / 20:.2f}"
    assert everything.startswith("| all | 3 |")
    assert worst == "mlp_2: 8B M=64: regret 1.00, 1.20, 1.06; ring triton, ring triton, ring triton"
    assert json.loads((tmp_path / "chosen.json").read_text())["rows"]["mlp_2: 70B M=64"]["runs"][0]["regret"] == 1.02


def test_a_file_that_is_not_json_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"rows": {"a row of hi.compile, compiled": 1.0}}))
    (tmp_path / "list.json").write_text("[1]")
    assert rows_of([tmp_path]) == []
    (tmp_path / "mlp_2.json").write_text('{"rows": [')
    with pytest.raises(SystemExit, match=r"error: .*mlp_2\.json is not JSON: Expecting value"):
        main([str(tmp_path)])


def test_folders_without_results_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no row with a choice of hi\.compile in "):
        main([str(tmp_path)])
