"""The example of every statement: it parses, prints back, passes the checker, and runs correctly on simulated ranks."""

from __future__ import annotations

import pytest
import torch

import hostir as hi
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.check import verify
from hostir.ir import HostIRError, Phase, Statement
from hostir.ir.op import REGISTRY
from tests.call.whole import planned
from tests.statement_examples import ALONE, OPERAND, example_of, example_program

every_statement = pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY.keys())


@every_statement
def test_the_docstring_says_what_it_does_and_ends_with_an_example(cls: type[Statement]) -> None:
    doc = (cls.__doc__ or "").strip()
    assert not doc.startswith("Example:")
    assert doc.count("Example:") == 1
    assert example_of(cls)
    assert "\n" not in example_of(cls)


@every_statement
def test_the_printer_writes_the_example_as_the_docstring_does(cls: type[Statement]) -> None:
    program = example_program(cls)
    assert hi.parse(str(program)) == program
    lines = [OPERAND.sub(r"%\1", line.strip()) for line in str(program).splitlines()]
    example = OPERAND.sub(r"%\1", example_of(cls))
    assert any(line == example or line.endswith(f"{{ {example} }}") for line in lines)


@every_statement
def test_the_checker_accepts_the_example(cls: type[Statement]) -> None:
    program = example_program(cls)
    assert [finding for finding in hi.check(program) if finding.level == "error"] == []


@every_statement
def test_the_example_computes_the_unsharded_result_on_simulated_ranks(cls: type[Statement]) -> None:
    program = example_program(cls)
    verify(program)
    host = program if program.phase is Phase.HOST else hi.lower(program)
    inputs = random_inputs(program, {}, seed=7)
    if cls.keyword() in ALONE:
        expected: tuple[torch.Tensor, ...] = (ALONE[cls.keyword()][1](*[x.double() for x in inputs]),)
    else:
        expected = reference(program, inputs)
    for outputs in map(planned(host, inputs), range(3)):
        for got, exact in zip(outputs, expected, strict=True):
            tolerance = 2 * torch.finfo(got.dtype).eps * 64**0.5
            torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("keyword", ALONE)
def test_the_unsharded_reference_refuses_the_first_statement_that_names_a_rank(keyword: str) -> None:
    program = example_program(REGISTRY[keyword])
    with pytest.raises(HostIRError, match="there are none where tensors are whole") as refused:
        reference(program, random_inputs(program, {}))
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.span is not None
    named = [s for s in program.walk() if s.keyword() in ALONE]
    assert diagnostic.span == named[0].span


def test_a_keyword_names_one_statement() -> None:
    assert all(cls.keyword() == keyword for keyword, cls in REGISTRY.items())
    classes = [cls.__qualname__ for cls in REGISTRY.values()]
    assert len(set(classes)) == len(classes)
