"""Implement each computation of the language with ATen, as a function `f(out, *operands, **options)`.

Each function writes all of `out`, whatever its strides. It accumulates in f32 or better, unless the user allows torch
to accumulate in f16 (`allow_fp16_accumulation`). By default torch lets cuBLAS add up the parts of split-K in 16 bits. A
contraction switches these 16-bit sums off for all threads while it issues its product, and then restores the user's
setting.

`out` must not share memory with the operands of a contraction or a sum. In an elementwise computation, `out` may be one
of the operands.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence

import torch

from hostir.ir.regions import is_dense
from hostir.kernels.grouped_library import (
    grouped_by_library,
    outer_by_library,
    takes_grouped,
    valid_index,
    valid_offsets,
)
from hostir.kernels.layout import collapse, rows
from hostir.kernels.matmul.tiles import SCALE_BLOCK
from hostir.kernels.scaled_library import scaled_by_library
from hostir.kernels.scales import scaled_matmul_reference

# torch's settings that let cuBLAS add up the parts of split-K in the dtype of the result.
REDUCED_PRECISION = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}
# The getter and the setter of each setting. They take a quarter of the time of torch.backends. A value is a pair: True
# if 16-bit sums are allowed, and True if split-K is allowed. torch requires the second to be True if the first is.
_SETTINGS = {
    dtype: (getattr(torch._C, f"_get_cublas_{name}"), getattr(torch._C, f"_set_cublas_{name}"))
    for dtype, name in REDUCED_PRECISION.items()
}
_setting = threading.Lock()  # held while a setting differs from the user's

ShapeAndStrides = tuple[tuple[int, ...], tuple[int, ...]]  # the shape and the strides of a tensor

# Up to this many numbers are added one by one, because the order in which torch adds depends on layouts. For more
# numbers, torch's sum is more accurate.
IN_ORDER = 16


def matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None = None) -> None:
    """`out[..., N] = a[..., K] @ b[K, N] + addend[..., N]`, with sums in f32.

    The addend is a vector `[N]`, or it has the shape of `out`. It may be `out` itself. The result is rounded once. But
    before cuBLAS adds an addend with the shape of `out`, it rounds the product, too.

    Sums in f32 matter most if the size of a row is not a multiple of 16 bytes. For such rows cuBLAS chooses other
    kernels, and it may choose one kernel for a slice of the rows and another for all rows. With 16-bit sums, some of
    these kernels have 1.4 times the error of others.
    """
    _with_wide_sums(_multiply, out, a, b, addend)


def _with_wide_sums(
    multiply: Callable[..., None],
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None = None,
) -> None:
    """Call `multiply(out, a, b, addend)` while torch's settings do not allow sums in 16 bits."""
    if out.dtype not in _SETTINGS:
        multiply(out, a, b, addend)
    elif out.is_cpu:  # f32 is a hundred times as fast on CPUs without 16-bit arithmetic
        wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        multiply(wide, a.float(), b.float(), None if addend is None else addend.float())
        out.copy_(wide)
    else:
        users, set_to = _SETTINGS[out.dtype]
        with _setting:
            if not users()[0]:
                multiply(out, a, b, addend)
                return
            set_to(False, True)
            try:
                multiply(out, a, b, addend)
            finally:
                set_to(True, True)


