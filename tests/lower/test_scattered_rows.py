"""Reduce-scatters by `ring`, `fused` and `push`: correct in every schedule and over calls, with equal bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.call.random import random_inputs
from hostir.check import verify
from hostir.check.tracing.memory import View
from hostir.check.tracing.tracer import Tracer
from hostir.ir import HostIRError, Program, parse
from hostir.ir.comm_ops import Communication, ReduceScatter
from hostir.ir.host_ops import Synchronize
from hostir.ir.machine import Done, Ready
from hostir.ir.onesided_ops import Barrier, Put, Signal, WaitSignal
from hostir.ir.tensor_ops import Add, Contraction, Matmul, Sum, TensorOp
from hostir.lower import run_passes
from hostir.lower.fused import Fused
from hostir.lower.scatters import Pieces
from hostir.lower.strategies import EXPLICIT, FINISH
from tests.call.whole import planned, run_whole
from tests.judging.simulated import failure_of
from tests.lower.held import assert_correct, assert_each_statement_is_needed, every_strategy, lowerable
from tests.lower.scattered import scattered

RANKS = pytest.mark.parametrize("ranks", [2, 3, 4, 8])
Dtype = str
Build = Callable[..., hi.Fusion]


def raising(program: Program) -> list[Contraction]:
    """Return the products that set a flag after each block of rows."""
    return [s for s in program.walk() if isinstance(s, Contraction) and s.done is not None]


def waiting(program: Program) -> list[Sum]:
    """Return the sums that take each block when it arrives."""
    return [s for s in program.walk() if isinstance(s, Sum) and s.ready is not None]


def collectives(program: Program) -> list[str]:
    return [s.keyword() for s in program.walk() if isinstance(s, Communication)]


# Layouts, and the statements around the sum -----------------------------------------------------------------------
def matmul(shape: Sequence[int | str], axis: int, ranks: int, dtype: Dtype = "f32", splits: int = 0) -> hi.Fusion:
    """Return a product that is summed over ranks and scattered along an axis, or the inner part of a split axis."""
    columns = 2 * ranks if axis == len(shape) else 6
    with hi.Fusion("scattered") as fusion:
        a, b = hi.tensor("a", [*shape, 4 * ranks], dtype), hi.tensor("b", [4 * ranks, columns], dtype)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(len(shape), mesh)
    b.shard(0, mesh)
    c.set_device_mesh(mesh)
    if splits:
        c.split(axis, splits)
        axis += 1
    c.axis(axis).parallelize(hi.ParallelType.DIDx)
    return fusion


LAYOUTS: dict[str, Callable[[int, Dtype], hi.Fusion]] = {
    "rows": lambda ranks, dtype: matmul([3 * ranks], 0, ranks, dtype),
    "one row each": lambda ranks, dtype: matmul([ranks], 0, ranks, dtype),
    "slices": lambda ranks, dtype: matmul([3, ranks, 2], 1, ranks, dtype),
    "rows in slices": lambda ranks, dtype: matmul([6 * ranks], 0, ranks, dtype, splits=3),
    "sequence in slices": lambda ranks, dtype: matmul([2, 4 * ranks], 1, ranks, dtype, splits=2),
    "batch": lambda ranks, dtype: matmul([2 * ranks, 3], 0, ranks, dtype),
    "sequence": lambda ranks, dtype: matmul([3, 2 * ranks], 1, ranks, dtype),
    "columns": lambda ranks, dtype: matmul([2, 3], 2, ranks, dtype),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=[*LAYOUTS])


@every_strategy
@every_layout
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_every_layout_are_summed_on_their_ranks(
    layout: Callable[[int, Dtype], hi.Fusion], strategy: str, ranks: int
) -> None:
    fusion = layout(ranks, "f32").program()
    program = hi.lower(fusion, strategy)
    assert not collectives(program)
    assert len(waiting(program)) == 1
    assert len(raising(program)) == (strategy == "fused")
    assert_correct(fusion, program, range(3))
    assert failure_of(program, 2) == ""


@every_strategy
@every_layout
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_partial_sums_are_added_in_f32(
    layout: Callable[[int, Dtype], hi.Fusion], strategy: str, dtype: Dtype
) -> None:
    fusion = layout(4, dtype).program()
    assert_correct(fusion, hi.lower(fusion, strategy), range(2))


def test_a_sum_over_ranks_rounds_once() -> None:
    """Sum one large and many small summands: a sum in bf16 would lose the small ones."""
    ranks = 8
    fusion = matmul([ranks], 0, ranks, "bf16").program()
    a = torch.zeros(ranks, 4 * ranks, dtype=torch.bfloat16)
    a[:, ::4] = torch.tensor([256.0] + [1.0] * (ranks - 1))
    b = torch.zeros(4 * ranks, 6, dtype=torch.bfloat16)
    b[::4] = 1.0
    exact = torch.full((ranks, 6), 256.0 + ranks - 1).bfloat16()
    assert exact[0, 0] > 256
    for strategy in ("ring", "fused", "push"):
        (c,) = run_whole(hi.lower(fusion, strategy), [a, b])
        assert torch.equal(c, exact), strategy


def row_parallel(ranks: int, dtype: Dtype = "f32", *, bias: bool = True) -> hi.Fusion:
    """Return a row-parallel linear layer with bias, an activation, and rows that are added at the end."""
    with hi.Fusion("row_parallel") as fusion:
        x, w = hi.tensor("x", [2 * ranks, 4 * ranks], dtype), hi.tensor("w", [6, 4 * ranks], dtype)
        rest = hi.tensor("rest", [2 * ranks, 6], dtype)
        y = hi.gelu(hi.linear(x, w, hi.tensor("bias", [6], dtype) if bias else None)) + rest
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)
    w.shard(1, mesh)
    rest.shard(0, mesh)
    y.shard(0, mesh)
    return fusion


@every_strategy
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_bias_and_activation_are_applied_with_the_sum(strategy: str, ranks: int, dtype: Dtype) -> None:
    fusion = row_parallel(ranks, dtype).program()
    program = hi.lower(fusion, strategy)
    words = [s.keyword() for s in program.walk() if isinstance(s, TensorOp)]
    assert words[words.index("sum") :] == ["sum", "add"]
    (total,) = waiting(program)
    assert total.addend is not None
    assert (total.addend.name, total.activation) == ("bias", "gelu")
    assert_correct(fusion, program, range(3))


def products(ranks: int, count: int = 2, dtype: Dtype = "f32", *, scatter: bool = True) -> hi.Fusion:
    """Return a sum of several row-parallel products."""
    mesh = hi.DeviceMesh(range(ranks))
    with hi.Fusion("products") as fusion:
        total: hi.Tensor | None = None
        for n in range(count):
            a, b = hi.tensor(f"a{n}", [2 * ranks, 2 * ranks], dtype), hi.tensor(f"b{n}", [2 * ranks, 6], dtype)
            a.shard(1, mesh)
            b.shard(0, mesh)
            total = a @ b if total is None else total + a @ b
        assert total is not None
        fusion.output(total)
    total.set_device_mesh(mesh)
    if scatter:
        total.shard(0, mesh)
    return fusion


@pytest.mark.parametrize("strategy", ["sequential", "ring", "fused", "push"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_sum_of_products_is_reduced_once(strategy: str, count: int) -> None:
    fusion = products(3, count).program()
    program = hi.lower(fusion, strategy)
    assert len(waiting(program)) == (strategy != "sequential")
    assert collectives(program) == (["reduce_scatter"] if strategy == "sequential" else [])
    assert_correct(fusion, program, range(3))


def test_a_sum_of_products_is_reduced_by_one_allreduce() -> None:
    fusion = products(2, 3, scatter=False).program()
    program = hi.lower(fusion, "sequential")
    assert collectives(program) == ["allreduce"]
    assert_correct(fusion, program, range(2))


def test_a_sum_with_another_reader_is_reduced_separately() -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @twice(%p: f32[4, 6] partial(tp), %q: f32[4, 6] partial(tp)) -> (%s, %x, %t) {
  %x: f32[4@tp, 6] = reduce_scatter %p over tp
  %y: f32[4@tp, 6] = reduce_scatter %q over tp
  %s: f32[4@tp, 6] = add %x, %y
  %z: f32[4@tp, 6] = reduce_scatter %q over tp
  %t: f32[4@tp, 6] = add %z, %z
}
"""
    fusion = parse(text)
    for strategy in ("sequential", "ring", "fused", "push"):
        program = hi.lower(fusion, strategy)
        assert sum(isinstance(s, (Sum, ReduceScatter)) for s in program.walk()) == 3
        assert_correct(fusion, program, range(2))


