"""Tensors that a call accepts and refuses, and calls in torch's inference mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parameter import UninitializedParameter

from hostir.call.executor import Executor
from tests.call.small_programs import BESIDE, alone, said

KEEPING = """%box: f32[4, 8] = allocate_symmetric
  %t: f32[4, 5] = allocate
  %c: f32[4, 5] = allocate
  copy %a -> %box
  matmul %box, %b -> %t
  relu %t -> %c"""


class Wrapper(torch.Tensor):
    """A tensor subclass that wraps another tensor, as DTensor does. It has no memory."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)

    def to_local(self) -> torch.Tensor:
        raise AssertionError("to_local was called")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} of a wrapper")


@pytest.fixture
def executor() -> Executor:
    return Executor(alone(KEEPING), machine="gloo")


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.randn(8, 5)


ODD: list[tuple[Callable[[], object], str, str]] = [
    (lambda: Wrapper(torch.randn(4, 8)), "is a Wrapper", "hint: pass what this rank has of it, .to_local()"),
    (lambda: torch.randn(4, 8).to_sparse(), "is of layout torch.sparse_coo", "hint: pass it .to_dense()"),
    (lambda: torch.randn(4, 8).to_sparse_csr(), "is of layout torch.sparse_csr", "hint: pass it .to_dense()"),
    (lambda: torch.nested.nested_tensor([torch.randn(4, 8)]), "is a nested tensor", "hint: pass a plain one"),
    (lambda: torch.randn(4, 8, dtype=torch.complex64).conj().imag, "is a view that negates", "pass it .resolve_neg()"),
    (lambda: torch._efficientzerotensor((4, 8)), "is zeros without memory", "hint: pass its .clone()"),
    (
        lambda: UninitializedParameter(requires_grad=False),
        "is a parameter without a shape",
        "hint: initialize it first",
    ),
    (lambda: torch.Tensor, "is <class 'torch.Tensor'>", "expected: a tensor f32[4, 8]"),
    (
        lambda: np.zeros((4, 8), np.float32),
        "is a numpy.ndarray of shape [4, 8], float32",
        "expected: a tensor f32[4, 8]",
    ),
    (lambda: "ones", "is 'ones'", "expected: a tensor f32[4, 8]"),
]


@pytest.mark.parametrize("machine", ["local", "gloo"])
@pytest.mark.parametrize(("make", "what", "to_do"), ODD)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
def test_inputs_without_plain_memory_are_refused_with_their_class_and_a_hint(
    machine: str, make: Callable[[], object], what: str, to_do: str
) -> None:
    executor, (a, b) = Executor(alone(BESIDE), machine=machine), numbers()
    parts = [a], [b]
    executor(*parts if machine == "local" else (a, b))  # a call with good inputs does not turn off the check
    odd = make()
    message = said(lambda: executor(*([odd], [b]) if machine == "local" else (odd, b)))
    assert f"input %a of rank 0 {what}" in message
    assert to_do in message


@pytest.mark.parametrize(("make", "what", "to_do"), ODD)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
def test_outputs_without_plain_memory_are_refused_with_their_class_and_a_hint(
    make: Callable[[], object], what: str, to_do: str
) -> None:
    executor, (a, b) = Executor(alone(BESIDE), machine="gloo"), numbers()
    executor(a, b, out=[torch.empty(4, 5)])
    odd = make()
    message = said(lambda: executor(a, b, out=[odd]))
    assert f"out= for %c of rank 0 {what}" in message
    assert to_do.replace("[4, 8]", "[4, 5]") in message


@pytest.mark.parametrize("machine", ["local", "gloo"])
def test_tensors_of_torch_func_are_refused_after_plain_tensors_of_the_same_shape(machine: str) -> None:
    executor, (a, b) = Executor(alone(BESIDE), machine=machine), numbers()

    def call(x: torch.Tensor) -> torch.Tensor:
        (c,) = executor(*([x], [b]) if machine == "local" else (x, b))
        return c[0] if machine == "local" else c

    call(a)
    message = said(lambda: torch.vmap(call)(torch.stack([a, a])))
    assert "input %a of rank 0 is a tensor of torch.func" in message
    assert "hint: call outside torch.vmap and its like" in message


def test_plain_tensors_of_any_shape_run_within_torch_func() -> None:
    executor = Executor(
        alone("%c: f32[M, 5] = allocate\n  matmul %a, %b -> %c", "%a: f32[M, 8], %b: f32[8, 5]"), machine="gloo"
    )
    b, results = torch.randn(8, 5), []

    def calls(batched: torch.Tensor) -> torch.Tensor:
        for rows in (4, 6, 4, 6):
            a = torch.arange(rows * 8).reshape(rows, 8) / 8
            results.append((executor(a, b)[0], a @ b))
        return batched

    torch.vmap(calls)(torch.zeros(2))
    assert len(executor.plans) == 2
    for c, exact in results:
        torch.testing.assert_close(c, exact)


def test_parameters_are_accepted_under_no_grad() -> None:
    executor, (a, b) = Executor(alone(BESIDE), machine="gloo"), numbers()
    executor(a, b)
    with torch.no_grad():
        (c,) = executor(a, torch.nn.Parameter(b))
    assert torch.equal(c, executor(a, b)[0])
    assert len(executor.plans) == 1


@pytest.mark.parametrize("body", [BESIDE, KEEPING])
@pytest.mark.parametrize("first", [True, False])
def test_calls_alternate_between_inference_mode_and_normal_mode(body: str, first: bool) -> None:
    executor = Executor(alone(body), machine="gloo")
    for inference in (first, not first, first):
        with torch.inference_mode(inference), torch.no_grad():
            a, b = numbers()
            (c,) = executor(a, b)
            torch.testing.assert_close(c, (a @ b).relu())
        assert c.is_inference() is inference


def test_an_output_made_in_inference_mode_is_refused_in_other_calls() -> None:
    executor = Executor(alone(KEEPING), machine="gloo")
    with torch.inference_mode():
        c = torch.empty(4, 5)
    a, b = numbers()
    for _ in range(2):
        with torch.inference_mode():
            executor(a, b, out=c)
            torch.testing.assert_close(c, (a @ b).relu())
        message = said(lambda: executor(a, b, out=c))
        assert "out= for %c of rank 0 was made in inference mode" in message
        assert "hint: call under torch.inference_mode(), or allocate the tensor outside it" in message


def test_an_output_made_in_inference_mode_is_refused_at_the_address_of_a_plain_one(executor: Executor) -> None:
    a, b = numbers()
    memory = np.zeros((4, 5), np.float32)
    executor(a, b, out=torch.from_numpy(memory))
    with torch.inference_mode():
        c = torch.from_numpy(memory)
    assert "was made in inference mode" in said(lambda: executor(a, b, out=c))
    executor(a, b, out=torch.from_numpy(memory))
