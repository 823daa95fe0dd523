"""M = 0: every strategy gives results without rows, and zeros for sums over the rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

import hostir as hi
from hostir.__main__ import main
from hostir.call.executor import Executor
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.check.tracing.tracer import Tracer
from hostir.ir import Program
from hostir.plan.operations import AllocateOp, ComputeOp, ViewOp
from hostir.plan.unroll import unroll
from tests.call.small_programs import alone
from tests.call.whole import run_whole
from tests.symbolic import PATTERNS, lowered

ROWS = (0, 48, 0)


def assert_close_to_reference(source: Program, p: Program, sizes: dict[str, int], seed: int) -> list[torch.Tensor]:
    inputs = random_inputs(p, sizes, seed=seed)
    outputs = run_whole(p, inputs, sizes, seed=seed)
    for x, exact in zip(outputs, reference(source, inputs, sizes), strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=1e-4, atol=1e-4, msg=f"{sizes}\n{p}")
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_every_strategy_accepts_no_rows_before_and_after_some(pattern: Callable[..., hi.Fusion], ranks: int) -> None:
    for source, p in lowered(pattern, ranks):
        for seed, rows in enumerate(ROWS):
            outputs = assert_close_to_reference(source, p, {"M": rows}, seed)
            if rows == 0:
                assert all(x.numel() == 0 or not x.any() for x in outputs)


def summed(ranks: int) -> hi.Fusion:
    """Return a product and the sum of its rows. The numbers of blocks, rows, columns and summands are symbols."""
    with hi.Fusion("summed") as fusion:
        a, b = hi.tensor("a", ["B", ranks, "R", "K"], "f32"), hi.tensor("b", ["N", "K"], "f32")
        bias = hi.tensor("bias", ["N"], "f32")
        c = hi.linear(a, b, bias)
        total = hi.sum(c, 2)
        fusion.output(c)
        fusion.output(total)
    mesh = hi.DeviceMesh(range(ranks))
    for t in (a, b, bias, c, total):
        t.set_device_mesh(mesh)
    a.axis(1).parallelize(hi.ParallelType.DIDx)
    c.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion


def test_any_size_may_be_0() -> None:
    fusion = summed(2)
    for strategy in ("sequential", "pipeline", "ring", "fused", "push"):
        p = hi.lower(fusion, strategy)
        for extents in product((0, 2), repeat=4):
            assert_close_to_reference(fusion.program(), p, dict(zip("BRKN", extents, strict=True)), seed=1)


def test_empty_tensors_issue_only_operations_that_synchronize_ranks() -> None:
    for pattern in PATTERNS:
        if pattern.__name__.startswith(
            ("weight", "expert", "moe")
        ):  # it stores zeros, or gathers tensors with elements
            continue
        for _, p in lowered(pattern, 2):
            parts = [shard(x, v.tensor, 0, {"M": 0}) for x, v in zip(random_inputs(p, {"M": 0}), p.inputs, strict=True)]
            issued = {type(op).__name__.removesuffix("Op") for op in unroll(p, 0, {"M": 0}, parts).ops}
            synchronizing = {"Symmetric", "Signal", "WaitSignal", "Barrier", "Synchronize", "Delay"}
            assert issued <= {"Allocate", "Free", *synchronizing}, p


def test_a_proof_without_rows_has_no_accesses_to_them() -> None:
    (_, p), *_ = lowered(PATTERNS[0], 2)
    tracer = Tracer(0, p, {"M": 0})
    tracer.call()
    assert all(access.buffer.name == "b" for event in tracer.trace.events for access in event.accesses)
    assert hi.check(p, sizes={"M": 0}) == []


def test_results_without_rows_are_written_to_the_buffer_of_the_caller() -> None:
    p = alone("%c: f32[M, 5] = allocate\n  matmul %a, %b -> %c", "%a: f32[M, 8], %b: f32[8, 5]")
    b = torch.randn(8, 5)
    for machine in ("local", "gloo"):
        executor = Executor(p, machine=machine)
        for m in (0, 8, 0):
            a, out = torch.randn(m, 8), torch.full((m, 5), float("nan"))
            inputs, outputs = ([a], [b]) if machine == "local" else (a, b), [out] if machine == "local" else out
            (c,) = executor(*inputs, out=outputs)
            assert (c[0] if machine == "local" else c) is out
            torch.testing.assert_close(out, a @ b)


def test_an_empty_graph_is_not_captured() -> None:
    from hostir.machines.cuda.graphs import uniform_only

    p = alone("%c: f32[M, 8] = allocate\n  relu %a -> %c", "%a: f32[M, 8]")
    nothing, something = (unroll(p, 0, {"M": m}, [torch.randn(m, 8)]) for m in (0, 2))
    assert all(isinstance(op, AllocateOp | ViewOp) for op in nothing.ops)
    assert "nothing runs with these sizes" in uniform_only(nothing)
    assert any(isinstance(op, ComputeOp) for op in something.ops)
    assert uniform_only(something) == ""


def test_a_compiled_fusion_accepts_no_rows_before_and_after_some() -> None:
    def fusion() -> hi.Fusion:
        with hi.Fusion("tokens") as fusion:
            x, w = hi.tensor("x", ["M", 8], "f32"), hi.tensor("w", [8, 4], "f32")
            y = x @ w
            fusion.output(y)
        mesh = hi.DeviceMesh(range(2))
        x.shard(0, mesh)
        w.shard(1, mesh)
        y.shard(1, mesh)
        return fusion

    for chosen_for in (0, 8):
        for strategy in ("auto", "sequential"):
            compiled = hi.compile(fusion(), strategy, sizes={"M": chosen_for}, machine="local")
            for m in (0, 8, 0):
                x, w = torch.randn(m, 8), torch.randn(8, 4)
                (y,) = compiled(list(x.tensor_split(2)), list(w.chunk(2, 1)))
                torch.testing.assert_close(torch.cat(y, 1), x @ w)


def test_the_check_command_explains_the_result_for_no_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    (_, p), *_ = lowered(PATTERNS[0], 2)
    file = f"{tmp_path}/p.hir"
    with open(file, "w") as out:
        out.write(str(p))
    assert main(["check", file, "--set", "M=0"]) == 0
    assert "nothing to report for M=0; tensors without elements are neither made nor moved" in capsys.readouterr().out