def test_the_sum_of_two_partial_sums_is_a_partial_sum() -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @sums(%p: f32[4, 6] partial(tp), %q: f32[4, 6] partial(tp)) -> (%y) {
  %s: f32[4, 6] partial(tp) = add %p, %q
  %y: f32[4@tp, 6] = reduce_scatter %s over tp
}
"""
    fusion = parse(text)
    assert run_passes(fusion, EXPLICIT) == fusion
    assert_correct(fusion, hi.lower(fusion, "fused"), range(2))
    with pytest.raises(HostIRError, match="%s cannot be made a partial sum over tp"):
        hi.lower(parse(text.replace("add", "mul")), "fused")


@every_strategy
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_reduce_scatters_share_the_barrier_after_the_previous_call(strategy: str, ranks: int) -> None:
    with hi.Fusion("two") as fusion:
        a, b, d = (hi.tensor(n, s, "f32") for n, s in zip("abd", ([16, 8], [8, 6], [8, 10]), strict=True))
        c, e = a @ b, a @ d
        fusion.output(c, e)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(1, mesh)
    b.shard(0, mesh)
    d.shard(0, mesh)
    c.shard(0, mesh)
    e.shard(0, mesh)
    program = hi.lower(fusion, strategy)
    assert len(waiting(program)) == 2
    assert sum(isinstance(s, Barrier) for s in program.walk()) == 1
    assert_correct(fusion.program(), program, range(3))
    assert failure_of(program, 2) == ""


@every_strategy
@pytest.mark.parametrize("slices", ["", "2, "], ids=["rows", "slices"])
def test_rows_gathered_over_one_axis_and_scattered_over_the_other_have_one_product(strategy: str, slices: str) -> None:
    """The kernels that signal after copies must start before a sum that waits for other ranks holds the SMs."""
    text = f"""hostir 1
