"""Lowered patterns as golden files for readers; each file is a program that parses, is proved and runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hostir as hi
from examples import patterns
from examples.patterns import SCALED
from hostir.lower import STRATEGIES
from hostir.runtime.reference import compare, reference
from hostir.runtime.sharding import random_inputs
from tests.golden import Golden
from tests.runtime.whole import run_whole

Pattern = Callable[[], hi.Fusion]
CASES = Path(__file__).parent.parent / "cases" / "patterns"
PATTERNS = (*patterns.PATTERNS, *patterns.NORMED, *SCALED)
every_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
# `ring`, `fused` and `push` lower what gathers or scatters rows, and what does not communicate.
ROWS = ["allgather_matmul", "allgather_matmul_rows", "allgather_matmul_kept", "column_parallel", "gate_up"]
ROWS += ["matmul_allgather", "row_parallel_scattered", "mlp", "mlp_2d", "no_communication"]
ROWS += ["reduce_scatter", "all_gather", "all_reduce", "row_parallel", "row_parallel_bias", "mlp_replicated"]
ROWS += ["attention_output"]
ROWS += [pattern.__name__ for pattern in SCALED]
LOWERED = [(p, s) for p in PATTERNS for s in STRATEGIES if s in ("sequential", "pipeline") or p.__name__ in ROWS]
ON_ONE_STREAM = "allgather_matmul_rows-fused_on_one_stream.hir"
every_strategy = pytest.mark.parametrize(
    ("pattern", "strategy"), LOWERED, ids=[f"{p.__name__}-{strategy}" for p, strategy in LOWERED]
)


@every_pattern
def test_the_fusion(pattern: Pattern, golden: Golden) -> None:
    golden(f"patterns/{pattern.__name__}-fusion.hir", str(pattern()))


@every_strategy
def test_the_host_program(pattern: Pattern, strategy: str, golden: Golden) -> None:
    text = str(hi.lower(pattern(), strategy))
    golden(f"patterns/{pattern.__name__}-{strategy}.hir", text)


def test_on_one_stream_the_copies_and_their_signals_take_turns(golden: Golden) -> None:
    program = hi.lower(patterns.allgather_matmul_rows(), "fused", streams=1)
    golden(f"patterns/{ON_ONE_STREAM}", str(program))
    assert hi.check(program) == []


@every_strategy
def test_the_files_are_programs_that_check_and_run(pattern: Pattern, strategy: str) -> None:
    file = CASES / f"{pattern.__name__}-{strategy}.hir"
    program = hi.parse(file.read_text(), str(file))
    fusion = hi.parse((CASES / f"{pattern.__name__}-fusion.hir").read_text())
    assert hi.check(program) == []
    assert hi.lower(fusion, strategy) == program
    inputs = random_inputs(fusion, {}, seed=11)
    plain, exact = reference(fusion, inputs, dtype=None), reference(fusion, inputs)
    assert all(found.good for found in compare(program, run_whole(program, inputs, seed=3), plain, exact))


def test_no_file_is_left_over() -> None:
    expected = {f"{p.__name__}-{kind}.hir" for p, kind in [*LOWERED, *((p, "fusion") for p in PATTERNS)]}
    assert {file.name for file in CASES.iterdir()} == {*expected, ON_ONE_STREAM}
