from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.kernels.matmul.estimate import TRITON, choose, duration, rounded_up
from hostir.kernels.matmul.schedule import Grid
from hostir.kernels.matmul.tiles import Gemm, Tile, candidates

EXTENTS = st.integers(1, 1 << 17)
FLOATS = ("bf16", "f16", "f32")


def chosen_for(M: int, N: int, K: int, sms: int = 132, **how: object) -> Tile:
    return choose(Gemm(M, N, K, "bf16", **how), sms, candidates("bf16"))


@pytest.mark.parametrize(
    ("M", "N", "K", "tile"),
    [
        (8192, 3584, 8192, (128, 256)),
        (4096, 6656, 16384, (128, 256)),
        (512, 3584, 8192, (128, 128)),  # 112 of 132 multiprocessors, not 56
        (16, 8192, 4096, (64, 64)),
    ],
)
def test_tiles_are_small_enough_to_keep_all_sms_busy(M, N, K, tile):
    chosen = chosen_for(M, N, K)
    assert (chosen.m, chosen.n) == tile


@given(
    *(EXTENTS, EXTENTS, EXTENTS, st.integers(1, 200), st.integers(1, 64)),
    st.sampled_from([*FLOATS, "tf32"]),
    st.booleans(),
    st.sampled_from([99 << 10, 163 << 10, 227 << 10]),
)
def test_every_choice_fits_into_shared_memory(M, N, K, sms, batches, dtype, descriptors, shared_memory):
    gemm = Gemm(M, N, K, dtype, batches)
    tile = choose(gemm, sms, candidates(dtype, descriptors=descriptors, shared_memory=shared_memory))
    assert tile.shared_memory(gemm.itemsize, descriptors=descriptors) <= shared_memory


@given(st.integers(1, 4096), st.sampled_from([None, 1, 2, 7, 8]), st.booleans(), st.sampled_from([1, 3]))
def test_gemms_that_are_rounded_to_one_gemm_have_its_numbers_of_tiles(height, blocks, separate, batches):
    tiles = candidates("bf16")
    block, rows = (None, height) if blocks is None else (height, blocks * height)
    gemm = Gemm(rows, 512, 256, "bf16", batches, block, blocks is not None and separate)
    stands = rounded_up(gemm, tiles)
    assert rounded_up(stands, tiles) == stands
    for tile in (dataclasses.replace(t, early_blocks=early) for t in tiles for early in (0, 1)):
        of_gemm, of_other = Grid.of(tile, gemm), Grid.of(tile, stands)
        assert dataclasses.replace(of_gemm, rows=of_other.rows) == of_other


def test_tiles_are_chosen_only_a_few_times_for_many_numbers_of_rows():
    tiles = candidates("bf16")
    gemms = [Gemm(8 * n, 3584, 8192, "bf16", block=n, separate=True) for n in range(1, 1025)]
    assert len({rounded_up(gemm, tiles) for gemm in gemms}) == 1024 // 64
    for blocks in (2, 4, 8):  # which tiles may span
        few = {rounded_up(Gemm(blocks * n, 3584, 8192, "bf16", block=n), tiles) for n in range(1, 257)}
        assert len(few) <= 256 * blocks // 64 + 3
    for gemm in (gemms[130], gemms[300]):
        each = 2.5 + gemm.block * gemm.k * 2 / 390e3  # the arrivals that the choice assumes; for others it may be worse
        arrivals = [0.0, *(15.0 + each * i for i in range(1, 8))]
        chosen, best = (
            duration(choose(g, 132, tiles), gemm, 132, TRITON, arrivals)[0] for g in (rounded_up(gemm, tiles), gemm)
        )
        assert chosen <= 1.03 * best


def test_too_little_shared_memory_is_reported():
    with pytest.raises(ValueError, match=r"no bf16 matmul tile fits into 1024 bytes"):
        candidates("bf16", shared_memory=1024)


@given(st.integers(1, 64), EXTENTS, st.sampled_from([16, 64, 128]))
def test_tiles_cover_all_rows_and_do_not_span_blocks(blocks, height, m):
    grid = Grid.of(Tile(m, 64), Gemm(blocks * height, 64, 64, "bf16", block=height))
    assert grid.batches * grid.rows == blocks * height
    assert grid.rows == height or height < m


def test_batches_and_rows_without_blocks_are_not_regrouped():
    for gemm in (Gemm(256, 64, 64, "bf16", batches=4, block=128), Gemm(256, 64, 64, "bf16")):
        grid = Grid.of(Tile(64, 64), gemm)
        assert (grid.batches, grid.rows) == (gemm.batches, gemm.m)


@pytest.mark.parametrize(
    ("M", "N", "K", "tiles"), [(2048, 6656, 16384, 20), (4096, 6656, 16384, 40), (4096, 3584, 8192, 52)]
)
def test_the_tiles_of_a_small_last_wave_are_split(M, N, K, tiles):
    assert chosen_for(M, N, K).split == tiles


