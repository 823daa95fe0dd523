"""fp8 on CPUs: products and quantization give torch's values, also for NaN, infinities and zeros."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hostir.ir.source import HostIRError
from hostir.kernels.aten import KERNELS, LEAST_SCALE
from hostir.kernels.contractions import BY_BLOCKS

F8, F8_WIDE = torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = float("nan"), float("inf")


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    s: torch.Tensor,
    t: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.full((*a.shape[:-1], b.shape[1]), NAN, dtype=dtype)
    KERNELS["scaled_matmul"](out, a, b, s, t, bias)
    return out


def quantized(x: torch.Tensor, dtype: str, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.full((*x.shape[:-1], x.shape[-1] // block if block else 1), NAN)
    KERNELS["row_scales"](scale, x, dtype=dtype, block=block)
    q = torch.empty(x.shape, dtype=F8 if dtype == "f8e4m3" else F8_WIDE)
    KERNELS["quantize"](q, x, scale, dtype=dtype)
    return q, scale


def needs_torch_with_scales_of_rows() -> None:
    """Skip the test if torch cannot multiply with a scale for each row on CPUs."""
    if torch.__version__ < "2.13":
        pytest.skip(f"torch {torch.__version__} multiplies with scales of rows on GPUs only")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("by_rows", [True, False])
def test_a_product_is_as_exact_as_torchs(dtype: torch.dtype, by_rows: bool) -> None:
    a, b = torch.randn(32, 96).to(F8), torch.randn(48, 96).to(F8).t()
    s, t = (torch.rand(32, 1), torch.rand(1, 48)) if by_rows else (torch.rand(1, 1), torch.rand(1, 1))
    bias = torch.randn(48).to(dtype)
    exact = (a.double() * s) @ (b.double() * t) + bias
    if by_rows:
        needs_torch_with_scales_of_rows()
    ours, torchs = product(a, b, s, t, dtype, bias), torch._scaled_mm(a, b, s, t, bias=bias, out_dtype=dtype)
    assert (ours - exact).norm() <= 1.1 * (torchs - exact).norm() + torch.finfo(torch.float32).eps * exact.norm()


def test_special_values_give_torchs_results() -> None:
    needs_torch_with_scales_of_rows()
    rows = torch.ones(6, 32)
    rows[1], rows[2, 3], rows[3, 3], rows[4, :2] = 0, NAN, INF, torch.tensor([INF, -INF])
    columns = torch.ones(16, 32)
    columns[1], columns[2, 0], columns[3, 5] = 0, NAN, 0
    for narrow, scale in itertools.product((F8, F8_WIDE), (1.0, 0.0, NAN, -2.0)):
        a, b = rows.to(narrow), columns.to(F8).t()
        s, t = torch.full((6, 1), 1.0), torch.full((1, 16), 1.0)
        s[0], s[1], t[0, 4] = scale, scale, scale
        ours, torchs = product(a, b, s, t, torch.bfloat16), torch._scaled_mm(a, b, s, t, out_dtype=torch.bfloat16)
        torch.testing.assert_close(ours, torchs, equal_nan=True, rtol=0, atol=0)


def test_an_infinite_scale_multiplies_the_sum_as_on_a_gpu() -> None:
    a, b = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).to(F8), torch.tensor([[1.0, 1.0], [0.0, -1.0]]).to(F8)
    out = product(a, b, torch.full((2, 1), INF), torch.ones(1, 2), torch.float32)
    assert out[0, 0] == INF
    assert out.flatten()[1:].isnan().all()  # sums of 0; on a CPU torch scales each factor


@pytest.mark.parametrize("groups", [0, 2])
def test_special_values_with_scales_of_tensors_and_blocks_give_float32s_results(groups: int) -> None:
    a, b = torch.ones(6, 256), torch.ones(256, 128)
    a[1], a[2, 3], a[3, 3], a[4, 130], b[:, 1], b[2, 5] = 0, NAN, INF, -INF, 0, NAN
    for scale in (1.0, 0.0, NAN, -2.0):
        s, t = torch.ones(6, 2) if groups else torch.full((1, 1), scale), torch.ones(groups or 1, 1)
        if groups:
            s[0, 1] = s[1, 1] = s[3, 0] = scale
        x, y = a.to(F8_WIDE), b.to(F8_WIDE)
        each = s.repeat_interleave(128, 1) if groups else s
        exact = ((x.float() * each) @ (y.float() * t[0])).bfloat16()
        first = product(x, y, s, t, torch.bfloat16)
        torch.testing.assert_close(first, exact, equal_nan=True, rtol=0, atol=0)
        assert torch.equal(first.view(torch.int16), product(x, y, s, t, torch.bfloat16).view(torch.int16))


def test_blocks_are_scaled_one_by_one() -> None:
    a, b, s, t = torch.randn(8, 256).to(F8), torch.randn(256, 384).to(F8), torch.rand(8, 2), torch.rand(2, 3)
    exact = (a.double() * s.repeat_interleave(128, 1)) @ (
        b.double() * t.repeat_interleave(128, 0).repeat_interleave(128, 1)
    )
    torch.testing.assert_close(product(a, b, s, t, torch.float32), exact.float())


@pytest.mark.parametrize(("dtype", "step"), [("f8e4m3", 2**-4), ("f8e5m2", 2**-3)])
@pytest.mark.parametrize("block", [0, 128])
def test_quantization_errors_are_at_most_half_a_step_of_the_dtype(dtype: str, step: float, block: int) -> None:
    for input_dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(16, 256) * torch.logspace(-20, 20, 16)[:, None]).to(input_dtype)
        q, scale = quantized(x, dtype, block)
        each = scale.repeat_interleave(block, -1) if block else scale
        error = (q.double() * each - x.double()).abs()
        assert (error <= step * x.double().abs() + each * 2**-10).all()
        largest = q.float().unflatten(-1, (-1, block or 256)).abs().amax(-1)
        assert (largest == torch.finfo(q.dtype).max).all()


class DividesAsCuda(TorchDispatchMode):
    """Replaces a division by a Python number by a multiplication with its rounded reciprocal, as torch does on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            return args[0] * (torch.ones_like(args[0]) / torch.full_like(args[0], args[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2"])
def test_scales_are_rounded_once_although_torch_multiplies_by_reciprocals(dtype: str) -> None:
    x = torch.randn(512, 256).bfloat16()
    exact = x.double().abs().amax(-1, keepdim=True) / {"f8e4m3": 448, "f8e5m2": 57344}[dtype]
    with DividesAsCuda():
        q, scale = quantized(x, dtype)
    assert torch.equal(scale, exact.float())
    assert torch.equal(q.float(), quantized(x, dtype)[0].float())


def test_quantization_of_zero_rows_and_special_values() -> None:
    x = torch.ones(5, 128)
    x[0], x[1, 0], x[2, 0], x[3] = 0, NAN, INF, 1e-45
    q, scale = quantized(x, "f8e4m3")
    for row_scale, expected in zip(scale[:4, 0], (LEAST_SCALE, NAN, INF, LEAST_SCALE), strict=True):
        torch.testing.assert_close(row_scale, torch.tensor(expected), equal_nan=True, rtol=0, atol=0)
    assert not q[0].float().any()
    assert q[1].isnan().all()
    assert q[2, 0].isnan()
    assert not q[2, 1:].float().any()
    assert q[3].float().isfinite().all()
    assert (q[4].float() == 448).all()


@pytest.mark.parametrize(("special", "scale"), [(NAN, NAN), (INF, INF), (0.0, LEAST_SCALE)])
def test_a_special_value_in_one_row_reaches_the_scale_of_the_tensor(special: float, scale: float) -> None:
    x, largest = torch.zeros(4, 128), torch.empty(1, 1)
    x[2, 5] = special
    KERNELS["largest"](largest, quantized(x, "f8e4m3")[1])
    torch.testing.assert_close(largest, torch.full((1, 1), scale), equal_nan=True, rtol=0, atol=0)


def test_values_saturate_if_the_scale_is_too_small() -> None:
    x, q = torch.tensor([[1000.0, -1000.0, 1.0, INF]]), torch.empty(1, 4, dtype=F8)
    KERNELS["quantize"](q, x, torch.ones(1, 1), dtype="f8e4m3")
    assert q.float().tolist() == [[448.0, -448.0, 1.0, 448.0]]


def test_scales_that_would_be_copied_before_their_rows_arrive_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostir.kernels.flags.ready import ReadyFlags
    from hostir.kernels.matmul import matmul  # loads Triton

    launched: list[Any] = []
    monkeypatch.setattr(matmul, "multiply", lambda *operands, **options: launched.append(operands))
    a, b = torch.zeros(3, 2, 128, dtype=F8).transpose(0, 1), torch.zeros(16, 128, dtype=F8).t()
    scales = torch.zeros(3, 2, 1).transpose(0, 1)
    ready = ReadyFlags(torch.zeros(3, dtype=torch.int32), 1, torch.zeros(3, 2, dtype=torch.int64), first=1)
    out = torch.zeros(2, 3, 16)
    for own_rows in (None, torch.zeros(2, 128, dtype=F8)):  # these rows are multiplied first, without a wait
        with pytest.raises(HostIRError, match="have no single stride"):
            BY_BLOCKS["scaled_matmul_by_blocks"](out, a, b, scales, torch.zeros(1, 16), ready=ready, own_rows=own_rows)
    assert not launched
