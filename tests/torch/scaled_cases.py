"""Cases of torch's operators with scales, on fp8; test_operators.py starts the ranks.

The first two cases have the shapes and dtypes of torch's tests (AsyncTPTest) and compare with torch's fallbacks. With
SIZES=70B they have two batches of 4096 rows and the widths of Llama 3 70B on 8 ranks.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import hostir as hi
from hostir.torch.ops.all_gather_matmul import fused_all_gather_matmul
from hostir.torch.ops.running import group_named
from tests.torch.on_ranks import DEVICE, OPS, RANKS, broadcast, case, group, main, part, parts_of_all
from tests.torch.operator_cases import STRATEGIES, run_by_hostir

F8 = torch.float8_e4m3fn
GATHER, SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
STRATEGIES = STRATEGIES[1:]  # `auto` chooses one of them
ROWS, WIDE, NARROW = ((2, 4096), 8192, 3584) if os.environ.get("SIZES") == "70B" else ((8, 64), 32, 16)


def assert_close(result: torch.Tensor, expected: torch.Tensor, **bounds: float) -> None:
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result.float(), expected.float(), **bounds)
    assert result.stride() == expected.stride(), (result.stride(), expected.stride())


def right_sides(K: int = 32, N: int = 16, count: int = 3) -> list[torch.Tensor]:
    return [torch.rand(N, K).to(F8).t() for _ in range(count)]


def scales_of(a: torch.Tensor, mode: str) -> torch.Tensor:
    return torch.tensor(0.1) if mode == "tensor-wise" else broadcast(torch.rand(*a.shape[:-1], 1) + 0.1)


def expected_products(
    rows: torch.Tensor, bs: list[torch.Tensor], of_a: torch.Tensor, of_bs: list[torch.Tensor], axis: int, dtypes: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the results of torch's fallback, with its strides.

    The fallback itself runs neither on CPUs, because gloo gathers no fp8, nor with dtypes that cuBLAS lacks.
    """
    rows = rows.movedim(axis, 0).contiguous()
    if of_a.numel() > 1:
        of_a = of_a.movedim(axis, 0).flatten(0, -2).contiguous()
    flat = rows.flatten(0, -2).float() * of_a
    exact = [(flat @ (b.float() * of_b)).unflatten(0, rows.shape[:-1]) for b, of_b in zip(bs, of_bs, strict=True)]
    products = [
        y.clamp(-448, 448).to(F8) if dtype is None else y.to(dtype) for y, dtype in zip(exact, dtypes, strict=True)
    ]
    return rows.movedim(0, axis), [y.movedim(0, axis) for y in products]


@case
def fused_all_gather_scaled_matmul() -> None:
    modes = ("tensor-wise", "row-wise-replicated", "row-wise-sharded")
    for axis, mode in itertools.product((0, 1), modes):
        unsharded, bs = broadcast(torch.rand(*ROWS, WIDE)).to(F8), right_sides(WIDE, NARROW)
        a = part(unsharded.view(torch.uint8), axis).contiguous().view(F8)
        rows = scales_of(unsharded, mode)
        of_a = part(rows, axis) if mode == "row-wise-sharded" else rows
        of_bs = [torch.tensor(0.1) if mode == "tensor-wise" else torch.rand(1, NARROW) + 0.1 for _ in bs]
        for dtypes in ([torch.bfloat16] * 3,) if axis else ([None, torch.bfloat16, torch.float32],):
            arguments = a, bs, of_a, of_bs, axis, group(), [None] * 3, [None] * 3, dtypes, [None] * 3
            full, products = expected_products(unsharded, bs, rows, of_bs, axis, dtypes)
            if DEVICE == "cuda" and None not in dtypes:  # torch has row-wise products of bf16 only
                full, products = symm_mem._fused_all_gather_scaled_matmul_fallback(*arguments)
            for strategy in STRATEGIES:
                with run_by_hostir(strategy, GATHER):
                    gathered_a, cs = getattr(OPS, GATHER)(*arguments)
                assert_close(gathered_a, full)
                assert torch.equal(gathered_a.float(), unsharded.float())
                for c, product in zip(cs, products, strict=True):
                    assert_close(c, product, rtol=2**-3 if c.dtype == F8 else 2**-7, atol=2**-7)