@pytest.mark.parametrize(
    ("M", "N", "K"), [(4096, 1792, 4096), (8192, 3584, 8192), (512, 6656, 16384), (64, 3584, 8192)]
)
def test_nearly_full_and_single_waves_are_not_split(M, N, K):
    assert chosen_for(M, N, K).split == 0


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
    tile = chosen_for(M, N, K, 131, block=M // 4, separate=True)
    assert (tile.m, tile.n, tile.early_blocks, tile.split) == expected


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
    tile = chosen_for(M, N, K, 131, block=M // 8, separate=True)
    assert (tile.m, tile.n, tile.early_blocks, tile.split) == expected


@pytest.mark.parametrize(
    ("M", "N", "K", "block"),
    [(8, 4096, 8192, 1), (64, 4096, 8192, 1), (2048, 3584, 4 * 64, 256)],  # the last: parts would be short
)
def test_tiles_are_not_split_for_a_tiny_gain_or_into_short_parts(M, N, K, block):
    tile = chosen_for(M, N, K, 131, block=block, separate=True)
    assert (tile.early_blocks, tile.split) == (0, 0)


@given(st.integers(1, 16), st.integers(1, 4096), EXTENTS, EXTENTS, st.booleans(), st.sampled_from(FLOATS))
@settings(deadline=None)
def test_the_kernel_can_run_every_choice_for_rows_in_blocks(blocks, block, N, K, separate, dtype):
    gemm = Gemm(blocks * block, N, K, dtype, block=block, separate=separate)
    tile = choose(gemm, 131, candidates(dtype))
    grid = Grid.of(tile, gemm)
    assert grid.early_blocks == tile.early_blocks < blocks
    assert 0 <= tile.split <= grid.tiles - grid.first
    assert not (tile.early_blocks and dtype == "f32"), "registers cannot hold the sums of this tile"
    if tile.split:
        assert grid.schedule(tile, 131).parts >= 2


@pytest.mark.parametrize(("blocks", "early"), [(1, 0), (4, 0), (4, 1), (4, 3), (4, 9)])
@pytest.mark.parametrize("separate", [True, False])
def test_early_blocks_and_own_rows_come_before_the_tiles_that_may_be_split(blocks, early, separate):
    tile = Tile(128, 256, 64, stages=4, warps=8, early_blocks=early)
    grid = Grid.of(tile, Gemm(200 * blocks, 1000, 64, "bf16", block=200, separate=separate))  # 2 x 4 tiles of a block
    assert grid.early == 8 * min(early, blocks)
    assert grid.first == 8 * max(min(early, blocks), separate)
    spanning = Grid.of(tile, Gemm(200 * blocks, 1000, 64, "bf16", block=50))
    assert (spanning.early_blocks, spanning.early, spanning.first) == (0, 0, 0)


def test_late_blocks_get_smaller_tiles_than_rows_that_are_ready():
    here = chosen_for(4096, 1792, 4096)
    coming = chosen_for(4096, 1792, 4096, block=1024)
    assert coming.m * coming.n < here.m * here.n


@pytest.mark.parametrize(("N", "K", "rows"), [(6656, 16384, 128), (3584, 8192, 128), (1792, 4096, 64)])
def test_tiles_span_small_blocks_if_the_right_operand_does_not_fit_into_l2(N: int, K: int, rows: int) -> None:
    assert chosen_for(512, N, K, 116, block=64).m == rows


def test_if_memory_limits_all_tiles_the_tile_with_least_arithmetic_is_chosen() -> None:
    apart = chosen_for(512, 6656, 16384, block=64, separate=True)
    assert apart.m == 64, "no tile spans two blocks, so half of a taller tile would be empty"


def one_by_one(tile: Tile, gemm: Gemm, sms: int, arrivals: list[float]) -> float:
    """Return the end of the last program by a loop over all units of work, as a reference for `duration`."""
    grid, tile_time = Grid.of(tile, gemm), TRITON.unsplit_time(tile, gemm)
    plan = grid.schedule(tile, sms)
    split = grid.tiles + grid.early - plan.unsplit
    early = [(unit // 2, TRITON.part(tile, 2, tile_time)) for unit in range(2 * grid.early)]
    alone = [(unit, tile_time) for unit in range(grid.early, grid.tiles - split)]
    parts = [
        (unit, TRITON.part(tile, plan.parts, tile_time)) for unit in range(grid.tiles - split, grid.tiles)
    ] * plan.parts
    free = [0.0] * plan.programs
    for number, (unit, takes) in enumerate([*early, *alone, *parts]):
        program, last_block = number % plan.programs, ((unit + 1) * grid.blocks - 1) // grid.tiles
        free[program] = max(free[program], arrivals[last_block]) + takes
    return max(free)


@given(
    *(st.integers(1, 8), st.integers(1, 600), st.integers(1, 3000), st.integers(1, 140), st.data()),
    *(st.sampled_from(candidates("bf16")), st.integers(0, 3), st.integers(0, 60), st.sampled_from([2, 4, 8])),
)
@settings(deadline=None)
def test_the_estimate_equals_a_simulation_of_programs_that_take_tiles_in_turn(
    blocks, block, N, sms, data, tile, early, split, parts
):
    tile = dataclasses.replace(tile, early_blocks=early, split=split, parts=parts)
    gemm = Gemm(blocks * block, N, 2048, "bf16", block=block)
    arrivals = data.draw(st.lists(st.floats(0, 500), min_size=blocks, max_size=blocks))
    assert duration(tile, gemm, sms, arrivals=arrivals)[1] == pytest.approx(one_by_one(tile, gemm, sms, arrivals))
