"""The script for many GPUs: a full run on CPU processes with tiny sizes."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import on_eight
from benchmarks.on_eight import PARTS, RUNNING, Job, Part, options, run_all
from hostir.job.session import Session
from tests.launch import environment, launch


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(200)
def test_the_script_runs_the_requested_parts_and_records_their_outcomes(tmp_path: Path) -> None:
    env = environment(HOSTIR_CACHE=str(tmp_path))
    tiny = (
        "--device",
        "cpu",
        "--shrink",
        "64",
        "--rows",
        "8B:2048,70B:16",
        "--only",
        "reduce_scatter,overhead,llama_block,stress,tune",
    )
    done = launch(2, "-m", "benchmarks.on_eight", "--out", str(tmp_path / "on_eight"), *tiny, env=env, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads((tmp_path / "on_eight/on_eight.json").read_text())
    assert {name: outcome.split(",")[0] for name, outcome in data["parts"].items()} == dict.fromkeys(
        ("reduce_scatter", "overhead", "llama_block", "stress", "tune"), "ok"
    )
    log = (tmp_path / "on_eight/on_eight.log").read_text()
    assert "on_eight: stress: ok" in log
    assert "0 mismatches, 0 hangs" in log
    assert (tmp_path / "on_eight/matmul_reduce_scatter_2.md").exists()
    assert "| lower it |" in (tmp_path / "on_eight/overhead.md").read_text()
    (row,) = json.loads((tmp_path / "on_eight/llama_block.json").read_text())["rows"]
    assert row["ways"].keys() == {"DTensor eager", "hostir eager"}


class Alone:
    """A session of one rank."""

    rank, size = 0, 1

    def exchange(self, key: str, mine: str, timeout: float) -> list[str]:
        return [mine]


def fails(job: Job) -> bool:
    raise ValueError("too many\nlines")


PARTS_WITH_ALL_OUTCOMES = tuple(
    Part(name, 100, run)
    for name, run in (("good", lambda job: True), ("wrong", lambda job: False), ("raises", fails), ("hung", fails))
)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr(on_eight, "PARTS", PARTS_WITH_ALL_OUTCOMES)
    names = [part.name for part in PARTS_WITH_ALL_OUTCOMES]
    return Namespace(out=tmp_path, only=names, seconds=540, device="cpu")


def resumed(arguments: Namespace, begun: float, **parts: str) -> dict[str, Any]:
    """Run the parts after an earlier call, which left the outcomes `parts`."""
    (arguments.out / "on_eight.json").write_text(json.dumps({"begun": begun, "parts": parts}))
    return run_all(cast(Session, Alone()), arguments)


def test_other_parts_run_after_a_part_that_fails_or_ended_the_processes(
    arguments: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    outcomes = resumed(arguments, time.time() - 100, hung=RUNNING)
    assert {name: outcome.split(",")[0] for name, outcome in outcomes.items()} == {
        **{"good": "ok", "wrong": "FAILED", "raises": "FAILED: ValueError: too many"},
        "hung": "FAILED: it hung",
    }
    assert json.loads((arguments.out / "on_eight.json").read_text())["parts"] == outcomes


def test_a_second_call_keeps_the_outcomes_of_the_first_one(arguments: Namespace) -> None:
    arguments.only = ["good"]
    assert [*resumed(arguments, 0.0, good="FAILED", hung="ok, 3 s")] == ["good"]
    assert json.loads((arguments.out / "on_eight.json").read_text())["parts"]["hung"] == "ok, 3 s"


def test_no_part_begins_with_less_than_a_minute_left(arguments: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert set(resumed(arguments, time.time() - 500).values()) == {"no time left"}


def test_a_part_that_hangs_ends_the_process_with_a_message(
    arguments: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    on_eight.end(PARTS_WITH_ALL_OUTCOMES[0], Job(cast(Session, Alone()), arguments, 100))
    log = (arguments.out / "on_eight.log").read_text()
    assert codes == [1]
    assert "good: rank 0 hangs: not done after 160 s" in log
    assert "most recent call first" in log


def test_parts_are_named_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert options(["--out", "x"]).only == [part.name for part in PARTS]
    tables = options(["--out", "x", "--only", "tables"]).only
    assert {"llama_block", "overhead", "all_gather"} <= {*tables}
    assert {"stress", "lost"}.isdisjoint(tables)
    assert options(["--out", "x", "--only", "tables,lost"]).only == [*tables, "lost"]
    with pytest.raises(SystemExit):
        options(["--out", "x", "--only", "stress,nothing"])
    assert "no part nothing" in capsys.readouterr().err
