from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.ir.source import HostIRError
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts, timeout_error
from hostir.kernels.matmul import matmul as matmul_module
from hostir.kernels.matmul.matmul import _launches, matmul
from hostir.kernels.matmul.operands import DTYPES
from hostir.kernels.matmul.tiles import Tile
from tests.kernels.checking import assert_only_view_written, embedded, filled, multiprocessors
from tests.kernels.checking import parts as parts_of_tiles
from tests.kernels.raising import fill_and_raise

TILES = (
    Tile(16, 16, 16, stages=1, warps=1, group=2),
    Tile(32, 32, 16, stages=1, warps=1, halves=True, group=1),
    Tile(64, 16, 32, stages=1, warps=1),
    Tile(32, 32, 16, stages=1, warps=1, halves=True, early_blocks=1),
    Tile(16, 32, 16, stages=1, warps=1, group=2, early_blocks=3),
)
SMALL = TILES[0]


def raised(blocks: int, *, dtype: torch.dtype = torch.int32, but: int | None = None, **fields: object) -> ReadyFlags:
    """Return flags that have reached the awaited epoch 5, except flag `but`, which stands at 4."""
    flags = torch.full((blocks,), 5, dtype=dtype)
    if but is not None:
        flags[but] = 4
    return ReadyFlags(flags, **{"epoch": 5, "timeouts": no_timeouts(blocks, "cpu"), "polls": 3, **fields})


def whole_numbers(*shape: int) -> torch.Tensor:
    """Return small integers, so that sums are exact in any order."""
    return filled(shape, torch.float32, integers=True)


