"""Fusions under construction: `with hi.Fusion(...)`, and the functions that users call on its tensors."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import replace
from numbers import Real
from types import TracebackType
from typing import Any

from hostir.dsl.tensor import NAME, SizeLike, Tensor
from hostir.ir import comm_ops, scaled_ops, tensor_ops, view_ops
from hostir.ir.op import Phase, Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.sizes import Size, product
from hostir.ir.source import Span, described, did_you_mean, error, user_span
from hostir.ir.tensor_ops import TensorOp
from hostir.ir.types import DTYPES, Axis, DType, Mesh, TensorType

# Fusions --------------------------------------------------------------------------------------------------------------
# A fusion under construction: `with hi.Fusion(...)`, its inputs and outputs, and its program.

TORCH_NAMES = {
    **{"torch.float64": "f64", "torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"},
    **{"torch.float8_e4m3fn": "f8e4m3", "torch.float8_e5m2": "f8e5m2"},
}
MAX_AXES = 64  # torch's limit for a tensor

_building: ContextVar[Fusion | None] = ContextVar("building", default=None)


class Fusion:
    """A tensor program, before lowering. Statements are added inside `with`; annotations may follow after it.

        with hi.Fusion("layer") as fusion:
            x = hi.tensor("x", ["M", 64])
            w = hi.tensor("w", [64, 32])
            y = x @ w
            fusion.output(y)

    Results are named after the variable that they are assigned to. `print(fusion)` shows the program. Raises
    HostIRError for an invalid name.

    Args:
        name: letters, digits and `_`, not starting with a digit.
    """

    def __init__(self, name: str = "fusion") -> None:
        self.span = user_span()
        _check_name(name, "a fusion", self.span)
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._statements: list[Statement] = []
        self._names = Names()
        self._entered: list[Token[Fusion | None]] = []

    def __enter__(self) -> Fusion:
        self._entered.append(_building.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        _building.reset(self._entered.pop())

    def output(self, *tensors: Tensor) -> None:
        """Declare outputs, in the order in which a call returns them.

        Raises HostIRError for a tensor of another fusion, for an input, and for a tensor that is an output already.
        """
        span = user_span()
        for t in tensors:
            if not isinstance(t, Tensor) or t.fusion is not self:
                hint = "build it inside this fusion's 'with'"
                raise error(f"not a tensor of fusion @{self.name}: {described(t)}", span, hint=hint)
            if t in self.inputs:
                expected = "the result of a computation"
                raise error(f"the output %{t.name} is an input, never computed", span, expected=expected)
            if t in self.outputs:
                raise error(f"%{t.name} is declared as an output twice", span)
            self.outputs.append(t)

    def program(self) -> Program:
        """Return the fusion as a program, with the annotations so far; `hi.lower` begins with it.

        Raises HostIRError if there is no output.
        """
        if not self.outputs:
            raise error(f"fusion @{self.name} has no output", self.span, hint="fusion.output(c)")
        meshes: dict[tuple[Any, ...], Mesh] = {}
        types = {}
        for t in self.tensors.values():
            mesh = None
            if t.mesh:
                key = (t.mesh.names, t.mesh.shape, t.mesh.devices)
                name = f"mesh_{len(meshes)}" if meshes else "mesh"
                mesh = meshes.setdefault(key, Mesh(name, *key))
            types[t.name] = TensorType(t.dtype, t.axes, mesh, t.partial_over)
        values = {t.name: Value(t.name, types[t.name], t.span) for t in self.tensors.values()}
        return Program(
            self.name,
            Phase.FUSION,
            tuple(meshes.values()) or (Mesh("mesh", ("didx",), (1,), (0,)),),
            tuple(values[t.name] for t in self.inputs),
            tuple(values[t.name] for t in self.outputs),
            tuple(s.rename(values) for s in self._statements),
        )

    def operate(self, operator: str, *operands: Any) -> Tensor:
        """Add the statements of an arithmetic operator on tensors of the fusion being built, and numbers."""
        return OPERATORS[operator](*operands)

    def size(self, extent: SizeLike, span: Span | None) -> Size:
        """Return the size of a result or a split, whose symbols must be those of inputs."""
        size = Size.of(extent, span)
        known = {n for t in self.inputs for s in t.shape for n in s.names}
        if unknown := sorted(size.names - known):
            hint = did_you_mean(unknown[0], known) or "sizes get their names from the shapes of inputs"
            expected = f"one of: {', '.join(sorted(known)) or 'none'}"
            raise error(f"unknown size name '{unknown[0]}'", span, expected=expected, hint=hint)
        return size

    def _new(self, name: str, dtype: DType, shape: Sequence[Size], span: Span | None) -> Tensor:
        t = Tensor(self, self._names.fresh(name), dtype, shape, span)
        self.tensors[t.name] = t
        return t

    def __str__(self) -> str:
        return str(self.program())

    def __repr__(self) -> str:
        return f"fusion @{self.name}"

    def _repr_markdown_(self) -> str:
        return self.program()._repr_markdown_()


def _check_name(name: object, what: str, span: Span | None) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise error(
            f"{described(name)} cannot name {what}", span, expected="letters, digits and _, not starting with a digit"
        )


def building(span: Span | None) -> Fusion:
    """Return the fusion of the innermost `with`."""
    fusion = _building.get()
    if fusion is None:
        raise error("no fusion is being built", span, hint="with hi.Fusion('name') as fusion: ...")
    return fusion


def sizes(shape: Any, span: Span | None, fusion: Fusion | None = None) -> list[Size]:
    """Return a shape as sizes; with `fusion`, its names must be size names of the fusion's inputs."""
    if isinstance(shape, str | bytes) or not isinstance(shape, Sequence):
        raise error(f"not a shape: {described(shape)}", span, expected="a list of sizes, such as [4, 'M', 128]")
    if len(shape) > MAX_AXES:
        raise error(f"a shape of {len(shape)} axes", span, expected=f"at most {MAX_AXES}")
    return [fusion.size(s, span) if fusion else Size.of(s, span) for s in shape]


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, which may be torch's; for anything else, a description of the value."""
    name = dtype if isinstance(dtype, str) else described(dtype)
    return TORCH_NAMES.get(name, name)


