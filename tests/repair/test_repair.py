"""Repairs: missing synchronisation is inserted without a longer chain of dependent statements."""

from __future__ import annotations

from pathlib import Path

import pytest

import hostir as hi
from benchmarks.repair import broken, repaired
from examples import patterns
from hostir.check import check
from hostir.check.findings import Finding
from hostir.check.proof import analyse
from hostir.ir.host_ops import For, FreeBuffer, SetStream, Synchronize, Wait
from hostir.ir.onesided_ops import Barrier, Signal, WaitSignal
from hostir.ir.op import Lit, Statement
from hostir.ir.program import Program, with_hosts
from hostir.repair.places import without
from hostir.repair.repair import difference, longest_chain, redundant, repair
from tests.judging.mutants import called
from tests.judging.mutation import originals, sample, tiny
from tests.judging.simulated import outcome, rehearsal

CASES = Path(__file__).parents[1] / "cases"
ORDERING = (Synchronize, Wait, Barrier, Signal, WaitSignal)
SEEDS = 20
CORRECT = (
    "patterns/allgather_matmul-pipeline",
    "patterns/row_parallel_scattered-pipeline",
    "onesided/exchange_matmul_4",
    "onesided/get_workers",
    "onesided/reduce_scatter_put",
    "onesided/ring_put_4",
    "onesided/shared_buffer",
)
ABOUT_ORDER = (
    "flag_of_two_streams",
    "freed_in_use",
    "get_without_signal",
    "handle_never_waited",
    "input_read_after_the_call",
    "input_without_fork",
    "leak",
    "no_barrier_after_reading",
    "nvfuser_3606",
    "output_not_joined",
    "put_without_signal",
    "race_between_streams",
    "read_before_communication_ended",
    "reduce_scatter_without_closing_barrier",
    "reused_by_the_next_call",
    "two_writers",
)
NOT_ABOUT_ORDER = {
    "collective_on_one_rank": "differ in the collectives",
    "both_receive_first": "deadlock",
    "freed_twice": "freed twice",
    "handle_waited_twice": "waited for twice",
    "kernel_keeps_its_producer_out": "holds all SMs",
    "read_of_what_nobody_wrote": "nobody has written",
    "signal_of_two_ranks": "two ranks send",
    "signal_sent_twice": "sent again",
    "used_after_free": "after it was freed",
}


def program(name: str) -> Program:
    return hi.parse((CASES / f"{name}.hir").read_text(), f"{name}.hir")


def reparsed(changed: Program) -> Program:
    """Return the program parsed back from its text."""
    return hi.parse(str(changed), changed.name)


def chain(of: Program) -> int:
    """Return the length of the longest chain of work."""
    order = analyse(of).order
    assert order is not None
    return longest_chain(order)


def synchronising(of: Program) -> list[Statement]:
    """Return the statements that order others, the frees, and the loops that contain only ordering statements."""
    loops = [s for s in of.walk() if isinstance(s, For) and all(isinstance(x, (*ORDERING, SetStream)) for x in s.body)]
    return [s for s in of.walk() if isinstance(s, (*ORDERING, FreeBuffer)) or s in loops]


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_a_repair_of_deleted_synchronisation_is_proved_and_its_chain_is_not_longer(name: str) -> None:
    original, broken = program(name), 0
    for s in synchronising(original):
        wrong = reparsed(original.with_body(without(original.body, (s,))))
        if not check(wrong):
            continue
        broken += 1
        repaired = reparsed(repair(wrong))
        assert check(repaired) == [], difference(wrong, repaired)
        assert chain(repaired) <= chain(original), difference(original, repaired)
    assert broken >= 2


@pytest.mark.parametrize(("name", "deleted"), [("onesided/get_workers", For), ("onesided/ring_put_4", WaitSignal)])
def test_a_repaired_program_gives_the_original_result_in_every_order(name: str, deleted: type[Statement]) -> None:
    original = program(name)
    removed = next(s for s in synchronising(original) if isinstance(s, deleted))
    repaired = reparsed(repair(reparsed(original.with_body(without(original.body, (removed,))))))
    expected = outcome(rehearsal(original), 0)
    machine = rehearsal(repaired)
    assert isinstance(expected, list)
    assert all(outcome(machine, seed) == expected for seed in range(SEEDS))


