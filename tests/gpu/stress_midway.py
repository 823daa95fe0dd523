"""Calls fail midway on one rank, at every few steps. Each rank gets one error, and later calls are correct.

    HOSTIR_TIMEOUT=8 torchrun --nproc-per-node N tests/gpu/stress_midway.py [--device cpu] [--every K]

Two executors of equal programs take turns with an executor of another program. The ranks take turns to fail. On CUDA
the other ranks go on calling until they get the error, and read no results before. Prints a line for each failure, with
the seconds until all ranks have called again. Exits with 1 if a result is wrong or an error is missing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

import hostir as hi
from examples import patterns
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.job.session import session

ROWS = 64  # of each rank
CASES = [
    (pattern, strategy, kernels)
    for pattern in ("allgather_matmul_rows", "row_parallel", "row_parallel_scattered")
    for strategy in ("ring", "fused", "push", "pipeline")
    for kernels in ("triton", "aten")
]


class Layer:
    """Executors of equal programs on this rank."""

    def __init__(self, pattern: str, strategy: str, kernels: str, rank: int, ranks: int, device: torch.device) -> None:
        fusion = getattr(patterns, pattern)(ranks, 1, ROWS * ranks, 64 * ranks, 128, dtype="bf16")
        self.program, self.rank, self.device = hi.lower(fusion, strategy), rank, device
        self.executors = [hi.Executor(hi.parse(str(self.program)), kernels=kernels) for _ in range(2)]
        # a copy to the device would wait for a call that a peer has left
        self.parts = lru_cache(maxsize=8)(self._parts)

    def _parts(self, seed: int) -> list[torch.Tensor | None]:
        unsharded = random_inputs(self.program, {}, seed=seed)
        parts = [shard(x, v.tensor, self.rank, {}) for x, v in zip(unsharded, self.program.inputs, strict=True)]
        return [None if x is None else x.to(self.device) for x in parts]

    def issue(self, seed: int) -> Any:
        return self.executors[seed % 2](*self.parts(seed))

    def check(self, seed: int) -> None:
        """Make a call, and check that its result is the rank's part of the unsharded product."""
        (result,) = self.issue(seed)
        a, b = (x.to(self.device).double() for x in random_inputs(self.program, {}, seed=seed))
        (value,) = self.program.outputs
        expected = shard((a @ b).to(torch.bfloat16), value.tensor, self.rank, {})
        assert expected is not None
        torch.testing.assert_close(result.double(), expected.double(), rtol=3e-2, atol=3e-1)

    def warm_up(self) -> None:
        """Make calls by both executors until native code issues them."""
        for seed in (0, 1, 0, 1, 0, 1):
            self.check(seed)

    def steps(self) -> Iterator[tuple[list[Any], int]]:
        """Yield a pair for each step that the first executor issues: a list that holds the step, and its index."""
        (plan,) = self.executors[0].plans.values()
        if tapes := getattr(plan, "tapes", None):  # native code issues most of the plan's steps
            lists = [taped.steps for taped in tapes.by_key.values() if taped is not None]
            assert lists, "no run is taped"
            return ((steps, k) for steps in lists for k in range(len(steps)))
        of_streams = (lane for key, lane in getattr(plan, "lanes", {}).items() if isinstance(key, int))  # on CPU
        lists = [plan.steps] if hasattr(plan, "steps") else [lane.steps for lane in of_streams]
        return ((steps, k) for steps in lists for k in range(len(steps)))


def issue_all(layers: Iterable[Layer]) -> None:
    for layer in layers:
        layer.issue(0)


def fail() -> None:
    raise RuntimeError("this step fails")


def first_error(calls: Callable[[], object]) -> str:
    """Make these calls; return the text of the error that one of them raises, or an empty text."""
    try:
        calls()
    except hi.HostIRError as problem:
        return str(problem)
    return ""


def error_of(layer: Layer, seed: int, seconds: float = 60.0) -> str:
    """Make calls until one raises, and return the text of its error. Exit if none raises within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if message := first_error(lambda: layer.issue(seed)):
            return message
        time.sleep(0.02)
    raise SystemExit(f"rank {layer.rank} got no error within {seconds:g} s")


def main() -> None:
    """Run as one rank of a job."""
    parser = argparse.ArgumentParser(description="Calls that fail midway on one rank.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--every", type=int, default=5, help="fail at every K-th step", metavar="K")
    chosen = parser.parse_args()
    on_cpu = chosen.device == "cpu"
    with session(chosen.device) as job:
        assert job is not None
        cases = [case for case in CASES if not on_cpu or case[2] == "aten"]
        other = Layer("allgather_matmul_rows", "sequential", "aten", job.rank, job.size, job.device)
        store, turn = dist.distributed_c10d._get_default_store(), 0
        for case in cases:
            layer = Layer(*case, job.rank, job.size, job.device)
            layer.warm_up()
            count = job.exchange("steps", str(len(list(layer.steps()))))
            for k in range(0, min(map(int, count)), chosen.every):
                layer.warm_up()
                for each, seed in itertools.product((layer, other), (0, turn + 1, turn + 2)):
                    each.parts(seed)
                job.exchange("no rank is in a call", "")
                failing, turn, began = turn % job.size, turn + 1, time.monotonic()
                if job.rank == failing:
                    steps, at = next(itertools.islice(layer.steps(), k, None))
                    steps[at], step = fail, steps[at]
                    message = error_of(layer, 0)
                    steps[at] = step
                    assert "this step fails" in message, message
                    store.set(f"midway/{turn}", job.groups.abandoned)
                ahead_of_it = (turn // job.size) % 2 == 0 and not on_cpu  # in the other turns, no rank runs ahead
                early, message = ahead_of_it and job.rank != failing, ""
                ahead = (layer, other, layer, layer, layer) if ahead_of_it else (layer,)
                if early:  # flags, a communication of NCCL and flags again wait for the failing rank
                    message = first_error(partial(issue_all, ahead))
                abandoned = on_cpu or store.get(f"midway/{turn}")  # on a CPU a call needs all ranks at once
                if not abandoned:  # no rank has noticed: this rank makes the call again
                    assert not message, message
                    for each in () if early else ahead:
                        each.check(0)
                elif job.rank != failing:
                    message = message or error_of(layer, 0)
                    assert "this step fails" in message, message
                for caller in (layer, other, layer):
                    caller.check(turn)
                    caller.check(turn + 1)
                if job.rank == 0:
                    seconds = time.monotonic() - began
                    print(f"{'/'.join(case)}: step {k} of rank {failing}: {seconds:.2f} s", flush=True)
        print(f"rank {job.rank}: {turn} failures, and all later calls are correct", flush=True)


if __name__ == "__main__":
    main()
