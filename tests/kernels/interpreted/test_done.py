"""Completion flags: they rise after blocks of the output are stored, while the kernel goes on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from hostir.kernels.flags.done import DoneFlags
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts
from hostir.kernels.matmul import workspaces
from hostir.kernels.matmul.matmul import matmul, multiply
from hostir.kernels.matmul.operands import DTYPES
from hostir.kernels.matmul.tiles import Tile
from tests.kernels.checking import assert_only_view_written, embedded, filled, multiprocessors

TILES = (
    Tile(16, 16, 16, stages=1, warps=1, group=2),
    Tile(32, 32, 16, stages=1, warps=1, halves=True, group=1),
    Tile(64, 16, 32, stages=1, warps=1, group=8),
    Tile(16, 16, 16, stages=1, warps=1, group=3, split=3, parts=2),
    Tile(32, 16, 16, stages=1, warps=1, halves=True, split=2, parts=3),
)
SMALL = TILES[0]
builder = interpreter.interpreter_builder


class Watched:
    """Records the order in which flags rise, and the block in memory when its flag rises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flags: torch.Tensor, out: torch.Tensor) -> None:
        self.flags, self.out, self.order = flags, out, list[int]()
        self.seen = dict[int, torch.Tensor]()
        atomic = builder.create_atomic_rmw

        def create(*arguments: Any) -> Any:
            before = flags.clone()
            result = atomic(*arguments)
            for slot in (flags != before).nonzero().flatten().tolist():
                self.order.append(slot)
                self.seen[slot] = out.reshape(-1, out.shape[-1]).chunk(len(flags))[slot].clone()
            return result

        monkeypatch.setattr(builder, "create_atomic_rmw", create)


