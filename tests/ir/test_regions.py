"""Regions of strided views: intersection and coverage, compared with explicit sets of elements."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from hostir.check.tracer import Buffer, View, dense, rows_of, strides_in
from hostir.ir.regions import Region, covered, dense_strides, is_dense, view_strides

SHAPES = {
    24: [(24,), (4, 6), (6, 4), (2, 3, 4), (3, 8), (2, 2, 6)],
    36: [(36,), (4, 9), (6, 6), (9, 4), (2, 3, 6), (3, 2, 6), (3, 12)],
    48: [(48,), (4, 12), (6, 8), (8, 6), (2, 4, 6), (16, 3), (2, 2, 3, 4)],
}


def drawn(random: Random, elements: int) -> tuple[Region, set[int]]:
    """A view by index, piece and permutation of one buffer in one of several shapes, and its elements."""
    array = np.arange(elements).reshape(random.choice(SHAPES[elements]))
    for _ in range(random.randint(0, 4)):
        if not array.ndim:
            break
        axis, what = random.randrange(array.ndim), random.choice(("index", "piece", "permute"))
        extent = array.shape[axis]
        if what == "index":
            array = array[(slice(None),) * axis + (random.randrange(extent),)]
        elif what == "piece":
            count = random.choice([d for d in range(1, extent + 1) if extent % d == 0])
            piece = np.split(array, count, axis)
            array = piece[random.randrange(count)]
        else:
            array = array.transpose(random.sample(range(array.ndim), array.ndim))
    elements_of = np.asarray(array)
    step = [elements_of.strides[a] // elements_of.itemsize for a in range(elements_of.ndim)]
    return Region.of(int(elements_of.flat[0]), elements_of.shape, tuple(step)), set(elements_of.reshape(-1).tolist())


@pytest.mark.parametrize("elements", SHAPES)
def test_two_regions_meet_exactly_where_their_elements_do(elements: int) -> None:
    random, met = Random(elements), 0
    for _ in range(5000):
        (a, mine), (b, other) = drawn(random, elements), drawn(random, elements)
        assert a.meets(b) == b.meets(a) == bool(mine & other), (a, b)
        assert (a == b) <= (mine == other)
        met += bool(mine & other)
    assert 1000 < met < 4900, "both outcomes are tried"


@pytest.mark.parametrize("elements", SHAPES)
def test_a_region_is_covered_exactly_where_the_union_holds_all_its_elements(elements: int) -> None:
    random, yes = Random(elements), 0
    for _ in range(2000):
        region, mine = drawn(random, elements)
        others = [drawn(random, elements) for _ in range(random.randint(0, 6))]
        union = set().union(*(s for _, s in others))
        assert covered(region, [r for r, _ in others]) == (mine <= union)
        yes += mine <= union
    assert 200 < yes < 1800, "both outcomes are tried"


@pytest.mark.parametrize("elements", SHAPES)
def test_what_two_regions_share_is_covered_exactly_where_the_union_holds_it(elements: int) -> None:
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


def test_equal_sets_are_equal_regions_however_they_are_written() -> None:
    assert Region.of(0, (4, 6), (6, 1)) == Region.of(0, (24,), (1,)) == Region.of(0, (6, 4), (1, 6))
    assert Region.of(5, (1, 3), (99, 2)) == Region.of(5, (3, 1), (2, 7))


def test_a_reshape_is_a_view_exactly_where_numpy_needs_no_copy() -> None:
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
    every_other = View(x.buffer, 5, (4, 3, 5), (30, 10, 1))  # of 24 rows, 12 that are two rows apart
    blocks = [rows_of(every_other, i, 6).region for i in range(6)]
    assert [block.offset for block in blocks] == [5, 25, 45, 65, 85, 105]
    assert {block.dims for block in blocks} == {((2, 10), (5, 1))}


EXTENTS = (0, 1, 1, 2, 2, 3, 4, 6)


def regrouped(random: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many elements: axes merged, split, and axes of one element put between."""
    left, found = 1, []
    for n in shape:
        left *= n
        factor = random.choice([f for f in (1, 2, 3, 4, 6) if left and left % f == 0] or [left])
        found += [factor] if random.random() < 0.8 else []
        left = left // factor if found and factor and random.random() < 0.8 else left
    tail = torch.Size(shape).numel() // max(torch.Size(found).numel(), 1)
    return (*found, tail)


def test_a_view_has_torchs_strides_or_needs_a_copy_where_torch_says_so() -> None:
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


def test_a_dense_tensor_has_torchs_strides() -> None:
    for shape in [(), (3,), (2, 3), (0,), (2, 0, 3), (1, 5, 1), (0, 0)]:
        assert dense_strides(shape) == torch.empty(shape, device="meta").stride()
        assert is_dense(shape, dense_strides(shape))
