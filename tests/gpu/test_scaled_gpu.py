"""Products of 8-bit floats with scales, compiled, on a real GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from hostir.kernels import aten, quantize
from hostir.kernels.flags.done import DoneFlags
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts
from hostir.kernels.matmul.operands import DTYPES, DTYPES_8_BIT
from hostir.kernels.matmul.tiles import Tile, candidates
from hostir.kernels.matmul.workspaces import _by_stream as workspaces
from hostir.kernels.scaled import scaled_matmul
from hostir.kernels.scaled_library import scaled_by_library
from hostir.kernels.scales import scaled_matmul_reference
from hostir.kernels.table import kernel_table
from hostir.torch.float8 import float8_weight_gradient
from tests.gpu.one_device import descriptor_modes
from tests.kernels.checking import assert_as_accurate, assert_only_view_written, embedded

CUDA = "cuda"
BF16 = torch.bfloat16
E4M3, E5M2 = DTYPES_8_BIT
MODES = ("tensor", "rows", "blocks")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no tensor cores for 8-bit floats"
)


def operands(
    M: int, N: int, K: int, mode: str, a_type: torch.dtype = E4M3, b_type: torch.dtype = E4M3
) -> tuple[torch.Tensor, ...]:
    """Return random a, column-major b, and their scales."""
    shapes = {"tensor": ((1, 1), (1, 1)), "rows": ((M, 1), (1, N)), "blocks": ((M, K // 128), (K // 128, -(-N // 128)))}
    of_a, of_b = (torch.rand(shape, device=CUDA) + 0.5 for shape in shapes[mode])
    a, b = torch.randn(M, K, device=CUDA).to(a_type), torch.randn(N, K, device=CUDA).to(b_type).t()
    return a, b, of_a, of_b


def magnitude(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> torch.Tensor:
    positive = [x.float().abs().to(x.dtype) for x in (a, b)]
    return scaled_matmul_reference(*positive, of_a, of_b, None, torch.float64)


def tiles_for(mode: str, fast: bool, *, descriptors: bool, result: int = 2) -> tuple[Tile, ...]:
    return candidates("f8" if fast and mode != "blocks" else "f8s", descriptors=descriptors, result=result)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("M", "N", "K"), [(64, 3584, 8192), (2048, 3584, 8192), (1000, 1024, 3584), (16, 256, 128)])
def test_the_error_is_about_the_error_of_torch(M, N, K, mode, fast):
    inputs = operands(M, N, K, mode)
    out, buffer = embedded([M, N], BF16, pad=[1, 16], device=CUDA)
    exact = scaled_matmul_reference(*inputs, None, torch.float64)
    theirs = torch.empty(M, N, dtype=BF16, device=CUDA)
    if mode == "blocks":  # a sum in float32, rounded once
        a, b, of_a, of_b = inputs
        wide = of_a.repeat_interleave(128, 1), of_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :N]
        theirs.copy_((a.float() * wide[0]) @ (b.float() * wide[1]))
        if scaled_by_library(out.fill_(math.nan), *inputs):
            assert_as_accurate(out, theirs, exact, magnitude(*inputs))
    else:
        assert scaled_by_library(theirs, *inputs, fast=fast)
    for use_descriptors in descriptor_modes():
        for tile in (None, *tiles_for(mode, fast, descriptors=use_descriptors)[:3]):
            scaled_matmul(out.fill_(math.nan), *inputs, fast=fast, use_descriptors=use_descriptors, tile=tile)
            assert_only_view_written(out, buffer)
            assert_as_accurate(out, theirs, exact, magnitude(*inputs))
            before = out.clone()
            scaled_matmul(out.fill_(math.nan), *inputs, fast=fast, use_descriptors=use_descriptors, tile=tile)
            assert torch.equal(out, before), "results repeat bit for bit"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 16, 128), (7, 48, 384), (130, 272, 256), (300, 1000, 640)])
@pytest.mark.parametrize(("a_type", "b_type"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
def test_any_dtypes_biases_and_ragged_shapes_give_the_product(M, N, K, mode, dtype, a_type, b_type):
    inputs = operands(M, N, K, mode, a_type, b_type)
    bias = torch.randn(N, device=CUDA).to(dtype)
    exact = scaled_matmul_reference(*inputs, bias, torch.float64)
    largest = magnitude(*inputs).max().item()
    for use_descriptors in descriptor_modes():
        for fast in (True, False):
            out, buffer = embedded([M, N], dtype, pad=[1, 16], device=CUDA)
            scaled_matmul(out, *inputs, bias, fast=fast, use_descriptors=use_descriptors)
            assert_only_view_written(out, buffer)
            rounding = exact.abs().max().item() * torch.finfo(dtype).eps
            summed = largest * 2.0 ** (-11 if fast else -12)  # tensor cores keep 13 bits below the largest product
            assert (out.double() - exact).abs().max().item() <= rounding + summed


@pytest.mark.parametrize("split", [9, 40])
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("mode", MODES)
def test_split_tiles_give_the_same_bits_in_any_order_of_programs(mode, split, parts):
    a, b, of_a, of_b = operands(1024, 3584, 4096, mode)
    a, b = (torch.randint(-4, 5, x.shape, device=CUDA).float().to(E4M3) for x in (a, b.t()))
    of_a, of_b = (torch.randint(-3, 3, x.shape, device=CUDA).float().exp2() for x in (of_a, of_b))
    expected = scaled_matmul_reference(a, b.t(), of_a, of_b, None, torch.float32)
    for tile in tiles_for(mode, False, descriptors=True, result=4)[:2]:
        out = torch.full((1024, 3584), math.nan, device=CUDA)
        scaled_matmul(out, a, b.t(), of_a, of_b, tile=dataclasses.replace(tile, split=split, parts=parts))
        assert torch.equal(out, expected)
    assert not any(tickets.any().item() for _, tickets in workspaces.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fast", [True, False])
def test_nan_infinity_and_zeros_give_the_results_of_torch(mode, fast):
    a, b, of_a, of_b = operands(128, 256, 256, mode, E5M2)
    a[0], a[1, 3], a[2, 5] = 0, math.nan, math.inf
    if mode == "tensor":
        of_b.zero_()
    else:
        of_a[3], of_a[4], of_a[5], of_a[0] = 0, math.inf, math.nan, math.inf
    out, theirs = torch.empty(128, 256, dtype=BF16, device=CUDA), torch.empty(128, 256, dtype=BF16, device=CUDA)
    scaled_matmul(out, a, b, of_a, of_b, fast=fast)
    if mode == "blocks":
        theirs = scaled_matmul_reference(a, b, of_a, of_b, None, BF16)
    else:
        assert scaled_by_library(theirs, a, b, of_a, of_b, fast=fast)
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_waits_and_flags_change_no_bit(mode, local):
    M, N, K, blocks, first = 2048, 3584, 4096, 8, 3
    a, b, of_a, of_b = operands(M, N, K, mode)
    height = M // blocks
    for tile in tiles_for(mode, True, descriptors=True)[:2]:
        plain = torch.empty(M, N, dtype=BF16, device=CUDA)
        scaled_matmul(plain, a, b, of_a, of_b, fast=True, tile=tile)
        out = torch.empty(M, N, dtype=BF16, device=CUDA)
        arriving, late_scale = torch.empty_like(a), torch.empty_like(of_a)
        own_rows = a[first * height :][:height].clone()
        flags, raised = (torch.zeros(blocks, dtype=torch.int64, device=CUDA) for _ in range(2))
        side = torch.cuda.Stream()
        # From the host: a copy within the GPU may need SMs that the kernel holds.
        rows, scales = a.cpu().pin_memory(), of_a.cpu().pin_memory()
        epochs = torch.arange(4).repeat_interleave(blocks).view(4, blocks).pin_memory()
        for epoch in (1, 2, 3):
            out.fill_(math.nan)
            arriving.view(torch.uint8).fill_(0x7F)  # NaN
            late_scale.fill_(math.nan)
            if local:  # the kernel does not wait for scales of local rows
                late_scale[first * height :][:height] = of_a[first * height :][:height]
            if mode == "tensor":
                late_scale.copy_(of_a)
            torch.cuda.synchronize()
            ready = ReadyFlags(flags, epoch, no_timeouts(blocks, CUDA), first=first)
            options: dict[str, Any] = {"own_rows": own_rows} if local else {}
            with torch.cuda.stream(side):
                torch.cuda._sleep(500_000)
                for block in range(blocks):
                    part = slice(block * height, (block + 1) * height)
                    arriving[part].copy_(rows[part], non_blocking=True)
                    late_scale[part].copy_(scales[part], non_blocking=True)
                    flags[block : block + 1].copy_(epochs[epoch, block : block + 1], non_blocking=True)
            done = DoneFlags(raised, epoch, first)
            scaled_matmul(out, arriving, b, late_scale, of_b, fast=True, ready=ready, done=done, tile=tile, **options)
            torch.cuda.synchronize()
            assert not ready.timeouts.any()
            assert raised.tolist() == [epoch] * blocks
            assert torch.equal(out, plain)


@pytest.mark.parametrize("policy", ["auto", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_kernel_tables_accept_every_layout(mode, policy):
    a, b, of_a, of_b = operands(256, 512, 256, mode)
    exact = scaled_matmul_reference(a, b, of_a, of_b, None, torch.float64)
    for right in (b, b.contiguous()):
        for dtype in DTYPES:
            out = torch.full((256, 512), math.nan, dtype=dtype, device=CUDA)
            kernel_table(policy, "cuda")["scaled_matmul"](out, a, right, of_a, of_b)
            assert (out.double() - exact).abs().max() <= exact.abs().max() * 2.0**-8


def test_a_graph_replays_the_product():
    inputs = operands(512, 3584, 1024, "rows")
    out, plain = (torch.empty(512, 3584, dtype=BF16, device=CUDA) for _ in range(2))
    scaled_matmul(plain, *inputs, fast=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled_matmul(out, *inputs, fast=True)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, plain)


@pytest.mark.parametrize("policy", ["auto", "triton", "aten"])
@pytest.mark.parametrize("f8", aten.FP8)
@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_and_quantized_numbers_have_the_bits_of_the_cpu(dtype, block, f8, policy):
    x = (torch.randn(300, 8192) * torch.logspace(-20, 3, 8192)).to(dtype)
    x[0], x[1, 7], x[2, 3] = 0, math.nan, math.inf
    scale, table = torch.empty(300, 8192 // (block or 8192)), kernel_table(policy, "cuda")
    q = torch.empty(x.shape, dtype=aten.FP8[f8])
    aten.row_scales(scale, x, dtype=f8, block=block)
    aten.quantize(q, x, scale, dtype=f8)
    on_gpu, gpu_scale, out = (torch.empty_like(t, device=CUDA) for t in (x, scale, q))
    table["row_scales"](gpu_scale, on_gpu.copy_(x), dtype=f8, block=block)
    table["quantize"](out, on_gpu, gpu_scale, dtype=f8)
    torch.testing.assert_close(gpu_scale.cpu(), scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out.cpu().float(), q.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [70, 8192, 28672])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_quantized_in_one_kernel_have_the_bits_of_the_cpu_in_both_layouts(dtype, columns):
    x = (torch.randn(300, columns) * torch.logspace(-20, 3, columns)).to(dtype)
    x[0], x[1, 7], x[2, 3] = 0, math.nan, math.inf
    q, scale = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(300, 1)
    aten.quantize_rows(q, scale, [x])
    for on_gpu in (x.to(CUDA), x.t().contiguous().to(CUDA).t()):
        out, gpu_scale = torch.empty_like(q, device=CUDA), torch.full((300, 1), math.nan, device=CUDA)
        quantize.quantize_rows(out, gpu_scale, [on_gpu])
        torch.testing.assert_close(gpu_scale.cpu(), scale, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(out.cpu().float(), q.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("by_columns", [False, True])
def test_matrices_quantized_together_have_the_bits_of_the_cpu(by_columns, axis):
    shapes = [(size, 4100)[:: 1 if axis == 0 else -1] for size in (1024, 128, 7, 3584)]
    xs = [(torch.randn(shape) * torch.logspace(-3, 3, shape[1])).bfloat16() for shape in shapes]
    xs = [x.t().contiguous().t() for x in xs] if by_columns else xs
    shape = torch.cat(xs, axis).shape
    q, scale = torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(shape[0], 1)
    aten.quantize_rows(q, scale, xs, axis=axis)
    out, gpu_scale = torch.empty_like(q, device=CUDA), torch.full_like(scale, math.nan, device=CUDA)
    quantize.quantize_rows(out, gpu_scale, [x.t().to(CUDA).t() if by_columns else x.to(CUDA) for x in xs], axis=axis)
    torch.testing.assert_close(gpu_scale.cpu(), scale, rtol=0, atol=0)
    torch.testing.assert_close(out.cpu().float(), q.float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("outer", "inner", "N", "K"), [(1, 4096, 1280, 8192), (1, 20000, 256, 512), (2, 500, 96, 256), (3, 33, 40, 72)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_weights_are_sums_of_the_rows_in_fp8(outer, inner, N, K, dtype):
    rows, exact = [], []
    for columns, powers in ((N, (1, -3)), (K, (-2, 2))):
        shape, size = (outer, inner, columns), torch.logspace(*powers, inner, 2.0)[:, None]
        q, scale = torch.empty(shape, dtype=torch.float8_e4m3fn, device=CUDA), torch.empty(*shape[:-1], 1, device=CUDA)
        quantize.quantize_rows(q, scale, [torch.randn(shape, device=CUDA) * size.to(CUDA)])
        rows += [q, scale]
        exact.append((q.double() * scale).flatten(0, 1))
    strided = [t.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(t.dtype) for t in rows]
    exact = exact[0].t() @ exact[1]
    for given in (rows, strided):
        out = float8_weight_gradient.call(*given, dtype)
        assert out.dtype == getattr(torch, dtype)
        error = (out.double() - exact).norm() / exact.norm()
        rounded = (exact.to(out.dtype).double() - exact).norm() / exact.norm()
        assert error <= 1.1 * rounded + 2e-4, f"{error:.2e}"  # tensor cores add products of fp8 in about 14 bits
    results, length = [], -(-outer * inner // 16) * 16
    for kernels in (quantize, aten):
        scales = torch.empty(2, device=CUDA)
        moved = [torch.full((n, length), math.nan, device=CUDA).to(E4M3) for n in (N, K)]
        kernels.transpose_rows(*moved, scales, rows[0], rows[2], rows[1], rows[3])
        results.append((scales, *(each.float() for each in moved)))
    for ours, atens in zip(*results, strict=True):
        assert torch.equal(ours, atens)
