from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hostir.kernels.layout import collapse, descriptor_strides, row_pieces, rows

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_collapsed_axes_reach_the_same_elements_in_the_same_order(shape, data):
    base = torch.arange(4**8).view([4] * 8)
    t = base.permute(data.draw(st.permutations(range(8))))[tuple(slice(0, size) for size in shape)]
    t = t[(..., *[0] * (8 - len(shape)))]
    levels = collapse(t.shape, t.stride())
    flat = t.as_strided([size for size, _ in levels], [stride for _, stride in levels])
    assert torch.equal(flat.flatten(), t.flatten())


@pytest.mark.parametrize(
    ("shape", "strides", "levels"),
    [
        ((4, 5, 6), [(30, 6, 1)], [(120, 1)]),
        ((4, 5, 6), [(40, 6, 1)], [(4, 40), (30, 1)]),
        ((4, 5), [(5, 1), (10, 1)], [(4, 5, 10), (5, 1, 1)]),  # one operand does not merge
        ((1, 5, 1), [(99, 7, 99)], [(5, 7)]),
        ((4, 5), [(0, 0)], [(20, 0)]),
        ((1, 1), [(3, 3)], []),
        ((), [()], []),
        ((3, 0), [(1, 1)], [(0, 0)]),
    ],
)
def test_neighbouring_axes_merge_if_all_strides_allow_it(shape, strides, levels):
    assert collapse(shape, *strides) == levels


def test_rows_are_a_view():
    t = torch.randn(4, 3, 10)[:, :, :8]
    assert torch.equal(rows(t), t.reshape(12, 8))
    assert rows(t).data_ptr() == t.data_ptr()
    assert rows(torch.randn(8)).shape == (1, 8)
    assert rows(torch.randn(3, 0, 8)).shape == (0, 8)
    assert rows(torch.randn(4, 3, 8)[:, :2]) is None


@given(st.lists(SHAPES, min_size=1, max_size=3), st.sets(st.integers(0, 40)), st.data())
def test_pieces_of_rows_are_the_same_rows_of_all_tensors_in_any_layouts(shapes, cuts, data):
    order = st.permutations(range(4))
    parts = [
        (torch.rand(5, 5, 5, 5).permute(data.draw(order))[(0,) * (4 - len(shape))][tuple(slice(n) for n in shape)], 0)
        for shape in shapes
    ]
    count = min(t.shape[:-1].numel() for t, _ in parts)
    parts = [(t, data.draw(st.integers(0, t.shape[:-1].numel() - count))) for t, _ in parts]
    pieces = row_pieces(parts, count, cuts)
    starts = [start for start, _ in pieces]
    assert starts == sorted({*starts})
    assert {cut for cut in cuts if cut < count} <= {0, *starts}
    for i, (t, first) in enumerate(parts):
        parts = [views[i] for _, views in pieces]
        assert [view.shape[0] for view in parts] == [b - a for a, b in itertools.pairwise([*starts, count])]
        assert torch.equal(torch.cat(parts), t.reshape(-1, t.shape[-1])[first : first + count])
        assert {view.untyped_storage().data_ptr() for view in parts} == {t.untyped_storage().data_ptr()}
    assert len(row_pieces([(torch.rand(2, 3, 8), 1)], 4)) == 1


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (bf16(4, 16), [16, 1]),
        (bf16(4, 24)[:, :13], [24, 1]),
        (bf16(3, 4, 16)[:, :2], [64, 16, 1]),
        (bf16(1, 13), [16, 1]),  # the stride of a single row is never used
        (bf16(4, 8)[:, :1], [8, 1]),
        (bf16(4, 13), "multiple of 16 bytes"),
        (bf16(4, 17)[:, 1:], "16-byte boundary"),
        (bf16(16, 4).t(), "innermost stride is 4"),
        (bf16(1, 16).expand(4, 16), "step over whole rows"),
        (bf16(4, 3, 16).transpose(0, 1), "step over whole rows"),
    ],
)
def test_tma_describes_aligned_nested_axes(t, expected):
    parts = descriptor_strides(t, t.shape, t.stride())
    if isinstance(expected, str):
        assert expected in parts
    else:
        assert parts == expected