def test_a_deleted_fork_join_wait_and_free_are_all_restored() -> None:
    original = program("patterns/allgather_matmul-pipeline")
    removed = synchronising(original)
    assert len(removed) >= 4
    wrong = reparsed(original.with_body(without(original.body, removed)))
    repaired = reparsed(repair(wrong))
    assert check(repaired) == []
    assert chain(repaired) == chain(original)


@pytest.mark.parametrize(
    ("name", "deleted"),
    [
        ("push_epochs", WaitSignal),  # a barrier instead would delay all slices
        ("push_epochs", Signal),
        ("ring_put_epochs", Signal),
        ("ready_matmul_own", Signal),  # a kernel waits for it
    ],
)
def test_a_missing_signal_or_wait_is_restored(name: str, deleted: type[Statement]) -> None:
    original = program(f"onesided/{name}")
    removed = [s for s in original.walk() if isinstance(s, deleted)]
    assert len(removed) == 1
    repaired = repair(reparsed(original.with_body(without(original.body, removed))))
    assert sorted(str(repaired).splitlines()) == sorted(str(original).splitlines())


def test_a_signal_is_restored_if_its_wait_delays_the_signal_of_the_next_epoch() -> None:
    text = """hostir 1
mesh @mesh [didx] = 0 1
program @twice(%x: f32[2@didx, 8]) -> (%y, %z) {
  %r = rank of %x over didx
  %one: f32[2@didx, 8] = allocate_symmetric
  %two: f32[2@didx, 8] = allocate_symmetric
  %there: flag[1] = allocate_symmetric
  %y: f32[2@didx, 8] = allocate
  %z: f32[2@didx, 8] = allocate
  barrier of %x over didx
  put %x -> %one at (%r + 1) % 2 over didx
  signal %there[0] = 1 at (%r + 1) % 2 over didx
  wait_signal %there[0] >= 1
  relu %one -> %y
  put %y -> %two at (%r + 1) % 2 over didx
  signal %there[0] = 2 at (%r + 1) % 2 over didx
  wait_signal %there[0] >= 2
  relu %two -> %z
}
"""
    wrong = hi.parse(text.replace("  signal %there[0] = 1 at (%r + 1) % 2 over didx\n", ""))
    assert [f.category for f in analyse(wrong).findings if isinstance(f, Finding)] == ["deadlock"]
    assert str(repair(wrong)) == str(hi.parse(text))


def test_a_repair_waits_for_the_previous_calls_kernel_that_holds_sms() -> None:
    original = program("onesided/signal_kernels")
    removed = next(s for s in original.walk() if isinstance(s, Synchronize) and s.stream == Lit(1))
    assert str(repair(reparsed(original.with_body(without(original.body, [removed]))))) == str(original)


def test_workers_are_forked_from_the_worker_that_waited_for_the_barrier() -> None:
    original = hi.lower(tiny(patterns.mlp, 4, 1), "ring")
    fork = next(s for s in original.walk() if isinstance(s, For) and called(s) == "fork")
    wrong = reparsed(original.with_body(without(original.body, [fork])))
    repaired = repair(wrong)
    added = [line[1:].strip() for line in difference(wrong, repaired).splitlines() if line[0] == "+" and line[1] != "+"]
    assert added == ["for %s in 0..2 { set_stream %s + 1   synchronize 0 }"]
    assert chain(repaired) == chain(original)


@pytest.mark.slow
@pytest.mark.xdist_group("mutation")  # tests/test_mutation.py uses the same lowered programs
def test_repairs_of_deleted_synchronisation_have_no_longer_chains() -> None:
    """Repair a sample of the mutants; `python -m benchmarks.repair` repairs all of them."""
    pairs = {mutant.text: (original, mutant) for original, mutant in broken(originals()[::8])}
    for mutant in sample([mutant for _, mutant in pairs.values()], 16):
        result = repaired(*pairs[mutant.text])
        assert result.good, f"@{mutant.name} {mutant.change}: {result.before} to {result.after} {result.why}"


