"""The computations of the language in ATen: one function for each kind, `f(out, *operands, **options)`.

Each writes all of `out`, whatever its strides, and accumulates in f32 or better, unless the user has torch accumulate
f16 (`allow_fp16_accumulation`). Where cuBLAS divides K, it may not add up halves, as torch lets it by default: that
setting, which is one for all threads, is another than the user's while a product is issued. `out` shares no memory with
the operands of a contraction or a sum; elementwise it may be an operand.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from hostir.runtime.kernels.layout import rows

# What torch asks before it lets cuBLAS add up partial sums of K in the dtype of the result.
SUMS_OF_HALVES = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}
# What asks for it and changes it, in a quarter of the time that torch.backends takes: a pair with whether K may be
# divided at all, which torch wants to be True where halves may be added up.
_SETTINGS = {
    dtype: (getattr(torch._C, f"_get_cublas_{name}"), getattr(torch._C, f"_set_cublas_{name}"))
    for dtype, name in SUMS_OF_HALVES.items()
}
_setting = threading.Lock()  # held while it is another than the user's


def matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`out[..., N] = a[..., K] @ b[K, N]`."""
    _contract(out, a, b, None)


def linear(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """`out[..., N] = a[..., K] @ weight[N, K]^T + bias[N]`, rounded once.

    cuBLAS rounds before it adds the bias as well where a row of `out` is no multiple of 16 bytes, as
    `torch.nn.functional.linear` does.
    """
    _contract(out, a, weight.t(), bias)


def add(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """`out = x + y`, broadcast from the last axis on."""
    torch.add(x, y, out=out)


def mul(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """`out = x * y`, broadcast from the last axis on."""
    torch.mul(x, y, out=out)


def relu(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out = max(x, 0)`; NaN stays NaN."""
    torch.clamp_min(x, 0, out=out)


def gelu(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out = x * (1 + erf(x / sqrt 2)) / 2`."""
    if out.is_contiguous():
        torch.ops.aten.gelu.out(x, approximate="none", out=out)
    else:  # there torch 2.13 leaves elements of `out` unwritten on a CPU
        out.copy_(torch.nn.functional.gelu(x))


def silu(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out = x / (1 + exp(-x))`."""
    torch.ops.aten.silu.out(x, out=out)


def copy(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out = x`."""
    out.copy_(x)


def cast(out: torch.Tensor, x: torch.Tensor, *, dtype: str) -> None:
    """`out = x` in the dtype of `out`, rounded to nearest even."""
    out.copy_(x)


def sum(out: torch.Tensor, x: torch.Tensor, *, axis: int) -> None:
    """`out = x.sum(axis)`; torch accumulates f16 and bf16 in f32."""
    torch.sum(x, axis, out=out)


KERNELS: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (matmul, linear, add, mul, relu, gelu, silu, copy, cast, sum)
}
BY_CUBLAS = (matmul, linear)


def _contract(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """`out = a @ b (+ bias)`, with sums in f32.

    Where rows are not multiples of 16 bytes cuBLAS takes other kernels, and others for slices than for the whole: with
    sums of halves some have 1.4 times the error of the rest.
    """
    setting = _SETTINGS.get(out.dtype)
    if setting is None:
        _multiply(out, a, b, bias)
    elif out.is_cpu:  # a hundred times as fast where the CPU has no such arithmetic
        wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        _multiply(wide, a.float(), b.float(), None if bias is None else bias.float())
        out.copy_(wide)
    else:
        users, set_to = setting
        with _setting:
            if not users()[0]:
                _multiply(out, a, b, bias)
                return
            set_to(False, True)
            try:
                _multiply(out, a, b, bias)
            finally:
                set_to(True, True)


def _multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """As `_contract`."""
    if bias is None and out.is_contiguous() and _folds(a.shape, a.stride()):  # else torch.matmul may resize or fail
        torch.matmul(a, b, out=out)  # for less of the host's time than views of ours take
        return
    a_rows, out_rows = rows(a), rows(out)
    if a_rows is not None and out_rows is not None:
        if bias is None:
            torch.mm(a_rows, b, out=out_rows)
        else:
            torch.addmm(bias, a_rows, b, out=out_rows)
    elif a.ndim == 3:
        batched = b.expand(len(a), *b.shape)
        if bias is None:
            torch.bmm(a, batched, out=out)
        else:
            torch.baddbmm(bias, a, batched, out=out)
    else:
        for out_part, a_part in zip(out, a, strict=True):
            _multiply(out_part, a_part, b, bias)


@functools.lru_cache(maxsize=1024)
def _folds(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether torch.matmul makes one product of all leading axes: it looks at strides of axes of size 1, too."""
    return len(shape) > 1 and all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(len(shape) - 2))
