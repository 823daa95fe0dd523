"""Calls that fail midway on one rank, at every few steps: each rank gets one error, and later calls are right.

    HOSTIR_TIMEOUT=8 torchrun --nproc-per-node N tests/gpu/stress_midway.py [--device cpu] [--every K]

Two executors of equal programs take turns, and one of another program. The rank that fails goes round. On CUDA the
other ranks go on calling until they hear of it, and look at no results before. Prints a line for each failure, with
the seconds until all ranks have called again. Exits with 1 where a result is wrong or an error is missing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

import hostir as hi
from examples import patterns
from hostir.runtime.session import session
from hostir.runtime.sharding import random_inputs, shard

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
        self.parts = lru_cache(maxsize=4)(
            self._parts
        )  # a copy to the device would wait for a call that a peer has left

    def _parts(self, seed: int) -> list[torch.Tensor | None]:
        whole = random_inputs(self.program, {}, seed=seed)
        parts = [shard(x, v.tensor, self.rank, {}) for x, v in zip(whole, self.program.inputs, strict=True)]
        return [None if x is None else x.to(self.device) for x in parts]

    def issue(self, seed: int) -> Any:
        return self.executors[seed % 2](*self.parts(seed))

    def check(self, seed: int) -> None:
        """One call, whose result is that of the unsharded product."""
        (found,) = self.issue(seed)
        a, b = (x.to(self.device).double() for x in random_inputs(self.program, {}, seed=seed))
        (value,) = self.program.outputs
        want = shard((a @ b).to(torch.bfloat16), value.tensor, self.rank, {})
        assert want is not None
        torch.testing.assert_close(found.double(), want.double(), rtol=3e-2, atol=3e-1)

    def steps(self) -> Iterator[tuple[list[Any], int]]:
        """The steps of the first executor's plan, each as a list and a place in it."""
        (plan,) = self.executors[0].plans.values()
        of_streams = (lane for key, lane in getattr(plan, "lanes", {}).items() if isinstance(key, int))  # on CPU
        lists = [plan.steps] if hasattr(plan, "steps") else [lane.steps for lane in of_streams]
        return ((steps, k) for steps in lists for k in range(len(steps)))


def strike() -> None:
    raise RuntimeError("on strike")


def error_of(layer: Layer, seed: int, seconds: float = 60.0) -> str:
    """The error that a call, or one of those that follow, raises."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            layer.issue(seed)
        except hi.HostIRError as problem:
            return str(problem)
        time.sleep(0.02)
    raise SystemExit(f"rank {layer.rank} heard of no failure within {seconds:g} s")


def main() -> None:
    """Runs as one rank of a job."""
    parser = argparse.ArgumentParser(description="Calls that fail midway on one rank.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--every", type=int, default=5, help="let every so many-th step fail")
    chosen = parser.parse_args()
    on_cpu = chosen.device == "cpu"
    with session(chosen.device) as job:
        assert job is not None
        kinds = [case for case in CASES if not on_cpu or case[2] == "aten"]
        other = Layer("allgather_matmul_rows", "sequential", "aten", job.rank, job.size, job.device)
        store, turn = dist.distributed_c10d._get_default_store(), 0
        for case in kinds:
            layer = Layer(*case, job.rank, job.size, job.device)
            layer.check(0)
            count = job.exchange("steps", str(len(list(layer.steps()))))
            for k in range(0, min(map(int, count)), chosen.every):
                layer.check(0)
                layer.check(1)
                for each, seed in itertools.product((layer, other), (turn + 1, turn + 2)):
                    each.parts(seed)
                job.exchange("no rank is in a call", "")
                lost, turn, began = turn % job.size, turn + 1, time.monotonic()
                if job.rank == lost:
                    steps, at = next(itertools.islice(layer.steps(), k, None))
                    steps[at], kept = strike, steps[at]
                    said = error_of(layer, 0)
                    steps[at] = kept
                    assert "on strike" in said, said
                    store.set(f"midway/{turn}", job.groups.abandoned)
                early = turn % 2 == 0 and job.rank != lost and not on_cpu
                if early:
                    layer.issue(0)
                midway = on_cpu or store.get(f"midway/{turn}")  # on a CPU a call needs all ranks at once
                if not midway:  # nobody has noticed: the rank makes that call again
                    layer.check(0) if not early else None
                elif job.rank != lost:
                    said = error_of(layer, 0)
                    assert "on strike" in said, said
                for each in (layer, other, layer):
                    each.check(turn)
                    each.check(turn + 1)
                if job.rank == 0:
                    seconds = time.monotonic() - began
                    print(f"{'/'.join(case)}: step {k} of rank {lost}: {seconds:.2f} s", flush=True)
        print(f"rank {job.rank}: {turn} failures, and all later calls are right", flush=True)


if __name__ == "__main__":
    main()
