"""Compute torch's operators on fp8 matrices with scales by executors: their programs, checks and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from hostir.ir.program import Program
from hostir.ir.scaled_ops import BLOCK
from hostir.torch.operators import Operator, from_front, grouped, mean, own
from hostir.torch.programs import Unfit, _extra_sizes, _fusion, _in_front, _type

FP8 = {torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2"}
BLOCKS = "_blocks"  # behind the word for scales of rows: of blocks of 128 elements
RESULTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}

# Fusions --------------------------------------------------------------------------------------------------------------
# As those of hostir.torch.programs. Scales of rows have the axes of the rows, of which M is outermost.


@dataclass(frozen=True)
class ScaledProduct:
    """One product of the gathered rows.

    Fields:
        b: the dtype of its right side, in the words of a program.
        columns: of the right side.
        dtype: of the result, which may be fp8.
        bias: the dtype of its bias; empty if it has none.
        scaled: whether the result, which is fp8, is multiplied by a scale before it is rounded.
        fast: whether tensor cores may accumulate.
    """

    b: str
    columns: int
    dtype: str
    bias: str = ""
    scaled: bool = False
    fast: bool = False


def gathered_program(
    ranks: int, dtype: str, K: int, products: tuple[ScaledProduct, ...], scales: str, free: int, outside: int
) -> Program:
    """`a`, of which each rank has rows, gathered and multiplied with matrices. Results: the products, `a`, its scales.

    `scales` of `a` are tensor-wise (`one`), or of rows: each rank has those of its own (`sharded`), or of all
    (`replicated`). With `_blocks` behind it there is one for 128 elements of a row, and for 128 x 128 of a matrix.
    """
    blocks, sharded = scales.endswith(BLOCKS), scales.startswith("sharded")
    along = K // BLOCK if blocks else 1
    others = _extra_sizes(free)
    a, body, front = _in_front("%a", dtype, ("M@didx", *others, K), outside)
    ones = [1] * (free + 2)
    rows = ones if scales == "one" else ["M@didx" if sharded else "M", *others, along]
    inputs, outputs = [a, f"%s: {_type('f32', *rows)}"], []
    body.append(f"%a_full: {_type(dtype, 'M', *others, K)} = reshard {front}")
    scale = "%s"
    if sharded:
        scale = "%s_full"
        body.append(f"%s_full: {_type('f32', 'M', *others, along)} = reshard %s")
    for i, p in enumerate(products):
        wide = p.dtype if p.dtype in RESULTS.values() else "f32"
        result = "M", *others, p.columns
        each = p.columns // BLOCK if blocks else 1 if scales == "one" else p.columns
        inputs += [f"%b{i}: {_type(p.b, K, p.columns)}", f"%t{i}: {_type('f32', along, each)}"]
        plus, fast = "", " accumulate fast" if p.fast else ""
        if p.bias:
            inputs.append(f"%bias{i}: {_type(p.bias, p.columns)}")
            plus = f" plus %bias{i}"
        if p.bias not in ("", wide):
            body.append(f"%wide{i}: {_type(wide, p.columns)} = cast %bias{i} to {wide}")
            plus = f" plus %wide{i}"
        narrow = wide != p.dtype
        name = f"%y{i}" if narrow else f"%c{i}"
        body.append(
            f"{name}: {_type(wide, *result)} = scaled_matmul %a_full, %b{i} scaled {scale}, %t{i}{plus} to {wide}{fast}"
        )
        if p.scaled:
            inputs.append(f"%r{i}: {_type('f32', 1)}")
            body.append(f"%z{i}: {_type(wide, *result)} = mul %y{i}, %r{i}")
        if narrow:
            inputs += [f"%one: {_type('f32', *ones)}"] if "%one" not in " ".join(inputs) else []
            last = f"%z{i}" if p.scaled else f"%y{i}"
            body.append(f"%c{i}: {_type(p.dtype, *result)} = quantize {last} by %one to {p.dtype}")
        outputs.append(f"%c{i}")
    return _fusion(
        "all_gather_scaled_matmul",
        ranks,
        inputs,
        [*outputs, "%a_full", *(["%s_full"] if sharded else [])],
        body,
    )


def scattered_program(
    ranks: int, dtype: str, K: int, product: ScaledProduct, scales: str, free: int, outside: int
) -> Program:
    """The sum over all ranks of `a @ b`, of which each gets rows. Each rank has scales of its own.

    They are tensor-wise (`one`), of `rows` and columns, or of `blocks` of 128 elements of a row and 128 x 128 of `b`.
    """
    others, part = _extra_sizes(free), "M@didx"
    a, body, front = _in_front("%a", dtype, ("M", *others, f"{K}@didx"), outside)
    lead = [1] * (free + 1) if scales == "one" else ["M", *others]
    columns = product.columns
    along = f"{K // BLOCK if scales == 'blocks' else ranks}@didx"
    across = {"one": 1, "rows": columns, "blocks": columns // BLOCK}[scales]
    inputs = [
        a,
        f"%s: {_type('f32', *lead, along)}",
        f"%b: {_type(product.b, f'{K}@didx', columns)}",
        f"%t: {_type('f32', along, across)}",
    ]
    scale, rows, plus = "%s", others, ""
    if product.bias:
        inputs.append(f"%bias: {_type(product.bias, columns)} partial(didx)")
        plus = " plus %bias"
    if free > 1:  # kernels take rows of two strides, not of more
        rows = ["*".join(others)]
        body.append(f"%a_rows: {_type(dtype, 'M', *rows, f'{K}@didx')} = reshape {front}")
        front = "%a_rows"
        if scales != "one":
            body.append(f"%s_rows: {_type('f32', 'M', *rows, along)} = reshape %s")
            scale = "%s_rows"
    fast = " accumulate fast" if product.fast else ""
    made = "%c0" if free < 2 else "%c_rows"
    body.append(
        f"{made}: {_type(product.dtype, part, *rows, columns)} = "
        f"scaled_matmul {front}, %b scaled {scale}, %t{plus} to {product.dtype}{fast}"
    )
    if free > 1:
        body.append(f"%c0: {_type(product.dtype, part, *others, columns)} = reshape %c_rows")
    if outside:
        order = (*range(1, outside + 1), 0, *range(outside + 1, free + 2))
        result = _type(product.dtype, *others[:outside], part, *others[outside:], columns)
        body += [f"%c_back: {result} = permute %c0 {order}", f"%c: {result} = copy %c_back"]
    return _fusion("scaled_matmul_reduce_scatter", ranks, inputs, ["%c" if outside else "%c0"], body)


# Checks ---------------------------------------------------------------------------------------------------------------
# Raise ValueError as torch's operators do, and for scales that torch takes for something else without a word.


def check_lists(bs: Sequence[Tensor], lists: Mapping[str, Sequence[object]]) -> None:
    """Raise ValueError unless there is one of each for each right side."""
    for name, given in lists.items():
        if len(given) != len(bs):
            raise ValueError(f"len({name}) is {len(given)}, and len(Bs) is {len(bs)}")


def gathered_scales(
    a: Tensor, scale: Tensor, bs: Sequence[Tensor], b_scales: Sequence[Tensor], axis: int, ranks: int
) -> str:
    """Return which scales those of `a` are, as `gathered_program` takes them; the others must go with them."""
    full = [n * ranks if k == axis else n for k, n in enumerate(a.shape)]
    blocks = bool(bs) and all(are_of_blocks(a, scale, b, x) for b, x in zip(bs, b_scales, strict=True))
    along = scale.shape[-1] if blocks else 1
    if [*scale.shape] == [*a.shape[:-1], along]:
        found = "sharded"
    elif scale.numel() == 1:
        found = "one"
    elif [*scale.shape] == [*full[:-1], along]:
        found = "replicated"
    else:
        raise ValueError(
            f"Invalid scale shape for fp8 all-gather (shard shape: {a.shape}, scale shape: {scale.shape}): "
            f"expected one element, {[*a.shape[:-1], 1]} or {[*full[:-1], 1]}, or a scale for {BLOCK} elements of a row"
        )
    if found == "sharded" and scale.numel() == 1 and all(x.numel() == 1 for x in b_scales):
        found = "one"  # of a single row: a scale of the tensor, if those of the other side are
    if blocks and found != "one":
        return found + BLOCKS
    for b, x in zip(bs, b_scales, strict=True):
        check_right_scale(b, x, by_rows=found != "one")
    return found


def are_of_blocks(a: Tensor, scale: Tensor, b: Tensor, b_scale: Tensor) -> bool:
    """Return whether scales are of blocks: of 128 elements of a row of `a`, and 128 x 128 of `b`."""
    expected = [n / BLOCK for n in b.shape]
    return a.shape[-1] == b.shape[0] and [*scale.shape[-1:]] == expected[:1] and [*b_scale.shape] == expected


def check_right_scale(b: Tensor, scale: Tensor, by_rows: bool) -> None:
    """Raise ValueError unless the scale of a right side goes with that of the left one."""
    expected = [1, b.shape[1]] if by_rows else [1, 1]
    if [*scale.shape] != expected if by_rows else scale.numel() != 1:
        kind = "row-wise" if by_rows else "tensor-wise"
        raise ValueError(f"a {kind} A_scale goes with a B_scale of shape {expected}, not {[*scale.shape]}")


def scattered_scales(a: Tensor, scale: Tensor, b: Tensor, b_scale: Tensor) -> str:
    """Return which scales those of both sides are, as `scattered_program` takes them."""
    by_rows = scale.numel() > 1
    if [*scale.shape[:-1]] == [*a.shape[:-1]] and are_of_blocks(a, scale, b, b_scale):
        return "blocks" if by_rows or b_scale.numel() > 1 else "one"
    if by_rows and [*scale.shape] != [*a.shape[:-1], 1]:
        raise ValueError(
            "For row-wise scaling, the leading dims of A_scale must match the leading dims of A, and its last one is 1 "
            f"(A shape: {a.shape}, A_scale shape: {scale.shape})"
        )
    by_rows = by_rows or b_scale.numel() > 1
    check_right_scale(b, b_scale, by_rows)
    return "rows" if by_rows else "one"


def _right_scale(scale: Tensor, blocks: bool) -> Tensor:
    """Return the scales of a right side as programs take them."""
    return scale.float().contiguous() if blocks else scale.float().reshape(1, -1)


def _name(x: Tensor, what: str) -> str:
    if x.dtype not in FP8:
        raise Unfit(f"{what} is {x.dtype}, not fp8")
    return FP8[x.dtype]


def _product(
    a: Tensor, b: Tensor, bias: Tensor | None, scaled: bool, out_dtype: torch.dtype | None, fast: bool | None
) -> ScaledProduct:
    """Return what a product is compiled for. Raises Unfit for what hostir does not compute."""
    if b.shape[0] != a.shape[-1]:
        raise Unfit(f"A has {a.shape[-1]} columns, and B has {b.shape[0]} rows")
    dtype = out_dtype or b.dtype
    if dtype not in RESULTS and dtype not in FP8:
        raise Unfit(f"its result is {dtype}")
    if bias is not None and (bias.dtype not in RESULTS or [*bias.shape] != [b.shape[1]]):
        raise Unfit(f"its bias is of shape {[*bias.shape]}, {bias.dtype}")
    narrow = dtype in FP8
    word = FP8[dtype] if narrow else RESULTS[dtype]
    return ScaledProduct(
        _name(b, "B"), b.shape[1], word, "" if bias is None else RESULTS[bias.dtype], scaled and narrow, bool(fast)
    )


def _rows_first(scale: Tensor, x: Tensor, outside: int, ranks: int = 1) -> Tensor:
    """Return the scales of the rows of `x`, with axis `outside` outermost, which is `ranks` times as long."""
    sizes = [n * ranks if k == outside else n for k, n in enumerate(x.shape[:-1])]
    return scale.float().reshape(*sizes, scale.shape[-1]).movedim(outside, 0).contiguous()


# Operators ------------------------------------------------------------------------------------------------------------


def all_gather_scaled_matmul(
    op: Operator,
    a: Tensor,
    bs: Sequence[Tensor],
    scale: Tensor,
    b_scales: Sequence[Tensor],
    axis: int,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    fast: Sequence[bool | None],
    scales: str = "",
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gather `a` along an axis but the last, with its scales, and multiply it with each of `bs`.

    `scales` says which those of `a` are, where their shapes need not: of one row each, they may be the tensor's.
    """
    ranks = op.group.size
    found = scales or gathered_scales(a, scale, bs, b_scales, axis, ranks)
    if axis == a.ndim - 1:
        raise Unfit("the axis that is gathered is the one that the products sum over")
    if not bs:
        raise Unfit("there is no product")
    kind, (x, outside) = _name(a, "A"), grouped(a, axis)
    scaled = [r is not None for r in result_scales]
    made = tuple(_product(a, *given) for given in zip(bs, biases, scaled, out_dtypes, fast, strict=True))
    ones, blocks = [1] * x.ndim, found.endswith(BLOCKS)
    times = ranks if found.startswith("replicated") else 1
    of_rows = scale.float().reshape(ones) if found == "one" else _rows_first(scale, x, outside, times)
    inputs, one = [x, of_rows], None
    for b, t, bias, r, p in zip(bs, b_scales, biases, result_scales, made, strict=True):
        inputs += [b, _right_scale(t, blocks), *(() if bias is None else (bias,))]
        inputs += [r.float().reshape(1)] if p.scaled and r is not None else []
        if p.dtype in FP8.values() and one is None:
            one = torch.ones(ones, device=a.device)
            inputs.append(one)
    key = (a.shape[-1], made, found, x.ndim - 2, outside)
    results = op.execute(gathered_program, key, inputs, dtype=kind)
    products, (full, *of_full) = results[: len(bs)], results[len(bs) :]
    every = from_front(own(of_full[0], scale, ranks), a, axis, ranks) if of_full else scale
    return from_front(own(full, a, ranks), a, axis, ranks), every, [from_front(y, a, axis, ranks) for y in products]


