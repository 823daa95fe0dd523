"""The rules of the checker: which statements are ordered over streams, ranks and calls."""

from __future__ import annotations

import pytest

import hostir as hi
from examples import patterns
from hostir.check import prove
from hostir.check.findings import Finding
from hostir.check.proof import analyse, shared_queues
from hostir.ir import Diagnostic, HostIRError, Program
from hostir.repair.repair import repair

HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\n"


def program(body: str, inputs: str = "%x: f32[4, 6]", outputs: str = "%y", result: str = "f32[4, 6]") -> Program:
    head = f"{HEAD}program @p({inputs}) -> ({outputs}) streams 2 {{\n"
    return hi.parse(
        f"{head}  %user = current_stream\n  %r = rank of %x over didx\n  %y: {result} = allocate\n{body}}}\n"
    )


def kinds(program: Program, calls: int = 2) -> list[str]:
    findings = hi.check(program, calls=calls)
    assert all(isinstance(d, Finding) for d in findings), findings
    return [d.category for d in findings if isinstance(d, Finding)]


FORK, JOIN = "  synchronize %user\n", "  set_stream %user\n  synchronize 0\n"


def test_a_worker_that_forks_and_joins_is_ordered() -> None:
    assert kinds(program(f"  set_stream 0\n{FORK}  relu %x -> %y\n{JOIN}")) == []


REUSED = """hostir 1
mesh @mesh [didx] = 0
program @reused(%x: f32[4, 4]) -> (%y, %z) streams 1 {
  %user = current_stream
  %y: f32[4, 4] = allocate
  %z: f32[4, 4] = allocate
  set_stream 0
  synchronize %user
  set_stream %user
  %u: f32[4, 4] = allocate
  relu %x -> %u
  matmul %u, %u -> %y
  free %u
  %t: f32[4, 4] = allocate
  set_stream 0
ORDER  gelu %x -> %t
  relu %t -> %z
  set_stream %user
  synchronize 0
  free %t
}
"""


def test_another_stream_may_use_a_buffer_after_waiting_for_the_stream_that_allocated_it() -> None:
    """The previous owner of the memory may still use it on that stream."""
    (finding,) = hi.check(hi.parse(REUSED.replace("ORDER", ""), "reused.hir"))
    assert (
        finding.message
        == "race on %t: 'gelu %x -> %t' writes it, while '%t: f32[4, 4] = allocate' may not yet have allocated it"
    )
    assert finding.hint.startswith("on stream 0, 'synchronize %user' before it")
    assert finding.expected == "an order between the caller's stream of rank 0 and stream 0 of rank 0"
    assert [(span.line, text) for span, text in finding.notes if span] == [
        (14, "rank 0, the caller's stream, call 1: '%t: f32[4, 4] = allocate'"),
        (16, "rank 0, stream 0, call 1: 'gelu %x -> %t'"),
    ]
    assert hi.check(hi.parse(REUSED.replace("ORDER", "  synchronize %user\n"))) == []
    there = REUSED.replace(
        "  %t: f32[4, 4] = allocate\n  set_stream 0\n", "  set_stream 0\n  %t: f32[4, 4] = allocate\n"
    )
    assert hi.check(hi.parse(there.replace("ORDER", ""))) == []


def test_a_read_without_an_order_after_the_write_is_a_race_and_without_a_write_unwritten() -> None:
    body = "  %t: f32[4, 6] = allocate\n  set_stream 0\n  {}relu %t -> %y\n" + JOIN + "  free %t\n"
    head = "  set_stream 0\n  synchronize %user\n  set_stream %user\n"
    written = program(head + body.format("relu %x -> %t\n  "))
    assert [d.message.split(", while")[0] for d in hi.check(written)] == ["race on %t: 'relu %x -> %t' writes it"]
    assert kinds(program(head + body.format(""))) == ["unwritten"]


def test_a_symmetric_output_is_undefined_after_the_call() -> None:
    body = "  %s: f32[4, 6] = allocate_symmetric\n{}  relu %s -> %y\n{}"
    copy = "  copy %x -> %s\n"
    assert kinds(program(body.format(copy, ""), outputs="%y, %s")) == []
    kept = body.format("", copy)  # each call reads the result of the previous call
    nobody = "'relu %s -> %y' reads %s, parts of which nobody has written"
    assert [d.message for d in hi.check(program(kept))] == [nobody]
    assert [d.message for d in hi.check(program(kept, outputs="%y, %s"))] == [
        nobody,
        "'relu %s -> %y' reads %s, rows of which the caller leaves undefined",
    ]


def test_a_missing_fork_races_for_the_input_and_a_missing_join_for_the_output() -> None:
    assert kinds(program(f"  set_stream 0\n  relu %x -> %y\n{JOIN}")) == ["race"]
    findings = hi.check(program(f"  set_stream 0\n{FORK}  relu %x -> %y\n"))
    assert {d.buffer for d in findings if isinstance(d, Finding)} == {"x", "y"}


def test_synchronize_orders_only_statements_issued_before_it() -> None:
    late = (
        f"  set_stream 0\n{FORK}  set_stream %user\n  synchronize 0\n"
        "  set_stream 0\n  relu %x -> %y\n  set_stream %user\n"
    )
    assert "race" in kinds(program(late))


