"""What the ranks of tests/torch/test_operators.py run: `operator_cases.py NAME ...`; each prints `PASS name rank`.

    DEVICE=cuda torchrun --standalone --nproc-per-node 2 tests/torch/operator_cases.py     all cases, on GPUs
    DEVICE=cuda torchrun --standalone --nproc-per-node 2 tests/torch/layer_cases.py

The cases of torch's own tests (AsyncTPTest, SymmetricMemoryTest, MicroPipelineTPTest) have their shapes and dtypes.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import hostir as hi
import hostir.torch
from hostir.torch.ops.running import group_named

DEVICE = os.environ.get("DEVICE", "cpu")
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STRATEGIES = ("auto", "sequential", "pipeline", "ring", "fused", "push")
OPS = torch.ops.symm_mem
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def group() -> str:
    return dist.group.WORLD.group_name


def everywhere(x: torch.Tensor) -> torch.Tensor:
    """The tensor of rank 0, on every rank."""
    dist.broadcast(x, 0)
    return x


def part(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.chunk(RANKS, axis)[RANK]


@contextmanager
def hostirs(strategy: str, operator: str, calls: int = 1) -> Iterator[None]:
    """Installed strictly; in the end the report must show that hostir ran it so often, by the strategy asked for."""
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


def close(found: torch.Tensor, true: torch.Tensor) -> None:
    torch.testing.assert_close(found, true)
    assert found.stride() == true.stride(), (found.stride(), true.stride())


def refused(strategy: str, call: Callable[[], object], why: str) -> None:
    with hi.torch.install(strict=True, strategy=strategy), pytest.raises(hi.HostIRError, match=why):
        call()


# AsyncTPTest ----------------------------------------------------------------------------------------------------------


@case
def fused_all_gather_matmul() -> None:
    for axis in (0, 1, 2):
        whole, bs = everywhere(torch.rand(8, 64, 32)), [torch.rand(32, 16) for _ in range(3)]
        a = part(whole, axis)
        full, products = symm_mem._fused_all_gather_matmul_fallback(a, bs, axis, group())
        for strategy in STRATEGIES if axis != 2 else STRATEGIES[:-1]:
            with hostirs(strategy, "fused_all_gather_matmul"):
                found, cs = OPS.fused_all_gather_matmul(a, bs, axis, group())
            close(found, full)
            assert torch.equal(found, whole)
            for c, b, product in zip(cs, bs, products, strict=True):
                close(c, product)
                torch.testing.assert_close(c, whole @ b)
        if axis == 2:
            refused("push", lambda a=a, bs=bs: OPS.fused_all_gather_matmul(a, bs, 2, group()), "sums over")
            odd = a[0, :7], bs
            refused("ring", lambda odd=odd: OPS.fused_all_gather_matmul(*odd, 1, group()), "not known to be even")


@case
def fused_matmul_reduce_scatter() -> None:
    for axis, reduce_op in itertools.product((0, 1, 2), ("avg", "sum")):
        a, b = torch.rand(8, 64, 1024), torch.rand(1024, 16)
        everyones = [torch.empty_like(a) for _ in range(RANKS)]
        dist.all_gather(everyones, a)
        bs = [torch.empty_like(b) for _ in range(RANKS)]
        dist.all_gather(bs, b)
        exact = sum(x.double() @ y.double() for x, y in zip(everyones, bs, strict=True))
        exact = exact / RANKS if reduce_op == "avg" else exact
        true = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, reduce_op, axis, group())
        for strategy in STRATEGIES:
            with hostirs(strategy, "fused_matmul_reduce_scatter"):
                found = OPS.fused_matmul_reduce_scatter(a, b, reduce_op, axis, group())
            close(found, true)
            torch.testing.assert_close(found, part(exact, axis).float())


@case
def fused_matmul_reduce_scatter_bfloat16_custom_reduce() -> None:
    a, b = torch.rand(64, 1024).bfloat16(), torch.rand(1024, 32).bfloat16()
    exact = (a.double() @ b.double()) / RANKS
    dist.all_reduce(exact)
    exact = part(exact, 0)
    true = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "avg", 0, group())
    for strategy in STRATEGIES:
        with hostirs(strategy, "fused_matmul_reduce_scatter"):
            found = OPS.fused_matmul_reduce_scatter(a, b, "avg", 0, group())
        torch.testing.assert_close(found, true, rtol=1e-2, atol=1e-2)
        assert found.stride() == true.stride()
        assert (found.double() - exact).abs().mean() <= 1.1 * (true.double() - exact).abs().mean()


@case
def a_mean_of_float16_is_rounded_once_and_does_not_overflow() -> None:
    a, b = torch.rand(4, 4 * RANKS, 64).half() * 900, (1 + torch.rand(64, 4 * RANKS)).half()
    parts = [torch.empty(4, 4 * RANKS, 4 * RANKS).half() for _ in range(RANKS)]
    dist.all_gather(parts, a @ b)
    assert sum(parts).isinf().any()
    true = torch.stack(parts).float().mean(0).half()
    for strategy, axis in itertools.product(STRATEGIES, (1, 2)):
        with hostirs(strategy, "fused_matmul_reduce_scatter"):
            found = OPS.fused_matmul_reduce_scatter(a, b, "avg", axis, group())
            mine = torch.ops.hostir.reduce_scatter(parts[RANK], "avg", axis, group())
        torch.testing.assert_close(found, part(true, axis), rtol=1e-3, atol=0)  # a unit of float16, or the product's
        torch.testing.assert_close(mine, part(true, axis), rtol=1e-7, atol=0)
    out = torch.full_like(part(true, 1), torch.nan)
    hi.torch.matmul_reduce_scatter(a, b, group(), scatter_dim=1, reduce_op="avg", out=out)
    torch.testing.assert_close(out, part(true, 1), rtol=1e-3, atol=0)


# Layouts --------------------------------------------------------------------------------------------------------------


def layouts(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Tensors of a shape: dense, with the axes in memory in the opposite order, and a piece of a larger one."""
    yield torch.randn(shape)
    yield torch.randn(shape[::-1]).permute([*range(len(shape))][::-1])
    yield torch.randn([n + 1 for n in shape])[tuple(slice(n) for n in shape)]