@pytest.mark.slow
@pytest.mark.parametrize("slot", ["(%r_1 + (2 - %i)) % 2", "+ %i) % 2"])
def test_a_wait_for_the_rows_of_each_peer_comes_back_with_its_slot(slot: str) -> None:
    original = hi.lower(with_hosts(tiny(patterns.all_gather, 4, 2).program(), 2), "hierarchical", 2)
    (mutant,) = [m for _, m in broken([original]) if m.operator == "delete wait_signal" and slot in str(m.change)]
    result = repaired(original, mutant)
    assert result.good, f"{mutant.change}: {result.before} to {result.after} {result.why}"


def test_a_missing_signal_that_needs_several_statements_is_not_restored() -> None:
    original = program("onesided/ready_matmul")
    removed = [s for s in original.walk() if isinstance(s, Signal)]
    with pytest.raises(hi.HostIRError, match="nobody sends the signal"):
        repair(reparsed(original.with_body(without(original.body, removed))))


def test_a_repair_does_not_overwrite_unread_data() -> None:
    original = program("onesided/credits")
    # The wait for the credit to fill a buffer again.
    removed = next(s for s in original.walk() if isinstance(s, WaitSignal))
    with pytest.raises(hi.HostIRError, match="no repair was found for this: race on %box"):
        repair(reparsed(original.with_body(without(original.body, [removed]))))


@pytest.mark.parametrize("name", ABOUT_ORDER)
def test_a_finding_about_order_is_repaired_with_no_longer_chain_than_by_hand(name: str) -> None:
    wrong = program(f"findings/{name}")
    repaired = reparsed(repair(wrong))
    assert check(wrong) != []
    assert check(repaired) == []
    assert chain(repaired) <= chain(program(f"findings/{name}.fixed"))


@pytest.mark.parametrize("name", NOT_ABOUT_ORDER)
def test_a_finding_that_no_insertion_repairs_is_refused_with_a_hint(name: str) -> None:
    with pytest.raises(hi.HostIRError, match=NOT_ABOUT_ORDER[name]) as refusal:
        repair(program(f"findings/{name}"))
    assert all(d.hint for d in refusal.value.diagnostics)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, {"i0": 4, "i2": 8, "i3": 16, "i4": 64, "i5": 64, "i6": 32}])
def test_a_pipeline_without_a_fork_gets_one_fork_loop(sizes: dict[str, int] | None) -> None:
    dump = program("nvfuser/seed_3606")
    repaired = repair(dump, sizes)
    added = [line[1:].strip() for line in difference(dump, repaired).splitlines() if line[0] == "+" and line[1] != "+"]
    assert added == ["for %s in 0..4 { set_stream %s   synchronize %stream }"]
    assert check(repaired, sizes=sizes) == []


def test_a_correct_program_is_returned_unchanged() -> None:
    correct = program("patterns/mlp-pipeline")
    assert repair(correct) is correct


def test_the_caller_stream_is_named_only_if_the_repair_needs_it() -> None:
    text = """hostir 1
mesh @mesh [didx] = 0
program @p(%x: f32[8, 8]) -> (%y) streams 1 {
  %t: f32[8, 8] = allocate
  %y: f32[8, 8] = allocate
  relu %x -> %t
  STREAM
  gelu %t -> %y
}
"""
    on_worker = repair(hi.parse(text.replace("STREAM", "set_stream 0")))
    on_callers = repair(hi.parse(text.replace("  STREAM\n", "")))
    assert check(on_worker) == check(on_callers) == []
    assert "%user = current_stream" in str(on_worker)
    assert "current_stream" not in str(on_callers)


def test_a_fork_is_moved_after_the_allocation_that_its_workers_use() -> None:
    text = """hostir 1
mesh @mesh [didx] = 0
program @p(%x: f32[4, 8]) -> (%y) streams 2 {
  %user = current_stream
  for %s in 0..2 { set_stream %s   synchronize %user }
  set_stream %user
  %y: f32[4, 8] = allocate
  for %i in 0..4 {
    set_stream %i % 2
    %x_i = select %x[%i]
    %y_i = select %y[%i]
    relu %x_i -> %y_i
  }
  set_stream %user
  for %s in 0..2 { synchronize %s }
}
"""
    fork, rest = "  for %s in 0..2 { set_stream %s   synchronize %user }\n", "  for %i in 0..4 {\n"
    repaired = repair(hi.parse(text))
    assert str(repaired) == str(hi.parse(text.replace(fork, "").replace(rest, fork + rest)))


