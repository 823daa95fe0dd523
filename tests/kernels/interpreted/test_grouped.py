"""Products of rows in groups in Triton equal ATen's."""

from __future__ import annotations

import itertools
import math
import multiprocessing

import pytest
import torch

from hostir.kernels import aten, grouped
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts, timeout_error
from hostir.kernels.matmul.operands import DTYPES, DTYPES_8_BIT
from hostir.kernels.matmul.tiles import collecting_pays
from hostir.kernels.table import kernel_table
from tests.kernels.raising import fill_and_raise

OFFSETS = {
    "groups of any size": [[0, 3, 3, 40, 50]],
    "rows of no group": [[5, 20, 20, 33, 41]],
    "all rows in one group": [[0, 0, 50, 50, 50]],
    "no rows in any group": [[7, 7, 7, 7, 7]],
    "three sources": [[0, 10, 20, 30, 50], [2, 2, 2, 50, 50], [0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("collects", [False, True])
def test_groups_equal_atens(offsets, dtype, integers, collects, monkeypatch):
    monkeypatch.setattr(grouped, "collecting_pays", lambda *_: collects)
    monkeypatch.setattr(grouped, "_prepared", {})
    begins = torch.tensor(offsets, dtype=integers)
    x = torch.randn(len(offsets), 50, 37).to(dtype)
    for source, row in enumerate(offsets):  # rows of no group hold anything
        x[source, : row[0]] = math.nan
        x[source, row[-1] :] = math.nan
    w = torch.randn(4, 37, 41).to(dtype)
    for matrices in (w, w.mT.contiguous().mT, torch.stack([w, w], 1)[:, 0]):
        wanted, ours = torch.empty(len(offsets), 50, 41, dtype=dtype), torch.full((50, len(offsets), 41), math.nan)
        ours = ours.to(dtype).transpose(0, 1)
        aten.grouped_matmul(wanted, x, matrices, begins)
        with monkeypatch.context() as patch:
            patch.setattr(grouped.aten, "grouped_matmul", None)  # the Triton kernel must compute it
            grouped.grouped_matmul(ours, x, matrices, begins)
        torch.testing.assert_close(ours, wanted, rtol=max(2e-5, 2 * torch.finfo(dtype).eps), atol=2e-5)


def whole(*shape):
    """Return whole numbers, whose sums are exact in any order: numpy adds differently in each row of a tile."""
    return torch.randint(-4, 5, shape).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_rows_by_an_index_equal_permuted_rows(dtype, integers):
    begins = torch.tensor([[0, 10, 20, 30, 50], [2, 2, 2, 50, 50], [0, 0, 0, 0, 0]])
    x, w, index = whole(3, 20, 37).to(dtype), whole(4, 37, 41).to(dtype), torch.randint(0, 20, (50, 3)).mT
    wanted, ours = torch.empty(3, 50, 41, dtype=dtype), torch.full((3, 50, 41), math.nan, dtype=dtype)
    grouped.grouped_matmul(wanted, x.gather(1, index[..., None].expand(-1, -1, 37)), w, begins)
    grouped.grouped_matmul(ours, x, w, begins, index.to(integers))
    assert torch.equal(ours, wanted)


def fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", DTYPES_8_BIT)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
@pytest.mark.parametrize("indexed", [False, True])
def test_groups_of_fp8_rows_equal_scaled_products(offsets, left, dtype, indexed):
    sources, tokens, begins = len(offsets), 20 if indexed else 50, torch.tensor(offsets)
    x, w = fp8(sources, tokens, 37, dtype=left), fp8(4, 41, 37).mT
    scale_x, scale_w = torch.rand(sources, tokens, 1) + 0.1, torch.rand(4, 41, 1).mT
    index = torch.randint(0, tokens, (sources, 50)) if indexed else None
    for source, row in enumerate(offsets):  # the scales of rows of no group are anything
        outside = torch.ones(50, dtype=torch.bool)
        outside[row[0] : row[-1]] = False
        unused = outside if index is None else ~torch.isin(torch.arange(tokens), index[source][~outside])
        scale_x[source, unused] = math.nan
    exact = torch.zeros(sources, 50, 41, dtype=torch.float64)
    for source, row in enumerate(offsets):
        order = slice(None) if index is None else index[source]
        wide = (x.double() * scale_x.double())[source][order]
        for group, (begin, end) in enumerate(itertools.pairwise(row)):
            exact[source, begin:end] = wide[begin:end] @ (w[group].double() * scale_w[group].double())
    for multiply in (aten.grouped_matmul, grouped.grouped_matmul):
        out = torch.full((sources, 50, 41), math.nan, dtype=dtype)
        multiply(out, x, w, begins, index, scale_x, scale_w)
        torch.testing.assert_close(out.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("most", [4096, 6])
@pytest.mark.parametrize("tokens", [10, 4])
def test_blocks_of_fp8_sources_are_computed_as_without_flags(tokens, most, monkeypatch):
    monkeypatch.setattr(grouped, "MAX_INTERVALS", most)
    x, w, offsets = fp8(2, 3, tokens, 8), fp8(2, 8, 5), torch.randint(0, 11, (2, 3, 3)).sort(-1).values
    scales = torch.rand(3, 2, tokens, 1).transpose(0, 1), torch.rand(2, 1, 5)
    index = None if tokens == 10 else torch.randint(0, tokens, (2, 3, 10))
    wanted, ours = torch.empty(2, 3, 10, 5), torch.full((2, 3, 10, 5), math.nan)
    aten.grouped_matmul(wanted, x, w, offsets, index, *scales)
    own_rows, there = x[0, 2:], x.clone()
    there[0, 2] = fp8(tokens, 8)
    ready, table = raised(6, 2, first=2), kernel_table("triton", "cpu")
    by_blocks = table["grouped_matmul_by_blocks"]
    by_blocks(ours, there, w, offsets, index, *scales, ready=ready, own_rows=own_rows)
    torch.testing.assert_close(ours, wanted)


def test_rows_are_collected_if_sources_have_few_rows_of_each_group():
    assert not collecting_pays(1, 8, 4096, 1792, 128)
    assert not collecting_pays(2, 8, 4096, 4096, 128)
    assert collecting_pays(8, 8, 4096, 4096, 128)
    assert collecting_pays(2, 128, 16384, 2048, 128)
    assert not collecting_pays(2, 16, 4096, 256, 128)  # copies of long rows, and few products


@pytest.mark.parametrize("rows", [4, 0])
def test_an_index_that_does_not_fit_reads_nothing_outside(rows):
    memory, w = torch.full((rows + 8, 8), math.nan), torch.randn(1, 8, 5)
    memory[4 : rows + 4] = torch.randn(rows, 8)
    out, index = torch.full((3, 5), math.nan), torch.tensor([-7, 1, 99])
    grouped.grouped_matmul(out, memory[4 : rows + 4], w, torch.tensor([0, 3]), index)
    limited = memory[4 : rows + 4][index.clamp(0, rows - 1)] if rows else torch.zeros(3, 8)
    torch.testing.assert_close(out, limited @ w[0])


@pytest.mark.parametrize("offsets", [[0, 30, 10, 50], [-1, -1, -1, -1], [0, 60, 70, 80], [9, 3, 99, -5]])
def test_offsets_that_do_not_fit_access_nothing_outside_and_every_row_is_written(offsets):
    x, w = torch.randn(50, 8), torch.randn(3, 8, 5)
    memory = torch.full((70, 5), math.nan)
    grouped.grouped_matmul(memory[10:60], x, w, torch.tensor(offsets))
    assert not memory[10:60].isnan().any()
    assert memory[:10].isnan().all()
    assert memory[60:].isnan().all()


def test_sources_that_do_not_merge_are_computed_one_by_one(monkeypatch):
    x, w = torch.randn(2, 3, 6, 8).transpose(0, 1), torch.randn(2, 8, 5)
    offsets = torch.randint(0, 7, (3, 2, 3)).sort(-1).values
    wanted, ours = torch.empty(3, 2, 6, 5), torch.empty(3, 2, 6, 5)
    aten.grouped_matmul(wanted, x, w, offsets)
    for most in (grouped.MAX_INTERVALS, 4):
        monkeypatch.setattr(grouped, "MAX_INTERVALS", most)
        grouped.grouped_matmul(ours.fill_(math.nan), x, w, offsets)
        torch.testing.assert_close(ours, wanted)


def test_aten_computes_f64_and_empty_results_are_left_alone():
    x, w, offsets = torch.randn(6, 8).double(), torch.randn(2, 8, 5).double(), torch.tensor([0, 2, 6])
    out = torch.empty(6, 5, dtype=torch.float64)
    grouped.grouped_matmul(out, x, w, offsets)
    torch.testing.assert_close(out, torch.cat([x[:2] @ w[0], x[2:] @ w[1]]))
    grouped.grouped_matmul(
        torch.empty(0, 5), torch.empty(0, 8), torch.randn(2, 8, 5), torch.zeros(3, dtype=torch.int64)
    )


def raised(blocks: int, but: int | None = None, **fields: object) -> ReadyFlags:
    """Return flags that have reached the awaited epoch 5, except flag `but`, which stands at 4."""
    flags = torch.full((blocks,), 5)
    if but is not None:
        flags[but] = 4
    return ReadyFlags(flags, **{"epoch": 5, "timeouts": no_timeouts(blocks, "cpu"), "polls": 3, **fields})


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tokens", [20, 7])
@pytest.mark.parametrize(("blocks", "first"), [(1, 0), (2, 1), (4, 0), (4, 3)])
def test_sources_that_have_arrived_are_computed_as_without_flags(blocks, first, tokens, own):
    x, w = whole(4, tokens, 8), whole(3, 8, 5)
    index = None if tokens == 20 else torch.randint(0, tokens, (4, 20))
    offsets = torch.tensor([[0, 5, 9, 20], [2, 2, 2, 2], [0, 0, 20, 20], [1, 6, 11, 17]])
    wanted, ours = torch.empty(4, 20, 5), torch.full((4, 20, 5), math.nan)
    grouped.grouped_matmul(wanted, x, w, offsets, index)
    there, own_rows = x, None
    if own:  # its flag does not rise, and its rows are elsewhere
        own_rows, there = x.chunk(blocks)[first].clone(), x.clone()
        there.chunk(blocks)[first].fill_(math.nan)
    ready = raised(blocks, first if own else None, first=first)
    grouped.grouped_matmul(ours, there, w, offsets, index, ready=ready, own_rows=own_rows)
    assert torch.equal(ours, wanted)
    assert not ready.timeouts.any()


def test_a_source_that_does_not_arrive_is_a_timeout_of_its_flag():
    x, w, offsets = torch.randn(4, 20, 8), torch.randn(3, 8, 5), torch.tensor([[0, 5, 9, 20]] * 4)
    ready = raised(4, 2)
    grouped.grouped_matmul(torch.empty(4, 20, 5), x, w, offsets, ready=ready)
    problem = timeout_error(ready.timeouts, 1, "%there")
    assert "flag %there[2] did not reach epoch 5 (stands at 4)" in str(problem)
    assert "%there[3]" not in str(problem)


def test_the_kernel_waits_until_another_process_has_filled_a_source():
    w, offsets = whole(2, 8, 5), torch.tensor([[0, 5, 20], [3, 3, 9], [0, 20, 20]])
    context = multiprocessing.get_context("spawn")
    rows, numbers, rounds = context.RawArray("f", 3 * 20 * 8), context.RawArray("i", 3), context.Queue()
    x, flags = torch.frombuffer(rows, dtype=torch.float32).view(3, 20, 8), torch.frombuffer(numbers, dtype=torch.int32)
    other = context.Process(target=fill_and_raise, args=(rows, numbers, rounds), daemon=True)
    other.start()
    for epoch, order in enumerate(([0, 1, 2], [2, 0, 1], [1, 2, 0]), start=1):
        source, ready = whole(3, 20, 8), ReadyFlags(flags, epoch, no_timeouts(3, "cpu"), first=order[0])
        wanted, ours = torch.empty(3, 20, 5), torch.full((3, 20, 5), math.nan)
        grouped.grouped_matmul(wanted, source, w, offsets)
        x.fill_(math.nan)  # rows that are read too early give NaN
        rounds.put((source.numpy(), epoch, order))
        grouped.grouped_matmul(ours, x, w, offsets, ready=ready)
        assert torch.equal(ours, wanted)
        assert not ready.timeouts.any()
    rounds.put(None)
    other.join(30)
    assert other.exitcode == 0


@pytest.mark.parametrize(("sources", "flags"), [(3, 2), (0, 1)])
def test_flags_that_do_not_split_the_sources_are_refused(sources, flags):
    x, offsets = torch.randn(sources, 6, 8), torch.zeros(sources, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{flags} flags for {sources} sources"):
        grouped.grouped_matmul(torch.empty(sources, 6, 5), x, torch.randn(2, 8, 5), offsets, ready=raised(flags))


@pytest.mark.parametrize("most", [4096, 6])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tokens", [10, 4])
def test_blocks_of_sources_of_any_layout_are_computed_as_without_flags(own, tokens, most, monkeypatch):
    monkeypatch.setattr(grouped, "MAX_INTERVALS", most)
    x, w = torch.randn(2, 3, tokens, 8), torch.randn(2, 8, 5)
    offsets = torch.randint(0, 11, (3, 3, 2)).sort(1).values.movedim(2, 0)
    index = None if tokens == 10 else torch.randint(0, tokens, (10, 3, 2)).movedim(0, 2).movedim(1, 0)
    wanted, ours = torch.empty(2, 3, 10, 5), torch.full((2, 5, 3, 10), math.nan).movedim(1, 3)
    aten.grouped_matmul(wanted, x, w, offsets, index)
    there, own_rows, first = x, None, 1
    if own:
        own_rows, there = x[0, 2:].mT.contiguous().mT, x.clone()
        there[0, 2] = math.nan
        first = 2
    ready, table = raised(6, first if own else None, first=first), kernel_table("triton", "cpu")
    table["grouped_matmul_by_blocks"](ours, there, w, offsets, index, ready=ready, own_rows=own_rows)
    torch.testing.assert_close(ours, wanted)
    assert not ready.timeouts.any()
