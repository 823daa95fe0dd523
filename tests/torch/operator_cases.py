"""Cases of torch's symmetric-memory operators run by hostir; test_operators.py starts the ranks.

The cases under AsyncTPTest, SymmetricMemoryTest and MicroPipelineTPTest have the shapes and dtypes of torch's tests.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import hostir as hi
import hostir.torch
from hostir.torch.ops import running
from hostir.torch.ops.library import Operator
from hostir.torch.ops.running import group_named
from tests.torch.on_ranks import (
    OPS,
    RANK,
    RANKS,
    assert_near,
    broadcast,
    case,
    case_of_gpus,
    group,
    main,
    part,
    parts_of_all,
)

STRATEGIES = ("auto", "sequential", "pipeline", "ring", "fused", "push")


@contextmanager
def run_by_hostir(strategy: str, operator: str, calls: int = 1) -> Iterator[None]:
    """Install hostir; assert at the end that the report counts `calls` calls of the operator by this strategy."""
    hi.torch.report(clear=True)
    with hi.torch.install(strict=True, strategy=strategy):
        yield
    rows = [row for row in hi.torch.report() if row.operator == f"symm_mem::{operator}"]
    assert sum(row.calls for row in rows) == calls, rows
    assert not [row for row in hi.torch.report() if row.strategy == "torch"]
    assert all(row.why for row in rows)
    if strategy != "auto":  # these programs have no Stream axis for a pipeline
        ran = "sequential" if strategy == "pipeline" else strategy
        assert all(row.strategy.split(",")[0] == ran for row in rows), rows
        assert ran == strategy or all("'pipeline' lowers to the sequential program" in row.why[-1] for row in rows)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride(), (result.stride(), expected.stride())


def assert_refused(strategy: str, call: Callable[[], object], reason: str) -> None:
    with hi.torch.install(strict=True, strategy=strategy), pytest.raises(hi.HostIRError, match=reason):
        call()


# Remembered calls -------------------------------------------------------------------------------------------------


@contextmanager
def computed(times: int) -> Iterator[None]:
    """Assert at the end that `times` calls were worked out, and that all other calls were repeated from memory."""
    counts = []

    def count(operator: Operator, args: object, options: object) -> object:
        counts.append(operator.name)
        return work_out(operator, args, options)

    work_out = Operator.computed
    with mock.patch.object(Operator, "computed", count):
        yield
    assert len(counts) == times, counts


def random_parts(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random tensor that is the same on all ranks, and this rank's part of its first axis."""
    unsharded = broadcast(torch.rand(shape))
    return unsharded, part(unsharded, 0)


@case
def calls_with_known_layouts_are_repeated_from_memory() -> None:
    with computed(5):
        for _ in range(4):
            (x, mine), w, v = random_parts(8 * RANKS, 3, 16), torch.rand(12, 16), torch.rand(12, 16)
            assert_near(hi.torch.all_gather_matmul(mine, w.t(), group()), x.double() @ w.t().double())
            ys = hi.torch.column_parallel_linear(mine, [w, v], group())
            for y, weight in zip(ys, (w, v), strict=True):
                assert_near(y, x.double() @ weight.t().double())
            full, y = hi.torch.all_gather_matmul(mine.movedim(0, 1), w.t(), group(), gather_dim=1, return_a=True)
            assert_near(full, x.movedim(0, 1).double())
            assert_near(y, x.movedim(0, 1).double() @ w.t().double())
            a = torch.rand(4 * RANKS, 2, 16)
            total = torch.stack(parts_of_all(a @ w.t())).sum(0)
            assert_near(hi.torch.row_parallel_linear(a, w, group()), part(total, 0).double())
            assert_near(hi.torch.matmul_all_reduce(a, w.t(), group()), total.double())


