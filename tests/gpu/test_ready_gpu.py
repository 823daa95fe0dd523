"""Matmuls that wait for flags of blocks of rows, on a real GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hostir.kernels.flags.ready import ReadyFlags, no_timeouts, timeout_error
from hostir.kernels.matmul.matmul import matmul
from hostir.kernels.matmul.operands import DTYPES
from hostir.kernels.matmul.tiles import Tile
from tests.gpu.one_device import descriptor_modes
from tests.kernels.checking import assert_only_view_written, embedded, filled, tiles_of

CUDA = "cuda"


def one_tile(dtype: torch.dtype, use_descriptors: bool) -> Tile:
    """Return one tile for kernels with and without flags, which might choose different tiles."""
    return tiles_of(dtype, descriptors=use_descriptors)[0]


def raised(blocks: int, *, dtype: torch.dtype = torch.int32, **fields: object) -> ReadyFlags:
    """Return flags that are set to the awaited epoch 1."""
    flags = torch.ones(blocks, dtype=dtype, device=CUDA)
    return ReadyFlags(flags, **{"epoch": 1, "timeouts": no_timeouts(blocks, CUDA), **fields})


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 8])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(64, 1792, 4096), (512, 1792, 4096), (4096, 3584, 1024), (2000, 904, 520), (8 * 129, 328, 72)]
)
def test_every_tile_gives_the_bits_of_the_kernel_without_flags(M, N, K, blocks, transpose_b):
    dtype = torch.bfloat16
    a = filled([M, K], dtype, device=CUDA)
    b = filled([N, K] if transpose_b else [K, N], dtype, device=CUDA)
    for use_descriptors in descriptor_modes():
        for config in tiles_of(dtype, descriptors=use_descriptors):
            options = {"transpose_b": transpose_b, "use_descriptors": use_descriptors, "tile": config}
            out, buffer = embedded([M, N], dtype, pad=[1, 8], device=CUDA)
            ready = raised(blocks, first=blocks // 2)
            matmul(a, b, out, ready=ready, **options)
            assert_only_view_written(out, buffer)
            assert torch.equal(out, matmul(a, b, torch.empty_like(out), **options))
            assert timeout_error(ready.timeouts, 0, "%f") is None


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(64, 1792, 4096), (512, 1792, 4096), (4096, 3584, 1024), (2000, 904, 520), (8 * 129, 328, 72)]
)
def test_own_rows_give_the_same_bits_as_rows_in_the_buffer(M, N, K, transpose_b):
    dtype, blocks, first = torch.bfloat16, 8, 5
    a = filled([M, K], dtype, device=CUDA)
    b = filled([N, K] if transpose_b else [K, N], dtype, device=CUDA)
    local = filled([M // blocks, K], dtype, pad=[0, 8], device=CUDA).copy_(a.chunk(blocks)[first])
    rows = a.clone()
    rows.chunk(blocks)[first].fill_(math.nan)
    for use_descriptors in descriptor_modes():
        for config in tiles_of(dtype, descriptors=use_descriptors):
            options = {"transpose_b": transpose_b, "use_descriptors": use_descriptors, "tile": config}
            out, buffer = embedded([M, N], dtype, pad=[1, 8], device=CUDA)
            ready = raised(blocks, first=first)
            ready.flags[first] = 0
            for _ in range(2):  # the second is launched without Triton
                matmul(rows, b, out.fill_(math.nan), ready=ready, own_rows=local, **options)
                assert_only_view_written(out, buffer)
                assert torch.equal(out, matmul(a, b, torch.empty_like(out), **options))
            assert timeout_error(ready.timeouts, 0, "%f") is None


@pytest.mark.parametrize(
    ("M", "N", "K", "transpose_b"), [(2048, 3584, 1024, True), (2000, 904, 1096, True), (8 * 129, 328, 1032, False)]
)
def test_early_blocks_always_give_the_bits_of_tiles_split_in_two(M, N, K, transpose_b):
    dtype, blocks, first = torch.bfloat16, 8, 5
    a = filled([M, K], dtype, device=CUDA)
    b = filled([N, K] if transpose_b else [K, N], dtype, device=CUDA)
    local = a.chunk(blocks)[first].clone()
    rows = a.clone()
    rows.chunk(blocks)[first].fill_(math.nan)
    for use_descriptors in descriptor_modes():
        for tile in tiles_of(dtype, descriptors=use_descriptors)[: 3 if use_descriptors else 1]:
            options = {"transpose_b": transpose_b, "use_descriptors": use_descriptors}
            wanted = [  # computed in parts, because a launch splits only as many tiles as it has programs
                torch.cat([_in_two(part, b[i : i + tile.n] if transpose_b else b[:, i : i + tile.n], tile, options)
                           for i in range(0, N, tile.n)], 1)
                for part in a.chunk(blocks)
            ]  # fmt: skip
            for early, split, own_rows in [(1, 0, local), (3, 5, local), (3, 0, None)]:
                config = dataclasses.replace(tile, early_blocks=early, split=split, parts=2)
                out, buffer = embedded([M, N], dtype, pad=[1, 8], device=CUDA)
                ready = raised(blocks, first=first)
                ready.flags[first] = 0 if own_rows is not None else 1
                gathered = a if own_rows is None else rows
                seen = []
                for _ in range(3):
                    matmul(gathered, b, out.fill_(math.nan), ready=ready, own_rows=own_rows, tile=config, **options)
                    assert_only_view_written(out, buffer)
                    seen.append(out.clone())
                assert all(torch.equal(seen[0], again) for again in seen[1:])
                apart = own_rows is not None or M // blocks >= tile.m
                for block in range(early) if apart else ():
                    place = (first + block) % blocks
                    assert torch.equal(seen[0].chunk(blocks)[place], wanted[place])
                assert timeout_error(ready.timeouts, 0, "%f") is None


@pytest.mark.parametrize(("M", "N", "K", "bias"), [(2048, 1792, 1024, False), (2000, 904, 1096, True)])
def test_any_number_of_early_and_split_tiles_gives_the_product(M, N, K, bias):
    blocks, first = 8, 5
    a, b = (filled(shape, torch.bfloat16, integers=True, device=CUDA) for shape in ([M, K], [K, N]))
    added = filled([N], torch.bfloat16, integers=True, device=CUDA) if bias else None
    exact = a.double() @ b.double()
    exact = (exact if added is None else exact + added).bfloat16()
    local, rows = a.chunk(blocks)[first].clone(), a.clone()
    rows.chunk(blocks)[first].fill_(math.nan)
    out = torch.empty(M, N, dtype=torch.bfloat16, device=CUDA)
    for use_descriptors in descriptor_modes():
        tile = one_tile(torch.bfloat16, use_descriptors)
        walks = [(0, 9, 2, local), (1, 9, 8, local), (3, 9, 2, local), (3, 30, 4, local), (8, 9, 2, local)]
        walks.append((3, 9, 2, None))
        for early, split, parts, own_rows in walks:
            config = dataclasses.replace(tile, early_blocks=early, split=split, parts=parts)
            ready = raised(blocks, first=first)
            ready.flags[first] = 0 if own_rows is not None else 1
            options = {"bias": added, "use_descriptors": use_descriptors, "tile": config}
            matmul(a if own_rows is None else rows, b, out.fill_(math.nan), ready=ready, own_rows=own_rows, **options)
            assert torch.equal(out, exact), (config, own_rows is None)
            assert timeout_error(ready.timeouts, 0, "%f") is None


def _in_two(a: torch.Tensor, b: torch.Tensor, tile: Tile, options: dict[str, bool]) -> torch.Tensor:
    """Return the product with every tile split in two."""
    config = dataclasses.replace(tile, split=1 << 20, parts=2)
    out = torch.empty(len(a), b.shape[0] if options["transpose_b"] else b.shape[1], dtype=a.dtype, device=CUDA)
    return matmul(a, b, out, tile=config, **options)


@pytest.mark.parametrize("flag_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matmul_of_any_layout_and_dtype_waits(dtype, flag_dtype):
    a, b = filled([6, 100, 120], dtype, pad=[0, 2, 0], device=CUDA), filled([120, 90], dtype, device=CUDA)
    out, buffer = embedded([6, 100, 90], dtype, pad=[0, 1, 3], device=CUDA)
    options = {"use_descriptors": False, "tile": one_tile(dtype, False)}
    for blocks in (2, 6, 24):
        matmul(a, b, out.fill_(math.nan), ready=raised(blocks, dtype=flag_dtype, first=1), **options)
        assert_only_view_written(out, buffer)
        assert torch.equal(out, matmul(a, b, torch.empty_like(out), **options))


@pytest.mark.parametrize(("first", "early"), [(0, 0), (5, 0), (0, 2), (5, 4)])
def test_a_waiting_kernel_reads_rows_that_copies_bring_in_every_call(first, early):
    blocks, M, N, K = 8, 2048, 3584, 2048
    a = torch.empty(M, K, dtype=torch.bfloat16, device=CUDA)
    b = filled([K, N], torch.bfloat16, device=CUDA)
    out, expected = (torch.empty(M, N, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    flags = torch.zeros(blocks, dtype=torch.int32, device=CUDA)
    ready = ReadyFlags(flags, 0, no_timeouts(blocks, CUDA), first=first, polls=5_000_000)
    side = torch.cuda.Stream()
    modes = [
        {"use_descriptors": mode, "tile": dataclasses.replace(one_tile(torch.bfloat16, mode), early_blocks=early)}
        for mode in descriptor_modes()
    ]
    there = raised(blocks, first=first)
    for options in modes:
        matmul(a, b, expected, ready=there, **options)  # compiles
    for epoch in range(1, 21):
        # Copy engines bring both from pinned memory, so nothing that the kernel waits for needs an SM.
        rows, epochs = (
            torch.randn(M, K).bfloat16().pin_memory(),
            torch.full((1,), epoch, dtype=torch.int32).pin_memory(),
        )
        a.fill_(math.nan)
        out.fill_(math.nan)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            for block in [(first + i) % blocks for i in range(blocks)]:
                a.chunk(blocks)[block].copy_(rows.chunk(blocks)[block], non_blocking=True)
                flags[block : block + 1].copy_(epochs, non_blocking=True)
        options = modes[epoch % len(modes)]
        matmul(a, b, out, ready=dataclasses.replace(ready, epoch=epoch), **options)
        assert timeout_error(ready.timeouts, 0, "%f") is None
        torch.cuda.synchronize()
        assert torch.equal(out, matmul(a, b, expected, ready=there, **options))


@pytest.mark.parametrize("early", [0, 1])  # block 2
@pytest.mark.parametrize("missing", [0, 2, 3])
def test_a_kernel_that_times_out_leaves_the_rows_of_a_missing_block_unwritten_unless_it_is_early(missing, early):
    a, b = filled([4096, 512], torch.bfloat16, device=CUDA), filled([512, 1024], torch.bfloat16, device=CUDA)
    for use_descriptors in descriptor_modes():
        out = torch.full((4096, 1024), math.nan, dtype=torch.bfloat16, device=CUDA)
        ready = raised(4, first=2, polls=1000)
        ready.flags[missing] = 0
        config = dataclasses.replace(one_tile(torch.bfloat16, use_descriptors), early_blocks=early)
        options = {"use_descriptors": use_descriptors, "tile": config}
        there = matmul(a, b, torch.empty_like(out), ready=raised(4, first=2), **options)
        matmul(a, b, out, ready=ready, **options)
        error = timeout_error(ready.timeouts, 3, "%arrived")
        assert f"rank 3: flag %arrived[{missing}] did not reach epoch 1 (stands at 0)" in str(error)
        assert out.chunk(4)[missing].isnan().all() or (early and missing == 2)
        if missing != 2 or early:  # multiplied without a wait
            assert torch.equal(out.chunk(4)[2], there.chunk(4)[2])
        ready.flags[missing] = 1
        matmul(a, b, out.fill_(math.nan), ready=ready, **options)  # the tickets are reset
        assert torch.equal(out, there)


@pytest.mark.parametrize("early", [0, 2])
def test_a_replayed_launch_waits_again(early):
    a, b = filled([1024, 512], torch.bfloat16, device=CUDA), filled([512, 1024], torch.bfloat16, device=CUDA)
    out, expected = (torch.empty(1024, 1024, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    ready = raised(4, polls=1000)
    config = dataclasses.replace(one_tile(torch.bfloat16, descriptor_modes()[-1]), early_blocks=early)
    options = {"use_descriptors": descriptor_modes()[-1], "tile": config}
    matmul(a, b, out, ready=ready, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(a, b, out, ready=ready, **options)
    a.copy_(torch.randn_like(a))
    out.fill_(math.nan)
    graph.replay()
    assert timeout_error(ready.timeouts, 0, "%f") is None
    assert torch.equal(out, matmul(a, b, expected, ready=raised(4), **options))
    ready.flags.zero_()
    out.fill_(math.nan)
    graph.replay()
    assert ready.timeouts.tolist() == [[1, 0]] * 4
    assert out.chunk(4)[early].isnan().all()


def test_the_host_reads_timeouts_in_pinned_memory():
    a, b = filled([1024, 512], torch.bfloat16, device=CUDA), filled([512, 1024], torch.bfloat16, device=CUDA)
    timeouts = torch.zeros(4, 2, dtype=torch.int64).pin_memory()
    out = torch.full((1024, 1024), math.nan, dtype=torch.bfloat16, device=CUDA)
    for _ in range(2):  # the second launch bypasses Triton
        ready = dataclasses.replace(raised(4, polls=1000), timeouts=timeouts.zero_())
        ready.flags[1] = 0
        matmul(a, b, out, ready=ready)
        torch.cuda.synchronize()
        assert timeouts.tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]
    pageable = no_timeouts(4, "cpu")
    with pytest.raises(ValueError, match="one device"):
        matmul(a, b, out, ready=dataclasses.replace(ready, timeouts=pageable))
