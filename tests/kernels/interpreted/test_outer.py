"""Sums of outer products of rows in groups in Triton equal ATen's."""

from __future__ import annotations

import math

import pytest
import torch

from hostir.kernels import aten, outer
from hostir.kernels.matmul.operands import DTYPES
from tests.kernels.interpreted.test_grouped import OFFSETS


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_sums_of_groups_equal_atens(offsets, dtype, adds, monkeypatch):
    begins = torch.tensor(offsets, dtype=torch.int32)
    x, y = torch.randn(len(offsets), 50, 37).to(dtype), torch.randn(50, len(offsets), 41).to(dtype).transpose(0, 1)
    for source, row in enumerate(offsets):  # rows of no group hold anything
        for t in (x, y):
            t[source, : row[0]] = math.nan
            t[source, row[-1] :] = math.nan
    old = torch.randn(4, 41, 37).to(dtype).mT
    wanted, ours = old.clone(), old.clone() if adds else torch.full_like(old, math.nan)
    aten.grouped_outer(wanted, x, y, begins, *([wanted] if adds else []))
    with monkeypatch.context() as patch:
        patch.setattr(outer.aten, "grouped_outer", None)  # the Triton kernel must compute it
        outer.grouped_outer(ours, x, y, begins, *([ours] if adds else []))
    torch.testing.assert_close(ours, wanted, rtol=max(2e-5, 2 * torch.finfo(dtype).eps), atol=1e-4)


@pytest.mark.parametrize("most", [1, 2, 64])
@pytest.mark.parametrize(("sources", "columns"), [(1, 64), (5, 64), (5, 50)])
def test_the_rows_of_any_number_of_sources_are_summed(sources, columns, most, monkeypatch):
    monkeypatch.setattr(outer, "MAX_SOURCES", most)
    x, y = torch.randn(sources, 40, 32), torch.randn(sources, 40, columns)
    offsets = torch.randint(0, 41, (sources, 4)).sort(-1).values
    out, wanted = torch.full((3, 32, columns), math.nan), torch.empty(3, 32, columns)
    outer.grouped_outer(out, x, y, offsets)
    aten.grouped_outer(wanted, x, y, offsets)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("offsets", [[0, 30, 10, 50], [-1, -1, -1, -1], [0, 60, 70, 80], [9, 3, 99, -5]])
def test_offsets_that_do_not_fit_read_nothing_outside(offsets):
    rows = torch.full((70, 8), math.nan)
    rows[10:60] = torch.randn(50, 8)
    out = torch.full((3, 8, 5), math.nan)
    outer.grouped_outer(out, rows[10:60], torch.randn(50, 5), torch.tensor(offsets))
    assert not out.isnan().any()


def test_no_sources_give_0():
    out = torch.full((2, 8, 5), math.nan)
    outer.grouped_outer(out, torch.empty(0, 4, 8), torch.empty(0, 4, 5), torch.zeros(0, 3, dtype=torch.int64))
    assert not out.any()


def test_aten_computes_f64_and_groups_without_rows_give_0():
    x, y, offsets = torch.randn(6, 8).double(), torch.randn(6, 5).double(), torch.tensor([0, 2, 6])
    out = torch.empty(2, 8, 5, dtype=torch.float64)
    outer.grouped_outer(out, x, y, offsets)
    torch.testing.assert_close(out, torch.stack([x[:2].t() @ y[:2], x[2:].t() @ y[2:]]))
    empty = torch.full((2, 8, 5), math.nan)
    outer.grouped_outer(empty, torch.empty(0, 8), torch.empty(0, 5), torch.zeros(3, dtype=torch.int64))
    assert not empty.any()