@case
def calls_that_do_more_than_run_one_fusion_are_worked_out_each_time() -> None:
    (x, _), b = random_parts(8 * RANKS, 16), torch.rand(16, 12)
    expected = torch.stack(parts_of_all(x @ b)).mean(0)
    out = torch.empty(8, 12)
    with computed(6):
        for _ in range(3):  # a mean divides the sum in place, and `out=` is the caller's memory
            assert_near(hi.torch.matmul_reduce_scatter(x, b, group(), reduce_op="avg"), part(expected, 0).double())
            hi.torch.matmul_reduce_scatter(x, b, group(), out=out.fill_(torch.nan))
            assert_near(out, part(expected, 0).double() * RANKS)


@case
def results_of_remembered_calls_are_new_lists_and_all_are_written() -> None:
    for number in range(3):
        x, mine = random_parts(4 * RANKS, 16)
        full, products = hi.torch.all_gather_matmul(mine, [], group(), return_a=True)
        assert_near(full, x.double())
        assert products == []
        products.append(torch.tensor(number))
        gathered = torch.full_like(x, torch.nan)
        torch.ops.hostir.all_gather_matmul_out(mine, [], 0, group(), out=[], gathered=gathered)
        assert_near(gathered, x.double())


@case
def another_layout_dtype_strategy_or_aliasing_is_no_remembered_call() -> None:
    x, mine = random_parts(8 * RANKS, 16)
    w, v = torch.rand(12, 16), torch.rand(12, 16)

    def check(mine: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> None:
        for y, weight in zip(hi.torch.column_parallel_linear(mine, [w, v], group()), (w, v), strict=True):
            assert_near(y, x.double() @ weight.t().double())

    with computed(3):  # the first and the last time, both weights are one tensor
        check(mine, w, w)
        check(mine, w, v)
        check(mine, v, w)
        check(mine, v, v)
    with computed(3):
        check(mine.t().contiguous().t(), w, v)
        check(mine.bfloat16(), w.bfloat16(), v.bfloat16())
        check(mine.requires_grad_(), w, v)
    for strategy, times in (("sequential", 1), ("ring", 1), ("sequential", 0)):
        hi.torch.report(clear=True)
        with hi.torch.install(strategy=strategy), computed(times):
            check(mine.detach(), w, v)
        assert {row.strategy.split(",")[0] for row in hi.torch.report()} == {strategy}


# AsyncTPTest ------------------------------------------------------------------------------------------------------


@case
def fused_all_gather_matmul() -> None:
    for axis in (0, 1, 2):
        unsharded, bs = broadcast(torch.rand(8, 64, 32)), [torch.rand(32, 16) for _ in range(3)]
        a = part(unsharded, axis)
        expected, products = symm_mem._fused_all_gather_matmul_fallback(a, bs, axis, group())
        for strategy in STRATEGIES if axis != 2 else STRATEGIES[:-1]:
            with run_by_hostir(strategy, "fused_all_gather_matmul"):
                full, cs = OPS.fused_all_gather_matmul(a, bs, axis, group())
            assert_close(full, expected)
            assert torch.equal(full, unsharded)
            for c, b, product in zip(cs, bs, products, strict=True):
                assert_close(c, product)
                torch.testing.assert_close(c, unsharded @ b)
        if axis == 2:
            assert_refused("push", lambda a=a, bs=bs: OPS.fused_all_gather_matmul(a, bs, 2, group()), "sums over")
            odd = lambda a=a, bs=bs: OPS.fused_all_gather_matmul(a[0, :7], bs, 1, group())  # noqa: E731
            assert_refused("ring", odd, "not known to be even")


@case
def fused_matmul_reduce_scatter() -> None:
    for axis, reduce_op in itertools.product((0, 1, 2), ("avg", "sum")):
        a, b = torch.rand(8, 64, 1024), torch.rand(1024, 16)
        exact = sum(x.double() @ y.double() for x, y in zip(parts_of_all(a), parts_of_all(b), strict=True))
        exact = exact / RANKS if reduce_op == "avg" else exact
        expected = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, reduce_op, axis, group())
        for strategy in STRATEGIES:
            with run_by_hostir(strategy, "fused_matmul_reduce_scatter"):
                result = OPS.fused_matmul_reduce_scatter(a, b, reduce_op, axis, group())
            assert_close(result, expected)
            torch.testing.assert_close(result, part(exact, axis).float())


