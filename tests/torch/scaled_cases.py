"""What the ranks of tests/torch/test_operators.py run of torch's scaled operators: `scaled_cases.py NAME ...`.

    DEVICE=cuda torchrun --standalone --nproc-per-node 2 tests/torch/scaled_cases.py     all cases, on GPUs
    DEVICE=cuda SIZES=70B torchrun ... tests/torch/scaled_cases.py fused_all_gather_scaled_matmul ...

The first two have the shapes and dtypes of torch's own tests (AsyncTPTest), and compare with torch's fallbacks; with
SIZES=70B, they have two batches of 4096 rows, and the widths of Llama 3 70B on 8 ranks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import hostir as hi
from tests.torch.operator_cases import DEVICE, OPS, RANKS, STRATEGIES, everywhere, group, hostirs, main, part

CASES: dict[str, Callable[[], None]] = {}
F8 = torch.float8_e4m3fn
GATHER, SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"


STRATEGIES = STRATEGIES[1:]  # one of which `auto` chooses
ROWS, WIDE, NARROW = ((2, 4096), 8192, 3584) if os.environ.get("SIZES") == "70B" else ((8, 64), 32, 16)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def close(found: torch.Tensor, true: torch.Tensor, **bounds: float) -> None:
    assert found.dtype == true.dtype
    torch.testing.assert_close(found.float(), true.float(), **bounds)
    assert found.stride() == true.stride(), (found.stride(), true.stride())


def right_sides(K: int = 32, N: int = 16, count: int = 3) -> list[torch.Tensor]:
    return [torch.rand(N, K).to(F8).t() for _ in range(count)]


def scales_of(whole: torch.Tensor, mode: str) -> torch.Tensor:
    return torch.tensor(0.1) if mode == "tensor-wise" else everywhere(torch.rand(*whole.shape[:-1], 1) + 0.1)


def unsharded(
    whole: torch.Tensor, bs: list[torch.Tensor], of_a: torch.Tensor, of_bs: list[torch.Tensor], axis: int, dtypes: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What torch's fallback computes and how it lies in memory.

    Gloo gathers no fp8, so it cannot run on CPUs; and cuBLAS lacks some of these dtypes.
    """
    rows = whole.movedim(axis, 0).contiguous()
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
        whole, bs = everywhere(torch.rand(*ROWS, WIDE)).to(F8), right_sides(WIDE, NARROW)
        a = part(whole.view(torch.uint8), axis).contiguous().view(F8)
        rows = scales_of(whole, mode)
        of_a = part(rows, axis) if mode == "row-wise-sharded" else rows
        of_bs = [torch.tensor(0.1) if mode == "tensor-wise" else torch.rand(1, NARROW) + 0.1 for _ in bs]
        for dtypes in ([torch.bfloat16] * 3,) if axis else ([None, torch.bfloat16, torch.float32],):
            given = a, bs, of_a, of_bs, axis, group(), [None] * 3, [None] * 3, dtypes, [None] * 3
            full, products = unsharded(whole, bs, rows, of_bs, axis, dtypes)
            if DEVICE == "cuda" and None not in dtypes:  # of other dtypes torch has no row-wise products
                full, products = symm_mem._fused_all_gather_scaled_matmul_fallback(*given)
            for strategy in STRATEGIES:
                with hostirs(strategy, GATHER):
                    found, cs = getattr(OPS, GATHER)(*given)
                close(found, full)
                assert torch.equal(found.float(), whole.float())
                for c, product in zip(cs, products, strict=True):
                    close(c, product, rtol=2**-3 if c.dtype == F8 else 2**-7, atol=2**-7)


@case
def fused_scaled_matmul_reduce_scatter() -> None:
    for axis, by_rows in itertools.product((0, 1), (True, False)):
        reduce_op = "avg" if axis == by_rows else "sum"
        a, (b,) = torch.rand(*ROWS, NARROW).to(F8), right_sides(NARROW, WIDE, 1)
        of_a, of_b = (torch.rand(*ROWS, 1), torch.rand(1, WIDE)) if by_rows else [torch.tensor(0.1)] * 2
        given = a, b, of_a, of_b, reduce_op, axis, axis, group()
        dtype = torch.float16 if axis else torch.bfloat16  # a mean of float16 is computed from sums in f32
        true = symm_mem._fused_scaled_matmul_reduce_scatter_fallback(*given, [*ROWS, WIDE], out_dtype=dtype)
        exact = (a.double() * of_a) @ (b.double() * of_b)
        dist.all_reduce(exact)
        exact = part(exact / (RANKS if reduce_op == "avg" else 1), axis)
        for strategy in STRATEGIES:
            with hostirs(strategy, SCATTER):
                found = getattr(OPS, SCATTER)(*given, [*ROWS, WIDE], out_dtype=dtype)
            close(found, true, rtol=2**-6, atol=2**-6)
            assert (found.double() - exact).norm() <= 1.1 * (true.double() - exact).norm() + 1e-3 * exact.norm()


