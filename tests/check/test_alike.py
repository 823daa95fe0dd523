"""Ranks that are alike: rank 0 stands for all, and the verdict is that of a look at all."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

import hostir as hi
from examples import patterns
from hostir import knobs
from hostir.check import check_structure
from hostir.check.alike import PerRank, UnlikeError, alike
from hostir.check.proof import analyse, analyse_quickly, findings_of
from hostir.check.signature import small_sizes
from hostir.ir import Program
from hostir.lower import STRATEGIES
from tests.mutants import mutants
from tests.mutation import originals

HEAD = """hostir 1
mesh @mesh [didx] = 0 1 2 3
program @p(%x: f32[4@didx, 8], %b: f32[8, 4]) -> (%y) streams 2 {
  %r = rank of %x over didx
  %all: f32[4, 8] = allocate_symmetric
  %two: f32[2, 4, 8] = allocate_symmetric
  %there: flag[4] = allocate_symmetric
  %y: f32[4@didx, 8] = allocate
"""
MINE = "%mine = chunk %all[%r of 4]\n"
LIKE = [
    MINE + "put %x -> %mine at (%r + 1) % 4 over didx",
    MINE + "put %x -> %mine at (%r * 5 + 3) % 4 over didx\nsignal %there[(%r + 2) % 4] = 1 at %r over didx",
    "for %i in 0..2 { %t = select %two[%i] %m = chunk %t[%r of 4] put %x -> %m at (%r + %i) % 4 over didx }",
    "%m = chunk %two[%r of 4] axis 1\n%k = select %m[1]\nput %x -> %k at %r over didx",
]
UNLIKE = [
    "if %r == 0 { relu %x -> %y }",
    MINE + "put %x -> %mine at 1 over didx",
    MINE + "put %x -> %mine at (4 - %r) % 4 over didx",
    MINE + "put %x -> %mine at (%r / 2) over didx",
    MINE + "put %x -> %mine at %r over didx\n%first = chunk %all[0 of 4]\nrelu %first -> %y",
    MINE
    + "put %x -> %mine at %r over didx\n%half = chunk %all[1 of 2]\nget %half from (%r + 1) % 4 over didx -> %half",
    "%m = chunk %all[3 - %r of 4]\nput %x -> %m at %r over didx",
    "signal %there[%r] = 1 at %r over didx\nsignal %there[0] = 1 at (%r + 1) % 4 over didx",
    "signal %there[0] = %r + 1 at %r over didx",
    "set_stream %r % 2",
    "%h = send %x to (%r + 1) % 4 over didx\nwait %h",
]


def test_an_output_that_is_another_part_on_each_rank_is_looked_at_on_all() -> None:
    body = "%z: f32[4, 4@didx, 8] = allocate\nfor %i in 0..4 { %t = select %z[%i] relu %x -> %t }\n%out = select %z[%r]"
    text = HEAD.replace("(%y)", "(%out)") + body + "\nrelu %x -> %y\nfree %y\n}"
    program = hi.parse(text)
    assert alike(program, {}, 2) is None
    assert hi.check(program) == []


def order_of(body: str) -> object:
    return alike(hi.parse(HEAD + body + "\n}"), {}, 2)


@pytest.mark.parametrize("body", LIKE)
def test_ranks_are_alike_that_do_the_same_one_place_further_on(body: str) -> None:
    assert order_of(body) is not None


@pytest.mark.parametrize("body", UNLIKE)
def test_ranks_are_not_alike_that_differ_in_more_than_their_place(body: str) -> None:
    assert order_of(body) is None


def test_an_output_may_be_another_part_on_each_rank() -> None:
    text = HEAD.replace("(%y)", "(%mine)") + "%t: f32[4, 8] = allocate\nadd %t, %t -> %t\n%mine = chunk %t[%r of 4]\n}"
    program = hi.parse(text)
    assert alike(program, {}, 2) is not None
    assert [found.kind for found in analyse_quickly(program).findings] == [
        found.kind for found in analyse(program).findings
    ]


@pytest.mark.parametrize("compute", [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod])
def test_a_number_of_every_rank_is_computed_on_each(compute: Callable[[int, int], int]) -> None:
    random = Random(0)
    for _ in range(20):
        many, one = [random.randrange(1, 9) for _ in range(4)], random.randrange(1, 9)
        spread: Any = PerRank.of(many)
        assert on_each(compute(spread, one)) == [compute(n, one) for n in many]
        assert on_each(compute(one, spread)) == [compute(one, n) for n in many]
        assert on_each(compute(spread, spread)) == [compute(n, n) for n in many]


def on_each(number: Any) -> list[int]:
    return [int(n) for n in number.values] if isinstance(number, PerRank) else [number] * 4


def test_a_number_of_every_rank_gives_only_answers_that_hold_on_all() -> None:
    number: Any = PerRank.of([1, 2, 3])
    assert number < 4
    assert not number > 3
    for ask in (lambda: number > 1, lambda: number == 2, lambda: f"{number}", lambda: {number}, lambda: [0, 1][number]):
        with pytest.raises((UnlikeError, TypeError)):
            ask()


# Against a look at all ranks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("program", originals(), ids=lambda program: program.name)
def test_what_is_done_to_rank_0_is_what_a_look_at_all_ranks_finds_there(program: Program) -> None:
    sizes = small_sizes(program, {})
    assert sizes is not None
    order, full = alike(program, sizes, 2), analyse(program).order
    if order is None:
        return
    assert full is not None
    assert touches(order.events) == touches(full.events)


def touches(events: list) -> Counter:  # type: ignore[type-arg]
    """The accesses to rank 0's memory, each with the event that makes it."""
    return Counter(
        (e.rank, e.call, e.verb, id(e.statement), e.rounds, a.buffer.name, a.region.offset, a.region.dims, a.does)
        for e in events
        for a in e.accesses
        if (a.rank if a.rank >= 0 else e.rank if e.seen is None else 0) == 0
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_verdict_is_that_of_a_look_at_all_ranks(seed: int) -> None:
    random = Random(seed)
    program = random.choice([p for p in originals() if " put " in str(p) or " get " in str(p)])
    found = mutants(program)
    for mutant in random.sample(found, min(8, len(found))):
        try:
            edited = hi.parse(mutant.text, mutant.of)
        except hi.HostIRError:
            continue
        sizes = small_sizes(edited, {})
        order = None if sizes is None or check_structure(edited) else alike(edited, sizes, 2)
        if order is not None:
            assert bool(findings_of(edited, order)) == bool(analyse(edited, calls=2).findings), mutant.what


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_of_an_mlp_has_ranks_that_are_alike(strategy: str) -> None:
    with knobs.scope(spec=0):
        program = hi.lower(patterns.mlp(ranks=8, S=8, M=256), strategy)
    order = alike(program, {}, 2)
    assert order is not None
    assert findings_of(program, order) == []