@case
def fused_matmul_reduce_scatter_bfloat16_custom_reduce() -> None:
    a, b = torch.rand(64, 1024).bfloat16(), torch.rand(1024, 32).bfloat16()
    exact = (a.double() @ b.double()) / RANKS
    dist.all_reduce(exact)
    exact = part(exact, 0)
    expected = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "avg", 0, group())
    for strategy in STRATEGIES:
        with run_by_hostir(strategy, "fused_matmul_reduce_scatter"):
            result = OPS.fused_matmul_reduce_scatter(a, b, "avg", 0, group())
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
        assert result.stride() == expected.stride()
        assert (result.double() - exact).abs().mean() <= 1.1 * (expected.double() - exact).abs().mean()


@case
def means_of_float16_round_once_and_do_not_overflow() -> None:
    a, b = torch.rand(4, 4 * RANKS, 64).half() * 900, (1 + torch.rand(64, 4 * RANKS)).half()
    parts = parts_of_all(a @ b)
    assert sum(parts).isinf().any()
    expected = torch.stack(parts).float().mean(0).half()
    for strategy, axis in itertools.product(STRATEGIES, (1, 2)):
        with run_by_hostir(strategy, "fused_matmul_reduce_scatter"):
            result = OPS.fused_matmul_reduce_scatter(a, b, "avg", axis, group())
            mine = torch.ops.hostir.reduce_scatter(parts[RANK], "avg", axis, group())
        torch.testing.assert_close(result, part(expected, axis), rtol=1e-3, atol=0)  # one more rounding
        torch.testing.assert_close(mine, part(expected, axis), rtol=1e-7, atol=0)
    out = torch.full_like(part(expected, 1), torch.nan)
    hi.torch.matmul_reduce_scatter(a, b, group(), scatter_dim=1, reduce_op="avg", out=out)
    torch.testing.assert_close(out, part(expected, 1), rtol=1e-3, atol=0)


# Layouts ----------------------------------------------------------------------------------------------------------


