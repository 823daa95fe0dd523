"""A few hundred cases of the random differential run, and planted faults that it must report.

`python -m benchmarks.differential` runs thousands, and some of them on real processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

import pytest
import torch

import hostir as hi
from benchmarks import differential
from benchmarks.differential import CELLS, FIXED, RANDOM, SPAN, Result, fits, multiple_of, several
from hostir.call import local as local_runs
from hostir.ir import program as programs
from hostir.ir.sizes import Division
from hostir.ir.source import Diagnostic
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernel_table
from hostir.machines.simulated import machine as local

SEED = 19  # a correct result of 30 elements is called wrong once in 600 draws
CASES = 400  # case numbers; some have no communication to overlap


def failed(results: list[Result]) -> list[str]:
    return [differential.complaint(r, SEED, "local") for r in results if r.outcome in ("wrong", "exception")]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_random_cases_are_right_or_refused_with_a_true_reason(part: int) -> None:
    results = several(range(part * CASES // 2, (part + 1) * CASES // 2), SEED)
    assert not failed(results)
    outcomes = [result.outcome for result in results]
    assert outcomes.count("right") > CASES // 10
    assert outcomes.count("refused") > CASES // 20


@pytest.mark.slow
def test_random_mixtures_of_experts_are_right_or_refused_with_a_true_reason() -> None:
    results = several(range(2 * SPAN, 2 * SPAN + 60), SEED)
    assert not failed(results)
    assert {result.cell.pattern for result in results} >= {"random mixtures", "moe_layer"}
    assert sum(result.outcome == "right" for result in results) > 30


def test_the_first_cases_cover_all_strategies_ranks_rows_and_patterns() -> None:
    first, patterns = CELLS[:CASES], len(FIXED) + len(RANDOM)
    for field, values in (("strategy", 6), ("ranks", 5), ("rows", 4), ("pattern", patterns)):
        assert len({getattr(cell, field) for cell in first}) == values
    assert len(set(CELLS)) == len(CELLS) == 6 * 5 * 4 * patterns


@pytest.mark.parametrize(
    ("type", "body", "multiple"),
    [
        ("f32[M@didx, 4]", "", 4),
        ("f32[(2 M@didx), 4]", "", 4),
        ("f32[M/6, 4]", "", 6),
        ("f32[M, 4]", "for %i in 0..3 { %x_i = chunk %x[%i of 3] }", 3),
        ("f32[M@didx, 4]", "for %i in 0..3 { %x_i = chunk %x[%i of 3] }", 12),
        ("f32[2*M, 4]", "", 1),
    ],
)
def test_the_divisor_of_rows_is_computed_without_the_programs_misfits(type: str, body: str, multiple: int) -> None:
    text = f"hostir 1\nmesh @mesh [didx] = 0 1 2 3\nprogram @p(%x: {type}) -> (%x) {{\n  {body}\n}}\n"
    program = hi.parse(text)
    assert multiple_of(program) == multiple
    assert fits(program, 0)
    assert [m for m in range(1, 40) if not program.misfits({"M": m})] == [m for m in range(1, 40) if not m % multiple]


# Faults -----------------------------------------------------------------------------------------------------------
def complaints_in(count: int) -> list[str]:
    """Run this number of cases with at least one row; return the complaints."""
    return failed(several([n for n in range(2 * count) if CELLS[n].rows != "M = 0"][:count], SEED))


def test_a_kernel_with_one_wrong_element_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(policy: str, device: str) -> Mapping[str, Kernel]:
        table = kernel_table(policy, device)

        def matmul(out: torch.Tensor, *operands: torch.Tensor, **options: object) -> None:
            table["matmul"](out, *operands, **options)
            out.view(-1)[-1:] *= 2

        return {**table, "matmul": matmul}

    monkeypatch.setattr(local, "kernel_table", planted)
    assert any(text.startswith("wrong") and "allowed" in text for text in complaints_in(60))


def test_a_missing_refusal_of_a_size_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "misfits", lambda *_: [])
    assert complaints_in(40)


def refusing(factor: int) -> object:
    """Return a replacement for `misfits` that demands a multiple of `factor` times the true divisor."""

    def misfits(name: str, divisions: Sequence[Division], sizes: Mapping[str, int]) -> list[Diagnostic]:
        divisor = lcm(*(division.size.den for division in divisions)) * factor
        rule = f"M={sizes.get('M')} does not fit @{name}: M must be a multiple of {divisor}, because it is so"
        return [Diagnostic(rule)] if sizes.get("M", 0) % divisor else []

    return misfits


def test_a_refusal_of_a_size_that_fits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "misfits", refusing(2))
    assert any("refuses what fits" in text for text in complaints_in(40))


@pytest.mark.slow
def test_a_message_with_another_multiple_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "misfits", refusing(2))
    assert any("names another multiple" in text for text in complaints_in(120))


def test_an_exception_that_is_no_diagnostic_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("the shards are lost")

    monkeypatch.setattr(local_runs, "shard", broken)
    complaints = complaints_in(40)
    assert any(text.startswith("exception") and "the shards are lost" in text for text in complaints)
    assert all(f"python -m benchmarks.differential --seed {SEED} --case" in text for text in complaints)
