"""Compile some kernels that plans of patterns and benchmarks load on a Hopper GPU. Every run draws other kernels.

`make kernels` compiles all of them.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.kernels.cases import every_case
from tests.kernels.compile_every import kernels_of, outcome
from tests.kernels.hopper import Kernel

DRAWN = 30
# Cases with a kernel that once needed more shared memory than a program may have, or than the estimate of its tile.
FAILED = (
    "scaled_gather 70B M=4096 rows fast on 2: fused triton",
    "scaled_gather 70B M=2048 rows fast on 2: fused triton",
    "scaled_gather 70B M=512 rows fast on 2: push triton",
    "scaled_gather 70B M=2048 rows fast on 2: push triton",
    "scaled_gather 70B M=2048 axis 1 on 8: fused triton",
    "scaled arrivals 70B M=2048 rows fast: fused triton",
    "scaled_allgather_matmul rows f32 large on 2: push triton",
    "scaled_batch_scattered tensor axis 1 f32 large on 2: ring 2 streams auto",
    "expert_mlp f32 on 8: sequential by low_latency triton",
)


@pytest.mark.parametrize("number", range(DRAWN))
def test_a_random_kernel_of_all_plans_fits(number: int, testrun_uid: str) -> None:
    random = Random(f"{testrun_uid} {number}")
    kernels: list[Kernel] = []
    while not kernels:  # a strategy may refuse, and some programs only communicate
        case = random.choice(every_case())
        kernels = [kernel for _, kernel in kernels_of([case]).values()]
    kernel = random.choice([each for each in kernels if each.is_matmul] or kernels)
    assert not outcome(kernel).faults, f"{kernel} of '{case.name}', which belongs in FAILED"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILED)
def test_kernels_of_cases_that_once_failed_fit(name: str) -> None:
    (case,) = [case for case in every_case() if case.name == name]
    products = [kernel for _, kernel in kernels_of([case]).values() if "matmul" in kernel.name]
    assert products
    for kernel in products:
        assert not outcome(kernel).faults, str(kernel)
