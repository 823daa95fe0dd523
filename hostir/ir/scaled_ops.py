"""Define the product of fp8 matrices with scales, and statements that convert tensors to fp8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

from hostir.ir.op import Int, Name, Read, ReadIf, Shape, Value, statement
from hostir.ir.sharding import ALONE, CONTRACTED, Map
from hostir.ir.sizes import ONE, Division, Size
from hostir.ir.source import did_you_mean
from hostir.ir.tensor_ops import BY_BLOCKS, Contraction, TensorOp, check_contracted
from hostir.ir.types import DTYPES, FP8, DType, TensorType

BLOCK = 128  # elements along K, and columns of B, that share a block-wise scale
F32 = DTYPES["f32"]
RESULTS = ("bf16", "f16", "f32")  # dtypes of products of fp8 matrices


def _shown(shape: Shape) -> str:
    return f"f32[{', '.join(map(str, shape))}]"


def require_f32(op: TensorOp, scale: Value) -> None:
    """Raise unless a scale is f32."""
    if scale.tensor.dtype != F32:
        raise op.fail(f"the scale {scale} is {scale.tensor.dtype}", expected="scales in f32")


def _fp8_named(op: TensorOp, name: str) -> DType:
    """Return the fp8 type with this name; raise for any other name."""
    if name not in FP8:
        expected, hint = f"one of: {', '.join(FP8)}", did_you_mean(name, FP8)
        raise op.fail(f"'{name}' is not an fp8 dtype", expected=expected, hint=hint)
    return FP8[name]


def fp8_result(op: TensorOp, operands: Sequence[Value], name: str) -> DType:
    """Return the dtype with this name, of a product. Raise if an operand is not fp8, or if the result cannot be it."""
    for x in operands:
        if x.tensor.dtype.name not in FP8:
            raise op.fail(
                f"{x} is {x.tensor.dtype}",
                expected=f"operands in {' or '.join(FP8)}",
                hint="hi.quantize makes fp8 tensors and scales in Python; products of wider dtypes have no scales",
            )
    if name not in RESULTS:
        hint = did_you_mean(name, RESULTS)
        if name in FP8:
            hint = "write the product to bf16, then quantize it: its scales are not known before"
        raise op.fail(f"a product of fp8 matrices is not '{name}'", expected=f"one of: {', '.join(RESULTS)}", hint=hint)
    return DTYPES[name]


class Scaling(Enum):
    """The granularity of scales: the elements that share a scale."""

    TENSOR = "tensor-wise"
    ROW = "row-wise"
    BLOCK = "block-wise"


@dataclass(frozen=True)
class ScaleShapes:
    """The shapes of the scales of `a` and `b` at one granularity."""

    scaling: Scaling
    a: Shape
    b: Shape


@dataclass(frozen=True)
class OperandScales:
    """The operands `a` and `b` of a product, and their scales `of_a` and `of_b`."""

    a: Value
    b: Value
    of_a: Value
    of_b: Value

    def verify(self, op: TensorOp) -> None:
        """Raise if the scales do not fit the operands, or if the two scales have different granularities."""
        for scale in (self.of_a, self.of_b):
            require_f32(op, scale)
        if self.scaling is not None:
            return
        a, b, K = self.of_a.tensor.shape, self.of_b.tensor.shape, self.a.tensor.shape[-1]
        forms = list(self.forms(ONE))
        alike = [form for form in forms if form.a == a]
        if not alike and len(a) > 1 and not a[0].is_one:
            alike = [form for form in self.forms(self.groups) if form.a == a]
        hint = ""
        if a[-1:] != (ONE,) and not (K / BLOCK).is_integer and not K.symbols:
            hint = f"block-wise scales need a multiple of {BLOCK} elements along K, and K is {K}"
        if any(form.b == a and form.a == b for form in forms):
            hint = f"{self.of_a} fits {self.b}, and {self.of_b} fits {self.a}: exchange them"
        N = self.b.tensor.shape[-1]
        if a[-1] == b[0] == K / BLOCK and not N.divisible_by(BLOCK) and b[-1] != N and not N.symbols:
            message = f"{self.b} has {N} columns, and a block-wise scale covers {BLOCK} columns"
            raise op.fail(message, expected=f"a multiple of {BLOCK} columns, or other scales")
        if alike:
            raise op.fail(
                f"{self.of_a} is a {alike[0].scaling.value} scale of {self.a}, and {self.of_b} is {self.of_b.tensor}",
                expected=" or ".join(dict.fromkeys(_shown(form.b) for form in alike)),
                hint=hint or "both scales are tensor-wise, both row-wise, or both block-wise",
            )
        raise op.fail(
            f"{self.of_a}: {self.of_a.tensor} is not a scale of {self.a}: {self.a.tensor}",
            expected=" or ".join(f"{_shown(form.a)} ({form.scaling.value})" for form in forms),
            hint=hint,
        )

    @property
    def groups(self) -> Size:
        """The number of groups of scales along K, if each rank that holds a part of K has its own scales.

        It is the last extent of the shape of `of_a`. It is 1 if this extent is unknown or does not divide K.
        """
        groups, K = self.of_a.tensor.shape[-1:], self.a.tensor.shape[-1]
        return groups[0] if groups and groups[0].value is not None and K.divisible_by(groups[0]) else ONE

    def forms(self, groups: Size) -> Iterator[ScaleShapes]:
        """Yield the possible shapes of the two scales, for each granularity.

        If `groups` is not 1, also yield the shapes with `groups` tensor-wise or row-wise scales along K.
        """
        *rows, K = self.a.tensor.shape
        N = self.b.tensor.shape[1]
        yield ScaleShapes(Scaling.TENSOR, (*(ONE for _ in rows), ONE), (ONE, ONE))
        yield ScaleShapes(Scaling.ROW, (*rows, ONE), (ONE, N))
        if K.divisible_by(BLOCK) and N.divisible_by(BLOCK):
            yield ScaleShapes(Scaling.BLOCK, (*rows, K / BLOCK), (K / BLOCK, N / BLOCK))
        if groups != ONE:
            yield ScaleShapes(Scaling.TENSOR, (*(ONE for _ in rows), groups), (groups, ONE))
            yield ScaleShapes(Scaling.ROW, (*rows, groups), (groups, N))

    @cached_property
    def scaling(self) -> Scaling | None:
        """The granularity of both scales; None if their shapes fit no granularity."""
        a, b, groups = self.of_a.tensor.shape, self.of_b.tensor.shape, self.groups
        if not a or not b:
            return None
        scaling = next((form.scaling for form in self.forms(groups) if (form.a, form.b) == (a, b)), None)
        if (
            scaling is None
            and all(size.is_one for size in (*a[:-1], *b[1:]))
            and a[-1] == b[0]
            and b[0] in (ONE, groups)
        ):
            return Scaling.TENSOR  # a tensor-wise scale may have fewer axes, because a slice of rows may remove an axis
        return scaling


@statement
@dataclass(frozen=True, eq=False, repr=False)
class ScaledMatmul(Contraction):
    """`out[..., N] = sum over k of (a * scale_a)[..., k] (b * scale_b)[k, n]`, of fp8 operands, accumulated in f32.

    The scales are f32. Their shapes are one of

    - tensor-wise: each scale has one element, and all its axes have extent 1;
    - row-wise: `[..., 1]`, one scale for each row of `a`, and `[1, N]`, one scale for each column of `b`;
    - block-wise: `[..., K/128]` and `[K/128, N/128]`. A scale of `a` covers 128 elements of a row. A scale of `b`
      covers 128 x 128 elements.

    If G ranks hold parts of K, there may be G tensor-wise or row-wise scales along K, one for each rank: `[..., G]` and
    `[G, ...]`.

    The result is bf16, f16 or f32. With `plus %bias` the statement adds a row of N elements, which have the dtype of
    the result, and rounds once. If the product is a partial sum, the bias may be a partial sum, too. With `accumulate
    fast` the sums over all of K may stay in the tensor core's accumulators, as with `use_fast_accum` of
    `torch._scaled_mm`. `accumulate fast` has no effect on a CPU.

    Flags work as in `matmul`. The flag of a block says that the block's rows of `scale_a` are ready, too. `own %x`
    replaces only rows of `a`.

    Example: %c: f32[8, 4] = scaled_matmul %a: f8e4m3[8, 64], %b: f8e5m2[64, 4] scaled %s: f32[1], %t: f32[1] to f32
    """

    syntax = (
        "scaled_matmul {a}, {b} scaled {scale_a}, {scale_b}<? plus {bias}?> to {dtype}"
        "<? accumulate {accumulate}?> -> {out}" + BY_BLOCKS
    )
    takes_fp8: ClassVar[bool] = True
    followers: ClassVar[frozenset[str]] = frozenset({"scale_a", "scale_b", "bias"})

    b: Read
    scale_a: Read
    scale_b: Read
    dtype: Name
    bias: ReadIf = field(default=None, kw_only=True)
    accumulate: Name = field(default="", kw_only=True)

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype, n = fp8_result(self, (self.a, self.b), self.dtype), self.b.tensor.shape[-1]
        check_contracted(self, self.a, self.b, 0)
        if self.accumulate not in ("", "fast"):
            raise self.fail(f"it cannot accumulate '{self.accumulate}'", expected="'accumulate fast', or neither word")
        self.scales.verify(self)
        if self.bias is not None and (self.bias.tensor.shape != (n,) or self.bias.tensor.dtype != dtype):
            raise self.fail(f"the bias {self.bias} is {self.bias.type}", expected=f"{dtype}[{n}]")
        return dtype, (*self.a.tensor.shape[:-1], n)

    @cached_property
    def scales(self) -> OperandScales:
        return OperandScales(self.a, self.b, self.scale_a, self.scale_b)

    @property
    def scaling(self) -> Scaling | None:
        """The granularity of both scales; None if their shapes fit no granularity."""
        return self.scales.scaling

    def maps(self) -> tuple[Map, ...]:
        rows, scaling = len(self.a.tensor.axes) - 1, self.scaling
        lead = tuple(range(rows))
        of_a: Map = tuple(ALONE for _ in self.scale_a.tensor.axes[:-1]) if scaling is Scaling.TENSOR else lead
        groups = CONTRACTED if not self.scale_a.tensor.shape[-1].is_one else ALONE
        columns = ALONE if scaling is Scaling.TENSOR else rows
        of_b: Map = (
            (groups, columns) if len(self.scale_b.tensor.axes) == 2 else (ALONE,) * len(self.scale_b.tensor.axes)
        )
        maps = (*lead, CONTRACTED), (CONTRACTED, rows), (*of_a, groups), of_b, (rows,)
        return maps[: len(self.operands)]

    def verify_layout(self) -> None:
        super().verify_layout()
        self.check_parts([v.tensor for v in self.operands])

    def infer(self) -> TensorType:
        bias = self.bias
        if bias is None or not bias.tensor.partial:
            return super().infer()
        product = replace(self, bias=None).infer()
        if bias.tensor.partial != product.partial:
            sums = " and ".join(", ".join(over) or "none" for over in (bias.tensor.partial, product.partial))
            raise self.fail(f"the bias {bias} and the product are partial sums over different axes: {sums}")
        return product

    def check_parts(self, operands: Sequence[TensorType]) -> None:
        a, b, scale, *_ = (type.local_shape for type in operands)
        if self.scaling is Scaling.BLOCK:
            for x, size in ((self.a, a[-1]), (self.b, b[1])):
                if not size.divisible_by(BLOCK):
                    message = f"a rank holds {size} elements of an axis of {x}, and a block-wise scale covers {BLOCK}"
                    raise self.fail(message, expected=f"a multiple of {BLOCK} on each rank")
        elif not scale[-1].is_one:
            raise self.fail(
                f"{self.scale_a} has {scale[-1]} scales along the {a[-1]} elements of K that a rank holds",
                expected=f"one scale, or one for each {BLOCK} elements",
                hint="several scales need as many ranks: shard the last axis of the operand over them",
            )

    def divisions(self) -> Iterator[Division]:
        yield from super().divisions()
        if self.scaling is Scaling.BLOCK:
            for x, axis in ((self.a, -1), (self.b, 1)):
                why = f"a block-wise scale covers {BLOCK} elements of {x}"
                yield Division(x.tensor.local_shape[axis] / BLOCK, why, self.span)

    def rows_in_blocks(self) -> tuple[Value, ...]:
        scales = () if self.scaling is Scaling.TENSOR else (self.scale_a,)
        return (self.rows, self.out, *scales)

    @property
    def scale_of_rows(self) -> Value | None:
        return None if self.scaling is Scaling.TENSOR else self.scale_a

    @property
    def along(self) -> tuple[int, ...]:
        return () if self.scaling is Scaling.TENSOR else (2,)

    def options(self) -> dict[str, Any]:
        options = super().options()
        return {n: x for n, x in options.items() if n not in ("dtype", "accumulate")} | {"fast": bool(self.accumulate)}


@statement
@dataclass(frozen=True, eq=False, repr=False)
class RowScales(TensorOp):
    """The scale with which each row of `x` is converted to an fp8 dtype: `max(amax / limit, 2^-126)`.

    `amax` is the largest absolute value of the row, and `limit` is the largest value of the dtype: 448 for `f8e4m3`,
    57344 for `f8e5m2`. Scales are f32. With `each 128` there is one scale for each 128 elements of a row. A row of
    zeros has the scale 2^-126, to avoid division by 0. A row with a NaN has the scale NaN. A row with an infinity and
    no NaN has an infinite scale.

    Example: %s: f32[16, 1] = row_scales %x: bf16[16, 256] to f8e4m3
    """

    syntax = "row_scales {x} to {dtype}<? each {block}?> -> {out}"
    x: Read
    dtype: Name
    block: Int = field(default=0, kw_only=True)

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        _fp8_named(self, self.dtype)
        *rows, K = self.x.tensor.shape or (ONE,)
        if self.x.tensor.dtype.name in FP8 or not self.x.tensor.shape:
            raise self.fail(f"{self.x} is {self.x.type}", expected="rows in f64, f32, f16 or bf16")
        if self.block and not K.divisible_by(self.block):
            raise self.fail(
                f"blocks of {self.block} elements do not divide the rows of {self.x}, of {K}",
                expected=f"a last axis that {self.block} divides",
            )
        return F32, (*rows, K / self.block if self.block else ONE)

    def maps(self) -> tuple[Map, ...]:
        rows = len(self.x.tensor.axes) - 1
        return ((*range(rows), rows if self.block else ALONE),)

    def divisions(self) -> Iterator[Division]:
        if self.block:
            why = f"a scale covers {self.block} elements of {self.x}"
            yield Division(self.x.tensor.local_shape[-1] / self.block, why, self.span)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Largest(TensorOp):
    """The largest element of a tensor. The result has the same number of axes, all of extent 1.

    It is NaN if an element is NaN, and 0 if there are no elements.

    Example: %y: f32[1, 1] = largest %x: f32[16, 32]
    """

    syntax = "largest {x} -> {out}"
    x: Read

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        return self.x.tensor.dtype, tuple(ONE for _ in self.x.tensor.shape)

    def maps(self) -> tuple[Map, ...]:
        return ((ALONE,) * len(self.x.tensor.axes),)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Quantize(TensorOp):
    """`x / scale` in an fp8 dtype: computed in f32, limited to the dtype's range, rounded to nearest even.

    The scale is f32 and has as many axes as `x`. Each axis of the scale has extent 1, or the extent of the axis of `x`.
    The last axis may also have one scale for each 128 elements of `x`. NaN stays NaN.

    Example: %y: f8e4m3[16, 32] = quantize %x: bf16[16, 32] by %s: f32[16, 1] to f8e4m3
    """

    syntax = "quantize {x} by {scale} to {dtype} -> {out}"
    x: Read
    scale: Read
    dtype: Name
    followers: ClassVar[frozenset[str]] = frozenset({"scale"})

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype, shape, scale = _fp8_named(self, self.dtype), self.x.tensor.shape, self.scale.tensor.shape
        if self.x.tensor.dtype.name in FP8:
            raise self.fail(f"{self.x} is {self.x.tensor.dtype} already", expected="a tensor in f64, f32, f16 or bf16")
        require_f32(self, self.scale)
        if len(scale) != len(shape) or not shape or not self._fits():
            ones = ", ".join("1" for _ in shape)
            rows = _shown((*shape[:-1], ONE))
            raise self.fail(
                f"{self.scale}: {self.scale.tensor} is not a scale of {self.x}: {self.x.tensor}",
                expected=f"f32[{ones}], {rows}, or one scale for each {BLOCK} elements of a row",
            )
        return dtype, shape

    def _fits(self) -> bool:
        *rows, K = self.x.tensor.shape
        *scales, last = self.scale.tensor.shape
        rows_fit = all(size in (extent, ONE) for size, extent in zip(scales, rows, strict=True))
        return rows_fit and (last in (K, ONE) or (K.divisible_by(BLOCK) and last == K / BLOCK))

    def maps(self) -> tuple[Map, ...]:
        pairs = enumerate(zip(self.scale.tensor.shape, self.x.tensor.shape, strict=True))
        spread = tuple(ALONE if size.is_one and not extent.is_one else i for i, (size, extent) in pairs)
        return tuple(range(len(self.x.tensor.axes))), spread

    def divisions(self) -> Iterator[Division]:
        *_, last = self.scale.tensor.shape
        if last not in (ONE, self.x.tensor.shape[-1]):
            why = f"a scale covers {BLOCK} elements of {self.x}"
            yield Division(self.x.tensor.local_shape[-1] / BLOCK, why, self.span)
