"""Symmetric buffers, signals, barriers, messages and matmuls that wait for flags, on simulated ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from hostir.call.local import rehearse, run_calls, run_local
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.machines.simulated.machine import LocalMachine
from hostir.machines.trace import Trace
from tests.call.small_programs import said

SEEDS = range(100)


def program(body: str, head: str = "%x: f32[4@didx, 3]) -> (%y)", ranks: int = 2, streams: int = 2) -> Program:
    mesh = " ".join(map(str, range(ranks)))
    return parse(f"hostir 1\nmesh @mesh [didx] = {mesh}\nprogram @p({head} streams {streams} {{\n{body}\n}}\n", "p.hir")


def whole(p: Program, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn([s.bind({}) for s in v.tensor.shape], generator=generator) for v in p.inputs]


def rehearsed(p: Program, calls: int = 2) -> tuple[LocalMachine, list[list[torch.Tensor]]]:
    inputs = [whole(p, call) for call in range(calls)]
    return rehearse(p, inputs), inputs


# Each rank puts its part into its neighbour's box. The barrier keeps the next call from filling a box still read.
RING = """
  %next = rank of %x over didx
  %box: f32[2, 3] = allocate_symmetric
  %there: flag[1] = allocate_symmetric
  %y: f32[4@didx, 3] = allocate
  put %x -> %box at (%next + 1) % RANKS over didx
  signal %there[0] = 1 at (%next + 1) % RANKS over didx
  wait_signal %there[0] >= 1
  relu %box -> %y
  barrier of %x over didx
"""


def ring(ranks: int = 2, *without: str) -> Program:
    body = RING
    for line in without:
        assert line in body
        body = body.replace(line, "")
    body = body.replace("RANKS", str(ranks)).replace("f32[4@didx", f"f32[{2 * ranks}@didx")
    return program(body, f"%x: f32[{2 * ranks}@didx, 3]) -> (%y)", ranks)


def right(outputs: Sequence, inputs: Sequence[Sequence[torch.Tensor]], ranks: int) -> bool:
    """Return True if every call gave every rank its neighbour's data."""
    for (y,), (x,) in zip(outputs, inputs, strict=True):
        parts = x.clamp_min(0).chunk(ranks)
        if not all(torch.equal(y[(r + 1) % ranks], parts[r]) for r in range(ranks)):
            return False
    return True


@pytest.mark.parametrize("ranks", [2, 3])
def test_put_signal_wait_and_a_closing_barrier_are_right_in_every_order(ranks: int) -> None:
    machine, inputs = rehearsed(ring(ranks), 3)
    assert all(right(machine.run(seed, watch=seed < 5), inputs, ranks) for seed in SEEDS)


@pytest.mark.parametrize(
    "line", ["  wait_signal %there[0] >= 1\n", "  barrier of %x over didx\n"], ids=["no wait", "no barrier"]
)
def test_some_seed_exposes_a_missing_statement_and_watch_finds_it_under_seed_0(line: str) -> None:
    machine, inputs = rehearsed(ring(2, line))
    wrong = [seed for seed in SEEDS if not right(machine.run(seed), inputs, 2)]
    assert len(wrong) >= 5, wrong
    with pytest.raises(HostIRError, match=r"(?s)race: rank \d, '(relu|put).* %box of rank \d"):
        machine.run(0, watch=True)


def test_get_reads_the_same_view_at_the_peer() -> None:
    p = program(
        """
  %me = rank of %x over didx
  %box: f32[3, 4] = allocate_symmetric
  %t = permute %box (1, 0)
  %rows = chunk %t[1 of 2]
  %y: f32[4@didx, 3] = allocate
  copy %x -> %rows
  barrier of %x over didx
  get %rows from 1 - %me over didx -> %y
  barrier of %x over didx
"""
    )
    machine, inputs = rehearsed(p)
    for seed in SEEDS:
        for (y,), (x,) in zip(machine.run(seed, watch=seed < 5), inputs, strict=True):
            assert torch.equal(torch.cat([y[1], y[0]]), x)


def test_a_flag_has_the_epoch_of_the_latest_signal() -> None:
    p = program(
        """
  %user = current_stream
  %f: flag[1] = allocate_symmetric
  %y: f32[4@didx, 3] = allocate
  relu %x -> %y
  set_stream 0
  synchronize %user
  signal %f[0] = 2 at 0 over didx
  signal %f[0] = 1 at 0 over didx
  set_stream %user
  %me = rank of %x over didx
  if %me == 0 { wait_signal %f[0] >= 2 }
  synchronize 0
"""
    )
    machine, _ = rehearsed(p, 1)
    verdicts = set()
    for seed in SEEDS:
        try:
            machine.run(seed)
            verdicts.add("passes")
        except HostIRError as problem:
            verdicts.add(problem.diagnostics[0].message.partition(":")[0])
    assert verdicts == {"passes", "deadlock"}


