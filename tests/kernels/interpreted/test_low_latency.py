"""The kernel that sums or gathers tensors of all ranks in one exchange, on one rank; the test plays the other ranks."""

from __future__ import annotations

from random import Random

import pytest
import torch

from hostir.kernels import aten
from hostir.kernels.low_latency import (
    BITS,
    BLOCKS,
    FLOATS,
    GATHERED,
    IN_FLIGHT,
    NO_ROWS,
    POLLS,
    PROGRAMS,
    SECONDS_PER_POLL,
    VECTOR,
    Epilogue,
    LowLatency,
    RowTensors,
)
from tests.kernels.checking import multiprocessors

CPU = torch.device("cpu")
SUMS = "allreduce", "reduce_scatter"


class Ranks:
    """The slots of all ranks, and the kernel of one of them."""

    def __init__(
        self,
        ranks: int,
        rank: int,
        dtype: torch.dtype,
        room: int,
        *,
        collective: str,
        epilogue: Epilogue | None = None,
    ) -> None:
        self.ranks, self.rank, self.room, self.collective = ranks, rank, room, collective
        self.slots = [torch.zeros(2 * ranks * room, dtype=dtype) for _ in range(ranks)]
        self.calls = torch.zeros(PROGRAMS, dtype=torch.int32)
        self.timeouts = torch.zeros(ranks, 2, dtype=torch.int64)
        self.kernel = LowLatency(CPU, rank, self.slots, self.calls, self.timeouts, collective, epilogue)

    def slot(self, at: int, source: int, call: int) -> torch.Tensor:
        """Return the slot of a source in the memory of rank `at`, as integers."""
        bits = self.slots[at].view(BITS[self.slots[at].element_size()])
        return bits.view(2, self.ranks, self.room)[call % 2, source]

    def part(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.view(self.ranks, -1)[rank] if self.collective == "reduce_scatter" else x

    def call(
        self, number: int, summands: list[torch.Tensor], out: torch.Tensor | None, rows: RowTensors = NO_ROWS
    ) -> None:
        """Send the summands of the peers, run the kernel, and check what it sent and that its slots are empty."""
        size = self.part(summands[0], 0).numel()
        for peer in range(self.ranks):
            if peer != self.rank:
                self.slot(self.rank, peer, number)[:size] = ~_bits(self.part(summands[peer], self.rank)).view(-1)
        before = summands[self.rank].clone()
        self.kernel(summands[self.rank], out, rows)
        assert self.calls.tolist() == [number + 1] * PROGRAMS
        assert not self.timeouts.any()
        assert not _bits(self.slots[self.rank]).any(), "the slots of this rank are not empty"
        for peer in range(self.ranks):
            if peer != self.rank:
                sent = self.slot(peer, self.rank, number)
                assert sent[:size].all(), "an element looks as if it were not there"
                assert torch.equal(_bits(self.part(before, peer)).view(-1), ~sent[:size])
                assert not sent[size:].any()
                sent.zero_()
                assert not _bits(self.slots[peer]).any(), "it stored elsewhere"


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS[x.element_size()])