def tensor(name: str, shape: Sequence[SizeLike], dtype: Any = "bf16") -> Tensor:
    """Declare an input of the fusion being built; calls pass the inputs in the order of their declarations.

    Raises HostIRError outside `with hi.Fusion(...)`, for a name that is taken, and for an invalid size or dtype.

    Args:
        name: letters, digits and `_`, not starting with a digit.
        shape: of the unsharded tensor: integers, names bound at run time ("M"), products and quotients of them ("M/8").
        dtype: `f64`, `f32`, `f16`, `bf16`, `f8e4m3` or `f8e5m2`, or the torch dtype.
    """
    span = user_span()
    fusion = building(span)
    _check_name(name, "a tensor", span)
    if name in fusion._names.taken:
        raise error(f"%{name} is defined twice", span, hint="give it another name")
    if (kind := dtype_name(dtype)) not in DTYPES:
        hint = did_you_mean(kind, DTYPES)
        raise error(f"unknown dtype {described(dtype)}", span, expected=f"one of: {', '.join(DTYPES)}", hint=hint)
    t = fusion._new(name, DTYPES[kind], sizes(shape, span), span)
    fusion.inputs.append(t)
    return t


def operand(t: Any, span: Span | None) -> Value:
    """Return a tensor as an operand of a statement of the fusion being built."""
    fusion = building(span)
    if not isinstance(t, Tensor):
        raise error(f"not a tensor: {described(t)}", span, expected="a tensor of this fusion")
    if t.fusion is not fusion:
        whose = f"%{t.name} belongs to fusion @{t.fusion.name}, not to @{fusion.name}"
        raise error(whose, span, hint="declare it as an input here: hi.tensor(...)")
    return Value(t.name, TensorType(t.dtype, tuple(Axis.of(s) for s in t.shape)), t.span)


