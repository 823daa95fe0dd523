"""Define computations on rows in groups, for mixtures of experts. The rows of one expert are a group.

The rows of all groups are in one tensor, group after group. Offsets say where each group begins. They are integers on
the device, and the host does not wait for them: a kernel reads them when it runs. The number of rows in the tensor is
the capacity. Rows before the first group and after the last group belong to no group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from hostir.ir.op import IndexOperand, Name, Phase, Read, ReadIf, Value, statement
from hostir.ir.scaled_ops import fp8_result, require_f32
from hostir.ir.sharding import ALONE, CONTRACTED, Map
from hostir.ir.sizes import ONE, Division, Size, product
from hostir.ir.tensor_ops import BY_BLOCKS, ByBlocks, TensorOp, check_equal_terms, same_dtype
from hostir.ir.types import FP8, DType, TensorType

if TYPE_CHECKING:
    from hostir.ir.machine import Frame, Ready

ROWS = "<? rows {index}?>"
SCALED = "<? scaled {scale_x}, {scale_w} to {dtype}?>"


@dataclass(frozen=True, eq=False, repr=False)
class GroupedProduct(TensorOp):
    """The base class of products of the rows `x[..., T, K]` in groups, with `offsets[..., E + 1]`.

    The leading axes are sources. Each source has its own rows and its own groups.
    """

    contracts: ClassVar[bool] = True

    @property
    def grouped(self) -> tuple[Value, Value]:
        """The operand that holds the rows, and the operand that holds the offsets."""
        raise AssertionError(type(self).__name__)

    @property
    def groupable(self) -> Size:
        """The number of rows of a source that may belong to groups."""
        return self.grouped[0].tensor.shape[-2]

    @property
    def index_operands(self) -> tuple[IndexOperand, ...]:
        return (IndexOperand(self.grouped[1], self.groupable, ascending=True),)

    def groups(self) -> int:
        """Return the number of groups. Raise if the offsets do not fit the rows."""
        rows, offsets = self.grouped
        *sources, length = offsets.tensor.shape or (Size(1),)
        if len(rows.tensor.axes) < 2:
            raise self.fail(f"{rows} is {rows.type}", expected="rows [..., T, K]")
        if length.value is None or length.value < 2 or tuple(sources) != rows.tensor.shape[:-2]:
            lead = "".join(f"{size}, " for size in rows.tensor.shape[:-2])
            raise self.fail(
                f"{offsets} is {offsets.type}, and {rows} is {rows.type}",
                expected=f"offsets [{lead}E + 1] for E groups, where E is an integer",
            )
        return length.value - 1


@statement
@dataclass(frozen=True, eq=False, repr=False)
class GroupedMatmul(ByBlocks, GroupedProduct):
    """`out[t] = x[t] @ w[e]` for the rows t of group e, which are `offsets[e] <= t < offsets[e + 1]`.

    The shapes are `x[..., T, K]`, `w[E, K, N]`, `offsets[..., E + 1]` and `out[..., T, N]`. With leading axes, each
    index of them has its own rows and its own offsets; all share the matrices `w`. Rows that belong to no group become
    0. Sums are accumulated in f32, or in f64 if the operands are f64.

    Offsets are i32 or i64. They do not decrease, and lie between 0 and T. The kernel reads them when it runs. Whatever
    they are, the statement reads all of `x` and writes all of the result.

    In a host program `rows %index` multiplies the rows `x[index[s]]` instead, as `permute_rows` would order them. The
    index is `[..., S]`, in i32 or i64, from 0 to T - 1. Groups then consist of these S rows, and the result is
    `[..., S, N]`.

    With `scaled %scale_x, %scale_w to dtype`, the operands are fp8, and the sums are multiplied by `scale_x[t]` and
    `scale_w[e, n]`. The scales are f32, of the shapes `[..., T, 1]` and `[E, 1, N]`. The result is bf16, f16 or f32.
    `rows %index` applies to the scales of the rows, too.

    With `ready %flags >= epoch from first`, the indices of the leading axes are sources, and they are split into equal
    blocks, one for each flag. The kernel computes a block after the block's flag has reached the epoch, as in `matmul`.
    The flag says that the block's scales are ready, too. The kernel reads all offsets and the index when it starts,
    before it waits. `own` is as in `matmul`. It raises no flags.

    Example: %y: bf16[64, 32] = grouped_matmul %x: bf16[64, 16], %w: bf16[4, 16, 32] by %offsets: i32[5]
    """

    syntax = f"grouped_matmul {{x}}, {{w}} by {{offsets}}{ROWS}{SCALED} -> {{out}}{BY_BLOCKS}"
    takes_fp8: ClassVar[bool] = True
    followers: ClassVar[frozenset[str]] = frozenset({"scale_x", "scale_w"})

    x: Read
    w: Read
    offsets: Read
    index: ReadIf = field(default=None, kw_only=True)
    scale_x: ReadIf = field(default=None, kw_only=True)
    scale_w: ReadIf = field(default=None, kw_only=True)
    dtype: Name = field(default="", kw_only=True)

    @classmethod
    def form(cls, phase: Phase) -> str:
        form = super().form(phase)
        return form if phase is Phase.HOST else form.replace(ROWS, "")

    @property
    def grouped(self) -> tuple[Value, Value]:
        return self.x, self.offsets

    @property
    def groupable(self) -> Size:
        return self.x.tensor.shape[-2] if self.index is None else self.index.tensor.shape[-1]

    @property
    def index_operands(self) -> tuple[IndexOperand, ...]:
        index = () if self.index is None else (IndexOperand(self.index, self.x.tensor.shape[-2]),)
        return (*super().index_operands, *index)

    @property
    def rows(self) -> Value:
        return self.x

    @property
    def scale_of_rows(self) -> Value | None:
        return self.scale_x

    @property
    def along(self) -> tuple[int, ...]:
        return tuple(n for n, x in enumerate((self.offsets, self.index, self.scale_x), 2) if x is not None)

    def rows_in_blocks(self) -> tuple[Value, ...]:
        return (*super().rows_in_blocks(), *(() if self.scale_x is None else (self.scale_x,)))

    def options(self) -> dict[str, Any]:
        return {n: x for n, x in super().options().items() if n != "dtype"}

    def verify(self) -> None:
        super().verify()
        if self.done is not None:
            raise self.fail("a grouped matmul raises no flags", hint="signal after it")
        if self.ready is not None and len(self.x.tensor.axes) < 3:
            raise self.fail(f"it waits for flags, and {self.x} is {self.x.type}", expected="sources [..., R, T, K]")

    def divisions(self) -> Iterator[Division]:
        if self.ready is not None:
            sources, blocks = product(self.x.tensor.local_shape[:-2]), self.ready.tensor.shape[0]
            why = f"the sources of {self.x} are {blocks} equal blocks, one for each flag of {self.ready}"
            yield Division(sources / blocks, why, self.span)

    def waits_for(self, frame: Frame) -> Ready | None:
        ready = super().waits_for(frame)
        if ready is None:
            return None
        lead = frame.shape(self.x.tensor)[:-2]
        if prod(lead) % ready.blocks:
            expected = "equal blocks of sources, a flag for each"
            raise self.fail(
                f"{ready.blocks} flags do not divide the {prod(lead)} sources of {self.x}", expected=expected
            )
        return replace(ready, sources=len(lead), early=(2,) if self.index is None else (2, 3))

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype, groups = self._dtype(), self.groups()
        if len(self.w.tensor.axes) != 3 or self.w.tensor.shape[0] != Size(groups):
            raise self.fail(
                f"{self.w} is {self.w.type}, and {self.offsets} has the offsets of {groups} groups",
                expected=f"a matrix for each group: [{groups}, K, N]",
            )
        check_equal_terms(self, self.x, self.w, 1)
        lead = self.x.tensor.shape[:-2]
        if self.index is not None and self.index.tensor.shape != (*lead, self.groupable):
            names = ", ".join([*map(str, lead), "S"])
            raise self.fail(f"{self.index} is {self.index.type}, and {self.x} is {self.x.type}", expected=f"[{names}]")
        columns = self.w.tensor.shape[2]
        for scale, x, shape in (
            (self.scale_x, self.x, (*self.x.tensor.shape[:-1], ONE)),
            (self.scale_w, self.w, (Size(groups), ONE, columns)),
        ):
            if scale is not None and scale.tensor.shape != shape:
                expected = f"f32[{', '.join(map(str, shape))}], a scale for each {'row' if x is self.x else 'column'}"
                raise self.fail(f"{scale}: {scale.tensor} is not a scale of {x}: {x.tensor}", expected=expected)
        return dtype, (*lead, self.groupable, columns)

    def _dtype(self) -> DType:
        """Return the dtype of the result. Raise if the dtypes of the operands do not fit each other."""
        if self.scale_x is not None and self.scale_w is not None:
            for scale in (self.scale_x, self.scale_w):
                require_f32(self, scale)
            return fp8_result(self, (self.x, self.w), self.dtype)
        dtype = same_dtype(self, [self.x, self.w])
        if dtype.name in FP8:
            hint = "write 'scaled %scale_x, %scale_w to bf16', or pass scale_x and scale_w in Python"
            raise self.fail(f"{self.x} and {self.w} are {dtype}, and have no scales", hint=hint)
        return dtype

    def maps(self) -> tuple[Map, ...]:
        sources = range(len(self.x.tensor.axes) - 2)
        columns = len(sources) + 1
        by_source = (*sources, ALONE)
        index = () if self.index is None else (by_source,)
        scales = () if self.scale_x is None else ((*sources, ALONE, ALONE), (ALONE, ALONE, columns))
        return ((*sources, ALONE, CONTRACTED), (ALONE, CONTRACTED, columns), by_source, *index, *scales)

    @property
    def right_side(self) -> tuple[Value, int]:
        return self.w, 1

    def keeps_axis(self, axis: int) -> bool:
        return axis == len(self.out.tensor.axes) - 1  # the columns


@statement
@dataclass(frozen=True, eq=False, repr=False)
class GroupedOuter(GroupedProduct):
    """`out[e] = x[rows of e]^T @ y[rows of e]` for each group e: the sum of the outer products of the rows of a group.

    The shapes are `x[T, K]`, `y[T, N]`, `offsets[E + 1]` and `out[E, K, N]`. This is the gradient of the matrices of a
    `grouped_matmul`. With one leading axis, the same in `x`, `y` and `offsets`, the sum is also over this axis. A group
    without rows gives 0. Sums are accumulated in f32, or in f64 if the operands are f64. Offsets are as in
    `grouped_matmul`.

    In a host program `plus %c` adds the sums to the contents of `%c`, which is also the result, and rounds once.

    Example: %c: f32[4, 16, 32] = grouped_outer %x: f32[64, 16], %y: f32[64, 32] by %offsets: i32[5]
    """

    syntax = "grouped_outer {x}, {y} by {offsets}<? plus {addend}?> -> {out}"
    x: Read
    y: Read
    offsets: Read
    addend: ReadIf = field(default=None, kw_only=True)

    @classmethod
    def form(cls, phase: Phase) -> str:
        form = super().form(phase)
        return form if phase is Phase.HOST else form.replace("<? plus {addend}?>", "")

    @property
    def grouped(self) -> tuple[Value, Value]:
        return self.x, self.offsets

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype, groups = same_dtype(self, [self.x, self.y]), self.groups()
        x, y = self.x.tensor.shape, self.y.tensor.shape
        if x[:-1] != y[:-1] or len(x) != len(y):
            raise self.fail(f"{self.x} is {self.x.type}, {self.y} is {self.y.type}", expected="the same number of rows")
        if len(x) > 3:
            raise self.fail(f"{self.x} is {self.x.type}", expected="rows [T, K], with at most one axis before them")
        return dtype, (Size(groups), x[-1], y[-1])

    def verify(self) -> None:
        super().verify()
        if self.addend is not None and self.addend != self.out:
            raise self.fail(f"it adds to {self.addend}, but its result is {self.out}", expected=f"'plus {self.out}'")

    def infer(self) -> TensorType:
        return super().infer() if self.addend is None else replace(self, addend=None).infer()

    def maps(self) -> tuple[Map, ...]:
        source: Map = (CONTRACTED,) * (len(self.x.tensor.axes) - 2)
        return ((*source, ALONE, 1), (*source, ALONE, 2), (*source, ALONE), (0, 1, 2))[: len(self.operands)]

    @property
    def summed(self) -> Sequence[Size]:
        return self.x.tensor.local_shape[:-1]

    @property
    def right_side(self) -> tuple[Value, int]:
        return self.y, len(self.y.tensor.axes) - 2

    def in_place(self, operand: int) -> bool:
        return operand == 3

    def keeps_axis(self, axis: int) -> bool:
        return True


@dataclass(frozen=True, eq=False, repr=False)
class RowsByIndex(TensorOp):
    """The base class of computations that read rows `[..., T, K]` by an index of rows.

    The leading axes are sources. Each source has its own rows and its own index. The computations are linear in the
    rows: if the rows are a partial sum, so is the result.
    """

    @property
    def indexed(self) -> tuple[Value, Value]:
        """The operand that holds the rows, and the operand that holds the index."""
        raise AssertionError(type(self).__name__)

    @property
    def index_operands(self) -> tuple[IndexOperand, ...]:
        rows, index = self.indexed
        return (IndexOperand(index, rows.tensor.shape[-2]),)

    def sources(self, axes: int) -> tuple[Size, ...]:
        """Return the leading axes. Raise if the index does not have them, followed by the given number of axes."""
        rows, index = self.indexed
        lead = rows.tensor.shape[:-2]
        if len(rows.tensor.axes) < 2:
            raise self.fail(f"{rows} is {rows.type}", expected="rows [..., T, K]")
        if index.tensor.shape[:-axes] != lead or len(index.tensor.axes) != len(lead) + axes:
            names = ", ".join([*map(str, lead), *("S", "k")[:axes]])
            raise self.fail(f"{index} is {index.type}, and {rows} is {rows.type}", expected=f"an index [{names}]")
        return lead

    @property
    def linear_in(self) -> Value:
        return self.indexed[0]

    def infer(self) -> TensorType:
        rows = self.linear_in
        if not rows.tensor.partial:
            return super().infer()
        complete = replace(rows, type=replace(rows.tensor, partial=()))
        return replace(self.rename({rows.name: complete}).infer(), partial=rows.tensor.partial)

    def in_place(self, operand: int) -> bool:
        return False

    def keeps_axis(self, axis: int) -> bool:
        return axis >= len(self.out.tensor.axes) - 2  # the rows and the columns


@statement
@dataclass(frozen=True, eq=False, repr=False)
class PermuteRows(RowsByIndex):
    """`out[s] = x[index[s]]`: rows in the order of an index, in which a row may occur any number of times.

    The shapes are `x[..., T, K]`, `index[..., S]` and `out[..., S, K]`. With leading axes, each index of them has its
    own rows and its own index. The index is i32 or i64, from 0 to T - 1. The kernel reads it when it runs. Whatever it
    is, the statement reads all of `x`. The rows of a partial sum are a partial sum.

    Example: %y: bf16[128, 32] = permute_rows %x: bf16[64, 32] by %index: i32[128]
    """

    syntax = "permute_rows {x} by {index} -> {out}"
    takes_fp8: ClassVar[bool] = True

    x: Read
    index: Read

    @property
    def indexed(self) -> tuple[Value, Value]:
        return self.x, self.index

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        sources = self.sources(axes=1)
        return self.x.tensor.dtype, (*sources, self.index.tensor.shape[-1], self.x.tensor.shape[-1])

    def maps(self) -> tuple[Map, ...]:
        sources = range(len(self.x.tensor.axes) - 2)
        return (*sources, ALONE, len(sources) + 1), (*sources, len(sources))


@statement
@dataclass(frozen=True, eq=False, repr=False)
class CombineRows(RowsByIndex):
    """`out[t] = sum over j of weights[t, j] * y[index[t, j]]`: each row is a weighted sum of some rows of `y`.

    The shapes are `y[..., S, K]`, `index[..., T, k]`, `weights[..., T, k]` and `out[..., T, K]`. With leading axes,
    each index of them has its own rows, index and weights. The index is i32 or i64, from 0 to S - 1. The weights have
    the dtype of `y`, or f32. The kernel reads the index when it runs. Whatever it is, the statement reads all of `y`.
    Sums are computed in f32 (in f64 if `y` is f64), in the order of j, and rounded once. The weighted sums of a partial
    sum are a partial sum.

    Example: %x: bf16[64, 32] = combine_rows %y: bf16[128, 32] by %index: i32[64, 2] times %weights: f32[64, 2]
    """

    syntax = "combine_rows {y} by {index} times {weights} -> {out}"
    y: Read
    index: Read
    weights: Read

    @property
    def indexed(self) -> tuple[Value, Value]:
        return self.y, self.index

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        sources, dtype, of_weights = self.sources(axes=2), self.y.tensor.dtype, self.weights.tensor.dtype
        if self.weights.tensor.shape != self.index.tensor.shape or of_weights.name not in ("f32", dtype.name):
            shape = ", ".join(map(str, self.index.tensor.shape))
            raise self.fail(
                f"the weights {self.weights} are {self.weights.type}",
                expected=f"{dtype}[{shape}]" + (f" or f32[{shape}]" if dtype.name != "f32" else ""),
            )
        return dtype, (*sources, self.index.tensor.shape[-2], self.y.tensor.shape[-1])

    def maps(self) -> tuple[Map, ...]:
        sources = range(len(self.y.tensor.axes) - 2)
        by_row = (*sources, len(sources), ALONE)
        return (*sources, ALONE, len(sources) + 1), by_row, by_row
