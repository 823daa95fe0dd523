"""The benchmark of programs for two hosts: its constants, its table, and one row of it on two hosts."""

from __future__ import annotations

import re
from dataclasses import astuple

import pytest

from benchmarks.hosts import (
    KERNELS,
    MUST,
    PATTERNS,
    STRATEGIES,
    UNIT,
    Needs,
    gains,
    hardware_for,
    lowered,
    main,
    needed,
    on_hosts,
    report,
)
from hostir.choice.timeline import predict
from tests import two_hosts
from tests.conftest import NO_HOSTS


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_hierarchical_needs_the_given_times_and_has_the_gains_that_it_must_have(pattern: str) -> None:
    programs = {strategy: lowered(PATTERNS[pattern], strategy, 16) for strategy in STRATEGIES}
    for needs in Needs.every():
        hardware = hardware_for(programs["hierarchical"], needs)
        assert astuple(needed(programs["hierarchical"], hardware)) == pytest.approx(astuple(needs))
        times = {name: predict(each, {}, on_hosts(hardware), KERNELS).us / UNIT for name, each in programs.items()}
        assert min(gains({"times": times})) >= MUST, (str(needs), times)


def test_a_table_has_the_gains_and_counts_those_that_are_large_enough() -> None:
    times = {"sequential": 2.5, "pipeline": 1.625, "hierarchical": 1.25}
    row = {"pattern": "MLP", "needs": {"kernel": 1.0, "outer": 1.2, "inner": 1.0}, "bound": 1.2, "times": times}
    lines = report([row]).splitlines()
    assert lines[2] == "| MLP | 1.0, 1.2, 1.0 | 1.20 | 2.50 | 1.62 | 1.25 | 2.00 x | 1.30 x |"
    assert "at least 1.2 x in 2 of 2, at least 1.5 x in 1 of 2; the smallest is 1.30 x." in lines[-1]


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.two_hosts
def test_a_row_is_measured_on_two_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := two_hosts.why_not():
        pytest.skip(f"{NO_HOSTS}: {reason}")
    main(["--equal", "--seconds", "0.2", "--slices", "4", "--patterns", "all-gather + matmul"])
    printed = capsys.readouterr().out
    times = re.search(r"1.0, 1.0, 1.0 \| 1.00 \| (\S+) \| (\S+) \| (\S+) \|", printed)
    assert times, printed
    every, pipeline, hierarchical = map(float, times.groups())
    assert every >= 2.5
    assert pipeline >= 1.75
    assert 1 < hierarchical < every
