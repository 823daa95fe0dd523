"""Operands of matmuls of fp8 matrices with scales: their checks, and the scales as a fusion takes them.

The left side has one scale, or one for each row, or one for each 128 elements of a row. The right side then has one
scale, or one for each column, or one for each block of 128x128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hostir.ir.scaled_ops import BLOCK
from hostir.torch.ops.running import Unfit

FP8 = {torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2"}
RESULTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


class ScaledRight(NamedTuple):
    """The right side of a scaled product, and what becomes of the product.

    Fields:
        b: the matrix.
        scale: its scales.
        bias: added to the product.
        result_scale: multiplies an fp8 result before it is rounded.
        out_dtype: of the result; by default the dtype of `b`.
        fast: whether tensor cores may accumulate.
    """

    b: Tensor
    scale: Tensor
    bias: Tensor | None = None
    result_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    fast: bool | None = False


def check_lengths(bs: Sequence[Tensor], **lists: Sequence[Any]) -> None:
    """Raise ValueError, as torch does, unless each list has a value for each right side."""
    for name, values in lists.items():
        if len(values) != len(bs):
            raise ValueError(f"len({name}) is {len(values)}, and len(Bs) is {len(bs)}")


@dataclass(frozen=True)
class ScaledProduct:
    """A product with scales, as a fusion takes it.

    Fields:
        b: the dtype of its right side, by its name in programs.
        columns: the number of columns of the right side.
        dtype: the dtype of the result, which may be fp8.
        bias: the dtype of its bias; empty without a bias.
        scaled: True if the result is fp8 and is multiplied by a scale before it is rounded.
        fast: True if tensor cores may accumulate.
    """

    b: str
    columns: int
    dtype: str
    bias: str = ""
    scaled: bool = False
    fast: bool = False


def product_of(a: Tensor, right: ScaledRight, out_dtype: torch.dtype | None) -> ScaledProduct:
    """Return the product of `a` with a right side. Raises Unfit for a product that hostir does not compute."""
    b, bias = right.b, right.bias
    if b.shape[0] != a.shape[-1]:
        raise Unfit(f"A has {a.shape[-1]} columns, and B has {b.shape[0]} rows")
    dtype = out_dtype or b.dtype
    if dtype not in RESULTS and dtype not in FP8:
        raise Unfit(f"its result is {dtype}")
    if bias is not None and (bias.dtype not in RESULTS or [*bias.shape] != [b.shape[1]]):
        raise Unfit(f"its bias is of shape {[*bias.shape]}, {bias.dtype}")
    narrow = dtype in FP8
    return ScaledProduct(
        fp8_dtype(b, "B"),
        b.shape[1],
        FP8[dtype] if narrow else RESULTS[dtype],
        "" if bias is None else RESULTS[bias.dtype],
        narrow and right.result_scale is not None,
        bool(right.fast),
    )


def fp8_dtype(x: Tensor, name: str) -> str:
    """Return the name of a tensor's dtype in programs. Raises Unfit unless it is fp8."""
    if x.dtype not in FP8:
        raise Unfit(f"{name} is {x.dtype}, not fp8")
    return FP8[x.dtype]


def are_of_blocks(a: Tensor, scale: Tensor, right: ScaledRight) -> bool:
    """Return True if both sides have scales of blocks: 128 elements of a row of `a`, and 128x128 of `b`."""
    expected = [n / BLOCK for n in right.b.shape]
    return a.shape[-1] == right.b.shape[0] and [*scale.shape[-1:]] == expected[:1] and [*right.scale.shape] == expected


def check_right_scale(right: ScaledRight, by_rows: bool) -> None:
    """Raise ValueError unless the right side has one scale, or, if the left side has scales of rows, of columns."""
    scale, expected = right.scale, [1, right.b.shape[1]] if by_rows else [1, 1]
    if [*scale.shape] != expected if by_rows else scale.numel() != 1:
        left = "row-wise" if by_rows else "tensor-wise"
        raise ValueError(f"a {left} A_scale goes with a B_scale of shape {expected}, not {[*scale.shape]}")


def right_scale(scale: Tensor, blocks: bool) -> Tensor:
    """Return the scales of a right side as a fusion takes them."""
    return scale.float().contiguous() if blocks else scale.float().reshape(1, -1)


def left_scale(scale: Tensor, x: Tensor, outside: int, ranks: int = 1) -> Tensor:
    """Return the scales of the rows of `x`, with axis `outside` outermost, which is `ranks` times as long."""
    sizes = [n * ranks if k == outside else n for k, n in enumerate(x.shape[:-1])]
    return scale.float().reshape(*sizes, scale.shape[-1]).movedim(outside, 0).contiguous()
