"""The kernels, compiled, on a real GPU."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading

import pytest
import torch

from hostir.kernels import aten, gated, grouped, outer
from hostir.kernels.devices import TooLargeError
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts
from hostir.kernels.layout import rows
from hostir.kernels.low_latency import GATHERED, PROGRAMS, LowLatency
from hostir.kernels.matmul import matmul as workspace
from hostir.kernels.matmul import workspaces
from hostir.kernels.matmul.matmul import matmul, matmul_reference
from hostir.kernels.matmul.operands import DTYPES
from hostir.kernels.matmul.tiles import Tile
from hostir.kernels.norm import rms_norm
from hostir.kernels.reduce import reduce_sum
from tests.gpu.one_device import descriptor_modes
from tests.kernels.checking import (
    assert_as_accurate,
    assert_only_view_written,
    check_matmul,
    check_reduce_sum,
    embedded,
    filled,
    multiprocessors,
    parts,
    tiles_of,
    user_allows,
)

CUDA = "cuda"


def splitting(use_descriptors: bool, most: int) -> Tile:
    """Return a tile with split-K for the last tiles, in at most `most` parts."""
    return dataclasses.replace(tiles_of(torch.bfloat16, descriptors=use_descriptors)[0], split=9, parts=most)


def poison_workspaces() -> None:
    """Fill the workspaces of split-K with NaN; all tickets must be 0."""
    torch.cuda.synchronize()
    for sums, tickets in workspaces._by_stream.values():
        sums.fill_(math.nan)
        assert not tickets.any()


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(1, 4096, 4096), (16, 1792, 4096), (512, 3584, 8192), (2048, 1792, 4096), (4096, 4096, 1792), (1000, 3000, 2000)],
)
def test_shapes_of_models_give_the_product(M, N, K, transpose_b):
    a = filled([M, K], torch.bfloat16, device=CUDA)
    b = filled([N, K] if transpose_b else [K, N], torch.bfloat16, device=CUDA)
    for use_descriptors in descriptor_modes():
        out, buffer = embedded([M, N], torch.bfloat16, device=CUDA)
        check_matmul(a, b, out, buffer, transpose_b=transpose_b, use_descriptors=use_descriptors)


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (7, 5, 3), (130, 257, 65), (300, 129, 1001), (255, 512, 63)])
def test_ragged_shapes_give_the_product(M, N, K, dtype, transpose_b):
    a = filled([M, K], dtype, device=CUDA)
    b = filled([N, K] if transpose_b else [K, N], dtype, device=CUDA)
    bias = filled([N], dtype, device=CUDA) if transpose_b else None
    out, buffer = embedded([M, N], dtype, pad=[1, 1], device=CUDA)
    check_matmul(a, b, out, buffer, bias=bias, transpose_b=transpose_b)


@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_shapes_in_aligned_memory_can_use_descriptors(dtype, column_major):
    B, M, N, K = 3, 201, 328, 187  # rows of `out` end on 16 bytes; TMA would write beyond other ends
    order = [1, 0] if column_major else [0, 1]
    a = filled([B, M, K], dtype, pad=[0, 2, -K % 8], device=CUDA)
    b = filled([K, N], dtype, order=order, pad=[-K % 8, -N % 8], device=CUDA)
    for use_descriptors in descriptor_modes():
        out, buffer = embedded([B, M, N], dtype, pad=[0, 1, 8], device=CUDA)
        check_matmul(a, b, out, buffer, use_descriptors=use_descriptors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_after_a_ragged_row_is_not_written(dtype):
    a, b = filled([201, 64], dtype, device=CUDA), filled([64, 333], dtype, pad=[0, 3], device=CUDA)
    out, buffer = embedded([201, 333], dtype, pad=[1, 3], device=CUDA)
    check_matmul(a, b, out, buffer)
    with pytest.raises(ValueError, match="end within 16 bytes"):
        matmul(a, b, out, use_descriptors=True)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_any_strides_give_the_product(order):
    a = filled([4, 100, 120], torch.bfloat16, order=order, pad=[1, 2, 3], offset=1, device=CUDA)
    b = filled([120, 90], torch.bfloat16, order=[1, 0], pad=[1, 0], offset=3, device=CUDA)
    out, buffer = embedded([4, 100, 90], torch.bfloat16, order=order, pad=[1, 0, 1], device=CUDA)
    check_matmul(a, b, out, buffer)


@pytest.mark.parametrize("transpose_b", [True, False])
def test_every_tile_gives_the_product(transpose_b):
    M, N, K, dtype = 700, 904, 520, torch.bfloat16
    a = filled([2, M, K], dtype, pad=[0, 8, 0], device=CUDA)
    b = filled([N, K] if transpose_b else [K, N], dtype, pad=[0, 0 if transpose_b else -N % 8], device=CUDA)
    bias = filled([N], dtype, device=CUDA)
    plain = torch.nn.functional.linear(a, b if transpose_b else b.t(), bias)
    exact = matmul_reference(a, b, bias=bias, transpose_b=transpose_b)
    magnitude = matmul_reference(a.abs(), b.abs(), transpose_b=transpose_b)
    for use_descriptors in descriptor_modes():
        for tile in tiles_of(dtype, descriptors=use_descriptors):
            out, buffer = embedded([2, M, N], dtype, pad=[0, 8, -N % 8], device=CUDA)
            matmul(*(a, b, out), bias=bias, transpose_b=transpose_b, use_descriptors=use_descriptors, tile=tile)
            assert_only_view_written(out, buffer)
            assert_as_accurate(out, plain, exact, magnitude)


def test_slices_of_an_inner_axis_are_used_in_place():
    a = filled([4, 8, 64, 512], torch.bfloat16, device=CUDA)
    b = filled([512, 384], torch.bfloat16, device=CUDA)
    out, buffer = embedded([4, 8, 64, 384], torch.bfloat16, device=CUDA)
    tile = tiles_of(torch.bfloat16, descriptors=descriptor_modes()[-1])[0]  # other tiles round differently
    for i in range(8):
        assert rows(a[:, i]) is None
        matmul(a[:, i], b, out[:, i], tile=tile)
        assert buffer.isnan().sum().item() == (7 - i) * 4 * 64 * 384
    assert torch.equal(out, matmul(a, b, torch.empty_like(out), tile=tile))


def test_float32_is_exact_unless_tf32_is_allowed():
    a, b = filled([256, 1024], torch.float32, device=CUDA), filled([1024, 512], torch.float32, device=CUDA)
    exact = matmul_reference(a, b)

    def error(use_descriptors: bool) -> float:
        out = matmul(a, b, torch.full((256, 512), math.nan, device=CUDA), use_descriptors=use_descriptors)
        return (out.double() - exact).abs().max().item()

    for use_descriptors in descriptor_modes():
        assert error(use_descriptors) < 1e-3
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            assert 1e-3 < error(use_descriptors) < 1
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False


def test_matrices_of_one_address_with_different_strides_are_distinguished():
    memory = torch.randn(1 << 20, device=CUDA).bfloat16()
    b = filled([256, 128], torch.bfloat16, device=CUDA)
    for shape, strides in [((64, 256), (256, 1)), ((64, 256), (512, 1)), ((128, 256), (1024, 1)), ((32, 256), (1, 32))]:
        a = memory.as_strided(shape, strides)
        out, buffer = embedded([shape[0], 128], torch.bfloat16, device=CUDA)
        check_matmul(a, b, out, buffer)


def test_a_replayed_launch_computes_with_the_current_data():
    a, b = filled([512, 1024], torch.bfloat16, device=CUDA), filled([1024, 768], torch.bfloat16, device=CUDA)
    x, total = filled([8, 64, 256], torch.bfloat16, device=CUDA), torch.empty(64, 256, device=CUDA).bfloat16()
    out = torch.empty(512, 768, device=CUDA).bfloat16()
    matmul(a, b, out)
    reduce_sum(x, total, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(a, b, out)
        reduce_sum(x, total, 0)
    a.copy_(torch.randn_like(a))
    x.copy_(torch.randn_like(x))
    out.fill_(math.nan)
    total.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, matmul(a, b, torch.empty_like(out)))
    assert torch.equal(total, reduce_sum(x, torch.empty_like(total), 0))


def test_work_goes_to_the_current_stream():
    a, b = filled([4096, 4096], torch.bfloat16, device=CUDA), filled([4096, 4096], torch.bfloat16, device=CUDA)
    out = torch.zeros(4096, 4096, device=CUDA).bfloat16()
    expected = matmul(a, b, torch.empty_like(out))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        matmul(a, b, out)
    assert not side.query()
    side.synchronize()
    assert torch.equal(out, expected)


def test_offsets_beyond_32_bits_are_supported():
    far = (1 << 31) + 1024  # elements between two batches
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("for lack of a CUDA GPU with 24 GiB")
    memory = torch.full((far + 64 * 256,), math.nan, dtype=torch.bfloat16, device=CUDA)
    a = memory.as_strided((2, 64, 256), (far, 256, 1)).copy_(torch.randn(2, 64, 256, device=CUDA))
    b = filled([256, 128], torch.bfloat16, device=CUDA)
    for use_descriptors in descriptor_modes():
        out, buffer = embedded([2, 64, 128], torch.bfloat16, device=CUDA)
        check_matmul(a, b, out, buffer, use_descriptors=use_descriptors)
    total, buffer = embedded([64, 256], torch.bfloat16, device=CUDA)
    check_reduce_sum(a, total, buffer, 0)


def test_sums_of_split_tiles_are_float32_with_any_default_dtype():
    a, b = filled([1024, 512], torch.bfloat16, device=CUDA), filled([512, 1024], torch.bfloat16, device=CUDA)
    device, graph = torch.device(CUDA, torch.cuda.current_device()), torch.cuda.CUDAGraph()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with multiprocessors(20):
            for use_descriptors in descriptor_modes():
                out, buffer = embedded([1024, 1024], torch.bfloat16, device=CUDA)
                config = splitting(use_descriptors, 2)
                check_matmul(a, b, out, buffer, use_descriptors=use_descriptors, tile=config)
        with torch.cuda.graph(graph):
            in_capture, _ = workspaces.workspace(device, torch.cuda.current_stream().cuda_stream, 100, 4)
            in_capture.zero_()  # torch warns about an empty graph
    finally:
        torch.set_default_dtype(torch.float32)
    assert in_capture.dtype == torch.float32
    assert all(sums.dtype == torch.float32 for sums, _ in workspaces._by_stream.values())


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("dtype", list(aten.REDUCED_PRECISION))
@pytest.mark.parametrize("shape", [(160, 100, 1000), (33, 100, 1000), (64, 60, 4096), (64, 1792, 4096)])
def test_cublas_sums_in_float32_with_any_setting_of_torch(shape, dtype, allowed):
    M, N, K = shape
    setting = aten.REDUCED_PRECISION[dtype]
    a, b = filled([3, M, K], dtype, device=CUDA), filled([K, N], dtype, device=CUDA)
    exact = a.double() @ b.double()
    rounded = torch.linalg.vector_norm(exact.to(dtype).double() - exact)
    dense = torch.full((3, M, N), math.nan, dtype=dtype, device=CUDA)
    strided = torch.full((3, 2 * M, N), math.nan, dtype=dtype, device=CUDA)[:, :M]
    with user_allows(setting, allowed):
        for part, a_part in zip(dense, a, strict=True):
            aten.matmul(part, a_part, b)
        aten.matmul(strided, a, b)
        assert getattr(torch.backends.cuda.matmul, setting) is allowed
    for out in (dense, strided):
        assert torch.linalg.vector_norm(out.double() - exact) < 1.02 * rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((8, 512, 4096), 0),
        ((2, 333, 1001), 0),
        ((64, 8, 1024), 1),
        ((500, 5000), 1),
        ((3000, 7), 0),
        ((2, 3, 4, 5, 6), 2),
    ],
)
def test_sums_over_any_axis(shape, axis, dtype):
    kept = [*shape[:axis], *shape[axis + 1 :]]
    out, buffer = embedded(kept, dtype, pad=[1] * len(kept), device=CUDA)
    check_reduce_sum(filled(shape, dtype, device=CUDA), out, buffer, axis)


def test_sums_of_any_strides():
    for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        x = filled([8, 60, 70], torch.bfloat16, order=order, pad=[1, 2, 3], offset=1, device=CUDA)
        out, buffer = embedded([60, 70], torch.bfloat16, order=[1, 0], pad=[0, 1], device=CUDA)
        check_reduce_sum(x, out, buffer, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 4096, 5000, 8192, 16384, 40000])
def test_norms_of_rows_match_torch_and_round_once(columns, dtype):
    x, weight = (torch.randn(*shape, columns, device=CUDA).to(dtype) for shape in ((33,), ()))
    for scale in (weight, None):
        out = torch.full_like(x, math.nan)
        rms_norm(out, x, scale, eps=1e-5)
        wide = torch.nn.functional.rms_norm(x.float(), [columns], None if scale is None else scale.float(), 1e-5)
        torch.testing.assert_close(out, wide.to(dtype), rtol=max(2e-6, torch.finfo(dtype).eps), atol=2e-6)


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize(("M", "N", "K"), [(64, 1792, 4096), (512, 1792, 4096), (2048, 1792, 1024), (1000, 1000, 2056)])
def test_split_tiles_give_the_product_with_the_same_bits_every_time(M, N, K, transpose_b):
    dtype = torch.bfloat16
    a = filled([M, K], dtype, device=CUDA)
    b = filled([N, K] if transpose_b else [K, N], dtype, device=CUDA)
    bias = filled([N], dtype, device=CUDA)
    plain = torch.nn.functional.linear(a, b if transpose_b else b.t(), bias)
    exact = matmul_reference(a, b, bias=bias, transpose_b=transpose_b)
    magnitude = matmul_reference(a.abs(), b.abs(), transpose_b=transpose_b)
    every = torch.cuda.get_device_properties(0).multi_processor_count
    for use_descriptors in descriptor_modes():
        for tile in tiles_of(dtype, descriptors=use_descriptors):
            for split, sms, most in [(1, every, 8), (20, every, 8), (20, every, 2), (40, 100, 2)]:
                config = dataclasses.replace(tile, split=split, parts=most)
                options = {"bias": bias, "transpose_b": transpose_b, "use_descriptors": use_descriptors}
                results = []
                with multiprocessors(sms):
                    for _ in range(4):
                        poison_workspaces()
                        out, buffer = embedded([M, N], dtype, pad=[1, 8], device=CUDA)
                        matmul(a, b, out, tile=config, **options)
                        assert_only_view_written(out, buffer)
                        results.append(out)
                    assert 2 <= parts() <= most
                assert_as_accurate(results[0], plain, exact, magnitude)
                assert all(torch.equal(results[0], other) for other in results[1:])
    poison_workspaces()


@pytest.mark.parametrize("most", [2, 8])
@multiprocessors(66)  # both launches fit on the GPU together
def test_concurrent_launches_with_split_tiles_use_separate_workspaces(most):
    a, b = filled([1100, 4096], torch.bfloat16, device=CUDA), filled([4096, 1792], torch.bfloat16, device=CUDA)
    config = splitting(descriptor_modes()[-1], most)
    inputs = [a, -a]
    expected = [matmul(x, b, torch.empty(1100, 1792, device=CUDA).bfloat16(), tile=config) for x in inputs]
    assert (parts() == 2) == (most == 2)
    assert parts()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(50):
        outs = [torch.full_like(expected[0], math.nan) for _ in inputs]
        torch.cuda.synchronize()
        for stream, x, out in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                matmul(x, b, out, tile=config)
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            assert torch.equal(out, wanted)
    poison_workspaces()


@pytest.mark.parametrize("most", [2, 8])
@multiprocessors(44)
def test_concurrent_replays_with_split_tiles_use_separate_workspaces(most):
    a, b = filled([1100, 4096], torch.bfloat16, device=CUDA), filled([4096, 1792], torch.bfloat16, device=CUDA)
    config = splitting(descriptor_modes()[-1], most)
    inputs = [a, -a]
    expected = [matmul(x, b, torch.empty(1100, 1792, device=CUDA).bfloat16(), tile=config) for x in inputs]
    assert (parts() == 2) == (most == 2)
    assert parts()
    torch.cuda.synchronize()
    side, graphs, outs = torch.cuda.Stream(), [], [torch.empty_like(expected[0]) for _ in inputs]
    for x, out in zip(inputs, outs, strict=True):  # both are captured on one stream, with separate workspaces
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=side):
            matmul(x, b, out, tile=config)
            matmul(x, b, out, tile=config)
    streams = [torch.cuda.Stream() for _ in graphs]
    eager = torch.empty_like(expected[0])
    for _ in range(50):
        for out in (*outs, eager):
            out.fill_(math.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(side):
            matmul(a, b, eager, tile=config)
        torch.cuda.synchronize()
        assert torch.equal(outs[0], expected[0])
        assert torch.equal(outs[1], expected[1])
        assert torch.equal(eager, expected[0])


def test_operands_at_new_addresses_give_the_product():
    shape = (96, 256)
    for use_descriptors in descriptor_modes():
        for round in range(100):  # more addresses than are cached
            a, b = filled(shape, torch.bfloat16, device=CUDA), filled([256, 128], torch.bfloat16, device=CUDA)
            keep = torch.empty(1 + round, 1024, device=CUDA)
            out, buffer = embedded([96, 128], torch.bfloat16, device=CUDA)
            check_matmul(a, b, out, buffer, use_descriptors=use_descriptors)
            del keep


def test_a_new_thread_can_launch():
    a, b = filled([512, 512], torch.bfloat16, device=CUDA), filled([512, 512], torch.bfloat16, device=CUDA)
    expected = matmul(a, b, torch.empty_like(a))
    torch.cuda.synchronize()
    for _ in range(2):
        outs = [torch.full_like(a, math.nan) for _ in range(4)]
        torch.cuda.synchronize()
        threads = [threading.Thread(target=matmul, args=(a, b, out)) for out in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)


def test_a_tile_that_needs_more_than_the_gpu_has_makes_way_for_another(monkeypatch):
    fits = tiles_of(torch.bfloat16, descriptors=False)[-1]
    too_large = dataclasses.replace(tiles_of(torch.bfloat16, descriptors=False)[0], stages=12)
    monkeypatch.setattr(workspace, "candidates", lambda *_, **__: (too_large, fits))
    monkeypatch.setattr(workspace, "_launches", {})
    a, b = filled([2048, 512], torch.bfloat16, device=CUDA), filled([512, 2048], torch.bfloat16, device=CUDA)
    out, buffer = embedded([2048, 2048], torch.bfloat16, device=CUDA)
    check_matmul(a, b, out, buffer, use_descriptors=False)
    (call,) = workspace._launches.values()
    assert call.tile.unsplit == fits
    with pytest.raises(TooLargeError, match="bytes of shared memory, and the GPU has"):
        matmul(a, b, out, use_descriptors=False, tile=too_large)


# Rows in groups ---------------------------------------------------------------------------------------------------
def begins_of(sources: int, groups: int, rows: int) -> torch.Tensor:
    """Return offsets of groups of random sizes, with rows of no group before and after them."""
    return torch.randint(rows // 8, rows - rows // 8, (sources, groups + 1), device=CUDA).sort(-1).values.int()


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("groups", "K", "N"), [(8, 4096, 1792), (64, 2048, 768), (1, 1000, 72)])
def test_rows_of_several_sources_are_multiplied_in_groups(groups, K, N, waits, indexed):
    sources, rows = 2, 2048
    x = torch.randn(sources, rows // 2 if indexed else rows, K, device=CUDA).bfloat16()
    w, offsets = torch.randn(groups, K, N, device=CUDA).bfloat16(), begins_of(sources, groups, rows)
    index = torch.randint(x.shape[1], (sources, rows), device=CUDA, dtype=torch.int32) if indexed else None
    out = torch.full((sources, rows, N), math.nan, device=CUDA).bfloat16()
    ready = (
        ReadyFlags(torch.full((sources,), 3, device=CUDA), 3, no_timeouts(sources, CUDA), first=1) if waits else None
    )
    grouped.grouped_matmul(out, x, w, offsets, index, ready=ready)
    exact, by_torch = (torch.zeros(out.shape, device=CUDA, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    for source, row in enumerate(offsets.tolist()):
        chosen = x[source] if index is None else x[source, index[source].long()]
        for group, (begin, end) in enumerate(itertools.pairwise(row)):
            exact[source, begin:end] = chosen[begin:end].double() @ w[group].double()
            by_torch[source, begin:end] = chosen[begin:end] @ w[group]
    assert_as_accurate(out, by_torch, exact, exact.abs())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("groups", "K", "N"), [(8, 4096, 1792), (64, 2048, 768), (1, 1000, 72)])
def test_fp8_rows_of_several_sources_are_multiplied_in_groups(groups, K, N, waits, indexed, transposed):
    sources, rows, tokens = 2, 2048, 1024 if indexed else 2048
    x = torch.randn(sources, tokens, K, device=CUDA).to(torch.float8_e4m3fn)
    shape = (groups, N, K) if transposed else (groups, K, N)
    w, offsets = torch.randn(shape, device=CUDA).to(torch.float8_e4m3fn), begins_of(sources, groups, rows)
    w = w.mT if transposed else w
    scale_x, scale_w = torch.rand(sources, tokens, 1, device=CUDA) + 0.5, torch.rand(groups, 1, N, device=CUDA) + 0.5
    index = torch.randint(tokens, (sources, rows), device=CUDA, dtype=torch.int32) if indexed else None
    out = torch.full((sources, rows, N), math.nan, device=CUDA).bfloat16()
    ready = (
        ReadyFlags(torch.full((sources,), 3, device=CUDA), 3, no_timeouts(sources, CUDA), first=1) if waits else None
    )
    grouped.grouped_matmul(out, x, w, offsets, index, scale_x, scale_w, ready=ready)
    exact, by_torch = (torch.zeros(out.shape, device=CUDA, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    for source, row in enumerate(offsets.tolist()):
        order = slice(None) if index is None else index[source].long()
        chosen = x[source].double()[order] * scale_x[source].double()[order]
        for group, (begin, end) in enumerate(itertools.pairwise(row)):
            exact[source, begin:end] = chosen[begin:end] @ (w[group].double() * scale_w[group])
            by_torch[source, begin:end] = exact[source, begin:end].float()
    assert_as_accurate(out, by_torch, exact, exact.abs())


@pytest.mark.parametrize("sources", [1, 2, 5])
@pytest.mark.parametrize(("groups", "K", "N"), [(8, 4096, 1792), (64, 2048, 96), (3, 1000, 72)])
def test_outer_products_of_rows_of_several_sources_are_summed_in_groups(groups, K, N, sources):
    rows = 1024
    x, y = (torch.randn(sources, rows, n, device=CUDA).bfloat16() for n in (K, N))
    offsets = begins_of(sources, groups, rows)
    out = torch.full((groups, K, N), math.nan, device=CUDA).bfloat16()
    outer.grouped_outer(out, x, y, offsets)
    exact, by_torch = (torch.zeros(out.shape, device=CUDA, dtype=dtype) for dtype in (torch.float64, torch.float32))
    for source, row in enumerate(offsets.tolist()):
        for group, (begin, end) in enumerate(itertools.pairwise(row)):
            a, b = x[source, begin:end], y[source, begin:end]
            exact[group] += a.double().t() @ b.double()
            by_torch[group] += a.float().t() @ b.float()
    assert_as_accurate(out, by_torch.bfloat16(), exact, exact.abs())


@pytest.mark.parametrize("shape", [(2, 4096, 1792), (3, 7, 20000), (1, 5, 33)])
def test_gates_and_their_gradients_match_float64(shape):
    g, u, dy = (torch.randn(shape, device=CUDA).bfloat16() for _ in range(3))
    weights = torch.rand(shape[:-1], device=CUDA)
    exact = [t.double().requires_grad_() for t in (g, u, weights)]
    y = torch.nn.functional.silu(exact[0]) * exact[1] * exact[2][..., None]
    wanted = [y.detach(), *torch.autograd.grad(y, exact, dy.double())]
    results = [gated.gate(g, u, weights), *gated.gate_gradients(dy, g, u, weights)]
    for result, true in zip(results, wanted, strict=True):
        scale = float(true.abs().max())
        torch.testing.assert_close(result.double(), true, rtol=torch.finfo(result.dtype).eps, atol=1e-6 * scale)


@pytest.mark.parametrize("dtype", GATHERED)
@pytest.mark.parametrize("size", [512, 1 << 20])
def test_a_gather_by_low_latency_gives_up_on_a_rank_that_sends_nothing(size, dtype):
    slots = [torch.zeros(4 * size, dtype=dtype, device=CUDA) for _ in range(2)]
    calls, timeouts = torch.zeros(PROGRAMS, dtype=torch.int32, device=CUDA), torch.zeros(2, 2, dtype=torch.int64)
    device, timeouts = torch.device(CUDA, torch.cuda.current_device()), timeouts.pin_memory()
    gather = LowLatency(device, 0, slots, calls, timeouts, "allgather", seconds=0.05)
    part = torch.randn(size, device=CUDA).to(dtype)
    out = torch.zeros(2 * size, dtype=dtype, device=CUDA)
    gather(part, out)
    torch.cuda.synchronize()
    assert timeouts.tolist() == [[0, 0], [1, 0]]
    assert torch.equal(out[:size].float(), part.float())
    assert out[size:].float().isnan().all()