def whole_numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small integers, so that sums are exact in any order."""
    return filled(shape, dtype, integers=True)


def counts_are_zero() -> bool:
    return not any(tickets.any() for _, tickets in workspaces._by_stream.values())


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_every_flag_rises_after_its_block_and_counts_return_to_zero(data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    blocks, height = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    use_descriptors = draw(st.booleans())
    N = 8 * draw(st.integers(1, 5)) if use_descriptors else draw(st.integers(1, 40))
    K = draw(st.sampled_from([0, 8, 40, 272])) if not use_descriptors else draw(st.sampled_from([8, 40, 272]))
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    a, b = whole_numbers(blocks * height, K, dtype=dtype), whole_numbers(K, N, dtype=dtype)
    bias = whole_numbers(N, dtype=dtype) if draw(st.booleans()) else None
    tile = draw(st.sampled_from(TILES))
    if draw(st.booleans()) and blocks * height % 4 == 0:  # batches that do not merge: rows between them are left out
        rows = filled([4, blocks * height // 4, K], dtype, pad=[0, 1, 0]).copy_(a.view(4, blocks * height // 4, K))
    else:
        rows = a
    flags = torch.zeros(blocks, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    epoch, first = draw(st.sampled_from([1, 7])), draw(st.integers(0, blocks - 1))
    out, buffer = embedded([*rows.shape[:-1], N], dtype, pad=[0] * (rows.ndim - 2) + [1, 8])
    before = whole_numbers(*out.shape, dtype=dtype) if bias is None and draw(st.booleans()) else None
    if before is not None:
        out.copy_(before)
    with pytest.MonkeyPatch.context() as patch, multiprocessors(draw(st.integers(1, 12))):
        watched = Watched(patch, flags, out)
        done = DoneFlags(flags, epoch, first)
        how = {"use_descriptors": use_descriptors, "tile": tile, "adds": before is not None}
        multiply(rows, b, out, bias=bias, done=done, **how)
    assert_only_view_written(out, buffer)
    exact = a.double() @ b.double()
    added = bias if before is None else before.view(-1, N)
    exact = (exact if added is None else exact + added.double()).to(dtype)
    assert torch.equal(out.reshape(-1, N), exact)
    assert flags.tolist() == [epoch] * blocks
    assert sorted(watched.order) == list(range(blocks)), "each flag rises once"
    for block, seen in watched.seen.items():
        assert torch.equal(seen, exact.chunk(blocks)[block]), "the flag rose before its block was stored"
    assert counts_are_zero()


@pytest.mark.parametrize("use_descriptors", [True, False])
@pytest.mark.parametrize(("height", "first"), [(8, 1), (16, 4), (24, 0), (48, 1)])
def test_blocks_are_computed_in_order_from_the_first(height, first, use_descriptors, monkeypatch):
    blocks = 5
    a, b = whole_numbers(blocks * height, 24), whole_numbers(24, 48)
    out, flags = torch.full((blocks * height, 48), math.nan), torch.zeros(blocks, dtype=torch.int64)
    with multiprocessors(1):  # one program, so that tiles are computed in their order
        watched = Watched(monkeypatch, flags, out)
        matmul(a, b, out, done=DoneFlags(flags, 1, first), use_descriptors=use_descriptors, tile=SMALL)
    assert torch.equal(out, a @ b)
    for block, seen in watched.seen.items():
        assert torch.equal(seen, (a @ b).chunk(blocks)[block]), "the flag rose before its block was stored"
    in_order = [*range(first, blocks), *range(first)]
    if height % SMALL.m == 0:
        assert watched.order == in_order
    else:  # a tile with the first row of a block may also have the last rows of the block before
        assert watched.order[-1] in (in_order[-1], in_order[-2])
        assert set(watched.order[:2]) <= set(in_order[:3]) | {in_order[-1]}


@pytest.mark.parametrize(("waits", "raises", "own_rows", "early", "split", "use_descriptors"), [
    (4, 4, True, 0, 0, True), (4, 2, False, 2, 2, False), (2, 8, True, 1, 2, True), (4, 160, True, 2, 0, False),
    (4, 1, False, 0, 2, True), (4, 4, True, 0, 0, False),
])  # fmt: skip
def test_a_kernel_that_waits_raises_flags_too(waits, raises, own_rows, early, split, use_descriptors, monkeypatch):
    monkeypatch.setattr("hostir.kernels.matmul.matmul.MIN_OWN_ROWS", 0)
    rows, K, N, first = 160, 200, 48, waits // 2
    all_rows, b, bias = whole_numbers(rows, K), whole_numbers(K, N), whole_numbers(N)
    a, mine = all_rows.clone(), None
    flags = torch.ones(waits, dtype=torch.int64)
    if own_rows:
        mine = all_rows.chunk(waits)[first].clone()
        a.chunk(waits)[first].fill_(math.nan)
        flags[first] = 0
    ready = ReadyFlags(flags, 1, no_timeouts(waits, "cpu"), first=first, polls=3)
    tile = Tile(32, 16, 16, stages=1, warps=1, group=2, early_blocks=early, split=split, parts=2)
    out, raised = torch.full((rows, N), math.nan), torch.zeros(raises, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch, multiprocessors(7):
        watched = Watched(patch, raised, out)
        options = {"bias": bias, "use_descriptors": use_descriptors, "tile": tile}
        matmul(a, b, out, ready=ready, own_rows=mine, done=DoneFlags(raised, 3), **options)
    exact = all_rows @ b + bias
    assert torch.equal(out, exact)
    assert raised.tolist() == [3] * raises
    for block, seen in watched.seen.items():
        assert torch.equal(seen, exact.chunk(raises)[block])
    assert counts_are_zero()
    assert not ready.timeouts.any()


@pytest.mark.parametrize(
    ("raises", "missing", "early", "split"), [(4, 0, 0, 0), (2, 2, 1, 3), (8, 3, 4, 0), (160, 2, 1, 3), (160, 2, 0, 0)]
)
def test_flags_of_blocks_that_miss_rows_do_not_rise(raises, missing, early, split):
    rows, waits = 160, 4
    a, b = whole_numbers(rows, 200), whole_numbers(200, 48)
    ready = ReadyFlags(torch.ones(waits, dtype=torch.int64), 1, no_timeouts(waits, "cpu"), first=2, polls=3)
    ready.flags[missing] = 0
    tile = Tile(32, 16, 16, stages=1, warps=1, group=2, early_blocks=early, split=split, parts=2)
    out, raised = torch.full((rows, 48), math.nan), torch.zeros(raises, dtype=torch.int64)
    with multiprocessors(7):
        matmul(a, b, out, ready=ready, done=DoneFlags(raised, 1), tile=tile)
        assert counts_are_zero(), "the next launch must count from 0"
        for block, (is_raised, part) in enumerate(zip(raised.tolist(), out.chunk(raises), strict=True)):
            needs = range(block * waits // raises, -(-(block + 1) * waits // raises))
            assert not (is_raised and (missing in needs or part.isnan().any()))
        ready.flags.fill_(1)
        raised.zero_()
        ready.timeouts.zero_()
        matmul(a, b, out, ready=ready, done=DoneFlags(raised, 1), tile=tile)
    assert torch.equal(out, a @ b)
    assert raised.all()


@pytest.mark.parametrize(
    ("error", "message", "fields"),
    [
        (TypeError, "flags of int32 or int64", {"flags": torch.zeros(3)}),
        (ValueError, "a row of flags, got shape", {"flags": torch.zeros(6, dtype=torch.int32)[::2]}),
        (ValueError, "no block 3 to begin with: expected 0 to 2", {"first": 3}),
        (ValueError, "12 rows do not make 5 equal blocks", {"flags": torch.zeros(5, dtype=torch.int32)}),
        (ValueError, "one device", {"flags": torch.zeros(3, dtype=torch.int32, device="meta")}),
    ],
)
def test_flags_that_do_not_fit_are_reported(error, message, fields):
    done = dataclasses.replace(DoneFlags(torch.zeros(3, dtype=torch.int32), 1), **fields)
    with pytest.raises(error, match=message):
        matmul(torch.zeros(12, 8), torch.zeros(8, 8), torch.zeros(12, 8), done=done)
