from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hostir.runtime.kernels.streamk import MIN_STEPS, Schedule, first_step, schedule, share_of

SHAPES = {
    "tiles": st.integers(1, 700),
    "steps": st.integers(1, 300),
    "sms": st.integers(1, 140),
    "waves": st.integers(0, 3),
}


@given(shares=st.integers(1, 150), steps=st.integers(1, 5000))
def test_shares_are_equal_but_for_a_step_and_know_their_own(shares, steps):
    shares = min(shares, steps)
    firsts = [first_step.fn(share, shares, steps) for share in range(shares + 1)]
    sizes = {stop - first for first, stop in itertools.pairwise(firsts)}
    assert (firsts[0], firsts[-1]) == (0, steps)
    assert max(sizes) - min(sizes) <= 1
    for share, (first, stop) in enumerate(itertools.pairwise(firsts)):
        assert share_of.fn(first, shares, steps) == share == share_of.fn(stop - 1, shares, steps)


@given(**SHAPES)
def test_a_schedule_keeps_to_the_multiprocessors_and_to_whole_waves(tiles, steps, sms, waves):
    plan = schedule(tiles, steps, sms, waves)
    assert 1 <= plan.programs <= sms
    assert 0 <= plan.whole <= tiles
    if not plan.shares:
        assert plan.whole == tiles
        return
    assert plan.shares <= plan.programs
    assert plan.shares * MIN_STEPS <= (tiles - plan.whole) * steps
    assert plan.whole % plan.programs == 0 or not plan.whole
    assert tiles - plan.whole <= waves * sms


@given(**SHAPES)
def test_every_sum_has_a_slot_of_its_own(tiles, steps, sms, waves):
    plan = schedule(tiles, steps, sms, waves)
    slots = [slot for slot, _ in sums_of(plan, tiles, steps)]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < plan.shares + tiles - plan.whole for slot in slots)
    if plan.shares:
        assert sum(count for _, count in sums_of(plan, tiles, steps)) == (tiles - plan.whole) * steps


def sums_of(plan: Schedule, tiles: int, steps: int) -> list[tuple[int, int]]:
    """(slot, steps) of each sum, as the kernel numbers them."""
    found = []
    total = (tiles - plan.whole) * steps
    for share in range(plan.shares):
        step, end = (first_step.fn(i, plan.shares, total) for i in (share, share + 1))
        while step < end:
            count = min(steps - step % steps, end - step)
            found.append((share + step // steps, count))
            step += count
    return found


def test_the_last_wave_is_shared_where_it_is_not_full():
    assert schedule(416, 256, 132, 1) == Schedule(132, 396, 120)  # 20 tiles by 6 each
    assert schedule(416, 256, 132, 2) == Schedule(132, 264, 132)
    assert schedule(396, 256, 132, 1) == Schedule(132, 396)  # full waves
    assert schedule(416, 7, 132, 1) == Schedule(132, 416)  # too few steps
    assert schedule(416, 256, 132, 0) == Schedule(132, 416)
    assert schedule(7, 64, 132, 1) == Schedule(112, 0, 112)
