"""Executors prove the sizes that they run, when they make a plan. One proof may cover many sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hostir as hi
from hostir.call.executor import Executor, run
from hostir.check import forget
from hostir.check import proof as orders
from hostir.ir.program import Program
from tests.call.small_programs import alone, program, said
from tests.machines.cuda import fake_graphs

TURNS = """%user = current_stream
  %y: f32[N, 8] = allocate
  %t: f32[5, 8] = allocate
  for %s in 0..2 { set_stream %s  synchronize %user }
  for %i in 0..N {
    set_stream %i % 2
    %x_i = select %x[%i]
    %t_i = select %t[%i % 5]
    %y_i = select %y[%i]
    relu %x_i -> %t_i
    gelu %t_i -> %y_i
  }
  set_stream %user
  for %s in 0..2 { synchronize %s }
  free %t"""
LONG = "%y: f32[8] = allocate\n  for %i in 0..200000 { relu %x -> %y }"


def in_turns() -> Program:
    """Return a program with a buffer of five slots on two streams: five rounds are correct, six have a race."""
    return alone(TURNS, "%x: f32[N, 8]", "%y")


@pytest.fixture(params=["local", "parts", "gloo", "cuda"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    fake_graphs.install(monkeypatch)
    return str(request.param)


def executor_of(p: Program, machine: str, **options: Any) -> Executor:
    if machine == "cuda":
        return fake_graphs.executor(p, **options)
    return Executor(p, machine=machine.replace("parts", "local"), **options)


def call(executor: Executor, machine: str, x: torch.Tensor) -> torch.Tensor:
    (y,) = executor([x] if machine == "parts" else x)
    return y[0] if isinstance(y, list) else y


def test_the_sizes_of_each_call_are_proved(machine: str) -> None:
    executor = executor_of(in_turns(), machine)
    for n in (5, 6, 3, 7, 5, 6):
        x = torch.randn(n, 8)
        if n <= 5:
            torch.testing.assert_close(call(executor, machine, x), torch.nn.functional.gelu(x.relu()))
        else:
            assert "race on %t" in said(lambda x=x: call(executor, machine, x))


def test_run_proves_the_sizes_of_unsharded_tensors() -> None:
    for machine in ("local", "gloo"):
        (y,) = hi.run(in_turns(), x := torch.randn(5, 8), machine=machine)
        torch.testing.assert_close(y, torch.nn.functional.gelu(x.relu()))
        assert "race on %t" in said(lambda machine=machine: run(in_turns(), torch.randn(6, 8), machine=machine))


def test_known_sizes_are_proved_when_the_executor_is_made() -> None:
    assert Executor(in_turns(), sizes={"N": 5})
    assert "race on %t" in said(lambda: Executor(in_turns(), sizes={"N": 6}))
    assert "race on %t" in said(lambda: Executor(hi.parse(str(in_turns()).replace("N,", "6,").replace("..N", "..6"))))


def test_without_a_check_all_sizes_run(machine: str) -> None:
    executor = executor_of(in_turns(), machine, check=False)
    assert call(executor, machine, torch.randn(6, 8)).shape == (6, 8)


def test_a_program_that_is_too_long_to_check_is_refused_with_a_hint() -> None:
    for call_it in (
        lambda: Executor(alone(LONG, "%x: f32[8]", "%y")),
        lambda: hi.run(alone(LONG, "%x: f32[8]", "%y"), torch.randn(8)),
        lambda: Executor(alone(LONG.replace("200000", "N"), "%x: f32[8], %n: f32[N]", "%y"), machine="gloo")(
            torch.randn(8), torch.randn(200000)
        ),
    ):
        text = said(call_it)
        assert "@p was not checked for races" in text
        assert "check=False, --no-check" in text


def test_one_proof_serves_all_sizes_that_it_covers(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[Any] = []
    analyse = orders.analyse
    monkeypatch.setattr(orders, "analyse", lambda *args: analysed.append(args) or analyse(*args))
    forget()  # the proofs of earlier tests
    body = "%c: f32[M, 5] = allocate\n  matmul %a, %b -> %c"
    executor = executor_of(alone(body, "%a: f32[M, 11], %b: f32[11, 5]"), machine)
    for m in (3, 4, 64, 1, 3):
        a, b = torch.randn(m, 11), torch.randn(11, 5)
        (c,) = executor([a], [b]) if machine == "parts" else executor(a, b)
        torch.testing.assert_close(c[0] if isinstance(c, list) else c, a @ b, atol=1e-4, rtol=1e-4)
    assert len(analysed) == 1


def test_inputs_of_different_ranks_bind_the_sizes_together() -> None:
    body = "%c: f32[2@didx, M] = allocate\n  for %i in 0..N { relu %a -> %c }"
    p = program(body, "%a: f32[2@didx, M], %n: f32[N]")
    parts = [torch.randn(1, 3), torch.randn(1, 3)]
    (c,) = Executor(p, machine="local")(parts, [torch.randn(2), torch.randn(2)])
    assert torch.equal(c[1], parts[1].relu())
