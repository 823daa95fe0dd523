"""Lowered patterns as golden files for readers; each file is a program that parses, is proved and runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hostir as hi
from examples import patterns
from hostir.call.bounds import compare
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.lower import STRATEGIES
from tests.call.whole import run_whole
from tests.golden import Golden

CASES = Path(__file__).parent.parent / "cases" / "patterns"
PATTERNS = {p.__name__: p for p in (*patterns.PATTERNS, *patterns.NORMED, *patterns.EXPERTS, *patterns.SCALED)}
# Programs that differ in more than names and sizes. `tests/lower` checks and runs the others without a golden file.
FUSIONS = ["mlp", "mlp_2d", "allgather_matmul_rows", "broadcast", "attention_output", "quantized_rows"]
SCALED = ["quantized_rows", "scaled_row_parallel", "scaled_batch_gathered"]
EVERY = ["allgather_matmul", "row_parallel", "row_parallel_scattered", "mlp_2d", "attention_output"]
EXPERTS = ["batched_mlp", "expert_mlp", "moe_layer"]
COLLECTIVES = ["gather", "scatter", "broadcast", "alltoall", "sendrecv"]
LOWERED = {
    "sequential": [*EVERY, *SCALED, *EXPERTS, "weight_gathered", *COLLECTIVES],
    "sequential by low_latency": ["allgather_matmul", "row_parallel", "row_parallel_scattered"],
    "sequential by one_shot": ["row_parallel", "row_parallel_scattered"],
    "sequential by two_shot": ["row_parallel"],
    "sequential by copy_engine": ["allgather_matmul"],
    "pipeline": [*EVERY, *EXPERTS, "mlp", "allgather_matmul_rows", "weight_gathered"],
    "chain": ["row_parallel_scattered", "mlp", "attention_output"],
    "ring": [*EVERY, *SCALED, *EXPERTS, "mlp", "all_gather", "all_reduce"],
    "fused": [*EVERY, *SCALED, "mlp", "allgather_matmul_rows", "expert_mlp", "moe_layer", "moe_layer_fp8"],
    "push": [*EVERY, *SCALED, "mlp"],
}
ON_ONE_STREAM = "allgather_matmul_rows-fused_on_one_stream.hir"
every_program = pytest.mark.parametrize(
    ("strategy", "name"), [(s, name) for s, names in LOWERED.items() for name in names]
)


def file_name(name: str, strategy: str) -> str:
    return f"{name}-{strategy.replace(' ', '_')}.hir"


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_prints_as_its_golden_file(name: str, golden: Golden) -> None:
    golden(f"patterns/{name}-fusion.hir", str(PATTERNS[name]()))


@every_program
def test_a_lowered_pattern_prints_as_its_golden_file(name: str, strategy: str, golden: Golden) -> None:
    golden(f"patterns/{file_name(name, strategy)}", str(hi.lower(PATTERNS[name](), strategy)))


def test_on_one_stream_copies_and_their_signals_alternate(golden: Golden) -> None:
    program = hi.lower(patterns.allgather_matmul_rows(), "fused", streams=1)
    golden(f"patterns/{ON_ONE_STREAM}", str(program))
    assert hi.check(program) == []


@every_program
def test_a_golden_file_is_a_program_that_is_proved_and_runs(name: str, strategy: str) -> None:
    file = CASES / file_name(name, strategy)
    program = hi.parse(file.read_text(), str(file))
    fusion = hi.parse(str(PATTERNS[name]()))
    assert hi.check(program) == []
    assert hi.lower(fusion, strategy) == program
    inputs = random_inputs(fusion, {}, seed=11)
    plain, exact = reference(fusion, inputs, dtype=None), reference(fusion, inputs)
    assert all(comparison.good for comparison in compare(program, run_whole(program, inputs, seed=3), plain, exact))


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_fusion_without_a_stream_axis_is_not_sliced_by_the_pipeline(pattern: Callable[..., hi.Fusion]) -> None:
    same = hi.lower(pattern(), "pipeline") == hi.lower(pattern(), "sequential")
    assert same == ("@stream" not in str(pattern()) or pattern is patterns.no_communication)


def test_a_fusion_without_communication_has_one_program() -> None:
    sequential, *others = (hi.lower(patterns.no_communication(), strategy) for strategy in STRATEGIES)
    assert [s.keyword() for s in sequential.walk()] == ["allocate", "matmul"]
    assert sequential.streams == 0
    assert all(program == sequential for program in others)


def test_no_golden_file_is_left_over() -> None:
    expected = {
        file_name(name, strategy) for strategy, names in {**LOWERED, "fusion": FUSIONS}.items() for name in names
    }
    assert {file.name for file in CASES.iterdir()} == {*expected, ON_ONE_STREAM}
