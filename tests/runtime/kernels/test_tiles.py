from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.runtime.kernels.matmul_kernel import schedule
from hostir.runtime.kernels.tiles import Ahead, Config, choose, in_blocks

EXTENTS = st.integers(1, 1 << 17)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize(
    ("M", "N", "K", "tile"),
    [
        (8192, 3584, 8192, (128, 256)),
        (4096, 6656, 16384, (128, 256)),
        (512, 3584, 8192, (128, 128)),  # 112 of 132 multiprocessors, not 56
        (16, 8192, 4096, (64, 64)),
    ],
)
def test_tiles_are_as_large_as_keeps_the_multiprocessors_busy(M, N, K, tile):
    chosen = choose(M, N, K, torch.bfloat16, 132)
    assert (chosen.m, chosen.n) == tile


@given(
    *(EXTENTS, EXTENTS, EXTENTS, st.integers(1, 200), st.integers(1, 64)),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    *(st.booleans(), st.booleans()),
    st.sampled_from([99 << 10, 163 << 10, 227 << 10]),
)
def test_every_choice_fits_into_shared_memory(M, N, K, sms, batch, dtype, descriptors, tf32, shared_memory):
    tile = choose(M, N, K, dtype, sms, batch=batch, descriptors=descriptors, tf32=tf32, shared_memory=shared_memory)
    assert tile.shared_memory(dtype.itemsize, descriptors=descriptors) <= shared_memory


def test_too_little_shared_memory_is_said():
    with pytest.raises(ValueError, match=r"no torch\.bfloat16 matmul tile fits into 1024 bytes"):
        choose(64, 64, 64, torch.bfloat16, 1, shared_memory=1024)


@given(st.integers(1, 64), EXTENTS, st.sampled_from([16, 64, 128]))
def test_rows_in_blocks_are_all_there_and_no_tile_spans_two(blocks, height, m):
    batches, rows = in_blocks(1, blocks * height, height, m)
    assert batches * rows == blocks * height
    assert rows == height or height < m


def test_batches_and_rows_without_blocks_stay_as_they_are():
    assert in_blocks(4, 256, 128, 64) == (4, 256)
    assert in_blocks(1, 256, None, 64) == (1, 256)


@pytest.mark.parametrize(
    ("M", "N", "K", "tiles"), [(2048, 6656, 16384, 20), (4096, 6656, 16384, 40), (4096, 3584, 8192, 52)]
)
def test_the_tiles_of_a_thin_last_wave_are_split(M, N, K, tiles):
    assert choose(M, N, K, torch.bfloat16, 132).split == tiles


@pytest.mark.parametrize(
    ("M", "N", "K"), [(4096, 1792, 4096), (8192, 3584, 8192), (512, 6656, 16384), (64, 3584, 8192)]
)
def test_waves_that_are_nearly_full_or_alone_are_not_split(M, N, K):
    assert choose(M, N, K, torch.bfloat16, 132).split == 0


