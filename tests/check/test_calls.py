"""The checker analyses two calls, and more if waiting kernels may overlap earlier calls that need SMs."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

import hostir as hi
from examples import patterns
from hostir.check import check, proof_of
from hostir.check.proof import JOIN, analyse
from hostir.ir import Program, parse
from hostir.ir.source import UNCHECKED
from hostir.lower import lower
from tests.judging.mutants import mutants
from tests.judging.mutation import originals
from tests.judging.simulated import errors

# The signal of a call waits for the relu of two calls before: `z` of the previous call waits for `y`, which waits for
# the relu. A kernel of call 3 may hold the SMs that the relu of call 1 needs. Then the signal of the other rank waits.
BEHIND = """hostir 1
mesh @mesh [didx] = 0 1
program @behind(%x: f32[2@didx, 8], %b: f32[8, 4]) -> (%c) streams 2 {
  %user = current_stream
  %r = rank of %x over didx
  %a: f32[2@didx, 8] = allocate_symmetric
  %z: f32[2@didx, 8] = allocate_symmetric
  %ready: flag[1] = allocate_symmetric
  %c: f32[2@didx, 4] = allocate
  %t: f32[2@didx, 8] = allocate
  copy %x -> %t
  put %x -> %a at %r over didx
  set_stream 1
  signal %ready[0] = 1 at (%r + 1) % 2 over didx
  set_stream 0
  synchronize 1                                       // y
  set_stream 1
  synchronize 0                                       // z
  set_stream 0
  synchronize %user
  relu %t -> %z
  free %t
  set_stream %user
  matmul %a, %b -> %c ready %ready >= 1 from 0
}
"""

# Nothing ever joins stream 0: its relu may wait for SMs through any number of calls.
APART = """hostir 1
mesh @mesh [didx] = 0 1
program @apart(%x: f32[2@didx, 8], %b: f32[8, 4]) -> (%c) streams 1 {
  %user = current_stream
  %r = rank of %x over didx
  %a: f32[2@didx, 8] = allocate_symmetric
  %z: f32[2@didx, 8] = allocate_symmetric
  %ready: flag[1] = allocate_symmetric
  %c: f32[2@didx, 4] = allocate
  %t: f32[2@didx, 8] = allocate
  copy %x -> %t
  put %x -> %a at %r over didx
  signal %ready[0] = 1 at (%r + 1) % 2 over didx
  set_stream 0
  synchronize %user
  relu %t -> %z
  free %t
  set_stream %user
  matmul %a, %b -> %c ready %ready >= 1 from 0
}
"""


@cache
def waiting() -> list[Program]:
    return [program for program in originals() if " ready " in str(program)]


def test_a_deadlock_that_first_occurs_in_the_third_call_is_found() -> None:
    program = hi.parse(BEHIND)
    assert not hi.check(program, calls=2)
    assert [finding.category for finding in hi.check(program, calls=3)] == ["SMs held"]
    assert [finding.category for finding in hi.check(program)] == ["SMs held"]


def test_a_program_that_needs_unboundedly_many_calls_is_reported_as_unchecked() -> None:
    (finding,) = hi.check(hi.parse(APART))
    assert (finding.category, finding.hint) == (UNCHECKED, JOIN)


@pytest.mark.slow
@pytest.mark.xdist_group("mutation")  # in the process that lowers all programs for tests/test_mutation.py
def test_two_calls_suffice_for_lowered_programs() -> None:
    assert len(waiting()) > 10
    for program in waiting():
        assert analyse(program).calls == 2, program


@pytest.mark.slow
@pytest.mark.xdist_group("mutation")
@pytest.mark.parametrize("seed", range(6))
def test_more_calls_change_no_verdict(seed: int) -> None:
    random = Random(seed)
    program = random.choice(waiting())
    for mutant in random.sample(mutants(program), 6):
        try:
            edited = hi.parse(mutant.text, mutant.name)
        except hi.HostIRError:
            continue
        findings = hi.check(edited)
        if all(d.category != UNCHECKED for d in findings):
            assert bool(errors(findings)) == bool(errors(hi.check(edited, calls=program.ranks + 2))), mutant.change


# Calls of other sizes ---------------------------------------------------------------------------------------------
ACKNOWLEDGED = """hostir 1
mesh @mesh [didx] = 0 1 2
program @acknowledged(%x: f32[3@didx, M]) -> (%y) {
  %r = rank of %x over didx
  %box: f32[2, 1, M] = allocate_symmetric
  %here: flag[2] = allocate_symmetric
  %read: flag[2] = allocate_symmetric
  %y: f32[2, 1, M] = allocate
  for %i in 0..2 {
    %b = select %box[%i]
    put %x -> %b at (%r + 2 - %i) % 3 over didx
    signal %here[%i] = 1 at (%r + 2 - %i) % 3 over didx
  }
  for %i in 0..2 {
    wait_signal %here[%i] >= 1
    %b = select %box[%i]
    %y_i = select %y[%i]
    copy %b -> %y_i
    signal %read[%i] = 1 at (%r + 1 + %i) % 3 over didx  // to the rank that has sent it
  }
  for %i in 0..2 { wait_signal %read[%i] >= 1 }
}
"""


def test_calls_of_other_sizes_share_buffers_if_no_two_calls_use_them_at_once() -> None:
    """A rank may write one half of a peer's buffer while the peer reads the other. At other sizes they overlap."""
    halves = parse(ACKNOWLEDGED)
    assert check(halves) == []
    assert not proof_of(halves, {"M": 4}).resizable
    barrier = ACKNOWLEDGED.replace("  for %i", "  barrier of %box over didx\n  for %i", 1)
    separated = parse(barrier)
    proofs = [proof_of(separated, {"M": m}) for m in (4, 5, 1)]
    assert all(proof.resizable for proof in proofs)
    assert len(set(proofs)) == 1


@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
def test_lowered_programs_share_buffers_with_calls_of_other_sizes(strategy: str) -> None:
    for pattern in (patterns.allgather_matmul_rows, patterns.mlp, patterns.row_parallel_scattered):
        program = lower(pattern(4, S=2, M="M"), strategy)  # type: ignore[arg-type]
        proofs = {proof_of(program, {"M": m}) for m in (64, 128, 200, 320)}
        assert [proof.resizable for proof in proofs] == [True], pattern