def layouts(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Yield contiguous, transposed and sliced tensors of a shape."""
    yield torch.randn(shape)
    yield torch.randn(shape[::-1]).permute([*range(len(shape))][::-1])
    yield torch.randn([n + 1 for n in shape])[tuple(slice(n) for n in shape)]


@case
def operands_have_any_layout() -> None:
    turn = itertools.cycle(STRATEGIES[1:])
    for shape, axis in (((8, 6), 0), ((8, 3, 6), 0), ((1, 8, 6), 1), ((2, 8, 3, 6), 1)):
        for a, return_a in itertools.product(layouts(shape), (True, False)):
            strategy = next(turn)
            parts = parts_of_all(a)
            b = broadcast(torch.randn(6, 4)) if axis else broadcast(torch.randn(4, 6)).t()
            with run_by_hostir(strategy, "fused_all_gather_matmul"):
                full, (c,) = OPS.fused_all_gather_matmul(a, [b], axis, group(), return_A=return_a)
            assert torch.equal(full, torch.cat(parts, axis)) if return_a else full is None
            torch.testing.assert_close(c, torch.cat(parts, axis) @ b)
            expected = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "sum", axis, group())
            with run_by_hostir(strategy, "fused_matmul_reduce_scatter"):
                assert_close(OPS.fused_matmul_reduce_scatter(a, b, "sum", axis, group()), expected)
            out = torch.full_like(expected, torch.nan)
            hi.torch.matmul_reduce_scatter(a, b, group(), scatter_dim=axis, out=out)
            torch.testing.assert_close(out, expected)
            unsharded = torch.ops.hostir.all_gather(a, axis, group())
            assert torch.equal(unsharded, torch.cat(parts, axis))
            mine = torch.ops.hostir.reduce_scatter(a, "sum", axis, group())
            torch.testing.assert_close(mine, part(sum(parts), axis))


@case
def a_sequence_is_copied_at_most_once() -> None:
    a, b = torch.randn(2, 8, 6), torch.randn(6, 4)
    for strategy in ("ring", "fused", "push", "sequential"):
        group_named(group()).compiled.clear()
        with hi.torch.install(strict=True, strategy=strategy):
            OPS.fused_all_gather_matmul(a, [b], 1, group(), return_A=False)
            gather, *_ = (executor.program for executor in group_named(group()).compiled.values())
            OPS.fused_matmul_reduce_scatter(a, b, "sum", 1, group())
            *_, scatter = (executor.program for executor in group_named(group()).compiled.values())
        copies = [[s.keyword() for s in p.walk() if s.keyword() in ("copy", "dense")] for p in (gather, scatter)]
        assert copies[0] == ([] if strategy == "ring" else ["copy"]), gather
        assert copies[1] == (["copy"] if strategy == "sequential" else []), scatter


# SymmetricMemoryTest ----------------------------------------------------------------------------------------------


@case
def low_contention_all_gather() -> None:
    for shape, dtype in itertools.product(((64, 64), (4, 3, 5), (6,), (0, 4)), (torch.float32, torch.bfloat16)):
        x = torch.randn(shape).to(dtype)
        every = parts_of_all(x)
        for strategy in STRATEGIES:
            with run_by_hostir(strategy, "_low_contention_all_gather"):
                result = OPS._low_contention_all_gather(x, group())
            result = torch.ops._c10d_functional.wait_tensor(result)
            assert torch.equal(result, torch.cat(every))
            assert result.is_contiguous()


@case
def low_contention_reduce_scatter() -> None:
    for shape, reduce_op in itertools.product(((64, 64), (8, 3, 5), (4,)), ("sum", "avg")):
        x = torch.randn(shape)
        exact = x.double()
        dist.all_reduce(exact)
        exact = part(exact, 0) / (RANKS if reduce_op == "avg" else 1)
        for strategy in STRATEGIES:
            with run_by_hostir(strategy, "_low_contention_reduce_scatter"):
                result = OPS._low_contention_reduce_scatter(x, reduce_op, group())
            assert_close(torch.ops._c10d_functional.wait_tensor(result), exact.float())


# MicroPipelineTPTest ----------------------------------------------------------------------------------------------


def symmetric(x: torch.Tensor) -> torch.Tensor:
    """Return the values of `x` in symmetric memory; on CPU, where torch has none, in other memory."""
    if x.device.type == "cpu":
        return x.clone()
    copy = symm_mem.empty(x.shape, dtype=x.dtype, device=x.device)
    symm_mem.rendezvous(copy, group())
    return copy.copy_(x)


@case
def one_shot_and_two_shot_all_reduces() -> None:
    for strategy, dtype, calls in itertools.product(("auto", "ring"), (torch.float32, torch.bfloat16), (1, 3)):
        x = torch.randn(4 * RANKS, 64).to(dtype)
        expected = sum(parts_of_all(x), torch.zeros(x.shape, dtype=torch.float32)).to(dtype)
        mine = symmetric(x)
        with run_by_hostir(strategy, "one_shot_all_reduce", calls):
            for _ in range(calls):
                y = OPS.one_shot_all_reduce(mine, "sum", group())
                torch.testing.assert_close(y, expected)
                assert torch.equal(mine, x), "the operand stays"
        with run_by_hostir(strategy, "two_shot_all_reduce_", calls):
            for _ in range(calls):
                mine.copy_(x)
                assert OPS.two_shot_all_reduce_(mine, "sum", group()) is mine
                torch.testing.assert_close(mine, expected)


@case_of_gpus
def torch_runs_all_reduces_of_other_memory_and_of_large_tensors() -> None:
    x = torch.randn(4, 1024)
    hi.torch.report(clear=True)
    with hi.torch.install(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(RuntimeError):  # torch's message
                OPS.one_shot_all_reduce(x, "sum", group())
        large = symmetric(torch.ones(32 << 20, dtype=torch.bfloat16))
        OPS.two_shot_all_reduce_(large, "sum", group())
    assert (large == RANKS).all()
    messages = [str(w.message) for w in caught if isinstance(w.message, hi.FallbackWarning)]
    assert ["its input is not in symmetric memory" in text for text in messages] == [True] * (RANK == 0)
    assert {(row.operator, row.strategy, row.calls) for row in hi.torch.report()} == {
        ("symm_mem::one_shot_all_reduce", "torch", 2),
        ("symm_mem::two_shot_all_reduce_", "torch", 1),
    }
    assert_refused("auto", lambda: OPS.one_shot_all_reduce(x, "sum", group()), "not in symmetric memory")
    with hi.torch.install(strategy="sequential"):  # hostir's own program, whatever the size
        mine = symmetric(torch.ones(32 << 20, dtype=torch.bfloat16))
        OPS.two_shot_all_reduce_(mine, "sum", group())
    assert (mine == RANKS).all()


@case
def torch_runs_all_reduces_that_hostir_cannot_run() -> None:
    x = torch.randint(9, (4, 8), dtype=torch.int32)
    expected = sum(parts_of_all(x)).to(torch.int32)
    with hi.torch.install(), pytest.warns(hi.FallbackWarning) if RANK == 0 else nullcontext():
        assert torch.equal(OPS.one_shot_all_reduce(x, "sum", group()), expected)
    with hi.torch.install():
        y = OPS.two_shot_all_reduce_(x, "sum", group())
        assert y.data_ptr() == x.data_ptr()
        assert torch.equal(x, expected)


@case
def graphs_of_torchs_micro_pipeline_pass_run_by_every_strategy() -> None:
    from torch._inductor.decomposition import decompositions
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
    from torch.fx.experimental.proxy_tensor import make_fx

    symm_mem.enable_symm_mem_for_group(group())

    def gather(a: torch.Tensor, b: torch.Tensor, axis: int) -> torch.Tensor:
        return all_gather_tensor(a, axis, group()) @ b

    def scatter(a: torch.Tensor, b: torch.Tensor, axis: int) -> torch.Tensor:
        return reduce_scatter_tensor(a @ b, "avg", axis, group())

    fusions = ((gather, "fused_all_gather_matmul"), (scatter, "fused_matmul_reduce_scatter"))
    for (function, name), (shape, axis) in itertools.product(
        fusions, (((64, 32), 0), ((4, 64, 32), 0), ((4, 64, 32), 1))
    ):
        a, b = torch.randn(shape), torch.randn(32, 16)
        traced = make_fx(partial(function, axis=axis), decompositions, tracing_mode="fake")(a, b)
        remove_noop_ops(traced.graph)
        view_to_reshape(traced)
        with mock.patch.object(dist, "is_nccl_available", return_value=True):  # otherwise the pass changes nothing
            micro_pipeline_tp_pass(traced.graph)
        traced.recompile()
        for strategy in STRATEGIES:
            with run_by_hostir(strategy, name):
                result = traced(a, b)
            torch.testing.assert_close(result, function(a, b, axis))


# Installation -----------------------------------------------------------------------------------------------------


@case
def another_number_of_rows_needs_no_other_program() -> None:
    b = torch.randn(16, 8)
    for strategy in ("auto", "ring"):
        compiled = set()
        with hi.torch.install(strict=True, strategy=strategy):
            for rows, beside in ((4, 1), (8, 3), (2, 5), (0, 2), (64, 1)):
                a = torch.randn(beside, rows, 16)
                _, (c,) = OPS.fused_all_gather_matmul(a, [b], 1, group())
                assert c.shape == (beside, rows * RANKS, 8)
                y = OPS.fused_matmul_reduce_scatter(torch.randn(beside, rows * RANKS, 16), b, "sum", 1, group())
                assert y.shape == (beside, rows, 8)
                compiled.add(frozenset(group_named(group()).compiled))
        assert len(max(compiled, key=len)) - len(min(compiled, key=len)) <= 2, "rows have one axis or two"


@case
def unsupported_calls_run_in_torch_and_warn_once() -> None:
    unsharded = broadcast(torch.randint(9, (4 * RANKS, 8), dtype=torch.int32))
    b = torch.randint(9, (8, 4), dtype=torch.int32)
    hi.torch.report(clear=True)
    with hi.torch.install(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            full, (c,) = OPS.fused_all_gather_matmul(part(unsharded, 0), [b], 0, group())
            assert torch.equal(c, unsharded @ b)
            assert torch.equal(full, unsharded)
            y = torch.ops._c10d_functional.wait_tensor(OPS._low_contention_all_gather(part(unsharded, 0), group()))
            assert torch.equal(y, unsharded)
    messages = [str(w.message) for w in caught if isinstance(w.message, hi.FallbackWarning)]
    assert len(messages) == (2 if RANK == 0 else 0), messages
    assert all("its dtype is torch.int32" in text for text in messages)
    rows = {row.operator: row for row in hi.torch.report()}
    assert rows["symm_mem::fused_all_gather_matmul"].strategy == "torch"
    assert rows["symm_mem::fused_all_gather_matmul"].calls == 3
    assert "torch.int32" in str(hi.torch.report())
    call = lambda: OPS.fused_all_gather_matmul(part(unsharded, 0), [b], 0, group())  # noqa: E731
    assert_refused("auto", call, "dtype is torch.int32")


@case
def wrong_arguments_are_refused_with_torchs_messages() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 4)
    for strict in (True, False):
        with hi.torch.install(strict=strict):
            for wrong, words in (((a[0], [b], 0), "A_shard"), ((a, [b[0]], 0), "B must"), ((a, [b], 2), "Invalid")):
                with pytest.raises(ValueError, match=words):
                    OPS.fused_all_gather_matmul(*wrong, group())
            for wrong_, words in (
                ((a[0], b, "sum", 0), "A_shard"),
                ((a, b[0], "sum", 0), "B must"),
                ((a, b, "sum", -1), "Invalid gather_dim"),
                ((a, b, "max", 0), "sum or avg"),
            ):
                with pytest.raises(ValueError, match=words):
                    OPS.fused_matmul_reduce_scatter(*wrong_, group())
            with pytest.raises(ValueError, match="not supported"):
                OPS._low_contention_reduce_scatter(a, "max", group())
    with pytest.raises(hi.HostIRError, match="unknown strategy 'rnig'"):
        hi.torch.install(strategy="rnig")
    with pytest.raises(hi.HostIRError, match=r"(?s)graphs='yes'.*True or False"):
        hi.torch.install(graphs="yes")  # type: ignore[arg-type]


@case
def the_setting_for_graphs_ends_with_the_installation() -> None:
    with hi.torch.install(graphs=True) as installed:
        assert running.SETTINGS.graphs
        assert ", for CUDA graphs)" in repr(installed)
        a, b = torch.randn(4, 8), torch.randn(8, 4)
        with hi.torch.install():
            assert not running.SETTINGS.graphs
        hi.torch.install(graphs=True)
        _, (product,) = OPS.fused_all_gather_matmul(a, [b], 0, group())
        assert product.shape == (4 * RANKS, 4)
    assert not running.SETTINGS.graphs


@case
def uninstalling_restores_torchs_operators() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 4)
    for _ in range(2):
        with hi.torch.install() as installed:
            assert "symm_mem::fused_all_gather_matmul" in installed.operators
            OPS.fused_all_gather_matmul(a, [b], 0, group())
        with pytest.raises(NotImplementedError):
            OPS.fused_all_gather_matmul(a, [b], 0, group())
    hi.torch.install()
    OPS.fused_all_gather_matmul(a, [b], 0, group())
    hi.torch.uninstall()
    hi.torch.uninstall()
    with pytest.raises(NotImplementedError):
        OPS.fused_matmul_reduce_scatter(a, b, "sum", 0, group())


if __name__ == "__main__":
    # On CPUs torch has no operators of this name, and it sums integers.
    main(
        "uninstalling_restores_torchs_operators",
        "unsupported_calls_run_in_torch_and_warn_once",
        "torch_runs_all_reduces_that_hostir_cannot_run",
    )