def test_a_fusion_is_refused() -> None:
    with pytest.raises(hi.HostIRError, match="is a fusion"):
        repair(program("patterns/mlp-fusion"))


def test_the_difference_names_the_file_and_shows_inserted_lines() -> None:
    wrong = program("findings/leak")
    text = difference(wrong, repair(wrong))
    assert text.startswith("--- findings/leak.hir\n+++ findings/leak.hir\n")
    assert "\n+  free %t\n" in text


def without_redundant(of: Program) -> tuple[list[Finding], Program]:
    """Return the findings about redundant statements, and the program without these statements."""
    findings = [d for d in redundant(of) if isinstance(d, Finding)]
    spans = {d.span for d in findings}
    return findings, of.with_body(without(of.body, [s for s in of.walk() if s.span in spans]))


@pytest.mark.parametrize("name", ["patterns/allgather_matmul-pipeline", "onesided/get_workers", "onesided/credits"])
def test_a_program_with_the_least_synchronisation_has_nothing_redundant(name: str) -> None:
    assert redundant(program(name)) == []


def test_the_first_of_two_equal_waits_is_redundant() -> None:
    text = (CASES / "findings/race_between_streams.fixed.hir").read_text()
    findings, lean = without_redundant(
        hi.parse(text.replace("  synchronize 0\n", "  synchronize 0\n  synchronize 0\n", 1))
    )
    assert [(d.category, d.level) for d in findings] == [("redundant", "warning")]
    assert str(lean) == str(program("findings/race_between_streams.fixed"))
    assert check(lean) == []


def test_a_join_in_every_round_is_reported_as_one_redundant_loop() -> None:
    text = (CASES / "patterns/allgather_matmul-pipeline.hir").read_text()
    loop = "  for %i in 0..4 {\n"
    findings, lean = without_redundant(hi.parse(text.replace(loop, f"{loop}    for %s in 0..4 {{ synchronize %s }}\n")))
    assert len(findings) == 1
    assert "for %s in 0..4" in findings[0].message
    assert str(lean) == str(hi.parse(text))


def test_signals_and_their_waits_are_redundant_together() -> None:
    text = (CASES / "onesided/get_barrier.hir").read_text()
    barrier = "  barrier of %mine over didx              // every part is there\n"
    pair = "  signal %more[0] = 1 at (%r + 1) % 2 over didx\n  wait_signal %more[0] >= 1\n"
    flags = "  %more: flag[1] = allocate_symmetric\n"
    assert barrier in text
    findings, _ = without_redundant(hi.parse(text.replace(barrier, flags + pair + barrier)))
    assert len(findings) == 1
    assert "signal %more[0]" in findings[0].message


def test_a_wait_for_the_caller_in_every_round_makes_a_longer_chain_than_a_fork() -> None:
    forked = program("findings/nvfuser_3606.fixed")
    text = str(forked).replace("  for %s in 0..2 { set_stream %s   synchronize %stream }\n", "")
    each = hi.parse(text.replace("set_stream %i % 2\n", "set_stream %i % 2\n    synchronize %stream\n"))
    assert check(each) == check(forked) == []
    assert chain(each) > chain(forked)


def test_a_single_worker_is_forked_and_joined_without_loops() -> None:
    text = """hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[2@didx, 8]) -> (%y) streams 2 {
  %user = current_stream
  %y: f32[2@didx, 8] = allocate
  set_stream 0
  relu %x -> %y
  set_stream %user
}
"""
    program = hi.parse(text, "one.hir")
    changed = [line for line in difference(program, repair(program)).splitlines() if line[:1] in "+-"]
    assert changed == ["--- one.hir", "+++ one.hir", "+  synchronize %user", "+  synchronize 0"]
