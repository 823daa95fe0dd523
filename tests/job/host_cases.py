"""Cases that every rank of tests/job/test_two_hosts.py runs: `host_cases.py NAME ...`, on two hosts.

A case that succeeds prints `PASS name rank`. Every call gets new random inputs. Allocated memory holds NaN until it is
written. Results are compared with the same computation on unsharded tensors in float64.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch

import hostir as hi
from examples import patterns
from hostir.call.bounds import compare
from hostir.call.executor import Executor
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir.program import Program, with_hosts
from hostir.job.session import joined
from tests.two_hosts import DEVICE

RANK, SIZE, IN_HOST = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
SEED = 1000 * os.getppid() + int(time.time()) // 60
CASES: dict[str, Callable[[], None]] = {}
PATTERNS = (
    patterns.allgather_matmul,
    patterns.allgather_matmul_rows,
    patterns.column_parallel,
    patterns.row_parallel,
    patterns.row_parallel_bias,
    patterns.row_parallel_scattered,
    patterns.mlp,
    patterns.all_gather,
    patterns.reduce_scatter,
    patterns.expert_mlp,
)
NOT_ALONE = (patterns.row_parallel, patterns.row_parallel_bias)  # not overlapped if each host has one rank


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def stated(pattern: Callable[..., hi.Fusion], hosts: int = 2) -> Program:
    return with_hosts(pattern(ranks=SIZE).program(), hosts)


def check(fusion: Program, strategy: str) -> None:
    """Run a fusion by a strategy, twice, and compare the results with the unsharded reference."""
    program = hi.lower(fusion, strategy)
    executor = Executor(program)
    for seed in (7, 8):
        inputs = random_inputs(fusion, {}, seed=seed)
        plain, exact = reference(fusion, inputs, dtype=None), reference(fusion, inputs)
        parts = [shard(x, v.tensor, RANK, {}) for x, v in zip(inputs, program.inputs, strict=True)]
        outputs = hi.run(program, *inputs) if seed == 7 else None
        local = executor(*parts)
        if outputs is not None:
            wrong = [str(c) for c in compare(program, outputs, plain, exact, summed=True) if not c.good]
            assert not wrong, (program.name, strategy, wrong)
            for part, full, value in zip(local, outputs, program.outputs, strict=True):
                torch.testing.assert_close(part, shard(full, value.tensor, RANK, {}), rtol=0, atol=0)


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
    except hi.HostIRError as problem:
        return str(problem)
    raise AssertionError("it was not refused")


@case
def every_pattern_is_right() -> None:
    for pattern in PATTERNS:
        for strategy in ("hierarchical", "pipeline"):
            if strategy == "pipeline" or IN_HOST > 1 or pattern not in NOT_ALONE:
                check(stated(pattern), strategy)


@case
def the_ranks_of_a_host_are_known() -> None:
    expected = tuple(tuple(range(first, first + IN_HOST)) for first in (0, IN_HOST))
    assert joined("cpu").hosts() == expected


@case
def memory_is_not_shared_across_hosts() -> None:
    program = hi.lower(patterns.allgather_matmul(ranks=SIZE), "ring")
    inputs = random_inputs(program, {}, seed=1)
    message = refusal(lambda: hi.run(program, *inputs))
    assert f"ranks 0 and {IN_HOST} of @allgather_matmul run on different hosts, which share no memory" in message
    assert ": first; rank" in message
    assert ": second" in message
    assert "'hierarchical' on hi.DeviceMesh(..., hosts=2)" in message


@case
def auto_takes_a_strategy_that_crosses_hosts() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        executor = hi.compile(patterns.row_parallel(ranks=SIZE), tune=0)
    assert executor.choice.strategy in ("sequential", "pipeline", "hierarchical")
    assert executor.choice.machine.endswith("on 2 hosts")
    refused = {it.candidate.strategy: it.reason for it in executor.choice.impossible}
    assert f"ranks 0 and {IN_HOST} are on different hosts" in refused["ring"]
    said = [str(warning.message) for warning in seen]
    assert any("ring" in text and "stay within one host" in text for text in said) == (RANK == 0), said


@case
def other_hosts_than_stated_are_reported_once() -> None:
    program = hi.lower(stated(patterns.row_parallel, SIZE), "sequential")
    inputs = random_inputs(program, {}, seed=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            hi.run(program, *inputs)
    said = [str(warning.message) for warning in seen if "hosts" in str(warning.message)]
    if IN_HOST == 1:
        assert said == []
        return
    assert len(said) == (RANK == 0)
    expected = "The meshes of @row_parallel state 4 hosts for 4 ranks, and the job has 2 hosts: ranks 0, 1; ranks 2, 3."
    assert all(expected in text for text in said), said


def calls_until(seconds: float, event: Callable[[], None]) -> None:
    """Call a hierarchical program again and again; after some seconds cause an event on the last rank."""
    program = hi.lower(stated(patterns.mlp), "hierarchical")
    executor = Executor(program)
    inputs = random_inputs(program, {}, seed=1)
    parts = [shard(x, v.tensor, RANK, {}) for x, v in zip(inputs, program.inputs, strict=True)]
    begin, done = time.monotonic(), False
    while True:
        executor(*parts)
        if RANK == SIZE - 1 and not done and time.monotonic() - begin > seconds:
            done = True
            event()


@case
def a_host_dies() -> None:
    def die() -> None:
        os.kill(-1, signal.SIGKILL)  # every other process of this host
        os.kill(os.getpid(), signal.SIGKILL)

    calls_until(1.0, die)


@case
def the_link_goes_down() -> None:
    calls_until(1.0, lambda: subprocess.run(("ip", "link", "set", "dev", DEVICE, "down"), check=True))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CASES[name]()
        print(f"PASS {name} {RANK}\n", end="", flush=True)