def linear(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """`out[..., N] = a[..., K] @ weight[N, K]^T + bias[N]`, rounded once.

    If the size of a row of `out` is not a multiple of 16 bytes, cuBLAS rounds twice: before and after it adds the bias.
    `torch.nn.functional.linear` does the same.
    """
    matmul(out, a, weight.t(), bias)


def batched_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`out[..., M, N] = a[..., M, K] @ b[..., K, N]` for each index of the leading axes, rounded once."""
    matmul(out, a, b)


def grouped_matmul(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    index: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
) -> None:
    """`out[..., t, :] = x[..., t, :] @ w[e]` for the rows t of group e; rows of no group become 0; rounded once.

    With `index`, the rows are `x[..., index[..., t], :]`, as `permute_rows` orders them. Operands in fp8 have scales:
    `scale_x[..., T, 1]`, which the index orders, too, and `scale_w[E, 1, N]`.
    `torch._grouped_mm` computes it if it supports the operands. Otherwise there is one product for each group, and the
    host waits for the offsets. Raises HostIRError for offsets that decrease or lie outside the rows, except if
    `torch._grouped_mm` computes the result: it limits such offsets to the rows.
    """
    if index is not None:
        index = valid_index(index, x.shape[-2])
        x, scale_x = _rows_at(x, index), None if scale_x is None else _rows_at(scale_x, index)
    if offsets.ndim > 1:
        scales = itertools.repeat(None, len(out)) if scale_x is None else scale_x
        for out_part, x_part, offsets_part, scale in zip(out, x, offsets, scales, strict=True):
            grouped_matmul(out_part, x_part, w, offsets_part, None, scale, scale_w)
    elif scale_x is None and takes_grouped(out, x, w):
        grouped_by_library(out, x, w, offsets)
    else:
        begins = valid_offsets(offsets, len(x))
        out[: begins[0]].zero_()
        out[begins[-1] :].zero_()
        for group, (begin, end) in enumerate(itertools.pairwise(begins)):
            if begin == end:
                continue
            if scale_x is None or scale_w is None:
                matmul(out[begin:end], x[begin:end], w[group])
            else:
                scaled_matmul(out[begin:end], x[begin:end], w[group], scale_x[begin:end], scale_w[group])


def grouped_outer(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, addend: torch.Tensor | None = None
) -> None:
    """`out[e] = sum of the outer products of x[t] and y[t] over the rows t of group e, + addend[e]`, rounded once.

    With one leading axis, the sum is also over this axis. The addend may be `out` itself. `torch._grouped_mm` computes
    the sums if it supports the operands. Otherwise the host waits for the offsets, and there is one product for each
    group. Raises HostIRError for invalid offsets as `grouped_matmul` does.
    """
    sources = [(x, y, offsets)] if x.ndim == 2 else list(zip(x, y, offsets, strict=True))
    wide = torch.promote_types(out.dtype, torch.float32)
    total = out if len(sources) == 1 and addend is None else torch.zeros(out.shape, dtype=wide, device=out.device)
    for x_rows, y_rows, begins in sources:
        part = total if len(sources) == 1 and addend is None else torch.empty_like(total)
        _outer(part, x_rows, y_rows, begins)
        if part is not total:
            total += part
    if total is not out:
        out.copy_(total if addend is None else total + addend)


def _outer(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> None:
    """Compute `out[e] = x[rows of e]^T @ y[rows of e]` for each group e. The dtype of `out` may be wider."""
    if takes_grouped(out, x.t(), y):
        outer_by_library(out, x, y, offsets)
        return
    x, y = x.to(out.dtype), y.to(out.dtype)
    for total, (begin, end) in zip(out, itertools.pairwise(valid_offsets(offsets, len(x))), strict=True):
        if begin < end:
            matmul(total, x[begin:end].t(), y[begin:end])
        else:
            total.zero_()


def permute_rows(out: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> None:
    """`out[..., s, :] = x[..., index[..., s], :]`.

    Raises HostIRError for an index outside the rows, on a CPU. On a GPU, such an index is limited to the rows.
    """
    out.copy_(_rows_at(x, valid_index(index, x.shape[-2])))


def combine_rows(out: torch.Tensor, y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
    """`out[..., t, :] = sum over j of weights[..., t, j] * y[..., index[..., t, j], :]`, in this order, rounded once.

    It is computed in f32 or better. An index outside the rows is treated as in `permute_rows`.
    """
    wide, index = torch.promote_types(out.dtype, torch.float32), valid_index(index, y.shape[-2])
    total = torch.zeros(out.shape, dtype=wide, device=out.device)
    for j in range(index.shape[-1]):
        total += weights[..., j, None].to(wide) * _rows_at(y, index[..., j])
    out.copy_(total)


def _rows_at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `x[..., index[..., s], :]` for each s."""
    if x.dtype in FP8.values():  # torch has no kernels for these
        return _rows_at(x.view(torch.uint8), index).view(x.dtype)
    if x.ndim == 2:
        return x.index_select(0, index)
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


def add(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """`out = x + y`. Shapes broadcast as in torch."""
    torch.add(x, y, out=out)


def mul(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """`out = x * y`. Shapes broadcast as in torch."""
    torch.mul(x, y, out=out)


def relu(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out = max(x, 0)`; NaN stays NaN."""
    torch.clamp_min(x, 0, out=out)


def gelu(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out = x * (1 + erf(x / sqrt 2)) / 2`."""
    if out.is_contiguous():
        torch.ops.aten.gelu.out(x, approximate="none", out=out)
    else:  # on a CPU, torch 2.13 leaves elements of a strided `out` unwritten
        out.copy_(torch.nn.functional.gelu(x))


def silu(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out = x / (1 + exp(-x))`."""
    torch.ops.aten.silu.out(x, out=out)


def scale(out: torch.Tensor, x: torch.Tensor, *, factor: float) -> None:
    """`out = x * factor`, in f32 or better, rounded once."""
    if out.is_cpu and out.itemsize < 4:  # on a CPU, torch may first round the factor to the dtype
        out.copy_(x.float().mul_(factor))
    else:
        torch.mul(x, factor, out=out)


def offset(out: torch.Tensor, x: torch.Tensor, *, amount: float) -> None:
    """`out = x + amount`, in f32 or better, rounded once."""
    if out.is_cpu and out.itemsize < 4:
        out.copy_(x.float().add_(amount))
    else:
        torch.add(x, amount, out=out)


def copy(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out = x`."""
    out.copy_(x)


def cast(out: torch.Tensor, x: torch.Tensor, *, dtype: str) -> None:
    """`out = x` in the dtype of `out`, rounded to nearest even."""
    out.copy_(x)


def sum(
    out: torch.Tensor, x: torch.Tensor, addend: torch.Tensor | None = None, *, axis: int, activation: str = ""
) -> None:
    """`out = activation(x.sum(axis) + addend)`, in f32 or better, rounded once.

    If `axis` has at most IN_ORDER elements, they are added one after another, from the first to the last. On a GPU,
    this holds only if there is an addend or an activation.
    """
    if 0 < x.shape[axis] <= IN_ORDER and (out.is_cpu or addend is not None or activation):
        add_up(out, x.unbind(axis), addend, activation)
        return
    if addend is None and not activation:
        torch.sum(x, axis, out=out)
        return
    total = torch.sum(x, axis, dtype=torch.promote_types(x.dtype, torch.float32))
    add_up(out, (total,), addend, activation)


def add_up(
    out: torch.Tensor, parts: Sequence[torch.Tensor], addend: torch.Tensor | None = None, activation: str = ""
) -> None:
    """`out = activation(parts[0] + parts[1] + ... + addend)`, in this order and in f32 or better, rounded once."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in (*parts[1:], *(() if addend is None else (addend,))):
        total += part
    if activation:
        KERNELS[activation](total, total)
    out.copy_(total)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float) -> None:
    """`out = x / sqrt(mean(x^2) + eps) * weight` for each row of `x`, in f32 or better, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    total = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(total if weight is None else total * weight)


FP8 = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
LEAST_SCALE = 2.0**-126  # the smallest normal number of f32


def scaled_matmul(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast: bool = False,
) -> None:
    """`out[..., n] = bias[n] + sum over k of (a * scale_a)[..., k] * (b * scale_b)[k, n]`, rounded once.

    `torch._scaled_mm` computes it if it supports the operands. Otherwise it is computed in float64. `fast` is passed to
    `torch._scaled_mm`.

    Tensor-wise and row-wise scales may have G elements along K. Each of them belongs to K/G elements of an operand.
    This happens if each of G ranks has scaled its shard of K, and the product is computed on the unsharded tensors as a
    reference.
    """
    if out.dtype != torch.float64 and scaled_by_library(out, a, b, scale_a, scale_b, bias, fast=fast):
        return
    scale_a, scale_b = scale_a.float(), scale_b.float()  # in the reference they are f64
    groups, K, columns = scale_a.shape[-1], a.shape[-1], -(-out.shape[-1] // SCALE_BLOCK)
    block_wise = groups * SCALE_BLOCK == K and scale_a.shape[:-1] == a.shape[:-1] and scale_b.shape[-1] == columns
    if groups == 1 or block_wise:
        out.copy_(scaled_matmul_reference(a, b, scale_a, scale_b, bias, out.dtype))
        return
    total = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    for group in range(groups):
        part, one = slice(group * K // groups, (group + 1) * K // groups), slice(group, group + 1)
        scales = scale_a[..., one], scale_b[one]
        total += scaled_matmul_reference(a[..., part], b[part], *scales, None, torch.float64)
    out.copy_(total if bias is None else total + bias)


def row_scales(out: torch.Tensor, x: torch.Tensor, *, dtype: str, block: int = 0) -> None:
    """`out = max(amax / limit, 2^-126)` in f32, for each row of `x`, or for each `block` elements of a row.

    `amax` is the largest absolute value of the row or block. `limit` is the largest number of `dtype`, an fp8 dtype.
    """
    blocks = x.unflatten(-1, (-1, block)) if block else x.unsqueeze(-2)
    amax = blocks.float().abs().amax(-1) if x.shape[-1] else torch.zeros_like(out, dtype=torch.float32)
    # On CUDA, torch divides by a Python number by multiplying with its rounded reciprocal. The scale can then be off by
    # one unit of f32. Elements halfway between two numbers of fp8 would be rounded to the other number. If the divisor
    # is a tensor, torch divides exactly.
    limit = torch.full((), torch.finfo(FP8[dtype]).max, device=x.device)
    out.copy_((amax / limit).clamp_min_(LEAST_SCALE))


def largest(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out = max(x)`, the largest element: NaN if `x` contains a NaN, and 0 if `x` is empty."""
    out.copy_(x.amax().view(out.shape) if x.numel() else torch.zeros_like(out))


def quantize(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *, dtype: str) -> None:
    """`out = x / scale` in fp8, computed in f32, limited to the dtype's range and rounded to nearest even.

    `scale` has as many axes as `x`. Each axis has size 1 or the size of the same axis of `x`. The last axis of `scale`
    may also have one element for each block of a row.
    """
    narrow = FP8[dtype]
    limit = torch.finfo(narrow).max
    if scale.shape[-1] not in (1, x.shape[-1]):
        scale = scale.repeat_interleave(x.shape[-1] // scale.shape[-1], -1)
    out.copy_((x.float() / scale.float()).clamp_(-limit, limit).to(narrow))


def power_of_two_scales(x: torch.Tensor) -> torch.Tensor:
    """Return the scale of each row of `x` for e4m3 in f32: the least power of two for which no element is too large.

    It is at least 2^-126. The scale of a row with a NaN is NaN, and the scale of a row with an infinity is infinite.
    The largest number of e4m3 is 1.75 * 2^8. So the scale is 2^(e - 8) if the largest absolute value of the row is at
    most 1.75 * 2^e, and else 2^(e - 7). This adds to the bits of that value, so that those above 1.75 carry into the
    exponent.
    """
    if not x.shape[-1]:
        return x.new_full([*x.shape[:-1], 1], LEAST_SCALE, dtype=torch.float32)
    most = x.abs().amax(-1, keepdim=True).float().view(torch.int32)
    bits = ((most + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    return torch.where(most < 0x7F800000, bits.clamp_min(0x800000), most).view(torch.float32)


def quantize_rows(out: torch.Tensor, scale: torch.Tensor, xs: Sequence[torch.Tensor], *, axis: int = 0) -> None:
    """Quantize each row of `x` to e4m3: `scale` is `power_of_two_scales(x)`, and `out = x / scale`.

    `x` consists of the tensors `xs`. With `axis=0` they are one below the other, with `axis=-1` side by side.
    """
    x = xs[0] if len(xs) == 1 else torch.cat([*xs], axis)
    scale.copy_(power_of_two_scales(x))
    out.copy_((x.float() / scale).to(out.dtype))


def transpose_rows(
    a_out: torch.Tensor,
    b_out: torch.Tensor,
    scales: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
) -> None:
    """Transpose the rows of two operands in fp8, and replace the scales of their rows by one scale for all rows.

    A matmul that sums over rows cannot multiply each row by its scales. So the result gets the largest product of the
    two scales of a row. Let r be the product of the scales of another row, relative to the largest one. Then this row
    of each operand is multiplied by about the square root of r. A number of 8 bits then becomes too small for its
    dtype only if r is tiny. All factors are powers of two. If a scale is NaN or infinite, the factors of its row are
    NaN.

    Args:
        a_out, b_out: results, `[columns, length]`, contiguous, of the dtype of the operands. Their columns beyond the
            rows get 0.
        scales: a result, `[2]`: the largest product, at least 2^-126, and 1. NaN if a scale is NaN.
        a, b: the operands, `[outer, inner, columns]`, with `outer * inner` rows.
        a_scale, b_scale: the scales of their rows, `[outer, inner, 1]`.
    """
    product = (a_scale * b_scale).flatten()
    scales[0], scales[1] = product.amax().clamp_min(LEAST_SCALE), 1
    ratio = product / scales[0]
    exponent = (ratio.view(torch.int32) >> 23) - 127
    for out, x, part in zip((a_out, b_out), (a, b), (exponent >> 1, exponent - (exponent >> 1)), strict=True):
        by = torch.where(ratio.isnan(), ratio, ((part + 127) << 23).view(torch.float32))
        flat = x.flatten(0, 1)
        out[:, : len(flat)] = (flat.float() * by[:, None]).to(x.dtype).t()
        out.view(torch.uint8)[:, len(flat) :] = 0


KERNELS: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (
        *(matmul, linear, batched_matmul, add, mul, relu, gelu, silu, copy, cast, sum, rms_norm),
        *(scale, offset, scaled_matmul, row_scales, largest, quantize),
        *(grouped_matmul, grouped_outer, permute_rows, combine_rows),
    )
}
BY_CUBLAS = (matmul, linear, batched_matmul, grouped_matmul, grouped_outer, scaled_matmul)  # kernels that call cuBLAS


def _multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Compute `out = a @ b (+ bias)` with torch's current settings."""
    if b.ndim > 2:
        _multiply_batches(out, a, b)
        return
    if bias is None and out.is_contiguous() and _folds(a.shape, a.stride()):
        _multiply_rows(out, a, b, None)
        return
    a_rows, out_rows = rows(a), rows(out)
    if a_rows is not None and out_rows is not None:
        if bias is None:
            torch.mm(a_rows, b, out=out_rows)
        else:
            torch.addmm(bias if bias.ndim == 1 else bias.reshape(out_rows.shape), a_rows, b, out=out_rows)
    elif a.ndim == 3:
        batched = b.expand(len(a), *b.shape)
        if bias is None:
            torch.bmm(a, batched, out=out)
        else:
            torch.baddbmm(bias, a, batched, out=out)
    else:
        for i, (out_part, a_part) in enumerate(zip(out, a, strict=True)):
            _multiply(out_part, a_part, b, bias if bias is None or bias.ndim == 1 else bias[i])


def _multiply_batches(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compute `out[..., M, N] = a[..., M, K] @ b[..., K, N]`. It is one product if the leading axes merge into one."""
    lead = collapse(a.shape[:-2], *(t.stride()[:-2] for t in (out, a, b)))
    if len(lead) > 1:
        for parts in zip(out, a, b, strict=True):
            _multiply_batches(*parts)
        return
    ((size, *strides),) = lead or [(1, 0, 0, 0)]
    flat = [
        t.as_strided((size, *t.shape[-2:]), (stride, *t.stride()[-2:]))
        for t, stride in zip((out, a, b), strides, strict=True)
    ]
    torch.bmm(*flat[1:], out=flat[0])


def _multiply_rows(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, _: None) -> None:
    torch.matmul(a, b, out=out)  # takes less host time than our views; for other layouts it may resize `out`, or fail


# The same as `matmul` for tensors whose layouts `takes_rows` accepts. It takes fewer function calls.
matmul_of_rows: Callable[..., None] = functools.partial(_with_wide_sums, _multiply_rows)


def takes_rows(out: ShapeAndStrides, a: ShapeAndStrides, b: ShapeAndStrides) -> bool:
    """Return True if torch computes `out = a @ b` as one product of rows, for tensors of these shapes and strides."""
    return len(b[0]) == 2 and is_dense(*out) and _folds(*a)


@functools.lru_cache(maxsize=1024)
def _folds(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if torch.matmul computes one product for all leading axes.

    Like torch.matmul, this compares the strides of all leading axes, also of axes of size 1.
    """
    return len(shape) > 1 and all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(len(shape) - 2))
