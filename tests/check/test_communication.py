"""The checker on communication: when it accesses memory, when it ends, the order within a team, and handles."""

from __future__ import annotations

import re

import pytest

import hostir as hi
from hostir.ir import Program
from tests.judging import simulated
from tests.judging.simulated import failure_of, outcome, rehearsal

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\nmesh @turned [didx] = 1 0\nmesh @other [didx] = 2 3\n"


def program(body: str, inputs: str = "%x: f32[2@didx, 8]", outputs: str = "", streams: int = 1) -> Program:
    """Return a program with this body from line 7 on; %r is the position of the rank on @mesh."""
    head = f"program @p({inputs}) -> ({outputs}) streams {streams} {{\n  %user = current_stream"
    return hi.parse(f"{HEAD}{head}   %r = rank of %x over didx\n{body}}}\n", "p.hir")


def errors(program: Program) -> list[str]:
    return list(simulated.errors(hi.check(program)))


# When memory is accessed ------------------------------------------------------------------------------------------
EARLY_READ = """  %s: f32[2@didx, 8] = allocate_symmetric
  %y: f32[2, 8] = allocate
  barrier of %x over didx
  put %x -> %s at (%r + 1) % 2 over didx
{between}  %h = allgather %s -> %y over didx
  wait %h
"""


def test_a_collective_may_read_its_input_as_soon_as_it_is_issued() -> None:
    early = program(EARLY_READ.format(between=""), outputs="%y")
    put, gather = "'put %x -> %s at (%r + 1) % 2 over didx' of another rank", "'%h = allgather %s -> %y over didx'"
    assert errors(early) == [f"race on %s: {gather} reads it, while {put} may still write it"]
    assert failure_of(early, 20)
    ordered = program(EARLY_READ.format(between="  barrier of %x over didx\n"), outputs="%y")
    assert errors(ordered) == []
    assert failure_of(ordered, 20) == ""


SHARED_RESULT = """  %t: f32[{rows}] = allocate
  %y: f32[{rows}] = allocate
  %z: f32[{rows}] = allocate
  for %s in 0..2 {{ set_stream %s   synchronize %user }}
  set_stream 0
  %g = {collective} %x -> %t over didx
  wait %g
  relu %t -> %y
  set_stream 1
{order}  %h = {collective} %w -> %t over didx
  wait %h
  gelu %t -> %z
  set_stream %user
  for %s in 0..2 {{ synchronize %s }}
  free %t
"""


@pytest.mark.parametrize(
    ("collective", "sent", "rows"),
    [
        ("allgather", "f32[2@didx, 8]", "2, 8"),
        ("allreduce", "f32[2, 8] partial(didx)", "2, 8"),
        ("reduce_scatter", "f32[2, 8] partial(didx)", "2@didx, 8"),
        ("alltoall", "f32[2, 8@didx]", "2@didx, 8"),
    ],
)
def test_a_collective_may_write_its_result_as_soon_as_it_is_issued(collective: str, sent: str, rows: str) -> None:
    def shared(order: str) -> Program:
        body = SHARED_RESULT.format(collective=collective, rows=rows, order=order)
        return program(body, f"%x: {sent}, %w: {sent}", "%y, %z", streams=2)

    racing, ordered = shared(""), shared("  synchronize 0\n")
    first, second = (f"'%{h} = {collective} %{x} -> %t over didx'" for h, x in ("gx", "hw"))
    assert errors(racing) == [
        f"race on %t: {second} writes it, while {first} may still write it",
        f"race on %t: {second} writes it, while 'relu %t -> %y' may still read it",
        f"race on %t: 'gelu %t -> %z' reads it, while {first} may still write it",
    ]
    assert failure_of(racing, 20)
    assert errors(ordered) == []
    assert failure_of(ordered, 20) == ""


def test_collectives_of_one_rank_may_overlap() -> None:
    alone = hi.parse("""hostir 1
mesh @mesh [didx] = 0
program @alone(%x: f32[8, 8], %a: f32[8, 8]) -> (%o, %y) streams 2 {
  %user = current_stream
  %buf: f32[8, 8] = allocate
  %o: f32[8, 8] = allocate
  %y: f32[8, 8] = allocate
  for %s in 0..2 { set_stream %s  synchronize %user }
  set_stream 0
  matmul %a, %a -> %buf
  %q = as_partial %buf over didx
  %g = allreduce %q -> %o over didx
  set_stream 1
  %p = as_partial %x over didx
  %h = allreduce %p -> %buf over didx
  wait %h
  relu %buf -> %y
  set_stream 0
  wait %g
  set_stream %user
  for %s in 0..2 { synchronize %s }
  free %buf
}
""")
    second = "'%h = allreduce %p -> %buf over didx'"
    assert errors(alone) == [
        f"race on %buf: {second} writes it, while 'matmul %a, %a -> %buf' may still write it",
        f"race on %buf: {second} writes it, while '%g = allreduce %q -> %o over didx' may still read it",
    ]
    assert failure_of(alone, 20)