mesh @mesh [dp, tp] = (0 1 2) (3 4 5)
fusion @both(%x: f32[{slices}12@dp, 6@tp], %w: f32[6@tp, 4]) -> (%y) {{
  %full: f32[{slices}12, 6@tp] = allgather %x over dp
  %p: f32[{slices}12, 4] partial(tp) = matmul %full, %w
  %y: f32[{slices}12@tp, 4] = reduce_scatter %p over tp
}}
"""
    fusion = parse(text)
    program = hi.lower(fusion, strategy)
    assert not collectives(program)
    assert [s for s in raising(program) if s.ready is not None] == raising(program)
    assert len(raising(program)) == (strategy == "fused")
    assert_correct(fusion, program, range(4))
    assert failure_of(program, 2) == ""


@every_strategy
@pytest.mark.parametrize("pattern", [patterns.mlp, patterns.mlp_2d], ids=lambda p: p.__name__)
@pytest.mark.parametrize("ranks", [4, 8])
def test_both_halves_of_an_mlp_are_overlapped(pattern: Build, strategy: str, ranks: int) -> None:
    program = hi.lower(pattern(ranks=ranks, S=2, M=32, K=16), strategy)
    assert not collectives(program)
    assert len(waiting(program)) == 1


@every_strategy
@RANKS
def test_random_fusions_of_scattered_rows_give_the_unsharded_result(strategy: str, ranks: int) -> None:
    fusions = [scattered(ranks, seed) for seed in range(8 if ranks < 8 else 4)]
    lowered = list(lowerable(fusions, lambda seed, fusion: hi.lower(fusion, strategy, streams=1 + seed % 3)))
    for seed, fusion, program in lowered:
        assert_correct(fusion, program, range(seed, seed + 2))
    assert len(lowered) > len(fusions) // 2


@every_strategy
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_program_serves_any_number_of_rows(strategy: str, ranks: int) -> None:
    fusions = [scattered(ranks, seed, named=True) for seed in range(10)]
    fusions = [fusion for fusion in fusions if "M" in fusion.size_names]
    lowered = list(lowerable(fusions, lambda _, fusion: hi.lower(fusion, strategy)))
    for seed, fusion, program in lowered:
        assert_correct(fusion, program, range(seed, seed + 1), *({"M": rows} for rows in (0, 2 * ranks, 6 * ranks)))
    assert len(lowered) > 3


@every_strategy
def test_rows_that_the_ranks_do_not_divide_are_refused_with_one_diagnostic(strategy: str) -> None:
    program = hi.lower(matmul(["M"], 0, 4), strategy)
    with pytest.raises(HostIRError, match=r"M must be a multiple of 4, because") as refused:
        hi.run(program, torch.randn(10, 16), torch.randn(16, 6), machine="local")
    assert len(refused.value.diagnostics) == 1


# Order ------------------------------------------------------------------------------------------------------------
class Order(Tracer):
    """Records the order in which a product sets its flags, and the order in which copies wait for them."""

    def __init__(self, rank: int, program: Program) -> None:
        super().__init__(rank, program, {})
        self.raised: list[tuple[int, int]] = []  # buffer and index of the flag
        self.awaited: list[tuple[int, int]] = []

    def compute(
        self,
        operation: str,
        out: View,
        operands: Sequence[View | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        if done is not None:
            first = 0 if ready is None else -(-ready.first * done.blocks // ready.results)
            self.raised += [(done.flags.buffer, (first + n) % done.blocks) for n in done.order]
        super().compute(operation, out, operands, options, ready, done)

    def wait_signal(self, flags: View, slot: int, epoch: int) -> None:
        self.awaited.append((flags.buffer, slot))
        super().wait_signal(flags, slot, epoch)


def in_pieces(fusion: Program, streams: int = 1) -> Program:
    """Return the fusion lowered by `fused` with blocks of any size."""
    return run_passes(fusion, [*EXPLICIT, Fused(streams, Pieces(most=8, min_bytes=1)), *FINISH])


def tall(ranks: int, pieces: int) -> Program:
    return matmul([256 * pieces * ranks], 0, ranks).program()


def late(order: Order) -> int:
    """Return the largest delay of a copy, in blocks: copies should wait for blocks in the order they are computed."""
    awaited = [order.raised.index(flag) for flag in order.awaited if flag in order.raised]
    assert len(awaited) == len(set(awaited)) > 0
    return max(at - sorted(awaited)[turn] for turn, at in enumerate(awaited))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("layout", ["rows", "slices", "rows in slices", "sequence", "pieces"])
def test_copies_wait_for_blocks_in_about_the_order_of_their_computation(layout: str, ranks: int) -> None:
    fusion = tall(ranks, 3) if layout == "pieces" else LAYOUTS[layout](ranks, "f32").program()
    program = in_pieces(fusion)
    (product,) = raising(program)
    assert product.done is not None
    in_order = ranks == 2 or layout in ("rows", "pieces")
    for rank in range(ranks):
        order = Order(rank, program)
        order.call()
        assert order.raised[-1] not in order.awaited, "the last block is for another rank"
        assert late(order) <= (0 if in_order else ranks)


@pytest.mark.parametrize("tp", [3, 4])
@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("rows", [24, 12 * 512])
def test_blocks_computed_in_the_order_of_gathered_rows_are_sent_in_that_order(rows: int, dp: int, tp: int) -> None:
    grid = " ".join(f"({' '.join(str(tp * i + j) for j in range(tp))})" for i in range(dp))
    text = f"""hostir 1