def widened(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What numbers with a scale for each 128 of a row stand for."""
    return x.double() * scale.repeat_interleave(128, -1).double()


@case
def scales_of_blocks() -> None:
    """Which torch's own functions refuse: a scale for 1 x 128 numbers of A, and one for 128 x 128 of B."""
    K, N = 256, 384
    for axis, sharded in itertools.product((0, 1), (False, True)):
        whole, bs = everywhere(torch.rand(2 * RANKS, 4 * RANKS, K)).to(F8), right_sides(K, N, 2)
        of_rows, of_bs = (
            everywhere(torch.rand(*whole.shape[:-1], K // 128) + 0.1),
            [torch.rand(K // 128, N // 128) + 0.1 for _ in bs],
        )
        wide = [widened(b.t(), t.t().repeat_interleave(128, 0)).t() for b, t in zip(bs, of_bs, strict=True)]
        a = part(whole.view(torch.uint8), axis).contiguous().view(F8)
        of_a = part(of_rows, axis) if sharded else of_rows
        for strategy in STRATEGIES:
            with hostirs(strategy, GATHER):
                dtypes = torch.bfloat16, torch.float32
                _, cs = getattr(OPS, GATHER)(
                    a, bs, of_a, of_bs, axis, group(), [None] * 2, [None] * 2, dtypes, [None] * 2
                )
            for c, b in zip(cs, wide, strict=True):
                torch.testing.assert_close(c.double(), widened(whole, of_rows) @ b, rtol=2**-7, atol=2**-7)
        if sharded:
            continue
        mine = torch.rand(2 * RANKS, 4 * RANKS, K).to(F8)
        exact = widened(mine, of_rows) @ wide[0]
        dist.all_reduce(exact)
        for strategy in STRATEGIES:
            with hostirs(strategy, SCATTER):
                given = mine, bs[0], of_rows, of_bs[0], "sum", axis, axis, group(), [*mine.shape[:-1], N]
                found = getattr(OPS, SCATTER)(*given, out_dtype=torch.bfloat16)
            torch.testing.assert_close(found.double(), part(exact, axis), rtol=2**-6, atol=2**-6)


@case
def reshape_scaled_matmul_reshape_and_scatter() -> None:
    """Flattened rows, as the compiler's pass passes them: the axis is that of `output_shape`, the scales are flat."""
    a, (b,) = torch.rand(2, 16, 32).to(F8).flatten(0, 1), right_sides(32, 64, 1)
    of_a, of_b = torch.rand(32, 1), torch.rand(1, 64)
    bias = torch.rand(64).bfloat16()
    for axis in (0, 1):
        given = a, b, of_a, of_b, "sum", axis, 0, group(), [2 * RANKS, 16 // RANKS, 64] if axis == 0 else [2, 16, 64]
        more: dict[str, Any] = {"bias": bias, "out_dtype": torch.float32, "use_fast_accum": True}
        if DEVICE == "cuda":  # of f32 results with a bias torch has none there
            exact = ((a.float() * of_a) @ (b.float() * of_b) + bias).view(given[-1])
            dist.all_reduce(exact)
            true, tolerance = part(exact, axis).contiguous(), 2**-9  # fast sums
        else:
            true = symm_mem._fused_scaled_matmul_reduce_scatter_fallback(*given[:-1], [*given[-1]], **more)
            tolerance = 1e-5
        for strategy in STRATEGIES:
            with hostirs(strategy, SCATTER):
                found = getattr(OPS, SCATTER)(*given, **more)
            close(found, true, rtol=tolerance, atol=tolerance)


@case
def biases_result_scales_and_dtypes() -> None:
    whole, bs = everywhere(torch.rand(8 * RANKS, 32)).to(F8), right_sides()
    a, of_a = part(whole.view(torch.uint8), 0).contiguous().view(F8), torch.rand(8, 1)
    of_bs = [torch.rand(1, 16) for _ in bs]
    biases = [torch.rand(16).bfloat16(), None, torch.rand(16).bfloat16()]
    results = [None, torch.tensor(0.5), None]
    dtypes = [torch.float32, F8, torch.bfloat16]
    everyones = [torch.empty_like(of_a) for _ in range(RANKS)]
    dist.all_gather(everyones, of_a)
    rows = whole.float() * torch.cat(everyones)
    for strategy in STRATEGIES:
        with hostirs(strategy, GATHER):
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
        given = {"out_dtype": torch.bfloat16, **more}
        getattr(OPS, SCATTER)(a, b, of_a, of_b, "sum", 0, 0, group(), [4, 16], **given)

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


if __name__ == "__main__":
    main(CASES)
