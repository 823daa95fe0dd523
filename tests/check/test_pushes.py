"""Waiting matmuls that overlap the copies by SMs directly before them: the orders that they need."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hostir as hi
from hostir.call.local import rehearse
from hostir.call.random import random_inputs
from hostir.ir import HostIRError
from hostir.ir.onesided_ops import Put
from tests.judging.simulated import outcome

HEAD = """hostir 1
mesh @mesh [x] = 0 1
program @p(%a: f32[2@x, 4], %b: f32[4, 4]) -> (%c) streams 1 {
  %user = current_stream
  %r = rank of %a over x
  %full: f32[2, 4] = allocate_symmetric
  %there: flag[2] = allocate_symmetric
  %mine: f32[2@x, 4] = shard %full
  %c: f32[2, 4] = allocate
  %t: f32[2@x, 4] = allocate
  %w: f32[4, 4] = allocate_symmetric
  relu %a -> %t
  barrier of %full over x
"""
TO_PEER = ["put %t -> %mine at 1 - %r over x by 4 sms", "signal %there[%r] = 1 at 1 - %r over x"]
TO_SELF = ["put %t -> %mine at %r over x by 4 sms", "signal %there[%r] = 1 at %r over x"]
MATMUL = "matmul %full, %b -> %c ready %there >= 1 from %r"


def program(*lines: str) -> hi.Program:
    return hi.parse(HEAD + "".join(f"  {line}\n" for line in lines) + "}\n", "p.hir")


def kinds(*lines: str) -> set[str]:
    """Return the categories of the checker's findings. Simulated ranks must find an error exactly if there are any."""
    drawn = program(*lines)
    findings = {getattr(f, "category", "structure") for f in hi.check(drawn) if f.level == "error"}
    machine = rehearse(drawn, [random_inputs(drawn, {}, seed) for seed in (1, 2)])
    observed = [error for seed in range(3) if isinstance(error := outcome(machine, seed, watch=True), str)]
    assert bool(findings) == bool(observed), f"checker: {findings}; simulated ranks: {observed}"
    return findings


def test_rows_followed_by_their_flags_are_ordered() -> None:
    assert kinds(*TO_SELF, *TO_PEER, MATMUL) == set()
    assert kinds(*TO_PEER, *TO_SELF, MATMUL) == set()


def test_local_rows_need_a_flag_after_them() -> None:
    early = "signal %there[%r] = 1 at %r over x"
    assert kinds(early, *TO_SELF[:1], *TO_PEER, MATMUL) & {"race", "unwritten"}
    assert kinds(early, *TO_SELF[:1], *TO_PEER, "relu %t -> %t", MATMUL) == set(), "a kernel in between orders them"


def test_a_dense_statement_orders_nothing() -> None:
    to_w = ["put %b -> %w at %r over x by 4 sms", *TO_SELF, *TO_PEER]
    assert kinds(*to_w, "%d = dense %a", MATMUL.replace("%b", "%w")) & {"race", "unwritten"}
    assert kinds(*TO_SELF, *TO_PEER, "%d = dense %b", MATMUL.replace("%b", "%d")) == set()


@pytest.mark.parametrize("change", ["set_stream 0", "relu %a -> %a"])
def test_other_operands_are_ordered_after_the_copies_only_by_a_statement_in_between(change: str) -> None:
    to_w = ["put %b -> %w at %r over x by 4 sms", *TO_SELF, *TO_PEER]
    reads_w = MATMUL.replace("%b", "%w")
    assert kinds(*to_w, reads_w) & {"race", "unwritten"}
    if change == "set_stream 0":
        assert kinds(*to_w, change, "synchronize %user", reads_w, "set_stream %user", "synchronize 0") == set()
    else:
        assert kinds(*to_w, change, reads_w) == set()


def test_a_synchronize_after_the_copies_orders_the_matmul() -> None:
    to_w = ["put %b -> %w at %r over x by 4 sms", *TO_SELF, *TO_PEER]
    assert kinds(*to_w, "synchronize %user", MATMUL.replace("%b", "%w")) == set()
    aside = ["%s: f32[4, 4] = allocate", "set_stream 0", "synchronize %user", "relu %b -> %s", "set_stream %user"]
    assert kinds(*aside, *to_w, "synchronize 0", MATMUL.replace("%b", "%s"), "free %s") == set()


def test_a_negative_number_of_sms_is_refused() -> None:
    (put,) = [s for s in program(*TO_SELF, *TO_PEER, MATMUL).walk() if isinstance(s, Put)][:1]
    with pytest.raises(HostIRError, match="put by -1 sms"):
        replace(put, sms=-1).verify()


def test_the_result_must_not_overlap_the_sources_of_the_copies() -> None:
    filled = ["%o: f32[2, 4] = allocate", "%q: f32[2, 4] = allocate_symmetric", "%h = chunk %b[0 of 2] axis 0"]
    copied = ["relu %h -> %o", "put %o -> %q at 1 - %r over x by 4 sms", *TO_SELF, *TO_PEER]
    into_o = MATMUL.replace("-> %c", "-> %o")
    assert kinds(*filled, *copied, into_o, "relu %o -> %c") == {"race"}
    assert kinds(*filled, *copied, "relu %t -> %t", into_o, "relu %o -> %c") == set()


def test_a_statement_after_the_matmul_comes_after_the_copies() -> None:
    assert kinds(*TO_SELF, *TO_PEER, MATMUL, "relu %a -> %t") == set()


def test_copies_on_another_stream_may_find_all_sms_held_by_the_waiting_kernel() -> None:
    behind = ["set_stream 0", "synchronize %user", *TO_PEER, "set_stream %user"]
    assert "SMs held" in kinds(*TO_SELF, *behind, MATMUL, "synchronize 0")


def test_earlier_copies_of_another_kernel_may_find_all_sms_held_by_the_waiting_kernel() -> None:
    first = ["%first: flag[1] = allocate_symmetric", "set_stream 0", "synchronize %user"]
    marked = ["put %b -> %w at %r over x by 4 sms", "signal %first[0] = 1 at %r over x"]
    then = ["set_stream %user", "wait_signal %first[0] >= 1", MATMUL, "synchronize 0"]
    assert "SMs held" in kinds(*first, *marked, *TO_SELF, *TO_PEER, *then)
    assert kinds(*first, *TO_SELF, *TO_PEER, *marked, *then) == set()
