"""The memory that a program needs, compared with the memory that machines allocate; programs that need too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.__main__ import main
from hostir.call import local
from hostir.call.local import rehearse
from hostir.call.random import random_inputs
from hostir.call.room import Room
from hostir.cli import run as command
from hostir.ir.source import amount
from hostir.machines.simulated.memory import SimulatedMemory
from hostir.machines.simulated.rank import RankMachine
from hostir.machines.simulated.scheduler import check_seed

LOOP = """hostir 1
mesh @two [x] = 0 1
mesh @one [y] = 2
program @p(%a: f32[8@x, 4], %b: f16[16] on @one) -> (%c) {
  %c: f32[8@x, 4] = allocate
  for %i in 0..3 {
    %t: f32[8@x, 4] = allocate
    relu %a -> %t
    free %t
    %u: f32[8@x, 4] = allocate
    relu %a -> %u
  }
  relu %a -> %c
}
"""


def test_the_memory_of_each_rank_is_counted() -> None:
    part = 4 * 4 * 4
    freed, kept = Room(hi.parse(LOOP), {}), Room(hi.parse(LOOP), {}, frees=False)
    assert freed.inputs == 8 * 4 * 4 + 16 * 2
    assert freed.ranks == [part + part + 3 * part] * 2 + [32]
    assert kept.ranks == [2 * part + part + 6 * part] * 2 + [64]


@pytest.mark.parametrize(
    ("pattern", "strategy"),
    [
        *((pattern, "pipeline") for pattern in (patterns.mlp, patterns.allgather_matmul, patterns.mlp_2d)),
        *((pattern, "fused") for pattern in (patterns.mlp, patterns.allgather_matmul, patterns.mlp_2d)),
        (patterns.row_parallel, "pipeline"),  # gathers no rows, so `fused` refuses it
    ],
)
def test_simulated_ranks_allocate_the_counted_memory(
    pattern: Any, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = hi.lower(pattern(), strategy)
    inputs = random_inputs(program, {})
    monkeypatch.setattr(RankMachine, "dense", lambda _, x: x)  # no copies of dense tensors
    allocated: list[torch.Tensor] = []
    for module, name in ((SimulatedMemory, "new"), (local, "shard")):
        monkeypatch.setattr(module, name, recording(getattr(module, name), allocated))
    rehearse(program, [inputs])
    room, total = Room(program, {}, frees=False), sum(x.numel() * x.element_size() for x in allocated)
    assert sum(room.ranks) <= total <= sum(room.ranks) + room.inputs, (
        "inputs are counted although they may not be copied"
    )


def recording(make: Callable[..., torch.Tensor], results: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that does as `make`, and appends each result to a list."""

    def recorded(*arguments: Any) -> torch.Tensor:
        results.append(make(*arguments))
        return results[-1]

    return recorded


def test_fewer_calls_run_at_once_if_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = hi.lower(patterns.gather())
    room = Room(program, {}, frees=False)
    a_call = sum(room.ranks) + room.inputs
    counts: list[int] = []

    def counting(program: Any, calls: Any, *rest: Any) -> Any:
        counts.append(len(calls))
        return rehearse(program, calls, *rest)

    monkeypatch.setattr(command, "rehearse", counting)
    for free, expected in ((100 * a_call, [4, 2]), (2 * a_call, [2, 2, 2]), (a_call, [1] * 6)):
        monkeypatch.setattr(command, "free_here", lambda free=free: free)
        assert main(["run", "examples/patterns.py:gather", "--repeat", "6"]) == 0
        assert counts == expected
        counts.clear()
    monkeypatch.setattr(command, "free_here", lambda: a_call - 1)
    assert main(["run", "examples/patterns.py:gather"]) == 2
    assert f"error: @gather takes {amount(a_call)} on 4 simulated ranks: " in capfd.readouterr().err


def test_a_failed_allocation_gives_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    program = hi.lower(patterns.gather())
    inputs = random_inputs(program, {})

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(hi.HostIRError, match="not enough memory for @gather on 4 simulated ranks"):
        hi.run(program, *inputs)


@pytest.mark.parametrize("seed", ["a", 1.5, None, True, [1]])
def test_a_seed_must_be_an_integer(seed: Any) -> None:
    program = hi.lower(patterns.gather())
    inputs = random_inputs(program, {})
    calls = (
        lambda: hi.run(program, *inputs, seed=seed),
        lambda: hi.Executor(program, seed=seed),
        lambda: rehearse(program, [inputs]).run(seed),
        lambda: random_inputs(program, {}, seed),
        lambda: check_seed(seed),
    )
    for call in calls:
        with pytest.raises(hi.HostIRError, match="the seed is"):
            call()


def test_a_seed_may_be_any_integer() -> None:
    program = hi.lower(patterns.gather())
    for seed in (-1, 2**64, 10**30):
        (x,) = random_inputs(program, {}, seed)
        hi.run(program, x, seed=seed)
