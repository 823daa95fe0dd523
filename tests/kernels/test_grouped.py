"""Products of rows in groups: the kernels against a product of each group in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.ir.source import HostIRError
from hostir.kernels.aten import KERNELS
from tests.kernels.checking import assert_as_accurate, assert_only_view_written, embedded, filled

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def products(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the products of each group; rows of no group are 0, whatever they hold."""
    if offsets.ndim > 1:
        parts = [products(rows, w, begins) for rows, begins in zip(x, offsets, strict=True)]
        return torch.stack(parts) if parts else x.new_empty(*x.shape[:-1], w.shape[-1])
    out = x.new_zeros(len(x), w.shape[-1])
    for matrix, (begin, end) in zip(w, pairwise(offsets.tolist()), strict=True):
        out[begin:end] = x[begin:end] @ matrix
    return out


@settings(max_examples=100)
@given(st.data())
def test_groups_of_any_size_and_layout_are_as_accurate_as_torch(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    dtype, sources = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(1, 3), max_size=2))
    rows, k, n, groups = (draw(st.integers(0, 12)), *(draw(st.integers(1, 9)) for _ in range(3)))

    def layout(axes: int) -> dict[str, object]:
        pad = [draw(st.integers(0, 2)) for _ in range(axes)]
        return {"order": draw(st.permutations(range(axes))), "pad": pad, "offset": draw(st.integers(0, 1))}

    x = filled([*sources, rows, k], dtype, **layout(len(sources) + 2))
    w = filled([groups, k, n], dtype, **layout(3))
    offsets = torch.randint(0, rows + 1, (*sources, groups + 1)).sort(-1).values
    offsets = offsets.to(draw(st.sampled_from([torch.int32, torch.int64])))
    out, buffer = embedded([*sources, rows, n], dtype, **layout(len(sources) + 2))
    index: torch.Tensor | None = None
    if rows and draw(st.booleans()):
        index = torch.randint(0, rows, (*sources, rows))
    KERNELS["grouped_matmul"](out, x, w, offsets, index)
    assert_only_view_written(out, buffer)
    if index is not None:
        x = x.gather(-2, index[..., None].expand(*index.shape, k))
    exact = products(x.double(), w.double(), offsets)
    assert_as_accurate(out, products(x, w, offsets), exact, products(x.double().abs(), w.double().abs(), offsets))


def test_rows_of_no_group_become_zero_whatever_they_hold() -> None:
    x, w = torch.full((6, 4), torch.nan), torch.randn(2, 4, 3)
    x[2:4] = torch.randn(2, 4)
    out = torch.full((6, 3), torch.nan)
    KERNELS["grouped_matmul"](out, x, w, torch.tensor([2, 2, 4]))
    assert not out[:2].any()
    assert not out[4:].any()
    torch.testing.assert_close(out[2:4], x[2:4] @ w[1])


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [
        ([0, 4, 3], "offset 3 of group 2, after 4, does not fit 6 rows"),
        ([0, 4, 7], "offset 7 of group 2, after 4, does not fit 6 rows"),
        ([-1, 4, 6], "offset -1 of group 0, at the beginning, does not fit 6 rows"),
    ],
)
def test_offsets_that_do_not_fit_the_rows_are_an_error(offsets: list[int], problem: str) -> None:
    with pytest.raises(HostIRError, match=problem):
        KERNELS["grouped_matmul"](torch.empty(6, 3), torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor(offsets))


@settings(max_examples=100)
@given(st.data())
def test_outer_products_of_groups_are_as_accurate_as_torch(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    dtype, sources, adds = (
        draw(st.sampled_from(DTYPES)),
        draw(st.lists(st.integers(0, 3), max_size=1)),
        draw(st.booleans()),
    )
    rows, k, n, groups = (draw(st.integers(0, 12)), *(draw(st.integers(1, 9)) for _ in range(3)))
    x, y = torch.randn(*sources, rows, k).to(dtype), torch.randn(*sources, rows, n).to(dtype)
    offsets = torch.randint(0, rows + 1, (*sources, groups + 1)).sort(-1).values
    before = torch.randn(groups, k, n).to(dtype)
    out = before.clone() if adds else torch.full_like(before, torch.nan)
    KERNELS["grouped_outer"](out, x, y, offsets, *([out] if adds else []))
    exact, magnitude = (before.double(), before.double().abs()) if adds else (torch.zeros(out.shape).double(),) * 2
    parts = zip(x, y, offsets, strict=True) if sources else [(x, y, offsets)]
    for x_rows, y_rows, begins in parts:
        for group, (begin, end) in enumerate(pairwise(begins.tolist())):
            left, right = x_rows[begin:end].double().t(), y_rows[begin:end].double()
            exact, magnitude = exact.clone(), magnitude.clone()
            exact[group] += left @ right
            magnitude[group] += left.abs() @ right.abs()
    assert_as_accurate(out, exact.to(dtype), exact, magnitude)


@settings(max_examples=50)
@given(st.data())
def test_rows_are_permuted_and_combined_as_torch_indexes_them(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    dtype, sources = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(1, 3), max_size=2))
    rows, k, tokens, experts = draw(st.integers(1, 9)), *(draw(st.integers(1, 5)) for _ in range(3))
    x = torch.randn(*sources, k, rows).to(dtype).mT
    index = torch.randint(0, rows, (*sources, tokens, experts))
    weights = torch.randn(*sources, tokens, experts).to(draw(st.sampled_from([dtype, torch.float32])))
    flat = [i.reshape(tokens, experts) for i in index.reshape(-1, tokens * experts)]
    expected = torch.stack([r[i] for r, i in zip(x.reshape(-1, rows, k), flat, strict=True)])
    permuted = torch.full((*sources, tokens * experts, k), torch.nan, dtype=dtype)
    KERNELS["permute_rows"](permuted, x, index.reshape(*sources, -1).int())
    assert torch.equal(permuted, expected.reshape(permuted.shape))
    combined = torch.full((*sources, tokens, k), torch.nan, dtype=dtype)
    KERNELS["combine_rows"](combined, x, index.int(), weights)
    terms = expected.reshape(*sources, tokens, experts, k).double() * weights.double()[..., None]
    torch.testing.assert_close(combined.double(), terms.sum(-2), rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_index_outside_the_rows_is_an_error(wrong: int) -> None:
    index = torch.tensor([[0, 5], [wrong, 2]])
    with pytest.raises(HostIRError, match=f"index {wrong} is not one of 6 rows"):
        KERNELS["permute_rows"](torch.empty(2, 4), torch.randn(6, 4), index[:, 0])
    with pytest.raises(HostIRError, match=f"index {wrong} is not one of 6 rows"):
        KERNELS["combine_rows"](torch.empty(2, 4), torch.randn(6, 4), index, torch.randn(2, 2))
