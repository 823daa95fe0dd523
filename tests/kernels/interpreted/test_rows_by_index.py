"""Rows by an index in Triton equal ATen's."""

from __future__ import annotations

import math

import pytest
import torch

from hostir.kernels import aten, rows_by_index
from hostir.kernels.matmul.operands import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize(("lead", "columns", "width"), [((), 37, 4096), ((3,), 64, 16), ((2, 3), 21, 4096)])
def test_permuted_and_combined_rows_equal_atens(lead, columns, width, integers, dtype, monkeypatch):
    y = torch.randn(*lead, columns, 9).to(dtype).mT
    order = torch.randint(0, 9, (7, *lead)).movedim(0, -1).to(integers)
    index = torch.randint(0, 9, (*lead, 5, 3)).to(integers)
    weights = torch.randn(*lead, 5, 3)
    monkeypatch.setattr(rows_by_index, "MAX_WIDTH", width)
    for factors in (weights, weights.to(dtype)):
        wanted, ours = torch.empty(*lead, 5, columns, dtype=dtype), torch.full((*lead, columns, 5), math.nan).mT
        ours = ours.to(dtype)
        aten.combine_rows(wanted, y, index, factors)
        with monkeypatch.context() as patch:
            patch.setattr(rows_by_index.aten, "combine_rows", None)  # the Triton kernel must compute it
            rows_by_index.combine_rows(ours, y, index, factors)
        torch.testing.assert_close(ours, wanted, rtol=max(1e-6, torch.finfo(dtype).eps), atol=1e-6)
    wanted, ours = (torch.full((*lead, 7, columns), math.nan, dtype=dtype) for _ in range(2))
    aten.permute_rows(wanted, y, order)
    with monkeypatch.context() as patch:
        patch.setattr(rows_by_index.aten, "permute_rows", None)
        rows_by_index.permute_rows(ours, y, order)
    assert torch.equal(ours, wanted)


def test_sources_that_do_not_merge_are_computed_one_by_one():
    y, index = torch.randn(2, 3, 6, 8).transpose(0, 1), torch.randint(0, 6, (3, 2, 4, 2))
    wanted, ours = torch.empty(3, 2, 4, 8), torch.full((3, 2, 4, 8), math.nan)
    weights = torch.rand(3, 2, 4, 2)
    aten.combine_rows(wanted, y, index, weights)
    rows_by_index.combine_rows(ours, y, index, weights)
    torch.testing.assert_close(ours, wanted)


def test_an_index_that_does_not_fit_reads_nothing_outside():
    memory = torch.full((14, 8), math.nan)
    memory[4:10] = torch.randn(6, 8)
    out, index = torch.full((3, 8), math.nan), torch.tensor([-7, 2, 99])
    rows_by_index.permute_rows(out, memory[4:10], index)
    assert torch.equal(out, memory[4:10][[0, 2, 5]])


def test_no_rows_and_sums_without_addends():
    y = torch.randn(6, 8)
    out = torch.full((3, 8), math.nan)
    rows_by_index.combine_rows(out, y, torch.empty(3, 0, dtype=torch.int32), torch.empty(3, 0))
    assert not out.any()
    empty = torch.empty(0, 8)
    rows_by_index.permute_rows(empty, y, torch.empty(0, dtype=torch.int32))
    rows_by_index.permute_rows(empty, empty, torch.empty(0, dtype=torch.int32))
    double = torch.empty(1, 8, dtype=torch.float64)
    rows_by_index.permute_rows(double, y.double(), torch.tensor([2]))
    assert torch.equal(double, y[2:3].double())
