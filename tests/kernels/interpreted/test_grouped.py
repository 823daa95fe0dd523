"""Products of rows in groups in Triton equal ATen's."""

from __future__ import annotations

import math

import pytest
import torch

from hostir.kernels import aten, grouped
from hostir.kernels.matmul.operands import DTYPES

OFFSETS = {
    "groups of any size": [[0, 3, 3, 40, 50]],
    "rows of no group": [[5, 20, 20, 33, 41]],
    "all rows in one group": [[0, 0, 50, 50, 50]],
    "no rows in any group": [[7, 7, 7, 7, 7]],
    "three sources": [[0, 10, 20, 30, 50], [2, 2, 2, 50, 50], [0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_groups_equal_atens(offsets, dtype, integers, monkeypatch):
    begins = torch.tensor(offsets, dtype=integers)
    x = torch.randn(len(offsets), 50, 37).to(dtype)
    for source, row in enumerate(offsets):  # rows of no group hold anything
        x[source, : row[0]] = math.nan
        x[source, row[-1] :] = math.nan
    w = torch.randn(4, 37, 41).to(dtype)
    for matrices in (w, w.mT.contiguous().mT, torch.stack([w, w], 1)[:, 0]):
        wanted, ours = torch.empty(len(offsets), 50, 41, dtype=dtype), torch.full((50, len(offsets), 41), math.nan)
        ours = ours.to(dtype).transpose(0, 1)
        aten.grouped_matmul(wanted, x, matrices, begins)
        with monkeypatch.context() as patch:
            patch.setattr(grouped.aten, "grouped_matmul", None)  # the Triton kernel must compute it
            grouped.grouped_matmul(ours, x, matrices, begins)
        torch.testing.assert_close(ours, wanted, rtol=max(2e-5, 2 * torch.finfo(dtype).eps), atol=2e-5)


@pytest.mark.parametrize("offsets", [[0, 30, 10, 50], [-1, -1, -1, -1], [0, 60, 70, 80], [9, 3, 99, -5]])
def test_offsets_that_do_not_fit_access_nothing_outside_and_every_row_is_written(offsets):
    x, w = torch.randn(50, 8), torch.randn(3, 8, 5)
    memory = torch.full((70, 5), math.nan)
    grouped.grouped_matmul(memory[10:60], x, w, torch.tensor(offsets))
    assert not memory[10:60].isnan().any()
    assert memory[:10].isnan().all()
    assert memory[60:].isnan().all()


def test_sources_that_do_not_merge_are_computed_one_by_one(monkeypatch):
    x, w = torch.randn(2, 3, 6, 8).transpose(0, 1), torch.randn(2, 8, 5)
    offsets = torch.randint(0, 7, (3, 2, 3)).sort(-1).values
    wanted, ours = torch.empty(3, 2, 6, 5), torch.empty(3, 2, 6, 5)
    aten.grouped_matmul(wanted, x, w, offsets)
    for most in (grouped.MAX_INTERVALS, 4):
        monkeypatch.setattr(grouped, "MAX_INTERVALS", most)
        grouped.grouped_matmul(ours.fill_(math.nan), x, w, offsets)
        torch.testing.assert_close(ours, wanted)


def test_aten_computes_f64_and_empty_results_are_left_alone():
    x, w, offsets = torch.randn(6, 8).double(), torch.randn(2, 8, 5).double(), torch.tensor([0, 2, 6])
    out = torch.empty(6, 5, dtype=torch.float64)
    grouped.grouped_matmul(out, x, w, offsets)
    torch.testing.assert_close(out, torch.cat([x[:2] @ w[0], x[2:] @ w[1]]))
    grouped.grouped_matmul(
        torch.empty(0, 5), torch.empty(0, 8), torch.randn(2, 8, 5), torch.zeros(3, dtype=torch.int64)
    )
