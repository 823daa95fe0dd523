"""Strided regions: intersection, coverage and the index of regions, compared with explicit sets of elements."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from hostir.check.tracing.memory import Buffer, View, dense, rows_of, strides_in
from hostir.ir.regions import Near, Region, covered, dense_strides, is_dense, view_strides

SHAPES = {
    24: [(24,), (4, 6), (6, 4), (2, 3, 4), (3, 8), (2, 2, 6)],
    36: [(36,), (4, 9), (6, 6), (9, 4), (2, 3, 6), (3, 2, 6), (3, 12)],
    48: [(48,), (4, 12), (6, 8), (8, 6), (2, 4, 6), (16, 3), (2, 2, 3, 4)],
}


def drawn(random: Random, elements: int) -> tuple[Region, set[int]]:
    """Return a random view of a buffer and its elements: the buffer is reshaped, indexed, cut and permuted."""
    array = np.arange(elements).reshape(random.choice(SHAPES[elements]))
    for _ in range(random.randint(0, 4)):
        if not array.ndim:
            break
        axis, view = random.randrange(array.ndim), random.choice(("index", "piece", "permute"))
        extent = array.shape[axis]
        if view == "index":
            array = array[(slice(None),) * axis + (random.randrange(extent),)]
        elif view == "piece":
            count = random.choice([d for d in range(1, extent + 1) if extent % d == 0])
            piece = np.split(array, count, axis)
            array = piece[random.randrange(count)]
        else:
            array = array.transpose(random.sample(range(array.ndim), array.ndim))
    elements_of = np.asarray(array)
    step = [elements_of.strides[a] // elements_of.itemsize for a in range(elements_of.ndim)]
    return Region.of(int(elements_of.flat[0]), elements_of.shape, tuple(step)), set(elements_of.reshape(-1).tolist())


@pytest.mark.parametrize("elements", SHAPES)
def test_two_regions_meet_if_and_only_if_they_share_an_element(elements: int) -> None:
    random, met = Random(elements), 0
    for _ in range(5000):
        (a, mine), (b, other) = drawn(random, elements), drawn(random, elements)
        assert a.meets(b) == b.meets(a) == bool(mine & other), (a, b)
        assert (a == b) <= (mine == other)
        met += bool(mine & other)
    assert 1000 < met < 4900, "both outcomes are tried"


@pytest.mark.parametrize("elements", SHAPES)
def test_a_region_is_covered_if_and_only_if_the_union_holds_all_its_elements(elements: int) -> None:
    random, yes = Random(elements), 0
    for _ in range(2000):
        region, mine = drawn(random, elements)
        others = [drawn(random, elements) for _ in range(random.randint(0, 6))]
        union = set().union(*(s for _, s in others))
        assert covered(region, [r for r, _ in others]) == (mine <= union)
        yes += mine <= union
    assert 200 < yes < 1800, "both outcomes are tried"


@pytest.mark.parametrize("elements", SHAPES)
def test_an_intersection_is_covered_if_and_only_if_the_union_holds_all_its_elements(elements: int) -> None:
    random, yes, shared = Random(elements), 0, 0
    for _ in range(2000):
        (region, mine), (within, inside) = drawn(random, elements), drawn(random, elements)
        others = [drawn(random, elements) for _ in range(random.randint(0, 4))]
        union = set().union(*(s for _, s in others))
        assert covered(region, [r for r, _ in others], within) == (mine & inside <= union)
        shared += bool(mine & inside)
        yes += bool(mine & inside) and mine & inside <= union
    assert 200 < yes < shared - 200, "both outcomes are tried, and regions that share something"


def test_the_pieces_of_a_large_matrix_are_compared_without_writing_them_out() -> None:
    rows, columns, pieces = 32768, 16384, 64
    width = columns // pieces
    cut = [Region.of(i * width, (rows, width), (columns, 1)) for i in range(pieces)]
    assert not any(cut[0].meets(other) for other in cut[1:])
    assert cut[3].meets(Region.of(100 * columns, (columns,), (1,)))
    assert covered(Region.of(0, (rows * columns,), (1,)), cut)
    assert not covered(Region.of(0, (rows * columns,), (1,)), cut[:-1])


def test_regions_with_equal_elements_are_equal() -> None:
    assert Region.of(0, (4, 6), (6, 1)) == Region.of(0, (24,), (1,)) == Region.of(0, (6, 4), (1, 6))
    assert Region.of(5, (1, 3), (99, 2)) == Region.of(5, (3, 1), (2, 7))


def test_a_reshape_is_a_view_if_and_only_if_numpy_needs_no_copy() -> None:
    random, views = Random(5), 0
    for _ in range(3000):
        elements = random.choice(list(SHAPES))
        array = np.arange(elements).reshape(random.choice(SHAPES[elements]))
        array = array.transpose(random.sample(range(array.ndim), array.ndim))
        shape = random.choice(SHAPES[elements])
        view = View(Buffer(0, "x", elements), 0, array.shape, tuple(s // array.itemsize for s in array.strides))
        moved = array.reshape(shape)
        strides = strides_in(view, shape)
        assert (strides is not None) == np.shares_memory(moved, array)
        if strides is not None:
            views += 1
            assert strides == tuple(s // array.itemsize for s in moved.strides)
    assert 500 < views < 2900, "both outcomes are tried"


def test_blocks_of_rows_are_views_of_the_flattened_rows() -> None:
    x = dense(Buffer(0, "x", 4 * 6 * 5), (4, 6, 5))
    every_other = View(x.buffer, 5, (4, 3, 5), (30, 10, 1))  # every other of 24 rows
    blocks = [rows_of(every_other, i, 6).region for i in range(6)]
    assert [block.offset for block in blocks] == [5, 25, 45, 65, 85, 105]
    assert {block.dims for block in blocks} == {((2, 10), (5, 1))}


EXTENTS = (0, 1, 1, 2, 2, 3, 4, 6)


def regrouped(random: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return another shape of as many elements: it merges and splits axes and inserts axes of one element."""
    left, extents = 1, []
    for n in shape:
        left *= n
        factor = random.choice([f for f in (1, 2, 3, 4, 6) if left and left % f == 0] or [left])
        extents += [factor] if random.random() < 0.8 else []
        left = left // factor if extents and factor and random.random() < 0.8 else left
    tail = torch.Size(shape).numel() // max(torch.Size(extents).numel(), 1)
    return (*extents, tail)