def test_only_overlapping_slices_need_an_order() -> None:
    both = (
        "  for %s in 0..2 {{ set_stream %s   synchronize %user }}\n  for %s in 0..2 {{\n    set_stream %s\n"
        "    %a = chunk %x[{read} of 2] axis {axis}\n    %b = chunk %y[{write} of 2] axis {axis}\n"
        "    relu %a -> %b\n  }}\n"
        "  set_stream %user\n  for %s in 0..2 {{ synchronize %s }}\n"
    )
    assert kinds(program(both.format(read="%s", write="%s", axis=1))) == []
    assert kinds(program(both.format(read=0, write="%s", axis=0))) == []
    assert kinds(program(both.format(read="%s", write=0, axis=1))) == ["unwritten", "race"]


def test_rows_and_columns_of_one_buffer_overlap() -> None:
    body = (
        f"  %z: f32[4, 3] = allocate\n  set_stream 0\n{FORK}  %row = select %y[1]\n  %in = select %x[0]\n"
        f"  relu %in -> %row\n"
        "  set_stream %user\n  %cut = chunk %y[{} of 2] axis 1\n  %some = chunk %x[0 of 2] axis 1\n"
        "  gelu %some -> %cut\n"
    )
    findings = hi.check(program(body.format(1), outputs=""))
    assert any(isinstance(d, Finding) and d.category == "race" and d.buffer == "y" for d in findings)


def test_only_a_wait_orders_statements_after_a_collective() -> None:
    gather = "  %all: f32[2, 3] = allocate\n  %h = allgather %x -> %all over didx\n{}  free %all\n"
    ordered, late = "  wait %h\n  relu %all -> %y\n", "  relu %all -> %y\n  wait %h\n"
    sharded = {"inputs": "%x: f32[2@didx, 3]", "result": "f32[2, 3]"}
    assert kinds(program(gather.format(ordered), **sharded)) == []
    assert kinds(program(gather.format(late), **sharded)) == ["race"]


def test_a_collective_orders_statements_before_it_ahead_of_statements_after_it_on_other_ranks() -> None:
    body = (
        "  %s: f32[2@didx, 3] = allocate_symmetric\n  %all: f32[2, 3] = allocate\n"
        "  barrier of %x over didx\n  copy %x -> %s\n"
        "  %h = allgather %x -> %all over didx\n{}  get %s from (%r + 1) % 2 over didx -> %y\n{}  free %all\n"
    )
    sharded = {"inputs": "%x: f32[2@didx, 3]", "result": "f32[1, 3]"}
    assert kinds(program(body.format("  wait %h\n", ""), **sharded)) == []
    assert kinds(program(body.format("", "  wait %h\n"), **sharded)) == ["race"]


def test_a_barrier_at_the_beginning_or_the_end_orders_calls() -> None:
    body = (
        "  %s: f32[4, 6] = allocate_symmetric\n{}  copy %x -> %s\n  barrier of %x over didx\n"
        "  get %s from (%r + 1) % 2 over didx -> %y\n{}"
    )
    barrier = "  barrier of %x over didx\n"
    assert kinds(program(body.format(barrier, ""))) == []
    assert kinds(program(body.format("", barrier))) == []
    assert kinds(program(body.format("", "")), calls=1) == []
    assert kinds(program(body.format("", ""))) == ["race"]


def test_epochs_restart_with_every_call() -> None:
    body = (
        "  %s: f32[4, 6] = allocate_symmetric\n  %f: flag[2] = allocate_symmetric\n  %p = rank of %x over didx\n"
        "  put %x -> %s at (%r + 1) % 2 over didx\n  signal %f[0] = 1 at (%r + 1) % 2 over didx\n"
        "  wait_signal %f[0] >= 1\n  copy %s -> %y\n{}"
    )
    closing = "  signal %f[1] = 1 at (%r + 1) % 2 over didx\n  wait_signal %f[1] >= 1\n"
    assert kinds(program(body.format(closing))) == []
    assert kinds(program(body.format(""))) == ["race"]


def test_a_finding_names_both_statements_with_rank_and_stream_and_a_statement_to_insert() -> None:
    text = str(program(f"  set_stream 0\n  relu %x -> %y\n{JOIN}"))
    (finding,) = hi.check(hi.parse(text, "p.hir"))
    lines = str(finding).splitlines()
    assert lines[0].startswith("p.hir:8:3: error: race on %x: 'relu %x -> %y' reads it, while the caller")
    assert "  expected: an order between the caller's stream of rank 0 and stream 0 of rank 0" in lines
    assert any(line.startswith("  hint: on stream 0, 'synchronize %user' before it") for line in lines)
    assert "p.hir:8:3: note: rank 0, stream 0, call 1: 'relu %x -> %y'" in lines


def test_a_race_is_reported_once_for_all_ranks_rounds_and_calls() -> None:
    body = f"  set_stream 0\n  for %i in 0..8 {{\n    relu %x -> %y\n  }}\n{JOIN}"
    findings = hi.check(program(body))
    assert [d.message.split(":")[0] for d in findings] == ["race on %x"]
    assert isinstance(findings[0], Finding)
    assert findings[0].times > 30