AFTER_ONE = """  %s: f32[2@didx, 8] = allocate_symmetric
  %y: f32[2, 8] = allocate
  %z: f32[2@didx, 8] = allocate
  barrier of %x over didx
  copy %x -> %s
  %h = allgather %s -> %y over didx
  wait %h
  {then}
  barrier of %x over didx
"""


def test_after_a_collective_other_ranks_may_still_read_their_inputs() -> None:
    """When the collective of one rank has ended, all ranks have started theirs, but may still be sending."""
    reads = program(AFTER_ONE.format(then="get %s from (%r + 1) % 2 over didx -> %z"), outputs="%y, %z")
    assert errors(reads) == []
    assert failure_of(reads, 20) == ""
    writes = program(AFTER_ONE.format(then="relu %x -> %z   put %x -> %s at (%r + 1) % 2 over didx"), outputs="%y, %z")
    assert errors(writes) == [
        "race on %s: 'put %x -> %s at (%r + 1) % 2 over didx' of another rank writes it, while "
        "'%h = allgather %s -> %y over didx' may still read it"
    ]
    assert failure_of(writes, 20)


# When a communication ends ----------------------------------------------------------------------------------------
MOVED = """  %s: f32[2@didx, 8] = allocate_symmetric
  %y: f32[2, 8] on @other = allocate
  %z: f32[2@didx, 8] = allocate
  barrier of %x over didx
  copy %x -> %s
{between}  get %s from (%r + 1) % 2 over didx -> %z
"""


def test_a_transfer_between_meshes_does_not_order_its_senders() -> None:
    moved = program(MOVED.format(between="  %h = gather %x -> %y\n  wait %h\n"), outputs="%y, %z")
    assert errors(moved) == [
        "race on %s: 'get %s from (%r + 1) % 2 over didx -> %z' of another rank reads it, while "
        "'copy %x -> %s' may still write it"
    ]
    assert failure_of(moved, 20)
    between = "  %h = gather %x -> %y\n  wait %h\n  barrier of %x over didx\n"
    assert errors(program(MOVED.format(between=between), outputs="%y, %z")) == []


CHAINED = """hostir 1
mesh @one [didx] = 0
mesh @two [didx] = 1
mesh @both [didx] = 0 1
program @p(%v: f32[8] on @one, %x: f32[2@didx, 8] on @both) -> (%w, %z) {{
  %r = rank of %x over didx
  %f: flag[1] on @both = allocate_symmetric
  %s: f32[2@didx, 8] on @both = allocate_symmetric
  %w: f32[8] on @two = allocate
  %z: f32[2@didx, 8] on @both = allocate
  barrier of %x over didx
{body}}}
"""


def chained(body: str) -> Program:
    """Return a program in which rank 0 sends to rank 1, with flags and memory of both."""
    return hi.parse(CHAINED.format(body=body))


def test_a_receive_ends_after_the_send_has_started() -> None:
    body = "  relu %x -> %z\n  if %r == 0 { put %x -> %s at 1 over didx }\n  %h = broadcast %v -> %w\n  wait %h\n"
    got = chained(body + "  if %r == 1 { copy %s -> %z }\n  if %r == 1 { get %s from 1 over didx -> %z }\n")
    assert errors(got) == []
    assert failure_of(got, 20) == ""


def test_a_send_may_block_until_the_receive_starts() -> None:
    body = (
        "  relu %x -> %z\n  if %r == 0 {\n    %h = broadcast %v -> %w\n    wait %h\n"
        "    signal %f[0] = 1 at 1 over didx\n  }\n"
        "  if %r == 1 {\n    wait_signal %f[0] >= 1\n    %h = broadcast %v -> %w\n    wait %h\n  }\n"
    )
    held = chained(body)
    (finding,) = hi.check(held)
    assert finding.message.startswith("deadlock: ")
    notes = " ".join(text for _, text in finding.notes)
    assert "rank 0, the caller's stream, call 1: '%h = broadcast %v -> %w'" in notes
    assert "rank 1, the caller's stream, call 1: 'wait_signal %f[0] >= 1'" in notes
    outcomes = [outcome(rehearsal(held), seed) for seed in range(20)]
    stuck = [o for o in outcomes if isinstance(o, str)]
    assert 0 < len(stuck) < 20, "some schedules block the sender, others do not"
    assert all(message.startswith("deadlock") for message in stuck)


