"""Calls with `out=`: results are written into the caller's tensors. Tensors that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hostir.call.executor import Executor
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.plan.lifetimes import homes
from hostir.plan.operations import NONE
from hostir.plan.unroll import unroll
from tests.call.small_programs import FORK, JOIN, alone, pipeline, program, said

MACHINES = pytest.mark.parametrize("machine", ["local", "gloo"])
PRODUCT = "%c: f32[4, 5] = allocate\n  matmul %a, %b -> %c"
A, B = "%a: f32[4, 8]", "%a: f32[4, 8], %b: f32[8, 5]"


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def call(executor: Executor, inputs: Sequence[torch.Tensor], out: Sequence[Any]) -> list[torch.Tensor]:
    """Call an executor of one rank. The local machine takes lists of parts."""
    if executor.machine == "local":
        return [parts[0] for parts in executor(*[[x] for x in inputs], out=[[x] for x in out])]
    return list(executor(*inputs, out=list(out)))


@MACHINES
def test_an_output_is_written_into_the_callers_tensor(machine: str) -> None:
    executor = Executor(alone(PRODUCT), machine=machine)
    memory = poisoned(3, 4, 5)
    for i in (0, 2, 0, 1):
        a, b = torch.randn(4, 8), torch.randn(8, 5)
        memory[i].fill_(float("nan"))
        (c,) = call(executor, (a, b), [memory[i]])
        assert c.data_ptr() == memory[i].data_ptr()
        assert torch.allclose(memory[i], a @ b, atol=1e-5)
    (fresh,) = executor(a, b) if machine == "gloo" else executor([a], [b])[0]
    assert torch.allclose(fresh, a @ b, atol=1e-5)
    assert not memory.data_ptr() <= fresh.data_ptr() < memory.data_ptr() + memory.nbytes


@pytest.mark.parametrize("form", [lambda c: c, lambda c: [c], lambda c: (c,)], ids=["tensor", "list", "tuple"])
def test_out_may_be_a_tensor_or_a_sequence_of_one_tensor(form: Callable[[torch.Tensor], Any]) -> None:
    a, b, c = torch.randn(4, 8), torch.randn(8, 5), poisoned(4, 5)
    (output,) = Executor(alone(PRODUCT), machine="gloo")(a, b, out=form(c))
    assert output is c
    assert torch.allclose(c, a @ b, atol=1e-5)


def test_the_kernel_writes_into_the_callers_tensor_without_a_copy() -> None:
    executor = Executor(alone(PRODUCT), machine="gloo")
    kernel, written = executor._machine.kernels["matmul"], []

    def look(out: torch.Tensor, *operands: torch.Tensor) -> None:
        written.append(out.data_ptr())
        kernel(out, *operands)

    executor._machine.kernels = {**executor._machine.kernels, "matmul": look}
    c = poisoned(4, 5)
    executor(torch.randn(4, 8), torch.randn(8, 5), out=c)
    executor(torch.randn(4, 8), torch.randn(8, 5))
    assert written[0] == c.data_ptr()
    assert written[1] != c.data_ptr()


@MACHINES
@pytest.mark.parametrize(
    ("body", "outputs", "exact"),
    [
        ("%c: f32[4, 8] = allocate\n  relu %a -> %c\n  %r = select %c[1]", "%r", lambda a: [a[1].relu()]),
        ("%c: f32[4, 8] = allocate\n  relu %a -> %c\n  %r = select %c[1]", "%r, %c", lambda a: [a[1].relu(), a.relu()]),
        ("%c: f32[4, 8] = allocate\n  relu %a -> %c", "%c, %c", lambda a: [a.relu(), a.relu()]),
        ("", "%a", lambda a: [a]),
        ("%c: f32[4, 8] = allocate_symmetric\n  relu %a -> %c", "%c", lambda a: [a.relu()]),
        ("%c: f32[4, 8] = allocate\n  relu %a -> %c\n  %t = permute %c (1, 0)", "%t", lambda a: [a.relu().T]),
    ],
    ids=["view", "view and whole", "twice", "input", "symmetric", "transposed"],
)
def test_views_inputs_and_symmetric_buffers_are_copied_into_the_callers_tensors(
    machine: str, body: str, outputs: str, exact: Callable[[torch.Tensor], list[torch.Tensor]]
) -> None:
    executor = Executor(alone(body, A, outputs), machine=machine)
    for _ in range(2):
        a = torch.randn(4, 8)
        expected = exact(a)
        out = [poisoned(*x.shape) for x in expected]
        results = call(executor, [a], out)
        assert all(x is y for x, y in zip(results, out, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(out, expected, strict=True))


def test_parts_of_several_ranks_go_into_lists_of_parts() -> None:
    p = pipeline(2)
    parts = [
        [shard(x, v.tensor, rank, {}) for rank in range(2)] for x, v in zip(random_inputs(p, {}), p.inputs, strict=True)
    ]
    plain = Executor(p)(*parts)[0]
    out = [poisoned(4, 2, 3, 5) for _ in range(2)]
    (output,) = Executor(p, seed=3)(*parts, out=out)
    assert all(x is y and torch.equal(x, z) for x, y, z in zip(output, out, plain, strict=True))


def test_a_rank_without_a_part_passes_none() -> None:
    p = parse("""hostir 1
