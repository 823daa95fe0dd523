"""Signals by kernels: a waiting matmul reserves one SM for them, and for nothing else.

The checker and the simulated ranks implement this rule independently. Each program is tried on both.
"""

from __future__ import annotations

import pytest

import hostir as hi
from examples import patterns
from hostir.ir.onesided_ops import Signal
from tests.judging.simulated import failure_of

SEEDS = 40
PUTS = """  for %i in 0..{others} {
    set_stream 0
    put %a -> %mine at (%r + {others} - %i) % {n} over x
    set_stream 1
    synchronize 0
"""
SIGNAL = "    signal %there[%r] = 1 at (%r + {others} - %i) % {n} over x by 1 sms\n"
MATMUL = "  set_stream %user\n  matmul %full, %b -> %c ready %there >= 1 from %r own %a\n"
RELU = "    relu %b -> %t\n"
JOIN = "  set_stream %user\n  synchronize 1\n"
AGAIN = "  for %i in 0..{others} {\n    set_stream 1\n" + SIGNAL + "  }\n"


def program(*parts: str, n: int = 3) -> hi.Program:
    text = f"""hostir 1
mesh @mesh [x] = {" ".join(map(str, range(n)))}
program @p(%a: f32[{n}@x, 4], %b: f32[4, 4]) -> (%c) streams 3 {{
  %user = current_stream
  %r = rank of %a over x
  %full: f32[{n}, 4] = allocate_symmetric
  %there: flag[{n}] = allocate_symmetric
  %more: flag[{n}] = allocate_symmetric
  %mine: f32[{n}@x, 4] = shard %full
  %c: f32[{n}, 4] = allocate
  %t: f32[4, 4] = allocate_symmetric
  set_stream 0
  synchronize %user
  barrier of %full over x
"""
    body = "".join(parts).replace("{others}", str(n - 1)).replace("{n}", str(n))
    return hi.parse(f"{text}{body}}}\n", "p.hir")


def kinds(drawn: hi.Program) -> set[str]:
    """Return the categories of the checker's findings, and assert that simulated ranks agree.

    They must deadlock exactly if the checker reports held SMs.
    """
    findings = {getattr(f, "category", "structure") for f in hi.check(drawn) if f.level == "error"}
    guilt = failure_of(drawn, SEEDS)
    assert bool(findings) == bool(guilt), f"checker: {findings}; simulated ranks: {guilt}"
    assert ("deadlock" in guilt) == ("SMs held" in findings)
    return findings


@pytest.mark.parametrize("n", [2, 3, 4])
def test_signals_before_the_matmul_have_an_sm(n: int) -> None:
    assert kinds(program(PUTS, SIGNAL, "  }\n", MATMUL, JOIN, n=n)) == set()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_programs_of_fused_are_accepted(ranks: int) -> None:
    for fusion in (patterns.allgather_matmul_rows(ranks=ranks), patterns.allgather_matmul(ranks=ranks, S=2)):
        lowered = hi.lower(fusion, "fused")
        by_sms = [s for s in lowered.walk() if isinstance(s, Signal) and s.sms]
        assert bool(by_sms) == (ranks > 2 or fusion.name == "allgather_matmul")  # if a copy follows another
        assert hi.check(lowered, calls=2) == []


def test_signals_after_the_matmul_may_find_all_sms_held() -> None:
    assert kinds(program(PUTS, "  }\n", MATMUL, AGAIN, JOIN)) == {"SMs held"}


def test_a_matmul_that_waits_for_the_signals_before_it_may_come_between_signals() -> None:
    later = AGAIN.replace("%there[%r]", "%more[%r]")
    assert kinds(program(PUTS, SIGNAL, "  }\n", MATMUL, later, JOIN)) == set()


@pytest.mark.parametrize("first", [RELU, "    put %b -> %t at %r over x\n"], ids=["relu", "put within the rank"])
def test_another_kernel_before_a_signal_delays_it(first: str) -> None:
    assert kinds(program(PUTS, first, SIGNAL, "  }\n", MATMUL, JOIN)) == {"SMs held"}
    assert kinds(program(PUTS, first, SIGNAL.replace(" by 1 sms", ""), "  }\n", MATMUL, JOIN)) == {"SMs held"}


