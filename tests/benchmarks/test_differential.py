"""A few hundred cases of the random differential run, and whether it finds what is wrong.

`python -m benchmarks.differential` runs thousands, and some of them on real processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

import pytest
import torch

import hostir as hi
from benchmarks import differential
from benchmarks.differential import CELLS, RANDOM, Result, fits, multiple_of, several
from examples.patterns import PATTERNS
from hostir.call import local as local_runs
from hostir.ir import program as programs
from hostir.ir.sizes import Division
from hostir.ir.source import Diagnostic
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernel_table
from hostir.machines.simulated import machine as local

SEED = 17
CASES = 400  # numbers, of which some have nothing to overlap


def failed(results: list[Result]) -> list[str]:
    return [differential.complaint(r, SEED, "local") for r in results if r.outcome in ("wrong", "exception")]


@pytest.mark.parametrize("part", range(2))
def test_random_cases_are_right_or_deservedly_refused(part: int) -> None:
    found = several(range(part * CASES // 2, (part + 1) * CASES // 2), SEED)
    assert not failed(found)
    ends = [result.outcome for result in found]
    assert ends.count("right") > CASES // 10
    assert ends.count("refused") > CASES // 20


def test_each_stretch_of_numbers_holds_all_strategies_ranks_and_rows() -> None:
    some, kinds = CELLS[:CASES], len(PATTERNS) + len(RANDOM)
    for field, values in (("strategy", 5), ("ranks", 5), ("rows", 4), ("pattern", kinds)):
        assert len({getattr(cell, field) for cell in some}) == values
    assert len(set(CELLS)) == len(CELLS) == 5 * 5 * 4 * kinds


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
def test_which_rows_fit_is_told_without_the_programs_own_rule(type: str, body: str, multiple: int) -> None:
    text = f"hostir 1\nmesh @mesh [didx] = 0 1 2 3\nprogram @p(%x: {type}) -> (%x) {{\n  {body}\n}}\n"
    program = hi.parse(text)
    assert multiple_of(program) == multiple
    assert fits(program, 0)
    assert [m for m in range(1, 40) if not program.misfits({"M": m})] == [m for m in range(1, 40) if not m % multiple]


# Faults -----------------------------------------------------------------------------------------------------------
def found_in(count: int) -> list[str]:
    """What goes wrong in so many cases with rows."""
    return failed(several([n for n in range(2 * count) if CELLS[n].rows != "M = 0"][:count], SEED))


def test_a_kernel_that_misses_an_element_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(policy: str, device: str) -> Mapping[str, Kernel]:
        table = kernel_table(policy, device)

        def matmul(out: torch.Tensor, *operands: torch.Tensor, **options: object) -> None:
            table["matmul"](out, *operands, **options)
            out.view(-1)[-1:] *= 2

        return {**table, "matmul": matmul}

    monkeypatch.setattr(local, "kernel_table", planted)
    assert any(text.startswith("wrong") and "allowed" in text for text in found_in(60))


def test_a_size_that_is_not_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "misfits", lambda *_: [])
    assert found_in(40)


def refusing(factor: int) -> object:
    """What refuses all rows that are no multiple of what must divide them, times a factor."""

    def misfits(name: str, divisions: Sequence[Division], sizes: Mapping[str, int]) -> list[Diagnostic]:
        asked = lcm(*(division.size.den for division in divisions)) * factor
        rule = f"M={sizes.get('M')} does not fit @{name}: M must be a multiple of {asked}, because it is so"
        return [Diagnostic(rule)] if sizes.get("M", 0) % asked else []

    return misfits


def test_a_refusal_of_what_fits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "misfits", refusing(2))
    assert any("refuses what fits" in text for text in found_in(40))


def test_a_message_with_another_multiple_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "misfits", refusing(2))
    assert any("names another multiple" in text for text in found_in(120))


def test_an_error_of_another_kind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("the shards are lost")

    monkeypatch.setattr(local_runs, "shard", broken)
    found = found_in(40)
    assert any(text.startswith("exception") and "the shards are lost" in text for text in found)
    assert all("python -m benchmarks.differential --seed 17 --case" in text for text in found)