def expected(summands: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of the ranks, in float32, rounded once."""
    total = summands[0].float()
    for x in summands[1:]:
        total = total + x.float()
    return total.to(summands[0].dtype)


@pytest.mark.parametrize("collective", SUMS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_gets_the_sums_of_all_ranks_and_empties_its_slots(
    ranks: int, dtype: torch.dtype, collective: str
) -> None:
    random = Random()
    rank, room = random.randrange(ranks), 64 * 40
    job = Ranks(ranks, rank, dtype, room, collective=collective)
    for number in range(4):
        size = random.choice([8, 64, 8 * random.randrange(1, room // 8), room])
        summands = [
            torch.randn(size * (ranks if collective == "reduce_scatter" else 1)).to(dtype) for _ in range(ranks)
        ]
        out = torch.full((size,), float("nan"), dtype=dtype)
        wanted = expected([job.part(x, rank) for x in summands])
        job.call(number, summands, out)
        assert torch.equal(out, wanted)


def test_collectives_of_all_kinds_and_sizes_take_turns_with_the_same_slots() -> None:
    random = Random()
    ranks, room = 3, 64 * 20
    job = Ranks(ranks, 1, torch.bfloat16, room, collective="allreduce")
    kernels = {kind: LowLatency(CPU, 1, job.slots, job.calls, job.timeouts, kind) for kind in (*SUMS, "allgather")}
    for number in range(12):
        job.collective, job.kernel = random.choice(list(kernels.items()))
        size, gathers = 8 * random.randrange(1, room // 8), job.collective == "allgather"
        data = [
            torch.randn(size * (ranks if job.collective == "reduce_scatter" else 1)).bfloat16() for _ in range(ranks)
        ]
        out = torch.full((size * (ranks if gathers else 1),), float("nan")).bfloat16()
        wanted = torch.cat(data) if gathers else expected([job.part(x, 1) for x in data])
        job.call(number, data, out)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", GATHERED)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_gets_the_parts_of_all_ranks_in_their_order(ranks: int, dtype: torch.dtype) -> None:
    random = Random()
    rank, room, unit = random.randrange(ranks), 64 * 40, VECTOR // dtype.itemsize
    job = Ranks(ranks, rank, dtype, room, collective="allgather")
    for number in range(4):
        size = random.choice([unit, 64, unit * random.randrange(1, room // unit), room])
        parts = [torch.randn(size).to(dtype) for _ in range(ranks)]
        out = torch.full((ranks * size,), float("nan"), dtype=dtype)
        job.call(number, parts, out)
        assert torch.equal(_bits(out), _bits(torch.cat(parts)))


@pytest.mark.parametrize("collective", [*SUMS, "allgather"])
@pytest.mark.parametrize("blocks", [IN_FLIGHT, IN_FLIGHT + 1, 3 * IN_FLIGHT + 1])
def test_a_program_of_several_blocks_sends_all_of_them_and_receives_all_of_them(blocks: int, collective: str) -> None:
    size = BLOCKS[1] // 2 * (2 * blocks - 1)  # of two programs, one has a block less
    job = Ranks(3, 1, torch.bfloat16, size, collective=collective)
    for number in range(3):
        data = [torch.randn(size * (3 if collective == "reduce_scatter" else 1)).bfloat16() for _ in range(3)]
        gathers = collective == "allgather"
        out = torch.full((size * (3 if gathers else 1),), float("nan")).bfloat16()
        wanted = torch.cat(data) if gathers else expected([job.part(x, 1) for x in data])
        with multiprocessors(2):
            job.call(number, data, out)
        assert torch.equal(out, wanted)


def test_the_sum_may_take_the_place_of_the_summands() -> None:
    job = Ranks(2, 1, torch.bfloat16, 1024, collective="allreduce")
    summands = [torch.randn(1024).bfloat16() for _ in range(2)]
    wanted = expected(summands)
    job.call(0, summands, summands[1])
    assert torch.equal(summands[1], wanted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_bit_pattern_arrives_but_the_nan_of_only_ones_as_another_nan(dtype: torch.dtype) -> None:
    bits = BITS[dtype.itemsize]
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(bits)
    if dtype == torch.float32:
        patterns = torch.cat([patterns, patterns << 16])
    x = patterns.view(dtype).clone()
    job = Ranks(2, 0, dtype, x.numel(), collective="allreduce")
    ones = patterns == -1
    assert ones.any()
    assert x[ones].isnan().all()
    job.slot(0, 1, 0)[:] = ~torch.zeros(x.numel(), dtype=dtype).view(bits)
    out = torch.empty_like(x)
    job.kernel(x, out)
    torch.testing.assert_close(out, x + 0.0, rtol=0, atol=0, equal_nan=True)
    sent = ~job.slot(1, 0, 0)
    assert torch.equal(sent[~ones], patterns[~ones])
    assert sent[ones].view(dtype).isnan().all()
    assert (sent != -1).all()


@pytest.mark.parametrize("dtype", GATHERED)
def test_a_gathered_part_keeps_all_bits_but_those_of_the_nan_of_only_ones(dtype: torch.dtype) -> None:
    width = 8 * dtype.itemsize
    low = torch.arange(1 << min(width, 16)) | (0xFFFF << 16 if width == 32 else 0)
    patterns = (low - (1 << width) * (low >> (width - 1))).to(BITS[dtype.itemsize])
    job = Ranks(2, 1, dtype, patterns.numel(), collective="allgather")
    out = torch.zeros(2 * patterns.numel(), dtype=dtype)
    sent = torch.where(patterns == -1, (1 << (width - 1)) - 1, patterns)  # as the peer's kernel would send it
    assert (sent != patterns).sum() == 1
    job.slot(1, 0, 0)[:] = ~sent
    job.kernel(patterns.view(dtype), out)
    assert sent.view(dtype)[patterns == -1].isnan()
    assert torch.equal(_bits(out), torch.cat([sent, sent])), "all ranks have the same bits"
    assert torch.equal(~job.slot(0, 1, 0), sent)


@pytest.mark.parametrize("collective", [*SUMS, "allgather"])
def test_a_kernel_gives_up_on_data_that_do_not_arrive_reports_the_rank_and_reads_nan(collective: str) -> None:
    ranks, size = 3, 8 * 700
    job = Ranks(ranks, 1, torch.bfloat16, size, collective=collective)
    job.kernel = LowLatency(CPU, 1, job.slots, job.calls, job.timeouts, collective, seconds=POLLS * SECONDS_PER_POLL)
    data = [torch.randn(size * (ranks if collective == "reduce_scatter" else 1)).bfloat16() for _ in range(ranks)]
    out = torch.zeros(size * (ranks if collective == "allgather" else 1)).bfloat16()
    job.slot(1, 0, 0)[:] = ~_bits(job.part(data[0], 1)).view(-1)
    job.slot(1, 2, 0)[:100] = ~_bits(job.part(data[2], 1)).view(-1)[:100]
    with multiprocessors(2):
        job.kernel(data[1], out)
    assert job.timeouts[:, 0].tolist() == [0, 0, 1]
    if collective == "allgather":
        assert torch.equal(out[: 2 * size], torch.cat(data[:2]))
        assert torch.equal(out[2 * size :][:100], data[2][:100])
        assert out[2 * size :][100:].isnan().all()
    else:
        assert torch.equal(out[:100], expected([job.part(x, 1) for x in data])[:100])
        assert out[100:].isnan().all()


@pytest.mark.parametrize("collective", ["allreduce", "allgather"])
def test_a_rank_that_waits_for_the_late_rank_too_is_not_reported(collective: str) -> None:
    block = BLOCKS[1] // 2
    job = Ranks(3, 1, torch.bfloat16, 6 * block, collective=collective)
    job.kernel = LowLatency(CPU, 1, job.slots, job.calls, job.timeouts, collective, seconds=POLLS * SECONDS_PER_POLL)
    data = [torch.randn(6 * block).bfloat16() for _ in range(3)]
    ahead = (IN_FLIGHT + 1) * block  # it has sent so much when it waits for the first block of rank 2
    job.slot(1, 0, 0)[:ahead] = ~_bits(data[0])[:ahead]
    with multiprocessors(1):
        job.kernel(data[1], torch.zeros(6 * block * (3 if collective == "allgather" else 1)).bfloat16())
    assert job.timeouts[:, 0].tolist() == [0, 0, 1]


def test_addresses_that_are_no_multiples_of_16_bytes_are_served() -> None:
    job = Ranks(2, 0, torch.float16, 512, collective="allreduce")
    buffer = torch.randn(513).half()
    summands, out = [buffer[1:], torch.randn(512).half()], torch.empty(513).half()[1:]
    wanted = expected(summands)
    job.call(0, summands, out)
    assert torch.equal(out, wanted)


def test_an_empty_sum_is_no_call() -> None:
    job = Ranks(2, 0, torch.float32, 64, collective="allreduce")
    job.kernel(torch.empty(0), torch.empty(0))
    assert not job.calls.any()


def separately(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epilogue: Epilogue
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the new residual, the normed rows, their scales and the quantized rows, as separate kernels store them."""
    added, normed = torch.empty_like(total), torch.empty_like(total)
    aten.add(added, total, residual)
    aten.rms_norm(normed, added, weight, eps=epilogue.eps)
    if not epilogue.fp8:
        return added, normed, None, None
    scales = torch.empty(len(total), 1)
    quantized = torch.empty(total.shape, dtype=aten.FP8[epilogue.fp8])
    aten.row_scales(scales, normed, dtype=epilogue.fp8)
    aten.quantize(quantized, normed, scales, dtype=epilogue.fp8)
    return added, normed, scales, quantized


def steps(x: torch.Tensor) -> float:
    """Return the relative distance between neighbouring numbers of a tensor's dtype."""
    return float(torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("fp8", ["", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("collective", SUMS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_residual_norm_and_quantization_follow_the_sum_as_in_separate_kernels(
    ranks: int, dtype: torch.dtype, collective: str, fp8: str
) -> None:
    random = Random()
    rank, room, epilogue = random.randrange(ranks), 64 * 40, Epilogue(1e-5, fp8)
    job = Ranks(ranks, rank, dtype, room, collective=collective, epilogue=epilogue)
    for number, (rows, columns) in enumerate([(8, 33), (1, 64), (16, 7), (5, 136)]):
        summands = [
            torch.randn(rows * (ranks if collective == "reduce_scatter" else 1), columns).to(dtype)
            for _ in range(ranks)
        ]
        residual = torch.randn(rows, columns).to(dtype)
        weight = torch.randn(columns).to(dtype) if random.random() < 0.5 else None
        total = expected([job.part(x, rank) for x in summands]).view(rows, columns)
        wanted = separately(total, residual, weight, epilogue)
        out, added, normed, scales, quantized = results = [
            None if x is None else torch.full_like(x, float("nan")) for x in (total, *wanted)
        ]
        kept = [x if random.random() < 0.5 else None for x in results[:3]]  # the others are not stored
        job.call(number, summands, kept[0], RowTensors(residual, weight, *kept[1:], scales, quantized))
        for x, ours, exact in zip(kept[:2], (out, added), (total, wanted[0]), strict=True):
            assert x is None or torch.equal(ours, exact)
        if kept[2] is not None:
            torch.testing.assert_close(normed, wanted[1], rtol=2 * steps(total), atol=1e-6)
        if fp8:
            torch.testing.assert_close(scales, wanted[2], rtol=max(2 * steps(total), 1e-6), atol=0)
            ours, exact = (q.float() * s for q, s in ((quantized, scales), (wanted[3], wanted[2])))
            torch.testing.assert_close(
                ours, exact, rtol=1.01 * steps(quantized), atol=2 * float(exact.abs().max()) / 2**16
            )


def test_results_may_take_the_place_of_the_residual_and_of_the_summands() -> None:
    job = Ranks(2, 1, torch.bfloat16, 1024, collective="allreduce", epilogue=Epilogue(1e-6))
    summands, residual = [torch.randn(8, 128).bfloat16() for _ in range(2)], torch.randn(8, 128).bfloat16()
    added, normed, _, _ = separately(expected(summands), residual, None, Epilogue(1e-6))
    job.call(0, summands, None, RowTensors(residual, None, residual, summands[1], None, None))
    assert torch.equal(residual, added)
    torch.testing.assert_close(summands[1], normed)


def test_a_row_with_nan_or_infinity_has_the_scale_and_the_elements_of_separate_kernels() -> None:
    job = Ranks(2, 0, torch.float32, 1024, collective="allreduce", epilogue=Epilogue(0.0, "f8e4m3"))
    summands, residual = [torch.zeros(4, 64) for _ in range(2)], torch.randn(4, 64)
    summands[0][0, 3], summands[1][1, 5], residual[2] = float("nan"), float("inf"), 0.0
    _, _, scales, quantized = separately(expected(summands), residual, None, Epilogue(0.0, "f8e4m3"))
    ours, rows = torch.empty(4, 1), torch.empty(4, 64, dtype=torch.float8_e4m3fn)
    job.call(0, summands, None, RowTensors(residual, None, None, None, ours, rows))
    torch.testing.assert_close(ours, scales, equal_nan=True)
    torch.testing.assert_close(rows.float()[:3], quantized.float()[:3], equal_nan=True)


def test_a_kernel_is_compiled_for_the_alignment_of_each_tensor() -> None:
    job = Ranks(2, 0, torch.float16, 512, collective="allreduce")
    buffer, dense = torch.randn(520).half(), torch.randn(512).half()
    for number, (x, out) in enumerate([(buffer[1:513], dense), (dense, buffer[1:513])]):
        summands = [x, torch.randn(512).half()]
        wanted = expected(summands)
        job.call(number, summands, out)
        assert torch.equal(out, wanted)
    assert len(job.kernel.launches) == 2
