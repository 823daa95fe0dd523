"""Products of 8-bit floats with scales, against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.kernels.flags.done import DoneFlags
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts
from hostir.kernels.matmul.operands import DTYPES, DTYPES_8_BIT
from hostir.kernels.matmul.tiles import Tile
from hostir.kernels.scaled import scaled_matmul
from hostir.kernels.scales import scaled_matmul_reference
from hostir.kernels.table import kernel_table
from tests.kernels.checking import assert_as_accurate, assert_only_view_written, embedded, multiprocessors

E4M3, E5M2 = DTYPES_8_BIT
MODES = ("tensor", "rows", "blocks")
TILES = (
    None,
    Tile(32, 16, 16, stages=1, warps=1),
    Tile(16, 64, 32, stages=1, warps=1, halves=True),
    Tile(64, 32, 64, stages=1, warps=1, group=1),
    Tile(32, 32, 16, stages=1, warps=1, halves=True, split=2, parts=3),
    Tile(16, 32, 32, stages=1, warps=1, split=3, parts=2),
)

SPLIT = Tile(32, 32, 32, stages=1, warps=1, halves=True, split=2, parts=3)


def eight_bit(shape: Sequence[int], dtype: torch.dtype, *, pad: Sequence[int] | None = None) -> torch.Tensor:
    """Return random numbers in padded memory, with NaN between the rows."""
    wide = [n + p for n, p in zip(shape, pad or [0] * len(shape), strict=True)]
    buffer = torch.full(wide, math.nan).to(dtype)
    view = buffer[tuple(slice(0, n) for n in shape)]
    return view.copy_(torch.randn(tuple(shape)).to(dtype))


def scales(mode: str, leading: Sequence[int], N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = {
        "tensor": ([1] * (len(leading) + 1), [1, 1]),
        "rows": ([*leading, 1], [1, N]),
        "blocks": ([*leading, K // 128], [K // 128, -(-N // 128)]),
    }
    of_a, of_b = shapes[mode]
    return torch.rand(of_a) + 0.5, torch.rand(of_b) * 4


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_types_scales_and_layouts_give_the_product(data):
    draw = data.draw
    mode, use_descriptors = draw(st.sampled_from(MODES)), draw(st.booleans())
    leading = draw(st.sampled_from([(5,), (40,), (1,), (2, 3, 7), (3, 20)]))
    extents = [16, 48] if use_descriptors else [1, 16, 33]
    N = draw(st.sampled_from([*extents, 160]))
    K = draw(st.sampled_from([128, 256] if mode == "blocks" else [*extents, 272]))
    a_type, b_type = draw(st.sampled_from(DTYPES_8_BIT)), draw(st.sampled_from(DTYPES_8_BIT))
    dtype = draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    gap = draw(st.integers(0, 1)) if len(leading) == 2 else 0  # so that axes do not merge
    a = eight_bit((*leading, K), a_type, pad=[*[0] * (len(leading) - 1), gap, 16])
    b = eight_bit((N, K), b_type, pad=[0, 16]).t()
    if draw(st.booleans()):
        b = b.contiguous()
    of_a, of_b = scales(mode, leading, N, K)
    bias = torch.randn(N, dtype=draw(st.sampled_from(DTYPES))) if draw(st.booleans()) else None
    out, buffer = embedded((*leading, N), dtype, pad=[*[0] * (len(leading) - 1), gap, 16])
    options = {"fast": draw(st.booleans()), "use_descriptors": use_descriptors, "tile": draw(st.sampled_from(TILES))}
    scaled_matmul(out, a, b, of_a, of_b, bias, **options)
    assert_only_view_written(out, buffer)
    exact = scaled_matmul_reference(a, b, of_a, of_b, bias, torch.float64)
    added = None if bias is None else bias.abs()
    positive = [x.float().abs().to(x.dtype) for x in (a, b)]
    magnitude = scaled_matmul_reference(*positive, of_a, of_b, added, torch.float64)
    assert_as_accurate(out, exact.float().to(dtype), exact, magnitude * 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_sums_are_rounded_once_to_nearest_even(mode, dtype):
    a, b = (torch.randint(-4, 5, shape).float().to(E4M3) for shape in ((40, 256), (48, 256)))
    of_a, of_b = (torch.randint(-3, 3, x.shape).float().exp2() for x in scales(mode, (40,), 48, 256))
    bias = torch.randint(-500, 500, (48,)).to(dtype)
    out = torch.empty(40, 48, dtype=dtype)
    scaled_matmul(out, a, b.t(), of_a, of_b, bias)
    assert torch.equal(out, scaled_matmul_reference(a, b.t(), of_a, of_b, bias, dtype))


@pytest.mark.parametrize("dtype", DTYPES_8_BIT)
def test_every_8_bit_float_is_read(dtype):
    a = torch.zeros(256, 16, dtype=dtype)
    a[:, 0] = torch.arange(256, dtype=torch.uint8).view(dtype)
    out = torch.empty(256, 16)
    one = torch.ones(1, 1)
    scaled_matmul(out, a, torch.ones(16, 16).to(E4M3), one, one)
    torch.testing.assert_close(out, a[:, :1].float().expand(256, 16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
def test_nan_infinity_zero_rows_and_scales_of_zero_are_as_in_torch(mode):
    """Cover infinite scales, zero scales and rows, NaN scales and elements; torch multiplies the sums by scales."""
    a, b = eight_bit((6, 128), E5M2), eight_bit((16, 128), E4M3).t()
    a[0], a[1, 3], a[2, 5] = 0, math.nan, math.inf
    of_a, of_b = scales(mode, (6,), 16, 128)
    if mode == "tensor":
        of_b.zero_()
    else:
        of_a[3], of_a[4], of_a[5] = 0, math.inf, math.nan
        of_a[0] = math.inf  # with a row of zeros
    out = torch.empty(6, 16)
    scaled_matmul(out, a, b, of_a, of_b)
    exact = scaled_matmul_reference(a, b, of_a, of_b, None, torch.float32)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5, equal_nan=True)
    row_wise = of_a.expand(6, 1).contiguous(), of_b.expand(1, 16).contiguous()  # also the case of a single block
    theirs = torch._scaled_mm(a, b, *row_wise, out_dtype=torch.float32)
    finite = [0, 1, 2, 3, 5]  # on a CPU, torch scales before it adds: an infinite scale gives NaN
    torch.testing.assert_close(out[finite], theirs[finite], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert out[1].isnan().all()
    assert mode == "tensor" or (out[0].isnan().all() and out[4].isinf().all() and not out[3].any())


def flags_of(blocks: int, **fields: Any) -> ReadyFlags:
    return ReadyFlags(torch.full((blocks,), 5), epoch=5, timeouts=no_timeouts(blocks, "cpu"), polls=3, **fields)


EARLY = Tile(16, 32, 32, stages=1, warps=1, early_blocks=2)
PAIRS = enumerate(itertools.product(MODES, [TILES[3], SPLIT, EARLY]))


@pytest.mark.parametrize(("mode", "tile", "height"), [(*pair, (16, 40)[i % 2]) for i, pair in PAIRS])
def test_ready_and_completion_flags_change_no_bit(mode, tile, height, monkeypatch):
    monkeypatch.setattr("hostir.kernels.matmul.matmul.MIN_OWN_ROWS", 0)
    blocks, N, K = 4, 48, 256 if mode == "blocks" else 96
    a = eight_bit((blocks * height, K), E4M3)
    b, (of_a, of_b) = eight_bit((N, K), E4M3).t(), scales(mode, (blocks * height,), N, K)
    a, b = (x.float().mul(2).round().to(E4M3) for x in (a, b))  # exact sums, in whatever order and parts
    of_a, of_b = of_a.log2().round().exp2(), of_b.log2().round().exp2()
    expected = scaled_matmul_reference(a, b, of_a, of_b, None, torch.bfloat16)
    with multiprocessors(7):
        for own_rows in (None, a[2 * height : 3 * height].clone()):
            out, buffer = embedded((blocks * height, N), torch.bfloat16, pad=[0, 16])
            raised = torch.zeros(blocks, dtype=torch.int64)
            rows_of_a = a.clone()
            if own_rows is not None:
                rows_of_a[2 * height : 3 * height] = math.nan
            ready = flags_of(blocks, first=2)
            scaled_matmul(
                out, rows_of_a, b, of_a, of_b, ready=ready, own_rows=own_rows, done=DoneFlags(raised, 7), tile=tile
            )
            assert_only_view_written(out, buffer)
            assert torch.equal(out, expected)
            assert raised.tolist() == [7] * blocks
            assert not ready.timeouts.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("waiting", [False, True])
def test_rows_that_do_not_merge_are_multiplied_slice_by_slice_with_their_scales(mode, waiting):
    a = torch.randint(-4, 5, (2, 4, 3, 256)).float().to(E4M3).transpose(0, 1)  # [4, 2, 3, 256]
    b = torch.randint(-4, 5, (256, 32)).float().to(E4M3)
    of_a, of_b = (torch.randint(-3, 3, x.shape).float().exp2() for x in scales(mode, (4, 2, 3), 32, 256))
    out, buffer = embedded((4, 2, 3, 32), torch.float32, pad=(1, 1, 1, 0))
    if waiting:
        flags = {"ready": flags_of(4, first=1), "done": DoneFlags(torch.zeros(4, dtype=torch.int64), 1)}
        kernel_table("triton", "cpu")["scaled_matmul_by_blocks"](out, a, b, of_a, of_b, **flags)
        assert flags["done"].flags.tolist() == [1] * 4
        own_rows = a[1].clone()
        kernel_table("triton", "cpu")["scaled_matmul_by_blocks"](
            out, a, b, of_a, of_b, ready=flags["ready"], own_rows=own_rows
        )
    else:
        kernel_table("triton", "cpu")["scaled_matmul"](out, a, b, of_a, of_b, fast=True)
    assert_only_view_written(out, buffer)
    assert torch.equal(out, scaled_matmul_reference(a, b, of_a, of_b, None, torch.float32))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"scale_a": torch.ones(2, 4)},
            ValueError,
            r"\[8, 2\] and \[2, 1\] \(block-wise\); got \[2, 4\] and \[1, 16\]",
        ),
        ({"scale_b": torch.ones(16, 1)}, ValueError, r"got \[8, 1\] and \[16, 1\]"),
        ({"scale_a": torch.ones(8, 2)}, ValueError, r"got \[8, 2\] and \[1, 16\]"),
        ({"scale_a": torch.ones(8, 1).double()}, TypeError, "expected scales of float32, got scale_a of torch.float64"),
        ({"b": torch.ones(256, 16)}, TypeError, "expects a and b of torch.float8_e4m3fn"),
        ({"bias": torch.ones(16).to(E4M3)}, TypeError, "out and bias of torch.bfloat16"),
        ({"out": torch.ones(8, 16).to(E4M3)}, TypeError, "out torch.float8_e4m3fn"),
        ({"bias": torch.ones(8)}, ValueError, r"a bias of shape \[16\]"),
        (
            {"scale_a": torch.ones(8, 2), "scale_b": torch.ones(2, 1), "tile": Tile(32, 256, 32)},
            ValueError,
            "columns and steps divide 128",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, error, message):
    arguments = {
        "out": torch.empty(8, 16),
        "a": torch.ones(8, 256).to(E4M3),
        "b": torch.ones(256, 16).to(E4M3),
        "scale_a": torch.ones(8, 1),
        "scale_b": torch.ones(1, 16),
    }
    with pytest.raises(error, match=message):
        scaled_matmul(**{**arguments, **change})
