"""Checks of every program of `ring`, `fused` and `push`: it parses back, is proved, and gives the unsharded result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

import hostir as hi
from hostir.ir import Program, Statement
from hostir.ir.host_ops import For, Synchronize
from hostir.ir.onesided_ops import Barrier, Get, If, Put, Signal, WaitSignal
from hostir.runtime.reference import compare, reference
from hostir.runtime.sharding import random_inputs
from tests.runtime.whole import run_whole

every_strategy = pytest.mark.parametrize("strategy", ["ring", "fused", "push"])


def hold(fusion: Program, program: Program, seeds: range, *calls: Mapping[str, int]) -> None:
    """Assert that the program parses back, is proved, and gives the unsharded result for these sizes and schedules."""
    assert hi.parse(str(program)) == program
    assert hi.check(program) == []
    for sizes in calls or [{}]:
        right(fusion, program, seeds, sizes)


def right(fusion: Program, program: Program, seeds: range, sizes: Mapping[str, int]) -> None:
    inputs = random_inputs(fusion, sizes, seed=seeds.start + 1)
    plain, exact = reference(fusion, inputs, sizes, None), reference(fusion, inputs, sizes)
    for seed in seeds:
        for found in compare(program, run_whole(program, inputs, sizes, seed=seed), plain, exact):
            assert found.good, f"seed {seed}: {found}\n{fusion}\n{program}"


def one_sided(program: Program) -> list[Statement]:
    return [s for s in program.walk() if isinstance(s, (Get, Put))]


def without_each(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, tuple[Statement, ...]]]:
    """Yield every body with one ordering or moving statement left out."""
    for n, s in enumerate(body):
        if isinstance(s, (Signal, WaitSignal, Barrier, Synchronize, Get, Put)):
            yield s, (*body[:n], *body[n + 1 :])
        if isinstance(s, (For, If)):
            for missing, inner in without_each(s.body):
                yield missing, (*body[:n], replace(s, body=inner), *body[n + 1 :])