@case
def fused_scaled_matmul_reduce_scatter() -> None:
    for axis, by_rows in itertools.product((0, 1), (True, False)):
        reduce_op = "avg" if axis == by_rows else "sum"
        a, (b,) = torch.rand(*ROWS, NARROW).to(F8), right_sides(NARROW, WIDE, 1)
        of_a, of_b = (torch.rand(*ROWS, 1), torch.rand(1, WIDE)) if by_rows else [torch.tensor(0.1)] * 2
        arguments = a, b, of_a, of_b, reduce_op, axis, axis, group()
        dtype = torch.float16 if axis else torch.bfloat16  # a mean of float16 is computed from sums in f32
        true = symm_mem._fused_scaled_matmul_reduce_scatter_fallback(*arguments, [*ROWS, WIDE], out_dtype=dtype)
        exact = (a.double() * of_a) @ (b.double() * of_b)
        dist.all_reduce(exact)
        exact = part(exact / (RANKS if reduce_op == "avg" else 1), axis)
        for strategy in STRATEGIES:
            with run_by_hostir(strategy, SCATTER):
                result = getattr(OPS, SCATTER)(*arguments, [*ROWS, WIDE], out_dtype=dtype)
            assert_close(result, true, rtol=2**-6, atol=2**-6)
            assert (result.double() - exact).norm() <= 1.1 * (true.double() - exact).norm() + 1e-3 * exact.norm()


