"""The findings of `watch`, under every seed: unordered accesses to common elements, and reads of unwritten memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hostir.call.local import rehearse, run_calls, run_local
from hostir.call.random import random_inputs
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, Span
from tests.call.programs import AG_MATMUL, GRID, ROW_PARALLEL, TRANSFERS
from tests.machines.simulated.test_machine import DISCARD, FORK, JOIN, OVERWRITE, REUSE, inputs_of, without

CASES = Path(__file__).parents[2] / "cases" / "patterns"
LOWERED = sorted(f for f in CASES.iterdir() if not f.stem.endswith("-fusion"))


@pytest.mark.parametrize("file", LOWERED, ids=lambda f: f.stem)
def test_lowered_programs_have_no_race(file: Path) -> None:
    program = parse(file.read_text(), str(file))
    run_calls(program, [random_inputs(program, {}, seed=call) for call in range(2)], watch=True)


@pytest.mark.parametrize("text", [AG_MATMUL, ROW_PARALLEL, TRANSFERS, GRID, OVERWRITE, DISCARD])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_right_program_has_no_finding(text: str, seed: int) -> None:
    program = parse(text)
    run_calls(program, [inputs_of(program, call) for call in range(2)], seed=seed, watch=True)


LATE = """hostir 1
mesh @mesh [didx] = 0 1
program @late(%x: f32[2@didx, 8]) -> (%y) {
  %full: f32[2, 8] = allocate
  %y: f32[2, 8] = allocate
  %h = allgather %x -> %full over didx
  relu %full -> %y
  wait %h
}
"""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(LATE, id="wait after the use"),
        pytest.param(without(AG_MATMUL, "    wait %h\n"), id="no wait"),
        pytest.param(without(AG_MATMUL, FORK), id="no fork"),
        pytest.param(without(AG_MATMUL, JOIN), id="no join"),
        pytest.param(AG_MATMUL.replace("0..2 { synchronize", "0..1 { synchronize"), id="one stream is not joined"),
        pytest.param(REUSE, id="two streams share a buffer"),
        pytest.param(without(ROW_PARALLEL, "  wait %g\n"), id="no wait before the join"),
        *(pytest.param(without(TRANSFERS, f"  wait %h{i}\n"), id=f"no wait for transfer {i}") for i in range(1, 6)),
        pytest.param(without(OVERWRITE, "  wait %h\n"), id="what is sent is overwritten"),
    ],
)
def test_a_missing_edge_is_found_in_every_order(text: str) -> None:
    program = parse(text)
    for seed in range(6):
        with pytest.raises(HostIRError, match=r"^(\S+: )?error: race: "):
            run_local(program, inputs_of(program), seed=seed, watch=True)


def test_a_race_names_both_sides_and_the_buffer() -> None:
    program = parse(without(REUSE, "    wait %h\n"), "reuse.hir")
    with pytest.raises(HostIRError) as caught:
        run_local(program, inputs_of(program), watch=True)
    (finding,) = caught.value.diagnostics
    gather, matmul = "'%h = allgather %a_i -> %g_i over didx'", "'matmul %g_i, %b -> %c_i'"
    sides = f"rank 0, {gather} in round 0 on stream 0", f"rank 0, {matmul} in round 0 on stream 0"
    assert finding.message.startswith(f"race: {sides[0]} and {sides[1]} touch common elements of %a_full of rank 0")
    assert [text for _, text in finding.notes] == [f"{sides[0]} writes", f"{sides[1]} reads"]
    assert [program_line(span) for span, _ in finding.notes] == ["%h = allgather", "matmul %g_i, %"]


def program_line(span: Span) -> str:
    return span.text.strip()[:14]


def program_of(body: str, head: str = "%x: f32[4@didx, 6]) -> (%y)") -> Program:
    text = f"hostir 1\nmesh @mesh [didx] = 0 1\nprogram @p({head} streams 2 {{\n{body}\n}}\n"
    return parse(text, "p.hir")


HALVES = """  %user = current_stream
  %y: f32[4@didx, 6] = allocate
  for %i in 0..2 {
    set_stream %i
    synchronize %user
    %x_i = chunk %x[%i of 2] axis AXIS
    %y_i = chunk %y[PART of 2] axis AXIS
    relu %x_i -> %y_i
  }
  set_stream %user
  for %s in 0..2 { synchronize %s }"""


@pytest.mark.parametrize("axis", ["0", "1"])
def test_accesses_to_different_elements_of_a_buffer_are_no_race(axis: str) -> None:
    apart = program_of(HALVES.replace("AXIS", axis).replace("PART", "%i"))
    run_local(apart, inputs_of(apart), watch=True)
    same = program_of(HALVES.replace("AXIS", axis).replace("PART", "0"))
    with pytest.raises(HostIRError, match=r"race: .* in round 0 on stream 0 and .* in round 1 on stream 1"):
        run_local(same, inputs_of(same), watch=True)


def test_accesses_to_interleaved_elements_are_no_race() -> None:
    body = HALVES.replace("%y: f32[4@didx, 6] = allocate", "%t: f32[6, 4@didx] = allocate\n  %y = permute %t (1, 0)")
    program = program_of(body.replace("AXIS", "1").replace("PART", "%i"), "%x: f32[4@didx, 6]) -> (%t)")
    run_local(program, inputs_of(program), watch=True)
    columns = program_of(body.replace("AXIS", "0").replace("PART", "%i"), "%x: f32[4@didx, 6]) -> (%t)")
    run_local(columns, inputs_of(columns), watch=True)


def test_a_read_of_unwritten_memory_is_named() -> None:
    part = "  %y: f32[4@didx, 6] = allocate\n  %t: f32[4@didx, 6] = allocate\n  %t_0 = chunk %t[0 of 2] axis 1\n"
    program = program_of(part + "  %x_0 = chunk %x[0 of 2] axis 1\n  relu %x_0 -> %t_0\n  relu %t -> %y")
    with pytest.raises(
        HostIRError, match=r"p.hir:9:.*rank 0, 'relu %t -> %y' on the caller's stream reads what nobody"
    ):
        run_local(program, inputs_of(program), watch=True)
    outputs = run_local(program, inputs_of(program))
    assert all(torch.isnan(y[:, 3:]).all() for y in outputs[0])
    unwritten = program_of("  %y: f32[4@didx, 6] = allocate")
    with pytest.raises(HostIRError, match=r"rank 0, caller, after the call, reads what nobody wrote: %y of rank 0"):
        run_local(unwritten, inputs_of(unwritten), watch=True)


def test_a_free_touches_the_whole_buffer() -> None:
    program = program_of(
        """  %user = current_stream
  %y: f32[4@didx, 6] = allocate
  %t: f32[4@didx, 6] = allocate
  relu %x -> %t
  %t_0 = chunk %t[0 of 2] axis 1
  %t_1 = chunk %t[1 of 2] axis 1
  set_stream 0
  synchronize %user
  %y_1 = chunk %y[1 of 2] axis 1
  relu %t_1 -> %y_1
  set_stream %user
  free %t_0
  synchronize 0"""
    )
    with pytest.raises(HostIRError, match=r"race: .*'relu %t_1 -> %y_1' on stream 0 and .*'free %t_0' on the caller's"):
        run_local(program, inputs_of(program), watch=True)


def test_waiting_for_sms_orders_nothing() -> None:
    """A kernel that begins after a matmul has ended is not ordered after the matmul."""
    program = parse("""hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[2, 3], %w: f32[3, 5]) -> (%y, %z) streams 2 {
  %user = current_stream
  %f: flag[2] = allocate_symmetric
  %y: f32[2, 5] = allocate
  %z: f32[2, 5] = allocate
  %me = rank of %x over didx
  for %i in 0..2 { signal %f[%i] = 1 at %me over didx }
  set_stream 0
  synchronize %user
  set_stream %user
  matmul %x, %w -> %y ready %f >= 1 from 0
  set_stream 0
  relu %y -> %z
  set_stream %user
  synchronize 0
}
""")
    machine = rehearse(program, [inputs_of(program)])
    for seed in range(6):
        with pytest.raises(HostIRError, match="race: "):
            machine.run(seed, watch=True)


def test_signals_of_one_flag_have_an_order() -> None:
    program = program_of(
        """  %me = rank of %x over didx
  %y: f32[4@didx, 6] = allocate
  relu %x -> %y
  %f: flag[1] = allocate_symmetric
  signal %f[0] = %me + 1 at 0 over didx"""
    )
    with pytest.raises(HostIRError, match=r"race: rank ., 'signal .* and rank ., 'signal .* set one flag"):
        run_local(program, inputs_of(program), watch=True)
