"""The kernel that sums tensors of all ranks in one exchange, for one rank; the test plays the other ranks."""

from __future__ import annotations

from random import Random

import pytest
import torch

from hostir.kernels.low_latency import BITS, FLOATS, PROGRAMS, LowLatencySum

CPU = torch.device("cpu")


class Ranks:
    """The slots of all ranks, and the kernel of one of them."""

    def __init__(self, ranks: int, rank: int, dtype: torch.dtype, room: int, *, scatters: bool) -> None:
        self.ranks, self.rank, self.room, self.scatters = ranks, rank, room, scatters
        self.slots = [torch.zeros(2 * ranks * room, dtype=dtype) for _ in range(ranks)]
        self.calls = torch.zeros(PROGRAMS, dtype=torch.int32)
        self.kernel = LowLatencySum(CPU, rank, self.slots, self.calls, scatters)

    def slot(self, at: int, source: int, call: int) -> torch.Tensor:
        """Return the slot of a source in the memory of rank `at`, as integers."""
        bits = self.slots[at].view(BITS[self.slots[at].element_size()])
        return bits.view(2, self.ranks, self.room)[call % 2, source]

    def part(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.view(self.ranks, -1)[rank] if self.scatters else x

    def call(self, number: int, summands: list[torch.Tensor], out: torch.Tensor) -> None:
        """Send the summands of the peers, run the kernel, and check what it sent and that its slots are empty."""
        for peer in range(self.ranks):
            if peer != self.rank:
                self.slot(self.rank, peer, number)[: out.numel()] = ~_bits(self.part(summands[peer], self.rank))
        before = summands[self.rank].clone()
        self.kernel(summands[self.rank], out)
        assert self.calls.tolist() == [number + 1] * PROGRAMS
        assert not _bits(self.slots[self.rank]).any(), "the slots of this rank are not empty"
        for peer in range(self.ranks):
            if peer != self.rank:
                sent = self.slot(peer, self.rank, number)
                assert sent[: out.numel()].all(), "an element looks as if it were not there"
                assert torch.equal(_bits(self.part(before, peer)), ~sent[: out.numel()])
                assert not sent[out.numel() :].any()
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


@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_gets_the_sums_of_all_ranks_and_empties_its_slots(
    ranks: int, dtype: torch.dtype, scatters: bool
) -> None:
    random = Random()
    rank, room = random.randrange(ranks), 64 * 40
    job = Ranks(ranks, rank, dtype, room, scatters=scatters)
    for number in range(4):
        size = random.choice([8, 64, 8 * random.randrange(1, room // 8), room])
        summands = [torch.randn(size * (ranks if scatters else 1)).to(dtype) for _ in range(ranks)]
        out = torch.full((size,), float("nan"), dtype=dtype)
        wanted = expected([job.part(x, rank) for x in summands])
        job.call(number, summands, out)
        assert torch.equal(out, wanted)


def test_the_sum_may_take_the_place_of_the_summands() -> None:
    job = Ranks(2, 1, torch.bfloat16, 1024, scatters=False)
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
    job = Ranks(2, 0, dtype, x.numel(), scatters=False)
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


def test_addresses_that_are_no_multiples_of_16_bytes_are_served() -> None:
    job = Ranks(2, 0, torch.float16, 512, scatters=False)
    buffer = torch.randn(513).half()
    summands, out = [buffer[1:], torch.randn(512).half()], torch.empty(513).half()[1:]
    wanted = expected(summands)
    job.call(0, summands, out)
    assert torch.equal(out, wanted)


def test_an_empty_sum_is_no_call() -> None:
    job = Ranks(2, 0, torch.float32, 64, scatters=False)
    job.kernel(torch.empty(0), torch.empty(0))
    assert not job.calls.any()