@case
def operands_of_any_layout() -> None:
    turn = itertools.cycle(STRATEGIES[1:])
    for shape, axis in (((1, 8, 6), 1), ((2, 8, 3, 6), 1)):
        for a in layouts(shape):
            strategy = next(turn)
            parts = [torch.empty(shape) for _ in range(RANKS)]
            dist.all_gather(parts, a.contiguous())
            b = everywhere(torch.randn(6, 4)) if axis % 2 else everywhere(torch.randn(4, 6)).t()
            with hostirs(strategy, "fused_all_gather_matmul"):
                full, (c,) = OPS.fused_all_gather_matmul(a, [b], axis, group())
            assert torch.equal(full, torch.cat(parts, axis))
            torch.testing.assert_close(c, torch.cat(parts, axis) @ b)
            true = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "sum", axis, group())
            with hostirs(strategy, "fused_matmul_reduce_scatter"):
                close(OPS.fused_matmul_reduce_scatter(a, b, "sum", axis, group()), true)
            out = torch.full_like(true, torch.nan)
            hi.torch.matmul_reduce_scatter(a, b, group(), scatter_dim=axis, out=out)
            torch.testing.assert_close(out, true)
            whole = torch.ops.hostir.all_gather(a, axis, group())
            assert torch.equal(whole, torch.cat(parts, axis))
            mine = torch.ops.hostir.reduce_scatter(a, "sum", axis, group())
            torch.testing.assert_close(mine, part(sum(parts), axis))


@case
def a_sequence_is_copied_at_most_once_and_the_text_says_where() -> None:
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


# SymmetricMemoryTest: collectives that leave SMs to others ------------------------------------------------------------


@case
def low_contention_all_gather() -> None:
    for shape, dtype in itertools.product(((64, 64), (4, 3, 5), (6,), (0, 4)), (torch.float32, torch.bfloat16)):
        x = torch.randn(shape).to(dtype)
        every = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(every, x)
        for strategy in STRATEGIES:
            with hostirs(strategy, "_low_contention_all_gather"):
                found = OPS._low_contention_all_gather(x, group())
            found = torch.ops._c10d_functional.wait_tensor(found)
            assert torch.equal(found, torch.cat(every))
            assert found.is_contiguous()


@case
def low_contention_reduce_scatter() -> None:
    for shape, reduce_op in itertools.product(((64, 64), (8, 3, 5), (4,)), ("sum", "avg")):
        x = torch.randn(shape)
        exact = x.double()
        dist.all_reduce(exact)
        exact = part(exact, 0) / (RANKS if reduce_op == "avg" else 1)
        for strategy in STRATEGIES:
            with hostirs(strategy, "_low_contention_reduce_scatter"):
                found = OPS._low_contention_reduce_scatter(x, reduce_op, group())
            close(torch.ops._c10d_functional.wait_tensor(found), exact.float())


# MicroPipelineTPTest: what the pass makes of its patterns -------------------------------------------------------------


