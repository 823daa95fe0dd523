"""Flags that kernels set after blocks of their results, and sums that wait for blocks, on a real GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hostir.kernels.flags.done import DoneFlags
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts, timeout_error
from hostir.kernels.matmul.matmul import matmul, multiply
from hostir.kernels.matmul.tiles import Tile
from hostir.kernels.matmul.workspaces import _by_stream as workspaces
from hostir.kernels.reduce import reduce_sum
from hostir.machines.cuda.driver import in_batches, wait_at_least, write
from tests.gpu.one_device import descriptor_modes
from tests.kernels.checking import assert_only_view_written, embedded, filled, tiles_of

CUDA = "cuda"
BF16 = torch.bfloat16
CALLS = 2000


def one_tile(use_descriptors: bool, **fields: int) -> Tile:
    return dataclasses.replace(tiles_of(BF16, descriptors=use_descriptors)[0], **fields)


def flags_of(blocks: int, value: int = 0) -> torch.Tensor:
    return torch.full((blocks,), value, dtype=torch.int64, device=CUDA)


def tickets_are_zero() -> bool:
    return not any(tickets.any().item() for _, tickets in workspaces.values())


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 8, 40])
@pytest.mark.parametrize(("M", "N", "K"), [(4096, 3584, 1024), (2000, 904, 520), (8 * 130, 328, 72), (40, 1792, 4096)])
def test_every_tile_gives_the_bits_of_the_kernel_without_flags_and_sets_all_flags(M, N, K, blocks, transpose_b):
    a = filled([M, K], BF16, device=CUDA)
    b = filled([N, K] if transpose_b else [K, N], BF16, device=CUDA)
    for use_descriptors in descriptor_modes():
        for tile in tiles_of(BF16, descriptors=use_descriptors):
            for split, parts in ((0, 2), (9, 2), (9, 8)):
                config = dataclasses.replace(tile, split=split, parts=parts)
                options = {"transpose_b": transpose_b, "use_descriptors": use_descriptors, "tile": config}
                if M % blocks:
                    continue
                out, buffer = embedded([M, N], BF16, pad=[1, 8], device=CUDA)
                flags = flags_of(blocks)
                for epoch in (1, 2):  # the second launch bypasses Triton
                    matmul(a, b, out.fill_(math.nan), done=DoneFlags(flags, epoch, blocks // 2), **options)
                    assert flags.tolist() == [epoch] * blocks
                    assert_only_view_written(out, buffer)
                integers = split > 0  # the order of tiles decides which tiles are split
                plain = matmul(a, b, torch.empty_like(out), **options)
                assert torch.allclose(out, plain, rtol=2e-2, atol=2e-1) if integers else torch.equal(out, plain)
                assert tickets_are_zero()


@pytest.mark.parametrize("blocks", [1, 8])
@pytest.mark.parametrize(("batch", "M", "N", "K"), [(1, 4096, 3584, 1024), (3, 2000, 904, 520), (1, 40, 1792, 4096)])
def test_a_product_is_added_to_its_output_and_rounded_once(batch, M, N, K, blocks):
    a, b = filled([batch, M + 1, K], BF16, device=CUDA)[:, :M], filled([K, N], BF16, device=CUDA)
    before, flags = filled([batch, M, N], BF16, device=CUDA), flags_of(blocks)
    exact = a.double() @ b.double() + before.double()
    for use_descriptors in descriptor_modes():
        for tile in (None, *tiles_of(BF16, descriptors=use_descriptors, adds=True)):
            for epoch in (1, 2):  # the second launch bypasses Triton
                out, done = before.clone(), DoneFlags(flags.zero_(), epoch, 0)
                multiply(a, b, out, done=done, use_descriptors=use_descriptors, tile=tile, adds=True)
                assert flags.tolist() == [epoch] * blocks
                assert (out.double() - exact).norm() <= 1.1 * (exact.to(BF16).double() - exact).norm()


@pytest.mark.parametrize("split", [0, 9])
@pytest.mark.parametrize(("M", "blocks"), [(4096, 8), (4096, 16), (6000, 8), (1040, 8), (2048, 64)])
def test_copies_after_flags_read_complete_blocks_while_the_kernel_runs(M, blocks, split):
    """Copy each block to the host after its flag: a byte that is stored late would be NaN in the copy."""
    N, K, height = 2048, 4096, M // blocks
    modes = [{"use_descriptors": mode, "tile": one_tile(mode, split=split, parts=2)} for mode in descriptor_modes()]
    b = filled([K, N], BF16, device=CUDA)
    a, out, expected = (torch.empty(M, n, dtype=BF16, device=CUDA) for n in (K, N, N))
    taken = torch.empty(M, N, dtype=BF16).pin_memory()  # a copy within the GPU would need SMs that the kernel holds
    flags, side = flags_of(blocks), torch.cuda.Stream()
    reset = in_batches([write(flags.data_ptr() + 8 * i, 0) for i in range(blocks)])
    waits = [in_batches([wait_at_least(flags.data_ptr() + 8 * i, 1)]) for i in range(blocks)]
    worst = torch.zeros((), dtype=torch.int64, device=CUDA)
    for call in range(CALLS // 2):
        a.normal_()
        out.fill_(math.nan)
        first, options = call % blocks, modes[call % len(modes)]
        reset(torch.cuda.current_stream().cuda_stream)
        side.wait_stream(torch.cuda.current_stream())
        matmul(a, b, out, done=DoneFlags(flags, 1, first), **options)  # issued before the waits
        with torch.cuda.stream(side):
            for i in range(blocks):
                block = (first + i) % blocks
                waits[block](side.cuda_stream)
                taken[block * height :][:height].copy_(out[block * height :][:height], non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        matmul(a, b, expected, done=DoneFlags(flags, 1, first), **options)
        copied = taken.to(CUDA, non_blocking=True)
        worst += (copied.view(torch.int16) != expected.view(torch.int16)).sum()
    assert worst.item() == 0
    assert tickets_are_zero()


@pytest.mark.parametrize("waits", [2, 8])
@pytest.mark.parametrize("blocks", [2, 8, 16])
def test_a_waiting_kernel_sets_flags(blocks, waits):
    M, N, K = 2048, 3584, 1024
    a, b = (filled(shape, BF16, integers=True, device=CUDA) for shape in ([M, K], [K, N]))
    exact = (a.double() @ b.double()).to(BF16)
    for use_descriptors in descriptor_modes():
        for early, split, local in [(0, 0, False), (1, 0, True), (1, 9, True), (2, 5, False)]:
            config = one_tile(use_descriptors, early_blocks=early, split=split, parts=2)
            ready = ReadyFlags(flags_of(waits, 1), 1, no_timeouts(waits, CUDA), first=1)
            own_rows = a.chunk(waits)[1].clone() if local else None
            flags, out = flags_of(blocks), torch.full((M, N), math.nan, dtype=BF16, device=CUDA)
            options = {"use_descriptors": use_descriptors, "tile": config, "own_rows": own_rows}
            matmul(a, b, out, ready=ready, done=DoneFlags(flags, 1), **options)
            assert torch.equal(out, exact)
            assert flags.tolist() == [1] * blocks
            assert tickets_are_zero()


@pytest.mark.parametrize("missing", [0, 2, 3])
@pytest.mark.parametrize("early", [0, 1])
def test_a_kernel_that_times_out_sets_no_flag_of_a_block_with_missing_rows(missing, early):
    a, b = filled([4096, 512], BF16, device=CUDA), filled([512, 1024], BF16, device=CUDA)
    for use_descriptors in descriptor_modes():
        config = one_tile(use_descriptors, early_blocks=early)
        out, flags = torch.full((4096, 1024), math.nan, dtype=BF16, device=CUDA), flags_of(8)
        ready = ReadyFlags(flags_of(4, 1), 1, no_timeouts(4, CUDA), first=2, polls=1000)
        ready.flags[missing] = 0
        matmul(a, b, out, ready=ready, done=DoneFlags(flags, 1), use_descriptors=use_descriptors, tile=config)
        assert timeout_error(ready.timeouts, 0, "%f") is not None
        raised = flags.tolist()
        assert not any(raised[2 * missing : 2 * missing + 2])
        assert not any(out.chunk(8)[i].isnan().any() for i in range(8) if raised[i])
        assert tickets_are_zero()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("sources", [2, 3, 8])
@pytest.mark.parametrize(("rows", "N", "results"), [(1024, 4096, 1), (1024, 4096, 4), (130, 904, 2), (8, 8192, 8)])
def test_a_waiting_sum_gives_the_bits_of_a_sum_without_flags(rows, N, results, sources, dtype):
    x = filled([sources, rows, N], dtype, device=CUDA)
    plain = reduce_sum(x, torch.empty(rows, N, dtype=dtype, device=CUDA), 0)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    total = x[0].to(wide)
    for source in x[1:]:
        total += source.to(wide)
    assert torch.equal(plain, total.float().to(dtype))
    own_rows = x[1].clone()
    x[1] = math.nan
    ready = ReadyFlags(flags_of(sources * results, 1), 1, no_timeouts(sources * results, CUDA), source=1)
    ready.flags.view(sources, results)[1] = 0
    flags = flags_of(2)
    for epoch in (1, 2):
        out, buffer = embedded([rows, N], dtype, pad=[1, 8], device=CUDA)
        reduce_sum(x, out, 0, ready=ready, own_rows=own_rows, done=DoneFlags(flags, epoch))
        assert_only_view_written(out, buffer)
        assert torch.equal(out, plain)
        assert flags.tolist() == [epoch] * 2
    assert timeout_error(ready.timeouts, 0, "%f") is None


@pytest.mark.parametrize("results", [1, 4])
def test_a_waiting_sum_reads_sources_that_copies_bring_in_every_call(results):
    sources, rows, N, own_rows = 4, 512, 4096, 2
    x = torch.empty(sources, rows, N, dtype=BF16, device=CUDA)
    flags, side = flags_of(sources * results), torch.cuda.Stream()
    ready = ReadyFlags(flags, 0, no_timeouts(sources * results, CUDA), source=own_rows, polls=5_000_000)
    out, expected = (torch.empty(rows, N, dtype=BF16, device=CUDA) for _ in range(2))
    blocks = [(s, j) for s in range(sources) for j in range(results) if s != own_rows]
    reduce_sum(x, out, 0, ready=dataclasses.replace(ready, epoch=-1), own_rows=expected)  # compiles
    worst, height = torch.zeros((), dtype=torch.int64, device=CUDA), rows // results
    pool = [torch.randn(sources, rows, N).to(BF16).pin_memory() for _ in range(8)]
    for epoch in range(1, CALLS // 4):
        fresh = pool[epoch % 8]  # from pinned memory: a copy within the GPU would need SMs that the sum may hold
        local, sources_on_gpu = fresh[own_rows].to(CUDA), fresh.to(CUDA)
        x.fill_(math.nan)
        out.fill_(math.nan)
        side.wait_stream(torch.cuda.current_stream())
        order = [blocks[i] for i in torch.randperm(len(blocks)).tolist()]
        with torch.cuda.stream(side):
            for source, block in order:
                part = slice(block * height, (block + 1) * height)
                x[source, part].copy_(fresh[source, part], non_blocking=True)
                slot = flags.data_ptr() + 8 * (source * results + block)
                in_batches([write(slot, epoch)])(side.cuda_stream)
        reduce_sum(x, out, 0, ready=dataclasses.replace(ready, epoch=epoch), own_rows=local)
        torch.cuda.current_stream().wait_stream(side)
        worst += (out.view(torch.int16) != reduce_sum(sources_on_gpu, expected, 0).view(torch.int16)).sum()
    assert worst.item() == 0
    assert timeout_error(ready.timeouts, 0, "%f") is None


def test_a_replayed_matmul_sets_its_flags_again():
    a, b = filled([1024, 512], BF16, device=CUDA), filled([512, 1024], BF16, device=CUDA)
    out, flags = torch.empty(1024, 1024, dtype=BF16, device=CUDA), flags_of(4)
    matmul(a, b, out, done=DoneFlags(flags, 1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(a, b, out, done=DoneFlags(flags, 1))
    for _ in range(20):
        a.normal_()
        flags.zero_()
        graph.replay()
        assert flags.tolist() == [1] * 4
        assert torch.equal(out, matmul(a, b, torch.empty_like(out), done=DoneFlags(flags_of(4), 1)))


def test_a_sum_runs_at_the_speed_of_memory():
    """At least 60 % of 4.8 TB/s on an H200: less would mean that loads wait for each other."""
    x = torch.randn(8, 1024, 8192, device=CUDA).to(BF16)
    out = torch.empty(1024, 8192, dtype=BF16, device=CUDA)
    reduce_sum(x, out, 0)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=CUDA)
    times = []
    for _ in range(20):
        flush.zero_()
        start.record()
        reduce_sum(x, out, 0)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    moved = (x.numel() + out.numel()) * 2
    assert moved / sorted(times)[10] > 0.6 * 4.8e12 or torch.cuda.get_device_name() != "NVIDIA H200"
