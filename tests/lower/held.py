"""Assertions about programs of `ring`, `fused` and `push`: they parse back, are proved, and compute the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import pytest

import hostir as hi
from hostir.call.bounds import Comparison, compare
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir import HostIRError, Program, Statement
from hostir.ir.host_ops import For, Synchronize, Wait
from hostir.ir.onesided_ops import Barrier, Get, If, Put, Signal, WaitSignal
from tests.call.whole import planned

every_strategy = pytest.mark.parametrize("strategy", ["ring", "fused", "push"])


def assert_correct(fusion: Program, program: Program, seeds: range, *sizes: Mapping[str, int]) -> None:
    """Assert that the program parses back, is proved, and gives the unsharded result at all sizes and schedules.

    A result may be wrong by chance: when the largest element of a row is 1e-5, a norm of the row multiplies its
    rounding errors by 1e5, and the plain computation may have rounded well. So a wrong result counts if the program
    gives one for other values, too.
    """
    assert hi.parse(str(program)) == program
    assert hi.check(program) == []
    for binding in sizes or [{}]:
        wrong = mismatches(fusion, program, binding, seeds, values=seeds.start + 1)
        again = wrong and mismatches(fusion, program, binding, seeds, values=seeds.start + 1001)
        assert not again, f"{wrong}, and for other values {again}\n{fusion}\n{program}"


def mismatches(
    fusion: Program, program: Program, binding: Mapping[str, int], seeds: range, values: int
) -> dict[int, list[Comparison]]:
    """Run a program on random values in several schedules. Return the wrong outputs of each schedule that has some."""
    inputs = random_inputs(fusion, binding, seed=values)
    plain, exact = reference(fusion, inputs, binding, None), reference(fusion, inputs, binding)
    run = planned(program, inputs, binding)
    compared = {seed: compare(program, run(seed), plain, exact) for seed in seeds}
    return {seed: wrong for seed, all_of in compared.items() if (wrong := [c for c in all_of if not c.good])}


def one_sided(program: Program) -> list[Statement]:
    return [s for s in program.walk() if isinstance(s, (Get, Put))]


def lowerable(
    fusions: Iterable[Program], lower: Callable[[int, Program], Program]
) -> Iterator[tuple[int, Program, Program]]:
    """Yield the index of each fusion, the fusion and its program; skip rows that lie over several mesh axes."""
    for index, fusion in enumerate(fusions):
        try:
            program = lower(index, fusion)
        except HostIRError as refused:
            if "lie over several axes of the mesh" not in str(refused):
                raise
            continue
        assert one_sided(program)
        yield index, fusion, program


def without_each(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, tuple[Statement, ...]]]:
    """Yield each ordering or moving statement, with the body without this statement."""
    for n, s in enumerate(body):
        if isinstance(s, (Signal, Wait, WaitSignal, Barrier, Synchronize, Get, Put)):
            yield s, (*body[:n], *body[n + 1 :])
        if isinstance(s, (For, If)):
            for missing, inner in without_each(s.body):
                yield missing, (*body[:n], replace(s, body=inner), *body[n + 1 :])


def assert_each_statement_is_needed(program: Program) -> set[type[Statement]]:
    """Leave out each statement that orders or moves; assert that the checker reports an error. Return their types."""
    types = set()
    for missing, body in without_each(program.body):
        types.add(type(missing))
        errors = [finding for finding in hi.check(program.with_body(body)) if finding.level == "error"]
        assert errors, f"'{missing.keyword()}' was left out unnoticed\n{program}"
    return types
