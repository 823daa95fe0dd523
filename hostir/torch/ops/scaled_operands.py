"""Operands of scaled fp8 matmuls: check their shapes and dtypes, and bring scales into the shape that fusions take.

There are three layouts of scales:

- Each operand has one scale.
- The left operand has a scale for each row, and the right operand has a scale for each column.
- The left operand has a scale for each 128 elements of a row, and the right operand has a scale for each 128x128 block.
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
    """The right operand of a scaled matmul, and how its result is computed.

    Fields:
        b: the right operand, `[K, N]`.
        scale: the scales of `b`.
        bias: a vector that is added to the product; None for no bias.
        result_scale: a factor for an fp8 result, applied before the result is rounded. None for no factor.
        out_dtype: the dtype of the result; None for the dtype of `b`.
        fast: True if tensor cores may accumulate with less precision (torch's `use_fast_accum`).
    """

    b: Tensor
    scale: Tensor
    bias: Tensor | None = None
    result_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    fast: bool | None = False


def check_lengths(bs: Sequence[Tensor], **lists: Sequence[Any]) -> None:
    """Raise ValueError unless each list has as many items as `bs`. torch raises the same error."""
    for name, values in lists.items():
        if len(values) != len(bs):
            raise ValueError(f"len({name}) is {len(values)}, and len(Bs) is {len(bs)}")


@dataclass(frozen=True)
class ScaledProduct:
    """The properties of a scaled matmul that decide the text of its fusion.

    A dtype is given by the name that programs use for it.

    Fields:
        b: the dtype of the right operand.
        columns: the number of columns of the right operand.
        dtype: the dtype of the result, which may be fp8.
        bias: the dtype of the bias. Empty without a bias.
        scaled: True if the result is fp8 and is multiplied by a factor before it is rounded.
        fast: True if tensor cores may accumulate with less precision (torch's `use_fast_accum`).
    """

    b: str
    columns: int
    dtype: str
    bias: str = ""
    scaled: bool = False
    fast: bool = False


def product_of(a: Tensor, right: ScaledRight, out_dtype: torch.dtype | None) -> ScaledProduct:
    """Return the properties of the product of `a` and a right operand.

    If `out_dtype` is None, the result has the dtype of the right operand.

    Raises Unfit if hostir cannot compute the product.
    """
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
    """Return the name that programs use for the fp8 dtype of `x`. Raises Unfit if the dtype is not fp8.

    `name` is the operand's name in the message.
    """
    if x.dtype not in FP8:
        raise Unfit(f"{name} is {x.dtype}, not fp8")
    return FP8[x.dtype]


def are_of_blocks(a: Tensor, scale: Tensor, right: ScaledRight) -> bool:
    """Return True if both operands have block-wise scales.

    `a` then has a scale for each 128 elements of a row, and the right operand has a scale for each 128x128 block. The
    function checks only the last axis of `scale`.
    """
    expected = [n / BLOCK for n in right.b.shape]
    return a.shape[-1] == right.b.shape[0] and [*scale.shape[-1:]] == expected[:1] and [*right.scale.shape] == expected


def check_right_scale(right: ScaledRight, by_rows: bool) -> None:
    """Raise ValueError unless the scales of the right operand fit the scales of the left operand.

    If the left operand has a scale for each row (`by_rows`), the right operand must have a scale for each column.
    Otherwise the right operand must have one scale.
    """
    scale, expected = right.scale, [1, right.b.shape[1]] if by_rows else [1, 1]
    if [*scale.shape] != expected if by_rows else scale.numel() != 1:
        left = "row-wise" if by_rows else "tensor-wise"
        raise ValueError(f"a {left} A_scale goes with a B_scale of shape {expected}, not {[*scale.shape]}")


def right_scale(scale: Tensor, blocks: bool) -> Tensor:
    """Return the scales of a right operand as a contiguous f32 tensor.

    If `blocks` is True, the tensor is a matrix with a scale for each block. Otherwise its shape is `[1, columns]`.
    """
    return scale.float().contiguous() if blocks else scale.float().reshape(1, -1)


def left_scale(scale: Tensor, x: Tensor, outside: int, ranks: int = 1) -> Tensor:
    """Return the scales of a left operand as a contiguous f32 tensor.

    The result has the axes of `x`, but axis `outside` comes first, and the last axis counts the scales of a row. If
    `ranks` is larger than 1, `scale` holds the scales of the gathered rows: axis `outside` is then `ranks` times as
    long as in `x`.
    """
    sizes = [n * ranks if k == outside else n for k, n in enumerate(x.shape[:-1])]
    return scale.float().reshape(*sizes, scale.shape[-1]).movedim(outside, 0).contiguous()