def scaled_matmul_reduce_scatter(
    op: Operator,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    b_scale: Tensor,
    average: bool,
    axis: int,
    output_shape: Sequence[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    fast: bool,
) -> Tensor:
    """Multiply, sum over all ranks, and return this rank's part along an axis of `output_shape`; contiguous.

    As in torch, each rank adds the bias to its own product.
    """
    ranks, form = op.group.size, scattered_scales(a, scale, b, b_scale)
    shape = [*output_shape[:-1], b.shape[1]]
    if prod(shape[:-1]) != prod(a.shape[:-1]) or output_shape[-1] != b.shape[1]:
        raise ValueError(f"output_shape {[*output_shape]} does not fit A of shape {[*a.shape]} and B of {[*b.shape]}")
    if axis == len(shape) - 1:
        raise Unfit("it scatters the columns of the product, of which scales are no rows")
    if shape[axis] % ranks:
        raise Unfit(f"its {ranks} ranks do not divide axis {axis} of the product, which is {shape[axis]}")
    if out_dtype not in RESULTS:
        raise Unfit(f"partial sums in {out_dtype or b.dtype} would be added over ranks: give out_dtype")
    summed = torch.float32 if average and out_dtype == torch.float16 else out_dtype  # which do not overflow
    kind, product = _name(a, "A"), _product(a, b, bias, False, summed, fast)
    seen = a.reshape(*shape[:-1], a.shape[-1])
    x, outside = grouped(seen, axis, joined=True)
    if form == "one":
        scale = scale.float().reshape([1] * x.ndim)
    else:
        scale = _rows_first(scale.expand(*a.shape[:-1], scale.shape[-1]), x, outside)
    inputs = [x, scale, b, _right_scale(b_scale, form == "blocks")]
    if bias is not None:
        product = replace(product, bias=product.dtype)
        inputs.append(bias.to(summed))
    shape[axis] //= ranks
    key = (a.shape[-1] * ranks, product, form, x.ndim - 2, outside)
    (y,) = op.execute(scattered_program, key, inputs, dtype=kind)
    return (mean(y, ranks, out_dtype) if average else y).view(shape)
