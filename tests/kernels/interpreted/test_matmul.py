from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.kernels.matmul.matmul import matmul
from hostir.kernels.matmul.operands import DTYPES
from hostir.kernels.matmul.tiles import Tile
from tests.kernels.checking import check_matmul, embedded, filled

EXTENTS = st.integers(1, 50) | st.sampled_from([32, 64])
TILES = (
    None,
    Tile(32, 16, 16, stages=1, warps=1),
    Tile(16, 64, 32, stages=1, warps=1, halves=True),
    Tile(64, 32, 16, stages=1, warps=1, group=1),
)
few = settings(max_examples=30, deadline=None)


def aligned(extent: int, dtype: torch.dtype) -> int:
    """Return the elements to add to `extent` so that rows begin at multiples of 16 bytes."""
    return -extent % (16 // dtype.itemsize)


@few
@given(st.data())
def test_any_strides_give_the_product(data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    B, M, N, K = draw(st.integers(1, 3)), draw(EXTENTS), draw(EXTENTS), draw(EXTENTS)
    pads = st.integers(0, 3)
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    transpose_b = draw(st.booleans())

    def layout(axes: int) -> dict[str, object]:
        return {
            "order": draw(st.permutations(range(axes))),
            "pad": [draw(pads) for _ in range(axes)],
            "offset": draw(st.integers(0, 1)),
        }

    a = filled([B, M, K], dtype, **layout(3))
    b = filled([N, K] if transpose_b else [K, N], dtype, **layout(2))
    bias = filled([N], dtype, pad=[1], offset=1)[:N] if draw(st.booleans()) else None
    out, buffer = embedded([B, M, N], dtype, **layout(3))
    check_matmul(a, b, out, buffer, bias=bias, transpose_b=transpose_b, tile=draw(st.sampled_from(TILES)))


@few
@given(st.data())
def test_descriptors_give_the_product(data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    B, M, N, K = draw(st.integers(1, 3)), draw(EXTENTS), draw(EXTENTS), draw(EXTENTS)
    N += aligned(N, dtype)  # TMA always writes the last 16 bytes of a row completely
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    transpose_b, column_major = draw(st.booleans()), draw(st.booleans())
    gap = draw(st.integers(0, 2))  # rows between two batches, so that batch and row strides do not merge
    inner = K if transpose_b != column_major else N
    order = [1, 0] if column_major else [0, 1]

    a = filled([B, M, K], dtype, pad=[0, gap, aligned(K, dtype)])
    b_shape = [N, K] if transpose_b else [K, N]
    b = filled(b_shape, dtype, order=order, pad=[aligned(inner, dtype) if axis == order[-1] else 0 for axis in (0, 1)])
    bias = filled([N], dtype) if draw(st.booleans()) else None
    out, buffer = embedded([B, M, N], dtype, pad=[0, 1, aligned(N, dtype)])
    check_matmul(
        *(a, b, out, buffer),
        bias=bias,
        transpose_b=transpose_b,
        use_descriptors=True,
        tile=draw(st.sampled_from(TILES)),
    )


@pytest.mark.parametrize("use_descriptors", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_products_are_rounded_to_nearest_even(dtype, use_descriptors):
    a = filled([40, 200], dtype, integers=True)
    b = filled([200, 48], dtype, integers=True)
    out, _ = embedded([40, 48], dtype)
    bias = filled([48], dtype, integers=True) * 129  # sums that bfloat16 cannot hold
    matmul(a, b, out, bias=bias, use_descriptors=use_descriptors)
    assert torch.equal(out, (a.double() @ b.double() + bias.double()).to(dtype))


@pytest.mark.parametrize("use_descriptors", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_infinity_and_subnormals_come_through(dtype, use_descriptors):
    special = [math.nan, math.inf, -math.inf, torch.finfo(dtype).tiny / 2, -torch.finfo(dtype).max]
    a = torch.zeros(5, 8, dtype=dtype)
    a[:, 0] = torch.tensor(special, dtype=dtype)
    b = filled([8, 8], dtype).abs_()
    b[0] = 1
    out, _ = embedded([5, 8], dtype)
    matmul(a, b, out, use_descriptors=use_descriptors)
    torch.testing.assert_close(out, a[:, :1].expand(5, 8), rtol=0, atol=0, equal_nan=True)


def test_sums_beyond_the_range_become_infinite():
    a, b = torch.full((4, 8), 6e4, dtype=torch.float16), torch.ones(8, 8, dtype=torch.float16)
    assert matmul(a, b, torch.zeros(4, 8, dtype=torch.float16)).isposinf().all()


@pytest.mark.parametrize("leading", [(), (5,), (2, 3, 4), (1, 7, 1)])
def test_leading_axes_merge_into_rows(leading):
    a = filled([*leading, 24], torch.bfloat16)
    b = filled([24, 40], torch.bfloat16)
    out, buffer = embedded([*leading, 40], torch.bfloat16)
    check_matmul(a, b, out, buffer)


@pytest.mark.parametrize("use_descriptors", [True, False])
def test_slices_of_an_inner_axis_are_used_in_place(use_descriptors):
    a, b = filled([3, 4, 20, 24], torch.bfloat16, integers=True), filled([24, 40], torch.bfloat16, integers=True)
    out, buffer = embedded([3, 4, 20, 40], torch.bfloat16)
    for i in range(4):
        matmul(a[:, i], b, out[:, i], use_descriptors=use_descriptors)
        assert buffer.isnan().sum().item() == (3 - i) * 3 * 20 * 40
    assert torch.equal(out, matmul(a, b, torch.empty_like(out)))


def test_a_batch_on_one_side_only_is_used_in_place():
    a, b = filled([3, 20, 24], torch.float16, pad=[0, 2, 0]), filled([24, 40], torch.float16)
    out, buffer = embedded([3, 20, 40], torch.float16)
    check_matmul(a, b, out, buffer, use_descriptors=True)
    a, (out, buffer) = a.contiguous(), embedded([3, 20, 40], torch.float16, pad=[0, 2, 0])
    check_matmul(a, b, out, buffer, use_descriptors=True)


def test_broadcast_operands_are_read_where_they_lie():
    a = filled([1, 24], torch.float32).expand(9, 24)
    b = filled([1, 40], torch.float32).expand(24, 40)
    out, buffer = embedded([9, 40], torch.float32)
    check_matmul(a, b, out, buffer)


@pytest.mark.parametrize(("M", "N", "K"), [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_an_empty_contraction_leaves_the_bias(M, N, K, with_bias):
    out, buffer = embedded([2, M, N], torch.bfloat16, pad=[0, 1, 1])
    bias = filled([N], torch.bfloat16) if with_bias else None
    check_matmul(filled([2, M, K], torch.bfloat16), filled([K, N], torch.bfloat16), out, buffer, bias=bias)


def test_threads_do_not_disturb_each_other():
    a, b = filled([50, 40], torch.float32, integers=True), filled([40, 50], torch.float32, integers=True)
    outs = [torch.full((50, 50), math.nan) for _ in range(4)]
    threads = [threading.Thread(target=matmul, args=(a, b, out)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = matmul(a, b, torch.empty(50, 50))
    assert all(torch.equal(out, expected) for out in outs)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (
            TypeError,
            "one dtype of .*; got a torch.bfloat16, b torch.float32",
            (bf16(4, 8), torch.zeros(8, 4), bf16(4, 4)),
            {},
        ),
        (TypeError, "got a torch.float64", [torch.zeros(4, 4, dtype=torch.float64)] * 3, {}),
        (ValueError, "b to have 2 axes", (bf16(4, 8), bf16(1, 8, 4), bf16(4, 4)), {}),
        (
            ValueError,
            r"expects \[..., 8\] @ \[8, 4\], got a of shape \[4, 7\]",
            (bf16(4, 7), bf16(8, 4), bf16(4, 4)),
            {},
        ),
        (ValueError, r"@ \[8, 4\]", (bf16(4, 7), bf16(4, 8), bf16(4, 4)), {"transpose_b": True}),
        (ValueError, r"gives \[4, 4\], but out has shape \[4, 5\]", (bf16(4, 8), bf16(8, 4), bf16(4, 5)), {}),
        (ValueError, r"bias of shape \[4\]", (bf16(4, 8), bf16(8, 4), bf16(4, 4)), {"bias": bf16(8)}),
        (ValueError, "overlaps itself", (bf16(4, 8), bf16(8, 4), bf16(1, 4).expand(4, 4)), {}),
        (ValueError, "do not merge", (bf16(4, 2, 3, 8)[:, :, ::2], bf16(8, 4), bf16(2, 4, 2, 4).transpose(0, 1)), {}),
        (ValueError, "one device", (bf16(4, 8), bf16(8, 4).to("meta"), bf16(4, 4)), {}),
        (
            ValueError,
            "TMA descriptors: a .*multiple of 16 bytes",
            (bf16(4, 9), bf16(9, 8), bf16(4, 8)),
            {"use_descriptors": True},
        ),
        (
            ValueError,
            "TMA descriptors: b .*16-byte boundary",
            (bf16(4, 8), bf16(65)[1:].view(8, 8), bf16(4, 8)),
            {"use_descriptors": True},
        ),
        (
            ValueError,
            "TMA descriptors: out .*innermost",
            (bf16(4, 8), bf16(8, 8), bf16(8, 4).t()),
            {"use_descriptors": True},
        ),
    ],
)
def test_operands_that_do_not_fit_are_reported(error, message, arguments, options):
    with pytest.raises(error, match=message):
        matmul(*arguments, **options)