def test_barriers_of_one_number_match_on_different_streams() -> None:
    p = program(
        """
  %me = rank of %x over didx
  %user = current_stream
  %box: f32[2, 3] = allocate_symmetric
  %y: f32[4@didx, 3] = allocate
  copy %x -> %box
  for %s in 0..2 { if %s == %me { set_stream %s   synchronize %user } }
  barrier of %x over didx
  get %box from 1 - %me over didx -> %y
  barrier of %x over didx
  for %s in 0..2 { if %s == %me { set_stream %user   synchronize %s } }
"""
    )
    machine, inputs = rehearsed(p)
    for seed in SEEDS:
        for (y,), (x,) in zip(machine.run(seed, watch=seed < 5), inputs, strict=True):
            assert torch.equal(torch.cat([y[1], y[0]]), x)


def test_a_barrier_that_a_rank_leaves_out_is_named() -> None:
    p = program(
        "  %me = rank of %x over didx\n  if %me == 1 { barrier of %x over didx }", "%x: f32[4@didx, 3]) -> (%x)"
    )
    with pytest.raises(HostIRError, match=r"(?s)ranks 0 1 differ in barrier 1.*rank 0 issues only 0.*rank 1, 'barrier"):
        run_local(p, whole(p, 0))


def messages(body: str, ranks: int = 2) -> Program:
    text = f"  %me = rank of %x over didx\n  %y: f32[{2 * ranks}@didx, 3] = allocate\n{body}"
    return program(text, f"%x: f32[{2 * ranks}@didx, 3]) -> (%y)", ranks)


BOTH_SEND = """  %s = send %x to 1 - %me over didx
  %r = recv %y from 1 - %me over didx
  wait %s
  wait %r"""


def test_two_ranks_that_send_first_wait_for_each_other_where_a_send_waits_for_its_receiver() -> None:
    p = messages(BOTH_SEND)
    ended = []
    for seed in range(20):
        try:
            run_local(p, whole(p, 0), seed=seed)
        except HostIRError as problem:
            ended.append(str(problem))
    assert 0 < len(ended) < 20
    pattern = r"(?s)deadlock.*rank 0, '%s = send.*rank 1, '%s = send"
    assert all(re.search(pattern, message) for message in ended)
    with pytest.raises(HostIRError, match="deadlock"):
        run_local(p, whole(p, 0), seed=0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_exchange_sends_and_receives_at_once(ranks: int) -> None:
    step = f"%x to (%me + 1) % {ranks}, %y from (%me + {ranks - 1}) % {ranks}"
    machine, inputs = rehearsed(messages(f"  %h = exchange {step} over didx\n  wait %h", ranks))
    for seed in SEEDS:
        for (y,), (x,) in zip(machine.run(seed, watch=seed < 5), inputs, strict=True):
            assert torch.equal(torch.cat([*y[1:], y[0]]), x)


def test_a_send_matches_a_receive_and_both_have_handles() -> None:
    ordered = """  if %me == 0 { %s = send %x to 1 over didx   wait %s   %r = recv %y from 1 over didx   wait %r }
  if %me == 1 { %r = recv %y from 0 over didx   wait %r   %s = send %x to 0 over didx   wait %s }"""
    machine, inputs = rehearsed(messages(ordered))
    for seed in SEEDS:
        for (y,), (x,) in zip(machine.run(seed, watch=seed < 5), inputs, strict=True):
            assert torch.equal(torch.cat([y[1], y[0]]), x)
    late = messages(ordered.replace("wait %r }\n", "gelu %y -> %y   wait %r }\n"))
    assert "race: " in said(lambda: run_local(late, whole(late, 0), watch=True))


def test_the_kth_send_matches_the_kth_receive() -> None:
    body = """  %x0 = chunk %x[0 of 2]   %x1 = chunk %x[1 of 2]
  %y0 = chunk %y[0 of 2]   %y1 = chunk %y[1 of 2]
  if %me == 0 { %s = send %x0 to 1 over didx   %t = send %x1 to 1 over didx   wait %s   wait %t   copy %x -> %y }
  if %me == 1 { %r = recv %y1 from 0 over didx   %q = recv %y0 from 0 over didx   wait %r   wait %q }"""
    p = messages(body)
    x = whole(p, 0)
    for seed in SEEDS:
        (y,) = run_local(p, x, seed=seed)
        assert torch.equal(y[1], x[0][:2].flip(0))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("  if %me == 0 { %s = send %x to 1 over didx   wait %s }", r"message 1 .*rank 0, '%s = send.*receives only 0"),
        (
            "  %x0 = chunk %x[0 of 2]\n"
            "  if %me == 0 { %s = send %x0 to 1 over didx }\n  if %me == 1 { %r = recv %y from 0 over didx }",
            r"message 1 from rank 0 to rank 1 has no partner that fits.*\[1, 3\].*\[2, 3\]",
        ),
    ],
)
def test_a_message_without_its_partner_is_named(body: str, message: str) -> None:
    p = messages(body)
    with pytest.raises(HostIRError, match=f"(?s){message}"):
        run_local(p, whole(p, 0))


