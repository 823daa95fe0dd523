"""Rewrite a product with scattered columns as a transposed product with scattered rows: `c^T = b^T @ a^T`.

The strategies `ring`, `fused` and `push` overlap only scattered rows. With this rewriting they overlap scattered
columns as well. The transposed operands are views. A copy transposes each rank's part of the sum back, because tensors
are row-major.
"""

from __future__ import annotations

from dataclasses import replace

from hostir.ir.comm_ops import AllGather, ReduceScatter
from hostir.ir.op import Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.sizes import product
from hostir.ir.tensor_ops import Cast, Contraction, DenseCopy, Matmul
from hostir.ir.types import Axis
from hostir.ir.view_ops import Permute, Reshape
from hostir.lower.propagate import operands_of, result_of, users_of

SWAPPED = (1, 0)


def columns_as_rows(program: Program) -> Program:
    """Transpose each product that only a reduce_scatter of columns reads, either directly or through a cast."""
    makers = {result_of(s).name: s for s in program.body}
    users, names = users_of(program), Names.of(program)
    # For each statement to replace (a product, a cast or a reduce_scatter), by its result: the new statements.
    turned: dict[str, list[Statement]] = {}
    for s in program.body:
        if not isinstance(s, ReduceScatter) or not _by_columns(s):
            continue
        cast = makers.get(s.x.name)
        maker = makers.get(cast.x.name) if isinstance(cast, Cast) else cast
        if not isinstance(maker, Contraction):
            continue
        steps = [each.name for each in dict.fromkeys((maker.out, s.x))]
        alone = all(len(users[name]) == 1 for name in steps) and not {v.name for v in program.outputs} & {*steps}
        if alone and _can_be_transposed(maker) and not isinstance(makers.get(maker.a.name), AllGather):
            turned |= {name: [] for name in steps} | {s.out.name: _transposed(maker, s, names)}
    body = [each for s in program.body for each in turned.get(result_of(s).name, [s])]
    return program.with_body(body) if turned else program


def _by_columns(s: ReduceScatter) -> bool:
    return s.mesh.size(s.over) > 1 and s.out.tensor.axis_on(s.over) == len(s.out.tensor.axes) - 1


def _can_be_transposed(s: Contraction) -> bool:
    """Return True if a product has only two operands, and the left operand is a matrix or can be reshaped to a matrix.

    A left operand with more than two axes can be reshaped if its rows are not sharded.
    """
    rows = s.a.tensor.host().axes[:-1]
    alone = len(operands_of(s)) == 2  # the bias of a linear is already a separate addition, after the sum over ranks
    return alone and (len(rows) == 1 or (len(rows) > 1 and not any(axis.marks for axis in rows)))


def _transposed(s: Contraction, scatter: ReduceScatter, names: Names) -> list[Statement]:
    """Return the statements of the transposed product: views, the product, the reduce_scatter of its rows, and a copy.

    The copy transposes the result back.
    """
    body: list[Statement] = []

    def view(cls: type[Permute | Reshape], x: Value, axes: tuple[Axis, ...], suffix: str) -> Value:
        out = Value(names.fresh(f"{x.name}_{suffix}"), x.tensor.host().with_axes(axes), s.span)
        body.append(Permute(x, out, SWAPPED, span=s.span) if cls is Permute else Reshape(x, out, span=s.span))
        return out

    def swapped(x: Value) -> Value:
        return view(Permute, x, x.tensor.host().axes[::-1], "t")

    a, (b, contracted) = s.a, s.right_side
    if len(a.tensor.axes) > 2:
        rows = product(a.tensor.shape[:-1])
        a = view(Reshape, a, (Axis.of(rows), a.tensor.host().axes[-1]), "rows")
    left, right = b if contracted else swapped(b), swapped(a)
    columns, rows_axis = scatter.out.tensor.host().axes[-1], a.tensor.host().axes[0]
    product_type, part = s.out.tensor.host(), scatter.out.tensor.host()
    full = Value(names.fresh(f"{s.out.name}_t"), product_type.with_axes((product_type.axes[-1], rows_axis)), s.span)
    mine = Value(names.fresh(f"{scatter.out.name}_t"), part.with_axes((columns, rows_axis)), scatter.span)
    body.append(Matmul(out=full, a=left, b=right, span=s.span, note=f"{s.out} transposed: its columns are scattered"))
    if product_type.dtype != part.dtype:
        narrow, type = full, replace(full.tensor, dtype=part.dtype)
        full = Value(names.fresh(f"{scatter.x.name}_t"), type, scatter.x.span)
        body.append(Cast(out=full, x=narrow, dtype=part.dtype.name, span=scatter.x.span))
    body.append(ReduceScatter(full, mine, over=scatter.over, span=scatter.span))
    back = swapped(mine)
    if len(part.axes) > 2:
        back = view(Reshape, back, part.axes, "rows")
    note = f"copy: the columns of {scatter.out} were summed up as rows"
    return [*body, DenseCopy(out=scatter.out, x=back, span=scatter.span, note=note)]
