"""Views of the rows of a block: `with_all_rows` gives the same views for all blocks as `with_rows` for one block."""

from __future__ import annotations

import pytest
import torch

from hostir.kernels.layout import with_all_rows, with_rows

DENSE, PERMUTED, SLICES = (0, 1, 2, 3), (2, 1, 0, 3), (1, 0, 2, 3)


def tensors(order: tuple[int, ...], rows: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, a, and rows that replace one of two blocks."""
    a = torch.randn(2, 3, rows, 8).permute(order)
    return torch.zeros(2, 3, rows, 5).permute(order), a, torch.randn(a.shape[:-1].numel() // 2, 8)


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("order", [DENSE, PERMUTED, SLICES])
def test_all_blocks_at_once_equal_the_blocks_one_by_one(order: tuple[int, ...], own_rows: bool) -> None:
    out, a, mine = tensors(order)
    of_own = mine if own_rows else None
    all_blocks = with_all_rows(out, a, 2, 1, of_own)
    for block, pairs in enumerate(all_blocks):
        wanted = with_rows(out, a, block, 2, of_own if block == 1 else None)
        assert [[(x.data_ptr(), x.shape) for x in pair] for pair in pairs] == [
            [(x.data_ptr(), x.shape) for x in pair] for pair in wanted
        ]
    b = torch.randn(8, 5)
    for pairs in all_blocks:
        for to, rows in pairs:
            to.copy_(rows @ b)
    rows = a.reshape(2, -1, 8).clone()
    if own_rows:
        rows[1] = mine
    torch.testing.assert_close(out.reshape(2, -1, 5), rows @ b)


def test_no_rows_give_empty_blocks() -> None:
    out, a, mine = tensors(DENSE, rows=0)
    assert [x.shape[0] for pairs in with_all_rows(out, a, 2, 0, mine) for pair in pairs for x in pair] == [0] * 4