@pytest.mark.parametrize(
    ("M", "N", "K", "expected"),
    [
        (2048, 1792, 4096, (64, 128, 0, 0)),
        (4096, 1792, 4096, (64, 256, 0, 0)),
        (8192, 1792, 4096, (128, 256, 0, 0)),
        (2048, 3584, 8192, (128, 256, 2, 0)),  # 207 us; none early 227
        (4096, 3584, 8192, (128, 256, 0, 55)),  # 361 us; 52 split 375, none 382
        (8192, 3584, 8192, (128, 256, 0, 18)),
        (2048, 6656, 16384, (128, 256, 0, 23)),  # 656 us; one early 703
        (4096, 6656, 16384, (128, 256, 0, 46)),  # 1319 us; none split 1412
    ],
)
def test_rows_in_blocks_get_the_tile_that_was_fastest_on_h200s_as_four_ranks_have_them(M, N, K, expected):
    tile = choose(M, N, K, torch.bfloat16, 131, block=M // 4, apart=True)
    assert (tile.m, tile.n, tile.early, tile.split) == expected


@pytest.mark.parametrize(
    ("M", "N", "K", "expected"),
    [
        (2048, 3584, 8192, (128, 256, 4, 18)),  # 224 us; none early 239
        (4096, 3584, 8192, (128, 256, 2, 56)),  # 371 us; none early 384
        (8192, 1792, 4096, (64, 256, 0, 0)),  # 246 us; 128 x 256 248
        (2048, 6656, 16384, (128, 256, 0, 23)),
    ],
)
def test_rows_in_blocks_get_the_tile_that_was_fastest_on_h200s_as_eight_ranks_have_them(M, N, K, expected):
    tile = choose(M, N, K, torch.bfloat16, 131, block=M // 8, apart=True)
    assert (tile.m, tile.n, tile.early, tile.split) == expected


@pytest.mark.parametrize(
    ("M", "N", "K", "block"),
    [(8, 4096, 8192, 1), (64, 4096, 8192, 1), (2048, 3584, 4 * 64, 256)],  # the last: parts would be short
)
def test_nothing_is_split_for_next_to_no_gain_or_into_short_parts(M, N, K, block):
    tile = choose(M, N, K, torch.bfloat16, 131, block=block, apart=True)
    assert (tile.early, tile.split) == (0, 0)


@given(st.integers(1, 16), st.integers(1, 4096), EXTENTS, EXTENTS, st.booleans(), st.sampled_from(FLOATS))
@settings(deadline=None)
def test_every_choice_for_rows_in_blocks_is_one_that_the_kernel_can_walk(blocks, block, N, K, apart, dtype):
    tile = choose(blocks * block, N, K, dtype, 131, block=block, apart=apart)
    batches, rows = in_blocks(1, blocks * block, block, tile.m, apart)
    ahead = Ahead.of(tile, batches, rows, N, block, apart)
    assert ahead.blocks == tile.early < blocks
    tiles = batches * -(-rows // tile.m) * -(-N // tile.n)
    assert 0 <= tile.split <= tiles - ahead.tiles
    assert not (tile.early and dtype == torch.float32), "registers do not hold its sums"
    if tile.split:
        assert schedule(tiles + ahead.early, -(-K // tile.k), 131, tile.split, tile.parts).parts >= 2


@pytest.mark.parametrize(("blocks", "early"), [(1, 0), (4, 0), (4, 1), (4, 3), (4, 9)])
@pytest.mark.parametrize("apart", [True, False])
def test_early_blocks_and_own_rows_come_before_the_tiles_that_may_be_split(blocks, early, apart):
    tile = Config(128, 256, 64, stages=4, warps=8, early=early)
    ahead = Ahead.of(tile, blocks, 200, 1000, 200, apart)  # 2 x 4 tiles of a block
    assert ahead.early == 8 * min(early, blocks)
    assert ahead.tiles == 8 * max(min(early, blocks), apart)
    assert Ahead.of(tile, 1, 200 * blocks, 1000, 50, apart) == Ahead()  # tiles span blocks


def test_blocks_that_come_late_are_multiplied_with_smaller_tiles_than_rows_that_are_there():
    here = choose(4096, 1792, 4096, torch.bfloat16, 132)
    coming = choose(4096, 1792, 4096, torch.bfloat16, 132, block=1024)
    assert coming.m * coming.n < here.m * here.n


@pytest.mark.parametrize(("N", "K", "rows"), [(6656, 16384, 128), (3584, 8192, 128), (1792, 4096, 64)])
def test_tiles_span_small_blocks_where_each_would_read_a_right_side_that_the_l2_does_not_hold(
    N: int, K: int, rows: int
) -> None:
    assert choose(512, N, K, torch.bfloat16, 116, block=64).m == rows


def test_where_all_tiles_read_for_longer_than_they_compute_the_one_that_computes_least_is_taken() -> None:
    apart = choose(512, 6656, 16384, torch.bfloat16, 132, block=64, apart=True)
    assert apart.m == 64, "no tile spans two blocks, so that half of a taller one would be empty"
