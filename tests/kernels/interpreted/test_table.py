from __future__ import annotations

import math

import pytest
import torch

import hostir.ir as text
from examples import patterns
from hostir import lower
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir.source import HostIRError
from hostir.kernels.flags.done import DoneFlags
from hostir.kernels.flags.ready import ReadyFlags, block_rows, no_timeouts
from hostir.kernels.table import kernel_table
from tests.call import programs
from tests.call.whole import run_whole
from tests.kernels.checking import assert_as_accurate, assert_only_view_written, embedded, filled


@pytest.mark.parametrize("name", ["AG_MATMUL", "ROW_PARALLEL", "GRID"])
def test_programs_compute_the_same_with_tritons_kernels(name):
    program = text.parse(getattr(programs, name))
    sizes = {"M": 3, "K": 8, "N": 5}
    inputs = random_inputs(program, {n: sizes[n] for n in program.size_names})
    for ours, exact in zip(
        run_whole(program, inputs, seed=1, kernels="triton"), reference(program, inputs), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("strategy", ["sequential", "fused"])
def test_f64_uses_atens_kernels(strategy):
    fusion = patterns.mlp(ranks=2, S=2, M=16, K=8, H=8, dtype="f64")
    inputs = random_inputs(fusion.program(), {}, seed=3)
    (result,) = run_whole(lower(fusion, strategy), inputs, kernels="triton")
    (exact,) = reference(fusion.program(), inputs)
    torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_leading_axes_that_do_not_merge_take_several_launches(dtype):
    a = filled((2, 3, 4, 8), dtype, pad=(1, 1, 1, 0))
    weight, bias = filled((5, 8), dtype), filled((5,), dtype)
    out, buffer = embedded((2, 3, 4, 5), dtype, order=(2, 0, 1, 3), pad=(1, 0, 1, 0))
    kernel_table("triton", "cpu")["linear"](out, a, weight, bias)
    assert_only_view_written(out, buffer)
    exact = a.double() @ weight.double().t() + bias.double()
    magnitude = a.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert_as_accurate(out, a @ weight.t() + bias, exact, magnitude)


@pytest.mark.parametrize(
    ("policy", "device", "present"),
    [("triton", "cpu", True), ("triton", "cuda", True), ("auto", "cuda", True), ("auto", "cpu", False)]
    + [("aten", device, False) for device in ("cpu", "cuda")],
)
def test_tables_have_waiting_products_if_triton_suits_the_device(policy, device, present):
    assert {"matmul_by_blocks", "linear_by_blocks"} & kernel_table(policy, device).keys() == (
        {"matmul_by_blocks", "linear_by_blocks"} if present else set()
    )


KINDS = ("matmul", "linear", "linear with a bias")
ROWS = ((0, 1, 2), 4), ((1, 0, 2), 12), ((1, 0, 2), 4), ((2, 0, 1), 2), ((2, 0, 1), 20)


@pytest.mark.parametrize(  # each contraction with all rows, and with each first block
    ("name", "order", "blocks", "first"),
    [(KINDS[(i + j) % 3], *rows, (0, 1, -1)[j]) for i, rows in enumerate(ROWS) for j in range(3)],
)
def test_rows_that_do_not_merge_are_waited_for_slice_by_slice(name, order, blocks, first):
    a = filled((4, 3, 5, 8), torch.float32, order=(*order, 3), pad=(0, 1, 1, 0), integers=True)
    b = filled((8, 6), torch.float32, integers=True)
    out, buffer = embedded((4, 3, 5, 6), torch.float32, pad=(1, 0, 1, 0))
    ready = ReadyFlags(
        torch.ones(blocks, dtype=torch.int32), 1, no_timeouts(blocks, "cpu"), first=first % blocks, polls=3
    )
    kernel = kernel_table("triton", "cpu")["matmul_by_blocks" if name == "matmul" else "linear_by_blocks"]
    bias = filled((6,), torch.float32, integers=True) if "bias" in name else torch.zeros(6)
    right = (b,) if name == "matmul" else (b.t().contiguous(), *((bias,) if "bias" in name else (None,)))
    kernel(out, a, *right, ready=ready)
    assert_only_view_written(out, buffer)
    assert torch.equal(out, a @ b + bias)
    assert not ready.timeouts.any()

    ready.flags[-1] = 0
    kernel(out.fill_(math.nan), a, *right, ready=ready)
    assert ready.timeouts.tolist() == [[0, 0]] * (blocks - 1) + [[1, 0]]
    height = 60 // blocks
    assert out.reshape(60, 6)[-height:].isnan().all()


@pytest.mark.parametrize(
    ("order", "blocks", "first"),
    [((0, 1, 2), 4, 0), ((0, 1, 2), 6, 1), ((1, 0, 2), 12, 1), ((1, 0, 2), 5, 0), ((2, 0, 1), 2, 1)],
)
@pytest.mark.parametrize("few", [0, 100])
def test_own_rows_are_used_in_any_layout(order, blocks, first, few, monkeypatch):
    monkeypatch.setattr("hostir.kernels.matmul.matmul.MIN_OWN_ROWS", few)
    monkeypatch.setattr("hostir.kernels.matmul.matmul._launches", {})
    a = filled((4, 3, 5, 8), torch.float32, order=(*order, 3), pad=(0, 1, 1, 0), integers=True)
    own_rows = filled((60 // blocks, 8), torch.float32, integers=True)
    b, bias = filled((8, 6), torch.float32, integers=True), filled((6,), torch.float32, integers=True)
    out, buffer = embedded((4, 3, 5, 6), torch.float32, pad=(1, 0, 1, 0))
    flags = torch.ones(blocks, dtype=torch.int32)
    flags[first] = 0
    ready = ReadyFlags(flags, 1, no_timeouts(blocks, "cpu"), first=first, polls=3)
    kernel_table("triton", "cpu")["linear_by_blocks"](out, a, b.t().contiguous(), bias, ready=ready, own_rows=own_rows)
    assert_only_view_written(out, buffer)
    rows = a.reshape(60, 8).clone()
    rows.chunk(blocks)[first].copy_(own_rows)
    assert torch.equal(out.reshape(60, 6), rows @ b + bias)
    assert not ready.timeouts.any()


@pytest.mark.parametrize("missing", [None, 2])
@pytest.mark.parametrize("waits", [True, False])
def test_flags_rise_together_after_rows_that_do_not_merge_unless_rows_are_missing(waits, missing):
    a = filled((4, 3, 5, 8), torch.float32, order=(1, 0, 2, 3), pad=(0, 1, 1, 0), integers=True)
    b, out = filled((8, 6), torch.float32, integers=True), torch.full((4, 3, 5, 6), math.nan)
    raised, ready = torch.zeros(6, dtype=torch.int64), None
    if waits:
        ready = ReadyFlags(torch.ones(4, dtype=torch.int32), 1, no_timeouts(4, "cpu"), polls=3)
        if missing is not None:
            ready.flags[missing] = 0
    kernel_table("triton", "cpu")["matmul_by_blocks"](out, a, b, ready=ready, done=DoneFlags(raised, 2))
    gave_up = waits and missing is not None
    assert raised.tolist() == [0 if gave_up else 2] * 6
    assert gave_up or torch.equal(out, a @ b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_linear_that_waits_rounds_once(dtype):
    ones = torch.ones(4, 1, dtype=dtype)
    big = 16 if dtype == torch.bfloat16 else 45.25  # the product lies between two numbers that are 2 apart
    a, weight = torch.cat([ones * big, ones], 1), torch.tensor([[big, 1.0]], dtype=dtype)
    bias, out = torch.ones(1, dtype=dtype), torch.full((4, 1), math.nan, dtype=dtype)
    ready = ReadyFlags(torch.ones(2, dtype=torch.int32), 1, no_timeouts(2, "cpu"))
    kernel_table("triton", "cpu")["linear_by_blocks"](out, a, weight, bias, ready=ready)
    exact = a.double() @ weight.double().t() + bias.double()
    assert torch.equal(out, exact.to(dtype))
    assert not torch.equal(out, (a @ weight.t()) + bias), "an example that cannot tell"


def test_blocks_that_do_not_fit_the_slices_are_reported():
    a, b, out = torch.zeros(4, 3, 10, 8)[:, :, ::2].transpose(0, 1), torch.zeros(8, 6), torch.zeros(3, 4, 5, 6)
    ready = ReadyFlags(torch.ones(5, dtype=torch.int32), 1, no_timeouts(5, "cpu"))
    with pytest.raises(HostIRError, match=r"cannot wait for 5 blocks of rows in 3 slices"):
        kernel_table("triton", "cpu")["matmul_by_blocks"](out, a, b, ready=ready)


def test_timeouts_on_the_host_must_be_in_pinned_memory(monkeypatch):
    ready = ReadyFlags(torch.ones(2, dtype=torch.int32, device="meta"), 1, no_timeouts(2, "cpu"))
    out = torch.empty(6, 4, device="meta")
    with pytest.raises(ValueError, match="one device, got out on meta, flags on meta, timeouts on cpu"):
        block_rows(ready, out)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert block_rows(ready, out) == 3
