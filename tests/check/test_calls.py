"""How many calls are looked at: two, but where kernels that wait may meet what needs SMs in calls before the last."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

import hostir as hi
from hostir.check.proof import JOIN, analyse
from hostir.ir import Program
from hostir.ir.source import UNCHECKED
from tests.mutants import mutants
from tests.mutation import errors, originals

# The signal of a call waits for a relu two calls before: z, in the call before, for y, which is behind that relu.
# Either rank's kernel of call 3 may keep the relu of call 1 from its SMs, and the other's signal with it.
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

# Nothing ever joins stream 0: its relu may wait for SMs through any number of calls, and nobody waits for it.
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


def test_a_ring_over_calls_is_found_that_two_ranks_meet_first_in_the_third() -> None:
    program = hi.parse(BEHIND)
    assert not hi.check(program, calls=2)
    assert [found.kind for found in hi.check(program, calls=3)] == ["SMs held"]
    assert [found.kind for found in hi.check(program)] == ["SMs held"]


def test_what_no_number_of_calls_would_show_is_unchecked() -> None:
    (found,) = hi.check(hi.parse(APART))
    assert (found.kind, found.hint) == (UNCHECKED, JOIN)


@pytest.mark.xdist_group("mutation")  # in the process that lowers all programs for tests/test_mutation.py
def test_two_calls_suffice_for_lowered_programs() -> None:
    assert len(waiting()) > 10
    for program in waiting():
        assert analyse(program).calls == 2, program


@pytest.mark.xdist_group("mutation")
@pytest.mark.parametrize("seed", range(6))
def test_more_calls_show_nothing_new(seed: int) -> None:
    random = Random(seed)
    program = random.choice(waiting())
    for mutant in random.sample(mutants(program), 6):
        try:
            edited = hi.parse(mutant.text, mutant.of)
        except hi.HostIRError:
            continue
        found = hi.check(edited)
        if all(d.kind != UNCHECKED for d in found):
            assert bool(errors(found)) == bool(errors(hi.check(edited, calls=program.ranks + 2))), mutant.what
