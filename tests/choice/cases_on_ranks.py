"""Cases that tests/choice/test_on_ranks.py runs as `cases_on_ranks.py NAME ...`; each prints `PASS name rank`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.call.executor import Executor
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.call.rank import RankExecutor
from hostir.choice import cache, measure
from hostir.choice.candidates import candidates_of
from hostir.choice.choices import Candidate
from hostir.choice.decision import choose
from hostir.choice.platforms import platform_here
from hostir.ir.source import HostIRError, error
from hostir.job.session import joined, session
from hostir.machines.gloo import machine as gloo
from hostir.plan.unrolled import UnrolledProgram

RANK = int(os.environ["RANK"])
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def fusion(m: int = 64) -> hi.Fusion:
    return patterns.allgather_matmul(2, S=2, M=m, K=32, N=16)


def check_result(executor: Executor, fusion: hi.Fusion) -> None:
    inputs = random_inputs(fusion.program(), {}, seed=os.getppid())
    outputs = executor(*[shard(x, v.tensor, RANK, {}) for v, x in zip(fusion.program().inputs, inputs, strict=True)])
    a, b = inputs
    torch.testing.assert_close(outputs[0], a @ b, rtol=1e-4, atol=1e-4)


@case
def measurements_are_agreed_on_cached_and_used() -> None:
    job, program = joined("cpu"), fusion().program()
    platform = platform_here("gloo", 2)
    candidates = candidates_of(program, platform, for_testing=True)
    progress: list[str] = []
    entries = measure.measure(candidates.programs, {}, job, runs=2, progress=progress.append)
    assert len(progress) <= measure.steps(len(entries))
    assert {c.strategy for c in entries} == {"sequential", "pipeline", "ring", "fused", "push"}
    assert all(not entry.failure and entry.eager and entry.graph is None for entry in entries.values())
    every = job.exchange("entries", repr(sorted(map(str, entries.items()))))
    assert every[0] == every[1]
    programs = candidates.programs
    slow = {c: cache.Entry.measured(p, 1.0 if c.strategy == "fused" else 9e9) for c, p in programs.items()}
    if RANK == 0:  # rank 1 reads no cache: it takes rank 0's measurements
        cache.write(cache.key_of(program, {}, platform), "p", slow)
    executor = hi.compile(fusion())
    assert isinstance(executor.choice, hi.Choice)
    assert (executor.choice.source, executor.choice.strategy) == ("measured", "fused")
    assert json.loads(job.exchange("choice", json.dumps(executor.choice.to_json()))[0]) == json.loads(
        json.dumps(executor.choice.to_json())
    )
    check_result(executor, fusion())


@case
def without_measurements_rank_0_warns_and_all_agree() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        executor = hi.compile(fusion(128))
    assert [w.category for w in warned] == ([hi.FallbackWarning] if RANK == 0 else [])
    assert isinstance(executor.choice, hi.Choice)
    assert executor.choice.strategy in ("sequential", "pipeline")
    assert executor.choice.fallbacks
    check_result(executor, fusion(128))


@case
def a_wrong_candidate_is_not_timed() -> None:
    job, program = joined("cpu"), fusion().program()
    programs = {Candidate(s, 1, "aten"): hi.lower(program, s, 2) for s in ("sequential", "ring", "fused")}
    honest = RankExecutor.__call__

    def dishonest(self: RankExecutor, *inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        outputs = honest(self, *inputs, **options)
        if RANK == 1 and "allocate_symmetric" in str(self.program) and "ready" not in str(self.program):
            outputs[0].view(-1)[0] += 30
        return outputs

    with mock.patch.object(RankExecutor, "__call__", dishonest):
        entries = measure.measure(programs, {}, job, runs=1)
    by_strategy = {c.strategy: entry for c, entry in entries.items()}
    assert by_strategy["ring"].eager is None
    assert "another result than the sequential program" in by_strategy["ring"].failure
    assert by_strategy["fused"].eager
    assert not by_strategy["fused"].failure


@case
def a_candidate_that_no_rank_can_run_is_not_timed() -> None:
    job, program = joined("cpu"), fusion().program()
    programs = {Candidate("sequential", 1, kernels): hi.lower(program, "sequential") for kernels in ("aten", "triton")}
    entries = measure.measure(programs, {}, job, runs=1)
    plain, triton = entries.values()
    assert plain.eager
    assert not triton.eager
    assert "Triton" in triton.failure


@case
def a_candidate_that_the_first_call_refuses_is_not_timed() -> None:
    job, program = joined("cpu"), fusion().program()
    programs = {Candidate(s, 2, "aten"): hi.lower(program, s, 2) for s in ("sequential", "ring", "fused")}
    honest = gloo.GlooMachine.plan

    def dishonest(self: gloo.GlooMachine, unrolled: UnrolledProgram, *rest: Any) -> gloo.GlooPlan:
        if " get " in str(unrolled.program):
            raise error("no memory to share")
        return honest(self, unrolled, *rest)

    with mock.patch.object(gloo.GlooMachine, "plan", dishonest):
        entries = measure.measure(programs, {}, job, runs=1)
    by_strategy = {c.strategy: entry for c, entry in entries.items()}
    assert "no memory to share" in by_strategy["ring"].failure
    assert by_strategy["sequential"].eager
    assert by_strategy["fused"].eager


@case
def too_few_ranks_are_refused_on_all() -> None:
    with pytest.raises(HostIRError, match="is for 4 ranks, and there are 2"):
        choose(patterns.allgather_matmul(4), machine="gloo")


@case
def a_fusion_that_no_strategy_lowers_is_refused_on_all_with_the_reason() -> None:
    with hi.Fusion("apart") as apart:
        a, b = hi.tensor("a", [16, 8], "f32"), hi.tensor("b", [8, 4], "f32")
        apart.output(a @ b)
    a.set_device_mesh(hi.DeviceMesh([0]))
    b.set_device_mesh(hi.DeviceMesh([1]))
    with pytest.raises(HostIRError, match="operands of matmul lie on different meshes: %a on @mesh"):
        hi.compile(apart)


@case
def a_failure_of_rank_0_is_raised_on_all() -> None:
    broken = mock.patch("hostir.choice.decision.candidates_of", side_effect=ZeroDivisionError("nothing to divide"))
    with broken, pytest.raises(HostIRError, match="rank 0 could not choose: ZeroDivisionError: nothing to divide"):
        hi.compile(fusion())
    assert hi.compile(fusion()).choice is not None


def rows() -> hi.Fusion:
    with hi.Fusion("rows") as fusion:
        a, b = hi.tensor("a", ["M", 32], "f32"), hi.tensor("b", [32, 16], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(2))
    a.shard(0, mesh)
    c.set_device_mesh(mesh)
    return fusion


def check_rows(executor: Executor, m: int) -> None:
    a, b = random_inputs(rows().program(), {"M": m}, seed=os.getppid() + m)
    (c,) = executor(a.chunk(2)[RANK], b)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


@case
def each_call_runs_the_program_of_its_range_on_all_ranks() -> None:
    job, program = joined("cpu"), rows().program()
    platform = platform_here("gloo", 2)
    programs = candidates_of(program, platform, for_testing=True).programs
    for m, fastest in ((64, "fused"), (1024, "ring")) if RANK == 0 else ():  # rank 1 reads no cache
        entries = {c: cache.Entry.measured(p, 10.0 + (c.strategy != fastest)) for c, p in programs.items()}
        cache.write(cache.key_of(program, {"M": m}, platform), "rows", entries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executor = hi.compile(rows())
    taken = []
    for m in (64, 1000, 60, 4096, 70, 64):
        check_rows(executor, m)
        taken.append(next(c.strategy for c, e in executor.executors.items() if e is executor.current))
    assert taken == ["fused", "ring", "fused", "sequential", "fused", "fused"]
    every = job.exchange("taken", json.dumps([taken, str(executor.choice)]))
    assert every[0] == every[1]


@case
def a_call_that_one_rank_refuses_fails_on_all() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executor = hi.compile(rows())
    for m in (64, 4096, 1000):  # a new range, the range of an earlier call, and new sizes
        a = torch.zeros(m // 2, 32, dtype=torch.float64 if RANK == 1 else torch.float32)
        with pytest.raises(HostIRError, match=r"dtype torch\.float64"):
            executor(a, torch.zeros(32, 16))
        check_rows(executor, 64)


@case
def a_program_that_takes_too_much_symmetric_memory_is_refused_on_all() -> None:
    executor = hi.compile(rows(), "fused", symmetric_limit=10_000)
    check_rows(executor, 64)
    assert executor.symmetric_bytes is not None
    assert 64 * 32 * 4 <= executor.symmetric_bytes <= 10_000
    with pytest.raises(HostIRError, match=r"of symmetric memory on a rank, M=1024"):
        check_rows(executor, 1024)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_rows(hi.compile(rows(), symmetric_limit=10_000), 1024)


def main() -> None:
    with session("cpu"):
        for name in sys.argv[1:]:
            CASES[name]()
            sys.stdout.write(f"PASS {name} {RANK}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
