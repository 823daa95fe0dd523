"""The end of a call: a kernel resets flags and grants credits. The last kernel that waits for flags may do it, too."""

from __future__ import annotations

import math

import pytest
import torch

from hostir.kernels.contractions import BY_BLOCKS
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts
from hostir.kernels.flags.signals import CallEnd
from hostir.kernels.matmul.matmul import multiply
from hostir.kernels.matmul.tiles import Tile
from hostir.kernels.reduce import add_up
from tests.kernels.checking import filled, multiprocessors
from tests.kernels.interpreted.test_done import Watched, whole_numbers

CPU = torch.device("cpu")


def addresses(words: torch.Tensor) -> list[int]:
    return [words.data_ptr() + 8 * n for n in range(len(words))]


@pytest.mark.parametrize(("flags", "credits"), [(4, 1), (1, 7), (3, 0), (0, 2)])
def test_a_kernel_of_its_own_resets_flags_and_grants_credits(flags: int, credits: int) -> None:
    raised, granted = torch.full((flags,), 9), torch.arange(credits)
    end = CallEnd(CPU, addresses(raised), addresses(granted))
    end()
    end()
    assert raised.tolist() == [0] * flags
    assert granted.tolist() == [n + 2 for n in range(credits)]


@pytest.mark.parametrize("sms", [1, 3, 40])
@pytest.mark.parametrize("kernel", ["sum", "matmul", "split matmul"])
def test_the_last_program_of_a_kernel_that_waits_ends_the_call(kernel: str, sms: int, monkeypatch) -> None:
    blocks, rows, N = 4, 64, 48
    flags = torch.full((2 * blocks if kernel == "sum" else blocks,), 5)
    granted, out = torch.zeros(1, dtype=torch.int64), torch.full((rows, N), math.nan)
    end = CallEnd(CPU, addresses(flags), addresses(granted))
    ready = ReadyFlags(flags, 5, no_timeouts(len(flags), "cpu"), polls=3, ending=end)
    x, a, b = whole_numbers(2, rows, N), whole_numbers(rows, 40), whole_numbers(40, N)
    exact = x.sum(0) if kernel == "sum" else a @ b
    for call in (1, 2):
        out.fill_(math.nan)
        flags.fill_(5)
        with pytest.MonkeyPatch.context() as patch, multiprocessors(sms):
            watched = Watched(patch, granted, out)
            if kernel == "sum":
                add_up(x, out, 0, ready=ready)
            else:
                split = 5 if kernel == "split matmul" else 0
                tile = Tile(32, 16, 16, stages=1, warps=1, group=2, split=split, parts=2)
                multiply(a, b, out, ready=ready, tile=tile)
        assert watched.order == [0], "one credit a call"
        assert torch.equal(watched.seen[0], exact), "the call has ended before the result was stored"
        assert torch.equal(out, exact)
        assert granted.item() == call
        assert not flags.any()
        assert end.arrived.item() == 0, "the next launch counts its programs from 0"


def test_a_product_of_several_launches_ends_the_call_after_the_last_one() -> None:
    flags, granted = torch.ones(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    end = CallEnd(CPU, addresses(flags), addresses(granted))
    ready = ReadyFlags(flags, 1, no_timeouts(2, "cpu"), polls=3, ending=end)
    a, b = filled([2, 3, 4, 40], torch.float32, pad=[1, 1, 1, 0]), whole_numbers(40, 48)  # rows that do not merge
    out = torch.full((2, 3, 4, 48), math.nan)
    BY_BLOCKS["matmul_by_blocks"](out, a, b, ready=ready)
    torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-4)
    assert granted.item() == 1
    assert not flags.any()


def test_a_kernel_that_gives_up_waiting_ends_the_call_all_the_same() -> None:
    flags, granted = torch.tensor([1, 0]), torch.zeros(1, dtype=torch.int64)
    end = CallEnd(CPU, addresses(flags), addresses(granted))
    ready = ReadyFlags(flags, 1, no_timeouts(2, "cpu"), polls=3, ending=end)
    out = torch.full((64, 48), math.nan)
    multiply(whole_numbers(64, 40), whole_numbers(40, 48), out, ready=ready)
    assert ready.timeouts[1].any()
    assert granted.item() == 1
    assert not flags.any()
    assert end.arrived.item() == 0
