"""Calls that follow each other at once, and programs that are planned once and run under many seeds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hostir.call.local import rehearse, run_calls, run_local
from hostir.call.random import random_inputs
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.machines.simulated.machine import Parts
from tests.call.programs import AG_MATMUL
from tests.call.small_programs import said

SEEDS = range(60)


def program(body: str, head: str = "%x: f32[4@didx, 3]) -> (%y)") -> Program:
    text = f"hostir 1\nmesh @mesh [didx] = 0 1\nprogram @p({head} streams 2 {{\n{body}\n}}\n"
    return parse(text, "p.hir")


def calls_of(p: Program, count: int = 2) -> list[list[torch.Tensor]]:
    return [random_inputs(p, dict.fromkeys(p.size_names, 3), seed=call) for call in range(count)]


def bits(calls: Sequence[Sequence[Parts]]) -> list[list[int]]:
    return [part.view(torch.int32).flatten().tolist() for call in calls for output in call for part in output]


def test_each_call_gives_the_same_result_as_alone() -> None:
    p = parse(AG_MATMUL)
    calls = calls_of(p, 3)
    for seed in range(20):
        together = run_calls(p, calls, seed=seed, watch=seed < 3)
        assert bits(together) == bits([run_local(p, inputs) for inputs in calls])


def test_a_machine_runs_again_and_again_as_if_for_the_first_time() -> None:
    p = parse(AG_MATMUL.replace("    wait %h\n", "").replace("  free %a_full\n", ""))
    calls = calls_of(p)
    machine = rehearse(p, calls)
    fresh = {seed: bits(run_calls(p, calls, seed=seed)) for seed in range(12)}
    assert len({str(outputs) for outputs in fresh.values()}) > 2, "the orders show"
    assert all(bits(machine.run(seed)) == fresh[seed] for seed in (*fresh, *reversed(fresh)))


def test_a_machine_runs_again_after_an_error() -> None:
    p = program("  %y: f32[4@didx, 3] = allocate\n  relu %x -> %y\n  free %x\n", "%x: f32[4@didx, 3]) -> (%y)")
    machine = rehearse(p, calls_of(p, 1))
    assert said(machine.run) == said(machine.run)


LEFT = """  %user = current_stream
  %z: f32[4@didx, 3] = allocate
  set_stream 0
  synchronize %user
  relu %x -> %z
  set_stream %user
"""


def test_a_worker_that_nobody_joins_reads_the_next_calls_inputs() -> None:
    body = LEFT.replace("%z: f32[4@didx, 3] = allocate", "%z: f32[4@didx, 3] = allocate_symmetric")
    p = program(f"  %y: f32[4@didx, 3] = allocate\n{body}  synchronize 1\n  relu %x -> %y")
    machine = rehearse(p, calls_of(p))
    relu = "'relu %x -> %z' of call 1 on stream 0"
    for seed in (0, 1, 2):
        with pytest.raises(
            HostIRError, match=rf"(?s)race: (?=.*{relu})(?=.*caller of call 1, after the call|.*caller of call 2)"
        ):
            machine.run(seed, watch=True)


def test_the_caller_overwrites_inputs_and_outputs_once_its_stream_is_done() -> None:
    p = program(f"  %y: f32[4@didx, 3] = allocate\n{LEFT}  set_stream 0\n  copy %z -> %y\n  set_stream %user")
    machine = rehearse(p, calls_of(p))
    results = [torch.cat([part for call in machine.run(seed) for part in call[0]]) for seed in SEEDS]
    assert any(x.isnan().any() for x in results)


def test_streams_keep_their_order_from_call_to_call() -> None:
    """A worker's tasks of one call precede its tasks of the next call."""
    body = """  %user = current_stream
  %z: f32[4@didx, 3] = allocate_symmetric
  set_stream 0
  %y: f32[4@didx, 3] = allocate
  copy %z -> %y
  set_stream %user
  synchronize 0
  set_stream 0
  synchronize %user
  copy %x -> %z
  set_stream %user
  synchronize 0"""
    p = program(body)
    calls = calls_of(p, 3)
    machine = rehearse(p, calls)
    for seed in SEEDS:
        (first,), (second,), (third,) = machine.run(seed)
        assert torch.cat(first).isnan().all(), "what is symmetric begins as NaN, in every run"
        assert torch.equal(torch.cat(second), calls[0][0])
        assert torch.equal(torch.cat(third), calls[1][0])
    assert "reads what nobody wrote: %z of rank" in said(lambda: machine.run(watch=True))


def test_an_epoch_of_an_earlier_call_ends_no_wait() -> None:
    """If a high epoch of the call before ended a wait, the rank would read that call's data."""
    body = """  %me = rank of %x over didx
  %box: f32[2, 3] = allocate_symmetric
  %f: flag[1] = allocate_symmetric
  %y: f32[4@didx, 3] = allocate
  put %x -> %box at 1 - %me over didx
  signal %f[0] = 3 at 1 - %me over didx
  wait_signal %f[0] >= 1
  copy %box -> %y
  barrier of %x over didx"""
    p = program(body)
    calls = calls_of(p, 3)
    machine = rehearse(p, calls)
    for seed in SEEDS:
        for (y,), (x,) in zip(machine.run(seed, watch=seed < 3), calls, strict=True):
            assert torch.equal(torch.cat([y[1], y[0]]), x)
    short = program(body.replace("= 3", "= 1").replace(">= 1", ">= 2"))
    with pytest.raises(
        HostIRError, match=r"(?s)deadlock.*'wait_signal .*of call 1: no signal sets flag \S+ to epoch 2"
    ):
        run_calls(short, calls)


def test_the_next_call_overwrites_memory_that_a_peer_still_reads() -> None:
    body = """  %me = rank of %x over didx
  %box: f32[2, 3] = allocate_symmetric
  %f: flag[1] = allocate_symmetric
  %y: f32[4@didx, 3] = allocate
  put %x -> %box at 1 - %me over didx
  signal %f[0] = 1 at 1 - %me over didx
  wait_signal %f[0] >= 1
  copy %box -> %y"""
    p = program(body)
    calls = calls_of(p)
    machine = rehearse(p, calls)
    assert len({str(bits(machine.run(seed))) for seed in SEEDS}) > 1
    notes = r"note: rank ., 'copy %box -> %y' of call 1 .* reads.*note: rank ., 'put .* of call 2 .* writes"
    with pytest.raises(HostIRError, match=rf"(?s)race: .*%box of rank ..*{notes}"):
        machine.run(0, watch=True)
    closed = rehearse(program(f"{body}\n  barrier of %x over didx"), calls)
    assert len({str(bits(closed.run(seed, watch=seed < 3))) for seed in SEEDS}) == 1


def test_calls_of_other_sizes_are_refused() -> None:
    p = program("  %y: f32[4@didx, N] = allocate\n  relu %x -> %y", "%x: f32[4@didx, N]) -> (%y)")
    with pytest.raises(HostIRError, match=r"call 2 of @p has other sizes"):
        run_calls(p, [[torch.zeros(4, 3)], [torch.zeros(4, 5)]])
