"""Inputs that share memory with another input or within themselves are refused if the program writes one of them."""

from __future__ import annotations

import pytest
import torch

from hostir.call import arguments
from hostir.call import rank as executors
from hostir.call.executor import Executor, run
from hostir.call.tensors import share_memory
from hostir.ir.program import Program
from hostir.machines.cuda import machine as cuda
from tests.call.small_programs import alone, program, said
from tests.machines.cuda import fake_graphs
from tests.machines.cuda.simulated_gpus import Shared

TWO = "%a: f32[4, 8], %b: f32[4, 8]"
READS = "%c: f32[4, 8] = allocate\n  add %a, %b -> %c"
WRITES = f"relu %b -> %b\n  {READS}"
IN_A_LOOP = f"""for %i in 0..4 {{
    %b_i = select %b[%i]
    %row = reshape %b_i
    relu %row -> %row
  }}
  {READS}""".replace("%row = reshape", "%row: f32[1, 8] = reshape")


def writing(body: str = WRITES) -> Program:
    return alone(body, TWO)


@pytest.fixture(params=["local", "parts", "gloo", "cuda"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    fake_graphs.install(monkeypatch)
    return str(request.param)


def executor_of(p: Program, machine: str) -> Executor:
    return fake_graphs.executor(p) if machine == "cuda" else Executor(p, machine=machine.replace("parts", "local"))


def call(executor: Executor, machine: str, *inputs: torch.Tensor) -> torch.Tensor:
    """Call an executor of one rank, and return its only output."""
    (c,) = executor(*[[x] for x in inputs] if machine == "parts" else inputs)
    return c[0] if isinstance(c, list) else c


@pytest.mark.parametrize("body", [WRITES, IN_A_LOOP])
def test_inputs_that_share_memory_are_refused_if_the_program_writes_one(body: str, machine: str) -> None:
    executor = executor_of(writing(body), machine)
    memory = torch.randn(4, 4, 8)
    flat = memory.view(-1)
    shared = r"input %b, which @p writes, shares memory with input %a"
    for a, b in [
        (memory[0], memory[0]),
        (memory[0], flat[31:63].view(4, 8)),
        (memory[2], flat[33:65].view(4, 8)),
    ]:
        before = memory.clone()
        for _ in range(2):
            assert shared in (text := said(lambda a=a, b=b: call(executor, machine, a, b)))
            assert "pass a.clone()" in text
        assert torch.equal(memory, before), "a refused call writes nothing"
        call(executor, machine, memory[1], memory[3].clone())
        call(executor, machine, memory[0], memory[1].clone())


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (4, 1), (8, 0)])
def test_an_input_whose_elements_share_memory_is_refused_if_the_program_writes_it(
    strides: tuple[int, int], machine: str
) -> None:
    a, memory = torch.randn(4, 8), torch.randn(64)
    b = memory.as_strided((4, 8), strides)
    text = said(lambda: call(executor_of(writing(), machine), machine, a, b))
    assert "elements of input %b, which @p writes, share memory" in text
    call(executor_of(writing(READS), machine), machine, a, b)


@pytest.mark.parametrize("strides", [(8, 1), (1, 4), (16, 2), (1, 5)])
def test_an_input_that_the_program_writes_need_not_be_dense(strides: tuple[int, int], machine: str) -> None:
    a, b = torch.randn(4, 8), torch.randn(64).as_strided((4, 8), strides)
    expected = a + b.relu()
    assert torch.equal(call(executor_of(writing(), machine), machine, a, b), expected)


def test_inputs_are_checked_again_at_new_addresses(machine: str) -> None:
    executor = executor_of(writing(), machine)
    memory = torch.randn(3, 4, 8)
    for _ in range(3):
        expected = memory[0] + memory[1].relu()
        assert torch.equal(call(executor, machine, memory[0], memory[1]), expected)
        assert "shares memory" in said(lambda: call(executor, machine, memory[2], memory[2]))