@pytest.fixture
def all_apart(monkeypatch):
    """Read own rows in place, even if they are few."""
    monkeypatch.setattr("hostir.kernels.matmul.matmul.MIN_OWN_ROWS", 0)
    _launches.clear()
    yield
    _launches.clear()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_waiting_gives_the_bits_of_the_kernel_without_flags(data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    blocks, height = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    use_descriptors = draw(st.booleans())
    N = 8 * draw(st.integers(1, 4)) if use_descriptors else draw(st.integers(1, 32))
    steps = draw(st.booleans())  # enough along K for two parts
    K = 272 if steps else 8 * draw(st.integers(1, 4)) if use_descriptors else draw(st.integers(1, 32))
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    a = filled([blocks * height, K], dtype, pad=[0, 8])
    b = filled([K, N], dtype, order=draw(st.permutations(range(2)))) if not use_descriptors else filled([K, N], dtype)
    bias = filled([N], dtype) if draw(st.booleans()) else None
    tile = draw(st.sampled_from(TILES))
    options = {"bias": bias, "use_descriptors": use_descriptors, "tile": tile}
    first, there = draw(st.integers(0, blocks - 1)), draw(st.booleans())
    but = first if there else None  # the flag of own rows does not rise
    ready = raised(blocks, dtype=draw(st.sampled_from([torch.int32, torch.int64])), but=but, first=first)
    rows, own_rows = a, None
    if there:
        own_rows = filled([height, K], dtype, pad=[0, 8]).copy_(a.chunk(blocks)[first])
        rows = a.clone()
        rows.chunk(blocks)[first].fill_(math.nan)

    out, buffer = embedded([blocks * height, N], dtype, pad=[1, 8])
    few = draw(st.sampled_from([0, 20]))  # with 20, own rows are too few and are copied
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hostir.kernels.matmul.matmul.MIN_OWN_ROWS", few)
        _launches.clear()
        assert matmul(rows, b, out, ready=ready, own_rows=own_rows, **options) is out
    _launches.clear()
    assert not there or rows.chunk(blocks)[first].isnan().all() == (height >= few)
    assert_only_view_written(out, buffer)
    # The last bit of a product in the interpreter depends on the position of the row in the tile.
    parts = blocks if height >= tile.m or (there and height >= few) else 1
    for block, (ours, part) in enumerate(zip(out.chunk(parts), a.chunk(parts), strict=True)):
        early = parts == blocks and (block - first) % blocks < tile.early_blocks
        options["tile"] = dataclasses.replace(tile, early_blocks=0, split=1 << 30 if early else 0, parts=2)
        with multiprocessors(100):
            assert torch.equal(ours, matmul(part, b, torch.full_like(ours, math.nan), **options))
            # With one or two steps, the sum is the same in one part or in two.
            assert parts_of_tiles() == (2 if early and steps else 0)
    assert timeout_error(ready.timeouts, 0, "%f") is None
    assert ready.flags.tolist() == [4 if block == but else 5 for block in range(blocks)]


@pytest.mark.parametrize("column_major", [True, False])
def test_b_of_either_order_is_loaded_through_descriptors(column_major):
    a = filled([3 * 20, 24], torch.bfloat16)
    b = filled([24, 40], torch.bfloat16, order=[1, 0] if column_major else [0, 1])
    out, _ = embedded([60, 40], torch.bfloat16)
    matmul(a, b, out, ready=raised(3, first=1), use_descriptors=True)
    assert torch.equal(out, matmul(a, b, torch.empty_like(out), use_descriptors=True))


@pytest.mark.parametrize("use_descriptors", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 3, 6, 12])  # several batches each, one each, parts of batches
def test_a_batch_is_used_in_place(blocks, use_descriptors):
    a, b = filled([6, 20, 24], torch.bfloat16, pad=[0, 2, 0]), filled([24, 40], torch.bfloat16)
    out, buffer = embedded([6, 20, 40], torch.bfloat16, pad=[0, 1, 0])
    ready = raised(blocks, first=blocks // 2)
    matmul(a, b, out, ready=ready, use_descriptors=use_descriptors, tile=SMALL)
    assert_only_view_written(out, buffer)
    assert torch.equal(out, matmul(a, b, torch.empty_like(out), use_descriptors=use_descriptors, tile=SMALL))


@pytest.mark.parametrize("use_descriptors", [True, False])
@pytest.mark.parametrize(("blocks", "order"), [(1, (1, 0, 2)), (2, (0, 1, 2)), (3, (1, 0, 2)), (6, (0, 1, 2))])
def test_own_rows_may_be_several_batches(blocks, order, use_descriptors, all_apart):
    a, b = filled([6, 20, 24], torch.bfloat16, pad=[0, 2, 0]), filled([24, 40], torch.bfloat16)
    out, buffer = embedded([6, 20, 40], torch.bfloat16, pad=[0, 1, 0])
    wanted = matmul(a, b, torch.empty_like(out), use_descriptors=use_descriptors, tile=SMALL)
    first = blocks // 2
    own_rows = filled([6 // blocks, 20, 24], torch.bfloat16, order=order).copy_(a.chunk(blocks)[first])
    a.chunk(blocks)[first].fill_(math.nan)
    ready = raised(blocks, but=first, first=first)
    matmul(a, b, out, ready=ready, own_rows=own_rows, use_descriptors=use_descriptors, tile=SMALL)
    assert_only_view_written(out, buffer)
    assert torch.equal(out, wanted)
    assert not ready.timeouts.any()


def early_tiles() -> Iterator[tuple[int, bool, bool, int, int]]:
    """Yield a quarter of all combinations of arguments.

    Each number of SMs is combined with each number of early blocks. Over these combinations, `own_rows` and descriptors
    take all four combinations of values.
    """
    for (i, sms), (j, early) in itertools.product(enumerate([1, 3, 5, 100]), enumerate([0, 1, 2, 5])):
        own_rows, descriptors = divmod((i + j) % 4, 2)
        for batches in (1, 2):  # of a block
            yield batches, descriptors == 1, own_rows == 1, sms, early


@pytest.mark.parametrize(("batches", "use_descriptors", "own_rows", "sms", "early"), [*early_tiles()])
def test_the_tiles_of_early_blocks_are_split_in_two(batches, use_descriptors, own_rows, sms, early, all_apart):
    blocks, height, N = 4, 40, 40
    rows, b, bias = whole_numbers(blocks * batches, height, 24), whole_numbers(24, N), whole_numbers(N)
    a, mine = rows.clone(), slice(2 * batches, 3 * batches)
    if own_rows:
        a[mine] = math.nan
    config = Tile(32, 32, 16, stages=1, warps=1, group=2, early_blocks=early)
    ready = raised(blocks, but=2 if own_rows else None, first=2)
    if batches == 1:
        a = a.view(-1, 24)
    out, buffer = embedded([*a.shape[:-1], N], torch.float32, pad=[0] * (a.ndim - 2) + [1, 4])
    own = rows[mine].view(-1, *a.shape[1:]) if own_rows else None
    with multiprocessors(sms):
        matmul(a, b, out, bias=bias, ready=ready, own_rows=own, use_descriptors=use_descriptors, tile=config)
        (call,) = matmul_module._launches.values()
    assert (early > 0) == call.constants.EARLY
    assert call.sizes[0] == min(early, blocks)
    assert_only_view_written(out, buffer)
    assert torch.equal(out.view(rows.shape[0], height, N), rows @ b + bias)
    assert not ready.timeouts.any()


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, early_blocks=2)])
@pytest.mark.parametrize("missing", [1, 2])
def test_own_rows_are_computed_even_if_other_blocks_do_not_arrive(missing, config, all_apart):
    a, own_rows, b = whole_numbers(60, 24), whole_numbers(20, 24), whole_numbers(24, 48)
    out, ready = torch.full((60, 48), math.nan), raised(3, but=missing, first=0)
    matmul(a, b, out, ready=ready, own_rows=own_rows, tile=config)
    assert torch.equal(out[:20], own_rows @ b)
    absent = out.chunk(3)[missing]  # an early tile is multiplied without its rows
    assert torch.equal(absent, a.chunk(3)[missing] @ b) if missing < config.early_blocks else absent.isnan().all()
    assert ready.timeouts.tolist() == [[5, 4] if block == missing else [0, 0] for block in range(3)]


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: torch.cat([x[:, :1], x], 1)[:, 1:],  # does not begin at a multiple of 16 bytes
        lambda x: torch.cat([x, x[:, :4]], 1)[:, :-4],  # rows that begin there
        lambda x: x.t().contiguous().t(),
    ],
)
def test_own_rows_that_no_descriptor_fits_are_copied_and_other_operands_keep_descriptors(odd, all_apart):
    a, b = whole_numbers(3 * 20, 24).bfloat16(), whole_numbers(24, 40).bfloat16()
    out, own_rows = torch.empty(60, 40, dtype=torch.bfloat16), odd(a[20:40].clone())
    wanted = matmul(a, b, torch.empty_like(out), tile=SMALL)
    a[20:40] = math.nan
    matmul(a, b, out, ready=raised(3, but=1, first=1), own_rows=own_rows, tile=SMALL)
    assert torch.equal(out, wanted)
    assert torch.equal(a[20:40], own_rows)
    assert [call.copies_own for call in _launches.values()] == [False, True]


