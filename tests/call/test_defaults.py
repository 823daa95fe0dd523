"""The user's default device and dtype of torch change nothing. The default device here is meta: it holds no data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from examples import patterns
from hostir.call.executor import Executor
from hostir.call.local import run_calls
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.cli.run import rehearsed
from hostir.kernels.matmul.workspaces import workspace
from hostir.lower import STRATEGIES, lower
from tests.call.small_programs import BESIDE, alone

SIZES = {"ranks": 2, "S": 1, "M": 16, "K": 12, "N": 8}
FUSION = patterns.allgather_matmul(**SIZES, dtype="f32").program()


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def product() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return inputs of `FUSION`, and its result."""
    inputs = random_inputs(FUSION, {}, seed=1)
    assert all(x.is_cpu and not torch.equal(x, x.bfloat16().float()) for x in inputs)
    a, b = inputs
    return inputs, a @ b


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_simulated_ranks_stay_on_the_cpu(strategy: str) -> None:
    inputs, exact = product()
    ((parts,),) = run_calls(lower(FUSION, strategy), [inputs], seed=3, watch=True)
    for part in parts:
        assert part is not None
        torch.testing.assert_close(part, exact)


def test_references_stay_on_the_device_of_the_inputs() -> None:
    inputs, _ = product()
    a, b = (x.double() for x in inputs)
    for outputs in (rehearsed(lower(FUSION, "fused"), inputs), reference(FUSION, inputs)):
        torch.testing.assert_close(outputs[0], a @ b)


def test_real_ranks_stay_on_the_device_of_the_inputs() -> None:
    a, b = (torch.randn(*shape, dtype=torch.float32, device="cpu") for shape in ((4, 8), (8, 5)))
    (c,) = Executor(alone(BESIDE), machine="gloo")(a, b)
    torch.testing.assert_close(c, (a @ b).relu())


def test_the_workspace_for_sums_of_tiles_is_float32() -> None:
    device, stream = torch.device("cpu"), -1  # no other test uses this stream
    sums, tickets = workspace(device, stream, sums=1000, tickets=7)
    assert (sums.dtype, sums.numel(), sums.is_cpu) == (torch.float32, 1000, True)
    assert (tickets.dtype, tickets.numel(), tickets.is_cpu) == (torch.int32, 7, True)
