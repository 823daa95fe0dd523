"""`Executor.start` on CPUs: the call has ended when `start` returns."""

from __future__ import annotations

import pytest
import torch

import hostir as hi
from hostir.call.executor import Executor
from hostir.ir.source import HostIRError
from tests.call.small_programs import alone

BODY = "%c: f32[M, 5] = allocate\n  matmul %a, %b -> %c"


@pytest.mark.parametrize("machine", ["local", "gloo"])
def test_every_wait_for_a_started_call_returns_the_outputs(machine: str) -> None:
    executor = Executor(alone(BODY, "%a: f32[M, 8], %b: f32[8, 5]"), machine=machine)
    a, b, out = torch.randn(3, 8), torch.randn(8, 5), torch.full((3, 5), float("nan"))
    inputs = ([a], [b]) if machine == "local" else (a, b)
    started = executor.start(*inputs, out=[out] if machine == "local" else out)
    assert isinstance(started, hi.Started)
    outputs = started.wait()
    assert started.wait() is outputs
    torch.testing.assert_close(out, a @ b)
    executor.start(*inputs)  # no wait for this call
    (plain,) = executor(*inputs)
    torch.testing.assert_close(plain[0] if machine == "local" else plain, a @ b)
    with pytest.raises(HostIRError, match="given 1 input"):
        executor.start(*inputs[:1])
