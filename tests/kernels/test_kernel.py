"""Kernels that an operation of a plan calls again and again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from hostir.ir.types import DTYPES
from hostir.kernels import contractions
from hostir.kernels.repeats import MAX_REPEATS, repeating
from hostir.kernels.table import kernel_table
from hostir.machines import binding
from hostir.plan.operations import CALLER, ComputeOp, StatementPlace
from tests.call.small_programs import alone


class Adding:
    """A kernel that notes how it was called; it says what does the same again from its second call on."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, out: torch.Tensor, x: torch.Tensor | None, *, by: int) -> Callable[[], None] | None:
        self.log.append("looked")
        out.fill_(by)
        return partial(self.again, out.data_ptr()) if len(self.log) > 1 else None

    def again(self, address: int) -> None:
        self.log.append(f"again at {address}")


def test_what_a_kernel_says_does_the_same_again_is_all_that_is_called_at_the_same_addresses() -> None:
    kernel, out, x = Adding(), torch.zeros(4), torch.zeros(4)
    call = repeating(kernel, by=3)
    for _ in range(4):
        call(out, x)
    assert kernel.log == ["looked", "looked", *[f"again at {out.data_ptr()}"] * 2]
    assert out.tolist() == [3, 3, 3, 3]


def test_other_addresses_are_looked_at_anew_and_an_operand_that_is_missing_is_another() -> None:
    kernel, outs, x = Adding(), [torch.zeros(4), torch.zeros(4)], torch.zeros(4)
    call = repeating(kernel, by=1)
    call(outs[0], x)
    for out in outs:
        call(out, x)
    call(outs[0], None)
    assert kernel.log == ["looked"] * 4
    for out in reversed(outs):
        call(out, x)
    assert kernel.log[4:] == [f"again at {out.data_ptr()}" for out in reversed(outs)]


def test_no_tensor_is_held_and_not_all_addresses_are_kept() -> None:
    kernel, x = Adding(), torch.zeros(4)
    call = repeating(kernel, by=1)
    call(x, None)
    many = torch.zeros(MAX_REPEATS + 2, 4)
    for out in many:
        call(out, None)
    call(many[0], None)
    assert kernel.log == ["looked"] * (MAX_REPEATS + 4), "the first was forgotten"
    held = weakref.ref(many)
    del many, out
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("repeatable", [True, False])
def test_an_operation_keeps_what_its_kernel_returns_where_that_is_repeatable(
    repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Adding()
    monkeypatch.setattr(binding, "REPEATABLE", (kernel,) if repeatable else ())
    (*_, statement) = alone("%c: f32[4, 5] = allocate\n  matmul %a, %b -> %c").body
    op = ComputeOp(StatementPlace(statement, ()), CALLER, "matmul", DTYPES["f32"], 1, (2,), {"by": 3})
    step = binding.bind_compute(op, [None, torch.zeros(4), torch.zeros(4)], kernel)
    for _ in range(3):
        step()
    assert [what.split()[0] for what in kernel.log] == ["looked", "looked", "again" if repeatable else "looked"]


def test_contractions_and_sums_in_triton_are_repeatable_and_those_in_aten_are_not() -> None:
    triton, aten = kernel_table("triton", "cuda"), kernel_table("aten", "cuda")
    kinds = {"matmul", "linear", "scaled_matmul", "sum", "sum_by_blocks"}  # a sum is one by blocks, without flags
    assert {kind for kind, kernel in triton.items() if kernel in contractions.REPEATABLE} == kinds
    assert {kind for kind, kernel in aten.items() if kernel in contractions.REPEATABLE} <= {
        "scaled_matmul"
    }  # partly Triton's
