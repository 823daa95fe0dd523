"""Tiles that are split among several programs."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
import triton.runtime.interpreter as interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.kernels.flags.ready import ReadyFlags, no_timeouts
from hostir.kernels.matmul import workspaces
from hostir.kernels.matmul.matmul import matmul
from hostir.kernels.matmul.operands import DTYPES
from hostir.kernels.matmul.tiles import MIN_STEPS, Tile
from tests.kernels.checking import check_matmul, embedded, filled, multiprocessors, parts

TILES = (
    Tile(16, 16, 16, stages=1, warps=1, group=2, split=1),
    Tile(32, 32, 16, stages=1, warps=1, halves=True, group=1, split=2),
    Tile(64, 16, 32, stages=1, warps=1, split=1),
)
SMALL = TILES[0]
PAIRS = dataclasses.replace(SMALL, parts=2)


def whole_numbers(*shape: int) -> torch.Tensor:
    """Return small integers, so that sums are exact in any order."""
    return filled(shape, torch.float32, integers=True)


def poisoned() -> None:
    """Fill the memory for sums with NaN, and leave the tickets at 0."""
    for sums, tickets in workspaces._by_stream.values():
        sums.fill_(math.nan)
        assert not tickets.any()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_split_tiles_give_the_product(data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    use_descriptors = draw(st.booleans())
    quantum = 8 if use_descriptors else 1
    B, M = draw(st.integers(1, 3)), draw(st.integers(1, 50))
    config = dataclasses.replace(draw(st.sampled_from(TILES)), parts=draw(st.integers(2, 4)))
    least = 2 * MIN_STEPS * config.k // quantum  # for two parts
    N, K = quantum * draw(st.integers(1, 56 // quantum)), quantum * draw(st.integers(least, least + 150 // quantum))
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    a = filled([B, M, K], dtype, pad=[0, draw(st.integers(0, 1)), 0])
    b = filled([K, N], dtype)
    bias = filled([N], dtype) if draw(st.booleans()) else None
    out, buffer = embedded([B, M, N], dtype, pad=[0, 1, 8])
    poisoned()
    with multiprocessors(draw(st.integers(2 * config.split, 9))):
        check_matmul(a, b, out, buffer, bias=bias, use_descriptors=use_descriptors, tile=config)
        assert parts() >= 2
    poisoned()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_bits_do_not_depend_on_which_program_is_last(seed, count, monkeypatch):
    a, b = filled([64, 600], torch.float32), filled([600, 20], torch.float32)  # 8 tiles
    config = dataclasses.replace(SMALL, parts=count)
    with multiprocessors(3):
        expected = matmul(a, b, torch.empty(64, 20), tile=config)
        assert parts() == count
        order = list(range(3))
        random.Random(seed).shuffle(order)
        builder = interpreter.interpreter_builder
        place = builder.set_grid_idx
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: place(order[x], y, z))
        poisoned()
        out = matmul(a, b, torch.full((64, 20), math.nan), tile=config)
        assert torch.equal(out, expected)
        assert not torch.equal(out, matmul(a, b, torch.empty(64, 20), tile=dataclasses.replace(SMALL, split=0)))


@pytest.mark.parametrize("config", [SMALL, PAIRS])
@pytest.mark.parametrize(("sms", "most"), [(1, 0), (2, 2), (3, 3), (100, 3)])
def test_any_number_of_multiprocessors_gives_the_product(sms, most, config):
    a, b = whole_numbers(50, 200), whole_numbers(200, 40)
    with multiprocessors(sms):
        assert torch.equal(matmul(a, b, torch.full((50, 40), math.nan), tile=config), a @ b)
        assert parts() == min(most, config.parts)


@pytest.mark.parametrize("early", [0, 1, 2])
@pytest.mark.parametrize("own_rows", [True, False])
@pytest.mark.parametrize(("sms", "most"), [(4, 2), (4, 8), (7, 3)])
def test_tiles_that_wait_for_rows_are_split_in_the_same_way(own_rows, early, sms, most):
    use_descriptors = (own_rows + early + most) % 2 == 0  # both, for every value of the other parameters
    config = dataclasses.replace(TILES[(early + most) % 2], parts=most, early_blocks=early)
    blocks, height, K, N = 3, 64 if own_rows else 32, 208, 48  # fewer own rows would be copied
    all_rows, b = whole_numbers(blocks * height, K), whole_numbers(K, N)
    a = all_rows.clone()
    mine = all_rows[height : 2 * height].clone() if own_rows else None
    if own_rows:
        a[height : 2 * height] = math.nan
    ready = ReadyFlags(torch.ones(blocks, dtype=torch.int32), 1, no_timeouts(blocks, "cpu"), first=1)
    out = torch.full((blocks * height, N), math.nan)
    with multiprocessors(sms):
        poisoned()
        matmul(a, b, out, ready=ready, own_rows=mine, use_descriptors=use_descriptors, tile=config)
        assert parts() == min(most, sms // config.split, -(-K // config.k) // MIN_STEPS)
    assert torch.equal(out, all_rows @ b)
    poisoned()


@pytest.mark.parametrize("early", [0, 1, 2])
@pytest.mark.parametrize("config", [SMALL, PAIRS])
def test_a_split_tile_with_missing_rows_reports_them_and_resets_its_tickets(config, early):
    config = dataclasses.replace(config, early_blocks=early)
    all_rows, b = whole_numbers(64, 320), whole_numbers(320, 16)
    flags, timeouts = torch.tensor([1, 0], dtype=torch.int32), no_timeouts(2, "cpu")
    out = torch.full((64, 16), math.nan)
    with multiprocessors(3):
        ready = ReadyFlags(flags, 1, timeouts, polls=3)
        matmul(all_rows, b, out, ready=ready, tile=config)
        assert parts() == (min(3, config.parts) if early < 2 else 0)
        poisoned()
        assert timeouts.tolist() == [[0, 0], [1, 0]]
        assert torch.equal(out[:32], (all_rows @ b)[:32])
        matmul(all_rows, b, out, ready=dataclasses.replace(ready, flags=torch.ones_like(flags)), tile=config)
    assert torch.equal(out, all_rows @ b)


def test_launches_of_one_stream_share_memory_that_grows_and_other_streams_have_their_own():
    cpu = torch.device("cpu")
    sums, tickets = workspaces.workspace(cpu, 1, 10, 4)
    assert not tickets.any()
    again = workspaces.workspace(cpu, 1, 8, 4)
    assert [t.data_ptr() for t in again] == [sums.data_ptr(), tickets.data_ptr()]
    other = workspaces.workspace(cpu, 2, 8, 4)
    assert other[1].data_ptr() != tickets.data_ptr()
    grown = workspaces.workspace(cpu, 1, 8, 40)
    assert len(grown[0]) == 10
    assert len(grown[1]) == 64  # enough for all later sizes
    for stream in (1, 2):
        del workspaces._by_stream[cpu, stream]
