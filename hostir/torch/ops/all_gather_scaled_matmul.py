"""All-gather + matmul of scaled fp8 matrices.

If each rank has scales for its rows, the scales are gathered together with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from hostir.ir.program import Program
from hostir.ir.scaled_ops import BLOCK
from hostir.torch.ops.fusions import extra_sizes, fusion, in_front, type_of
from hostir.torch.ops.layouts import collapsed, expanded, gathered_like, unaliased
from hostir.torch.ops.library import GATHERED, check_operands, define, takes_over
from hostir.torch.ops.running import THREAD, OperatorCall, Unfit
from hostir.torch.ops.scaled_operands import (
    FP8,
    RESULTS,
    ScaledProduct,
    ScaledRight,
    are_of_blocks,
    check_lengths,
    check_right_scale,
    fp8_dtype,
    left_scale,
    product_of,
    right_scale,
)

BLOCKS = "_blocks"  # the end of a layout's name if there is a scale for each 128 elements of a row
NUMBERED = {23: torch.float8_e5m2, 24: torch.float8_e4m3fn}  # dtypes that torch's conversion does not know


def dtype_of_number(number: Any) -> torch.dtype | None:
    """Convert an item of a list of dtypes to a dtype or None. The dispatcher passes these items as numbers."""
    if number in NUMBERED:
        return NUMBERED[number]
    dtypes: list[torch.dtype | None] = symm_mem._maybe_convert_scalar_types_to_dtypes([number])
    return dtypes[0]


def _with_dtypes(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of torch's function, which converts the output dtypes from numbers to dtypes."""
    return lambda *args: torchs(*args[:8], [dtype_of_number(number) for number in args[8]], *args[9:])


