"""Calls with known layouts run a bound call without looking it up."""

from __future__ import annotations

import pytest
import torch

from hostir.call.executor import Executor
from hostir.call.rank import RankExecutor
from hostir.ir.source import HostIRError
from tests.call.small_programs import alone

KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


@pytest.mark.parametrize("excluded", [False, True])
def test_a_call_that_was_bound_in_other_modes_of_torch_is_looked_up_once(
    excluded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile makes the first call of compiled code with other dispatch keys excluded than later calls."""
    executor = Executor(alone("%c: f32[4, 8] = allocate\n  relu %a -> %c", "%a: f32[4, 8]"), machine="gloo")
    look_ups = []
    bind = RankExecutor._bind
    monkeypatch.setattr(RankExecutor, "_bind", lambda self, *tensors: look_ups.append(1) or bind(self, *tensors))

    def call() -> None:
        x = torch.randn(4, 8)
        (y,) = executor(x)
        assert torch.equal(y, x.relu())

    if excluded:
        with torch._C._ExcludeDispatchKeyGuard(KEY):
            call()
    for _ in range(5):
        call()
    assert len(look_ups) == 1 + excluded


def test_a_call_that_was_bound_without_gradients_is_looked_up_once_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(alone("%c: f32[4, 8] = allocate\n  relu %a -> %c", "%a: f32[4, 8]"), machine="gloo")
    look_ups = []
    bind = RankExecutor._bind
    monkeypatch.setattr(RankExecutor, "_bind", lambda self, *tensors: look_ups.append(1) or bind(self, *tensors))
    x = torch.randn(4, 8)
    with torch.no_grad():
        executor(x.clone().requires_grad_())
    for _ in range(5):
        executor(x)
    assert len(look_ups) == 2
    for _ in range(2):
        with pytest.raises(HostIRError, match="requires gradients"):
            executor(x.clone().requires_grad_())
