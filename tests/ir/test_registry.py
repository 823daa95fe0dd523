"""Every statement's own example: it reads, prints back, checks, and runs the same on all machines."""

from __future__ import annotations

import pytest
import torch

import hostir as hi
from hostir.ir import Phase, Statement, verify
from hostir.ir.op import REGISTRY
from hostir.runtime.local import run_whole
from hostir.runtime.reference import reference
from hostir.runtime.sharding import random_inputs
from tests.statement_examples import OPERAND, example_of, example_program

every_statement = pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY.keys())


@every_statement
def test_the_docstring_says_what_it_does_and_ends_with_an_example(cls: type[Statement]) -> None:
    doc = (cls.__doc__ or "").strip()
    assert not doc.startswith("Example:")
    assert doc.count("Example:") == 1
    assert example_of(cls)
    assert "\n" not in example_of(cls)


@every_statement
def test_the_example_is_written_as_the_printer_writes_it(cls: type[Statement]) -> None:
    program = example_program(cls)
    assert hi.parse(str(program)) == program
    lines = [OPERAND.sub(r"%\1", line.strip()) for line in str(program).splitlines()]
    example = OPERAND.sub(r"%\1", example_of(cls))
    assert any(line == example or line.endswith(f"{{ {example} }}") for line in lines)


@every_statement
def test_the_example_checks_and_runs_alike_on_simulated_ranks_and_on_whole_tensors(cls: type[Statement]) -> None:
    program = example_program(cls)
    verify(program)
    host = program if program.phase is Phase.HOST else hi.lower(program)
    inputs = random_inputs(program, {}, seed=7)
    for seed in range(3):
        for got, expected in zip(run_whole(host, inputs, seed=seed), reference(program, inputs), strict=True):
            tolerance = 2 * torch.finfo(got.dtype).eps * 64**0.5
            torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_keyword_names_one_statement() -> None:
    assert all(cls.keyword() == keyword for keyword, cls in REGISTRY.items())
    classes = [cls.__qualname__ for cls in REGISTRY.values()]
    assert len(set(classes)) == len(classes)
