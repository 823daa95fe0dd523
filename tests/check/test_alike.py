"""The checker may analyse rank 0 in place of all ranks: the verdict equals the verdict on all ranks."""

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
from hostir.check.one_rank.alike import alike
from hostir.check.one_rank.torus import PerRank, Torus, UnlikeError
from hostir.check.proof import analyse, analyse_quickly, judge
from hostir.check.small_sizes import small_sizes
from hostir.ir import Program
from hostir.lower import STRATEGIES
from tests.judging.mutants import mutants
from tests.judging.mutation import on_grid, originals, tiny

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
    "for %i in 0..4 { signal %there[%r] = 9 at (%r + %i) % 4 over didx }\n"
    "%c: f32[4, 4] = allocate\nmatmul %all, %b -> %c ready %there >= %r + 1 from 0",
    "set_stream %r % 2",
    "%h = send %x to (%r + 1) % 4 over didx\nwait %h",
]


GRID_HEAD = """hostir 1
mesh @grid [dp, tp] = (0 1) (2 3)
mesh @flat [didx] = 0 1 2 3
program @p(%x: f32[2@dp, 2@tp, 8], %v: f32[4@didx, 8] on @flat) -> (%y) streams 2 {
  %p = rank of %x over dp
  %q = rank of %x over tp
  %r = rank of %v over didx
  %all: f32[2, 2, 8] = allocate_symmetric
  %flat: f32[4, 8] on @flat = allocate_symmetric
  %there: flag[12] = allocate_symmetric
  %y: f32[2@dp, 2@tp, 8] = allocate
"""
GRID_MINE = "%mine: f32[2@dp, 2@tp, 8] = shard %all\n"
GRID_READY = (
    GRID_MINE + "%f: flag[2] = allocate_symmetric\nput %x -> %mine at (%q + 1) % 2 over tp\n"
    "%w: f32[8, 3] = allocate\n%c: f32[2, 3] = allocate\nmatmul %row, %w -> %c ready %f >= 1 from %q\n"
    "signal %f[%q] = 1 at %q over tp\nsignal %f[%q] = 1 at (%q + 1) % 2 over tp"
)
GRID_LIKE = [
    "%row = select %all[%p]\n" + GRID_READY,
    GRID_MINE + "put %x -> %mine at (%p + 1) % 2 over dp\nput %x -> %mine at (%q + 1) % 2 over tp",
    "%row = select %all[%p]\nput %row -> %row at (%q + 1) % 2 over tp",
    "signal %there[(%q * 2) + %p] = 1 at %p over dp\nsignal %there[(%q * 2) + ((%p + 1) % 2)] = 1 at %p over dp",
    "signal %there[%q] = 1 at (%p + 1) % 2 over dp",
    "barrier of %v over didx\nbarrier of %x over dp",
]
GRID_UNLIKE = [
    "%row = select %all[0]\n" + GRID_READY,
    "if %p == 0 { relu %x -> %y }",
    "if %q == 0 { barrier of %x over dp }",
    GRID_MINE + "put %x -> %mine at %q over dp",
    GRID_MINE + "put %x -> %mine at 0 over tp",
    "%mine = chunk %flat[%r of 4]\nput %v -> %mine at (%r + 1) % 4 over didx",
    "%row = select %all[(%p + %q) % 2]\nput %row -> %row at (%q + 1) % 2 over tp",
    GRID_MINE + "put %x -> %mine at %p over dp\n%row = select %all[0]\nput %row -> %row at (%q + 1) % 2 over tp",
    "signal %there[%p + %q] = 1 at %p over dp",
    "signal %there[%p + (3 * %q)] = 1 at %p over dp",
    "signal %there[%q] = 1 at %p over dp\nsignal %there[%p] = 1 at %p over dp\nsignal %there[0] = 2 at %p over dp",
    "signal %there[(%p * 2) + %q] = 1 at %p over dp\nsignal %there[%p * 2] = 2 at %p over dp",
    "signal %there[0] = %q + 1 at %p over dp",
    "set_stream %q",
]


def assert_one_rank_stands_for_all(program: Program, *, compare: bool = False) -> None:
    """Assert that rank 0 stands for all ranks and has no findings; `compare` its accesses with a full analysis."""
    order = alike(program, {}, 2)
    assert order is not None
    assert judge(program, order, {}, 2).findings == []
    if compare:
        full = analyse(program, calls=2).order
        assert full is not None
        assert touches(order.events) == touches(full.events)


def test_an_output_that_is_another_part_on_each_rank_is_checked_on_all_ranks() -> None:
    body = "%z: f32[4, 4@didx, 8] = allocate\nfor %i in 0..4 { %t = select %z[%i] relu %x -> %t }\n%out = select %z[%r]"
    text = HEAD.replace("(%y)", "(%out)") + body + "\nrelu %x -> %y\nfree %y\n}"
    program = hi.parse(text)
    assert alike(program, {}, 2) is None
    assert hi.check(program) == []