mesh @mesh [dp, tp] = {grid}
fusion @both(%x: f32[{rows}@dp, {12 * tp}@tp], %w: f32[{12 * tp}@tp, 4]) -> (%y) {{
  %full: f32[{rows}, {12 * tp}@tp] = allgather %x over dp
  %p: f32[{rows}, 4] partial(tp) = matmul %full, %w
  %y: f32[{rows}@tp, 4] = reduce_scatter %p over tp
}}
"""
    program = in_pieces(parse(text))
    for rank in range(dp * tp):
        order = Order(rank, program)
        order.call()
        pieces = len(order.raised) // tp
        assert late(order) < pieces
    if rows < 100:
        assert_correct(parse(text), program, range(1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_the_rows_of_a_rank_are_sent_in_as_many_pieces_as_are_large_enough(ranks: int, pieces: int) -> None:
    fusion = tall(ranks, pieces)
    program = in_pieces(fusion)
    (product,) = raising(program)
    assert product.done is not None
    assert product.done.tensor.shape[0].value == ranks * pieces
    assert_correct(fusion, program, range(2))


def test_few_rows_and_a_symbolic_number_of_rows_are_sent_in_one_piece() -> None:
    for fusion in (tall(2, 1), patterns.row_parallel_scattered(2, S=1, M="M").program()):  # type: ignore[arg-type]
        (product,) = raising(in_pieces(fusion))
        assert product.done is not None
        assert product.done.tensor.shape[0].value == 2


def test_rows_of_a_large_product_are_sent_in_two_pieces() -> None:
    fusion = patterns.row_parallel_scattered(2, S=1, M=8192, K=28672, N=8192, dtype="bf16")
    program = hi.lower(fusion, "fused")
    (product,) = raising(program)
    assert product.done is not None
    assert product.done.tensor.shape[0].value == 4  # of 2048 rows, 32 MiB
    assert hi.check(program) == []
    assert str(program).count("\n") < 40


@every_strategy
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_result_has_the_same_bits_in_every_run_and_schedule(strategy: str, ranks: int) -> None:
    """In bf16, another order of the summands would give other bits."""
    for fusion in (patterns.mlp(ranks, S=2, M=8 * ranks, K=32, H=8 * ranks, dtype="bf16"), row_parallel(ranks, "bf16")):
        program = hi.lower(fusion, strategy)
        inputs = random_inputs(fusion.program(), {}, seed=1)
        first, *others = map(planned(program, inputs), range(6))
        for outputs in others:
            assert all(map(torch.equal, first, outputs))
        executor = hi.Executor(program, machine="local")
        eager = [executor(*inputs) for _ in range(2)]
        assert all(torch.equal(a, b) for x, y in zip(*eager, strict=True) for a, b in zip(x, y, strict=True))


def test_all_strategies_and_schedules_give_equal_bits_if_products_are_exact() -> None:
    """Partial sums of small integers are exact in bf16, so only the order of the summands could differ."""
    ranks = 4
    fusion = matmul([4 * ranks], 0, ranks, "bf16")
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(-2, 3, shape, generator=generator).bfloat16() for shape in ((16, 16), (16, 6))]
    results = [run_whole(hi.lower(fusion, s), inputs, seed=n)[0] for s in ("ring", "fused", "push") for n in range(2)]
    assert all(torch.equal(results[0], other) for other in results[1:])


# Statements that are needed, and fusions that are refused ---------------------------------------------------------
LEFT_OUT: dict[str, tuple[Build, tuple[int, ...]]] = {
    "slices": (lambda ranks: patterns.row_parallel_scattered(ranks, S=2, M=2 * ranks, K=ranks, N=2), (2, 3, 4, 8)),
    "rows": (row_parallel, (3,)),
    "columns": (lambda ranks: matmul([5], 1, ranks), (2, 4)),
    "mlp": (lambda ranks: patterns.mlp(ranks, S=1, M=ranks, K=2, H=ranks), (2, 3, 4, 8)),
}


@every_strategy
@pytest.mark.parametrize(("name", "ranks"), [(name, n) for name, (_, numbers) in LEFT_OUT.items() for n in numbers])
def test_the_checker_reports_every_statement_left_out(name: str, strategy: str, ranks: int) -> None:
    types = assert_each_statement_is_needed(hi.lower(LEFT_OUT[name][0](ranks), strategy, streams=2))
    of_strategy = {"ring": {Synchronize}, "fused": {Synchronize, WaitSignal}, "push": set()}
    assert {Put, Signal} | ({Barrier} if name != "mlp" else set()) | of_strategy[strategy] <= types


@every_strategy
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_text_fits_on_a_page_and_only_numbers_depend_on_the_ranks(strategy: str, ranks: int) -> None:
    for pattern in (patterns.row_parallel_scattered, patterns.mlp):
        texts = [str(hi.lower(pattern(n, S=2), strategy)) for n in (4, ranks)]
        assert max(text.count("\n") for text in texts) <= 60
        few, many = ([re.sub(r"\d+", "", line) for line in text.splitlines()[2:]] for text in texts)
        assert few == many or (strategy, ranks) == ("ring", 2)  # 2 ranks have one worker stream, and no fork


@every_strategy
def test_a_product_with_scattered_columns_is_transposed_and_copied_once(strategy: str) -> None:
    program = hi.lower(matmul([6], 1, 2), strategy)
    notes = [s.note for s in program.walk() if isinstance(s, TensorOp) and "copy" in s.note]
    assert notes == ["copy: the columns of %c were summed up as rows"]
    assert all("transposed" in s.note for s in program.walk() if isinstance(s, Contraction))


@every_strategy
def test_scattered_columns_between_elementwise_statements_give_the_unsharded_result(strategy: str) -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1 2
fusion @columns(%x: f32[M, 9@tp], %w: f32[6, 9@tp], %bias: f32[6]) -> (%z) {
  %g: f32[M, 9@tp] = gelu %x
  %y: f32[M, 6@tp] = linear %g, %w, %bias
  %z: f32[M, 6@tp] = relu %y
}
"""
    fusion = parse(text)
    program = hi.lower(fusion, strategy)
    assert not collectives(program)
    assert_correct(fusion, program, range(3), {"M": 5})


