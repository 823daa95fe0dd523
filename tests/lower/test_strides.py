"""Inputs of any strides: every strategy accepts them and gives the unsharded result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import hostir as hi
from hostir.call.executor import Executor
from hostir.call.parts import assemble, shard
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.check import prove
from hostir.ir import Program
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Dense
from hostir.ir.source import FallbackWarning
from hostir.plan.operations import AllocateOp, ComputeOp
from hostir.plan.unroll import unroll
from tests.call.small_programs import alone, program, said
from tests.symbolic import LAYOUTS, PATTERNS, lowered

RANKS = 2
SIZES = {"M": 24}
EXPANDED = LAYOUTS[-1]
Parts = list[torch.Tensor | None]


def parts_of(p: Program, inputs: list[torch.Tensor], layout: Callable[[torch.Tensor], torch.Tensor]) -> list[Parts]:
    """Return the shards of each input in the given layout."""
    ranks = range(p.ranks)
    parts = [[shard(x, v.tensor, rank, SIZES) for rank in ranks] for v, x in zip(p.inputs, inputs, strict=True)]
    return [[None if x is None else layout(x) for x in mine] for mine in parts]


@pytest.mark.filterwarnings("ignore::hostir.FallbackWarning")
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_every_strategy_accepts_inputs_of_any_strides(pattern: Callable[..., hi.Fusion]) -> None:
    for source, p in lowered(pattern, RANKS):
        for number, layout in enumerate(LAYOUTS):
            inputs = random_inputs(p, SIZES, seed=number)
            parts = parts_of(p, inputs, layout)
            if layout is EXPANDED:  # the layout repeats the first row, so the unsharded inputs change
                inputs = [assemble(mine, v.tensor, SIZES) for v, mine in zip(p.inputs, parts, strict=True)]
            outputs = Executor(p, sizes=SIZES, seed=number)(*parts)
            exact = reference(source, inputs, SIZES)
            for value, shards, true in zip(p.outputs, outputs, exact, strict=True):
                torch.testing.assert_close(
                    assemble(shards, value.tensor, SIZES).double(), true, rtol=1e-4, atol=1e-4, msg=f"{layout}\n{p}"
                )


def test_lowering_adds_dense_only_for_inputs_that_a_collective_or_a_copy_to_a_peer_reads() -> None:
    dense = {p.name: [] for _, p in lowered(PATTERNS[0], RANKS)}
    for pattern in PATTERNS:
        for _, p in lowered(pattern, RANKS):
            dense.setdefault(p.name, []).append([str(s.x) for s in p.walk() if isinstance(s, Dense)])
    assert dense["allgather_matmul"] == [["%a"], ["%a"], [], [], ["%a"], ["%a"]]  # `ring` and `chain` copy in the rank
    assert not any(dense["row_parallel"] + dense["no_communication"])
    assert dense["gather"] == [["%x"], ["%x"]]


# `dense` on each machine ------------------------------------------------------------------------------------------
ONE = "%a_dense = dense %a\n  %c: f32[4, 8] = allocate\n  relu %a_dense -> %c"


def test_a_contiguous_input_is_not_copied_and_another_is_copied_once_a_call() -> None:
    p = alone(ONE, "%a: f32[4, 8]")
    contiguous, transposed = (unroll(p, 0, {}, [x]).ops for x in (torch.randn(4, 8), torch.randn(8, 4).t()))
    assert [type(op) for op in contiguous] == [AllocateOp, ComputeOp]
    assert [type(op) for op in transposed] == [AllocateOp, ComputeOp, AllocateOp, ComputeOp]
    assert isinstance(transposed[1], ComputeOp)
    assert transposed[1].computation == "copy"


@pytest.mark.parametrize("machine", ["local", "gloo"])
def test_a_view_of_an_input_can_be_made_dense(machine: str) -> None:
    body = """%t = permute %a (1, 0)
  %d = dense %t
  %flat: f32[32] = reshape %d
  %c: f32[32] = allocate
  relu %flat -> %c"""
    for a in (torch.randn(4, 8), torch.randn(8, 4).t()):
        (c,) = Executor(alone(body, "%a: f32[4, 8]"), machine=machine)([a] if machine == "local" else a)
        assert torch.equal(c[0] if machine == "local" else c, a.t().reshape(-1).relu())


def test_a_copy_is_reported_once_for_all_sizes() -> None:
    p = replace(alone(ONE.replace("4, 8", "M, 8"), "%a: f32[M, 8]"), name="copied")
    executor = Executor(p, machine="gloo")
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        for m in (4, 4, 6):
            executor(torch.randn(8, m).t())
    assert [warning.category for warning in messages] == [FallbackWarning]
    assert "Every call of @copied copies its input %a, which is not contiguous and must be" in str(messages[0].message)
    assert messages[0].filename == __file__


# `dense` in the checker -------------------------------------------------------------------------------------------
GATHERED = "%g: f32[4, 3] = allocate\n  %h = allgather %d -> %g over didx\n  wait %h"


def test_dense_is_for_inputs_that_nothing_writes() -> None:
    dense = "%d = dense %x\n  "
    prove(program(dense + GATHERED, "%x: f32[4@didx, 3]", "%g"))
    for writes in ("relu %x -> %x", "relu %d -> %d", "%v = chunk %x[0 of 2]\n  relu %v -> %v"):
        after = said(lambda writes=writes: prove(program(f"{dense}{writes}\n  {GATHERED}", "%x: f32[4@didx, 3]", "%g")))
        assert "is written, and %d may be its memory or a copy of it" in after
    before = program(f"relu %x -> %x\n  {dense}{GATHERED}", "%x: f32[4@didx, 3]", "%g")
    assert "%x is written, and %d may be" in said(lambda: prove(before))
    assert "%d is a view of an input" in said(
        lambda: prove(program(f"{dense}{GATHERED}\n  free %d", "%x: f32[4@didx, 3]", "%g"))
    )


def test_a_collective_of_an_input_without_dense_names_the_input_and_says_what_helps() -> None:
    p = program(GATHERED.replace("%d", "%x"), "%x: f32[4@didx, 3]", "%g")
    x = [torch.randn(3, 2).t() for _ in range(2)]
    assert isinstance(p.body[1], Communication)
    text = said(lambda: Executor(p)(x))
    assert "input %x of rank 0 is not contiguous" in text
    assert "or have the program read '%x_dense = dense %x'" in text