@case
def micro_pipeline_all_gather_matmul() -> None:
    shapes = ((64, 32), (2, 64, 32))
    for shape, axis, return_a, rows in itertools.product(shapes, (0, 1), (True, False), (True, False)):
        if axis == len(shape) - 1:
            continue
        a, b = torch.randn(shape), torch.randn(32, 16) if rows else torch.randn(16, 32).t()
        full, (product,) = symm_mem._fused_all_gather_matmul_fallback(a, [b], axis, group(), return_A=return_a)
        for strategy in STRATEGIES:
            with hostirs(strategy, "fused_all_gather_matmul"):
                found, (c,) = OPS.fused_all_gather_matmul(a, [b], axis, group(), return_A=return_a)
            close(c, product)
            assert found is None if full is None else torch.equal(found, full)


@case
def micro_pipeline_matmul_reduce_scatter() -> None:
    for shape, axis in itertools.product(((64, 32), (2, 64, 32), (4, 2, 8, 32)), (0, 1, 2)):
        if axis >= len(shape) - 1 or shape[axis] % RANKS:
            continue
        for a in (torch.randn(shape), torch.randn(shape).transpose(0, -1).contiguous().transpose(0, -1)):
            b = torch.randn(32, 16)
            true = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "sum", axis, group())
            for strategy in STRATEGIES:
                with hostirs(strategy, "fused_matmul_reduce_scatter"):
                    found = OPS.fused_matmul_reduce_scatter(a, b, "sum", axis, group())
                close(found, true)


@case
def graphs_of_the_micro_pipeline_pass() -> None:
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
        with mock.patch.object(dist, "is_nccl_available", return_value=True):  # or it leaves the graph as it is
            micro_pipeline_tp_pass(traced.graph)
        traced.recompile()
        for strategy in STRATEGIES:
            with hostirs(strategy, name):
                found = traced(a, b)
            torch.testing.assert_close(found, function(a, b, axis))


# The take-over --------------------------------------------------------------------------------------------------------


@case
def other_numbers_of_rows_make_no_other_program() -> None:
    b = torch.randn(16, 8)
    for strategy in ("auto", "ring"):
        made = set()
        with hi.torch.install(strict=True, strategy=strategy):
            for rows, beside in ((4, 1), (8, 3), (2, 5), (0, 2), (64, 1)):
                a = torch.randn(beside, rows, 16)
                _, (c,) = OPS.fused_all_gather_matmul(a, [b], 1, group())
                assert c.shape == (beside, rows * RANKS, 8)
                y = OPS.fused_matmul_reduce_scatter(torch.randn(beside, rows * RANKS, 16), b, "sum", 1, group())
                assert y.shape == (beside, rows, 8)
                made.add(frozenset(group_named(group()).compiled))
        assert len(max(made, key=len)) - len(min(made, key=len)) <= 2, "one axis of rows or two, and nothing else"


@case
def what_hostir_lacks_goes_to_torch_and_says_so_once() -> None:
    whole = everywhere(torch.randint(9, (4 * RANKS, 8), dtype=torch.int32))
    b = torch.randint(9, (8, 4), dtype=torch.int32)
    hi.torch.report(clear=True)
    with hi.torch.install(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            full, (c,) = OPS.fused_all_gather_matmul(part(whole, 0), [b], 0, group())
            assert torch.equal(c, whole @ b)
            assert torch.equal(full, whole)
            y = torch.ops._c10d_functional.wait_tensor(OPS._low_contention_all_gather(part(whole, 0), group()))
            assert torch.equal(y, whole)
    said = [str(w.message) for w in caught if isinstance(w.message, hi.FallbackWarning)]
    assert len(said) == (2 if RANK == 0 else 0), said
    assert all("its dtype is torch.int32" in text for text in said)
    rows = {row.operator: row for row in hi.torch.report()}
    assert rows["symm_mem::fused_all_gather_matmul"].strategy == "torch"
    assert rows["symm_mem::fused_all_gather_matmul"].calls == 3
    assert "torch.int32" in str(hi.torch.report())
    refused("auto", lambda: OPS.fused_all_gather_matmul(part(whole, 0), [b], 0, group()), "dtype is torch.int32")


@case
def wrong_arguments_are_refused_in_torchs_words() -> None:
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


@case
def it_comes_off_again() -> None:
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


# On CPU torch has no operators of its own, and sums of integers.
CPU_ONLY = {"it_comes_off_again", "what_hostir_lacks_goes_to_torch_and_says_so_once"}


def main(cases: dict[str, Callable[[], None]]) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch's, of names that torch 2.11 has as well
    torch.use_deterministic_algorithms(True, warn_only=DEVICE == "cuda")  # which also fills new memory with NaN
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    torch.manual_seed(int.from_bytes(os.environ.get("SEED", "").encode()) + RANK)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    for name in sys.argv[1:] or [name for name in cases if DEVICE == "cpu" or name not in CPU_ONLY]:
        cases[name]()
        print(f"PASS {name} {RANK}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CASES)