def apply(cls: type[Any], shape: Sequence[Size] | None = None, name: str = "", **fields: Any) -> Tensor:
    """Add a statement at the user's line; its result has `shape`, or the inferred shape.

    The result is named `name`, or after the variable that it is assigned to.
    """
    span = user_span()
    fusion = building(span)
    unknown = Value("out", TensorType(DTYPES["f32"], ()))
    draft = cls(out=unknown, span=span, **fields)
    if isinstance(draft, TensorOp):
        dtype, shape = draft.result()
    elif shape is None:
        dtype, shape = draft.infer().dtype, draft.infer().shape
    else:
        dtype = draft.x.tensor.dtype
    t = fusion._new(name or _assigned(span, cls.keyword()), dtype, shape, span)
    statement = replace(draft, out=Value(t.name, TensorType(dtype, tuple(Axis.of(s) for s in shape)), span))
    statement.verify()
    fusion._statements.append(statement)
    return t


def _assigned(span: Span | None, otherwise: str) -> str:
    """Return the name of the variable that the user's line assigns the result to; `otherwise` without one."""
    if span is None or not span.column:
        return otherwise
    before, after = span.text[: span.column - 1], span.text[span.column - 1 + span.width :]
    match = re.search(r"([A-Za-z_]\w*)\s*(?::[^=]*)?=\s*$", before)
    return match[1] if match and re.match(r"\s*([#;]|$)", after) else otherwise


# Functions ------------------------------------------------------------------------------------------------------------
# The functions that users call on tensors. Each adds one statement to the fusion being built and returns its result.


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a[..., K] @ b[K, N]` of shape `[..., N]`; also written `a @ b`.

    Operands and result have the same dtype; sums are in f32 (f64: in f64). Raises HostIRError if the contracted
    sizes or the dtypes differ, or if `b` does not have two axes.
    """
    span = user_span()
    return apply(tensor_ops.Matmul, a=operand(a, span), b=operand(b, span))


def linear(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a[..., K] @ weight[N, K]^T + bias[N]` of shape `[..., N]`: what `torch.nn.Linear` computes.

    Operands and result have the same dtype; sums are in f32 (f64: in f64). Raises HostIRError if sizes or dtypes do
    not fit.
    """
    span = user_span()
    added = None if bias is None else operand(bias, span)
    return apply(tensor_ops.Linear, a=operand(a, span), weight=operand(weight, span), bias=added)


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: Any = "bf16",
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """`(a * scale_a)[..., K] @ (b * scale_b)[K, N] + bias[N]` of fp8 operands, of shape `[..., N]`.

    The two scales are f32. Both are tensor-wise (one element); or both are row-wise (`[..., 1]` with the rows of `a`,
    and `[1, N]`); or both are block-wise (`[..., K/128]` and `[K/128, N/128]`). If K is sharded over R ranks, each rank
    may have separate tensor-wise or row-wise scales: `[..., R]` and `[R, ...]`, sharded like K. Sums are in f32. Raises
    HostIRError for other dtypes, and for scales that do not fit.

    Args:
        a, b: `f8e4m3` or `f8e5m2`. GPUs need contiguous columns of `b`: a transposed `[N, K]`.
        dtype: dtype of the result: `bf16`, `f16` or `f32`. Partial sums are communicated in it.
        bias: a tensor in the dtype of the result.
        fast: True allows tensor cores to accumulate as with `use_fast_accum` of `torch._scaled_mm`.
    """
    span = user_span()
    if not isinstance(fast, bool):
        raise error(f"fast is {described(fast)}", span, expected="True or False")
    return apply(
        scaled_ops.ScaledMatmul,
        a=operand(a, span),
        b=operand(b, span),
        scale_a=operand(scale_a, span),
        scale_b=operand(scale_b, span),
        dtype=dtype_name(dtype),
        bias=None if bias is None else operand(bias, span),
        accumulate="fast" if fast else "",
    )


SCALES = ("tensor", "rows", "blocks")


def quantize(
    x: Tensor, dtype: Any = "f8e4m3", scales: str = "rows", scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`x` in fp8, and the f32 scales to multiply it by: `x` is about `q * scale`, for `q, scale = quantize(x)`.

    A scale is `max(amax / max, 2^-126)`. `amax` is the largest absolute value of the elements that share the scale;
    `max` is the largest value of the dtype, 448 for `f8e4m3` and 57344 for `f8e5m2`. `q` is `x / scale` in f32, limited
    to the dtype's range and rounded to nearest even. If all elements are zero, the scale is 2^-126 and `q` is zero.

    Elements that share a scale with a NaN become NaN. An infinity makes the scale infinite: the infinity becomes NaN,
    and the other elements become zero. Products with either are NaN.

    Args:
        dtype: `f8e4m3` or `f8e5m2`.
        scales: the elements that share a scale: all of the `tensor`, each of the `rows`, or `blocks` of 128 elements of
            a row. If a tensor with one scale is sharded, ranks gather the scales of its rows to agree on it.
        scale: a scale to use instead, such as one from earlier batches: `[1, ..., 1]`, `[..., 1]` or `[..., K/128]`.
    """
    span = user_span()
    value, kind = operand(x, span), dtype_name(dtype)
    if scale is None:
        if scales not in SCALES:
            hint = did_you_mean(scales, SCALES) if isinstance(scales, str) else ""
            raise error(f"unknown scales {described(scales)}", span, expected=f"one of: {', '.join(SCALES)}", hint=hint)
        block = scaled_ops.BLOCK if scales == "blocks" else 0
        scale = apply(scaled_ops.RowScales, name="scale", x=value, dtype=kind, block=block)
        if scales == "tensor":
            scale = apply(scaled_ops.Largest, name="scale", x=operand(scale, span))
    q = apply(scaled_ops.Quantize, name="quantized", x=value, scale=operand(scale, span), dtype=kind)
    return q, scale


