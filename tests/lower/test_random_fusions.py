"""Random sharded fusions, lowered by each strategy, give the unsharded result in several schedules."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import hostir as hi
from hostir.call import bounds
from hostir.call.bounds import reductions, relative_error
from hostir.call.local import rehearse
from hostir.call.parts import assemble
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.call.sizes import bind_sizes
from hostir.ir import HostIRError, Program
from hostir.lower import STRATEGIES
from tests.strategies import Drawn, fusions

FUSIONS = 50  # for each number of ranks; at most half may be refused. benchmarks/differential.py draws thousands


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 4, 1))])
def test_the_lowered_program_gives_the_unsharded_result(ranks: int) -> None:
    tally: Counter[str] = Counter()

    @settings(max_examples=FUSIONS, suppress_health_check=list(HealthCheck))
    @given(fusions(ranks), st.integers(1, 10**6))
    def every(drawn: Drawn | HostIRError, seed: int) -> None:
        if isinstance(drawn, HostIRError):
            tally["refused"] += 1
            return
        note(f"{drawn.sizes}\n{drawn.fusion}")
        programs = (lowered_or_refused(drawn.fusion, strategy) for strategy in STRATEGIES)
        lowered = list({str(program): program for program in programs if program}.values())
        correct = 0
        for program in lowered:
            try:
                assert_correct(drawn, [program], seed)
                correct += 1
            except HostIRError as refused:
                if "must be a multiple of" not in str(refused):  # the bound size is not divisible
                    raise
        tally["correct" if correct else "refused"] += 1

    every()
    assert tally["refused"] < tally["correct"]


def assert_correct(drawn: Drawn, lowered: list[Program], seed: int) -> None:
    """Run the programs in three schedules and compare the results with the unsharded fusion."""
    source = drawn.fusion.program()
    inputs = random_inputs(source, drawn.sizes, seed)
    plain, exact = reference(source, inputs, dtype=None), reference(source, inputs)
    for program in lowered:
        note(str(program))
        sizes = bind_sizes(program, inputs)
        machine = rehearse(program, [inputs], sizes)
        for schedule in (0, seed, seed + 1):
            (outputs,) = machine.run(schedule)
            got = [assemble(parts, v.tensor, sizes) for v, parts in zip(program.outputs, outputs, strict=True)]
            for g, p, e in zip(got, plain, exact, strict=True):
                assert relative_error(g, e) <= bound(program, p, e, len(source.body))


def lowered_or_refused(fusion: hi.Fusion, strategy: str) -> Program | None:
    """Return the program, or None if a diagnostic refuses the annotations."""
    try:
        return hi.lower(fusion, strategy)
    except HostIRError as refused:
        if hasattr(refused, "__notes__"):  # a pass left a program that does not verify
            raise
        return None


def bound(program: Program, plain: torch.Tensor, exact: torch.Tensor, steps: int) -> float:
    """Return the error bound of `hostir run --compare`, with one more rounding for every step."""
    return bounds.bound(plain, exact, steps - 1 + reductions(program))