def order_of(body: str) -> object:
    return alike(hi.parse(HEAD + body + "\n}"), {}, 2)


@pytest.mark.parametrize("body", LIKE)
def test_ranks_are_alike_if_they_differ_by_a_shift_of_their_positions(body: str) -> None:
    assert order_of(body) is not None


@pytest.mark.parametrize("body", UNLIKE)
def test_ranks_are_not_alike_if_they_differ_in_more_than_a_shift(body: str) -> None:
    assert order_of(body) is None


@pytest.mark.parametrize("body", GRID_LIKE)
def test_ranks_of_a_grid_are_alike_if_they_differ_by_a_shift_along_each_axis(body: str) -> None:
    program = hi.parse(GRID_HEAD + body + "\n}")
    order, full = alike(program, {}, 2), analyse(program).order
    assert order is not None
    assert full is not None
    assert touches(order.events) == touches(full.events)


@pytest.mark.parametrize("body", GRID_UNLIKE)
def test_ranks_of_a_grid_are_not_alike_if_they_differ_in_more_than_a_shift(body: str) -> None:
    assert alike(hi.parse(GRID_HEAD + body + "\n}"), {}, 2) is None


MESHES = [
    ("@m [didx] = 0 1 2 3 4 5 6 7", None, (8,)),
    ("@m [dp, tp] = (0 1 2 3) (4 5 6 7)", None, (2, 4)),
    ("@m [dp, tp] = (0 1 2 3) (4 5 6 7)", "@n [didx] = 0 1 2 3 4 5 6 7", (2, 4)),
    ("@m [dp, tp] = (0 1 2 3 4 5 6 7)", "@n [dp, tp] = (0) (1) (2) (3) (4) (5) (6) (7)", (8,)),
    ("@m [dp, tp] = (0 1 2 3) (4 5 6 7)", "@n [dp, tp] = (0 1) (2 3) (4 5) (6 7)", None),
    ("@m [dp, tp] = (0 2 4 6) (1 3 5 7)", None, None),
    ("@m [dp, cp, tp] = ((0 1) (2 3)) ((4 5) (6 7))", None, (2, 2, 2)),
    ("@m [dp, cp, tp] = ((0 1) (2 3)) ((4 5) (6 7))", "@n [didx] = 0 1 2 3 4 5 6 7", (2, 2, 2)),
    ("@m [dp, cp, tp] = ((0 1) (2 3)) ((4 5) (6 7))", "@n [dp, tp] = (0 1 2 3) (4 5 6 7)", None),
    ("@m [didx] = 0 1 2 3", "@n [didx] = 4 5 6 7", None),
    ("@m [didx] = 0 1 2 3 4 5 6 7", "@n [didx] = 1 0 2 3 4 5 6 7", None),
]


@pytest.mark.parametrize(("mesh", "other", "shape"), MESHES)
def test_the_torus_of_a_program_contains_all_its_meshes(
    mesh: str, other: str | None, shape: tuple[int, ...] | None
) -> None:
    lines = [f"mesh {text}" for text in (mesh, other) if text]
    more = ", %z: f32[8] on @n" if other else ""
    program = hi.parse("\n".join(["hostir 1", *lines, f"program @p(%x: f32[8] on @m{more}) -> (%x) {{", "}"]))
    torus = Torus.of(program)
    assert (torus and torus.shape) == shape


def test_a_matmul_that_waits_for_another_epoch_on_each_rank_is_checked_on_all() -> None:
    signals = "for %i in 0..4 { signal %there[%r] = EPOCH at (%r + %i) % 4 over didx }\n"
    waits = "%c: f32[4, 4] = allocate\nmatmul %all, %b -> %c ready %there >= %r + 1 from 0\n"
    body = signals.replace("EPOCH", "10") + waits + signals.replace("EPOCH", "9")
    findings = hi.check(hi.parse(HEAD.replace("(%y)", "(%c)") + body + "\n}"))
    assert any("epoch" in f.message for f in findings if f.level == "error"), findings


def test_an_output_may_be_another_part_on_each_rank() -> None:
    text = HEAD.replace("(%y)", "(%mine)") + "%t: f32[4, 8] = allocate\nadd %t, %t -> %t\n%mine = chunk %t[%r of 4]\n}"
    program = hi.parse(text)
    assert alike(program, {}, 2) is not None
    quick, full = analyse_quickly(program).findings, analyse(program).findings
    assert [finding.category for finding in quick] == [finding.category for finding in full]


