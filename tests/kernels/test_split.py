from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hostir.kernels.matmul.kernel import first_step
from hostir.kernels.matmul.schedule import Schedule, schedule
from hostir.kernels.matmul.tiles import MAX_PARTS, MIN_STEPS

SHAPES = {
    "tiles": st.integers(1, 700),
    "steps": st.integers(1, 300),
    "sms": st.integers(1, 140),
    "split": st.integers(0, 150),
    "most": st.integers(2, MAX_PARTS),
}


@given(parts=st.integers(1, 66), steps=st.integers(1, 5000))
def test_parts_differ_by_at_most_one_step(parts, steps):
    firsts = [first_step.fn(part, parts, steps) for part in range(parts + 1)]
    sizes = {stop - first for first, stop in itertools.pairwise(firsts)}
    assert (firsts[0], firsts[-1]) == (0, steps)
    assert max(sizes) - min(sizes) <= 1


@given(**SHAPES)
def test_every_part_has_its_own_program_and_is_long_enough(tiles, steps, sms, split, most):
    plan = schedule(tiles, steps, sms, split, most)
    assert 1 <= plan.programs <= sms
    if not plan.parts:
        assert plan.unsplit == tiles
        return
    left = tiles - plan.unsplit
    assert left == min(split, tiles)
    assert 2 <= plan.parts <= most
    assert left * plan.parts <= plan.programs
    assert plan.parts * MIN_STEPS <= steps


@given(**SHAPES)
def test_programs_with_fewer_unsplit_tiles_take_parts_first(tiles, steps, sms, split, most):
    plan = schedule(tiles, steps, sms, split, most)
    left = tiles - plan.unsplit
    mine = {program: part_of(program, plan, left) for program in range(plan.programs)}
    parts = [part for part in mine.values() if part[0] < left]
    assert sorted(parts) == [(tile, part) for tile in range(left) for part in range(plan.parts)]
    busy = {program: len(range(program, plan.unsplit, plan.programs)) for program in mine}
    with_part = [busy[program] for program, part in mine.items() if part[0] < left]
    without = [busy[program] for program, part in mine.items() if part[0] >= left]
    assert not with_part or not without or max(with_part) <= min(without) + 1
    if with_part and without and plan.unsplit % plan.programs:
        assert min(busy.values()) in with_part


def part_of(program: int, plan: Schedule, split: int) -> tuple[int, int]:
    """Compute `part_of` of the matmul kernel on the host."""
    number = (program - plan.unsplit % plan.programs) % plan.programs
    return (number % split if number < split * plan.parts else split, number // max(split, 1))


def test_a_last_wave_of_few_tiles_is_split():
    assert schedule(416, 256, 132, 20) == Schedule(132, 396, 6)
    assert schedule(416, 256, 132, 52) == Schedule(132, 364, 2)
    assert schedule(416, 256, 132, 67) == Schedule(132, 416)  # too many to have two programs each
    assert schedule(416, 7, 132, 20) == Schedule(132, 416)  # too few steps
    assert schedule(416, 256, 132, 0) == Schedule(132, 416)
    assert schedule(7, 64, 132, 7) == Schedule(56, 0, 8)


def test_in_a_last_wave_of_many_tiles_every_part_has_a_program():
    plan = schedule(224, 128, 132, 40, 2)
    assert plan == Schedule(132, 184, 2)
    unsplit, parts = range(184 % 132), [p for p in range(132) if part_of(p, plan, 40)[0] < 40]
    assert sorted([*unsplit, *parts]) == list(range(132)), "in the last wave every program has one of either"