def add(x: Tensor | float, y: Tensor | float) -> Tensor:
    """The elementwise sum, also written `x + y`.

    Axes are aligned from the last one, and axes of size 1 are broadcast, as in torch. One of the two may be a number,
    which the program then holds; one that changes from call to call is an input, `hi.tensor("scale", [1], dtype)`.
    Raises HostIRError if sizes do not match or dtypes differ, and for a number that is not finite.
    """
    span = user_span()
    tensor, number = with_number(x, y, span)
    if number is None:
        return apply(tensor_ops.Add, x=operand(x, span), y=operand(y, span))
    return apply(tensor_ops.Offset, x=operand(tensor, span), amount=number)


def mul(x: Tensor | float, y: Tensor | float) -> Tensor:
    """The elementwise product, also written `x * y`; axes, dtypes, numbers and errors are as for `add`."""
    span = user_span()
    tensor, number = with_number(x, y, span)
    if number is None:
        return apply(tensor_ops.Mul, x=operand(x, span), y=operand(y, span))
    return apply(tensor_ops.Scale, x=operand(tensor, span), factor=number)


def with_number(x: Any, y: Any, span: Span | None) -> tuple[Any, float | None]:
    """Return the operand that is no number, and the number that the other one is; None if neither is a number."""
    for tensor, given in ((x, y), (y, x)):
        if not isinstance(given, bool) and isinstance(given, Real) and not isinstance(tensor, Real):
            return tensor, finite(given, span)
    return x, None


def finite(given: Real, span: Span | None) -> float:
    """Return a number as a float; raise HostIRError for one that is infinite, not a number, or too large."""
    try:
        number = float(given)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise error(f"a tensor meets the number {described(given)}", span, expected="a finite number")
    return number


def _subtract(x: Any, y: Any) -> Tensor:
    """Add what computes `x - y`: the sum with the negated `y`, which is exact."""
    span = user_span()
    tensor, number = with_number(x, y, span)
    if number is not None and tensor is x:
        return apply(tensor_ops.Offset, x=operand(x, span), amount=-number)
    right = operand(y, span)
    negated = apply(tensor_ops.Scale, name=f"minus_{right.name}", x=right, factor=-1.0)
    return add(x, negated)


def _divide(x: Any, y: Any) -> Tensor:
    """Add what computes `x / y` for a number `y`: the product with its inverse."""
    span = user_span()
    tensor, number = with_number(x, y, span)
    if number is None or tensor is y:
        hint = "multiply with an input that holds the inverse"
        raise error("a fusion divides by numbers only", span, expected="such as x / 3", hint=hint)
    if not number or not math.isfinite(1 / number):
        raise error(f"{operand(x, span)} is divided by {described(y)}, which has no inverse", span)
    return mul(x, 1 / number)