def test_a_copy_by_sms_before_a_signal_delays_it_unless_the_matmul_is_ordered_after_the_copy() -> None:
    by_sms = PUTS.replace("over x\n", "over x by 2 sms\n", 1)
    assert kinds(program(by_sms, SIGNAL, "  }\n", MATMUL, JOIN)) == {"SMs held"}
    ahead = "  set_stream %user\n  synchronize 0\n"
    assert kinds(program(by_sms, SIGNAL, "  }\n", ahead, MATMUL, JOIN)) == set()


def test_the_matmul_reserves_no_sm_for_signals_of_the_previous_call() -> None:
    """They precede the signals of this call on their stream."""
    later = AGAIN.replace("%there[%r]", "%more[%r]")
    assert kinds(program(PUTS, SIGNAL, "  }\n", MATMUL, "  set_stream %user\n  synchronize 1\n", later)) == {"SMs held"}


def test_a_signal_by_a_kernel_ends_a_group_of_copies_by_sms() -> None:
    """So the matmul after it starts after the copies, and may read their results."""
    rows = "  set_stream %user\n  synchronize 0\n  for %i in 0..{n} {\n    put %b -> %t at %r over x by 2 sms\n"
    rows += "    put %a -> %mine at (%r + %i) % {n} over x by 2 sms\n"
    signal = "    signal %there[%r] = 1 at (%r + %i) % {n} over x"
    matmul = "  }\n  matmul %full, %t -> %c ready %there >= 1 from %r\n"
    assert kinds(program(rows, signal, "\n", matmul))
    assert kinds(program(rows, signal, " by 1 sms\n", matmul)) == set()


GATHER = "  set_stream 2\n  synchronize %user\n  %g: f32[{n}, 4] = allocate\n  %h = allgather %a -> %g over x\n"
GATHERED = "  wait %h\n  free %g\n"


@pytest.mark.parametrize(
    "first", [GATHER, GATHER.replace("synchronize %user", "synchronize 0")], ids=["at once", "later"]
)
def test_a_collective_that_may_overlap_the_matmul_takes_the_reserved_sm(first: str) -> None:
    """Its kernel holds this SM while it waits for more SMs, so nothing after it starts."""
    end = "  set_stream %user\n"
    assert kinds(program(PUTS, SIGNAL, "  }\n", first, MATMUL, JOIN, end, GATHERED)) == {"SMs held"}
    assert kinds(program(first, PUTS, SIGNAL, "  }\n", MATMUL, JOIN, end, GATHERED)) == {"SMs held"}
    plain = SIGNAL.replace(" by 1 sms", "")
    assert kinds(program(PUTS, plain, "  }\n", first, MATMUL, JOIN, end, GATHERED)) == set()


def test_a_collective_that_is_ordered_with_the_matmul_takes_no_reserved_sm() -> None:
    user = "  set_stream %user\n"
    assert kinds(program(PUTS, SIGNAL, "  }\n", GATHER, user, GATHERED, MATMUL, JOIN)) == set()
    assert kinds(program(PUTS, SIGNAL, "  }\n", MATMUL, GATHER, user, GATHERED, JOIN)) == set()
    behind = GATHER.replace("synchronize %user", "synchronize 1")
    assert kinds(program(PUTS, SIGNAL, "  }\n", behind, MATMUL, user, GATHERED, JOIN)) == set()


def test_a_second_waiting_matmul_takes_the_reserved_sm_unless_it_is_ordered_with_the_first() -> None:
    local = "  put %a -> %mine at %r over x\n  signal %there[%r] = 1 at %r over x\n"
    local += "  set_stream %user\n  synchronize 0\n  %d: f32[{n}, 4] = allocate\n"
    matmul = MATMUL.replace(" own %a", "")
    second = f"  set_stream 2\n  synchronize %user\n{matmul}".replace("  set_stream %user\n", "").replace("%c", "%d")
    join = "  set_stream %user\n  synchronize 2\n  free %d\n"
    assert kinds(program(local, PUTS, SIGNAL, "  }\n", second, matmul, JOIN, join)) == {"SMs held"}
    assert kinds(program(local, PUTS, SIGNAL, "  }\n", matmul, second, JOIN, join)) == set()
    plain = SIGNAL.replace(" by 1 sms", "")
    assert kinds(program(local, PUTS, plain, "  }\n", second, matmul, JOIN, join)) == set()