def widened(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the numbers that quantized rows stand for, with one scale for each 128 elements of a row."""
    return x.double() * scale.repeat_interleave(128, -1).double()


@case
def scales_may_be_of_blocks() -> None:
    """A has a scale for each 1 x 128 elements and B for each 128 x 128; torch's functions refuse both."""
    K, N = 256, 384
    for axis, sharded in itertools.product((0, 1), (False, True)):
        unsharded, bs = broadcast(torch.rand(2 * RANKS, 4 * RANKS, K)).to(F8), right_sides(K, N, 2)
        of_rows, of_bs = (
            broadcast(torch.rand(*unsharded.shape[:-1], K // 128) + 0.1),
            [torch.rand(K // 128, N // 128) + 0.1 for _ in bs],
        )
        wide = [widened(b.t(), t.t().repeat_interleave(128, 0)).t() for b, t in zip(bs, of_bs, strict=True)]
        a = part(unsharded.view(torch.uint8), axis).contiguous().view(F8)
        of_a = part(of_rows, axis) if sharded else of_rows
        for strategy in STRATEGIES:
            with run_by_hostir(strategy, GATHER):
                dtypes = torch.bfloat16, torch.float32
                _, cs = getattr(OPS, GATHER)(
                    a, bs, of_a, of_bs, axis, group(), [None] * 2, [None] * 2, dtypes, [None] * 2
                )
            for c, b in zip(cs, wide, strict=True):
                torch.testing.assert_close(c.double(), widened(unsharded, of_rows) @ b, rtol=2**-7, atol=2**-7)
        if sharded:
            continue
        mine = torch.rand(2 * RANKS, 4 * RANKS, K).to(F8)
        exact = widened(mine, of_rows) @ wide[0]
        dist.all_reduce(exact)
        for strategy in STRATEGIES:
            with run_by_hostir(strategy, SCATTER):
                arguments = mine, bs[0], of_rows, of_bs[0], "sum", axis, axis, group(), [*mine.shape[:-1], N]
                result = getattr(OPS, SCATTER)(*arguments, out_dtype=torch.bfloat16)
            torch.testing.assert_close(result.double(), part(exact, axis), rtol=2**-6, atol=2**-6)


@case
def rows_may_be_flattened_before_a_scatter() -> None:
    """The scatter axis refers to `output_shape`; rows and scales are flat, as in calls by torch's pass."""
    a, (b,) = torch.rand(2, 16, 32).to(F8).flatten(0, 1), right_sides(32, 64, 1)
    of_a, of_b = torch.rand(32, 1), torch.rand(1, 64)
    bias = torch.rand(64).bfloat16()
    for axis in (0, 1):
        shape = [2 * RANKS, 16 // RANKS, 64] if axis == 0 else [2, 16, 64]
        arguments = a, b, of_a, of_b, "sum", axis, 0, group(), shape
        more: dict[str, Any] = {"bias": bias, "out_dtype": torch.float32, "use_fast_accum": True}
        if DEVICE == "cuda":  # torch has no f32 results with a bias on GPUs
            exact = ((a.float() * of_a) @ (b.float() * of_b) + bias).view(arguments[-1])
            dist.all_reduce(exact)
            true, tolerance = part(exact, axis).contiguous(), 2**-9  # fast sums
        else:
            true = symm_mem._fused_scaled_matmul_reduce_scatter_fallback(*arguments[:-1], [*arguments[-1]], **more)
            tolerance = 1e-5
        for strategy in STRATEGIES:
            with run_by_hostir(strategy, SCATTER):
                result = getattr(OPS, SCATTER)(*arguments, **more)
            assert_close(result, true, rtol=tolerance, atol=tolerance)


@case
def biases_result_scales_and_dtypes_are_applied() -> None:
    unsharded, bs = broadcast(torch.rand(8 * RANKS, 32)).to(F8), right_sides()
    a, of_a = part(unsharded.view(torch.uint8), 0).contiguous().view(F8), torch.rand(8, 1)
    of_bs = [torch.rand(1, 16) for _ in bs]
    biases = [torch.rand(16).bfloat16(), None, torch.rand(16).bfloat16()]
    results = [None, torch.tensor(0.5), None]
    dtypes = [torch.float32, F8, torch.bfloat16]
    rows = unsharded.float() * torch.cat(parts_of_all(of_a))
    for strategy in STRATEGIES:
        with run_by_hostir(strategy, GATHER):
            _, cs = getattr(OPS, GATHER)(a, bs, of_a, of_bs, 0, group(), biases, results, dtypes, [True, False, True])
        exact = [rows @ (b.float() * t) for b, t in zip(bs, of_bs, strict=True)]
        tolerance = 2**-9 if DEVICE == "cuda" else 2**-20  # fast sums
        torch.testing.assert_close(cs[0], exact[0] + biases[0].float(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(cs[1].float(), exact[1] * 0.5, rtol=2**-4, atol=2**-9)
        torch.testing.assert_close(cs[2].float(), exact[2] + biases[2].float(), rtol=2**-8, atol=0)
        assert [c.dtype for c in cs] == dtypes


@case
def wrong_scales_are_refused() -> None:
    a, (b,) = torch.rand(4, 8).to(F8), right_sides(8, 16, 1)
    one, columns = torch.tensor(0.1), torch.rand(1, 16)

    def gather(of_a: torch.Tensor, of_b: torch.Tensor, axis: int = 0) -> None:
        getattr(OPS, GATHER)(a, [b], of_a, [of_b], axis, group(), [None], [None], [torch.bfloat16], [False])

    def scatter(of_a: torch.Tensor, of_b: torch.Tensor, **more: Any) -> None:
        options = {"out_dtype": torch.bfloat16, **more}
        getattr(OPS, SCATTER)(a, b, of_a, of_b, "sum", 0, 0, group(), [4, 16], **options)

    with hi.torch.install(strict=True):
        for wrong in (torch.rand(8, 2), torch.rand(4), torch.rand(4, 8), torch.rand(3, 1)):
            with pytest.raises(ValueError, match="Invalid scale shape for fp8 all-gather"):
                gather(wrong, columns)
        with pytest.raises(ValueError, match=r"row-wise A_scale goes with a B_scale of shape \[1, 16\]"):
            gather(torch.rand(4, 1), one)
        with pytest.raises(ValueError, match=r"tensor-wise A_scale goes with a B_scale of shape \[1, 1\]"):
            gather(one, columns)
        with pytest.raises(ValueError, match="must match the leading dims of A"):
            scatter(torch.rand(4, 2), columns)
        with pytest.raises(ValueError, match=r"B_scale of shape \[1, 16\]"):
            scatter(torch.rand(4, 1), torch.rand(16, 1))
        with pytest.raises(hi.HostIRError, match="partial sums in torch"):
            scatter(torch.rand(4, 1), columns, out_dtype=None)
        with pytest.raises(hi.HostIRError, match="sum over"):
            gather(one, one, axis=1)
        for axis in (-1, 2):
            with pytest.raises(ValueError, match="Invalid scatter dim for 3D"):
                getattr(OPS, SCATTER)(a, b, one, one, "sum", axis, 0, group(), [4, 16], out_dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="is 2, and len"):
            getattr(OPS, GATHER)(a, [b], one, [one], 0, group(), [None] * 2, [None], [None], [False])


# Python functions in torch's module -------------------------------------------------------------------------------
# vLLM calls them by name for FlashInfer, and passes its own function for the products.

FUNCTIONS = "_fused_all_gather_matmul_impl", "_fused_scaled_matmul_reduce_scatter_impl"


def _flashinfer_scaled_mm_out(*_: Any, **__: Any) -> None:
    raise AssertionError("hostir computes the products")


_flashinfer_scaled_mm_out.__module__ = "vllm.compilation.passes.fusion.collective_fusion"


def by_flashinfer(scale_b: torch.Tensor, dtype: torch.dtype | None, **more: Any) -> dict[str, Any]:
    rest = {"bias": None, "scale_result": None, "use_fast_accum": False}
    return {"scale_b": scale_b, "out_dtype": dtype, **rest, **more}


def gathered(a: torch.Tensor, bs: list[torch.Tensor], of_a: Any, kwargs: list[Any], dtypes: Any, **more: Any) -> Any:
    options = {"mm_out_op": _flashinfer_scaled_mm_out, "gather_dim": 0, "group_name": group(), "return_A": False} | more
    return symm_mem._fused_all_gather_matmul_impl(
        A_shard=a, Bs=bs, A_scale=of_a, kwargs_list=kwargs, out_dtypes=dtypes, **options
    )


def scattered(a: torch.Tensor, b: torch.Tensor, of_a: Any, kwargs: Any, dtype: Any, **more: Any) -> Any:
    axes = {"orig_scatter_dim": 0, "scatter_dim_after_maybe_reshape": 0}
    options = {"mm_out_op": _flashinfer_scaled_mm_out, "reduce_op": "sum", **axes, "group_name": group(), **more}
    shape = [*a.shape[:-1], b.shape[1]]
    return symm_mem._fused_scaled_matmul_reduce_scatter_impl(
        A=a, B=b, A_scale=of_a, kwargs=kwargs, out_dtype=dtype, output_shape=shape, **options
    )


def calls(name: str, strategy: str) -> list[int]:
    rows = [row for row in hi.torch.report() if row.operator == f"torch.distributed._symmetric_memory.{name}"]
    assert {row.strategy.split(",")[0] for row in rows} <= {strategy}, rows
    return [row.calls for row in rows]


@case
def functions_that_vllm_calls_are_run_by_hostir() -> None:
    bf16, one, other = torch.bfloat16, torch.tensor([0.1]), torch.tensor(0.3)
    unsharded, bs = broadcast(torch.rand(8 * RANKS, 32)).to(F8), right_sides(count=2)
    a = part(unsharded.view(torch.uint8), 0).contiguous().view(F8)
    rows = broadcast(torch.rand(8 * RANKS, 1) + 0.1)
    for strategy in ("sequential", "ring", "fused", "push"):
        hi.torch.report(clear=True)
        with hi.torch.install(strict=True, strategy=strategy) as installed:
            assert all(any(name in function for function in installed.functions) for name in FUNCTIONS)
            _, (true,) = expected_products(unsharded, bs[:1], one, [other], 0, [bf16])
            full, (result,) = gathered(a, bs[:1], one, [by_flashinfer(other, bf16)], [bf16])
            assert full is None
            assert_close(result, true, rtol=2**-7, atol=2**-7)
            columns, dtypes = [torch.rand(1, 16) for _ in bs], [bf16, torch.float32]
            kwargs = [by_flashinfer(t, dtype) for t, dtype in zip(columns, dtypes, strict=True)]
            product = torch.ops.aten._scaled_mm.out  # as torch's functions pass it
            more: dict[str, Any] = {"mm_out_op": product, "return_A": True}
            full, products = gathered(a, bs, part(rows, 0), kwargs, dtypes, **more)
            assert torch.equal(full.float(), unsharded.float())
            _, true = expected_products(unsharded, bs, rows, columns, 0, dtypes)
            for y, z in zip(products, true, strict=True):
                assert_close(y, z, rtol=2**-7, atol=2**-7)
            plain, b = unsharded.float(), torch.rand(32, 16)
            more["mm_out_op"] = torch.ops.aten.mm.out
            full, (result,) = gathered(part(plain, 0), [b], None, [{}], [torch.float32], **more)
            assert torch.equal(full, plain)
            assert_close(result, plain @ b, rtol=1e-5, atol=1e-5)
            scale = one * (1 + dist.get_rank())
            exact = (unsharded.double() * scale) @ (bs[0].double() * other)
            dist.all_reduce(exact)
            result = scattered(unsharded, bs[0], scale, by_flashinfer(other, bf16), bf16)
            assert_close(result, part(exact, 0).to(bf16), rtol=2**-6, atol=2**-6)
        assert [sum(calls(name, strategy)) for name in FUNCTIONS] == [3, 1]
        assert FUNCTIONS[0] in str(hi.torch.report())


@case
def programs_return_the_gathered_rows_only_if_the_caller_asks_for_them() -> None:
    bf16, one, (b,) = torch.bfloat16, torch.tensor([0.5]), right_sides(32, 16, 1)
    a, columns = torch.ones(8, 32).to(F8), torch.ones(1, 16)
    for scale, right, count in ((one, one, 1), (torch.ones(8, 1), columns, 2)):  # scales of rows are gathered, too
        for return_a in (False, True):
            group_named(group()).compiled.clear()
            with hi.torch.install(strict=True, strategy="ring"):
                full, _ = gathered(a, [b], scale, [by_flashinfer(right, bf16)], [bf16], return_A=return_a)
            assert (full is not None) == return_a
            (executor,) = group_named(group()).compiled.values()
            assert len(executor.program.outputs) == 1 + count * return_a, executor.program


@contextmanager
def replaced(**functions: Any) -> Iterator[None]:
    """Replace functions in torch's module, as another package may do before hostir is installed."""
    with mock.patch.multiple(symm_mem, **functions):
        yield
        assert all(getattr(symm_mem, name) is function for name, function in functions.items()), "not restored"


@case
def unsupported_calls_of_these_functions_run_in_torch_unchanged() -> None:
    seen: list[str] = []

    def gather(  # with the parameters of torch's function
        mm_out_op: Any, A_shard: Any, Bs: Any, A_scale: Any, kwargs_list: Any, out_dtypes: Any, gather_dim: Any,
        group_name: Any, return_A: Any,
    ) -> Any:  # fmt: skip
        seen.append(f"gather {gather_dim}")
        return None, ["torch's"]

    def scatter(
        mm_out_op: Any, A: Any, B: Any, A_scale: Any, kwargs: Any, out_dtype: Any, reduce_op: Any,
        orig_scatter_dim: Any, scatter_dim_after_maybe_reshape: Any, group_name: Any, output_shape: Any,
    ) -> Any:  # fmt: skip
        seen.append(f"scatter {orig_scatter_dim}")
        return "torch's"

    def quantizing(
        *_: Any, **__: Any
    ) -> None:  # as vLLM's function for other devices, which takes an A that is not fp8 yet
        raise AssertionError

    one, bf16 = torch.tensor(0.1), torch.bfloat16
    a, (b,) = torch.rand(4 * RANKS, 8).to(F8), right_sides(8, 16, 1)
    kwargs, plain, weight = by_flashinfer(one, bf16), torch.rand(4, 8), torch.rand(8, 4)
    mm = {"mm_out_op": torch.ops.aten.mm.out}
    declined: dict[str, Callable[[], Any]] = {
        "does not know what its mm_out_op computes, .*quantizing": lambda: gathered(
            a, [b], one, [kwargs], [bf16], mm_out_op=quantizing
        ),
        "is given use_8x4_sf_layout": lambda: gathered(a, [b], one, [{**kwargs, "use_8x4_sf_layout": True}], [bf16]),
        "is given no scale_b": lambda: gathered(a, [b], one, [{}], [bf16]),
        r"returns torch\.bfloat16, and its results are torch\.float32": lambda: gathered(
            a, [b], one, [kwargs], [torch.float32]
        ),
        "goes with an A_scale": lambda: gathered(a, [b], None, [kwargs], [bf16]),
        "goes without an A_scale": lambda: gathered(a, [b], one, [{}], [bf16], **mm),
        "the products sum over": lambda: gathered(a, [b], one, [kwargs], [bf16], gather_dim=1),
        "another dtype than its operands": lambda: gathered(plain, [weight], None, [{}], [bf16], **mm),
        "requires gradients": lambda: gathered(plain, [weight.clone().requires_grad_()], None, [{}], [None], **mm),
        "its product has no scales": lambda: scattered(plain, weight, None, {}, None, **mm),
        "partial sums in torch.float8_e4m3fn": lambda: scattered(a, b, one, by_flashinfer(one, None), None),
        "do not divide": lambda: scattered(a[1:], b, one, kwargs, bf16),
    }
    with replaced(**dict(zip(FUNCTIONS, (gather, scatter), strict=True))):
        for reason, call in declined.items():
            hi.torch.report(clear=True)
            seen.clear()
            with hi.torch.install(), warnings.catch_warnings():
                warnings.simplefilter("ignore", hi.FallbackWarning)
                assert "torch's" in str(call())
            assert len(seen) == 1, (reason, seen)
            (row,) = hi.torch.report()
            assert row.strategy == "torch"
            assert re.search(reason, row.why[0]), (reason, row)
            with hi.torch.install(strict=True), pytest.raises(hi.HostIRError, match=reason):
                call()
        with hi.torch.install(), pytest.raises(ValueError, match="Invalid gather_dim"):
            gathered(a, [b], one, [kwargs], [bf16], gather_dim=2)
        with hi.torch.install():
            replaced_by_hostir = [getattr(symm_mem, name) for name in FUNCTIONS]
        seen.clear()
        assert replaced_by_hostir[0](*[None] * 6, 0, group(), False) == gather(*[None] * 6, 0, group(), False)
        assert seen == ["gather 0"] * 2, "after uninstalling, hostir's function calls torch's"


@case
def an_operator_left_to_torch_does_not_call_hostir_again() -> None:
    """Torch's operators look these functions up by name, but hostir must not run the nested call."""
    seen: list[Any] = []
    gather, scatter = (getattr(symm_mem, name) for name in FUNCTIONS)

    def counting(function: Any) -> Any:
        @functools.wraps(function)
        def count(*args: Any, **kwargs: Any) -> Any:
            seen.append(function)
            return None, [torch.zeros(1)]

        return count

    def torchs(a: Any, bs: Any, *rest: Any, **options: Any) -> Any:
        hostirs = symm_mem._fused_all_gather_matmul_impl
        assert hostirs.__wrapped__.__wrapped__ is gather, "it wraps the counting function"
        product = torch.ops.aten.mm.out
        _, products = symm_mem._fused_all_gather_matmul_impl(
            product, a.float(), [b.float() for b in bs], None, [{}], [torch.float32], 0, group(), True
        )
        return a.new_zeros(1), [y.to(a.dtype) for y in products]

    with (
        replaced(**dict(zip(FUNCTIONS, map(counting, (gather, scatter)), strict=True))),
        mock.patch.dict(fused_all_gather_matmul.torchs, {DEVICE: torchs}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", hi.FallbackWarning)
        hi.torch.report(clear=True)
        with hi.torch.install():
            integers = torch.ones(4, 4, dtype=torch.int32)
            OPS.fused_all_gather_matmul(integers, [integers], 0, group())
    assert seen == [gather]
    assert [(row.operator, row.strategy) for row in hi.torch.report()] == [
        ("symm_mem::fused_all_gather_matmul", "torch")
    ]


@case
def functions_with_unknown_parameters_are_not_replaced_and_a_warning_says_so() -> None:
    def gather(mm_out_op: Any, A_shard: Any, layouts: Any) -> str:
        return "torch's"

    with replaced(**{FUNCTIONS[0]: gather}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with hi.torch.install() as installed:
                assert symm_mem._fused_all_gather_matmul_impl is gather
                assert [name.rpartition(".")[2] for name in installed.functions] == [FUNCTIONS[1]]
                OPS.fused_all_gather_matmul(torch.ones(2, 4), [torch.ones(4, 2)], 0, group())
        messages = [str(w.message) for w in caught if "does not take over" in str(w.message)]
        assert len(messages) == (dist.get_rank() == 0)
        assert all("has it with the parameters mm_out_op, A_shard, layouts; expected: the" in m for m in messages)
        with pytest.raises(
            hi.HostIRError, match=r"does not take over torch\.distributed\._symmetric_memory\._fused_all_"
        ):
            hi.torch.install(strict=True)
        assert "hostir has given them back" in repr(installed), "nothing is installed"


if __name__ == "__main__":
    main()
