"""The index of regions by offset and extent finds the same regions as a comparison with all of them."""

from __future__ import annotations

from random import Random

import pytest

from hostir.ir.regions import Near, Region


def region(random: Random) -> Region:
    """A view of a buffer of a few hundred elements: blocks, rows, columns and single elements."""
    offset, inner, step = random.randrange(200), random.choice([1, 1, 3, 8]), random.choice([8, 16, 40])
    return Region.of(offset, (random.randrange(1, 6), inner), (step, 1))


@pytest.mark.parametrize("seed", range(20))
def test_the_index_finds_what_a_look_at_all_regions_finds(seed: int) -> None:
    random = Random(seed)
    near: Near[int] = Near()
    known = list(dict.fromkeys(region(random) for _ in range(120)))
    for n, one in enumerate(known):
        assert near.meeting(one) == [m for m in range(n) if known[m].meets(one)]
        near.add(one, n)


def test_columns_of_a_matrix_are_not_held_against_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    meets = Region.meets

    def counted(one: Region, other: Region) -> bool:
        nonlocal looks
        looks += 1
        return meets(one, other)

    monkeypatch.setattr(Region, "meets", counted)
    near: Near[int] = Near()
    for n in range(100):
        column = Region.of(8 * n, (50, 8), (800, 1))
        assert near.meeting(column) == []
        near.add(column, n)
    assert looks <= 200  # neighbours
    assert near.meeting(Region.of(800 + 12, (8,), (1,))) == [1, 2]