mesh @left [x] = 0 1
mesh @right [y] = 1
program @p(%a: f32[8@x, 4]) -> (%c) {
  %c: f32[8, 4] on @right = allocate
  %h = gather %a -> %c
  wait %h
}
""")
    a, c = torch.randn(8, 4), poisoned(8, 4)
    parts = [a[:4].clone(), a[4:].clone()]
    (output,) = Executor(p)(parts, out=[None, c])
    assert output[0] is None
    assert output[1] is c
    assert torch.equal(c, a)
    assert "out= for %c on rank 0, which holds no part of it" in said(lambda: Executor(p)(parts, out=[c.clone(), c]))
    assert "out= for %c of rank 1 is None" in said(lambda: Executor(p)(parts, out=[None, None]))


def written_directly(p: Program, *inputs: torch.Tensor) -> list[bool]:
    """Return for each output True if the program writes it into the caller's tensor without a copy."""
    return [home != NONE for home in homes(unroll(p, 0, {}, inputs))]


@pytest.mark.parametrize(
    ("body", "outputs", "expected"),
    [
        ("%c: f32[4, 8] = allocate\n  relu %a -> %c", "%c", [True]),
        ("%c: f32[4, 8] = allocate\n  relu %a -> %c", "%c, %c", [True, False]),
        ("%c: f32[4, 8] = allocate\n  relu %a -> %c\n  %r = select %c[1]", "%r, %c", [False, True]),
        ("", "%a", [False]),
        (f"{FORK}\n  set_stream 1\n  %c: f32[4, 8] = allocate\n  relu %a -> %c\n  {JOIN}", "%c", [True]),
        ("%user = current_stream\n  set_stream 0\n  %c: f32[4, 8] = allocate\n  relu %a -> %c\n  set_stream %user\n"
         "  synchronize 0", "%c", [False]),
        ("%user = current_stream\n  set_stream 1\n  synchronize %user\n  set_stream 0\n  synchronize 1\n"
         "  %c: f32[4, 8] = allocate\n  relu %a -> %c\n  set_stream %user\n  synchronize 0", "%c", [True]),
    ],
    ids=["whole", "twice", "view", "input", "forked", "not after the caller", "after the caller by another stream"],
)  # fmt: skip
def test_outputs_need_no_copy_if_whole_buffers_are_first_used_after_the_callers_earlier_work(
    body: str, outputs: str, expected: list[bool]
) -> None:
    assert written_directly(alone(body, A, outputs), torch.randn(4, 8)) == expected


def test_a_stream_that_waits_for_a_communication_of_the_callers_stream_is_ordered_after_the_caller() -> None:
    body = """%user = current_stream
  %g: f32[4, 4] = allocate
  %h = allgather %a -> %g over didx
  set_stream 0
  wait %h
  %c: f32[4, 4] = allocate
  relu %g -> %c
  set_stream %user
  synchronize 0
  free %g"""
    assert written_directly(program(body, "%a: f32[4@didx, 4]"), torch.randn(2, 4)) == [True]


def out_argument(machine: str, out: Any) -> Any:
    return [[x] for x in out] if machine == "local" and isinstance(out, list) else out


