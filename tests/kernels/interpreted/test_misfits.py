"""Checks of indices on the device find every index that does not fit, and say where it is."""

from __future__ import annotations

import pytest
import torch

from hostir.kernels.misfits import check_indices, misfit


def found(indices: torch.Tensor, limit: int, *, ascending: bool) -> tuple[int, int] | None:
    word = torch.zeros(1, dtype=torch.int64)
    check_indices(indices, limit, word, ascending=ascending)
    return misfit(int(word))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_must_ascend_within_the_rows_of_each_source(dtype):
    offsets = torch.tensor([[0, 3, 3, 9], [2, 2, 5, 5], [0, 0, 0, 0]], dtype=dtype)
    assert found(offsets, 9, ascending=True) is None
    assert found(offsets, 8, ascending=True) == (3, 9)
    for place, value in ((4, -1), (6, 1), (8, -5)):
        wrong = offsets.clone()
        wrong.view(-1)[place] = value
        assert found(wrong, 9, ascending=True) == (place, value)
    assert found(offsets.t().contiguous().t(), 8, ascending=True) == (3, 9)


@pytest.mark.parametrize("value", [5, -1, 1 << 20, -(1 << 20)])
@pytest.mark.parametrize("place", [0, 1023, 1024, 2999])
def test_an_index_of_rows_must_be_less_than_their_number(place, value):
    index = torch.randint(0, 5, (3, 1000))
    assert found(index, 5, ascending=False) is None
    index.view(-1)[place] = value
    assert found(index, 5, ascending=False) == (place, value)
    assert found(index.int(), 5, ascending=False) == (place, value)


def test_values_of_more_than_32_bits_are_shown_as_the_nearest_one():
    assert found(torch.tensor([1 << 40]), 5, ascending=False) == (0, (1 << 31) - 1)
    assert found(torch.tensor([-(1 << 40)]), 5, ascending=False) == (0, -(1 << 31))


def test_axes_that_do_not_merge_are_checked_part_by_part():
    index = torch.zeros(2, 5, 3, 4, dtype=torch.int32)[:, :3].transpose(1, 2)
    assert found(index, 1, ascending=False) is None
    index[1, 2, 0, 3] = 1
    assert found(index, 1, ascending=False) is not None
    assert found(index[:0], 1, ascending=False) is None
