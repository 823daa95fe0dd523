"""Define computations on rows in groups, for mixtures of experts. The rows of one expert are a group.

The rows of all groups are in one tensor, group after group. Offsets say where each group begins. They are integers on
the device, and the host does not wait for them: a kernel reads them when it runs. The number of rows in the tensor is
the capacity. Rows before the first group and after the last group belong to no group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hostir.ir.op import IndexOperand, Read, Value, statement
from hostir.ir.sharding import ALONE, CONTRACTED, Map
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import TensorOp, check_equal_terms, same_dtype
from hostir.ir.types import DType


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
    def index_operands(self) -> tuple[IndexOperand, ...]:
        rows, offsets = self.grouped
        return (IndexOperand(offsets, rows.tensor.shape[-2], ascending=True),)

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
class GroupedMatmul(GroupedProduct):
    """`out[t] = x[t] @ w[e]` for the rows t of group e, which are `offsets[e] <= t < offsets[e + 1]`.

    The shapes are `x[..., T, K]`, `w[E, K, N]`, `offsets[..., E + 1]` and `out[..., T, N]`. With leading axes, each
    index of them has its own rows and its own offsets; all share the matrices `w`. Rows that belong to no group become
    0. Sums are accumulated in f32, or in f64 if the operands are f64.

    Offsets are i32 or i64. They do not decrease, and lie between 0 and T. The kernel reads them when it runs. Whatever
    they are, the statement reads all of `x` and writes all of the result.

    Example: %y: bf16[64, 32] = grouped_matmul %x: bf16[64, 16], %w: bf16[4, 16, 32] by %offsets: i32[5]
    """

    syntax = "grouped_matmul {x}, {w} by {offsets} -> {out}"
    x: Read
    w: Read
    offsets: Read

    @property
    def grouped(self) -> tuple[Value, Value]:
        return self.x, self.offsets

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype, groups = same_dtype(self, [self.x, self.w]), self.groups()
        if len(self.w.tensor.axes) != 3 or self.w.tensor.shape[0] != Size(groups):
            raise self.fail(
                f"{self.w} is {self.w.type}, and {self.offsets} has the offsets of {groups} groups",
                expected=f"a matrix for each group: [{groups}, K, N]",
            )
        check_equal_terms(self, self.x, self.w, 1)
        return dtype, (*self.x.tensor.shape[:-1], self.w.tensor.shape[2])

    def maps(self) -> tuple[Map, ...]:
        sources = range(len(self.x.tensor.axes) - 2)
        columns = len(sources) + 1
        return (*sources, ALONE, CONTRACTED), (ALONE, CONTRACTED, columns), (*sources, ALONE)

    @property
    def right_side(self) -> tuple[Value, int]:
        return self.w, 1

    def keeps_axis(self, axis: int) -> bool:
        return axis == len(self.out.tensor.axes) - 1  # the columns
