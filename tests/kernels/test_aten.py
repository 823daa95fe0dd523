from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.ir.op import REGISTRY
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import TensorOp
from hostir.kernels import aten, devices
from hostir.kernels.aten import KERNELS
from hostir.kernels.table import ADDING, kernel_for, kernel_table
from tests.kernels.checking import assert_as_accurate, assert_only_view_written, embedded, filled, user_allows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "copy": torch.clone,
}
NUMBERS: dict[str, tuple[str, Callable[[torch.Tensor, float], torch.Tensor]]] = {
    "scale": ("factor", torch.mul),
    "offset": ("amount", torch.add),
}


def layout(draw: st.DrawFn, axes: int) -> dict[str, object]:
    """Draw a layout: axes in any order in memory, padding, and an offset."""
    return {
        "order": draw(st.permutations(range(axes))),
        "pad": [draw(st.integers(0, 2)) for _ in range(axes)],
        "offset": draw(st.integers(0, 1)),
    }


@pytest.mark.parametrize("users", [True, False])
@pytest.mark.parametrize("dtype", list(aten.REDUCED_PRECISION))
def test_16_bit_sums_of_cublas_are_off_while_a_product_is_issued_and_then_restored(
    dtype: torch.dtype, users: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, seen, multiply = aten.REDUCED_PRECISION[dtype], [], aten._multiply

    def spy(*operands: torch.Tensor) -> None:
        cublas = torch.backends.cuda.matmul
        seen.append((getattr(cublas, setting), getattr(cublas, f"{setting}_split_k")))
        multiply(*operands)

    monkeypatch.setattr(aten, "_multiply", spy)
    out, a, b, bias = (torch.empty(n, dtype=dtype, device="meta") for n in ((4, 8), (4, 16), (16, 8), (8,)))
    with user_allows(setting, users):
        aten.matmul(out, a, b)
        aten._with_wide_sums(spy, out, a, b)  # as `matmul_of_rows` does
        aten.linear(out, a, b.t(), bias)
        with pytest.raises(RuntimeError):
            aten.matmul(out, a, b[:3])
        assert getattr(torch.backends.cuda.matmul, setting) is users
    assert seen == [(False, True)] * 4  # K may be divided


@settings(max_examples=50)
@given(st.data())
def test_norms_of_rows_of_any_layout_equal_torchs_norm_rounded_once(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    dtype, weighted, eps = draw(st.sampled_from(DTYPES)), draw(st.booleans()), draw(st.sampled_from([0.1, 1e-6]))
    shape = [*draw(st.lists(st.integers(1, 4), max_size=2)), draw(st.integers(1, 40))]
    x = filled(shape, dtype, **layout(draw, len(shape)))
    weight = filled(shape[-1:], dtype, **layout(draw, 1)) if weighted else None
    out, buffer = embedded(shape, dtype, **layout(draw, len(shape)))
    KERNELS["rms_norm"](out, x, weight, eps=eps)
    assert_only_view_written(out, buffer)
    wide = torch.nn.functional.rms_norm(x.float(), shape[-1:], None if weight is None else weight.float(), eps)
    torch.testing.assert_close(out, wide.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@settings(max_examples=150)
@given(st.data())
def test_contractions_of_any_layout_are_as_accurate_as_torch(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    dtype, linear, biased = draw(st.sampled_from(DTYPES)), draw(st.booleans()), draw(st.booleans())
    lead = draw(st.lists(st.integers(1, 4), max_size=3))
    n, k = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    a = filled([*lead, k], dtype, **layout(draw, len(lead) + 1))
    b = filled([n, k] if linear else [k, n], dtype, **layout(draw, 2))
    out, buffer = embedded([*lead, n], dtype, **layout(draw, len(lead) + 1))
    weight = b.t() if linear else b
    exact, torchs = a.double() @ weight.double(), a @ weight
    magnitude = a.double().abs() @ weight.double().abs()
    if linear and biased:
        bias = filled([n], dtype, **layout(draw, 1))
        KERNELS["linear"](out, a, b, bias)
        exact, torchs, magnitude = exact + bias.double(), torchs + bias, magnitude + bias.double().abs()
    else:
        KERNELS["linear" if linear else "matmul"](out, a, b)
    assert_only_view_written(out, buffer)
    assert_as_accurate(out, torchs, exact, magnitude)


@settings(max_examples=100)
@given(st.data())
def test_batched_products_of_any_layout_are_as_accurate_as_torch(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    dtype, lead = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    m, n, k = (draw(st.integers(0, 9)) for _ in range(3))
    a = filled([*lead, m, k], dtype, **layout(draw, len(lead) + 2))
    b = filled([*lead, k, n], dtype, **layout(draw, len(lead) + 2))
    out, buffer = embedded([*lead, m, n], dtype, **layout(draw, len(lead) + 2))
    KERNELS["batched_matmul"](out, a, b)
    assert_only_view_written(out, buffer)
    assert_as_accurate(out, a @ b, a.double() @ b.double(), a.double().abs() @ b.double().abs())


@pytest.mark.parametrize(
    ("a", "out"),
    [
        (torch.randn(2, 3, 8), torch.empty(2, 4, 5)[:, :3]),
        (torch.randn(2, 3, 8), torch.empty(3, 2, 5).transpose(0, 1)),
        (torch.randn(2, 4, 8)[:, :3], torch.empty(2, 3, 5)),
        (torch.randn(1, 6, 8).transpose(0, 1), torch.empty(6, 1, 5)),
        (torch.randn(1, 6, 8)[:, :3], torch.empty(1, 3, 5)),
        (torch.randn(8), torch.empty(5)),
        (torch.randn(2, 3, 4, 8), torch.empty(2, 3, 4, 5)),
    ],
)
def test_products_of_padded_transposed_and_dense_rows_are_written_in_place(a: torch.Tensor, out: torch.Tensor) -> None:
    b, where, strides = torch.randn(8, 5), out.data_ptr(), out.stride()
    KERNELS["matmul"](out.fill_(torch.nan), a, b)
    assert (out.data_ptr(), out.stride()) == (where, strides)
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize(
    ("a", "products"),
    [
        (torch.randn(2, 3, 4, 8), ["matmul"]),
        (torch.randn(1, 2, 3, 8), ["matmul"]),
        (torch.randn(6, 8), ["matmul"]),
        (torch.randn(1, 6, 8).transpose(0, 1), ["mm"]),  # torch.matmul would make six products
        (torch.randn(2, 4, 8)[:, :3], ["bmm"]),
    ],
)
def test_rows_with_a_single_stride_take_one_product(
    a: torch.Tensor, products: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    b, out = torch.randn(8, 5), torch.empty(*a.shape[:-1], 5)
    layouts = [(tuple(x.shape), x.stride()) for x in (out, a, b)]
    assert aten.takes_rows(*layouts) is (products == ["matmul"])
    if aten.takes_rows(*layouts):
        aten.matmul_of_rows(out.fill_(torch.nan), a, b)
        torch.testing.assert_close(out, a @ b)
    seen: list[str] = []

    def noted(name: str) -> Callable[..., torch.Tensor]:
        kernel = getattr(torch, name)

        def run(*operands: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            seen.append(name)
            return kernel(*operands, out=out)

        return run

    for name in ("matmul", "mm", "bmm"):
        monkeypatch.setattr(torch, name, noted(name))
    KERNELS["matmul"](torch.empty(*a.shape[:-1], 5), a, torch.randn(8, 5))
    assert seen == products


@settings(max_examples=100)
@given(st.data())
def test_elementwise_kernels_of_any_layout_are_as_accurate_as_torch(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    dtype, name = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([*ELEMENTWISE, *NUMBERS, "add", "mul"]))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    x = filled(shape, dtype, **layout(draw, len(shape)))
    out, buffer = embedded(shape, dtype, **layout(draw, len(shape)))
    if name in ELEMENTWISE:
        f = ELEMENTWISE[name]
        KERNELS[name](out, x)
        torchs, exact = f(x), f(x.double())
    elif name in NUMBERS:
        (option, torchs_kernel), number = NUMBERS[name], draw(st.sampled_from([0.1, -3.0, 1e-3, 0.0]))
        KERNELS[name](out, x, **{option: number})
        torchs, exact = torchs_kernel(x.float(), number).to(dtype), torchs_kernel(x.double(), number)
    else:
        short = [draw(st.sampled_from([1, size])) for size in shape[draw(st.integers(0, len(shape))) :]]
        y = filled(short, dtype, **layout(draw, len(short)))
        KERNELS[name](out, x, y)
        torchs, exact = (x + y, x.double() + y.double()) if name == "add" else (x * y, x.double() * y.double())
    assert_only_view_written(out, buffer)
    assert_as_accurate(out, torchs, exact, exact.abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("inner", [0, 1])
def test_sums_are_accumulated_in_f32(dtype: torch.dtype, axis: int, inner: int) -> None:
    shape = (3000, 40) if axis == 0 else (40, 3000)
    x = torch.rand(shape).to(dtype) + 1  # one sign: an f16 or bf16 sum would stop growing long before the end
    x = x if inner else x.t().contiguous().t()
    out, buffer = embedded((40,), dtype, pad=[3])
    KERNELS["sum"](out, x, axis=axis)
    exact = x.double().sum(axis)
    assert_only_view_written(out, buffer)
    assert_as_accurate(out, x.float().sum(axis).to(dtype), exact, exact)


def test_cast_rounds_to_nearest_even() -> None:
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1e30, -0.0])
    out = torch.full((4,), float("nan"), dtype=torch.bfloat16)
    KERNELS["cast"](out, x, dtype="bf16")
    assert torch.equal(out, torch.tensor([1, 1 + 2**-6, 1e30, -0.0]).bfloat16())


def test_relu_keeps_nan() -> None:
    out = torch.zeros(2)
    KERNELS["relu"](out, torch.tensor([float("nan"), -1.0]))
    assert out[0].isnan()
    assert out[1] == 0


def test_every_computation_of_the_language_has_a_kernel() -> None:
    computations = {keyword for keyword, statement in REGISTRY.items() if issubclass(statement, TensorOp)}
    assert computations <= kernel_table("aten", "cpu").keys()


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(HostIRError, match=r"(?s)unknown kernels 'cudnn'.*one of: auto, triton, cublas, aten"):
        kernel_table("cudnn", "cpu")


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "INTERPRETED", False)
    with pytest.raises(HostIRError, match=r"(?s)'triton' on a CPU.*TRITON_INTERPRET=1"):
        kernel_table("triton", "cpu")
    assert set(kernel_table("triton", "cuda")) == set(KERNELS) | {
        *("matmul_pushed", "linear_pushed", "scaled_matmul_pushed"),
        "matmul_by_blocks",
        "linear_by_blocks",
        "scaled_matmul",
        "scaled_matmul_by_blocks",
        "grouped_matmul_by_blocks",
        "sum_by_blocks",
        ADDING,
    }


def test_cublas_computes_products_that_are_added_to_their_result_on_gpus() -> None:
    table = kernel_table("triton", "cuda")
    adding, plain = (kernel_for(table, torch.bfloat16, "matmul", operands) for operands in (3, 2))
    assert adding is aten.matmul
    assert plain is table["matmul"] is not aten.matmul
    assert kernel_for(table, torch.bfloat16, "linear", 3) is table["linear"]
    assert kernel_for(table, torch.float64, "matmul", 3) is KERNELS["matmul"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_operands_are_multiplied_in_f32_and_rounded_once(dtype: torch.dtype) -> None:
    a, weight, bias = torch.randn(3, 5, 700).to(dtype), torch.randn(9, 700).to(dtype), torch.randn(9).to(dtype)
    out = torch.full((3, 2, 5, 9), torch.nan, dtype=dtype)[:, 1]
    kernels = kernel_table("aten", "cpu")
    kernels["linear"](out, a, weight, bias)
    exact = a.double() @ weight.double().t() + bias.double()
    assert torch.equal(out, (a.float() @ weight.float().t() + bias.float()).to(dtype))
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5, aten.IN_ORDER])
def test_few_numbers_are_added_in_order_in_any_layout(dtype: torch.dtype, count: int) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        x = torch.randn(count, 7, 33).to(dtype).permute(order).contiguous().permute([order.index(i) for i in range(3)])
        expected = torch.zeros(7, 33)
        for part in x:
            expected = expected + part.float()
        out = torch.full((7, 33), float("nan"), dtype=dtype)
        KERNELS["sum"](out, x, axis=0)
        assert torch.equal(out, expected.to(dtype))