def test_a_view_has_the_strides_of_torch_or_needs_a_copy_as_in_torch() -> None:
    random, views, copies = Random(6), 0, 0
    for _ in range(10_000):
        shape = tuple(random.choice(EXTENTS) for _ in range(random.randrange(5)))
        strides = dense_strides(shape)
        if random.random() < 0.7:
            strides = tuple(random.choice([s, s, s, 2 * s, 0, random.randrange(8)]) for s in strides)
        order = random.sample(range(len(shape)), len(shape)) if random.random() < 0.5 else range(len(shape))
        shape, strides = tuple(shape[i] for i in order), tuple(strides[i] for i in order)
        x = torch.empty_strided(shape, strides, device="meta")
        assert is_dense(shape, strides) == x.is_contiguous()
        new = random.choice([shape, regrouped(random, shape), tuple(reversed(shape))])
        try:
            expected = x.view(new).stride()
        except RuntimeError:
            expected = None
        assert view_strides(shape, strides, new) == expected, (shape, strides, new)
        views, copies = views + (expected is not None), copies + (expected is None)
    assert min(views, copies) > 700, "both outcomes are tried"


def test_a_dense_tensor_has_the_strides_of_torch() -> None:
    for shape in [(), (3,), (2, 3), (0,), (2, 0, 3), (1, 5, 1), (0, 0)]:
        assert dense_strides(shape) == torch.empty(shape, device="meta").stride()
        assert is_dense(shape, dense_strides(shape))


# The index of regions ---------------------------------------------------------------------------------------------
def region_of_few_elements(random: Random) -> Region:
    """Return a random view of a small buffer: a block, a row, a column or a single element."""
    offset, inner, step = random.randrange(200), random.choice([1, 1, 3, 8]), random.choice([8, 16, 40])
    return Region.of(offset, (random.randrange(1, 6), inner), (step, 1))


@pytest.mark.parametrize("seed", range(20))
def test_the_index_returns_all_regions_that_meet(seed: int) -> None:
    random = Random(seed)
    near: Near[int] = Near()
    known = list(dict.fromkeys(region_of_few_elements(random) for _ in range(120)))
    for n, one in enumerate(known):
        assert near.meeting(one) == [m for m in range(n) if known[m].meets(one)]
        near.add(one, n)


def test_the_index_compares_each_column_of_a_matrix_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = 0
    meets = Region.meets

    def counting(one: Region, other: Region) -> bool:
        nonlocal comparisons
        comparisons += 1
        return meets(one, other)

    monkeypatch.setattr(Region, "meets", counting)
    near: Near[int] = Near()
    for n in range(100):
        column = Region.of(8 * n, (50, 8), (800, 1))
        assert near.meeting(column) == []
        near.add(column, n)
    assert comparisons <= 200  # neighbours
    assert near.meeting(Region.of(800 + 12, (8,), (1,))) == [1, 2]