@pytest.mark.parametrize("compute", [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod])
def test_arithmetic_on_a_number_per_rank_is_elementwise(compute: Callable[[int, int], int]) -> None:
    random = Random(0)
    for _ in range(20):
        numbers, scalar = [random.randrange(1, 9) for _ in range(4)], random.randrange(1, 9)
        per_rank: Any = PerRank.of(numbers)
        assert on_each(compute(per_rank, scalar)) == [compute(n, scalar) for n in numbers]
        assert on_each(compute(scalar, per_rank)) == [compute(scalar, n) for n in numbers]
        assert on_each(compute(per_rank, per_rank)) == [compute(n, n) for n in numbers]


def on_each(number: Any) -> list[int]:
    return [int(n) for n in number.values] if isinstance(number, PerRank) else [number] * 4


def test_a_number_per_rank_answers_only_questions_with_one_answer_on_all_ranks() -> None:
    number: Any = PerRank.of([1, 2, 3])
    assert number < 4
    assert not number > 3
    for ask in (lambda: number > 1, lambda: number == 2, lambda: f"{number}", lambda: {number}, lambda: [0, 1][number]):
        with pytest.raises((UnlikeError, TypeError)):
            ask()


# Compared with an analysis of all ranks ---------------------------------------------------------------------------
GRIDS = ((2, 2), (2, 4), (3, 2), (4, 2))


@pytest.mark.slow
@pytest.mark.xdist_group("mutation")  # in the process that lowers all programs for tests/test_mutation.py
@pytest.mark.parametrize("part", range(8))
def test_the_accesses_to_rank_0_equal_the_accesses_in_an_analysis_of_all_ranks(part: int) -> None:
    for program in originals()[part::8]:
        sizes = small_sizes(program, {})
        assert sizes is not None, program
        order, full = alike(program, sizes, 2), analyse(program).order
        if order is not None:
            assert full is not None, program
            assert touches(order.events) == touches(full.events), program


@pytest.mark.parametrize("grid", GRIDS)
def test_one_rank_of_a_grid_stands_for_all(grid: tuple[int, int]) -> None:
    for program in on_grid(*grid):
        assert_one_rank_stands_for_all(program, compare=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_of_a_grid_of_three_axes_stands_for_all(strategy: str) -> None:
    with knobs.scope(spec=0):
        program = hi.lower(tiny(patterns.mlp_3d, 8, 2), strategy)
    assert_one_rank_stands_for_all(program, compare=True)
    assert same_verdicts(program, Random(3), 4)


def touches(events: list) -> Counter:  # type: ignore[type-arg]
    """Return the accesses to rank 0's memory, each with its event."""
    return Counter(
        (e.rank, e.call, e.verb, id(e.statement), e.rounds, a.buffer.name, a.region.offset, a.region.dims, a.does)
        for e in events
        for a in e.accesses
        if (a.rank if a.rank >= 0 else e.rank if e.seen is None else 0) == 0
    )


@pytest.mark.slow
@pytest.mark.xdist_group("mutation")
@pytest.mark.parametrize("seed", range(12))
def test_the_verdict_on_rank_0_equals_the_verdict_on_all_ranks(seed: int) -> None:
    random = Random(seed)
    program = random.choice([p for p in originals() if " put " in str(p) or " get " in str(p)])
    same_verdicts(program, random, 8)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS)
def test_the_verdict_on_a_rank_of_a_grid_equals_the_verdict_on_all_ranks(grid: tuple[int, int]) -> None:
    random = Random(sum(grid))
    assert sum(same_verdicts(program, random, 4) for program in on_grid(*grid)) > 8


def same_verdicts(program: Program, random: Random, most: int) -> int:
    """Compare the verdicts on rank 0 and on all ranks for mutants; return the number of mutants with equal ranks."""
    edits, compared = mutants(program), 0
    for mutant in random.sample(edits, min(most, len(edits))):
        try:
            edited = hi.parse(mutant.text, mutant.name)
        except hi.HostIRError:
            continue
        sizes = small_sizes(edited, {})
        order = None if sizes is None or check_structure(edited) else alike(edited, sizes, 2)
        if order is not None and sizes is not None:
            assert bool(judge(edited, order, sizes, 2).findings) == bool(analyse(edited, calls=2).findings), (
                mutant.change
            )
            compared += 1
    return compared


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pattern", [patterns.mlp, patterns.row_parallel_scattered], ids=lambda p: p.__name__)
def test_one_rank_stands_for_all_ranks_of_a_lowered_pattern(pattern: Callable[..., hi.Fusion], strategy: str) -> None:
    with knobs.scope(spec=0):
        assert_one_rank_stands_for_all(hi.lower(pattern(ranks=8, S=8, M=256), strategy))