def test_a_program_that_writes_no_input_takes_one_tensor_twice_without_a_check(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(*_: object) -> bool:
        raise AssertionError("inputs are compared although the program writes no input")

    monkeypatch.setattr(arguments, "share_memory", checks)
    monkeypatch.setattr(executors, "addresses", checks)
    executor = executor_of(writing(READS), machine)
    x = torch.randn(4, 8)
    for _ in range(2):
        assert torch.equal(call(executor, machine, x, x), x + x)


def test_run_refuses_unsharded_tensors_that_share_memory() -> None:
    x = torch.randn(4, 8)
    for machine in ("local", "gloo"):
        text = said(lambda machine=machine: run(writing(), x, x[:], machine=machine))
        assert "input %b, which @p writes, shares memory with input %a" in text


def test_simulated_ranks_may_share_one_tensor() -> None:
    p = program("relu %b -> %b\n  %c: f32[2@didx, 8] = allocate\n  add %a, %b -> %c", "%a: f32[2@didx, 8], %b: f32[8]")
    a, b = torch.randn(1, 8), torch.randn(8)
    (c,) = Executor(p, machine="local")([a, a], [b, b])
    assert torch.equal(c[0], a + b.relu())
    assert torch.equal(c[1], a + b.relu())
    assert "shares memory with input %a" in said(lambda: Executor(p, machine="local")([a, a], [b, a[0]]))


@pytest.mark.parametrize(
    ("x", "y", "shared"),
    [
        (lambda m: m[:, :4], lambda m: m[:, 4:], False),
        (lambda m: m[:, :5], lambda m: m[:, 4:], True),
        (lambda m: m[:, ::2], lambda m: m[:, 1::2], False),
        (lambda m: m[:, ::2], lambda m: m[:, 1::3], True),
        (lambda m: m[1:, 3].expand(8, -1), lambda m: m[:, 4:], False),
        (lambda m: m[1, 4].expand(8, 8), lambda m: m[:, 4:], True),
        (lambda m: m[:0], lambda m: m, False),
        (lambda m: m[0, 0].view(torch.int32), lambda m: m[:, 0], True),
        (lambda m: m.view(torch.int16)[:, 1], lambda m: m.view(torch.int16)[:, ::2], False),
    ],
)
def test_only_tensors_with_a_common_byte_share_memory(x: object, y: object, shared: bool) -> None:
    memory = torch.zeros(4, 8)
    assert callable(x)
    assert callable(y)
    assert share_memory(x(memory), y(memory)) is shared
    assert share_memory(y(memory), x(memory)) is shared


BOXED = """%box: f32[4, 4] = allocate_symmetric
  %c: f32[4, 4] = allocate
  put %a -> %box at 0 over didx
  copy %box -> %c"""


@pytest.mark.parametrize("machine", ["gloo", "cuda"], indirect=True)
def test_an_input_in_its_symmetric_buffer_is_copied_if_its_strides_differ(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PeerMemory", lambda device, rank, group: Shared(rank, {}))
    executor = executor_of(alone(BOXED, "%a: f32[4, 4]"), machine)
    (home,) = executor.places(torch.empty(4, 4))
    for turn in (lambda x: x, torch.t, lambda x: x, torch.t):
        x = torch.randn(4, 4)
        home.copy_(x)
        assert torch.equal(call(executor, machine, turn(home)), turn(x))


def test_simulated_ranks_refuse_inputs_of_places_as_those_of_a_call() -> None:
    executor = Executor(alone(BOXED, "%a: f32[4, 4]"), machine="local")
    assert executor.places(torch.zeros(4, 4)) == (None,)
    for wrong in (
        (),
        (torch.zeros(4, 4), torch.zeros(4, 4)),
        (torch.zeros(3, 4),),
        (torch.zeros(4, 4).double(),),
        ("x",),
    ):
        refusals = [said(lambda call=call, wrong=wrong: call(*wrong)) for call in (executor.places, executor)]
        assert refusals[0] == refusals[1]
