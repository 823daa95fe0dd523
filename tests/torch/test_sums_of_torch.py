"""torch's one-shot and two-shot all-reduces after `install`: which of them hostir runs, on faked kernels of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hostir as hi
import hostir.torch
from hostir.choice.collectives import is_sooner
from hostir.machines.cuda.implementations import SymmetricCollectives
from hostir.torch.ops import collectives, library
from hostir.torch.ops.collectives import one_shot_all_reduce, two_shot_all_reduce

RANKS, BF16 = 2, torch.bfloat16
OPERATORS = {"one_shot_all_reduce": one_shot_all_reduce, "two_shot_all_reduce_": two_shot_all_reduce}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Give torch kernels on CPU, and return the list of calls of these and of hostir. All tensors are symmetric."""
    calls: list[str] = []

    def one_shot(x: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        calls.append("torch")
        return torch.empty_like(x)

    def two_shot(x: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        calls.append("torch")
        return x

    def sum_up(x: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        calls.append("hostir")
        return torch.empty_like(x)

    torch_library = torch.library.Library("symm_mem", "IMPL")
    for (name, operator), kernel in zip(OPERATORS.items(), (one_shot, two_shot), strict=True):
        torch_library.impl(name, kernel, "CPU")
        monkeypatch.setattr(operator, "compute", sum_up)
    monkeypatch.setattr(collectives, "_is_symmetric", lambda x, group_name: True)
    monkeypatch.setattr(collectives, "_get_group_size_by_name", lambda name: RANKS)
    group = SimpleNamespace(name="0", remembered={}, remember=lambda *_: None)
    monkeypatch.setattr(library, "group_named", lambda name: group)
    yield calls
    hi.torch.uninstall()
    torch_library._destroy()


def reduce(name: str, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = getattr(torch.ops.symm_mem, name)(x, "sum", "0")
    assert (result is x) == (name == "two_shot_all_reduce_"), "only the two-shot all-reduce overwrites its operand"
    return result


def test_small_sums_run_in_hostir_and_large_ones_in_torch_without_a_warning(
    ran: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    for strict in (False, True):
        hi.torch.install(strict=strict)
        for name in OPERATORS:
            reduce(name, torch.empty(16, 8192, dtype=BF16))
        assert ran == ["hostir"] * 2
        reduce("two_shot_all_reduce_", torch.empty(4096, 8192, dtype=BF16))
        assert ran[2:] == ["torch"]
        ran.clear()
    assert not [w for w in recwarn if issubclass(w.category, hi.FallbackWarning)]
    assert "torch's kernel is expected to be faster on 2 ranks" in str(hi.torch.report(clear=True))


def test_a_strategy_of_the_caller_runs_sums_of_all_sizes(ran: list[str]) -> None:
    hi.torch.install(strategy="ring")
    reduce("two_shot_all_reduce_", torch.empty(4096, 8192, dtype=BF16))
    assert ran == ["hostir"]


@pytest.mark.parametrize("x", [torch.empty(3, dtype=BF16), torch.empty(4, dtype=torch.float64)])
def test_sums_that_low_latency_cannot_compute_run_in_torch(ran: list[str], x: torch.Tensor) -> None:
    hi.torch.install()
    for name in OPERATORS:
        getattr(torch.ops.symm_mem, name)(x, "sum", "0")
        assert ran.pop() == "torch", name


def test_torch_runs_tensors_outside_of_symmetric_memory_and_the_reason_is_said_once(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(collectives, "_is_symmetric", lambda x, group_name: False)
    hi.torch.install()
    x = torch.empty(7, 64, dtype=BF16)
    for _ in range(3):
        torch.ops.symm_mem.one_shot_all_reduce(x, "sum", "0")
    assert ran == ["torch"] * 3
    (said,) = [str(w.message) for w in recwarn if issubclass(w.category, hi.FallbackWarning)]
    assert "torch's own function runs symm_mem::one_shot_all_reduce: its input is not in symmetric memory" in said
    hi.torch.install(strict=True)
    with pytest.raises(hi.HostIRError, match="its input is not in symmetric memory"):
        torch.ops.symm_mem.one_shot_all_reduce(x, "sum", "0")


def test_implementations_run_torchs_kernel_before_during_and_after_an_installation(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = partial(SymmetricCollectives.operator, SimpleNamespace(), None)
    before = operator("two_shot_all_reduce_")
    with hi.torch.install():
        during = operator("two_shot_all_reduce_")
        for own in (before, during):
            own(torch.empty(8, dtype=BF16), "sum", "0")
    assert ran == ["torch", "torch"]
    dispatched: list[Any] = []
    monkeypatch.setattr(torch.ops.symm_mem.two_shot_all_reduce_, "default", lambda *args: dispatched.append(args))
    x = torch.empty(8)
    operator("two_shot_all_reduce_")(x, "sum", "0")
    assert dispatched == [(x, "sum", "0")]


@pytest.mark.parametrize("by", ["one_shot", "two_shot"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_of_a_few_rows_are_sooner_by_low_latency_and_the_limit_is_one_size(by: str, ranks: int) -> None:
    sooner = [is_sooner(by, 1 << n, ranks) for n in range(4, 30)]
    assert sooner[0]
    assert sooner == sorted(sooner, reverse=True)
    assert all(sooner) == (by == "one_shot")


def test_the_page_names_the_limits_of_the_two_shot_kernel() -> None:
    limits = [max(n for n in range(1024, 64 << 20, 1024) if is_sooner("two_shot", n, ranks)) for ranks in (2, 4, 8)]
    two, four, eight = (f"{limit / 1e6:.2f} MB" for limit in limits)
    page = " ".join((Path(__file__).parents[2] / "docs/torch.md").read_text().split())
    assert f"The two-shot kernel is replaced up to {two} on 2 ranks, {four} on 4, and {eight} on 8." in page


@pytest.mark.parametrize("name", OPERATORS)
def test_an_input_that_requires_gradients_gets_the_sum_without_them(ran: list[str], name: str) -> None:
    x = torch.ones(4, 8, dtype=BF16, requires_grad=True)
    with hi.torch.install():
        y = getattr(torch.ops.symm_mem, name)(x, "sum", "0")
    assert ran == ["hostir"]
    assert y.shape == x.shape
    assert name == "one_shot_all_reduce" or y is x