OPERATORS = {"@": matmul, "+": add, "*": mul, "-": _subtract, "/": _divide}


def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`, elementwise, in the shape and dtype of `x`."""
    return apply(tensor_ops.Relu, x=operand(x, user_span()))


def gelu(x: Tensor) -> Tensor:
    """The exact Gaussian error linear unit, `x * (1 + erf(x / sqrt 2)) / 2`, elementwise."""
    return apply(tensor_ops.Gelu, x=operand(x, user_span()))


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))`, elementwise."""
    return apply(tensor_ops.Silu, x=operand(x, user_span()))


def cast(x: Tensor, dtype: Any) -> Tensor:
    """The same values in another dtype, rounded to nearest even.

    `dtype` is any dtype that `tensor` accepts; HostIRError for any other. A cast to fp8 is torch's conversion, without
    a scale; `quantize` computes a scale.
    """
    return apply(tensor_ops.Cast, x=operand(x, user_span()), dtype=dtype_name(dtype))


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` of each row of `x`: what `torch.nn.RMSNorm` of the last axis computes.

    It is computed in f32 (f64: in f64) and rounded once. `x[..., N]`, `weight[N]` and the result have the same dtype.
    Sharded rows are gathered first. Raises HostIRError if sizes or dtypes do not fit.
    """
    span = user_span()
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= sys.float_info.max:
        raise error(f"eps is {described(eps)}", span, expected="a finite number of at least 0, such as 1e-6")
    scaled = None if weight is None else operand(weight, span)
    return apply(tensor_ops.RmsNorm, x=operand(x, span), eps=float(eps), weight=scaled)


def sum(x: Tensor, axis: int) -> Tensor:
    """The sum over one axis, computed in f32 (f64: in f64). The axis is removed; a negative axis counts from the end.

    Raises HostIRError if there is no such axis.
    """
    span = user_span()
    value = operand(x, span)
    count = len(value.tensor.axes)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -count <= axis < count:
        raise error(f"{value} has no axis {described(axis)}", span, expected=f"an axis below {count}")
    return apply(tensor_ops.Sum, x=value, axis=axis % count)


def reshape(x: Tensor, shape: Sequence[SizeLike]) -> Tensor:
    """The same elements, in row-major order, in another shape; one size may be -1, and is then inferred.

    Raises HostIRError if the number of elements differs.
    """
    span = user_span()
    value = operand(x, span)
    given = list(shape) if isinstance(shape, Sequence) else []
    unknown = [k for k, size in enumerate(given) if isinstance(size, int) and size == -1]
    if len(unknown) == 1:
        at, total = unknown[0], product(value.tensor.shape)
        known = product(sizes([*shape[:at], *shape[at + 1 :]], span, building(span)))
        if not total.divisible_by(known):
            raise error(f"{value} has {total} elements, which {known} does not divide", span)
        shape = [*shape[:at], total / known, *shape[at + 1 :]]
    new = sizes(shape, span, building(span))
    if product(new) != product(value.tensor.shape):
        raise error(f"{value} has {product(value.tensor.shape)} elements, the new shape {product(new)}", span)
    return apply(view_ops.Reshape, new, x=value)


def permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The axes in another order: axis `i` of the result is axis `axes[i]` of `x`, as in torch.

    Raises HostIRError unless `axes` names each axis once.
    """
    span = user_span()
    value = operand(x, span)
    if not isinstance(axes, Sequence) or any(isinstance(i, bool) or not isinstance(i, int) for i in axes):
        raise error(f"not an order of axes: {described(axes)}", span, expected="a list of integers, such as (1, 0)")
    count = len(value.tensor.axes)
    return apply(view_ops.Permute, x=value, axes=tuple(i % count if -count <= i < 0 else i for i in axes))


def reshard(x: Tensor) -> Tensor:
    """The same tensor with another sharding, or on another mesh: annotate the result with its mesh and axes.

    Lowering inserts the communication. A result without annotation is replicated. If the input is a partial sum,
    declared with `x.partial(mesh)`, the result is the sum.
    """
    value = operand(x, user_span())
    return apply(comm_ops.Reshard, value.tensor.shape, x=value)
