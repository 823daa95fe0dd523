"""Copies by a kernel, and matmuls that overlap it, on a real GPU."""

from __future__ import annotations

from random import Random

import pytest
import torch

from hostir.kernels.flags.copies import Piece, PushKernel
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts, timeout_error
from hostir.kernels.matmul.matmul import matmul, multiply
from tests.kernels.checking import parts
from tests.kernels.pushing import Job, Peers

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("shift", [0, 8, 6])
@pytest.mark.parametrize("sms", [1, 16, 132])
@pytest.mark.parametrize(
    ("pieces", "size"), [(1, 16), (7, 65_536), (3, 1_000_002), (8, 1 << 20), (40, 2048), (2, 9_000_016)]
)
def test_every_piece_is_copied_completely_and_its_flag_is_set(pieces: int, size: int, sms: int, shift: int) -> None:
    job = Job.random(Random(size), "cuda", pieces, size, shift, sms)
    for _ in range(3):
        job.flags.zero_()
        job.push(job.source)
        job.check(shift)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), [(64, 1792, 4096), (512, 1792, 4096), (4096, 1792, 4096), (1000, 328, 72)])
def test_a_matmul_that_overlaps_copies_waits_for_each_block(M: int, N: int, K: int, captured: bool) -> None:
    blocks = 4
    height = M // blocks
    b = torch.randn(K, N, device=CUDA).bfloat16()
    a, out = (torch.empty(M, columns, device=CUDA, dtype=torch.bfloat16) for columns in (K, N))
    flags, timeouts = torch.zeros(blocks, dtype=torch.int64, device=CUDA), no_timeouts(blocks, CUDA)
    source, after = torch.empty_like(a), torch.empty_like(a)
    size = height * K * 2
    order = [(1 + i) % blocks for i in range(blocks)]
    pieces = [Piece(i * size, a.data_ptr() + i * size, flags.data_ptr() + 8 * i, 1) for i in order]
    push = PushKernel(CUDA, pieces, size, sms=16)
    ready = ReadyFlags(flags, 1, timeouts, first=1, overlapped_sms=16)

    def both() -> None:
        push(source)
        matmul(a, b, out, ready=ready)
        after.copy_(a)  # ordered after both

    def refill() -> None:
        source.normal_()
        a.fill_(float("nan"))
        out.fill_(float("nan"))
        flags.zero_()

    refill()
    both()
    torch.cuda.synchronize()
    again = both
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            both()
        again = graph.replay
    for _ in range(20):
        refill()
        again()
        torch.cuda.synchronize()
        assert timeout_error(timeouts, 0, "%f") is None
        assert torch.equal(after, source), "later statements come after the copies"
        exact = source.double() @ b.double()
        error = (out.double() - exact).norm() / exact.norm()
        assert error <= 1.1 * (source @ b - exact).norm() / exact.norm()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("M", "N", "K", "dtype", "transpose_b"),
    [
        (1, 8192, 3584, torch.bfloat16, False),
        (16, 8192, 3584, torch.bfloat16, True),
        (64, 8192, 3584, torch.float16, True),
        (24, 1000, 7168, torch.bfloat16, False),
        (64, 72, 520, torch.float32, True),
    ],
)
def test_a_product_stores_its_rows_to_peers_and_sets_their_flags(
    M: int, N: int, K: int, dtype: torch.dtype, transpose_b: bool, captured: bool
) -> None:
    """The bits equal those of the kernel without peers, also on the peers, with and without split-K."""
    b = torch.randn(*((N, K) if transpose_b else (K, N)), device=CUDA, dtype=dtype)
    a, out, expected = (torch.empty(M, columns, device=CUDA, dtype=dtype) for columns in (K, N, N))
    height = M // 8 or M
    for peers in (Peers.of(out, [0] * 7, M), Peers.of(out, [*range(0, M, height)][1:] or [0], height)):

        def both(peers: Peers = peers) -> None:
            multiply(a, b.t() if transpose_b else b, out, pushed=peers.push)

        both()
        split = parts()
        matmul(a, b, expected, transpose_b=transpose_b)
        assert parts() == split
        again = both
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                both()
            again = graph.replay
        for _ in range(20):
            a.normal_()
            out.fill_(float("nan"))
            peers.flags.zero_()
            for target in peers.targets:
                target.fill_(7)
            again()
            matmul(a, b, expected, transpose_b=transpose_b)
            assert torch.equal(out, expected)
            peers.check(out)
    exact = a.double() @ (b.t() if transpose_b else b).double()
    theirs = (a @ (b.t() if transpose_b else b) - exact).norm()
    assert (out.double() - exact).norm() <= 1.1 * theirs + 1e-6 * exact.norm()