def test_a_leak_is_a_warning_and_the_program_is_proved() -> None:
    leaking = program("  %t: f32[4, 6] = allocate\n  relu %x -> %t\n  relu %t -> %y\n")
    (finding,) = hi.check(leaking)
    assert (finding.level, finding.message.split()[0]) == ("warning", "%t")
    assert prove(leaking) is leaking


def test_proving_raises_all_errors() -> None:
    with pytest.raises(HostIRError) as wrong:
        prove(program("  set_stream 0\n  relu %x -> %y\n"))
    assert len(wrong.value.diagnostics) >= 2


@pytest.mark.parametrize(
    ("unchecked", "reason"),
    [
        (program("  for %i in 0..200000 { relu %x -> %y }\n"), "1600012 statements over all ranks"),
        (program("  relu %x -> %y\n", "%x: f32[35/M], %z: f32[M/5]", result="f32[35/M]"), "no small values of M"),
    ],
    ids=["too long", "no small sizes"],
)
def test_a_program_that_cannot_be_checked_is_not_proved(unchecked: Program, reason: str) -> None:
    (finding,) = hi.check(unchecked)
    assert (finding.level, finding.category) == ("error", "unchecked")
    assert f"@p was not checked for races: {reason}" in finding.message
    for _ in range(2):
        with pytest.raises(HostIRError, match=f"not checked for races: {reason}") as refused:
            prove(unchecked)
        assert "or run it unproved: check=False, --no-check" in str(refused.value)
    with pytest.raises(HostIRError, match="not checked for races"):
        repair(unchecked)


def test_symbolic_sizes_are_checked_at_small_sizes_with_more_rounds_than_streams() -> None:
    text = (
        "program @p(%x: f32[S, M, K/2]) -> (%y) streams 3 {{\n  %user = current_stream\n"
        "  %y: f32[S, M, K/2] = allocate\n  for %s in 0..3 {{ set_stream %s   synchronize %user }}\n"
        "  for %i in 0..S {{\n"
        "    set_stream %i % 3\n    %a = select %x[%i]\n    %b = select %y[{}]\n    relu %a -> %b\n  }}\n"
        "  set_stream %user\n  for %s in 0..3 {{ synchronize %s }}\n}}\n"
    )
    clean, wraps = (hi.parse(HEAD + text.format(index)) for index in ("%i", "%i % 4"))
    assert hi.check(clean) == []
    assert analyse(clean).sizes == {"S": 8, "M": 2, "K": 2}
    assert "race" in [d.category for d in hi.check(wraps)]
    assert hi.check(clean, sizes={"S": 2, "M": 5, "K": 8}) == []


def test_a_number_of_ranks_that_differs_from_the_mesh_is_refused() -> None:
    (finding,) = hi.check(program("  relu %x -> %y\n"), ranks=8)
    assert finding == Diagnostic("@p is for 2 ranks, not 8", expected="2 ranks")


def test_a_local_copy_between_overlapping_parts_is_refused_unless_both_are_the_same() -> None:
    copies = (
        "  %s: f32[4, 6] = allocate_symmetric\n  put %x -> %s at %r over didx\n"
        "  %rows: f32[2, 12] = reshape %s\n  %turned = permute %rows (1, 0)\n  %columns: f32[12, 2] = reshape %s\n"
        "  {copy}\n  relu %s -> %y\n"
    )
    assert kinds(program(copies.format(copy="put %columns -> %columns at %r over didx"))) == []
    (finding,) = hi.check(program(copies.format(copy="put %turned -> %columns at %r over didx")))
    assert finding.message == "rank 0: it copies a part of %s to another part that overlaps it, on the same rank"
    assert finding.span
    assert finding.span.line == 12


# Hardware queues --------------------------------------------------------------------------------------------------
def signalled_last() -> Program:
    """Return a program in which all streams but the last wait for a signal that is issued later on the last stream."""
    return program(
        "  %f: flag[1] = allocate_symmetric\n"
        "  for %s in 0..2 {\n    set_stream %s\n    wait_signal %f[0] >= 1\n  }\n"
        "  set_stream %user\n  signal %f[0] = 1 at %r over didx\n  relu %x -> %y\n"
        "  for %s in 0..2 { synchronize %s }\n"
    )


def test_streams_that_share_a_queue_deadlock_behind_a_wait_for_a_later_signal() -> None:
    findings = shared_queues(signalled_last(), {})
    assert kinds(signalled_last()) == []
    assert [d.category for d in findings if isinstance(d, Finding)] == ["queues shared"]
    assert "wait_signal %f[0] >= 1" in str(findings[0])
    assert "signal %f[0] = 1 at %r over didx" in str(findings[0])


def test_lowered_programs_run_on_one_queue() -> None:
    for strategy in ("sequential", "pipeline", "ring", "fused", "push"):
        assert shared_queues(hi.lower(patterns.mlp(ranks=4, S=4, M=64), strategy), {}) == []