@every_strategy
def test_scattered_columns_without_a_product_are_refused_with_the_reason(strategy: str) -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @columns(%p: f32[6, 4] partial(tp)) -> (%y) {
  %y: f32[6, 4@tp] = reduce_scatter %p over tp
}
"""
    fusion = parse(text)
    with pytest.raises(HostIRError, match=f"'{strategy}' cannot overlap the reduce_scatter: it scatters the last axis"):
        hi.lower(fusion, strategy)


@every_strategy
def test_a_sum_is_written_in_the_order_of_the_only_copy_of_it(strategy: str) -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1 2
fusion @sequence(%a: f32[2, 6, 9@tp], %b: f32[9@tp, 4]) -> (%z) {
  %t: f32[6, 2, 9@tp] = permute %a (1, 0, 2)
  %c: f32[6@tp, 2, 4] = matmul %t, %b
  %y: f32[2, 6@tp, 4] = permute %c (1, 0, 2)
  %z: f32[2, 6@tp, 4] = copy %y
}
"""
    fusion = parse(text)
    program = hi.lower(fusion, strategy)
    assert not [s for s in program.walk() if s.keyword() in ("copy", "dense")]
    assert_correct(fusion, program, range(3))
    assert failure_of(program, 2) == ""


@every_strategy
def test_waits_for_data_of_all_ranks_point_to_the_line_of_the_collective(strategy: str) -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1 2
fusion @both(%x: f32[6@tp, 4], %p: f32[6, 4] partial(tp)) -> (%full, %y) {
  %full: f32[6, 4] = allgather %x over tp
  %y: f32[6@tp, 4] = reduce_scatter %p over tp
}
"""
    waits = [s for s in hi.lower(parse(text), strategy).walk() if isinstance(s, WaitSignal)]
    lines = {"ring": {5}, "fused": {4, 5}, "push": {4}}[strategy]  # the sum waits in its kernel
    assert {s.span.line if s.span else None for s in waits} == lines


@every_strategy
def test_a_reduce_scatter_without_a_matmul_holds_no_sm_during_copies(strategy: str) -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1 2
fusion @alone(%p: f32[6, 4] partial(tp)) -> (%y) {
  %y: f32[6@tp, 4] = reduce_scatter %p over tp
}
"""
    fusion = parse(text)
    program = hi.lower(fusion, strategy)
    assert [s.keyword() for s in program.walk() if isinstance(s, TensorOp)] == ["sum"]
    assert [s.sms for s in program.walk() if isinstance(s, Put)] == ([16] if strategy == "push" else [0, 0])
    assert len(waiting(program)) == (strategy == "push") == (not any(isinstance(s, WaitSignal) for s in program.walk()))
    assert_correct(fusion, program, range(3))
    assert failure_of(program, 2) == ""


@pytest.mark.parametrize("strategy", ["fused", "push"])
def test_the_last_of_several_summed_products_adds_to_the_others_and_is_overlapped(strategy: str) -> None:
    program = hi.lower(products(2, 3), strategy)
    first, *adding = [s for s in program.walk() if isinstance(s, Matmul)]
    assert first.addend is None
    assert all(s.addend == s.out == first.out for s in adding)
    assert raising(program) == (adding[-1:] if strategy == "fused" else [])
    assert "not overlapped" not in str(program)
    assert not any(isinstance(s, Add) for s in program.walk())
    assert failure_of(program, 2) == ""
    with pytest.raises(HostIRError, match="it adds to %b0, but its result is"):
        verify(parse(str(program).replace(f"plus {first.out}", "plus %b0", 1)))