@pytest.mark.parametrize(
    ("error", "message", "own_rows", "ready"),
    [
        (TypeError, "float32, the dtype of a, got torch.bfloat16", torch.zeros(4, 8).bfloat16(), True),
        (ValueError, r"own rows \[4, 8\], got shape \[3, 8\]", torch.zeros(3, 8), True),
        (ValueError, r"own rows \[4, 8\], got shape \[4, 7\]", torch.zeros(4, 7), True),
        (ValueError, r"expected flags of blocks \(ready\) as well", torch.zeros(4, 8), False),
        (ValueError, "one device", torch.zeros(4, 8, device="meta"), True),
    ],
)
def test_own_rows_that_do_not_fit_are_reported(error, message, own_rows, ready):
    with pytest.raises(error, match=message):
        matmul(
            torch.zeros(12, 8),
            torch.zeros(8, 8),
            torch.zeros(12, 8),
            ready=raised(3) if ready else None,
            own_rows=own_rows,
        )


def test_own_rows_of_incomplete_batches_are_reported(all_apart):
    a = filled([6, 20, 24], torch.float32, pad=[0, 2, 0])
    with pytest.raises(ValueError, match="complete batches of 20 rows, got 10 rows"):
        matmul(a, torch.zeros(24, 8), torch.zeros(6, 20, 8), ready=raised(12), own_rows=torch.zeros(10, 24))


@pytest.mark.parametrize("use_descriptors", [True, False])
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("missing", range(4))
def test_blocks_are_computed_in_the_order_of_arrival_until_one_is_missing(first, missing, use_descriptors):
    height = 20  # two tiles of rows, and three of columns: each program has tiles of every block
    a, b = whole_numbers(4 * height, 24), whole_numbers(24, 48)
    ready = raised(4, but=missing, first=first)
    out = torch.full((4 * height, 48), math.nan)
    matmul(a, b, out, ready=ready, tile=SMALL, use_descriptors=use_descriptors)
    arrived = [(first + i) % 4 for i in range((missing - first) % 4)]
    for block, (ours, wanted) in enumerate(zip(out.chunk(4), (a @ b).chunk(4), strict=True)):
        assert torch.equal(ours, wanted) if block in arrived else ours.isnan().all()
    assert ready.timeouts.tolist() == [[5, 4] if block == missing else [0, 0] for block in range(4)]


