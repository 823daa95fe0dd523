"""Symmetric memory of a program: users see the size, and a limit restricts `auto` to candidates that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir import knobs
from hostir.__main__ import main
from hostir.choice.cache import Entry
from hostir.choice.decision import Decider, symmetric_bytes
from hostir.choice.hardware import H200
from hostir.choice.platforms import Platform, reference
from hostir.choice.ranges import Ranges
from hostir.ir.source import HostIRError
from tests.choice.test_ranges import layer, run

ROOT = Path(__file__).parents[2]
ROWS = patterns.allgather_matmul_rows(ranks=2, S=1, M=8192, N=3584, K=1024, dtype="bf16")
GATHERED = 8192 * 1024 * 2  # bytes that every rank gathers


def decider(limit: int | None = None, fusion: hi.Fusion = ROWS) -> Decider:
    return Decider(fusion.program(), reference(H200, 2), limit=limit)


@pytest.fixture(autouse=True)
def _no_warnings(recwarn: pytest.WarningsRecorder) -> None:
    """Record warnings: a candidate over the limit is a warning, and pytest makes warnings errors."""


def test_a_choice_lists_the_symmetric_memory_that_each_executor_takes() -> None:
    timings = {it.candidate.strategy: it.symmetric for it in decider().choice({}).timings}
    assert timings["sequential"] == 0
    for strategy in ("ring", "fused", "push"):
        program = hi.lower(ROWS, strategy, 2)
        assert GATHERED <= timings[strategy] < GATHERED + 4096  # with flags
        assert hi.Executor(program).symmetric_bytes == symmetric_bytes(program, {}) == timings[strategy]


def test_symbolic_sizes_must_be_bound_to_know_the_symmetric_memory() -> None:
    program = hi.lower(layer(), "fused", 1)
    assert hi.Executor(program).symmetric_bytes is None
    few, many = (symmetric_bytes(program, {"M": m}) for m in (64, 128))
    assert many - few == 64 * 64 * 4


def test_auto_takes_the_fastest_candidate_that_fits_the_limit() -> None:
    needed = decider().choice({}).timings[0].symmetric
    assert decider(needed).choice({}).strategy == decider().choice({}).strategy != "sequential"
    choice = decider(needed - 1).choice({})
    assert choice.strategy != decider().choice({}).strategy
    assert all(timing.symmetric < needed for timing in choice.timings)
    assert any("of symmetric memory on a rank, and the limit is 16.0 MiB" in it for it in choice.fallbacks)


def test_a_measured_candidate_that_does_not_fit_is_not_taken() -> None:
    platform = Platform("cuda", "NVIDIA H200", 2, "nvlink", (("torch", "2.11"),), H200)
    limited = Decider(ROWS.program(), platform, limit=GATHERED // 2)
    entries = {c: Entry.measured(p, 9.0 + (c.strategy == "sequential")) for c, p in limited.measurable.programs.items()}
    choice = limited.choice({}, entries)
    assert choice.source == "measured"
    taken = {timing.candidate.strategy for timing in choice.timings}
    assert taken == {"sequential", "sequential by copy_engine", "pipeline"}


def test_a_limit_is_an_argument_or_a_knob() -> None:
    assert hi.compile(ROWS).choice.strategy != "sequential"
    assert hi.compile(ROWS, symmetric_limit=1000).choice.strategy == "sequential"
    with knobs.scope(symmetric_limit=1000):
        assert hi.compile(ROWS).choice.strategy == "sequential"
        assert hi.compile(ROWS, symmetric_limit=1 << 30).choice.strategy != "sequential"
    for wrong in (-1, "1 GB", 1.5):
        with pytest.raises(HostIRError, match="symmetric_limit="):
            hi.compile(ROWS, symmetric_limit=wrong)


def test_a_requested_strategy_that_does_not_fit_is_refused() -> None:
    message = r"@allgather_matmul_rows takes 16.0 MiB \(\d+ bytes\) of symmetric memory on a rank"
    with pytest.raises(HostIRError, match=rf"{message}\n *expected: at most 1000 bytes"):
        hi.compile(ROWS, "fused", symmetric_limit=1000)
    assert hi.compile(ROWS, "sequential", symmetric_limit=0).symmetric_bytes == 0
    executor = hi.compile(layer(), "fused", symmetric_limit=10_000)
    run(executor, 8)
    with pytest.raises(HostIRError, match=r"@layer takes 128.\d KiB \(.*\) of symmetric memory on a rank, M=512"):
        executor(torch.zeros(512, 64), torch.zeros(64, 48))


def test_a_call_takes_a_candidate_that_fits_at_its_sizes() -> None:
    fusion = layer(dtype="bf16", k=1024)
    every = Ranges(decider(fusion=fusion), {})
    fastest = every.candidate({"M": 5000})
    needed = symmetric_bytes(every.program(fastest), {"M": 5000})
    assert fastest.strategy != "sequential"
    limited = Ranges(decider(needed, fusion), {})
    assert limited.representative({"M": 5000}) == {"M": 4096}
    assert limited.candidate({"M": 5000}) == fastest
    other = limited.candidate({"M": 5002})
    assert (
        symmetric_bytes(every.program(other), {"M": 5002})
        <= needed
        < symmetric_bytes(every.program(fastest), {"M": 5002})
    )


def test_explain_shows_the_symmetric_memory(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ("explain", "examples/patterns.py:allgather_matmul_rows", "--machine", "h200x4", "--set", "M=65536")
    assert main(arguments) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[2].endswith("symmetric")
    assert all(line.endswith("16.0 MiB") for line in out if line.startswith(("  ring", "  fused", "  push")))
    with knobs.scope(symmetric_limit=1 << 20):
        assert main(arguments) == 0
    assert "it takes 16.0 MiB of symmetric memory on a rank, and the limit is 1.0 MiB" in capfd.readouterr().out
