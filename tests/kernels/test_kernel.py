"""Repeated calls of a kernel by an operation of a plan."""

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
    """A kernel that records its calls. From its second call on, it returns a function that repeats the call."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, out: torch.Tensor, x: torch.Tensor | None, *, by: int) -> Callable[[], None] | None:
        self.log.append("looked")
        out.fill_(by)
        return partial(self.again, out.data_ptr()) if len(self.log) > 1 else None

    def again(self, address: int) -> None:
        self.log.append(f"again at {address}")


def test_at_known_addresses_only_the_function_that_repeats_the_call_is_called() -> None:
    kernel, out, x = Adding(), torch.zeros(4), torch.zeros(4)
    call = repeating(kernel, by=3)
    for _ in range(4):
        call(out, x)
    assert kernel.log == ["looked", "looked", *[f"again at {out.data_ptr()}"] * 2]
    assert out.tolist() == [3, 3, 3, 3]


def test_other_addresses_and_missing_operands_are_new_calls() -> None:
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


def test_tensors_are_not_kept_and_addresses_are_bounded() -> None:
    kernel, x = Adding(), torch.zeros(4)
    call = repeating(kernel, by=1)
    call(x, None)
    many = torch.zeros(MAX_REPEATS + 2, 4)
    for out in many:
        call(out, None)
    call(many[0], None)
    assert kernel.log == ["looked"] * (MAX_REPEATS + 4), "the first addresses were forgotten"
    held = weakref.ref(many)
    del many, out
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("repeatable", [True, False])
def test_an_operation_repeats_the_calls_of_repeatable_kernels(
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


def test_contractions_and_sums_are_repeatable_in_triton_but_not_in_aten() -> None:
    triton, aten = kernel_table("triton", "cuda"), kernel_table("aten", "cuda")
    kinds = {"matmul", "linear", "scaled_matmul", "sum", "sum_by_blocks"}  # the sum is the sum by blocks, without flags
    assert {name for name, kernel in triton.items() if kernel in contractions.REPEATABLE} == kinds
    assert {name for name, kernel in aten.items() if kernel in contractions.REPEATABLE} <= {
        "scaled_matmul"
    }  # some are in Triton