@pytest.mark.parametrize("first", [0, 3, 6])
@pytest.mark.parametrize("missing", [0, 2, 7])
def test_a_tile_waits_for_all_the_blocks_that_it_spans(missing, first):
    a, b = whole_numbers(8 * 6, 24), whole_numbers(24, 48)
    out = torch.full((48, 48), math.nan)
    ready = raised(8, but=missing, first=first)
    matmul(a, b, out, ready=ready, tile=dataclasses.replace(SMALL, group=1))  # 16 rows, and one for each program
    spanning = {row // 16 for row in range(missing * 6, missing * 6 + 6)}
    order = [(first * 6 // 16 + i) % 3 for i in range(3)]
    begun = order[: min(map(order.index, spanning))]
    for tile, (ours, wanted) in enumerate(zip(out.split(16), (a @ b).split(16), strict=True)):
        assert torch.equal(ours, wanted) if tile in begun else ours.isnan().all()
    assert ready.timeouts.tolist() == [[5, 4] if block == missing else [0, 0] for block in range(8)]


def test_a_kernel_that_gave_up_reports_the_flag_and_its_value():
    ready = raised(3, but=1)
    matmul(filled([12, 8], torch.float32), filled([8, 8], torch.float32), torch.empty(12, 8), ready=ready)
    problem = timeout_error(ready.timeouts, 2, "%arrived")
    assert isinstance(problem, HostIRError)
    assert problem.diagnostics[0].message == "rank 2: flag %arrived[1] did not reach epoch 5 (stands at 4)"


def test_epochs_beyond_32_bits_are_compared():
    ready = raised(2, dtype=torch.int64, epoch=(1 << 40) + 1)
    ready.flags[:] = torch.tensor([1 << 41, 1 << 40])
    matmul(filled([8, 8], torch.float32), filled([8, 8], torch.float32), torch.empty(8, 8), ready=ready)
    assert ready.timeouts[1].tolist() == [(1 << 40) + 1, 1 << 40]


def test_an_empty_contraction_waits_and_leaves_the_bias():
    bias = filled([8], torch.float32)
    a, b, out = torch.empty(12, 0), torch.empty(0, 8), torch.full((12, 8), math.nan)
    matmul(a, b, out, bias=bias, ready=raised(3))
    assert torch.equal(out, bias.expand(12, 8))
    ready = raised(3, but=0)
    matmul(a, b, out.fill_(math.nan), bias=bias, ready=ready)
    assert out[:4].isnan().all()
    assert ready.timeouts[0].tolist() == [5, 4]


def test_another_process_raises_the_flags_while_the_kernel_waits():
    context = torch.multiprocessing.get_context("spawn")
    blocks, height = 4, 20
    rows, raised_flags, rounds = (
        context.RawArray("f", blocks * height * 24),
        context.RawArray("i", blocks),
        context.Queue(),
    )
    a = torch.frombuffer(rows, dtype=torch.float32).view(-1, 24)
    flags = torch.frombuffer(raised_flags, dtype=torch.int32)
    b, ready = whole_numbers(24, 48), ReadyFlags(flags, 0, no_timeouts(blocks, "cpu"))
    other = context.Process(target=fill_and_raise, args=(rows, raised_flags, rounds), daemon=True)
    other.start()
    orders = [[0, 1, 2, 3], [2, 3, 0, 1], [3, 2, 1, 0]]
    for epoch, order in enumerate(orders, start=1):
        source = whole_numbers(blocks * height, 24)
        a.fill_(math.nan)  # rows that are read too early give NaN
        rounds.put((source.numpy(), epoch, order))
        for use_descriptors in (True, False):  # in the second launch all rows are ready
            out = torch.full((blocks * height, 48), math.nan)
            now = dataclasses.replace(ready, epoch=epoch, first=order[0])
            matmul(a, b, out, ready=now, tile=SMALL, use_descriptors=use_descriptors)
            assert torch.equal(out, source @ b)
    rounds.put(None)
    other.join(30)
    assert other.exitcode == 0
    assert timeout_error(ready.timeouts, 0, "%f") is None


@pytest.mark.parametrize(
    ("error", "message", "fields"),
    [
        (TypeError, "flags of int32 or int64", {"flags": torch.zeros(3)}),
        (TypeError, "timeouts of int64", {"timeouts": torch.zeros(3, 2)}),
        (ValueError, "a row of flags, got shape", {"flags": torch.zeros(3, 1, dtype=torch.int32)}),
        (ValueError, "a row of flags, got shape", {"flags": torch.zeros(6, dtype=torch.int32)[::2]}),
        (ValueError, "a row of flags, got shape", {"flags": torch.zeros(0, dtype=torch.int32)}),
        (ValueError, r"timeouts of shape \[3, 2\]", {"timeouts": no_timeouts(2, "cpu")}),
        (ValueError, "no block 3 to begin with: expected 0 to 2", {"first": 3}),
        (ValueError, "at least one poll", {"polls": 0}),
        (
            ValueError,
            "12 rows do not make 5 equal blocks",
            {"flags": raised(5).flags, "timeouts": no_timeouts(5, "cpu")},
        ),
        (ValueError, "one device", {"flags": torch.zeros(3, dtype=torch.int32, device="meta")}),
    ],
)
def test_flags_that_do_not_fit_are_reported(error, message, fields):
    ready = dataclasses.replace(raised(3), **fields)
    with pytest.raises(error, match=message):
        matmul(torch.zeros(12, 8), torch.zeros(8, 8), torch.zeros(12, 8), ready=ready)
