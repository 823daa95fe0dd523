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


def test_a_few_layouts_in_turn_are_recalled_and_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two differ only in whether they require gradients, as in a layer's forward and backward pass."""
    executor = Executor(alone("%c: f32[M, 8] = allocate\n  relu %a -> %c", "%a: f32[M, 8]"), machine="gloo")
    look_ups = []
    bind = RankExecutor._bind
    monkeypatch.setattr(RankExecutor, "_bind", lambda self, *tensors: look_ups.append(1) or bind(self, *tensors))
    inputs = torch.randn(2, 8), torch.randn(8, 3).t(), torch.randn(4, 8), torch.randn(4, 8).requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            for x in inputs:
                (y,) = executor(x)
                assert torch.equal(y, x.relu())
    assert len(look_ups) == 4
    assert len(executor.plans) == 3


def test_an_out_that_is_passed_as_an_input_is_refused() -> None:
    executor = Executor(alone("%c: f32[4, 8] = allocate\n  relu %a -> %c", "%a: f32[4, 8]"), machine="gloo")
    x, y = torch.randn(4, 8), torch.empty(4, 8)
    executor(x, out=y)
    with pytest.raises(HostIRError, match="was given 2 inputs"):
        executor(x, y)
    (z,) = executor(x)
    assert torch.equal(z, x.relu())