@MACHINES
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([torch.empty(4, 5), torch.empty(4, 5)], "out= of @p has 2 tensors"),
        ([torch.empty(5, 4)], "out= for %c of rank 0 has shape [5, 4]"),
        ([torch.empty(4, 5, dtype=torch.float64)], "has dtype torch.float64"),
        ([torch.empty(5, 4).T], "has strides [1, 4]"),
        ([torch.empty(4, 5, requires_grad=True)], "requires gradients"),
        ([torch.empty(4, 5, device="meta")], "is on meta"),
        ([None], "out= for %c of rank 0 is None"),
        ([3.0], "out= for %c of rank 0 is 3.0"),
        (3.0, "out= is 3.0"),
    ],
)
def test_out_that_does_not_fit_is_refused_in_every_call(machine: str, out: Any, message: str) -> None:
    executor = Executor(alone(PRODUCT), machine=machine)
    a, b, c = torch.randn(4, 8), torch.randn(8, 5), poisoned(4, 5)
    inputs = ([a], [b]) if machine == "local" else (a, b)
    assert message in said(lambda: executor(*inputs, out=out_argument(machine, out)))
    call(executor, (a, b), [c])
    assert torch.allclose(c, a @ b, atol=1e-5)
    for _ in range(2):
        assert message in said(lambda: executor(*inputs, out=out_argument(machine, out)))


@MACHINES
def test_a_tensor_that_requires_gradients_is_written_under_no_grad(machine: str) -> None:
    a, b, c = torch.randn(4, 8), torch.randn(8, 5), torch.empty(4, 5, requires_grad=True)
    with torch.no_grad():
        call(Executor(alone(PRODUCT), machine=machine), (a, b), [c])
    assert torch.allclose(c, a @ b, atol=1e-5)


@MACHINES
def test_out_that_shares_memory_with_an_input_or_another_output_is_refused_in_every_call(machine: str) -> None:
    body = "%c: f32[4, 8] = allocate\n  relu %a -> %c\n  %d: f32[4, 8] = allocate\n  gelu %a -> %d"
    executor = Executor(alone(body, A, "%c, %d"), machine=machine)
    memory = torch.randn(4, 4, 8)
    a = memory[0].clone()
    call(executor, [memory[0]], [memory[1], memory[2]])
    assert torch.equal(memory[1], a.relu())
    flat, before = memory.view(-1), memory.clone()
    for out, message in [
        ([memory[1], memory[0]], "out= for %d shares memory with input %a"),
        ([memory[1], flat[33:65].view(4, 8)], "out= for %d shares memory with out= for %c"),
        ([flat[31:63].view(4, 8), memory[2]], "out= for %c shares memory with input %a"),
    ]:
        assert message in said(lambda out=out: call(executor, [memory[0]], out))
        assert torch.equal(memory, before), "a refused call writes nothing"
    call(executor, [memory[0]], [flat[32:64].view(4, 8), memory[2]])
    assert torch.equal(memory[1], a.relu())


def test_a_failed_call_does_not_leave_its_out_to_the_next_call() -> None:
    executor = Executor(alone(PRODUCT), machine="gloo")
    kernel, fails = executor._machine.kernels["matmul"], [True]

    def sometimes(out: torch.Tensor, *operands: torch.Tensor) -> None:
        if fails.pop():
            raise ValueError("not now")
        kernel(out, *operands)

    executor._machine.kernels = {**executor._machine.kernels, "matmul": sometimes}
    a, b, c = torch.randn(4, 8), torch.randn(8, 5), poisoned(4, 5)
    assert "not now" in said(lambda: executor(a, b, out=c))
    fails.append(False)
    (fresh,) = executor(a, b)
    assert torch.allclose(fresh, a @ b, atol=1e-5)
    assert c.isnan().all()


def test_the_local_machine_expects_a_part_for_each_rank() -> None:
    p = pipeline(2)
    a, b = random_inputs(p, {})
    problem = said(lambda: Executor(p)(a, b, out=torch.empty(4, 2, 3, 5)))
    assert "out= of @p does not hold lists of parts" in problem
    assert "expected: 2 for each output" in problem