@takes_over(
    "fused_all_gather_scaled_matmul",
    cuda=_with_dtypes(symm_mem._fused_all_gather_scaled_matmul),
    cpu=_with_dtypes(symm_mem._fused_all_gather_scaled_matmul_fallback),
)
def fused_all_gather_scaled_matmul(
    A: Tensor,
    Bs: list[Tensor],
    A_scale: Tensor,
    B_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[Tensor | None],
    result_scales: list[Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    """All-gather A with its scales, and multiply it with each of Bs; return the gathered A and the products."""
    lists: dict[str, Sequence[Any]] = {
        "B_scales": B_scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": [dtype_of_number(number) for number in out_dtypes],
        "use_fast_accum": use_fast_accum,
    }
    check_lengths(Bs, **lists)
    rights = [ScaledRight(*fields) for fields in zip(Bs, *lists.values(), strict=True)]
    call = OperatorCall("symm_mem::fused_all_gather_scaled_matmul", group_name)
    full, _, products = gathered_scaled_products(call, A, A_scale, rights, gather_dim)
    return full, products


@define(
    "all_gather_scaled_matmul(Tensor a, Tensor a_scale, Tensor[] bs, Tensor[] b_scales, int gather_dim, "
    "str group_name, str scales, Tensor?[] biases, ScalarType out_dtype, bool use_fast_accum=False) "
    "-> (Tensor, Tensor, Tensor[])",
    GATHERED,
)
def all_gather_scaled_matmul(
    a: Tensor,
    a_scale: Tensor,
    bs: list[Tensor],
    b_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    scales: str,
    biases: list[Tensor | None],
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """All-gather `a` and its scales, and multiply the gathered `a` with each of `bs`.

    `scales` is the layout of `a_scale`, as for `gather_fusion`. Returns the gathered `a`, its scales, and the products.
    """
    rights = [
        ScaledRight(b, scale, bias, None, out_dtype, use_fast_accum)
        for b, scale, bias in zip(bs, b_scales, biases, strict=True)
    ]
    call = OperatorCall("hostir::all_gather_scaled_matmul", group_name)
    full, full_scale, products = gathered_scaled_products(call, a, a_scale, rights, gather_dim, scales)
    return full, full_scale.clone() if full_scale is a_scale else full_scale, products


def gathered_scaled_products(
    call: OperatorCall,
    a: Tensor,
    scale: Tensor,
    rights: Sequence[ScaledRight],
    axis: int,
    scales: str = "",
    return_a: bool = True,
) -> tuple[Any, Any, list[Tensor]]:
    """All-gather `a` and its scales, and multiply the gathered `a` with each right operand.

    Returns the gathered `a`, its scales, and the products. Raises Unfit for a call that hostir cannot run, and
    ValueError for scales of wrong shapes.

    Args:
        call: the call of the operator.
        a: this rank's part, in fp8.
        scale: the scales of `a`.
        rights: the right operands.
        axis: the axis of `a` to gather along. It must not be the last axis.
        scales: the layout of `scale`, as for `gather_fusion`. By default the layout follows from the shapes.
        return_a: False to return None for the gathered `a` and for its scales.
    """
    check_operands(a, [right.b for right in rights], axis)
    ranks = call.group.size
    if THREAD.tracing:
        products = [gathered_like(a, axis, ranks, r.b.shape[1], r.out_dtype or r.b.dtype) for r in rights]
        sharded = scales.startswith("sharded")
        full_scale = gathered_like(a, axis, ranks, scale.shape[-1], torch.float32) if sharded else scale
        return gathered_like(a, axis, ranks), full_scale, products
    scales = scales or layout_of_scales(a, scale, rights, axis, ranks)
    if axis == a.ndim - 1:
        raise Unfit("the axis that is gathered is the one that the products sum over")
    if not rights:
        raise Unfit("there is no product")
    dtype, (x, outside) = fp8_dtype(a, "A"), collapsed(a, axis)
    shapes = tuple([product_of(a, right, right.out_dtype) for right in rights])
    ones, blocks = [1] * x.ndim, scales.endswith(BLOCKS)
    times = ranks if scales.startswith("replicated") else 1
    inputs = [x, scale.float().reshape(ones) if scales == "one" else left_scale(scale, x, outside, times)]
    one = None
    for right, shape in zip(rights, shapes, strict=True):
        inputs += [right.b, right_scale(right.scale, blocks), *(() if right.bias is None else (right.bias,))]
        inputs += [right.result_scale.float().reshape(1)] if shape.scaled and right.result_scale is not None else []
        if shape.dtype in FP8.values() and one is None:
            one = torch.ones(ones, device=a.device)
            inputs.append(one)
    key = (a.shape[-1], shapes, scales, x.ndim - 2, outside, return_a)
    results = call.execute(gather_fusion, key, inputs, dtype=dtype)
    products = [expanded(y, a, axis, ranks) for y in results[: len(rights)]]
    if not return_a:
        return None, None, products
    full, *full_scales = results[len(rights) :]
    full_scale = expanded(unaliased(full_scales[0], scale, ranks), a, axis, ranks) if full_scales else scale
    return expanded(unaliased(full, a, ranks), a, axis, ranks), full_scale, products


def layout_of_scales(a: Tensor, scale: Tensor, rights: Sequence[ScaledRight], axis: int, ranks: int) -> str:
    """Return the layout of `scale`, the scales of `a`. The result is one of the words that `gather_fusion` explains.

    Raises ValueError if the shapes of the scales do not fit the operands.
    """
    rows = [n * ranks if k == axis else n for k, n in enumerate(a.shape)]
    blocks = bool(rights) and all(are_of_blocks(a, scale, right) for right in rights)
    along = scale.shape[-1] if blocks else 1
    if [*scale.shape] == [*a.shape[:-1], along]:
        layout = "sharded"
    elif scale.numel() == 1:
        layout = "one"
    elif [*scale.shape] == [*rows[:-1], along]:
        layout = "replicated"
    else:
        raise ValueError(
            f"Invalid scale shape for fp8 all-gather (shard shape: {a.shape}, scale shape: {scale.shape}): "
            f"expected one element, {[*a.shape[:-1], 1]} or {[*rows[:-1], 1]}, or a scale for {BLOCK} elements of a row"
        )
    if layout == "sharded" and scale.numel() == 1 and all(right.scale.numel() == 1 for right in rights):
        layout = "one"  # one row, so one scale: it fits if each right operand has one scale, too
    if blocks and layout != "one":
        return layout + BLOCKS
    for right in rights:
        check_right_scale(right, by_rows=layout != "one")
    return layout


def gather_fusion(
    ranks: int,
    dtype: str,
    K: int,
    products: tuple[ScaledProduct, ...],
    scales: str,
    extra: int,
    outside: int,
    return_a: bool = True,
) -> Program:
    """Return the fusion that gathers `%a` along M and multiplies it with scaled matrices. `%a` has K columns.

    Its outputs are the products, the gathered `%a` if `return_a`, and the scales of `%a` if they are gathered.

    Args:
        products: the properties of each product, which include its right operand and its result.
        scales: the layout of the scales of `%a`. `one`: there is a single scale. `sharded`: each rank has the scales of
            its rows. `replicated`: each rank has the scales of all rows. With the suffix `_blocks`, there is a scale
            for each 128 elements of a row. Without it, there is a scale for each row.
        extra: the number of axes of the rows besides M. The first `outside` of them stand before M.
    """
    blocks, sharded = scales.endswith(BLOCKS), scales.startswith("sharded")
    along = K // BLOCK if blocks else 1
    others = extra_sizes(extra)
    a, body, front = in_front("%a", dtype, ("M@didx", *others, K), outside)
    ones = [1] * (extra + 2)
    rows = ones if scales == "one" else ["M@didx" if sharded else "M", *others, along]
    inputs, outputs = [a, f"%s: {type_of('f32', *rows)}"], []
    body.append(f"%a_full: {type_of(dtype, 'M', *others, K)} = reshard {front}")
    scale = "%s"
    if sharded:
        scale = "%s_full"
        body.append(f"%s_full: {type_of('f32', 'M', *others, along)} = reshard %s")
    for i, p in enumerate(products):
        wide = p.dtype if p.dtype in RESULTS.values() else "f32"
        result = "M", *others, p.columns
        across = p.columns // BLOCK if blocks else 1 if scales == "one" else p.columns
        inputs += [f"%b{i}: {type_of(p.b, K, p.columns)}", f"%t{i}: {type_of('f32', along, across)}"]
        plus, fast = "", " accumulate fast" if p.fast else ""
        if p.bias:
            inputs.append(f"%bias{i}: {type_of(p.bias, p.columns)}")
            plus = f" plus %bias{i}"
        if p.bias not in ("", wide):
            body.append(f"%wide{i}: {type_of(wide, p.columns)} = cast %bias{i} to {wide}")
            plus = f" plus %wide{i}"
        narrow = wide != p.dtype
        name = f"%y{i}" if narrow else f"%c{i}"
        product = f"scaled_matmul %a_full, %b{i} scaled {scale}, %t{i}{plus} to {wide}{fast}"
        body.append(f"{name}: {type_of(wide, *result)} = {product}")
        if p.scaled:
            inputs.append(f"%r{i}: {type_of('f32', 1)}")
            body.append(f"%z{i}: {type_of(wide, *result)} = mul %y{i}, %r{i}")
        if narrow:
            inputs += [f"%one: {type_of('f32', *ones)}"] if "%one" not in " ".join(inputs) else []
            last = f"%z{i}" if p.scaled else f"%y{i}"
            body.append(f"%c{i}: {type_of(p.dtype, *result)} = quantize {last} by %one to {p.dtype}")
        outputs.append(f"%c{i}")
    if return_a:
        outputs += ["%a_full", "%s_full"] if sharded else ["%a_full"]
    return fusion("all_gather_scaled_matmul", ranks, inputs, outputs, body)
