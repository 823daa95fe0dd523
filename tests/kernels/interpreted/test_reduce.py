from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.kernels.reduce import DTYPES, reduce_sum
from tests.kernels.checking import check_reduce_sum, embedded, filled


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_strides_give_the_sum(data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 10) | st.sampled_from([32, 40]), min_size=1, max_size=3))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    kept = [size for i, size in enumerate(shape) if i != axis % len(shape)]
    torch.manual_seed(draw(st.integers(0, 1 << 30)))

    def layout(axes: int) -> dict[str, object]:
        return {
            "order": draw(st.permutations(range(axes))),
            "pad": [draw(st.integers(0, 2)) for _ in range(axes)],
            "offset": draw(st.integers(0, 1)),
        }

    out, buffer = embedded(kept, dtype, **layout(len(kept)))
    check_reduce_sum(filled(shape, dtype, **layout(len(shape))), out, buffer, axis)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((8, 37, 300), 0), ((5, 4000), 1), ((3000, 3), 0), ((2, 8, 5, 7, 6), 1)])
def test_long_and_short_axes_give_the_sum(shape, axis, dtype):
    kept = [*shape[:axis], *shape[axis + 1 :]]
    out, buffer = embedded(kept, dtype)
    check_reduce_sum(filled(shape, dtype), out, buffer, axis)


def test_further_axes_that_do_not_merge_take_a_launch_for_each_index():
    x = filled([3, 4, 5, 6, 7], torch.float32, order=[4, 2, 0, 1, 3])
    out, buffer = embedded([3, 4, 6, 7], torch.float32, pad=[1, 1, 1, 1])
    check_reduce_sum(x, out, buffer, 2)


def test_sums_accumulate_in_float32():
    x = torch.ones(4096, 3, dtype=torch.bfloat16)  # in bfloat16 the sum would stop at 256
    assert torch.equal(reduce_sum(x, torch.zeros(3, dtype=torch.bfloat16), 0), torch.full((3,), 4096.0).bfloat16())


def test_the_sum_can_stay_in_float32():
    x = filled([8, 30], torch.bfloat16, integers=True)
    x[0] = 1000
    assert torch.equal(reduce_sum(x, torch.empty(30), 0), x.float().sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_sums_are_rounded_to_nearest_even(dtype):
    x = filled([9, 500], dtype, integers=True) * 129
    out, _ = embedded([500], dtype)
    assert torch.equal(reduce_sum(x, out, 0), x.double().sum(0).to(dtype))


def test_empty_axes_give_zeros_or_nothing():
    out, buffer = embedded([3, 4], torch.float32)
    check_reduce_sum(torch.zeros(3, 0, 4), out, buffer, 1)
    assert not out.any()
    assert reduce_sum(torch.zeros(3, 0, 4), torch.empty(0, 4), 0).numel() == 0


def test_nan_and_infinity_come_through():
    x = torch.tensor([[math.nan, math.inf, math.inf, 1], [1, 1, -math.inf, 1]], dtype=torch.bfloat16)
    torch.testing.assert_close(reduce_sum(x, torch.zeros(4).bfloat16(), 0), x.sum(0), equal_nan=True)


@pytest.mark.parametrize(
    ("error", "message", "x", "out", "axis"),
    [
        (TypeError, "got x torch.int32", torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3), 0),
        (ValueError, "got axis 2", torch.zeros(2, 3), torch.zeros(3), 2),
        (ValueError, r"has shape \[3\], but out \[2\]", torch.zeros(2, 3), torch.zeros(2), 0),
        (ValueError, "overlaps itself", torch.zeros(2, 3), torch.zeros(1).expand(3), 0),
        (ValueError, "one device", torch.zeros(2, 3), torch.zeros(3, device="meta"), 0),
    ],
)
def test_operands_that_do_not_fit_are_reported(error, message, x, out, axis):
    with pytest.raises(error, match=message):
        reduce_sum(x, out, axis)
