"""Log messages of hostir: choices, plans and communications that are not overlapped, and none in a warm call."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.call.executor import Executor
from hostir.ir.source import logger
from tests.choice.fusions import turned
from tests.pages import ROOT, environment


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "hostir"):
        yield caplog


def _on_one_rank() -> hi.Program:
    with hi.Fusion("alone") as fusion:
        c = hi.relu(hi.tensor("a", ["M", 8], "f32"))
        fusion.output(c)
    return hi.lower(fusion)


def test_nothing_is_printed_by_default() -> None:
    code = (
        "import hostir as hi, torch\nfrom examples import patterns\n"
        "hi.compile(patterns.allgather_matmul(), machine='local')\n"
        "hi.Executor(hi.lower(patterns.no_communication(ranks=1)), machine='gloo')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_choice_is_logged_with_the_second_best(records: pytest.LogCaptureFixture) -> None:
    executor = hi.compile(patterns.allgather_matmul())
    (record,) = records.records
    assert record.name == "hostir.choice.decision"
    assert record.getMessage().startswith(f"{executor.choice}; '")


def test_a_communication_that_is_not_overlapped_is_logged_at_every_compilation(
    records: pytest.LogCaptureFixture,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            hi.compile(turned(), "fused")
    messages = [r.getMessage() for r in records.records if "is not overlapped: fused handles only" in r.getMessage()]
    assert len(messages) == 2
    assert all(message.startswith("@turned: the alltoall at ") for message in messages)


def test_a_new_plan_is_logged_and_later_calls_log_nothing(
    records: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(_on_one_rank(), machine="gloo")
    for rows in (4, 6):
        executor(torch.randn(rows, 8))
    assert [r.name for r in records.records] == ["hostir.call.rank"] * 2
    first, second = (r.getMessage() for r in records.records)
    assert first.startswith("@alone: planned for M=4 in ")
    assert first.endswith(" ms; a call allocates 128 bytes, and 0 bytes of symmetric memory stay, of 0 in all")
    assert "M=6" in second
    for name in ("log", "isEnabledFor"):  # a warm call does not even query the level
        monkeypatch.setattr(logging.LoggerAdapter, name, _never)
    executor(torch.randn(6, 8))


def _never(*arguments: object, **options: object) -> None:
    raise AssertionError(f"a warm call logs {arguments}")


def test_a_message_in_a_job_begins_with_the_rank(
    records: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger("hostir.test").info("alone")
    monkeypatch.setenv("RANK", "3")
    logger("hostir.test").info("%d plans", 2)
    assert [r.getMessage() for r in records.records] == ["alone", "rank 3: 2 plans"]