PULL = """
  %me = rank of %x over didx
  %user = current_stream
  %full: f32[2, 2, 3] = allocate_symmetric
  %flags: flag[2] = allocate_symmetric
  %y: f32[2, 2, 5] = allocate
  %own = select %full[%me]
  set_stream 0
  synchronize %user
  COPIES
  set_stream %user
  put %x -> %own at %me over didx
  signal %flags[%me] = 1 at %me over didx
  matmul %full, %w -> %y ready %flags >= 1 from %me
  synchronize 0
  barrier of %x over didx
"""
PUTS = """put %x -> %own at 1 - %me over didx
  signal %flags[%me] = 1 at 1 - %me over didx"""
PULL_HEAD = "%x: f32[4@didx, 3], %w: f32[3, 5]) -> (%y)"


def product_of(p: Program, seed: int, machine: LocalMachine, inputs: list[list[torch.Tensor]], watch: bool) -> bool:
    outputs = machine.run(seed, watch=watch)
    return all(
        torch.allclose(part.flatten(0, 1), x @ w, atol=1e-5)
        for (y,), (x, w) in zip(outputs, inputs, strict=True)
        for part in y
    )


def test_a_matmul_computes_each_block_once_its_flag_is_up() -> None:
    p = program(PULL.replace("COPIES", PUTS), PULL_HEAD)
    machine, inputs = rehearsed(p)
    assert all(product_of(p, seed, machine, inputs, seed < 5) for seed in SEEDS)


def test_copies_issued_after_the_matmul_that_waits_for_them_never_run() -> None:
    behind = PULL.replace("  set_stream 0\n  synchronize %user\n  COPIES\n", "").replace(
        "  synchronize 0\n", f"  {PUTS}\n"
    )
    p = program(behind, PULL_HEAD)
    for seed in range(5):
        with pytest.raises(HostIRError, match=r"(?s)deadlock.*rank 0, 'matmul .*no signal sets flag \S+ to epoch 1"):
            run_local(p, whole(p, 0), seed=seed)
    before = behind.replace(f"  {PUTS}\n", "").replace("  matmul", f"  {PUTS}\n  matmul")
    machine, inputs = rehearsed(program(before, PULL_HEAD))
    assert all(product_of(p, seed, machine, inputs, seed < 5) for seed in SEEDS)


@pytest.mark.parametrize(
    ("mine", "kernel"),
    [
        ("f32[4@didx, 3] = allocate", "relu %x -> %mine"),
        ("f32[4, 3] = allocate", "%h = allgather %x -> %mine over didx   wait %h"),
        ("f32[4@didx, 3] = allocate_symmetric", "put %x -> %mine at %me over didx"),
    ],
    ids=["relu", "allgather", "put within the rank"],
)
def test_a_kernel_may_wait_forever_for_sms(mine: str, kernel: str) -> None:
    """The flags rise after a kernel that either begins before the matmul, or waits forever for the matmul's SMs."""
    late = PULL.replace("COPIES", f"{kernel}\n  {PUTS}").replace("  %y:", f"  %mine: {mine}\n  %y:")
    p = program(late, PULL_HEAD)
    machine, inputs = rehearsed(p)
    hangs: list[str] = []
    for seed in SEEDS:
        try:
            assert product_of(p, seed, machine, inputs, False)
        except HostIRError as problem:
            hangs.append(str(problem))
    assert 5 <= len(hangs) <= 95, "either begins first"
    assert all("the SMs are held by rank" in hang for hang in hangs)


def test_a_trace_shows_copies_messages_and_one_bar_for_a_matmul_that_waits() -> None:
    trace = Trace()
    p = program(PULL.replace("COPIES", PUTS), PULL_HEAD)
    run_calls(p, [whole(p, 0)], trace=trace)
    bars = sorted((e.stream, e.keyword) for e in trace.events if e.rank == 1)
    assert bars == [("caller", "matmul"), ("caller", "put"), ("stream 0", "put")]
    p = messages("  %h = exchange %x to 1 - %me, %y from 1 - %me over didx\n  wait %h")
    trace = Trace()
    run_calls(p, [whole(p, 0)], trace=trace)
    assert [(e.stream, e.keyword) for e in trace.events] == [("communication", "exchange")] * 2
    assert all(e.start <= e.end for e in trace.events)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("  put %x -> %x at 1 over didx", r"rank 0, 'put.*%x is not symmetric"),
        ("  %f: flag[1] = allocate\n  wait_signal %f[0] >= 1", r"%f is not symmetric"),
        (
            "  %me = rank of %x over didx\n  for %i in 0..%N { if %i == %me { %f: flag[1] = allocate_symmetric\n"
            "  signal %f[0] = 1 at 1 over didx } }".replace("%N", "1"),
            r"rank 0, 'signal .*: rank 1 has no %f",
        ),
    ],
)
def test_memory_that_is_not_symmetric_is_refused_at_a_peer(body: str, message: str) -> None:
    p = program(body, "%x: f32[4@didx, 3]) -> (%x)")
    with pytest.raises(HostIRError, match=f"(?s){message}"):
        run_calls(p, [whole(p, 0)])