def test_the_end_of_a_send_orders_nothing_on_the_receiver() -> None:
    body = (
        "  relu %x -> %z\n  if %r == 1 { copy %x -> %s }\n  %h = broadcast %v -> %w\n  wait %h\n"
        "  if %r == 0 { get %s from 1 over didx -> %z }\n"
    )
    program = chained(body)
    assert errors(program) == [
        "race on %s: 'get %s from 1 over didx -> %z' of another rank reads it, while 'copy %x -> %s' may still write it"
    ]
    assert failure_of(program, 20)


# Teams ------------------------------------------------------------------------------------------------------------
TWO_ORDERS = """  %y: f32[2, 8] = allocate
  %v: f32[2, 8] on @turned = allocate
  if %r == 0 {{
    %g = allgather %x -> %y over didx
    %h = allgather %w -> %v over didx
    wait %g
    wait %h
  }}
  if %r == 1 {{
    {first}
    {second}
    wait %g
    wait %h
  }}
"""
TURNED = "%x: f32[2@didx, 8], %w: f32[2@didx, 8] on @turned"
PLAIN, BACKWARDS = "%g = allgather %x -> %y over didx", "%h = allgather %w -> %v over didx"


def test_meshes_of_the_same_ranks_in_another_order_share_one_team() -> None:
    swapped = program(TWO_ORDERS.format(first=BACKWARDS, second=PLAIN), TURNED, "%y, %v")
    (finding,) = hi.check(swapped)
    assert finding.message == "ranks 0 1 differ in the collectives of their team"
    assert finding.hint == "every rank of a team issues the same ones in the same order"
    assert [(span.line, text) for span, text in finding.notes if span] == [
        (10, f"rank 0, the caller's stream, call 1: '{PLAIN}'"),
        (16, f"rank 1, the caller's stream, call 1: '{BACKWARDS}'"),
    ]
    assert "differ in communication 1 of their team" in failure_of(swapped, 1)
    alike = program(TWO_ORDERS.format(first=PLAIN, second=BACKWARDS), TURNED, "%y, %v")
    assert errors(alike) == []
    assert failure_of(alike, 20) == ""


# Handles ----------------------------------------------------------------------------------------------------------
GATHER = "%y: f32[2, 8] = allocate\n%h = allgather %x -> %y over didx\n"  # lines 7 and 8


@pytest.mark.parametrize(
    ("body", "lines", "message"),
    [
        ("", (8,), "%h is never waited for"),
        ("if %r == 0 {\nwait %h\n}\n", (8,), "%h is never waited for"),
        ("if %r == 1 {\n%k = send %x to 0 over didx\n}\nwait %h\n", (10,), "%k is never waited for"),
        ("wait %h\nfor %i in 0..2 {\n%k = allgather %x -> %y over didx\n}\n", (11,), "%k is never waited for"),
        ("wait %h\nwait %h\n", (10, 9), "%h is waited for twice"),
        ("for %i in 0..2 {\nwait %h\n}\n", (10, 10), "%h is waited for twice"),
        ("if %r == 0 {\nwait %h\n}\nwait %h\n", (12, 10), "%h is waited for twice"),
    ],
)
def test_a_handle_is_waited_for_once_on_each_rank(body: str, lines: tuple[int, ...], message: str) -> None:
    (finding,) = hi.check(program(GATHER + body))
    assert finding.message == message
    spans = [finding.span, *(span for span, _ in finding.notes)]
    assert tuple(span.line for span in spans if span) == lines
    never = f"add 'wait {message[:2]}' before its result is used"
    assert finding.hint == ("wait for it once" if "twice" in message else never)


@pytest.mark.parametrize(
    "body",
    [
        "if %r == 0 {\nwait %h\n}\nif %r == 1 {\nwait %h\n}\n",
        "for %i in 0..3 {\nif %i == 1 {\nwait %h\n}\n}\n",
        "wait %h\nfor %i in 0..2 {\n%k = allgather %x -> %y over didx\nwait %k\n}\n",
    ],
)
def test_a_handle_may_be_waited_for_in_any_block(body: str) -> None:
    assert errors(program(GATHER + body, outputs="%y")) == []


def test_an_exchange_must_not_receive_into_its_input() -> None:
    (finding,) = hi.check(program("%h = exchange %x to 1 - %r, %x from 1 - %r over didx\nwait %h\n"))
    assert re.fullmatch("exchange writes %x while it reads it", finding.message)
